"""Threads beside the one that trains: the cores and the device that they use."""

import logging
import os
import threading

import pytest
import torch

from shardcore._native import _C
from shardcore.distributed.comm import Comm
from shardcore.distributed.machine import WorkerThreads, own_cores
from shardcore.engine.bucket import BufferPool, ReducePolicy
from shardcore.engine.reduce_scatter import ReduceScatter
from shardcore.offload.host_gradients import HostGrads
from shardcore.offload.workers import make_worker, use_own_threads


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _affinities(threads: WorkerThreads) -> list[set[int]]:
    """Of the threads that a worker thread has then, its own first."""
    found: list[set[int]] = []
    values = torch.ones(1 << 20)

    def work() -> None:
        before = _threads()
        use_own_threads(threads)
        _C.sq_norm([values])
        mine = str(threading.get_native_id())
        found.extend(os.sched_getaffinity(int(thread)) for thread in (mine, *(_threads() - before)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found


@pytest.mark.skipif(len(own_cores()) < 2, reason="one core")
def test_kernels_of_the_worker_stay_on_its_cores(caplog: pytest.LogCaptureFixture) -> None:
    core, all_cores = own_cores()[-1], set(own_cores())
    assert _affinities(WorkerThreads(3, (core,))) == [{core}] * 3
    assert _affinities(WorkerThreads(2)) == [all_cores] * 2
    assert set(own_cores()) == all_cores
    with caplog.at_level(logging.WARNING, logger="shardcore"):
        assert _affinities(WorkerThreads(2, (4095,))) == [all_cores] * 2
    assert "cannot be bound to the cores 4095" in caplog.text


def test_the_workers_use_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's first call of CUDA would open another one, also to ask whether a copy is
    done.
    """
    used: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: used.append((device, threading.get_ident()))
    )
    device = torch.device("cuda", 3)
    worker = make_worker("test", WorkerThreads(1), device)
    idents = [worker.submit(threading.get_ident).result() for _ in range(2)]
    assert used == [(device, idents[0])]
    assert idents[0] == idents[1] != threading.get_ident()
    policy = ReducePolicy(1, True, torch.float32)
    host = HostGrads(
        _C.HostTier(torch.device("cpu"), False),
        [],
        WorkerThreads(1),
        ReduceScatter(Comm(), BufferPool(device), [], policy),
        policy,
        False,
    )
    host._worker.submit(threading.get_ident).result()
    assert [found for found, _ in used] == [device] * 2

    def broken(device: torch.device) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(torch.cuda, "set_device", broken)
    assert make_worker("test", WorkerThreads(1), device).submit(lambda: 5).result() == 5
