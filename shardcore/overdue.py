"""What is said before NCCL's watchdog ends a process whose collective timed out: where this rank waits, and where others do.

A thread looks now and then whether what was started is done. Where it is not, PART of the process group's timeout after it
was started, this rank tells the others where it is and writes to stderr what they tell. They tell it in the store that the
group was made with: one text, to which all append, so that many ranks ask little of who serves it. Collectives of one backend
end in the order in which they were started, so of all that is on its way there two are remembered: one, and the last.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

PART = 0.75
ANSWERS_S = 30.0  # how long the others may take to tell, at most: each does PART of its own wait after it began
_LOOKS = 100  # in a timeout
_AT_MOST_S = 1.0  # between two looks
_Began = tuple[dist.Work, float]  # what was started, and when
_SAID, _WAITING = "said", "waiting"  # in the store: what ranks said, a line each time, and how many wait


class Overdue:
    """Watches the collectives of one engine. `where` tells the point that this rank has come to."""

    def __init__(
        self,
        store: Callable[[], Store],
        name: str,
        rank: int,
        world_size: int,
        timeout: timedelta,
        where: Callable[[], str],
    ) -> None:
        """Report as `rank` under `name`, the same on every rank, in a clone of what `store` returns by then.

        where: a method, kept by a weak reference.
        """
        self._of_group, self._prefix = store, f"shardcore/overdue/{name}"
        self._clone: PrefixStore | None = None
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout.total_seconds()
        self._where = weakref.WeakMethod(where)
        self._on_way: dict[str, tuple[_Began, _Began]] = {}  # by the kind of device, as each has its backend: one, and the last
        self._lock = threading.Lock()  # of these
        self._told: _Began | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def started(self, work: dist.Work, device: str) -> None:
        """Remember a collective that was started just now on data of a kind of device."""
        if self._thread is None:
            self._thread = threading.Thread(target=_watch, args=(weakref.ref(self), self._stop, self._pause_s), daemon=True)
            self._thread.start()
            weakref.finalize(self, self._stop.set)
        with self._lock:
            began = work, time.monotonic()
            self._on_way[device] = self._on_way[device][0] if device in self._on_way else began, began

    @property
    def _pause_s(self) -> float:
        return min(_AT_MOST_S, self._timeout_s / _LOOKS)

    def look(self) -> None:
        """Forget what is done; report what is overdue, once."""
        with self._lock:
            for device, (first, last) in list(self._on_way.items()):
                if first[0].is_completed():
                    del self._on_way[device]
                    if not last[0].is_completed():
                        self._on_way[device] = last, last
            waits = [first for first, _ in self._on_way.values()]
        if self._told is not None and self._told not in waits:
            self._told = None
            self._say("")
        longest = min(waits, key=lambda began: began[1], default=None)
        if self._told is None and longest is not None and time.monotonic() - longest[1] > PART * self._timeout_s:
            self._told = longest
            self._report(longest)

    @property
    def _store(self) -> PrefixStore:
        """A connection of its own, made when it is needed: others wait in the group's."""
        if self._clone is None:
            self._clone = PrefixStore(self._prefix, self._of_group().clone())  # type: ignore[attr-defined]
        return self._clone

    def _say(self, point: str) -> None:
        """Tell the others where this rank waits; "": no more."""
        self._store.append(_SAID, f"{self._rank} {point}\n")  # type: ignore[attr-defined]
        self._store.add(_WAITING, 1 if point else -1)

    def said(self) -> dict[int, str]:
        """Return where each rank that waits has said that it does."""
        lines = self._store.get(_SAID).decode().splitlines() if self._store.check([_SAID]) else []
        last = dict(line.split(" ", 1) for line in lines)
        return {int(rank): point for rank, point in last.items() if point}

    def _report(self, wait: _Began) -> None:
        here = self._where()
        self._say("nowhere" if here is None else here())
        until = time.monotonic() + min(ANSWERS_S, (1 - PART) * self._timeout_s / 2)
        while self._store.add(_WAITING, 0) < self._world_size and time.monotonic() < until:
            self._stop.wait(self._pause_s)
        said, points = self.said(), dict[str, list[int]]()
        for rank in range(self._world_size):
            point = f"at {said[rank]}" if rank in said else "not waiting (ended, failed, or busy elsewhere)"
            points.setdefault(point, []).append(rank)
        lines = [f"rank{'s' * (len(of) > 1)} {_ranges(of)} {point}" for point, of in points.items()]
        if wait[0].is_completed():
            return
        waited_s = time.monotonic() - wait[1]
        sys.stderr.write(
            f"shardcore: rank {self._rank} has waited {waited_s:.0f} s for the other ranks, and at {self._timeout_s:.0f} s "
            f"NCCL ends the process, or gloo the wait: {'; '.join(lines)}; expected every rank to run the same units in the "
            "same order (look at the first error of the ranks that differ; init_process_group(timeout=...) gives more time)\n"
        )
        sys.stderr.flush()


def _ranges(ranks: Sequence[int]) -> str:
    """Name rising ranks in short: 0, 2 to 5."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


def _watch(overdue: "weakref.ref[Overdue]", stop: threading.Event, pause_s: float) -> None:
    while not stop.wait(pause_s):
        watched = overdue()
        if watched is None:
            return
        try:
            watched.look()
        except (RuntimeError, ValueError, dist.DistError):  # the store is gone, as the process that serves it is, or the group
            return
        del watched
