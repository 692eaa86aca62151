"""The place of each parameter in a flat buffer, and the range of the buffer that each rank owns.

Pure arithmetic: no torch, no communication. Invariants (tested for any world size): every parameter
and every shard starts on a 256-element boundary; all shards of a buffer have the same length;
parameters keep their order and never overlap; the pieces of all ranks together are every element of
every parameter exactly once. The boundary is also the block of the norm and of 8-bit states, so no
block is ever cut (see docs/kernels.md, Blocks).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

BLOCK = 256


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a flat buffer: `numel` elements from `offset`."""

    offset: int
    numel: int


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in one range of the buffer.

    `slot` is the parameter's position in the layout, `param_start` the piece's first element within
    the parameter, `start` its first element within the range.
    """

    slot: int
    param_start: int
    start: int
    numel: int


@dataclass(frozen=True)
class Columns:
    """Columns [first, first + count) of a tensor seen as `rows` rows of `width` elements: a
    slice of it, flat row by row.
    """

    rows: int
    width: int
    first: int
    count: int

    def before(self, row: int, column: int) -> int:
        """Return how many elements of the slice come before this place of the tensor."""
        return row * self.count + min(max(column - self.first, 0), self.count)

    def boxes(self, start: int, numel: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (row, rows, column, columns) in the tensor of elements [start, start + numel) of
        the slice: three at most.
        """
        while numel > 0:
            row, skipped = divmod(start, self.count)
            rows, columns = 1, min(numel, self.count - skipped)
            if columns == self.count:
                rows = numel // columns
            yield row, rows, self.first + skipped, columns
            start, numel = start + rows * columns, numel - rows * columns


@dataclass(frozen=True)
class FlatLayout:
    """A flat buffer of `world_size` shards of `shard_numel` elements each."""

    slots: tuple[Slot, ...]
    world_size: int
    shard_numel: int

    @cached_property
    def numel(self) -> int:
        """Length of the full buffer in elements, padding included."""
        return self.shard_numel * self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return (start, end) of the rank's shard in the full buffer."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def pieces(self, start: int, end: int) -> tuple[Piece, ...]:
        """Return the non-empty pieces of parameters inside [start, end) of the buffer, in order."""
        pieces = []
        for index, slot in enumerate(self.slots):
            low, high = max(start, slot.offset), min(end, slot.offset + slot.numel)
            if low < high:
                pieces.append(Piece(index, low - slot.offset, low - start, high - low))
        return tuple(pieces)

    def gaps(self) -> Iterable[tuple[int, int]]:
        """Yield the (start, end) ranges that belong to no parameter: what must be zero in a
        buffer that is summed.
        """
        cursor = 0
        for slot in self.slots:
            if cursor < slot.offset:
                yield cursor, slot.offset
            cursor = slot.offset + slot.numel
        if cursor < self.numel:
            yield cursor, self.numel


def plan_flat(numels: Sequence[int], world_size: int) -> FlatLayout:
    """Lay parameters of the given sizes one after another, each on a block boundary, and cut the
    buffer into equal shards.
    """
    if world_size < 1:
        raise ValueError(f"plan_flat: world_size is {world_size}; expected at least 1")
    slots = []
    cursor = 0
    for index, numel in enumerate(numels):
        if numel < 0:
            raise ValueError(
                f"plan_flat: numels[{index}] is {numel}; expected a size of at least 0"
            )
        slots.append(Slot(cursor, numel))
        cursor += round_up(numel, BLOCK)
    return FlatLayout(tuple(slots), world_size, round_up(cursor, BLOCK * world_size) // world_size)
