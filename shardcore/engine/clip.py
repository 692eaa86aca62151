"""Clipping reduced gradients in place, some or all of them, apart from a step."""

from collections.abc import Collection, Sequence

import torch

from shardcore._native import _C
from shardcore.comm import Comm, Traffic
from shardcore.engine.bucket import Bucket, Lifetimes
from shardcore.engine.host_grads import sq_norm_of


def clip(
    buckets: Sequence[Bucket],
    chosen: Collection[torch.Tensor] | None,
    max_norm: float,
    comm: Comm,
    lifetimes: Lifetimes,
    device: torch.device,
) -> tuple[bool, float]:
    """Scale the gradients of the chosen parameters (None: all) to a global norm of at most `max_norm`. Collective.

    Returns whether they were scaled, and the norm before.
    """
    views: dict[Bucket, list[torch.Tensor]] = {}
    for bucket in buckets:
        for start, part in bucket.grads() if bucket.reduced else ():
            for managed, _, view in bucket.owned_views(part, start):
                if managed.has_grad and (chosen is None or managed.param in chosen):
                    views.setdefault(bucket, []).append(view)
    every = [view for of_bucket in views.values() for view in of_bucket]
    norm = _norm_of(every, comm, lifetimes, device)
    coefficient = _C.clip_coefficient(norm, max_norm)
    if coefficient == 1.0 or not every:
        return False, norm
    torch._foreach_mul_(every, coefficient)
    for bucket in views:
        bucket.sq_norm = sq_norm_of(bucket.own_grads(comm.topology.place(comm.rank)), device)
    return True, norm


def _norm_of(views: Sequence[torch.Tensor], comm: Comm, lifetimes: Lifetimes, device: torch.device) -> float:
    part = sq_norm_of(views, device) if views else torch.zeros(2, dtype=torch.float64, device=device)
    if lifetimes.owns_everything:
        return _C.norm_from_sq(part.cpu())
    rows = comm.gather_rows(part, Traffic.READ).cpu()
    return _C.norm_from_sq(_C.sq_norm_add(rows[sorted(comm.sharers)]))
