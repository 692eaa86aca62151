"""Blocks of a file that are read and written in place: what comes back, what is refused, what
fails.
"""

import errno
from pathlib import Path

import pytest
import torch

from shardcore._native import _C

BLOCK, BLOCKS = 4096, 300


def _aligned(size: int) -> torch.Tensor:
    memory = torch.empty(size + BLOCK, dtype=torch.uint8)
    skipped = -memory.data_ptr() % BLOCK
    return memory[skipped : skipped + size]


def _random(seed: int) -> torch.Tensor:
    memory = _aligned(BLOCKS * BLOCK)
    return memory.copy_(
        torch.randint(0, 256, memory.shape, generator=torch.Generator().manual_seed(seed))
    )


def test_blocks_come_back_and_unwritten_ones_are_zero(tmp_path: Path) -> None:
    file = _C.BlockFile(_C.FileEngine(), tmp_path / "file", 2 * BLOCKS * BLOCK)
    data, found = _random(0), _aligned(2 * BLOCKS * BLOCK).fill_(7)
    transfer = file.write(data, BLOCKS * BLOCK)
    transfer.wait()
    transfer.wait()
    file.sync()
    file.read(found, 0).wait()
    assert found[: BLOCKS * BLOCK].eq(0).all()
    assert found[BLOCKS * BLOCK :].equal(data)


def test_the_memory_lives_until_the_transfer_is_over(tmp_path: Path) -> None:
    file = _C.BlockFile(_C.FileEngine(faults="delay:50"), tmp_path / "file", BLOCKS * BLOCK)
    transfer = file.write(_random(1), 0)
    torch.full((BLOCKS * BLOCK,), 9, dtype=torch.uint8)
    transfer.wait()
    found = _aligned(BLOCKS * BLOCK)
    file.read(found, 0).wait()
    assert found.equal(_random(1))


def test_what_is_not_in_whole_blocks_of_the_file_is_refused(tmp_path: Path) -> None:
    file = _C.BlockFile(_C.FileEngine(), tmp_path / "file", BLOCKS * BLOCK)
    memory = _aligned(2 * BLOCK)
    for refused, offset in ((memory, BLOCKS * BLOCK - BLOCK), (memory, -BLOCK), (memory[:0], 0)):
        with pytest.raises(
            ValueError, match=r"expected whole blocks of \d+ inside of .*file, which has 1228800"
        ):
            file.read(refused, offset)
    if file.block_bytes > 1:
        for refused, offset in ((memory[1 : 1 + BLOCK], 0), (memory[: BLOCK + 1], 0), (memory, 1)):
            with pytest.raises(ValueError, match="expected whole blocks"):
                file.write(refused, offset)
        with pytest.raises(ValueError, match="size_bytes has 5; expected a multiple"):
            _C.BlockFile(_C.FileEngine(), tmp_path / "other", 5)
    with pytest.raises(ValueError, match="contiguous"):
        file.read(torch.empty(BLOCK, 2, dtype=torch.uint8)[:, 0], 0)
    with pytest.raises(FileNotFoundError):
        _C.BlockFile(_C.FileEngine(), tmp_path / "none/file", BLOCK)


@pytest.mark.parametrize("op", ["read", "write"])
def test_errors_have_number_path_and_offset(op: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = _C.BlockFile(_C.FileEngine(faults=f"{op}:EIO@{5 * BLOCK}"), path, BLOCKS * BLOCK)
    memory = _random(2)
    getattr(file, op)(memory[:BLOCK], 0).wait()
    for _ in range(2):
        with pytest.raises(OSError, match=f"{op} at offset 0 failed") as error:
            getattr(file, op)(memory, 0).wait()
        assert (error.value.errno, error.value.filename) == (errno.EIO, str(path))
    with pytest.raises(OSError, match="No space left"):
        _C.BlockFile(_C.FileEngine(faults="reserve:ENOSPC"), path, BLOCK)
    with pytest.raises(OSError, match="fdatasync"):
        _C.BlockFile(_C.FileEngine(faults="sync:EIO"), path, BLOCK).sync()
