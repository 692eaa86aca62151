"""A step on the cpu tier: what moves, what overlaps, and waits, copies, pinned memory or RAM that are missing."""

import functools
import logging
import mmap
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from shardcore._native import _C
from shardcore.distributed.machine import free_bytes
from shardcore.engine.cpu_store import CpuStore, staging_bytes
from shardcore.estimate import predict
from tests.engine.models import Run, batch_of, hash_of_training, loss_of, make_net, train
from tests.ranks import run_ranks
from tests.support.copies import simulated_tier

CPU_TIER = {"optimizer": "cpu"}
STEPS = 3


class Wrapped:
    """A tier that tests look into, or change."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def pipeline(self, pipeline: Any) -> Any:
        """What is to take the place of the OffloadPipeline of this tier."""
        return pipeline


def tier_with(patch: pytest.MonkeyPatch, wrap: Callable[[Any], Any] = lambda tier: tier, **simulated: Any) -> None:
    """Let every CpuStore made from now on have a tier of the CPU, simulated if asked; what `wrap` returns may be Wrapped."""
    tier_of, pipeline_of = _C.HostTier, _C.OffloadPipeline

    def make(device: torch.device, *arguments: Any) -> Any:
        return wrap(simulated_tier(*arguments, **simulated) if simulated else tier_of(device, *arguments))

    def make_pipeline(tier: Any, places: int) -> Any:
        return tier.pipeline(pipeline_of(tier._tier, places)) if isinstance(tier, Wrapped) else pipeline_of(tier, places)

    patch.setattr(_C, "HostTier", make)
    patch.setattr(_C, "OffloadPipeline", make_pipeline)


def small_chunks(patch: pytest.MonkeyPatch) -> None:
    """Let each bucket have several chunks, so that they are on their way at once."""
    patch.setattr(CpuStore.__init__, "__defaults__", (None, 256))


def hash_after(**shard: Any) -> str:
    return hash_of_training(*train(0, Run(stage=0, steps=STEPS, shard=shard))[:2])  # all buckets in one call of the store


class Watched(Wrapped):
    """A tier whose copies and waits are written down; `unwaited` events, of copies outside of steps, wait for nothing."""

    def __init__(self, tier: Any, log: list[str], leave_out: Callable[[str], bool] = lambda _: False) -> None:
        super().__init__(tier)
        self._log, self._leave_out, self._count = log, leave_out, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tier, name)
        if name not in ("to_tier", "from_tier"):
            return method

        def copy(dst: torch.Tensor, src: torch.Tensor) -> Any:
            self._log.append(name)
            return self.event(method(dst, src), name)

        return copy

    def event(self, event: Any, which: str) -> Any:
        return WatchedEvent(event, which, self._log, self._leave_out)

    def pipeline(self, pipeline: Any) -> Any:
        return WatchedPipeline(pipeline, self, self._log)


class WatchedPipeline:
    """A pipeline whose events are written down when someone has waited for them."""

    def __init__(self, pipeline: Any, tier: Watched, log: list[str]) -> None:
        self._pipeline, self._tier, self._log, self._told = pipeline, tier, log, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def begin(self, *arguments: Any, **options: Any) -> None:
        self._pipeline.begin(*arguments, **options)
        self._told = 0

    def _tell(self) -> None:
        events = self._pipeline.events
        self._log += [what for what, *_ in events[self._told :]]
        self._told = len(events)

    def wait_fetched(self, count: int) -> None:
        self._pipeline.wait_fetched(count)
        self._tell()

    def wait_updated(self, first: int, last: int) -> Any:
        left = self._pipeline.wait_updated(first, last)
        self._tell()
        return None if left is None else self._tier.event(left, "from_tier")


class WatchedEvent:
    def __init__(self, event: Any, which: str, log: list[str], leave_out: Callable[[str], bool]) -> None:
        self._event, self._which, self._log, self._leave_out = event, which, log, leave_out

    def _wait(self, how: str) -> None:
        call = f"{self._which}.{how}"
        self._log.append(call)
        if not self._leave_out(call):
            getattr(self._event, how)()

    def synchronize(self) -> None:
        self._wait("synchronize")

    def wait(self) -> None:
        self._wait("wait")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2])
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


def _with_late_copies(rank: int, world_size: int, stage: int, offload: Any, lazy: bool) -> str:
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch)
        tier_with(patch, late=True)
        run = Run(stage, STEPS, shard={"offload": offload, "overlap_step": lazy})
        return hash_of_training(*train(rank, run)[:2])


@pytest.mark.parametrize("lazy", [False, True])
def test_what_ranks_gather_has_come_from_the_tier(lazy: bool) -> None:
    """Copies are made only when someone waits for them; a gather that does not wait sends the weights of before."""
    assert run_ranks(2, _with_late_copies, 1, CPU_TIER, lazy) == run_ranks(2, _with_late_copies, 1, None, False)


def test_a_wait_for_the_last_weights_that_is_left_out_changes_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
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
    model, optimizer, _ = train(0, Run(stage=0, steps=1, precision="bf16", shard={"offload": CPU_TIER, "units": 10**9}))
    log.clear()
    loss_of(model, batch_of(1, 0, 0)).backward()
    optimizer.step()
    text = " ".join(log)
    # Two come; then for each chunk: wait for it, Adam, send it back, wait for the place of the one after the next, fetch that.
    chunks = log.count("adam")
    assert chunks > 6
    steady = "to_tier.synchronize adam from_tier from_tier.synchronize to_tier "
    assert text.startswith("from_tier.synchronize to_tier from_tier.synchronize to_tier " + steady * (chunks - 2))
    assert text.endswith("to_tier.synchronize adam from_tier to_tier.synchronize adam from_tier from_tier.wait")


def test_a_failed_copy_ends_the_step_with_nothing_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)
    tier_with(monkeypatch, failing_copy=20)
    model, optimizer, _ = train(0, Run(stage=0, steps=0, shard={"offload": CPU_TIER}))
    loss_of(model, batch_of(0, 0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"HostTier.\w+: copy \d+ of \d+ bytes failed \(a planted fault\)"):
        optimizer.step()
    copies = optimizer._engine.store.copies
    moved = copies.bytes_to_tier, copies.bytes_from_tier
    with pytest.raises(RuntimeError, match="a planted fault"):
        optimizer.step()  # goes on failing: weights and states no longer belong together
    assert moved[0] <= copies.bytes_to_tier


def test_no_step_allocates_in_the_tier_and_all_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    empty = _C.HostTier.empty
    monkeypatch.setattr(_C.HostTier, "empty", lambda self, *a, **k: (taken.append(1), empty(self, *a, **k))[1])
    for precision in ("fp32", "bf16"):
        model, optimizer, _ = train(0, Run(steps=0, precision=precision, accumulate=2, shard={"offload": CPU_TIER}))
        made = len(taken)
        for step in range(3):
            with shardcore.no_sync(model):  # float32 gradients where they were bfloat16
                loss_of(model, batch_of(step, 0, 0)).backward()
            loss_of(model, batch_of(step, 1, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(taken) == made
        store = optimizer._engine.store
        states = sum(size for bucket in optimizer._engine.buckets for _, _, size in store.stored(bucket))
        assert store.scratch_bytes == staging_bytes(optimizer._engine.buckets)
        assert store.copies.bytes_allocated == states + store.scratch_bytes
        predicted = predict(make_net(), None, 2, world_size=1, precision=precision, accumulate=2, offload=CPU_TIER)
        assert predicted.resting.by_tier["cpu"] == store.copies.bytes_allocated


# --- pinned memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused_by", ["system", "limit", "nobody"])
def test_memory_that_cannot_be_pinned_is_pageable_with_one_warning(
    refused_by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = hash_after()
    place = 5 * mmap.PAGESIZE  # 24 * 37 weights and more, in float32
    tier_with(monkeypatch, pinnable_bytes=1 << 30 if refused_by != "system" else 2 * place)
    options = CPU_TIER | ({"pin_memory_limit": 2 * place} if refused_by == "limit" else {})
    with caplog.at_level(logging.WARNING, logger="shardcore"):
        model, optimizer, _ = train(0, Run(steps=STEPS, shard={"offload": options, "units": 10**9}))
    assert hash_of_training(model, optimizer) == expected
    copies = optimizer._engine.store.copies
    staging = optimizer._engine.store.scratch_bytes
    warnings = [record.getMessage() for record in caplog.records if "pinned" in record.getMessage()]
    if refused_by == "nobody":
        assert (warnings, copies.bytes_refused) == ([], 0)
        assert staging <= copies.bytes_pinned < staging + 5 * mmap.PAGESIZE
    else:
        why = "the simulated system locks no more" if refused_by == "system" else f"pin_memory_limit is {2 * place} bytes"
        assert copies.bytes_pinned <= 2 * place
        assert copies.bytes_refused > 0
        (text,) = warnings
        for part in (f"{copies.bytes_refused} of ", "do not overlap", why, "ulimit -l", "pin_memory_limit"):
            assert part in text


def test_states_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """They never travel; locking them would only take memory from others."""
    tier_with(monkeypatch, pinnable_bytes=1 << 30)
    _, optimizer, _ = train(0, Run(steps=0, shard={"offload": CPU_TIER}))
    store = optimizer._engine.store
    assert store.copies.bytes_pinned < store.scratch_bytes + 5 * mmap.PAGESIZE < store.copies.bytes_allocated


def test_pin_memory_false_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tier_with(monkeypatch, pinnable_bytes=1 << 30)
    _, optimizer, _ = train(0, Run(steps=0, shard={"offload": CPU_TIER | {"pin_memory": False}}))
    copies = optimizer._engine.store.copies
    assert (copies.bytes_pinned, copies.bytes_refused) == (0, 0)


# --- RAM --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path

    return write


def test_free_memory_is_the_least_of_what_machine_and_groups_have(machine: Callable[[str, str], Path]) -> None:
    root = machine("other", "")
    assert free_bytes(root) is None
    machine("proc/meminfo", "MemTotal:       64 kB\nMemFree:         1 kB\nMemAvailable:   40 kB\n")
    assert free_bytes(root) == 40 * 1024
    machine("proc/self/cgroup", "5:cpu:/a\n0::/jobs/mine\n")
    machine("sys/fs/cgroup/jobs/mine/memory.max", "max\n")
    machine("sys/fs/cgroup/jobs/mine/memory.current", "5000\n")
    assert free_bytes(root) == 40 * 1024
    machine("sys/fs/cgroup/jobs/memory.max", "30000\n")  # of the group above
    machine("sys/fs/cgroup/jobs/memory.current", "20000\n")
    assert free_bytes(root) == 10000
    machine("sys/fs/cgroup/jobs/memory.stat", "anon 9000\ninactive_file 4000\n")  # files that the kernel can drop
    assert free_bytes(root) == 14000
    machine("sys/fs/cgroup/jobs/mine/memory.max", "5500\n")
    assert free_bytes(root) == 500
    machine("sys/fs/cgroup/jobs/mine/memory.current", "6000\n")
    assert free_bytes(root) == 0


def test_free_memory_of_the_older_groups(machine: Callable[[str, str], Path]) -> None:
    root = machine("proc/meminfo", "MemAvailable:   40 kB\n")
    machine("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/outside/of/the/container\n")
    machine("sys/fs/cgroup/memory/memory.limit_in_bytes", "9000\n")
    machine("sys/fs/cgroup/memory/memory.usage_in_bytes", "8000\n")
    machine("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 100\n")
    assert free_bytes(root) == 1100


def test_free_memory_of_this_machine_is_known() -> None:
    free = free_bytes()
    assert free is None or 0 < free < 1 << 50


def _short(rank: int, world_size: int, share: float, offload: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        needed = []
        host_bytes = shardcore.api.host_bytes
        patch.setattr("shardcore.api.host_bytes", lambda *a: needed.append(host_bytes(*a)) or needed[-1])
        patch.setattr("shardcore.distributed.machine.free_bytes", lambda: int(share * world_size * sum(needed)))
        model = make_net()
        before = [(id(p), p.data_ptr()) for p in model.parameters()]
        try:
            shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 2, offload=offload, precision="bf16")
        except MemoryError as error:
            assert [(id(p), p.data_ptr()) for p in model.parameters()] == before
            text = str(error)
            for part in (f"needs {world_size * needed[0]} bytes", f"for the {world_size} ranks of {socket.gethostname()}"):
                assert part in text
            assert f"has {int(share * world_size * needed[0])} bytes" in text
            return "short"
        return "enough"


@pytest.mark.parametrize("world_size", [1, 2])
def test_too_little_memory_is_said_before_anything_is_changed(world_size: int) -> None:
    """The ranks of a machine share it: what is enough for one of two is too little."""
    for share, offload_to, answer in ((1.0, CPU_TIER, "enough"), (0.9, CPU_TIER, "short"), (0.0, None, "enough")):
        assert run_ranks(world_size, functools.partial(_short), share, offload_to) == [answer] * world_size
