"""Gradients on their way to host memory: those of micro-steps are added there, on a thread of its own; waits and errors."""

import threading
from concurrent.futures import wait
from typing import Any

import pytest
import torch

import shardcore
from shardcore._native import _C
from shardcore.engine import host_gradients as host_grads
from tests.engine.models import Run, batch_of, hash_of, hash_of_training, loss_of, train
from tests.engine.test_offload import Watched, tier_with
from tests.engine.test_offload_tiers import GRADS
from tests.ranks import run_ranks


def _one_bucket(**options: Any) -> tuple[Any, Any]:
    shard = {"grad_dtype": "bf16", "units": 10**9, "clip_grad_norm": 0.5, "offload": GRADS, **options}
    return train(0, Run(steps=0, accumulate=3, precision="bf16", shard=shard))[:2]


def _steps_of(model: Any, optimizer: Any) -> str:
    for step in range(2):
        for micro in range(3):
            (loss_of(model, batch_of(step, micro, 0)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_of_training(model, optimizer)


@pytest.mark.parametrize("waits", [True, False])
def test_what_has_left_is_added_behind_backward(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a thread of its own, as late as a step allows; a step that does not wait for it has other bits."""
    expected = _steps_of(*_one_bucket(offload=None))
    gate, add, added = threading.Event(), host_grads._add, []

    def late(*arguments: Any) -> torch.Tensor:
        assert gate.wait(30)
        added.append(threading.current_thread().name)
        return add(*arguments)

    monkeypatch.setattr(host_grads, "_add", late)
    model, optimizer = _one_bucket(offload=GRADS | {"ratio": 0.8})
    host = optimizer._engine.reducer.host_grads
    arrive = host.arrive

    def opened() -> None:
        if waits:
            gate.set()
            arrive()
        gate.set()
        wait(filter(None, host._adding))
        gate.clear()

    monkeypatch.setattr(host, "arrive", opened)
    assert (_steps_of(model, optimizer) == expected) == waits
    assert added == ["shardcore-add_0"] * 4


def test_an_error_of_the_thread_that_adds_is_the_step_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> torch.Tensor:
        raise OSError("planted")

    expected = _steps_of(*_one_bucket())
    model, optimizer = _one_bucket()
    before = hash_of(model.parameters())
    monkeypatch.setattr(host_grads, "_add", fails)
    for micro in range(4):  # the last one takes the place of the first that was to be added
        loss_of(model, batch_of(0, micro, 0)).backward()
        if micro in (1, 3):
            with pytest.raises(RuntimeError, match=r"^backward: adding gradients in host memory failed \(OSError: planted\)"):
                optimizer.step()
    assert hash_of(model.parameters()) == before
    monkeypatch.undo()
    optimizer.zero_grad()
    assert _steps_of(model, optimizer) == expected


def _fails_to_leave(rank: int, world_size: int, accumulate: int) -> list[str]:
    """Of rank 0 the second copy behind the first step fails, and all after it in that direction."""
    run = Run(steps=1, accumulate=accumulate, precision="bf16", shard={"offload": GRADS, "sync_each": True})
    said: list[str] = []
    log: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        tier_with(patch, lambda tier: Watched(tier, log))
        train(rank, run)
        patch.undo()
        copies = log.count("to_tier") + log.count("from_tier")
        tier_with(patch, failing_copy=copies + 2 if rank == 0 else 0)
        model, optimizer, _ = train(rank, run)
        for step in (1, 2):
            for micro in range(accumulate):
                loss_of(model, batch_of(step, micro, rank)).backward()
            for call in (
                lambda: shardcore.clip_grad_norm_(model, 0.1),
                lambda: shardcore.full_grad(model.gain),
                optimizer.step,
            ):
                try:
                    call()
                    said.append("nothing")
                except (RuntimeError, ValueError) as error:
                    said.append(f"{error} from {type(error.__cause__).__name__}")
            optimizer.zero_grad()
    return said


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_cannot_leave_is_refused_by_what_needs_it(accumulate: int) -> None:
    """Not by backward, in which the other ranks wait for more of this one."""
    mine, others = run_ranks(2, _fails_to_leave, accumulate)
    for text in mine:
        assert "gradients in host memory failed (RuntimeError: HostTier.to_tier: copy " in text
        assert "(a planted fault)" in text
        assert text.endswith("from RuntimeError")
    assert [text.split(":")[0] for text in others] == ["clip_grad_norm_", "full_grad", "step"] * 2
    assert all("rank 0 refused" in text for text in others)


def test_the_norm_is_taken_before_a_gradient_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """So clipping reads no gradient a second time."""
    log: list[str] = []
    tier_with(monkeypatch, lambda tier: Watched(tier, log))
    model, optimizer, _ = train(0, Run(steps=0, shard={"offload": GRADS}))
    sq_norm = _C.sq_norm
    monkeypatch.setattr(_C, "sq_norm", lambda tensors: (log.append("norm"), sq_norm(tensors))[1])
    log.clear()
    loss_of(model, batch_of(0, 0, 0)).backward()
    assert [call for call in log if "." not in call] == ["norm", "to_tier"] * len(optimizer._engine.buckets)
    optimizer.step()
    assert log.count("norm") == len(optimizer._engine.buckets)
