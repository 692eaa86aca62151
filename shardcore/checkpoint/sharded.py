"""State dicts in shards, for torch.distributed.checkpoint: no rank holds full tensors.

Note [Boxes]: a rank has ranges of flattened parameters, cut at 256-element blocks. DTensor has no
such placement (Shard(0) cuts at rows). But torch.distributed.checkpoint describes every tensor as
boxes, (offsets, sizes), and any range of a row-major tensor is a few boxes (at most 2 * dimensions
- 1), which are views of it. So a checkpoint has full tensors under their own names, which DTensors,
plain tensors and other world sizes load. `Shards` provides its boxes by the protocol of DTensor.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardcore.checkpoint.file_tensors import boxes_of, sizes_of
from shardcore.checkpoint.format import named_buffers, named_parameters, names_of, with_extra_state
from shardcore.distributed.everyone import Ranks
from shardcore.engine.bucket import Bucket, Managed
from shardcore.engine.engine import Engine
from shardcore.engine.model_state import use_loaded
from shardcore.engine.slices import Slice
from shardcore.engine.states import set_owned
from shardcore.optim.group_options import dtype_name
from shardcore.optim.state import step_count, step_tensor
from shardcore.optim.state_dict import warn_of_lost
from shardcore.optim.state_format import SCALES
from shardcore.torch_private import make_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

logger = logging.getLogger("shardcore")

_OP = "load_sharded_state_dict"
_SCALE = "loss_scale."  # the prefix of its keys


class Shards(torch.Tensor):
    """This rank's `ranges` of a flattened tensor, [(first element, values)]. Every operation on it
    raises TypeError.

    boxes: the same memory by offset in the full tensor; see Note [Boxes].
    """

    ranges: list[tuple[int, torch.Tensor]]
    boxes: dict[torch.Size, torch.Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        ranges: list[tuple[int, torch.Tensor]],
        cut: Slice | None = None,
    ) -> "Shards":
        """Describe a tensor of this shape, of which this rank has `ranges`, of the slice `cut`
        of it if that is given.
        """
        local_shape = shape
        if cut is not None and cut.dim is not None:
            local_shape = cut.cut(torch.empty(shape, device="meta")).shape
        shards: Shards = make_wrapper_subclass(cls, shape, dtype=dtype)
        shards.ranges, shards.boxes = ranges, {}
        for start, values in ranges:
            cursor = 0
            for box in boxes_of(local_shape, start, values.numel()):
                part = values[cursor : cursor + prod(sizes_of(box))].view(sizes_of(box))
                cursor += part.numel()
                local_offsets = tuple(indices.start for indices in box)
                parts = [(local_offsets, part)] if cut is None else cut.boxes(local_offsets, part)
                shards.boxes |= {torch.Size(offsets): view for offsets, view in parts}
        return shards

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        """Refuse every operation."""
        raise TypeError(
            f"{function}: got the shards of a parameter, for torch.distributed.checkpoint only. "
            "Use the full tensor, from model.state_dict()"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe it without values, which are not all on this rank."""
        numel = sum(values.numel() for _, values in self.ranges)
        return (
            f"Shards({numel} of the {self.numel()} elements of a {tuple(self.shape)} {self.dtype})"
        )

    def __create_write_items__(self, fqn: str, _: object) -> "list[WriteItem]":
        """See torch.distributed._checkpointable: what this rank writes."""
        _refuse_in_safetensors()
        # imported where torch.distributed.checkpoint itself calls: it loads 700 modules
        planner, metadata = (
            import_module(f"torch.distributed.checkpoint.{name}")
            for name in ("planner", "metadata")
        )
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(
                    metadata.ChunkStorageMetadata(offsets, part.size()),
                    metadata.TensorProperties.create_from_tensor(part),
                    self.size(),
                ),
            )
            for offsets, part in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> "list[ChunkStorageMetadata]":
        """See torch.distributed._checkpointable: what this rank reads."""
        metadata = import_module("torch.distributed.checkpoint.metadata")
        return [
            metadata.ChunkStorageMetadata(offsets, part.size())
            for offsets, part in self.boxes.items()
        ]

    def __get_tensor_shard__(self, index: "MetadataIndex") -> torch.Tensor:
        """See torch.distributed._checkpointable: the memory of one box."""
        assert index.offset is not None
        return self.boxes[index.offset]


@cache
def _refuse_in_safetensors() -> None:
    """Make HuggingFaceStorageWriter raise ValueError, on every rank, for boxes that would overwrite
    each other in its files: it keeps one box per name and file, and drops the others.

    Only its plan knows both the writer and the boxes, so that method is replaced. Tested with torch
    2.13.
    """
    writer = import_module("torch.distributed.checkpoint").HuggingFaceStorageWriter
    prepare = writer.prepare_local_plan

    def prepare_local_plan(self: Any, plan: Any) -> Any:
        boxes = Counter(item.index.fqn for item in plan.items)
        for item in plan.items:
            data = item.tensor_data
            part = data is not None and data.chunk.sizes != data.size
            if part and (boxes[item.index.fqn] > 1 or not self.save_distributed):
                raise ValueError(
                    f"HuggingFaceStorageWriter: {item.index.fqn} is in {boxes[item.index.fqn]} "
                    "boxes on this rank, and this writer's files would keep only one. Write the "
                    "result of sharded_state_dict with a FileSystemWriter, or write "
                    "model.state_dict(), which contains full tensors, on rank 0 alone "
                    "(dcp.save(..., no_dist=True))"
                )
        return prepare(self, plan)

    writer.prepare_local_plan = prepare_local_plan


# (start, numel) -> those elements of a buffer of this rank's shard
ReadOwned = Callable[[int, int], torch.Tensor]


def shards_of(bucket: Bucket, managed: Managed, read: ReadOwned) -> torch.Tensor:
    """Copy this rank's ranges of a parameter."""
    ranges = [
        (piece.param_start, read(piece.start, piece.numel).clone())
        for piece in bucket.pieces_of(managed)
    ]
    shape, empty = managed.param.shape, read(0, 0)
    if not managed.param.numel():
        return empty.new_empty(shape)
    return Shards(shape, empty.dtype, ranges, managed.sliced)


def read_weights(engine: Engine, bucket: Bucket) -> ReadOwned:
    """Return what reads the owned weights as the optimizer sees them: the masters where there
    are any.
    """
    if bucket.state_format.master is None:
        return bucket.owned_values
    return partial(engine.store.read, bucket, "master")


@torch.no_grad()
def model_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the model's state by name: `Shards` of masters, plain tensors of what every rank
    has in full. Collective.
    """
    _read_all(engine, "the model")
    engine.updater.warn_of_lost_edits("sharded_state_dict")
    modules = [name or "the model" for name in with_extra_state(engine.model)]
    if modules and engine.comm.rank == 0:
        logger.warning(
            "sharded_state_dict: the extra state of %s is left out (torch.distributed.checkpoint "
            "would pickle it); save get_extra_state() of the module yourself",
            ", ".join(modules),
        )
    values: dict[torch.Tensor, torch.Tensor] = {}
    for _, tensor in _named(engine.model):
        bucket = engine.bucket_of.get(tensor)  # type: ignore[call-overload]
        if tensor in values:  # tied: the same memory under each name
            continue
        if bucket is None:
            values[tensor] = tensor.detach().clone()
        else:
            values[tensor] = shards_of(bucket, engine.managed[tensor], read_weights(engine, bucket))  # type: ignore[index]
    return {name: values[tensor] for name, tensor in _named(engine.model)}


@torch.no_grad()
def load_model_state(engine: Engine, state: Mapping[str, Any]) -> None:
    """Set weights, masters and buffers from the tensors of `model_state`, filled from a
    checkpoint. Collective.
    """
    named = dict(_named(engine.model))

    def check() -> str:
        _check_names(named, state)
        for name, tensor in named.items():
            bucket = engine.bucket_of.get(tensor)  # type: ignore[call-overload]
            if bucket is not None:
                _check_ranges(name, bucket, engine.managed[tensor], state[name])  # type: ignore[index]
            elif not isinstance(state[name], torch.Tensor) or state[name].shape != tensor.shape:
                raise ValueError(
                    f"{_OP}: {name} is {state[name]!r}; expected a tensor of shape "
                    f"{tuple(tensor.shape)}"
                )
        engine.refuse_held(_OP)
        return "that of the model"

    engine.agree(_OP, check)
    if engine.unsharder is not None:
        # what is kept, or still being gathered after a failed forward, has the old values
        engine.unsharder.reshard_all()
    name_of = {tensor: name for name, tensor in named.items()}
    for name, tensor in named.items():
        if tensor not in engine.bucket_of:
            tensor.copy_(state[name])
    for bucket in engine.buckets:
        for managed in bucket.params:
            set_owned(engine.store, bucket, managed, _reader(state[name_of[managed.param]]))
    use_loaded(engine)


@torch.no_grad()
def optimizer_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Return states by "parameter.key" (`Shards`), step counts and a dynamic loss scale.
    Collective.
    """
    _read_all(engine, "the optimizer")
    state: dict[str, torch.Tensor] = {}
    for name, bucket, managed in _updated(engine):
        state[f"{name}.step"] = step_tensor(managed.step)
        for key in bucket.state_format.keys:
            if key != "master":  # it is in the model's state
                state[f"{name}.{key}"] = shards_of(
                    bucket, managed, partial(engine.store.read, bucket, key)
                )
    for key, value in (engine.scaler.state() or {}).items():
        dtype = torch.float64 if isinstance(value, float) else torch.int64
        state[f"{_SCALE}{key}"] = torch.tensor(value, dtype=dtype, device="cpu")
    return state


@torch.no_grad()
def load_optimizer_state(engine: Engine, state: Mapping[str, Any]) -> None:
    """Set states, step counts and loss scale from the tensors of `optimizer_state`, filled from
    a checkpoint. Collective.
    """
    scale = {f"{_SCALE}{key}": key for key in engine.scaler.state() or {}}
    keys: dict[str, tuple[Bucket, Managed]] = {}

    def loaded_scale() -> dict[str, Any] | None:
        numbers = {}
        for name, key in scale.items():
            value = state[name]
            is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
            numbers[key] = value.item() if is_scalar else value
        return numbers or None

    def check() -> str:
        engine.membership.check(_OP)
        for name, bucket, managed in _updated(engine):
            for key in ("step", *bucket.state_format.keys):
                if key != "master":  # it is in the model's state
                    keys[f"{name}.{key}"] = (bucket, managed)
        _check_names({**keys, **scale}, state)
        for name, (bucket, managed) in keys.items():
            if name.endswith(".step"):
                step_count(_OP, name, state[name])
            else:
                _check_ranges(name, bucket, managed, state[name])
        engine.scaler.check_state(_OP, loaded_scale())
        return f"that of the optimizer{f' with the loss scale {loaded_scale()}' if scale else ''}"

    engine.agree(_OP, check)
    rounded: dict[str, str] = {}
    for name, (bucket, managed) in keys.items():
        key = name.rpartition(".")[2]
        if key == "step":
            managed.step = step_count(_OP, name, state[name])
            continue
        read = _reader(state[name])
        for piece in bucket.pieces_of(managed):
            values = read(piece.param_start, piece.numel)
            engine.store.write(bucket, key, piece.start, values)
            stored = engine.store.read(bucket, key, piece.start, piece.numel)
            if name not in rounded and not torch.equal(stored.to(values), values):
                rounded[name] = rounding(bucket, name, key)
    engine.go_on_from(loaded_scale())
    warn_of_rounding(_OP, engine.everyone, rounded.values(), stacklevel=3)


def rounding(bucket: Bucket, name: str, key: str) -> str:
    """Say that a state, or the weight, of a bucket is not kept exactly, and as what it is kept.
    name: with the key.
    """
    dtype = bucket.dtype if key == "weight" else bucket.state_format.dtypes[key]
    how = dtype_name(dtype)
    if key in SCALES and bucket.state_format.state_dtype == "8bit":
        how = (
            "8-bit codes, quantized anew by this layout's blocks of 256 elements "
            "(state_dtype='8bit')"
        )
    return f"{name} is rounded to the dtype of this optimizer: {how}"


def warn_of_rounding(op: str, ranks: Ranks, rounded: Collection[str], stacklevel: int) -> None:
    """Warn once, on the first rank, of what is rounded on any. Collective. rounded: of this
    rank, each in words.
    """
    of_ranks = ranks.gather_json([min(rounded, default=""), len(rounded)])
    if ranks.rank == 0:
        first = min((text for text, count in of_ranks if count), default="")
        warn_of_lost(op, [first] * max(count for _, count in of_ranks), stacklevel + 1)


def _read_all(engine: Engine, content: str) -> None:
    """Begin a read of all of a model that has the Parameters that `shard` was given. Collective."""

    def check() -> str:
        engine.membership.check("sharded_state_dict")
        engine.updater.accept_weight_edits()
        return f"that of {content}{engine.updater.changed()}"

    engine.agree("sharded_state_dict", check)


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a state dict of the plain model has: parameters (tied ones under each name) and
    persistent buffers.
    """
    yield from named_parameters(model, remove_duplicate=False)
    yield from named_buffers(model)


def _updated(engine: Engine) -> Iterator[tuple[str, Bucket, Managed]]:
    names = names_of(engine)
    for bucket in engine.updater.buckets:
        for managed in bucket.params:
            yield names[managed.param], bucket, managed


def _check_names(expected: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{_OP}: state_dict is of type {type(state).__name__}; expected the result of "
            "sharded_state_dict"
        )
    for name in [*expected, *state]:
        if name not in state or name not in expected:
            place = "missing from" if name not in state else "unexpected in"
            raise ValueError(
                f"{_OP}: {name} is {place} state_dict; expected the keys of sharded_state_dict"
            )


def _check_ranges(name: str, bucket: Bucket, managed: Managed, values: Any) -> None:
    expected = [(piece.param_start, piece.numel) for piece in bucket.pieces_of(managed)]
    ranges = [(start, part.numel()) for start, part in getattr(values, "ranges", [])]
    if ranges != expected or values.shape != managed.param.shape:
        raise ValueError(
            f"{_OP}: {name} is {values!r}; expected the shards of this rank from sharded_state_dict"
        )


def _reader(values: Any) -> Any:
    parts = dict(getattr(values, "ranges", []))
    return lambda start, numel: parts[start]
