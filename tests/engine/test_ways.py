"""Ranks that go different ways get the same error, at once; none waits, none takes another unit's weights or gradients."""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from tests.engine.forced import as_on_nccl
from tests.engine.models import Net, Run, batch_of, hash_of_training, loss_of, train
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
        elif what == "evaluates":
            if odd:
                with torch.no_grad():
                    model(x)
            optimizer.step()
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
        ("has no backward", *["ranks 0, 2 at a backward; rank 1 at a step"] * 2),
        (
            "evaluates",
            *["ranks 0, 2 at a step; rank 1 at the weights of the root without gradients (evaluation)"] * 2,
        ),
        ("reads", *["ranks 0, 2 at the weights of the root; rank 1 at state_dict"] * 2),
    ],
)
def test_ranks_that_go_different_ways_are_told_so(what: str, first: str, later: str, trained: int) -> None:
    """Before the order is known, and after: every rank gets the same error, at once."""
    for error in run_ranks(3, _different, what, trained):
        assert f"ranks went different ways: {later if trained else first}; expected every rank" in error


def _saved_by_rank_0(rank: int, world_size: int) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    model, _, _ = train(rank, Run(stage=2, steps=1, shard={"process_group": group}))
    try:
        if rank == 0:
            model.state_dict()
        else:
            time.sleep(5)  # in a barrier, say
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_read_on_one_rank_beside_a_barrier_is_named() -> None:
    said, _ = run_ranks(2, _saved_by_rank_0)
    assert said.startswith("state_dict: waiting for the other ranks failed")


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("what", "odd"), [("has no backward", "a step"), ("reads", "state_dict")])
def test_below_stage_3_ranks_that_leave_out_a_call_are_told_so(what: str, odd: str, stage: int) -> None:
    for error in run_ranks(3, _different, what, 1, stage):
        assert f"ranks went different ways: ranks 0, 2 at a backward; rank 1 at {odd}; expected every rank" in error
        assert ("state_dict is collective: every rank calls it" in error) == (what == "reads")


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
        unchanged = hash_of_training(model, optimizer) == before
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        return str(refusal.value), unchanged


def test_another_order_that_no_message_tells_is_found_by_the_step() -> None:
    """With NCCL, for which gloo's own collectives stand in. It would update from gradients of wrong weights."""
    for error, unchanged in run_ranks(2, _in_another_order):
        assert re.search(
            r"step: ranks disagree: .* the weights of blocks\.2 on rank 1 but .* the weights of blocks\.1 on", error
        )
        assert unchanged


# --- and then ---------------------------------------------------------------------------------------------------------


def _backward(model: Any, optimizer: Any) -> None:
    loss_of(model, batch_of(7, 0, 1)).backward()


def _fails_in_backward(model: Any, optimizer: Any) -> None:
    def fail(grad: torch.Tensor) -> None:
        handle.remove()
        raise RuntimeError("its own")

    handle = model.blocks[1].up.weight.register_hook(fail)
    _backward(model, optimizer)


def _fails_in_forward_and_tries_again(model: Any, optimizer: Any) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise RuntimeError("its own")

    handle = model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="its own"):
        _backward(model, optimizer)
    _backward(model, optimizer)


def _reduces_nothing(model: Any, optimizer: Any) -> None:
    with shardcore.no_sync(model):
        _backward(model, optimizer)
    optimizer.step()


def _skips_two_backwards(model: Any, optimizer: Any) -> None:
    x = model.blocks[0](model.inp(torch.ones(2, 10))).detach().requires_grad_()
    model.head(model.blocks[2](model.blocks[1](x))).sum().backward()


def _evaluates_first(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model(torch.ones(2, 10))
    _backward(model, optimizer)


DEVIATIONS: dict[str, Callable[[Any, Any], None]] = {
    "fails in backward": _fails_in_backward,
    "fails in forward and tries again": _fails_in_forward_and_tries_again,
    "reduces nothing": _reduces_nothing,
    "has no backward": lambda model, optimizer: optimizer.step(),
    "reads alone": lambda model, optimizer: model.state_dict(),
    "skips two backwards": _skips_two_backwards,
    "evaluates first": _evaluates_first,
}
BELOW_3 = ["fails in backward", "reduces nothing", "has no backward", "reads alone"]


def _goes_on(
    rank: int, world_size: int, stage: int, deviations: list[str], offload: dict[str, str] | None = None
) -> tuple[list[str], str]:
    """Let rank 1 deviate, forget all, and train a step, again and again. Four ranks are two replicas of two shards."""
    torch.manual_seed(0)
    model: Any = Net()
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    adam = shardcore.FusedAdam([{"params": matrices}, {"params": others, "weight_decay": 0.1}], lr=1e-2)
    group = init_device_mesh("cpu", (2, 2)) if world_size == 4 else dist.new_group(timeout=timedelta(seconds=20))
    model, optimizer = shardcore.shard(model, adam, stage, process_group=group, precision="fp32", offload=offload)
    errors = []
    for step, deviation in enumerate(["", *deviations]):
        if deviation:
            try:
                if rank == 1:
                    DEVIATIONS[deviation](model, optimizer)
                else:
                    _backward(model, optimizer)
                    optimizer.step()
                errors.append("no error")
            except RuntimeError as error:
                errors.append(str(error))
        optimizer.zero_grad()
        loss_of(model, batch_of(step, 0, rank)).backward()
        optimizer.step()
    return errors, hash_of_training(model, optimizer)


@pytest.mark.parametrize(
    ("world_size", "stage", "deviations", "offload"),
    [
        (2, 1, BELOW_3, None),
        (3, 3, [*DEVIATIONS], None),
        (4, 3, ["fails in backward", "skips two backwards"], None),
        (4, 3, ["fails in backward", "reduces nothing"], {"optimizer": "cpu", "gradients": "cpu"}),
    ],
)
def test_ranks_that_went_different_ways_train_on_where_they_were(
    world_size: int, stage: int, deviations: list[str], offload: dict[str, str] | None
) -> None:
    """All are told at once, whatever the others wait for; and what is left behind disturbs no later step."""
    undisturbed = run_ranks(world_size, _goes_on, stage, [""] * len(deviations))
    results = run_ranks(world_size, _goes_on, stage, deviations, offload)
    assert {hashed for _, hashed in results} == {hashed for _, hashed in undisturbed}
    for errors, _ in results:
        for deviation, error in zip(deviations, errors, strict=True):
            assert "ranks went different ways" in error or deviation == "fails in backward"
            assert error != "no error"
