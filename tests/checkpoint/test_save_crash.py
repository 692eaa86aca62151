"""Nothing is lost: processes are killed, disks fill, transfers fail and bits flip, and each error
says where it was.

A few times each; make crash-test does all of it often, and prints a table.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore._native import _C
from shardcore.checkpoint import format as layout
from shardcore.checkpoint import write
from shardcore.checkpoint.directory import checkpoints
from shardcore.checkpoint.format import Checkpoint
from tests.support.crash import times
from tests.support.models import Net, Run, error_of, hash_of_training, stepped, train
from tests.support.ranks import free_port, join_group, start

pytestmark = pytest.mark.crash

RUN = Run(stage=2, steps=0, precision="bf16", shard={"offload": {"optimizer": "cpu"}})
Record = Callable[[str, Any], None]


def make(rank: int = 0) -> tuple[Any, Any]:
    model, optimizer, _ = train(rank, RUN, Net(width=64, hidden=512))
    return model, optimizer


# --- killed processes -----------------------------------------------------------------------------


def _save_forever(
    rank: int, world_size: int, port: str, folder: str, wait: bool, early: bool
) -> None:
    """Resume, then step and save; `folder`.complete has the last step of which a save has said that
    it is on disk.

    early: the broken twin, which names a checkpoint before it is whole.
    """
    if world_size > 1:
        join_group(rank, world_size, port)
    model, optimizer = make(rank)
    step = (
        shardcore.load(folder, model, optimizer).client_state["step"]
        if Path(folder, "latest").exists()
        else 0
    )
    complete = os.open(f"{folder}.complete", os.O_CREAT | os.O_WRONLY)
    while True:
        if rank == 0:
            os.pwrite(complete, f"{step if wait else max(0, step - 1):8d}".encode(), 0)
        stepped(model, optimizer, rank, step)
        step += 1
        state = {"step": step, "hash": hash_of_training(model, optimizer)}
        if early:
            Path(folder).mkdir(exist_ok=True)
            Path(folder, "latest").write_text(f"step{step}")
        shardcore.save(
            folder, model, optimizer, tag=f"step{step}", client_state=state, keep_last=2, wait=wait
        )


def _torn(folder: Path) -> bool:
    return folder.exists() and any(name.endswith(".saving") for name in os.listdir(folder))


def _kill_while_saving(
    folder: Path, world_size: int, wait: bool, chance: random.Random, early: bool = False
) -> int:
    """Kill the ranks of a job that saves, one after the other; returns the last step that was on
    disk for certain.
    """
    complete = Path(f"{folder}.complete")
    complete.unlink(missing_ok=True)
    port = free_port()
    ranks = [
        start(_save_forever, rank, world_size, port, str(folder), wait, early)
        for rank in range(world_size)
    ]
    until, saves = time.monotonic() + 120, chance.randrange(4)

    def wait_for(what: Callable[[], bool]) -> None:
        while not what():
            assert time.monotonic() < until, "a job saves"
            assert all(rank.is_alive() for rank in ranks), "nothing but the signal ends a job"
            time.sleep(0.0005)

    try:
        wait_for(lambda: complete.exists() and bool(complete.read_text()))
        begun = int(complete.read_text())
        wait_for(lambda: int(complete.read_text()) >= begun + saves and _torn(folder))
        time.sleep(chance.random() ** 3 * 0.05)
    finally:
        for rank in chance.sample(ranks, world_size):  # as torchrun does when one has died
            rank.kill()
            time.sleep(chance.random() * 0.02)
        for rank in ranks:
            rank.join()
    return int(complete.read_text())


def _check_what_is_left(
    folder: Path, complete: int, model: Any, optimizer: Any, hashes: dict[int, str]
) -> None:
    for path in checkpoints(folder):
        state = shardcore.load(path, model, optimizer).client_state
        assert hash_of_training(model, optimizer) == state["hash"], "a checkpoint is one moment's"
        assert hashes.setdefault(state["step"], state["hash"]) == state["hash"], (
            "a resumed training is the same one"
        )
    if complete > 0 or (folder / "latest").exists():
        assert shardcore.load(folder, model, optimizer).client_state["step"] >= complete, (
            "what is on disk is not lost"
        )


@pytest.mark.cases(1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_killed_job_loses_nothing(
    tmp_path: Path, world_size: int, record_property: Record
) -> None:
    chance = random.Random(world_size)
    folder, count = tmp_path / "saved", times("kills", 6) // 2
    model, optimizer = make()
    torn = again = in_background = 0
    hashes: dict[int, str] = {}
    for number in range(count):
        wait = number % 2 == 0
        in_background += not wait
        left, before = _torn(folder), len(hashes)
        complete = _kill_while_saving(folder, world_size, wait, chance)
        _check_what_is_left(folder, complete, model, optimizer, hashes)
        again += left and len(hashes) > before
        torn += _torn(folder)
    assert len(hashes) > 1, "jobs have saved"
    assert torn > 0, "some were killed in the middle"
    what = f"killed while saving, {world_size} process{'es' * (world_size - 1)}"
    how = (
        f"{in_background} in the background, {torn} left a part of a save, {again} saved again "
        f"after that"
    )
    record_property("crash", (what, count, f"0 lost ({how})"))


@pytest.mark.more
def test_a_checkpoint_that_is_named_too_early_is_lost(tmp_path: Path) -> None:
    chance, folder = random.Random(0), tmp_path / "saved"
    model, optimizer = make()

    def kill_jobs() -> None:
        for _ in range(20):
            shutil.rmtree(folder, ignore_errors=True)
            complete = _kill_while_saving(folder, 1, True, chance, early=True)
            _check_what_is_left(folder, complete, model, optimizer, {})

    with pytest.raises((OSError, ValueError)):
        kill_jobs()


def _rank_that_dies(rank: int, folder: str, port: str) -> None:
    join_group(rank, 2, port)
    model, optimizer, _ = train(rank, Run(stage=2, steps=1))
    shardcore.save(folder, model, optimizer)
    dist.barrier()
    if rank == 1:
        write.file_engine = lambda: os.kill(os.getpid(), signal.SIGKILL)
    said = error_of(lambda: shardcore.save(folder, model, optimizer, tag="never"))
    Path(folder, "said").write_text(said)


def test_a_rank_that_dies_in_a_save_is_noticed(tmp_path: Path, record_property: Record) -> None:
    count = times("dead_ranks", 1)
    model, optimizer, _ = train(0, Run(stage=2, steps=0))
    for number in range(count):
        folder, port = tmp_path / str(number), free_port()
        processes = [start(_rank_that_dies, rank, str(folder), port) for rank in range(2)]
        for process in processes:
            process.join(100)
            assert process.exitcode is not None
        assert "never" not in os.listdir(folder)
        assert (folder / "latest").read_text() == "global_step1"
        assert "rank" in (folder / "said").read_text()
        shardcore.load(folder, model, optimizer)
    record_property(
        "crash",
        ("a rank that dies in a collective save", count, "noticed, the checkpoint before it loads"),
    )


# --- a full disk ----------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(
            f"cannot mount a small disk here ({done.stderr.strip()}); test_save.py injects ENOSPC "
            f"instead"
        )
    yield place
    subprocess.run(["umount", place], check=True)


def _fill(disk: Path, left: int) -> Path:
    """Leave so many bytes of a disk."""
    filler = disk / "filler"
    with open(filler, "wb") as file:
        space = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, max(1, space.f_bavail * space.f_bsize - left))
    return filler


@pytest.mark.more
def test_a_full_disk_is_named_and_loses_nothing(small_disk: Path, record_property: Record) -> None:
    chance = random.Random(3)
    folder, count = small_disk / "saved", times("full_disks", 5)
    model, optimizer = make()
    stepped(model, optimizer, 0, 0)
    path = shardcore.save(folder, model, optimizer, tag="old").path
    size = sum(-(-file.stat().st_size // 4096) * 4096 for file in path.iterdir())
    data = (path / layout.data_file(0)).stat().st_size
    full = 0
    for number in range(count):
        expected = hash_of_training(model, optimizer)
        stepped(model, optimizer, 0, number + 1)
        # Somewhere in the data, or in one of the small files after them, "latest" among these; or
        # not quite.
        filler = _fill(
            small_disk,
            chance.choice((chance.randrange(data), chance.randrange(data, size + 40_960))),
        )
        said = error_of(
            lambda: shardcore.save(folder, model, optimizer, tag=chance.choice(("old", "new")))
        )
        if said != "no error":
            full += 1
            assert "No space left on device" in said
            assert str(folder) in said, "the file is named"
            trained = hash_of_training(model, optimizer)
            shardcore.load(folder, model, optimizer)  # whatever "latest" names
            shardcore.load(folder, model, optimizer, tag="old")
            assert hash_of_training(model, optimizer) in (expected, trained)
        filler.unlink()
        if "new" in os.listdir(folder):
            shardcore.load(folder, model, optimizer, tag="new")
        shardcore.save(folder, model, optimizer, tag="old")
    assert full > count / 4
    record_property(
        "crash",
        (
            "a disk that fills",
            full,
            "named, the old checkpoint loads, saved again when there was room",
        ),
    )


# --- failing transfers ----------------------------------------------------------------------------


def _read_all(path: Path, faults: str) -> None:
    with Checkpoint(path, _C.FileEngine(faults=faults)) as checkpoint:
        for name, shape in checkpoint.shapes.items():
            for key in checkpoint.keys(name):
                checkpoint.read(name, key, 0, torch.Size(shape).numel())


@pytest.mark.cases(3)
@pytest.mark.parametrize("fault", ["write:EIO", "read:EIO", "flip:write", "flip:read"])
def test_each_fault_is_named_by_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, record_property: Record
) -> None:
    chance = random.Random(fault)
    count = times("faults", 3)
    model, optimizer = make()
    stepped(model, optimizer, 0, 0)
    path = shardcore.save(tmp_path, model, optimizer).path
    size = (path / layout.data_file(0)).stat().st_size
    _read_all(path, "")
    for _ in range(count):
        at = chance.randrange(size)
        writes = "write" in fault
        target = path
        said = ""
        if writes:
            with monkeypatch.context() as patch:
                patch.setattr(write, "file_engine", lambda: _C.FileEngine(faults=f"{fault}@{at}"))  # noqa: B023
                said = error_of(lambda: shardcore.save(tmp_path, model, optimizer, tag="next"))
            target = tmp_path / "next"
        if fault != "write:EIO":
            said = error_of(lambda: _read_all(target, "" if writes else f"{fault}@{at}"))  # noqa: B023
        assert layout.data_file(0) in said
        if "flip" in fault:
            first, end = map(
                int, said.partition("in bytes ")[2].partition(" (")[0].split(",")[0].split(" to ")
            )
        else:
            assert "Input/output error" in said
            asked, _, first_text = said.partition(" failed: ")[2].partition(" bytes asked at ")
            first = int(first_text.partition(",")[0])
            end = first + int(asked)
        assert first <= at < end, "the offset is named"
        _read_all(path, "")
    record_property(
        "crash", (f"{fault} at a byte", count, "100% found, and named by file and offset")
    )
