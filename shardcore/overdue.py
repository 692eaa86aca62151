"""What is said before NCCL's watchdog ends a process whose collective timed out: where this rank waits, and where others do.

A thread looks now and then whether what was started is done. Where it is not, PART of the process group's timeout after it
was started, this rank tells the others where it is (in the store that the group was made with) and writes to stderr what they
tell. Collectives of one group end in the order in which they were started, so of all that is on its way two are remembered:
one, and the last.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

PART = 0.75
ANSWERS_S = 30.0  # how long the others may take to tell, at most: each does PART of its own wait after it began
_LOOKS = 100  # in a timeout
_AT_MOST_S = 1.0  # between two looks


class Overdue:
    """Watches the collectives of one engine. `where` tells the point that this rank has come to."""

    def __init__(
        self, store: Store, name: str, rank: int, world_size: int, timeout: timedelta, where: Callable[[], str]
    ) -> None:
        """Report as `rank` under `name`, the same on every rank. `where` is kept by a weak reference: a method."""
        self._store = PrefixStore(f"shardcore/overdue/{name}", store.clone())  # type: ignore[attr-defined]
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout.total_seconds()
        self._where = weakref.WeakMethod(where)
        self._first: tuple[dist.Work, float] | None = None
        self._last: tuple[dist.Work, float] | None = None
        self._lock = threading.Lock()  # of the two
        self._told = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def started(self, work: dist.Work) -> None:
        """Remember a collective that was started just now."""
        if self._thread is None:
            self._thread = threading.Thread(target=_watch, args=(weakref.ref(self), self._stop, self._pause_s), daemon=True)
            self._thread.start()
            weakref.finalize(self, self._stop.set)
        with self._lock:
            self._last = work, time.monotonic()
            self._first = self._first or self._last

    @property
    def _pause_s(self) -> float:
        return min(_AT_MOST_S, self._timeout_s / _LOOKS)

    def look(self) -> None:
        """Forget what is done; report what is overdue, once."""
        with self._lock:
            done = self._first is not None and self._first[0].is_completed()
            if done:
                self._first = self._last = None if self._last is None or self._last[0].is_completed() else self._last
            waited_s = 0.0 if self._first is None else time.monotonic() - self._first[1]
        if self._told and done:
            self._told = False
            self._store.delete_key(str(self._rank))
        if not self._told and waited_s > PART * self._timeout_s:
            self._told = True
            self._report(waited_s)

    def _report(self, waited_s: float) -> None:
        here = self._where()
        self._store.set(str(self._rank), "nowhere" if here is None else here())
        others = {rank: str(rank) for rank in range(self._world_size) if rank != self._rank}
        until = time.monotonic() + min(ANSWERS_S, (1 - PART) * self._timeout_s / 2)
        while not self._store.check(list(others.values())) and time.monotonic() < until:
            self._stop.wait(self._pause_s)
        points: dict[str, list[int]] = {}
        for rank in range(self._world_size):
            told = self._store.check([str(rank)])
            point = f"at {self._store.get(str(rank)).decode()}" if told else "not waiting (ended, failed, or busy elsewhere)"
            points.setdefault(point, []).append(rank)
        lines = [f"rank{'s' * (len(of) > 1)} {', '.join(map(str, of))} {point}" for point, of in points.items()]
        sys.stderr.write(
            f"shardcore: rank {self._rank} has waited {waited_s:.0f} s for the other ranks, and NCCL ends the process at "
            f"{self._timeout_s:.0f} s: {'; '.join(lines)}; expected every rank to run the same units in the same order (look "
            "at the first error of the ranks that differ; init_process_group(timeout=...) gives more time)\n"
        )
        sys.stderr.flush()


def _watch(overdue: "weakref.ref[Overdue]", stop: threading.Event, pause_s: float) -> None:
    while not stop.wait(pause_s):
        watched = overdue()
        if watched is None:
            return
        try:
            watched.look()
        except (RuntimeError, dist.DistError):  # the store is gone, as the process that serves it is
            return
        del watched
