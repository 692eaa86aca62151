"""A StorageWriter and a StorageReader of torch.distributed.checkpoint over shardcore's format, for
FSDP2 and other DTensors.

    import shardcore.dcp
    dcp.save(state, storage_writer=shardcore.dcp.Writer("runs/step20"))
    dcp.load(state, storage_reader=shardcore.dcp.Reader("runs/step20"))

`import shardcore` leaves this module out, since torch.distributed.checkpoint loads 700 modules.
Tested with torch 2.13; what it uses of torch is the same in 2.11.
A tensor's name is the one that the planner gives it. A box of it becomes ranges of the flattened
tensor: a box of whole rows (Shard(0)) is one range, cut at RANGE_NUMEL, any other one is a range
for each run of neighbouring elements. What is no tensor is plain data in the manifest, under "dcp".
Nothing of it is pickled; on reading, the planner gets bytes of torch.save that were made then of
the decoded data, since that is what `load_bytes` takes.
"""

import io
import logging
import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, groupby, product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shardcore.checkpoint import directory, plain
from shardcore.checkpoint import format as layout
from shardcore.checkpoint.file_tensors import boxes_of, sizes_of, slices_of
from shardcore.checkpoint.foreign.torch_files import METADATA
from shardcore.checkpoint.load import objects_of
from shardcore.checkpoint.write import Item, check_visible, write_manifest, write_ranges

logger = logging.getLogger("shardcore")

# of each folder, who locked it last
_locks: "weakref.WeakValueDictionary[Path, Writer]" = weakref.WeakValueDictionary()
_MAX_RANGES = 4_000_000  # of which a manifest has 60 bytes each, at most
_ENDING_S = 1.0  # for which a thread may still be there after its asynchronous save has failed


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(path))


def _unlock(lock: directory.SaveLock, process: int) -> None:
    if os.getpid() == process:  # a forked process frees the Writer, too
        lock.release()


class Writer(StorageWriter):
    """Writes a checkpoint of shardcore for torch.distributed.checkpoint, as one file per rank and a
    manifest.

    path: the checkpoint, on a file system of all ranks. `checkpoint_id=` of `dcp.save` replaces it.
    save_latest: True names the checkpoint in the file "latest" beside it, for `shardcore.load`.

    When `dcp.save` returns, everything is on disk. Until then an earlier checkpoint at `path` is
    complete. It is replaced, never edited, and so is an empty directory.

    A value other than a tensor must be plain data (numbers, text, lists, tuples, dicts, bytes). For
    plain data the planner needs the `lookup_object` of DefaultSavePlanner.

    Rank 0 holds a lock on the directory of `path` until the save ends. If another rank fails, torch
    does not notify rank 0. The lock is then released by the next save of this Writer or of its
    thread, or when the Writer is freed.

    Every rank raises these errors as CheckpointException: OSError (a full disk, a failed write),
    with file and offset; TypeError, with the name, for a value of any other type; BlockingIOError
    if another save is running there; FileExistsError if `path` is neither a checkpoint nor an empty
    directory; ValueError if no plan covers some elements of a tensor.
    """

    def __init__(self, path: str | os.PathLike[str], *, save_latest: bool = False) -> None:
        """See the class. Nothing is done yet."""
        self._path = self._next = _absolute(path)
        self._save_latest, self._rank = save_latest, 0
        # the lock's end, with this Writer at the latest
        self._unlock: weakref.finalize[Any, Any] | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Take the path of the next checkpoint."""
        if checkpoint_id is not None:
            self._next = _absolute(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a checkpoint. Raises ValueError, or RuntimeError if the one before is still
        being written.
        """
        if not self._end_failed():
            raise RuntimeError(
                f"save: {self._path} is still being written by this Writer; expected a wait for "
                f"its future before"
            )
        self._path = self._next
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "shardcore.dcp: use_collectives has False; expected True, since a checkpoint has "
                "one manifest"
            )
        self._rank = kwargs["rank"]
        directory.check_tag("save", self._path.name)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0: lock the directory, and make the one that is written to. Raises OSError."""
        path, folder = self._path, self._path.parent
        if folder in _locks:
            _locks[folder]._end_failed()
        self._thread = threading.current_thread()
        self._unlock = weakref.finalize(
            self, _unlock, directory.SaveLock(folder, path.name), os.getpid()
        )
        _locks[folder] = self
        return plans

    def _end_failed(self) -> bool:
        """Release the lock unless its save goes on in another thread; returns whether there is
        none.
        """
        if self._unlock is None or not self._unlock.alive:
            return True
        if self._thread is not threading.current_thread():
            self._thread.join(_ENDING_S)
        if self._thread is threading.current_thread() or not self._thread.is_alive():
            self._unlock()
        return not self._unlock.alive

    @torch.no_grad()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file. Raises OSError, or TypeError for what the format does not
        have.
        """
        path = directory.unfinished(self._path.parent, self._path.name)
        check_visible(path, self._rank)
        objects: dict[str, Any] = {}
        items: list[Item] = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                objects[item.index.fqn] = plain.to_json(
                    _object(planner, item), f"save: {item.index.fqn}"
                )
            else:
                items += _items(planner, item)
        written = {**write_ranges(path, layout.data_file(self._rank), items), "objects": objects}
        file = written["files"][0]
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(file["name"]), file["bytes"], written)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: write the manifest, and give the checkpoint its name. Raises OSError or
        ValueError.
        """
        folder, name = self._path.parent, self._path.name
        assert self._unlock is not None
        try:
            written_by_ranks = [result.storage_data for result in chain.from_iterable(results)]
            tensors = {
                key: {
                    "shape": list(stored.size),
                    "dtype": layout.dtype_name(stored.properties.dtype, key),
                    "step": None,
                }
                for key, stored in metadata.state_dict_metadata.items()
                if isinstance(stored, TensorStorageMetadata)
            }
            objects: dict[str, Any] = {}
            ranges = 0
            for written in written_by_ranks:
                objects |= written["objects"]
                for parts in written["ranges"].values():
                    ranges += sum(len(part["ranges"]) for part in parts.values())
            planner_data = plain.to_json(metadata.planner_data, "save: planner_data")
            if ranges > _MAX_RANGES:
                raise ValueError(
                    f"save: {ranges} ranges are too many for a manifest; expected at most "
                    f"{_MAX_RANGES}: a tensor that is cut "
                    "in another dimension than the first has one for each row (shard dimension 0, "
                    "or use FileSystemWriter)"
                )
            path = directory.unfinished(folder, name)
            entries = {
                **_EMPTY_ENTRIES,
                "dcp": {"objects": objects, "planner_data": planner_data},
            }
            write_manifest(path, written_by_ranks, tensors, entries)
            _check_whole(path)
            directory.commit(folder, name, self._save_latest, None)
        finally:
            self._unlock()


# Entries of a manifest that a state dict of torch.distributed.checkpoint does not have apart.
_EMPTY_ENTRIES: dict[str, Any] = {
    "tied": {},
    "frozen": [],
    "groups": None,
    "loss_scale": None,
    "scheduler": None,
    "extra_state": {},
    "counters": {},
}


def _check_whole(path: Path) -> None:
    """Raise ValueError if what was written cannot be read."""
    try:
        layout.Checkpoint(path).close()
    except ValueError as error:
        raise ValueError(
            f"save: what the ranks planned to write is no whole checkpoint ({error}); expected "
            f"each element of each tensor on one rank (with no_dist=True: full tensors)"
        ) from error


def _object(planner: SavePlanner, item: WriteItem) -> Any:
    if not hasattr(planner, "lookup_object"):
        raise TypeError(
            f"save: {item.index.fqn} is no tensor, and {type(planner).__name__} has no "
            f"lookup_object; expected a "
            "DefaultSavePlanner (others give pickled bytes, which this format does not have)"
        )
    return planner.lookup_object(item.index)


def _items(planner: SavePlanner, item: WriteItem) -> Iterator[Item]:
    """Yield the ranges of a box, which are read one after another."""
    data, name = item.tensor_data, item.index.fqn
    assert data is not None
    dtype, sizes = data.properties.dtype, data.chunk.sizes
    box: list[torch.Tensor] = []

    def read(cursor: int, numel: int) -> torch.Tensor:
        if cursor == 0:
            value = planner.resolve_data(item)
            if not isinstance(value, torch.Tensor) or value.shape != sizes or value.dtype != dtype:
                raise ValueError(
                    f"save: the planner gives {type(value).__name__} for {name}; expected "
                    f"{tuple(sizes)} of {dtype}"
                )
            box[:] = [value.detach().reshape(-1)]
        part = box[0][cursor : cursor + numel]
        if cursor + numel == prod(sizes):
            box.clear()
        return part

    cursor = 0
    for start, numel in runs_of(data.size, data.chunk.offsets, sizes):
        for first, count in layout.cut(start, numel):
            yield Item(name, "weight", dtype, first, count, partial(read, cursor, count))
            cursor += count


def runs_of(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield (start, numel) in the flattened tensor of the runs of elements that make up a box of
    it, in order.
    """
    if 0 in sizes:
        return
    whole = len(shape)  # dimensions from here on are whole
    while whole > 0 and sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    outer = max(0, whole - 1)
    numel = prod(sizes[outer:])
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for index in product(*(range(size) for size in sizes[:outer])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), numel


class Reader(StorageReader):
    """Lets torch.distributed.checkpoint load a checkpoint of shardcore into any sharding and any
    number of ranks.

    path: a checkpoint of `Writer`, or a directory whose "latest" names a checkpoint.
        `checkpoint_id=` of `dcp.load` replaces it.

    A checkpoint of `shardcore.save` also loads: its weights (float32 masters if there are any) and
    buffers. Each rank reads only the ranges with its own elements, one at a time (4 MiB), and
    verifies their checksums.

    Every rank raises these errors as CheckpointException: OSError; ValueError for damaged files,
    with file and offset.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """See the class. Nothing is read yet."""
        self._path = _absolute(path)
        self._source: layout.Checkpoint | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load; checkpoint_id: the path."""
        self._close()
        if checkpoint_id is not None:
            self._path = _absolute(checkpoint_id)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Return what there is: each tensor as one box. Raises OSError or ValueError.

        (torch asks again, for metadata of each rank, where this has an argument that is called
        kwargs.)
        """
        self._close()
        try:
            return self._read_metadata()
        except (OSError, ValueError) as error:
            # torch 2.11 then raises "metadata is None", which does not say why
            logger.error("%s", error)
            raise

    def _read_metadata(self) -> Metadata:
        if self._path.exists():
            folder = directory.find("load", self._path, None)
        else:
            folder = directory.find("load", self._path.parent, self._path.name)
        if (folder / METADATA).exists():
            raise ValueError(
                f"load: {folder} was written by FileSystemWriter; expected a checkpoint of Writer: "
                f"use FileSystemReader"
            )
        self._source = source = layout.Checkpoint(folder)
        entries: dict[str, Any] = {}
        for name, shape in source.shapes.items():
            size, dtype = torch.Size(shape), source.read(name, "weight", 0, 0).dtype
            box = ChunkStorageMetadata(torch.Size([0] * len(shape)), size)
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, [box])
        self._objects, planner_data = objects_of(source)
        entries.update({name: BytesStorageMetadata() for name in self._objects})
        return Metadata(entries, planner_data=planner_data)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return them."""
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what this rank has. Raises OSError or ValueError."""
        assert self._source is not None
        try:
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    pickled = io.BytesIO()
                    torch.save(self._objects[item.storage_index.fqn], pickled)
                    pickled.seek(0)
                    planner.load_bytes(item, pickled)
                else:
                    target = planner.resolve_tensor(item).detach()
                    _fill(target, self._source, item)
                    planner.commit_tensor(item, target)
        finally:
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()


def _fill(target: torch.Tensor, source: layout.Checkpoint, item: ReadItem) -> None:
    """Copy a box of a tensor to `target`, reading each range that has something of it once."""
    name = item.storage_index.fqn
    shape = source.shapes[name]
    entry = source.entries[source.tied.get(name, name)]
    stored = entry.parts["master"] if "master" in entry.parts else entry.parts["weight"]
    if len(entry.slices) == 1:
        windows = [(stored_range.start, stored_range.numel) for stored_range in stored.ranges]
    else:
        windows = list(layout.cut(0, prod(shape)))
    if target.shape != item.lengths:
        raise ValueError(
            f"load: {name} has {tuple(target.shape)} to fill; expected {tuple(item.lengths)}"
        )
    pieces = _pieces(windows, runs_of(shape, item.storage_offsets, item.lengths))
    for index, of_range in groupby(pieces, key=lambda piece: piece[0]):
        values = source.read(name, "weight", *windows[index])
        for _, start, before, numel in of_range:
            for box in boxes_of(target.shape, before, numel):
                part = target[slices_of(box)]
                part.copy_(values[start : start + part.numel()].view(sizes_of(box)))
                start += part.numel()


def _pieces(
    windows: Sequence[tuple[int, int]], runs: Iterator[tuple[int, int]]
) -> Iterator[tuple[int, int, int, int]]:
    """Cut runs where windows, (start, numel), end: yield (number of the window, start in it,
    elements before, numel).
    """
    starts = [start for start, _ in windows]
    before = 0
    for start, numel in runs:
        index = bisect_right(starts, start) - 1
        while numel > 0:
            first, length = windows[index]
            count = min(numel, first + length - start)
            yield index, start - first, before, count
            start += count
            before += count
            numel -= count
            index += 1
