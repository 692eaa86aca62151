"""zero.Init: constructors run as without it, with at most a bound of full weights."""

import copy
import operator
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore as deepspeed
from shardcore.deepspeed import zero_init
from shardcore.engine.pieces import has_piece
from tests.support.deepspeed import ds_config, start
from tests.support.models import error_of, hash_of, hash_of_training, make_net
from tests.support.ranks import run_ranks


class Odd(nn.Module):
    """Reads and edits its weights while it is constructed, as models in remote code do."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)  # deep copies of the layer
        self.gain = nn.Parameter(torch.ones(7))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.emb.weight
        with torch.no_grad():
            self.blocks[1].weight.mul_(self.blocks[0].weight.norm())
            self.blocks[2].weight.data[0] = 3.0
        self.apply(self._init)
        sums = [param.double().sum() for param in self.parameters()]
        self.register_buffer("sums", torch.stack(sums))
        self.copied = copy.deepcopy(self.blocks[0])

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x)
        for block in [*self.blocks, self.copied]:
            x = block(x)
        return self.head(self.encoder(x)) * self.gain[0]


class Silent(Odd):
    """The broken twin: its edit is lost."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.blocks[2].weight.data[0] = 3.0000002


def _made(rank: int, world_size: int, whole_bytes: int | None, stage: int, kind: Any = Odd) -> Any:
    """whole_bytes: None to construct without Init."""
    torch.manual_seed(0 if whole_bytes is None else rank)
    if whole_bytes is None:
        model = kind()
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zero_init, "WHOLE_BYTES", whole_bytes)
            with deepspeed.zero.Init():
                model = kind()
        assert all(param.shape == (0,) for param in model.parameters())
    engine = start(ds_config(stage=stage), model)
    losses = []
    for _ in range(2):
        loss = engine(torch.arange(6).view(2, 3) + rank).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, hash_of_training(engine.module, engine.optimizer)


@pytest.mark.cases(2)
@pytest.mark.parametrize("stage", [3, 1])
def test_constructors_make_the_bits_of_a_plain_construction(stage: int) -> None:
    plain = run_ranks(2, _made, None, stage)
    for whole_bytes in (0, 600, 1 << 27):
        assert run_ranks(2, _made, whole_bytes, stage) == plain
    assert run_ranks(2, _made, 0, stage, Silent) != plain


class Many(nn.Module):
    """Lists of layers without a module around each, and the bytes in memory as they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.full: list[int] = []
        self.layers = nn.ModuleList([self._layer() for _ in range(20)])

    def _layer(self) -> nn.Module:
        (construction,) = zero_init._constructions
        layer = nn.Linear(100, 25)
        self.full.append(sum(param.nbytes for param in construction.whole))
        return layer


def _most(rank: int, world_size: int) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_init, "WHOLE_BYTES", 30_000)
        with deepspeed.zero.Init():
            return Many().full


def test_full_weights_stay_within_the_bound() -> None:
    for full in run_ranks(2, _most):
        assert max(full) <= 30_000 + 10_100, "the bound, and the layer that is made"
        assert sum(20 * [10_100]) > 100_000


def _on_one_rank(rank: int, world_size: int, what: str) -> str:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3 + (what == "shape" and rank == 1))
            if what == "error" and rank == 1:
                raise KeyError("of rank 1")
            self.second = nn.Linear(3, 3)
            if what == "read" and rank == 1:
                self.first.weight.norm()
            if what == "look" and rank == 1:
                assert self.first.weight.shape == (3, 3)
                assert self.first.weight.dim() == len(self.first.weight) - 1 == 2
                assert self.first.weight.dtype == torch.float32

    def make() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(zero_init, "WHOLE_BYTES", 0)
            with deepspeed.zero.Init():
                Bad()

    message = error_of(make)
    assert not zero_init._constructions
    with deepspeed.zero.Init():  # ranks are in step again
        assert not has_piece(nn.Linear(2, 2).weight)
    return message


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("error", ("rank 1 failed: KeyError", "of rank 1")),
        ("shape", ("has the weight Linear.weight (4, 3)",) * 2),
        ("read", ("zero.Init", "zero.Init")),
        ("look", ("no error", "no error")),
    ],
)
def test_ranks_that_construct_other_models_raise_on_all(what: str, texts: tuple[str, str]) -> None:
    for message, text in zip(run_ranks(2, _on_one_rank, what), texts, strict=True):
        assert text in message


# Without an error they would change empty data, and be lost.
_EDITS = (
    nn.init.ones_,
    lambda weight: weight.data.mul_(2.0),
    lambda weight: operator.iadd(weight.data, torch.ones(3, 8)),
    lambda weight: operator.setitem(weight.data, slice(None), 0.0),
)
_SAID = (
    *("embedding", "layer_norm", "load_state_dict: 0.weight", *["pickle"] * 3),
    *("fill_", "mul_", "add_", "__setitem__"),
)


def _used_too_early(rank: int, world_size: int, folder: str) -> list[str]:
    with deepspeed.zero.Init():
        model = nn.Sequential(nn.Embedding(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    full = {"0.weight": torch.ones(6, 8)}
    path = f"{folder}/{rank}.pt"
    said = [
        error_of(lambda: model(torch.tensor([1]))),
        error_of(lambda: model[1](torch.ones(2, 8))),
        error_of(lambda: model.load_state_dict(full, strict=False)),
        error_of(lambda: torch.save(model, path)),
        error_of(lambda: torch.save(model.state_dict(), path)),
        error_of(lambda: pickle.dumps(model[2].bias)),
        *(error_of(partial(edit, model[2].weight)) for edit in _EDITS),
    ]
    twin = copy.deepcopy(model)
    assert has_piece(twin[2].weight), "copied in parts"
    model.half().float()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.load_state_dict(full, strict=False)
        assert type(model[0].weight) is nn.Parameter
        model(torch.tensor([1]))
        torch.save(model.state_dict(), path)
    assert torch.equal(torch.load(path)["0.weight"], full["0.weight"])
    engine = start(ds_config(stage=3), model)
    assert {type(param) for param in engine.module.parameters()} == {nn.Parameter}
    assert torch.equal(engine.module.state_dict()["0.weight"], full["0.weight"])
    return said


def test_a_use_before_initialize_says_that_weights_are_partitioned(tmp_path: Path) -> None:
    for said in run_ranks(2, _used_too_early, str(tmp_path)):
        for call, text in zip(
            _SAID,
            said,
            strict=True,
        ):
            assert text.startswith(f"RuntimeError: {call}: the parameter is partitioned"), text
            assert "Shard the model first" in text


def _over_a_group(rank: int, world_size: int) -> str:
    whole, pair = dist.new_group(), [dist.new_group([0, 1]), dist.new_group([2])][rank // 2]
    with deepspeed.zero.Init(None, whole), deepspeed.zero.Init(data_parallel_group=None):
        pass
    with deepspeed.zero.Init(None, pair, sequence_data_parallel_group=whole):
        pass
    return error_of(lambda: deepspeed.zero.Init(data_parallel_group=pair))


def test_groups_of_some_ranks_are_refused() -> None:
    for size, message in zip((2, 2, 1), run_ranks(3, _over_a_group), strict=True):
        assert f"data_parallel_group has {size} of 3 ranks" in message


class _Packed(nn.Parameter):
    pass


def _given(rank: int, world_size: int) -> None:
    model: Any = make_net(rank)
    deepspeed.zero.Init(module=model)
    assert model.head.weight.ds_shape == (5, 24)
    with deepspeed.zero.Init():
        lazy = nn.LazyLinear(3)
        lazy.packed = _Packed(torch.ones(3), requires_grad=False)
    assert not has_piece(lazy.weight)
    assert torch.equal(lazy.packed, torch.ones(3)), "as quantized weights"
    with deepspeed.zero.Init(enabled=False):
        plain = nn.Linear(2, 2)
    assert plain.weight.shape == (2, 2)
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        with deepspeed.zero.Init(), torch.device("meta"):
            meta = nn.Linear(2, 2)
        half = nn.Linear(2, 2)
    assert meta.weight.is_meta
    assert half.weight.ds_tensor.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    with deepspeed.zero.Init():
        with deepspeed.zero.Init():
            inner = nn.Linear(2, 2)
        assert has_piece(inner.weight)
        outer = nn.Linear(2, 2)
        with deepspeed.zero.GatheredParameters(inner.weight, modifier_rank=0):
            inner.weight.data.zero_()
        assert not inner.weight.any()
    assert has_piece(outer.weight)
    engine = start(ds_config(stage=3), model)
    reference = start(ds_config(stage=3), make_net(0))
    assert hash_of(engine.module.state_dict().values()) == hash_of(
        reference.module.state_dict().values()
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_modules_and_contexts_that_are_given(world_size: int) -> None:
    run_ranks(world_size, _given)


def _shown(rank: int, world_size: int) -> list[tuple[int, ...]]:
    with zero_init.init_with_shapes():
        model = nn.Linear(30, 20)
    assert has_piece(model.weight)
    return [tuple(param.shape) for param in model.parameters()]


def test_weights_have_their_shapes_for_optimizers_that_group_by_them() -> None:
    assert run_ranks(2, _shown) == [[(20, 30), (20,)]] * 2
