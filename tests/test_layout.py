"""Layout properties for any world size, and a layout that cuts a block must be caught by the
same checker.
"""

from dataclasses import replace

import pytest

from shardcore.layout import BLOCK, FlatLayout, plan_flat

pytest.importorskip("hypothesis", reason="property tests need hypothesis")
from hypothesis import given
from hypothesis import strategies as st

sizes = st.lists(
    st.one_of(st.integers(0, 3 * BLOCK), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 100_003])),
    max_size=12,
)


def check(numels: list[int], layout: FlatLayout) -> None:
    """Raise AssertionError unless the layout keeps every promise of shardcore.layout."""
    world = layout.world_size
    assert layout.shard_numel % BLOCK == 0
    assert [slot.numel for slot in layout.slots] == numels
    end = 0
    for slot in layout.slots:
        assert slot.offset % BLOCK == 0
        assert slot.offset >= end
        end = slot.offset + slot.numel
    assert end <= layout.numel < end + BLOCK * world + BLOCK
    covered: dict[int, int] = dict.fromkeys(range(len(numels)), 0)
    for rank in range(world):
        start, stop = layout.shard_range(rank)
        assert (start, stop) == (rank * layout.shard_numel, (rank + 1) * layout.shard_numel)
        for piece in layout.pieces(start, stop):
            assert piece.numel > 0
            assert piece.start % BLOCK == 0
            assert piece.param_start == covered[piece.slot], (
                "pieces come in order, without holes or overlaps"
            )
            assert layout.slots[piece.slot].offset + piece.param_start == start + piece.start
            covered[piece.slot] += piece.numel
    assert list(covered.values()) == numels
    gaps = list(layout.gaps())
    assert sum(b - a for a, b in gaps) + sum(numels) == layout.numel


@given(sizes, st.integers(1, 1100))
def test_every_element_belongs_to_exactly_one_rank(numels: list[int], world_size: int) -> None:
    check(numels, plan_flat(numels, world_size))


@given(sizes, st.integers(1, 64))
def test_offsets_do_not_depend_on_the_world_size(numels: list[int], world_size: int) -> None:
    assert plan_flat(numels, world_size).slots == plan_flat(numels, 1).slots


def test_units_smaller_than_the_world_leave_empty_shards() -> None:
    layout = plan_flat([10], 4)
    assert [len(layout.pieces(*layout.shard_range(rank))) for rank in range(4)] == [1, 0, 0, 0]


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_broken_twins_are_rejected(world_size: int) -> None:
    numels = [1000, 3, 0, 70_000]
    good = plan_flat(numels, world_size)
    shifted = [
        replace(slot, offset=slot.offset + (1 if i else 0)) for i, slot in enumerate(good.slots)
    ]
    for broken in (
        replace(good, slots=tuple(shifted)),
        replace(good, shard_numel=good.shard_numel - BLOCK),
        replace(good, shard_numel=good.shard_numel + 1),
        replace(good, slots=(*good.slots[:-1], replace(good.slots[-1], offset=0))),
    ):
        with pytest.raises(AssertionError):
            check(numels, broken)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="world_size is 0; expected at least 1"):
        plan_flat([1], 0)
    with pytest.raises(ValueError, match=r"numels\[1\] is -1"):
        plan_flat([1, -1], 1)
