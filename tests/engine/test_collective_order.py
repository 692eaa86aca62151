"""Ranks start collectives in an order that the program alone decides, as NCCL needs: not timing, nor reads on one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardcore.distributed import comm as comm_module
from tests.engine.forced import as_on_nccl
from tests.engine.late import SlowStore, start, stepped
from tests.engine.models import Run, hash_of_training
from tests.ranks import run_ranks

OFFLOAD = {"optimizer": "cpu"}


def _logged(patch: pytest.MonkeyPatch) -> list[str]:
    """Log what this rank starts: gathers of the engine, and the user's all_reduce."""
    log: list[str] = []

    def log_calls(owner: Any, attribute: str, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, attribute)

        def logged(*args: Any, **options: Any) -> Any:
            log.append(f"{name} of {args[0].numel()}")
            return call(*args, **options)

        patch.setattr(owner, attribute, logged)

    log_calls(comm_module, "_all_gather", "gather")
    log_calls(dist, "all_reduce", "all_reduce")
    return log


def _with_a_collective_in_forward(rank: int, world_size: int) -> tuple[list[str], str]:
    with as_on_nccl() as patch:
        model, optimizer = start(rank, Run(stage=3, shard={"offload": OFFLOAD}), True, late=False)
        if rank == 1:
            SlowStore(optimizer._engine.overlap_step)
        # SyncBatchNorm, experts or a metric have one like this.
        model.blocks[1].register_forward_hook(lambda *_: dist.all_reduce(torch.ones(3)))
        log = _logged(patch)
        for step in range(4):
            stepped(model, optimizer, rank, step)
        optimizer.synchronize()
        return log, hash_of_training(model, optimizer)


def test_a_slow_update_changes_no_order_of_collectives() -> None:
    (first, bits), second = run_ranks(2, _with_a_collective_in_forward)
    assert (first, bits) == second
    assert first.count("all_reduce of 3") == 4
    assert len(first) > 20


READS: dict[str, Callable[[Any, Any], Any]] = {
    "parameters": lambda model, optimizer: list(model.parameters()),
    "a weight": lambda model, optimizer: model.head.weight,
    "param_groups": lambda model, optimizer: optimizer.param_groups[0]["params"],
}


def _read_on_one_rank(rank: int, world_size: int, stage: int, read: str | None) -> tuple[list[str], str, str]:
    with as_on_nccl() as patch:
        model, optimizer = start(rank, Run(stage=stage, shard={"offload": OFFLOAD}), read is not None, late=False)
        log = _logged(patch)
        said = ""
        for step in range(3):
            stepped(model, optimizer, rank, step)
            if rank == 0 and read is not None:
                try:
                    READS[read](model, optimizer)
                except RuntimeError as error:
                    said = str(error)
            dist.all_reduce(torch.ones(3))
        optimizer.synchronize()
        assert len(list(model.parameters())) == len(optimizer.param_groups[0]["params"])
        return log, said, hash_of_training(model, optimizer)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_read_on_one_rank_starts_no_collective(stage: int) -> None:
    (complete, _, expected), _ = run_ranks(2, _read_on_one_rank, stage, None)
    for read in READS:
        (first, said, bits), (second, _, other_bits) = run_ranks(2, _read_on_one_rank, stage, read)
        assert first == second
        assert sorted(first) == sorted(complete)
        assert bits == other_bits == expected
        assert "optimizer.synchronize() on every rank" in said
