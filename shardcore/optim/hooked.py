"""torch.optim's wrapper around step, entered only where somebody listens: it takes as long as a whole step of a few tensors."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardcore._native import _C

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


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
