"""Committed steps on a disk that is slow, goes away, is full or has errors: the same bits, or an
error and the step before.
"""

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from shardcore._native import _C
from shardcore.checkpoint import write
from shardcore.offload import nvme_states
from tests.support.models import Run, error_of, hash_of_training, make_net, stepped, train
from tests.support.ranks import run_fresh


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_states, "CHUNK_NUMEL", 512)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Hashes of the training after 0, 1, ... steps, of states in memory."""
    model, optimizer, _ = train(0, Run(stage=2, steps=0, precision="bf16"))
    hashes = [hash_of_training(model, optimizer)]
    for step in range(4):
        stepped(model, optimizer, 0, step)
        hashes.append(hash_of_training(model, optimizer))
    return hashes


def begun(folder: Path, **offload: Any) -> tuple[Any, Any]:
    """Return model and optimizer as of the last committed step in a directory, or anew."""
    tiers = {"optimizer": "nvme", "path": str(folder), "resume": True, **offload}
    return train(0, Run(stage=2, steps=0, precision="bf16", shard={"offload": tiers}), make_net())[
        :2
    ]


def last_step_in(folder: Path) -> tuple[int, str]:
    """Return the last committed step of a copy of a directory, and the training's hash there."""
    copy = shutil.copytree(folder, folder.with_name("copy"), ignore=shutil.ignore_patterns("*lock"))
    model, optimizer = begun(Path(copy))
    found = shardcore.resume(model), hash_of_training(model, optimizer)
    del model, optimizer
    shutil.rmtree(copy)
    return found


def with_faults(patch: pytest.MonkeyPatch, module: Any, faults: str) -> None:
    engine = _C.FileEngine(faults=faults)
    patch.setattr(module, "file_engine", lambda: engine)


@pytest.mark.more
def test_a_slow_disk_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[str]
) -> None:
    for module in (nvme_states, write):
        with_faults(monkeypatch, module, "delay:2")
    for folder, offload in (("scratch", {"durable": False, "resume": None}), ("slots", {})):
        model, optimizer = begun(tmp_path / folder, **offload)
        for step in range(2):
            stepped(model, optimizer, 0, step)
        assert hash_of_training(model, optimizer) == expected[2]
    assert last_step_in(tmp_path / "slots") == (2, expected[2])


def renamed(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def unmounted(folder: Path) -> None:
    """As `umount --lazy` leaves it: open files go on, and the name is that of an empty directory
    below.
    """
    renamed(folder)
    folder.mkdir()


@pytest.mark.cases(1)
@pytest.mark.parametrize("goes", [renamed, unmounted])
def test_a_directory_that_disappears_is_named_and_goes_on_when_it_is_back(
    goes: Callable[[Path], None], tmp_path: Path, expected: list[str]
) -> None:
    folder = tmp_path / "nvme"
    model, optimizer = begun(folder)
    for step in range(2):
        stepped(model, optimizer, 0, step)
    goes(folder)
    for _ in range(2):
        says = error_of(lambda: stepped(model, optimizer, 0, 2))
        assert "step 2 is made, but cannot be committed" in says
        assert f"{folder}" in says.split("expected")[0], "of the error itself"
        optimizer.zero_grad()
    assert last_step_in(tmp_path / "elsewhere") == (1, expected[1])
    shutil.rmtree(folder, ignore_errors=True)
    (tmp_path / "elsewhere").rename(folder)
    for step in range(2, 4):
        stepped(model, optimizer, 0, step)
    assert hash_of_training(model, optimizer) == expected[4]
    assert last_step_in(folder) == (4, expected[4])


def test_files_that_are_removed_are_no_commit(tmp_path: Path) -> None:
    """Though the process has them open, and can write to them."""
    model, optimizer = begun(tmp_path)
    stepped(model, optimizer, 0, 0)
    (tmp_path / "rank_00000.slot_1.safetensors").unlink()
    says = error_of(lambda: stepped(model, optimizer, 0, 1))
    assert "step 1 is made, but cannot be committed" in says
    assert "rank_00000.slot_1.safetensors" in says


def failing_fsync(patch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    patch.setattr(os, "fsync", fail)


COMMITS_FAIL: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "the rest is not written": (
        lambda patch: with_faults(patch, write, "write:EIO"),
        "Input/output error.*rest_",
    ),
    "the rest is not durable": (
        lambda patch: with_faults(patch, write, "sync:EIO"),
        "Input/output error.*rest_",
    ),
    "the record is not durable": (failing_fsync, "Input/output error"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("what", COMMITS_FAIL)
def test_a_commit_that_fails_leaves_the_step_before_and_is_made_again(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[str]
) -> None:
    fail, match = COMMITS_FAIL[what]
    folder = tmp_path / "nvme"
    model, optimizer = begun(folder)
    for step in range(2):
        stepped(model, optimizer, 0, step)
    with monkeypatch.context() as patch:
        fail(patch)
        with pytest.raises(
            RuntimeError, match=f"step 2 is made, but cannot be committed .*{match}"
        ) as caught:
            stepped(model, optimizer, 0, 2)
        assert f"Step 1 stays the last committed step in {folder}" in str(caught.value)
    whole = (1, 2) if "record" in what else (1,)  # it is there, and may be durable
    assert last_step_in(folder) in [(step, expected[step]) for step in whole]
    optimizer.zero_grad()
    stepped(model, optimizer, 0, 2)
    assert hash_of_training(model, optimizer) == expected[3]
    assert last_step_in(folder) == (3, expected[3])


def test_states_that_could_not_be_made_durable_are_never_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[str]
) -> None:
    """The kernel tells an error of fdatasync once, and has dropped what it could not write: a
    second one says nothing.
    """
    folder = tmp_path / "nvme"
    model, optimizer = begun(folder)
    for step in range(2):
        stepped(model, optimizer, 0, step)
    with monkeypatch.context() as patch:

        def fail(file: Any) -> None:
            raise OSError(errno.EIO, "Input/output error", "slot_0")

        patch.setattr(_C.BlockFile, "sync", fail)
        assert "step 2 is made, but cannot be committed" in error_of(
            lambda: stepped(model, optimizer, 0, 2)
        )
    for _ in range(2):
        assert "Input/output error: 'slot_0'" in error_of(lambda: stepped(model, optimizer, 0, 2))
    assert last_step_in(folder) == (1, expected[1])


def _grown(folder: str) -> tuple[int, int, int]:
    """Return by how much descriptors, bytes of files and KiB of memory grow in the last 900 of
    1,000 committed steps.
    """
    nvme_states.CHUNK_NUMEL = 512
    torch.set_num_threads(1)
    model, optimizer = begun(Path(folder))
    found = []
    for step in range(1000):
        stepped(model, optimizer, 0, step)
        if step in (99, 999):
            optimizer.synchronize()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            files = sum(path.stat().st_size for path in Path(folder).iterdir())
            found.append(
                (len(os.listdir("/proc/self/fd")), files, pages * resource.getpagesize() // 1024)
            )
    return tuple(after - before for before, after in zip(*found, strict=True))


@pytest.mark.slow
def test_nothing_grows_over_a_thousand_commits(tmp_path: Path) -> None:
    descriptors, files, memory = run_fresh(_grown, str(tmp_path))
    assert descriptors == 0
    assert abs(files) < 512, "records have times and counts, of other lengths"
    assert memory < 2048  # 2.3 KiB for a commit would be
