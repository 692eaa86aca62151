"""Whole weights that exist only around their use (stage 3): gathered ahead, let go after.

A unit's weights are gathered when its forward or its backward begins, and the next unit's at the same time, while this one
computes. Which unit is next is what the last pass showed (`Order`); where a pass takes another way, nothing is gathered
ahead until it was learned again. So the order of gathers follows from the order of use alone, never from timing.

Note [Letting go in backward]: autograd adds to a parameter's gradient once all nodes that use the parameter have run, so a
unit is let go when all of its gradients are there. Frozen and unused parameters get none. But autograd runs the nodes of a
device in the reverse of the order in which they were made: when the latest input's own node is next, the unit's are done.
(Nothing is put into the graph to learn that: it would change the order of sums.) An input that is a leaf has no such node;
its gradient being there says less, so there the gradients must be there as well. Units that hold other units are used by
these, at times that nothing tells; they stay until backward ends, the root among them.
Note [Recomputation]: with activation checkpointing forward hooks run inside backward, and the second of a pair may not run.
There `before_forward` gathers as always and `after_forward` does nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shardcore._native import _C
from shardcore.comm import Comm
from shardcore.engine.bucket import Bucket, BufferPool, Managed, closed_message
from shardcore.engine.gather import Gatherer, keepers_of
from shardcore.engine.interrupts import held_back_interrupts
from shardcore.engine.lazy import LazyStep
from shardcore.engine.meeting import END_OF_BACKWARD, END_OF_FORWARD, Meetings
from shardcore.engine.order import Order, in_backward, tensors_in
from shardcore.engine.store import StepError
from shardcore.engine.trace import scope
from shardcore.engine.unit import Unit, take_edits


class Weights:
    """Decides when each unit's weights are whole on this rank, and moves them."""

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Comm,
        device: torch.device,
        reshard_after_forward: bool | int,
        lazy: LazyStep | None = None,
    ) -> None:
        """Serve `units`, whose parameters are closed and whose shards are in place.

        reshard_after_forward: whether weights are let go between forward and backward; or how many consecutive ranks keep
        them together, a part each. lazy: may still update the shards after a step.
        """
        self.units, self.comm, self.lazy = list(units), comm, lazy
        self.meetings = Meetings(comm, [unit.name for unit in units])
        self.meetings.before = self._start_owed
        self.meetings.on_parting.append(self._forget)
        self._owed: Unit | None = None  # see _start_ahead
        keepers = keepers_of(reshard_after_forward)
        first = comm.rank - comm.rank % keepers if keepers else 0
        self._keepers = range(first, first + keepers)
        self.pool = BufferPool(device)
        self._unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self._gatherer = Gatherer(list(self._unit_of), comm, device)
        self._forward, self._backward = Order[Unit](), Order[Unit]()
        self._parted = False  # ranks went different ways since: units that are whole here may not be so elsewhere
        self._lost: list[Any] = []  # gathers that may never end, and their memory
        self._scratch: list[tuple[Unit, Managed]] = []
        # Called from hooks of modules that may be compiled in place: torch.compile must not look inside.
        for method in ("before_forward", "after_forward", "before_part", "after_part", "begin_forward", "end_forward"):
            setattr(self, method, torch.compiler.disable(getattr(self, method)))  # type: ignore[no-untyped-call]

    # --- moving -------------------------------------------------------------------------------------------------------

    def _start_ahead(self, unit: Unit) -> None:
        """Gather a unit that is used soon. If its weights are not updated yet, do it before the next gather or meeting.

        Not now or never, by how fast this rank's Adam is: all ranks gather the same units in the same order.
        """
        if self.lazy is None or self.lazy.has_arrived(unit.buckets):
            self._start(unit)
        else:
            self._owed = unit

    def _start_owed(self) -> None:
        if self._owed is not None:
            try:
                self._start(self._owed)
            except StepError:  # it never comes: the meeting that is next tells the others, and this rank's own call says why
                self._owed = None

    def _start(self, unit: Unit) -> None:
        if self._owed is not unit:
            self._start_owed()
        if unit.open or unit.gathers is not None:
            return
        if self.lazy is not None:
            self.lazy.wait(unit.buckets)  # if this is interrupted, what is owed stays so
            self._owed = None
        gathers: list[Any] = []
        with held_back_interrupts(), scope("gather", unit.name):
            try:
                with self.meetings.refusing():
                    starts = self._bring(unit)
                unit.notice = self.meetings.start_weights(self.units.index(unit))
                for start in starts:
                    gathers += start()
                unit.gathers = iter(gathers)
            except Exception:
                unit.gathers, unit.kept = iter(gathers), None
                self._lose(unit)  # or the next use would take what is there for the weights
                raise

    def _bring(self, unit: Unit) -> Sequence[Callable[[], list[Any]]]:
        """Give a unit memory with this rank's part in place, or on its way there; returns what starts to gather the rest."""
        starts, arrivals = [], []
        for bucket in unit.buckets:
            if not self._gatherer.apart:
                bucket.weight = bucket.owned_weight
                continue
            bucket.weight = self.pool.take(bucket.layout.numel, bucket.dtype)
            if unit.kept:
                part = unit.kept.pop(0)
                self._kept_part(bucket).copy_(part)
                self.pool.give(part)
                starts.append(partial(self._gatherer.gather_kept, bucket, self._keepers))
            else:
                arrivals.append(self._gatherer.bring(bucket))
                starts.append(partial(self._gatherer.gather, bucket, arrivals[-1]))
        unit.kept = None
        self._gatherer.find_errors(arrivals)
        return starts

    def _wait(self, unit: Unit) -> None:
        """Wait until a unit's weights are whole; can be interrupted, and done again until its `gathers` are None."""
        try:
            self.meetings.check(unit.notice)
            if unit.gathers is not None:
                with self.meetings.refusing():
                    self._gatherer.wait(unit.gathers)
        except Exception:
            self._lose(unit)
            raise

    def _lose(self, unit: Unit) -> None:
        """Give up what is being gathered; it may still come, into memory that is kept."""
        if unit.gathers is not None:
            self._lost.append((unit.gathers, [bucket.let_go() for bucket in unit.buckets]))
            unit.gathers = None

    def _forget(self) -> None:
        """Forget what was learned, and what may never come (engine/meeting.py, Note [Parting])."""
        self._parted, self._owed = True, None
        self._forward, self._backward = Order[Unit](), Order[Unit]()
        for unit in self.units:
            unit.guest = None
            if not self.meetings.sent_by_all(unit.notice):
                self._lose(unit)

    def _start_anew(self) -> None:
        """If ranks went different ways, let go of what only some of them have."""
        if self._parted:
            self._parted = False
            self.close_all()

    def _exchange(self, bucket: Bucket, op: str, call: Callable[..., None], *arguments: Any) -> None:
        """Exchange memory; if that fails because a parameter lies elsewhere name it here, and stop the other ranks."""
        try:
            with self.meetings.refusing():
                call(*arguments)
        except (TypeError, ValueError):
            bucket.check_in_place(op)
            raise

    def _open(self, unit: Unit) -> None:
        self._start(unit)
        if unit.open:
            return
        self._wait(unit)
        with held_back_interrupts():
            unit.gathers = None
            for bucket in unit.buckets:
                self._exchange(bucket, "use", bucket.lend)
            unit.open = True

    def _kept_part(self, bucket: Bucket) -> torch.Tensor:
        return bucket.weight.chunk(len(self._keepers))[self._keepers.index(self.comm.rank)]

    def _keep_part(self, unit: Unit) -> None:
        unit.kept = []
        for bucket in unit.buckets:
            part = self._kept_part(bucket)
            unit.kept.append(self.pool.take(part.numel(), part.dtype).copy_(part))

    def _close(self, unit: Unit, keep: bool = False) -> None:
        if unit.held:
            return
        if keep and unit.open and unit.kept is None and len(self._keepers) > 1 and len(self.comm.sharers) > 1:
            self._keep_part(unit)
        if unit.gathers is not None:
            self._wait(unit)
        with held_back_interrupts():
            unit.gathers = None
            for bucket in unit.buckets:
                if unit.open:
                    if any(managed.edited for managed in bucket.params):
                        bucket.take_edits()
                    self._exchange(bucket, "letting go", bucket.withdraw)
                memory = bucket.let_go()
                if self._gatherer.apart:
                    self.pool.give(memory)
            unit.open = False

    def close_all(self) -> None:
        """Let go of every unit's whole weights: new ones come into the shards, or nobody needs them now."""
        for unit in self.units:
            unit.calls = 0
            if unit.held:
                take_edits(unit)
            elif unit.open or unit.gathers is not None:
                self._close(unit)
            for part in unit.kept or []:
                self.pool.give(part)
            unit.kept = None

    @torch.no_grad()
    def renew(self) -> None:
        """Bring the weights that `full_params` holds in line with the shards, which a step has changed. Collective."""
        works: list[Any] = []
        for bucket in (bucket for unit in self.units if unit.held for bucket in unit.buckets):
            if self.lazy is not None:
                self.lazy.wait([bucket])
            if self._gatherer.apart:
                with scope("gather", bucket.unit):
                    works += self._gatherer.gather(bucket, self._gatherer.bring(bucket))
        self._gatherer.wait(works)

    @contextmanager
    def whole(self, params: set[nn.Parameter]) -> Iterator[None]:
        """Keep the units of `params` whole inside the context; edits in place reach the shards at its end. Collective."""
        chosen = [u for u in self.units if any(m.param in params for bucket in u.buckets for m in bucket.params)]
        self._start_anew()
        for unit in chosen:
            self._open(unit)
            unit.held += 1
        try:
            yield
        finally:
            for unit in chosen:
                unit.held -= 1
                take_edits(unit)
                self._close(unit)

    def lend_scratch(self, params: Sequence[nn.Parameter]) -> None:
        """Give closed parameters memory of undefined content, for someone who writes all of it and reads none.

        What is being gathered (a forward that failed left it) has the old values: it is let go.
        """
        self._start_owed()
        for unit in self.units:
            if unit.gathers is not None:
                self._close(unit)
        place = {m.param: (unit, b, m) for unit in self.units if not unit.open for b in unit.buckets for m in b.params}
        chosen = [place[param] for param in params if param in place]
        for unit, bucket, managed in chosen:
            memory = torch.empty_like(managed.param).detach().view(-1)
            self._exchange(bucket, "load_state_dict", _C.lend, [managed.param], memory, [0])
            self._scratch.append((unit, managed))

    def end_scratch(self) -> None:
        """Take back what `lend_scratch` gave."""
        for unit, managed in self._scratch:
            _C.withdraw([managed.param], [closed_message(managed.name, unit.name)])
            managed.version = managed.param._version
        self._scratch = []

    # --- passes -------------------------------------------------------------------------------------------------------

    def _use(self, unit: Unit) -> None:
        if self._gatherer.apart and torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotImplementedError(
                f"the weights of {unit.name or 'the root'} lie in shards (stage 3), which transforms of torch.func "
                "(grad, vmap, ...) cannot run over; expected stage 0, 1 or 2, or torch.func.functional_call without a transform"
            )
        self._start_anew()
        order = self._backward if in_backward() else self._forward
        self._open(unit)
        order.use(unit)
        if order.next is not None:
            self._start_ahead(order.next)

    def begin_forward(self) -> None:
        """Begin a forward of the whole model (not one that backward repeats)."""
        if not in_backward():
            self._start_anew()
            self._forward.begin()

    def end_forward(self) -> None:
        """End a forward of the whole model: what was gathered and not used is let go; without gradients everything is."""
        if in_backward():
            return
        self.meetings.meet(END_OF_FORWARD, [unit.name or "root" for unit in self._forward.now])
        self._forward.end()
        for unit in self.units:
            if unit.gathers is not None or (unit.open and not torch.is_grad_enabled()):
                self._close(unit)

    def before_forward(self, index: int, inputs: Any) -> None:
        """Make unit `index` ready, and watch for the end of this call's backward."""
        unit = self.units[index]
        unit.guest = None
        self._use(unit)
        if unit.stays or not torch.is_grad_enabled():
            return
        watched = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        made = [(leaf.grad_fn._sequence_nr(), i) for i, leaf in enumerate(watched) if leaf.grad_fn is not None]
        if made:
            watched[max(made)[1]].register_hook(lambda grad: self._end_call(unit))  # type: ignore[no-untyped-call]
        elif watched:
            watched[0].register_hook(lambda grad: self._end_call(unit, only_if_complete=True))  # type: ignore[no-untyped-call]

    def after_forward(self, index: int, output: Any) -> None:
        """Let go of unit `index`, unless its backward is near, and watch for that."""
        unit = self.units[index]
        if in_backward():
            return
        if torch.is_grad_enabled():
            self._watch_backward(unit, output)
            if unit.stays or len(self._keepers) == 1 or self._forward.is_last(unit):
                return
        if not unit.stays:
            self._close(unit, keep=torch.is_grad_enabled())

    def _watch_backward(self, unit: Unit, output: Any) -> None:
        """Make the unit whole when the first node that made one of its outputs is to run, once a backward.

        Hooks of nodes run after those of tensors: a unit that ends where this one begins is let go before.
        """
        last = -1

        def begin(grads: Any) -> None:
            nonlocal last
            task = torch._C._current_graph_task_id()
            if task != last:
                last = task
                unit.calls += 1
                self._use(unit)

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begin)

    def before_part(self, index: int, part: nn.Module) -> None:
        """Make unit `index` ready for a module inside it that is called on its own (`model.lm_head(x)`)."""
        unit = self.units[index]
        self._start_anew()
        if not unit.open:
            unit.guest = part
            self._use(unit)

    def after_part(self, index: int, part: nn.Module, output: Any) -> None:
        """Let go of the unit if it was whole for this call alone; with gradients it stays until backward ends."""
        unit = self.units[index]
        if unit.guest is not part:
            return
        unit.guest = None
        if torch.is_grad_enabled():
            self._watch_backward(unit, output)
        elif not in_backward():
            self._close(unit)

    def begin_backward(self) -> None:
        """Begin a backward."""
        self._backward.begin()
        for unit in self.units:
            unit.calls = 0
            unit.incomplete = {bucket for bucket in unit.buckets if bucket.trainable}

    def gradients_complete(self, bucket: Bucket) -> None:
        """Learn that all gradients of a bucket are there. See Note [Letting go in backward]."""
        unit = self._unit_of[bucket]
        unit.incomplete.discard(bucket)
        if not unit.incomplete and not unit.stays and not unit.has_frozen:
            self._close(unit)

    def _end_call(self, unit: Unit, only_if_complete: bool = False) -> None:
        unit.calls = max(0, unit.calls - 1)
        here = unit.open or unit.gathers is not None
        if unit.calls == 0 and here and not (only_if_complete and unit.incomplete):
            self._close(unit)

    def end_backward(self) -> None:
        """End a backward."""
        self.meetings.meet(END_OF_BACKWARD, [unit.name or "root" for unit in self._backward.now])
        self._backward.end()
        self.close_all()
