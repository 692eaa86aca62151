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
from shardcore.telling import READS, different_ways, elsewhere, first_difference

BACKWARD = "a backward"
LOCAL_BACKWARD = "a backward that reduces nothing"
END_OF_FORWARD = "the end of forward"
END_OF_BACKWARD = "the end of backward"
STEP = "a step"
READ = "a read"
REFUSAL = "an error of its own"
_REMEMBERED = 1 << 12  # of what was not told, enough for the passes of a step
_EVALUATES = 1  # detail of weights
_POINTS = (BACKWARD, LOCAL_BACKWARD, END_OF_FORWARD, END_OF_BACKWARD, STEP, READ, REFUSAL)
_ORDERED = (_POINTS.index(END_OF_FORWARD), _POINTS.index(END_OF_BACKWARD))


@dataclass(eq=False)
class Notice:
    """An announcement: of each rank what it does next, what it says of itself and a detail for errors, (world_size, 3) int64.

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
        self._at: tuple[int, int] | None = None  # on NCCL: the last point
        comm.watch(self.where)
        self._untold, self._digest = deque[tuple[int, int]](maxlen=_REMEMBERED), 0  # the last of it, and the digest of all
        self.on_parting: list[Callable[[], None]] = []  # forget what ranks may have learned differently, serve who waits

    def start(self, point: str, backwards: int = 0) -> Notice | None:
        """Tell the others that this rank has come to `point` after so many `backwards` (Reducer.count); see `check`."""
        return self._announce(_POINTS.index(point), backwards)

    def start_weights(self, index: int, evaluates: bool) -> Notice | None:
        """Tell the others that this rank gathers the weights of unit `index`, perhaps to evaluate; see `check`."""
        return self._announce(len(_POINTS) + index, detail=_EVALUATES * evaluates)

    def _name(self, what: int, detail: int) -> str:
        if what == _POINTS.index(READ):
            return READS[detail]
        return self._names[what] + " without gradients (evaluation)" * (detail == _EVALUATES)

    def _elsewhere(self, rows: torch.Tensor) -> RuntimeError:
        points = rows[:, ::2].tolist()
        names = [self._name(what, detail) for what, detail in points]
        if (rows[:, 0] == rows[0, 0]).all():
            names = [name + after(count) for name, count in zip(names, rows[:, 1].tolist(), strict=True)]
        error = elsewhere(names)
        reads = [READS[detail] for what, detail in points if what == _POINTS.index(READ)]
        if reads and len(reads) < len(points):
            error = RuntimeError(
                f"{error}; {reads[0]} is collective: every rank calls it, also where one alone uses the result"
            )
        if any(what >= len(_POINTS) and detail == _EVALUATES for what, detail in points):
            error = RuntimeError(
                f"{error}; at stage 3 every rank runs each forward, in evaluation, too (inside full_params(model), which is "
                "collective, each rank runs what it likes)"
            )
        return error

    def _announce(self, what: int, said: int = 0, detail: int = 0) -> Notice | None:
        if self._comm.world_size == 1:
            return None
        if self._comm.uses_nccl:
            self._at = what, detail
            self._untold.append(self._at)
            self._digest = zlib.crc32(b"%d " % what, self._digest)
            return None
        rows = torch.zeros(self._comm.world_size, 3, dtype=torch.int64, device=self._comm.device)
        rows[self._comm.rank] = torch.tensor([what, said, detail], device="cpu")
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
        """Wait until every rank has said where it is; RuntimeError if one is elsewhere, or ran another number of backwards.

        See Note [Parting].
        """
        while notice is not None and not notice.agreed:
            if notice not in self._unchecked:
                raise different_ways("they did so before this call")
            first = self._unchecked[0]
            self._comm.refuse_if_broken()  # the wait that failed is not among first.works any more
            wait_all(first.works)
            compared = 1 if first.rows[self._comm.rank, 0] in _ORDERED else 2  # the order is for `meet`
            if (first.rows[:, :compared] != first.rows[0, :compared]).any():
                self.part()
                raise self._elsewhere(first.rows)
            first.agreed = True
            self._unchecked.popleft()  # last: until here an interrupt lets all of this be done again

    def meet(self, point: str, backwards: int = 0, detail: int = 0) -> None:
        """Raise RuntimeError unless every rank comes to this point now, after as many `backwards`. Collective.

        detail: of a read, which of READS.
        """
        self.check(self._announce(_POINTS.index(point), backwards, detail))

    def end_pass(self, point: str, order: Sequence[str]) -> None:
        """Raise RuntimeError unless every rank comes to this end of a pass, by the same `order` of units. Collective."""
        notice = self._announce(_POINTS.index(point), zlib.crc32("\n".join(order).encode()))
        self.check(notice)
        if notice is not None and (notice.rows[:, 1] != notice.rows[0, 1]).any():
            difference = first_difference(self._comm.gather_json([f"use {i}: {name}" for i, name in enumerate(order)]))
            self.part()
            raise different_ways(str(difference))

    def agree_on_nccl(self, backwards: int) -> None:
        """Raise RuntimeError unless every rank sends gradients after as many backwards: where nothing announces it."""
        if self._comm.uses_nccl and self._comm.world_size > 1:
            counts = self._comm.tell(torch.tensor([backwards], device="cpu"), Traffic.BACKWARD)[:, 0].tolist()
            if len(set(counts)) > 1:
                raise elsewhere([BACKWARD + after(count) for count in counts])

    def where(self) -> str:
        """Return the point that this rank has come to, where nothing is told of it."""
        return "its start" if self._at is None else self._name(*self._at)

    def untold(self) -> list[str]:
        """Return where this rank was since the last call, if the others were not told: for a step to compare."""
        reads = _POINTS.index(READ)  # of weights a forward without gradients gathers the same as one with them
        said = [f"{i}: {self._name(what, detail if what == reads else 0)}" for i, (what, detail) in enumerate(self._untold)]
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
            with suppress(RuntimeError):  # of a rank that has gone: the error that names the difference says more
                call()
        self._lost += self._unchecked
        self._unchecked.clear()
        self._comm.start_anew()


def after(backwards: int) -> str:
    """Say in words what Reducer.count says."""
    added = "some" if backwards % 2 else "none"
    return f" ({backwards // 2} backwards since the last step or zero_grad(), {added} of them added locally)"


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
