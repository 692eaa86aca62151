"""Reduced gradients that live in host memory: they leave in backward, and what comes later is added to them there.

Of each bucket's owned range the last `host_numel` elements leave; the first stay (`Bucket.grad`), for kernels of the device.

Note [Leaving]: a gradient leaves as it would lie on the device: in grad_dtype, or as it is where there was nothing to sum. At
most IN_FLIGHT of them hold device memory. Before one more takes some, the stream waits for the oldest copy, and its memory
goes back to the pool. So what is taken follows from the order of buckets alone, never from timing.
Note [Adding]: `out + float32(scale * sum)`, rounded once, is what `ordered_sum` computes on the device. Here the product comes
in float32, whatever grad_dtype is, and the same function adds it, as a sum of one piece; so the bits are the same. A thread of
its own waits for each copy and adds, in the order in which they left, while backward, and what comes after it, goes on; the
norm is that of the sum, from the same pass. A place is taken again when it was added. `arrive` waits for all of that.
Note [Failed copies]: an error of a copy or of a sum does not end the backward, in which other ranks wait for this one:
`arrive` raises it, where a step or a read refuses on every rank.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

import torch

from shardcore._native import _C
from shardcore.distributed.comm import Comm, Started, Traffic, wait_all
from shardcore.engine.bucket import Bucket, BufferPool, ReducePolicy
from shardcore.engine.overlap_step import Worker, WorkerThreads
from shardcore.engine.reduce_scatter import Parts

IN_FLIGHT = 2
T = TypeVar("T")


def home_dtype(bucket: Bucket, policy: ReducePolicy, alone: bool) -> torch.dtype:
    """Return the dtype of a bucket's reduced gradient, in training as declared; `alone`: no sum over ranks, no scale."""
    return policy.travels_as(bucket.dtype) if alone and policy.accumulate == 1 else policy.grad_dtype


def adding_bytes(buckets: Iterable[Bucket], policy: ReducePolicy) -> int:
    """Return the bytes of the places where micro-steps come to that are added to gradients of these buckets."""
    if policy.accumulate == 1 or not policy.sync_each:
        return 0
    return IN_FLIGHT * max((bucket.host_numel for bucket in buckets), default=0) * torch.float32.itemsize


def home_bytes(buckets: Sequence[Bucket], policy: ReducePolicy, alone: bool) -> int:
    """Return the bytes of host memory that gradients of these buckets take. See home_dtype."""
    kept = sum(bucket.host_numel * home_dtype(bucket, policy, alone).itemsize for bucket in buckets)
    return kept + adding_bytes(buckets, policy)


def sq_norm_of(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the squared norm (high, low) on `device` of tensors that may lie on several."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return _sum_of([_C.sq_norm(of_device) for of_device in by_device.values()], device)


def _sum_of(squares: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    if len(squares) == 1:
        return squares[0].to(device)
    return _C.sq_norm_add(torch.stack([part.cpu() for part in squares])).to(device)


@dataclass(frozen=True)
class GradHome:
    """Where reduced gradients of `buckets` go: `copies` leads there. threads: what adds there."""

    copies: _C.HostTier
    buckets: Sequence[Bucket]
    threads: WorkerThreads


@dataclass
class _Leaving:
    """A gradient on its way: `source` (owned_numel,) is on the device until `give` takes it back.

    adds: to what is there, as_it_is: as torch would, else as ordered_sum. gathers: what has to end before it is whole. place:
    where its copy arrives; started: that is queued; arrived: when, None if it failed.
    """

    bucket: Bucket
    source: torch.Tensor
    give: Callable[[torch.Tensor], None]
    adds: bool
    as_it_is: bool
    gathers: list[Started]
    place: torch.Tensor | None = None
    started: bool = False
    arrived: _C.CopyEvent | None = None


@dataclass
class _Sum:
    """What is added to a bucket's gradient last: the squared norms of the host's part, when it was, and of the device's."""

    far: "Future[torch.Tensor]"
    near: torch.Tensor | None = None


@torch.no_grad()
def _add(
    arrived: _C.CopyEvent,
    part: torch.Tensor,
    first: torch.Tensor,
    total: torch.Tensor,
    as_it_is: bool,
    own: torch.Tensor | None,
) -> torch.Tensor:
    """Add `part`, when it has arrived, to `first` in `total`; returns the squared norm of `own`, by default of `total`."""
    arrived.synchronize()
    if first is not total:
        _C.cast([total], [first])
    square = _sum(part, total, as_it_is)
    return square if own is None else _C.sq_norm([own])


def _sum(part: torch.Tensor, total: torch.Tensor, as_it_is: bool) -> torch.Tensor:
    return _C.sq_norm([total.add_(part)]) if as_it_is else _C.ordered_sum(part, 1, 1.0, total, accumulate=True)


def _failed(doing: str, error: BaseException) -> RuntimeError:
    return RuntimeError(
        f"backward: {doing} gradients in host memory failed ({type(error).__name__}: {error}); expected it to succeed "
        "(zero_grad() forgets them; where copies go on failing, make the model anew and load its last saved state)"
    )


def _result(adding: "Future[torch.Tensor]") -> torch.Tensor:
    error = adding.exception()
    if error is not None:
        raise _failed("adding", error) from error
    return adding.result()


class HostGrads:
    """The host's part of reduced gradients (`Bucket.host_grad`), and the only way to it."""

    def __init__(self, home: GradHome | None, comm: Comm, policy: ReducePolicy, scaled: bool, pool: BufferPool) -> None:
        """Allocate for what training needs as it was declared: of each bucket `host_numel`; nothing without a home.

        pool: where device memory comes from and goes to. scaled: whether losses are, so that gradients are always unscaled.
        """
        self._copies: _C.HostTier | None = None if home is None else home.copies
        buckets = [] if home is None else [bucket for bucket in home.buckets if bucket.host_numel]
        self._comm, self._policy, self._pool = comm, policy, pool
        self._memory: dict[Bucket, torch.Tensor] = {}
        for bucket in buckets:
            bucket.host_grad = self._view(bucket, home_dtype(bucket, policy, comm.world_size == 1 and not scaled))
        place_bytes = adding_bytes(buckets, policy) // IN_FLIGHT
        self._places = [self._empty(place_bytes) for _ in range(IN_FLIGHT if buckets else 0)]
        self._turn = 0
        self._worker = Worker("shardcore-add", WorkerThreads(1) if home is None else home.threads, pool.device)
        self._adding: list[Future[torch.Tensor] | None] = [None] * IN_FLIGHT  # the last from each place
        self._sums: dict[Bucket, _Sum] = {}
        self._leaving: deque[_Leaving] = comm.keep_alive(deque())
        self._last: _C.CopyEvent | None = None
        self._failure: tuple[str, BaseException] | None = None  # see Note [Failed copies]

    def __contains__(self, bucket: Bucket) -> bool:
        """Whether the bucket's gradients leave."""
        return bucket in self._memory

    def shrink(self) -> None:
        """Keep host memory for `host_numel` of each bucket, which is less now. No gradient may be there."""
        for bucket in list(self._memory):
            assert bucket.host_grad is not None
            dtype, bucket.host_grad = bucket.host_grad.dtype, None
            del self._memory[bucket]
            if bucket.host_numel:
                bucket.host_grad = self._view(bucket, dtype)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the places for what is added."""
        return sum(place.nbytes for place in self._places)

    # --- backward -----------------------------------------------------------------------------------------------------

    def reduce(
        self,
        bucket: Bucket,
        whole: torch.Tensor,
        last: Parts,
        factor: float | torch.Tensor,
        as_it_is: bool,
        release: Callable[[torch.Tensor], None],
        number: int,
    ) -> None:
        """Let a bucket's gradient leave, or be added to what `Bucket.reduced` says is there already.

        whole, last: see ReduceScatter; factor: multiplies the sum; as_it_is: `whole` is the gradient, and is set or added
        as torch would; release: takes `whole` back; number: see ReduceScatter.gather_number.
        """
        adds = bucket.reduced
        self._make_room()
        if as_it_is:
            source, give = whole, release
            if not adds:  # else that of the sum counts
                bucket.sq_norm = _C.sq_norm([whole])
        else:
            source, give = (
                self._pool.take(bucket.owned_numel, self._dtype_of(adds)),
                self._pool.give,
            )
            bucket.sq_norm = last.add_up(factor, bucket.reduced_slice(source))
            release(whole)
        several, name = len(self._replicas) > 1, f"the gradients of {bucket.unit or 'the root'}"
        gathers = self._comm.all_gather(source, Traffic.BACKWARD, name, self._replicas, of=number) if several else []
        self._leaving.append(_Leaving(bucket, source, give, adds, as_it_is, gathers))
        if not gathers:
            self._start(self._leaving[-1])

    def _dtype_of(self, adds: bool) -> torch.dtype:
        return torch.float32 if adds else self._policy.grad_dtype

    def drain(self) -> None:
        """Let all that leaves go: no device memory is held any more, on CUDA in the order of the current stream."""
        self._make_room(0)

    def arrive(self) -> None:
        """Wait on the host until what has left is there, and added, so that it may be read. Interrupted, it may be repeated.

        RuntimeError if something is missing, until all is forgotten.
        """
        if self._last is not None:
            self._watch("keeping", self._last.synchronize)
        if self._failure is not None:
            doing, error = self._failure
            raise _failed(doing, error) from error
        for adding in filter(None, self._adding):
            _result(adding)
        for bucket, total in self._sums.items():
            squares = [_result(total.far)] if total.near is None else [_result(total.far), total.near]
            bucket.sq_norm = _sum_of(squares, self._pool.device)
        self._sums.clear()

    def forget(self) -> None:
        """Wait as `arrive` does, for gradients that nobody needs."""
        if self._last is not None:
            self._watch("keeping", self._last.synchronize)
        wait(filter(None, self._adding))
        self._adding = [None] * IN_FLIGHT
        self._sums.clear()
        self._failure = None

    def _watch(self, doing: str, call: Callable[[], T]) -> T | None:
        """Return what `call` returns, or keep its error for `arrive`."""
        try:
            return call()
        except Exception as error:
            self._failure = self._failure or (doing, error)
            return None

    def abandon(self) -> None:
        """Drop what is on its way: its backward has failed."""
        for leaving in self._leaving:
            if not leaving.started and not self._comm.broken:
                wait_all(leaving.gathers)
        self.forget()
        for leaving in self._leaving:
            leaving.give(leaving.source)
        self._leaving.clear()

    # --- one gradient -------------------------------------------------------------------------------------------------

    @property
    def _replicas(self) -> Sequence[int]:
        return self._comm.topology.replica_ranks(self._comm.rank)

    def _empty(self, size: int) -> torch.Tensor:
        assert self._copies is not None
        return self._copies.empty(size, torch.uint8)

    def _view(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        """Return the bucket's host memory as values of `dtype`; it grows if training is not as it was declared."""
        size = bucket.host_numel * dtype.itemsize
        if bucket not in self._memory or self._memory[bucket].numel() < size:
            self._memory[bucket] = self._empty(size)
        return self._memory[bucket][:size].view(dtype)

    def _adding_place(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        turn = self._turn % IN_FLIGHT
        last = self._adding[turn]
        if last is not None:
            self._watch("adding", last.result)
        if self._places[turn].numel() < numel * dtype.itemsize:
            self._places[turn] = self._empty(numel * dtype.itemsize)
        return self._places[turn][: numel * dtype.itemsize].view(dtype)

    def _make_room(self, keep: int = IN_FLIGHT - 1) -> None:
        for leaving in self._leaving:
            if not leaving.started:
                wait_all(leaving.gathers)
                self._start(leaving)
        while len(self._leaving) > keep:
            self._end(self._leaving.popleft())

    def _start(self, leaving: _Leaving) -> None:
        """Queue the copy of a gradient that is whole, and give the device its part."""
        bucket, source, cut = leaving.bucket, leaving.source, leaving.bucket.device_numel
        self._turn += 1
        if not leaving.adds:
            leaving.place = bucket.host_grad = self._view(bucket, source.dtype)
            if cut:
                self._near(bucket, source.dtype).copy_(source[:cut])
        else:
            leaving.place = self._adding_place(bucket.host_numel, source.dtype)
        copies, place = self._copies, leaving.place
        assert copies is not None
        leaving.started = True
        leaving.arrived = self._watch("keeping", lambda: copies.to_tier(place, source[cut:]))
        self._last = leaving.arrived or self._last
        if leaving.adds and leaving.arrived is not None:
            self._let_add(leaving, leaving.arrived)

    def _let_add(self, leaving: _Leaving, arrived: _C.CopyEvent) -> None:
        """Let the worker add what is on its way."""
        bucket = leaving.bucket
        first = bucket.host_grad
        assert first is not None
        if not leaving.as_it_is and first.dtype != self._policy.grad_dtype:  # it was kept as it was
            del self._memory[bucket]
            bucket.host_grad = self._view(bucket, self._policy.grad_dtype)
        total = bucket.host_grad
        own = bucket.own_grads()[-1] if len(self._replicas) > 1 else None  # each takes the norm of its piece
        submit = self._worker.submit
        far = self._watch("adding", lambda: submit(_add, arrived, leaving.place, first, total, leaving.as_it_is, own))
        if far is not None:
            self._adding[self._turn % IN_FLIGHT] = far
            self._sums[bucket] = _Sum(far)

    def _end(self, leaving: _Leaving) -> None:
        """Give the device memory of one that has left back; what is added to the device's part is there."""
        if leaving.arrived is not None:
            if leaving.adds and leaving.bucket.device_numel:
                self._sums[leaving.bucket].near = self._add_near(leaving)
            self._watch("keeping", leaving.arrived.wait)
        leaving.give(leaving.source)

    def _add_near(self, leaving: _Leaving) -> torch.Tensor:
        bucket, cut = leaving.bucket, leaving.bucket.device_numel
        first, dtype = bucket.grad, self._policy.grad_dtype
        assert first is not None
        if not leaving.as_it_is and first.dtype != dtype:
            bucket.grad = self._pool.keep(cut, dtype)
            _C.cast([bucket.grad], [first])
            self._pool.give(first)
        total = bucket.grad
        assert total is not None
        square = _sum(leaving.source[:cut], total, leaving.as_it_is)
        return square if len(self._replicas) == 1 else _C.sq_norm([bucket.own_grads()[0]])

    def _near(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of the device's part, in this dtype."""
        if bucket.grad is None or bucket.grad.dtype != dtype:
            if bucket.grad is not None:
                self._pool.give(bucket.grad)
            bucket.grad = self._pool.keep(bucket.device_numel, dtype)
        return bucket.grad
