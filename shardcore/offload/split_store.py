"""Optimizer states of which a share stays on the device: each bucket's owned range is cut in two at
a 256-element block.

The first `Bucket.device_numel` elements are served by a DeviceStore and the others by a CpuStore,
with one kernel and the same scalars. No block is cut, so the cut never shows in the bits.

"auto" starts with all states in host memory. It times the second and the third step and their
forwards, and chooses, the same on all ranks, the ratio at which the CPU's part takes no longer than
a forward. States move once, at the next `zero_grad()` that leaves no gradient (`resplit`). Timing
thus changes the share, never the bits.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, cast

import torch

from shardcore._native import _C
from shardcore.distributed.comm import Traffic
from shardcore.engine.bucket import Bucket
from shardcore.engine.plan import Plan
from shardcore.engine.states import DeviceStore, Scalars, Span
from shardcore.layout import BLOCK
from shardcore.offload.cpu_store import CpuStore, OffloadOptions
from shardcore.offload.nvme_states import StateFiles, Unopened
from shardcore.optim.state_format import StateTensors

logger = logging.getLogger("shardcore")

MEASURED_STEPS = 3  # the first is not counted: it allocates memory, and caches are cold
STEPS_OF_ONE = 64  # shares are multiples of 1 / 64
HEADROOM_PARTS = 10  # one of so many parts of the device's memory is left free


def device_numel(bucket: Bucket, ratio: float) -> int:
    """Return how many elements of the owned range the device updates: the CPU has `ratio` of the
    blocks, rounded.
    """
    blocks = bucket.owned_numel // BLOCK
    return (blocks - round(ratio * blocks)) * BLOCK


def split(buckets: Iterable[Bucket], ratio: float) -> None:
    """Let the CPU update `ratio` of each bucket's owned range, its end.

    As in DeepSpeed's Twin-Flow, 1 puts all states into host memory, 0 leaves all on the device.
    """
    for bucket in buckets:
        bucket.device_numel = device_numel(bucket, ratio)


class SplitStore(CpuStore):
    """A CpuStore beside a DeviceStore of the first part of each bucket's owned range.

    If weights are in host memory, the device's part of them is copied to the device for a step, and
    back, through a scratch buffer as large as the largest such part. The CPU updates its part in
    place.
    """

    on_device: DeviceStore

    def __init__(self, buckets: Sequence[Bucket], *arguments: Any, **options: Any) -> None:
        """Allocate zero states for `buckets` where `split` says. See CpuStore."""
        super().__init__(buckets, *arguments, **options)
        self.timed = False  # a step ends when its last weights have arrived
        self._spent_s = 0.0
        self._copied_back: _C.CopyEvent | None = None
        self._make_device_store()

    def _make_device_store(self) -> None:
        self.on_device = DeviceStore(self._buckets, self._device)
        # for weights in host memory: they have no staging buffers
        sizes = {
            bucket: bucket.device_numel * bucket.dtype.itemsize
            for bucket in (() if self._weights else self._buckets)
        }
        self.weight_scratch_bytes = max(sizes.values(), default=0)
        memory = torch.empty(self.weight_scratch_bytes, dtype=torch.uint8, device=self._device)
        self._scratch = {bucket: memory[:size].view(bucket.dtype) for bucket, size in sizes.items()}

    def seconds(self) -> float:
        """Return the time of all steps so far."""
        return self._spent_s

    def device_bytes(self, ratio: float) -> int:
        """Return the bytes of states that stay on the device with this ratio."""
        return sum(
            bucket.state_format.nbytes(device_numel(bucket, ratio)) for bucket in self._buckets
        )

    def extra_device_bytes(self, ratio: float) -> int:
        """Return the additional bytes on the device with this ratio, compared with ratio 1."""
        counts = [(bucket, device_numel(bucket, ratio)) for bucket in self._buckets]
        grads = 0 if self._grads else sum(count for _, count in counts) * torch.float32.itemsize
        scratch = 0
        if not self._weights:
            scratch = max((count * bucket.dtype.itemsize for bucket, count in counts), default=0)
        return self.device_bytes(ratio) + grads + scratch

    def resplit(self, ratio: float) -> None:
        """Move states to the device, which had none, until a share of `ratio` is left in host
        memory.
        """
        split(self._buckets, ratio)
        self._make_device_store()
        for bucket in self._buckets:
            self.on_device.load(bucket, self.shrink(bucket))
        tracked = [bucket for bucket in self._buckets if bucket.bits]
        self.track(tracked)
        for bucket in tracked:  # bits of other ranges: none is known
            bucket.rewritten = True

    def read(
        self, bucket: Bucket, key: str, start: int = 0, numel: int | None = None
    ) -> torch.Tensor:
        """See StateStore. A range on both tiers is joined in host memory."""
        cut, end = bucket.device_numel, bucket.owned_numel if numel is None else start + numel
        # an empty part lies where both tiers' are joined
        if start >= cut or (start == end and bucket.host_numel):
            return super().read(bucket, key, max(cut, start), end - start)
        if end <= cut:
            return self.on_device.read(bucket, key, start, end - start)
        first = self.on_device.read(bucket, key, start, cut - start)
        return torch.cat([first.cpu(), super().read(bucket, key, cut, end - cut).cpu()])

    def states_of(self, bucket: Bucket, start: int, numel: int) -> StateTensors:
        """See StateStore."""
        first = max(0, min(bucket.device_numel - start, numel))
        on_device = self.on_device.states_of(bucket, start, first) if first else {}
        on_cpu = super().states_of(bucket, start + first, numel - first) if first < numel else {}
        if not on_device or not on_cpu:
            return on_device or on_cpu
        return {key: torch.cat([flat.cpu(), on_cpu[key]]) for key, flat in on_device.items()}

    def stored(self, bucket: Bucket) -> Iterator[tuple[str, str, int]]:
        """See StateStore."""
        yield from self.on_device.stored(bucket)
        yield from super().stored(bucket)

    def replace(self, replaced: Sequence[Bucket], new_buckets: Sequence[Bucket]) -> None:
        """See StateStore."""
        raise NotImplementedError("the states of a split store stay where they are")

    def track(self, buckets: Sequence[Bucket]) -> None:
        """See StateStore."""
        self.on_device.track(buckets)
        super().track(buckets)

    def write(self, bucket: Bucket, key: str, start: int, values: torch.Tensor) -> None:
        """See StateStore."""
        first = max(0, min(bucket.device_numel - start, values.numel()))
        self.on_device.write(bucket, key, start, values[:first])
        if first < values.numel():
            super().write(bucket, key, start + first, values[first:])

    def steps(
        self, parts: Sequence[Sequence[Span]], hypers: Scalars
    ) -> Iterator[_C.CopyEvent | None]:
        """See StateStore. The device's share of a part is queued once the first chunks are on
        their way to the CPU.
        """
        begun_s = time.perf_counter()
        update = self._step_in_scratch if self._scratch else self.on_device.step
        yield from self._steps(parts, hypers, lambda on_device: update(on_device, hypers))
        if self.timed:
            self.copies.synchronize()
        if self._copied_back is not None:
            self._copied_back.synchronize()
        self._spent_s += time.perf_counter() - begun_s

    def _step_in_scratch(self, spans: Sequence[Span], hypers: Scalars) -> None:
        """Update weights of host memory on the device, a bucket at a time: copy those that the
        step reads, copy all back.
        """
        for bucket, of_bucket in groupby(spans, key=lambda span: span.bucket):
            of_first, scratch = list(of_bucket), self._scratch[bucket]
            ranges = [slice(span.start, span.start + span.numel) for span in of_first]
            if bucket.state_format.reads_weights:
                for part in ranges:
                    self.copies.from_tier(scratch[part], bucket.owned_weight[part]).wait()
            self.on_device.step(of_first, hypers, scratch)
            for part in ranges:
                self._copied_back = self.copies.to_tier(bucket.owned_weight[part], scratch[part])
            assert self._copied_back is not None
            self._copied_back.wait()  # before the next bucket's weights are written to the scratch


def host_store(
    buckets: Sequence[Bucket],
    copies: _C.HostTier,
    device: torch.device,
    tiers: OffloadOptions,
    files: StateFiles | None,
    nodes: Sequence[int] = (),
) -> CpuStore:
    """Return the store of these tiers, for buckets that `split` has cut. See CpuStore."""
    store = SplitStore if tiers.auto or tiers.ratio < 1.0 else CpuStore
    return store(buckets, copies, device, tiers, files, nodes)


class _Counted:
    """A HostTier without memory."""

    @staticmethod
    def empty(numel: int, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")


def planned_store(
    buckets: Sequence[Bucket], updated: Sequence[Bucket], tiers: OffloadOptions, prefetch: int
) -> CpuStore:
    """Split `buckets` by the ratio of `tiers`, and return a store of the `updated` ones with the
    sizes of `host_store`, but without memory and files.
    """
    weights = buckets if tiers.params == "nvme" else []
    split(weights or updated, tiers.ratio)
    files = None if tiers.path is None else Unopened(())
    store = host_store(updated, cast(Any, _Counted()), torch.device("meta"), tiers, files)
    if weights:
        store.keep_weights(weights, Unopened(()), prefetch)
    return store


def choose_ratio(
    affordable: float, limit_bytes: int, device_bytes: Callable[[float], int]
) -> float:
    """Return the largest share of at most `affordable` that keeps at most `limit_bytes` on the
    device, else the least.
    """
    steps = int(min(1.0, max(0.0, affordable)) * STEPS_OF_ONE)
    while steps < STEPS_OF_ONE and device_bytes(steps / STEPS_OF_ONE) > limit_bytes:
        steps += 1
    return steps / STEPS_OF_ONE


def room_above_peak(device: torch.device) -> float:
    """Return the bytes of a device that the peak of torch's allocator leaves, less the
    headroom; no limit on the CPU.
    """
    if device.type != "cuda":
        return math.inf
    free, total = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return max(0.0, free + idle - total // HEADROOM_PARTS)


def ratio_tuner_of(plan: Plan) -> "RatioTuner | None":
    """Return the tuner of a plan's ratio; None if the user set the ratio."""
    tiers = plan.options["offload"]
    if not isinstance(plan.host, SplitStore) or not tiers.auto:
        return None
    return RatioTuner(plan, plan.host, tiers.device_memory_limit)


class RatioTuner:
    """Times forwards and steps until it has chosen a ratio.

    If the CPU takes all, a step spends `step_s` seconds in its Adam and the copies around it, until
    the last weights are back; a forward takes `forward_s`. A forward hides the CPU's part if its
    share is at most forward_s / step_s. Adam and the link are not timed alone: the times are those
    of the overlapped work, with all ranks active. No ratio changes a bit, so a measurement may
    choose it.

    chosen: the ratio, until `resplit` moves states to it. updated: the last step updated the
    weights.
    """

    def __init__(self, plan: Plan, store: SplitStore, limit_bytes: int | None) -> None:
        """Choose for all ranks, which keep at most `limit_bytes` of the states of `store` on their
        device; None for what the steps that are measured leave free.
        """
        self._comm, self._device = plan.comm, plan.device
        self._store, self._limit_bytes = store, limit_bytes
        self._overlaps: bool = plan.options["overlap_step"]  # a forward can hide a step
        self._room = math.inf
        store.timed = True
        self.chosen: float | None = None
        self.updated = False
        self._steps = 0
        self._before_s = 0.0
        self._forward_s, self._step_s = float("inf"), float("inf")
        self._begun_s: float | None = None

    @property
    def measures(self) -> bool:
        """Whether the next forward is timed. No step may be under way beside it: its waits would
        count as forward.
        """
        return 0 < self._steps < MEASURED_STEPS

    def begin_forward(self) -> None:
        """Note that a forward of the whole model begins; waits for the device if it is timed."""
        self._begun_s = self._now_s() if self.measures else None

    def end_forward(self) -> None:
        """Note that it ends; waits for the device if it is timed."""
        if self._begun_s is not None:
            self._forward_s = min(self._forward_s, self._now_s() - self._begun_s)
            self._begun_s = None

    def begin_step(self) -> None:
        """Note that a step begins, and all before it are complete. Collective where the ratio is
        chosen.
        """
        if not self.updated:  # the last step was skipped, on every rank
            return
        self.updated = False
        self._room = min(self._room, room_above_peak(self._device))
        spent_s = self._store.seconds()
        took_s, self._before_s = spent_s - self._before_s, spent_s
        if self.measures:
            self._step_s = min(self._step_s, took_s)
        self._steps += 1
        if self._steps == MEASURED_STEPS:
            self._choose()

    def _choose(self) -> None:
        measured = torch.tensor(
            [self._forward_s, self._step_s, self._room], dtype=torch.float64, device="cpu"
        )
        rows = self._comm.all_gather_cpu(measured, Traffic.STEP, "a step").tolist()
        # The same on all ranks: the least of their shares. A step of 0 seconds failed.
        affordable = min(forward_s / step_s if step_s > 0 else 1.0 for forward_s, step_s, _ in rows)
        limit, size_of = self._limit_bytes, self._store.device_bytes
        if limit is None:  # what the measured peak leaves, on the rank with the least
            size_of = self._store.extra_device_bytes
            limit = int(min(size_of(0.0), *(room for *_, room in rows)))
        # without an overlapped step nothing is hidden: the device keeps what the limit allows
        self.chosen = choose_ratio(affordable if self._overlaps else 0.0, limit, size_of)
        if self._comm.rank == 0:
            logger.info(
                'offload: "auto" chose the ratio %g: forwards of the ranks take %s ms, steps on '
                "the CPU %s; the device keeps %d bytes of states (of at most %d)%s",
                self.chosen,
                *(", ".join(f"{1e3 * row[i]:.1f}" for row in rows) for i in (0, 1)),
                self._store.device_bytes(self.chosen),
                limit,
                "" if self.chosen <= affordable else "; the CPU's part is longer than a forward",
            )

    def resplit(self) -> None:
        """Move states to the chosen ratio. No step may be under way, and no gradient may be
        kept.
        """
        assert self.chosen is not None
        self._store.resplit(self.chosen)
        self.chosen, self._store.timed = None, False

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
