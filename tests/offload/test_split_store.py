"""A share of the states on the device: `ratio`, and what the first steps measured for `"ratio":
"auto"`.
"""

import logging
from typing import Any

import pytest
import torch

import shardcore
from shardcore.engine.states import DeviceStore
from shardcore.offload.cpu_store import CpuStore
from shardcore.offload.split_store import (
    MEASURED_STEPS,
    RatioTuner,
    SplitStore,
    choose_ratio,
    room_above_peak,
)
from tests.support.models import Run, hash_of_training, stepped, train
from tests.support.ranks import run_ranks
from tests.support.schedules import SlowStore, start
from tests.support.tiers import CPU_TIER, GRADS, PARAMS, Watched, small_chunks, tier_with

AUTO = {"ratio": "auto", "device_memory_limit": 1 << 30}


def test_the_least_share_of_the_device_that_hides_and_fits() -> None:
    def kept(ratio: float) -> int:
        return round(1000 * (1 - ratio))

    assert choose_ratio(2.0, 0, kept) == choose_ratio(1.0, 1000, kept) == 1.0
    assert choose_ratio(0.51, 1000, kept) == 0.5  # rounded to more on the device
    assert choose_ratio(0.0, 1000, kept) == 0.0
    assert choose_ratio(0.5, 250, kept) == 0.75  # the limit comes first
    assert choose_ratio(0.0, 0, kept) == 1.0


def _chosen(
    rank: int, world_size: int, stage: int, offload: Any, limit: int
) -> tuple[str, list[float], int]:
    """Rank r's forward takes 0.3 s and the CPU's step r + 1 half seconds."""
    ratios: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        patch.setattr(RatioTuner, "end_forward", lambda tuner: setattr(tuner, "_forward_s", 0.3))
        patch.setattr(
            SplitStore, "seconds", lambda store: calls.append(1) or len(calls) * 0.5 * (rank + 1)
        )
        resplit = SplitStore.resplit
        patch.setattr(
            SplitStore,
            "resplit",
            lambda store, ratio: (ratios.append(ratio), resplit(store, ratio))[1],
        )
        shard = {
            "offload": offload | {"device_memory_limit": limit},
            "clip_grad_norm": 0.5,
            "overlap_step": True,
        }
        model, optimizer, _ = train(rank, Run(stage, MEASURED_STEPS + 3, 2, "bf16", shard=shard))
    report = shardcore.memory_report(model)
    kept = sum(
        line.bytes
        for line in report.lines
        if line.kind in ("master", "states") and line.tier == "device"
    )
    assert optimizer._engine.store.copies.bytes_allocated == report.by_tier["cpu"]
    return hash_of_training(model, optimizer), ratios, kept


def _plain(rank: int, world_size: int) -> str:
    run = Run(2, MEASURED_STEPS + 3, 2, "bf16", shard={"clip_grad_norm": 0.5})
    return hash_of_training(*train(rank, run)[:2])


@pytest.mark.cases(1)
@pytest.mark.parametrize(("stage", "tiers"), [(2, CPU_TIER), (3, GRADS | PARAMS)])
def test_ranks_choose_one_ratio_and_the_bits_stay(stage: int, tiers: dict[str, Any]) -> None:
    expected = run_ranks(2, _plain)
    # no bucket has so many blocks that 5/64 of them were one
    for limit, ratio in ((1 << 30, 19 / 64), (0, 59 / 64)):
        for rank, (found, ratios, kept) in enumerate(
            run_ranks(2, _chosen, stage, AUTO | tiers, limit)
        ):
            assert ratios == [ratio]
            assert (kept > 0) == (limit > 0)
            assert found == expected[rank]


def test_what_is_measured_chooses_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shardcore"):
        model, optimizer, _ = train(
            0, Run(steps=MEASURED_STEPS + 1, shard={"offload": {"optimizer": "cpu"} | AUTO})
        )
    (text,) = [record.getMessage() for record in caplog.records if "auto" in record.getMessage()]
    engine = optimizer._engine
    kept = sum(
        line.bytes
        for line in shardcore.memory_report(model).lines
        if (line.kind, line.tier) == ("states", "device")
    )
    assert f"keeps {kept} bytes of states" in text
    assert 0 < engine.ratio_tuner._forward_s < 1
    assert 0 < engine.ratio_tuner._step_s < 1


@pytest.mark.more
def test_a_slow_link_keeps_more_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk, so nothing overlaps: gradients and weights take 40 ms each to come, weights 40
    to go back; forward 20.
    """
    (bucket,) = train(0, Run(steps=0, shard={"units": 10**9}))[1]._engine.buckets
    tier_with(monkeypatch, gigabytes_per_second=4 * bucket.owned_numel / 0.04 / 1e9)
    monkeypatch.setattr(RatioTuner, "end_forward", lambda tuner: setattr(tuner, "_forward_s", 0.02))
    shares = []
    monkeypatch.setattr(SplitStore, "resplit", lambda store, ratio: shares.append(ratio))
    for overlap in (False, True):
        shard = {"offload": {"optimizer": "cpu"} | AUTO, "units": 10**9, "overlap_step": overlap}
        train(0, Run(steps=MEASURED_STEPS + 1, shard=shard))
    nothing_hidden, share = shares
    assert nothing_hidden == 0
    assert 0 < share <= 12 / 64


def _fills_the_room(
    rank: int, world_size: int, tiers: dict[str, Any]
) -> tuple[float, int, int, int]:
    """Rank r's device has (r + 1) * 20,000 bytes left at its peak. Returns the ratio, and what
    its device takes more by it.
    """
    shares = []
    shard = {"offload": tiers | {"ratio": "auto"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "shardcore.offload.split_store.room_above_peak", lambda device: (rank + 1) * 20_000.0
        )
        resplit = SplitStore.resplit
        patch.setattr(
            SplitStore,
            "resplit",
            lambda store, ratio: (shares.append(ratio), resplit(store, ratio))[1],
        )
        kept = []
        for steps in (MEASURED_STEPS, MEASURED_STEPS + 3):
            model, optimizer, _ = train(rank, Run(3, steps, 1, "bf16", shard=shard))
            kept.append(shardcore.memory_report(model).by_tier["device"])
    store = optimizer._engine.store
    return (
        shares[0],
        kept[1] - kept[0],
        store.extra_device_bytes(shares[0]),
        store.extra_device_bytes(shares[0] - 1 / 64),
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("tiers", [CPU_TIER, GRADS | PARAMS])
def test_without_a_limit_the_device_takes_what_the_peak_left_on_the_rank_with_the_least(
    tiers: dict[str, Any],
) -> None:
    """Gradients and scratch that follow the states to the device count, too."""
    first, second = run_ranks(2, _fills_the_room, tiers)
    assert first == second
    ratio, more, taken, one_share_more = first
    assert 0 < ratio < 1
    assert more <= taken <= 20_000 < one_share_more


def test_the_room_above_the_peak_leaves_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    assert room_above_peak(torch.device("cpu")) == float("inf")
    for name, value in (
        ("mem_get_info", (500, 1000)),
        ("memory_reserved", 300),
        ("max_memory_allocated", 250),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert room_above_peak(torch.device("cuda", 0)) == 450
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20, 1000))
    assert room_above_peak(torch.device("cuda", 0)) == 0


def test_an_overlapped_step_is_no_part_of_the_forward_that_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = start(0, Run(shard={"offload": CPU_TIER | AUTO}), True, late=False)
    overlap, begin, under_way = (
        optimizer._engine.overlap_step,
        RatioTuner.begin_forward,
        list[int](),
    )

    def begins(tuner: RatioTuner) -> None:
        begin(tuner)
        if tuner._begun_s is not None:
            under_way.append(len(overlap._pending))

    monkeypatch.setattr(RatioTuner, "begin_forward", begins)
    SlowStore(overlap, 0.04)
    for step in range(MEASURED_STEPS + 1):
        stepped(model, optimizer, 0, step)
    assert under_way == [0] * (MEASURED_STEPS - 1)


def _fails_while_measured(rank: int, world_size: int) -> str:
    model, optimizer = start(
        rank, Run(1, shard={"offload": {"optimizer": "cpu"} | AUTO}), True, late=False
    )
    for step in range(MEASURED_STEPS):
        if rank == 1 and step == MEASURED_STEPS - 1:
            optimizer._engine.overlap_step.store = None  # its worker fails at once
        stepped(model, optimizer, rank, step)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        optimizer.step()  # ranks choose
    return str(caught.value)


def test_a_worker_that_fails_while_it_is_timed_is_an_error_on_all_ranks() -> None:
    others, mine = run_ranks(2, _fails_while_measured)
    assert "updating the weights of the root failed" in mine
    assert "step: rank 1 refused: " in others


def test_states_that_are_moved_wrongly_change_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _plain(0, 1)
    monkeypatch.setattr("shardcore.offload.split_store.choose_ratio", lambda *_: 0.5)
    run = Run(
        2,
        MEASURED_STEPS + 3,
        2,
        "bf16",
        shard={"clip_grad_norm": 0.5, "offload": {"optimizer": "cpu"} | AUTO},
    )
    assert hash_of_training(*train(0, run)[:2]) == expected
    write = SplitStore.resplit

    def forgetful(store: SplitStore, ratio: float) -> None:
        write(store, ratio)
        next(iter(store.on_device._states.values()))["exp_avg"].zero_()

    monkeypatch.setattr(SplitStore, "resplit", forgetful)
    assert hash_of_training(*train(0, run)[:2]) != expected


# --- a share of the states ------------------------------------------------------------------------


def test_ratio_is_the_share_on_the_cpu_and_only_that_travels() -> None:
    for ratio, offload in (
        (0.0, CPU_TIER | {"ratio": 0}),
        (0.25, CPU_TIER | {"ratio": 0.25}),
        (1.0, CPU_TIER),
    ):
        model, optimizer, _ = train(
            0, Run(steps=0, precision="bf16", shard={"offload": offload, "units": 10**9})
        )
        (bucket,) = optimizer._engine.buckets
        report = shardcore.memory_report(model)
        cut = round(ratio * bucket.owned_numel / 256) * 256
        in_states = {tier: 0 for tier in ("device", "cpu")}
        for line in report.lines:
            if line.kind in ("master", "states"):
                in_states[line.tier] += line.bytes
        assert in_states == {"device": 12 * (bucket.owned_numel - cut), "cpu": 12 * cut}
        copies = optimizer._engine.store.copies
        assert copies.bytes_allocated == report.by_tier.get("cpu", 0)
        before = copies.bytes_to_tier, copies.bytes_from_tier
        stepped(model, optimizer, 0, 0)
        used = bucket.layout.slots[-1].offset + bucket.layout.slots[-1].numel
        here = max(0, used - (bucket.owned_numel - cut))  # padding at the end stays
        assert (copies.bytes_to_tier - before[0], copies.bytes_from_tier - before[1]) == (
            2 * here,
            2 * here,
        )


def test_the_device_works_while_the_first_chunks_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    small_chunks(monkeypatch)
    tier_with(monkeypatch, lambda tier: Watched(tier, log))
    step = DeviceStore.step
    monkeypatch.setattr(
        DeviceStore, "step", lambda *arguments: (log.append("device"), step(*arguments))
    )
    model, optimizer, _ = train(
        0,
        Run(
            steps=0, precision="bf16", shard={"offload": CPU_TIER | {"ratio": 0.5}, "units": 10**9}
        ),
    )
    log.clear()
    stepped(model, optimizer, 0, 0)
    assert log[:4] == ["to_tier", "to_tier", "device", "to_tier.synchronize"]


def _idle_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceStore, "step", lambda store, spans, hypers: None)


def _idle_cpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        CpuStore,
        "_steps",
        lambda store, parts, hypers, beside: (
            beside(store._part(spans, 0).on_device) for spans in parts
        ),
    )


def _cut_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """The CPU's part of gradients begins a block later than its states do."""
    patch.setattr(
        "shardcore.offload.cpu_store._grad_of", lambda bucket: (bucket.grad.roll(-256), 0)
    )


@pytest.mark.parametrize("twin", [_idle_device, _idle_cpu, _cut_elsewhere])
def test_a_split_that_forgets_a_part_changes_the_hash(
    twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(steps=2, shard={"offload": CPU_TIER | {"ratio": 0.37}})
    good = hash_of_training(*train(0, run)[:2])
    twin(monkeypatch)
    assert hash_of_training(*train(0, run)[:2]) != good
