"""Whether training steps compute the same bits twice, and if not, where they first differ.

The steps run twice from one checkpoint. Each run records digests of what modules take and return,
of the gradients that autograd's nodes take and compute, of the averaged gradients and of the new
weights. All that was computed before the first record that differs agrees, so this record names the
code that is not deterministic.

Note [Whose code]: An input belongs to the module that calls the other one, an output to the module
itself, as all that was computed inside of it agrees. A node of autograd belongs to the innermost
module whose forward made it. Hooks of tensors would not do: the gradient of a tensor is the sum
over all that use it.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node

from shardcore.checkpoint.format import plain_name
from shardcore.checkpoint.load import load, restore_random
from shardcore.checkpoint.save import Averages, random_states, save
from shardcore.digest import digest
from shardcore.distributed.compare import Entry, name_ranks
from shardcore.engine.agreement import together
from shardcore.engine.digests import Digests, dtype_text, key_of
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.unshard import in_backward, tensors_in
from shardcore.torch_private import (
    is_traceable_wrapper_subclass,
    next_sequence_nr,
    sequence_nr_of,
)

_OP, _TAG = "check_determinism", "start"
Kind = Literal["data", "forward", "backward", "reduction", "update"]


@dataclass(frozen=True)
class Determinism:
    """The result of `check_determinism`, the same on every rank. str() of it is the message.

    equal: whether both runs have the same bits. Only if not, the others are set.
    step: the index of the first step that differs.
    kind: the first value that differs: "data" (inputs of the model), "forward" (a value that a
        module computes), "backward" (a gradient that autograd computes), "reduction" (an averaged
        gradient) or "update" (a new weight).
    module: the name of the module that computes it, or has the parameter; "" for the model.
    unit: the unit of this module; "root" for what is in no other unit.
    ranks: where it differs.
    """

    equal: bool
    message: str
    step: int | None = None
    kind: Kind | None = None
    module: str | None = None
    unit: str | None = None
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the message."""
        return self.message


def check_determinism(
    step: Callable[[int], Any],
    steps: int,
    model: nn.Module,
    *,
    scheduler: Any = None,
    stateful: Mapping[str, Any] | None = None,
    ema: Averages | None = None,
    directory: str | Path | None = None,
) -> Determinism:
    """Run training steps twice, and return whether both runs have the same bits. If not, name the
    first module whose output or gradient differs. Collective.

    Weights, optimizer states, buffers, the loss scale and random states (of Python, torch, NumPy
    and the GPU) are saved before the first run and restored after each run. So training continues
    as if no step had been run.

    Args:
        step: Called with an index from 0 to steps - 1. Runs forward, backward and the optimizer's
            step on the data of this index, which have to be the same in both runs.
        steps: The number of steps of a run.
        model: The model returned by shard, not a pipeline stage. Of an engine returned by
            initialize the counts of steps are not restored.
        scheduler, stateful, ema: Saved and restored, too, as by `save` and `load`. Give what `step`
            changes.
        directory: A directory shared by all ranks for a checkpoint, which is removed afterwards; by
            default one for temporary files. Several nodes need it.

    Modules inside of compiled ones are not seen. Then the compiled module is named.

    Raises:
        ValueError, TypeError: For bad arguments, and if gradients wait for a step, on every rank.
        OSError: If the checkpoint cannot be written.
        Exception: The errors of `step`, on its rank, and RuntimeError on the others. Then the model
            remains as the failed step left it.
    """
    engine = engine_behind(_OP, model)

    def check() -> list[Entry]:
        if not callable(step):
            raise TypeError(f"{_OP}: step is a {type(step).__name__}; expected a function")
        if type(steps) is not int or steps < 1:
            raise ValueError(f"{_OP}: steps is {steps!r}; expected a number of at least 1")
        if len(engine.comm.across) > len(engine.comm.slices):
            raise ValueError(f"{_OP}: model is a pipeline stage; expected a model of one stage")
        if engine.reducer.backwards > 0:
            raise ValueError(
                f"{_OP}: {engine.reducer.backwards} backward(s) ran since the last step; expected "
                "none. Call it between two steps"
            )
        return [("argument", "steps", str(steps))]

    engine.agree(_OP, check)
    engine.zero_grad()
    restored = {"scheduler": scheduler, "stateful": stateful, "ema": ema}
    with _unaudited(engine), _folder(engine, directory) as folder:
        snapshot = _Snapshot(engine, folder, restored)
        runs = []
        for _ in range(2):
            runs.append(_recorded(engine, step, steps))
            snapshot.restore()
    return _compared(engine, steps, *runs)


@contextmanager
def _unaudited(engine: Engine) -> Iterator[None]:
    """Audit no step inside: the run does not have these steps. Collective."""
    engine.settle_audits()
    audit = engine.updater.audit
    engine.updater.audit = engine.reducer.audit = None
    try:
        yield
    finally:
        engine.updater.audit = engine.reducer.audit = audit


@contextmanager
def _folder(engine: Engine, directory: str | Path | None) -> Iterator[Path]:
    """Make a directory on rank 0, and remove it at the end. Collective."""
    ranks = engine.everyone
    own: str | None = None
    with together(ranks, _OP, "no step was run"):
        if ranks.rank == 0:
            own = tempfile.mkdtemp(prefix="shardcore-", dir=directory)
    try:
        yield Path(ranks.gather_json(own)[0])
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)


class _Snapshot:
    """A checkpoint, and of each rank the buffers and random states, of which a checkpoint lacks
    some.
    """

    def __init__(self, engine: Engine, folder: Path, restored: dict[str, Any]) -> None:
        """Save everything. Collective."""
        self._engine, self._folder, self._restored = engine, folder, restored
        self._optimizer: Any = engine._optimizer()
        save(folder, engine.model, self._optimizer, tag=_TAG, save_latest=False, **restored)
        self._random = random_states(engine.device)
        self._buffers = _buffers_of(engine.model)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything. Collective."""
        model = self._engine.model
        load(self._folder, model, self._optimizer, tag=_TAG, **self._restored)
        for module, key, buffer, values in self._buffers:
            module._buffers[key] = buffer
            buffer.data.copy_(values)
        restore_random(self._random, self._engine.device)


def _buffers_of(model: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]:
    """Return the module, key and copy of each buffer."""
    return [
        (module, key, buffer, buffer.detach().clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]


# --- a run ----------------------------------------------------------------------------------------


class _Value(StrEnum):
    """The kinds of recorded values."""

    INPUT = "input"
    OUTPUT = "output"
    TAKEN_GRAD = "taken gradient"
    MADE_GRAD = "made gradient"
    AVERAGE_GRAD = "average gradient"
    WEIGHT = "weight"


class _Record(NamedTuple):
    """Which value a digest is of. Plain data.

    name: of the module or parameter. maker: the module whose code made the value; None for code
    outside of the model. node: the name of the autograd node. repeated: in a forward that
    activation checkpointing repeats. call: counts records that are otherwise equal.
    """

    step: int
    value: _Value
    name: str
    maker: str | None = None
    node: str = ""
    repeated: bool = False
    call: int = 0


def _recorded(engine: Engine, step: Callable[[int], Any], steps: int) -> dict[_Record, int]:
    """Run the steps, and return the digests in the order in which the values were computed."""
    recorder = _Recorder(engine)
    with recorder.attached():
        for index in range(steps):
            recorder.begin(index)
            with together(engine.everyone, _OP, "the model is as the failed step left it"):
                step(index)
            recorder.add_params(_Value.WEIGHT)
    return recorder.finish()


class _Recorder:
    """Records digests on the device, and reads them at the end."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._step = engine, 0
        self._found: dict[_Record, int] = {}
        self._counts: Counter[_Record] = Counter()
        self._digests, self._of_tensors = Digests(), list[_Record]()
        # the calls under way: names, and the number of the first node that each may make
        self._calls: list[tuple[str, int]] = []
        self._owned: set[Node] = set()  # of the outermost call under way

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Record what the model and the optimizer do inside the context."""
        engine = self._engine
        handles: list[Any] = []
        for name, module in engine.model.named_modules():
            begin, end = (partial(f, plain_name(name)) for f in (self._begin_call, self._end_call))
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            # always: activation checkpointing ends repeated forwards early, by an exception
            handles.append(module.register_forward_hook(end, always_call=True))
        if (optimizer := engine._optimizer()) is not None:
            before = lambda *_: self.add_params(_Value.AVERAGE_GRAD)  # noqa: E731
            handles.append(optimizer.register_step_pre_hook(before))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin(self, step: int) -> None:
        self._step = step

    def add_params(self, value: _Value) -> None:
        """Record all gradients or weights. Collective."""
        what: Any = "weights" if value is _Value.WEIGHT else "grads"
        for name, total in digest(self._engine.model, what, "param").items():
            self._found[self._new(value, name)] = total

    def finish(self) -> dict[_Record, int]:
        device = self._engine.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # digests were computed on the streams of the model
        totals = self._digests.totals(device).tolist()
        self._found.update(zip(self._of_tensors, totals, strict=True))
        return self._found

    def _new(self, *of_record: Any) -> _Record:
        record = _Record(self._step, *of_record)
        self._counts[record] += 1
        return record._replace(call=self._counts[record])

    def _add(self, values: Any, *of_record: Any) -> None:
        """Record the digest of all tensors in `values`."""
        record, label = self._new(*of_record), str(len(self._of_tensors))
        self._found[record] = 0
        self._of_tensors.append(record)
        self._digests.name(label)
        for number, tensor in enumerate(tensors_in(values)):
            for plain in _plain(tensor.detach()):
                key = key_of(str(number), dtype_text(plain.dtype), tuple(plain.shape))
                self._digests.add(label, key, plain.contiguous().view(-1))
        self._digests.flush()

    def _begin_call(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        maker, began = self._calls[-1] if self._calls else (None, 0)
        self._add([args, kwargs], _Value.INPUT, name, maker, "", in_backward())
        if maker is not None:
            self._own_nodes(maker, began, [args, kwargs])
        self._calls.append((name, next_sequence_nr()))

    def _end_call(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        # the last call is another one where a hook before `_begin_call` has failed
        if torch.compiler.is_compiling() or not self._calls or self._calls[-1][0] != name:
            return
        self._add(output, _Value.OUTPUT, name, name, "", in_backward())
        _, began = self._calls.pop()
        self._own_nodes(name, began, output)
        if not self._calls:
            self._owned.clear()

    def _own_nodes(self, name: str, began: int, values: Any) -> None:
        """Watch the nodes of autograd that a call under way made, itself, for these values. See
        Note [Whose code].
        """
        nodes = [tensor.grad_fn for tensor in tensors_in(values)]
        while nodes:
            node = nodes.pop()
            # without next functions: the one that adds to a parameter's gradient
            if node is None or node in self._owned or not node.next_functions:
                continue
            if sequence_nr_of(node) < began:
                continue
            self._owned.add(node)
            of_node = name, name, node.name()
            node.register_prehook(partial(self._take_grads, of_node))
            node.register_hook(partial(self._make_grads, of_node))
            nodes += [function for function, _ in node.next_functions]

    def _take_grads(self, of_node: tuple[str, str, str], outer: Any) -> None:
        self._add(outer, _Value.TAKEN_GRAD, *of_node)

    def _make_grads(self, of_node: tuple[str, str, str], inner: Any, outer: Any) -> None:
        self._add(inner, _Value.MADE_GRAD, *of_node)


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory that a tensor wraps, or itself. Sparse ones are left out."""
    if not is_traceable_wrapper_subclass(tensor):
        if tensor.layout is torch.strided:
            yield tensor
        return
    copy: Any = tensor.clone()  # complete, unlike the result of an asynchronous collective
    if not is_traceable_wrapper_subclass(copy):
        yield copy
        return
    for inner in (getattr(copy, name) for name in copy.__tensor_flatten__()[0]):
        if isinstance(inner, torch.Tensor):
            yield from _plain(inner)


# --- the comparison -------------------------------------------------------------------------------


def _compared(
    engine: Engine, steps: int, first: Mapping[_Record, int], second: Mapping[_Record, int]
) -> Determinism:
    """Return the earliest difference on any rank. Collective."""
    ranks = engine.everyone
    of_ranks = [
        None if found is None else (tuple(found[0]), _Record(*found[1]), found[2])
        for found in ranks.gather_json(_first_difference(first, second))
    ]
    if not any(of_ranks):
        counted = f"{steps} step{'s' * (steps > 1)}"
        return Determinism(True, f"both runs of {counted} have the same bits on every rank")
    _, record, in_both = min(filter(None, of_ranks), key=itemgetter(0))
    where = tuple(
        rank for rank, found in enumerate(of_ranks) if found is not None and found[1] == record
    )
    place = f"step {record.step}" + f", {name_ranks(where)}" * (ranks.world_size > 1)
    kind, text = _in_words(record, "differs" if in_both else "exists in one run only")
    module = record.maker if record.maker is not None else record.name
    if kind in ("reduction", "update"):
        module = record.name.rpartition(".")[0]
    units = {plain_name(bucket.unit) for bucket in engine.buckets} - {""}
    around = [unit for unit in units if f"{module}.".startswith(f"{unit}.")]
    unit = max(around, key=len, default="root")
    return Determinism(False, f"{place}: {text}", record.step, kind, module, unit, where)


def _first_difference(
    first: Mapping[_Record, int], second: Mapping[_Record, int]
) -> tuple[tuple[int, int], _Record, bool] | None:
    """Return the step and position of the first record that differs, the record, and whether both
    runs have it.
    """
    for position, record in enumerate([*first, *(each for each in second if each not in first)]):
        if first.get(record) != second.get(record):
            return (record.step, position), record, record in first and record in second
    return None


def _in_words(record: _Record, differs: str) -> tuple[Kind, str]:
    step, value, name, maker, node, repeated, _ = record
    name, maker_name = name or "the model", maker or "the model"
    again = " in the forward that activation checkpointing repeats" if repeated else ""
    cause = (
        "This code is not deterministic, or uses a random state other than those of Python, torch "
        "and NumPy"
    )
    match value:
        case _Value.INPUT if maker is None and not repeated:
            return "data", (
                f"the input of {name} {differs}, and all before it agrees. Let step({step}) use "
                "the same data in each call; give iterators and generators as stateful"
            )
        case _Value.INPUT:
            by = "" if maker is None else f", which {maker_name} computes,"
            return "forward", f"the input of {name}{by} {differs}{again}. {cause}"
        case _Value.OUTPUT:
            return (
                "forward",
                f"the output of {name} {differs}{again}, and its input agrees. {cause}",
            )
        case _Value.TAKEN_GRAD:
            return "backward", (
                f"the gradient that {node} of {name} takes {differs}, and all before it agrees. "
                "The loss, a hook or code after this operation is not deterministic"
            )
        case _Value.MADE_GRAD:
            return "backward", (
                f"the gradient that {node} of {name} computes {differs}, and the one that it takes "
                "agrees. This operation is not deterministic; see "
                "torch.use_deterministic_algorithms"
            )
        case _Value.AVERAGE_GRAD:
            return "reduction", (
                f"the averaged gradient of {name} {differs}, and all recorded before agrees. "
                'Expected reduction="ordered", and no code that edits gradients at random'
            )
    return "update", (
        f"the new weight of {name} {differs}, and its gradient agrees. Give what else step "
        "changes: scheduler, stateful, ema"
    )
