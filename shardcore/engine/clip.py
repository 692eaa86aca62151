"""Clipping reduced gradients in place, some or all of them, apart from a step."""

from collections.abc import Callable, Collection, Sequence

import torch

from shardcore.comm import Comm, Traffic
from shardcore.engine.bucket import Bucket, Lifetimes
from shardcore.engine.host_grads import sq_norm_of
from shardcore.optim import join, norm_part


class OwnGrads:
    """This rank's parts of the reduced gradients of some parameters.

    part: the norm of all ranks' parts, see shardcore.optim.norm_part; device: the engine's.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        chosen: Collection[torch.Tensor] | None,
        norm_type: float | None,
        comm: Comm,
        lifetimes: Lifetimes,
        device: torch.device,
        edited: Callable[[], None],
    ) -> None:
        """Find the gradients of the chosen parameters (None: all), and take their norm, unless norm_type is None. Collective.

        edited: is called when they have other values.
        """
        self.device, self._place, self._edited = device, comm.topology.place(comm.rank), edited
        self._views: dict[Bucket, list[torch.Tensor]] = {}
        for bucket in buckets:
            for start, part in bucket.grads() if bucket.reduced else ():
                for managed, _, view in bucket.owned_views(part, start):
                    if managed.has_grad and (chosen is None or managed.param in chosen):
                        self._views.setdefault(bucket, []).append(view)
        self.part = torch.zeros(2, dtype=torch.float64, device="cpu")
        if norm_type is not None:
            self.part = norm_part([view for views in self._views.values() for view in views], norm_type)
            if not lifetimes.owns_everything:
                rows = comm.tell(self.part, Traffic.READ, "a norm")
                self.part = join([rows[sorted(comm.sharers)]], norm_type)

    def scale(self, coefficient: float) -> None:
        """Multiply them."""
        if coefficient == 1.0:
            return
        for bucket, views in self._views.items():
            torch._foreach_mul_(views, coefficient)
            bucket.sq_norm = self._sq_norm(bucket)
        self._edited()

    def clamp(self, limit: float) -> None:
        """Clip each element to [-limit, limit]. What was not finite goes on to skip the step."""
        for bucket, views in self._views.items():
            before = self._sq_norm(bucket) if bucket.sq_norm is None else bucket.sq_norm
            torch._foreach_clamp_min_(views, -limit)
            torch._foreach_clamp_max_(views, limit)
            bucket.sq_norm = torch.where(before.isfinite().all(), self._sq_norm(bucket), before)
        self._edited()

    def _sq_norm(self, bucket: Bucket) -> torch.Tensor:
        return sq_norm_of(bucket.own_grads(self._place), self.device)
