"""Ranks that go different ways get an error; none takes another unit's weights or gradients."""

import re

import pytest
import torch

from tests.engine.forced import as_on_nccl
from tests.engine.models import Net, Run, hash_of_training, train
from tests.ranks import run_ranks

NEVER = re.compile(r"ranks wait for different things, which can never end: .*ranks 0, 2 for .*expected every rank")


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
        elif what == "evaluates":
            if odd:
                with torch.no_grad():
                    model(x)
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


WHATS = ["skips the last unit", "has no backward", "evaluates", "reads"]


@pytest.mark.parametrize(("what", "trained"), [("skips a unit", 0), *((what, trained) for what in WHATS for trained in (0, 2))])
def test_ranks_that_go_different_ways_are_told_so(what: str, trained: int) -> None:
    """Before the order is known, and after."""
    for error in run_ranks(3, _different, what, trained):
        assert NEVER.match(error), error


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("what", "odd"), [("has no backward", "a step"), ("reads", "state_dict")])
def test_below_stage_3_ranks_that_leave_out_a_call_are_told_so(what: str, odd: str, stage: int) -> None:
    for error in run_ranks(3, _different, what, 1, stage):
        assert NEVER.match(error), error
        assert f"rank 1 for {odd}" in error
        assert "ranks 0, 2 for the reduction of blocks.2" in error


class Ordered(Net):
    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        x = self.inp(x)
        for index in order:
            x = self.blocks[index](x)
        return self.head(x) * self.gain


def _in_another_order(rank: int, world_size: int) -> tuple[str, bool]:
    """Units of one size, gathered as often on each rank: what is matched by its order alone takes one for another."""
    with as_on_nccl():
        torch.manual_seed(0)
        model, optimizer, _ = train(rank, Run(stage=3, steps=0, shard={"reshard_after_forward": False}), Ordered())
        before = hash_of_training(model, optimizer)
        model(torch.ones(2, 10), (0, 2, 1) if rank == 1 else (0, 1, 2)).sum().backward()
        with pytest.raises(ValueError) as refusal:
            optimizer.step()
        optimizer.zero_grad()
        return str(refusal.value), hash_of_training(model, optimizer) == before


def test_another_order_that_no_message_tells_is_found_by_the_step() -> None:
    """With NCCL, for which gloo's own collectives stand in. It would update from gradients of wrong weights."""
    for error, unchanged in run_ranks(2, _in_another_order):
        assert re.search(
            r"step: ranks disagree: .* the weights of blocks\.2 on rank 1 but .* the weights of blocks\.1 on", error
        )
        assert unchanged
