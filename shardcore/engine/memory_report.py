"""What a sharded model keeps in memory on this rank, by kind, tier and unit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardcore.engine.bucket import Bucket, BufferPool, Lifetimes
from shardcore.engine.engine import Engine
from shardcore.engine.states import StateStore
from shardcore.optim.interface import engine_of


@dataclass(frozen=True)
class MemoryLine:
    """`bytes` of one kind ("weights", "gradients", "master", "states", "communication") on one
    tier, of one unit.
    """

    unit: str
    kind: str
    tier: str
    bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """The bytes that shardcore allocated on this rank. They include padding and frozen weights, but
    not activations.

    `lines` holds the bytes by unit, kind and tier. `by_kind` and `by_tier` are sums. print() shows
    a table in MiB with a row for each tier. `table(by_unit=True)` adds rows for units.
    """

    lines: tuple[MemoryLine, ...]

    def _sum(self, field: str) -> dict[str, int]:
        sums: dict[str, int] = {}
        for line in self.lines:
            sums[getattr(line, field)] = sums.get(getattr(line, field), 0) + line.bytes
        return sums

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes by kind, over all tiers and units. The four main kinds are always present."""
        return {"weights": 0, "gradients": 0, "master": 0, "states": 0} | self._sum("kind")

    @property
    def by_tier(self) -> dict[str, int]:
        """Bytes by tier ("device", "cpu", "nvme")."""
        return self._sum("tier")

    def __str__(self) -> str:
        """Format as a table in MiB: a row for each tier, a column for each kind."""
        return self.table()

    def table(self, by_unit: bool = False) -> str:
        """Return a table in MiB, with a column for each kind and a row for each tier. by_unit=True
        adds a row for each tier of a unit.
        """
        kinds, tiers = list(self.by_kind), list(self.by_tier)
        rows = [["unit", "tier", *kinds, "total"]]

        def add(unit: str, tier: str, lines: Sequence[MemoryLine]) -> None:
            counts = [sum(line.bytes for line in lines if line.kind == kind) for kind in kinds]
            rows.append([unit, tier, *map(_mib, (*counts, sum(counts)))])

        for unit in dict.fromkeys(line.unit for line in self.lines) if by_unit else ():
            for tier in tiers:
                if lines := [line for line in self.lines if (line.unit, line.tier) == (unit, tier)]:
                    add(unit, tier, lines)
        for tier in tiers:
            add("all", tier, [line for line in self.lines if line.tier == tier])
        add("all", "all", self.lines)
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )


def memory_report(model: nn.Module) -> MemoryReport:
    """Return the memory of a sharded `model` (or of an engine of initialize) on this rank, as a
    MemoryReport.

    Waits for an overlapped step. `shardcore.estimate.predict` returns the same numbers before
    training. "nvme" counts states once: the disk holds two copies unless "durable" is False. Raises
    ValueError for a model that is not sharded.
    """
    engine = engine_of(model)
    if not isinstance(engine, Engine):
        raise ValueError(
            f"memory_report: {type(model).__name__} is not sharded; expected shardcore.shard's "
            f"result"
        )
    engine.synchronize()
    return report_now(engine)


def report_now(engine: Engine) -> MemoryReport:
    """Return what `engine` keeps, while an overlapped step may still run."""
    host_grads = engine.reducer.host_grads
    if host_grads is not None:
        host_grads.drain()
    return MemoryReport(
        tuple(
            memory_lines(
                engine.buckets,
                engine.lifetimes,
                engine.store,
                engine.reducer.pool,
                engine.unsharder.pool if engine.unsharder is not None else None,
                0 if host_grads is None else host_grads.scratch_bytes,
                engine.reducer.buffers_of,
                frozen=[param for _, param in engine.unmanaged if param not in engine.managed],
                frozen_tier="device" if engine.weights_away is None else "cpu",
            )
        )
    )


def memory_lines(
    buckets: Sequence[Bucket],
    lifetimes: Lifetimes,
    store: StateStore,
    pool: BufferPool,
    gathered: BufferPool | None,
    grad_staging_bytes: int,
    local_grads: Callable[[Bucket], Sequence[torch.Tensor]],
    frozen: Sequence[torch.Tensor],
    frozen_tier: str = "device",
) -> Iterator[MemoryLine]:
    """Yield what an engine of these parts keeps, on any device (shardcore.estimate asks on meta).

    pool: the reducer's; gathered: of unsharded weights, None where they are resident;
    grad_staging_bytes: of gradients that are added in host memory; local_grads: the buffers of a
    bucket's; frozen: weights in no bucket, which are on `frozen_tier`.
    """
    pooled = pool.allocated_bytes
    for bucket in buckets:
        unit = bucket.unit or "root"
        numel = bucket.layout.numel if lifetimes.full_weight_resident else bucket.owned_numel
        yield MemoryLine(unit, "weights", bucket.weight_tier, numel * bucket.dtype.itemsize)
        in_grads = gradient_bytes(bucket, local_grads(bucket))
        pooled -= in_grads
        yield MemoryLine(unit, "gradients", "device", in_grads)
        if bucket.host_grad is not None:
            yield MemoryLine(unit, "gradients", "cpu", bucket.host_grad.untyped_storage().nbytes())
        if bucket.group is not None:
            for tier, key, size in store.stored(bucket):
                yield MemoryLine(
                    unit, "master" if key in ("master", "remainder") else "states", tier, size
                )
    yield MemoryLine("frozen", "weights", frozen_tier, sum(param.nbytes for param in frozen))
    if gathered is not None:
        yield MemoryLine(
            "shared", "weights", "device", gathered.allocated_bytes + store.weight_scratch_bytes
        )
    yield MemoryLine("shared", "communication", "device", max(pooled, 0))
    if store.scratch_bytes + grad_staging_bytes:
        yield MemoryLine(
            "shared",
            "communication",
            "device" if store.tier == "device" else "cpu",
            store.scratch_bytes + grad_staging_bytes,
        )


def gradient_bytes(bucket: Bucket, local_grads: Sequence[torch.Tensor]) -> int:
    """Return what a bucket's gradients take now, local and reduced; the same memory counts once."""
    buffers = {id(t): t for t in (bucket.grad, *local_grads) if t is not None}
    return sum(t.nbytes for t in buffers.values())


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f}"
