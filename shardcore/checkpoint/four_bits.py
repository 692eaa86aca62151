"""from_pretrained with bitsandbytes' 4-bit quantization under ZeRO 3: weights become pieces while
they are read.

bitsandbytes' scales have one mean over the weight, so a weight is quantized whole, on one rank,
which sends each rank its pieces of the packed bytes and of the scales. As many weights are
quantized at a time as there are ranks. Of files that are quantized already each rank reads its
ranges. Transformers constructs quantized models on the meta device, so all other parameters get
their pieces here, too.

Tested with transformers 5.24 and bitsandbytes 0.50.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from shardcore.checkpoint.file_tensors import FileTensor, Stored, whole
from shardcore.distributed.comm import Comm
from shardcore.distributed.machine import FreedMemory
from shardcore.engine.agreement import together
from shardcore.engine.pieces import begin, fill_piece, pieces_of, scatter_piece
from shardcore.engine.quantized import (
    SCALES,
    empty_like,
    is_complete,
    is_statistic,
    statistics_of,
)

_TEMPORARIES = 8  # what bitsandbytes allocates on the CPU for each byte of a 16-bit weight


def is_4_bit(quantizer: Any) -> bool:
    """Whether from_pretrained loads by this quantizer in bitsandbytes' 4 bits, under ZeRO 3.

    Raises ValueError for its 8 bits, which stage 3 does not shard: before the weights are read.
    """
    zero3: Any = sys.modules["transformers.integrations.deepspeed"]
    if zero3.is_deepspeed_zero3_enabled() is not True:
        return False
    config = quantizer.quantization_config
    if getattr(config, "load_in_8bit", False) is True:
        raise ValueError(
            "from_pretrained: shardcore does not shard bitsandbytes' 8-bit weights at stage 3. Use "
            "load_in_4bit=True, or stage 0, 1 or 2"
        )
    return getattr(config, "load_in_4bit", False) is True


def without_statistics(
    files: Mapping[str, FileTensor],
) -> tuple[dict[str, FileTensor], dict[Stored, dict[str, FileTensor]]]:
    """Return files without the tensors beside 4-bit weights; and these by their weight, by the
    ends of their names.
    """
    weights, statistics = dict(files), dict[Stored, dict[str, FileTensor]]()
    for name, tensor in files.items():
        weight, _, end = name.partition(".weight.")
        if is_statistic(end) and f"{weight}.weight" in files:
            statistics.setdefault(files[f"{weight}.weight"], {})[end] = tensor
            del weights[name]
    return weights, statistics


def without_quantizer(mapping: Iterable[Any]) -> list[Any]:
    """Return conversions of transformers without those of its quantizer."""
    return [
        each
        for each in mapping
        if not any(hasattr(op, "hf_quantizer") for op in getattr(each, "operations", ()))
    ]


def put_piece(comm: Comm, model: nn.Module, name: str, old: torch.Tensor) -> torch.Tensor:
    """Put an unfilled parameter in pieces, or an unfilled buffer, in place of one on the meta
    device, and return it.
    """
    if isinstance(old, nn.Parameter):
        data = torch.empty(0, dtype=old.dtype, device=comm.device)
        new: torch.Tensor = nn.Parameter(data, requires_grad=old.is_floating_point())
        begin(comm, new, old.shape)  # type: ignore[arg-type]
    else:
        new = torch.empty_like(old, device=comm.device)
    _set(model, name, new)
    return new


def _set(model: nn.Module, name: str, tensor: torch.Tensor) -> nn.Module:
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, key, tensor)
    return module


class FourBits:
    """The 4-bit weights of one from_pretrained."""

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        quantizer: Any,
        statistics: Mapping[Stored, Mapping[str, FileTensor]],
        op: tuple[str, str],
    ) -> None:
        """statistics: see `without_statistics`. op: what errors say, see `together`."""
        self._comm, self._model, self._quantizer = comm, model, quantizer
        self._statistics, self._op = statistics, op
        self._freed = FreedMemory()

    def has(self, name: str) -> bool:
        """Whether the model has a parameter of this name in 4 bits."""
        return bool(self._quantizer.param_needs_quantization(self._model, name))

    def fits(self, old: torch.Tensor, stored: Stored) -> bool:
        """Whether files have as many elements as the unquantized weight `old`."""
        if not self._quantizer.pre_quantized:
            return prod(stored.shape) == old.numel()
        return prod(stored.shape) == (old.numel() + 1) // (2 * stored.dtype.itemsize)

    @torch.no_grad()
    def load(
        self,
        found: Mapping[str, tuple[Any, Stored]],
        dtype_of: Callable[[str], torch.dtype | None],
    ) -> None:
        """Fill the weights in `found`, by name, of the parameters on the meta device, with files.
        Collective.

        dtype_of: that of a weight, by name, before it is quantized; None: as in files.
        """
        if self._quantizer.pre_quantized:
            with together(self._comm, *self._op):
                for name, (old, stored) in found.items():
                    self._read(name, old, stored)
            return
        waiting = list(found.items())
        while waiting:
            size = self._comm.world_size
            round_, waiting = waiting[:size], waiting[size:]
            made: Any = None  # frees the one of the last round
            with together(self._comm, *self._op):
                if self._comm.rank < len(round_):
                    name, (_, stored) = round_[self._comm.rank]
                    made = self._quantized(name, whole(stored).to(dtype=dtype_of(name)))
            for source, text in enumerate(self._comm.gather_json(_as_json(made))[: len(round_)]):
                name, (old, _) = round_[source]
                self._scatter(name, old, text, made, source)

    def _read(self, name: str, old: Any, stored: Stored) -> None:
        """Read this rank's ranges of a weight that is quantized in files."""
        files = self._statistics.get(stored, {})
        if not is_complete(files):
            raise ValueError(
                f"{self._op[0]}: {getattr(stored, 'path', '')} lacks scales or tables of {name}; "
                "expected a file of a model that bitsandbytes quantized to 4 bits"
            )
        tables = {
            end: torch.empty(0, dtype=tensor.dtype) if end in SCALES else whole(tensor)
            for end, tensor in files.items()
        }
        weight = empty_like(old, stored.dtype, tables, self._comm.device)
        scales = (files[end] for end in SCALES if end in files)
        for part, source in zip(pieces_of(weight), (stored, *scales), strict=True):
            begin(self._comm, part, source.shape)
            fill_piece(self._comm, part, source.read)
            self._freed.add(part.ds_tensor.nbytes)  # type: ignore[attr-defined]
        self._put(name, weight)

    def _quantized(self, name: str, values: torch.Tensor) -> Any:
        operation = self._quantizer.get_quantize_ops()
        values = values.to(self._comm.device)
        converted = operation.convert({name: values}, full_layer_name=name, model=self._model)
        self._freed.add(_TEMPORARIES * values.nbytes)
        return converted[name]

    def _scatter(self, name: str, old: Any, text: Any, made: Any, source: int) -> None:
        """Make pieces of the weight that rank `source` has made."""
        comm = self._comm
        tables = {
            end: torch.tensor(values, dtype=getattr(torch, dtype))
            for end, (dtype, values) in text["tables"].items()
        }
        weight = empty_like(old, getattr(torch, text["dtype"]), tables, comm.device)
        full = pieces_of(made) if comm.rank == source else []
        for index, part in enumerate(pieces_of(weight)):
            begin(comm, part, text["shapes"][index])
            flat = full[index].data.reshape(-1) if full else None
            scatter_piece(comm, part, flat, source)
        self._put(name, weight)

    def _put(self, name: str, weight: Any) -> None:
        weight._is_hf_initialized = True
        module: Any = _set(self._model, name, weight)
        module._is_hf_initialized = True


def _as_json(made: Any) -> Any:
    """Return what other ranks must know of a quantized weight besides its bytes and scales."""
    if made is None:
        return None
    tables = {
        end: (_name_of(tensor.dtype), [] if end in SCALES else tensor.tolist())
        for end, tensor in statistics_of(made).items()
    }
    shapes = [list(part.shape) for part in pieces_of(made)]
    return {"tables": tables, "dtype": _name_of(made.dtype), "shapes": shapes}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
