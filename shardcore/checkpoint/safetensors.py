"""Tensors in .safetensors files: found by name, checked before use, read by ranges. Never pickle.

The safetensors package, which reads headers and bytes, is optional and imported here only.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeAlias

import torch

PathLike: TypeAlias = str | os.PathLike[str]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"

# The format's names of the dtypes that a model may have.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its entry in the file's header, and the handle that reads it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    handle: Any

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype in torch; None if torch has none."""
        return DTYPES.get(self.dtype)


class TensorFiles:
    """Open files, and the tensors in them by name: `stored`. Their bytes are mapped, not loaded."""

    def __init__(self, given: PathLike | Sequence[PathLike]) -> None:
        """Open a .safetensors file, several, or a folder in Hugging Face's layout (its index, or model.safetensors).

        Raises FileNotFoundError, TypeError or ValueError, the latter also for files that are torn or hold a name twice, and
        ModuleNotFoundError without the safetensors package.
        """
        items = [given] if isinstance(given, str | os.PathLike) else given
        paths = [path for item in items for path in _files_of(Path(item))]
        package = _package()
        stored: dict[str, Stored] = {}
        for path in dict.fromkeys(paths):
            for name, tensor in _open(package, path).items():
                if name in stored:
                    raise ValueError(f"shard: {name} is in {stored[name].path} and in {path}; expected it in one file")
                stored[name] = tensor
        self.stored: Mapping[str, Stored] = MappingProxyType(stored)

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Return elements [start, start + numel) of the flattened tensor, in the file's dtype. Raises OSError."""
        tensor = self.stored[name]
        if numel == 0:
            return torch.empty(0, dtype=tensor.torch_dtype, device="cpu")
        try:
            if not tensor.shape:
                return tensor.handle.get_tensor(name).view(1)  # type: ignore[no-any-return]
            row = prod(tensor.shape[1:])
            first = start // row
            rows: torch.Tensor = tensor.handle.get_slice(name)[first : -(-(start + numel) // row)]
            return rows.reshape(-1)[start - first * row :][:numel]
        except Exception as error:
            raise OSError(f"shard: {name} cannot be read from {tensor.path}: {error}") from error


def _files_of(path: Path) -> list[Path]:
    """Return the files of `path`, a file or a folder."""
    if not path.is_dir():
        if path.suffix != ".safetensors":
            raise ValueError(f"shard: materialize has {path}; expected a .safetensors file or a folder (pickle is never read)")
        return [path]
    index = path / _INDEX
    if not index.exists():
        if not (path / _SINGLE).exists():
            raise FileNotFoundError(f"shard: materialize has the folder {path}; expected {_INDEX} or {_SINGLE} in it")
        return [path / _SINGLE]
    try:
        return sorted({path / file for file in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'shard: {index} is torn or no index ({error!r}); expected JSON with a "weight_map"') from error


def _package() -> ModuleType:
    try:
        return import_module("safetensors")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "shard: materialize has files, which the safetensors package reads, and it is missing; expected it (pip install "
            "safetensors)",
            name="safetensors",
        ) from error


def _open(package: ModuleType, path: Path) -> dict[str, Stored]:
    if not path.exists():
        raise FileNotFoundError(f"shard: there is no file {path}; expected it (is the copy complete?)")
    try:
        handle = package.safe_open(str(path), framework="pt", device="cpu")
        found = {}
        for name in handle.keys():  # noqa: SIM118 - a handle is no dict
            part = handle.get_slice(name)
            found[name] = Stored(path, tuple(part.get_shape()), str(part.get_dtype()), handle)
        return found
    except Exception as error:
        raise ValueError(
            f"shard: {path} is torn or no safetensors file ({error}); expected a complete one: copy it again"
        ) from error
