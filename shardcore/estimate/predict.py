"""The memory of a rank and the bytes that it sends per step, computed from shapes: nothing is
allocated, no rank is started.

Units, buckets, layouts, states and the buffers of offload are those of `shard`, on the meta device.
Messages are formulas over the buckets (`_Step.transfers`). The size of a buffer pool depends on the
order in which buffers are taken and given back, so `_Step.fill_pools` repeats that order with the
engine's pools. tests/estimate compares all with real ranks. Not predicted: activations, the model's
buffers, and temporary memory of shard() and state_dict().
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardcore.distributed.clock import Clock
from shardcore.distributed.comm import Comm, Started
from shardcore.distributed.topology import Topology, topology_of
from shardcore.engine import build
from shardcore.engine.bucket import (
    LIFETIMES,
    Bucket,
    BufferPool,
    Lifetimes,
    ReducePolicy,
)
from shardcore.engine.memory_report import MemoryReport, memory_lines
from shardcore.engine.quantized import numel_of, with_parts
from shardcore.engine.reduce_scatter import Parts, ReduceScatter
from shardcore.engine.reducer import LocalGrad, use_row_bytes
from shardcore.engine.states import DeviceStore, StateStore
from shardcore.engine.step import STEP_ROW_BYTES
from shardcore.engine.units import Unit, plan_units
from shardcore.engine.unshard import keepers_of
from shardcore.offload.cpu_store import CpuStore, OffloadOptions
from shardcore.offload.host_gradients import IN_FLIGHT, grad_staging_bytes, host_grad_dtype
from shardcore.offload.nvme_states import DiskUse, disk_use
from shardcore.offload.split_store import planned_store
from shardcore.optim import ShardableOptimizer
from shardcore.optim.float8 import float8_formats
from shardcore.options import OPTIONS, ShardOptions, accept_optimizer, check_names

_META = torch.device("meta")


@dataclass(frozen=True)
class Transfer:
    """The collectives of a step for one purpose, and the `bytes` that this rank sends (and
    receives) in them.
    """

    purpose: str
    collectives: int
    bytes: int


@dataclass(frozen=True)
class Copies:
    """Bytes that a rank copies from its device to host memory and back in a step, and how many
    elements the CPU updates.
    """

    to_host: int = 0
    from_host: int = 0
    updated: int = 0


@dataclass(frozen=True)
class Prediction:
    """The memory and the messages of one rank, after its buffer pools grew in the first steps.

    numel: parameters of the model; of a 4-bit weight, those before it was packed.
    resting: memory between steps, after zero_grad. It is also the peak: nothing is freed within a
        step.
    transfers: collectives per step.
    disk: states on disk.
    copies: copies per step, including padding.
    """

    numel: int
    units: int
    resting: MemoryReport
    transfers: tuple[Transfer, ...]
    disk: DiskUse | None = None
    copies: Copies = Copies()

    @property
    def sent_bytes(self) -> int:
        """The bytes sent by this rank per step."""
        return sum(transfer.bytes for transfer in self.transfers)


class _Rank(Comm):
    """A rank without a process group, whose collectives send nothing."""

    def __init__(self, rank: int, topology: Topology) -> None:
        self.group = None
        self.rank = rank
        self.world_size = topology.world_size
        self.topology = topology
        self.uses_nccl, self.clock = True, Clock()  # NCCL keeps no buffers of others
        self.slices, self.across = (), ()

    def all_to_all(self, *_: Any, **__: Any) -> list[Started]:
        return []

    reduce_scatter = all_to_all


class _ReduceScatter(ReduceScatter):
    """The engine's ReduceScatter, without the sums."""

    def _parts(self, flight: Any) -> Parts:
        return _Unsummed(**vars(super()._parts(flight)))


class _Unsummed(Parts):
    def add_up(self, scale: Any, out: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
        return out


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
    """Predict the memory and messages of `rank` of `world_size` ranks after shard(model, optimizer,
    stage, **options).

    model: not changed. Its parameters may be on the meta device.
    optimizer: None for one group of all trainable parameters.
    hybrid: as with a mesh of (world_size / ranks_per_node, ranks_per_node) as process_group, with
        one replica per node.

    Assumes one use of each parameter per backward, in the order of `model.parameters()`, and units
    in module order. The ratio "auto" is predicted as 1, its start. Raises the ValueError or
    TypeError of shard.
    """
    check_names("predict", options, (*OPTIONS[1:], "process_group", "ranks_per_node"))
    per_node = options.pop("ranks_per_node", None)
    if options.pop("process_group", None) is not None:
        raise ValueError(
            "predict: process_group was given; expected world_size, and ranks_per_node with "
            "hybrid=True for a mesh"
        )
    if world_size < 1:
        raise ValueError(f"predict: world_size is {world_size}; expected at least 1")
    if not 0 <= rank < world_size:
        raise ValueError(
            f"predict: rank is {rank} of {world_size}; expected 0 <= rank < world_size"
        )
    if hybrid and per_node is None:
        raise ValueError(
            "predict: hybrid is True without ranks_per_node; expected the number of ranks that "
            "share weights"
        )
    shard_options = ShardOptions(stage=stage, **options)
    if shard_options.chooses_offload:
        raise ValueError(
            'predict: offload is "auto"; expected what it chooses, or `shardcore estimate --fit`, '
            "which does"
        )
    if optimizer is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    accepted = accept_optimizer(optimizer, shard_options.offload)
    build.check_ownership(model, optimizer)
    topology = topology_of(world_size, per_node, per_node if hybrid else None)
    return predict_rank(model, accepted, shard_options, topology, rank)


def predict_rank(
    model: nn.Module,
    optimizer: ShardableOptimizer,
    options: ShardOptions,
    topology: Topology,
    rank: int = 0,
) -> Prediction:
    """Return the prediction for these options of shard and an optimizer that accept_optimizer
    returned. See `predict`.
    """
    comm, stage, world_size = _Rank(rank, topology), options.stage, topology.world_size
    options.check(len(comm.shard_ranks), backend_sums=True)
    specs = plan_units(model, options.units)
    fixed_dtypes = build.fixed_dtypes_of(model, options.keep_fp32)
    builder = build.Builder(comm, LIFETIMES[stage], options.dtype, fixed_dtypes, _META)
    builder.float8 = float8_formats(model)
    buckets = builder.plan(model, specs, optimizer)
    options.check_loss_scale({bucket.dtype for bucket in buckets})
    tiers = options.tiers
    for bucket in buckets:
        builder.allocate(bucket)
        bucket.weight_tier = tiers.params or "device"
    updated = [bucket for bucket in buckets if bucket.group is not None]
    store: StateStore = DeviceStore(updated, _META)
    if tiers.optimizer is not None:
        store = planned_store(buckets, updated, tiers, options.prefetch)
    in_buckets = {managed.param for bucket in buckets for managed in bucket.params}
    named = with_parts(model.named_parameters())
    frozen = [param for _, param in named if not param.requires_grad]
    replicated = [param for param in frozen if param not in in_buckets]
    offloaded = set()
    if tiers.gradients is not None:
        offloaded = {bucket for bucket in updated if bucket.host_numel}
    step = _Step(
        comm,
        buckets,
        build.units_of(specs, buckets),
        LIFETIMES[stage],
        options.reduce_policy(world_size),
        keepers_of(options.reshard_after_forward),
        options.prefetch,
        world_size == 1 and not options.loss_scaler().active,
        offloaded,
    )
    step.fill_pools()
    lines = memory_lines(
        buckets,
        step.lifetimes,
        store,
        step.pool,
        None if step.lifetimes.full_weight_resident else step.gathered,
        grad_staging_bytes(step.offloaded, step.policy),
        step.buffers_of,
        [
            torch.empty(param.shape, dtype=builder.dtype_of(param), device=_META)
            for param in replicated
        ],
    )
    disk = None
    if isinstance(store, CpuStore) and store.in_files is not None:
        weights = () if store.weight_files is None else store.weight_files.chunks
        disk = disk_use(buckets, tiers.durable, store.in_files.chunks, weights)
    return Prediction(
        sum(map(numel_of, model.parameters())),
        len(specs),
        MemoryReport(tuple(lines)),
        step.transfers(),
        disk,
        step.copies(tiers),
    )


@dataclass(eq=False)
class _Step:
    """A training step of this rank: its messages, and the buffers that it takes from pools.

    keepers: see keepers_of. prefetch: units gathered ahead. alone: gradients are neither summed
    over ranks nor unscaled.
    offloaded: the buckets with gradients in host memory.
    """

    comm: Comm
    buckets: Sequence[Bucket]
    units: Sequence[Unit]
    lifetimes: Lifetimes
    policy: ReducePolicy
    keepers: int
    prefetch: int
    alone: bool
    offloaded: Collection[Bucket]

    def __post_init__(self) -> None:
        topology, rank = self.comm.topology, self.comm.rank
        self._levels = topology.levels(rank)
        if self.policy.backend_sums:
            self._levels = [range(topology.world_size)]
        self._replicas = topology.replica_ranks(rank)
        if self.lifetimes.owns_everything:
            self._replicas = topology.ranks_by_piece()
        self._adds_locally = self.policy.accumulate > 1 and not self.policy.sync_each
        self._passing = [unit for unit in self.units if not unit.stays]
        self._order = [bucket for bucket in reversed(self.buckets) if bucket.trainable]
        gradients = (  # parameters arrive in reverse order
            (-managed.index, place, managed.local.numel())
            for place, bucket in enumerate(self._order)
            for managed in bucket.params
        )
        # The bucket of each gradient, and its elements, in backward.
        self._arrivals = [(self._order[place], numel) for _, place, numel in sorted(gradients)]
        self.pool, self.gathered = BufferPool(_META), BufferPool(_META)
        self._reduce_scatter = _ReduceScatter(self.comm, self.pool, self._order, self.policy)
        self._locals = {
            bucket: LocalGrad(bucket, self.pool, self.lifetimes, self.comm.world_size)
            for bucket in self._order
        }
        self._leaving: deque[tuple[Bucket, torch.Tensor, Callable[[torch.Tensor], None]]] = deque()
        self._unsharded: dict[Unit, list[torch.Tensor]] = {}
        self._kept_parts: dict[Unit, list[torch.Tensor]] = {}
        for bucket in self.offloaded:
            dtype = host_grad_dtype(bucket, self.policy, self.alone)
            bucket.host_grad = torch.empty(bucket.host_numel, dtype=dtype, device=_META)

    def _sent_dtype(self, bucket: Bucket) -> torch.dtype:
        return self.policy.travels_as(torch.float32 if self._adds_locally else bucket.grad_dtype)

    # --- messages ---------------------------------------------------------------------------------

    def transfers(self) -> tuple[Transfer, ...]:
        """Return the messages of a step, once the order of units is known."""
        world, sharing = self.comm.world_size, len(self.comm.shard_ranks)
        micros = self.policy.accumulate
        reductions = 1 if self._adds_locally else micros
        sent: dict[str, Transfer] = {}

        def add(purpose: str, ranks: int, sizes: Sequence[int]) -> None:
            """Count a collective of `ranks` per size, in bytes of the full buffer, of which a
            rank sends all parts but one.
            """
            parts = [size // ranks * (ranks - 1) for size in sizes if size and ranks > 1]
            if parts:
                so_far = sent.get(purpose, Transfer(purpose, 0, 0))
                sent[purpose] = Transfer(
                    purpose, so_far.collectives + len(parts), so_far.bytes + sum(parts)
                )

        def weights(units: Iterable[Unit], frozen: bool = True) -> list[int]:
            """Return the bytes of each unit, whose buckets travel in one call."""
            sizes = []
            for unit in units:
                buckets = [b for b in unit.buckets if frozen or b.group is not None]
                kept = self.lifetimes.full_weight_resident
                dtypes = [b.dtype if kept else b.gathered_dtype for b in buckets]
                numels = [b.layout.numel for b in buckets]
                sizes.append(sum(n * d.itemsize for n, d in zip(numels, dtypes, strict=True)))
            return sizes

        if not self.lifetimes.full_weight_resident:
            add("gather weights in forward", sharing, weights(self.units) * micros)
            of_parts = ", of parts kept" if self.keepers else ""
            freed = self._passing[:-1]  # backward begins with the last
            add(
                f"gather weights in backward{of_parts}",
                self.keepers or sharing,
                weights(freed) * micros,
            )
        for bucket in self._order:
            numel, dtype = bucket.layout.numel, self._sent_dtype(bucket)
            for ranks in self._levels:
                add("exchange gradients", len(ranks), [numel * dtype.itemsize] * reductions)
                numel, dtype = numel // len(ranks), torch.float32
            first = later = bucket.owned_numel * self.policy.grad_dtype.itemsize
            if bucket in self.offloaded:  # sums of micro-steps are float32
                later = bucket.owned_numel * torch.float32.itemsize
            add("gather gradients", len(self._replicas), [first] + [later] * (reductions - 1))
        add(
            "agree on used parameters",
            world,
            [use_row_bytes(len(self._arrivals)) * world] * reductions,
        )
        add("agree on the norm", world, [STEP_ROW_BYTES * world])
        if self.lifetimes.gathers_new_weights:
            add("gather weights after the step", sharing, weights(self.units, frozen=False))
        return tuple(sent.values())

    def copies(self, tiers: OffloadOptions) -> Copies:
        """Return the copies of a step, once the order of units is known."""
        if tiers.optimizer is None:
            return Copies()
        micros = self.policy.accumulate
        to_host = from_host = updated = 0
        freed: set[Bucket] = set()
        if not self.keepers:
            freed = {bucket for unit in self._passing[:-1] for bucket in unit.buckets}
        for bucket in self.buckets:
            device_numel = host_numel = 0
            if bucket.group is not None:
                device_numel, host_numel = bucket.device_numel, bucket.host_numel
            updated += host_numel
            grad_bytes = host_grad_dtype(bucket, self.policy, self.alone).itemsize
            if bucket in self.offloaded and not self._adds_locally:
                grad_bytes += torch.float32.itemsize * (micros - 1)
            to_host += host_numel * grad_bytes
            weight_bytes = bucket.dtype.itemsize
            if tiers.params is None:  # the CPU's share of new weights comes back
                from_host += host_numel * weight_bytes
                to_host += host_numel * weight_bytes * bucket.state_format.reads_weights
            else:
                # shards are read where they are gathered, and the device's share of new ones leaves
                gathers = micros * (2 if bucket in freed else 1)
                from_host += bucket.owned_numel * weight_bytes * gathers
                from_host += device_numel * weight_bytes * bucket.state_format.reads_weights
                to_host += device_numel * weight_bytes
        return Copies(to_host, from_host, updated)

    # --- buffers, in the order of Unsharder, Reducer, ReduceScatter and HostGrads -----------------

    def fill_pools(self) -> None:
        """Run steps until the pools no longer grow. The order of units is unknown in the first
        pass.
        """
        order_is_known, before = False, -1
        while before != self._pool_bytes():
            before = self._pool_bytes()
            for micro in range(1, self.policy.accumulate + 1):
                self._move_weights(order_is_known)
                self._backward(self.policy.sync_each or micro == self.policy.accumulate)
                order_is_known = True
            for bucket in self._order:
                bucket.reduced = False

    def buffers_of(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return the buffers of a bucket's local gradient."""
        local = self._locals.get(bucket)
        return [] if local is None else local.buffers

    def _pool_bytes(self) -> int:
        return self.pool.allocated_bytes + self.gathered.allocated_bytes

    def _move_weights(self, order_is_known: bool) -> None:
        offloaded = any(bucket.weight_tier != "device" for bucket in self.buckets)
        gathers = len(self.comm.shard_ranks) > 1 or offloaded
        if self.lifetimes.full_weight_resident or not gathers:
            return
        for unit in self.units:
            if unit.stays:
                self._gather(unit)
        for units, backward in (self._passing, False), (self._passing[::-1], True):
            for number, unit in enumerate(units):
                self._gather(unit)
                if order_is_known:
                    for ahead in units[number + 1 : number + 1 + self.prefetch]:
                        self._gather(ahead)
                # backward begins with the last unit of a forward, which then stays
                stays = order_is_known and unit is units[-1]
                if backward or (self.keepers != 1 and not stays):
                    self._free(unit, keep=not backward and self.keepers > 1)
        for unit in self.units:
            self._free(unit)

    def _gather(self, unit: Unit) -> None:
        if unit not in self._unsharded:
            kept_parts = self._kept_parts.pop(unit, [])
            self._unsharded[unit] = []
            for bucket in unit.buckets:
                self._unsharded[unit].append(
                    self.gathered.acquire(bucket.layout.numel, bucket.gathered_dtype)
                )
                if kept_parts:
                    self.gathered.release(kept_parts.pop(0))

    def _free(self, unit: Unit, keep: bool = False) -> None:
        flats = self._unsharded.pop(unit, [])
        if keep:
            self._kept_parts[unit] = [
                self.gathered.acquire(flat.numel() // self.keepers, flat.dtype) for flat in flats
            ]
        for flat in flats:
            self.gathered.release(flat)

    def _backward(self, reducing: bool) -> None:
        missing = {bucket: len(bucket.params) for bucket in self._order}
        waiting = deque(self._order if reducing else ())
        for bucket, numel in self._arrivals:
            local = self._locals[bucket]
            if local.buffer is None:
                local.buffer = local.acquire(
                    torch.float32 if self._adds_locally else self._sent_dtype(bucket)
                )
            missing[bucket] -= 1
            if reducing:
                self._reduce_scatter.arrive(bucket, numel, self._finish)
            while waiting and not missing[waiting[0]]:
                self._send(self._locals[waiting.popleft()])
        self._reduce_scatter.drain(self._finish)
        self._let_leave(len(self._leaving))
        if not reducing or not self.lifetimes.owns_everything:
            return
        for bucket in self._order:
            # param.grad has a buffer of its own
            if bucket.grad is not None and bucket.grad.dtype != bucket.dtype:
                self._locals[bucket].keep_resident(bucket.dtype)

    def _send(self, local: LocalGrad) -> None:
        bucket, full, dtype = local.bucket, local.buffer, self._sent_dtype(local.bucket)
        assert full is not None
        local.buffer = None
        if full.dtype != dtype:
            sums, full = full, local.acquire(dtype)
            local.release(sums)
        if self.comm.world_size == 1:
            self._finish(bucket, full, Parts(full, 1, full, 0))
        else:
            self._reduce_scatter.send(bucket, full, self._finish)

    def _finish(self, bucket: Bucket, full: torch.Tensor, parts: Parts) -> None:
        dtype, first = self.policy.grad_dtype, not bucket.reduced
        is_plain = self.alone and first and (self.policy.accumulate == 1 or full.dtype == dtype)
        reduced_in_place = self.lifetimes.owns_everything and self.comm.world_size > 1
        if bucket in self.offloaded:
            self._leave(bucket, full, is_plain)
        else:
            if is_plain or (reduced_in_place and first and full.dtype == dtype):
                bucket.replace_grad(full, self.pool)
            elif bucket.grad is None or bucket.grad.dtype != dtype:
                bucket.replace_grad(self.pool.keep(bucket.owned_numel, dtype), self.pool)
            if full is not bucket.grad:
                self._locals[bucket].release(full)
        bucket.reduced = True

    def _leave(self, bucket: Bucket, full: torch.Tensor, is_plain: bool) -> None:
        self._let_leave(len(self._leaving) + 1 - IN_FLIGHT)
        local = self._locals[bucket]
        if is_plain:
            self._leaving.append((bucket, full, local.release))
        else:
            dtype = torch.float32 if bucket.reduced else self.policy.grad_dtype
            copied = self.pool.acquire(bucket.owned_numel, dtype)
            self._leaving.append((bucket, copied, self.pool.release))
            local.release(full)
        if len(self._replicas) == 1:
            self._keep_on_device()

    def _let_leave(self, count: int) -> None:
        self._keep_on_device()
        for _ in range(count):
            _, source, give = self._leaving.popleft()
            give(source)

    def _keep_on_device(self) -> None:
        for bucket, source, _ in self._leaving:
            if bucket.grad is None and bucket.device_numel:
                bucket.grad = self.pool.keep(bucket.device_numel, source.dtype)
