"""The files that one training iteration enters, by name.

A reader who follows a gradient, or a step, opens these and no others. A file that an option opens
is not entered without the option, not even to learn that there is nothing to do.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from tests.support.models import batch_of, loss_of, make_net
from tests.support.ranks import run_ranks

# What every iteration enters.
ALWAYS = {
    "distributed/comm.py",
    "engine/agreement.py",
    "engine/bucket.py",
    "engine/engine.py",
    "engine/hooks.py",
    "engine/reducer.py",
    "engine/step.py",
    "optim/base.py",
}
BY_STAGE: dict[int, set[str]] = {2: set(), 3: {"engine/unshard.py"}}
BY_OFFLOAD: dict[str | None, set[str]] = {
    None: {"engine/states.py"},
    "cpu": {"offload/cpu_store.py"},
}
BY_RANKS: dict[int, set[str]] = {1: set(), 2: {"engine/reduce_scatter.py"}}


def _entered(rank: int, world_size: int, stage: int, offload: str | None) -> set[str]:
    """Train two steps, then return the files of shardcore that a third one enters."""
    model: Any = make_net()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
    options = {} if offload is None else {"offload": {"optimizer": offload}}
    model, optimizer = shardcore.shard(model, optimizer, stage, **options)
    package = Path(shardcore.__file__).parent
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    for step in range(3):
        sys.setprofile(note if step == 2 else None)
        try:
            loss_of(model, batch_of(step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            sys.setprofile(None)
    return {
        Path(file).relative_to(package).as_posix()
        for file in files
        if Path(file).is_relative_to(package)
    }


class _Many(nn.Module):
    """So many parameters in one bucket."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.many = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * param for param in self.many]).sum()


def _frames_of_backward(rank: int, world_size: int, stage: int, count: int) -> int:
    """Return how many frames of shardcore a backward over `count` parameters enters."""
    model: Any = _Many(count)
    model, optimizer = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), stage)
    package, frames = str(Path(shardcore.__file__).parent), 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal frames
        frames += event == "call" and frame.f_code.co_filename.startswith(package)

    for step in range(3):
        loss = model(torch.ones(3))
        sys.setprofile(note if step == 2 else None)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
        optimizer.step()
        optimizer.zero_grad()
    return frames


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_takes_at_most_8_frames(stage: int, world_size: int) -> None:
    few, many = (run_ranks(world_size, _frames_of_backward, stage, n)[0] for n in (10, 30))
    assert (many - few) / 20 <= 8


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("stage", [2, 3])
def test_an_iteration_enters_these_files_alone(
    stage: int, offload: str | None, world_size: int
) -> None:
    expected = ALWAYS | BY_STAGE[stage] | BY_OFFLOAD[offload] | BY_RANKS[world_size]
    for entered in run_ranks(world_size, _entered, stage, offload):
        assert sorted(entered) == sorted(expected)
