"""A step on the cpu tier: the same bits wherever states lie; what moves, what overlaps, waits,
copies and pinned memory.
"""

import itertools
import logging
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from shardcore._native import _C
from shardcore.distributed.machine import own_cores
from shardcore.engine.states import Span
from shardcore.estimate import predict
from tests.support.choice import EVERY, part, some
from tests.support.models import Run, batch_of, hash_of_training, loss_of, make_net, stepped, train
from tests.support.ranks import run_ranks
from tests.support.tiers import (
    CPU_TIER,
    GRADS,
    PARAMS,
    SPLITS,
    Watched,
    fits,
    hashes_of,
    partly_frozen,
    small_chunks,
    tier_with,
)

STEPS = 3


def hash_after(**shard: Any) -> str:
    # all buckets in one call of the store
    return hash_of_training(*train(0, Run(stage=0, steps=STEPS, shard=shard))[:2])


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16")])
def test_the_latest_copies_that_the_waits_allow_give_the_same_bits(
    stage: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(stage=stage, steps=STEPS, precision=precision)
    expected = hash_of_training(*train(0, run)[:2])
    small_chunks(monkeypatch)
    tier_with(monkeypatch, late=True)
    run.shard["offload"] = CPU_TIER
    assert hash_of_training(*train(0, run)[:2]) == expected
    run.shard["overlap_step"] = True  # on its worker
    assert hash_of_training(*train(0, run)[:2]) == expected


def _with_late_copies(rank: int, world_size: int, stage: int, offload: Any, overlap: bool) -> str:
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch)
        tier_with(patch, late=True)
        run = Run(stage, STEPS, shard={"offload": offload, "overlap_step": overlap})
        return hash_of_training(*train(rank, run)[:2])


@pytest.mark.parametrize(("offload", "overlap"), [(CPU_TIER, True), (GRADS, False)])
def test_what_ranks_gather_was_copied_from_the_tier(offload: dict[str, Any], overlap: bool) -> None:
    """Copies are made only when someone waits for them; a gather that does not wait sends the
    weights of before.
    """
    assert run_ranks(2, _with_late_copies, 1, offload, overlap) == run_ranks(
        2, _with_late_copies, 1, None, False
    )


def test_a_wait_for_the_last_weights_that_is_left_out_changes_the_hash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The waits of a step itself: tests/cpp/offload_pipeline_test.cpp."""
    expected = hash_after()
    seen = 0

    def leave_out(made: str) -> bool:
        nonlocal seen
        seen += made == "from_tier.wait"
        return made == "from_tier.wait" and seen == 2

    small_chunks(monkeypatch)
    tier_with(monkeypatch, lambda tier: Watched(tier, [], leave_out), late=True)
    assert hash_after(offload=CPU_TIER) != expected
    assert seen >= 2


def test_both_directions_are_in_flight_while_adam_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    small_chunks(monkeypatch)
    tier_with(monkeypatch, lambda tier: Watched(tier, log))
    model, optimizer, _ = train(
        0, Run(stage=0, steps=1, precision="bf16", shard={"offload": CPU_TIER, "units": 10**9})
    )
    log.clear()
    loss_of(model, batch_of(1, 0, 0)).backward()
    optimizer.step()
    text = " ".join(log)
    # Two come; then for each chunk: wait for it, Adam, send it back, wait for the place of the one
    # after the next, fetch that.
    chunks = log.count("update")
    assert chunks > 6
    steady = "to_tier.synchronize update from_tier from_tier.synchronize to_tier "
    assert text.startswith(
        "from_tier.synchronize to_tier from_tier.synchronize to_tier " + steady * (chunks - 2)
    )
    assert text.endswith(
        "to_tier.synchronize update from_tier to_tier.synchronize update from_tier from_tier.wait"
    )


def test_a_failed_copy_ends_the_step_with_nothing_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_chunks(monkeypatch)
    tier_with(monkeypatch, failing_copy=20)
    model, optimizer, _ = train(0, Run(stage=0, steps=0, shard={"offload": CPU_TIER}))
    loss_of(model, batch_of(0, 0, 0)).backward()
    with pytest.raises(
        RuntimeError, match=r"HostTier.\w+: copy \d+ of \d+ bytes failed \(a planted fault\)"
    ):
        optimizer.step()
    copies = optimizer._engine.store.copies
    moved = copies.bytes_to_tier, copies.bytes_from_tier
    with pytest.raises(RuntimeError, match="a planted fault"):
        optimizer.step()  # goes on failing: weights and states no longer belong together
    assert moved[0] <= copies.bytes_to_tier


def test_no_step_allocates_in_the_tier_and_all_is_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    empty = _C.HostTier.empty
    monkeypatch.setattr(
        _C.HostTier, "empty", lambda self, *a, **k: (taken.append(1), empty(self, *a, **k))[1]
    )
    for precision in ("fp32", "bf16"):
        model, optimizer, _ = train(
            0, Run(steps=0, precision=precision, accumulate=2, shard={"offload": CPU_TIER})
        )
        made = len(taken)
        for step in range(3):
            with shardcore.no_sync(model):  # float32 gradients where they were bfloat16
                loss_of(model, batch_of(step, 0, 0)).backward()
            loss_of(model, batch_of(step, 1, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(taken) == made
        store = optimizer._engine.store
        states = sum(
            size for bucket in optimizer._engine.buckets for _, _, size in store.stored(bucket)
        )
        assert store.copies.bytes_allocated == states + store.scratch_bytes
        predicted = predict(
            make_net(), None, 2, world_size=1, precision=precision, accumulate=2, offload=CPU_TIER
        )
        assert predicted.resting.by_tier["cpu"] == store.copies.bytes_allocated


# --- pinned memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("refused_by", ["system", "limit", "nobody", "options"])
def test_memory_that_cannot_be_pinned_is_pageable_with_one_warning(
    refused_by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What travels is pinned, and no states: locking them would only take memory from others."""
    expected = hash_after()
    place = 5 * mmap.PAGESIZE  # 24 * 37 weights and more, in float32
    tier_with(monkeypatch, pinnable_bytes=1 << 30 if refused_by != "system" else 2 * place)
    options = CPU_TIER | {
        "limit": {"pin_memory_limit": 2 * place},
        "options": {"pin_memory": False},
    }.get(refused_by, {})
    with caplog.at_level(logging.WARNING, logger="shardcore"):
        model, optimizer, _ = train(0, Run(steps=STEPS, shard={"offload": options, "units": 10**9}))
    assert hash_of_training(model, optimizer) == expected
    copies = optimizer._engine.store.copies
    staging = optimizer._engine.store.scratch_bytes
    warnings = [record.getMessage() for record in caplog.records if "pinned" in record.getMessage()]
    if refused_by in ("nobody", "options"):
        assert (warnings, copies.bytes_refused) == ([], 0)
        expected_bytes = staging if refused_by == "nobody" else 0
        assert (
            expected_bytes
            <= copies.bytes_pinned
            < expected_bytes + 5 * mmap.PAGESIZE
            < copies.bytes_allocated
        )
    else:
        why = (
            "the simulated system locks no more"
            if refused_by == "system"
            else f"pin_memory_limit is {2 * place} bytes"
        )
        assert copies.bytes_pinned <= 2 * place
        assert copies.bytes_refused > 0
        (text,) = warnings
        for part in (
            f"{copies.bytes_refused} of ",
            "do not overlap",
            why,
            "ulimit -l",
            "pin_memory_limit",
        ):
            assert part in text


def _policy_at(tensor: torch.Tensor) -> str:
    """Of memory: "default", or such as "interleave:0-1", of which a machine with one node shows
    "interleave:0".
    """
    areas = [line.split()[:2] for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    return max(
        (int(start, 16), policy) for start, policy in areas if int(start, 16) <= tensor.data_ptr()
    )[1]


@pytest.mark.parametrize("nodes", [(0, 1), (0,), (1022, 1023), ()])
def test_states_lie_on_the_nodes_of_the_cores_that_update_them(
    nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No node is the twin; and the last two are none of this machine's, so that the system
    refuses.
    """
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel knows no NUMA nodes")
    probe = _C.HostTier(torch.device("cpu"))
    probe.empty(1, torch.uint8, nodes=[0])
    if probe.node_refusal:
        pytest.skip(f"this system does not place memory: {probe.node_refusal}")
    expected = hash_after()
    cores = own_cores()
    monkeypatch.setattr(
        "shardcore.distributed.machine.numa_nodes", lambda root: dict.fromkeys(nodes, cores)
    )
    with caplog.at_level(logging.WARNING, logger="shardcore"):
        model, optimizer, _ = train(0, Run(steps=STEPS, shard={"offload": CPU_TIER}))
    store = optimizer._engine.store
    kept = [
        store._states.states_of(bucket, 0, bucket.host_numel)
        for bucket in optimizer._engine.buckets
    ]
    found = {_policy_at(flat).partition(":")[0] for states in kept for flat in states.values()}
    assert found == {{(0, 1): "interleave", (0,): "prefer"}.get(nodes, "default")}
    assert {_policy_at(flat) for flat in store._grads + store._weights} == {"default"}, (
        "near the device"
    )
    refusals = [record.getMessage() for record in caplog.records if "NUMA" in record.getMessage()]
    assert len(refusals) == (nodes == (1022, 1023))
    assert all("(mbind: Invalid argument)" in text for text in refusals)
    assert hash_of_training(model, optimizer) == expected


OFFLOADS: list[dict[str, Any]] = [
    *(CPU_TIER | {"ratio": ratio} for ratio in (0, 0.37, 0.8)),
    GRADS,
    *(GRADS | {"ratio": ratio} for ratio in (0.37, 0.8)),
    PARAMS,
    PARAMS | {"ratio": 0},
    *(PARAMS | GRADS | {"ratio": ratio} for ratio in (0.37, 1)),
]
ORDERS = [(1, "fp32", 1, None), (2, "bf16", 2, True)]
MORE_ORDERS = [
    (1, "bf16", 2, True),
    (1, "bf16", 1, None),
    (2, "fp32", 2, False),
    (2, "bf16", 1, None),
    (3, "fp16", 2, True),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("world_size", "precision", "accumulate", "sync_each"), some(ORDERS + MORE_ORDERS, ORDERS)
)
@pytest.mark.parametrize("every", EVERY)
def test_one_hash_wherever_things_lie(
    world_size: int, precision: str, accumulate: int, sync_each: bool | None, every: int
) -> None:
    common: dict[str, Any] = {"clip_grad_norm": 0.5, "sync_each": sync_each}
    if precision == "fp16":
        common["loss_scale"] = 1024.0
    places = [
        (0, None),
        *(
            (stage, offload)
            for stage in (0, 1, 2, 3)
            for offload in OFFLOADS
            if fits(stage, offload)
        ),
    ]
    places = places if world_size == 1 else part(places, every, 0)
    runs = [
        Run(
            stage,
            2,
            accumulate,
            precision,
            shard=common | {"offload": offload, "units": (500, "auto")[stage % 2]} | overlap,
        )
        for (stage, offload), overlap in zip(
            places, itertools.cycle([{}, {"overlap_step": True}]), strict=False
        )
    ]
    hashes = run_ranks(world_size, hashes_of, runs)
    assert [
        place for place, value in zip(places, hashes[0], strict=True) if value != hashes[0][0]
    ] == []
    assert all(of_rank == hashes[0] for of_rank in hashes)


@pytest.mark.cases(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_was_checked_is_what_is_taken_and_no_step_takes_more(
    accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []
    monkeypatch.setattr("shardcore.api.short_of_memory", lambda comm, needs: needed.append(needs))
    for offload in SPLITS:
        shard = {"offload": offload, "grad_dtype": "bf16"}
        model, optimizer, _ = train(0, Run(3, 0, accumulate, "bf16", shard=shard), partly_frozen())
        copies = optimizer._engine.store.copies
        for step in range(2):
            assert (
                copies.bytes_allocated
                == needed[-1]
                == shardcore.memory_report(model).by_tier.get("cpu", 0)
            ), offload
            for micro in range(accumulate):
                loss_of(model, batch_of(step, micro, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        predicted = predict(
            partly_frozen(), None, 3, world_size=1, precision="bf16", accumulate=accumulate, **shard
        )
        assert predicted.resting.by_tier.get("cpu", 0) == needed[-1], offload


def test_a_step_like_the_last_one_cuts_and_views_nothing_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, _ = train(0, Run(steps=2, shard={"offload": CPU_TIER | {"ratio": 0.5}}))
    store = optimizer._engine.store
    kept = [*store.on_device._lists.values(), *store._parts.values()]
    monkeypatch.setattr(Span, "part", None)
    stepped(model, optimizer, 0, 2)
    assert all(
        a is b
        for a, b in zip(
            [*store.on_device._lists.values(), *store._parts.values()], kept, strict=True
        )
    )
