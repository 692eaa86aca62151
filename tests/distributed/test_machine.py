"""What a rank finds on its machine: the cores and threads of its worker, and the memory that it
may take.
"""

import os
import platform
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardcore
from shardcore._native import _C
from shardcore.distributed.machine import (
    FreedMemory,
    WorkerThreads,
    cores_of_share,
    divide_by_nodes,
    format_cores,
    free_bytes,
    machine_id,
    near_cores,
    nodes_of,
    numa_nodes,
    own_cores,
    parse_cores,
    physical_cores,
    plan_worker,
    quota,
    worker_cores,
    worker_threads,
)
from shardcore.offload import cpu_store
from shardcore.offload.workers import make_worker
from tests.support.models import (
    Run,
    batch_of,
    hash_of_training,
    loss_of,
    make_net,
    micro_steps,
    stepped,
    train,
)
from tests.support.ranks import run_fresh, run_ranks
from tests.support.schedules import start
from tests.support.tiers import CPU_TIER, tier_with


def test_each_rank_keeps_a_core_and_workers_share_the_rest() -> None:
    eight, shared, apart = [list(range(8))], [list(range(8))] * 2, [[0, 1, 2], [3, 4, 5]]
    assert [worker_threads(cores, 0, None) for cores in (eight, shared, apart)] == [7, 3, 2]
    assert [worker_threads(cores, 0, 5.5) for cores in (eight, shared, apart)] == [4, 1, 1]
    assert worker_threads([[0]] * 4, 3, 0.5) == 1, "at least one"
    assert [worker_threads([[0, 1, 2, 3], [4, 5]], rank, None) for rank in range(2)] == [3, 1], (
        "each of its own cores"
    )
    assert own_cores() == sorted(os.sched_getaffinity(0))


def test_workers_stay_on_the_cores_of_their_rank(tmp_path: Path) -> None:
    def cores(of_ranks: list[list[int]], threads: int) -> list[list[int]]:
        return [worker_cores(of_ranks, rank, threads, tmp_path) for rank in range(len(of_ranks))]

    eight, some = list(range(8)), [0, 1, 2, 5, 7]
    assert cores([eight], 7) == [eight]
    assert cores([eight] * 2, 3) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert cores([some] * 2, 1) == [[0, 1], [2, 5, 7]]
    assert cores([[0, 1, 2], [3, 4, 5]], 2) == [[0, 1, 2], [3, 4, 5]], "as the launcher said"
    assert cores([[0, 1]] * 2, 1) == [[], []], (
        "as many cores as ranks: a worker could only stand in its main thread's way"
    )
    assert cores([eight] * 2, 4) == [[], []], "no core more than threads"
    assert cores([[0, 1, 2], [2, 3, 4]], 1) == [[], []], "whose is core 2?"
    for core in eight:  # packages by turns, 0 and 4 are one physical core
        folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 2}\n")
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert cores([eight] * 4, 1) == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert [cores_of_share(eight, index, 2, tmp_path) for index in range(2)] == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]
    assert physical_cores([0, 4, 1], tmp_path) == 2
    assert physical_cores([0, 4, 1], tmp_path / "unknown") == 3


def test_lists_of_cores() -> None:
    assert parse_cores("8,0-2, 1".replace(" ", "")) == [0, 1, 2, 8]
    assert format_cores([0, 1, 2, 5, 8, 9]) == "0-2,5,8-9"
    for bad in ("", "3-1", "a", "1,,2", "-1"):
        with pytest.raises(ValueError, match="expected numbers and ranges, such as 0-3,8"):
            parse_cores(bad)


FIRST, SECOND = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
ALL = sorted(FIRST + SECOND)


def test_numa_nodes_and_the_cores_near_a_device(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    for node, cores in enumerate(["0-3,8-11\n", "\n", "4-7,12-15\n"]):  # node 1 has memory alone
        folder = tmp_path / f"sys/devices/system/node/node{2 * node % 3}"
        folder.mkdir(parents=True)
        assert (numa_nodes(tmp_path), nodes_of(ALL, tmp_path)) == ({}, []), (
            "one node: nothing to choose"
        )
        assert near_cores("0000:3B:00.0", tmp_path) == []
        (folder / "cpulist").write_text(cores)
    assert numa_nodes(tmp_path) == {0: FIRST, 1: SECOND}
    assert near_cores("0000:3B:00.0", tmp_path) == SECOND
    assert near_cores("0000:01:00.0", tmp_path) == [], "an unknown device"
    (device / "numa_node").write_text("-1\n")
    assert near_cores("0000:3b:00.0", tmp_path) == [], "a virtual machine"
    assert [nodes_of(cores, tmp_path) for cores in (ALL, [3, 4], FIRST, [15], [16])] == [
        [0, 1],
        [0, 1],
        [0],
        [1],
        [],
    ]


def test_ranks_with_the_same_cores_divide_them_by_the_nodes_of_their_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert divide_by_nodes([ALL], [SECOND]) == [ALL], "one rank: both sockets"
    assert divide_by_nodes([ALL] * 3, [SECOND, FIRST, SECOND]) == [SECOND, FIRST, SECOND]
    assert divide_by_nodes([[2, 3, 4]] * 2, [FIRST, SECOND]) == [[2, 3], [4]], (
        "a job that may use these only"
    )
    assert divide_by_nodes([[2, 3], [6, 7]], [SECOND, FIRST]) == [[2, 3], [6, 7]], "each was bound"
    for near in ([FIRST, []], [[], []]):
        assert divide_by_nodes([ALL] * 2, near) == [ALL] * 2, "an unknown node"
    assert divide_by_nodes([FIRST] * 2, [FIRST, SECOND]) == [FIRST] * 2, "bound to the other node"

    def planned(near: list[list[int]], parts: int = 1) -> list[tuple[int, list[int]]]:
        """Of ranks of which `parts` have the parts of one model, and the others copies of these."""
        rows = [[machine_id(), ALL, cores] for cores in near]
        of_part = [rows[part::parts] for part in range(parts)]

        def plan(rank: int) -> tuple[int, list[int]]:
            copy, part = divmod(rank, parts)

            def gather(row: Any) -> Any:
                assert row == rows[rank]
                return of_part[part]

            def gather_parts(mine: Any) -> Any:
                assert mine == of_part[part]
                return of_part

            across = [SimpleNamespace(rank=part, gather_json=gather_parts)] if parts > 1 else []
            comm: Any = SimpleNamespace(rank=copy, gather_json=gather, across=across)
            worker = plan_worker(comm, None, torch.device("cuda", rank))
            return worker.count, list(worker.cores)

        monkeypatch.setattr(
            "shardcore.distributed.machine.near_cores", lambda address: near[int(address)]
        )
        return [plan(rank) for rank in range(len(near))]

    monkeypatch.setattr("shardcore.distributed.machine.own_cores", lambda: ALL)
    monkeypatch.setattr("shardcore.distributed.machine.quota", lambda: None)
    monkeypatch.setattr("shardcore.distributed.machine.pci_address", str)
    monkeypatch.setattr(
        "shardcore.distributed.machine._topology_of", lambda core, root: (0, core, core)
    )
    uneven = [SECOND, FIRST, SECOND]
    assert planned(uneven) == [(3, [4, 5, 6, 7]), (7, FIRST), (3, [12, 13, 14, 15])]
    assert planned([SECOND]) == [(15, ALL)]
    assert planned([FIRST, SECOND], parts=2) == [(7, FIRST), (7, SECOND)]
    assert sorted(planned([FIRST, FIRST, SECOND, SECOND], parts=2)) == sorted(
        planned([FIRST, FIRST, SECOND, SECOND])
    )
    monkeypatch.setattr(
        "shardcore.distributed.machine.divide_by_nodes", lambda of_ranks, near: of_ranks
    )
    assert {count for count, _ in planned(uneven)} == {4}, "the twin: as if there were no nodes"
    monkeypatch.setattr(
        "shardcore.distributed.machine._of_model",
        lambda comm, value: (comm.rank, comm.gather_json(value)),
    )
    assert planned([FIRST, SECOND], parts=2) == 2 * [(15, ALL)], (
        "the twin: as if there were no other parts"
    )


def test_the_quota_is_the_least_of_the_groups(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert quota(tmp_path) is None
    write("proc/self/cgroup", "5:cpu,cpuacct:/old\n0::/jobs/mine\n")
    write("sys/fs/cgroup/jobs/mine/cpu.max", "max 100000\n")
    assert quota(tmp_path) is None
    write("sys/fs/cgroup/jobs/cpu.max", "350000 100000\n")  # of the group above
    assert quota(tmp_path) == 3.5


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_kernels_of_a_thread_use_threads_of_its_own() -> None:
    values = torch.linspace(0, 1, 1 << 20)
    started: list[set[str]] = []
    sums: list[torch.Tensor] = []

    def work() -> None:
        before = _threads()
        _C.use_threads(4)
        assert _threads() == before, "they start with the first kernel"
        sums.append(_C.sq_norm([values]))
        started.append(_threads() - before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(started[0]) == 3
    assert torch.equal(sums[0], _C.sq_norm([values]))
    deadline = time.monotonic() + 10
    while started[0] & _threads():  # they end with their thread
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _worker_of(
    rank: int, world_size: int, started: Sequence[str] = ("once", "once")
) -> WorkerThreads:
    with pytest.MonkeyPatch.context() as patch:
        # unknown here
        patch.setattr("shardcore.distributed.machine.own_cores", lambda: list(range(9000, 9006)))
        patch.setattr("shardcore.distributed.machine.quota", lambda: None)
        patch.setattr(
            "shardcore.distributed.machine.machine_id", lambda: ["localhost", started[rank]]
        )
        _, optimizer, _ = train(rank, Run(steps=0, shard={"overlap_step": True}))
    threads: WorkerThreads = optimizer._engine.plan.threads
    return threads


def test_ranks_of_a_machine_have_workers_on_different_cores() -> None:
    assert run_ranks(2, _worker_of) == [
        WorkerThreads(2, (9000, 9001, 9002)),
        WorkerThreads(2, (9003, 9004, 9005)),
    ]
    assert (
        run_ranks(2, _worker_of, ("on one", "on another"))
        == [WorkerThreads(5, tuple(range(9000, 9006)))] * 2
    ), "machines of one name"


def test_the_worker_gets_cpu_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on it would use them; a step of the cpu tier has a thread of its own with as many,
    on the same cores.
    """
    given: list[tuple[str, int]] = []
    use = _C.use_threads
    monkeypatch.setattr(
        _C,
        "use_threads",
        lambda count: (given.append((threading.current_thread().name, count)), use(count)),
    )
    core = own_cores()[-1]
    kept = []  # or the threads of the first model would end some time after the second is made
    for cpu_threads in (1, 3):
        model, optimizer, _ = train(
            0,
            Run(
                steps=0,
                shard={
                    "offload": {"optimizer": "cpu", "cpu_threads": cpu_threads},
                    "overlap_step": True,
                },
            ),
        )
        kept.append(model)
        threads = WorkerThreads(optimizer._engine.plan.threads.count, (core,))
        optimizer._engine.overlap_step._worker = make_worker(
            "shardcore-step", threads, torch.device("cpu")
        )
        before = _threads()
        loss_of(model, batch_of(0, 0, 0)).backward()
        after_backward = _threads()
        optimizer.step()
        optimizer.synchronize()
        started = _threads() - after_backward
        assert before <= after_backward
        assert len(started) == 1 + cpu_threads + 2, (
            "the worker, those of the step, and one for each direction of copies"
        )
        assert all(os.sched_getaffinity(int(thread)) == {core} for thread in started)
    assert given == [("shardcore-step_0", 1), ("shardcore-step_0", 3)]


def _why_no_thread_starts() -> str:
    values = torch.ones(1 << 20)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # of all limits the one that binds root
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 20), resource.RLIM_INFINITY))
    try:
        _C.use_threads(64)
        _C.sq_norm([values])
    except RuntimeError as error:
        return str(error)
    return "they started"


def test_threads_that_cannot_start_say_what_to_do() -> None:
    expected = (
        "a thread cannot start; expected the system to allow one more than run now (ulimit -u"
    )
    assert run_fresh(_why_no_thread_starts).startswith(expected)


@pytest.mark.cases(1)
@pytest.mark.parametrize("own_thread", [True, False])
def test_the_worker_needs_no_gil(own_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the caller never releases the interpreter all buckets are updated; the twin gets no
    further than the first.
    """
    interval = sys.getswitchinterval()
    # 20 ms and more a bucket: step() itself ends before
    tier_with(monkeypatch, gigabytes_per_second=2e-4)
    if not own_thread:
        monkeypatch.setattr(cpu_store, "on_worker", SimpleNamespace(threads=0))
    model, optimizer = start(
        0, Run(stage=0, shard={"offload": {"optimizer": "cpu"}}), True, late=False
    )
    stepped(model, optimizer, 0, 0)
    optimizer.synchronize()
    pipeline = optimizer._engine.store._pipeline
    losses = micro_steps(model, optimizer, 0, 1, 1)
    try:
        sys.setswitchinterval(60)
        optimizer.step()
        deadline = time.monotonic() + (30 if own_thread else 1)
        while (
            updated := [what for what, *_ in pipeline.events].count("update")
        ) < 4 and time.monotonic() < deadline:
            pass
    finally:
        sys.setswitchinterval(interval)
    optimizer.synchronize()
    assert losses
    assert [what for what, *_ in pipeline.events].count("update") == 4  # the root and three blocks
    assert (updated == 4) == own_thread


def _on_a_small_stack() -> list[str]:
    found: list[str] = []

    def run(**options: Any) -> None:
        torch.set_num_threads(1)
        found.append(hash_of_training(*train(0, Run(shard=options))[:2]))

    run()
    threading.stack_size(1 << 17)
    thread = threading.Thread(target=run, kwargs={"offload": {"optimizer": "cpu"}})
    thread.start()
    thread.join()
    return found


def test_a_step_needs_little_stack() -> None:
    """Threads of OpenMP and of users may have little."""
    machine_id, there = run_fresh(_on_a_small_stack)
    assert machine_id == there


# --- RAM ------------------------------------------------------------------------------------------


def test_free_memory_is_the_least_of_what_machine_and_groups_have(tmp_path: Path) -> None:
    def free_with(name: str, text: str) -> int | None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return free_bytes(tmp_path)

    assert free_with("other", "") is None
    assert (
        free_with("proc/meminfo", "MemTotal:    64 kB\nMemFree:      1 kB\nMemAvailable:   40 kB\n")
        == 40 * 1024
    )
    free_with("proc/self/cgroup", "5:cpu:/a\n0::/jobs/mine\n")
    free_with("sys/fs/cgroup/jobs/mine/memory.max", "max\n")
    assert free_with("sys/fs/cgroup/jobs/mine/memory.current", "5000\n") == 40 * 1024
    free_with("sys/fs/cgroup/jobs/memory.max", "30000\n")  # of the group above
    assert free_with("sys/fs/cgroup/jobs/memory.current", "20000\n") == 10000
    # Files that the kernel can drop:
    assert free_with("sys/fs/cgroup/jobs/memory.stat", "anon 9000\ninactive_file 4000\n") == 14000
    assert free_with("sys/fs/cgroup/jobs/mine/memory.max", "5500\n") == 500
    assert free_with("sys/fs/cgroup/jobs/mine/memory.current", "6000\n") == 0


def _short(rank: int, world_size: int, share: float, offload: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        needed = []
        host_bytes = shardcore.api._host_bytes
        patch.setattr(
            "shardcore.api._host_bytes",
            lambda *a, **k: needed.append(host_bytes(*a, **k)) or needed[-1],
        )
        patch.setattr(
            "shardcore.distributed.machine.free_bytes",
            lambda: int(share * world_size * sum(needed)),
        )
        model = make_net()
        before = [(id(p), p.data_ptr()) for p in model.parameters()]
        try:
            shardcore.shard(
                model, shardcore.FusedAdam(model.parameters()), 2, offload=offload, precision="bf16"
            )
        except MemoryError as error:
            assert [(id(p), p.data_ptr()) for p in model.parameters()] == before
            text = str(error)
            for part in (
                f"needs {world_size * needed[0]} bytes",
                f"for the {world_size} ranks of {socket.gethostname()}",
            ):
                assert part in text
            assert f"has {int(share * world_size * needed[0])} bytes" in text
            return "short"
        return "enough"


@pytest.mark.parametrize("world_size", [1, 2])
def test_too_little_memory_is_said_before_anything_is_changed(world_size: int) -> None:
    """The ranks of a machine share it: what is enough for one of two is too little."""
    for share, offload_to, answer in (
        (1.0, CPU_TIER, "enough"),
        (0.9, CPU_TIER, "short"),
        (0.0, None, "enough"),
    ):
        assert run_ranks(world_size, _short, share, offload_to) == [answer] * world_size


def _kept_after_free(trims: bool) -> int:
    def now() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.partition("RssAnon:")[2].split()[0]) << 10

    before = now()
    # below glibc's least threshold for memory maps
    blocks = [bytearray(100_000) for _ in range(1000)]
    del blocks[:-1]
    freed = FreedMemory()
    for _ in range(1000 if trims else 600):
        freed.add(100_000)
    return now() - before


def test_freed_memory_goes_back_to_the_system() -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("no glibc")
    assert run_fresh(_kept_after_free, True) < 20e6
    assert run_fresh(_kept_after_free, False) > 60e6, "60 MB are too few"
