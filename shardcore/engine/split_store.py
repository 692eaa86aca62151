"""Optimizer states of which a share stays on the device: each bucket's owned range is cut in two at a 256-element block.

Note [Choosing a share]: of a step in which the CPU takes all, `step_s` seconds go for its Adam and the copies around it, until
the last weights are back; a forward takes `forward_s`. So the CPU's share may be forward_s / step_s: the rest, on the device,
is the least that hides the CPU's part. The least of all ranks' shares counts. What the device then keeps must fit the limit
that was given, else the CPU takes more than it can hide. No share changes a bit, so a measurement may choose it.
Neither Adam nor the link is timed alone: what counts is what both take here, overlapped as they are, with all ranks at work.

Both parts are buckets of their own (`parts_of`), so a DeviceStore serves the first ones and a CpuStore the others, with one
kernel and the same numbers. No block is cut, so the cut never shows in the bits.

Weights that lie in host memory come to the device for its part of a step and go back, through a scratch as large as the largest
such part. The CPU's part is updated where it lies.

Note [Which way ratio goes]: it is the share that the CPU updates, as in DeepSpeed's Twin-Flow. 1 puts all states into host
memory, 0 leaves all beside the weights.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from shardcore._native import _C
from shardcore.distributed.comm import Comm, Traffic
from shardcore.engine.bucket import Bucket
from shardcore.engine.cpu_store import CpuStore
from shardcore.engine.state_store import DeviceStore, Scalars, Span
from shardcore.layout import BLOCK

logger = logging.getLogger("shardcore")

MEASURED_STEPS = 3  # the first is not counted: it takes memory, and caches are cold
_STEPS_OF_ONE = 64  # shares are multiples of 1 / 64


def choose_ratio(affordable: float, limit_bytes: int, device_bytes: Callable[[float], int]) -> float:
    """Return the largest share of at most `affordable` that leaves no more than `limit_bytes` on the device, else the least."""
    steps = int(min(1.0, max(0.0, affordable)) * _STEPS_OF_ONE)
    while steps < _STEPS_OF_ONE and device_bytes(steps / _STEPS_OF_ONE) > limit_bytes:
        steps += 1
    return steps / _STEPS_OF_ONE


class RatioTuner:
    """Times forwards and steps until it has chosen a ratio, which `take` gives once."""

    def __init__(
        self,
        comm: Comm,
        device: torch.device,
        spent_s: Callable[[], float],
        limit_bytes: int,
        device_bytes: Callable[[float], int],
    ) -> None:
        """Choose for all ranks of `comm`. spent_s: seconds of all steps so far; the rest: see choose_ratio."""
        self._comm, self._device, self._spent_s = comm, device, spent_s
        self._limit_bytes, self._device_bytes = limit_bytes, device_bytes
        self.updated = False  # the last step updated the weights
        self._steps = 0
        self._before_s = 0.0
        self._forward_s, self._step_s = float("inf"), float("inf")
        self._begun: float | torch.cuda.Event | None = None
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._chosen: float | None = None

    @property
    def measures(self) -> bool:
        """Whether the next forward is timed. No step may be under way beside it: its waits would count as forward."""
        return 0 < self._steps < MEASURED_STEPS

    def begin_forward(self) -> None:
        """Learn that a forward of the whole model begins."""
        self._begun = self._now() if self.measures else None

    def end_forward(self) -> None:
        """Learn that it ends."""
        begun, self._begun = self._begun, None
        if isinstance(begun, float):
            self._forward_s = min(self._forward_s, time.perf_counter() - begun)
        elif begun is not None:
            self._pairs.append((begun, self._event()))

    def begin_step(self) -> None:
        """Learn that a step begins, and all before it are complete. Collective where the ratio is chosen."""
        if not self.updated:  # the last step was skipped, on every rank
            return
        self.updated = False
        spent_s = self._spent_s()
        took_s, self._before_s = spent_s - self._before_s, spent_s
        if self.measures:
            self._step_s = min(self._step_s, took_s)
        self._steps += 1
        if self._steps != MEASURED_STEPS:
            return
        for begun, ended in self._pairs:
            ended.synchronize()
            self._forward_s = min(self._forward_s, begun.elapsed_time(ended) / 1e3)
        self._pairs.clear()
        times = torch.tensor([self._forward_s, self._step_s], dtype=torch.float64, device="cpu")
        rows = self._comm.all_gather_cpu(times, Traffic.STEP, "a step").tolist()
        affordable = min(forward_s / step_s if step_s > 0 else 1.0 for forward_s, step_s in rows)  # 0: the step failed
        self._chosen = choose_ratio(affordable, self._limit_bytes, self._device_bytes)
        if self._comm.rank == 0:
            kept = self._device_bytes(self._chosen)
            logger.info(
                'offload: "auto" chose the ratio %g: forwards of the ranks take %s ms, steps on the CPU %s; the device keeps '
                "%d bytes of states (of at most %d)%s",
                self._chosen,
                *(", ".join(f"{1e3 * row[i]:.1f}" for row in rows) for i in (0, 1)),
                kept,
                self._limit_bytes,
                "" if self._chosen <= affordable else "; the CPU's part is longer than a forward",
            )

    def take(self) -> float | None:
        """Return the ratio that was chosen, once."""
        chosen, self._chosen = self._chosen, None
        return chosen

    def _now(self) -> "float | torch.cuda.Event":
        return self._event() if self._device.type == "cuda" else time.perf_counter()

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def parts_of(bucket: Bucket, ratio: float) -> tuple[Bucket, Bucket]:
    """Return the parts of the owned range that the device and the CPU update, as buckets: they look at the same parameters.

    The CPU has `ratio` of its blocks, rounded. Weights and gradients are the bucket's own: `SplitStore` points at them.
    """
    start, end = bucket.owned
    blocks = bucket.owned_numel // BLOCK
    cut = start + (blocks - round(ratio * blocks)) * BLOCK

    def part(first: int, last: int) -> Bucket:
        owned = first, last
        return Bucket(
            bucket.unit, bucket.dtype, bucket.group, bucket.params, bucket.layout, owned, bucket.trainable, bucket.state_format
        )

    return part(start, cut), part(cut, end)


def cuts_of(buckets: Iterable[Bucket], ratio: float) -> dict[Bucket, int]:
    """Return where in each bucket's owned range the CPU's part begins, of those that have one."""
    cuts = {bucket: parts_of(bucket, ratio)[0].owned_numel for bucket in buckets}
    return {bucket: cut for bucket, cut in cuts.items() if cut < bucket.owned_numel}


def device_bytes(buckets: Iterable[Bucket], ratio: float) -> int:
    """Return the bytes of states that stay on the device, of buckets that have any."""
    return sum(bucket.state_format.nbytes(parts_of(bucket, ratio)[0].owned_numel) for bucket in buckets)


def scratch_bytes(parts: Iterable[Bucket]) -> int:
    """Return the bytes on the device in which these parts' weights are updated, one after the other, if they lie elsewhere."""
    return max((part.owned_numel * part.dtype.itemsize for part in parts), default=0)


def host_store(
    buckets: Sequence[Bucket],
    device: torch.device,
    pin_memory: bool,
    pin_memory_limit: int | None,
    *,
    ratio: float,
    grads_leave: bool,
    weights_here: bool,
    changes: bool,
) -> "CpuStore | SplitStore":
    """Return a store that has `ratio` of the states in host memory; `changes`: until `resplit`. See CpuStore."""
    arguments = buckets, device, pin_memory, pin_memory_limit
    if ratio == 1.0 and not changes:
        return CpuStore(*arguments, grads_leave=grads_leave, weights_here=weights_here)
    return SplitStore(*arguments, ratio=ratio, grads_leave=grads_leave, weights_here=weights_here, changes=changes)


class SplitStore:
    """A DeviceStore of the first part of each bucket's owned range, and a CpuStore of the rest."""

    tier = "cpu"

    def __init__(
        self,
        buckets: Sequence[Bucket],
        device: torch.device,
        pin_memory: bool,
        pin_memory_limit: int | None = None,
        *,
        ratio: float,
        grads_leave: bool = False,
        weights_here: bool = False,
        changes: bool = False,
    ) -> None:
        """Allocate zero states for `buckets`, `ratio` of them in host memory. See CpuStore and Note [Which way ratio goes].

        changes: until `resplit`. Steps are timed for it, so they end when their last weights have arrived.
        """
        self._device, self._weights_here, self._changes = device, weights_here, changes
        self._left: _C.CopyEvent | None = None
        self._spent_s = 0.0
        self._cut(buckets, ratio)
        far = [far for _, far in self._parts.values()]
        pinning = pin_memory, pin_memory_limit
        self.on_cpu = CpuStore(far, device, *pinning, grads_leave=grads_leave, weights_here=weights_here)

    def _cut(self, buckets: Iterable[Bucket], ratio: float) -> None:
        """Make the parts, and the device's zero states."""
        self._parts = {bucket: parts_of(bucket, ratio) for bucket in buckets}
        self._weights: dict[Bucket, torch.Tensor] = {}  # at which parts look
        self._halves: dict[Bucket, tuple[list[Span], list[Span], list[Span]]] = {}  # see _halves_of
        size = scratch_bytes([near for near, _ in self._parts.values()])
        self._scratch = torch.empty(size, dtype=torch.uint8, device=self._device) if self._weights_here else None
        for bucket in self._parts:
            self._point(bucket)
        self.on_device = DeviceStore([near for near, _ in self._parts.values()])

    def seconds(self) -> float:
        """Return the time of all steps so far."""
        return self._spent_s

    def resplit(self, ratio: float) -> dict[Bucket, int]:
        """Move states to the device, which has none so far, so that `ratio` of them stay in host memory. See cuts_of."""
        old = self._parts
        self._cut(old, ratio)
        self._changes = False
        for bucket, (_, whole) in old.items():
            near, far = self._parts[bucket]
            assert whole.owned_numel == bucket.owned_numel
            self.on_device.take(near, self.on_cpu.give_up(whole, far))
        return cuts_of(self._parts, ratio)

    def _point(self, bucket: Bucket) -> None:
        """Let both parts look at the bucket's weights where they lie now."""
        near, far = self._parts[bucket]
        cut = near.owned_numel
        if self._weights.get(bucket) is not bucket.owned_weight:
            self._weights[bucket] = weight = bucket.owned_weight
            near.owned_weight, far.owned_weight = weight[:cut], weight[cut:]
            if self._scratch is not None:
                near.owned_weight = self._scratch[: cut * bucket.dtype.itemsize].view(bucket.dtype)

    def _bring_grads(self, bucket: Bucket) -> None:
        """Let both parts look at the bucket's gradient, for one step."""
        near, far = self._parts[bucket]
        near.grad = None if bucket.grad is None else bucket.grad[: near.owned_numel]
        far.grad = None if bucket.grad is None else bucket.grad[near.owned_numel :]
        far.host_grad = bucket.host_grad

    @property
    def copies(self) -> _C.HostTier:
        """The only way to and from host memory."""
        return self.on_cpu.copies

    @property
    def scratch_bytes(self) -> int:
        """See StateStore."""
        return self.on_cpu.scratch_bytes

    @property
    def weight_scratch_bytes(self) -> int:
        """See StateStore."""
        return 0 if self._scratch is None else self._scratch.nbytes

    def read(self, bucket: Bucket, key: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """See StateStore. What both parts have of it is put together in host memory."""
        self._point(bucket)
        near, far = self._parts[bucket]
        near.owned_weight = self._weights.pop(bucket)[: near.owned_numel]  # not the scratch; to be pointed again
        cut, end = near.owned_numel, bucket.owned_numel if numel is None else start + numel
        if start >= cut or (start == end and far.owned_numel > 0):  # nothing lies where both parts are put together
            return self.on_cpu.read(far, key, max(0, start - cut), end - start)
        if end <= cut:
            return self.on_device.read(near, key, start, end - start)
        first = self.on_device.read(near, key, start, cut - start)
        return torch.cat([first.cpu(), self.on_cpu.read(far, key, 0, end - cut).cpu()])

    def stored(self, bucket: Bucket) -> Iterator[tuple[str, str, int]]:
        """See StateStore."""
        near, far = self._parts[bucket]
        yield from self.on_device.stored(near)
        yield from self.on_cpu.stored(far)

    def write(self, bucket: Bucket, key: str, start: int, values: torch.Tensor) -> None:
        """See StateStore."""
        near, far = self._parts[bucket]
        room = max(0, min(near.owned_numel - start, values.numel()))
        self.on_device.write(near, key, start, values[:room])
        if room < values.numel():
            self.on_cpu.write(far, key, start + room - near.owned_numel, values[room:])

    def steps(self, parts: Sequence[Sequence[Span]], hypers: Scalars) -> Iterator[_C.CopyEvent | None]:
        """See StateStore. The device's share of a part is queued once the first chunks are on their way to the CPU."""
        begun_s = time.perf_counter()
        buckets = {span.bucket: None for part in parts for span in part}
        for bucket in buckets:
            self._point(bucket)
            self._bring_grads(bucket)
        near, far = zip(*map(self._halves_of, parts), strict=True) if parts else ((), ())
        update = self.on_device.step if self._scratch is None else self._step_in_scratch
        try:
            yield from self.on_cpu.steps(far, hypers, lambda index: update(near[index], hypers))
            if self._changes:
                self.copies.synchronize()
            if self._left is not None:
                self._left.synchronize()
        finally:
            for part in (part for bucket in buckets for part in self._parts[bucket]):
                part.grad = part.host_grad = None  # or they would hold memory that its pool has given up
        self._spent_s += time.perf_counter() - begun_s

    def _step_in_scratch(self, spans: Sequence[Span], hypers: Scalars) -> None:
        """Update weights of host memory on the device, a bucket at a time: those that the step reads come, all go back."""
        home = {near: bucket for bucket, (near, _) in self._parts.items()}
        for near, of_bucket in groupby(spans, key=lambda span: span.bucket):
            here = list(of_bucket)
            places = [slice(span.start, span.start + span.numel) for span in here]
            weight = home[near].owned_weight
            if near.state_format.reads_weights:
                for place in places:
                    self.copies.from_tier(near.owned_weight[place], weight[place]).wait()
            self.on_device.step(here, hypers)
            for place in places:
                self._left = self.copies.to_tier(weight[place], near.owned_weight[place])
            assert self._left is not None
            self._left.wait()  # before the next bucket takes the scratch

    def _halves_of(self, spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
        """Return what the device and the CPU update of a part, as in the last step if it is the same."""
        if not spans:
            return [], []
        kept = self._halves.get(spans[0].bucket)
        if kept is None or kept[0] != spans:
            near = [span for span in map(self._near, spans) if span.numel]
            far = [span for span in map(self._far, spans) if span.numel]
            kept = self._halves[spans[0].bucket] = list(spans), near, far
        return kept[1:]

    def _near(self, span: Span) -> Span:
        """Return what the device updates of a span, perhaps nothing."""
        part, _ = self._parts[span.bucket]
        return replace(span.part(0, max(0, min(part.owned_numel - span.start, span.numel))), bucket=part)

    def _far(self, span: Span) -> Span:
        """Return what the CPU updates of a span, perhaps nothing."""
        near, part = self._parts[span.bucket]
        skipped = max(0, min(near.owned_numel - span.start, span.numel))
        rest = span.part(skipped, span.numel - skipped)
        return replace(rest, bucket=part, start=rest.start - near.owned_numel)
