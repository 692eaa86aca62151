"""Ranks that wait for different things get an error that names them, within seconds; ranks that are late are named in a log."""

import gc
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore.distributed import comm, watchdog
from shardcore.engine.bucket import BufferPool
from tests.engine.forced import as_on_nccl
from tests.engine.models import Run, batch_of, hash_of_training, loss_of, train
from tests.ranks import free_port, run_ranks

NEVER = "ranks wait for different things, which can never end: "


def _step(model: Any, optimizer: Any, rank: int, step: int) -> None:
    loss_of(model, batch_of(step, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _twice(model: Any, optimizer: Any, rank: int) -> None:
    if rank == 0:
        block = model.blocks[1]
        forward = block.forward
        block.forward = lambda x: forward(forward(x))  # one call of the module, then two of the block
        model.blocks[1].register_forward_hook(lambda module, args, out: model.blocks[0](out))
    for step in range(2):
        _step(model, optimizer, rank, step)


def _detached(model: Any, optimizer: Any, rank: int) -> None:
    if rank == 0:
        model.blocks[1].register_forward_hook(lambda module, args, out: out.detach())
    for step in range(2):
        _step(model, optimizer, rank, step)


def _in_full_params(model: Any, optimizer: Any, rank: int) -> None:
    with shardcore.full_params(model):
        if rank == 0:
            _step(model, optimizer, rank, 1)
    _step(model, optimizer, rank, 1)


def _grad_alone(model: Any, optimizer: Any, rank: int) -> None:
    loss = loss_of(model, batch_of(1, 0, rank))
    if rank == 0:
        x = torch.randn(4, 10, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)
    loss.backward()
    optimizer.step()
    model.state_dict()


def _own_collective(model: Any, optimizer: Any, rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    _step(model, optimizer, rank, 1)


def _read_beside_a_barrier(model: Any, optimizer: Any, rank: int) -> None:
    if rank == 0:
        model.state_dict()
    dist.barrier()


def _two_models(model: Any, optimizer: Any, rank: int) -> None:
    other, its, _ = train(rank, Run(steps=1))
    for one in [model, other] if rank == 0 else [other, model]:
        loss_of(one, batch_of(1, 0, rank)).backward()
    optimizer.step()
    its.step()


DIFFERENT: dict[str, tuple[Callable[[Any, Any, int], None], tuple[int, ...], tuple[str, ...]]] = {
    "a block twice": (_twice, (3,), ("the weights of blocks.",)),
    "a detached output": (_detached, (3,), ("the weights of", "the reduction of")),
    "training in full_params": (_in_full_params, (3,), ("the weights of", "the reduction of")),
    "autograd.grad": (_grad_alone, (3,), ("the weights of",)),
    "a collective of the user's": (_own_collective, (0, 1, 2, 3), ("torch.distributed.all_reduce",)),
    "a read beside a barrier": (_read_beside_a_barrier, (1, 3), ("state_dict", "torch.distributed.barrier")),
    "two models": (_two_models, (1,), ("the reduction of",)),
}


def _diverge(rank: int, world_size: int, what: str, stage: int, nccl: bool) -> tuple[str, float]:
    with as_on_nccl() if nccl else nullcontext():
        model, optimizer, _ = train(rank, Run(stage=stage, steps=1))
        began = time.monotonic()
        try:
            DIFFERENT[what][0](model, optimizer, rank)
        except RuntimeError as error:
            return str(error), time.monotonic() - began
        return "no error", time.monotonic() - began


@pytest.mark.parametrize("nccl", [False, True], ids=["gloo", "as nccl"])
@pytest.mark.parametrize(("what", "stage"), [(what, stage) for what, (_, stages, _) in DIFFERENT.items() for stage in stages])
def test_what_can_never_end_is_an_error_that_names_it(what: str, stage: int, nccl: bool) -> None:
    answers = [said for said, _ in run_ranks(3, _diverge, what, stage, nccl)]
    for said in answers:
        print(said)
    named = [said for said in answers if said.startswith(NEVER)]
    assert named
    for said in answers:  # a collective of the user's raises torch's own error
        assert said.startswith(NEVER) or ("user" in what or "barrier" in what), said
    for part in DIFFERENT[what][2]:
        assert part in named[0]
    assert "rank 0 for " in named[0]
    assert "ranks 1, 2 for " in named[0]


def _out_of_memory(rank: int, world_size: int, stage: int, where: str, point: int, nccl: bool) -> str:
    """Rank 0 meets an error at the `point`-th buffer that it takes, catches it and trains on, as if nothing had been."""
    with as_on_nccl() if nccl else nullcontext(), pytest.MonkeyPatch.context() as patch:
        model, optimizer, _ = train(rank, Run(stage=stage, steps=1))
        taken, take = [0], BufferPool.take
        all_gather = comm.Comm.all_gather

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def counts(*given: Any, **options: Any) -> Any:
                taken[0] += 1
                if rank == 0 and taken[0] == point:
                    raise torch.OutOfMemoryError("injected")
                return call(*given, **options)

            return counts

        if where == "reduction":
            patch.setattr(BufferPool, "take", counted(take))
        else:
            patch.setattr(comm.Comm, "all_gather", counted(all_gather))
        try:
            for step in range(1, 4):
                with suppress(torch.OutOfMemoryError):
                    if where == "state_dict" and step == 1:
                        model.state_dict()
                    loss_of(model, batch_of(step, 0, rank)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return hash_of_training(model, optimizer)
        except RuntimeError as error:
            return str(error)


POINTS = [("reduction", 0, 2), ("reduction", 2, 3), ("reduction", 3, 5), ("state_dict", 1, 2), ("state_dict", 3, 2)]


# gloo's own collectives, which stand in for NCCL's, end the process where sizes differ: as they do at stage 3.
@pytest.mark.parametrize(
    ("where", "stage", "point", "nccl"),
    [(*point, nccl) for point in POINTS for nccl in (False, True) if point[1] < 3 or not nccl],
)
def test_an_error_that_one_rank_catches_ends_all(where: str, stage: int, point: int, nccl: bool) -> None:
    """Or training goes on, where the messages that were left out are those of a whole pass: to one hash on all ranks."""
    answers = run_ranks(2, _out_of_memory, stage, where, point, nccl)
    for said in answers:
        assert said.startswith((NEVER, "ranks went different ways", "step: ranks disagree")) or len(set(answers)) == 1, said


def _leaves(rank: int, world_size: int, nccl: bool) -> str:
    with as_on_nccl() if nccl else nullcontext():
        model, optimizer, _ = train(rank, Run(stage=2, steps=1))
        if rank == 1:  # its training is over, and the process lives on
            del model, optimizer
            gc.collect()
            time.sleep(4)
            return ""
        try:
            _step(model, optimizer, rank, 1)
        except RuntimeError as error:
            return str(error)
        return "no error"


@pytest.mark.parametrize("nccl", [False, True], ids=["gloo", "as nccl"])
def test_a_rank_whose_engine_is_gone_is_not_waited_for(nccl: bool) -> None:
    waiting, gone, _ = run_ranks(3, _leaves, nccl)
    assert waiting.startswith(NEVER)
    assert "rank 1 for nothing: its engine is gone" in waiting
    assert gone == ""


def _late(rank: int, world_size: int, late: bool) -> tuple[list[str], str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "LATE_S", 1.0)
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        patch.setattr(watchdog.logger, "handlers", [handler])
        model, optimizer, _ = train(rank, Run(stage=3, steps=1))
        if rank == 1 and late:
            time.sleep(2.7)
        _step(model, optimizer, rank, 1)
        return lines, hash_of_training(model, optimizer)


def test_ranks_that_are_late_are_named_and_waited_for() -> None:
    (first, trained), (second, _), (third, _) = run_ranks(3, _late, True)
    assert second == third == []
    assert 1 <= len(first) <= 2  # once a LATE_S
    assert first[0].startswith(
        "ranks 0, 2 have waited 1 s for the weights of the root (call 2), at which rank 1 has not arrived"
    )
    assert run_ranks(3, _late, False)[0] == ([], trained)


def _shards_late(rank: int, world_size: int) -> str:
    model, optimizer, _ = train(rank, Run(steps=1))
    del model, optimizer
    gc.collect()
    if rank == 1:
        time.sleep(2)  # it reads data before it makes the next model
    return hash_of_training(*train(rank, Run(steps=1))[:2])


def test_a_rank_between_two_models_is_waited_for() -> None:
    assert len({*run_ranks(2, _shards_late)}) == 1


class Slow:
    """An object that takes long to unpickle."""

    def __reduce__(self) -> Any:
        return time.sleep, (2.5,)


def _gathers_objects(rank: int, world_size: int) -> str:
    model, optimizer, _ = train(rank, Run(steps=1))
    dist.gather_object(Slow(), [None] * world_size if rank == 0 else None)
    _step(model, optimizer, rank, 1)
    return hash_of_training(model, optimizer)


def test_a_rank_that_unpickles_what_others_sent_is_waited_for() -> None:
    assert len({*run_ranks(2, _gathers_objects)}) == 1


_ENDS_FIRST = """
import os, sys, time
import torch.distributed as dist
import shardcore
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{store}", rank=rank, world_size=2)
dist.barrier()
time.sleep(rank)
"""


def test_a_process_ends_though_the_store_is_gone() -> None:
    """Rank 0, which serves it, ends first; nothing of ours connects to it at the end."""
    port = free_port()
    ranks = [subprocess.Popen([sys.executable, "-c", _ENDS_FIRST, str(rank), port]) for rank in range(2)]
    try:
        for process in ranks:
            process.wait(60)
    finally:
        for process in ranks:
            process.kill()


def test_collectives_that_were_started_in_another_order_are_found() -> None:
    assert not watchdog._differ((3, ["a", "b", "c"]), (2, ["a", "b"]))
    assert not watchdog._differ((103, ["x", "y"]), (102, ["w", "x"]))
    assert watchdog._differ((2, ["a", "b"]), (2, ["b", "a"]))
    assert watchdog._differ((103, ["x", "y"]), (103, ["x", "z"]))
