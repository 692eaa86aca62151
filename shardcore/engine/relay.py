"""A model that is sharded a second time, as `initialize` may: new buckets take the values of the
first engine's.

A new bucket is filled from whole old ones, gathered one after the other: no rank has more than a
few units in full. Values are those of masters. Until the end both engines have their memory, so an
error before the first bucket changes nothing.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from shardcore.engine.bucket import Managed
from shardcore.engine.build import become
from shardcore.engine.engine import Engine
from shardcore.engine.hooks import take_off
from shardcore.optim.interface import Superseded


def begin(op: str, old: Engine) -> None:
    """Bring the values of `old` up to date. Collective; raises on every rank, if on one."""

    def refuse() -> None:
        old.refuse_held(op)
        if old.commits is not None:
            raise NotImplementedError(
                f"{op}: the model's states are in files that outlast the process; expected "
                '"durable": False'
            )
        if old.saving is not None:
            old.saving.wait()

    old.read_all(op, "the model", refuse)
    if old.unsharder is not None:
        old.unsharder.reshard_all()


def values_in(old: Engine, params: Sequence[Managed]) -> Iterator[tuple[Managed, torch.Tensor]]:
    """Yield what parameters have, which may be in buckets of `old`. Collective; each is valid
    until the next.
    """
    wanted = {managed.param: managed for managed in params}
    yield from (
        (managed, managed.local.data)
        for param, managed in wanted.items()
        if param not in old.managed
    )
    buckets = [
        bucket
        for bucket in old.buckets
        if any(managed.param in wanted for managed in bucket.params)
    ]
    fulls = old.full_tensors.of_buckets(
        (bucket, old.master_or_weight(bucket)) for bucket in buckets
    )
    for bucket, full in zip(buckets, fulls, strict=True):
        for managed in bucket.params:
            if managed.param in wanted:
                yield wanted[managed.param], managed.slice_of(full)


@torch.no_grad()
def bring_back(old: Engine, params: Iterable[nn.Parameter]) -> None:
    """Give frozen parameters that are in buckets of `old` memory of their own. Collective."""
    of_old = [old.managed[param] for param in params if param in old.managed]
    for managed, value in values_in(old, of_old):
        become(
            managed.param, managed.as_param(value.to(old.device, managed.param.dtype, copy=True))
        )


def end(old: Engine) -> None:
    """Free `old` and let it, its optimizer and what else refers to it refuse every call."""
    take_off(old.model, old)
    optimizer = old._optimizer()
    if optimizer is not None:
        optimizer.__dict__["state"] = {}
    old.__dict__.clear()
    old.__class__ = Superseded  # type: ignore[assignment]
