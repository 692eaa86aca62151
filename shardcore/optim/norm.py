"""The global norm of gradients and what clipping makes of it.

Invariant: squares are summed by _C.sq_norm in blocks of 256 and added in double-double, so neither the order nor the
grouping of the tensors changes the norm; what follows is csrc/core/grad_scale.h, one formula for host and device.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from shardcore._native import _C
from shardcore.comm import Comm
from shardcore.optim.dtensor import find_rows, grouped
from shardcore.optim.options import PARAM_DTYPES, dtype_name
from shardcore.optim.scale import check_max_norm

# Local gradients by the groups of ranks that hold the rest of them (shardcore.optim.dtensor.grouped).
ShardedGradients = Mapping[tuple[dist.ProcessGroup, ...], Sequence[torch.Tensor]]


def global_norm(tensors: Sequence[torch.Tensor], sharded: ShardedGradients | None = None) -> float:
    """Return the Euclidean norm over all tensors, rounded to float32; 0 for none. Waits for their devices.

    tensors: float32 | bfloat16 | float16, any shapes, on any devices. A non-finite element makes it non-finite.
    sharded: local parts of which other ranks hold the rest; squares are added over those ranks in rank order, which is
    collective: every rank of the groups makes the same call, even without tensors.
    """
    total = _squares(tensors)
    for groups, parts in (sharded or {}).items():
        squares = _squares(parts)
        for comm in map(Comm, groups):
            squares = _C.sq_norm_add(comm.gather_rows(squares.to(comm.device)).cpu())
        total = _C.sq_norm_add(torch.stack([total, squares]))
    return _C.norm_from_sq(total)


def _squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares as a double-double: float64 (2,) on the CPU."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for t in tensors:
        by_device.setdefault(t.device, []).append(t.detach())
    totals = [_C.sq_norm(_C.dense(group)).cpu() for group in by_device.values()]
    return totals[0] if len(totals) == 1 else _C.sq_norm_add(torch.stack(totals) if totals else torch.zeros(0, 2).double())


def _check_param_and_grad(index: int, param: object) -> None:
    """Raise TypeError or ValueError for what clip_grad_norm_ cannot scale."""
    if not isinstance(param, torch.Tensor):
        raise TypeError(f"clip_grad_norm_: params[{index}] has type {type(param).__name__}; expected a tensor")
    grad = param.grad
    if grad is not None and grad.layout is not torch.strided:
        raise ValueError(f"clip_grad_norm_: grads[{index}] has layout {grad.layout}; expected a dense gradient")
    if grad is not None and grad.dtype not in PARAM_DTYPES:
        raise TypeError(
            f"clip_grad_norm_: grads[{index}] has dtype {dtype_name(grad.dtype)}; expected float32, bfloat16 or float16"
        )


def clip_grad_norm_(model_or_params: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients in place so that their global norm is at most max_norm, and return the norm from before.

    For a module, a parameter or parameters: every ``.grad`` there is multiplied by min(1, max_norm / (norm + 1e-6)), as
    torch.nn.utils.clip_grad_norm_ does with norm_type 2 (a non-finite norm included). Returns a float32 tensor of shape
    () on the first gradient's device. For a module that shardcore.shard has changed the engine clips what it holds, on
    every rank. Gradients of DTensor parameters are clipped by the norm over their mesh: collective, with replicated dimensions
    counted once. In an optimizer's own loop ``step(max_norm=...)`` does the same without rewriting the gradients.
    """
    limit = check_max_norm("clip_grad_norm_", max_norm)
    engine = getattr(model_or_params, "_shardcore_engine", None)
    if engine is not None and not isinstance(model_or_params, torch.Tensor):
        return engine.clip_grad_norm_(limit)  # type: ignore[no-any-return]
    if isinstance(model_or_params, torch.nn.Module):
        model_or_params = model_or_params.parameters()
    if not isinstance(model_or_params, Iterable):
        given = type(model_or_params).__name__
        raise TypeError(f"clip_grad_norm_: model_or_params has type {given}; expected a module, a parameter or parameters")
    params = [model_or_params] if isinstance(model_or_params, torch.Tensor) else list(model_or_params)
    for i, p in enumerate(params):
        _check_param_and_grad(i, p)
    engines = {id(e): e for e in (getattr(p, "_shardcore_engine", None) for p in params) if e is not None}
    if len(engines) > 1 or (engines and not all(hasattr(p, "_shardcore_engine") for p in params)):
        raise ValueError("clip_grad_norm_: params are not all of one sharded model; expected one model at a time")
    for engine in engines.values():
        return engine.clip_grad_norm_(limit, params)  # type: ignore[no-any-return]
    dtensors = find_rows("clip_grad_norm_", params)
    owners = [p for p in params if p.grad is not None]
    grads = [
        dtensors[p].part("clip_grad_norm_", f"grads[{i}]", p.grad) if p in dtensors else p.grad
        for i, p in enumerate(params)
        if p.grad is not None
    ]
    norm = global_norm(*grouped(owners, grads, dtensors))
    coefficient = _C.clip_coefficient(norm, limit)
    with torch.no_grad():
        if grads and coefficient != 1.0:
            torch._foreach_mul_(grads, coefficient)
    return torch.tensor(norm, dtype=torch.float32, device=grads[0].device if grads else None)
