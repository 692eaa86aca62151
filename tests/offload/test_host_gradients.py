"""Gradients in host memory: they leave in backward, are added there by a thread, and give the
same bits.
"""

import itertools
import threading
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardcore
from shardcore._native import _C
from shardcore.engine.states import StepError
from shardcore.offload import host_gradients as host_grads
from tests.support.choice import some
from tests.support.models import (
    Reused,
    Run,
    batch_of,
    hash_of,
    hash_of_training,
    loss_of,
    stepped,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.tiers import FORMS, GRADS, Watched, Wrapped, hashes_of, small_chunks, tier_with


def _one_bucket(**options: Any) -> tuple[Any, Any]:
    shard = {
        "grad_dtype": "bf16",
        "units": 10**9,
        "clip_grad_norm": 0.5,
        "offload": GRADS,
        **options,
    }
    return train(0, Run(steps=0, accumulate=3, precision="bf16", shard=shard))[:2]


def _steps_of(model: Any, optimizer: Any) -> str:
    for step in range(2):
        for micro in range(3):
            (loss_of(model, batch_of(step, micro, 0)) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_of_training(model, optimizer)


@pytest.mark.parametrize("waits", [True, False])
def test_what_has_left_is_added_behind_backward(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a thread of its own, as late as a step allows; a step that does not wait for it has
    other bits.
    """
    expected = _steps_of(*_one_bucket(offload=None))
    gate, add, added = threading.Event(), host_grads._add, []

    def late(*arguments: Any) -> torch.Tensor:
        assert gate.wait(30)
        added.append(threading.current_thread().name)
        return add(*arguments)

    monkeypatch.setattr(host_grads, "_add", late)
    model, optimizer = _one_bucket(offload=GRADS | {"ratio": 0.8})
    host = optimizer._engine.reducer.host_grads
    synchronize = host.synchronize

    def opened() -> None:
        if waits:
            gate.set()
            synchronize()
        gate.set()
        wait(filter(None, host._adding))
        gate.clear()

    monkeypatch.setattr(host, "synchronize", opened)
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
            with pytest.raises(
                RuntimeError,
                match=r"^backward: adding gradients in host memory failed \(OSError: planted\)",
            ):
                optimizer.step()
    assert hash_of(model.parameters()) == before
    monkeypatch.undo()
    optimizer.zero_grad()
    assert _steps_of(model, optimizer) == expected


def _fails_to_leave(rank: int, world_size: int, accumulate: int) -> list[str]:
    """Of rank 0 the second copy behind the first step fails, and all after it in that direction."""
    run = Run(
        steps=1,
        accumulate=accumulate,
        precision="bf16",
        shard={"offload": GRADS, "sync_each": True},
    )
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
    assert [call for call in log if "." not in call] == ["norm", "to_tier"] * len(
        optimizer._engine.buckets
    )
    optimizer.step()
    assert log.count("norm") == len(optimizer._engine.buckets)


# --- steps on gradients that travel ---------------------------------------------------------------


@pytest.fixture
def all_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backward waits for a gradient that is being copied."""
    monkeypatch.setattr(host_grads, "IN_FLIGHT", 16)


@pytest.mark.usefixtures("all_travel")
@pytest.mark.parametrize("overlap", [False, True])
def test_adam_works_on_gradients_that_are_there_while_the_last_travel(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are made only when someone waits for them. Clipping needs the norm of all."""
    small_chunks(monkeypatch)
    tier_with(monkeypatch, late=True)
    shard = {"offload": GRADS, "overlap_step": overlap, "clip_grad_norm": 0.1}
    model, optimizer, _ = train(0, Run(steps=1, precision="bf16", shard=shard))
    buckets = optimizer._engine.buckets
    loss_of(model, batch_of(1, 0, 0)).backward()
    optimizer.step()
    optimizer.synchronize()
    events = [
        event
        for event in optimizer._engine.store._pipeline.events
        if event[0] in ("to_tier.synchronize", "update")
    ]
    assert [what for what, *_ in events] == ["to_tier.synchronize", "update"] * (len(events) // 2)
    copies = [number for what, _, _, number in events if what != "update"]
    assert copies == sorted(copies), "in the order of arrival"
    assert sorted(set(copies)) == list(range(copies[0], copies[0] + len(buckets)))
    assert copies.count(copies[-1]) == buckets[0].owned_numel // 256, (
        "all others before the last gradient is there"
    )


FEW_FORMS = [
    *(("fp32", 1, False), ("masters", 2, True), ("masters", 3, False), ("split 8-bit", 3, True)),
    *(("bf16 states", 1, True), ("stochastic", 2, False)),
]


@pytest.mark.cases(5)
@pytest.mark.usefixtures("all_travel")
@pytest.mark.parametrize(
    ("form", "stage", "overlap"),
    some(itertools.product(FORMS, (1, 2, 3), (False, True)), FEW_FORMS),
)
def test_steps_on_gradients_that_travel_have_the_same_bits(
    form: str, stage: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision, adam = FORMS[form]
    run = Run(0, 2, 1, precision, shard={"clip_grad_norm": 0.5}, adam={"lr": 1e-2} | adam)
    expected = hashes_of(0, 1, [run])
    small_chunks(monkeypatch)
    tier_with(monkeypatch, late=True)
    offload = GRADS | ({"params": "cpu"} if stage == 3 else {})
    run = replace(run, stage=stage, shard=run.shard | {"offload": offload, "overlap_step": overlap})
    assert hashes_of(0, 1, [run]) == expected


class _Unwaited(Wrapped):
    """A tier whose pipeline takes every gradient for there."""

    def pipeline(self, pipeline: Any) -> Any:
        class Pipeline(Wrapped):
            def begin(self, *arguments: Any, arrivals: Any, **options: Any) -> None:
                pipeline.begin(*arguments, **options)

        return Pipeline(pipeline)


@pytest.mark.usefixtures("all_travel")
def test_a_step_that_does_not_wait_for_a_gradient_changes_the_hash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of an overlapped step the next backward waits, sooner or later."""
    run = Run(steps=3, precision="bf16")
    expected = hash_of_training(*train(0, run)[:2])
    run.shard["offload"] = GRADS
    for wrap, same in ((Wrapped, True), (_Unwaited, False)):
        with monkeypatch.context() as patch:
            tier_with(patch, wrap, late=True)
            assert (hash_of_training(*train(0, run)[:2]) == expected) == same


@pytest.mark.usefixtures("all_travel")
@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_of_a_gradient_that_travels_is_the_step_s(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(steps=0, precision="bf16", shard={"offload": GRADS, "overlap_step": overlap})
    log: list[str] = []
    with monkeypatch.context() as patch:
        tier_with(patch, lambda tier: Watched(tier, log))
        train(0, run)
    # of the last gradient
    tier_with(monkeypatch, late=True, failing_copy=len(log) - log.count("to_tier.synchronize") + 4)
    model, optimizer, _ = train(0, run)
    loss_of(model, batch_of(0, 0, 0)).backward()
    if overlap:
        optimizer.step()
    for call in (optimizer.synchronize if overlap else optimizer.step, optimizer.step):
        with pytest.raises(
            StepError, match=r"HostTier.to_tier: copy \d+ of \d+ bytes failed \(a planted fault\)"
        ):
            call()


# --- gradients ------------------------------------------------------------------------------------


def _moved(
    rank: int, world_size: int, offload: dict[str, Any], accumulate: int
) -> list[tuple[int, int, int]]:
    """Bytes to the tier in each backward and in the step, beside the elements that leave; and on
    the device after backward.
    """
    shard = {"offload": offload, "sync_each": True, "grad_dtype": "bf16", "units": 10**9}
    model, optimizer, _ = train(
        rank, Run(stage=2, steps=1, precision="bf16", accumulate=accumulate, shard=shard)
    )
    (bucket,) = optimizer._engine.buckets
    copies = optimizer._engine.store.copies
    cut = bucket.owned_numel - bucket.host_grad.numel()
    assert (
        cut == bucket.owned_numel - round(offload.get("ratio", 1) * bucket.owned_numel / 256) * 256
    )
    found = []
    for micro in range(accumulate + 1):
        before = copies.bytes_to_tier
        if micro < accumulate:
            loss_of(model, batch_of(3, micro, rank)).backward()
        else:
            optimizer.step()
        held = sum(
            line.bytes
            for line in shardcore.memory_report(model).lines
            if line.kind == "gradients" and line.tier == "device"
        )
        found.append((copies.bytes_to_tier - before, bucket.owned_numel - cut, held - 2 * cut))
    return found


@pytest.mark.parametrize("offload", [GRADS, GRADS | {"ratio": 0.37}])
def test_gradients_leave_in_backward_and_their_memory_is_given_back(
    offload: dict[str, Any],
) -> None:
    """What is added travels in float32, whatever grad_dtype is; nothing travels in the step,
    since masters are there.
    """
    for world_size, accumulate in ((1, 1), (2, 2)):
        for backward, *others, step in run_ranks(world_size, _moved, offload, accumulate):
            leaves = backward[1]
            assert leaves > 0
            assert backward == (2 * leaves, leaves, 0)
            assert others == [(4 * leaves, leaves, 0)] * (accumulate - 1)
            assert step == (0, leaves, 0)


def test_the_latest_copies_of_gradients_that_the_waits_allow_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for accumulate, precision in ((1, "fp32"), (2, "bf16")):
        run = Run(steps=3, accumulate=accumulate, precision=precision, shard={"grad_dtype": "bf16"})
        expected = hash_of_training(*train(0, run)[:2])
        run.shard["offload"] = GRADS | {"ratio": 0.6}
        with monkeypatch.context() as patch:
            tier_with(patch, late=True)
            assert hash_of_training(*train(0, run)[:2]) == expected


@pytest.mark.parametrize("call", ["to_tier.wait", "to_tier.synchronize"])
def test_a_wait_for_a_gradient_that_is_left_out_changes_the_hash(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(steps=3, accumulate=2, precision="bf16")
    expected = hash_of_training(*train(0, run)[:2])
    run.shard["offload"] = GRADS
    tier_with(monkeypatch, lambda tier: Watched(tier, [], lambda made: made == call), late=True)
    assert hash_of_training(*train(0, run)[:2]) != expected


def test_a_gradient_leaves_while_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two on their way; for the last ones the next backward waits."""
    log: list[str] = []
    tier_with(monkeypatch, lambda tier: Watched(tier, log))
    model, optimizer, _ = train(0, Run(steps=2, shard={"offload": GRADS}))
    assert [bucket.owned_numel for bucket in optimizer._engine.buckets] == [1024, 3072, 3072, 3072]
    for index, block in enumerate(model.blocks):
        # the unit's last gradient but one
        block.norm.weight.register_hook(lambda _, index=index: log.append(f"block {index}"))
    log.clear()
    loss_of(model, batch_of(0, 0, 0)).backward()
    waits = ["to_tier.wait", "to_tier"]
    assert log[:2] == ["to_tier.wait"] * 2, "for those of the backward before"
    assert log[2:] == ["block 2", "to_tier", "block 1", "to_tier", "block 0", *waits, *waits]


@pytest.mark.cases(1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_arrive_in_parts_and_backwards_that_fail(world_size: int) -> None:
    common = {"offload": GRADS | {"ratio": 0.6}}
    for precision, options in (("fp32", {"grad_dtype": "bf16"}), ("bf16", {"accumulate": 2})):
        places = [{}, common]
        hashes = {
            run_ranks(world_size, _in_parts, 2 + world_size % 2, precision, options | place)[0]
            for place in places
        }
        assert len(hashes) == 1


def _fail(grad: torch.Tensor) -> None:
    raise RuntimeError("planted")


def _in_parts(
    rank: int, world_size: int, stage: int, precision: str, options: dict[str, Any]
) -> str:
    torch.manual_seed(0)
    accumulate = options.pop("accumulate", 1)
    run = Run(
        stage=stage,
        precision=precision,
        shard={"sync_each": False, **options},
        accumulate=accumulate,
    )
    model, optimizer, _ = train(rank, run, Reused())
    if world_size == 1:
        handle = model.blocks[1].down.weight.register_hook(_fail)  # the unit behind is on its way
        with pytest.raises(RuntimeError, match="planted"):
            loss_of(model, batch_of(5, 0, 0)).backward()
        handle.remove()
        optimizer.zero_grad()
        stepped(model, optimizer, 0, 6)
    return hash_of_training(model, optimizer)
