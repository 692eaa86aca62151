"""Contexts in which full weights are read and edited, and what ranks agree on at their end.

At stage 3 each rank keeps its shard of the full weights that it has, so ranks with different ones
would mix them. Below stage 3 they would train with different weights. So either all ranks compare
what they are about to keep, or one rank's weights become those of all. Leaving a context is
collective: a rank whose block raises an error takes part, too.

Note [Local]: inside `gathered`, DeepSpeed's GatheredParameters, a state dict of gathered weights is
local, since scripts save there on one rank alone. With a modifier_rank so is a load: it edits the
gathered weights, and masters follow at the end.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial

import torch
from torch import nn

from shardcore.distributed.comm import Comm, Traffic, as_bytes
from shardcore.engine.agreement import OtherCallError, agree, value_read
from shardcore.engine.engine import Engine
from shardcore.engine.units import Unit
from shardcore.optim.dtensor import is_dtensor
from shardcore.torch_private import storage_id

_END = "the end of"


@contextmanager
def full_params(engine: Engine, params: set[nn.Parameter]) -> Iterator[None]:
    """Keep `params` unsharded inside the context; at stage 3 edits have to be the same on all
    ranks. Collective there.

    Raises ValueError on all ranks, with the weights as before, if they are not.
    """
    engine.refuse_away("full_params")
    if engine.unsharder is None:
        yield
        return
    compare = partial(_refuse_differences, engine, "full_params")
    with engine.unsharder.full_params(params, partial(_settle, compare)):
        yield


@contextmanager
def gathered(
    engine: Engine, params: Sequence[nn.Parameter], modifier_rank: int | None
) -> Iterator[None]:
    """Be `full_params`, with local state dicts; with a modifier_rank its weights become those of
    all ranks at the end.

    modifier_rank: a rank of torch.distributed. Collective, but at stages 0 to 2 without a
    modifier_rank.
    """
    unsharder, op = engine.unsharder, f"GatheredParameters(modifier_rank={modifier_rank})"
    engine.refuse_away(op)
    source = None if modifier_rank is None else engine.comm.rank_of(op, modifier_rank)
    versions: list[int] = []

    def make_equal(units: Sequence[Unit]) -> None:
        if source is not None:
            _spread(engine, op, params, versions, source)
        # a context around this one makes the weights equal
        elif engine.gathered.covers(params, spread=True):
            return
        _refuse_differences(engine, op, units, set(params))

    context: AbstractContextManager[None] = nullcontext()
    if unsharder is not None:
        settle = partial(_settle, make_equal)
        context = unsharder.full_params(set(params), settle, keep_last=True)
    elif source is not None:
        context = leaving(partial(_settle, make_equal, ()))
    with context:
        versions += [param._version for param in params]
        with _keeping_memory(params), engine.gathered.opened(params, spread=source is not None):
            yield


@contextmanager
def _keeping_memory(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Take `param.data = values` for an edit, as DeepSpeed does: at the end each parameter has its
    own memory again.

    Values of another shape or dtype are left to be refused.
    """
    own = {param: param.data for param in params if not is_dtensor(param)}
    try:
        yield
    finally:
        for param, data in own.items():
            assigned = param.data
            fits = (assigned.shape, assigned.dtype) == (data.shape, data.dtype)
            if fits and storage_id(assigned.untyped_storage()) != storage_id(
                data.untyped_storage()
            ):
                data.copy_(assigned)
                param.data = data
                torch.autograd.graph.increment_version(param)


@contextmanager
def leaving(settle: Callable[[], Exception | None]) -> Iterator[None]:
    """Call the collective `settle` at the end, also where the block raises: the other ranks wait
    for it.

    An error that it returns is raised.
    """
    try:
        yield
    except Exception:
        with suppress(Exception):  # the first error is raised
            settle()
        raise
    if (problem := settle()) is not None:
        raise problem


def _settle(
    make_equal: Callable[[Sequence[Unit]], None], units: Sequence[Unit]
) -> Exception | None:
    """Call `make_equal` once all ranks are at the end of their blocks; returns the error of a rank
    that made another call before.
    """
    problem: OtherCallError | None = None
    while True:
        try:
            make_equal(units)
            return problem
        except OtherCallError as error:  # it leaves its block by this error
            if all(call.startswith(_END) for call in error.calls):
                raise
            problem = error.with_traceback(None)


def _spread(
    engine: Engine, op: str, params: Sequence[nn.Parameter], versions: Sequence[int], source: int
) -> None:
    """Let rank `source`'s weights, edited through `.data`, too, be those of all ranks. versions:
    those before the edits.
    """
    comm, managed_params = (
        engine.comm,
        [engine.managed.get(param) or engine.constant[param] for param in params],
    )
    for managed in managed_params:
        if engine.trains(managed.param):
            # perhaps through .data, which no version counter shows
            engine.bucket_of[managed.param].changed = True
    if comm.world_size == 1:
        return
    _begin_settling(
        comm,
        op,
        f"{', '.join(managed.name for managed in managed_params)} with the edits of rank {source}",
    )
    edited_here = [
        param._version != version for param, version in zip(params, versions, strict=True)
    ]
    edited = torch.tensor(edited_here, device=comm.device)
    comm.broadcast(edited, source, op)
    for managed, is_edited in zip(managed_params, edited.tolist(), strict=True):
        value = managed.param.detach()
        sent = value.contiguous()
        comm.broadcast(sent, source, op)
        if sent is not value:
            value.copy_(sent)
        if is_edited:
            torch.autograd.graph.increment_version(managed.param)
        else:  # what another rank wrote is gone
            managed.version = managed.version_now


def _refuse_differences(
    engine: Engine, op: str, units: Sequence[Unit], params: Collection[nn.Parameter] | None = None
) -> None:
    """Raise ValueError on all ranks if their full weights of `units` differ. Reads all of them,
    as edits may be unseen ones.

    params: which ones the context is for, None for all; of the others only edits that are seen.
    """
    comm, buckets = engine.comm, [bucket for unit in units for bucket in unit.buckets]
    if comm.world_size == 1 or not buckets:
        return
    weights = [
        (managed.name, managed.slice_of(bucket.weight))
        for bucket in buckets
        for managed in bucket.params
        if params is None or managed.param in params or managed.edited
    ]

    def difference() -> Exception | None:
        digests = torch.stack([digest_of(weight) for _, weight in weights]).cpu()
        rows = comm.all_gather_cpu(digests, Traffic.READ, op)
        for (name, _), row in zip(weights, rows.T.tolist(), strict=True):
            others = [rank for rank, digest in enumerate(row) if digest != row[0]]
            if others:
                return ValueError(
                    f"{op}: rank {others[0]} leaves the block with other values of {name} than "
                    f"rank 0; expected the same edits on every rank, or "
                    "deepspeed.zero.GatheredParameters(modifier_rank=), which copies that "
                    "rank's edits to all (the weights are as before)"
                )
        return None

    if params is None:  # fewer kernels
        digests = torch.stack([digest_of(bucket.weight) for bucket in buckets]).tolist()
    else:
        digests = [(name, digest_of(weight).item()) for name, weight in weights]
    _begin_settling(comm, op, f"the weights {digests}", difference)


def _begin_settling(
    comm: Comm, op: str, what: str, difference: Callable[[], Exception | None] | None = None
) -> None:
    comm.refuse_if_broken()
    agree(comm, f"{_END} {op}", entries=[value_read(what)], over=comm.slices, explain=difference)


_CHUNK = 1 << 20


@torch.no_grad()
def digest_of(values: torch.Tensor) -> torch.Tensor:
    """Return a number (int64, of shape ()) that other bits, or the same in other places, change."""
    data = as_bytes(values.detach())
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() - data.numel() % 8
    words = data[:whole].view(torch.int64)
    parts = [words[start : start + _CHUNK] for start in range(0, words.numel(), _CHUNK)] + [
        data[whole:].to(torch.int64)
    ]
    odd = torch.arange(1, 2 * _CHUNK, 2, device=data.device)  # so that each bit of a word counts
    sums = torch.stack([(part * odd[: part.numel()]).sum() for part in parts])
    return (sums * odd[: sums.numel()]).sum()
