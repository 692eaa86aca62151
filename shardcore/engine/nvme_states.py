"""Optimizer states in files: read, updated and written chunk by chunk, through a few buffers in host memory.

A chunk is a range of a bucket's part in the tier, of at most CHUNK_NUMEL elements, with all of its states beside each other, at
one place of this rank's file. Buffers are as large as the largest chunk, so no tensor is too large for them.

Note [Three things at once]. While Adam works on a chunk, the next ones are read into other buffers and the ones before are
written from theirs. A buffer is used again when its write is over. What is still being written when a step ends goes on beside
the next forward; whoever reads that chunk waits for it.

Note [Scratch]. The file has no name any more once it is open: whatever ends the process, its space is free again, and two jobs
may use one directory. What lasts is a checkpoint (shardcore.save). A checksum of each chunk is kept in memory and compared in
each read, so a damaged chunk is an error before anything is trained on it.
"""

import errno
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardcore._native import _C
from shardcore.engine.bucket import Bucket
from shardcore.engine.state_store import Span
from shardcore.layout import round_up
from shardcore.optim.state_format import Allocate, Kept, range_of

CHUNK_NUMEL = 1 << 22
PLACES = 4  # two are read ahead, one is updated, one is written
_ALIGNMENT = 4096  # of each chunk; a disk with larger blocks sets it


@dataclass(eq=False)
class _Chunk:
    """Elements [first, first + numel) of a bucket's part in the tier, in the file at `offset`. crc: None if never written."""

    bucket: Bucket
    first: int
    numel: int
    nbytes: int
    offset: int = 0
    crc: int | None = None
    write: _C.FileTransfer | None = None  # that may not be over


def file_engine() -> _C.FileEngine:
    """Return what reads and writes a rank's file."""
    return _C.FileEngine()


def chunk_numel(buckets: Sequence[Bucket]) -> int:
    """Return the most elements that a chunk has."""
    return min(CHUNK_NUMEL, max((bucket.host_numel for bucket in buckets), default=0))


def buffer_bytes(buckets: Sequence[Bucket]) -> int:
    """Return the bytes of host memory that all buffers take."""
    return (PLACES + 1) * (_place_bytes(buckets) + _ALIGNMENT)


def _place_bytes(buckets: Sequence[Bucket], alignment: int = _ALIGNMENT) -> int:
    most = max((bucket.state_format.nbytes(min(bucket.host_numel, CHUNK_NUMEL)) for bucket in buckets), default=0)
    return round_up(most, alignment)


class NvmeStates:
    """See the head of this file, and HostStates, whose place this takes. Reads may come from several threads."""

    tier = "nvme"
    places = PLACES

    def __init__(self, buckets: Sequence[Bucket], directory: Path, allocate: Allocate) -> None:
        """Take a file's space for the states of `buckets`, all zero, and memory for the buffers. Raises OSError."""
        self._engine = file_engine()
        self._chunks = {bucket: list(_chunks_of(bucket)) for bucket in buckets}
        every = [chunk for chunks in self._chunks.values() for chunk in chunks]
        self.chunk_numel = chunk_numel(buckets)
        directory.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(".states", "shardcore-", directory)
        os.close(descriptor)
        self.path = Path(path)
        try:
            alignment = max(_ALIGNMENT, _C.BlockFile(self._engine, path, 0).block_bytes)
            cursor = 0
            for chunk in every:
                chunk.offset, cursor = cursor, cursor + round_up(chunk.nbytes, alignment)
            self._file = _C.BlockFile(self._engine, path, cursor)
        finally:
            os.unlink(path)
        self.file_bytes = cursor
        size = _place_bytes(buckets, alignment)
        self._buffers = [_aligned(allocate, size, alignment) for _ in range(PLACES + 1)]  # the last one: see _hold
        self.scratch_bytes = (size + alignment) * len(self._buffers)
        self._alignment = alignment
        self.bytes_read = self.bytes_written = 0  # of the file so far
        self._lock = threading.RLock()
        self._held: _Chunk | None = None
        self._held_is_newer = False
        self._step: list[_Chunk] = []
        self._reads: dict[int, _C.FileTransfer] = {}
        self._writes: list[_Chunk | None] = [None] * PLACES  # the chunk that a buffer was written to last

    # --- as HostStates ----------------------------------------------------------------------------------------------------

    def stored(self, bucket: Bucket) -> Iterator[tuple[str, int]]:
        """Yield (key, bytes) of each tensor that keeps a bucket's states."""
        for key, dtype in bucket.state_format.dtypes.items():
            yield key, sum(self._views(chunk, PLACES)[key].numel() for chunk in self._chunks[bucket]) * dtype.itemsize

    def kept(self, bucket: Bucket, start: int, numel: int) -> Kept:
        """Return states of elements [start, start + numel) of the part in the tier, in memory of their own."""
        with self._lock:
            found = [
                {key: flat.clone() for key, flat in range_of(self._hold(chunk), first, count).items()}
                for chunk, first, count in self._overlapping(bucket, start, numel)
            ]
        if not found:
            return bucket.state_format.new(0, lambda n, dtype: torch.empty(n, dtype=dtype, device="cpu"))
        return found[0] if len(found) == 1 else {key: torch.cat([one[key] for one in found]) for key in found[0]}

    def change(self, bucket: Bucket, start: int, numel: int) -> Iterator[tuple[int, int, Kept]]:
        """Yield (start, numel, states to write to) of each part of a range; they are kept once the next one is asked for."""
        with self._lock:
            for chunk, first, count in self._overlapping(bucket, start, numel):
                views = self._hold(chunk)
                self._held_is_newer = True
                yield chunk.first + first, count, range_of(views, first, count)

    def cut(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Yield the spans of each chunk of a step, in order."""
        last: tuple[Bucket, int] | None = None
        found: list[Span] = []
        for span in spans:
            done = 0
            while done < span.numel:
                at = span.start + done - span.bucket.device_numel
                index = at // self.chunk_numel
                part = span.part(done, min(span.numel - done, (index + 1) * self.chunk_numel - at))
                if last != (span.bucket, index) and found:
                    yield found
                    found = []
                last = span.bucket, index
                found.append(part)
                done += part.numel
        if found:
            yield found

    def of_chunk(self, spans: Sequence[Span], turn: int) -> list[Kept]:
        """View the states of each span of chunk `turn` of a step, where they are while Adam works on them."""
        chunk = self._chunk_of(spans[0])
        views = self._views(chunk, turn % PLACES)
        return [range_of(views, span.start - span.bucket.device_numel - chunk.first, span.numel) for span in spans]

    def begin(self, cut: Sequence[Sequence[Span]]) -> None:
        """Begin a step over these chunks: the first ones are read."""
        with self._lock:
            self._put_held()
            self._held = None
        self._reads.clear()  # of a step that failed
        self._step = [self._chunk_of(spans[0]) for spans in cut]
        for number in range(min(PLACES - 2, len(self._step))):
            self._start_read(number)

    def before(self, number: int) -> None:
        """Wait until chunk `number` of the step is in its buffer. Raises OSError."""
        chunk = self._step[number]
        self._reads.pop(number).wait()
        self._check(chunk, number % PLACES)

    def after(self, number: int) -> None:
        """Write chunk `number`, which was updated, and read on. Raises OSError of an earlier write."""
        chunk = self._step[number]
        with self._lock:
            self._start_write(chunk, number % PLACES)
        self._writes[number % PLACES] = chunk
        if number + PLACES - 2 < len(self._step):
            self._start_read(number + PLACES - 2)

    # --- chunks -----------------------------------------------------------------------------------------------------------

    def _start_read(self, number: int) -> None:
        place = number % PLACES
        if (before := self._writes[place]) is not None:
            self._settle(before)
        chunk = self._step[number]
        self._settle(chunk)
        self._reads[number] = self._read(chunk, place)

    def _read(self, chunk: _Chunk, place: int) -> _C.FileTransfer:
        memory = self._memory(chunk, place)
        self.bytes_read += memory.nbytes
        return self._file.read(memory, chunk.offset)

    def _start_write(self, chunk: _Chunk, place: int) -> None:
        memory = self._memory(chunk, place)
        self.bytes_written += memory.nbytes
        chunk.crc = _C.crc32c(memory)
        chunk.write = self._file.write(memory, chunk.offset)

    def _settle(self, chunk: _Chunk) -> None:
        """Wait until what was written of a chunk is in the file. Raises OSError."""
        with self._lock:
            if chunk.write is not None:
                chunk.write.wait()
                chunk.write = None

    def _hold(self, chunk: _Chunk) -> Kept:
        """Return views of a chunk in the buffer beside those of steps, which has it until another one is asked for."""
        if self._held is not chunk:
            self._put_held()
            self._settle(chunk)
            self._held = None
            if chunk.crc is None:  # never written
                self._memory(chunk, PLACES).zero_()
            else:
                self._read(chunk, PLACES).wait()
                self._check(chunk, PLACES)
            self._held = chunk
        return self._views(chunk, PLACES)

    def _put_held(self) -> None:
        if self._held is not None and self._held_is_newer:
            self._start_write(self._held, PLACES)
            self._settle(self._held)
        self._held_is_newer = False

    def _check(self, chunk: _Chunk, place: int) -> None:
        if chunk.crc is not None and _C.crc32c(self._memory(chunk, place)) != chunk.crc:
            names = ", ".join(managed.name for managed in chunk.bucket.params[:3])
            raise OSError(
                errno.EIO,
                f"states of {names} in bytes {chunk.offset} to {chunk.offset + chunk.nbytes} are not what was written (is the "
                "disk damaged? go on from a checkpoint, in another directory)",
                str(self.path),
            )

    def _memory(self, chunk: _Chunk, place: int) -> torch.Tensor:
        return self._buffers[place][: round_up(chunk.nbytes, self._alignment)]

    def _views(self, chunk: _Chunk, place: int) -> Kept:
        """View the states of a chunk in a buffer, one after the other, the widest dtypes first."""
        cursor, found = 0, {}
        sizes = chunk.bucket.state_format.new(chunk.numel, lambda n, dtype: torch.empty(n, dtype=dtype, device="meta"))
        for key, like in sorted(sizes.items(), key=lambda item: -item[1].itemsize):
            found[key] = self._buffers[place][cursor : cursor + like.nbytes].view(like.dtype)
            cursor += like.nbytes
        return {key: found[key] for key in sizes}

    def _chunk_of(self, span: Span) -> _Chunk:
        return self._chunks[span.bucket][(span.start - span.bucket.device_numel) // self.chunk_numel]

    def _overlapping(self, bucket: Bucket, start: int, numel: int) -> Iterator[tuple[_Chunk, int, int]]:
        """Yield (chunk, start in it, numel) of each chunk that has some of these elements."""
        for chunk in self._chunks[bucket]:
            first, last = max(start, chunk.first), min(start + numel, chunk.first + chunk.numel)
            if first < last:
                yield chunk, first - chunk.first, last - first


def _chunks_of(bucket: Bucket) -> Iterator[_Chunk]:
    for first in range(0, bucket.host_numel, CHUNK_NUMEL):
        numel = min(CHUNK_NUMEL, bucket.host_numel - first)
        yield _Chunk(bucket, first, numel, bucket.state_format.nbytes(numel))


def _aligned(allocate: Allocate, size: int, alignment: int) -> torch.Tensor:
    memory = allocate(size + alignment, torch.uint8)
    skipped = -memory.data_ptr() % alignment
    return memory[skipped : skipped + size]
