"""Muon on shards: momentum where states live, whole matrices a bucket at a time, and the way
that weights move.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from shardcore._native import _C
from shardcore.distributed.comm import Comm, Traffic, wait_all
from shardcore.engine.bucket import Bucket, Lifetimes
from shardcore.engine.states import Scalars, Span, StateStore
from shardcore.optim.base import Group
from shardcore.optim.muon import MuonKind, MuonStep


@contextmanager
def orthogonalized(
    bucket: Bucket,
    spans: Sequence[Span],
    hypers: Scalars,
    groups: Sequence[Group],
    store: StateStore,
    comm: Comm,
    lifetimes: Lifetimes,
    refuse: Callable[[], None],
) -> Iterator[None]:
    """Let a bucket's gradient be orthogonalized momentum inside the context, if Muon updates it.

    Collective. That is a float32 one, beside the reduced gradient, which comes back. Where `refuse`
    raises nothing changes.
    """
    options = groups[bucket.group or 0]
    if not options["use_muon"]:
        refuse()
        yield
        return
    assert not isinstance(hypers, _C.DeviceScalars)
    gathers = not lifetimes.owns_everything and len(comm.shard_ranks) > 1
    scales = {
        hypers[span.hyper].scale for span in spans if isinstance(hypers[span.hyper], MuonStep)
    }
    reduced = bucket.grad
    try:
        with comm.scope(f"shardcore::orthogonalize({bucket.label})"):
            bucket.grad = _direction(
                bucket,
                options,
                scales.pop() if scales else 1.0,
                store,
                refuse,
                comm if gathers else None,
            )
        yield
    finally:
        bucket.grad = reduced


def _direction(
    bucket: Bucket,
    options: Group,
    scale: float,
    store: StateStore,
    refuse: Callable[[], None],
    comm: Comm | None,
) -> torch.Tensor:
    """Return the way that this rank's elements move: (owned_numel,) float32, on the device.
    comm: gathers momentum.
    """
    assert bucket.grad is not None
    full = torch.zeros(bucket.layout.numel, dtype=torch.bfloat16, device=bucket.grad.device)
    own = bucket.owned_slice(full)
    try:
        refuse()
        grad = bucket.grad.to(torch.float32) * scale
        buffer = store.read(bucket, "momentum_buffer").to(grad.device, copy=True)
        for managed, piece, part in bucket.owned_views(grad):
            if managed.has_grad:
                elements = slice(piece.start, piece.start + piece.numel)
                own[elements] = MuonKind.momentum(options, buffer[elements], part)
                store.write(bucket, "momentum_buffer", piece.start, buffer[elements])
    finally:  # after an error, too: the other ranks wait for it
        if comm is not None:
            wait_all(comm.all_gather([full], Traffic.STEP, "momentum", comm.shard_ranks))
    direction = torch.zeros_like(grad)
    for managed in bucket.params:
        if managed.has_grad and (pieces := bucket.pieces_of(managed)):
            move = MuonKind.direction(options, managed.slice_of(full)).view(-1)
            for piece in pieces:
                direction[piece.start : piece.start + piece.numel] = move[
                    piece.param_start : piece.param_start + piece.numel
                ]
    return direction
