"""Announcements: before each collective every rank says what it comes to, so that ranks which go different ways all get the
same error at once, and none waits for the process group's timeout.

Note [Parting]: announcements are checked in the order in which they were made, so every rank finds the same first one at which
ranks differ. From there all start anew: with tags of their own, and with nothing learned. What was announced before it was sent
by all, and comes. What was announced from there on may come late or never: nobody waits for it, and its memory is kept.
Note [NCCL]: its messages have no tags, so nothing is announced there (`start` returns None). Its watchdog ends a wait, after
Comm.watch has said where. With gloo beside it, what ranks compare says where each is (telling.py). Where nobody waits, since
equally many collectives of the same sizes ran in another order, the next step finds that (`untold`).
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from shardcore.comm import Comm, Traffic, wait_all
from shardcore.engine.interrupts import held_back_interrupts
from shardcore.telling import different_ways, elsewhere, first_difference

BACKWARD = "a backward"
LOCAL_BACKWARD = "a backward that reduces nothing"
END_OF_FORWARD = "the end of forward"
END_OF_BACKWARD = "the end of backward"
STEP = "a step"
READ = "a read of whole values"
REFUSAL = "an error of its own"
_REMEMBERED = 1 << 12  # of what was not told, enough for the passes of a step
_POINTS = (BACKWARD, LOCAL_BACKWARD, END_OF_FORWARD, END_OF_BACKWARD, STEP, READ, REFUSAL)


@dataclass(eq=False)
class Notice:
    """An announcement: of each rank what it does next and a digest of its history, (world_size, 2) int64.

    agreed: every rank is known to have announced the same.
    """

    rows: torch.Tensor
    works: Iterator[Any]  # that were not waited for
    agreed: bool = False


class Meetings:
    """Announces where this rank is: at one of the points above, or at the weights of a unit (stage 3)."""

    def __init__(self, comm: Comm, units: Sequence[str]) -> None:
        """Announce over `comm`; `units` are the names of all units, in the same order on every rank."""
        self._comm = comm
        self._names = [*_POINTS, *(f"the weights of {unit or 'the root'}" for unit in units)]
        self._unchecked: deque[Notice] = comm.keeps(deque())
        self._lost: list[Notice] = comm.keeps([])
        self._at: int | None = None  # on NCCL: the last point
        comm.watch(self.where)
        self._untold, self._digest = deque[int](maxlen=_REMEMBERED), 0  # the last of it, and the digest of all
        self.before: Callable[[], None] = lambda: None  # makes what is to be announced before the next meeting
        self.on_parting: list[Callable[[], None]] = []  # forget what ranks may have learned differently, serve who waits

    def start(self, point: str) -> Notice | None:
        """Tell the others that this rank has come to `point`; see `check`."""
        return self._announce(_POINTS.index(point))

    def start_weights(self, index: int) -> Notice | None:
        """Tell the others that this rank gathers the weights of unit `index`; see `check`."""
        return self._announce(len(_POINTS) + index)

    def _announce(self, what: int, history: int = 0) -> Notice | None:
        if self._comm.world_size == 1:
            return None
        if self._comm.uses_nccl:
            self._at = what
            self._untold.append(what)
            self._digest = zlib.crc32(b"%d " % what, self._digest)
            return None
        rows = torch.zeros(self._comm.world_size, 2, dtype=torch.int64, device=self._comm.device)
        rows[self._comm.rank, 0], rows[self._comm.rank, 1] = what, history
        with held_back_interrupts():
            notice = Notice(rows, iter(self._comm.all_gather(rows, Traffic.NOTICE)))
            self._unchecked.append(notice)
        return notice

    @property
    def broken(self) -> bool:
        """Whether nothing can be told any more (Comm.broken)."""
        return self._comm.broken

    def sent_by_all(self, notice: Notice | None) -> bool:
        """Whether what `notice` announced is sent by every rank, as far as this one knows by now, and can be waited for."""
        return not self.broken and (notice is None or notice.agreed)

    def check(self, notice: Notice | None) -> None:
        """Wait until every rank has said where it is; RuntimeError if one is elsewhere (Note [Parting])."""
        while notice is not None and not notice.agreed:
            if notice not in self._unchecked:
                raise different_ways("they did so before this call")
            first = self._unchecked[0]
            self._comm.refuse_if_broken()  # the wait that failed is not among first.works any more
            wait_all(first.works)
            whats = first.rows[:, 0].tolist()
            if len(set(whats)) > 1:
                self.part()
                raise elsewhere([self._names[what] for what in whats])
            first.agreed = True
            self._unchecked.popleft()  # last: until here an interrupt lets all of this be done again

    def meet(self, point: str, order: Sequence[str] = ()) -> None:
        """Raise RuntimeError unless every rank comes to this point now, by the same `order` of units. Collective."""
        self.before()
        notice = self._announce(_POINTS.index(point), zlib.crc32("\n".join(order).encode()))
        self.check(notice)
        if notice is not None and (notice.rows[:, 1] != notice.rows[0, 1]).any():
            difference = first_difference(self._comm.gather_json([f"use {i}: {name}" for i, name in enumerate(order)]))
            self.part()
            raise different_ways(str(difference))

    def where(self) -> str:
        """Return the point that this rank has come to, where nothing is told of it."""
        return "its start" if self._at is None else self._names[self._at]

    def untold(self) -> list[str]:
        """Return where this rank was since the last call, if the others were not told: for a step to compare."""
        said = [f"{number}: {self._names[what]}" for number, what in enumerate(self._untold)]
        said += [f"their digest: {self._digest:x}"] * bool(said)
        self._untold.clear()
        self._digest = 0
        return said

    def refusing(self) -> "_Refusing":
        """Let an error of this rank's own stop the other ranks: it tells them in place of what it would announce next."""
        return _Refusing(self)

    def part(self) -> None:
        """Start anew, as every rank does at this point. See Note [Parting]."""
        for call in self.on_parting:
            call()
        self._lost += self._unchecked
        self._unchecked.clear()
        self._comm.start_anew()


class _Refusing:
    """See Meetings.refusing. A class, since it is entered for each unit."""

    def __init__(self, meetings: Meetings) -> None:
        self._meetings = meetings

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception) and not self._meetings.broken:
            with suppress(RuntimeError):  # what the others do: they learn of it, and this rank's own error says more
                self._meetings.meet(REFUSAL)
