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
        self.comm, self.parts = comm, comm.slices if parts is None else parts
        self.rank, self.world_size, self.slices = comm.rank, comm.world_size, 1
        for part in self.parts:
            self.rank = self.rank * part.world_size + part.rank
            self.world_size *= part.world_size
            self.slices *= part.world_size

    @property
    def ranks_of_part(self) -> range:
        """The numbers, among all, of the ranks that have the same part of the model."""
        first = self.rank - self.comm.rank * self.slices
        return range(first, self.world_size, self.slices)

    def gather_json(self, value: Any) -> list[Any]:
        """Return what every rank passed, in their order (see Comm.gather_json). Collective."""
        of_parts = [value]
        for part in reversed(self.parts):
            of_parts = list(chain.from_iterable(part.gather_json(of_parts)))
        return list(chain.from_iterable(self.comm.gather_json(of_parts)))


Ranks: TypeAlias = Comm | Everyone
