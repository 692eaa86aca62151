"""What a rank will keep in memory and send in a step, from shapes alone: nothing is allocated and no other rank is needed.

The buckets, their layouts, the states and the buffer pools are the engine's own, on the meta device; only the order in which
one training step takes and gives buffers is told again here (`_Rehearsal`). tests/engine/test_predict.py holds it against
real ranks. Not predicted: activations, buffers of the model, and what shard() and state_dict() need besides while they run.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from shardcore.api import shard
from shardcore.arguments import (
    DTYPES,
    accept_optimizer,
    check_loss_scale,
    check_options,
    loss_scaler,
    offload_options,
    reduce_policy,
)
from shardcore.comm import Comm
from shardcore.engine import build
from shardcore.engine.bucket import LIFETIMES, Bucket, Lifetimes, ReducePolicy, give_full, take_full
from shardcore.engine.buffers import BufferPool
from shardcore.engine.exchange import MAX_IN_FLIGHT
from shardcore.engine.gather import keepers_of
from shardcore.engine.memory import MemoryReport, gradient_bytes, memory_lines
from shardcore.engine.unit import Unit
from shardcore.engine.updater import NORM_ROW_BYTES
from shardcore.engine.use import use_row_bytes
from shardcore.offload_split import cuts_of
from shardcore.predict_tiers import LeavingGrads, MetaStates
from shardcore.topology import Topology, topology_of
from shardcore.units import plan_units

_META = torch.device("meta")


@dataclass(frozen=True)
class Transfer:
    """What one step sends for one purpose: so many collectives, and `bytes` from this rank (it receives as many)."""

    purpose: str
    collectives: int
    bytes: int


@dataclass(frozen=True)
class Prediction:
    """What one rank keeps and sends once training runs: pools grow in the first step, with nodes in the first few.

    resting: memory between steps, after zero_grad. Nothing is given back to the device within a step, so this is also the
    peak; but buffers change their kind: `most` has the most bytes of gradients and of communication on the device at any time.
    transfers: of one step, messages that all backends send (gloo also announces each gather with 24 bytes;
        NCCL's ranks compare 8 before a backward sends).
    """

    numel: int
    units: int
    resting: MemoryReport
    most: Mapping[str, int]
    transfers: tuple[Transfer, ...]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a step."""
        return sum(transfer.bytes for transfer in self.transfers)


class _Place(Comm):
    """A rank of a world that need not exist."""

    def __init__(self, rank: int, topology: Topology) -> None:
        self.group, self.rank, self.world_size, self.topology = None, rank, topology.world_size, topology


def predict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    stage: int = 2,
    *,
    world_size: int,
    rank: int = 0,
    hybrid: bool = False,
    **options: Any,
) -> Prediction:
    """Return what `rank` of `world_size` ranks will keep and send after shard(model, optimizer, stage, **options).

    model: is not changed; its parameters may be on the meta device. optimizer: None for one group of all trainable
    parameters. hybrid: with a mesh of (world_size / ranks_per_node, ranks_per_node) as process_group, which replicates over
    nodes. A parameter is taken to be used once a step, in the order of `model.parameters()`, and units in module order. The
    ratio "auto" is predicted as it begins, as 1.
    Raises ValueError or TypeError for what shard would refuse.
    """
    known = {name: parameter.default for name, parameter in inspect.signature(shard).parameters.items()}
    for name in options:
        if name not in known:
            raise TypeError(f"predict: got the option {name!r}; expected one of shard's: {', '.join(list(known)[3:])}")
    chosen = known | options | {"stage": stage, "backend_sums": True}
    if chosen["process_group"] is not None:
        raise ValueError(
            "predict: process_group was given; expected world_size, and ranks_per_node with hybrid=True for a mesh"
        )
    if world_size < 1:
        raise ValueError(f"predict: world_size is {world_size}; expected at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"predict: rank is {rank} of {world_size}; expected 0 <= rank < world_size")
    per_node = chosen["ranks_per_node"]
    if hybrid and per_node is None:
        raise ValueError("predict: hybrid is True without ranks_per_node; expected the number of ranks that share weights")
    comm = _Place(rank, topology_of(world_size, per_node, per_node if hybrid else None))
    check_options(chosen | {"sharers": len(comm.sharers)})
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]) if optimizer is None else optimizer
    accept_optimizer(adam, chosen["offload"])
    build.check_ownership(model, adam)

    lifetimes = LIFETIMES[stage]
    specs = plan_units(model, chosen["units"])
    kept = build.kept_params(model, chosen["keep_fp32"])
    precision = chosen["precision"]
    builder = build.Builder(comm, lifetimes, None if precision is None else DTYPES[precision], kept, _META)
    buckets = builder.plan(model, specs, adam)
    check_loss_scale(chosen["loss_scale"], precision, {bucket.dtype for bucket in buckets})
    tiers = offload_options(chosen["offload"], stage)
    for bucket in buckets:
        builder.allocate(bucket)
        bucket.weight_tier = tiers.params or "device"
    updated = [bucket for bucket in buckets if bucket.group is not None]
    in_buckets = {managed.param for bucket in buckets for managed in bucket.params}
    frozen = [
        torch.empty(param.shape, dtype=builder.dtype_of(param), device=_META)
        for param in model.parameters()
        if not param.requires_grad and param not in in_buckets
    ]
    rehearsal = _Rehearsal(
        buckets,
        build.units_of(specs, buckets),
        lifetimes,
        comm,
        reduce_policy(chosen, world_size),
        keepers_of(chosen["reshard_after_forward"]),
        loss_scaler(chosen).active,
        MetaStates(updated, tiers),
        frozen,
        cuts_of(updated, tiers.ratio) if tiers.gradients is not None else {},
    )
    rehearsal.run()
    numel = sum(param.numel() for param in model.parameters())
    transfers = tuple(Transfer(purpose, *counted) for purpose, counted in rehearsal.sent.items())
    return Prediction(numel, len(specs), rehearsal.report(), rehearsal.most, transfers)


@dataclass(eq=False)
class _Rehearsal:
    """The buffers of one training step, in the order in which the engine takes and gives them (Reducer, Weights, Updater)."""

    buckets: Sequence[Bucket]
    units: Sequence[Unit]
    lifetimes: Lifetimes
    comm: Comm
    policy: ReducePolicy
    keepers: int  # see keepers_of
    scaled: bool  # losses are: gradients are unscaled in the reduction, in a world of one, too
    store: MetaStates
    frozen: Sequence[torch.Tensor]
    cuts: Mapping[Bucket, int]  # see GradHome
    pool: BufferPool = field(default_factory=lambda: BufferPool(_META))
    gathered: BufferPool = field(default_factory=lambda: BufferPool(_META))
    shown: dict[Bucket, torch.Tensor] = field(default_factory=dict)  # stage 0's param.grad
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)  # purpose -> (collectives, bytes)
    most: dict[str, int] = field(default_factory=dict)
    _in_grads: dict[Bucket, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._order = [bucket for bucket in reversed(self.buckets) if bucket.trainable]
        self._bucket_of = {managed: bucket for bucket in self._order for managed in bucket.params}
        self._arrivals = sorted(self._bucket_of, key=lambda managed: -managed.index)
        self._everyone = range(self.comm.world_size)
        self._levels = [self._everyone] if self.policy.backend_sums else self.comm.topology.levels(self.comm.rank)
        self._in_flight: list[tuple[Bucket, torch.Tensor, int, torch.Tensor, torch.Tensor]] = []
        self._held_bytes = 0  # the sum of _in_grads
        self._known = False
        alone, owners = self.comm.world_size == 1 and not self.scaled, len(self.comm.topology.owners(self.comm.rank))
        self._host = LeavingGrads(self.cuts, self.policy, alone, owners, self.pool, self._count)

    def run(self) -> None:
        """Take steps until the pools have their size: they grow in the first ones."""
        held = -1
        while held != (held := self.pool.allocated_bytes + self.gathered.allocated_bytes):
            self.step()

    def step(self) -> None:
        """Run forwards and backwards, update the weights, forget the gradients."""
        self.sent.clear()
        for micro in range(1, self.policy.accumulate + 1):
            self._move_weights()
            self._backward(reducing=self.policy.sync_each or micro == self.policy.accumulate)
        self._send("agree on the norm", NORM_ROW_BYTES * self.comm.world_size, self._everyone)
        if self.lifetimes.gathers_new_weights:
            for bucket in self.buckets:
                if bucket.group is not None:
                    self._send("gather weights after the step", bucket.layout.numel * bucket.dtype.itemsize, self.comm.sharers)
        self._hide_grads()
        for bucket in self._order:
            bucket.reduced = False
            self._note(bucket)

    def report(self) -> MemoryReport:
        """Return what is allocated now."""
        gathered = None if self.lifetimes.full_weight_resident else self.gathered
        adding = self._host.scratch_bytes
        lines = memory_lines(self.buckets, self.lifetimes, self.store, self.pool, gathered, adding, self.frozen, self.shown.get)
        return MemoryReport(tuple(lines))

    def _send(self, purpose: str, whole_bytes: int, ranks: Sequence[int]) -> None:
        """Count a collective of `ranks` over `whole_bytes`, of which each of them has, or is to have, an equal part."""
        if len(ranks) > 1 and whole_bytes:
            collectives, sent_bytes = self.sent.get(purpose, (0, 0))
            self.sent[purpose] = collectives + 1, sent_bytes + whole_bytes // len(ranks) * (len(ranks) - 1)

    def _count(self, bucket: Bucket) -> None:
        """Learn that the bucket's gradients have other memory now."""
        now = gradient_bytes(bucket, self.shown.get(bucket))
        self._held_bytes += now - self._in_grads.get(bucket, 0)
        self._in_grads[bucket] = now

    def _note(self, bucket: Bucket) -> None:
        """Count the bucket's gradients, and take the most of each kind."""
        self._count(bucket)
        here = {"gradients": self._held_bytes, "communication": self.pool.allocated_bytes - self._held_bytes}
        for kind, count in here.items():
            self.most[kind] = max(self.most.get(kind, 0), count)

    # --- weights (stage 3), as Weights does it ---------------------------------------------------------------------

    def _move_weights(self) -> None:
        apart = len(self.comm.sharers) > 1 or any(bucket.weight_tier != "device" for bucket in self.buckets)
        if self.lifetimes.full_weight_resident or not apart:
            return
        passing = [unit for unit in self.units if not unit.stays]
        known, self._known = self._known, True  # in the first pass no unit is gathered ahead, and none is known to be the last
        for unit in (unit for unit in self.units if unit.stays):
            self._gather(unit, "gather weights in forward")
        for here, ahead in zip(passing, [*passing[1:], None], strict=True):
            self._gather(here, "gather weights in forward")
            if ahead is not None and known:
                self._gather(ahead, "gather weights in forward")
            if self.keepers != 1 and (ahead is not None or not known):  # the last one stays: its backward is next
                self._let_go(here, keep=self.keepers > 1)
        for here, ahead in zip(reversed(passing), [*passing[-2::-1], None], strict=True):
            self._gather(here, "gather weights in backward")
            if ahead is not None and known:
                self._gather(ahead, "gather weights in backward")
            self._let_go(here)
        for unit in self.units:
            self._let_go(unit)

    def _gather(self, unit: Unit, purpose: str) -> None:
        if unit.open:
            return
        unit.open = True
        kept, unit.kept = unit.kept or [], None
        for bucket in unit.buckets:
            bucket.weight = self.gathered.take(bucket.layout.numel, bucket.dtype)
            if kept:
                self.gathered.give(kept.pop(0))
                self._send(f"{purpose}, of parts kept", bucket.weight.nbytes, range(self.keepers))
            else:
                self._send(purpose, bucket.weight.nbytes, self.comm.sharers)

    def _let_go(self, unit: Unit, keep: bool = False) -> None:
        if unit.open:
            unit.open = False
            if keep:
                unit.kept = [self.gathered.take(b.weight.numel() // self.keepers, b.dtype) for b in unit.buckets]
            for bucket in unit.buckets:
                self.gathered.give(bucket.let_go())

    # --- gradients, as Reducer and HandedOut do it --------------------------------------------------------------------

    def _backward(self, reducing: bool) -> None:
        self._hide_grads()
        dtypes = {
            bucket: torch.float32
            if not self.policy.sync_each and self.policy.accumulate > 1
            else self.policy.travels_as(bucket.dtype)
            for bucket in self._order
        }
        missing = {bucket: len(bucket.params) for bucket in self._order}
        waiting = list(self._order) if reducing else []
        for managed in self._arrivals:
            bucket = self._bucket_of[managed]
            missing[bucket] -= 1
            if bucket.wire is None:
                bucket.wire = self._take_full(bucket, dtypes[bucket])
                self._note(bucket)
            while waiting and not missing[waiting[0]]:
                self._launch(waiting.pop(0))
        self._drain(0)
        if reducing:
            self._host.drain()
            self._note(self._order[-1])
        if reducing:
            self._send("agree on used parameters", use_row_bytes(len(self._arrivals)) * self.comm.world_size, self._everyone)
        if self.lifetimes.owns_everything:
            for bucket in self._order:
                if bucket.reduced and bucket.grad is not None:
                    same = bucket.grad.dtype == bucket.dtype
                    self.shown[bucket] = bucket.grad if same else self._take_full(bucket, bucket.dtype)
                    self._note(bucket)

    def _launch(self, bucket: Bucket) -> None:
        assert bucket.wire is not None
        whole, bucket.wire = bucket.wire, None
        self._count(bucket)
        if self.comm.world_size == 1:
            self._finish(bucket, whole)
            return
        self._drain(MAX_IN_FLIGHT - 1)
        self._start(bucket, whole, 0, whole)

    def _start(self, bucket: Bucket, whole: torch.Tensor, level: int, sent: torch.Tensor) -> None:
        ranks = self._levels[level]
        received = self.pool.take(sent.numel() // (len(ranks) if self.policy.backend_sums else 1), sent.dtype)
        self._in_flight.append((bucket, whole, level, sent, received))
        self._note(bucket)
        self._send("exchange gradients", sent.nbytes, ranks)

    def _drain(self, keep: int) -> None:
        while len(self._in_flight) > keep:
            bucket, whole, level, sent, received = self._in_flight.pop(0)
            if level + 1 == len(self._levels):
                self._finish(bucket, whole)
            else:
                partial = self.pool.take(sent.numel() // len(self._levels[level]), torch.float32)
                self._start(bucket, whole, level + 1, partial)
            self.pool.give(received)
            if sent is not whole:
                self.pool.give(sent)

    def _finish(self, bucket: Bucket, sent: torch.Tensor) -> None:
        as_sums = sent.dtype == self.policy.grad_dtype
        alone = self.comm.world_size == 1
        unchanged = alone and not self.scaled and not bucket.reduced and (self.policy.accumulate == 1 or as_sums)
        if bucket in self.cuts:
            source = self._host.reduce(bucket, sent, unchanged, partial(self._release, bucket))
            self._send("gather gradients", source.nbytes, self.comm.topology.owners(self.comm.rank))
            bucket.reduced = True
            self._note(bucket)
            return
        if unchanged:
            bucket.replace_grad(sent, self.pool)
        else:
            if as_sums and self.lifetimes.owns_everything and not bucket.reduced and not alone:
                bucket.replace_grad(sent, self.pool)
            old, dtype = bucket.grad, self.policy.grad_dtype
            if old is None or old.dtype != dtype:
                bucket.replace_grad(self.pool.keep(bucket.owned_numel, dtype), self.pool)
            topology, rank = self.comm.topology, self.comm.rank
            owners = topology.everyone() if self.lifetimes.owns_everything else topology.owners(rank)
            self._send("gather gradients", bucket.owned_numel * dtype.itemsize, owners)
        bucket.reduced = True
        if sent is not bucket.grad:
            self._release(bucket, sent)
        self._note(bucket)

    def _release(self, bucket: Bucket, whole: torch.Tensor) -> None:
        give_full(bucket, whole, self.pool, self.lifetimes)
        self._count(bucket)

    def _take_full(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        passing = not self.lifetimes.full_grad_resident and (self.comm.world_size > 1 or bucket in self.cuts)
        return take_full(bucket, dtype, self.pool, passing)

    def _hide_grads(self) -> None:
        for bucket, shown in self.shown.items():
            if shown is not bucket.grad:
                bucket.resident[shown.dtype] = shown
        self.shown.clear()
