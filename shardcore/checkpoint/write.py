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


def check_visible(path: Path, rank: int) -> None:
    """Raise FileNotFoundError if a rank does not see the directory that is written to."""
    if not path.is_dir():
        raise FileNotFoundError(
            f"save: rank {rank} does not see {path}, created by rank 0. Use a directory shared by "
            "all ranks"
        )


@dataclass(frozen=True)
class LinkedFiles:
    """Files of committed states (checkpoint/slots.py) that are linked into a checkpoint.

    files: their entries in the manifest. chunks: (bucket, start, end) in the owned range. ranges:
    by key, for `add_range`.
    """

    files: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[tuple[Bucket, int, int]] = field(default_factory=list)
    ranges: dict[str, tuple[str, str, torch.dtype, list[int]]] = field(default_factory=dict)


FIRST_LINKED = 1  # the number of the first linked file among the files of a rank


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
    written_by_ranks: Sequence[Any], tensors: dict[str, Any], rest: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest.

    written_by_ranks: of each rank, what `write_ranges` returned, with its other files.

    tensors: "shape", "dtype" and "step" by name, of sliced ones "rows" and "slices" with their
    "columns"; "parts" is added.
    rest: the other entries of the manifest.
    Raises ValueError if ranks have a tensor in several dtypes, or one that `tensors` lacks.
    """
    ranges: dict[str, Any] = {}
    files: list[Any] = []
    for written in written_by_ranks:
        for name, parts in written["ranges"].items():
            for part, of_rank in parts.items():
                of_all = ranges.setdefault(name, {}).setdefault(part, {**of_rank, "ranges": []})
                if of_all["dtype"] != of_rank["dtype"]:
                    raise ValueError(
                        f"save: {name} is of {of_all['dtype']} on one rank and of "
                        f"{of_rank['dtype']} on another; expected one dtype"
                    )
                # a rank numbers its own files; the manifest numbers the files of all ranks
                of_all["ranges"] += [
                    [start, numel, len(files) + file, *place]
                    for start, numel, file, *place in of_rank["ranges"]
                ]
        files += written["files"]
    unexpected = set(ranges)
    for name, entry in tensors.items():
        slices = entry.get("slices", ())
        stored = {layout.slice_name(name, *entry_of["columns"]): entry_of for entry_of in slices}
        for stored_name, stored_entry in (stored or {name: entry}).items():
            unexpected.discard(stored_name)
            empty = {"weight": {"dtype": entry["dtype"], "ranges": []}}
            stored_entry["parts"] = ranges.get(stored_name) or empty
            for part in stored_entry["parts"].values():
                part["ranges"].sort()
    if unexpected:
        raise ValueError(
            f"save: {min(unexpected)} is on another rank, but not in the model of rank 0; expected "
            "the same names on every rank. Wrap, prune and rename layers on all of them"
        )
    sliced = any("slices" in entry for entry in tensors.values())
    return {
        "format": layout.FORMAT,
        "time": time.time(),
        "version": layout.SLICED if sliced else layout.VERSION,
        "written_by": {"shardcore": __version__, "torch": torch.__version__},
        "world_size": len(written_by_ranks),
        "files": files,
        "tensors": tensors,
        **rest,
    }


def write_json(path: Path, data: bytes) -> dict[str, Any]:
    """Write a JSON file of `format.json_bytes`; returns its entry in the manifest."""
    directory.write_synced(path, data)
    return {"name": path.name, "bytes": len(data)}


def write_manifest(
    path: Path, written_by_ranks: Sequence[Any], tensors: dict[str, Any], rest: Mapping[str, Any]
) -> None:
    """Write the manifest to the directory `path`. See manifest_of. Raises OSError, too."""
    directory.write_synced(
        path / layout.MANIFEST, layout.json_bytes(manifest_of(written_by_ranks, tensors, rest))
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
