"""An iteration stays as short to follow as it is promised to be: few files, and few calls from one into another."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import shardcore
from tests.support.ranks import run_ranks

PACKAGE = str(Path(shardcore.__file__).parent)


class Calls:
    """Counts calls between files of the package, on the thread that trains, as pairs (from, to)."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> None:
        sys.setprofile(self._profile)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
                caller = caller.f_back
            self.pairs["" if caller is None else caller.f_code.co_filename, frame.f_code.co_filename] += 1


def _second_step(rank: int, world_size: int) -> list[Counter[tuple[str, str]]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    model, optimizer = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 2, units=list(model))
    for _ in range(2):
        x = torch.randn(4, 32)
        forward, backward, step = Calls(), Calls(), Calls()
        with forward:
            loss = model(x).square().mean()
        with backward:
            loss.backward()
        with step:
            optimizer.step()
            optimizer.zero_grad()
    return [forward.pairs, backward.pairs, step.pairs]


def test_an_iteration_passes_through_few_files() -> None:
    forward, backward, step = run_ranks(2, _second_step)[0]
    files = {file for calls in (forward, backward, step) for _, file in calls}
    assert {f"{PACKAGE}/engine/{name}.py" for name in ("hooks", "reducer", "step")} <= files
    assert len(files) <= 18, files
    made = Counter({pair: count for pair, count in backward.items() if pair[0]})
    assert sum(count for (source, file), count in made.items() if source != file) <= 0.45 * made.total(), made
