"""Gradient pieces on their way to the ranks that add them up: level by level, a few buckets at a time.

At each level (Topology.levels) a rank cuts what it holds into equal parts, one for each rank of the level, and sums the parts
that it gets for its own, in rank order, in float32. The sum of one level is what the next one cuts.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardcore._native import _C
from shardcore.comm import Comm, Traffic, wait_all
from shardcore.engine.bucket import Bucket, BufferPool

MAX_IN_FLIGHT = 2


@dataclass(frozen=True)
class Parts:
    """What one level's ranks sent to this one: a row for each in `received`, but for `own`, this rank's, which is `number`."""

    received: torch.Tensor
    count: int
    own: torch.Tensor
    number: int

    def add_up(self, scale: float, out: torch.Tensor, accumulate: bool = False) -> torch.Tensor:
        """out = [out +] scale * the sum of the rows, in rank order; returns the squared norm of out (high, low)."""
        return _C.ordered_sum(self.received, self.count, scale, out, accumulate, self.own, self.number)


@dataclass
class _Flight:
    """A bucket at one level: `sent` is being cut and sent. whole: the local gradients, which the first level sent."""

    bucket: Bucket
    whole: torch.Tensor
    level: int
    sent: torch.Tensor
    received: torch.Tensor
    works: list[Any]


class Exchange:
    """Sends whole local gradients; calls `finish(bucket, whole, parts of the last level)` in the order of sending."""

    def __init__(self, comm: Comm, pool: BufferPool, finish: Callable[[Bucket, torch.Tensor, Parts], None]) -> None:
        """Exchange over the levels of `comm`, in buffers of `pool`."""
        self.comm, self.pool, self._finish = comm, pool, finish
        self._levels = comm.topology.levels(comm.rank)
        self._flights: deque[_Flight] = deque()

    def send(self, bucket: Bucket, whole: torch.Tensor) -> None:
        """Start with one bucket; those that are too many in flight are finished."""
        if self.comm.world_size == 1:
            self._finish(bucket, whole, Parts(whole, 1, whole, 0))
            return
        self.drain(MAX_IN_FLIGHT - 1)  # before the next one takes memory
        self._start(bucket, whole, 0, whole)

    def drain(self, keep: int = 0) -> None:
        """Wait and go on until at most `keep` buckets are in flight."""
        while len(self._flights) > keep:
            flight = self._flights.popleft()
            wait_all(flight.works)
            ranks = self._levels[flight.level]
            number = ranks.index(self.comm.rank)
            own = flight.sent.chunk(len(ranks))[number] if flight.sent.numel() else flight.sent
            parts = Parts(flight.received, len(ranks), own, number)
            if flight.level + 1 == len(self._levels):
                self._finish(flight.bucket, flight.whole, parts)
            else:
                partial = self.pool.take(own.numel(), torch.float32)
                parts.add_up(1.0, partial)
                self._start(flight.bucket, flight.whole, flight.level + 1, partial)
            self._give_back(flight)

    def abandon(self) -> None:
        """Wait for what is in flight and drop it."""
        for flight in self._flights:
            wait_all(flight.works)
            self._give_back(flight)
            self.pool.give(flight.whole)
        self._flights.clear()

    def _start(self, bucket: Bucket, whole: torch.Tensor, level: int, sent: torch.Tensor) -> None:
        received = self.pool.take(sent.numel(), sent.dtype)
        ranks = self._levels[level] if len(self._levels) > 1 else None
        works = self.comm.all_to_all(received, sent, Traffic.BACKWARD, ranks)
        self._flights.append(_Flight(bucket, whole, level, sent, received, works))

    def _give_back(self, flight: _Flight) -> None:
        self.pool.give(flight.received)
        if flight.sent is not flight.whole:
            self.pool.give(flight.sent)
