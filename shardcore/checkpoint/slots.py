"""The files of states on disk that outlast a crash: two slots and two commit records of each rank,
in a directory.

    rank_00000.slot_0.safetensors, rank_00000.slot_1.safetensors   the states, in flat ranges as in
                                                                   a checkpoint
    rank_00000.rest_0.safetensors, rank_00000.rest_1.safetensors   what the step changes beside
                                                                   them, of the last two commits
    rank_00000.commit_0.json, rank_00000.commit_1.json             the last two commits: manifests
                                                                   of what this rank has

A chunk of states is read from the slot that has it and written to the other one. A commit syncs
the slots, writes the rest and then its record, over the older one of two; a record that is torn is
none. So the last committed step of this rank is whole at any instant.

Note [Linked slots]. A checkpoint on the same file system gets the slot that has the states as a
hard link, so nothing is copied. From then on nothing may be written to that file. The space of
another file, ".next", is taken at once, so that a full disk is an error of the save. Before the
slot is written to, two steps later, the other file gets what the last commit has there, is synced,
and is renamed over the slot: at any instant the slot has the last commit. Whether a checkpoint has
a slot is seen by its number of links, also by the process that goes on after a crash. States that
are not committed, or in the other slot, are copied.

A record is a manifest (checkpoint/format.py) of this rank's files, with "commit" and "rank_state"
beside. The records of all ranks together make a checkpoint of any world size.
"""

import errno
import gc
import logging
import os
import re
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardcore._native import _C
from shardcore.checkpoint import directory, plain
from shardcore.checkpoint import format as layout
from shardcore.checkpoint.file_tensors import open_regular
from shardcore.checkpoint.save import ranges_of
from shardcore.checkpoint.write import FIRST_LINKED, LinkedFiles, add_range, key_of
from shardcore.distributed.comm import Comm
from shardcore.layout import BLOCK
from shardcore.offload.disk import Rates, alignment_of
from shardcore.offload.nvme_states import (
    Chunk,
    NvmeStates,
    check_directories,
    deal,
    place,
    places_of,
)
from shardcore.optim.state_format import SCALES

logger = logging.getLogger("shardcore")

COMMIT_THREAD = "shardcore-commit"  # the name of threads that commit
_NEXT = ".next"  # the suffix of the file that takes the place of one that a checkpoint has
_RECORD = re.compile(r"rank_(\d{5,9})\.commit_[01]\.json")


@dataclass(frozen=True)
class _Range:
    """Elements [start, start + numel) of a part of a parameter, `offset` bytes into a chunk.
    name: that of `shard`.
    """

    name: str
    param: torch.Tensor
    part: str
    dtype: torch.dtype
    start: int
    numel: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Slots:
    """The files of one rank: see the head of this file. A StateFiles.

    step: how many steps are committed. record: the commit to go on from, until it is adopted; None:
    begin anew.
    """

    def __init__(self, folders: Sequence[Path], rank: int) -> None:
        """Lock the files of this rank, and read its records, which are in the first directory.

        Raises BlockingIOError if another model or job uses them, OSError, and ValueError for a
        record of another version.
        """
        self._folders = [folder.absolute() for folder in folders]
        check_directories(self._folders)
        self.folder, self.rank, self.step = self._folders[0], rank, 0
        self.paths: Sequence[Path] = ()
        self.rates: Sequence[Rates] = ()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = self._locked()
        except BlockingIOError:
            for thread in threading.enumerate():  # an earlier model may still be committing
                if thread.name == COMMIT_THREAD:
                    thread.join()
            gc.collect()  # or be in a cycle, as schedulers make them
            self._lock = self._locked()
        self._records: dict[int, dict[str, Any]] = {}
        for index in (0, 1):
            record = _read_record(self.record_path(index))
            if record is not None:
                self._records[index] = record
        self.run = ""
        self._last = 1  # the index of the last commit's record
        self.record: Mapping[str, Any] | None = None
        self._ranges: dict[Chunk, list[_Range]] = {}
        self._committed_crcs: dict[Chunk, list[int] | None] = {}
        self._heads: list[bytes] = []  # of the slots of each directory
        self._sizes: list[int] = []
        self._opened: list[tuple[int, int]] = []
        self._files: list[_C.BlockFile] = []
        # by slot, of those that a checkpoint has: see Note [Linked slots]
        self._next: dict[int, _C.BlockFile] = {}

    def _locked(self) -> directory.FileLock:
        return directory.FileLock(
            self._path("lock"),
            "shard",
            {"rank": self.rank},
            another="another job keeps states there: {}. Wait for it, end it or use another path",
            this=(
                "another model of this process keeps states there: {}. Use one directory per "
                'model, or "durable": False'
            ),
        )

    def _path(self, name: str) -> Path:
        return self.folder / f"rank_{self.rank:05d}.{name}"

    def record_path(self, index: int) -> Path:
        """Return the path of a commit record."""
        return self._path(f"commit_{index}.json")

    def close(self) -> None:
        """Unlock. What a run has that committed nothing is removed: it is of no use, and may be
        large.
        """
        if self.record is None and not self.step:
            for path in self.paths:
                path.unlink(missing_ok=True)
        self._lock.release()

    # --- which step to go on from -----------------------------------------------------------------

    def choose(self, comm: Comm, resume: bool | None) -> None:
        """Choose the step that is gone on from, the same on every rank, and remove the other
        records. Collective.

        Raises ValueError, on every rank, if there is something that resume=None would lose, or no
        step that all ranks have.
        """
        # A rank writes step s + 1 over step s - 1 only after step s was committed on every rank:
        # each commits before it sends its part of the norm, which step s + 1 needs. So after a
        # crash the ranks' last commits are one step apart at most, and the newest one that all have
        # is whole everywhere. A rank that has a newer one removes its record before any rank goes
        # on.
        commits = {index: _id_of(record) for index, record in self._records.items()}
        of_ranks = comm.gather_json(
            {
                "commits": list(commits.values()),
                "folder": str(self.folder),
                "other_order": self._in_other_order(),
            }
        )
        common = None
        if resume is not False:
            commits_of_ranks = [set(map(tuple, of_rank["commits"])) for of_rank in of_ranks]
            folders = [of_rank["folder"] for of_rank in of_ranks]
            common = chosen_of(commits_of_ranks, folders, comm.world_size)
        if common is not None and resume is None:
            raise ValueError(
                f"shard: {self.folder} contains the committed step {common[1]} of an earlier run. "
                'Pass offload={"resume": True} to continue from it, "resume": False to begin '
                'anew over it, or another "path"'
            )
        other_orders = (of_rank["other_order"] for of_rank in of_ranks)
        other_order = next(filter(None, other_orders), None)
        if common is None and resume is not False and other_order is not None:
            raise ValueError(
                f'shard: offload["path"] begins with {self.folder}; expected the directories in '
                f"the order of the run there: {', '.join(other_order)}"
            )
        if common is None:
            self.run = uuid.UUID(comm.gather_json(uuid.uuid4().hex)[0]).hex
        else:
            self.run = common[0]
        for index, commit_id in commits.items():
            if tuple(commit_id) == common:
                self._last, self.record, self.step = index, self._records[index], common[1]
            else:
                self.record_path(index).unlink()
        directory.sync_directory(self.folder)
        comm.gather_json(None)  # no rank writes before every newer record is gone
        if comm.rank == 0 and resume:
            outcome = f"continues from step {self.step}"
            if common is None:
                outcome = "contains no committed step: a new run begins"
            logger.info("shard: %s %s", self.folder, outcome)

    def _in_other_order(self) -> list[str] | None:
        """Return the directories of a run that has these in another order."""
        for folder in self._folders[1:]:
            for index in (0, 1):
                record = _read_record(folder / self.record_path(index).name)
                paths = [] if record is None else list(record["commit"]["paths"])
                if set(paths) == set(map(str, self._folders)):
                    return paths
        return None

    # --- files ------------------------------------------------------------------------------------

    def open(self, engine: _C.FileEngine, chunks: Sequence[Chunk]) -> Sequence[_C.BlockFile]:
        """See StateFiles. ValueError if the slots to go on from are laid out for something else."""
        self._engine = engine
        names = [self._path(f"slot_{slot}.safetensors") for slot in range(2 * len(self._folders))]
        # Of several directories (nvme_states.deal) the first one has all files of the rank. Each
        # other one has two slots, 2 and 3 and so on, whose names also have the run's, so that runs
        # may share it; the first one has symlinks to them, which `load` follows. The record says
        # which chunk lies in which directory.
        names_of_run = [name.name.replace(".slot_", f".{self.run}.slot_") for name in names]
        striped = [self._folders[slot // 2] / names_of_run[slot] for slot in range(2, len(names))]
        self.paths = [*names[:2], *striped]
        if self.record is None:
            stripes = self._deal_new(engine, chunks)
        else:
            stripes = self._deal_recorded(self.record, chunks)
        alignment = max(alignment_of(engine, folder) for folder in self._folders)
        for number, stripe in enumerate(stripes):
            self._lay_out(stripe, alignment)
            for chunk in stripe:
                chunk.slot = 2 * number
        for slot, path in enumerate(self.paths):
            path.with_suffix(_NEXT).unlink(missing_ok=True)
            if slot > 1 and (not names[slot].is_symlink() or names[slot].readlink() != path):
                names[slot].unlink(missing_ok=True)
                names[slot].symlink_to(path)
            if self.record is None:
                path.unlink(missing_ok=True)  # a checkpoint may have it
                path.write_bytes(self._heads[slot // 2])
            else:
                self._check_slot(path, self._heads[slot // 2], self._sizes[slot // 2])
        for folder in self._folders:
            directory.sync_directory(folder)
        if self.record is not None:
            self._protect(self.record, chunks)
        self._files = [
            _C.BlockFile(engine, path, self._sizes[slot // 2])
            for slot, path in enumerate(self.paths)
        ]
        self._opened = [_identity(path) for path in self.paths]
        for slot, path in enumerate(self.paths):
            if path.stat().st_nlink > 1:
                self._make_next(slot)
        return self._files

    def _check_slot(self, path: Path, head: bytes, size: int) -> None:
        """Raise ValueError unless a slot is laid out as the states are now."""
        with open_regular(path) as file:
            same_head = file.read(len(head)) == head
            size_on_disk = os.fstat(file.fileno()).st_size
        if same_head and size_on_disk < size:
            raise ValueError(
                f"shard: {path} ends at byte {size_on_disk} of {size}. If the directory is a copy, "
                'copy it again. Otherwise begin anew with "resume": False and load a checkpoint'
            )
        if not same_head or size_on_disk != size:
            raise ValueError(
                f"shard: {path} contains other states. Use the model, world size, stage, ratio and "
                "optimizer options of the run that wrote it. With another offload path, "
                f"shardcore.load({str(self.folder)!r}, ...) reads it into any of these"
            )

    def _deal_new(
        self, engine: _C.FileEngine, chunks: Sequence[Chunk]
    ) -> Sequence[Sequence[Chunk]]:
        """Return the chunks of each directory in a new run, and remove what an earlier one has
        in other directories.
        """
        for link in self.folder.glob(f"rank_{self.rank:05d}.slot_*"):
            if link.is_symlink():
                for path in (link.readlink(), link.readlink().with_suffix(_NEXT), link):
                    path.unlink(missing_ok=True)
        self.rates, stripes = deal(engine, self._folders, chunks)
        return stripes

    def _deal_recorded(
        self, record: Mapping[str, Any], chunks: Sequence[Chunk]
    ) -> Sequence[Sequence[Chunk]]:
        """Return the chunks of each directory in a run that goes on. Raises ValueError if these
        are not its directories.
        """
        commit = record["commit"]
        missing = next((path for path in self.paths if not path.exists()), None)
        if missing is not None or len(commit["paths"]) != len(self._folders):
            problem = (
                f"has {len(self._folders)} directories" if missing is None else f"lacks {missing}"
            )
            raise ValueError(
                f'shard: offload["path"] {problem}; expected all directories of step {self.step} '
                f"in their order: {', '.join(commit['paths'])}. Check that every disk is mounted"
            )
        numbers: Sequence[int] = commit["stripes"]
        if len(numbers) != len(chunks):  # of another model, which the heads show
            numbers = [0] * len(chunks)
        return [
            [chunk for chunk, at in zip(chunks, numbers, strict=True) if at == n]
            for n in range(len(self._folders))
        ]

    def _lay_out(self, chunks: Sequence[Chunk], alignment: int) -> None:
        """Give chunks of one directory their places in its slots, and these a head."""
        end = place(chunks, 0, alignment)
        tensors: dict[str, tuple[torch.dtype, Sequence[int]]] = {}
        cursor = 0

        def pad(until: int) -> None:
            if cursor < until:
                tensors[f"padding@{cursor}"] = torch.uint8, [until - cursor]

        for chunk in chunks:
            ranges = self._ranges[chunk] = sorted(_ranges_in(chunk), key=lambda item: item.offset)
            chunk.parts = [(item.offset, item.nbytes) for item in ranges]
            for item in ranges:
                pad(chunk.offset + item.offset)
                tensors[key_of(item.name, item.part, item.start)] = item.dtype, [item.numel]
                cursor = chunk.offset + item.offset + item.nbytes
        pad(end)
        head, _ = layout.head_of(tensors, alignment=alignment)
        self._heads.append(head)
        self._sizes.append(place(chunks, len(head), alignment))

    def _protect(self, record: Mapping[str, Any], chunks: Sequence[Chunk]) -> None:
        """Let nothing be written over what a record has of the chunks."""
        crcs = {
            (file, offset): crc
            for entry in record["tensors"].values()
            for part in entry["parts"].values()
            for _, _, file, offset, crc in part["ranges"]
        }
        for chunk in chunks:
            offsets = [chunk.offset + offset for offset, _ in chunk.parts]
            self._committed_crcs[chunk] = None
            for slot in (chunk.slot, chunk.slot + 1):
                if offsets and (slot, offsets[0]) in crcs:
                    self._committed_crcs[chunk] = [crcs[slot, offset] for offset in offsets]
                    chunk.slot = slot
                    break
            chunk.committed = chunk.slot

    def adopt(self, states: NvmeStates) -> None:
        """Let the states be those of `record`, whatever was written since the files were opened."""
        states.forget()
        for chunk, crcs in self._committed_crcs.items():
            assert chunk.committed is not None
            chunk.slot, chunk.crcs = chunk.committed, crcs
        self.record, self._committed_crcs = None, {}

    # --- checkpoints that have a slot: Note [Linked slots] ----------------------------------------

    def link_into(
        self, states: NvmeStates, folder: Path, names: Mapping[torch.Tensor, str]
    ) -> LinkedFiles:
        """Link the slot of each directory that has most of its committed states into `folder`, if
        the file system can. Not while a step runs.

        names: of the parameters, as the manifest of the checkpoint has them.
        Raises OSError, where there is no room for another file among others.
        """
        states.flush()
        linked = LinkedFiles()
        for first_slot in range(0, len(self.paths), 2):
            committed: dict[int, list[Chunk]] = {first_slot: [], first_slot + 1: []}
            for chunk in states.chunks:
                is_committed = chunk.crcs is not None and chunk.slot == chunk.committed
                if is_committed and chunk.slot in committed:
                    committed[chunk.slot].append(chunk)
            slot = max(committed, key=lambda slot: sum(chunk.nbytes for chunk in committed[slot]))
            if not committed[slot] or not self._link(slot, folder):
                continue
            number = FIRST_LINKED + len(linked.files)
            linked.files.append(self._entry(slot))
            for chunk in committed[slot]:
                first = chunk.bucket.device_numel + chunk.first
                linked.chunks.append((chunk.bucket, first, first + chunk.numel))
                for placed in self._placed_ranges(chunk, number, names):
                    name, part, _, (start, *_) = placed
                    linked.ranges[key_of(name, part, start)] = placed
        return linked

    def _link(self, slot: int, folder: Path) -> bool:
        """Link a slot into a checkpoint, and take the space of the file after it. Returns
        whether it can be linked.
        """
        path = folder / self._entry(slot)["name"]
        try:
            self._check_identity(slot)
            os.link(self.paths[slot], path)
        except OSError:  # another file system, or one without links; or the slot is gone
            return False
        try:
            self._make_next(slot)
        except OSError:
            path.unlink()
            raise
        return True

    def _make_next(self, slot: int) -> None:
        if slot in self._next:
            return
        path = self.paths[slot].with_suffix(_NEXT)
        path.write_bytes(self._heads[slot // 2])
        try:
            self._next[slot] = _C.BlockFile(self._engine, path, self._sizes[slot // 2])
        except OSError:
            path.unlink()
            raise

    def before_write(self, slot: int) -> None:
        """See StateFiles."""
        if slot not in self._next:
            return
        path, next_path = self.paths[slot], self.paths[slot].with_suffix(_NEXT)
        self._check_identity(slot)
        with open(path, "rb") as source, open(next_path, "r+b") as target:
            for chunk in self._ranges:
                if slot in (chunk.slot, chunk.committed):
                    _copy(source.fileno(), target.fileno(), chunk.offset, chunk.nbytes)
        self._next[slot].sync()
        os.rename(next_path, path)
        directory.sync_directory(path.parent)
        self._files[slot], self._opened[slot] = self._next.pop(slot), _identity(path)

    def _check_identity(self, slot: int) -> None:
        # open files go on where their disk was unmounted
        if _identity(self.paths[slot]) != self._opened[slot]:
            message = "the file there is not the file of the states. Check that its disk is mounted"
            raise OSError(errno.ESTALE, message, str(self.paths[slot]))

    # --- commits ----------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """The number of the next commit's record."""
        return 1 - self._last

    @property
    def rest_name(self) -> str:
        """The name of the next commit's file of the rest."""
        return f"rank_{self.rank:05d}.rest_{self.index}.safetensors"

    def written(
        self, states: NvmeStates, rest: Mapping[str, Any], names: Mapping[torch.Tensor, str]
    ) -> dict[str, Any]:
        """Return what this rank has written, for `manifest_of`: the states where they are now, and
        `rest`, of `write_ranges`.

        names: see `link_into`.
        """
        ranges = rest["ranges"]
        for chunk in states.chunks:
            for placed in self._placed_ranges(chunk, chunk.slot, names):
                add_range(ranges, *placed)
        return {
            "files": [*map(self._entry, range(len(self.paths))), *rest["files"]],
            "ranges": ranges,
        }

    def _entry(self, slot: int) -> dict[str, Any]:
        """Return the entry of a slot in a manifest."""
        head = self._heads[slot // 2]
        return {
            "name": self._path(f"slot_{slot}.safetensors").name,
            "bytes": self._sizes[slot // 2],
            "head_bytes": len(head),
            "head_crc32c": layout.crc32c(head),
        }

    def _placed_ranges(
        self, chunk: Chunk, file: int, names: Mapping[torch.Tensor, str]
    ) -> Iterator[tuple[str, str, torch.dtype, list[int]]]:
        """Yield where the ranges of a chunk are, in file number `file`, for `add_range`."""
        if chunk.crcs is None:  # it was never written
            return
        for item, crc in zip(self._ranges[chunk], chunk.crcs, strict=True):
            place = [item.start, item.numel, file, chunk.offset + item.offset, crc]
            yield names[item.param], item.part, item.dtype, place

    def write_record(self, manifest: Mapping[str, Any], step: int, states: NvmeStates) -> None:
        """Commit: make the record durable, then let the states that it has not be written over.
        OSError if it cannot be.
        """
        for slot in range(len(self.paths)):
            self._check_identity(slot)
        commit = {
            "run": self.run,
            "step": step,
            "rank": self.rank,
            "paths": list(map(str, self._folders)),
            "stripes": [chunk.slot // 2 for chunk in states.chunks],
        }
        directory.write_synced(
            self.record_path(self.index), layout.json_bytes({**manifest, "commit": commit})
        )
        directory.sync_directory(self.folder)
        for chunk in states.chunks:
            chunk.committed = chunk.slot
        self._last, self.step = self.index, step


def _ranges_in(chunk: Chunk) -> Iterable[_Range]:
    low = chunk.bucket.device_numel + chunk.first
    places = places_of(chunk)
    for managed, start, param_start, numel in ranges_of(chunk.bucket, low, low + chunk.numel):
        name = layout.plain_name(managed.name)
        for part, (offset, like) in places.items():
            unit = BLOCK if part in SCALES.values() else 1
            offset += (start - low) // unit * like.itemsize
            first, count = param_start // unit, layout.stored_numel(part, numel)
            yield _Range(name, managed.param, part, like.dtype, first, count, offset)


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _copy(source: int, target: int, offset: int, nbytes: int) -> None:
    """Copy bytes between open files, by reference where the file system can. Raises OSError."""
    end = offset + nbytes
    while offset < end:
        try:
            copied = os.copy_file_range(source, target, end - offset, offset, offset)
        except OSError:  # a kernel (gVisor's) or file system without it
            copied = os.pwrite(target, os.pread(source, min(end - offset, 1 << 20), offset), offset)
        if copied == 0:
            raise OSError(
                errno.EIO, f"a file of states ends before byte {end}; expected it as it was written"
            )
        offset += copied


# --- records --------------------------------------------------------------------------------------


def _read_record(path: Path) -> dict[str, Any] | None:
    """Return a commit record; None if there is none, or the process ended while it was written."""
    try:
        record: dict[str, Any] = layout.read_json(path)
        version, commit = record["version"], record["commit"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        logger.info("shard: %s is incomplete, so the commit before it counts", path)
        return None
    if version != layout.VERSION:
        raise ValueError(
            f"shard: {path} has version {version!r}; expected {layout.VERSION}. Another "
            "shardcore may read it"
        )
    if not isinstance(commit, Mapping):
        raise ValueError(f"shard: {path} is not a commit record; expected one by shardcore")
    return record


def _id_of(record: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return of a commit the run, the step and the world size."""
    return str(record["commit"]["run"]), int(record["commit"]["step"]), int(record["world_size"])


def chosen_of(
    commits_of_ranks: Sequence[Collection[tuple[str, int, int]]],
    folders: Sequence[str],
    world_size: int,
) -> tuple[str, int, int] | None:
    """Return the newest commit that all ranks have; None if no rank has one, or only some their
    first. Raises ValueError.
    """
    all_commits = set().union(*commits_of_ranks)
    common = set.intersection(*map(set, commits_of_ranks))
    if common:
        chosen = max(common, key=lambda commit: commit[1])
        if chosen[2] != world_size:
            raise ValueError(
                f"shard: {folders[0]} contains step {chosen[1]} of {chosen[2]} ranks; expected "
                f"{world_size}. With another offload path, shardcore.load({folders[0]!r}, ...) "
                "reads it into any world size"
            )
        return chosen
    # only some ranks reached their first commit: the run has none to go on from
    if len(all_commits) <= 1 and all(
        step == 1 and world == world_size for _, step, world in all_commits
    ):
        return None
    texts = []
    for rank, (commits, folder) in enumerate(zip(commits_of_ranks, folders, strict=True)):
        steps = [f"step {step} of run {run[:8]}" for run, step, _ in sorted(commits)]
        texts.append(f"rank {rank}: {', '.join(steps) or 'nothing'} in {folder}")
    raise ValueError(
        f"shard: the ranks share no committed step ({'; '.join(texts[:4])}). Pass the directories "
        'of one run, or "resume": False to begin anew, or read a checkpoint with shardcore.load'
    )


class Committed(layout.Checkpoint):
    """A Source of committed steps: of one rank's record, or of those of all ranks."""

    def __init__(
        self, folder: Path, records: Sequence[Mapping[str, Any]], whole: bool = True
    ) -> None:
        """Join the records, of ranks in order. See Checkpoint."""
        super().__init__(folder, manifest=_joined(records), whole=whole)
        self._states = {record["commit"]["rank"]: record["rank_state"] for record in records}

    def of_rank(self, rank: int) -> Mapping[str, Any] | None:
        """See Source."""
        if rank not in self._states:
            return None
        state: Mapping[str, Any] = plain.from_json(self._states[rank], f"{self.path}: rank {rank}")
        return state


def open_committed(folder: Path) -> Committed | None:
    """Open the last step that all ranks have committed in a directory; None if there is none.
    Raises OSError or ValueError.
    """
    records: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.iterdir()):
        match = _RECORD.fullmatch(path.name)
        record = None if match is None else _read_record(path)
        if match is not None and record is not None:
            records.setdefault(int(match[1]), []).append(record)
    if not records:
        return None
    _, _, world_size = _id_of(records[min(records)][0])
    of_ranks = [records.get(rank, []) for rank in range(world_size)]
    commits_of_ranks = [set(map(_id_of, of_rank)) for of_rank in of_ranks]
    chosen = chosen_of(commits_of_ranks, [str(folder)] * world_size, world_size)
    if chosen is None:
        return None
    chosen_records = [
        next(record for record in of_rank if _id_of(record) == chosen) for of_rank in of_ranks
    ]
    return Committed(folder, chosen_records)


def _joined(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one manifest of records; what several have is read from the first."""
    joined = dict(records[0])
    joined["files"] = [file for record in records for file in record["files"]]
    joined["tensors"] = {}
    files = 0
    for record in records:
        for name, entry in record["tensors"].items():
            joined_parts = joined["tensors"].setdefault(name, {**entry, "parts": {}})["parts"]
            for key, part in entry["parts"].items():
                if not part["ranges"] and joined_parts:
                    continue
                joined_part = joined_parts.setdefault(key, {**part, "ranges": []})
                starts = {start for start, *_ in joined_part["ranges"]}
                joined_part["ranges"] += [
                    [start, numel, files + file, offset, crc]
                    for start, numel, file, offset, crc in part["ranges"]
                    if start not in starts
                ]
        files += len(record["files"])
    for entry in joined["tensors"].values():
        filled = {key: part for key, part in entry["parts"].items() if part["ranges"]}
        entry["parts"] = filled or entry["parts"]
        for part in entry["parts"].values():
            part["ranges"].sort()
    return joined
