"""Shards of weights in a file: read ahead of their use, and written by the steps that update them.

They are kept in chunks as states are (offload/nvme_states.py), which a step reads, updates and
writes beside those. The file has no name: where steps are committed, float32 masters make these
weights again, and a commit writes those that have none.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby

import torch

from shardcore._native import _C
from shardcore.engine.bucket import Bucket
from shardcore.layout import round_up
from shardcore.offload.nvme_states import (
    WEIGHT,
    Chunk,
    NvmeStates,
    StateFiles,
    WeightFormat,
    aligned,
)
from shardcore.optim.state_format import StateTensors

# Buffers beside those of what is read ahead, for shards that nothing foresaw.
_STREAMING = 2


class NvmeWeights(NvmeStates):
    """See the head of this file. WeightFiles, which a bucket uses; the step uses it as it does
    states.
    """

    content = "weights"

    def __init__(
        self,
        buckets: Sequence[Bucket],
        files: StateFiles,
        copies: _C.HostTier,
        device: torch.device,
        prefetch: int,
    ) -> None:
        """Take space in a file for the shards of `buckets`, in unit order; as many units as
        `prefetch` are read ahead.

        copies: to host memory and from there, of `device`.
        """
        super().__init__(
            buckets,
            files,
            partial(copies.empty, pinned=False),
            lambda bucket: WeightFormat(dtype=bucket.dtype),
        )
        self._copies, self._device = copies, device
        units = [
            sum(len(self._chunks[bucket]) for bucket in of_unit)
            for _, of_unit in groupby(buckets, lambda bucket: bucket.unit)
        ]
        # A gather needs the unit's shard in host memory. So the shards of the units after the next
        # ones are read while these compute: room for the largest such group of units.
        self._most_ahead = max((sum(units[i : i + prefetch]) for i in range(len(units))), default=0)
        count = self._most_ahead + _STREAMING
        self._ahead: dict[Chunk, tuple[torch.Tensor, _C.FileTransfer]] = {}
        # The buffers that are not read ahead into, and what waits until the last use of each is
        # over.
        self._free: deque[tuple[torch.Tensor, Callable[[], None]]] = deque(
            (aligned(copies.empty, self._size, self._alignment), lambda: None) for _ in range(count)
        )
        self.scratch_bytes += count * (self._size + self._alignment)

    def values(self, bucket: Bucket, start: int, numel: int) -> torch.Tensor:
        """See WeightFiles."""
        return self.states_of(bucket, start, numel)[WEIGHT]

    def assign(self, bucket: Bucket, start: int, values: torch.Tensor) -> None:
        """See WeightFiles."""
        for first, numel, states in self.change(bucket, start, values.numel()):
            part = values[first - start : first - start + numel].to(self._device).contiguous()
            self._copies.to_tier(states[WEIGHT], part).synchronize()

    def change(
        self, bucket: Bucket, start: int, numel: int
    ) -> Iterator[tuple[int, int, StateTensors]]:
        """See NvmeStates. What was read ahead is older then, and is read again."""
        with self._lock:
            for chunk, _first, _count in self._overlapping(bucket, start, numel):
                self._drop(chunk)
        return super().change(bucket, start, numel)

    def read_ahead(self, bucket: Bucket) -> None:
        """See WeightFiles."""
        with self._lock:
            for chunk in self._chunks[bucket]:
                if chunk not in self._ahead and len(self._ahead) < self._most_ahead:
                    self._ahead[chunk] = self._start_reading(chunk)

    def fetch(self, bucket: Bucket, target: torch.Tensor) -> _C.CopyEvent | None:
        """See WeightFiles."""
        copied: _C.CopyEvent | None = None
        for chunk in self._chunks[bucket]:
            with self._lock:
                memory, transfer = (
                    self._ahead.pop(chunk) if chunk in self._ahead else self._start_reading(chunk)
                )
            try:
                transfer.wait()
                self._check(chunk, memory)
                weights = memory[: chunk.nbytes].view(bucket.dtype)
                copied = self._copies.from_tier(
                    target[chunk.first : chunk.first + chunk.numel], weights
                )
            finally:
                with self._lock:
                    self._free.append(
                        (memory, transfer.wait if copied is None else copied.synchronize)
                    )
        return copied

    def _start_reading(self, chunk: Chunk) -> tuple[torch.Tensor, _C.FileTransfer]:
        if self._in_memory is chunk:
            self._put_memory_back()
        self._settle(chunk)
        memory, last_use_over = self._free.popleft()
        with suppress(OSError):  # of a read that nobody waited for
            last_use_over()
        return memory, self._read(chunk, memory[: round_up(chunk.nbytes, self._alignment)])

    def _drop(self, chunk: Chunk) -> None:
        if chunk in self._ahead:
            memory, transfer = self._ahead.pop(chunk)
            self._free.append((memory, transfer.wait))

    def _start_write(self, chunk: Chunk, place: int) -> None:
        self._drop(chunk)
        super()._start_write(chunk, place)
