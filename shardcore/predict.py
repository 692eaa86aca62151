"""What a rank will keep in memory and send in a step, from shapes alone: nothing is allocated and no other rank is needed.

The buckets, their layouts, the states and the buffer pools are the engine's own, on the meta device; only the order in which
one training step takes and gives buffers is told again here (`_Rehearsal`). tests/engine/test_predict.py holds it against
real ranks. Not predicted: activations, buffers of the model, and what shard() and state_dict() need besides while they run.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardcore.api import shard
from shardcore.arguments import DTYPES, accept_optimizer, check_options, offload_options
from shardcore.comm import Comm
from shardcore.engine import build
from shardcore.engine.bucket import LIFETIMES, Bucket, BufferPool, Lifetimes, ReducePolicy, take_full
from shardcore.engine.exchange import MAX_IN_FLIGHT
from shardcore.engine.memory import MemoryReport, gradient_bytes, memory_lines
from shardcore.engine.store import DeviceStore
from shardcore.engine.unit import Unit
from shardcore.engine.updater import NORM_ROW_BYTES
from shardcore.offload import staging_numel
from shardcore.optim import AdamOptimizer
from shardcore.topology import Topology
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
    """What one rank keeps and sends once training runs (from the second step on).

    resting: memory between steps, after zero_grad. Nothing is given back to the device within a step, so this is also the
    peak; but buffers change their kind: `most` has the most bytes of gradients and of communication at any time of a step.
    transfers: of one step, messages that all backends send (gloo also announces each gather with 16 bytes).
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

    def __init__(self, rank: int, world_size: int) -> None:
        self.group, self.rank, self.world_size = None, rank, world_size
        self.topology = Topology(world_size, world_size)


class _Store(DeviceStore):
    """States on meta that stand for those of a tier."""

    def __init__(self, buckets: Sequence[Bucket], amsgrad: Mapping[Bucket, bool], tier: str) -> None:
        super().__init__(buckets, amsgrad)
        self.tier, self.buckets = tier, buckets

    @property
    def scratch_bytes(self) -> int:
        """See StateStore."""
        if self.tier == "device":
            return 0
        grads = {bucket.grad.dtype for bucket in self.buckets if bucket.grad is not None}
        weights = {bucket.dtype for bucket in self.buckets}
        return staging_numel(self.buckets) * sum(dtype.itemsize for dtype in [*grads, *weights])


def predict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    stage: int = 2,
    *,
    world_size: int,
    rank: int = 0,
    **options: Any,
) -> Prediction:
    """Return what `rank` of `world_size` ranks will keep and send after shard(model, optimizer, stage, **options).

    model: is not changed; its parameters may be on the meta device. optimizer: None for one group of all trainable
    parameters. A parameter is taken to be used once a step, in the order of `model.parameters()`, and units in module order.
    Raises ValueError or TypeError for what shard would refuse.
    """
    known = {name: parameter.default for name, parameter in inspect.signature(shard).parameters.items()}
    for name in options:
        if name not in known:
            raise TypeError(f"predict: got the option {name!r}; expected one of shard's: {', '.join(list(known)[3:])}")
    chosen = known | options | {"stage": stage, "sharers": world_size, "backend_sums": True}
    check_options(chosen)
    for name, only in (("process_group", (None,)), ("ranks_per_node", (None,)), ("reshard_after_forward", (True, False))):
        if not any(chosen[name] is value for value in only):
            expected = " or ".join(map(str, only))
            raise NotImplementedError(f"predict: {name} is {chosen[name]!r}, which is not predicted yet; expected {expected}")
    if world_size < 1:
        raise ValueError(f"predict: world_size is {world_size}; expected at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(f"predict: rank is {rank} of {world_size}; expected 0 <= rank < world_size")
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]) if optimizer is None else optimizer
    if isinstance(adam, AdamOptimizer):
        accept_optimizer(adam)
    build.check_ownership(model, adam)

    lifetimes, comm = LIFETIMES[stage], _Place(rank, world_size)
    specs = plan_units(model, chosen["units"])
    kept = build.kept_params(model, chosen["keep_fp32"])
    builder = build.Builder(comm, lifetimes, DTYPES[chosen["precision"]], kept, _META)
    buckets = builder.plan(model, specs, adam)
    for bucket in buckets:
        builder.allocate(bucket)
    amsgrad = {bucket: bool(adam.param_groups[bucket.group]["amsgrad"]) for bucket in buckets if bucket.group is not None}
    tier = offload_options(chosen["offload"])[0] or "device"
    in_buckets = {managed.param for bucket in buckets for managed in bucket.params}
    frozen = [
        torch.empty(param.shape, dtype=builder.dtype_of(param), device=_META)
        for param in model.parameters()
        if not param.requires_grad and param not in in_buckets
    ]
    sync_each = stage >= 2 if chosen["sync_each"] is None else chosen["sync_each"]
    rehearsal = _Rehearsal(
        buckets,
        build.units_of(specs, buckets),
        lifetimes,
        comm,
        ReducePolicy(
            chosen["accumulate"],
            sync_each,
            DTYPES[chosen["grad_dtype"]],
            DTYPES.get(chosen["reduce_dtype"]),
            chosen["reduction"] == "nccl",
        ),
        chosen["reshard_after_forward"],
        chosen["precision"] == "fp16" and chosen["loss_scale"] != 1.0,
        _Store(list(amsgrad), amsgrad, tier),
        frozen,
    )
    for _ in range(2):  # in the first one pools grow
        rehearsal.step()
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
    reshard: bool
    scaled: bool  # losses are: gradients are unscaled in the reduction, in a world of one, too
    store: _Store
    frozen: Sequence[torch.Tensor]
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
        self._held_bytes = 0  # the sum of _in_grads
        self._known = False

    def step(self) -> None:
        """Run forwards and backwards, update the weights, forget the gradients."""
        self.sent.clear()
        for micro in range(1, self.policy.accumulate + 1):
            self._move_weights()
            self._backward(reducing=self.policy.sync_each or micro == self.policy.accumulate)
        self._send("agree on the norm", NORM_ROW_BYTES * self.comm.world_size)
        if self.lifetimes.full_weight_resident and not self.lifetimes.owns_everything:
            for bucket in self.buckets:
                if bucket.group is not None:
                    self._send("gather weights after the step", bucket.layout.numel * bucket.dtype.itemsize)
        self._hide_grads()
        for bucket in self._order:
            bucket.reduced = False
            self._note(bucket)

    def report(self) -> MemoryReport:
        """Return what is allocated now."""
        gathered = None if self.lifetimes.full_weight_resident else self.gathered
        return MemoryReport(
            tuple(memory_lines(self.buckets, self.lifetimes, self.store, self.pool, gathered, self.frozen, self.shown.get))
        )

    def _send(self, purpose: str, whole_bytes: int) -> None:
        """Count a collective over `whole_bytes`, of which each rank has, or is to have, an equal part."""
        world = self.comm.world_size
        if world > 1 and whole_bytes:
            collectives, sent_bytes = self.sent.get(purpose, (0, 0))
            self.sent[purpose] = collectives + 1, sent_bytes + whole_bytes // world * (world - 1)

    def _note(self, bucket: Bucket) -> None:
        """Learn that the bucket's gradients have other memory now."""
        now = gradient_bytes(bucket, self.shown.get(bucket))
        self._held_bytes += now - self._in_grads.get(bucket, 0)
        self._in_grads[bucket] = now
        here = {"gradients": self._held_bytes, "communication": self.pool.allocated_bytes - self._held_bytes}
        for kind, count in here.items():
            self.most[kind] = max(self.most.get(kind, 0), count)

    # --- weights (stage 3), as Weights does it ---------------------------------------------------------------------

    def _move_weights(self) -> None:
        if self.lifetimes.full_weight_resident or self.comm.world_size == 1:
            return
        passing = [unit for unit in self.units if not unit.stays]
        known, self._known = self._known, True  # in the first pass no unit is gathered ahead, and none is known to be the last
        for unit in (unit for unit in self.units if unit.stays):
            self._gather(unit, "gather weights in forward")
        for here, ahead in zip(passing, [*passing[1:], None], strict=True):
            self._gather(here, "gather weights in forward")
            if ahead is not None and known:
                self._gather(ahead, "gather weights in forward")
            if self.reshard and (ahead is not None or not known):  # the last one stays: its backward is next
                self._let_go(here)
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
        for bucket in unit.buckets:
            bucket.weight = self.gathered.take(bucket.layout.numel, bucket.dtype)
            self._send(purpose, bucket.layout.numel * bucket.dtype.itemsize)

    def _let_go(self, unit: Unit) -> None:
        if unit.open:
            unit.open = False
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
        in_flight: list[tuple[Bucket, torch.Tensor, torch.Tensor | None]] = []
        waiting = list(self._order) if reducing else []
        for managed in self._arrivals:
            bucket = self._bucket_of[managed]
            missing[bucket] -= 1
            if bucket.wire is None:
                bucket.wire = self._take_full(bucket, dtypes[bucket])
                self._note(bucket)
            while waiting and not missing[waiting[0]]:
                self._launch(waiting.pop(0), in_flight)
        while in_flight:
            self._finish(*in_flight.pop(0))
        if reducing:
            self._send("agree on used parameters", len(self._arrivals) * self.comm.world_size)
        if self.lifetimes.owns_everything:
            for bucket in self._order:
                if bucket.reduced and bucket.grad is not None:
                    same = bucket.grad.dtype == bucket.dtype
                    self.shown[bucket] = bucket.grad if same else self._take_full(bucket, bucket.dtype)
                    self._note(bucket)

    def _launch(self, bucket: Bucket, in_flight: list[tuple[Bucket, torch.Tensor, torch.Tensor | None]]) -> None:
        assert bucket.wire is not None
        whole, bucket.wire = bucket.wire, None
        if self.comm.world_size == 1:
            self._finish(bucket, whole, None)
            return
        while len(in_flight) >= MAX_IN_FLIGHT:
            self._finish(*in_flight.pop(0))
        received_numel = whole.numel() // (self.comm.world_size if self.policy.backend_sums else 1)
        in_flight.append((bucket, whole, self.pool.take(received_numel, whole.dtype)))
        self._note(bucket)
        self._send("exchange gradients", whole.numel() * whole.dtype.itemsize)

    def _finish(self, bucket: Bucket, sent: torch.Tensor, received: torch.Tensor | None) -> None:
        as_sums = sent.dtype == self.policy.grad_dtype
        alone = self.comm.world_size == 1
        if alone and not self.scaled and not bucket.reduced and (self.policy.accumulate == 1 or as_sums):
            self._replace_grad(bucket, sent)
        else:
            if as_sums and self.lifetimes.owns_everything and not bucket.reduced and not (alone and self.scaled):
                self._replace_grad(bucket, sent)
            old, dtype = bucket.grad, self.policy.grad_dtype
            if old is None or old.dtype != dtype:
                self._replace_grad(bucket, self.pool.keep(bucket.owned_numel, dtype))
            if self.lifetimes.owns_everything:
                self._send("gather gradients", bucket.owned_numel * dtype.itemsize)
        bucket.reduced = True
        if sent is not bucket.grad:
            if self.lifetimes.full_grad_resident and sent.dtype not in bucket.resident:
                bucket.resident[sent.dtype] = sent
            else:
                self.pool.give(sent)
        if received is not None:
            self.pool.give(received)
        self._note(bucket)

    def _replace_grad(self, bucket: Bucket, grad: torch.Tensor) -> None:
        if bucket.grad is not None:
            self.pool.give(bucket.grad)
        bucket.grad = grad

    def _take_full(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        passing = not self.lifetimes.full_grad_resident and self.comm.world_size > 1
        return take_full(bucket, dtype, self.pool, passing)

    def _hide_grads(self) -> None:
        for bucket, shown in self.shown.items():
            if shown is not bucket.grad:
                bucket.resident[shown.dtype] = shown
        self.shown.clear()
