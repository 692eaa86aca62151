"""A disk is measured with its own reads and writes, and nothing stays there."""

import os
from pathlib import Path

import pytest

from shardcore._native import _C
from shardcore.offload import disk


def open_files(folder: Path) -> list[str]:
    """Return what this process has open under a folder."""
    found = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return [path for path in found if path.startswith(str(folder))]


def test_rates_are_measured_and_nothing_stays(tmp_path: Path) -> None:
    rates = disk.measure(_C.FileEngine(backend="threads"), tmp_path, 1 << 20)
    before = open_files(tmp_path)
    assert min(rates.read, rates.write, rates.both) > 0
    slow = disk.measure(_C.FileEngine(backend="threads", faults="delay:50"), tmp_path, 1 << 20)
    assert max(slow.read, slow.write) < (1 << 20) / 0.05, "a disk that takes longer is seen"
    assert list(tmp_path.iterdir()) == []
    assert open_files(tmp_path) == before == []


def test_a_disk_is_named(tmp_path: Path) -> None:
    said = disk.about(_C.FileEngine(backend="threads"), tmp_path)
    assert said.startswith(disk._mount_of(tmp_path))
    assert said.endswith(
        (
            "the page cache (O_DIRECT) by threads",
            "through the page cache by threads",
            "tmpfs (memory) by threads",
        )
    )


def test_memory_is_not_taken_for_a_disk() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or not disk._mount_of(shared).startswith("tmpfs ("):
        pytest.skip("needs a tmpfs at /dev/shm")
    assert disk.about(_C.FileEngine(backend="threads"), shared) == "tmpfs (memory) by threads"


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none'$"):
        disk.measure(_C.FileEngine(), tmp_path / "none", 4096)
