"""The global norm of gradients and what clipping makes of it.

Invariant: squares are summed by _C.sq_norm in blocks of 256 and added in double-double, so neither the order nor the
grouping of the tensors changes the norm; what follows is csrc/core/grad_scale.h, one formula for host and device.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType

import torch
import torch.distributed as dist

from shardcore._native import _C
from shardcore.comm import Comm
from shardcore.optim.dtensor import Ranks, Rows, any_sharded, find_rows, grouped
from shardcore.optim.engine import engine_of
from shardcore.optim.options import PARAM_DTYPES, dtype_name
from shardcore.optim.scale import check_max_norm
from shardcore.optim.uncompiled import uncompiled

# Local gradients by the ranks that hold the rest of them (shardcore.optim.dtensor.grouped).
ShardedGradients = Mapping[Ranks, Sequence[torch.Tensor]]


class Refusal:
    """Why this rank refuses a call in which others wait for its squares: kept until global_norm has told them.

    ``with refusal:`` runs this rank's checks: a ValueError or TypeError ends the block and is kept as ``problem``. Where nobody
    waits it is raised at once.
    """

    def __init__(self, op: str, others_wait: bool) -> None:
        self.op, self._others_wait = op, others_wait
        self.problem: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not self._others_wait or not isinstance(error, TypeError | ValueError):
            return False
        self.problem = self.problem or error
        return True

    def row(self) -> torch.Tensor:
        """Return this rank's number if it refuses, else infinity: float64 (1,)."""
        return torch.tensor([math.inf if self.problem is None else dist.get_rank()], dtype=torch.float64, device="cpu")

    def settle(self, smallest: float) -> None:
        """Raise this rank's problem, or name the rank that refused: the smallest of all rows."""
        if self.problem is not None:
            raise self.problem
        if math.isfinite(smallest):
            raise ValueError(f"{self.op}: rank {smallest:.0f} refused, so no rank wrote anything; its own error says why")


def global_norm(
    tensors: Sequence[torch.Tensor], sharded: ShardedGradients | None = None, refusal: Refusal | None = None
) -> float:
    """Return the Euclidean norm over all tensors, rounded to float32; 0 for none. Waits for their devices.

    tensors: float32 | bfloat16 | float16, any shapes, on any devices; blocks are those of their memory, or of contiguous
    copies of what is not dense. A non-finite element makes it non-finite.
    sharded: local parts of which other ranks hold the rest; squares are added over those ranks in rank order, which is
    collective: every rank of their meshes makes the same call, even without tensors, or with a refusal, which all raise.
    """
    if not sharded:
        return _C.norm_from_sq(_squares(tensors))
    refusal = refusal or Refusal("global_norm", others_wait=True)
    sums = [torch.zeros(2, dtype=torch.float64, device="cpu")] * (1 + len(sharded))
    with refusal:
        sums = [_squares(some) for some in (tensors, *sharded.values())]
    total, refusing = sums[0], refusal.row()
    for ranks, squares in zip(sharded, sums[1:], strict=True):
        for group in ranks.sharded:
            rows = _gather(group, torch.cat([squares, refusing]))
            squares, refusing = _C.sq_norm_add(rows[:, :2].contiguous()), rows[:, 2:].amin(0)
        for group in ranks.replicas:  # they have the same squares, but may have a reason of their own
            refusing = _gather(group, refusing).amin(0)
        total = _C.sq_norm_add(torch.stack([total, squares]))
    refusal.settle(refusing.item())
    return _C.norm_from_sq(total)


def _gather(group: dist.ProcessGroup, row: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks of a group, on the CPU."""
    return Comm(group).tell(row)


def _squares(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares as a double-double: float64 (2,) on the CPU."""
    totals = [_C.sq_norm(group).cpu() for group in _C.dense_by_device(tensors)]
    if len(totals) == 1:
        return totals[0]
    return _C.sq_norm_add(torch.stack(totals) if totals else torch.zeros(0, 2, dtype=torch.float64, device="cpu"))


def _local_grad(op: str, index: int, param: object, dtensors: Mapping[torch.Tensor, Rows]) -> torch.Tensor | None:
    """Return this rank's part of a parameter's gradient. Raises TypeError or ValueError for what cannot be scaled."""
    if not isinstance(param, torch.Tensor):
        raise TypeError(f"{op}: params[{index}] has type {type(param).__name__}; expected a tensor")
    grad = param.grad
    if grad is None:
        return None
    if grad.layout is not torch.strided:
        raise ValueError(f"{op}: grads[{index}] has layout {grad.layout}; expected a dense gradient")
    if grad.dtype not in PARAM_DTYPES:
        raise TypeError(f"{op}: grads[{index}] has dtype {dtype_name(grad.dtype)}; expected float32, bfloat16 or float16")
    return dtensors[param].part(op, f"grads[{index}]", grad) if param in dtensors else grad


@uncompiled
def clip_grad_norm_(model_or_params: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale gradients in place so that their global norm is at most max_norm, and return the norm from before.

    For a module, a parameter or parameters: every ``.grad`` there is multiplied by min(1, max_norm / (norm + 1e-6)), as
    torch.nn.utils.clip_grad_norm_ does with norm_type 2 (a non-finite norm included). Returns a float32 tensor of shape
    () on the first gradient's device. For a module that shardcore.shard has changed the engine clips what it holds, on
    every rank. Gradients of DTensor parameters are clipped by the norm over their mesh: collective, with replicated dimensions
    counted once; if one rank refuses its arguments all raise, and nothing is clipped. In an optimizer's own loop
    ``step(max_norm=...)`` does the same, to the same norm, without rewriting the gradients. Squares are summed in the order in
    which the parameter lies in memory (channels_last, transposed), whatever its gradient's strides.
    """
    op = "clip_grad_norm_"
    engine = engine_of(model_or_params)
    if engine is not None and not isinstance(model_or_params, torch.Tensor):
        return engine.clip_grad_norm_(max_norm)  # type: ignore[no-any-return]
    if isinstance(model_or_params, torch.nn.Module):
        model_or_params = model_or_params.parameters()
    if not isinstance(model_or_params, Iterable):
        given = type(model_or_params).__name__
        raise TypeError(f"{op}: model_or_params has type {given}; expected a module, a parameter or parameters")
    params = [model_or_params] if isinstance(model_or_params, torch.Tensor) else list(model_or_params)
    engines = dict.fromkeys(map(engine_of, params))
    for engine in filter(None, engines):
        of_one = len(engines) == 1
        problem = None if of_one else ValueError(f"{op}: params are not all of one sharded model; expected one model at a time")
        return engine.clip_grad_norm_(max_norm, params, problem)  # type: ignore[no-any-return]
    dtensors = find_rows(op, params)
    refusal = Refusal(op, others_wait=any_sharded(dtensors))
    limit, found = math.inf, {}
    in_order: list[torch.Tensor] = []
    with refusal:
        limit = check_max_norm(op, max_norm)
        found = {i: grad for i, p in enumerate(params) if (grad := _local_grad(op, i, p, dtensors)) is not None}
        in_order = _C.dense(list(found.values()), [params[i] for i in found])  # so it has the bits of step(max_norm=)
    grads = list(found.values())
    norm = global_norm(*grouped([params[i] for i in found], in_order, dtensors), refusal)
    coefficient = _C.clip_coefficient(norm, limit)
    with torch.no_grad():
        if grads and coefficient != 1.0:
            torch._foreach_mul_(grads, coefficient)
    return torch.tensor(norm, dtype=torch.float32, device=grads[0].device if grads else "cpu")
