"""The global norm of gradients, and clipping.

Invariant: _C.sq_norm sums squares in blocks of 256 and adds blocks in double-double, so neither the
order nor the grouping of the tensors changes the norm; the coefficient is csrc/core/grad_scale.h,
one formula for host and device. Norms of other orders than 2 are torch's for each tensor (or shard
of one), joined in float64.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardcore._native import _C
from shardcore.distributed.comm import Comm
from shardcore.distributed.compare import Entry
from shardcore.optim.dtensor import Groups, Rows, find_rows, grouped
from shardcore.optim.group_options import PARAM_DTYPES, check_max_norm, number
from shardcore.optim.interface import engine_of
from shardcore.optim.tensor_lists import bad_grad
from shardcore.torch_private import disable_dynamo, replace_clipping

# Local gradients by the ranks that hold the rest of them (shardcore.optim.dtensor.grouped).
ShardedGradients = Mapping[Groups, Sequence[torch.Tensor]]


def check_norm_type(op: str, norm_type: object) -> float:
    """Return norm_type as a float; ValueError unless it is above 0. Infinity, or "inf", is the
    largest element.
    """
    x = math.inf if norm_type == "inf" else number(op, "norm_type", norm_type)
    if not x > 0.0:
        raise ValueError(f"{op}: norm_type is {x}; expected a number above 0, or inf")
    return x


def norm_part(tensors: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of these tensors in a form that `join` adds to others: float64 (2,) on the
    CPU.

    With norm_type 2 that is the sum of squares as a double-double, else (norm, 0).
    """
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in _C.dense(tensors):
        groups.setdefault(tensor.device, []).append(tensor)
    if norm_type == 2.0:
        totals = [_C.sq_norm(group).cpu() for group in groups.values()]
        return totals[0] if len(totals) == 1 else join(totals)
    filled = [
        some
        for group in groups.values()
        if (some := [tensor for tensor in group if tensor.numel()])
    ]
    norms = [
        torch.stack(torch._foreach_norm(some, norm_type, dtype=torch.float32)).cpu().double()
        for some in filled
    ]
    return join([torch.stack([norm, torch.zeros_like(norm)], dim=1) for norm in norms], norm_type)


def join(parts: Sequence[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Add norm_parts, float64 (2,) or rows (n, 2) on the CPU, and return the norm_part of all
    their tensors.
    """
    rows = torch.cat(
        [
            torch.zeros(1, 2, dtype=torch.float64, device="cpu"),
            *(part.view(-1, 2) for part in parts),
        ]
    )
    if norm_type == 2.0:
        return _C.sq_norm_add(rows)
    return torch.stack([torch.linalg.vector_norm(rows[:, 0], norm_type), rows[0, 1]])


def norm_of(part: torch.Tensor, norm_type: float = 2.0) -> float:
    """Return the norm that a norm_part stands for, rounded to float32."""
    return _C.norm_from_sq(part) if norm_type == 2.0 else part[0].float().item()


def global_norm(tensors: Sequence[torch.Tensor], sharded: ShardedGradients | None = None) -> float:
    """Return the Euclidean norm over all tensors, rounded to float32; 0 for none. See
    global_part.
    """
    return norm_of(global_part(tensors, sharded))


def global_part(
    tensors: Sequence[torch.Tensor], sharded: ShardedGradients | None = None, norm_type: float = 2.0
) -> torch.Tensor:
    """Return the norm_part of all tensors, of all ranks. Synchronizes with their devices.

    tensors: float32 | bfloat16 | float16, any shapes, on any devices; blocks are those of their
    memory, or of contiguous copies of what is not dense. A non-finite element makes it non-finite.
    sharded: local parts of which other ranks hold the rest; they are joined over those ranks in
    rank order, which is collective: every rank of their meshes makes the same call, even without
    tensors.
    """
    total = norm_part(tensors, norm_type)
    for groups, local_grads in (sharded or {}).items():
        part = norm_part(local_grads, norm_type)
        for group in groups:
            part = join([Comm(group).all_gather_cpu(part)], norm_type)
        total = join([total, part], norm_type)
    return total


def _local_grad(
    op: str, index: int, param: object, dtensors: Mapping[torch.Tensor, Rows]
) -> torch.Tensor | None:
    """Return this rank's part of a parameter's gradient. Raises TypeError or ValueError for what
    cannot be scaled.
    """
    if not isinstance(param, torch.Tensor):
        raise TypeError(
            f"{op}: params[{index}] is of type {type(param).__name__}; expected a tensor"
        )
    grad = param.grad
    if grad is None:
        return None
    if grad.layout is not torch.strided or grad.dtype not in PARAM_DTYPES:
        raise bad_grad(op, index, param, grad)
    return dtensors[param].part(op, f"grads[{index}]", grad) if param in dtensors else grad


def by_engine(params: Iterable[object]) -> dict[Any, list[torch.Tensor]]:
    """Return the parameters of sharded models among `params`, by engine."""
    engines: dict[Any, list[torch.Tensor]] = {}
    for param in params:
        if isinstance(param, torch.Tensor) and (engine := engine_of(param)) is not None:
            engines.setdefault(engine, []).append(param)
    return engines


def _argument(name: str, value: float) -> Entry:
    return "argument", name, str(value)


@disable_dynamo
def clip_grad_norm_(
    model_or_params: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so their global norm is at most max_norm. Returns the norm before
    clipping.

    Args:
        model_or_params: A module, a parameter or parameters. Each ``.grad`` (float32 | bfloat16 |
            float16) is multiplied by min(1, max_norm / (norm + 1e-6)), as in
            torch.nn.utils.clip_grad_norm_, even if the norm is not finite.
        norm_type: A number above 0, or inf. With 2, the norm is bit for bit the same however
            gradients are sharded.
        error_if_nonfinite: Raise RuntimeError if the norm is not finite, with no gradient changed.

    Returns a float32 tensor of shape () on the engine's or the first gradient's device, the same on
    every rank. Synchronizes with the devices of the gradients. Raises ValueError or TypeError
    before any gradient changes.

    For a sharded model (shardcore.shard), or its parameters, the engine clips its own gradients;
    the call is collective. Parameters of several sharded models, and plain parameters (with the
    same gradients on every rank), are clipped to their joint norm. DTensor parameters are clipped
    by the norm over their mesh: collective, with replicated dimensions counted once. In a training
    loop, ``step(max_norm=...)`` clips to the same norm without writing the gradients. Squares are
    summed in the parameter's order in memory (channels_last, transposed), regardless of its
    gradient's strides.
    """
    op = "clip_grad_norm_"
    engines: dict[Any, list[torch.Tensor] | None]
    engine = engine_of(model_or_params)
    if engine is not None and not isinstance(model_or_params, torch.Tensor):
        engines, params = {engine: None}, []
    else:
        if isinstance(model_or_params, torch.nn.Module):
            model_or_params = model_or_params.parameters()
        if not isinstance(model_or_params, Iterable):
            type_name = type(model_or_params).__name__
            raise TypeError(
                f"{op}: model_or_params is of type {type_name}; expected a module, a parameter or "
                "parameters"
            )
        params = (
            [model_or_params]
            if isinstance(model_or_params, torch.Tensor)
            else list(model_or_params)
        )
        engines = {**by_engine(params)}

    @functools.cache
    def checked() -> tuple[float, float, Mapping[torch.Tensor, Rows], Mapping[int, torch.Tensor]]:
        limit, order = check_max_norm(op, max_norm), check_norm_type(op, norm_type)
        dtensors = find_rows(op, [None if engine_of(p) is not None else p for p in params])
        plain = ((i, p) for i, p in enumerate(params) if engine_of(p) is None)
        return (
            limit,
            order,
            dtensors,
            {i: grad for i, p in plain if (grad := _local_grad(op, i, p, dtensors)) is not None},
        )

    def arguments() -> list[Entry]:
        limit, order, *_ = checked()
        return [_argument("max_norm", limit), _argument("norm_type", order)]

    shards = [
        engine.own_grads(op, engine_params, arguments, lambda: checked()[1])
        for engine, engine_params in engines.items()
    ]
    limit, order, dtensors, plain_grads = checked()
    grads, owners = list(plain_grads.values()), [params[i] for i in plain_grads]
    in_order = _C.dense([*grads], owners)  # for the bits of step(max_norm=)
    part = global_part(*grouped(owners, in_order, dtensors), order)
    norm = norm_of(join([part, *(shard.part for shard in shards)], order), order)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"{op}: the gradients' norm is {norm}, and error_if_nonfinite is True. With "
            "error_if_nonfinite=False, the gradients are scaled all the same"
        )
    coefficient = _C.clip_coefficient(norm, limit)
    for shard in shards:
        shard.scale(coefficient)
    with torch.no_grad():
        if grads and coefficient != 1.0:
            torch._foreach_mul_(grads, coefficient)
    device = shards[0].device if shards else grads[0].device if grads else "cpu"
    return torch.tensor(norm, dtype=torch.float32, device=device)


_Tensors = torch.Tensor | Iterable[torch.Tensor]
_torchs: dict[str, Callable[..., Any]] = {}  # what was replaced, by name


def reach_shards() -> None:
    """Make torch's clipping functions reach sharded parameters, from now on in this process.

    Trainer, Accelerate, Lightning and most training loops clip by torch.nn.utils.clip_grad_norm_ or
    clip_grad_value_. From stage 1 on these would find no p.grad, clip nothing and return 0, and
    torch has no public hook for parameters. So the first `shard` at stage 1, 2 or 3 replaces them
    by functions that pass sharded parameters to their engine and all others to torch's function.
    Tested with torch 2.13.0.
    """
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
        # the deprecated clip_grad_norm calls the one in clip_grad; a function that a script has
        # imported by name before this is not replaced
        for module in (nn.utils, nn.utils.clip_grad):
            if hasattr(module, name):
                setattr(module, name, function)
    # An imported clip_grad_norm_ calls this with the parameters but without norm_type, so it can
    # only refuse. An imported clip_grad_value_ calls nothing that sees parameters.
    replace_clipping(_refuse_early_imports)


def _listed(tensors: _Tensors) -> Sequence[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


_INSTEAD = (
    "A sharded model (stages 1 to 3) keeps no gradients in p.grad. Pass all parameters to "
    "clip_grad_norm_, with or without p.grad; with max_norm=math.inf it only returns the norm"
)


def _warn_if_empty(op: str, listed: Sequence[torch.Tensor]) -> None:
    # where parameters are sharded, `[p for p in parameters if p.grad is not None]` and the list of
    # gradients that get_total_norm takes are empty
    if not listed:
        warnings.warn(
            f"{op}: got no tensors, so nothing is clipped and the norm is 0. {_INSTEAD}",
            stacklevel=3,
        )


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
    if _any_in_shards(listed):  # foreach only selects torch's implementation
        return clip_grad_norm_(listed, max_norm, norm_type, error_if_nonfinite)
    _warn_if_empty("clip_grad_norm_", listed)
    result: torch.Tensor = _torchs["clip_grad_norm_"](
        listed, max_norm, norm_type, error_if_nonfinite, foreach
    )
    return result


def _clip_grads_with_norm_(
    parameters: _Tensors, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    op, listed = "clip_grads_with_norm_", _listed(parameters)
    _warn_if_empty(op, listed)
    if _any_in_shards(listed):

        def coefficient() -> float:
            return _C.clip_coefficient(
                number(op, "total_norm", total_norm), check_max_norm(op, max_norm)
            )

        for engine, params in by_engine(listed).items():
            engine.own_grads(op, params, lambda: [_argument("coefficient", coefficient())]).scale(
                coefficient()
            )
        listed = [param for param in listed if engine_of(param) is None]
    if listed:
        _torchs[op](listed, max_norm, total_norm, foreach)


def _refuse_early_imports(
    parameters: _Tensors, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    if _any_in_shards(_listed(parameters)):
        raise RuntimeError(
            "clip_grad_norm_: imported by name before shard(), it finds no gradient of a sharded "
            "model (stages 1 to 3). Call torch.nn.utils.clip_grad_norm_(parameters, max_norm), or "
            "use shard(clip_grad_norm=max_norm)"
        )
    _torchs["clip_grads_with_norm_"](parameters, max_norm, total_norm, foreach)


def _clip_grad_value_(parameters: _Tensors, clip_value: float, foreach: bool | None = None) -> None:
    op, listed = "clip_grad_value_", _listed(parameters)
    _warn_if_empty(op, listed)
    if _any_in_shards(listed):

        def limit() -> float:
            bound = number(op, "clip_value", clip_value)
            if not bound >= 0.0:
                raise ValueError(f"{op}: clip_value is {bound}; expected a number of at least 0")
            return bound

        for engine, params in by_engine(listed).items():
            engine.own_grads(op, params, lambda: [_argument("clip_value", limit())]).clamp(limit())
        listed = [param for param in listed if engine_of(param) is None]
    if listed:
        _torchs[op](listed, clip_value, foreach)


def _get_total_norm(
    tensors: _Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    listed = _listed(tensors)
    _warn_if_empty("get_total_norm", listed)
    result: torch.Tensor = _torchs["get_total_norm"](listed, norm_type, error_if_nonfinite, foreach)
    return result
