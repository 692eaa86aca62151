"""What a rank writes of a checkpoint: ranges of tensors into its data file, and on rank 0 the
manifest of what all wrote.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardcore._native import _C
from shardcore.checkpoint import directory
from shardcore.checkpoint import format as layout
from shardcore.checkpoint.digested import digest_key, key_of_part
from shardcore.engine.bucket import Bucket
from shardcore.engine.digests import VERSION as DIGEST_VERSION
from shardcore.engine.digests import digest_of, unsigned
from shardcore.offload.disk import file_engine
from shardcore.version import __version__


def key_of(name: str, part: str, start: int) -> str:
    """Return the name in a data file of a range of a part of a tensor."""
    return f"{name}{'' if part == 'weight' else f'.{part}'}@{start}"


@dataclass(eq=False)
class Item:
    """Elements [start, start + numel) of a part of a tensor. read: returns them, flat, on any
    device.

    stays: they are where they are read from until a step. first: of a remainder its weight, of
    scales their codes: both have one digest.
    """

    name: str
    part: str
    dtype: torch.dtype
    start: int
    numel: int
    read: Callable[[], torch.Tensor]
    stays: bool = False
    first: "Item | None" = None

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
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Write a data file to the directory `path`; returns its entry in the manifest, and the ranges
    by name and part.

    number: of the file among those of this rank. read: set when the items that stay, which come
    first, were read. shapes: of the full tensors by stored name: then digests are returned, too.
    """
    head, offsets = layout.head_of({item.key: (item.dtype, [item.numel]) for item in items})
    size = offsets[-1] + items[-1].nbytes if items else len(head)
    ranges: dict[str, Any] = {}
    writer = _C.FileWriter(file_engine(), str(path / name), size)
    scratch = _Scratch()
    digests = _Digests(items, shapes)
    try:
        head_crc = writer.append(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for item, offset in zip(items, offsets, strict=True):
            if read is not None and not item.stays:
                read.set()
            values = item.read()
            crc = writer.append(scratch.on_host(values))
            digests.add(item, values)
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
    return {"files": [file], "ranges": ranges, "digests": digests.sums}


class _Digests:
    """The digests of what a rank writes, from where it is stored. sums: by stored name and key."""

    def __init__(self, items: Sequence[Item], shapes: Mapping[str, Sequence[int]] | None) -> None:
        """See write_ranges."""
        self.sums: dict[str, dict[str, int]] = {}
        self._shapes = shapes
        self._firsts = {item.first for item in items}

    def add(self, item: Item, values: torch.Tensor) -> None:
        """Add an item with these values."""
        if self._shapes is None or item in self._firsts:  # its second has the digest of both
            return
        first, rest = item, None
        if item.first is not None:
            first, rest = item.first, values
            values = first.read().to(rest.device)
        _, key = digest_key(
            item.name, first.part, first.dtype, self._shapes[item.name], rest is not None
        )
        sums, of_key = self.sums.setdefault(item.name, {}), key_of_part(first.part)
        digest = digest_of(key, values, first.start, rest)
        sums[of_key] = unsigned(sums.get(of_key, 0) + digest)


def stored_entries(name: str, entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the entries of a tensor's slices by stored name; of one without slices its own."""
    slices = entry.get("slices", ())
    return {layout.slice_name(name, *each["columns"]): each for each in slices} or {name: entry}


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
    digests = _added_up(written.get("digests", {}) for written in written_by_ranks)
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
        for stored_name, stored_entry in stored_entries(name, entry).items():
            unexpected.discard(stored_name)
            empty = {"weight": {"dtype": entry["dtype"], "ranges": []}}
            stored_entry["parts"] = ranges.get(stored_name) or empty
            for part in stored_entry["parts"].values():
                part["ranges"].sort()
            if stored_name in digests:
                stored_entry["digests"] = digests[stored_name]
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
        **({"digest_version": DIGEST_VERSION} if digests else {}),
        **rest,
    }


def _added_up(
    of_ranks: Iterable[Mapping[str, Mapping[str, int | None]]],
) -> dict[str, dict[str, str]]:
    """Return the digests by stored name and key, as the manifest has them: 16 hexadecimal digits.
    None of what a rank knows no digest of.
    """
    sums: dict[str, dict[str, int | None]] = {}
    for of_rank in of_ranks:
        for name, digests in of_rank.items():
            of_name = sums.setdefault(name, {})
            for key, digest in digests.items():
                before = of_name.get(key, 0)
                if before is None or digest is None:
                    of_name[key] = None
                else:
                    of_name[key] = unsigned(before + digest)
    return {
        name: {key: f"{total:016x}" for key, total in of_name.items() if total is not None}
        for name, of_name in sums.items()
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
