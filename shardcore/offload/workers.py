"""Worker threads beside the training thread: each makes calls in order, and its kernels use threads
and cores of their own.
"""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from shardcore._native import _C
from shardcore.distributed.machine import WorkerThreads

logger = logging.getLogger("shardcore")


class _OnWorker(threading.local):
    """How many threads kernels of the calling thread use for themselves; 0: they use torch's."""

    threads = 0


on_worker = _OnWorker()


def use_own_threads(threads: WorkerThreads) -> None:
    """Let kernels of the calling thread use their own threads, which start with the first
    kernel, instead of torch's.
    """
    if threads.cores and hasattr(os, "sched_setaffinity"):
        try:
            # of this thread alone; those that it starts inherit it
            os.sched_setaffinity(0, threads.cores)
        except OSError as error:
            logger.warning(
                "overlap_step: the worker cannot be bound to the cores %s (%s); it runs on any "
                "core of this process",
                ", ".join(map(str, threads.cores)),
                error,
            )
    _C.use_threads(threads.count)
    on_worker.threads = threads.count


def _begin_thread(threads: WorkerThreads, device: torch.device) -> None:
    if device.type == "cuda":
        # A new thread's first call of CUDA opens device 0 (500 MB there), even to query an event.
        # the executor would run nothing any more; later calls of CUDA raise as well
        with suppress(Exception):
            torch.cuda.set_device(device)
            _C.allow_captures()
    use_own_threads(threads)


def make_worker(name: str, threads: WorkerThreads, device: torch.device) -> ThreadPoolExecutor:
    """Return a thread that makes calls in order; it starts with the first one.

    threads: of the kernels in its calls; device: whose copies they wait for.
    """
    return ThreadPoolExecutor(1, name, _begin_thread, (threads, device))
