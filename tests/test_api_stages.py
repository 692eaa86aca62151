"""Stage 3 beside stages 1 and 2: the same bits for tied, frozen, checkpointed, nested,
branching, compiled and tiny models.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore.distributed.comm import Comm, Traffic
from tests.support.models import Net, Run, batch_of, hash_of_training, loss_of, make_net, train
from tests.support.ranks import run_ranks

ADAM = {"lr": 1e-2, "weight_decay": 0.1}


class Checkpointed(Net):
    """Every other block is recomputed; a weight is tied between a recomputed block and one that
    is not.
    """

    def __init__(self, reentrant: bool) -> None:
        super().__init__(depth=4)
        self.reentrant = reentrant
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.blocks[2].down.weight = self.blocks[0].down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=self.reentrant) if index % 2 == 0 else block(x)
        return self.head(x) * self.gain


def _hash_of_kind(rank: int, world_size: int, kind: str, stage: int) -> str:
    torch.manual_seed(0)
    model = KINDS[kind]()
    adam = ADAM if kind != "lora" else {**ADAM, "weight_decay": 0.0}
    model, optimizer, _ = train(
        rank, Run(stage=stage, steps=4, adam=adam, shard={"clip_grad_norm": 0.5}), model
    )
    return hash_of_training(model, optimizer)


class Lora(Net):
    """Frozen base weights with small trainable ones beside them; one block is frozen as a whole,
    one not at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[2].requires_grad_(True)
        self.a = nn.ParameterList([nn.Parameter(torch.randn(4, 24) * 0.1) for _ in range(2)])
        for block in self.blocks[:1]:
            block.lora = nn.Linear(24, 24, bias=False)
            block.register_forward_hook(lambda module, args, output: output + module.lora(args[0]))
        self.register_buffer("table", torch.arange(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for a in self.a:
            x = x + nn.functional.pad(a.sum(0), (0, 0))[:10]
        return super().forward(x)


class Branching(Net):
    """A parallel structure: the first block's output feeds all the others, which have frozen
    parts.
    """

    def __init__(self) -> None:
        super().__init__(depth=4)
        for block in self.blocks:
            block.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](self.inp(x))
        rest = sum(block(first) for block in [*self.blocks[1:], self.blocks[1]])
        return self.head(rest + self.blocks[0](rest)) * self.gain


class Nested(nn.Module):
    """Units within units: an outer block uses a weight of its own before and after its inner
    blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList([_Outer() for _ in range(2)])
        self.head = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for outer in self.outer:
            x = outer(x)
        return self.head(x)


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))
        self.inner = nn.ModuleList([nn.Linear(10, 10) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.inner:
            x = torch.tanh(inner(x * self.scale))
        return x * self.scale


class Viewed(nn.Module):
    """What it returns is a view, as a Linear makes one of three dimensions, or of its own
    making.
    """

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own, self.up, self.down = own, nn.Linear(10, 12), nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return y if self.own else (x + y).view(y.shape)


class InPlace(nn.Module):
    """Outputs of units are edited in place, by the model and by the next unit: autograd leaves
    out the nodes of such views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(10, 10), nn.Linear(10, 5)
        self.blocks = nn.ModuleList(Viewed(own) for own in (True, False, True, True))
        self.blocks[3].register_forward_pre_hook(lambda module, given: (given[0].mul_(0.5),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x.unsqueeze(1))
        for block in self.blocks:
            x = block(x)
            x.mul_(1.5)
            x += 0.1
        return self.head(x).squeeze(1)


class Hooked(nn.Module):
    """Hooks of units read their weights before forward, as torch's older weight_norm and prune
    do.
    """

    def __init__(self) -> None:
        super().__init__()
        linear = lambda width: nn.Linear(10, width)  # noqa: E731
        made = [
            nn.utils.weight_norm(linear(10)),
            linear(10),
            prune.l1_unstructured(linear(10), "weight", 0.3),
        ]
        self.blocks, self.head = nn.ModuleList([*made, nn.utils.weight_norm(linear(10))]), linear(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


KINDS: dict[str, Any] = {
    "net": Net,
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "checkpointed": lambda: Checkpointed(False),
    "lora": Lora,
    "branching": Branching,
    "nested": Nested,
    "in place": InPlace,
    "hooked": Hooked,
    "tiny": lambda: Net(width=1, hidden=1, depth=2),  # shards without an element
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("world_size", "kind"), [*((2, kind) for kind in KINDS), (3, "tiny")])
def test_stages_train_alike(kind: str, world_size: int) -> None:
    """Stage 1 is test_api's."""
    assert (
        len(
            {
                hashed
                for stage in (2, 3)
                for hashed in run_ranks(world_size, _hash_of_kind, kind, stage)
            }
        )
        == 1
    )


def test_frozen_weights_are_sharded_too() -> None:
    def shares(stage: int) -> list[int]:
        return run_ranks(2, _frozen_bytes, stage)

    whole, halves = shares(2), shares(3)
    assert whole[0] == whole[1] >= 2 * halves[0] - 4 * 256 * 4 * 8


def _frozen_bytes(rank: int, world_size: int, stage: int) -> int:
    torch.manual_seed(0)
    model, _, _ = train(rank, Run(stage=stage, steps=0), Lora())
    return shardcore.memory_report(model).by_kind["weights"]


class Failing(Net):
    fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.inp(x))
        if self.fail:
            raise RuntimeError("planted")
        return self.head(self.blocks[1](x)) * self.gain


def test_an_exception_in_forward_leaves_the_next_step_whole() -> None:
    hashes = []
    for failures in (False, True):
        torch.manual_seed(0)
        model, optimizer, _ = train(0, Run(stage=3, steps=2), Failing())
        if failures:
            model.fail = True
            with pytest.raises(RuntimeError, match="planted"):
                model(torch.ones(2, 10))
            model.fail = False
        loss_of(model, batch_of(3, 0, 0)).backward()
        optimizer.step()
        hashes.append(hash_of_training(model, optimizer))
    assert hashes[0] == hashes[1]


def test_evaluation_and_second_forwards_between_do_not_matter() -> None:
    hashes = []
    for disturbed in (False, True):
        model, optimizer, _ = train(0, Run(stage=3, steps=2))
        losses = [loss_of(model, batch_of(4, micro, 0)) for micro in range(2)]
        if disturbed:
            with torch.no_grad():
                model(torch.ones(3, 10))
            torch.autograd.grad(loss_of(model, batch_of(6, 0, 0)), model.gain)
        for loss in losses:
            loss.backward()
        if disturbed:
            model.eval()
            with torch.inference_mode():
                model(torch.ones(3, 10))
            model.train()
        optimizer.step()
        hashes.append(hash_of_training(model, optimizer))
    assert hashes[0] == hashes[1]


def test_a_weight_that_is_not_gathered_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken twin: a rank that lends stale memory instead of gathering has other bits (and the
    tests above compare them).
    """
    good = run_ranks(2, _hash_of_kind, "net", 3)[0]
    bad = run_ranks(2, _hash_without_gathers)[0]
    assert good != bad


def _hash_without_gathers(rank: int, world_size: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        real = Comm.all_gather
        patch.setattr(
            Comm,
            "all_gather",
            lambda self, whole, kind, *a, **of: (
                [] if kind == Traffic.WEIGHTS else real(self, whole, kind, *a, **of)
            ),
        )
        return _hash_of_kind(rank, world_size, "net", 3)


def _compiled(rank: int, world_size: int, how: str, stage: int, overlap: bool) -> str:
    model = make_net()
    for index, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(backend="aot_eager")
        else:
            model.blocks[index] = torch.compile(block, backend="aot_eager")
    return hash_of_training(
        *train(rank, Run(stage=stage, steps=3, shard={"overlap_step": overlap}), model)[:2]
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_compiled_blocks(how: str) -> None:
    hashes = [
        set(run_ranks(2, _compiled, how, stage, overlap))
        for stage, overlap in ((2, False), (2, True), (3, False))
    ]
    assert hashes[0] == hashes[1] == hashes[2]
    assert len(hashes[0]) == 1


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_whole_model_that_is_compiled_trains_and_is_warned_of_once(
    stage: int, caplog: pytest.LogCaptureFixture, fresh_graphs: None
) -> None:
    hashes = []
    for how in ("not", "whole"):
        model, optimizer, _ = train(0, Run(stage=stage, steps=0))
        called = torch.compile(model, backend="aot_eager") if how == "whole" else model
        for step in range(3):
            loss_of(called, batch_of(step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        hashes.append(hash_of_training(model, optimizer))
    assert hashes[0] == hashes[1]
    (text,) = [record.getMessage() for record in caplog.records if record.name == "shardcore"]
    assert text.startswith("forward: torch.compile is around the whole model.")
    assert "Pass compile=True to shard() instead" in text


def test_one_graph_for_a_whole_model_is_refused_with_what_to_compile(fresh_graphs: None) -> None:
    model, _, _ = train(0, Run(stage=3, steps=0))
    with pytest.raises(Exception, match=r"Use shard\(compile=True\) or shard\(compile={...}\)"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(batch_of(0, 0, 0)[0])


@pytest.mark.more
def test_blocks_that_are_compiled_are_not_warned_of(
    caplog: pytest.LogCaptureFixture, fresh_graphs: None
) -> None:
    _compiled(0, 1, "in place", 3, False)
    assert not [record for record in caplog.records if record.name == "shardcore"]
