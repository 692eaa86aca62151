"""`param.grad` at stage 0, where every rank has the averaged gradients in full.

Users may edit, replace and remove these gradients before the step. They are views of the bucket's
reduced gradient or, where that has another dtype than the parameter, of the resident buffer of
local gradients, which is free between backwards. In-place edits show in the buffer's version
counter, which views share; replaced or removed gradients in the identity of `param.grad`.
"""

from collections.abc import Callable, Sequence

import torch

from shardcore._native import _C
from shardcore.engine.bucket import Bucket, Managed


class ParamGrads:
    """The gradients that stage 0 shows as `param.grad`."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        keep_resident: Callable[[Bucket, torch.dtype], torch.Tensor],
    ) -> None:
        """Serve `buckets`, whose reduced gradients every rank has in full. keep_resident: returns
        the resident buffer of a bucket in a dtype.
        """
        self._buckets, self._keep_resident = buckets, keep_resident
        # the buffers that `param.grad` are views of, and how often they were edited
        self._param_grads: dict[Bucket, tuple[torch.Tensor, int]] = {}

    def give(self) -> None:
        """Set `param.grad` of every parameter that has a gradient."""
        for bucket in self._buckets:
            if bucket.grad is None or not bucket.reduced:
                continue
            param_grads = bucket.grad
            if param_grads.dtype != bucket.dtype:
                param_grads = self._keep_resident(bucket, bucket.dtype)
                _C.cast([param_grads], [bucket.grad])
            for managed in bucket.params:
                managed.grad_view = (
                    managed.as_param(managed.slice_of(param_grads)) if managed.has_grad else None
                )
                managed.param.grad = managed.grad_view
            self._param_grads[bucket] = param_grads, self._version(bucket, param_grads)

    def drop(self) -> None:
        """Clear every `param.grad`."""
        self._param_grads.clear()
        for bucket in self._buckets:
            for managed in bucket.params:
                managed.param.grad = managed.grad_view = None

    @torch.no_grad()
    def absorb(self) -> None:
        """Bring the reduced gradients in line with what `param.grad` says now."""
        for bucket in self._buckets:
            param_grads, version = self._param_grads.get(bucket, (None, 0))
            edited = param_grads is not None and self._version(bucket, param_grads) != version
            changed = edited
            for managed in bucket.params:
                grad = managed.param.grad
                if grad is managed.grad_view:
                    if edited and grad is not None and param_grads is not bucket.grad:
                        self._take_edit(bucket, managed, managed.cut(grad))
                    continue
                changed = True
                target = managed.slice_of(self._full_grad(bucket))
                if grad is None:
                    target.zero_()
                else:
                    target.copy_(managed.cut(grad))
                managed.has_grad = grad is not None
                managed.grad_view = grad
            if param_grads is not None:
                self._param_grads[bucket] = param_grads, self._version(bucket, param_grads)
            if changed and bucket.grad is not None:
                bucket.sq_norm = _C.sq_norm([bucket.reduced_slice(bucket.grad)])

    @staticmethod
    def _version(bucket: Bucket, param_grads: torch.Tensor) -> int:
        """The count of edits of a buffer that `param.grad` are views of. (DTensors, which hold
        views of it, have their own.)
        """
        slices = (
            m.grad_view for m in bucket.params if m.sliced is not None and m.grad_view is not None
        )
        return param_grads._version + sum(view._version for view in slices)

    def _take_edit(self, bucket: Bucket, managed: Managed, param_grads: torch.Tensor) -> None:
        """Take the edited elements of a lower-precision view; the others keep their full
        precision.
        """
        full = managed.slice_of(self._full_grad(bucket))
        rounded = torch.empty_like(param_grads)
        _C.cast([rounded], [full])
        torch.where(rounded == param_grads, full, param_grads.to(full.dtype), out=full)

    def _full_grad(self, bucket: Bucket) -> torch.Tensor:
        if bucket.grad is None:
            bucket.grad = torch.zeros(
                bucket.layout.numel, dtype=torch.float32, device=bucket.owned_weight.device
            )
        elif not bucket.reduced:
            bucket.grad.zero_()
        bucket.reduced = True
        return bucket.grad
