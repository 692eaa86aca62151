"""A disk is measured with its own reads and writes, and nothing stays there."""

import os
import re
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


@pytest.mark.parametrize("mount", ["root", "memory", "disk"])
def test_a_directory_is_made_on_disks_that_are_mounted_alone(
    mount: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistyped path leads to the root file system, or into memory."""
    new, kind = tmp_path / "nvme" / "states", "tmpfs" if mount == "memory" else "/dev/disk1 (ext4)"
    monkeypatch.setattr(disk, "_is_on_root", lambda folder: mount == "root")
    monkeypatch.setattr(disk, "_mount_of", lambda folder: disk._MEMORY if "tmpfs" in kind else kind)
    if mount == "disk":
        disk.make_directory(new)
        disk.make_directory(new)
        assert new.is_dir()
        return
    expected = (
        rf"{new}, which does not exist, and {tmp_path} is on .*({re.escape(kind)}).*mkdir -p {new}$"
    )
    with pytest.raises(FileNotFoundError, match=expected):
        disk.make_directory(new)
    assert not new.parent.exists()
    new.mkdir(parents=True)
    disk.make_directory(new)  # as it is


def test_memory_is_not_taken_for_a_disk() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or not disk._mount_of(shared).startswith("tmpfs ("):
        pytest.skip("needs a tmpfs at /dev/shm")
    assert disk.about(_C.FileEngine(backend="threads"), shared) == "tmpfs (memory) by threads"


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none'$"):
        disk.measure(_C.FileEngine(), tmp_path / "none", 4096)
