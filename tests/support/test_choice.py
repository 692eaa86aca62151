"""What `make test` leaves to the slow tests: never a value, nor, where pairs are asked for, a
pair.
"""

import itertools
from typing import Any

import pytest

from tests.support.choice import combinations, part, some

TABLES = ([1, 2, 3, 4], ["fp32", "bf16"], [(1, None), (3, True), (3, False)])


def quick(rows: list[Any]) -> list[tuple[Any, ...]]:
    return [row for row in rows if isinstance(row, tuple) and not hasattr(row, "marks")]


@pytest.mark.parametrize("meet", [1, 2, 3])
def test_all_pairs_occur_and_nothing_is_lost(meet: int) -> None:
    rows = combinations(*TABLES, meet=meet)
    whole = list(itertools.product(*TABLES))
    assert [tuple(getattr(row, "values", row)) for row in rows] == whole
    for numbers in itertools.combinations(range(3), meet):
        met = {tuple(row[number] for number in numbers) for row in quick(rows)}
        assert met == set(itertools.product(*(TABLES[number] for number in numbers)))
    assert len(quick(rows)) == {1: 4, 2: 12, 3: 24}[meet]


def test_what_is_not_chosen_is_slow() -> None:
    rows = some([(1, "a"), (2, "b")], [(2, "b")])
    assert [mark.name for mark in rows[0].marks] == ["slow"]
    assert quick(rows) == [(2, "b")]
    with pytest.raises(AssertionError, match="a combination is chosen that is none"):
        some([(1, "a")], [(2, "b")])


def test_parts_of_neighbouring_numbers_are_all_of_it() -> None:
    runs = list("abcde")
    assert (part(runs, 2, 2), part(runs, 2, 3)) == (["a", "c", "e"], ["b", "d"])
    assert part(runs, 1, 3) == runs
