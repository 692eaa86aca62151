"""Models of the transformers package: how they fill themselves, and what their files' names and shapes become in them.

transformers is never imported first: who has a model of it has imported it. Its young and private names are used in this file
alone; tested with transformers 5.23. Before version 5 there is no conversion, and names are as in the files.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib import import_module
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardcore.engine.tensor_files import Stored, TensorFiles


def _is_pretrained(module: nn.Module) -> bool:
    return isinstance(module, getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ()))


class OwnInit:
    """Fills a module as building its model did: by `_init_weights` of the transformers model around it, or reset_parameters.

    `_init_weights` takes one module after the other, children first, and may write to those below (GPT-2's scales the
    projections of its blocks). So it is called for the module and for each one around it, while all that is not the module's
    own is on the meta device, where nothing is computed and no random number is drawn.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find, for each module of `model`, the modules around it and the transformers models that they belong to."""
        self._model = model
        self._stand_ins: dict[torch.Tensor, torch.Tensor] = {}
        self._calls: dict[nn.Module, list[tuple[Any, nn.Module]]] = {}
        of_name: dict[str, list[tuple[Any, nn.Module]]] = {}
        for name, module in model.named_modules():
            around = of_name[name.rpartition(".")[0]] if name else []
            owner = module if _is_pretrained(module) else around[0][0] if around else None
            self._calls[module] = of_name[name] = around if owner is None else [(owner, module), *around]

    def covers(self, module: nn.Module) -> bool:
        """Whether something fills this module."""
        return bool(self._calls[module]) or callable(getattr(module, "reset_parameters", None))

    def computes(self, name: str) -> bool:
        """Whether files may lack this parameter or buffer of a transformers model: from_pretrained makes it, too."""
        path, _, key = name.rpartition(".")
        module = self._model.get_submodule(path)
        patterns = [pattern for owner, _ in self._calls[module] for pattern in owner._keys_to_ignore_on_load_missing or ()]
        made = key in module._non_persistent_buffers_set or any(re.search(pattern, name) for pattern in patterns)
        return bool(self._calls[module]) and made

    def __call__(self, module: nn.Module) -> None:
        """Fill the module's own parameters and buffers, in place."""
        reset: Any = getattr(module, "reset_parameters", None)
        if not self._calls[module]:
            reset()
            return
        with self._others_on_meta(module):
            self._init(module)
            if callable(reset) and any(is_blank(tensor) for tensor in _own(module)):
                reset()
                self._init(module)

    def _init(self, module: nn.Module) -> None:
        for owner, around in self._calls[module]:
            owner._init_weights(around)

    @contextmanager
    def _others_on_meta(self, module: nn.Module) -> Iterator[None]:
        own = set(_own(module))
        hidden: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for other in self._model.modules():
            tables: tuple[dict[str, Any], ...] = (other._parameters, other._buffers)
            for table in tables:
                hidden += [(table, *item) for item in table.items() if item[1] is not None and item[1] not in own]
        try:
            for table, key, tensor in hidden:
                if not tensor.is_meta:
                    table[key] = self._stand_in(tensor)
            yield
        finally:
            for table, key, tensor in hidden:
                table[key] = tensor

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in self._stand_ins:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            is_param = isinstance(tensor, nn.Parameter)
            self._stand_ins[tensor] = nn.Parameter(empty, tensor.requires_grad) if is_param else empty
        return self._stand_ins[tensor]


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


_INTEGERS = (torch.int16, torch.int32, torch.int64)


def blank_like(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return memory in which what nobody fills shows: NaN, the least integer, no bool (integers of a byte do not show)."""
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    if like.is_complex() or (like.is_floating_point() and like.itemsize > 1):
        made.fill_(torch.nan)
    elif like.dtype in _INTEGERS:
        made.fill_(torch.iinfo(like.dtype).min)
    elif like.dtype == torch.bool:
        made.view(torch.uint8).fill_(2)
    return made


def is_blank(tensor: torch.Tensor) -> bool:
    """Whether an element is as `blank_like` left it."""
    if tensor.is_meta:
        return False
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1):
        return bool(tensor.isnan().any())
    if tensor.dtype in _INTEGERS:
        return bool((tensor == torch.iinfo(tensor.dtype).min).any())
    return tensor.dtype == torch.bool and bool((tensor.view(torch.uint8) > 1).any())


def files_of(model: nn.Module, files: TensorFiles) -> "TensorFiles | ConvertedFiles":
    """Return the files as `model` names and shapes what is in them."""
    if not _is_pretrained(model):
        return files
    try:
        loading, mapping = (import_module(f"transformers.{name}") for name in ("core_model_loading", "conversion_mapping"))
    except ModuleNotFoundError:
        return files
    return ConvertedFiles(model, files, loading, mapping.get_model_conversion_mapping(model))


class ConvertedFiles:
    """Tensors in files under a transformers model's names, as `TensorFiles` has them: `stored` and `read`.

    dropped: names of what the model does not have, as from_pretrained reports and drops it (the old head under a new one).
    What is only renamed is read by ranges. What transformers makes of several tensors, or of one in another form, is made
    whole when it is read, and kept until the next such tensor is.
    """

    def __init__(self, model: Any, files: TensorFiles, loading: Any, transforms: list[Any]) -> None:
        """Follow transformers' conversion of names. Reads no values: shapes are those of the conversion of meta tensors."""
        self._model, self._files = model, files
        self._key: dict[str, str] = {}
        self._parts: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        self._part_of: dict[str, str] = {}
        self._made: tuple[str, dict[str, torch.Tensor]] | None = None
        self.stored: dict[str, Stored] = {}
        renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
        converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
        own = model.state_dict()
        rename = partial(loading.rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=own)
        for key in sorted(files.stored, key=loading.dot_natural_key):
            name, pattern = rename(key, renamings, converters)
            if name not in own and key in own:
                name, pattern = rename(key, [], [])
            if pattern is None or name not in own:
                self._key.setdefault(name, key)
            else:
                self._parts.setdefault(name, (converter_of[pattern], []))[1].append((key, pattern))
        unexpected = SimpleNamespace(missing_keys=set(), unexpected_keys=self._key.keys() - own.keys())
        model._adjust_missing_and_unexpected_keys(unexpected)  # leaves out what from_pretrained ignores
        self.dropped = [name for name in self._key if name in unexpected.unexpected_keys]
        self.stored.update({name: files.stored[key] for name, key in self._key.items() if name in own})
        for first, (_, parts) in self._parts.items():
            source = files.stored[parts[0][0]]
            for name, made in self._convert(first, self._empty).items():
                self._part_of[name] = first
                self.stored[name] = Stored(source.path, tuple(made.shape), source.dtype, None)

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """See TensorFiles.read."""
        first = self._part_of.get(name)
        if first is None:
            return self._files.read(self._key[name], start, numel)
        if numel == 0:
            return torch.empty(0, dtype=self.stored[name].torch_dtype, device="cpu")
        if self._made is None or self._made[0] != first:
            self._made = None
            self._made = first, {each: made.reshape(-1) for each, made in self._convert(first, self._whole).items()}
        return self._made[1][name][start : start + numel]

    def _empty(self, key: str) -> torch.Tensor:
        stored = self._files.stored[key]
        return torch.empty(stored.shape, dtype=stored.torch_dtype or torch.float32, device="meta")

    def _whole(self, key: str) -> torch.Tensor:
        shape = self._files.stored[key].shape
        return self._files.read(key, 0, prod(shape)).view(shape)

    def _convert(self, first: str, values: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what transformers makes of the tensors that become `first` and perhaps others, by name."""
        converter, parts = self._parts[first]
        converter = deepcopy(converter)
        for key, pattern in parts:
            converter.add_tensor(first, key, pattern, partial(values, key))
        try:
            made = converter.convert(first, model=self._model, config=self._model.config)
        except Exception as error:
            keys = ", ".join(key for key, _ in parts[:3])
            raise ValueError(
                f"shard: transformers cannot make {first} of {keys} in {self._files.stored[parts[0][0]].path} "
                f"({type(error).__name__}: {error}); expected files of this model"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
