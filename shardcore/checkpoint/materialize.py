"""Weights of models built on the meta device: made module by module, or read from files, straight
into shards.

Invariants: a Parameter stays the same object (`become`). Full values exist for one module at a time
(from files: for one parameter, and only where the stage keeps full weights anyway). Every check
that needs no values runs before anything changes.

A function fills module after module in the model's order, not that of units, so random numbers are
drawn as when the model is built. For the same reason a module that shares a weight with an earlier
one fills a temporary tensor. Memory is NaN before it is filled, so what a function leaves out is an
error. Each rank reads the ranges of its pieces from files (see also pretrained.py).
"""

import logging
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isnan
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from shardcore.checkpoint.file_tensors import FileTensor, Stored
from shardcore.checkpoint.format import cut
from shardcore.checkpoint.pretrained import Converted, InFile, is_pretrained, tensors_for
from shardcore.checkpoint.safetensors import PathLike, open_files
from shardcore.checkpoint.source import ReadPart, read_columns
from shardcore.distributed.compare import Entry
from shardcore.distributed.everyone import Everyone
from shardcore.engine.bucket import Bucket, Managed, assign
from shardcore.engine.build import Builder, become
from shardcore.engine.pieces import partitioned_params
from shardcore.engine.slices import held_by, slice_of
from shardcore.engine.states import StateStore, part_of, set_weights
from shardcore.layout import Columns
from shardcore.optim.dtensor import is_dtensor
from shardcore.torch_private import is_persistent, use_count_of


class OwnInit:
    """Initializes a module as building it does: by `_init_weights` of the transformers model around
    it, or reset_parameters.

    transformers calls `_init_weights` for each module, children first, and it may write to modules
    below (GPT-2's scales the projections of its blocks). So it is called for the module and for
    each one around it, while all tensors that are not the module's own are on the meta device,
    where nothing is computed and no random numbers are drawn.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find, for each module of `model`, the modules around it and their transformers models."""
        self._model = model
        self._stand_ins: dict[torch.Tensor, torch.Tensor] = {}
        self._calls: dict[nn.Module, list[tuple[Any, nn.Module]]] = {}
        of_name: dict[str, list[tuple[Any, nn.Module]]] = {}
        for name, module in model.named_modules():
            calls = of_name[name.rpartition(".")[0]] if name else []
            if is_pretrained(module):
                calls = [(module, module), *calls]
            elif calls:
                owner, _ = calls[0]
                calls = [(owner, module), *calls]
            self._calls[module] = of_name[name] = calls

    def covers(self, module: nn.Module) -> bool:
        """Whether there is a function that initializes this module."""
        return bool(self._calls[module]) or callable(getattr(module, "reset_parameters", None))

    def computes(self, name: str) -> bool:
        """Whether from_pretrained, too, initializes this parameter or buffer of a transformers
        model if no file has it.
        """
        path, _, key = name.rpartition(".")
        module = self._model.get_submodule(path)
        patterns = [
            pattern
            for owner, _ in self._calls[module]
            for pattern in owner._keys_to_ignore_on_load_missing or ()
        ]
        ignored = any(re.search(pattern, name) for pattern in patterns)
        in_no_file = not is_persistent(module, key) or ignored
        return bool(self._calls[module]) and in_no_file

    def __call__(self, module: nn.Module) -> None:
        """Initialize the module's own parameters and buffers, in place."""
        reset: Any = getattr(module, "reset_parameters", None)
        if not self._calls[module]:
            reset()
            return
        with self._others_on_meta(module):
            self._init(module)
            if callable(reset) and any(is_blank(tensor) for tensor in _own_tensors(module)):
                reset()
                self._init(module)

    def _init(self, module: nn.Module) -> None:
        for owner, around in self._calls[module]:
            owner._init_weights(around)

    @contextmanager
    def _others_on_meta(self, module: nn.Module) -> Iterator[None]:
        own_tensors = set(_own_tensors(module))
        hidden: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for other in self._model.modules():
            tables: tuple[dict[str, Any], ...] = (other._parameters, other._buffers)
            for table in tables:
                for key, tensor in table.items():
                    if tensor is not None and tensor not in own_tensors:
                        hidden.append((table, key, tensor))
        try:
            for table, key, tensor in hidden:
                if not tensor.is_meta or is_dtensor(tensor):
                    table[key] = self._stand_in(tensor)
            yield
        finally:
            for table, key, tensor in hidden:
                table[key] = tensor

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in self._stand_ins:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            is_param = isinstance(tensor, nn.Parameter)
            self._stand_ins[tensor] = (
                nn.Parameter(empty, tensor.requires_grad) if is_param else empty
            )
        return self._stand_ins[tensor]


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _unset(dtype: torch.dtype) -> float | None:
    """Return the value by which unset elements are recognized; None for numbers of one byte,
    which have none to spare.
    """
    if dtype == torch.bool:
        return 2  # as a byte
    if dtype.itemsize == 1 or not dtype.is_signed:
        return None
    return torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def blank_like(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory whose unset elements `is_blank` finds."""
    blank = torch.empty(like.shape, dtype=like.dtype, device=device)
    unset = _unset(like.dtype)
    if unset is not None:
        values = blank.view(torch.uint8) if like.dtype == torch.bool else blank
        values.fill_(unset)
    return blank


def is_blank(tensor: torch.Tensor) -> bool:
    """Whether an element is as `blank_like` left it."""
    unset = _unset(tensor.dtype)
    if tensor.is_meta or unset is None:
        return False
    values = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
    blank = values.isnan() if isnan(unset) else values == unset
    return bool(blank.any())


logger = logging.getLogger("shardcore")

Fill: TypeAlias = Callable[[nn.Module], object]
Materialize: TypeAlias = Fill | PathLike | Sequence[PathLike | Fill]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def required(module: nn.Module) -> None:
    """Stand for `materialize` where a door's user gave none: parameters on the meta device are
    refused. It is never called.
    """


def plan_materialize(
    model: nn.Module, materialize: Materialize | None
) -> "FromInit | FromFiles | None":
    """Return what will fill the model's meta parameters and buffers, or None if it has none.
    Changes nothing.

    Raises TypeError, ValueError or OSError if they cannot be filled.
    """
    meta = {tensor: name for name, tensor in _named(model) if tensor.is_meta}
    for tensor, name in meta.items():
        _check_replaceable(name, tensor)
    if materialize is required:
        for tensor, name in meta.items():
            if isinstance(tensor, nn.Parameter):
                raise ValueError(
                    f"shard: {name} is on the meta device, and materialize is not given. Set it, "
                    "in shard_options or for initialize: a folder of .safetensors files for "
                    "pretrained weights, or None to initialize at random. Or build the model under "
                    "zero.Init, as from_pretrained does with a DeepSpeed configuration of stage 3"
                )
        materialize = None
    if materialize is not None and partitioned_params(model):
        raise ValueError(
            "shard: materialize is given, and zero.Init has made the weights. Pass "
            'materialize=None, or build the model under torch.device("meta")'
        )
    if materialize is None or callable(materialize):
        if materialize is not None and not meta:
            raise ValueError(
                "shard: materialize is a callable, but no tensor of the model is on the meta "
                "device, so it would never be called. Pass materialize=None, or build the model "
                'under torch.device("meta")'
            )
        in_memory = [name for name, param in model.named_parameters() if not param.is_meta]
        return FromInit(model, meta, materialize, in_memory) if meta else None
    items = [materialize] if isinstance(materialize, str | os.PathLike) else materialize
    paths, fills = [], []
    if isinstance(items, list | tuple):
        paths = [item for item in items if isinstance(item, str | os.PathLike)]
        fills = [item for item in items if callable(item)]
    if not paths or len(paths) + len(fills) != len(items) or len(fills) > 1:
        raise TypeError(
            f"shard: materialize is {materialize!r}; expected a callable for a module, a path, or "
            "a list of paths with at most one callable for tensors in none of the files"
        )
    tensors, dropped = _tensors_inside(model, open_files(paths))
    return FromFiles(model, tensors, dropped, fills[0] if fills else None)


def _tensors_inside(
    model: nn.Module, files: Mapping[str, FileTensor]
) -> "tuple[Mapping[str, InFile | Converted], Sequence[str]]":
    """Return `tensors_for` the model, or for the one transformers model inside it (as in a
    LightningModule) if the files do not have the names of `model`.
    """
    inside = list(_outermost_pretrained(model, ""))
    known = {name for name, _ in _all_named(model)}
    if len(inside) != 1 or known.issuperset(files):
        return tensors_for(model, files)
    ((prefix, pretrained),) = inside
    tensors, dropped = tensors_for(pretrained, files)
    return {prefix + name: stored for name, stored in tensors.items()}, dropped


def _outermost_pretrained(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if is_pretrained(module):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from _outermost_pretrained(child, f"{prefix}{name}.")


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _all_named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _check_replaceable(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if something refers to the meta tensor itself, so that it cannot be
    swapped for another.
    """
    if use_count_of(tensor) > 1 or weakref.getweakrefs(tensor):
        raise ValueError(
            f"shard: {name} is on the meta device and is still referenced elsewhere (by the graph "
            "of a forward, or a weak reference). Pass a model straight after building it"
        )


_Entry: TypeAlias = tuple[dict[str, Any], str, torch.Tensor]


class _Fresh(NamedTuple):
    """A tensor of a module, `table[key]`, that is to get values. filled: what the function
    fills, itself unless sliced.
    """

    table: dict[str, Any]
    key: str
    tensor: torch.Tensor
    filled: torch.Tensor


class FromInit:
    """Fills module after module by a function, in the model's order, so that random numbers are
    drawn as when it is built.
    """

    def __init__(
        self,
        model: nn.Module,
        meta: Mapping[torch.Tensor, str],
        init: Fill | None,
        in_memory: Sequence[str] = (),
    ) -> None:
        """Plan for the modules that own tensors of `meta` (with names); init: None initializes each
        as building it does.

        in_memory: parameters that keep the values they have, of which `fill` warns: perhaps none
        were set.
        """
        self._in_memory = in_memory
        self._meta = {tensor: (tensor.shape, tensor.dtype) for tensor in meta}
        own_init = OwnInit(model)
        self._init: Fill = init or own_init
        self._modules = [
            (name, module) for name, module in model.named_modules() if self._meta_entries(module)
        ]
        self.entries: list[Entry] = [("tensor on the meta device", name) for name in meta.values()]
        for name, module in self._modules:
            described = (
                f"the tensors {', '.join(key for _, key, _ in self._meta_entries(module))} of "
                f"{_described(name, module)} are on the meta device"
            )
            if init is None and not own_init.covers(module):
                raise ValueError(
                    f"shard: {described}, and the module defines no reset_parameters(). Pass a "
                    "callable for this module, or files, as materialize="
                )
            real = [key for key, _ in self._unfilled(module)]
            if real and any(
                isinstance(tensor, nn.Parameter) for _, _, tensor in self._meta_entries(module)
            ):
                raise ValueError(
                    f"shard: {described}, while {', '.join(real)} is in memory or in files. Put "
                    "all parameters of a module in one place, because filling some would "
                    "overwrite the others"
                )

    def _meta_entries(self, module: nn.Module) -> list[_Entry]:
        """Return the module's own tensors that were on the meta device: (the dict that holds it,
        its key, the tensor).
        """
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        return [
            (table, key, tensor)
            for table in tables
            for key, tensor in table.items()
            if tensor in self._meta
        ]

    def _unfilled(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Return the module's own parameters that are not filled here: they have values, or get
        them from files.
        """
        return [
            (key, param)
            for key, param in module._parameters.items()
            if param is not None and param not in self._meta
        ]

    def fill(
        self, builder: Builder, buckets: Sequence[Bucket], store: StateStore, broadcast: bool
    ) -> None:
        """Make the weights. Collective. Raises RuntimeError on every rank if the function fails
        on one.
        """
        if self._in_memory and builder.comm.rank == 0:
            logger.warning(
                "shard: %s is in memory rather than on the meta device, so its values are kept. "
                'Some constructors leave memory unset even under torch.device("meta"), such as '
                'torch.FloatTensor(...). If nothing set these values, call model.to("meta") '
                "before creating the optimizer",
                ", ".join(self._in_memory),
            )
        bucket_of: dict[torch.Tensor, tuple[Bucket, Managed]] = {
            m.param: (b, m) for b in buckets for m in b.params
        }
        for name, module in self._modules:
            self._fill(builder, bucket_of, store, broadcast, name, module)

    def _fill(
        self,
        builder: Builder,
        bucket_of: Mapping[torch.Tensor, tuple[Bucket, Managed]],
        store: StateStore,
        broadcast: bool,
        name: str,
        module: nn.Module,
    ) -> None:
        """Make the weights of a module. In place of a tensor that is sliced, or has values, it
        has a whole one meanwhile.
        """
        entries = self._meta_entries(module)
        unset = [each for each in entries if each[2].is_meta]
        aside: list[_Entry] = [
            (module._parameters, key, param) for key, param in self._unfilled(module)
        ]
        for table, key, tensor in entries:
            if tensor.is_meta and not is_dtensor(tensor):
                become(tensor, blank_like(tensor, builder.device))
            else:
                # sliced; or tied, and filled by another module: this one draws its random numbers
                # too, as when it is built
                aside.append((table, key, tensor))
        for table, key, tensor in aside:
            blank = blank_like(tensor, builder.device)
            if isinstance(tensor, nn.Parameter):
                blank = nn.Parameter(blank, tensor.requires_grad)
            table[key] = blank
        fresh = [_Fresh(table, key, tensor, table[key]) for table, key, tensor in unset]
        doing = f"filling {_described(name, module)}"
        with builder.together(doing):
            try:
                with torch.no_grad():
                    self._init(module)
                self._check(
                    name, fresh, has_values=not broadcast or Everyone(builder.comm).rank == 0
                )
            finally:
                for table, key, tensor in aside:
                    table[key] = tensor
        for table, key, tensor, filled in fresh:
            sliced = slice_of(key, tensor)
            if sliced is not None:
                if broadcast:
                    builder.broadcast(filled.data, repeated=True)
                become(tensor, sliced.wrap(sliced.cut(filled.data).contiguous()))
            if tensor not in bucket_of:
                builder.move_rest([table[key]], broadcast)
                continue
            bucket, managed = bucket_of[tensor]
            values = managed.local.data.contiguous()
            if broadcast:
                builder.broadcast(values, bucket.repeated)
            with builder.together(doing):
                set_weights(store, bucket, managed, part_of(values))
                builder.attach(bucket, managed)

    def _check(self, name: str, fresh: Sequence[_Fresh], has_values: bool) -> None:
        """Raise ValueError unless the function filled the module's parameters in place; buffers
        may be new ones.
        """
        for table, key, tensor, filled in fresh:
            value, full_name = table.get(key), f"{name}.{key}".lstrip(".")
            if not isinstance(value, torch.Tensor) or (
                value is not filled and isinstance(tensor, nn.Parameter)
            ):
                raise ValueError(f"{full_name} was replaced; expected it to be filled in place")
            shape, dtype = self._meta[tensor]
            if (value.shape, value.dtype) != (shape, dtype) or value.is_meta:
                raise ValueError(
                    f"{full_name} became {tuple(value.shape)} {value.dtype} on {value.device}; "
                    f"expected {tuple(shape)} {dtype} in memory, as it was built"
                )
            if has_values and is_blank(value):
                content = "NaN (of unset memory)" if value.is_floating_point() else "unset values"
                raise ValueError(
                    f"{full_name} contains {content}. Fill every element, or put the tensor in "
                    "memory before shard()"
                )


class FromFiles:
    """Fills parameters and buffers from files, by name; every rank reads what it keeps."""

    def __init__(
        self,
        model: nn.Module,
        tensors: Mapping[str, InFile | Converted],
        dropped: Sequence[str],
        init: Fill | None,
    ) -> None:
        """Match names; `init` fills modules whose tensors no file has (of a transformers model by
        itself, as from_pretrained).

        Raises ValueError or TypeError for missing and unexpected names, and for other shapes or
        dtypes. Unexpected names in the files of a transformers model are dropped, with a warning
        from `fill`.
        """
        self._tensors, self._dropped = tensors, dropped
        named = list(_all_named(model))
        names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in named:
            names.setdefault(tensor, []).append(name)
        known = {name for name, _ in named}
        unexpected = [name for name in tensors if name not in known]
        if unexpected:
            raise ValueError(
                f"shard: {tensors[unexpected[0]].path} contains {_listed(unexpected)}, which the "
                "model lacks among its parameters and buffers. Write the file without the others, "
                "or rename them to the model's names"
            )
        self._key: dict[torch.Tensor, str] = {}
        missing: dict[torch.Tensor, str] = {}
        for tensor, of_tensor in names.items():  # of tied weights, one name is enough
            stored = [name for name in of_tensor if name in tensors]
            for name in stored:
                _check_stored(name, tensors[name], tensor)
            if stored:
                self._key[tensor] = stored[0]
            elif tensor.is_meta:
                missing[tensor] = of_tensor[0]
        own_init = OwnInit(model)
        lacking = [
            name for name in missing.values() if init is None and not own_init.computes(name)
        ]
        if lacking:
            paths = list(dict.fromkeys(str(stored.path) for stored in tensors.values()))
            where = _listed(paths or ["an empty file"])
            beside = (
                f" ({_listed(self._dropped)} there is not in the model)" if self._dropped else ""
            )
            raise ValueError(
                f"shard: {_listed(lacking)} is on the meta device and not in {where}{beside}. Add "
                "its values to the files, put the tensor in memory before shard(), or pass "
                "materialize=[path, fill] with a callable for its module"
            )
        self._rest = FromInit(model, missing, init) if missing else None
        self.entries: list[Entry] = [
            ("tensor in files", name, str(s.shape), str(s.dtype), f"in {s.path.name}")
            for name, s in tensors.items()
        ]
        self.entries += [
            ("tensor on the meta device", name) for name, tensor in _named(model) if tensor.is_meta
        ]

    def fill(
        self, builder: Builder, buckets: Sequence[Bucket], store: StateStore, broadcast: bool
    ) -> None:
        """Make the weights. Collective. Raises RuntimeError on every rank if one cannot read."""
        if self._dropped and builder.comm.rank == 0:
            logger.warning(
                "shard: the files contain %s, which the model lacks; dropped, as from_pretrained "
                "does",
                ", ".join(self._dropped),
            )
        with builder.together("reading files"):
            self._read(builder, buckets, store)
        if self._rest is not None:
            self._rest.fill(builder, buckets, store, broadcast)

    @torch.no_grad()
    def _read(self, builder: Builder, buckets: Sequence[Bucket], store: StateStore) -> None:
        unread = dict(self._key)
        for bucket in buckets:
            for managed in bucket.params:
                key = unread.pop(managed.param, None)
                if key is not None:
                    if managed.param.is_meta:
                        builder.attach(bucket, managed)
                    read = _reader(self._tensors[key], managed.columns)
                    set_weights(store, bucket, managed, read)
        for tensor, key in unread.items():
            sliced = slice_of(key, tensor)
            if tensor.is_meta:
                dtype = (
                    builder.dtype_of(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype
                )
                empty = torch.empty(held_by(tensor).shape, dtype=dtype, device=builder.device)
                become(tensor, empty if sliced is None else sliced.wrap(empty))
            local = held_by(tensor).data.view(-1)
            read = _reader(self._tensors[key], None if sliced is None else sliced.columns)
            assign(local, read(0, local.numel()))


def _check_stored(name: str, stored: InFile | Converted, tensor: torch.Tensor) -> None:
    if stored.shape != tuple(tensor.shape):
        raise ValueError(
            f"shard: {name} has shape {stored.shape} in {stored.path}; expected "
            f"{tuple(tensor.shape)}, as in the model"
        )
    if stored.dtype != tensor.dtype and not (stored.dtype in _FLOATS and tensor.dtype in _FLOATS):
        raise TypeError(
            f"shard: {name} has dtype {stored.dtype} in {stored.path}; expected a dtype "
            f"convertible to {tensor.dtype}"
        )


def _reader(stored: Stored, columns: Columns | None) -> ReadPart:
    """Return what reads parts of a tensor, or of a slice of it: a few of its whole rows at a
    time.
    """
    if columns is None:
        return stored.read

    def read_part(start: int, numel: int) -> torch.Tensor:
        if numel == 0:
            return stored.read(0, 0)
        parts = [read_columns(stored.read, columns, *part) for part in cut(start, numel, columns)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return read_part


def _described(name: str, module: nn.Module) -> str:
    return f"{name or 'the root'} ({type(module).__name__})"


def _listed(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    rest = ", ".join(names[1:4]) + (", ..." if len(names) > 4 else "")
    return f"{names[0]} (and {len(names) - 1} more: {rest})"
