"""How shards of weights become whole ones: brought from where they lie, then gathered from the ranks that share them.

Note [Shards that come]: a shard in host memory is copied straight into its place in the whole weights, and the gather begins
when it has arrived. On CUDA a stream of its own waits for that, so that what computes does not. The copy began after all that
the current stream had queued by then, so the gather does, too, and may overwrite memory which that has read.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from shardcore._native import _C
from shardcore.comm import Comm, Traffic, wait_all
from shardcore.engine.bucket import Bucket


class Gatherer:
    """Fills whole weights. apart: whether these have memory of their own, or are the shard (of a world of one)."""

    def __init__(self, buckets: Sequence[Bucket], comm: Comm, device: torch.device) -> None:
        """Serve `buckets`, whose shards are in place."""
        tiered = any(bucket.tier is not None for bucket in buckets)
        self._comm, self._alone = comm, len(comm.sharers) == 1
        self.apart = tiered or not self._alone
        cuda = tiered and device.type == "cuda"
        self._number = {bucket: number for number, bucket in enumerate(buckets)}
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    @staticmethod
    def bring(bucket: Bucket) -> _C.CopyEvent | None:
        """Put the shard into its place in `bucket.weight`; returns when it is there if it comes from another tier."""
        place = bucket.owned_slice(bucket.weight)
        if bucket.tier is not None:
            return bucket.tier.from_tier(place, bucket.owned_weight)
        place.copy_(bucket.owned_weight)
        return None

    def find_errors(self, arrivals: Iterable[_C.CopyEvent | None]) -> None:
        """Raise if one of these shards cannot arrive, where that can be known before other ranks are sent to.

        On CUDA it is known too late; a rank alone waits when it needs them.
        """
        if self._stream is None and not self._alone:
            for arrived in arrivals:
                if arrived is not None:
                    arrived.wait()

    def gather(self, bucket: Bucket, arrived: _C.CopyEvent | None) -> list[Any]:
        """Start to gather `bucket.weight` once the shard has arrived; returns what to `wait` for (Note [Shards that come])."""
        if self._alone:
            return [] if arrived is None else [arrived]
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if arrived is not None:
                arrived.wait()
            name, number = f"the weights of {bucket.unit or 'the root'}", 2 * self._number[bucket]
            return self._comm.all_gather(bucket.weight, Traffic.WEIGHTS, name, self._comm.sharers, of=number)

    def gather_kept(self, bucket: Bucket, keepers: Sequence[int]) -> list[Any]:
        """Start to gather `bucket.weight` from the parts that `keepers` kept, this rank's in place; see `gather`."""
        name, number = f"the weights of {bucket.unit or 'the root'} that were kept", 2 * self._number[bucket] + 1
        return self._comm.all_gather(bucket.weight, Traffic.WEIGHTS, name, keepers, of=number)

    def wait(self, gathers: Iterable[Any]) -> None:
        """Wait until weights are whole: until done on the CPU, in stream order on CUDA."""
        if not self._alone:
            wait_all(gathers)
            return
        for arrived in gathers:
            arrived.wait()


def keepers_of(reshard_after_forward: bool | int) -> int:
    """Return how many ranks keep a unit's weights, a part each, from forward to backward; 0: only the shards are kept."""
    return int(not reshard_after_forward) if isinstance(reshard_after_forward, bool) else reshard_after_forward
