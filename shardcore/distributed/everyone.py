"""All ranks that have parts of a sharded model: shards, of each tensor-parallel slice."""

from typing import Any, TypeAlias

from shardcore.distributed.comm import Comm


class Everyone:
    """The ranks of a Comm and those of its `slices`, as one world: `rank` of `world_size`, as in a mesh of ("dp", "tp").

    slices: how many there are.
    """

    def __init__(self, comm: Comm) -> None:
        """See the class."""
        self._comm, self._of_slices = comm, next(iter(comm.slices), None)
        self.rank, self.world_size, self.slices = comm.rank, comm.world_size, 1
        if self._of_slices is not None:
            self.slices = self._of_slices.world_size
            self.rank, self.world_size = self.rank * self.slices + self._of_slices.rank, self.world_size * self.slices

    def gather_json(self, value: Any) -> list[Any]:
        """Return what every rank passed, in their order (see Comm.gather_json). Collective."""
        if self._of_slices is None:
            return self._comm.gather_json(value)
        return [one for of_slices in self._comm.gather_json(self._of_slices.gather_json(value)) for one in of_slices]

    def first_problem(self, problem: Exception | None) -> tuple[int, str] | None:
        """Return the first rank that has a problem, and which, in words; None if no rank has one. Collective."""
        found = self._comm.first_problem(problem)
        if self._of_slices is None:
            return found
        every = enumerate(self._of_slices.gather_json(found))
        return min(((one[0] * self.slices + index, one[1]) for index, one in every if one is not None), default=None)


Ranks: TypeAlias = Comm | Everyone
