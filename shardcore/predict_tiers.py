"""What tiers take in a prediction: states of one or two of them, and gradients that leave for host memory.

The order of taking and giving memory is that of engine/host_grads.py; only it is told again here.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardcore.arguments import Offload
from shardcore.engine.bucket import Bucket, ReducePolicy
from shardcore.engine.buffers import BufferPool
from shardcore.engine.host_grads import IN_FLIGHT, adding_bytes, home_dtype
from shardcore.engine.store import DeviceStore
from shardcore.offload import staging_bytes
from shardcore.offload_split import parts_of, scratch_bytes


class MetaStates(DeviceStore):
    """States on meta that stand for those of the tiers that `offload` says."""

    def __init__(self, buckets: Sequence[Bucket], offload: Offload) -> None:
        """Make states for `buckets`; see DeviceStore."""
        super().__init__(buckets)
        self.tier, self._offload = offload.optimizer or "device", offload
        self._parts = {bucket: parts_of(bucket, offload.ratio) for bucket in buckets}

    @property
    def scratch_bytes(self) -> int:
        """See StateStore."""
        if self.tier == "device":
            return 0
        far = [far for _, far in self._parts.values()]
        leave, here = self._offload.gradients is not None, self._offload.params is not None
        return staging_bytes(far, grads_leave=leave, weights_here=here)

    @property
    def weight_scratch_bytes(self) -> int:
        """See StateStore."""
        if self._offload.params is None or self._offload.ratio == 1.0:
            return 0
        return scratch_bytes([near for near, _ in self._parts.values()])

    def stored(self, bucket: Bucket) -> Iterator[tuple[str, str, int]]:
        """See StateStore."""
        if self.tier == "device":
            yield from super().stored(bucket)
            return
        near, far = self._parts[bucket]
        for part, tier in (near, "device"), (far, self.tier):
            if part.owned_numel:
                yield from ((tier, key, flat.nbytes) for key, flat in bucket.kind.new(part.owned_numel, _on_meta).items())


def _on_meta(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device="meta")


@dataclass
class _Leaving:
    bucket: Bucket
    source: torch.Tensor
    give: Callable[[torch.Tensor], None]
    adds: bool
    started: bool


@dataclass(eq=False)
class LeavingGrads:
    """HostGrads without values. cuts: see GradHome; alone: nothing is summed over ranks or unscaled; owners: of the same range.

    count: learns that a bucket's gradients have other memory.
    """

    cuts: Mapping[Bucket, int]
    policy: ReducePolicy
    alone: bool
    owners: int
    pool: BufferPool
    count: Callable[[Bucket], None]
    _leaving: deque[_Leaving] = field(default_factory=deque)

    def __post_init__(self) -> None:
        for bucket, cut in self.cuts.items():
            dtype = home_dtype(bucket, self.policy, self.alone)
            bucket.host_grad = torch.empty(bucket.owned_numel - cut, dtype=dtype, device=self.pool.device)

    @property
    def scratch_bytes(self) -> int:
        """See HostGrads."""
        return adding_bytes((bucket.owned_numel - cut for bucket, cut in self.cuts.items()), self.policy)

    def reduce(
        self, bucket: Bucket, whole: torch.Tensor, as_it_is: bool, release: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """See HostGrads; returns what leaves."""
        self._make_room(IN_FLIGHT - 1)
        source, give = whole, release
        if not as_it_is:
            source = self.pool.take(bucket.owned_numel, torch.float32 if bucket.reduced else self.policy.grad_dtype)
            give = self.pool.give
            release(whole)
        self._leaving.append(_Leaving(bucket, source, give, bucket.reduced, started=False))
        if self.owners == 1:
            self._start(self._leaving[-1])
        return source

    def drain(self) -> None:
        """See HostGrads."""
        self._make_room(0)

    def _make_room(self, keep: int) -> None:
        for leaving in self._leaving:
            self._start(leaving)
        while len(self._leaving) > keep:
            leaving = self._leaving.popleft()
            leaving.give(leaving.source)

    def _start(self, leaving: _Leaving) -> None:
        bucket = leaving.bucket
        if not leaving.started and not leaving.adds and self.cuts[bucket] and bucket.grad is None:
            bucket.grad = self.pool.keep(self.cuts[bucket], leaving.source.dtype)
            self.count(bucket)
        leaving.started = True
