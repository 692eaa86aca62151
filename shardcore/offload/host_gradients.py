"""Offload of reduced gradients to host memory: they are copied in backward, and those of later
micro-steps are added there.

The last `host_numel` elements of each bucket's owned range are offloaded. The first `device_numel`
stay on the device (`Bucket.grad`), where its kernels read them.

Norms are taken before the copy, so a step is decided, and Adam begins, while the last gradients are
on their way. A gradient that is added to another one is copied in float32 even if grad_dtype is
bfloat16: a product must not be rounded before the sum, or the bits would differ from the device's.
Device memory is taken back in the order of buckets, never by timing.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from shardcore._native import _C
from shardcore.distributed.comm import Started, wait_all
from shardcore.distributed.machine import WorkerThreads
from shardcore.engine.bucket import Bucket, ReducePolicy, sum_of_squares
from shardcore.engine.plan import MakeHostGrads, Plan
from shardcore.engine.reduce_scatter import Parts, ReduceScatter
from shardcore.offload.workers import make_worker

# How many gradients hold device memory while they are copied (to be added: staging buffers). Those
# of the last ones return it when the next backward begins.
IN_FLIGHT = 2
T = TypeVar("T")


def host_grad_dtype(bucket: Bucket, policy: ReducePolicy, alone: bool) -> torch.dtype:
    """Return the dtype of a bucket's reduced gradient on the host. alone: there is one rank and
    no loss scale.
    """
    return (
        policy.travels_as(bucket.grad_dtype)
        if alone and policy.accumulate == 1
        else policy.grad_dtype
    )


def grad_staging_bytes(buckets: Iterable[Bucket], policy: ReducePolicy) -> int:
    """Return the bytes of the staging buffers for gradients of later micro-steps of these
    buckets.
    """
    if policy.accumulate == 1 or not policy.sync_each:
        return 0
    return (
        IN_FLIGHT
        * max((bucket.host_numel for bucket in buckets), default=0)
        * torch.float32.itemsize
    )


def host_grad_bytes(buckets: Sequence[Bucket], policy: ReducePolicy, alone: bool) -> int:
    """Return the bytes of host memory for gradients of these buckets, staging buffers included.
    alone: see host_grad_dtype.
    """
    grad_bytes = sum(
        bucket.host_numel * host_grad_dtype(bucket, policy, alone).itemsize for bucket in buckets
    )
    return grad_bytes + grad_staging_bytes(buckets, policy)


def host_grads_of(plan: Plan) -> MakeHostGrads | None:
    """Return a function that makes a plan's HostGrads; None if its gradients stay on the device."""
    if plan.host is None or plan.options["offload"].gradients is None:
        return None
    return partial(HostGrads, plan.host.copies, plan.updated, plan.threads)


@dataclass
class _Pending:
    """A gradient that is being offloaded.

    source: (owned_numel,) on the device; `release` is called with it once it is copied.
    adds: add to the host's gradient instead of replacing it: by torch's `add_` if from_autograd,
        else by ordered_sum.
    gathers: collectives that complete `source` with the pieces of replicas.
    copied: the event of the copy; None before it is started, and if starting it failed.
    """

    bucket: Bucket
    source: torch.Tensor
    release: Callable[[torch.Tensor], None]
    adds: bool
    from_autograd: bool
    gathers: list[Started]
    copied: _C.CopyEvent | None = None


@torch.no_grad()
def _add(
    copied: _C.CopyEvent,
    part: torch.Tensor,
    first: torch.Tensor,
    total: torch.Tensor,
    from_autograd: bool,
    own_piece: torch.Tensor | None,
) -> torch.Tensor:
    """Wait for the copy of `part`, write first + part to `total`, return the squared norm of
    `own_piece` (by default of `total`).
    """
    copied.synchronize()
    if first is not total:
        _C.cast([total], [first])
    return _add_now(part, total, from_autograd, own_piece)


def _add_now(
    part: torch.Tensor, total: torch.Tensor, from_autograd: bool, own_piece: torch.Tensor | None
) -> torch.Tensor:
    square = (
        _C.sq_norm([total.add_(part)])
        if from_autograd
        else _C.ordered_sum(part, 1, 1.0, total, accumulate=True)
    )
    return square if own_piece is None else _C.sq_norm([own_piece])


class HostGrads:
    """Owns the host memory of reduced gradients (`Bucket.host_grad`): all writes to it go
    through this class.
    """

    def __init__(
        self,
        copies: _C.HostTier,
        buckets: Sequence[Bucket],
        threads: WorkerThreads,
        reduce_scatter: ReduceScatter,
        policy: ReducePolicy,
        scaled: bool,
    ) -> None:
        """Allocate `host_numel` elements for each bucket, and staging buffers.

        copies: allocates host memory and copies to it. threads: of the worker that adds.
        reduce_scatter: has the pool of device memory. scaled: losses are scaled, so that the
        reduction always unscales gradients.
        """
        self._reduce_scatter, comm = reduce_scatter, reduce_scatter.comm
        self._comm, self._policy, self._pool = comm, policy, reduce_scatter.pool
        self._copies = copies
        self._replicas = comm.topology.replica_ranks(comm.rank)
        self._memory: dict[Bucket, torch.Tensor] = {}
        buckets = [bucket for bucket in buckets if bucket.host_numel]
        for bucket in buckets:
            bucket.host_grad = self._host_view(
                bucket, host_grad_dtype(bucket, policy, comm.world_size == 1 and not scaled)
            )
        size = grad_staging_bytes(buckets, policy) // IN_FLIGHT
        self._staging: dict[int, torch.Tensor] = {}
        for turn in range(IN_FLIGHT if buckets else 0):
            self._staging[turn] = self._copies.empty(size, torch.uint8)
        self._turn = 0
        self._worker = make_worker("shardcore-add", threads, self._pool.device)
        # the last addition from each staging buffer
        self._adding: list[Future[torch.Tensor] | None] = [None] * IN_FLIGHT
        # Squared norms of the latest sums: of the elements on the host, and of those on the device.
        self._squares: dict[Bucket, tuple[Future[torch.Tensor], torch.Tensor | None]] = {}
        # whose copies begin when all pieces are here
        self._gathering: deque[_Pending] = comm.keep_alive(deque())
        self._leaving: deque[_Pending] = deque()  # being copied
        self._last: _C.CopyEvent | None = None
        self._failure: tuple[str, BaseException] | None = None  # see _watch

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the staging buffers."""
        return sum(buffer.nbytes for buffer in self._staging.values())

    def shrink(self) -> None:
        """Reallocate host memory after `host_numel` of buckets became smaller. There must be no
        gradients.
        """
        for bucket in list(self._memory):
            assert bucket.host_grad is not None
            dtype, bucket.host_grad = bucket.host_grad.dtype, None
            del self._memory[bucket]
            if bucket.host_numel:
                bucket.host_grad = self._host_view(bucket, dtype)

    # --- backward ---------------------------------------------------------------------------------

    def reduce(
        self,
        bucket: Bucket,
        full: torch.Tensor,
        last: Parts,
        factor: float | torch.Tensor,
        from_autograd: bool,
        release: Callable[[torch.Tensor], None],
    ) -> None:
        """Offload a bucket's gradient, or add it to the host's if `Bucket.reduced`.

        full: (layout.numel,), the local gradients, which `release` is called with when they are
        read; last: the parts of the last level (ReduceScatter). factor: multiplies their sum.
        from_autograd: `full` is the gradient itself, set or added as torch would.
        """
        adds = bucket.reduced
        # On the device `ordered_sum` computes `out + float32(scale * sum)`, rounded once. To add on
        # the host, `scale * sum` is copied in float32, whatever grad_dtype is, and `ordered_sum`
        # adds it there as a sum of one piece: the bits are the same.
        dtype = full.dtype if from_autograd else torch.float32 if adds else self._policy.grad_dtype
        self.start_all()
        # before memory is allocated: the pool depends on the order of buckets, never on timing
        self._release(len(self._leaving) + 1 - IN_FLIGHT)
        if from_autograd:
            pending = _Pending(bucket, full, release, adds, from_autograd, [])
            if not adds:  # else the norm of the sum is taken when it is added
                bucket.sq_norm = _C.sq_norm([full])
        else:
            source = self._pool.acquire(bucket.owned_numel, dtype)
            pending = _Pending(bucket, source, self._pool.release, adds, from_autograd, [])
            bucket.sq_norm = last.add_up(factor, bucket.reduced_slice(source))
            release(full)
        if len(self._replicas) > 1:
            pending.gathers = self._reduce_scatter.gather(bucket, pending.source, self._replicas)
            self._gathering.append(pending)
        else:
            self._start_copy(pending)

    def start_all(self) -> None:
        """Start the copies that wait for pieces of replicas."""
        while self._gathering:
            wait_all(self._gathering[0].gathers)
            self._start_copy(self._gathering.popleft())

    def drain(self) -> None:
        """Wait for all copies (in the order of the current stream on CUDA) and release their
        device memory.
        """
        self.start_all()
        self._release(len(self._leaving))

    def settle(self) -> None:
        """Make `Bucket.sq_norm` known, and raise what has failed so far, as `synchronize`.

        The norm is taken before a gradient is copied. So a step is decided while the last copies
        are under way, and waits for each where its gradient is used (`Bucket.arrival`). If one of
        these fails, the step fails halfway.
        """
        if self._squares or self._failure is not None:  # norms of sums are taken on the host
            self.synchronize()
        elif self._last is not None:
            self._watch("keeping", self._last.query)
            self._raise_failure()

    def synchronize(self) -> None:
        """Wait on the host until all gradients are copied and added, so that they can be read. Can
        be interrupted and repeated.

        Raises RuntimeError if a copy or an addition failed, on every call until `discard`.
        """
        with self._comm.clock.part("exposed_offload" if self._memory else None):
            self._wait_for_copies()
            for adding in filter(None, self._adding):
                self._watch("adding", adding.result)
        self._raise_failure()
        for bucket, (on_host, on_device) in self._squares.items():
            squares = [on_host.result()] if on_device is None else [on_host.result(), on_device]
            bucket.sq_norm = sum_of_squares(squares, self._pool.device)
        self._squares.clear()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            doing, error = self._failure
            raise RuntimeError(
                f"backward: {doing} gradients in host memory failed ({type(error).__name__}: "
                f"{error}). zero_grad() forgets them. If copies keep failing, rebuild the model "
                "and load its last checkpoint"
            ) from error

    def discard(self) -> None:
        """Wait as `synchronize` does, then drop squared norms and errors: the gradients are not
        needed.
        """
        self._wait_for_copies()
        wait(filter(None, self._adding))
        self._adding = [None] * IN_FLIGHT
        self._squares.clear()
        self._failure = None

    def abort(self) -> None:
        """Drop the gradients that are being copied, after their backward has failed."""
        for pending in self._gathering if not self._comm.broken else ():
            wait_all(pending.gathers)
        self.discard()
        for pending in (*self._leaving, *self._gathering):
            pending.release(pending.source)
        self._leaving.clear()
        self._gathering.clear()

    def _wait_for_copies(self) -> None:
        if self._last is not None:
            self._watch("keeping", self._last.synchronize)
        for bucket in self._memory:
            bucket.arrival = None

    def _watch(self, doing: str, call: Callable[[], T]) -> T | None:
        """Return what `call` returns, or store its error.

        An error in a copy or an addition does not end the backward, since other ranks would wait
        for this one. `settle` and `synchronize` raise it, at a step or a read, which then fails on
        every rank.
        """
        try:
            return call()
        except Exception as error:
            self._failure = self._failure or (doing, error)
            return None

    # --- one gradient -----------------------------------------------------------------------------

    def _view(
        self, memory: dict[Any, torch.Tensor], key: object, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a buffer as values of `dtype`; it is reallocated if it is too small."""
        size = numel * dtype.itemsize
        if key not in memory or memory[key].numel() < size:
            memory[key] = self._copies.empty(size, torch.uint8)
        return memory[key][:size].view(dtype)

    def _host_view(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        """Return the bucket's host memory as values of `dtype`."""
        return self._view(self._memory, bucket, bucket.host_numel, dtype)

    def _staging_view(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the next staging buffer, once its last content is added."""
        self._turn = (self._turn + 1) % IN_FLIGHT
        if (last := self._adding[self._turn]) is not None:
            self._watch("adding", last.result)
        return self._view(self._staging, self._turn, numel, dtype)

    def _release(self, count: int) -> None:
        """Wait for the oldest copies and release their device memory."""
        for _ in range(count):
            pending = self._leaving.popleft()
            if pending.copied is not None:
                with self._comm.clock.part("exposed_offload"):
                    self._watch("keeping", pending.copied.wait)
            pending.release(pending.source)

    def _start_copy(self, pending: _Pending) -> None:
        """Queue the copy of a complete gradient to the host, and its addition there; set or add
        the rest on the device.
        """
        bucket, source, cut = pending.bucket, pending.source, pending.bucket.device_numel
        if pending.adds:
            target = self._staging_view(bucket.host_numel, source.dtype)
        else:
            target = bucket.host_grad = self._host_view(bucket, source.dtype)
        copies = self._copies
        self._leaving.append(pending)
        pending.copied = copied = self._watch(
            "keeping", lambda: copies.to_tier(target, source[cut:])
        )
        self._last = copied or self._last
        if pending.adds:
            if copied is not None:
                self._start_adding(pending, copied, target)
            return
        bucket.arrival = copied
        if cut:
            if bucket.grad is None or bucket.grad.dtype != source.dtype:
                bucket.replace_grad(self._pool.keep(cut, source.dtype), self._pool)
            assert bucket.grad is not None
            bucket.grad.copy_(source[:cut])

    def _start_adding(self, pending: _Pending, copied: _C.CopyEvent, part: torch.Tensor) -> None:
        """Queue the addition of `part`, which is being copied, on the worker; add the elements
        on the device now.

        The worker adds in the order of the copies, while backward and later work continue. The same
        pass computes the squared norm of the sum.
        """
        bucket, from_autograd, cut = (
            pending.bucket,
            pending.from_autograd,
            pending.bucket.device_numel,
        )
        first = bucket.host_grad
        assert first is not None
        total = first
        dtype = first.dtype if from_autograd else self._policy.grad_dtype
        if first.dtype != dtype:  # the first gradient kept its own dtype
            del self._memory[bucket]
            total = bucket.host_grad = self._host_view(bucket, dtype)
        grad = bucket.sum_buffer(dtype, self._pool) if cut else None
        # Each replica computes the norm of its own piece.
        own_pieces: Sequence[torch.Tensor | None] = (
            bucket.own_grads() if len(self._replicas) > 1 else [None]
        )
        submit = self._worker.submit
        on_host = self._watch(
            "adding",
            lambda: submit(_add, copied, part, first, total, from_autograd, own_pieces[-1]),
        )
        if on_host is not None:
            self._adding[self._turn] = on_host
            on_device = None
            if grad is not None:
                on_device = _add_now(pending.source[:cut], grad, from_autograd, own_pieces[0])
            self._squares[bucket] = on_host, on_device
