"""Stage 0 hands every parameter its averaged gradient as `param.grad`, and accepts what the user does to it before the step.

The handed tensors are views of the bucket's reduced gradient or, where that has another dtype than the parameter, of the
resident local-gradient buffer, which is free between backwards. In-place edits show in the buffer's version counter (views
share it), replaced or removed gradients in the identity of `param.grad`.
"""

from collections.abc import Callable, Sequence

import torch

from shardcore._native import _C
from shardcore.engine.bucket import Bucket, Managed

TakeFull = Callable[[Bucket, torch.dtype], torch.Tensor]


class HandedOut:
    """The gradients that stage 0 shows as `param.grad`."""

    def __init__(self, buckets: Sequence[Bucket], place: int) -> None:
        """Serve `buckets`, whose reduced gradients are whole on every rank; of the norm, this rank adds the piece `place`."""
        self.buckets, self.place = buckets, place
        self._buffers: dict[Bucket, torch.Tensor] = {}
        self._versions: dict[Bucket, int] = {}

    def give(self, take_full: TakeFull) -> None:
        """Set `param.grad` of every parameter that has a gradient; `take_full` provides a buffer where one is needed."""
        for bucket in self.buckets:
            if bucket.grad is None or not bucket.reduced:
                continue
            shown = bucket.grad
            if shown.dtype != bucket.dtype:
                shown = take_full(bucket, bucket.dtype)
                _C.cast([shown], [bucket.grad])
            for managed in bucket.params:
                managed.grad_view = managed.slice_of(shown) if managed.has_grad else None
                managed.param.grad = managed.grad_view
            self._buffers[bucket], self._versions[bucket] = shown, shown._version

    def shown(self, bucket: Bucket) -> torch.Tensor | None:
        """Return the buffer that the bucket's `param.grad` are views of now."""
        return self._buffers.get(bucket)

    def drop(self) -> None:
        """Clear every `param.grad` and put the buffers back."""
        for bucket, shown in self._buffers.items():
            if shown is not bucket.grad:
                bucket.resident[shown.dtype] = shown
        self._buffers.clear()
        for bucket in self.buckets:
            for managed in bucket.params:
                managed.param.grad = managed.grad_view = None

    @torch.no_grad()
    def absorb(self) -> None:
        """Bring the reduced gradients in line with what `param.grad` says now."""
        for bucket in self.buckets:
            shown = self._buffers.get(bucket)
            edited = shown is not None and shown._version != self._versions[bucket]
            changed = edited
            for managed in bucket.params:
                grad = managed.param.grad
                if grad is managed.grad_view:
                    if edited and grad is not None and shown is not bucket.grad:
                        self._take_edit(bucket, managed, grad)
                    continue
                changed = True
                target = managed.slice_of(self._whole_grad(bucket))
                if grad is None:
                    target.zero_()
                else:
                    target.copy_(grad)
                managed.has_grad = grad is not None
                managed.grad_view = grad
            if shown is not None:
                self._versions[bucket] = shown._version
            if changed and bucket.grad is not None:
                bucket.sq_norm = _C.sq_norm([bucket.piece_slice(bucket.grad, self.place)])

    def _take_edit(self, bucket: Bucket, managed: Managed, shown: torch.Tensor) -> None:
        """Take the edited elements of a lower-precision view; the others keep their full precision."""
        whole = managed.slice_of(self._whole_grad(bucket))
        rounded = torch.empty_like(shown)
        _C.cast([rounded], [whole])
        torch.where(rounded == shown, whole, shown.to(whole.dtype), out=whole)

    def _whole_grad(self, bucket: Bucket) -> torch.Tensor:
        if bucket.grad is None:
            bucket.grad = torch.zeros(bucket.layout.numel, dtype=torch.float32, device=bucket.owned_weight.device)
        elif not bucket.reduced:
            bucket.grad.zero_()
        bucket.reduced = True
        return bucket.grad
