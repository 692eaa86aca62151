"""Gradient pieces on their way to the ranks that add them up: level by level, a few buckets at a
time.

At each level (Topology.levels) a rank cuts what it holds into equal parts, one for each rank of the
level, and sums the parts that it gets for its own, in rank order, in float32. The sum of one level
is what the next one cuts. With `backend_sums` (shard's reduction="nccl") the backend adds instead,
over all ranks at once, in the dtype that travels, in its own order.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from shardcore._native import _C
from shardcore.distributed.comm import Comm, Started, Traffic, wait_all
from shardcore.engine.bucket import Bucket, BufferPool, ReducePolicy

# units at the only level; with several one at each, so that a unit's next level begins with the
# next unit
MAX_IN_FLIGHT = 2


@dataclass(frozen=True)
class Parts:
    """What one level's ranks sent to this one: a row for each in `received`, but for `own`, this
    rank's, which is `number`.

    divided: what all rows were divided by before they were sent.
    """

    received: torch.Tensor
    count: int
    own: torch.Tensor
    number: int
    divided: int = 1

    def add_up(
        self, scale: float | torch.Tensor, out: torch.Tensor, accumulate: bool = False
    ) -> torch.Tensor:
        """out = [out +] scale * the undivided sum of the rows, in rank order; returns the
        squared norm of out (high, low).
        """
        scale = scale if self.divided == 1 else scale * self.divided
        return _C.ordered_sum(
            self.received, self.count, scale, out, accumulate, self.own, self.number
        )


@dataclass
class _Flight:
    """A bucket at one level: `sent` is being cut and sent. reduce_scatter_input: the local
    gradients, which the first level sent.
    """

    bucket: Bucket
    reduce_scatter_input: torch.Tensor
    level: int
    sent: torch.Tensor
    received: torch.Tensor
    collectives: list[Started]


# Takes a bucket, its reduce_scatter_input and the parts of the last level; the parts are valid
# until it returns.
Finish: TypeAlias = Callable[[Bucket, torch.Tensor, Parts], None]


class ReduceScatter:
    """Sends local gradients, and hands what arrived to the caller's `finish`, in the order of
    sending.
    """

    def __init__(
        self,
        comm: Comm,
        pool: BufferPool,
        buckets: Sequence[Bucket],
        policy: ReducePolicy,
    ) -> None:
        """Reduce `buckets` over the levels of `comm`, in buffers of `pool`."""
        self.comm, self.pool, self._policy = comm, pool, policy
        self._backend_sums = policy.backend_sums
        self._levels = (
            [range(comm.world_size)] if self._backend_sums else comm.topology.levels(comm.rank)
        )
        self.has_levels = len(self._levels) > 1  # else `arrive` has nothing to do
        self._number = {bucket: number for number, bucket in enumerate(buckets)}
        # by level
        self._flights: list[deque[_Flight]] = [comm.keep_alive(deque()) for _ in self._levels]
        # elements of units, and those of this backward
        self._numel, self._arrived = Counter[str](), Counter[str]()
        for bucket in buckets:
            self._numel[bucket.unit] += sum(managed.local.numel() for managed in bucket.params)

    def arrive(self, bucket: Bucket, numel: int, finish: Finish) -> None:
        """Note that so many elements of a bucket's local gradient are there.

        With more than half of a unit, what was sent before goes on to its next level, and not only
        when the unit is complete: so that is done sooner. Backward has computed for long enough
        then to hide the level before.
        """
        self._arrived[bucket.unit] += numel
        if self.has_levels and 2 * self._arrived[bucket.unit] > self._numel[bucket.unit]:
            while self._flights[0] and self._flights[0][0].bucket.unit != bucket.unit:
                self._go_on(0, finish)

    def send(self, bucket: Bucket, reduce_scatter_input: torch.Tensor, finish: Finish) -> None:
        """Start with one bucket. Where too many are in flight, earlier ones go on before this one
        takes memory. Of one rank nothing is to be sent.
        """
        self._make_room(0, bucket, finish)
        self._start(bucket, reduce_scatter_input, 0, reduce_scatter_input)

    def drain(self, finish: Finish) -> None:
        """Wait and go on until nothing is in flight."""
        for level, flights in enumerate(self._flights):
            while flights:
                self._go_on(level, finish)
        self._arrived.clear()

    def _make_room(self, level: int, bucket: Bucket, finish: Finish) -> None:
        """Let the oldest flights of a level go on where `bucket` would be one unit too many there.

        A unit has a bucket for each group of the optimizer (with and without weight decay) and
        dtype.
        """
        most = 1 if self.has_levels else MAX_IN_FLIGHT
        while len({flight.bucket.unit for flight in self._flights[level]} - {bucket.unit}) >= most:
            self._go_on(level, finish)

    def _go_on(self, level: int, finish: Finish) -> None:
        """Wait for the oldest flight of a level, and send its sum on, or finish it after the last
        level.
        """
        is_last = level + 1 == len(self._levels)
        if not is_last:
            self._make_room(level + 1, self._flights[level][0].bucket, finish)
        with self.comm.clock.part("exposed_reduce"):
            wait_all(self._flights[level][0].collectives)
        flight = self._flights[level].popleft()
        parts = self._parts(flight)
        if is_last:
            finish(flight.bucket, flight.reduce_scatter_input, parts)
        else:
            partial = self.pool.acquire(parts.own.numel(), torch.float32)
            parts.add_up(1.0, partial)
            self._start(flight.bucket, flight.reduce_scatter_input, level + 1, partial)
        self._give_back(flight)

    def parts_of_other(self, pieces: torch.Tensor) -> tuple[int, Parts]:
        """Send copies of local gradients so that each rank can add up the piece of the rank before
        it in a level. Collective; waits. Returns that rank, and the parts of the last level.

        pieces: (ranks, numel), by the rank that adds them up.
        """
        sent, whose = pieces.flatten(), self.comm.rank
        parts: Parts | None = None
        for ranks in self._levels:
            number = ranks.index(self.comm.rank)
            if parts is not None:
                sent = torch.empty(parts.own.numel(), dtype=torch.float32, device=sent.device)
                parts.add_up(1.0, sent)
            if len(ranks) > 1 and whose == self.comm.rank:
                sent = sent.view(len(ranks), -1).roll(1, 0).flatten()
                whose = ranks[number - 1]
            received = torch.empty_like(sent)
            several = ranks if self.has_levels else None
            wait_all(self.comm.all_to_all(received, sent, Traffic.READ, "an audit", several))
            parts = Parts(received, len(ranks), sent.chunk(len(ranks))[number], number)
        assert parts is not None
        return whose, parts

    def abandon(self) -> None:
        """Wait for what is in flight and drop it; after a wait has failed, only drop it."""
        for flights in self._flights:
            for flight in flights if not self.comm.broken else ():
                wait_all(flight.collectives)
                self._give_back(flight)
                self.pool.release(flight.reduce_scatter_input)
            flights.clear()
        self._arrived.clear()

    def _parts(self, flight: _Flight) -> Parts:
        ranks = self._levels[flight.level]
        if self._backend_sums:
            return Parts(
                flight.received,
                1,
                flight.received,
                0,
                divided=len(ranks) if _overflows(flight.sent) else 1,
            )
        number = ranks.index(self.comm.rank)
        own = flight.sent.chunk(len(ranks))[number] if flight.sent.numel() else flight.sent
        return Parts(flight.received, len(ranks), own, number)

    def _start(
        self, bucket: Bucket, reduce_scatter_input: torch.Tensor, level: int, sent: torch.Tensor
    ) -> None:
        ranks, name = self._levels[level], f"the reduction of {bucket.unit or 'the root'}"
        if self._sums(bucket, level, sent.dtype):
            name += ", added locally"
        if self._backend_sums:
            received = self.pool.acquire(sent.numel() // len(ranks), sent.dtype)
            collectives = self.comm.reduce_scatter(
                received, sent.div_(len(ranks)) if _overflows(sent) else sent, name
            )
        else:
            received = self.pool.acquire(sent.numel(), sent.dtype)
            several = ranks if len(self._levels) > 1 else None
            number = self._tag_number(bucket, level, sent.dtype)
            collectives = self.comm.all_to_all(
                received, sent, Traffic.BACKWARD, name, several, of=number
            )
        self._flights[level].append(
            _Flight(bucket, reduce_scatter_input, level, sent, received, collectives)
        )

    def _tag_number(self, bucket: Bucket, level: int, dtype: torch.dtype | None = None) -> int:
        """Number what travels. Local sums have numbers of their own: gloo ends the process where
        sizes differ.
        """
        return 2 * ((len(self._levels) + 1) * self._number[bucket] + level) + self._sums(
            bucket, level, dtype
        )

    def _sums(self, bucket: Bucket, level: int, dtype: torch.dtype | None) -> bool:
        """Whether what travels are local sums, in another dtype than that in which gradients do."""
        return level == 0 and dtype != self._policy.travels_as(bucket.grad_dtype)

    def gather(self, bucket: Bucket, grad: torch.Tensor, ranks: Sequence[int]) -> list[Started]:
        """Start to gather the reduced gradient of a range from the pieces of `ranks`, who all
        own it.
        """
        name, number = (
            f"the gradients of {bucket.unit or 'the root'}",
            self._tag_number(bucket, len(self._levels)),
        )
        return self.comm.all_gather([grad], Traffic.BACKWARD, name, ranks, of=[number])

    def _give_back(self, flight: _Flight) -> None:
        self.pool.release(flight.received)
        if flight.sent is not flight.reduce_scatter_input:
            self.pool.release(flight.sent)


def _overflows(sent: torch.Tensor) -> bool:
    """Whether the backend's sum of such pieces can leave the range of their dtype, so that they
    are divided before.
    """
    return sent.dtype == torch.float16
