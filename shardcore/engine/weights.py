"""Whole weights that exist only around their use (stage 3): gathered ahead, let go after.

A unit's weights are gathered when its forward or its backward begins, and the next unit's at the same time, while this one
computes. Which unit is next is what the last pass showed (`Order`); where a pass takes another way, nothing is gathered
ahead until it was learned again. So the order of gathers follows from the order of use alone, never from timing.

Note [Letting go in backward]: autograd adds to a parameter's gradient once all nodes that use the parameter have run, so a
unit is let go when all of its gradients are there. Frozen and unused parameters get none. But autograd runs the nodes of a
device in the reverse of the order in which they were made: when the latest input's own node is next, the unit's are done.
(Nothing is put into the graph to learn that: it would change the order of sums.) An input that is a leaf has no such node;
its gradient being there says less, so there the gradients must be there as well. Units that hold other units are used by
these, at times that nothing tells; they stay until backward ends, the root among them. Where a unit's output shows no tensor
(it lies in an object that nobody can look into) nothing tells when its backward begins: it stays whole from forward on.
Note [Recomputation]: with activation checkpointing forward hooks run inside backward, and the second of a pair may not run.
There `before_forward` gathers as always and `after_forward` does nothing.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardcore.comm import Comm
from shardcore.engine.bucket import Bucket
from shardcore.engine.lazy import LazyStep
from shardcore.engine.one_thread import ForwardThread
from shardcore.engine.order import Order, in_backward, tensors_in
from shardcore.engine.unit import Unit
from shardcore.engine.whole_units import WholeUnits
from shardcore.optim.uncompiled import keep_uncompiled

logger = logging.getLogger("shardcore")
# Shown by torch.compile, too, where it is told to take everything (fullgraph=True).
_COMPILE_BLOCKS = (
    "at stage 3 weights come and go with each unit, which a graph cannot hold, so it is cut there; compile the blocks "
    "(for block in model.blocks: block.compile()), without fullgraph=True"
)


class Weights(WholeUnits):
    """Decides when each unit's weights are whole on this rank."""

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Comm,
        device: torch.device,
        reshard_after_forward: bool | int,
        lazy: LazyStep | None,
    ) -> None:
        """Serve `units`, whose parameters are closed and whose shards are in place.

        reshard_after_forward: whether weights are let go between forward and backward; or how many consecutive ranks keep
        them together, a part each. lazy: may still update the shards after a step.
        """
        super().__init__(units, comm, device, reshard_after_forward, lazy)
        self._unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self._forward, self._backward = Order[Unit](), Order[Unit]()
        self._thread = ForwardThread()
        self._warned = False
        # Called from hooks of modules that may be compiled in place: torch.compile must not look inside.
        of_units = "before_hooks", "before_forward", "after_forward", "before_part", "after_part"
        keep_uncompiled(Weights, *of_units, "begin_forward", "end_forward", "warn_of_compiling", reason=_COMPILE_BLOCKS)

    def _use(self, unit: Unit) -> None:
        if self._gatherer.apart and torch._C._functorch.peek_interpreter_stack() is not None:
            raise NotImplementedError(
                f"forward: the weights of {unit.name or 'the root'} lie in shards (stage 3), which transforms of torch.func "
                "(grad, vmap, ...) cannot run over; expected stage 0, 1 or 2, or torch.func.functional_call without a transform"
            )
        order = self._backward if in_backward() else self._forward
        self._open(unit)
        if unit.held:  # ranks may differ in what they run inside `full_params`: nothing is learned, nor gathered ahead
            return
        order.use(unit)
        if order.next is not None:
            self._start(order.next)

    def warn_of_compiling(self) -> None:
        """Say once that the forward of the whole model is being compiled, and what to compile instead."""
        if not self._warned and self.comm.rank == 0:
            logger.warning(
                "forward: torch.compile is around the whole model; expected it around its blocks: %s", _COMPILE_BLOCKS
            )
        self._warned = True

    def begin_forward(self, model: nn.Module) -> None:
        """Begin a forward of the whole model (not one that backward repeats)."""
        if not in_backward() and not self.all_held:
            self._thread.enter(model)
            self._forward.begin()

    def end_forward(self) -> None:
        """End a forward of the whole model: what was gathered and not used is let go; without gradients everything is."""
        if in_backward() or self.all_held:
            return
        self._thread.leave()
        self._forward.end()
        for unit in self.units:
            if unit.gathers is not None or (unit.open and not torch.is_grad_enabled()):
                self._close(unit)

    def before_hooks(self, index: int) -> None:
        """Make unit `index` whole for hooks that come before `before_forward`, which watches the inputs that they leave."""
        self._use(self.units[index])

    def before_forward(self, index: int, inputs: Any) -> None:
        """Make unit `index` ready, and watch for the end of this call's backward."""
        unit = self.units[index]
        unit.guest, unit.began = 0, torch._C._autograd._get_sequence_nr()
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
            hidden = next(tensors_in(output), None) is None  # in objects that nobody can look into
            if unit.stays or len(self._keepers) == 1 or self._forward.is_last(unit) or hidden:
                return
        if not unit.stays:
            self._close(unit, keep=torch.is_grad_enabled())

    def _watch_backward(self, unit: Unit, output: Any) -> None:
        """Make the unit whole when the first node that made one of its outputs is to run, once a backward.

        Hooks of nodes run after those of tensors: a unit that ends where this one begins is let go before. An output that is a
        view (a Linear's, of three dimensions) loses its node if it is edited in place: so the node of what it views is watched,
        too, if this call made it.
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
            viewed = None if tensor._base is None else tensor._base.grad_fn
            if viewed is not None and viewed._sequence_nr() >= unit.began:
                viewed.register_prehook(begin)
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begin)

    def before_part(self, index: int, part: nn.Module) -> None:
        """Make unit `index` ready for a module inside it that is called on its own (`model.lm_head(x)`)."""
        unit = self.units[index]
        if not unit.open:
            unit.guest, unit.began = id(part), torch._C._autograd._get_sequence_nr()
            self._use(unit)

    def after_part(self, index: int, part: nn.Module, output: Any) -> None:
        """Let go of the unit if it was whole for this call alone; with gradients it stays until backward ends."""
        unit = self.units[index]
        if unit.guest != id(part):
            return
        unit.guest = 0
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
        self._backward.end()
        self.close_all()
