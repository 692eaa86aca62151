"""Weights for an inference engine: the full parameters of a sharded model, one after the other,
without a whole copy of the model.

How values are gathered: engine/full_weights.py. Names and conversions are those of
`save_pretrained` (checkpoint/save_pretrained.py).
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, overload

import torch
import torch.distributed as dist
from torch import nn

from shardcore.checkpoint.consolidate import Part, as_made, made_of
from shardcore.checkpoint.format import plain_name
from shardcore.checkpoint.merged import Merged, merged_of, merged_values, unit_of
from shardcore.checkpoint.save_pretrained import (
    adapter_names,
    as_in_files,
    is_transformers,
)
from shardcore.distributed.compare import Entry
from shardcore.engine.agreement import together
from shardcore.engine.bucket import Managed, follow, rounded, stream_now
from shardcore.engine.changes import ChangedWeights, Changes, Taken
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.full_weights import (
    Chunk,
    FullWeights,
    chunks_of,
    params_of,
    read_dtype,
    travels,
)
from shardcore.engine.quantized import is_int8, shape_and_dtype
from shardcore.engine.unshard import in_backward
from shardcore.optim.interface import Superseded, engine_of

logger = logging.getLogger("shardcore")

Names: TypeAlias = str | Callable[[str], str]
_OP = "stream_params"


class ParamMetadata(NamedTuple):
    """The name, shape and dtype of a streamed tensor."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


def track_changes(model: nn.Module) -> Changes:
    """Let steps note which weights they change, from the first `stream_params` with the result on.
    Local. Call it on every rank. Stream the first version before a CUDA graph captures steps.

    Returns the same object for one model. A step of Adam then sets a bit for each 16-bit weight
    that it changes: 1/8 byte for each weight of this rank's shard, where it is updated. Weights in
    float32, and weights of other optimizers, have no bits: each stream sends them in full.

    Raises:
        ValueError: The model is not sharded.
    """
    engine = engine_behind("track_changes", model)
    if engine.changes is None:
        engine.changes = Changes(engine)
    changes: Changes = engine.changes
    return changes


@overload
def stream_params(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    ranks: Sequence[int] | None = None,
    bucket_bytes: int | None = None,
    names: Names = "model",
    only_trainable: bool = False,
    merge_adapters: bool = False,
    changes: None = None,
    since: None = None,
) -> Iterator[tuple[str, torch.Tensor]]: ...


@overload
def stream_params(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    ranks: Sequence[int] | None = None,
    bucket_bytes: int | None = None,
    names: Names = "model",
    only_trainable: bool = False,
    changes: Changes,
    since: int | None = None,
) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor]]: ...


def stream_params(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    ranks: Sequence[int] | None = None,
    bucket_bytes: int | None = None,
    names: Names = "model",
    only_trainable: bool = False,
    merge_adapters: bool = False,
    changes: Changes | None = None,
    since: int | None = None,
) -> Iterator[Any]:
    """Yield the name and the full value of each parameter, one unit at a time. Collective: every
    rank iterates to the end.

    The next unit is gathered while one is consumed, by one collective. Two units and one bucket of
    memory are used beside the training state. Training continues to the bit as if nothing had been
    streamed. Tied parameters are yielded once. The order is that of the model's parameters; a
    parameter that is not gathered comes after those that are. It is the same in every call.

    Args:
        model: A sharded model, at any stage. An ordinary model yields its own parameters.
        dtype: The dtype of all floating tensors. None: the weights that forward uses, bit for bit.
            torch.float32: the masters, where there are any. Other dtypes are rounded from masters,
            as a step rounds weights (ties away from zero).
        device: Where the tensors are. None: the device that trains.
        ranks: Ranks of torch.distributed that receive tensors. None: all. On other ranks the
            iterator sends this rank's shards, and yields nothing.
        bucket_bytes: How many bytes of the root's parameters are gathered at a time; a larger
            parameter is gathered alone. None: the bytes of the largest unit.
        names: "model", the model's names without wrappers. "huggingface", the names and the layout
            of the files that `save_pretrained` of transformers writes: packed experts become one
            gate, up and down projection for each expert. Or a function of the model's name.
        only_trainable: Yield trainable parameters only. For a model of PEFT: the tensors and the
            names of its adapter's file, which inference engines load (its config is
            `model.peft_config`).
        merge_adapters: Yield the ordinary model that a model of PEFT stands for: LoRA and DoRA are
            merged into their base, a unit at a time, and quantized weights become floats. The model
            itself does not change. dtype=None means the dtype of each base weight.
        changes: From `track_changes`. Yield (name, indices, values) of the parameters that changed
            since a version. indices: int64, (changed,), ascending, into the flattened parameter;
            values: (changed,), in its dtype. indices=None: values is the full parameter. The
            order is not that of the model. The stream is a new version, `changes.version`. Keep
            this number for the next stream, and use one reader: it counts the streams of all. Not
            with `dtype`, `merge_adapters`, tensor-parallel slices, and names that convert
            parameters.
        since: The version that receivers have. None, or a version that is not the last, or one
            with other arguments: all parameters are full. So they are after a stream that failed.

    Call this on the CUDA stream that trains, and take tensors on any. Tensors may be views of the
    model's weights: do not edit them. A tensor that is kept has its own values at stage 3; at
    stages 0 to 2 the next step changes it.

    Raises:
        ValueError, TypeError, NotImplementedError: For arguments, on every rank.
        RuntimeError: On the other ranks, if a rank leaves its loop early, or fails.
    """
    options = _Options(
        dtype, bucket_bytes, names, only_trainable, merge_adapters, changes, since, device
    )
    engine = _engine_of(model)
    if engine is None:
        return _of_ordinary(model, options)
    # now: the first tensor may be taken on another stream than this, which trains
    home = stream_now(engine.device)
    return _made_on(home, _of_sharded(model, engine, options, ranks))


def _of_ordinary(model: nn.Module, options: "_Options") -> Iterator[tuple[str, torch.Tensor]]:
    alone = _Plan(model, None, options)
    yield from alone.tensors(alone.values(()), options.device)


def _of_sharded(
    model: nn.Module, engine: Engine, options: "_Options", ranks: Sequence[int] | None
) -> Generator[Any]:
    made: list[tuple[_Plan, set[int]]] = []

    def plan() -> list[Entry]:
        engine.refuse_held(_OP)
        if in_backward():
            raise ValueError(f"{_OP}: called inside a backward; expected it between steps")
        made.append((_Plan(model, engine, options), _receivers(engine, ranks)))
        engine.updater.accept_weight_edits()
        changes, since = options.changes, options.since
        known = changes is not None and changes.knows(since, (made[0][0].metadata, made[0][1]))
        given: dict[str, object] = {
            "ranks": ranks,
            "bucket_bytes": options.bucket_bytes,
            "since": since,
        }
        if changes is not None:
            given |= {"changes": f"version {changes.version}", "since": f"{since} (known: {known})"}
        tensors = [("tensor", m.name, f"{[*m.shape]} in {m.dtype}") for m in made[0][0].metadata]
        return [*(("argument", name, str(value)) for name, value in given.items()), *tensors]

    engine.agree(_OP, plan)
    chosen, receivers = made.pop()
    changes, since, device = options.changes, options.since, options.device
    if changes is None:
        values = chosen.values(receivers)
        total = len(chosen.metadata) if engine.comm.rank in receivers else 0
        yield from _to_the_end(engine, values, chosen.tensors(values, device), total)
        return
    streamed = chosen.metadata, receivers
    known = changes.knows(since, streamed)
    if since is not None and not known:
        why = (
            f"the loop over version {since} did not reach its end; expected it to take every item"
            if since == changes.version and changes.unfinished
            else f"since is {since}, not the last version ({changes.version}) of these parameters "
            "and ranks"
        )
        logger.warning("%s: %s. All parameters are sent in full", _OP, why)
    taken = changes.begin(engine)
    if known:
        changed = chosen.changed(taken, receivers)
        yield from _to_the_end(engine, changed, chosen.renamed(changed, device))
    else:
        values = chosen.values(receivers)
        full = ((name, None, value) for name, value in chosen.tensors(values, device))
        yield from _to_the_end(engine, values, full)
    changes.end(streamed)


def param_metadata(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int | None = None,
    names: Names = "model",
    only_trainable: bool = False,
    merge_adapters: bool = False,
) -> list[ParamMetadata]:
    """Return the name, shape and dtype of each tensor that `stream_params` yields, in its order.
    Local: nothing is gathered.

    The arguments are those of `stream_params`.
    """
    options = _Options(dtype, bucket_bytes, names, only_trainable, merge_adapters)
    return _Plan(model, _engine_of(model), options).metadata


def _made_on(home: torch.cuda.Stream | None, items: Generator[Any]) -> Iterator[Any]:
    """Make items on the CUDA stream `home`, whichever takes them: vLLM's sender packs tensors on
    streams of its own, which do not wait for the last step.
    """
    if home is None:
        yield from items
        return
    with closing(items):
        while True:
            with torch.cuda.stream(home):
                item = next(items, None)
            if item is None:
                return
            for tensor in item[1:]:
                if tensor is not None and tensor.is_cuda:
                    follow(home, tensor.device)
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
                del tensor
            yield item
            del item


class _LeftEarlyError(RuntimeError):
    """A loop over the stream ended before the stream."""


def _to_the_end(
    engine: Engine, values: Generator[Any], items: Iterator[Any], total: int | None = None
) -> Iterator[Any]:
    """Yield all items, made of values. A rank that leaves early gathers the rest, and the other
    ranks raise. total: the number of items, if it is known before.
    """
    count = 0
    with (
        suppress(_LeftEarlyError),
        together(engine.everyone, _OP, "receivers may have old and new tensors"),
    ):
        try:
            for item in items:
                count += 1
                yield item
        except GeneratorExit:
            values.close()  # gathers the rest
            if count == total:  # as zip does: it has all of them
                return
            message = f"its loop ended at tensor {count}"
            logger.warning("%s: %s; expected it to reach the end", _OP, message)
            raise _LeftEarlyError(message) from None
        except BaseException:
            values.close()  # the other ranks wait for the rest
            raise


def _engine_of(model: nn.Module) -> Engine | None:
    """Return the engine of a sharded model, or of a module around or inside it; None if none."""
    refs = [model, *model.parameters()] if isinstance(model, nn.Module) else []
    found = next(filter(None, map(engine_of, refs)), None)
    if isinstance(found, Superseded):
        found.refuse(_OP)
    return found


def _receivers(engine: Engine, ranks: Sequence[int] | None) -> set[int]:
    """Return the ranks of engine.comm that receive tensors."""
    everyone = range(dist.get_world_size()) if dist.is_initialized() else range(1)
    if ranks is not None and not isinstance(ranks, Sequence):
        raise TypeError(f"{_OP}: ranks is {ranks!r}; expected a list of ranks, or None")
    wrong = [rank for rank in ranks or () if type(rank) is not int or rank not in everyone]
    if wrong:
        raise ValueError(
            f"{_OP}: ranks has {wrong[0]!r}; expected ranks of torch.distributed, 0 to "
            f"{len(everyone) - 1}"
        )
    comm = engine.comm
    chosen = everyone if ranks is None else ranks
    return {rank for rank in range(comm.world_size) if comm.global_rank(rank) in chosen}


class _Plan:
    """The tensors that are yielded, and how they are made of the parameters of the model."""

    def __init__(self, model: nn.Module, engine: Engine | None, options: "_Options") -> None:
        """Check the arguments. Local."""
        options.check(model)
        self._engine, self._dtype = engine, options.dtype
        self._merged = _merged_params(model, engine) if options.merge_adapters else {}
        self._chunks: list[Chunk] = []
        self._rest: list[Managed] = []
        self._name_of: dict[nn.Parameter, str] = {}
        if options.merge_adapters:
            self._sources = self._of_merged()
            units = {name: unit_of(engine, each) for name, each in self._merged.items()}
            model = model.get_base_model()  # type: ignore[operator]
        else:
            self._sources, units = self._of_params(model, options)
        parts, targets = _named(model, self._sources, units, options)
        self._bucket_bytes = options.bucket_bytes
        if options.changes is not None:
            _check_changes(options.changes, engine, parts)
        self._part_of = {source: part for part in parts for source in part.sources}
        self.metadata = [
            ParamMetadata(name, targets[name].shape, targets[name].dtype)
            for name in as_made(self._sources, self._part_of)
        ]

    def _of_merged(self) -> dict[str, torch.Tensor]:
        sources = {}
        for name, each in self._merged.items():
            shape, dtype = shape_and_dtype(each.tensor)
            sources[name] = torch.empty(shape, dtype=read_dtype(dtype, self._dtype), device="meta")
        return sources

    def _of_params(
        self, model: nn.Module, options: "_Options"
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Find what is gathered, and what is not. Return the parameters on the meta device, in the
        order in which they are read, and their units.
        """
        engine = self._engine
        self._name_of = wanted = {
            param: plain_name(name)
            for name, param in model.named_parameters()
            if not options.only_trainable or param.requires_grad
        }
        _refuse_quantized(wanted)
        if engine is not None:
            gathered = [b for b in engine.buckets if travels(engine, b, options.dtype)]
            self._chunks = chunks_of(gathered, wanted, options.bucket_bytes)
        chunked = [m for chunk in self._chunks for m in params_of(chunk) if m.param in wanted]
        in_chunks = {managed.param for managed in chunked}
        self._rest = [Managed(n, p, 0, None) for p, n in wanted.items() if p not in in_chunks]
        sources, units = {}, {}
        for managed in (*chunked, *self._rest):
            name, param = wanted[managed.param], managed.param
            bucket = None if engine is None else engine.bucket_of.get(param)
            dtype = read_dtype(param.dtype if bucket is None else bucket.dtype, options.dtype)
            sources[name] = torch.empty(param.shape, dtype=dtype, device="meta")
            units[name] = "" if bucket is None else bucket.unit
        return sources, units

    def values(self, receivers: Collection[int]) -> Generator[tuple[str, torch.Tensor]]:
        """Yield the parameters by the names of the model; nothing on ranks that do not receive.
        Collective.
        """
        receives = self._engine is None or self._engine.comm.rank in receivers
        if self._merged:
            dtypes = {name: tensor.dtype for name, tensor in self._sources.items()}
            for name, merged in merged_values(
                self._engine, [*self._merged.values()], dtypes, lambda name: receives
            ):
                if merged is not None:
                    yield name, merged
                del merged
            return
        if self._engine is not None:
            full = FullWeights(self._engine, self._chunks, self._dtype, receivers)
            for managed, value in full.values():
                if receives and managed.param in self._name_of:
                    yield self._name_of[managed.param], value
                del value  # before the next chunk is waited for
        for managed in self._rest:
            whole = managed.full(managed.local.detach())
            if receives:
                name = self._name_of[managed.param]
                yield name, rounded(whole, read_dtype(whole.dtype, self._dtype))

    def tensors(
        self, values: Iterator[tuple[str, torch.Tensor]], device: torch.device | str | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what engines receive."""
        held: dict[Part, dict[str, torch.Tensor]] = {}
        for name, value in values:
            part = self._part_of[name]
            sources = held.setdefault(part, {})
            sources[name] = value
            del value
            if len(sources) < len(part.sources):
                continue
            made = made_of(part, held.pop(part))
            del sources
            while made:
                target = next(iter(made))
                tensor = made.pop(target)
                yield target, tensor if device is None else tensor.to(device)
                del tensor

    def changed(
        self, taken: Taken, receivers: Collection[int]
    ) -> Generator[tuple[str, torch.Tensor | None, torch.Tensor]]:
        """Yield what changed in the parameters, by the names of the model: see stream_params.
        Collective.
        """
        engine, wanted = self._engine, self._name_of
        assert engine is not None
        chunks = chunks_of(engine.buckets, wanted, self._bucket_bytes)
        for managed, places, value in ChangedWeights(engine, chunks, taken, receivers).values():
            if managed.param in wanted:
                yield wanted[managed.param], places, value
            del value
        # after the last gather: a reader that leaves here leaves no rank waiting
        if engine.comm.rank in receivers:
            for param in taken.rewritten:
                if param in wanted:
                    yield wanted[param], None, param.detach()

    def renamed(
        self,
        changed: Iterator[tuple[str, torch.Tensor | None, torch.Tensor]],
        device: torch.device | str | None,
    ) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor]]:
        """Yield what engines receive of the changed parameters."""
        for name, places, value in changed:
            target = self._part_of[name].targets[0]
            if device is None:
                yield target, places, value
            else:
                yield target, None if places is None else places.to(device), value.to(device)
            del value, places


def _check_changes(changes: object, engine: Engine | None, parts: Sequence[Part]) -> None:
    """Raise TypeError, ValueError or NotImplementedError if changes cannot be streamed."""
    if not isinstance(changes, Changes):
        raise TypeError(
            f"{_OP}: changes is a {type(changes).__name__}; expected what track_changes returns"
        )
    if engine is None or not changes.of(engine):
        raise ValueError(
            f"{_OP}: changes is of another model; expected track_changes(model) of this one"
        )
    if engine.comm.slices:
        raise NotImplementedError(
            f"{_OP}: got changes for tensor-parallel slices; expected changes=None, which sends "
            "all weights"
        )
    for part in parts:
        if part.make is not None:
            raise NotImplementedError(
                f"{_OP}: got changes, and names that convert {part.sources[0]}; expected "
                'names="model"'
            )


def _merged_params(model: nn.Module, engine: Engine | None) -> dict[str, Merged]:
    """Return the parameters of the ordinary model that a model of PEFT stands for."""
    merged = merged_of(_OP, model, engine)
    return {n: each for n, each in merged.items() if isinstance(each.tensor, nn.Parameter)}


def _refuse_quantized(wanted: Mapping[nn.Parameter, str]) -> None:
    for param, name in wanted.items():
        if is_int8(param) or hasattr(param, "quant_state"):
            raise NotImplementedError(
                f"{_OP}: {name} is quantized; expected merge_adapters=True, which yields floats, "
                "or only_trainable=True, which yields the adapters"
            )


def _named(
    model: Any, sources: Mapping[str, torch.Tensor], units: Mapping[str, str], options: "_Options"
) -> tuple[list[Part], Mapping[str, torch.Tensor]]:
    """Return how parameters, by the names of the model, become what engines receive; and this."""
    if options.only_trainable and hasattr(model, "peft_config"):
        final = adapter_names(model, sources)
        final |= {name: name for name in sources if name not in final}
    elif options.names == "huggingface":
        return as_in_files(model, {name: name for name in sources}, sources, units)
    elif callable(options.names):
        final = {name: options.names(name) for name in sources}
    else:
        final = {name: name for name in sources}
    for name, new in final.items():
        if not isinstance(new, str):
            raise TypeError(f"{_OP}: names returned {new!r} for {name}; expected a str")
    if len(set(final.values())) < len(final):
        twice = next(n for n, count in Counter(final.values()).items() if count > 1)
        raise ValueError(f"{_OP}: names returned {twice} twice; expected different names")
    parts = [Part([name], [new]) for name, new in final.items()]
    return parts, {new: sources[name] for name, new in final.items()}


@dataclass(frozen=True)
class _Options:
    """See stream_params."""

    dtype: torch.dtype | None
    bucket_bytes: int | None
    names: Names
    only_trainable: bool
    merge_adapters: bool
    changes: Changes | None = None
    since: int | None = None
    device: torch.device | str | None = None

    def check(self, model: object) -> None:
        """Raise TypeError or ValueError for arguments that are not supported."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"{_OP}: got a {type(model).__name__}; expected a model")
        is_float = isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        if self.dtype is not None and not is_float:
            raise TypeError(f"{_OP}: dtype is {self.dtype!r}; expected a floating dtype or None")
        if self.bucket_bytes is not None and not (
            type(self.bucket_bytes) is int and self.bucket_bytes > 0
        ):
            raise ValueError(
                f"{_OP}: bucket_bytes is {self.bucket_bytes!r}; expected a number of bytes or None"
            )
        try:
            torch.empty(0, device=self.device)
        except Exception as error:  # of several types
            raise ValueError(
                f"{_OP}: device is {self.device!r}; expected a device that torch has here, such as "
                '"cpu", or None'
            ) from error
        if self.names not in ("model", "huggingface") and not callable(self.names):
            raise ValueError(
                f'{_OP}: names is {self.names!r}; expected "model", "huggingface" or a function'
            )
        if self.only_trainable and self.merge_adapters:
            raise ValueError(
                f"{_OP}: got only_trainable=True and merge_adapters=True; expected one of them, "
                "since merged weights have no adapters"
            )
        if self.since is not None and (self.changes is None or type(self.since) is not int):
            raise ValueError(
                f"{_OP}: since is {self.since!r}; expected a version of changes, with changes="
            )
        if self.changes is not None and (self.dtype is not None or self.merge_adapters):
            raise ValueError(
                f"{_OP}: got changes with dtype={self.dtype} and merge_adapters="
                f"{self.merge_adapters}; expected neither: changes are those of the model's weights"
            )
        get_base = getattr(model, "get_base_model", None)
        base = get_base() if self.merge_adapters and get_base is not None else model
        if self.names == "huggingface" and not is_transformers(base):
            raise TypeError(
                f'{_OP}: names is "huggingface" for a {type(model).__name__}; expected a model of '
                'transformers, or names="model"'
            )
