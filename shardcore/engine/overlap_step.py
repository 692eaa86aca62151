"""The overlapped step (overlap_step=True): Adam runs on a thread of its own, and each read of weights waits for those it reads.

`step()` has decided everything (norm, clipping, scalars) when it hands its plan over; what is left is the same arithmetic in
another order of buckets, which no bit depends on. While a bucket's weights are on their way, `_parameters` of the modules that
have them are `Waiting` dicts, so whatever asks a module for a parameter waits: forward, parameters(), state_dict, deepcopy,
`module.weight`. Once they are there the module has its own dict again, so neither copies nor torch.compile find the other.
These dicts delegate to the one that they stand for; what was read meanwhile, and that dict, stay good. Their own content, which
C code may look at, is that of the other dict when they were made.

Note [Order]: buckets are updated in the order in which the last forward of the model used their units. Ranks gather in that
order, so it has to be the same on all of them: a digest of it travels with each step's norm, and where ranks differ all take
the order of units instead.
Note [Who gathers]: at stages 1 and 2 the worker starts to gather a bucket's new weights, and whoever needs them waits for that.
No other thread has a collective on this engine's group meanwhile, since all that have one finish the step first. Only where
other collectives might run at the same time in another order on another rank, which NCCL may not survive, the thread that
waits starts the gathers, at points that are the same on every rank: forwards, steps and `synchronize`. A read of weights, which
one rank may make alone, starts none and raises there. At stage 3 the gather of a unit waits for its update.
Note [Streams]: torch's current stream belongs to a thread. The worker's begins after an event of the stream that step() was
called on, and each stream that waits for a bucket waits for an event of the worker's.
"""

import atexit
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardcore._native import _C
from shardcore.distributed.comm import Comm, Started, Traffic, wait_all
from shardcore.engine.bucket import Bucket, Lifetimes
from shardcore.engine.state_store import Scalars, Span, StateStore, StepError
from shardcore.engine.trace import scope
from shardcore.engine.units import Unit, in_backward
from shardcore.optim.sharded import keep_uncompiled, weakly


class Waiting(dict[str, Any]):
    """`module._parameters` while some of them are on their way: what reads or changes it waits first."""

    def __init__(self, own: dict[str, Any], wait: Callable[[], None]) -> None:
        """Stand in for `own` until `wait` returns, which puts `own` back."""
        super().__init__(own)
        self.own, self._wait = own, wait

    def __iter__(self) -> Iterator[str]:
        """Tell names, without a wait. (Were it dict's own, dict(waiting) would call no method at all.)"""
        return iter(self.own)

    def now(self) -> dict[str, Any]:
        """Wait; returns what this stands for."""
        self._wait()
        return self.own

    def __reduce__(self) -> tuple[Any, ...]:
        """Wait, and be copied as what this stands for."""
        return dict, (self.now(),)


def _waits(name: str) -> Callable[..., Any]:
    return lambda self, *arguments, **options: getattr(self.now(), name)(*arguments, **options)


# All methods of dict but those that tell names only.
for _name in ("__getitem__", "__setitem__", "__delitem__", "__eq__", "__or__", "__ror__", "__ior__", "__repr__"):
    setattr(Waiting, _name, _waits(_name))
for _name in ("get", "items", "values", "copy", "pop", "popitem", "setdefault", "update", "clear"):
    setattr(Waiting, _name, _waits(_name))


class WaitingGroup(Waiting):
    """An entry of `optimizer.param_groups` in that time: who reads "params", or all values, waits.

    Options are read, written and added without a wait, as schedulers do after each step; the step has its own copy of them.
    """


def _waits_for_params(name: str) -> Callable[..., Any]:
    def method(self: WaitingGroup, key: str, *arguments: Any) -> Any:
        return getattr(self.now() if key == "params" else self.own, name)(key, *arguments)

    return method


for _name in ("__getitem__", "__setitem__", "get", "setdefault"):
    setattr(WaitingGroup, _name, _waits_for_params(_name))
for _name in ("__contains__", "__len__", "keys"):  # of options that were added meanwhile, too
    setattr(WaitingGroup, _name, lambda self, *arguments, name=_name: getattr(self.own, name)(*arguments))


logger = logging.getLogger("shardcore")

_on_thread = threading.local()


@dataclass(frozen=True)
class WorkerThreads:
    """How many threads the kernels of one worker use, and the cores that they stay on; none: wherever the process may run."""

    count: int
    cores: tuple[int, ...] = ()


def use_own_threads(threads: WorkerThreads | None) -> None:
    """Give this thread its threads, which start with its first kernel, at its first call; None: it goes on with torch's."""
    if threads is None or hasattr(_on_thread, "threads"):
        return
    if threads.cores and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, threads.cores)  # of this thread alone; those that it starts take it over
        except OSError as error:
            logger.warning(
                "overlap_step: the worker cannot be kept on the cores %s (%s); it runs wherever this process may",
                ", ".join(map(str, threads.cores)),
                error,
            )
    _C.use_threads(threads.count)
    _on_thread.threads = threads


def own_thread_count() -> int:
    """Return the number of threads that this thread was given; 0: torch's."""
    threads: WorkerThreads | None = getattr(_on_thread, "threads", None)
    return 0 if threads is None else threads.count


def _use_device(device: torch.device) -> None:
    """Make the device that of this thread: a new one's first call of CUDA opens device 0 (500 MB there), even to ask an event.

    Raises nothing, or no call would be made any more and nobody told: where CUDA is broken the calls themselves find out.
    """
    if device.type == "cuda":
        with suppress(Exception):
            torch.cuda.set_device(device)


class Worker:
    """A thread that makes calls in order. It starts with the first, and anew in a forked child; a fork waits for all."""

    def __init__(self, name: str, threads: WorkerThreads | None, device: torch.device) -> None:
        """Start nothing yet. threads: of the kernels in its calls, None for torch's; device: whose copies they wait for."""
        self._name, self.threads, self._device = name, threads, device
        self._last: Future[Any] | None = None
        self.start_anew()
        _alive.add(self)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Let the thread make the call after those before it; made here and now where no thread starts any more.

        Before its arguments the call is given what it is to tell `use_own_threads`.
        """
        try:
            self._last = self._executor.submit(call, self.threads, *arguments)
        except RuntimeError:  # the interpreter ends, or the system has no more
            self.start_anew()  # a thread that starts later would make the call once more
            self._last = Future()
            try:
                self._last.set_result(call(None, *arguments))
            except BaseException as error:
                self._last.set_exception(error)
        return self._last

    def let_end(self) -> None:
        """Let all calls end."""
        if self._last is not None:
            self._last.exception()

    def start_anew(self) -> None:
        """Let another thread start when it is needed."""
        self._executor = ThreadPoolExecutor(1, self._name, _use_device, (self._device,))


_alive: "weakref.WeakSet[Worker]" = weakref.WeakSet()  # os.register_at_fork keeps what it is given for good


def _of_all(method: Callable[[Worker], None]) -> None:
    for worker in list(_alive):
        method(worker)


os.register_at_fork(before=lambda: _of_all(Worker.let_end), after_in_child=lambda: _of_all(Worker.start_anew))
# Ctrl-C cuts short how concurrent.futures waits at exit; a thread that comes back from C++ too late would abort the process.
atexit.register(_of_all, Worker.let_end)


_BEGIN_S = 0.1  # at most, that a step waits for its worker to begin


@dataclass(eq=False)
class _Reader:
    """A module with parameters of its own in `buckets`. It is not kept: it keeps this, by its hooks."""

    module: "weakref.ref[nn.Module]"
    buckets: list[Bucket]


@dataclass(eq=False)
class _Update:
    """One bucket on its way.

    done: Adam has run, on CUDA up to `event`, and its weights are there when `left` is done (None: they are). gathers:
    collectives under way that nobody waited for; None: not started.
    """

    bucket: Bucket
    spans: Sequence[Span]
    done: "Future[None]" = field(default_factory=Future)
    event: torch.cuda.Event | None = None
    left: _C.CopyEvent | None = None
    gathers: list[Started] | None = None


class OverlapStep:
    """Runs the steps of one engine on a worker, and knows what has not arrived yet."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        store: StateStore,
        comm: Comm,
        lifetimes: Lifetimes,
        device: torch.device,
        threads: WorkerThreads,
        groups: list[dict[str, Any]],
    ) -> None:
        """Serve `units` of `model`, whose buckets `store` updates, on a worker whose kernels use `threads`.

        groups: the optimizer's (live) param_groups, whose "params" wait, too.
        """
        self._pending: dict[Bucket, _Update] = {}  # in the order in which they are updated
        self.units, self.store, self.comm, self.lifetimes, self.device = list(units), store, comm, lifetimes, device
        self._worker, self._groups = Worker("shardcore-step", threads, device), groups
        self._lock = threading.RLock()
        self.steps = 0
        self._failure: tuple[str, BaseException] | None = None
        self._work: tuple[Any, ...] | None = None  # what the worker was not given yet
        self._gathers = lifetimes.gathers_new_weights and len(comm.shard_ranks) > 1
        self._worker_gathers = self._gathers and not comm.uses_nccl
        self._left: list[_Update] = comm.keep_alive([])
        self._readers: dict[Bucket, list[_Reader]] = {bucket: [] for unit in units for bucket in unit.buckets}
        bucket_of = {managed.param: bucket for bucket in self._readers for managed in bucket.params}
        for module in model.modules():
            own = [bucket_of[param] for param in module._parameters.values() if param in bucket_of]
            if own:
                reader = _Reader(weakref.ref(module), list(dict.fromkeys(own)))
                for bucket in reader.buckets:
                    self._readers[bucket].append(reader)
        self._used: dict[Unit, None] = {}  # since the last forward of the whole model ended, in order
        self._order: list[Unit] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        _overlap_steps.add(self)
        # Called from hooks of modules that may be compiled in place: torch.compile must not look inside.
        keep_uncompiled(OverlapStep, "before_forward", "end_forward")

    # --- the order ----------------------------------------------------------------------------------------------------

    def before_forward(self, index: int) -> None:
        """Note that unit `index` is used, and wait for its weights."""
        unit = self.units[index]
        if not in_backward():
            self._used.setdefault(unit)
        self.wait(unit.buckets)

    def end_forward(self) -> None:
        """End a forward of the whole model: what it did not use is waited for, too. See Note [Order]."""
        if in_backward():
            return
        self._order, self._used = list(self._used), {}
        self.finish()

    @property
    def order(self) -> list[str]:
        """The names of the units in the order of the last forward; ranks compare it."""
        return [unit.name for unit in self._order]

    # --- the step -----------------------------------------------------------------------------------------------------

    def hand_over(self, spans: Mapping[Bucket, Sequence[Span]], hypers: Scalars, same_order: bool) -> None:
        """Let the worker update what `spans` says; nothing may be pending. same_order: `order` is the same on every rank."""
        assert not self._pending
        units = dict.fromkeys([*(self._order if same_order else []), *self.units])
        updates = [_Update(bucket, spans[bucket]) for unit in units for bucket in unit.buckets if bucket in spans]
        began: torch.cuda.Event | None = None
        if self._stream is not None:
            began = torch.cuda.Event()  # type: ignore[no-untyped-call]
            began.record(torch.cuda.current_stream(self.device))
        gather = self.comm.all_gather if self._worker_gathers else None
        self.steps += 1
        begun = threading.Event()
        self._work = _update_all, self.store, updates, hypers, gather, self.comm.shard_ranks, self._stream, began, begun
        self._pending = {update.bucket: update for update in updates}
        for reader in {reader: None for bucket in self._pending for reader in self._readers[bucket]}:
            self._let_wait(reader)
        self._groups[:] = [WaitingGroup(group, weakly(self._read)) for group in self._groups]
        self._submit()
        begun.wait(_BEGIN_S)  # else it may wait for the interpreter until what the caller does next ends

    def _submit(self) -> None:
        """Give the worker what it does not have yet. A signal handler may raise anywhere here: whoever waits submits again."""
        if self._work is not None:
            self._worker.submit(*self._work)
            self._work = None

    def _let_wait(self, reader: _Reader) -> None:
        if (module := reader.module()) is not None:
            module.__dict__["_parameters"] = Waiting(module._parameters, lambda: self._read(reader.buckets))

    # --- waiting ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for all that is pending. On CUDA all of this is in the order of the current stream."""
        self.wait(list(self._pending))

    def _read(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Wait for weights (None: all) that someone reads, perhaps on this rank alone. See Note [Who gathers]."""
        buckets = list(self._pending) if buckets is None else buckets
        if self._gathers and not self._worker_gathers:
            updates = [self._pending[bucket] for bucket in buckets if bucket in self._pending]
            missing = [update.bucket.unit or "the root" for update in updates if update.gathers is None]
            if missing:
                raise RuntimeError(
                    f"parameters: the weights of {', '.join(dict.fromkeys(missing))} are not gathered yet (overlap_step=True); "
                    "expected a forward of the model, or optimizer.synchronize() on every rank, before they are read"
                )
        self.wait(buckets)

    def wait(self, buckets: Iterable[Bucket]) -> None:
        """Wait until the weights of `buckets` are new. StepError if a step has failed, this time and from then on.

        May be interrupted anywhere, also by a signal handler that waits itself: all of this can be done again.
        """
        self._raise_failure()
        if not self._pending:
            return
        with self._lock:
            self._submit()
            for update in [self._pending[bucket] for bucket in buckets if bucket in self._pending]:
                self._wait_for_adam(update)
                if self._gathers:
                    self._wait_for_gather(update)
                for reader in self._readers[update.bucket]:
                    if not any(bucket in self._pending for bucket in reader.buckets if bucket is not update.bucket):
                        self._put_back(reader)
                if len(self._pending) == 1 and update.bucket in self._pending:
                    self._groups[:] = [group.own if isinstance(group, WaitingGroup) else group for group in self._groups]
                self._pending.pop(update.bucket, None)

    def _wait_for_adam(self, update: _Update) -> None:
        error = update.done.exception()
        if error is not None:
            self._fail("updating", update, error)
        if update.left is not None:
            try:
                update.left.wait()
            except RuntimeError as problem:
                self._fail("copying", update, problem)
        if update.event is not None:
            torch.cuda.current_stream(self.device).wait_event(update.event)

    def _wait_for_gather(self, last: _Update) -> None:
        """Wait for a bucket's gather; start it, and those before it, if the worker does not. See Note [Who gathers]."""
        for update in () if self._worker_gathers else self._pending.values():
            if update.gathers is None:
                self._wait_for_adam(update)
                update.gathers = _gather(self.comm.all_gather, update.bucket, self.comm.shard_ranks)
            if update is last:
                break
        try:
            wait_all(last.gathers or ())
        except Exception as error:
            self._fail("gathering", last, error)

    def _fail(self, doing: str, update: _Update, error: BaseException) -> None:
        message = (
            f"step {self.steps}: {doing} the weights of {update.bucket.unit or 'the root'} failed after step() had returned "
            f"({type(error).__name__}: {error}); expected it to succeed (some weights are new, some are not: make the model "
            "anew and load its last saved state)"
        )
        for other in self._pending.values():
            other.done.exception()  # the worker goes on gathering, see _update_all; then this thread may have collectives again
        self._failure = message, error
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            message, cause = self._failure
            raise StepError(message) from cause

    @staticmethod
    def _put_back(reader: _Reader) -> None:
        module = reader.module()
        if module is not None and isinstance(waiting := module._parameters, Waiting):
            module.__dict__["_parameters"] = waiting.own

    # --- fork, and the end --------------------------------------------------------------------------------------------

    def let_end(self) -> None:
        """Finish what is pending, as far as that asks nothing of other ranks. What fails is said at the next call."""
        with suppress(Exception):
            if self._gathers and not self._worker_gathers:  # the others may not be asked to gather now
                for update in self._pending.values():
                    self._wait_for_adam(update)
            else:
                self.finish()

    def __del__(self) -> None:
        """Finish what is pending, or the next engine on this group would meet its messages (Comm.separate)."""
        try:
            if self._pending and not own_thread_count() and not sys.is_finalizing():  # not on a worker: it may be this one's
                self.let_end()
        finally:
            if self._pending and self._worker_gathers:
                self._left += self._pending.values()

    def after_fork(self) -> None:
        """Work in a forked child: who held the lock stayed with the parent."""
        self._lock = threading.RLock()


def _gather(all_gather: Callable[..., list[Started]], bucket: Bucket, shard_ranks: Sequence[int]) -> list[Started]:
    with scope("gather", bucket.unit):
        return all_gather(bucket.weight, Traffic.STEP, f"the new weights of {bucket.unit or 'the root'}", shard_ranks)


@torch.no_grad()
def _update_all(
    threads: WorkerThreads | None,
    store: StateStore,
    updates: Sequence[_Update],
    hypers: Scalars,
    all_gather: Callable[..., list[Started]] | None,
    shard_ranks: Sequence[int],
    stream: torch.cuda.Stream | None,
    began: torch.cuda.Event | None,
    begun: threading.Event,
) -> None:
    """Run one step on the worker. After an error nothing more is updated, and all that was not says why.

    began: what the step comes after. begun: is set when the worker is about to compute. Gathers go on: other ranks wait for
    them, and learn at the next step that this one refuses.
    """
    error: BaseException | None = None
    steps: Iterator[_C.CopyEvent | None] = iter(())
    updates = [update for update in updates if not update.done.done()]  # none are left if this was submitted twice
    if not updates:
        begun.set()
    for update in updates:
        try:
            if error is None:
                with nullcontext() if stream is None else torch.cuda.stream(stream), scope("adam", update.bucket.unit):
                    if update is updates[0]:
                        use_own_threads(threads)
                        steps = store.steps([update.spans for update in updates], hypers)
                        if stream is not None and began is not None:
                            stream.wait_event(began)
                        begun.set()
                    update.left = next(steps)
                    if all_gather is not None and update.left is not None:
                        update.left.wait()
                    if stream is not None:
                        update.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        update.event.record(stream)
        except BaseException as problem:
            begun.set()
            error = problem
        try:
            if all_gather is not None:
                update.gathers = _gather(all_gather, update.bucket, shard_ranks)
        except BaseException as problem:
            error = error or problem
        if error is not None:
            steps = iter(())  # ends them: the cpu tier's go on by themselves
        if error is None and update is updates[-1]:
            error = _end(steps)
        if error is None:
            update.done.set_result(None)
        else:
            update.done.set_exception(error)


def _end(steps: Iterator[_C.CopyEvent | None]) -> BaseException | None:
    """Let a store end its steps (see store.arrivals); returns what went wrong."""
    try:
        next(steps, None)
    except BaseException as error:
        return error
    return None


# os.register_at_fork keeps what it is given for good; engines come and go.
_overlap_steps: "weakref.WeakSet[OverlapStep]" = weakref.WeakSet()


def _before_fork() -> None:  # a child has no worker
    for overlap_step in list(_overlap_steps):
        overlap_step.let_end()


def _after_fork() -> None:
    for overlap_step in list(_overlap_steps):
        overlap_step.after_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
