"""Models that configure_model and init_module make, with real Trainers and Fabrics over gloo ranks:
in parts with the values that are set there, or on the meta device.
"""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="the Trainer needs lightning")
pytest.importorskip("pytorch_lightning", reason="the other package needs pytorch_lightning")
pytest.importorskip("transformers", reason="tests with transformers")
pytest.importorskip("accelerate", reason="transformers needs it for ZeRO 3")
import torch
import transformers
from torch import nn

import shardcore
from shardcore.deepspeed import zero_init
from shardcore.engine.pieces import is_partitioned
from shardcore.optim.interface import engine_of
from tests.support.huggingface import VOCAB, forget_deepspeed, message_of, tiny, tiny_gpt2
from tests.support.lightning import (
    LR,
    Made,
    Plain,
    adamw,
    batches_of,
    fabric_of,
    fit,
    hash_of_fit,
    loader,
    module_of,
    ours,
    trainer_of,
)
from tests.support.models import Block, hash_of_training
from tests.support.peak import Peak
from tests.support.ranks import run_ranks
from tests.support.torch_memory import Memory, recorded_memory

pytestmark = pytest.mark.more
Build = Callable[[str], nn.Module]


class Own(nn.Module):
    """Sets values in each way that modules do."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.layers = Made().layers
        nn.init.normal_(self.layers[0].weight, std=0.3)
        self.layers[2].load_state_dict(torch.load(f"{folder}/head.pt"))
        self.gain = nn.Parameter(torch.randn(5))
        with torch.no_grad():
            self.gain[1] = 7.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.gain


class Broken(Own):
    """The broken twin: a value that is set at the end is another one."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        with torch.no_grad():
            self.gain[1] = 7.000001


class Language(nn.Module):
    """A transformers model under a head of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.out = model, nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.model(x.abs().long(), output_hidden_states=True).hidden_states[-1]
        return self.out(states.mean(1))


def _pretrained(folder: str) -> nn.Module:
    return Language(transformers.AutoModelForCausalLM.from_pretrained(folder))


def _from_config(folder: str) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    return Language(transformers.AutoModelForCausalLM.from_config(config))


def _resized(folder: str) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(VOCAB + 8)  # draws from the mean of the old weights
    return Language(model)


def by_shape(model: nn.Module) -> torch.optim.Optimizer:
    """Decay of matrices alone, as GPTs are trained."""
    params = list(model.parameters())
    assert all(param.numel() for param in params)
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR)


def configured(build: Callable[[], nn.Module]) -> Any:
    """A module that configure_model makes."""

    def configure_model(self: Any) -> None:
        if self.net is None:
            self.net = build()

    module = module_of(configure_model=configure_model, configure_optimizers=by_shape)
    module.net = None
    return module


class Around(Plain):
    def __init__(self, net: nn.Module) -> None:
        nn.Module.__init__(self)
        self.net = net


def _plain(rank: int, world_size: int, build: Build, folder: str) -> str:
    torch.manual_seed(7)
    model = Around(build(folder))
    model, optimizer = shardcore.shard(model, by_shape(model), 2)
    for batch in batches_of(rank, world_size):
        model.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_of_training(model, optimizer)


def _by_trainer(rank: int, world_size: int, build: Build, folder: str, stage: int) -> str:
    def configure_optimizers() -> torch.optim.Optimizer:
        assert all(is_partitioned(param) == (stage == 3) for param in module.parameters())
        return by_shape(module)

    module = configured(lambda: build(folder))
    module.configure_optimizers = configure_optimizers
    torch.manual_seed(7 + rank)  # rank 0's values count
    return hash_of_fit(fit(rank, world_size, f"shardcore_stage_{stage}", module))


def _by_fabric(rank: int, world_size: int, build: Build, folder: str, stage: int) -> str:
    fabric = fabric_of(rank, world_size, f"shardcore_stage_{stage}")
    torch.manual_seed(7 + rank)
    with fabric.init_module():
        model = Around(build(folder))
    assert all(is_partitioned(param) == (stage == 3) for param in model.parameters())
    model, optimizer = fabric.setup(model, by_shape(model))
    for batch in batches_of(rank, world_size):
        fabric.backward(model.loss(batch))
        optimizer.step()
        optimizer.zero_grad()
    return hash_of_training(model.module, optimizer.optimizer)


def _hashes(rank: int, world_size: int, build: Build, folder: str) -> list[str]:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(zero_init, "WHOLE_BYTES", 600)
        ways = [_by_trainer, _by_fabric]
        return [way(rank, world_size, build, folder, stage) for stage in (3, 1) for way in ways]


def _folder(path: Path) -> str:
    tiny_gpt2(3).save_pretrained(path)
    torch.manual_seed(9)
    torch.save(nn.Linear(24, 5).state_dict(), path / "head.pt")
    return str(path)


@pytest.mark.parametrize("build", [Own, _pretrained, _from_config, _resized])
def test_values_that_are_set_are_kept_at_every_stage(tmp_path: Path, build: Build) -> None:
    folder = _folder(tmp_path)
    plain = run_ranks(2, _plain, build, folder)
    assert len(set(plain)) == 1
    for hashes in run_ranks(2, _hashes, build, folder):
        assert set(hashes) == set(plain), hashes


def test_another_value_is_seen(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (plain, _) = run_ranks(2, _plain, Own, folder)
    for hashes in run_ranks(2, _hashes, Broken, folder):
        assert plain not in hashes


def _alone(rank: int, world_size: int, folder: str) -> bool:
    fabric = fabric_of(rank, world_size, "shardcore_stage_3")
    with fabric.init_module():
        model = Own(folder)
    assert not is_partitioned(model.gain)
    return _by_fabric(rank, world_size, Own, folder, 1) == _plain(rank, world_size, Own, folder)


def test_one_rank_partitions_nothing(tmp_path: Path) -> None:
    assert run_ranks(1, _alone, _folder(tmp_path)) == [True]


def _reads(rank: int, world_size: int) -> str:
    fabric = fabric_of(rank, world_size, "shardcore_stage_3")
    with fabric.init_module():
        model = Made()
    twin = copy.deepcopy(model)
    assert twin.layers[0].weight.shape == (24, 10)
    return message_of(rank, world_size, lambda *_: model.layers[0].weight.norm())


def test_a_read_between_init_module_and_setup_says_what_to_do() -> None:
    for message in run_ranks(2, _reads):
        assert "the parameter is partitioned by zero.Init" in message


# --- on the meta device ---------------------------------------------------------------------------


def _on_meta(rank: int, world_size: int) -> tuple[set[str], str]:
    fabric = fabric_of(rank, world_size, "shardcore_stage_3")
    torch.manual_seed(7)
    with fabric.init_module(empty_init=True):
        model = Around(Made())
    assert all(param.is_meta for param in model.parameters())
    model, optimizer = fabric.setup(model, by_shape(model))
    hashes = {hash_of_training(model.module, optimizer.optimizer)}
    trainer = trainer_of(rank, world_size, "shardcore_stage_3")
    with trainer.init_module(empty_init=True):
        assert nn.Linear(2, 2).weight.is_meta
    with trainer.init_module():
        assert not nn.Linear(2, 2).weight.is_meta

    def build() -> nn.Module:
        with torch.device("meta"):
            return Made()

    module = configured(build)
    torch.manual_seed(7)
    trainer = fit(rank, world_size, "shardcore_stage_3_offload", module, limit_train_batches=0)
    hashes.add(hash_of_fit(trainer))
    torch.manual_seed(7)
    model = Around(Made())
    return hashes, hash_of_training(*shardcore.shard(model, by_shape(model), 3))


def test_the_meta_device_makes_the_bits_of_building_with_the_same_seed() -> None:
    for hashes, expected in run_ranks(2, _on_meta):
        assert hashes == {expected}


def _materialized(rank: int, world_size: int, folder: str) -> Any:
    strategy = ours.ShardcoreStrategy(3, materialize=folder)
    module = configured(tiny_gpt2)
    module.loss = lambda batch: module.net(batch[0].abs().long()).logits.square().mean()
    trainer = trainer_of(rank, world_size, strategy, limit_val_batches=1)
    trainer.validate(module, loader(rank, world_size), verbose=False)
    assert engine_of(module) is not None
    state = module.state_dict()
    expected = tiny_gpt2(3).state_dict()
    refused = message_of(rank, world_size, _loads_at_once, folder)
    return all(torch.equal(state[f"net.{key}"], value) for key, value in expected.items()), refused


def _loads_at_once(rank: int, world_size: int, folder: str) -> None:
    trainer = trainer_of(rank, world_size, ours.ShardcoreStrategy(3, materialize=folder))
    load = transformers.GPT2LMHeadModel.from_pretrained
    trainer.validate(configured(lambda: load(folder)), loader(rank, world_size))


def test_materialize_reads_a_folder_into_the_transformers_model_of_configure_model(
    tmp_path: Path,
) -> None:
    for equal, refused in run_ranks(2, _materialized, _folder(tmp_path)):
        assert equal
        assert "RuntimeError: You are using `from_pretrained` with a meta device context" in refused


# --- memory ---------------------------------------------------------------------------------------


class Tower(nn.Module):
    """Units of the same size."""

    def __init__(self, count: int = 12, dim: int = 96, hidden: int = 400) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim, hidden) for _ in range(count)])


def _memory_of_trainer(rank: int, world_size: int, whole: bool) -> Memory:
    def build() -> nn.Module:
        with torch.device("meta"):
            return Tower()

    with recorded_memory() as memory:
        module = configured(build)
        if whole:
            module.net = Tower()
        fit(rank, world_size, "shardcore_stage_3", module, limit_train_batches=0)
    return memory


def _memory_of_fabric(rank: int, world_size: int, whole: bool) -> Memory:
    fabric = fabric_of(rank, world_size, "shardcore_stage_3")
    with recorded_memory() as memory:
        with nullcontext() if whole else fabric.init_module(empty_init=True):
            model = Tower()
        fabric.setup(model, adamw(model.parameters()))
    return memory


def _unit_and_whole(tower: Tower) -> tuple[int, int]:
    unit, *more = (4 * sum(p.numel() for p in block.parameters()) for block in tower.blocks)
    return unit, unit + sum(more)


@pytest.mark.parametrize("memory_of", [_memory_of_trainer, _memory_of_fabric])
def test_the_peak_of_a_module_on_the_meta_device_is_one_unit_above_the_shards(
    memory_of: Any,
) -> None:
    unit, whole = _unit_and_whole(Tower())
    for memory in run_ranks(2, memory_of, False):
        assert 0 < memory.peak - memory.kept <= unit < whole / 10
        assert memory.kept > whole, "half of weights and states"
    for memory in run_ranks(2, memory_of, True):
        assert memory.peak - memory.kept >= whole, "a module that is made whole is seen"


BIG = (20, 512, 4096)


def _peak_of_trainer(rank: int, world_size: int, stage: int) -> int:
    with pytest.MonkeyPatch.context() as patch, Peak() as peak:
        patch.setattr(zero_init, "WHOLE_BYTES", 8 << 20)
        module = configured(lambda: Tower(*BIG))
        fit(rank, world_size, f"shardcore_stage_{stage}", module, limit_train_batches=0)
    return peak.most


def _peak_of_fabric(rank: int, world_size: int, stage: int) -> int:
    fabric = fabric_of(rank, world_size, f"shardcore_stage_{stage}")
    with pytest.MonkeyPatch.context() as patch, Peak() as peak:
        patch.setattr(zero_init, "WHOLE_BYTES", 8 << 20)
        with fabric.init_module():
            model = Tower(*BIG)
        fabric.setup(model, by_shape(model))
    return peak.most


@pytest.mark.parametrize("peak_of", [_peak_of_trainer, _peak_of_fabric])
def test_a_rank_has_its_shard_and_two_units_in_memory(peak_of: Any) -> None:
    with torch.device("meta"):
        unit, whole = _unit_and_whole(Tower(*BIG))
    bound = whole / 2 + 2 * unit + (64 << 20)
    assert bound < 0.8 * whole
    for peak in run_ranks(2, peak_of, 3):
        assert 0.4 * whole < peak < bound, (peak, bound)
    for peak in run_ranks(2, peak_of, 2):
        assert peak > whole, "each rank has the whole model"


def _memory_of_loading(rank: int, world_size: int, stage: int, folder: str) -> tuple[int, int]:
    """Return the peak of from_pretrained, and the bytes of all weights; stage 2 has all of them."""
    forget_deepspeed()
    fabric = fabric_of(rank, world_size, f"shardcore_stage_{stage}")
    with pytest.MonkeyPatch.context() as patch, recorded_memory() as memory:
        patch.setattr(zero_init, "WHOLE_BYTES", 0)
        with fabric.init_module():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return memory.peak, sum(4 * param.numel() for param in model.parameters())


def test_from_pretrained_reads_into_the_parts(tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8}
    tiny("Llama", **wide).save_pretrained(tmp_path)
    for stage in (3, 2):
        for peak, whole in run_ranks(2, _memory_of_loading, stage, str(tmp_path)):
            assert (peak <= 0.7 * whole) == (stage == 3), (peak, whole)
