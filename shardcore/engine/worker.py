"""Threads and cores of a worker: kernels that run on it disturb neither torch's threads nor other ranks' workers."""

import logging
import os
import threading
from dataclasses import dataclass

from shardcore._native import _C

logger = logging.getLogger("shardcore")

_on_thread = threading.local()


@dataclass(frozen=True)
class WorkerThreads:
    """How many threads the kernels of one worker use, and the cores that they stay on; no cores: wherever the process may run."""

    count: int
    cores: tuple[int, ...] = ()


def use_own_threads(threads: WorkerThreads | None) -> None:
    """Give this thread its threads, at its first call; None: it goes on with torch's. RuntimeError if the system has no more."""
    if threads is None or hasattr(_on_thread, "threads"):
        return
    if threads.cores and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, threads.cores)  # of this thread alone; those that it starts take it over
        except OSError as error:
            logger.warning(
                "overlap_step: the worker cannot be kept on the cores %s (%s); it runs wherever this process may",
                ", ".join(map(str, threads.cores)),
                error,
            )
    _C.use_threads(threads.count)
    _on_thread.threads = threads
