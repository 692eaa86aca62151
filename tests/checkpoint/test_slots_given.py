"""Checkpoints of committed states have the files of the states as they are: nothing is copied,
and steps do not change them.
"""

import errno
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore._native import _C
from shardcore.checkpoint import directory, slots
from shardcore.checkpoint.directory import checkpoints
from shardcore.offload import nvme_states
from tests.support.crash import times
from tests.support.models import (
    Run,
    error_of,
    hash_of_training,
    made,
    stepped,
    steps_of_run,
    train,
)
from tests.support.ranks import run_ranks, start
from tests.support.tiers import FORMS, in_memory, run_on_disk


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_states, "CHUNK_NUMEL", 512)


def _sums(folder: Path) -> dict[str, int]:
    return {
        str(path): zlib.crc32(path.read_bytes()) for path in sorted(folder.rglob("*.safetensors"))
    }


def _shared(folder: Path, saved: Path) -> int:
    """Return how many bytes of a checkpoint are those of the states' files."""
    inodes = {path.stat().st_ino for path in folder.iterdir()}
    return sum(path.stat().st_size for path in saved.iterdir() if path.stat().st_ino in inodes)


def _saved(rank: int, world_size: int, run: Run, folder: str, wait: bool) -> dict[str, Any]:
    """Train, save and train on; on disk and, for comparison, in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_states, "CHUNK_NUMEL", 512)
        found: dict[str, Any] = {}
        for where, of in (("memory", in_memory(run)), ("disk", run)):
            saved = Path(folder, where)
            model, optimizer, _ = train(rank, of)
            steps_of_run(model, optimizer, of, rank, range(2))
            saving = shardcore.save(saved, model, optimizer, tag="2", wait=wait)
            if rank == 0 and where == "disk" and wait:
                found["shared"] = _shared(Path(folder, "nvme"), saved / "2")
            steps_of_run(model, optimizer, of, rank, range(2, 3))
            saving.wait()
            before = _sums(saved)
            steps_of_run(model, optimizer, of, rank, range(3, 6))
            found[where] = hash_of_training(model, optimizer)
            assert _sums(saved) == before, "steps do not change a checkpoint"
            found[f"{where} copied"] = (saved / "2" / f"rank_{rank:05d}.safetensors").stat().st_size
        return found


def _loaded(rank: int, world_size: int, run: Run, folder: str) -> list[str]:
    hashes = []
    for where in ("memory", "disk"):
        model, optimizer, _ = train(rank, run)
        shardcore.load(Path(folder, where), model, optimizer)
        hashes.append(hash_of_training(model, optimizer))
    return hashes


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "form", "way", "wait"),
    [  # each form once; ways that leave a part elsewhere, or go on when the save begins
        (1, "masters", "overlapped", True),
        (2, "split 8-bit", "a share", False),
        (3, "bf16 states", "weights, too", True),
        (3, "fp32", "all on disk", False),
        (2, "stochastic", "added up", True),
    ],
)
def test_it_has_the_bits_of_an_ordinary_save_and_copies_no_states(
    stage: int, form: str, way: str, wait: bool, tmp_path: Path
) -> None:
    run = run_on_disk(tmp_path / "nvme", stage, form, way, resume=True)
    for found in run_ranks(2, _saved, run, str(tmp_path), wait):
        assert found["memory"] == found["disk"]
        if way != "a share":
            weights = (
                found["memory copied"] / 3 + 8192
                if FORMS[form][1].get("master") != "fp32"
                else 8192
            )
            assert found["disk copied"] <= weights
        if wait and "shared" in found:
            assert found["shared"] > 1000
    for hashes in run_ranks(3, _loaded, in_memory(run, stage=3, seed=7), str(tmp_path)):
        assert hashes[0] == hashes[1]


def _three_saves(folder: Path) -> tuple[list[str], list[str]]:
    """Save after each of three steps, train on, and return hashes of what was saved and of what
    is loaded.
    """
    model, optimizer, _ = train(0, run_on_disk(folder / "nvme", resume=True))
    saved = []
    for step in range(3):
        stepped(model, optimizer, 0, step)
        saved.append(hash_of_training(model, optimizer))
        shardcore.save(folder / "saved", model, optimizer)
    for step in range(3, 6):
        stepped(model, optimizer, 0, step)
    other, adam, _ = train(0, Run(2, 0, precision="bf16", seed=7))
    loaded = []
    for step in (1, 2, 3):
        shardcore.load(folder / "saved", other, adam, tag=f"global_step{step}")
        loaded.append(hash_of_training(other, adam))
    return saved, loaded


def test_each_of_several_checkpoints_keeps_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, loaded = _three_saves(tmp_path)
    assert saved == loaded
    monkeypatch.setattr(slots.Slots, "before_write", lambda self, slot: None)
    with pytest.raises(ValueError, match=r"slot_\d.safetensors is damaged in bytes"):
        _three_saves(tmp_path / "written to")


def test_what_is_left_behind_when_a_slot_is_replaced_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "_copy", lambda *_: None)
    with pytest.raises((AssertionError, OSError, ValueError)):
        test_chunks_that_lie_in_different_slots(tmp_path)


def test_a_slot_is_replaced_where_the_system_copies_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "copy_file_range", missing)
    test_chunks_that_lie_in_different_slots(tmp_path)


class _Branches(nn.Module):
    """Of its two branches a step trains one, or both: so chunks lie in different slots."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(10, width), nn.Linear(width, 3)) for width in (90, 50)
        )

    def forward(self, x: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
        return sum((self.branches[index](x).sum() for index in which), start=torch.zeros(()))


def _branches(folder: Path, seed: int = 0, path: Path | None = None) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model: Any = _Branches()
    offload = {"optimizer": "nvme", "path": path or folder, "resume": True}
    return shardcore.shard(
        model,
        shardcore.FusedAdam(model.parameters(), lr=1e-2),
        2,
        units=[],
        precision="bf16",
        offload=made(offload),
    )


@pytest.mark.more
def test_chunks_that_lie_in_different_slots(tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(0)
    model, optimizer = _branches(tmp_path / "nvme")
    hashes = {}
    for step in range(20):
        which = ((0,), (1,), (0, 1))[int(torch.randint(3, (), generator=chance))]
        model(torch.randn(4, 10, generator=chance), which).backward()
        optimizer.step()
        optimizer.zero_grad()
        what = int(torch.randint(6, (), generator=chance))
        if what < 2:
            hashes[str(step)] = hash_of_training(model, optimizer)
            shardcore.save(tmp_path / "saved", model, optimizer, tag=str(step))
        elif what == 2:
            shardcore.load(
                tmp_path / "saved", model, optimizer, tag=list(hashes)[-1]
            ) if hashes else None
        elif what == 3:
            expected = hash_of_training(model, optimizer)
            model = optimizer = None
            model, optimizer = _branches(tmp_path / "nvme", seed=9)
            assert hash_of_training(model, optimizer) == expected
    del model, optimizer
    model, optimizer = _branches(tmp_path / "other", seed=9)
    for tag, expected in hashes.items():
        shardcore.load(tmp_path / "saved", model, optimizer, tag=tag)
        assert hash_of_training(model, optimizer) == expected
    assert len(hashes) > 3
    assert not list((tmp_path / "other").glob("*.next"))


def _trained(folder: Path, steps: int = 2, **offload: Any) -> tuple[Any, Any]:
    model, optimizer, _ = train(0, run_on_disk(folder, **{"resume": True, **offload}))
    for step in range(steps):
        stepped(model, optimizer, 0, step)
    return model, optimizer


def test_a_run_that_begins_anew_does_not_change_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = _trained(tmp_path / "nvme")
    for step in range(2, 4):
        shardcore.save(tmp_path / "saved", model, optimizer)
        stepped(model, optimizer, 0, step)
    shardcore.save(tmp_path / "saved", model, optimizer)
    before = _sums(tmp_path / "saved")
    del model, optimizer
    _trained(tmp_path / "nvme", 3, resume=False)
    assert _sums(tmp_path / "saved") == before
    left = sorted(path.name for path in (tmp_path / "nvme").iterdir() if "slot" in path.name)
    assert left == ["rank_00000.slot_0.safetensors", "rank_00000.slot_1.safetensors"]


@pytest.mark.more
def test_what_is_not_committed_or_cannot_be_linked_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = _trained(tmp_path / "nvme")
    expected = hash_of_training(model, optimizer)
    shardcore.save(tmp_path / "saved", model, optimizer, tag="given")
    shardcore.load(tmp_path / "saved", model, optimizer)  # as of now no step has these states
    shardcore.save(tmp_path / "saved", model, optimizer, tag="loaded")
    model, optimizer = _trained(tmp_path / "other")

    def another_disk(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", another_disk)
        shardcore.save(tmp_path / "saved", model, optimizer, tag="elsewhere")
    model, optimizer = _trained(tmp_path / "replaced")
    optimizer.synchronize()
    # as where a disk is unmounted: open files go on
    for path in (tmp_path / "replaced").glob("*.slot_?.safetensors"):
        path.rename(path.with_suffix(".away"))
        path.write_bytes(b"of something else")
    shardcore.save(tmp_path / "saved", model, optimizer, tag="replaced")
    model, optimizer = _trained(tmp_path / "third", durable=False, resume=None)
    shardcore.save(tmp_path / "saved", model, optimizer, tag="scratch")
    names = {
        path.name: sorted(file.name for file in path.glob("*slot*"))
        for path in (tmp_path / "saved").iterdir()
        if path.is_dir()
    }
    assert names == {
        "given": ["rank_00000.slot_1.safetensors"],
        "loaded": [],
        "elsewhere": [],
        "replaced": [],
        "scratch": [],
    }
    for tag in names:
        shardcore.load(tmp_path / "saved", model, optimizer, tag=tag)
        assert hash_of_training(model, optimizer) == expected


def test_no_room_for_another_slot_fails_the_save_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = _trained(tmp_path / "nvme")
    open_file = _C.BlockFile

    def full(engine: Any, path: Path, size: int) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(_C, "BlockFile", full)
        said = error_of(lambda: shardcore.save(tmp_path / "saved", model, optimizer))
    assert "No space left on device" in said
    assert "slot_1.next" in said
    assert open_file is _C.BlockFile
    assert not list(tmp_path.rglob("*.next"))
    assert os.listdir(tmp_path / "saved") == [".lock"]
    for step in range(2, 5):
        stepped(model, optimizer, 0, step)
    assert hash_of_training(model, optimizer) == hash_of_training(*_trained(tmp_path / "other", 5))


@pytest.mark.more
def test_files_and_descriptors_do_not_grow(tmp_path: Path) -> None:
    model, optimizer = _trained(tmp_path / "nvme", 0)
    sizes = []
    for step in range(24):
        stepped(model, optimizer, 0, step)
        if step % 3:
            shardcore.save(tmp_path / "saved", model, optimizer, keep_last=2)
        if step in (8, 23):
            optimizer.synchronize()
            sizes.append(
                (
                    len(os.listdir("/proc/self/fd")),
                    len(os.listdir(tmp_path / "nvme")),
                    len(os.listdir(tmp_path / "saved")),
                )
            )
    assert sizes[0] == sizes[1]


# --- killed between two file operations -----------------------------------------------------------

WHICH = ((0, 1), (0,), (0, 1), (0,), (1,), (0, 1), (0,))  # the branches that each step trains


def _kill_at(number: int) -> None:
    """Kill this process before the file operation of this number from now on."""
    left = [number]

    def counted(operation: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return run

    for place, name in (
        *((os, name) for name in ("link", "rename", "unlink", "mkdir", "copy_file_range")),
        *((_C, name) for name in ("BlockFile", "FileWriter", "exchange_paths")),
        (directory, "write_synced"),
        (directory, "sync_directory"),
        (Path, "write_bytes"),
    ):
        setattr(place, name, counted(getattr(place, name)))


def _branch_step(model: Any, optimizer: Any, step: int) -> None:
    model(torch.randn(4, 10, generator=torch.Generator().manual_seed(step)), WHICH[step]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _train_and_save(folder: str, number: int, early: bool) -> None:
    """early: the broken twin, in which a new file takes the place of a slot as soon as a
    checkpoint has the old one.
    """
    nvme_states.CHUNK_NUMEL = 512
    torch.set_num_threads(1)
    if early:
        make_next = slots.Slots._make_next

        def replace(self: Any, slot: int) -> None:
            make_next(self, slot)
            os.rename(self.paths[slot].with_suffix(slots._NEXT), self.paths[slot])
            self._files[slot], self._opened[slot] = (
                self._next.pop(slot),
                slots._identity(self.paths[slot]),
            )

        slots.Slots._make_next = replace
    model, optimizer = _branches(Path(folder, "nvme"))
    said = os.open(Path(folder, "said"), os.O_CREAT | os.O_WRONLY)
    _kill_at(number)
    for step in range(len(WHICH)):
        _branch_step(model, optimizer, step)
        os.pwrite(said, f"{step + 1} {step:2d}".encode(), 0)
        shardcore.save(Path(folder, "saved"), model, optimizer, tag=str(step + 1), keep_last=3)
        os.pwrite(said, f"{step + 1} {step + 1:2d}".encode(), 0)


def _kill_jobs(tmp_path: Path, every: int, early: bool = False) -> int:
    """Kill jobs before the first, `every`-th, ... file operation; returns how many there were
    before one ended by itself.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the jobs have
    model, optimizer = _branches(tmp_path / "other")
    expected = [hash_of_training(model, optimizer)]
    for step in range(len(WHICH)):
        _branch_step(model, optimizer, step)
        expected.append(hash_of_training(model, optimizer))

    def check(folder: Path, saved: int) -> None:
        found = (
            {path.name for path in checkpoints(folder / "saved")}
            if (folder / "saved").exists()
            else set()
        )
        assert not saved or str(saved) in found
        for tag in found:
            shardcore.load(folder / "saved", model, optimizer, tag=tag)
            assert hash_of_training(model, optimizer) == expected[int(tag)]

    number = killed = 0
    while True:
        folder = tmp_path / str(number)
        folder.mkdir()
        job = start(_train_and_save, str(folder), number, early)
        job.join(100)
        made, saved = map(int, (folder / "said").read_text().split() or (0, 0))
        check(folder, saved)
        resumed, adam = _branches(folder / "nvme", seed=9)
        first = shardcore.resume(resumed)
        assert first >= max(made - 1, saved)
        if first:
            assert hash_of_training(resumed, adam) == expected[first]
            for step in range(first, len(WHICH)):
                _branch_step(resumed, adam, step)
                shardcore.save(folder / "saved", resumed, adam, tag=str(step + 1))
            assert hash_of_training(resumed, adam) == expected[-1]
            check(folder, len(WHICH) if first < len(WHICH) else saved)
        del resumed, adam
        if job.exitcode == 0:
            break
        assert job.exitcode == -signal.SIGKILL
        killed += 1
        number += every
    torch.set_num_threads(threads)
    return killed


@pytest.mark.crash
@pytest.mark.slow  # make crash-test has it
def test_a_kill_between_two_file_operations_loses_neither_checkpoint_nor_step(
    tmp_path: Path, record_property: Any
) -> None:
    killed = _kill_jobs(tmp_path, max(1, 240 // max(12, times("commits", 12))))
    assert killed > 5
    record_property(
        "crash",
        ("killed between two file operations of a save", killed, "0 checkpoints or steps lost"),
    )


@pytest.mark.crash
def test_a_slot_that_is_replaced_too_early_is_lost(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"slot_0\.safetensors is damaged in bytes"):
        _kill_jobs(tmp_path, 19, early=True)
