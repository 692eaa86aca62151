"""What a rank writes of a checkpoint: ranges of tensors into its data file, and on rank 0 the
manifest of what all wrote.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardcore._native import _C
from shardcore.checkpoint import directory
from shardcore.checkpoint import format as layout
from shardcore.engine.bucket import Bucket
from shardcore.offload.disk import file_engine
from shardcore.version import __version__


def key_of(name: str, part: str, start: int) -> str:
    """Return the name in a data file of a range of a part of a tensor."""
    return f"{name}{'' if part == 'weight' else f'.{part}'}@{start}"


@dataclass(eq=False)
class Item:
    """Elements [start, start + numel) of a part of a tensor. read: returns them, flat, on any
    device.

    stays: they are where they are read from until a step.
    """

    name: str
    part: str
    dtype: torch.dtype
    start: int
    numel: int
    read: Callable[[], torch.Tensor]
    stays: bool = False

    @property
    def key(self) -> str:
        """Its name in the data file."""
        return key_of(self.name, self.part, self.start)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.numel * self.dtype.itemsize


def check_seen(path: Path, rank: int) -> None:
    """Raise FileNotFoundError if a rank does not see the directory that is written to."""
    if not path.is_dir():
        raise FileNotFoundError(
            f"save: rank {rank} does not see {path}, which rank 0 has made; expected a directory "
            f"that all ranks see"
        )


@dataclass(frozen=True)
class Given:
    """Files of committed states (checkpoint/slots.py) that a checkpoint has as they are.

    files: their entries in the manifest. chunks: (bucket, start, end) in the owned range. ranges:
    by key, for `add_range`.
    """

    files: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[tuple[Bucket, int, int]] = field(default_factory=list)
    ranges: dict[str, tuple[str, str, torch.dtype, list[int]]] = field(default_factory=dict)


FIRST_GIVEN = 1  # the number of the first such file among those of a rank


def add_range(
    ranges: dict[str, Any], name: str, part: str, dtype: torch.dtype, where: list[int]
) -> None:
    """Add where a range is: start, numel, number of the file among those of the rank, offset,
    checksum.
    """
    of_part = ranges.setdefault(name, {}).setdefault(
        part, {"dtype": layout.dtype_name(dtype, name), "ranges": []}
    )
    of_part["ranges"].append(where)


def write_ranges(
    path: Path,
    name: str,
    items: Sequence[Item],
    number: int = 0,
    read: threading.Event | None = None,
) -> dict[str, Any]:
    """Write a data file to the directory `path`; returns its entry in the manifest, and the ranges
    by name and part.

    number: of the file among those of this rank. read: set when the items that stay, which come
    first, were read.
    """
    head, offsets = layout.head_of({item.key: (item.dtype, [item.numel]) for item in items})
    size = offsets[-1] + items[-1].nbytes if items else len(head)
    ranges: dict[str, Any] = {}
    writer = _C.FileWriter(file_engine(), str(path / name), size)
    scratch = _Scratch()
    try:
        head_crc = writer.append(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for item, offset in zip(items, offsets, strict=True):
            if read is not None and not item.stays:
                read.set()
            crc = writer.append(scratch.on_host(item.read()))
            add_range(
                ranges,
                item.name,
                item.part,
                item.dtype,
                [item.start, item.numel, number, offset, crc],
            )
        if read is not None:
            read.set()
        writer.finish()
    finally:
        writer.close()
    file = {"name": name, "bytes": size, "head_bytes": len(head), "head_crc32c": head_crc}
    return {"files": [file], "ranges": ranges}


def manifest_of(
    said: Sequence[Any], tensors: dict[str, Any], rest: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest. said: of each rank, what `write_ranges` returned, with its other files.

    tensors: "shape", "dtype" and "step" by name, of sliced ones "rows" and "slices" with their
    "columns"; "parts" is added.
    rest: the other entries of the manifest.
    Raises ValueError if ranks have a tensor in several dtypes, or one that `tensors` lacks.
    """
    ranges: dict[str, Any] = {}
    files: list[Any] = []
    for one in said:
        for name, parts in one["ranges"].items():
            for part, found in parts.items():
                kept = ranges.setdefault(name, {}).setdefault(part, {**found, "ranges": []})
                if kept["dtype"] != found["dtype"]:
                    raise ValueError(
                        f"save: ranks have {name} as {kept['dtype']} and {found['dtype']}; "
                        f"expected one dtype"
                    )
                kept["ranges"] += [
                    [start, numel, len(files) + file, *where]
                    for start, numel, file, *where in found["ranges"]
                ]
        files += one["files"]
    written = set(ranges)
    for name, entry in tensors.items():
        of_slices = {
            layout.slice_name(name, *one["columns"]): one for one in entry.get("slices", ())
        }
        for stored, one in (of_slices or {name: entry}).items():
            written.discard(stored)
            one["parts"] = ranges.get(stored) or {"weight": {"dtype": entry["dtype"], "ranges": []}}
            for part in one["parts"].values():
                part["ranges"].sort()
    if written:
        raise ValueError(
            f"save: a rank has {min(written)}, which the model of rank 0 does not have; expected "
            f"the same names on every rank (wrap, prune and rename layers on all of them)"
        )
    return {
        "format": layout.FORMAT,
        "time": time.time(),
        "version": layout.SLICED
        if any("slices" in entry for entry in tensors.values())
        else layout.VERSION,
        "written_by": {"shardcore": __version__, "torch": torch.__version__},
        "world_size": len(said),
        "files": files,
        "tensors": tensors,
        **rest,
    }


def write_json(path: Path, held: bytes) -> dict[str, Any]:
    """Write a JSON file of `format.json_bytes`; returns its entry in the manifest."""
    directory.write_synced(path, held)
    return {"name": path.name, "bytes": len(held)}


def write_manifest(
    path: Path, said: Sequence[Any], tensors: dict[str, Any], rest: Mapping[str, Any]
) -> None:
    """Write the manifest to the directory `path`. See manifest_of. Raises OSError, too."""
    directory.write_synced(
        path / layout.MANIFEST, layout.json_bytes(manifest_of(said, tensors, rest))
    )


class _Scratch:
    """Host memory through which ranges of a device go, one after the other."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def on_host(self, values: torch.Tensor) -> torch.Tensor:
        """Return contiguous values in host memory, until the next call."""
        if values.device.type == "cpu":
            return values.contiguous()
        if self._memory is None:
            self._memory = torch.empty(
                layout.RANGE_NUMEL * 8, dtype=torch.uint8, device="cpu", pin_memory=True
            )
        return self._memory[: values.nbytes].view(values.dtype).copy_(values)
