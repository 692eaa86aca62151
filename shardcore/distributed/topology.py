"""The ranks of each node, the rank that reduces each piece of a buffer, and the ranks that hold the
piece afterwards. Pure arithmetic.

A buffer has as many equal pieces as there are ranks. Reduction runs in levels: the ranks of a level
cut what they hold into equal parts, one per rank, and each adds the parts that it receives in rank
order; first within a node, then across nodes. The bits depend on `ranks_per_node` alone, and each
rank ends with one piece (`piece_index`), reduced over all ranks.

Who keeps the result does not change the bits. Sharded over all ranks, each rank keeps its piece.
With hybrid sharding replica ranks gather their pieces of the shard, as all ranks do at stage 0, and
weights are gathered within the node. Each rank takes the squared norm of its own piece alone, so
replicas count once.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """`world_size` ranks, `ranks_per_node` consecutive ranks per node.

    replicate: shard within each node and replicate across nodes (hybrid sharding), instead of
    sharding over all ranks.
    """

    world_size: int
    ranks_per_node: int
    replicate: bool = False

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return self.world_size // self.ranks_per_node

    def node_ranks(self, rank: int) -> range:
        """Return the ranks of the rank's node."""
        first = rank - rank % self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    def cross_node_ranks(self, rank: int) -> range:
        """Return the ranks with the same local rank, one per node."""
        return range(rank % self.ranks_per_node, self.world_size, self.ranks_per_node)

    def levels(self, rank: int) -> list[range]:
        """Return the ranks, itself included, that the rank exchanges gradients with at each
        level.
        """
        levels = (self.node_ranks(rank), self.cross_node_ranks(rank))
        return [ranks for ranks in levels if len(ranks) > 1]

    def piece_index(self, rank: int) -> int:
        """Return the index of the piece that the rank has after the last level."""
        return rank % self.ranks_per_node * self.nodes + rank // self.ranks_per_node

    def owned_pieces(self, rank: int) -> tuple[int, int]:
        """Return the range (first, end) of pieces in the rank's shard: its own piece, or with
        `replicate` one per node.
        """
        piece = self.piece_index(rank)
        if not self.replicate:
            return piece, piece + 1
        first = piece - piece % self.nodes
        return first, first + self.nodes

    def ranks_by_piece(self) -> Sequence[int]:
        """Return all ranks in the order of their pieces."""
        if self.nodes == 1:
            return range(self.world_size)
        return sorted(range(self.world_size), key=self.piece_index)

    def shard_ranks(self, rank: int) -> Sequence[int]:
        """Return the ranks whose shards, in this order, are a full buffer."""
        return self.node_ranks(rank) if self.replicate else self.ranks_by_piece()

    def replica_ranks(self, rank: int) -> Sequence[int]:
        """Return the ranks that have the same shard as the rank, in the order of their pieces."""
        return self.cross_node_ranks(rank) if self.replicate else (rank,)


def topology_of(world_size: int, ranks_per_node: int | None, shard_dim: int | None) -> Topology:
    """Return the topology; shard_dim: the size of a two-dimensional mesh's second dimension.
    Raises ValueError or TypeError.
    """
    is_count = isinstance(ranks_per_node, int) and not isinstance(ranks_per_node, bool)
    if ranks_per_node is not None and not is_count:
        raise TypeError(
            f"shard: ranks_per_node is {ranks_per_node!r}; expected a whole number, or None"
        )
    if None not in (ranks_per_node, shard_dim) and ranks_per_node != shard_dim:
        raise ValueError(
            f"shard: ranks_per_node is {ranks_per_node}; expected {shard_dim}, the mesh's second "
            f"dimension, or None"
        )
    size = shard_dim or (world_size if ranks_per_node is None else ranks_per_node)
    if size < 1 or world_size % size:
        raise ValueError(
            f"shard: ranks_per_node is {size}; expected a divisor of the {world_size} ranks"
        )
    return Topology(world_size, size, replicate=shard_dim is not None)
