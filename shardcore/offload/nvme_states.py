"""Optimizer states in files: read, updated and written chunk by chunk, through a few buffers in
host memory.

Weights in files (offload/nvme_weights.py) are stored and updated the same way.

A chunk is a range of a bucket's part in the tier, of at most CHUNK_NUMEL elements. All its states
are next to each other in one of this rank's files. Buffers are as large as the largest chunk, so no
tensor is too large for them.
"""

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch

from shardcore._native import _C
from shardcore.engine.bucket import Bucket
from shardcore.engine.states import Span
from shardcore.layout import round_up
from shardcore.offload.disk import (
    ALIGNMENT,
    PROBE_BYTES,
    Rates,
    alignment_of,
    file_engine,
    measure,
    temporary,
)
from shardcore.optim.state_format import Allocate, StateFormat, StateTensors, range_of

CHUNK_NUMEL = 1 << 22  # 48 MiB of float32 states: long enough for a disk, small in memory
RATED_TBW = 600  # terabytes that a consumer's disk of 1 TB may be written
WEIGHT = "weight"
# Buffers of a step: while Adam works on one chunk, the next two are read, and the one before is
# written. A buffer is used again when its write is over.
PLACES = 4


@dataclass(frozen=True)
class WeightFormat(StateFormat):
    """How chunks keep weights of one dtype, which have no states."""

    dtype: torch.dtype = torch.float32

    def new(self, numel: int, make: Allocate) -> StateTensors:
        """See StateFormat."""
        return {WEIGHT: make(numel, self.dtype)}


@dataclass(eq=False)
class Chunk:
    """Elements [first, first + numel) of a bucket's part in the tier, in each file at `offset`.

    parts: (offset in the chunk, bytes) of each range with a checksum. crcs: of the parts; None if
    the chunk was never written and is all zero.
    slot: the number of the file that has its newest values. committed: of the file that has its
    values as of the last committed step, and must not be written to (checkpoint/slots.py); the two
    files of a directory are 2n and 2n + 1. None with one file (Scratch): a chunk is written where
    it was read.
    """

    bucket: Bucket
    first: int
    numel: int
    format: StateFormat
    offset: int = 0
    parts: Sequence[tuple[int, int]] = ()
    crcs: list[int] | None = None
    slot: int = 0
    committed: int | None = None
    write: _C.FileTransfer | None = field(default=None, repr=False)  # the last one, maybe not over

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the chunk, without padding."""
        return self.format.nbytes(self.numel)

    @property
    def names(self) -> str:
        """Names of some of its parameters."""
        return ", ".join(managed.name for managed in self.bucket.params[:3])


class StateFiles(Protocol):
    """The files of chunks. paths: of the files. rates: of the directories, if they were
    measured.
    """

    paths: Sequence[Path]
    rates: Sequence[Rates]

    def open(self, engine: _C.FileEngine, chunks: Sequence[Chunk]) -> Sequence[_C.BlockFile]:
        """Assign each chunk its file, offset and parts, and allocate space for all of them. Raises
        OSError.
        """

    def before_write(self, slot: int) -> None:
        """Prepare a file for writes: it may be replaced by another one in the list that `open`
        returned. Raises OSError.
        """


class Scratch:
    """Files without names once they are open: their space is free again after the process ends
    for any reason. Jobs may share the directories.
    """

    def __init__(self, directories: Sequence[Path], rates: Sequence[Rates] = ()) -> None:
        """Keep states in a file of each directory, which is made if it is missing. rates: of the
        directories, if they are measured already.
        """
        self._directories = directories
        self.paths: Sequence[Path] = ()
        self.rates = rates

    def open(self, engine: _C.FileEngine, chunks: Sequence[Chunk]) -> Sequence[_C.BlockFile]:
        """See StateFiles."""
        self.rates, stripes = deal(engine, self._directories, chunks, self.rates)
        alignment = max(alignment_of(engine, directory) for directory in self._directories)
        files, self.paths = [], []
        for number, (directory, stripe) in enumerate(zip(self._directories, stripes, strict=True)):
            size = place(stripe, 0, alignment)
            for chunk in stripe:
                chunk.slot, chunk.parts = number, [(0, chunk.nbytes)]
            with temporary(directory) as path:
                self.paths.append(path)
                files.append(_C.BlockFile(engine, path, size))
        return files

    def before_write(self, slot: int) -> None:
        """See StateFiles."""


class Unopened(Scratch):
    """Files that are only planned, and never opened."""


def check_directories(directories: Sequence[Path]) -> None:
    """Raise NotADirectoryError for a file, and ValueError for a directory that is listed twice."""
    path_of: dict[Path, Path] = {}
    for path in directories:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(
                f'shard: offload["path"] has {path}, a file; expected a directory'
            )
        if (earlier := path_of.setdefault(path.resolve(), path)) is not path:
            raise ValueError(
                f'shard: offload["path"] has {earlier} and {path}, the same directory; expected '
                "each directory once"
            )


def deal(
    engine: _C.FileEngine,
    directories: Sequence[Path],
    chunks: Sequence[Chunk],
    rates: Sequence[Rates] = (),
) -> tuple[Sequence[Rates], Sequence[Sequence[Chunk]]]:
    """Make the directories; return the rates of their disks, measured if there are several, and the
    chunks of each.

    Each disk gets as many chunks as all read and write in equal time. Neighbours lie on different
    disks, which work at the same time. Rates decide where bytes lie, never which bytes.
    """
    check_directories(directories)
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    if len(directories) == 1 or not chunks:
        return rates, [chunks, *([] for _ in directories[1:])]
    probe = min(PROBE_BYTES, sum(chunk.nbytes for chunk in chunks))
    rates = rates or [measure(engine, directory, probe) for directory in directories]
    stripes: list[list[Chunk]] = [[] for _ in directories]
    dealt = [0] * len(directories)
    for chunk in chunks:
        number = min(
            range(len(directories)),
            key=lambda number: (dealt[number] + chunk.nbytes) / rates[number].both,
        )
        dealt[number] += chunk.nbytes
        stripes[number].append(chunk)
    return rates, stripes


def place(chunks: Iterable[Chunk], offset: int, alignment: int) -> int:
    """Place chunks one after the other from `offset` on; returns where they end."""
    for chunk in chunks:
        chunk.offset, offset = offset, offset + round_up(chunk.nbytes, alignment)
    return offset


@dataclass(frozen=True)
class DiskUse:
    """Bytes of one rank on disk: read and written per step, and the space that files take."""

    read: int
    written: int
    space: int

    def seconds(self, rates: Rates) -> float:
        """Return how long a disk with these rates takes for a step."""
        return max(
            (self.read + self.written) / rates.both,
            self.written / rates.write,
            self.read / rates.read,
        )

    @property
    def steps_until_worn(self) -> int:
        """How many steps a disk lasts that nothing else writes to."""
        return int(RATED_TBW * 1e12 / max(1, self.written))


def disk_use(
    buckets: Iterable[Bucket],
    durable: bool,
    states: Iterable[Chunk],
    weights: Iterable[Chunk] = (),
) -> DiskUse:
    """Return the disk use of these chunks. durable: steps are committed (checkpoint/commits.py),
    with the states and weights that are not in these chunks.

    weights: chunks of weights. Forward and backward read them, and a step reads and writes those
    that it updates.
    """
    states_bytes = sum(round_up(chunk.nbytes, ALIGNMENT) for chunk in states)
    committed_bytes = 0
    for bucket in buckets if durable else ():
        if bucket.group is not None:
            committed_bytes += bucket.state_format.nbytes(bucket.device_numel)
        if bucket.trainable and bucket.state_format.reads_weights:
            committed_bytes += bucket.owned_numel * bucket.dtype.itemsize
    space = updated = 0
    for chunk in weights:
        size = round_up(chunk.nbytes, ALIGNMENT)
        space += size
        updated += size if chunk.bucket.group is not None else 0
    return DiskUse(
        states_bytes + updated + 2 * space,
        states_bytes + committed_bytes + updated,
        (1 + durable) * (states_bytes + committed_bytes) + space,
    )


class NvmeStates:
    """See the head of this file. Has the methods of HostStates. Several threads may read."""

    tier = "nvme"
    content = "states"
    places = PLACES

    def __init__(
        self,
        buckets: Sequence[Bucket],
        files: StateFiles,
        allocate: Allocate,
        format_of: Callable[[Bucket], StateFormat] = lambda bucket: bucket.state_format,
    ) -> None:
        """Allocate space in files for zero states of `buckets`, and memory for the buffers. Raises
        OSError.
        """
        self._format_of = format_of
        self._chunks = {bucket: list(chunks_of(bucket, format_of(bucket))) for bucket in buckets}
        # of the largest chunk
        self.chunk_numel = max((chunk.numel for chunk in self.chunks), default=0)
        self.files = files
        planned = isinstance(files, Unopened)
        self._files = [] if planned else files.open(file_engine(), self.chunks)
        alignment = max([ALIGNMENT, *(file.block_bytes for file in self._files)])
        size = round_up(max((chunk.nbytes for chunk in self.chunks), default=0), alignment)
        # the last one: see _hold
        self._buffers = [aligned(allocate, size, alignment) for _ in range(PLACES + 1)]
        self.scratch_bytes = (size + alignment) * len(self._buffers)
        self._alignment, self._size = alignment, size
        self.bytes_read = self.bytes_written = 0  # of the file so far
        self._lock = threading.RLock()
        self._not_durable: OSError | None = None
        self._in_memory: Chunk | None = None
        self._memory_is_newer = False
        self._step: list[Chunk] = []
        self._reads: dict[int, _C.FileTransfer] = {}
        # the chunk that a buffer was written to last
        self._writes: list[Chunk | None] = [None] * PLACES

    @property
    def chunks(self) -> list[Chunk]:
        """All chunks."""
        return [chunk for chunks in self._chunks.values() for chunk in chunks]

    def flush(self) -> None:
        """Make all writes so far durable; not during a step. Raises OSError, and raises the error
        of a file again at each later call.
        """
        with self._lock:
            self._put_memory_back()
            for chunk in self.chunks:
                self._settle(chunk)
        if self._not_durable is not None:
            raise self._not_durable
        try:
            for file in self._files:
                file.sync()
        except OSError as error:  # the kernel reports dropped pages only once
            self._not_durable = error
            raise

    def forget(self) -> None:
        """Drop the chunk that is cached in memory: the files have other values now."""
        self._in_memory, self._memory_is_newer = None, False

    # --- as HostStates ----------------------------------------------------------------------------

    def stored(self, bucket: Bucket) -> Iterator[tuple[str, int]]:
        """Yield (key, bytes) of each tensor that keeps a bucket's states."""
        for key in self._format_of(bucket).dtypes:
            yield key, sum(places_of(chunk)[key][1].nbytes for chunk in self._chunks[bucket])

    def states_of(self, bucket: Bucket, start: int, numel: int) -> StateTensors:
        """Return states of elements [start, start + numel) of the part in the tier, in memory of
        their own.
        """
        with self._lock:
            parts = [
                {
                    key: flat.clone()
                    for key, flat in range_of(self._hold(chunk), first, count).items()
                }
                for chunk, first, count in self._overlapping(bucket, start, numel)
            ]
        if not parts:
            return self._format_of(bucket).new(
                0, lambda n, dtype: torch.empty(n, dtype=dtype, device="cpu")
            )
        return (
            parts[0]
            if len(parts) == 1
            else {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        )

    def change(
        self, bucket: Bucket, start: int, numel: int
    ) -> Iterator[tuple[int, int, StateTensors]]:
        """Yield (start, numel, states to write to) of each part of a range. The caller's writes are
        final when it requests the next part.
        """
        with self._lock:
            for chunk, first, count in self._overlapping(bucket, start, numel):
                views = self._hold(chunk)
                self._memory_is_newer = True
                yield chunk.first + first, count, range_of(views, first, count)

    def cut(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Yield the spans of each chunk of a step, in order."""
        parts = [part for span in spans for part in self._parts_of(span)]
        return (list(of_chunk) for _, of_chunk in groupby(parts, self._chunk_of))

    def of_chunk(self, spans: Sequence[Span], turn: int) -> list[StateTensors]:
        """View the states of each span of chunk `turn` of a step, where they are while Adam
        works on them.
        """
        chunk = self._chunk_of(spans[0])
        views = self._views(chunk, turn % PLACES)
        return [
            range_of(views, span.start - span.bucket.device_numel - chunk.first, span.numel)
            for span in spans
        ]

    def begin(self, cut: Sequence[Sequence[Span]]) -> None:
        """Begin a step over these chunks: the first ones are read."""
        with self._lock:
            self._put_memory_back()
            self._in_memory = None
        self._reads.clear()  # of a step that failed
        self._step = [self._chunk_of(spans[0]) for spans in cut]
        for number in range(min(PLACES - 2, len(self._step))):
            self._start_read(number)

    def before(self, number: int) -> None:
        """Wait until chunk `number` of the step is in its buffer. Raises OSError."""
        chunk = self._step[number]
        self._reads.pop(number).wait()
        self._check(chunk, self._memory(chunk, number % PLACES))

    def after(self, number: int) -> None:
        """Write chunk `number`, which was updated, and read on. Raises OSError of an earlier
        write.
        """
        chunk = self._step[number]
        with self._lock:
            self._start_write(chunk, number % PLACES)
        # May continue after the step, beside the next forward: who reads the chunk waits for it.
        self._writes[number % PLACES] = chunk
        if number + PLACES - 2 < len(self._step):
            self._start_read(number + PLACES - 2)

    # --- chunks -----------------------------------------------------------------------------------

    def _start_read(self, number: int) -> None:
        place = number % PLACES
        if (before := self._writes[place]) is not None:
            self._settle(before)
        chunk = self._step[number]
        self._settle(chunk)
        self._reads[number] = self._read(chunk, self._memory(chunk, place))

    def _read(self, chunk: Chunk, memory: torch.Tensor) -> _C.FileTransfer:
        self.bytes_read += memory.nbytes
        return self._files[chunk.slot].read(memory, chunk.offset)

    def _start_write(self, chunk: Chunk, place: int) -> None:
        memory = self._memory(chunk, place)
        self.bytes_written += memory.nbytes
        # the other file than the last committed step's, which stays whole until the next commit
        slot = chunk.slot if chunk.committed is None else chunk.committed ^ 1
        self.files.before_write(slot)  # a file that a checkpoint has is replaced
        chunk.slot = slot
        chunk.crcs = self._crcs(memory, chunk)
        chunk.write = self._files[chunk.slot].write(memory, chunk.offset)

    def _settle(self, chunk: Chunk) -> None:
        """Wait until the last write of a chunk is over. Raises OSError."""
        with self._lock:
            if chunk.write is not None:
                chunk.write.wait()
                chunk.write = None

    def _hold(self, chunk: Chunk) -> StateTensors:
        """Return views of a chunk in the extra buffer, which steps do not use. They are valid until
        the next chunk is requested.
        """
        if self._in_memory is not chunk:
            self._put_memory_back()
            self._settle(chunk)
            self._in_memory = None
            memory = self._memory(chunk, PLACES)
            if chunk.crcs is None:
                memory.zero_()
            else:
                self._read(chunk, memory).wait()
                self._check(chunk, memory)
            self._in_memory = chunk
        return self._views(chunk, PLACES)

    def _put_memory_back(self) -> None:
        if self._in_memory is not None and self._memory_is_newer:
            self._start_write(self._in_memory, PLACES)
            self._settle(self._in_memory)
        self._memory_is_newer = False

    def _check(self, chunk: Chunk, memory: torch.Tensor) -> None:
        """Compare the checksums, which are kept in memory: a damaged chunk is an error before
        anything is trained on it.
        """
        if chunk.crcs is None:
            return
        for (offset, nbytes), crc, read_crc in zip(
            chunk.parts, chunk.crcs, self._crcs(memory, chunk), strict=True
        ):
            if crc != read_crc:
                first = chunk.offset + offset
                raise OSError(
                    errno.EIO,
                    f"{self.content} of {chunk.names} in bytes {first} to {first + nbytes} differ "
                    "from the bytes written. The disk may be damaged: resume from a checkpoint in "
                    "another directory",
                    str(self.files.paths[chunk.slot]),
                )

    @staticmethod
    def _crcs(memory: torch.Tensor, chunk: Chunk) -> list[int]:
        return [_C.crc32c(memory[offset : offset + nbytes]) for offset, nbytes in chunk.parts]

    def _memory(self, chunk: Chunk, place: int) -> torch.Tensor:
        return self._buffers[place][: round_up(chunk.nbytes, self._alignment)]

    def _views(self, chunk: Chunk, place: int) -> StateTensors:
        """View the states of a chunk in a buffer."""
        memory = self._buffers[place]
        return {
            key: memory[offset : offset + like.nbytes].view(like.dtype)
            for key, (offset, like) in places_of(chunk).items()
        }

    def _parts_of(self, span: Span) -> Iterator[Span]:
        start = span.start - span.bucket.device_numel
        for chunk, first, numel in self._overlapping(span.bucket, start, span.numel):
            yield span.part(chunk.first + first - start, numel)

    def _chunk_of(self, span: Span) -> Chunk:
        return self._chunks[span.bucket][
            (span.start - span.bucket.device_numel) // self.chunk_numel
        ]

    def _overlapping(
        self, bucket: Bucket, start: int, numel: int
    ) -> Iterator[tuple[Chunk, int, int]]:
        """Yield (chunk, start in it, numel) of each chunk that has some of these elements."""
        for chunk in self._chunks[bucket]:
            first, last = max(start, chunk.first), min(start + numel, chunk.first + chunk.numel)
            if first < last:
                yield chunk, first - chunk.first, last - first


def places_of(chunk: Chunk) -> dict[str, tuple[int, torch.Tensor]]:
    """Return, for each state of a chunk, its offset in bytes and a meta tensor of its size and
    dtype. States are placed one after another, wide dtypes first.
    """
    cursor, places = 0, {}
    sizes = chunk.format.new(
        chunk.numel, lambda n, dtype: torch.empty(n, dtype=dtype, device="meta")
    )
    for key, like in sorted(sizes.items(), key=lambda item: -item[1].itemsize):
        places[key] = cursor, like
        cursor += like.nbytes
    return {key: places[key] for key in sizes}


def chunks_of(bucket: Bucket, form: StateFormat) -> Iterator[Chunk]:
    """Yield the chunks of a bucket's part in the tier."""
    for first in range(0, bucket.host_numel, CHUNK_NUMEL):
        yield Chunk(bucket, first, min(CHUNK_NUMEL, bucket.host_numel - first), form)


def aligned(allocate: Allocate, size: int, alignment: int) -> torch.Tensor:
    """Return memory of this size at a multiple of `alignment`."""
    memory = allocate(size + alignment, torch.uint8)
    skipped = -memory.data_ptr() % alignment
    return memory[skipped : skipped + size]
