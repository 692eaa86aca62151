"""Gradient reduction, overlapped with backward unit by unit.

Autograd hands each parameter's gradient to `_on_grad`, which moves it into the bucket's flat
buffer. When a bucket is complete, and all before it in the fixed order have been sent, its pieces
go to their owners (all_to_all) while backward computes on; csrc/reduce then sums them in rank order
in float32. The order of collectives never depends on timing, so ranks cannot disagree, and the
order of sums never depends on buckets, stages or tiers, so neither do the bits.

Note [Backward boundaries]: a backward begins at the root output's gradient hook (or at the first
parameter's gradient if the loss does not come through the root's output) and ends in autograd's
final callback. Reentrant checkpointing runs nested backwards; beginning at the root output places
the callback in the outermost one. Only autograd holds the callback object, so when it is gone
without having been called, the backward failed.
Note [Failed backwards]: what a backward left that ended in an error is dropped, with a warning.
Where it failed on this rank alone, the others wait for what it was to send: distributed/watchdog.py
finds that, and names the error. torch has no hook for it, so `watch_for_errors` puts itself around
torch.autograd.backward, which Tensor.backward calls.
Note [Late gradients]: a parameter's hook can fire several times in one backward (a shared weight
under reentrant checkpointing), even after its bucket was sent. All but the first part wait in
`LocalGrad.late` and go in a second round at the end, on every rank; also where the bucket was not
sent yet, or the order of sums would depend on units.
Note [Home stream]: autograd runs a parameter's hook on the stream that its forward used. On CUDA
all work of a backward on gradients runs on one stream, its home: the one on which it begins. Home
waits for a hook's stream, and the caller of backward for home. Otherwise a bucket's copies would
run on other streams than its collective.
Note [Averages]: the reduction divides by the number of ranks and by the loss scale, in double, with
one rounding; the step's scale holds only the clip coefficient and the caller's `grad_scale`. At
stage 0 users may read and edit `p.grad`, so the average must exist before the step. All stages do
the same, or worlds that are not a power of two would round differently. A world of one without
accumulation and without a loss scale uses the gradient unchanged, in its own dtype.
"""

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial, wraps
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from shardcore._native import _C
from shardcore.distributed.comm import Comm, Started, Traffic, wait_all
from shardcore.distributed.compare import in_words, uneven_backwards
from shardcore.engine.agreement import HEADER_BYTES, Payload, agree
from shardcore.engine.bucket import (
    Bucket,
    BufferPool,
    Lifetimes,
    Managed,
    ReducePolicy,
    follow,
    stream_now,
)
from shardcore.engine.loss_scale import LossScaler
from shardcore.engine.param_grads import ParamGrads
from shardcore.engine.reduce_scatter import Parts, ReduceScatter
from shardcore.engine.states import OverlappedStep
from shardcore.engine.unshard import Unsharder
from shardcore.optim.interface import weakly
from shardcore.torch_private import accumulate_hooks_of, fake_mode, graph_task_id, queue_callback

logger = logging.getLogger("shardcore")
_SMALL_BYTES = 1 << 16  # of a gradient whose own copy takes longer to start than to run
_WAIT_AT_MOST = 32


class Boundary:
    """Watches one backward at a time. See Note [Backward boundaries]."""

    def __init__(self) -> None:
        # of the backward that began last; gone once that has ended or failed
        self.callback: weakref.ref[partial[None]] | None = None
        self._failed = False

    def begin(self, end: Callable[[], None]) -> None:
        """Let autograd call `end` when the backward that is under way ends."""
        callback = partial(end)  # an object that nobody else holds
        self.callback = weakref.ref(callback)
        queue_callback(callback)

    def clear(self) -> None:
        """Forget the backward: it ended, or what it left has been dropped."""
        self.callback, self._failed = None, False

    def end(self) -> None:
        """End the backward. It counts as failed until `clear`, even if its callback is kept
        alive (by a traceback).
        """
        self.callback, self._failed = None, True

    @property
    def under_way(self) -> bool:
        """Whether a backward has begun and neither ended nor failed."""
        return self.callback is not None and self.callback() is not None

    @property
    def failed(self) -> bool:
        """Whether the last backward ended in an error."""
        return self._failed or (self.callback is not None and self.callback() is None)


_reducers: "weakref.WeakSet[Reducer]" = weakref.WeakSet()  # of several ranks


@cache
def watch_for_errors() -> None:
    """Let the errors of backwards be known as soon as they are raised, from now on in this
    process.
    """
    inner = torch.autograd.backward

    @wraps(inner)
    def backward(*arguments: Any, **options: Any) -> None:
        try:
            inner(*arguments, **options)
        except BaseException as error:
            # else it is nested in another one, which may catch the error
            if graph_task_id() == -1:
                for reducer in list(_reducers):
                    reducer.note_error(error)
            raise

    torch.autograd.backward = backward


_USED, _LATE = 1, 2


def use_row_bytes(params: int) -> int:
    """Return the bytes that a rank proposes at the end of a backward over so many parameters."""
    return HEADER_BYTES + params


def agree_on_use(
    comm: Comm, params: Sequence[Managed], late: Collection[Managed], backwards: int
) -> set[Managed]:
    """Set which parameters got a gradient on any rank (`has_grad`), and reset `used`. Collective.

    late: those with gradients that came after their bucket was sent; backwards: Reducer.count.
    Returns the parameters that are late on any rank; RuntimeError on every rank if the counts
    differ.
    """
    is_used, late = [managed.used for managed in params], set(late)
    if comm.world_size > 1:
        flags = [_USED * m.used + _LATE * (m in late) for m in params]
        agreed = agree(
            comm,
            "backward",
            entries=[("backwards", "", str(backwards))],
            payload=Payload(
                {"flags": torch.tensor(flags, dtype=torch.uint8, device="cpu")},
                Traffic.BACKWARD,
                "the end of a backward",
            ),
            explain=lambda: uneven_backwards(comm.gather_json(backwards)),
        )
        rows = agreed.ranks["flags"]
        is_used, is_late = ((rows & flag).any(0).tolist() for flag in (_USED, _LATE))
        late = {managed for managed, flag in zip(params, is_late, strict=True) if flag}
    for managed, used in zip(params, is_used, strict=True):
        managed.has_grad |= used
        managed.used = False
    return late


class GradState(Enum):
    """Where a bucket's local gradient is on its way from autograd to the reduced shard."""

    COLLECTING = "collecting"  # parameters add to it, in one backward or, unreduced, in several
    REDUCING = "reducing"  # it was sent
    REDUCED = "reduced"  # the sum over ranks is in the reduced gradient


class LocalGrad:
    """The gradient of one bucket on this rank alone, from autograd until it is sent.

    Of its state this object is the only owner; what it becomes, the reduced gradient of the owned
    range, is the bucket's.

    missing: the slots of parameters that have not got a gradient in this backward.
    buffer: (layout.numel,), while there are gradients in it: in the bucket's grad_dtype, in the one
    that travels, or float32 sums over micro-steps. late: such a buffer for parts that came after
    the first (Note [Late gradients]).
    resident: buffers that stay allocated (Lifetimes.full_grad_resident), by dtype.
    """

    def __init__(
        self, bucket: Bucket, pool: BufferPool, lifetimes: Lifetimes, world_size: int
    ) -> None:
        """Collect gradients of `bucket` in buffers of `pool`."""
        self.bucket, self.params = bucket, bucket.params
        self.state = GradState.COLLECTING
        self.missing: set[int] = set()
        self.buffer: torch.Tensor | None = None
        self.late: torch.Tensor | None = None
        self.resident: dict[torch.dtype, torch.Tensor] = {}
        self._pool, self._world_size = pool, world_size
        self._stays = lifetimes.full_grad_resident
        itemsize = bucket.grad_dtype.itemsize
        self._gaps = [*bucket.layout.gaps()]
        self._small = [m.local.numel() * itemsize <= _SMALL_BYTES for m in bucket.params]
        self._slots: list[torch.Tensor] = []  # of `buffer`, a view for each parameter
        # small gradients that are not copied to their slots yet
        self._waiting: list[torch.Tensor] = []
        self._waiting_slots: list[torch.Tensor] = []
        self._copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = _C.cast
        # slots, and the padding between them, of buffers: they cost more to make than to fill
        self._views: dict[tuple[int, torch.dtype], tuple[list[torch.Tensor], ...]] = {}

    def begin(self) -> None:
        """Begin a backward."""
        self.state = GradState.COLLECTING
        self.missing = set(range(len(self.bucket.params)))

    def open(self, dtype: torch.dtype) -> None:
        """Take the buffer that gradients are copied to."""
        self.buffer = self.acquire(dtype)
        self._slots, _ = self._views_of(self.buffer)
        # one call for all, where torch's starts a copy for each; to float32 neither rounds
        is_exact = dtype == torch.float32 and self.buffer.is_cpu
        self._copy = _C.cast if is_exact else torch._foreach_copy_

    def add(self, slot: int, grad: torch.Tensor) -> None:
        """Copy a parameter's gradient to its slot of the buffer, or add it to what is there."""
        managed = self.params[slot]
        if managed.used:
            self.copy_waiting()
            self._slots[slot].add_(grad)
        elif self._small[slot]:
            # to start a copy takes longer than the copy: several are started together
            self._waiting.append(grad)
            self._waiting_slots.append(self._slots[slot])
            # else a model of small weights would hold all gradients twice
            if len(self._waiting) == _WAIT_AT_MOST:
                self.copy_waiting()
        else:
            self._slots[slot].copy_(grad)
        managed.used = True

    def add_late(self, slot: int, grad: torch.Tensor, dtype: torch.dtype) -> None:
        """Add a part of a gradient that is not the first to the late buffer, of this dtype."""
        self.bucket.params[slot].slice_of(self.open_late(dtype)).add_(grad)

    def open_late(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the late buffer; it begins with zeros."""
        if self.late is None:
            self.late = self._pool.acquire(self.bucket.layout.numel, dtype).zero_()
        return self.late

    def copy_waiting(self) -> None:
        """Copy the small gradients to their slots."""
        if not self._waiting:
            return
        try:
            self._copy(self._waiting_slots, self._waiting)
        except (TypeError, ValueError):  # a hook of the user's left another layout
            torch._foreach_copy_(self._waiting_slots, self._waiting)
        self.discard_waiting()

    def discard_waiting(self) -> None:
        """Forget the small gradients that are not copied."""
        self._waiting.clear()
        self._waiting_slots.clear()

    def close(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what is sent: the buffer in `dtype`, with zeros where there is no gradient, as a
        sum over ranks reads all of it.
        """
        assert self.buffer is not None
        self.copy_waiting()
        full, self.buffer = self.buffer, None
        slots, gaps = self._views_of(full)
        unused = [
            slot
            for slot, managed in zip(slots, self.bucket.params, strict=True)
            if not managed.used
        ]
        if gaps or unused:
            torch._foreach_zero_([*gaps, *unused])
        if full.dtype != dtype:
            sums, full = full, self.acquire(dtype).copy_(full)
            self.release(sums)
        return full

    def discard(self) -> None:
        """Drop what was not sent."""
        self.state = GradState.COLLECTING
        self.discard_waiting()
        if self.buffer is not None:
            self.release(self.buffer)
        if self.late is not None:
            self._pool.release(self.late)
        self.buffer = self.late = None

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers that it keeps now, but for the late one."""
        return [*self.resident.values(), *([] if self.buffer is None else [self.buffer])]

    # --- full buffers -----------------------------------------------------------------------------

    def acquire(self, dtype: torch.dtype) -> torch.Tensor:
        """Take a buffer (layout.numel,): the resident one, the memory of the bucket's idle
        gradient, or one of the pool.
        """
        if dtype in self.resident:
            return self.resident.pop(dtype)
        bucket, numel = self.bucket, self.bucket.layout.numel
        idle = None if bucket.reduced else bucket.grad
        if idle is not None and idle.numel() == numel and idle.dtype == dtype:
            bucket.grad = None
            return idle
        # it goes back to the pool soon, unless it stays or becomes the reduced gradient
        passes = self._world_size > 1 or bucket.host_grad is not None
        if passes and not self._stays:
            return self._pool.acquire(numel, dtype)
        return self._pool.keep(numel, dtype)

    def release(self, buffer: torch.Tensor) -> None:
        """Give back what `acquire` returned: one of each dtype stays where they are resident."""
        if self._stays and buffer.dtype not in self.resident:
            self.resident[buffer.dtype] = buffer
        else:
            self._pool.release(buffer)

    def keep_resident(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the resident buffer of a dtype, to be used between backwards."""
        if dtype not in self.resident:
            self.resident[dtype] = self._pool.keep(self.bucket.layout.numel, dtype)
        return self.resident[dtype]

    def free(self) -> None:
        """Give all memory to the pool, that of the bucket's gradient, too."""
        for buffer in self.resident.values():
            self._pool.release(buffer)
        self.resident.clear()
        if self.bucket.grad is not None:
            self._pool.release(self.bucket.grad)
        self.bucket.grad = None

    def _views_of(self, full: torch.Tensor) -> tuple[list[torch.Tensor], ...]:
        key = full.data_ptr(), full.dtype
        if key not in self._views:
            slots = [managed.slice_of(full) for managed in self.bucket.params]
            gaps = [full[start:end] for start, end in self._gaps]
            self._views[key] = slots, gaps
        return self._views[key]

    def forget_views(self, memory: torch.Tensor) -> None:
        """Forget the views of a buffer that the pool gives up."""
        for key in [key for key in self._views if key[0] == memory.data_ptr()]:
            del self._views[key]


def _keep_resident(
    local_grads: Mapping[Bucket, LocalGrad], bucket: Bucket, dtype: torch.dtype
) -> torch.Tensor:
    return local_grads[bucket].keep_resident(dtype)


class HostGradients(Protocol):
    """What the reducer needs of what keeps reduced gradients in host memory, of the buckets that
    have a `host_grad` (offload's HostGrads has the contracts).
    """

    @property
    def scratch_bytes(self) -> int: ...

    def reduce(
        self,
        bucket: Bucket,
        full: torch.Tensor,
        last: Parts,
        factor: float | torch.Tensor,
        from_autograd: bool,
        release: Callable[[torch.Tensor], None],
    ) -> None: ...

    def start_all(self) -> None: ...

    def drain(self) -> None: ...

    def settle(self) -> None: ...

    def synchronize(self) -> None: ...

    def discard(self) -> None: ...

    def abort(self) -> None: ...

    def shrink(self) -> None: ...


class Reducer:
    """Owns the gradients of all buckets from autograd to the reduced, averaged shard."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Comm,
        lifetimes: Lifetimes,
        policy: ReducePolicy,
        device: torch.device,
        unsharder: Unsharder | None,
        scaler: LossScaler,
        overlap_step: OverlappedStep | None,
        make_host_grads: Callable[[ReduceScatter, ReducePolicy, bool], HostGradients] | None,
    ) -> None:
        """Watch every parameter of `buckets`; they are reduced in the reverse of the given order.

        scaler: knows what gradients arrive multiplied by. overlap_step: may still read them after a
        step.
        make_host_grads: makes what keeps reduced gradients in host memory, from what sends them,
        how they are reduced, and whether losses are scaled; None if they stay on the device.
        """
        self.buckets = list(reversed(buckets))
        self.params = sorted((m for b in buckets for m in b.params), key=lambda m: m.index)
        self.comm, self.policy, self.device = comm, policy, device
        self.unsharder, self.overlap_step = unsharder, overlap_step
        self.scaler = scaler if scaler.active else None  # None: losses are not scaled
        self.divisor = comm.world_size  # of sums over ranks; 1 where these are not averaged
        self.pool = BufferPool(device, weakly(self._forget))
        self._locals = {
            bucket: LocalGrad(bucket, self.pool, lifetimes, comm.world_size)
            for bucket in self.buckets
        }
        self._in_order = [*self._locals.values()]
        self.exchange = ReduceScatter(comm, self.pool, self.buckets, policy)
        self.host_grads: HostGradients | None = None  # None: gradients stay on the device
        if make_host_grads is not None:
            self.host_grads = make_host_grads(self.exchange, policy, scaler.active)
        topology, all_own = comm.topology, lifetimes.owns_everything
        self._replicas = topology.ranks_by_piece() if all_own else topology.replica_ranks(comm.rank)
        self.param_grads = (
            ParamGrads(self.buckets, partial(_keep_resident, self._locals)) if all_own else None
        )
        self._owns_everything = all_own
        # nothing is summed over ranks, nor unscaled
        self._alone = comm.world_size == 1 and not scaler.active
        self.sync = True  # False inside no_sync()
        # called with a bucket and its local gradient, on the stream that sends it
        self.before_send: list[Callable[[Bucket, torch.Tensor], None]] = []
        self.audit: Any = None  # engine/audit.py
        self.muted = False  # this rank's gradients are left out (uneven.py)
        self.backwards = 0  # that gave gradients since the last step or zero_grad
        self._stepped = self._warned = False  # a step used the present gradients; a warning said so
        # backwards since the last reduction left float32 sums
        self._local_sums = False
        self._reducing = False  # this backward does
        self.dropped = False  # a backward failed, and no other ended since
        self._boundary = Boundary()
        self._home: torch.cuda.Stream | None = None  # see Note [Home stream]
        self._any_grad = False  # some parameter got a gradient in this backward
        self._next = 0  # how many buckets this backward sent
        self._late_params: set[Managed] = set()
        self._gathers: list[Started] = comm.keep_alive([])
        if comm.world_size > 1:
            _reducers.add(self)
            watch_for_errors()
        self.handles: list[RemovableHandle] = []  # of the hooks of parameters
        for order, bucket in enumerate(self.buckets):
            for slot, managed in enumerate(bucket.params):
                self._watch(managed.param, order, slot)

    # --- one gradient, from autograd to the reduced shard -----------------------------------------

    def _watch(self, param: torch.Tensor, order: int, slot: int) -> None:
        """Let autograd call this before and after it adds to `param.grad`; after the user's hooks,
        whenever those were added.

        The hooks hold no strong reference: Python's garbage collector cannot see through the second
        kind.
        """
        weak, boundary = weakref.ref(self), self._boundary

        def before(grad: torch.Tensor) -> None:
            if (reducer := weak()) is not None:
                under_way = boundary.callback
                if under_way is None or under_way() is None:
                    reducer.begin_backward()
                # ours clears p.grad, which later hooks are to see
                if next(reversed(hooks)) != handle.id:
                    hooks[handle.id] = hooks.pop(handle.id)

        def after(param: torch.Tensor) -> None:
            if (reducer := weak()) is not None:
                reducer._on_grad(order, slot, param)

        first = param.register_hook(before)  # type: ignore[no-untyped-call]
        handle = param.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
        hooks = accumulate_hooks_of(param)
        self.handles += [first, handle]

    def _on_grad(self, order: int, slot: int, param: torch.Tensor) -> None:
        """Take a parameter's gradient from autograd."""
        if (grad := param.grad) is None:
            return
        param.grad = None
        local = self._in_order[order]
        managed = local.params[slot]
        if managed.sliced is not None:
            grad = managed.cut(grad)
        if grad.layout != torch.strided:
            raise ValueError(
                f"backward: gradient of {managed.name} has layout {grad.layout}; expected a dense "
                f"gradient"
            )
        is_home = self._home is None or torch.cuda.current_stream(self.device) == self._home
        # the contexts below take longer than all of this
        if is_home and not torch.is_grad_enabled():
            self._collect(local, slot, grad)
            return
        # create_graph=True, or a branch on a stream of its own
        with torch.no_grad(), self._at_home():
            if self._home is not None:
                grad.record_stream(self._home)
            self._collect(local, slot, grad)

    def _collect(self, local: LocalGrad, slot: int, grad: torch.Tensor) -> None:
        """Add a gradient to those of its bucket, which is sent when all of them are there."""
        self._any_grad = True
        missing = local.missing
        is_first = slot in missing
        if self._reducing and not is_first:  # see Note [Late gradients]
            if not self.muted:
                self._late_params.add(local.bucket.params[slot])
                local.add_late(slot, grad, self.policy.travels_as(local.bucket.grad_dtype))
            return
        if not self.muted:
            if local.buffer is None:
                local.open(self._collected_dtype(local.bucket))
            local.add(slot, grad)
        if not is_first:
            return
        missing.remove(slot)
        if self._reducing and self.exchange.has_levels:
            self.exchange.arrive(local.bucket, grad.numel(), self._finish)
        if missing:
            return
        if self.unsharder is not None:
            self.unsharder.gradients_complete(local.bucket)
        if self._reducing:
            # in the order that all ranks have
            while self._next < len(self._in_order) and not self._in_order[self._next].missing:
                self._send_next()

    def _collected_dtype(self, bucket: Bucket) -> torch.dtype:
        """The dtype in which a bucket's gradients are collected; the same on every rank."""
        adds = self._local_sums or not self._reducing
        return torch.float32 if adds else self._sent_dtype(bucket)

    def _sent_dtype(self, bucket: Bucket) -> torch.dtype:
        """The dtype that travels: of what was added locally float32, unless one was chosen."""
        return self.policy.travels_as(torch.float32 if self._local_sums else bucket.grad_dtype)

    def _send_next(self) -> None:
        if self._next == 0 and self.comm.world_size > 1:
            self.comm.start_backward()
        local = self._in_order[self._next]
        self._next += 1
        if local.buffer is None:  # no parameter got a gradient on this rank
            local.open(self._collected_dtype(local.bucket))
        self._send(local, local.close(self._sent_dtype(local.bucket)))

    def _send(self, local: LocalGrad, reduce_scatter_input: torch.Tensor) -> None:
        """Send each rank its piece; `_finish` is called when this rank has those of its own."""
        assert local.state is not GradState.REDUCING
        local.state = GradState.REDUCING
        bucket = local.bucket
        for tell in self.before_send:
            tell(bucket, reduce_scatter_input)
        if self.audit is not None:
            self.audit.sending(bucket, reduce_scatter_input)
        with self.comm.scope(f"shardcore::reduce({bucket.label})"):
            if self.comm.world_size > 1:
                self.exchange.send(bucket, reduce_scatter_input, self._finish)
            else:  # nothing is sent
                parts = Parts(reduce_scatter_input, 1, reduce_scatter_input, 0)
                self._finish(bucket, reduce_scatter_input, parts)

    def _finish(self, bucket: Bucket, reduce_scatter_input: torch.Tensor, parts: Parts) -> None:
        """Make the bucket's reduced gradient, averaged and unscaled, with its squared norm, from
        the parts that ranks sent. Of one rank without a loss scale there is nothing to sum, and
        the local gradient is `plain`. The cases:

        to the host: gradients are offloaded
        sum: parts of ranks, or micro-steps, are added in grad_dtype
        keep: a plain gradient becomes the reduced one, in its own dtype
        add: late parts of a plain gradient are added to it, in that dtype
        """
        local = self._locals[bucket]
        assert local.state is GradState.REDUCING
        local.state = GradState.REDUCED
        if self.audit is not None:
            self.audit.summing(bucket, parts)
        if bucket.reduced:
            is_plain = reduce_scatter_input is local.late
        else:  # unless other micro-steps are summed in another dtype
            is_plain = (
                self.policy.accumulate == 1 or reduce_scatter_input.dtype == self.policy.grad_dtype
            )
        is_plain &= self._alone
        if bucket.host_grad is not None:
            assert self.host_grads is not None
            self.host_grads.reduce(
                bucket, reduce_scatter_input, parts, self._factor(), is_plain, local.release
            )
        elif not is_plain:
            self._sum(local, reduce_scatter_input, parts)
        elif not bucket.reduced:
            bucket.replace_grad(reduce_scatter_input, self.pool)
            bucket.sq_norm = None
        else:
            assert bucket.grad is not None
            bucket.grad.add_(reduce_scatter_input)
            bucket.sq_norm = None
            local.release(reduce_scatter_input)
        bucket.reduced = True

    def _factor(self) -> float | torch.Tensor:
        """Return what multiplies a sum over ranks."""
        return 1.0 / self.divisor if self.scaler is None else self.scaler.unscale(self.divisor)

    def _sum(self, local: LocalGrad, reduce_scatter_input: torch.Tensor, parts: Parts) -> None:
        """Add the parts up, to the gradient that is there, if any; at stage 0 and with replicas,
        start to gather the rest of it.
        """
        bucket, dtype = local.bucket, self.policy.grad_dtype
        leaves = self.comm.world_size > 1 and self._owns_everything
        if leaves and reduce_scatter_input.dtype == dtype and not bucket.reduced:
            # its pieces have left: the same memory takes the result
            bucket.replace_grad(reduce_scatter_input, self.pool)
        grad = bucket.sum_buffer(dtype, self.pool)
        with self.comm.scope(f"shardcore::sum({bucket.label})"):
            own = bucket.reduced_slice(grad)
            bucket.sq_norm = parts.add_up(self._factor(), own, bucket.reduced)
        if len(self._replicas) > 1:
            with self.comm.scope(f"shardcore::gather_grad({bucket.label})"):
                self._gathers += self.exchange.gather(bucket, grad, self._replicas)
        if reduce_scatter_input is not grad:
            local.release(reduce_scatter_input)

    # --- one backward -----------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Prepare for the gradients of one backward, unless one is under way."""
        if self._boundary.under_way:
            return
        # fake gradients: the buffers that they made would stay
        if fake_mode() is not None:
            raise NotImplementedError(
                "backward: FakeTensorMode is active, and fake gradients cannot be reduced. Run "
                "the forward alone inside it, or use a model without shard()"
            )
        if self.comm.clock.on:
            self.comm.clock.begin("backward")
        self.settle()
        if self.overlap_step is not None:
            self.overlap_step.finish()
        if self.host_grads is not None:
            self.host_grads.drain()
        self.accept_user_grads("backward")
        if self.param_grads is not None:
            self.param_grads.drop()
        elif self._stepped and not self._warned:
            self._warned = True
            if self.comm.rank == 0:
                logger.warning(
                    "backward: gradients are added to those of the last step. Call "
                    "optimizer.zero_grad() or model.zero_grad() after a step; from stage 1 on "
                    "p.grad = None does not clear them (logged once)"
                )
        self._boundary.begin(self._end_backward)
        self._home = stream_now(self.device)
        self.comm.begin_backward()
        self._next, self._any_grad = 0, False
        self._reducing = self.sync and (
            self.policy.sync_each or (self.backwards + 1) % self.policy.accumulate == 0
        )
        for local in self._in_order:
            local.begin()
        if self.unsharder is not None:
            self.unsharder.begin_backward()

    @contextmanager
    def _at_home(self) -> Iterator[None]:
        """Run the block on the home stream, behind the current stream's work. See Note [Home
        stream].
        """
        if self._home is None:
            yield
            return
        stream = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._home):
            follow(stream, self.device)
            yield

    @torch.no_grad()  # autograd calls it in the grad mode of the caller of backward
    def _end_backward(self) -> None:
        with self._at_home():
            self._finish_backward()
        follow(self._home, self.device)  # on the stream of the caller of backward

    def _finish_backward(self) -> None:
        self._boundary.end()
        if self.unsharder is not None:
            self.unsharder.end_backward()
        if self.scaler is not None:
            self.scaler.end_backward(self._any_grad)
        self.backwards += self._any_grad
        self._local_sums |= self._any_grad and not self._reducing
        if not self._any_grad:  # torch.autograd.grad: it leaves param.grad alone
            self.show_grads()
        elif self._reducing:
            self._reduce_rest()
        else:
            for local in self._in_order:
                local.copy_waiting()
        if self.comm.clock.on:
            self.comm.clock.end("backward")
        self._boundary.clear()
        self.comm.leave_backward(failed=False, reduced=self._any_grad and self._reducing)
        self.dropped &= not self._any_grad

    @torch.no_grad()
    def _reduce_rest(self) -> None:
        """Reduce what is not sent, with the parameters that have no gradient on this rank, and
        what came late.
        """
        while self._next < len(self._in_order):
            self._send_next()
        self._drain()
        late = agree_on_use(self.comm, self.params, self._late_params, self.count)
        if late:
            self._wait_gathers()
            for local in self._in_order:
                if late.intersection(local.bucket.params):
                    dtype = self.policy.travels_as(local.bucket.grad_dtype)
                    self._send(local, local.open_late(dtype))
                    local.late = None
            self._late_params.clear()
            self._drain()
        self._wait_gathers()
        if self.host_grads is not None:
            self.host_grads.start_all()
        self.comm.end_backward()
        self._local_sums = False
        self.show_grads()

    def _drain(self) -> None:
        if self.comm.world_size > 1:
            self.exchange.drain(self._finish)

    def _wait_gathers(self) -> None:
        gathers = [*self._gathers]
        self._gathers.clear()
        if gathers and not self.comm.broken:
            with self.comm.clock.part("exposed_reduce"):
                wait_all(gathers)

    def note_error(self, error: BaseException) -> None:
        """Let other ranks know the error of the backward that is under way, if there is one."""
        if self._boundary.under_way or self._boundary.failed:
            self.comm.fail_backward(in_words(error))

    def settle(self) -> None:
        """If the last backward ended in an error, drop all gradients. See Note [Failed
        backwards].
        """
        if self._boundary.failed:
            self.comm.fail_backward()
            self._boundary.clear()
            self.exchange.abandon()
            self._wait_gathers()
            if self.host_grads is not None:
                self.host_grads.abort()
            if self.unsharder is not None:
                self.unsharder.reshard_all()
            self.zero()
            self.dropped = True
            self.comm.leave_backward(failed=True)
            logger.warning(
                "backward: the last backward raised an error. Its gradients, and the earlier "
                "gradients of this step, are dropped"
            )

    # --- between backwards ------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """What ranks compare before they use gradients of others: twice `backwards`.

        Plus one if some were added locally, as such sums travel in another dtype.
        """
        return 2 * self.backwards + self._local_sums

    @property
    def repeats(self) -> bool:
        """Whether the last step used these gradients (stages 1 to 3; at stage 0 users may have
        edited them).
        """
        return self._stepped and self.param_grads is None

    def end_step(self) -> None:
        """Note that a step used the gradients, or was skipped."""
        if self.scaler is not None:
            self.scaler.end_step()
        self.backwards = 0
        self._stepped = any(bucket.reduced for bucket in self.buckets)

    def reduce_pending(self) -> None:
        """Reduce what was only summed locally so far (step() came after fewer backwards than
        declared).
        """
        if self._local_sums:
            self._next = 0
            self._reduce_rest()

    def accept_user_grads(self, op: str) -> None:
        """Accept what the user did to `param.grad` since backward (stage 0), or refuse it
        (gradients are sharded).
        """
        if self.param_grads is not None:
            self.param_grads.absorb()
            return
        for managed in self.params:
            if managed.param.grad is not None:
                raise ValueError(
                    f"{op}: {managed.name}.grad was assigned; expected None (from stage 1 on "
                    f"gradients are sharded; "
                    "read them with shardcore.full_grad, clip them with shardcore.clip_grad_norm_)"
                )

    def zero(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or fill them with zeros, which an overlapped step must have read
        by then.
        """
        if not set_to_none and self.overlap_step is not None:
            self.overlap_step.finish()
        self.settle()
        if self.host_grads is not None:
            self.host_grads.discard()  # zeros must not be overwritten
        self.backwards = 0
        self._stepped = self.dropped = self._local_sums = False
        if self.scaler is not None:
            self.scaler.unscaled = False
        self._late_params.clear()
        for local in self._in_order:
            local.discard()
            bucket = local.bucket
            if set_to_none:
                bucket.reduced = False
            elif bucket.reduced:
                for _, grad in bucket.grads():
                    grad.zero_()
                bucket.sq_norm = torch.zeros(2, dtype=torch.float64, device=self.device)
        for managed in self.params:
            managed.used = False
            managed.has_grad &= not set_to_none
            if self.param_grads is None:
                managed.param.grad = None  # nothing of ours: what a user assigned
        self.show_grads()

    def free_buffers(self) -> None:
        """Free what gradients were in, none of which may be needed any more; the next backward
        takes memory again.
        """
        for local in self._in_order:
            local.free()
        self.pool.shrink(0)

    def buffers_of(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return the buffers of a bucket's local gradient; frozen ones have none."""
        local = self._locals.get(bucket)
        return [] if local is None else local.buffers

    def _forget(self, memory: torch.Tensor) -> None:
        for local in self._in_order:
            local.forget_views(memory)

    @property
    def holds_grads(self) -> bool:
        """Whether there are gradients, of backwards that no zero_grad() has forgotten."""
        return (
            self._boundary.under_way
            or self.backwards > 0
            or any(bucket.reduced for bucket in self.buckets)
        )

    def show_grads(self) -> None:
        """Set `param.grad` again after the reduced gradients changed (stage 0; nothing from
        stage 1 on).
        """
        if self.param_grads is not None:
            self.param_grads.drop()
            self.param_grads.give()
