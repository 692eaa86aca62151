"""The cross entropy of a language model's head without its logits, the largest tensor of all for
long sequences.

Logits are computed for some of the classes at a time, in forward for their sums and in backward
once more for the gradient, and never kept. A chunk's rows of the weight's gradient are complete at
once: nothing is added up in the weight's dtype. The hidden states' gradient adds up over chunks in
float32.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from shardcore.optim.dtensor import is_dtensor

_REDUCTIONS = ("mean", "sum", "none")


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_bytes: int = 256 << 20,
) -> torch.Tensor:
    """Return cross_entropy(linear(hidden, weight, bias), target) without storing all logits.
    Differentiable once.

    Logits are rounded to the dtype of the inputs or of autocast, as by linear. Sums over classes
    are float32. The mean over no targets is NaN, as in torch. Under `shard` at stage 3, call it
    within the forward of a module that contains the weight.

    Args:
        hidden: (..., features); floating point.
        weight: (classes, features), of the same dtype as hidden, or of the dtype of autocast if it
            is enabled.
        target: (...) class indices, int64. Positions of ignore_index are ignored.
        bias: (classes,).
        reduction: "mean" over the positions that are not ignored, "sum", or "none": (...) float32.
        chunk_bytes: Approximate memory of the float32 logits of a chunk, in bytes.

    Raises ValueError for invalid shapes, reduction or chunk_bytes, TypeError for a target of
    another dtype than int64, and IndexError for a class index out of range (on CUDA a device
    assertion).
    """
    _check(hidden, weight, target, bias, reduction, chunk_bytes)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    elif hidden.dtype != weight.dtype:
        raise ValueError(
            f"chunked_cross_entropy: weight is {weight.dtype}; expected {hidden.dtype}, as hidden "
            "(or autocast)"
        )
    flat = hidden.reshape(-1, hidden.shape[-1])
    flat_target = target.reshape(-1)
    size = max(1, min(weight.shape[0], chunk_bytes // max(1, 4 * flat.shape[0])))
    with torch.autocast(hidden.device.type, enabled=False):
        losses: torch.Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            flat, weight, bias, flat_target, ignore_index, size
        )
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (flat_target != ignore_index).sum()


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    reduction: str,
    chunk_bytes: int,
) -> None:
    if is_dtensor(weight):
        raise TypeError(
            "chunked_cross_entropy: weight is a DTensor, sliced over ranks; expected an ordinary "
            "tensor. For sliced logits, use torch.distributed.tensor.parallel.loss_parallel()"
        )
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"chunked_cross_entropy: hidden has shape {tuple(hidden.shape)} and weight "
            f"{tuple(weight.shape)}; expected (..., features) and (classes, features)"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"chunked_cross_entropy: target has shape {tuple(target.shape)}; expected "
            f"{tuple(hidden.shape[:-1])}, as hidden"
        )
    if target.dtype != torch.int64:
        raise TypeError(
            f"chunked_cross_entropy: target is {target.dtype}; expected int64 class indices"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"chunked_cross_entropy: bias has shape {tuple(bias.shape)}; expected "
            f"{tuple(weight.shape[:1])}"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"chunked_cross_entropy: reduction is {reduction!r}; expected one of "
            f"{', '.join(_REDUCTIONS)}"
        )
    if chunk_bytes < 1:
        raise ValueError(
            f"chunked_cross_entropy: chunk_bytes is {chunk_bytes}; expected at least 1"
        )


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The loss of each row, float32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        ignore_index: int,
        size: int,
    ) -> torch.Tensor:
        counts = target != ignore_index
        rows = target.where(counts, 0)
        # IndexError, or CUDA's assertion, for what is no class
        rows.new_empty(weight.shape[0]).index_select(0, rows)
        log_sum = hidden.new_full(rows.shape, -torch.inf, dtype=torch.float32)
        target_logit = torch.zeros_like(log_sum)
        for start in range(0, weight.shape[0], size):
            logits = _logits(hidden, weight, bias, start, size)
            log_sum = torch.logaddexp(log_sum, logits.logsumexp(1))
            column = rows - start
            in_chunk = (column >= 0) & (column < logits.shape[1])
            of_chunk = logits.gather(1, column.where(in_chunk, 0)[:, None])[:, 0]
            target_logit = torch.where(in_chunk, of_chunk, target_logit)
        ctx.save_for_backward(hidden, weight, bias, rows, counts, log_sum)
        ctx.size = size
        return (log_sum - target_logit).where(counts, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, bias, rows, counts, log_sum = ctx.saved_tensors
        for_hidden, for_weight, for_bias, *_ = ctx.needs_input_grad
        grad = grads[0].where(counts, 0.0)[:, None]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        grad_bias = torch.empty_like(bias) if for_bias else None
        for start in range(0, weight.shape[0], ctx.size):
            part = _logits(hidden, weight, bias, start, ctx.size).sub_(log_sum[:, None]).exp_()
            column = rows - start
            in_chunk = (column >= 0) & (column < part.shape[1])
            part.scatter_add_(1, column.where(in_chunk, 0)[:, None], -in_chunk[:, None].float())
            part = part.mul_(grad)
            chunk = slice(start, start + ctx.size)
            if grad_bias is not None:
                grad_bias[chunk] = part.sum(0)
            part = part.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += part @ weight[chunk]
            if grad_weight is not None:
                torch.mm(part.t(), hidden, out=grad_weight[chunk])
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            grad_bias,
            None,
            None,
            None,
        )


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, start: int, size: int
) -> torch.Tensor:
    """Return the float32 logits of classes [start, start + size): a tensor of its own."""
    part = None if bias is None else bias[start : start + size]
    logits = torch.nn.functional.linear(hidden, weight[start : start + size], part)
    return logits.float()
