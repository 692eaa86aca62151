"""How ranks lie in nodes, who reduces which piece of a buffer, and who holds it afterwards. Pure: no torch, no communication.

A buffer has as many equal pieces as there are ranks. Reduction goes over levels: each level's ranks cut what they hold into
equal parts, one for each of them, and add what they get in rank order; first the ranks of a node, then the nodes. So the
bits depend on `ranks_per_node` and on nothing else, and each rank ends with one piece (`place`), reduced over all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """`world_size` ranks, `ranks_per_node` consecutive ones a node.

    replicate: every node holds everything, sharded over its ranks (hybrid sharding), instead of sharded over all ranks.
    """

    world_size: int
    ranks_per_node: int
    replicate: bool = False

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return self.world_size // self.ranks_per_node

    def mates(self, rank: int) -> Sequence[int]:
        """Return the ranks of the rank's node."""
        first = rank - rank % self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    def twins(self, rank: int) -> Sequence[int]:
        """Return the ranks that have the rank's number within their nodes, one a node."""
        return range(rank % self.ranks_per_node, self.world_size, self.ranks_per_node)

    def levels(self, rank: int) -> list[Sequence[int]]:
        """Return the ranks that the rank exchanges gradients with, itself included, level by level."""
        return [ranks for ranks in (self.mates(rank), self.twins(rank)) if len(ranks) > 1]

    def place(self, rank: int) -> int:
        """Return which piece the rank has after the last level."""
        return rank % self.ranks_per_node * self.nodes + rank // self.ranks_per_node

    def owned(self, rank: int) -> tuple[int, int]:
        """Return the range of pieces that the rank keeps: its own one, or its share of what its node keeps."""
        place = self.place(rank)
        return (place - place % self.nodes, place - place % self.nodes + self.nodes) if self.replicate else (place, place + 1)

    def everyone(self) -> Sequence[int]:
        """Return all ranks in the order of their pieces."""
        return sorted(range(self.world_size), key=self.place) if self.nodes > 1 else range(self.world_size)

    def sharers(self, rank: int) -> Sequence[int]:
        """Return the ranks whose owned ranges, in this order, make a whole buffer."""
        return self.mates(rank) if self.replicate else self.everyone()

    def owners(self, rank: int) -> Sequence[int]:
        """Return the ranks that own the same range as the rank, in the order of their pieces."""
        return self.twins(rank) if self.replicate else (rank,)


def topology_of(world_size: int, ranks_per_node: int | None, sharded: int | None) -> Topology:
    """Return how ranks lie; `sharded`: the size of a mesh's second dimension. Raises ValueError or TypeError."""
    if ranks_per_node is not None and (isinstance(ranks_per_node, bool) or not isinstance(ranks_per_node, int)):
        raise TypeError(f"shard: ranks_per_node is {ranks_per_node!r}; expected a whole number, or None")
    if None not in (ranks_per_node, sharded) and ranks_per_node != sharded:
        raise ValueError(f"shard: ranks_per_node is {ranks_per_node}; expected {sharded}, the mesh's second dimension, or None")
    size = sharded or (world_size if ranks_per_node is None else ranks_per_node)
    if size < 1 or world_size % size:
        raise ValueError(f"shard: ranks_per_node is {size}; expected a divisor of the {world_size} ranks")
    return Topology(world_size, size, replicate=sharded is not None)
