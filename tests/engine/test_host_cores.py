"""How many threads a lazy step's worker gets: of the cores that affinity and control groups leave, and really those."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from shardcore._native import _C
from shardcore.host_cores import own_cores, quota, worker_threads
from tests.engine.models import Run, train


def test_each_rank_keeps_a_core_and_workers_share_the_rest() -> None:
    eight, shared, apart = [list(range(8))], [list(range(8))] * 2, [[0, 1, 2], [3, 4, 5]]
    assert [worker_threads(cores, None) for cores in (eight, shared, apart)] == [7, 3, 2]
    assert [worker_threads(cores, 5.5) for cores in (eight, shared, apart)] == [4, 1, 1]
    assert worker_threads([[0]] * 4, 0.5) == 1, "at least one"
    assert own_cores() == sorted(os.sched_getaffinity(0))


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
    write("sys/fs/cgroup/cpu/old/cpu.cfs_quota_us", "-1\n")
    write("sys/fs/cgroup/cpu/old/cpu.cfs_period_us", "100000\n")
    assert quota(tmp_path) == 3.5
    write("sys/fs/cgroup/cpu/old/cpu.cfs_quota_us", "150000\n")
    assert quota(tmp_path) == 1.5


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_kernels_of_a_thread_use_threads_of_its_own() -> None:
    values = torch.linspace(0, 1, 1 << 20)
    started: list[set[str]] = []
    sums: list[torch.Tensor] = []

    def work() -> None:
        before = _threads()
        _C.use_threads(4)
        started.append(_threads() - before)
        sums.append(_C.sq_norm([values]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(started[0]) == 3
    assert torch.equal(sums[0], _C.sq_norm([values]))
    deadline = time.monotonic() + 10
    while started[0] & _threads():  # they end with their thread
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(ValueError, match="use_threads: count has 0; expected 1 to 4096"):
        _C.use_threads(0)
    with pytest.raises(TypeError, match="use_threads: count"):
        _C.use_threads("2")  # type: ignore[arg-type]


def test_the_worker_gets_cpu_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, int]] = []
    monkeypatch.setattr(_C, "use_threads", lambda count: given.append((threading.current_thread().name, count)))
    for cpu_threads in (1, 3):
        offload = {"optimizer": "cpu", "cpu_threads": cpu_threads}
        _, optimizer, _ = train(0, Run(steps=2, shard={"offload": offload, "overlap_step": True}))
        optimizer.synchronize()
    assert given == [("shardcore-step_0", 1), ("shardcore-step_0", 3)]
