"""Keeps torch.compile out of steps and clipping: it would compile their bookkeeping, in a hundred pieces, for no gain."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make torch.compile call a function as it is (a graph break), not trace it. Elsewhere that costs the test of a flag."""
    outside = _disable_dynamo(function)  # its first call imports torch._dynamo, and each call takes longer than the test

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return (outside if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call
