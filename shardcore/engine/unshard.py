"""Unsharding and resharding at stage 3: full weights exist only around their use, gathered ahead
and freed after.

A unit's weights are gathered when its forward or its backward begins, and those of the next
`prefetch` units at the same time, while this one computes. Which units are next is what the last
pass showed (`Order`); where a pass takes another way, nothing is gathered ahead until it was
learned again. So the order of gathers follows from the order of use alone, never from timing.

Note [Shards in host memory]: such a shard is copied straight into its range of the full weights,
and the gather begins when the copy is done. On CUDA a stream of its own waits for that, so that the
computing stream does not. The copy began after all that the current stream had queued by then, so
the gather does, too, and may overwrite memory that this work has read.
Note [Resharding in backward]: autograd accumulates a parameter's gradient once all nodes that use
the parameter have run, so a unit is resharded when all of its gradients are there. Frozen and
unused parameters get none. But autograd runs the nodes of a device in the reverse of the order in
which they were made: when the node of the latest input is next, those of the unit are done. (No
node is added to the graph for this: it would change the order of sums.) An input that is a leaf has
no such node, and its gradient may be there earlier, so there the parameters' gradients must be
there as well. Units that hold other units are used at unknown times; they stay until backward ends,
the root among them. Where a unit's output shows no tensor (it lies in an opaque object), the begin
of its backward cannot be seen: it stays unsharded from forward on.
Note [Several streams]: a forward may use units on streams of its own (branches, overlapped
experts), which it forks and joins. The stream that uses a unit first waits for its gather; other
streams that use the unit follow that stream. Memory that is given back to the pool on one stream
and taken on another is ordered by the pool.
Note [Recomputation]: with activation checkpointing forward hooks run inside backward, and the
second of a pair may not run. There `before_forward` gathers as always and `after_forward` does
nothing.
Note [Edits]: edits of unsharded weights are found by the version counter when a unit is resharded,
and copied to the shard. Edits through `.data` move no counter, so the end of `full_params` compares
the weights with the shard. Masters of changed weights are updated at the next step or read
(`Bucket.changed`). Before that, ranks compare a digest of what they are about to keep
(engine/full_params.py); if it differs, edits are dropped and loads are undone.
Note [One parameter after another]: scripts read a model by one context for each parameter. So the
end of such a context leaves the weights of its unit where they are, as if they were being gathered,
until another unit is used or the shards change. So each unit is gathered once.
Note [Modules outside of units]: modules of the root (`lm_head`) may be called on their own. Their
hooks unshard the root for the call, or until backward ends. Layers inside a unit have no hooks: a
call of one raises an error that names its weight.
"""

import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardcore._native import _C
from shardcore.distributed.comm import Comm, Traffic, wait_all
from shardcore.engine.bucket import Bucket, BufferPool, Managed, closed_message, follow, stream_now
from shardcore.engine.float8 import Float8Weights
from shardcore.engine.states import OverlappedStep
from shardcore.engine.units import Unit, UnitState
from shardcore.optim.interface import keep_uncompiled
from shardcore.torch_private import (
    base_of,
    fake_mode,
    functorch_level,
    graph_task_id,
    next_sequence_nr,
    on_profiles_with_stack,
    pytree,
    sequence_nr_of,
)


class Order:
    """The order in which units are used in one kind of pass: learned in one, expected in the
    next.
    """

    def __init__(self) -> None:
        self._learned: list[Unit] = []
        self._uses: list[Unit] | None = None
        self._on_track = False

    def begin(self) -> None:
        """Begin a pass."""
        self._uses, self._on_track = [], True

    def use(self, unit: Unit) -> None:
        """Note a use; several in a row count as one."""
        if self._uses is not None and (not self._uses or self._uses[-1] is not unit):
            self._on_track &= (
                len(self._uses) < len(self._learned) and self._learned[len(self._uses)] is unit
            )
            self._uses.append(unit)

    def after(self, count: int) -> list[Unit]:
        """The next units, at most `count`, after the one used last; fewer if the pass ends, none
        if the order is not known.
        """
        if self._uses is None or not self._on_track:
            return []
        return self._learned[len(self._uses) : len(self._uses) + count]

    def is_last(self, unit: Unit) -> bool:
        """Whether the pass, known as it is, ends with the use of `unit` that was just noted."""
        return (
            self._uses is not None
            and self._on_track
            and len(self._uses) == len(self._learned)
            and self._learned[-1] is unit
        )

    def end(self) -> None:
        """End the pass: the next one is expected to be like it."""
        if self._uses is not None:
            self._learned, self._uses = self._uses, None


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return bool(graph_task_id() != -1)


def tracer() -> str | None:
    """Return the name of what records operations on this thread, or runs them on fake tensors;
    None without.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    if get_proxy_mode() is not None:
        return "make_fx"
    return None if fake_mode() is None else "FakeTensorMode"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module takes or returns: nested sequences, mappings,
    dataclasses, and what pytree knows.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors_in(getattr(value, entry.name, None))
    else:
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


class Gatherer:
    """Fills full weights. apart: whether these have memory of their own, or are the shard (of a
    world of one).
    """

    def __init__(self, buckets: Sequence[Bucket], comm: Comm, device: torch.device) -> None:
        """Serve `buckets`, whose shards are in place."""
        tiered = any(bucket.tier is not None for bucket in buckets)
        self._comm, self._alone = comm, len(comm.shard_ranks) == 1
        self.copies_apart = tiered or not self._alone
        # what a wait is for (Clock)
        self.exposes = "exposed_offload" if self._alone else "exposed_gather"
        cuda = tiered and device.type == "cuda"
        self._number = {bucket: number for number, bucket in enumerate(buckets)}
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    @staticmethod
    def fetch(bucket: Bucket) -> _C.CopyEvent | None:
        """Copy the shard into its range of `bucket.weight`; returns the end of the copy if that
        is from another tier.
        """
        target = bucket.owned_slice(bucket.weight)
        if bucket.files is not None:
            return bucket.files.fetch(bucket, target)
        if bucket.tier is not None:
            return bucket.tier.from_tier(target, bucket.owned_weight)
        target.copy_(bucket.owned_weight)
        return None

    def gather(self, unit: Unit, arrivals: Iterable[_C.CopyEvent | None]) -> list[Any]:
        """Start to gather a unit's weights once its shards are copied; returns what to `wait` for.

        See Note [Shards in host memory]. Raises the error of a copy, before other ranks are sent
        to; on CUDA it is known later.
        """
        copies = [arrived for arrived in arrivals if arrived is not None]
        if self._alone:
            return copies
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for arrived in copies:
                arrived.wait()
            return self._start(
                unit, f"the weights of {unit.name or 'the root'}", self._comm.shard_ranks, 0
            )

    def gather_kept(self, unit: Unit, keepers: Sequence[int]) -> list[Any]:
        """Start to gather a unit's weights from the parts that `keepers` kept, this rank's in
        place; see `gather`.
        """
        return self._start(
            unit, f"the weights of {unit.name or 'the root'} that were kept", keepers, 1
        )

    def _start(self, unit: Unit, name: str, ranks: Sequence[int], is_kept: int) -> list[Any]:
        weights, numbers = (
            [bucket.weight for bucket in unit.buckets],
            [2 * self._number[b] + is_kept for b in unit.buckets],
        )
        return self._comm.all_gather(weights, Traffic.WEIGHTS, name, ranks, of=numbers)

    def wait(self, gathers: Iterable[Any]) -> None:
        """Wait until weights are gathered: until done on the CPU, in stream order on CUDA."""
        if not self._alone:
            wait_all(gathers)
            return
        for arrived in gathers:
            arrived.wait()


def keepers_of(reshard_after_forward: bool | int) -> int:
    """Return how many ranks keep a unit's weights, a part each, from forward to backward; 0:
    only the shards are kept.
    """
    return (
        int(not reshard_after_forward)
        if isinstance(reshard_after_forward, bool)
        else reshard_after_forward
    )


logger = logging.getLogger("shardcore")
_unsharders: "weakref.WeakSet[Unsharder]" = weakref.WeakSet()


def _note_profile(runs: bool) -> None:
    for unsharder in [*_unsharders]:
        unsharder.note_profile(runs)


# Shown by torch.compile, too, where it must not cut the graph (fullgraph=True).
_COMPILE_BLOCKS = (
    "at stage 3 weights are gathered and freed by unit, which a graph cannot hold, so it is cut "
    "there. Use shard(compile=True) or shard(compile={...}), which compiles each unit"
)


# What memory is lent to, where in the memory each tensor is, and what each says without it.
_Lent: TypeAlias = tuple[list[torch.Tensor], list[int], list[str]]


class Unsharder:
    """Decides when each unit's weights are gathered and freed on this rank."""

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Comm,
        device: torch.device,
        reshard_after_forward: bool | int,
        prefetch: int,
        overlap_step: OverlappedStep | None,
    ) -> None:
        """Serve `units`, which are sharded.

        reshard_after_forward: whether weights are freed between forward and backward; or how many
        consecutive ranks keep them together, a part each. prefetch: how many units ahead weights
        are gathered; what is in files is read for as many more. overlap_step: may still update the
        shards after a step.
        """
        self._prefetch = prefetch
        self.units, self.comm, self.overlap_step = list(units), comm, overlap_step
        keepers = keepers_of(reshard_after_forward)
        first = comm.rank - comm.rank % keepers if keepers else 0
        self._keepers = range(first, first + keepers)
        self._device = device
        self.pool = BufferPool(device)
        self._gatherer = Gatherer(
            [bucket for unit in units for bucket in unit.buckets], comm, device
        )
        # gathers that no code waits for, and their memory
        self._lost: list[Any] = comm.keep_alive([])
        self._slot_of = {
            m.param: (unit, bucket, m)
            for unit in units
            for bucket in unit.buckets
            for m in bucket.params
        }
        self.all_pinned = False  # inside full_params(model): a forward needs no other rank
        self._scratch: list[tuple[Unit, Managed]] = []
        # see Note [One parameter after another]
        self._closed: tuple[Unit, int] | None = None
        # each brings back what a load inside full_params has overwritten in a shard
        self.undo: list[Callable[[], None]] = []
        # of each bucket and dtype of its weights, what these are lent to, where in the bucket it
        # is, and what it says while sharded
        self._lent: dict[tuple[Bucket, torch.dtype], _Lent] = {}
        for unit in units:
            for bucket in unit.buckets:
                offsets = [managed.offset for managed in bucket.params]
                messages = [closed_message(managed.name, bucket.unit) for managed in bucket.params]
                params = [managed.local for managed in bucket.params]
                self._lent[bucket, bucket.dtype] = params, offsets, messages
        # None: every bucket is gathered as it is
        self.float8: Float8Weights | None = None
        if self._gatherer.copies_apart and any(b.float8 for unit in units for b in unit.buckets):
            self.float8 = Float8Weights([b for unit in units for b in unit.buckets], comm, device)
            for bucket, tensors in self.float8.tensors.items():
                _, offsets, messages = self._lent[bucket, bucket.dtype]
                self._lent[bucket, bucket.gathered_dtype] = tensors, offsets, messages
        _unsharders.add(self)
        on_profiles_with_stack(_note_profile)
        self._unit_of = {bucket: unit for unit in units for bucket in unit.buckets}
        self._forward, self._backward = Order(), Order()
        # Called from hooks of modules that may be compiled in place: torch.compile must not look
        # inside.
        of_units = "before_hooks", "before_forward", "after_forward", "before_part", "after_part"
        keep_uncompiled(
            Unsharder,
            *of_units,
            "begin_forward",
            "end_forward",
            reason=_COMPILE_BLOCKS,
        )

    @property
    def copies_apart(self) -> bool:
        """Whether full weights take memory beside the shards."""
        return self._gatherer.copies_apart

    def note_profile(self, runs: bool) -> None:
        """Let the errors of sharded weights name a profiler that reads them, while it runs."""
        self.explain(lambda name, unit: closed_message(name, unit, runs))

    def explain(self, message: Callable[[str, str], str]) -> None:
        """Let reads of sharded weights raise this message, made of the weight's name and unit."""
        for (bucket, _), (tensors, _, messages) in self._lent.items():
            messages[:] = [message(m.name, bucket.unit) for m in bucket.params]
            if self._unit_of[bucket].state is not UnitState.UNSHARDED:
                with suppress(
                    TypeError, ValueError
                ):  # of memory elsewhere, which the next use names
                    _C.withdraw(tensors, messages)

    def _use(self, unit: Unit) -> None:
        if self._gatherer.copies_apart and functorch_level() is not None:
            raise NotImplementedError(
                f"forward: the weights of {unit.name or 'the root'} are sharded (stage 3), and "
                "transforms of torch.func (grad, vmap, ...) do not support sharded weights; "
                "expected stage 0, 1 or 2, or torch.func.functional_call without a transform"
            )
        if not unit.pins:
            self._refuse_tracer("forward", unit)
        order = self._backward if in_backward() else self._forward
        self._start(unit)
        # ranks may differ in what they run inside `full_params`: nothing is learned, nor gathered
        # ahead
        if not unit.pins:
            order.use(unit)
            coming = order.after(2 * self._prefetch)
            # before the wait: on CUDA what is started after it would wait, too
            for other in coming[: self._prefetch]:
                self._start(other)
            for other in coming[self._prefetch :]:
                self._read_ahead(other)
        self._unshard(unit)

    @staticmethod
    def _refuse_tracer(op: str, unit: Unit) -> None:
        """Raise NotImplementedError, before anything is sent, where a gather would be recorded
        or give fake weights.
        """
        if (name := tracer()) is not None:
            raise NotImplementedError(
                f"{op}: the weights of {unit.name or 'the root'} are sharded (stage 3), and {name} "
                f"does not gather them; "
                f"expected shardcore.full_params(model) around {name}, or stage 0, 1 or 2"
            )

    def begin_forward(self) -> None:
        """Begin a forward of the whole model (not one that backward repeats)."""
        if not in_backward() and not self.all_pinned:
            self._forward.begin()

    def end_forward(self) -> None:
        """End a forward of the whole model: free what was gathered and not used, and without
        gradients everything.
        """
        if in_backward() or self.all_pinned:
            return
        self._forward.end()
        for unit in self.units:
            unused = unit.state is UnitState.GATHERING
            if unused or (unit.state is UnitState.UNSHARDED and not torch.is_grad_enabled()):
                self._reshard(unit)

    def before_hooks(self, index: int, *arguments: Any) -> None:
        """Unshard unit `index` for hooks that run before `before_forward`, which watches the
        inputs that they return.
        """
        self._use(self.units[index])

    def before_forward(self, index: int, module: nn.Module, *inputs: Any) -> None:
        """Unshard unit `index`, and watch for the end of this call's backward."""
        unit = self.units[index]
        unit.guest, unit.began = 0, next_sequence_nr()
        self._use(unit)
        if unit.stays or not torch.is_grad_enabled():
            return
        watched = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        nodes = [
            (sequence_nr_of(leaf.grad_fn), i)
            for i, leaf in enumerate(watched)
            if leaf.grad_fn is not None
        ]
        if nodes:
            watched[max(nodes)[1]].register_hook(lambda grad: self._end_call(unit))  # type: ignore[no-untyped-call]
        elif watched:
            if unit.leaf_hook is not None:  # the leaf may be there for good
                unit.leaf_hook.remove()
            unit.leaf_hook = watched[0].register_hook(  # type: ignore[no-untyped-call]
                lambda grad: self._end_call(unit, only_if_complete=True)
            )

    def after_forward(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        """Reshard unit `index`, unless its backward is near, and watch for that."""
        unit = self.units[index]
        if in_backward():
            return
        if torch.is_grad_enabled():
            self._watch_backward(unit, output)
            hidden = next(tensors_in(output), None) is None  # in opaque objects
            if unit.stays or len(self._keepers) == 1 or self._forward.is_last(unit) or hidden:
                return
        if not unit.stays:
            self._reshard(unit, keep=torch.is_grad_enabled())

    def _watch_backward(self, unit: Unit, output: Any) -> None:
        """Unshard the unit before the first node that made one of its outputs runs, once per
        backward.

        Hooks of nodes run after those of tensors: a unit that ends where this one begins is
        resharded first. An output that is a view (a Linear's, of three dimensions) loses its node
        if it is edited in place: so the node of its base is watched, too, if this call made it.
        """
        last = -1

        def begin(grads: Any) -> None:
            nonlocal last
            task = graph_task_id()
            if task != last:
                last = task
                unit.calls += 1
                self._use(unit)

        for tensor in tensors_in(output):
            base = base_of(tensor)
            viewed = None if base is None else base.grad_fn
            if viewed is not None and sequence_nr_of(viewed) >= unit.began:
                viewed.register_prehook(begin)
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begin)

    def before_part(self, index: int, part: nn.Module, inputs: Any) -> None:
        """Unshard unit `index` for a module inside it that is called on its own
        (`model.lm_head(x)`).
        """
        unit = self.units[index]
        if unit.state is not UnitState.UNSHARDED:
            unit.guest, unit.began = id(part), next_sequence_nr()
            self._use(unit)

    def after_part(self, index: int, part: nn.Module, inputs: Any, output: Any) -> None:
        """Reshard the unit if it was unsharded for this call alone; with gradients it stays
        until backward ends.
        """
        unit = self.units[index]
        if unit.guest != id(part):
            return
        unit.guest = 0
        if torch.is_grad_enabled():
            self._watch_backward(unit, output)
        elif not in_backward():
            self._reshard(unit)

    def begin_backward(self) -> None:
        """Begin a backward."""
        self._backward.begin()
        for unit in self.units:
            unit.calls = 0
            unit.incomplete = {bucket for bucket in unit.buckets if bucket.trainable}

    def gradients_complete(self, bucket: Bucket) -> None:
        """Note that all gradients of a bucket are there. See Note [Resharding in backward]."""
        unit = self._unit_of[bucket]
        unit.incomplete.discard(bucket)
        if not unit.incomplete and not unit.stays and not unit.has_frozen:
            self._reshard(unit)

    def _end_call(self, unit: Unit, only_if_complete: bool = False) -> None:
        unit.calls = max(0, unit.calls - 1)
        has_weights = unit.state is not UnitState.SHARDED
        if unit.calls == 0 and has_weights and not (only_if_complete and unit.incomplete):
            self._reshard(unit)

    def end_backward(self) -> None:
        """End a backward."""
        self._backward.end()
        self.reshard_all()

    # --- one unit ---------------------------------------------------------------------------------

    def __del__(self) -> None:
        """Leave with the group what a forward that failed has started."""
        self._lost += [unit.gathers for unit in self.units if unit.gathers]

    def _start(self, unit: Unit, exact: bool = False) -> None:
        """Start to gather a unit. Waits for its update: by how fast Adam is, ranks would start
        collectives in other orders.

        exact: gather float8 weights in their own dtype, too.
        """
        if exact and self.float8 is not None and not unit.pins:
            # what there is may be float8 bytes
            self._reshard(unit)
            self._drop_kept_parts(unit)
        self._free_closed(but=unit)
        if unit.state is not UnitState.SHARDED:
            return
        if self.overlap_step is not None:
            self.overlap_step.wait_for(unit.buckets)
        self._gather(unit, exact)

    def _read_ahead(self, unit: Unit) -> None:
        """Begin to read the shards of a unit that are in files, unless they are still being
        updated.
        """
        if unit.state is not UnitState.SHARDED or unit.kept_parts:
            return
        if self.overlap_step is not None and self.overlap_step.updates(unit.buckets):
            return
        for bucket in unit.buckets:
            if bucket.files is not None:
                bucket.files.read_ahead(bucket)

    def _gather(self, unit: Unit, exact: bool = False) -> None:
        """Start to gather a unit's weights, where it is open into the memory that they have.
        exact: see `_start`.
        """
        if self.float8 is not None and not exact and self.float8.is_stale(unit.buckets):
            if self.overlap_step is not None:
                self.overlap_step.wait_for(self.float8.buckets)
            self.float8.take_scales()
        with self.comm.scope(f"shardcore::gather({unit.buckets[0].label})"):
            try:
                unit.gathers = self._fetch(unit, exact)
                if unit.state is UnitState.SHARDED:  # else a held one gets new weights
                    unit.state = UnitState.GATHERING
            except BaseException:
                unit.kept_parts = None
                self._lose(unit)  # or the next use would take what is there for the weights
                raise

    def _fetch(self, unit: Unit, exact: bool) -> list[Any]:
        """Give a unit memory with this rank's part in place, or on its way there, and start to
        gather the rest.
        """
        arrivals, from_kept_parts = [], bool(unit.kept_parts)
        for bucket in unit.buckets:
            if not self._gatherer.copies_apart:
                bucket.weight = bucket.owned_weight
                continue
            if not bucket.weight.numel():
                dtype = bucket.dtype if exact else bucket.gathered_dtype
                bucket.weight = self.pool.acquire(bucket.layout.numel, dtype)
            if unit.kept_parts:
                part = unit.kept_parts.pop(0)
                self._kept_part(bucket).copy_(part)
                self.pool.release(part)
            elif bucket.in_float8:
                assert self.float8 is not None
                self.float8.cast(bucket, bucket.owned_slice(bucket.weight))
            else:
                arrivals.append(self._gatherer.fetch(bucket))
        unit.kept_parts = None
        return (
            self._gatherer.gather_kept(unit, self._keepers)
            if from_kept_parts
            else self._gatherer.gather(unit, arrivals)
        )

    def _wait(self, unit: Unit) -> None:
        """Wait for what gathers a unit, if anything; can be interrupted, and done again until
        its `gathers` are empty.
        """
        try:
            if unit.gathers:
                with self.comm.clock.part(self._gatherer.exposes):
                    self._gatherer.wait(unit.gathers)
        except Exception:
            self._lose(unit)
            raise
        unit.gathers = []

    def _lose(self, unit: Unit) -> None:
        """Abandon what is being gathered; its memory is kept, as the gather may still write to
        it.
        """
        self._lost.append((unit.gathers, [bucket.release() for bucket in unit.buckets]))
        unit.gathers = []
        if unit.state is UnitState.GATHERING:
            unit.state = UnitState.SHARDED

    def _swap_memory(
        self, bucket: Bucket, op: str, call: Callable[..., None], *arguments: Any
    ) -> None:
        """Exchange memory; if that fails because a parameter lies elsewhere name it here."""
        try:
            call(*arguments)
        except (TypeError, ValueError):
            bucket.check_in_place(op)
            raise

    def _unshard(self, unit: Unit) -> None:
        self._start(unit)
        if unit.state is not UnitState.UNSHARDED:
            assert unit.state is UnitState.GATHERING
            self._wait(unit)
            for bucket in unit.buckets:
                tensors, offsets, _ = self._lent[bucket, bucket.weight.dtype]
                self._swap_memory(bucket, "unsharding", _C.lend, tensors, bucket.weight, offsets)
            unit.state = UnitState.UNSHARDED
        stream = stream_now(self._device)
        if stream is not None and stream not in unit.streams:  # see Note [Several streams]
            follow(next(iter(unit.streams), None), self._device)
            unit.streams.append(stream)

    def _kept_part(self, bucket: Bucket) -> torch.Tensor:
        return bucket.weight.chunk(len(self._keepers))[self._keepers.index(self.comm.rank)]

    def _keep_part(self, unit: Unit) -> None:
        unit.kept_parts = []
        for bucket in unit.buckets:
            part = self._kept_part(bucket)
            unit.kept_parts.append(self.pool.acquire(part.numel(), part.dtype).copy_(part))

    def _reshard(self, unit: Unit, keep: bool = False) -> None:
        if unit.pins:
            return
        if (
            keep
            and unit.state is UnitState.UNSHARDED
            and unit.kept_parts is None
            and len(self._keepers) > 1
            and len(self.comm.shard_ranks) > 1
        ):
            self._keep_part(unit)
        self._wait(unit)
        for bucket in unit.buckets:
            whole = unit.state is UnitState.UNSHARDED
            if whole and bucket.edited_params():
                bucket.take_edits()
        self._withdraw(unit)
        for bucket in unit.buckets:
            memory = bucket.release()
            if self._gatherer.copies_apart:
                self.pool.release(memory)

    def _withdraw(self, unit: Unit) -> None:
        unit.streams.clear()
        # first: what an interrupt leaves here is unsharded anew
        before, unit.state = unit.state, UnitState.SHARDED
        for bucket in unit.buckets if before is UnitState.UNSHARDED else ():
            tensors, _, messages = self._lent[bucket, bucket.weight.dtype]
            self._swap_memory(bucket, "resharding", _C.withdraw, tensors, messages)

    def reshard_all(self) -> None:
        """Reshard every unit: the shards are about to change, or the full weights are not needed
        any more.
        """
        self._free_closed()
        for unit in self.units:
            unit.calls = 0
            if unit.pins:
                for bucket in unit.buckets:
                    bucket.take_edits()
            elif unit.state is not UnitState.SHARDED:
                self._reshard(unit)
            self._drop_kept_parts(unit)
        self.undo.clear()

    def _drop_kept_parts(self, unit: Unit) -> None:
        for part in unit.kept_parts or []:
            self.pool.release(part)
        unit.kept_parts = None

    @torch.no_grad()
    def renew(self) -> None:
        """Bring the scales of float8 weights, and the weights that `full_params` holds, in line
        with the shards, which a step has changed. Collective.
        """
        if self.float8 is not None and self.overlap_step is None:
            self.float8.take_scales()
        pinned = [unit for unit in self.units if unit.pins]
        try:
            for unit in pinned:
                if self.overlap_step is not None:
                    self.overlap_step.wait_for(unit.buckets)
                self._gather(unit, exact=True)
            for unit in pinned:
                self._wait(unit)
        except Exception:
            # closed: the weights of the step before would be taken for edits at the end of the
            # context
            for unit in pinned:
                self._withdraw(unit)
                self._lose(unit)
            raise

    def is_unsharded(self, param: nn.Parameter) -> bool:
        """Whether the weights of a parameter can be read now; True for what is never sharded."""
        if param not in self._slot_of:
            return True
        unit, bucket, _ = self._slot_of[param]
        return unit.state is UnitState.UNSHARDED and not bucket.in_float8

    def is_held(self, param: nn.Parameter) -> bool:
        """Whether `full_params` keeps a parameter unsharded."""
        return param in self._slot_of and self._slot_of[param][0].pins > 0

    @contextmanager
    def full_params(
        self,
        params: set[nn.Parameter],
        settle: Callable[[Sequence[Unit]], Exception | None] = lambda units: None,
        keep_last: bool = False,
    ) -> Iterator[None]:
        """Keep the units of `params` unsharded inside the context; edits in place reach the shards
        at its end. Collective.

        settle: is called with these units before they do, also where the block raises an Exception.
        The edits are dropped if it raises an error, not if it returns one to raise. The pool gives
        up at the end what this takes: it would keep as much as the whole model. keep_last: see Note
        [One parameter after another].
        """
        before, keeps = self.pool.allocated_bytes, True
        chosen = [
            u
            for u in self.units
            if any(m.param in params for bucket in u.buckets for m in bucket.params)
        ]
        pinned: list[Unit] = []
        for unit in chosen:
            self._refuse_tracer("full_params", unit)
        try:
            # all of them before the first is waited for: a wait takes long for small ones
            for unit in chosen:
                self._start(unit, exact=True)
            for unit in chosen:
                self._unshard(unit)
                unit.pins += 1
                pinned.append(unit)
            self.all_pinned = all(unit.pins for unit in self.units)
            try:
                yield
            except Exception:
                keeps = False
                with suppress(Exception):  # the first error is raised
                    settle(pinned)
                    keeps = True
                raise
            keeps = False
            problem = settle(pinned)
            keeps = True
            if problem is not None:
                raise problem
        except Exception:
            for unit in chosen:  # gathers that are not used now: free their memory
                if unit.state is UnitState.GATHERING and not self.comm.broken:
                    with suppress(Exception):  # the first error is raised
                        self._reshard(unit)
            raise
        finally:
            for unit in pinned:
                unit.pins -= 1
            self.all_pinned = all(unit.pins for unit in self.units)
            while self.undo:
                undo = self.undo.pop()
                if not keeps:
                    undo()
            for unit in pinned:
                for bucket in unit.buckets:
                    if keeps:  # also edits through `.data`, which no counter shows
                        bucket.take_edits(params if keep_last else None)
                    else:
                        for managed in bucket.params:
                            managed.version = managed.version_now
                if keep_last and keeps and len(pinned) == 1:
                    self._close(unit, before)
                else:
                    self._reshard(unit)
            if self.float8 is not None:
                self.float8.forget_scales()
            self.pool.shrink(before)

    def _close(self, unit: Unit, pool_bytes: int) -> None:
        """Close the weights of a unit, and keep their memory: Note [One parameter after another].
        pool_bytes: what the pool had before the unit was gathered.
        """
        if unit.pins or self.float8 is not None or not self._gatherer.copies_apart:
            self._reshard(unit)
            return
        self._withdraw(unit)
        unit.state = UnitState.GATHERING
        self._closed = unit, pool_bytes

    def _free_closed(self, but: Unit | None = None) -> None:
        if self._closed is None or self._closed[0] is but:
            return
        (unit, pool_bytes), self._closed = self._closed, None
        if unit.state is UnitState.GATHERING and not unit.gathers:
            self._reshard(unit)
            self.pool.shrink(pool_bytes)

    def in_turn(self, groups: Sequence[Collection[nn.Parameter]]) -> Iterator[None]:
        """Keep the units of each group of parameters unsharded in turn, to be read. The units of
        the next group are gathered meanwhile. Collective.
        """
        before = self.pool.allocated_bytes
        used = [{self._slot_of[p][0] for p in group if p in self._slot_of} for group in groups]
        coming = [[unit for unit in self.units if unit in units] for units in used]
        for unit in coming[0] if coming else ():
            self._start(unit, exact=True)
        try:
            while coming:
                group = coming.pop(0)
                for unit in group:
                    self._unshard(unit)
                    unit.pins += 1
                try:
                    for unit in coming[0] if coming else ():
                        self._start(unit, exact=True)
                    yield
                finally:
                    for unit in group:
                        unit.pins -= 1
                        if not coming or unit not in coming[0]:
                            self._reshard(unit)
        finally:
            for unit in coming[0] if coming else ():
                self._reshard(unit)
            if self.float8 is not None:
                self.float8.forget_scales()
            self.pool.shrink(before)

    def begin_load(self, params: Sequence[nn.Parameter]) -> None:
        """Give sharded parameters memory of undefined content, for load_state_dict, which writes
        all of it and reads none.

        What is being gathered (since a forward failed) has the old values, and is freed.
        """
        chosen = [self._slot_of[param] for param in params if param in self._slot_of]
        for unit, bucket, managed in chosen:
            if unit.state is UnitState.GATHERING or bucket.in_float8:
                self._reshard(unit)
            if unit.state is UnitState.UNSHARDED:
                continue
            memory = torch.empty_like(managed.local).detach().view(-1)
            self._swap_memory(bucket, "load_state_dict", _C.lend, [managed.local], memory, [0])
            self._scratch.append((unit, managed))

    def end_load(self) -> None:
        """Free what `begin_load` gave."""
        for unit, managed in self._scratch:
            _C.withdraw([managed.local], [closed_message(managed.name, unit.name)])
            managed.version = managed.version_now
        self._scratch = []
