"""Checks of one value, of a configuration or of an argument, with one form of error: its
name, the value, and the value expected.
"""

import math
import sys
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch

# (the name of the value, the value as given) -> checked value; raises TypeError, ValueError or
# NotImplementedError
Check = Callable[[str, Any], Any]


def unexpected(where: str, value: Any, expected: str) -> str:
    """Return the text of an error: the value of a key or argument, and what is expected."""
    if isinstance(value, str) and value == "auto":
        return f'{where} is "auto", which a trainer must fill in first; expected {expected}'
    return f"{where} is {value!r}; expected {expected}"


def integer(least: float, most: float, expected: str, kind: str = "a whole number") -> Check:
    """Return the check of a whole number; 5e8, as in JSON files, is one."""

    def check(where: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not is_whole:
            raise TypeError(unexpected(where, value, kind))
        if not least <= value <= most:
            raise ValueError(unexpected(where, value, expected))
        return int(value)

    return check


def number(least: float, most: float, expected: str) -> Check:
    """Return the check of a number, which it makes a float."""

    def check(where: str, value: Any) -> float:
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number:
            raise TypeError(unexpected(where, value, "a number"))
        if not least <= value <= most:
            raise ValueError(unexpected(where, value, expected))
        return float(value)

    return check


def word(*known: str, expected: str, otherwise: str = "") -> Check:
    """Return the check of a word, which it puts into lower case. otherwise: what is added to the
    expectation where a word is unknown.
    """

    def check(where: str, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(unexpected(where, value, expected))
        if value.lower() not in known:
            raise ValueError(unexpected(where, value, expected + otherwise))
        return value.lower()

    return check


def instance(kind: type, expected: str) -> Check:
    """Return the check of a value of one class."""

    def check(where: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(unexpected(where, value, expected))
        return value

    return check


_LARGEST = sys.float_info.max
NOT_NEGATIVE = number(0.0, _LARGEST, "a finite number of at least 0")
POSITIVE = number(math.ulp(0.0), _LARGEST, "a finite number above 0")
FINITE = number(-_LARGEST, _LARGEST, "a finite number")
BELOW_1 = number(0.0, math.nextafter(1.0, 0.0), "a number in [0, 1)")
COUNT = integer(1, math.inf, "at least 1")
SIZE = integer(0, math.inf, "at least 0")
FLAG = instance(bool, "true or false")


def check_loss(op: str, loss: Any) -> None:
    """Raise TypeError or ValueError for a loss that backward cannot begin with."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"{op}: loss has type {type(loss).__name__}; expected a tensor of one element"
        )
    if loss.numel() != 1:
        raise ValueError(
            f"{op}: loss has shape {tuple(loss.shape)}; expected one element (take its mean or sum)"
        )
    if not loss.requires_grad:
        raise ValueError(
            f"{op}: loss does not require a gradient; expected one computed by engine(...) outside "
            f"no_grad"
        )


def refuse_deepcompile(schedule: Any, compiled_autograd_enabled: Any) -> None:
    """Raise NotImplementedError for the arguments of engine.compile that belong to DeepCompile."""
    for name, value in (
        ("schedule", schedule),
        ("compiled_autograd_enabled", compiled_autograd_enabled),
    ):
        if value:
            raise NotImplementedError(
                f"compile: {name} has {value!r}. shardcore does not support DeepCompile; leave "
                f"{name} out"
            )
