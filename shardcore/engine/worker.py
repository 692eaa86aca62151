"""Threads and cores of a worker: kernels that run on it disturb neither torch's threads nor other ranks' workers."""

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from shardcore._native import _C

logger = logging.getLogger("shardcore")

_on_thread = threading.local()


@dataclass(frozen=True)
class WorkerThreads:
    """How many threads the kernels of one worker use, and the cores that they stay on; none: wherever the process may run."""

    count: int
    cores: tuple[int, ...] = ()


def use_own_threads(threads: WorkerThreads | None) -> None:
    """Give this thread its threads, which start with its first kernel, at its first call; None: it goes on with torch's."""
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


def own_thread_count() -> int:
    """Return the number of threads that this thread was given; 0: torch's."""
    threads: WorkerThreads | None = getattr(_on_thread, "threads", None)
    return 0 if threads is None else threads.count


def _use_device(device: torch.device) -> None:
    """Make the device that of this thread: a new one's first call of CUDA opens device 0 (500 MB there), even to ask an event.

    Raises nothing, or no call would be made any more and nobody told: where CUDA is broken the calls themselves find out.
    """
    if device.type == "cuda":
        with suppress(Exception):
            torch.cuda.set_device(device)


class Worker:
    """A thread that makes calls in order. It starts with the first, and anew in a forked child; a fork waits for all."""

    def __init__(self, name: str, threads: WorkerThreads | None, device: torch.device) -> None:
        """Start nothing yet. threads: of the kernels in its calls, None for torch's; device: whose copies they wait for."""
        self._name, self.threads, self._device = name, threads, device
        self._last: Future[Any] | None = None
        self.start_anew()
        _alive.add(self)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Let the thread make the call after those before it; made here and now where no thread starts any more.

        Before its arguments the call is given what it is to tell `use_own_threads`.
        """
        try:
            self._last = self._executor.submit(call, self.threads, *arguments)
        except RuntimeError:  # the interpreter ends, or the system has no more
            self.start_anew()  # a thread that starts later would make the call once more
            self._last = Future()
            try:
                self._last.set_result(call(None, *arguments))
            except BaseException as error:
                self._last.set_exception(error)
        return self._last

    def let_end(self) -> None:
        """Let all calls end."""
        if self._last is not None:
            self._last.exception()

    def start_anew(self) -> None:
        """Let another thread start when it is needed."""
        self._executor = ThreadPoolExecutor(1, self._name, _use_device, (self._device,))


_alive: "weakref.WeakSet[Worker]" = weakref.WeakSet()  # os.register_at_fork keeps what it is given for good


def _of_all(method: Callable[[Worker], None]) -> None:
    for worker in list(_alive):
        method(worker)


os.register_at_fork(before=lambda: _of_all(Worker.let_end), after_in_child=lambda: _of_all(Worker.start_anew))
# Ctrl-C cuts short how concurrent.futures waits at exit; a thread that comes back from C++ too late would abort the process.
atexit.register(_of_all, Worker.let_end)
