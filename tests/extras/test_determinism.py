"""check_determinism: equal where training is, else the code that is not; training goes on as if
nothing had been run.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore import Determinism
from shardcore.extras import determinism
from tests.support.models import (
    Net,
    batch_of,
    error_of,
    hash_of,
    hash_of_training,
    loss_of,
    made,
    make_net,
)
from tests.support.pretend_cuda import run_pretended, why_not
from tests.support.ranks import run_ranks
from tests.support.slices import mesh_of, sharded_lm, train_lm


class Dropped(Net):
    """Dropout in each block, batch norms, and a generator of Python's."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.Sequential(nn.BatchNorm1d(24), nn.Dropout(0.2))


class NoisyGrad(torch.autograd.Function):
    """The identity, with a gradient that differs in each call."""

    calls = count()

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 + next(NoisyGrad.calls) * 2**-10)


class Noise(nn.Module):
    """The identity, but for an element in the forward ("forward"), or its gradient."""

    def __init__(self, where: str, rank: int) -> None:
        super().__init__()
        self.where, self.rank, self.calls = where, rank, count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward" and self.rank == 1:
            x = x.clone()
            x[0, 0] += next(self.calls)
        return NoisyGrad.apply(x) if self.where == "backward" else x


def sharded(model: nn.Module, stage: int, **options: Any) -> tuple[Any, Any, Any]:
    made(options.get("offload"))
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = shardcore.shard(model, optimizer, stage, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    return model, optimizer, scheduler


def step_of(
    model: Any, optimizer: Any, scheduler: Any, rank: int, data: Callable[[int], Any] | None = None
) -> Callable[[int], None]:
    device = next(model.parameters()).device

    def step(index: int) -> None:
        x, y = data(index) if data is not None else batch_of(index, 0, rank)
        optimizer.zero_grad()
        optimizer.scale_loss(loss_of(model, (x.to(device), y.to(device)))).backward()
        optimizer.step()
        scheduler.step()

    return step


def _trained(rank: int, stage: int, options: dict[str, Any], checks: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model, optimizer, scheduler = sharded(Dropped(), stage, **options)
    torch.manual_seed(rank)
    ema = shardcore.EMA(model)
    of_index = step_of(model, optimizer, scheduler, rank)

    def step(index: int) -> None:
        of_index(index)
        ema.update()

    step(0)
    if checks:
        found = shardcore.check_determinism(step, 2, model, scheduler=scheduler, ema=ema)
        assert found == Determinism(True, "both runs of 2 steps have the same bits on every rank")
    step(1)
    buffers = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    averages = hash_of(ema.state_dict()["averages"].values())
    return hash_of_training(model, optimizer), buffers, averages, scheduler.get_last_lr()


def _continues(rank: int, world_size: int, stage: int, options: dict[str, Any]) -> None:
    assert _trained(rank, stage, options, True) == _trained(rank, stage, options, False)


CPU, KEEP = {"optimizer": "cpu"}, [nn.BatchNorm1d]
PLACES: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (2, {"precision": "fp16", "keep_fp32": KEEP, "overlap_step": True, "offload": CPU}),
    (3, {"precision": "bf16", "keep_fp32": KEEP, "offload": {**CPU, "params": "cpu"}}),
]


@pytest.mark.parametrize(("stage", "options"), PLACES, ids=str)
def test_training_goes_on_with_the_same_bits(stage: int, options: dict[str, Any]) -> None:
    run_ranks(2, _continues, stage, options)


def test_training_goes_on_with_states_on_disk(tmp_path: Path) -> None:
    offload = {"optimizer": "nvme", "path": str(tmp_path / "states"), "resume": False}
    run_ranks(2, _continues, 2, {"offload": offload})


class InBlock(nn.Module):
    """A block that uses `noise` in code of its own, beside modules that are deterministic."""

    def __init__(self, where: str, rank: int) -> None:
        super().__init__()
        self.noise = [Noise(where, rank)]  # in a list: no module of the block
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.noise[0](x) + torch.tanh(self.first(x)))


def _named(rank: int, world_size: int, stage: int, kind: str, place: str) -> Determinism:
    model = make_net()
    noise = Noise(kind, rank)
    if place == "module":
        model.blocks[1].up = nn.Sequential(noise, model.blocks[1].up)
    elif place == "block":
        model.blocks[1] = InBlock(kind, rank)
    else:
        model.blocks[1].up = nn.Sequential(noise, model.blocks[1].up)
        for block in model.blocks:
            block.forward = _Repeated(block, place == "reentrant")
    model, optimizer, scheduler = sharded(model, stage, units=[*model.blocks])
    step = step_of(model, optimizer, scheduler, rank)
    return shardcore.check_determinism(step, 2, model, scheduler=scheduler)


class _Repeated:
    """The forward of a block under activation checkpointing."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        self.forward, self.reentrant = block.forward, reentrant

    def __call__(self, x: torch.Tensor) -> Any:
        return checkpoint(self.forward, x, use_reentrant=self.reentrant, determinism_check="none")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("place", ["module", "block", "reentrant", "not reentrant"])
def test_it_names_the_module(stage: int, kind: str, place: str) -> None:
    first, second = run_ranks(2, _named, stage, kind, place)
    assert first == second
    assert (first.equal, first.step, first.kind, first.unit) == (False, 0, kind, "blocks.1")
    assert first.module == ("blocks.1" if place == "block" else "blocks.1.up.0")
    assert first.ranks == ((1,) if kind == "forward" else (0, 1))
    if kind == "backward":
        assert "NoisyGradBackward of blocks.1" in str(first)


def _unlike(rank: int, world_size: int, cause: str) -> Determinism:
    """Train with a cause of a difference outside of the modules."""
    torch.manual_seed(0)
    model, optimizer, scheduler = sharded(Dropped(), 0 if cause == "gradients" else 2)
    calls = count()
    restored: dict[str, Any] = {"scheduler": scheduler}
    of_index = step_of(model, optimizer, scheduler, rank)
    step = of_index
    if cause == "data":
        step = step_of(model, optimizer, scheduler, rank, lambda _: batch_of(next(calls), 0, rank))
    elif cause == "scheduler":
        del restored["scheduler"]
    elif cause == "gradients":

        def edit(*_: Any) -> None:
            model.head.weight.grad.mul_(1 + next(calls))

        optimizer.register_step_pre_hook(edit)
    elif cause == "loss":
        optimizer.scale_loss = lambda loss: NoisyGrad.apply(loss)
    elif cause == "calls":
        model.blocks[1].forward = lambda x: x if next(calls) > 1 else model.blocks[2](x)
    with pytest.MonkeyPatch.context() as patch:
        if cause == "random states":
            patch.setattr(determinism, "restore_random", lambda *_: None)
            patch.setattr(shardcore.checkpoint.load, "restore_random", lambda *_: None)
        elif cause == "buffers":
            patch.setattr(determinism, "_buffers_of", lambda model: [])
            model.blocks[0].norm[0].register_buffer("calls", torch.zeros(()), persistent=False)
            bias = lambda m, args, output: output + m.calls.add_(1)  # noqa: E731
            model.blocks[0].norm[0].register_forward_hook(bias)
        found = shardcore.check_determinism(step, 2, model, **restored)
    return found


CAUSES = {
    "data": (0, "data", "", "Let step(0) use the same data"),
    "scheduler": (1, "update", "", "ranks 0, 1: the new weight of gain differs"),
    "gradients": (0, "reduction", "head", "the averaged gradient of head.weight differs"),
    "loss": (0, "backward", "", "AddBackward0 of the model takes differs"),
    "calls": (0, "forward", "blocks.1", "exists in one run only"),
    "random states": (0, "forward", "blocks.0.norm.1", "the output of blocks.0.norm.1 differs"),
    "buffers": (0, "forward", "blocks.0.norm.0", "the output of blocks.0.norm.0 differs"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_causes_outside_of_modules(cause: str) -> None:
    step, kind, module, words = CAUSES[cause]
    for found in run_ranks(2, _unlike, cause):
        print(found)
        assert (found.equal, found.step, found.kind, found.module) == (False, step, kind, module)
        assert words in found.message


def _refused(rank: int, world_size: int, folder: str) -> list[str]:
    model, optimizer, scheduler = sharded(make_net(), 2)
    step = step_of(model, optimizer, scheduler, rank)

    def check(step: Any = step, steps: Any = 1, **options: Any) -> str:
        return error_of(lambda: shardcore.check_determinism(step, steps, model, **options))

    said = [check(steps=0), check(step=None), check(steps=1 + rank)]
    said.append(check(directory=f"{folder}/none"))
    said.append(check(lambda index: int("01x"[2 * (1 - rank)])))
    assert not [*Path(folder).iterdir()]
    loss_of(model, batch_of(0, 0, rank)).backward()
    said.append(check())
    optimizer.zero_grad()
    said.append(check(directory=folder))
    assert not [*Path(folder).iterdir()]
    return said


def test_what_is_refused(tmp_path: Path) -> None:
    of_ranks = run_ranks(2, _refused, str(tmp_path))
    for steps, step, other, folder, failed, waits, good in of_ranks:
        assert "steps is 0; expected a number of at least 1" in steps
        assert "step is a NoneType; expected a function" in step
        assert "argument steps is 2 on rank 1 but 1 on rank 0" in other
        assert "No such file" in folder
        assert "ValueError: invalid literal for int()" in failed
        assert "1 backward(s) ran since the last step; expected none" in waits
        assert good == "no error"
    assert "rank 0 failed" in of_ranks[1][4]


def _compiled(rank: int, world_size: int, kind: str) -> Determinism:
    model = make_net()
    model.blocks[1].up = nn.Sequential(Noise(kind, rank), model.blocks[1].up)
    compile = {"backend": "aot_eager"}
    model, optimizer, scheduler = sharded(model, 3, units=[*model.blocks], compile=compile)
    step = step_of(model, optimizer, scheduler, rank)
    step(0)
    return shardcore.check_determinism(step, 2, model, scheduler=scheduler)


@pytest.mark.more
@pytest.mark.parametrize("kind", ["none", "backward"])
def test_a_compiled_unit_is_named(kind: str) -> None:
    for found in run_ranks(2, _compiled, kind):
        assert found.equal == (kind == "none"), found
        assert found.module == (None if found.equal else "blocks.1"), found


def _of_slices(rank: int, world_size: int, noisy: bool) -> Determinism:
    mesh = mesh_of(4, 2)
    model, optimizer = sharded_lm(mesh, 3)
    calls = count()
    if noisy and rank == 2:
        layer = [*model.modules()][-1]
        layer.register_forward_hook(lambda m, args, output: output * (1 + next(calls)))

    def step(index: int) -> None:
        train_lm(model, optimizer, mesh, range(index, index + 1))

    return shardcore.check_determinism(step, 1, model)


@pytest.mark.parametrize("noisy", [False, True])
def test_tensor_parallel_slices(noisy: bool) -> None:
    of_ranks = run_ranks(4, _of_slices, noisy)
    assert all(found == of_ranks[0] for found in of_ranks)
    assert of_ranks[0].equal != noisy, of_ranks[0]
    if noisy:
        assert (of_ranks[0].kind, of_ranks[0].ranks) == ("forward", (2,))


def _on_cuda(rank: int, world_size: int) -> None:
    for stage, offload in ((0, None), (3, {"optimizer": "cpu"})):
        model, optimizer, scheduler = sharded(make_net(), stage, offload=offload)
        step = step_of(model, optimizer, scheduler, rank)
        assert shardcore.check_determinism(step, 1, model, scheduler=scheduler).equal
        del model, optimizer, scheduler, step


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_streams_of_a_device() -> None:
    """The pretended GPU raises for what streams or devices would get wrong."""
    run_pretended(2, _on_cuda)
