"""Points that every rank comes to in the same order. Each tells the others where it is, so that ranks which go different ways
all get the same error at once, and none waits for the process group's timeout.

Messages of NCCL cannot be told apart by tags: there nothing is told (Comm.announce), and its own watchdog ends the wait.
"""

import zlib
from collections.abc import Callable, Sequence

from shardcore.comm import Comm, Notice, different_ways, first_difference

BACKWARD = "a backward"
END_OF_FORWARD = "the end of forward"
END_OF_BACKWARD = "the end of backward"
STEP = "a step"
READ = "a read of whole values"
REFUSAL = "an error of its own"
_POINTS = (BACKWARD, END_OF_FORWARD, END_OF_BACKWARD, STEP, READ, REFUSAL)


class Meetings:
    """Announces where this rank is: at one of the points above, or at the weights of a unit (stage 3)."""

    def __init__(self, comm: Comm, units: Sequence[str], before: Callable[[], None] = lambda: None) -> None:
        """Announce over `comm`; `units` are the names of all units, in the same order on every rank.

        before: makes what is to be announced before the next meeting.
        """
        self._comm, self._before = comm, before
        self._names = [*_POINTS, *(f"the weights of {unit or 'the root'}" for unit in units)]

    def start(self, point: str) -> Notice | None:
        """Tell the others that this rank has come to `point`; see `check`."""
        return self._comm.announce(_POINTS.index(point))

    def start_unit(self, index: int) -> Notice | None:
        """Tell the others that this rank gathers the weights of unit `index`; see `check`."""
        return self._comm.announce(len(_POINTS) + index)

    def check(self, notice: Notice | None) -> None:
        """Wait until every rank has said where it is; RuntimeError if one is elsewhere."""
        self._comm.check(notice, self._names.__getitem__)

    def meet(self, point: str, order: Sequence[str] = ()) -> None:
        """Raise RuntimeError unless every rank comes to this point now, by the same `order` of units. Collective."""
        self._before()
        notice = self._comm.announce(_POINTS.index(point), zlib.crc32("\n".join(order).encode()))
        if self._comm.check(notice, self._names.__getitem__):
            return
        difference = first_difference(self._comm.gather_json([f"use {i}: {name}" for i, name in enumerate(order)]))
        raise different_ways(str(difference))
