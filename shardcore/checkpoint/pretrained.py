"""Files of pretrained models of transformers, under the names and in the forms that a model has;
and from_pretrained, which reads them straight into the pieces of zero.Init.

Tensors that transformers only renames are read by ranges, each rank its own: a file is read once in
all. Tensors that transformers converts (Mixtral's experts) are made in full, one group at a time.

A model of transformers implies that it is imported, so it is never imported here. Its private
names are used in this file and in materialize.py (OwnInit); tested with transformers 5.24. Versions
before 5 convert no weights: names are those of the files.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import nn

from shardcore.checkpoint.file_tensors import Box, FileTensor, Fp8Blocks, Stored, slices_of, whole
from shardcore.checkpoint.four_bits import (
    FourBits,
    is_4_bit,
    put_piece,
    without_quantizer,
    without_statistics,
)
from shardcore.checkpoint.safetensors import INDEX, SINGLE, open_files
from shardcore.distributed.comm import Comm
from shardcore.distributed.machine import FreedMemory
from shardcore.engine.agreement import agree, together
from shardcore.engine.pieces import fill_piece, is_partitioned, partitioned_params, scatter_piece
from shardcore.torch_private import unseen

logger = logging.getLogger("shardcore")


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    return isinstance(
        module, getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    )


InFile: TypeAlias = FileTensor | Fp8Blocks


def _dequantized(model: nn.Module, files: Mapping[str, FileTensor]) -> Mapping[str, InFile]:
    """Return files with float8 matrices as float32 ones, unless the model has their factors."""
    end = "_scale_inv"
    named = [*model.named_parameters(), *model.named_buffers()]
    if any(name.endswith(end) for name, _ in named):
        return files
    tensors: dict[str, InFile] = {**files}
    for name, codes in files.items():
        if codes.dtype == torch.float8_e4m3fn and name + end in files:
            tensors[name] = Fp8Blocks(name, codes, files[name + end])
            del tensors[name + end]
    return tensors


def tensors_for(
    model: nn.Module, in_files: Mapping[str, FileTensor]
) -> "tuple[Mapping[str, InFile | Converted], Sequence[str]]":
    """Return the tensors in files under the names of `model`; and names that it does not have,
    which from_pretrained drops with a report (the old head under a new one).
    """
    files = _dequantized(model, in_files)
    if not is_pretrained(model):
        return files, ()
    try:
        loading, mapping = (
            import_module(f"transformers.{name}")
            for name in ("core_model_loading", "conversion_mapping")
        )
    except ModuleNotFoundError:
        return files, ()
    conversion = Conversion(model, files, loading, mapping.get_model_conversion_mapping(model))
    return conversion.tensors, conversion.dropped


class Conversion:
    """Tensors in files under a transformers model's names. dropped: see `tensors_for`.

    Tensors that are only renamed are read by ranges. Those that transformers makes of several, or
    in another form, are made in full when they are read, and stay until the next such read.
    """

    def __init__(
        self,
        model: Any,
        files: Mapping[str, InFile],
        loading: Any,
        transforms: list[Any],
    ) -> None:
        """Convert names as transformers does. Reads no values: shapes come from a conversion of
        meta tensors.
        """
        self._model, self._files = model, files
        self._parts: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
        self._converted: tuple[str, dict[str, torch.Tensor]] | None = None
        key_of: dict[str, str] = {}
        renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
        converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
        state_dict = model.state_dict()
        rename = partial(
            loading.rename_source_key,
            base_model_prefix=model.base_model_prefix,
            meta_state_dict=state_dict,
        )
        for key in sorted(files, key=loading.dot_natural_key):
            name, pattern = rename(key, renamings, converters)
            if name not in state_dict and key in state_dict:
                name, pattern = rename(key, [], [])
            if pattern is None or name not in state_dict:
                key_of.setdefault(name, key)
            else:
                _, parts = self._parts.setdefault(name, (converter_of[pattern], []))
                parts.append((key, pattern))
        unexpected = SimpleNamespace(
            missing_keys=set(), unexpected_keys=key_of.keys() - state_dict.keys()
        )
        # removes what from_pretrained ignores
        model._adjust_missing_and_unexpected_keys(unexpected)
        self.dropped = [name for name in key_of if name in unexpected.unexpected_keys]
        self.tensors: dict[str, InFile | Converted] = {
            name: files[key] for name, key in key_of.items() if name in state_dict
        }
        for first, (_, parts) in self._parts.items():
            for name, empty in self._convert(first, _empty).items():
                self.tensors[name] = Converted(self, first, name, empty.shape, files[parts[0][0]])

    def full(self, first: str) -> dict[str, torch.Tensor]:
        """Return the tensors that are made with `first`, by name, flattened."""
        if self._converted is None or self._converted[0] != first:
            self._converted = None  # freed before the next ones are made
            converted = self._convert(first, whole)
            self._converted = first, {each: full.reshape(-1) for each, full in converted.items()}
        return self._converted[1]

    def forget(self) -> None:
        """Free the tensors that were made last."""
        self._converted = None

    def _convert(
        self, first: str, values: Callable[[InFile], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return what transformers makes of the tensors that become `first`, and perhaps others,
        by name.
        """
        converter, parts = self._parts[first]
        converter = deepcopy(converter)
        for key, pattern in parts:
            converter.add_tensor(first, key, pattern, partial(values, self._files[key]))
        try:
            converted = converter.convert(first, model=self._model, config=self._model.config)
        except Exception as error:
            keys = ", ".join(key for key, _ in parts[:3])
            raise ValueError(
                f"shard: transformers cannot make {first} of {keys} in "
                f"{self._files[parts[0][0]].path} ({type(error).__name__}: {error}); expected "
                "files of this model"
            ) from error
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }


class Converted(Stored):
    """A tensor that transformers makes of others in files."""

    def __init__(
        self,
        conversion: Conversion,
        first: str,
        name: str,
        shape: torch.Size,
        source: InFile,
    ) -> None:
        """first: with which tensor it is made. source: the first of those that it is made of."""
        self._conversion, self.first, self._name = conversion, first, name
        self.shape, self.grid = tuple(shape), (shape.numel(),)
        self.path, self.dtype = source.path, source.dtype

    def part(self, box: Box) -> torch.Tensor:
        """See Stored."""
        return self._conversion.full(self.first)[self._name][slices_of(box)]


def _empty(tensor: InFile) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


# --- from_pretrained under zero.Init --------------------------------------------------------------

_THEN = "the model is partly loaded: build it anew"


def read_into_pieces(building: Callable[[], AbstractContextManager[Any]]) -> None:
    """Let from_pretrained of transformers, if it is imported, read .safetensors files into the
    pieces of zero.Init in this process from now on.

    Without pieces, and from other files or a state dict, transformers loads as before. A model that
    bitsandbytes quantizes to 4 bits under ZeRO 3 gets its pieces as it is read. building: the
    context of zero.Init, in which `_init_weights` then makes what no file has: it may read weights
    that are loaded.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    kind: Any = getattr(modeling, "PreTrainedModel", None)
    load = getattr(kind, "_load_pretrained_model", None)
    if load is None or hasattr(load, "reads_into_pieces"):
        return

    @wraps(load)
    def load_pieces(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kw: Any
    ) -> Any:
        paths = checkpoint_files or ()
        reads_files = state_dict is None and all(str(p).endswith(".safetensors") for p in paths)
        if load_config.is_quantized:
            takes_pieces = is_4_bit(load_config.hf_quantizer)
        else:
            takes_pieces = bool(partitioned_params(model))
        if not paths or not reads_files or not takes_pieces:
            return load(model, state_dict, checkpoint_files, load_config, *args, **kw)
        building()  # starts torch.distributed; of a quantized model no context has
        return _Loading(model, paths, load_config).run(), None

    initialize: Any = kind._initialize_missing_keys

    @wraps(initialize)
    def initialize_pieces(model: Any, *args: Any, **kwargs: Any) -> Any:
        with building() if partitioned_params(model) else nullcontext():
            return initialize(model, *args, **kwargs)

    save = kind.save_pretrained

    @wraps(save)
    def save_whole(model: Any, *args: Any, **kwargs: Any) -> Any:
        if partitioned_params(model):
            raise RuntimeError(
                "save_pretrained: the weights are partitioned by zero.Init, and each rank has its "
                "part alone. Save after initialize() or shard(), or inside "
                "deepspeed.zero.GatheredParameters"
            )
        return save(model, *args, **kwargs)

    kind.save_pretrained = save_whole
    kind._initialize_missing_keys = initialize_pieces
    load_pieces.reads_into_pieces = True  # type: ignore[attr-defined]
    kind._load_pretrained_model = staticmethod(load_pieces)


def load_into_pieces(op: str, model: nn.Module, folder: str) -> bool:
    """Read the .safetensors files of a folder into a partitioned model of transformers; False, with
    nothing read, for other models and folders. Collective.

    Raises ValueError, on every rank, for tensors of other shapes. A warning names a missing one.
    """
    has_files = any((Path(folder) / name).exists() for name in (INDEX, SINGLE))
    if not is_pretrained(model) or not partitioned_params(model) or not has_files:
        return False
    mapping = import_module("transformers.conversion_mapping")
    load_config = SimpleNamespace(
        is_quantized=False,
        weight_mapping=mapping.get_model_conversion_mapping(model),
        dtype_plan=None,
    )
    info = _Loading(model, [folder], load_config, op).run()
    tensors = model.state_dict(keep_vars=True)
    there = {tensor for name, tensor in tensors.items() if name not in info.missing_keys}
    missing = [name for name in info.missing_keys if tensors[name] not in there]  # but tied ones
    if info.mismatched_keys:
        name, in_file, own = min(info.mismatched_keys)
        raise ValueError(
            f"{op}: {name} has the shape {tuple(in_file)} in {folder}; expected {tuple(own)}, as "
            "in the model"
        )
    if missing:  # as with Trainer, they stay as they are
        logger.warning(
            "%s: %s lacks %d tensors of the model, first %s", op, folder, len(missing), min(missing)
        )
    return True


class _Loading:
    """One from_pretrained, or load of a folder: every rank reads its pieces of the parameters, and
    all of the buffers.

    A group of tensors that transformers converts together is read and converted on one rank, which
    sends each rank its piece.
    """

    def __init__(
        self, model: Any, paths: Sequence[str], load_config: Any, op: str = "from_pretrained"
    ) -> None:
        """See `read_into_pieces`: the arguments of transformers. op: the call, for errors."""
        self._model, self._paths, self._config = model, paths, load_config
        self._comm, self._op = Comm(), op

    @unseen
    @torch.no_grad()
    def run(self) -> Any:
        """Load, and return what transformers reports. Collective; raises on every rank if a file
        cannot be read on one.
        """
        comm, model = self._comm, self._model
        loading = import_module("transformers.core_model_loading")
        mapping = without_quantizer(self._config.weight_mapping or ())
        four_bits: FourBits | None = None
        with together(comm, self._op, _THEN):
            files = in_files = open_files(self._paths, self._op)
            if self._config.is_quantized:
                in_files, statistics = without_statistics(files)
                quantizer = self._config.hf_quantizer
                four_bits = FourBits(comm, model, quantizer, statistics, (self._op, _THEN))
            conversion = Conversion(model, in_files, loading, mapping)
        agree(
            comm,
            self._op,
            entries=[("tensor in files", n, str(t.shape), str(t.dtype)) for n, t in files.items()],
        )
        targets: dict[str, Any] = model.state_dict(keep_vars=True)
        missing, mismatched = set(), set()
        found: dict[str, tuple[Any, Stored]] = {}
        to_4_bits: dict[str, tuple[Any, Stored]] = {}
        for name, target in targets.items():
            stored = conversion.tensors.get(name)
            if stored is None:
                missing.add(name)
                continue
            shape = target.ds_shape if is_partitioned(target) else target.shape
            if four_bits is not None and four_bits.has(name):
                chosen, fits = to_4_bits, four_bits.fits(target, stored)
            else:
                chosen, fits = found, stored.shape == tuple(shape)
            if fits:
                chosen[name] = target, stored
            else:
                mismatched.add((name, torch.Size(stored.shape), torch.Size(shape)))
        freed = FreedMemory()
        with together(comm, self._op, _THEN):
            for name, (target, tensor) in found.items():
                if target.is_meta:
                    target = put_piece(comm, model, name, target)
                    found[name] = target, tensor
                self._set_dtype(loading, name, target)
                if not is_partitioned(target):
                    target.copy_(whole(tensor))
                elif not isinstance(tensor, Converted):
                    fill_piece(comm, target, tensor.read)
                freed.add(target.ds_tensor.nbytes if is_partitioned(target) else target.nbytes)
                target._is_hf_initialized = True  # else transformers initializes it
        if four_bits is not None:
            four_bits.load(
                to_4_bits, lambda name: self._kept_in(loading, name) or self._config.dtype
            )
        self._convert(conversion, found)
        self._keep_untied(found)
        model._weight_conversions = [each for each in mapping if each.was_used()]
        return sys.modules["transformers.modeling_utils"].LoadStateDictInfo(
            missing_keys=missing,
            unexpected_keys=set(conversion.dropped),
            mismatched_keys=mismatched,
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )

    def _set_dtype(self, loading: Any, name: str, target: torch.Tensor) -> None:
        """Give a parameter the dtype that from_pretrained keeps some modules in."""
        dtype = self._kept_in(loading, name)
        if dtype is not None and is_partitioned(target):
            target.data = target.data.to(dtype)

    def _kept_in(self, loading: Any, name: str) -> torch.dtype | None:
        plan = self._config.dtype_plan or {}
        match = None
        if plan:
            pattern, of_group, _ = loading.build_glob_alternation(list(plan))
            match = pattern.search(name)
        return None if match is None else plan[of_group[match.lastgroup]]

    def _convert(self, conversion: "Conversion", found: Mapping[str, tuple[Any, Stored]]) -> None:
        """Fill what is converted: as many groups at a time as there are ranks, one on each."""
        comm = self._comm
        groups: dict[str, list[tuple[str, Any]]] = {}
        for name, (target, stored) in found.items():
            if isinstance(stored, Converted) and is_partitioned(target):
                groups.setdefault(stored.first, []).append((name, target))
        waiting = list(groups.items())
        while waiting:
            round_, waiting = waiting[: comm.world_size], waiting[comm.world_size :]
            full: Mapping[str, torch.Tensor] = {}
            with together(comm, self._op, _THEN):
                if comm.rank < len(round_):
                    full = conversion.full(round_[comm.rank][0])
            for source, (_, members) in enumerate(round_):
                for name, target in members:
                    scatter_piece(comm, target, full.get(name), source)
        conversion.forget()

    def _keep_untied(self, found: Mapping[str, tuple[Any, Stored]]) -> None:
        """Leave weights untied that the files have with different values, as from_pretrained does
        (it compares the empty data of partitioned ones).
        """
        pairs = [
            (target, source)
            for target, source in self._model.all_tied_weights_keys.items()
            if target in found and source in found
        ]
        if not pairs:
            return
        differ = torch.tensor(
            [not torch.equal(_values(found[a][0]), _values(found[b][0])) for a, b in pairs],
            dtype=torch.uint8,
            device="cpu",
        )
        of_ranks = self._comm.all_gather_cpu(differ)
        for (target, source), is_different in zip(pairs, of_ranks.any(0).tolist(), strict=True):
            if is_different:
                self._model.all_tied_weights_keys.pop(target)
                if self._comm.rank == 0:
                    logger.warning(
                        "%s: the files have other values of %s than of %s, so these are not tied. "
                        "Set tie_word_embeddings=False in the configuration",
                        self._op,
                        target,
                        source,
                    )


def _values(tensor: Any) -> torch.Tensor:
    values: torch.Tensor = tensor.ds_tensor if is_partitioned(tensor) else tensor.detach()
    return values
