"""Which combinations of parameters `make test` tries: a few that are chosen. The whole product
is there, marked slow.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def some(rows: Iterable[Sequence[Any]], chosen: Iterable[Sequence[Any]]) -> list[Any]:
    """Return all rows, for parametrize; those that are not among the chosen ones are marked
    slow.
    """
    rows, chosen = [tuple(row) for row in rows], [tuple(row) for row in chosen]
    assert all(row in rows for row in chosen), "a combination is chosen that is none"
    return [row if row in chosen else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


# For parametrize: of a list of runs, a case of several ranks makes every tenth one, and all as a
# slow test.
EVERY = [10, pytest.param(1, marks=pytest.mark.slow)]


def part(runs: Sequence[Any], every: int, number: int) -> list[Any]:
    """Return every `every`-th of `runs`, from another one on for cases of another `number`, so
    that together they make all.
    """
    return list(runs[number % every :: every])


def combinations(*tables: Iterable[Any], meet: int = 2) -> list[Any]:
    """Return every combination of one value of each table, for parametrize; those that are not
    in `few` are marked slow.
    """
    rows = list(itertools.product(*tables))
    return some(rows, few(rows, meet))


def few(rows: Sequence[tuple[Any, ...]], meet: int = 2) -> list[tuple[Any, ...]]:
    """Return few of all combinations of some tables' values.

    Chosen are, one after the other, those that show most that is new (of several, the one whose
    values were used least), until all values of any `meet` tables have met: with 2 every pair of
    values of two tables, with 1 only every value.
    """
    shown = {row: set(itertools.combinations(enumerate(row), meet)) for row in rows}
    left, used, chosen = set().union(*shown.values()), Counter[Any](), list[tuple[Any, ...]]()
    while left:
        best = max(
            rows,
            key=lambda row: (len(shown[row] & left), -sum(used[value] for value in enumerate(row))),
        )
        chosen.append(best)
        left -= shown[best]
        used.update(enumerate(best))
    return chosen
