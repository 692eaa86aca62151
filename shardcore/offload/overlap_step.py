"""The overlapped step (overlap_step=True): Adam runs on its own thread, and a read of weights waits
for their update.

`step()` computes the norm, clipping and all scalars before it starts the worker, which then runs
the same arithmetic in another order of buckets; the bits do not depend on that order. While a
bucket's weights are being updated, `_parameters` of the modules that use them are `PendingParams`,
so every read of a parameter from a module waits: forward, parameters(), state_dict, deepcopy,
`module.weight`. Afterwards the module gets its own dict back, so copies and torch.compile never see
another.

Note [Who gathers]: at stages 1 and 2 the worker starts to gather a bucket's new weights, and reads
of them wait for the gather. No other thread runs a collective on this engine's group meanwhile,
since every such thread finishes the step first. With NCCL other collectives could run in another
order on another rank, and hang. There the thread that waits starts the gathers, at points that are
the same on every rank: forwards, steps and `synchronize`. A single rank may read weights alone, so
a read starts no gather: with NCCL it raises an error if the weights are not gathered. At stage 3
the gather of a unit waits for its update.

Note [Waits]: these call `wait_for`: the hook before each unit's forward, ahead of the user's own
hooks; the end of the model's forward, for units that it did not use; reads of `_parameters` and of
"params" in param_groups; every gather at stage 3, or the order of collectives would depend on
timing; the next backward and zero_grad(set_to_none=False), since the worker reads gradients; reads
of full values; the next step; a fork.

Note [Failed updates]: after an error of the worker nothing more is updated, and every wait raises
StepError from its cause. Weights are gathered nevertheless, since other ranks wait for them. The
next step raises on every rank. (With NCCL and a worker at stages 1 and 2 the thread that raised
would have gathered: there the watchdog or the launcher ends the other ranks.)

Where a GPU runs Adam there is no worker: the update is queued on the device, and `defer` keeps the
gathers of stages 1 and 2 for the waits.
"""

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from shardcore._native import _C
from shardcore.distributed.comm import Comm, Started, wait_all
from shardcore.distributed.machine import WorkerThreads
from shardcore.engine.bucket import Bucket
from shardcore.engine.plan import Plan
from shardcore.engine.states import Audited, Scalars, Span, StateStore, StepError
from shardcore.engine.step import gather_new_weights, run_steps
from shardcore.engine.units import Unit
from shardcore.engine.unshard import in_backward
from shardcore.offload.workers import make_worker, on_worker
from shardcore.optim.interface import keep_uncompiled, weakly

logger = logging.getLogger("shardcore")


class PendingParams(MutableMapping[str, Any]):
    """`module._parameters` while some of them are being updated: reading or changing values
    waits; reading names does not.
    """

    def __init__(self, wrapped: dict[str, Any], wait: Callable[[], None]) -> None:
        """Replace `wrapped` until `wait` returns, which puts `wrapped` back."""
        self.wrapped, self._wait = wrapped, wait

    def _waited(self, key: str) -> dict[str, Any]:
        self._wait()
        return self.wrapped

    def __getitem__(self, key: str) -> Any:
        return self._waited(key)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._waited(key)[key] = value

    def __delitem__(self, key: str) -> None:
        del self._waited(key)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.wrapped)

    def __len__(self) -> int:
        return len(self.wrapped)

    def __contains__(self, key: object) -> bool:
        return key in self.wrapped

    def __repr__(self) -> str:
        return repr(dict(self))

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self) | dict(other)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the dict that this object replaces."""
        return dict, (dict(self),)

    def copy(self) -> dict[str, Any]:
        """Return a dict of the values."""
        return dict(self)


class PendingGroup(PendingParams):
    """An entry of `optimizer.param_groups` in that time: reading "params" waits.

    Options are read, written and added without a wait, as schedulers do after each step; the step
    has its own copy of them.
    """

    def _waited(self, key: str) -> dict[str, Any]:
        return super()._waited(key) if key == "params" else self.wrapped


@dataclass(eq=False)
class _Update:
    """One bucket that is being updated.

    done: Adam has run, on CUDA up to `event`. copied: the copy of the new weights to the device;
    None if there is none.
    gathers: the collectives that gather the new weights; None: not started.
    """

    bucket: Bucket
    spans: Sequence[Span]
    done: "Future[None]" = field(default_factory=Future)
    event: torch.cuda.Event | None = None
    copied: _C.CopyEvent | None = None
    gathers: list[Started] | None = None


def uses_worker(device: torch.device, store: StateStore) -> bool:
    """Whether an overlapped step needs a worker: not where a GPU runs Adam."""
    return device.type == "cpu" or store.tier != "device"


def overlap_step_of(plan: Plan) -> "OverlapStep | None":
    """Return the OverlapStep of a plan; None if no part of a step can overlap."""
    lifetimes, comm = plan.builder.lifetimes, plan.comm
    on_cpu = uses_worker(plan.device, plan.store)
    gathers = lifetimes.gathers_new_weights and len(comm.shard_ranks) > 1
    if not plan.options["overlap_step"] or not (on_cpu or gathers):
        return None
    return OverlapStep(plan, plan.threads if on_cpu else None, gathers)


class OverlapStep:
    """Runs the steps of one engine on a worker, and knows which weights are still being updated."""

    def __init__(self, plan: Plan, threads: WorkerThreads | None, gathers: bool) -> None:
        """Update the units of a plan on a worker whose kernels use `threads` (None: no worker).

        gathers: new weights are gathered. Reads of "params" in the optimizer's own param_groups
        wait, too.
        """
        self._pending: dict[Bucket, _Update] = {}  # in the order in which they are updated
        self.units, self.store = list(plan.units), plan.store
        self.comm, self.device = plan.comm, plan.device
        self.has_worker = threads is not None
        self._worker = make_worker("shardcore-step", threads or WorkerThreads(1), self.device)
        self._groups: list[Any] = plan.optimizer.param_groups
        self._lock = threading.RLock()
        self.step_count = 0
        self._failure: tuple[str, BaseException] | None = None
        self._gathers = gathers
        self._worker_gathers = gathers and not self.comm.uses_nccl
        self._unfinished: list[_Update] = self.comm.keep_alive([])
        # Modules that have parameters of their own, with the buckets of these.
        self._modules: list[tuple[weakref.ref[nn.Module], list[Bucket]]] = []
        self._modules_of: dict[Bucket, list[int]] = {
            bucket: [] for unit in self.units for bucket in unit.buckets
        }
        bucket_of = {
            managed.param: bucket for bucket in self._modules_of for managed in bucket.params
        }
        for module in plan.model.modules():
            buckets = list(
                dict.fromkeys(
                    bucket_of[param] for param in module._parameters.values() if param in bucket_of
                )
            )
            for bucket in buckets:
                self._modules_of[bucket].append(len(self._modules))
            self._modules.append((weakref.ref(module), buckets))
        # units used since the last forward of the model ended, in order
        self._used: dict[Unit, None] = {}
        self._order: list[Unit] = []
        self._stream = None
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        _overlap_steps.add(self)
        # Called from hooks of modules that may be compiled in place: torch.compile must not trace
        # them.
        keep_uncompiled(OverlapStep, "before_forward", "end_forward")

    def before_forward(self, index: int) -> None:
        """Note that unit `index` is used, and wait for its weights."""
        unit = self.units[index]
        if not in_backward():
            self._used.setdefault(unit)
        self.wait_for(unit.buckets)

    def end_forward(self) -> None:
        """Note that a forward of the model ended, and wait for the units that it did not use."""
        if in_backward():
            return
        self._order, self._used = list(self._used), {}
        self.finish()

    @property
    def order(self) -> list[str]:
        """The names of the units in the order of the last forward; ranks compare it."""
        return [unit.name for unit in self._order]

    def updates(self, buckets: Iterable[Bucket]) -> bool:
        """Whether Adam still has to update some of these buckets."""
        return any(
            not self._pending[bucket].done.done() for bucket in buckets if bucket in self._pending
        )

    def start(
        self,
        spans: Mapping[Bucket, Sequence[Span]],
        hypers: Scalars,
        same_order: bool,
        audit: Audited | None,
    ) -> None:
        """Start to update `spans` on the worker; nothing may be pending. same_order: `order` is
        the same on every rank.
        """
        assert not self._pending
        # Buckets are updated in the order in which the last forward used their units. Ranks gather
        # in that order, so it has to be the same on all: a digest of it is sent with each step's
        # norm, and where ranks differ all use the order of units.
        units = dict.fromkeys([*(self._order if same_order else []), *self.units])
        updates = [
            _Update(bucket, spans[bucket])
            for unit in units
            for bucket in unit.buckets
            if bucket in spans
        ]
        now: torch.cuda.Event | None = None
        # torch's current stream is per thread: the worker's waits for this thread's, and each
        # stream that uses a bucket waits for the worker's
        if self._stream is not None:
            now = torch.cuda.Event()  # type: ignore[no-untyped-call]
            now.record(torch.cuda.current_stream(self.device))
        self.step_count += 1
        begun = threading.Event()
        comm = self.comm if self._worker_gathers else None
        self._begin(updates)
        try:
            self._worker.submit(
                _update_all,
                partial(run_steps, self.store, audit),
                updates,
                hypers,
                comm,
                self.comm.scope,
                self._stream,
                now,
                begun,
            )
        # no thread starts: the interpreter ends, or the system has no more
        except RuntimeError as error:
            begun.set()
            for update in updates:
                update.done.set_exception(error)
        # else it might begin only when what the caller does next releases the interpreter
        begun.wait()

    def _begin(self, updates: Sequence[_Update]) -> None:
        self._pending = {update.bucket: update for update in updates}
        for ref, buckets in self._modules:
            if (module := ref()) is not None and not self._pending.keys().isdisjoint(buckets):
                self._defer_reads(module, buckets)
        self._groups[:] = [
            PendingGroup(group, weakly(self._wait_to_read)) for group in self._groups
        ]

    def defer(self, gathers: Mapping[Bucket, list[Started]]) -> None:
        """Let reads of weights, and forwards, wait for what gathers the new ones.

        Without a worker (states on a GPU) step() has queued Adam on the device. What is left to
        wait for are the gathers of stages 1 and 2, in the order of the stream.
        """
        assert not self._pending
        self.step_count += 1
        updates = [
            _Update(bucket, (), gathers=gathers_of_unit)
            for bucket, gathers_of_unit in gathers.items()
        ]
        for update in updates:
            update.done.set_result(None)
        if updates:
            self._begin(updates)

    def _defer_reads(self, module: nn.Module, buckets: Sequence[Bucket]) -> None:
        module.__dict__["_parameters"] = PendingParams(
            module._parameters, lambda: self._wait_to_read(buckets)
        )

    # --- waiting ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for all pending updates; on CUDA in the order of the current stream."""
        self.wait_for(list(self._pending))

    def _wait_to_read(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Wait for weights (None: all) before a read, which may happen on this rank only. See
        Note [Who gathers].
        """
        buckets = list(self._pending) if buckets is None else buckets
        if self._gathers and not self._worker_gathers:
            updates = [self._pending[bucket] for bucket in buckets if bucket in self._pending]
            missing = [
                update.bucket.unit or "the root" for update in updates if update.gathers is None
            ]
            if missing:
                raise RuntimeError(
                    f"parameters: the weights of {', '.join(dict.fromkeys(missing))} are not "
                    f"gathered yet (overlap_step=True); "
                    "expected a forward of the model, or optimizer.synchronize() on every rank, "
                    "before they are read"
                )
        self.wait_for(buckets)

    def wait_for(self, buckets: Iterable[Bucket]) -> None:
        """Wait until the weights of `buckets` are updated. Raises StepError from the first failed
        step on.

        Can be interrupted anywhere, also by a signal handler that calls it, and called again.
        """
        self._raise_failure()
        if not self._pending:
            return
        with (
            self._lock,
            self.comm.clock.part("exposed_offload" if self.has_worker else "exposed_gather"),
        ):
            for update in [self._pending[bucket] for bucket in buckets if bucket in self._pending]:
                self._wait_for_adam(update)
                if self._gathers:
                    self._wait_for_gather(update)
                self._pending.pop(update.bucket, None)
                for ref, of_module in (
                    self._modules[index] for index in self._modules_of[update.bucket]
                ):
                    if (module := ref()) is not None and self._pending.keys().isdisjoint(of_module):
                        params = module._parameters
                        module.__dict__["_parameters"] = (
                            params.wrapped if isinstance(params, PendingParams) else params
                        )
            if not self._pending:
                self._groups[:] = [
                    group.wrapped if isinstance(group, PendingGroup) else group
                    for group in self._groups
                ]

    def _wait_for_adam(self, update: _Update) -> None:
        error = update.done.exception()
        if error is not None:
            self._fail("updating", update, error)
        if update.copied is not None:
            try:
                update.copied.wait()
            except RuntimeError as problem:
                self._fail("copying", update, problem)
        if update.event is not None:
            torch.cuda.current_stream(self.device).wait_event(update.event)

    def _wait_for_gather(self, last: _Update) -> None:
        """Wait for a unit's gather; start it, and those before it, if the worker does not. See
        Note [Who gathers].
        """
        units = groupby(self._pending.values(), lambda update: update.bucket.unit)
        for unit, updates in (
            () if self._worker_gathers else [(unit, list(updates)) for unit, updates in units]
        ):
            if updates[0].gathers is None:
                for update in updates:
                    self._wait_for_adam(update)
                gathers_of_unit = gather_new_weights(
                    self.comm, [update.bucket for update in updates]
                )
                for update in updates:
                    update.gathers = gathers_of_unit
            if unit == last.bucket.unit:
                break
        try:
            wait_all(last.gathers or ())
        except Exception as error:
            self._fail("gathering", last, error)

    def _fail(self, doing: str, update: _Update, error: BaseException) -> None:
        message = (
            f"step {self.step_count}: {doing} the weights of {update.bucket.unit or 'the root'} "
            f"failed after step() had "
            f"returned ({type(error).__name__}: {error}); expected it to succeed (some weights are "
            f"new, some are not: make the model anew and load its last saved state)"
        )
        for pending in self._pending.values():
            # wait for the worker, which continues to gather (see _update_all): afterwards this
            # thread may run collectives
            pending.done.exception()
        self._failure = message, error
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            message, cause = self._failure
            raise StepError(message) from cause

    def finish_alone(self) -> None:
        """Finish pending updates without starting collectives. Errors are raised by the next
        call.
        """
        with suppress(Exception):
            if self._gathers and not self._worker_gathers:  # the other ranks do not gather now
                for update in self._pending.values():
                    self._wait_for_adam(update)
            else:
                self.finish()

    def __del__(self) -> None:
        """Finish pending updates: else the next engine on this group would receive their messages
        (Comm.acquire_group).
        """
        try:
            # not on a worker: it may be this one's
            if self._pending and not on_worker.threads and not sys.is_finalizing():
                self.finish_alone()
        finally:
            if self._pending and self._worker_gathers:
                self._unfinished += self._pending.values()


@torch.no_grad()
def _update_all(
    run: Callable[[Sequence[Sequence[Span]], Scalars], Iterator[_C.CopyEvent | None]],
    updates: Sequence[_Update],
    hypers: Scalars,
    comm: Comm | None,
    scope: Callable[[str], AbstractContextManager[object]],
    stream: torch.cuda.Stream | None,
    after: torch.cuda.Event | None,
    begun: threading.Event,
) -> None:
    """Run one step on the worker, after the event `after`. After an error nothing more is updated;
    the rest get the error.

    comm: gathers new weights; None if the thread that waits does. Gathers continue after an error,
    since other ranks wait for them; these get an error at the next step. scope: Comm.scope.
    begun: set when the worker is about to compute.
    """
    begun.set()
    error: BaseException | None = None

    def update_parts() -> Iterator[_C.CopyEvent | None]:  # so that all errors come out of `next`
        yield from run([update.spans for update in updates], hypers)

    events: Iterator[_C.CopyEvent | None] = update_parts()
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        if stream is not None and after is not None:
            stream.wait_event(after)
        for update in updates:
            try:
                if error is None:
                    with scope(f"shardcore::adam({update.bucket.label})"):
                        update.copied = next(events)
                        if comm is not None and update.copied is not None:
                            update.copied.wait()
                    if stream is not None:
                        update.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        update.event.record(stream)
            except BaseException as problem:
                error = problem
            try:
                if comm is not None:
                    update.gathers = gather_new_weights(comm, [update.bucket])
                if error is None and update is updates[-1]:
                    # lets the store end its step; closing the iterator earlier would wait as after
                    # an error
                    next(events, None)
            except BaseException as problem:
                error = error or problem
            if error is None:
                update.done.set_result(None)
            else:
                # ends the store's step, which on the cpu tier would otherwise continue
                events = iter(())
                update.done.set_exception(error)


# Weak references, since functions given to os.register_at_fork can never be unregistered.
_overlap_steps: "weakref.WeakSet[OverlapStep]" = weakref.WeakSet()


def _before_fork() -> None:  # the worker thread does not exist in a child
    for overlap_step in list(_overlap_steps):
        overlap_step.finish_alone()


os.register_at_fork(before=_before_fork)
