"""Checks of one value: what they return, and that others are refused with their limits."""

import math
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from shardcore.deepspeed import checks

LARGEST = sys.float_info.max


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        (checks.COUNT, 5e8, 500_000_000),
        (checks.SIZE, np.int64(0), 0),
        (checks.NOT_NEGATIVE, LARGEST, LARGEST),
        (checks.POSITIVE, math.ulp(0.0), math.ulp(0.0)),
        (checks.FINITE, -LARGEST, -LARGEST),
        (checks.FINITE, Fraction(1, 2), 0.5),
        (checks.BELOW_1, math.nextafter(1.0, 0.0), math.nextafter(1.0, 0.0)),
        (checks.FLAG, False, False),
        (checks.word("warn", expected="a word"), "WARN", "warn"),
    ],
)
def test_values_are_returned_in_one_type(check: Any, value: Any, expected: Any) -> None:
    checked = check("x", value)
    assert (checked, type(checked)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("check", "values"),
    [
        (checks.COUNT, [0, 0.5, True, "1", None, math.inf, math.nan]),
        (checks.SIZE, [-1]),
        (checks.NOT_NEGATIVE, [-1e-300, math.inf, math.nan, 10**400, False, "1", 1j]),
        (checks.POSITIVE, [0, 0.0]),
        (checks.FINITE, [-math.inf, -(10**400)]),
        (checks.BELOW_1, [1, -0.1]),
        (checks.FLAG, [0, "true", None]),
        (checks.word("warn", expected="a word"), ["", "warned", 1, []]),
    ],
)
def test_others_are_refused(check: Any, values: list[Any]) -> None:
    for value in values:
        with pytest.raises((TypeError, ValueError)) as error:
            check("op: x", value)
        assert str(error.value).startswith(f"op: x is {value!r}; expected ")


def test_auto_is_a_trainers_to_fill_in() -> None:
    with pytest.raises(TypeError, match=r'^x is "auto", which a trainer must fill in first; exp'):
        checks.COUNT("x", "auto")
