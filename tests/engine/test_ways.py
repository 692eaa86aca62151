"""Ranks that go different ways get the same error, at once; none waits, none takes another unit's weights or gradients."""

import pytest
import torch

from tests.engine.models import Net, Run, train
from tests.ranks import run_ranks


class Skipping(Net):
    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = block(x) if index != skip else x
        return self.head(x) * self.gain


def _different(rank: int, world_size: int, what: str, trained: int, stage: int = 3) -> str:
    torch.manual_seed(0)
    model, optimizer, _ = train(rank, Run(stage=stage, steps=trained), Skipping())
    x, odd = torch.ones(2, 10), rank == 1
    try:
        if what == "skips a unit":
            model(x, 1 if odd else -1)
        elif what == "skips the last unit":
            model(x, 2 if odd else -1).sum().backward()
        elif what == "has no backward":
            loss = model(x).sum()
            if not odd:
                loss.backward()
            optimizer.step()
        elif what == "reads":
            if odd:
                model.state_dict()
            model(x).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize(
    ("what", "first", "later"),
    [
        (
            "skips a unit",
            "ranks 0, 2 at the weights of blocks.1; rank 1 at the weights of blocks.2",
            "entry 2 is use 2: blocks.2 on rank 1 but use 2: blocks.1 on rank 0",
        ),
        (
            "skips the last unit",
            "ranks 0, 2 at the weights of blocks.2; rank 1 at the end of forward",
            "entry 3 is nothing on rank 1 but use 3: blocks.2 on rank 0",
        ),
        (
            "has no backward",
            "ranks 0, 2 at the weights of blocks.2; rank 1 at a step",
            "ranks 0, 2 at the weights of blocks.1; rank 1 at a step",
        ),
        ("reads", *["ranks 0, 2 at the weights of the root; rank 1 at a read of whole values"] * 2),
    ],
)
def test_ranks_that_go_different_ways_are_told_so(what: str, first: str, later: str, trained: int) -> None:
    """Before the order is known, and after: every rank gets the same error, at once."""
    for error in run_ranks(3, _different, what, trained):
        assert f"ranks went different ways: {later if trained else first}; expected every rank" in error


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("what", "odd"), [("has no backward", "a step"), ("reads", "a read of whole values")])
def test_below_stage_3_ranks_that_leave_out_a_call_are_told_so(what: str, odd: str, stage: int) -> None:
    for error in run_ranks(3, _different, what, 1, stage):
        assert f"ranks went different ways: ranks 0, 2 at a backward; rank 1 at {odd}; expected every rank" in error
