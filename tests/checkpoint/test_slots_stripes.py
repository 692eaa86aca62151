"""States over several directories: the bits of one, bytes as the disks are fast, and the same
promises where one is missing.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardcore
from shardcore.cli import main
from shardcore.offload import disk, nvme_states
from tests.support.models import (
    Run,
    assert_one,
    error_of,
    hash_of_training,
    stepped,
    steps_of_run,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.tiers import in_memory, run_on_disk


def _rates(folder: Path) -> disk.Rates:
    """Of directories whose names end with how fast their disks are."""
    rate = float(folder.name.rpartition("_")[2])
    return disk.Rates(rate, rate, rate)


def _measured(patch: pytest.MonkeyPatch, rates: Callable[[Path], disk.Rates] = _rates) -> None:
    patch.setattr(nvme_states, "CHUNK_NUMEL", 512)
    patch.setattr(nvme_states, "measure", lambda engine, folder, nbytes: rates(folder))


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    _measured(monkeypatch)


def _folders(tmp_path: Path, *rates: int) -> list[Path]:
    return [tmp_path / f"{number}_{rate}" for number, rate in enumerate(rates)]


def _trained(path: Any, steps: int = 3, **options: Any) -> tuple[Any, Any]:
    model, optimizer, _ = train(0, run_on_disk(path, **options))
    for step in range(steps):
        stepped(model, optimizer, 0, step)
    return model, optimizer


def _bytes_in(folder: Path) -> int:
    """Return how many bytes of disk the files of a directory have, each once."""
    return sum(
        path.lstat().st_size
        for path in folder.iterdir()
        if path.suffix == ".safetensors" and not path.is_symlink()
    )


def _hashes(rank: int, world_size: int, runs: list[Run]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        _measured(patch)
        hashes = []
        for run in runs:
            model, optimizer, _ = train(rank, run)
            steps_of_run(model, optimizer, run, rank, range(3))
            hashes.append(hash_of_training(model, optimizer))
        return hashes


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "form", "way", "durable"),
    [
        (0, "fp32", "states", True),
        (1, "masters", "added up", False),
        (2, "split 8-bit", "a share", True),
        (3, "bf16 states", "all on disk", False),
    ],
)
def test_several_directories_have_the_bits_of_memory(
    stage: int, form: str, way: str, durable: bool, tmp_path: Path
) -> None:
    paths = [
        [str(one) for one in _folders(tmp_path / str(len(rates)), *rates)]
        for rates in ((3, 1), (1, 2, 1))
    ]
    runs = [run_on_disk(path, stage, form, way, durable=durable) for path in paths]
    for hashes in run_ranks(2, _hashes, [in_memory(runs[0]), *runs]):
        assert_one(hashes)
    assert [len(os.listdir(one)) > 0 for one in paths[1]] == [durable] * 3


@pytest.mark.parametrize("rates", [(1, 1), (3, 1), (1, 5), (2, 1, 1), (0.001, 1)])
def test_bytes_follow_the_rates(
    rates: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_states, "CHUNK_NUMEL", 256)
    folders = _folders(tmp_path, *rates)  # type: ignore[arg-type]
    model, _ = _trained([str(one) for one in folders], 1)
    found = [_bytes_in(folder) for folder in folders]
    chunk = 2 * (256 * 12 + 4096)  # of two slots, and their heads
    for rate, size in zip(rates, found, strict=True):
        assert abs(size - sum(found) * rate / sum(rates)) < 4 * chunk
    assert model is not None


def test_equal_shares_whatever_the_rates_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_states, "measure", lambda *_: disk.Rates(1, 1, 1))
    with pytest.raises(AssertionError):
        test_bytes_follow_the_rates((1, 5), tmp_path, monkeypatch)


def test_neighbours_lie_on_different_disks(tmp_path: Path) -> None:
    safe_open = pytest.importorskip("safetensors", reason="another reader of the files").safe_open
    folders = _folders(tmp_path, 1, 1)
    _trained(folders, 1)
    keys: list[set[str]] = []
    for slot in (0, 2):
        with safe_open(folders[0] / f"rank_00000.slot_{slot}.safetensors", "pt") as file:
            keys.append({key for key in file.keys() if "weight.exp_avg@" in key})  # noqa: SIM118
    assert not keys[0] & keys[1]
    names = [{key.partition("@")[0] for key in of} for of in keys]
    assert len(names[0] & names[1]) > 3, "the chunks of a large tensor are on both"


def test_a_run_goes_on_with_the_stripes_that_it_has_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = hash_of_training(*_trained(tmp_path / "one", 4))
    hash_of_training(*_trained(_folders(tmp_path, 3, 1), 2))  # commits the last one
    monkeypatch.setattr(nvme_states, "measure", lambda *_: pytest.fail("rates are measured once"))
    (tmp_path / "moved").mkdir()
    moved = [folder.rename(tmp_path / "moved" / folder.name) for folder in _folders(tmp_path, 3, 1)]
    model, optimizer = _trained(moved, 0, resume=True)
    assert shardcore.resume(model) == 2
    for step in (2, 3):
        stepped(model, optimizer, 0, step)
    assert hash_of_training(model, optimizer) == expected
    del model, optimizer
    other, adam, _ = train(0, Run(3, 0, precision="bf16", seed=5))
    shardcore.load(moved[0], other, adam)
    assert hash_of_training(other, adam) == expected


@pytest.mark.parametrize("durable", [True, False])
def test_directories_that_cannot_be_used_are_named(tmp_path: Path, durable: bool) -> None:
    one, two = _folders(tmp_path, 1, 1)
    one.mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(one)

    def said(path: Any) -> str:
        return error_of(lambda: train(0, run_on_disk(path, durable=durable)))

    assert f"has {one} and {one}, the same directory" in said([one, one])
    assert f"has {one} and {tmp_path / 'link'}, the same directory" in said(
        [one, two, tmp_path / "link"]
    )
    assert f"has {tmp_path / 'file'}, a file; expected a directory" in said(
        [one, tmp_path / "file"]
    )
    for path in ([], [3], [one, None], 3, {"a": one}):
        assert "expected a directory on the disk to use, or a list of some" in said(path)
    assert not list(one.glob("*slot*"))


def test_a_directory_that_is_missing_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    one, two, three = _folders(tmp_path, 1, 1, 1)
    expected = hash_of_training(*_trained([one, two]))
    two.rename(three)  # its disk is not mounted

    def said(*path: Path) -> str:
        return error_of(lambda: train(0, run_on_disk(list(path), resume=True)))

    assert f'offload["path"] lacks {two}/rank_00000.' in said(one, two)
    assert f"expected all directories of step 3 in their order: {one}, {two}" in said(one, two)
    assert not two.exists()
    assert 'offload["path"] has 1 directories; expected all directories of step 3' in said(one)
    assert "lacks" in said(one, tmp_path / "4_1")
    assert "slot_2.safetensors" in error_of(
        lambda: shardcore.load(one, *train(0, Run(2, 0, precision="bf16"))[:2])
    )
    three.rename(two)
    for resume in (True, None):
        said_of = error_of(lambda: train(0, run_on_disk([two, one], resume=resume)))  # noqa: B023
        assert f"expected the directories in the order of the run there: {one}, {two}" in said_of
    assert "committed step 3 of an earlier run" in error_of(
        lambda: train(0, run_on_disk([one, two]))
    )
    assert hash_of_training(*_trained([one, two], 0, resume=True)) == expected


def test_runs_share_directories_that_are_not_their_first(tmp_path: Path) -> None:
    one, two, shared = _folders(tmp_path, 1, 1, 1)
    first = _trained([one, shared], 3)
    second = _trained([two, shared], 4)
    hashes = [hash_of_training(*first), hash_of_training(*second)]
    del first, second
    assert len(list(shared.iterdir())) == 4
    assert hash_of_training(*_trained([one, shared], 0, resume=True)) == hashes[0]
    assert hash_of_training(*_trained([two, shared], 0, resume=True)) == hashes[1]
    _trained([one, shared], 0, resume=False)
    assert len(list(shared.iterdir())) == 4, (
        "a run that begins anew leaves nothing of the one before"
    )
    assert hash_of_training(*_trained([two, shared], 0, resume=True)) == hashes[1]


def test_checkpoints_get_the_slots_of_all_directories(tmp_path: Path) -> None:
    folders = _folders(tmp_path, 1, 1)
    model, optimizer = _trained(folders)
    path = shardcore.save(tmp_path / "saved", model, optimizer).path
    expected = hash_of_training(model, optimizer)
    assert sorted(one.name for one in path.glob("*slot*")) == [
        "rank_00000.slot_0.safetensors",
        "rank_00000.slot_2.safetensors",
    ]
    assert not any(one.is_symlink() for one in path.iterdir())
    for step in range(3, 8):
        stepped(model, optimizer, 0, step)
    other, adam, _ = train(0, Run(1, 0, precision="bf16", seed=5))
    shardcore.load(tmp_path / "saved", other, adam)
    assert hash_of_training(other, adam) == expected


def test_all_disks_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = _folders(tmp_path, 3 * 10**9, 10**9)
    monkeypatch.setattr(disk, "measure", lambda engine, folder, nbytes=0: _rates(folder))
    for folder in folders:
        folder.mkdir()
    main(["info", "--disk", *map(str, folders)])
    told = capsys.readouterr().out
    assert all(f"{folder} " in told for folder in folders)
    assert "reads 4.00 GB/s, writes 4.00, both at once 4.00 in all (offload=" in told
    seconds = []
    for given in (folders[1:], folders):
        disks = [word for folder in given for word in ("--disk", str(folder))]
        main(["estimate", "tests.support.models:Net", "--stage", "2", "--offload", "nvme", *disks])
        told = capsys.readouterr().out
        assert "N ranks on it take N times as long\n  and wear it N times as fast" in told
        row = told.partition("disk, s*")[2].splitlines()[1]
        seconds.append(float(row.split()[-2]))
    assert seconds[0] == pytest.approx(4 * seconds[1], rel=0.02)
