"""Weights of models built on the meta device: made module by module, or read from files, straight into shards.

Invariants: a Parameter stays the same object (`become`). Whole values exist for one module at a time (from files: for one
parameter, and only where the stage keeps whole weights anyway). Every check that needs no value runs before anything changes.
"""

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from shardcore.engine.bucket import Bucket, Managed
from shardcore.engine.build import Builder, become, together
from shardcore.engine.pretrained import ConvertedFiles, OwnInit, blank_like, files_of, is_blank
from shardcore.engine.store import StateStore, assign, part_of, set_weights
from shardcore.engine.tensor_files import PathLike, TensorFiles

logger = logging.getLogger("shardcore")

Fill: TypeAlias = Callable[[nn.Module], object]
Materialize: TypeAlias = Fill | PathLike | Sequence[PathLike | Fill]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def plan_materialize(model: nn.Module, materialize: Materialize | None) -> "FromInit | FromFiles | None":
    """Return what will fill the model's meta parameters and buffers, or None if there is nothing to fill. Changes nothing.

    Raises TypeError, ValueError or OSError for what cannot be filled, ModuleNotFoundError without the safetensors package.
    """
    meta = {tensor: name for name, tensor in _named(model) if tensor.is_meta}
    for tensor, name in meta.items():
        _check_replaceable(name, tensor)
    if materialize is None or callable(materialize):
        if materialize is not None and not meta:
            raise ValueError(
                "shard: materialize is a callable and nothing of the model is on the meta device; expected None, or a model "
                'built under torch.device("meta") (it would never be called)'
            )
        in_memory = [name for name, param in model.named_parameters() if not param.is_meta]
        return FromInit(model, meta, materialize, in_memory) if meta else None
    items = [materialize] if isinstance(materialize, str | os.PathLike) else materialize
    paths = [item for item in items if isinstance(item, str | os.PathLike)] if isinstance(items, list | tuple) else []
    fills = [item for item in items if callable(item)] if paths else []
    if not paths or len(paths) + len(fills) != len(items) or len(fills) > 1:
        raise TypeError(
            f"shard: materialize is {materialize!r}; expected a callable that fills a module, a path, or a list of paths and "
            "perhaps one such callable for what the files lack"
        )
    return FromFiles(model, files_of(model, TensorFiles(paths)), fills[0] if fills else None)


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _check_replaceable(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError if something holds the meta tensor itself, so that it cannot become another."""
    held = tensor._use_count() > 1 or weakref.getweakrefs(tensor)  # type: ignore[attr-defined]
    if held:
        raise ValueError(
            f"shard: {name} is on the meta device and is held by something else (the graph of a forward that ran on it, or a "
            "weak reference); expected a model that was only built"
        )
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise ValueError(f"shard: {name} is on the meta device and has hooks; expected them to be registered after shard()")


class FromInit:
    """Fills each module by a function of it, in the model's order, so that random numbers are drawn as they were there."""

    def __init__(
        self, model: nn.Module, meta: Mapping[torch.Tensor, str], init: Fill | None, in_memory: Sequence[str] = ()
    ) -> None:
        """Plan for the modules that own tensors of `meta` (with names); without `init` each is filled as building it does.

        in_memory: parameters that keep the values they have, of which `fill` warns: nobody may have set them.
        """
        self._in_memory = in_memory
        self._meta = {tensor: (tensor.shape, tensor.dtype) for tensor in meta}
        own = OwnInit(model)
        self._init: Fill = init or own
        self._modules = [(name, module) for name, module in model.named_modules() if self._own(module)]
        self.entries = [f"on the meta device: {name}" for name in meta.values()]
        for name, module in self._modules:
            what = f"{_described(name, module)} has {', '.join(key for _, key, _ in self._own(module))} on the meta device"
            if init is None and not own.covers(module):
                raise ValueError(
                    f"shard: {what} and no reset_parameters(); expected materialize= with a callable that fills such a module, "
                    "or with files"
                )
            real = [key for key, _ in self._kept(module)]
            if real and any(isinstance(tensor, nn.Parameter) for _, _, tensor in self._own(module)):
                raise ValueError(
                    f"shard: {what} and {', '.join(real)} not to be filled; expected all parameters of a module in one "
                    "place (what fills some would overwrite the others)"
                )

    def _own(self, module: nn.Module) -> list[tuple[dict[str, Any], str, torch.Tensor]]:
        """Return the module's own tensors that were on the meta device: (the dict that holds it, its key, the tensor)."""
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        return [(table, key, tensor) for table in tables for key, tensor in table.items() if tensor in self._meta]

    def _kept(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Return the module's own parameters that are not to be filled: they have their values, or get them from files."""
        return [(key, param) for key, param in module._parameters.items() if param is not None and param not in self._meta]

    def fill(self, builder: Builder, buckets: Sequence[Bucket], store: StateStore, broadcast: bool) -> None:
        """Make the weights. Collective. Raises RuntimeError on every rank if the function fails on one."""
        if self._in_memory and builder.comm.rank == 0:
            logger.warning(
                "shard: not on the meta device, so kept as it is and not filled: %s. If nothing has set it (a constructor that "
                'calls torch.FloatTensor(...) leaves memory unset even under torch.device("meta")), expected '
                'model.to("meta") before the optimizer is made',
                ", ".join(self._in_memory),
            )
        place_of: dict[torch.Tensor, tuple[Bucket, Managed]] = {m.param: (b, m) for b in buckets for m in b.params}
        for name, module in self._modules:
            fresh: list[tuple[dict[str, Any], str, torch.Tensor]] = []
            kept: list[tuple[dict[str, Any], str, torch.Tensor]] = [(module._parameters, *own) for own in self._kept(module)]
            for table, key, tensor in self._own(module):
                if tensor.is_meta:
                    fresh.append((table, key, tensor))
                    become(tensor, blank_like(tensor, builder.device))
                else:  # another module has filled it; this one draws its random numbers, too, but for nothing
                    kept.append((table, key, tensor))
            for table, key, tensor in kept:
                blank = blank_like(tensor, builder.device)
                table[key] = nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank
            doing = f"filling {_described(name, module)}"
            with together(builder.comm, doing):
                try:
                    with torch.no_grad():
                        self._init(module)
                    self._check(name, fresh, has_values=builder.comm.rank == 0 or not broadcast)
                finally:
                    for table, key, tensor in kept:
                        table[key] = tensor
            for table, key, tensor in fresh:
                if tensor not in place_of:
                    builder.place_rest([table[key]], broadcast)
                    continue
                values = tensor.data.contiguous()
                if broadcast:
                    builder.comm.broadcast(values)
                with together(builder.comm, doing):
                    set_weights(store, *place_of[tensor], part_of(values))
                    builder.place(*place_of[tensor])

    def _check(self, name: str, fresh: Sequence[tuple[dict[str, Any], str, torch.Tensor]], has_values: bool) -> None:
        """Raise ValueError unless the function filled the module's parameters in place; buffers may be new ones."""
        for table, key, tensor in fresh:
            found, what = table.get(key), f"{name}.{key}".lstrip(".")
            if not isinstance(found, torch.Tensor) or (found is not tensor and isinstance(tensor, nn.Parameter)):
                raise ValueError(f"{what} was replaced; expected it to be filled in place")
            shape, dtype = self._meta[tensor]
            if (found.shape, found.dtype) != (shape, dtype) or found.is_meta:
                raise ValueError(
                    f"{what} became {tuple(found.shape)} {found.dtype} on {found.device}; expected {tuple(shape)} {dtype} in "
                    "memory, as it was built"
                )
            if has_values and is_blank(found):
                said = "NaN" if found.is_floating_point() else "unset values"
                raise ValueError(
                    f"{what} has {said} (all memory has before it is filled); expected every element to be filled, or the "
                    "tensor in memory before shard()"
                )


class FromFiles:
    """Fills parameters and buffers with what files have under their names; every rank reads what it keeps."""

    def __init__(self, model: nn.Module, files: TensorFiles | ConvertedFiles, init: Fill | None) -> None:
        """Match names; `init` fills the modules whose tensors the files lack, a transformers model what no file has.

        Raises ValueError or TypeError for missing and unexpected names, and for other shapes or dtypes. What the files of a
        transformers model have beside it is dropped, with a warning from `fill`.
        """
        self._files = files
        self._dropped = files.dropped if isinstance(files, ConvertedFiles) else []
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        names: dict[torch.Tensor, list[str]] = {}
        for name, tensor in named:
            names.setdefault(tensor, []).append(name)
        known = {name for name, _ in named}
        unexpected = [name for name in files.stored if name not in known]
        if unexpected:
            raise ValueError(
                f"shard: {files.stored[unexpected[0]].path} has {_listed(unexpected)}, which is no parameter or buffer of the "
                "model; expected the model's own names: write the file without the others, or rename them in it"
            )
        self._key: dict[torch.Tensor, str] = {}
        missing: dict[torch.Tensor, str] = {}
        for tensor, of_tensor in names.items():  # of tied weights, one name is enough
            stored = [name for name in of_tensor if name in files.stored]
            for name in stored:
                self._check(name, tensor)
            if stored:
                self._key[tensor] = stored[0]
            elif tensor.is_meta:
                missing[tensor] = of_tensor[0]
        own = OwnInit(model)
        lacking = [name for name in missing.values() if init is None and not own.computes(name)]
        if lacking:
            where = _listed(list(dict.fromkeys(str(stored.path) for stored in files.stored.values())) or ["an empty file"])
            beside = f" (where {_listed(self._dropped)} is not of the model)" if self._dropped else ""
            raise ValueError(
                f"shard: {_listed(lacking)} is on the meta device and not in {where}{beside}; expected its values "
                "there, the tensor in memory before shard(), or materialize=[path, fill] with a callable that fills its module"
            )
        self._rest = FromInit(model, missing, init) if missing else None
        self.entries = [f"in files: {name} {s.shape} {s.dtype} in {s.path.name}" for name, s in files.stored.items()]
        self.entries += [f"on the meta device: {name}" for name, tensor in _named(model) if tensor.is_meta]

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        stored = self._files.stored[name]
        if stored.shape != tuple(tensor.shape):
            raise ValueError(
                f"shard: {name} has shape {stored.shape} in {stored.path}; expected {tuple(tensor.shape)}, the model's"
            )
        if stored.torch_dtype != tensor.dtype and not (stored.torch_dtype in _FLOATS and tensor.dtype in _FLOATS):
            raise TypeError(
                f"shard: {name} has dtype {stored.dtype} in {stored.path}; expected one that {tensor.dtype} can be made from"
            )

    def fill(self, builder: Builder, buckets: Sequence[Bucket], store: StateStore, broadcast: bool) -> None:
        """Make the weights. Collective. Raises RuntimeError on every rank if one cannot read."""
        if self._dropped and builder.comm.rank == 0:
            logger.warning(
                "shard: the files have %s, which the model does not; dropped, as from_pretrained does", ", ".join(self._dropped)
            )
        with together(builder.comm, "reading files"):
            self._read(builder, buckets, store)
        if self._rest is not None:
            self._rest.fill(builder, buckets, store, broadcast)

    @torch.no_grad()
    def _read(self, builder: Builder, buckets: Sequence[Bucket], store: StateStore) -> None:
        left = dict(self._key)
        for bucket in buckets:
            for managed in bucket.params:
                key = left.pop(managed.param, None)
                if key is not None:
                    if managed.param.is_meta:
                        builder.place(bucket, managed)
                    set_weights(store, bucket, managed, self._reader(key))
        for tensor, key in left.items():
            if tensor.is_meta:
                dtype = builder.dtype_of(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype
                become(tensor, torch.empty(tensor.shape, dtype=dtype, device=builder.device))
            assign(tensor.data.view(-1), self._reader(key)(0, tensor.numel()))

    def _reader(self, key: str) -> Callable[[int, int], torch.Tensor]:
        return lambda start, numel: self._files.read(key, start, numel)


def _described(name: str, module: nn.Module) -> str:
    return f"{name or 'the root'} ({type(module).__name__})"


def _listed(names: Sequence[str]) -> str:
    more = f" (and {len(names) - 1} more: {', '.join(names[1:4])}{', ...' if len(names) > 4 else ''})" if len(names) > 1 else ""
    return names[0] + more
