"""Whole weights, gradients and states for whoever reads them, gathered from the parts that ranks own.

Small gathers take long to wait for and little else, so what is read one after the other is gathered one ahead.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch

from shardcore.comm import Comm, Traffic, wait_all
from shardcore.engine.bucket import Bucket, Managed
from shardcore.engine.store import ReadPart
from shardcore.engine.trace import scope


class WholeValues:
    """Gathers over `comm`, on `device`. Every rank asks for the same in the same order."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        """See the class."""
        self._comm, self._device = comm, device

    def of_buckets(self, parts: Iterable[tuple[Bucket, torch.Tensor]]) -> Iterator[torch.Tensor]:
        """Yield whole-bucket tensors from owned ranges, on the devices of these (themselves if they are all). Collective.

        Each is gathered while the one before is waited for and used, so three are there at most.
        """
        started = (self._start(bucket, owned) for bucket, owned in parts)
        coming = next(started, None)
        while coming is not None:
            (whole, works, device), coming = coming, next(started, None)
            wait_all(works)
            whole = whole.to(device)
            yield whole
            del whole

    def _start(self, bucket: Bucket, owned: torch.Tensor) -> tuple[torch.Tensor, list[Any], torch.device]:
        if owned.numel() == bucket.layout.numel:
            return owned, [], owned.device
        whole = torch.empty(bucket.layout.numel, dtype=owned.dtype, device=self._device)
        with scope("read", bucket.unit):
            bucket.owned_slice(whole).copy_(owned)
            return whole, self._comm.all_gather(whole, Traffic.READ, _name(bucket), self._comm.sharers), owned.device

    def of_param(self, bucket: Bucket, managed: Managed, read: ReadPart) -> torch.Tensor:
        """Return a new tensor of a parameter's shape; nothing else of its bucket travels. Collective.

        `read` reads from this rank's owned range; the result is on the device of what it returns.
        """
        like, ranks, numel = read(0, 0), self._comm.sharers, managed.param.numel()
        travels = bucket.owned_numel < bucket.layout.numel
        whole = torch.empty(numel, dtype=like.dtype, device=self._device if travels else like.device)
        for piece in bucket.pieces_of(managed):
            whole[piece.param_start : piece.param_start + piece.numel] = read(piece.start, piece.numel)
        if travels:
            size = bucket.layout.numel // len(ranks)
            cuts = [min(max(0, number * size - managed.offset), numel) for number in range(len(ranks) + 1)]
            with scope("read", bucket.unit):
                wait_all(self._comm.gather_parts([whole[a:b] for a, b in pairwise(cuts)], Traffic.READ, _name(bucket), ranks))
        return whole.view(managed.param.shape).to(like.device)


def _name(bucket: Bucket) -> str:
    return f"a read of {bucket.unit or 'the root'}"
