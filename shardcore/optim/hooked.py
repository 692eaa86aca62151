"""Calls of torch that an optimizer makes around its step: hooks of the step, and what torch.compile must not look into."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardcore._native import _C

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make torch.compile call a function as it is (a graph break), not trace it. Elsewhere that costs the test of two flags.

    The second: torch 2.14 runs the code around a generator that it is given untraced, but would trace what that calls.
    """
    outside = _disable_dynamo(function)  # its first call imports torch._dynamo, and each call takes longer than the test

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        compiled = torch.compiler.is_compiling() or get_eval_frame_callback() is not None
        return (outside if compiled else function)(*args, **kwargs)

    return call


def keep_uncompiled(kind: type, *names: str, reason: str | None = None) -> None:
    """Make torch.compile call these methods of a class as they are, and say the reason. Imports torch._dynamo.

    (Bound methods kept on an object would keep that object in a cycle.)
    """
    for name in names:
        method = vars(kind)[name]
        if not hasattr(method, "_torchdynamo_disable"):
            setattr(kind, name, torch.compiler.disable(method, reason=reason))  # type: ignore[no-untyped-call]


def hooked_step(func: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return what torch.optim puts in place of an optimizer's step, which tells the profiler and calls hooks.

    Where there are no hooks, and nobody records functions (torch.profiler), the new one is `func` alone.
    """
    listened = torch.optim.Optimizer.profile_hook_step(func)

    @wraps(func)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        optimizer = args[0]
        assert isinstance(optimizer, torch.optim.Optimizer)
        if (
            torch.compiler.is_compiling()  # as torch has it, and before what torch.compile cannot look into
            or _C.records_functions()
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        ):
            return listened(*args, **kwargs)
        return func(*args, **kwargs)

    return call
