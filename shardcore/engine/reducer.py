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
Note [Gradients in p.grad]: stage 0 gives every parameter its averaged gradient as `param.grad`, and
accepts what the user does to it before the step. These tensors are views of the bucket's reduced
gradient or, where that has another dtype than the parameter, of the resident local-gradient buffer,
which is free between backwards. In-place edits show in the buffer's version counter (views share
it), replaced or removed gradients in the identity of `param.grad`.
Note [Failed backwards]: what a backward left that ended in an error is dropped, with a warning.
Where it failed on this rank alone, the others wait for what it was to send: distributed/watchdog.py
finds that, and names the error. torch has no hook for it, so `watch_for_errors` puts itself around
torch.autograd.backward, which Tensor.backward calls.
Note [Unused here only]: a parameter without a gradient on this rank lets its bucket, and those
after it, wait for the end of backward.
Note [Late gradients]: a parameter's hook can fire several times in one backward (a shared weight
under reentrant checkpointing), even after its bucket was sent. All but the first part wait in
`_late` and go in a second round at the end, on every rank; also where the bucket is still here, or
the order of sums would depend on units.
Note [Home stream]: autograd runs a parameter's hook on the stream that its forward used. On CUDA
all work of a backward on gradients runs on one stream, its home: the one on which it begins. Home
waits for a hook's stream, and the caller of backward for home. Otherwise a bucket's copies would
run on other streams than its collective.
"""

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from shardcore._native import _C
from shardcore.distributed.comm import Comm, Started, Traffic, wait_all
from shardcore.distributed.compare import in_words, uneven_backwards
from shardcore.engine.agreement import HEADER_BYTES, agree
from shardcore.engine.bucket import (
    Bucket,
    BufferPool,
    GradState,
    Lifetimes,
    Managed,
    ReducePolicy,
    follow,
    give_full,
    stream_now,
    take_full,
)
from shardcore.engine.loss_scale import LossScaler
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
    def backward(*given: Any, **options: Any) -> None:
        try:
            inner(*given, **options)
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
    is_used, is_late = [m.used for m in params], [m in late for m in params]
    if comm.world_size > 1:
        flags = [
            _USED * used + _LATE * late_here
            for used, late_here in zip(is_used, is_late, strict=True)
        ]
        agreed = agree(
            comm,
            "backward",
            entries=[("backwards", "", str(backwards))],
            payload={"flags": torch.tensor(flags, dtype=torch.uint8, device="cpu")},
            kind=Traffic.BACKWARD,
            name="the end of a backward",
            explain=lambda: uneven_backwards(comm.gather_json(backwards)),
        )
        rows = agreed.ranks["flags"]
        is_used, is_late = ((rows & flag).any(0).tolist() for flag in (_USED, _LATE))
    for managed, used in zip(params, is_used, strict=True):
        managed.has_grad |= used
        managed.used = False
    return {
        managed for managed, late_anywhere in zip(params, is_late, strict=True) if late_anywhere
    }


class ParamGrads:
    """The gradients that stage 0 shows as `param.grad`."""

    def __init__(self, buckets: Sequence[Bucket], pool: BufferPool) -> None:
        """Serve `buckets`, whose reduced gradients every rank has in full; `pool`: of their
        buffers.
        """
        self.buckets, self._pool = buckets, pool
        self._versions: dict[Bucket, int] = {}  # of `Bucket.shown`

    def give(self) -> None:
        """Set `param.grad` of every parameter that has a gradient."""
        for bucket in self.buckets:
            if bucket.grad is None or not bucket.reduced:
                continue
            shown = bucket.grad
            if shown.dtype != bucket.dtype:
                shown = take_full(bucket, bucket.dtype, self._pool, passing=False)
                _C.cast([shown], [bucket.grad])
            for managed in bucket.params:
                managed.grad_view = (
                    managed.shown(managed.slice_of(shown)) if managed.has_grad else None
                )
                managed.param.grad = managed.grad_view
            bucket.shown, self._versions[bucket] = shown, self._version(bucket, shown)

    def drop(self) -> None:
        """Clear every `param.grad` and put the buffers back."""
        for bucket in self.buckets:
            if bucket.shown is not None and bucket.shown is not bucket.grad:
                bucket.resident[bucket.shown.dtype] = bucket.shown
            bucket.shown = None
            for managed in bucket.params:
                managed.param.grad = managed.grad_view = None

    @torch.no_grad()
    def absorb(self) -> None:
        """Bring the reduced gradients in line with what `param.grad` says now."""
        for bucket in self.buckets:
            shown = bucket.shown
            edited = shown is not None and self._version(bucket, shown) != self._versions[bucket]
            changed = edited
            for managed in bucket.params:
                grad = managed.param.grad
                if grad is managed.grad_view:
                    if edited and grad is not None and shown is not bucket.grad:
                        self._take_edit(bucket, managed, managed.cut(grad))
                    continue
                changed = True
                target = managed.slice_of(self._full_grad(bucket))
                if grad is None:
                    target.zero_()
                else:
                    target.copy_(managed.cut(grad))
                managed.has_grad = grad is not None
                managed.grad_view = grad
            if shown is not None:
                self._versions[bucket] = self._version(bucket, shown)
            if changed and bucket.grad is not None:
                bucket.sq_norm = _C.sq_norm([bucket.reduced_slice(bucket.grad)])

    @staticmethod
    def _version(bucket: Bucket, shown: torch.Tensor) -> int:
        """The count of edits of a buffer that `param.grad` are views of. (DTensors, which hold
        views of it, have their own.)
        """
        slices = (
            m.grad_view for m in bucket.params if m.sliced is not None and m.grad_view is not None
        )
        return shown._version + sum(view._version for view in slices)

    def _take_edit(self, bucket: Bucket, managed: Managed, shown: torch.Tensor) -> None:
        """Take the edited elements of a lower-precision view; the others keep their full
        precision.
        """
        full = managed.slice_of(self._full_grad(bucket))
        rounded = torch.empty_like(shown)
        _C.cast([rounded], [full])
        torch.where(rounded == shown, full, shown.to(full.dtype), out=full)

    def _full_grad(self, bucket: Bucket) -> torch.Tensor:
        if bucket.grad is None:
            bucket.grad = torch.zeros(
                bucket.layout.numel, dtype=torch.float32, device=bucket.owned_weight.device
            )
        elif not bucket.reduced:
            bucket.grad.zero_()
        bucket.reduced = True
        return bucket.grad


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
        as_it_is: bool,
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
        self.comm = comm
        self.lifetimes = lifetimes
        self.policy = policy
        self.device = device
        self.unsharder = unsharder
        self.scaler = scaler if scaler.active else None  # None: losses are not scaled
        self.overlap_step = overlap_step
        self.divisor = comm.world_size  # of sums over ranks; 1 where these are not averaged
        self.pool = BufferPool(device, weakly(self._forget))
        self._reduce_scatter = ReduceScatter(comm, self.pool, self.buckets, policy)
        self.host_grads: HostGradients | None = None  # None: gradients stay on the device
        if make_host_grads is not None:
            self.host_grads = make_host_grads(self._reduce_scatter, policy, scaler.active)
        topology, all_own = comm.topology, lifetimes.owns_everything
        self._replicas = topology.ranks_by_piece() if all_own else topology.replica_ranks(comm.rank)
        self.param_grads = ParamGrads(self.buckets, self.pool) if all_own else None
        self.sync = True  # False inside no_sync()
        self.muted = False  # this rank's gradients are left out (uneven.py)
        self.backwards = 0  # that gave gradients since the last step or zero_grad
        self._stepped = self._warned = False  # a step used the present gradients; a warning said so
        # backwards since the last reduction left float32 sums in Bucket.wire
        self._local_sums = False
        self._reducing = False
        self.dropped = False  # a backward failed, and no other ended since
        self._boundary = Boundary()
        self._home: torch.cuda.Stream | None = None  # see Note [Home stream]
        self._any_grad = False  # some parameter got a gradient in this backward
        self._next = 0  # how many buckets this backward sent
        self._missing: dict[Bucket, set[Managed]] = {}
        self._late: dict[Bucket, torch.Tensor] = {}
        self._late_params: set[Managed] = set()
        self._gathers: list[Started] = comm.keep_alive([])
        if comm.world_size > 1:
            _reducers.add(self)
            watch_for_errors()
        self.handles: list[RemovableHandle] = []  # of the hooks of parameters
        for order, bucket in enumerate(self.buckets):
            for slot, managed in enumerate(bucket.params):
                self._watch(managed.param, order, slot)

    def _watch(self, param: torch.Tensor, order: int, slot: int) -> None:
        """Let autograd call this before and after it adds to `param.grad`; after the user's hooks,
        whenever those were added.

        The hooks hold no strong reference: Python's garbage collector cannot see through the second
        kind.
        """
        weak = weakref.ref(self)

        def before(grad: torch.Tensor) -> None:
            if (reducer := weak()) is not None:
                under_way = reducer._boundary.callback
                if under_way is None or under_way() is None:
                    reducer.begin_backward()
                hooks = accumulate_hooks_of(reducer.buckets[order].params[slot].param)
                # ours clears p.grad, which later hooks are to see
                if next(reversed(hooks)) != handle.id:
                    hooks[handle.id] = hooks.pop(handle.id)

        def after(param: torch.Tensor) -> None:
            if (reducer := weak()) is not None:
                reducer._on_grad(order, slot)

        first = param.register_hook(before)  # type: ignore[no-untyped-call]
        handle = param.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
        self.handles += [first, handle]

    def _forget(self, memory: torch.Tensor) -> None:
        for bucket in self.buckets:
            bucket.forget_views(memory)

    # --- one backward -----------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Prepare for the gradients of one backward, unless one is under way."""
        if self._boundary.under_way:
            return
        # fake gradients: the buffers that they made would stay
        if fake_mode() is not None:
            raise NotImplementedError(
                "backward: FakeTensorMode is active, and fake gradients cannot be reduced; "
                "expected forward alone inside it, or a model that is not sharded"
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
                    "backward: adds to the gradients that the last step used, as nothing forgot "
                    "them; expected "
                    "optimizer.zero_grad() or model.zero_grad() after a step (from stage 1 on "
                    "p.grad = None does not; said once)"
                )
        self._boundary.begin(self._end_backward)
        self._home = stream_now(self.device)
        self.comm.begin_backward()
        self._next, self._any_grad = 0, False
        self._reducing = self.sync and (
            self.policy.sync_each or (self.backwards + 1) % self.policy.accumulate == 0
        )
        self._missing = {bucket: set(bucket.params) for bucket in self.buckets}
        for bucket in self.buckets:
            bucket.grad_state = GradState.COLLECTING
        if self.unsharder is not None:
            self.unsharder.begin_backward()

    @property
    def count(self) -> int:
        """What ranks compare before they use gradients of others: twice `backwards`.

        Plus one if some were added locally, as such sums travel in another dtype.
        """
        return 2 * self.backwards + self._local_sums

    def end_step(self) -> None:
        """Note that a step used the gradients, or was skipped."""
        if self.scaler is not None:
            self.scaler.end_step()
        self.backwards = 0
        self._stepped = any(bucket.reduced for bucket in self.buckets)

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
            self._reduce_scatter.abandon()
            self._wait_gathers()
            if self.host_grads is not None:
                self.host_grads.abort()
            if self.unsharder is not None:
                self.unsharder.reshard_all()
            self.zero()
            self.dropped = True
            self.comm.leave_backward(failed=True)
            logger.warning(
                "backward: the last one ended in an error; its gradients, and those it was to be "
                "added to, are dropped"
            )

    def _on_grad(self, order: int, slot: int) -> None:
        bucket = self.buckets[order]
        managed = bucket.params[slot]
        if (grad := managed.param.grad) is None:
            return
        managed.param.grad = None
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
            self._collect(bucket, managed, slot, grad)
            return
        # create_graph=True, or a branch on a stream of its own
        with torch.no_grad(), self._at_home():
            if self._home is not None:
                grad.record_stream(self._home)
            self._collect(bucket, managed, slot, grad)

    @contextmanager
    def _at_home(self) -> Iterator[None]:
        """Run the block on the home stream, behind the current stream's work. See Note [Home
        stream].
        """
        if self._home is None:
            yield
            return
        here = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._home):
            follow(here, self.device)
            yield

    def _collect(self, bucket: Bucket, managed: Managed, slot: int, grad: torch.Tensor) -> None:
        self._any_grad = True
        self._local_sums |= not self._reducing
        missing = self._missing[bucket]
        first = managed in missing
        if not self.muted:
            if self._reducing and not first:
                self._late_params.add(managed)
                managed.slice_of(self._late_buffer(bucket)).add_(grad)
                return
            assert bucket.grad_state is GradState.COLLECTING
            self._add_to_wire(bucket, managed, slot, grad)
        missing.discard(managed)
        if first and self._reducing and self._reduce_scatter.has_levels:
            for sent in self._reduce_scatter.arrive(bucket, grad.numel()):
                self._finish(*sent)
        if missing or not first:
            return
        if self.unsharder is not None:
            self.unsharder.gradients_complete(bucket)
        while (
            self._reducing
            and self._next < len(self.buckets)
            and not self._missing[self.buckets[self._next]]
        ):
            self._launch_next()

    def _add_to_wire(self, bucket: Bucket, managed: Managed, slot: int, grad: torch.Tensor) -> None:
        """Copy a local gradient to its slot of the bucket's buffer, or add it to what is there.
        Small ones wait until `_copy_waiting` copies them together.
        """
        wire = self._collect_buffer(bucket) if bucket.wire is None else bucket.wire
        target = bucket.views_of(wire)[0][slot]
        if managed.used:
            self._copy_waiting(bucket)
            target.add_(grad)
        elif grad.nbytes <= _SMALL_BYTES:
            bucket.waiting.append((target, grad))
            # else a model of small weights would hold all gradients twice
            if len(bucket.waiting) == _WAIT_AT_MOST:
                self._copy_waiting(bucket)
        else:
            target.copy_(grad)
        managed.used = True

    @staticmethod
    def _copy_waiting(bucket: Bucket) -> None:
        if bucket.waiting:
            targets, grads = zip(*bucket.waiting, strict=True)
            bucket.waiting.clear()
            torch._foreach_copy_(targets, grads)

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
        if not self._any_grad:  # torch.autograd.grad: it leaves param.grad alone
            self.show_grads()
        elif self._reducing:
            self._reduce_rest()
        else:
            for bucket in self.buckets:
                self._copy_waiting(bucket)
        if self.comm.clock.on:
            self.comm.clock.end("backward")
        self._boundary.clear()
        self.comm.leave_backward(failed=False, reduced=self._any_grad and self._reducing)
        self.dropped &= not self._any_grad

    def reduce_pending(self) -> None:
        """Reduce what was only summed locally so far (step() came after fewer backwards than
        declared).
        """
        if self._local_sums:
            self._next = 0
            self._reduce_rest()

    @torch.no_grad()
    def _reduce_rest(self) -> None:
        while self._next < len(self.buckets):
            self._launch_next()
        self._drain()
        late = agree_on_use(self.comm, self.params, self._late_params, self.count)
        if late:
            self._wait_gathers()
            for bucket in self.buckets:
                if late.intersection(bucket.params):
                    self._launch(bucket, self._late_buffer(bucket))
                    del self._late[bucket]
            self._late_params.clear()
            self._drain()
        self._wait_gathers()
        if self.host_grads is not None:
            self.host_grads.start_all()
        self.comm.end_backward()
        self._local_sums = False
        self.show_grads()

    def _drain(self) -> None:
        if self.comm.world_size == 1:
            return
        for sent in self._reduce_scatter.drain():
            self._finish(*sent)

    def _wait_gathers(self) -> None:
        gathers = [*self._gathers]
        self._gathers.clear()
        if gathers and not self.comm.broken:
            with self.comm.clock.part("exposed_reduce"):
                wait_all(gathers)

    # --- one bucket -------------------------------------------------------------------------------

    def _collect_buffer(self, bucket: Bucket) -> torch.Tensor:
        """The full buffer of the bucket that local gradients are written to. Its dtype is the
        same on every rank.
        """
        if bucket.wire is None:
            bucket.wire = self._take_full(
                bucket, torch.float32 if self._local_sums else self._sent_dtype(bucket)
            )
        return bucket.wire

    def _late_buffer(self, bucket: Bucket) -> torch.Tensor:
        if bucket not in self._late:
            self._late[bucket] = self.pool.take(
                bucket.layout.numel, self.policy.travels_as(bucket.dtype)
            ).zero_()
        return self._late[bucket]

    def _take_full(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor:
        passing = not self.lifetimes.full_grad_resident and (
            self.comm.world_size > 1 or bucket.host_grad is not None
        )
        return take_full(bucket, dtype, self.pool, passing)

    def _release_full(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        give_full(bucket, buffer, self.pool, self.lifetimes)

    def _launch_next(self) -> None:
        if self._next == 0 and self.comm.world_size > 1:
            self.comm.start_backward()
        bucket = self.buckets[self._next]
        self._next += 1
        full = self._collect_buffer(bucket)
        self._copy_waiting(bucket)
        bucket.wire = None
        self._zero_unused(bucket, full)
        dtype = self._sent_dtype(bucket)
        if full.dtype != dtype:
            sums, full = full, self._take_full(bucket, dtype).copy_(full)
            self._release_full(bucket, sums)
        self._launch(bucket, full)

    @staticmethod
    def _zero_unused(bucket: Bucket, full: torch.Tensor) -> None:
        """Zero the padding and the slots of parameters that are not `used`, so that a sum over
        ranks reads no stale bytes.
        """
        slots, gaps = bucket.views_of(full)
        unused = [
            slot for slot, managed in zip(slots, bucket.params, strict=True) if not managed.used
        ]
        if gaps or unused:
            torch._foreach_zero_([*gaps, *unused])

    def _sent_dtype(self, bucket: Bucket) -> torch.dtype:
        """The dtype that travels: of what was added locally float32, unless one was chosen."""
        return self.policy.travels_as(torch.float32 if self._local_sums else bucket.dtype)

    def _launch(self, bucket: Bucket, full: torch.Tensor) -> None:
        assert bucket.grad_state is not GradState.REDUCING
        bucket.grad_state = GradState.REDUCING
        with self.comm.scope(f"shardcore::reduce({bucket.label})"):
            if self.comm.world_size == 1:  # nothing is sent
                self._finish(bucket, full, Parts(full, 1, full, 0))
                return
            for sent in self._reduce_scatter.send(bucket, full):
                self._finish(*sent)

    def _finish(self, bucket: Bucket, full: torch.Tensor, last: Parts) -> None:
        """Bring what a bucket's ranks sent (`last`: the last level's parts) into its reduced
        gradient, averaged and unscaled, with its squared norm.

        The gradient goes to host memory, or is kept, added, or summed.
        """
        assert bucket.grad_state is GradState.REDUCING
        bucket.grad_state = GradState.REDUCED
        # Of one rank without a loss scale there is nothing to sum or to divide: its gradient stays
        # in its dtype unless other micro-steps are summed in another, and late parts are added to
        # it in that.
        as_it_is = self.comm.world_size == 1 and self.scaler is None
        if bucket.reduced:
            as_it_is &= full is self._late.get(bucket)
        else:
            as_it_is &= self.policy.accumulate == 1 or full.dtype == self.policy.grad_dtype
        if bucket.host_grad is not None:
            self._to_host(bucket, full, last, as_it_is)
        elif not as_it_is:
            self._sum(bucket, full, last)
        elif not bucket.reduced:
            bucket.replace_grad(full, self.pool)
            bucket.sq_norm = None
        else:
            assert bucket.grad is not None
            bucket.grad.add_(full)
            bucket.sq_norm = None
            self._release_full(bucket, full)
        bucket.reduced = True

    def _factor(self) -> float | torch.Tensor:
        """Return what multiplies a sum over ranks."""
        return 1.0 / self.divisor if self.scaler is None else self.scaler.unscale(self.divisor)

    def _to_host(self, bucket: Bucket, full: torch.Tensor, last: Parts, as_it_is: bool) -> None:
        assert self.host_grads is not None
        release = partial(give_full, bucket, pool=self.pool, lifetimes=self.lifetimes)
        self.host_grads.reduce(bucket, full, last, self._factor(), as_it_is, release)

    def _sum(self, bucket: Bucket, full: torch.Tensor, last: Parts) -> None:
        """Add the parts up, to the gradient that is there, if any; at stage 0 and with replicas,
        start to gather the rest of it.
        """
        leaves = self.comm.world_size > 1 and self.lifetimes.owns_everything
        if leaves and full.dtype == self.policy.grad_dtype and not bucket.reduced:
            # its pieces have left: the same memory takes the result
            bucket.replace_grad(full, self.pool)
        grad = bucket.sum_buffer(self.policy.grad_dtype, self.pool)
        with self.comm.scope(f"shardcore::sum({bucket.label})"):
            own = bucket.reduced_slice(grad)
            bucket.sq_norm = last.add_up(self._factor(), own, bucket.reduced)
        if len(self._replicas) > 1:
            with self.comm.scope(f"shardcore::gather_grad({bucket.label})"):
                self._gathers += self._reduce_scatter.gather(bucket, grad, self._replicas)
        if full is not grad:
            self._release_full(bucket, full)

    # --- between backwards ------------------------------------------------------------------------

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
        for buffer in self._late.values():  # of a backward that failed, not launched
            self.pool.give(buffer)
        self._late.clear()
        self._late_params.clear()
        for bucket in self.buckets:
            bucket.grad_state = GradState.COLLECTING
            bucket.waiting.clear()
            if bucket.wire is not None:
                self._release_full(bucket, bucket.wire)
                bucket.wire = None
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
        for bucket in self.buckets:
            for buffer in [
                *bucket.resident.values(),
                *([] if bucket.grad is None else [bucket.grad]),
            ]:
                self.pool.give(buffer)
            bucket.resident.clear()
            bucket.grad = None
        self.pool.shrink(0)

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
