"""The disk of a directory: its kind and its rates; and the file engine of this process."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from shardcore._native import _C

ALIGNMENT = 4096  # of places in files; a disk with larger blocks sets it
_PIECE_BYTES = 4 << 20
PROBE_BYTES = 64 << 20
_MEMORY = "tmpfs (memory)"  # a file system without a disk
_IN_MEMORY = "tmpfs", "devtmpfs", "ramfs"
# The most host memory of a file engine, for writes that do not use the caller's memory.
ENGINE_BYTES = 32 << 20


@dataclass(frozen=True)
class Rates:
    """Bytes per second: read, written, and of both together while as much is read as is written."""

    read: float
    write: float
    both: float


def striped(rates: Sequence[Rates]) -> Rates:
    """Return the joint rates of disks that are read and written at the same time."""
    return Rates(
        *(sum(getattr(of_disk, name) for of_disk in rates) for name in ("read", "write", "both"))
    )


def file_engine() -> _C.FileEngine:
    """Return the file engine of this process; it uses ENGINE_BYTES of host memory."""
    return _engine_of(os.getpid())


@cache
def _engine_of(process: int) -> _C.FileEngine:
    return _C.FileEngine()


@contextmanager
def temporary(directory: Path) -> Iterator[Path]:
    """Make an empty file whose name is gone afterwards. Raises OSError, which names the
    directory.
    """
    try:
        descriptor, name = tempfile.mkstemp(".states", "shardcore-", directory)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(directory)) from error
    os.close(descriptor)
    try:
        yield Path(name)
    finally:
        os.unlink(name)


def alignment_of(engine: _C.FileEngine, directory: Path) -> int:
    """Return the alignment of offsets in the files of a directory."""
    with temporary(directory) as path:
        return max(ALIGNMENT, _C.BlockFile(engine, path, 0).block_bytes)


def measure(engine: _C.FileEngine, directory: Path, nbytes: int = PROBE_BYTES) -> Rates:
    """Measure the disk of a directory with a temporary file of twice `nbytes`.
    Raises OSError.
    """
    alignment = alignment_of(engine, directory)
    piece = min(_PIECE_BYTES, max(alignment, nbytes // alignment * alignment))
    count = max(1, nbytes // piece)
    memory = torch.empty(2 * count * piece + alignment, dtype=torch.uint8, device="cpu")
    memory.random_(generator=torch.Generator().manual_seed(0))  # some disks compress
    skipped = -memory.data_ptr() % alignment
    pieces = [memory[skipped + i * piece : skipped + (i + 1) * piece] for i in range(2 * count)]
    first, second = pieces[:count], pieces[count:]
    with temporary(directory) as path:
        file = _C.BlockFile(engine, path, 2 * count * piece)

        def transfers(
            transfer: Callable[..., _C.FileTransfer], of: Sequence[torch.Tensor], start: int
        ) -> list[_C.FileTransfer]:
            return [transfer(memory, (start + i) * piece) for i, memory in enumerate(of)]

        def rate(start: Callable[[], list[_C.FileTransfer]], sync: bool) -> float:
            begun = time.perf_counter()
            started = start()
            for transfer in started:
                transfer.wait()
            if sync:
                file.sync()
            return len(started) * piece / (time.perf_counter() - begun)

        transfers(file.write, second, count)[-1].wait()
        write = rate(lambda: transfers(file.write, first, 0), sync=True)
        read = rate(lambda: transfers(file.read, first, 0), sync=False)
        both = rate(
            lambda: [*transfers(file.read, first, 0), *transfers(file.write, second, count)],
            sync=True,
        )
    return Rates(read, write, both)


def about(engine: _C.FileEngine, directory: Path) -> str:
    """Return the device and file system of a directory, and how files there are read and
    written, in words.
    """
    with temporary(directory) as path:
        direct = _C.BlockFile(engine, path, 0).block_bytes > 1
    mount = _mount_of(directory)
    if mount != _MEMORY:
        mount += ", past the page cache (O_DIRECT)" if direct else ", through the page cache"
    return f"{mount} by {engine.backend}{f' ({engine.note})' if engine.note else ''}"


def make_directory(directory: Path) -> None:
    """Make a directory unless it exists. FileNotFoundError where that would be on the root file
    system or in memory: a mistyped path leads there, and files of states would fill it.
    """
    above = next(f for f in (directory.absolute(), *directory.absolute().parents) if f.exists())
    mount, on_root = _mount_of(above), _is_on_root(above)
    if above != directory.absolute() and (on_root or mount == _MEMORY):
        raise FileNotFoundError(
            f'shard: offload["path"] has {directory}, which does not exist, and {above} is on '
            f"{'the root file system, ' if on_root else 'a '}{mount}. Create the folder first if "
            f"you mean this disk: mkdir -p {directory}"
        )
    directory.mkdir(parents=True, exist_ok=True)


def _is_on_root(directory: Path) -> bool:
    return os.stat(directory).st_dev == os.stat("/").st_dev


def space_of(directory: Path) -> str:
    """Return in words where a directory is, and how much space is free there."""
    return f"{_mount_of(directory)} with {shutil.disk_usage(directory).free / 2**30:.1f} GiB free"


def _mount_of(directory: Path) -> str:
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, source_fields = line.partition(" - ")
        if fields.split()[2] == device:
            kind, source, *_ = source_fields.split()
            return _MEMORY if kind in _IN_MEMORY else f"{source} ({kind})"
    return f"device {device}"
