"""Tensors in .safetensors files: found by name, checked before use, read by ranges. Never
pickle.
"""

import json
import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TypeAlias

import torch

from shardcore.checkpoint.file_tensors import FileTensor, Window, open_regular, row_major

PathLike: TypeAlias = str | os.PathLike[str]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

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


def open_file(op: str, path: Path) -> tuple[dict[str, FileTensor], Mapping[str, str]]:
    """Return the tensors of a file by name, and its metadata.

    Raises OSError, or ValueError for a file that is torn, and for dtypes other than DTYPES.
    """
    window = Window.of(path)
    tensors: dict[str, FileTensor] = {}
    unknown: list[str] = []
    try:
        head_size = int.from_bytes(window.read(0, 8), "little")
        header = json.loads(bytes(window.read(8, head_size)))
        data = window.part(8 + head_size, window.size - 8 - head_size)
        metadata: Mapping[str, str] = header.pop("__metadata__", {})
        for name, entry in header.items():
            shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
            if entry["dtype"] not in DTYPES:
                unknown.append(f"{name} as {entry['dtype']}")
                continue
            dtype = DTYPES[entry["dtype"]]
            if prod(shape) * dtype.itemsize != end - begin:
                raise ValueError(
                    f"{name} takes {end - begin} bytes; expected {prod(shape) * dtype.itemsize}"
                )
            part = data.part(begin, end - begin)
            tensors[name] = FileTensor(part, dtype, 0, shape, row_major(shape))
    except OSError:
        raise
    except Exception as error:  # of whatever kind damaged bytes cause
        reason = repr(error)
        if isinstance(error, ValueError):  # of Window, mostly
            reason = str(error).removeprefix("load: ").removesuffix(": copy it again")
        raise ValueError(
            f"{op}: {path} is torn or not a safetensors file ({reason}). Copy it again"
        ) from error
    if unknown:
        raise ValueError(
            f"{op}: {path} contains {', '.join(unknown[:3])}; expected tensors of "
            f"{', '.join(DTYPES)}"
        )
    return tensors, metadata


def indexed(op: str, index: Path) -> list[Path]:
    """Return the files that an index names, which are beside it. Raises OSError or ValueError."""
    try:
        with open_regular(index) as file:
            names = set(json.loads(file.read())["weight_map"].values())
        if not all(map(is_file_name, names)):
            raise ValueError("it names files elsewhere")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f'{op}: {index} is torn or not an index ({error!r}); expected JSON with a "weight_map"'
        ) from error
    return sorted(index.parent / name for name in names)


def is_file_name(name: object) -> bool:
    """Whether it names a file in a folder, and leads nowhere else."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "/" not in name
        and "\\" not in name
        and "\0" not in name
    )


def open_files(paths: PathLike | Sequence[PathLike], op: str = "shard") -> dict[str, FileTensor]:
    """Return the tensors by name of a .safetensors file, of several, or of a folder in Hugging
    Face's layout (its index, or model.safetensors). Reads no values.

    Raises FileNotFoundError, TypeError or ValueError, the latter also for files that are torn or
    hold a name twice.
    """
    items = [paths] if isinstance(paths, str | os.PathLike) else paths
    tensors: dict[str, FileTensor] = {}
    for path in dict.fromkeys(path for item in items for path in _files_of(Path(item))):
        if not path.exists():
            raise FileNotFoundError(
                f"{op}: the file {path} does not exist. The copy may be incomplete"
            )
        for name, tensor in open_file(op, path)[0].items():
            if name in tensors:
                raise ValueError(
                    f"{op}: {name} is in {tensors[name].path} and in {path}; expected it in one "
                    f"file"
                )
            tensors[name] = tensor
    return tensors


def _files_of(path: Path) -> list[Path]:
    """Return the files of `path`, a file or a folder."""
    if not path.is_dir():
        if path.suffix != ".safetensors":
            raise ValueError(
                f"shard: materialize is {path}; expected a .safetensors file or a folder (pickle "
                "is never read)"
            )
        return [path]
    if (path / INDEX).exists():
        return indexed("shard", path / INDEX)
    if not (path / SINGLE).exists():
        raise FileNotFoundError(
            f"shard: materialize is the folder {path}; expected {INDEX} or {SINGLE} in it"
        )
    return [path / SINGLE]
