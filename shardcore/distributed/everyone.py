"""All ranks of a sharded model, over all tensor-parallel slices and pipeline stages."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias

from shardcore.distributed.comm import Comm


class Everyone:
    """The ranks of a Comm and those of its `slices`, as one world: `rank` of `world_size`, as in a
    mesh of ("dp", "tp").

    slices: the number of slices, or of combinations of `parts`.
    """

    def __init__(self, comm: Comm, parts: Sequence[Comm] | None = None) -> None:
        """See the class. parts: Comms in place of those of `slices`, such as Comm.across."""
        self._comm, self._parts = comm, comm.slices if parts is None else parts
        self.rank, self.world_size, self.slices = comm.rank, comm.world_size, 1
        for part in self._parts:
            self.rank = self.rank * part.world_size + part.rank
            self.world_size *= part.world_size
            self.slices *= part.world_size

    def _of_parts(self, value: Any) -> list[Any]:
        values = [value]
        for part in reversed(self._parts):
            values = list(chain.from_iterable(part.gather_json(values)))
        return values

    def gather_json(self, value: Any) -> list[Any]:
        """Return what every rank passed, in their order (see Comm.gather_json). Collective."""
        return list(chain.from_iterable(self._comm.gather_json(self._of_parts(value))))

    def first_problem(self, problem: BaseException | None) -> tuple[int, str] | None:
        """Return the first rank with a problem, and the problem in words; None if no rank has one.
        Collective.
        """
        of_parts = self._of_parts(self._comm.first_problem(problem))
        problems = []
        for index, problem_of_part in enumerate(of_parts):
            if problem_of_part is not None:
                rank, text = problem_of_part
                problems.append((rank * self.slices + index, text))
        return min(problems, default=None)


Ranks: TypeAlias = Comm | Everyone
