"""torch's own clipping functions, for parameters whose gradients lie in shards.

Trainer, Accelerate, Lightning and most training loops clip by torch.nn.utils.clip_grad_norm_ or clip_grad_value_. From stage 1
on these would find no p.grad, clip nothing and return 0, in silence, and torch has nothing public by which parameters could
answer for themselves. So the first `shard` at stage 1, 2 or 3 replaces the functions in torch.nn.utils and
torch.nn.utils.clip_grad: sharded parameters go to their engine; calls without any go to torch's function, unchanged. What was
imported by name before that (`from torch.nn.utils import clip_grad_norm_` at the top of a script) cannot be reached.

A list that leaves out parameters without a gradient, `[p for p in ... if p.grad is not None]`, is empty then, and the functions
warn. get_total_norm is given gradients, which p.grad does not have: given nothing it warns, given None it raises.
`foreach` only picks torch's implementation, so for sharded parameters it changes nothing.

Tested with torch 2.13.0.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardcore._native import _C
from shardcore.optim import by_engine, check_max_norm, clip_grad_norm_, engine_of
from shardcore.optim.engine import GradShards
from shardcore.optim.options import number

_Tensors = torch.Tensor | Iterable[torch.Tensor]
_torchs: dict[str, Callable[..., Any]] = {}  # what was replaced, by name


def reach_shards() -> None:
    """Let torch's clipping functions reach sharded parameters, from now on in this process."""
    if _torchs:
        return
    ours: dict[str, Callable[..., Any]] = {
        "clip_grad_norm_": _clip_grad_norm_,
        "clip_grad_value_": _clip_grad_value_,
        "clip_grads_with_norm_": _clip_grads_with_norm_,
        "get_total_norm": _get_total_norm,
    }
    for name, function in ours.items():
        _torchs[name] = getattr(nn.utils, name)
        functools.update_wrapper(function, _torchs[name])
        for module in (nn.utils, nn.utils.clip_grad):  # the deprecated clip_grad_norm calls the one in clip_grad
            if hasattr(module, name):
                setattr(module, name, function)


def _listed(tensors: _Tensors) -> Sequence[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


_INSTEAD = (
    "gradients of a sharded model (stage 1 to 3) are in no p.grad: give clip_grad_norm_ all parameters, whatever their "
    "p.grad is; with max_norm=math.inf it only returns the norm"
)


def _warn_if_empty(op: str, listed: Sequence[torch.Tensor]) -> None:
    if not listed:
        warnings.warn(f"{op}: nothing was given, so nothing is clipped and a norm is 0 ({_INSTEAD})", stacklevel=3)


def _any_in_shards(params: Sequence[torch.Tensor]) -> bool:
    return any(engine.grads_in_shards for engine in by_engine(params))


def _clip_grad_norm_(
    parameters: _Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    listed = _listed(parameters)
    if _any_in_shards(listed):
        return clip_grad_norm_(listed, max_norm, norm_type, error_if_nonfinite)
    _warn_if_empty("clip_grad_norm_", listed)
    result: torch.Tensor = _torchs["clip_grad_norm_"](listed, max_norm, norm_type, error_if_nonfinite, foreach)
    return result


def _clip_grads_with_norm_(
    parameters: _Tensors, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    op, listed = "clip_grads_with_norm_", _listed(parameters)

    def coefficient() -> float:
        return _C.clip_coefficient(number(op, "total_norm", total_norm), check_max_norm(op, max_norm))

    _warn_if_empty(op, listed)
    plain = _clip_sharded(op, listed, coefficient, lambda grads, scale: grads.scale(scale))
    if plain:
        _torchs[op](plain, max_norm, total_norm, foreach)


def _clip_grad_value_(parameters: _Tensors, clip_value: float, foreach: bool | None = None) -> None:
    op, listed = "clip_grad_value_", _listed(parameters)

    def limit() -> float:
        value = number(op, "clip_value", clip_value)
        if not value >= 0.0:
            raise ValueError(f"{op}: clip_value has {value}; expected a number of at least 0")
        return value

    _warn_if_empty(op, listed)
    plain = _clip_sharded(op, listed, limit, lambda grads, value: grads.clamp(value))
    if plain:
        _torchs[op](plain, clip_value, foreach)


def _clip_sharded(
    op: str,
    params: Sequence[torch.Tensor],
    check: Callable[[], float],
    clip: Callable[[GradShards, float], None],
) -> Sequence[torch.Tensor]:
    """Clip the gradients of those that are sharded by the number that `check` returns, or raises for; returns the others."""
    if not _any_in_shards(params):
        return params
    value = math.nan
    problems: list[Exception] = []
    try:
        value = check()
    except (TypeError, ValueError) as error:
        problems.append(error)  # the engine raises it on every rank
    grads_of = by_engine(params).items()
    for shards in [engine.own_grads(op, some, f"{value}", problems) for engine, some in grads_of]:
        clip(shards, value)
    return [param for param in params if engine_of(param) is None]


def _get_total_norm(
    tensors: _Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    listed = _listed(tensors)
    if any(tensor is None for tensor in listed):
        raise TypeError(f"get_total_norm: tensors has None; expected tensors ({_INSTEAD})")
    _warn_if_empty("get_total_norm", listed)
    result: torch.Tensor = _torchs["get_total_norm"](listed, norm_type, error_if_nonfinite, foreach)
    return result
