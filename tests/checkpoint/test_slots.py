"""The files of committed states: valid safetensors, locked, refused by name where they are of
something else, or damaged.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest

import shardcore
from shardcore.checkpoint import format as layout
from shardcore.checkpoint.slots import chosen_of
from shardcore.offload import nvme_states
from tests.support.models import Run, error_of, hash_of_training, stepped, train
from tests.support.ranks import run_ranks

MASTERS = {"lr": 1e-2, "state_dtype": "8bit"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_states, "CHUNK_NUMEL", 512)


def _run(
    folder: Path | str, stage: int = 2, precision: str = "bf16", adam: Any = None, **offload: Any
) -> Run:
    tiers = {"optimizer": "nvme", "path": str(folder), **offload}
    return Run(stage, 0, precision=precision, shard={"offload": tiers}, adam=adam or {"lr": 1e-2})


def _trained(folder: Path, steps: int = 3, **options: Any) -> None:
    model, optimizer, _ = train(0, _run(folder, **options))
    for step in range(steps):
        stepped(model, optimizer, 0, step)
    hash_of_training(model, optimizer)  # commits the last one


def _flip(path: Path, at: int) -> None:
    held = bytearray(path.read_bytes())
    held[at] ^= 1
    path.write_bytes(held)


def _newest(folder: Path) -> dict[str, Any]:
    records = [layout.read_json(path) for path in folder.glob("*.commit_*.json")]
    return max(records, key=lambda record: record["commit"]["step"])


@pytest.mark.parametrize("adam", [{"lr": 1e-2}, MASTERS])
def test_slots_are_safetensors_with_the_states(tmp_path: Path, adam: dict[str, Any]) -> None:
    safe_open = pytest.importorskip("safetensors", reason="another reader of the files").safe_open
    model, optimizer, _ = train(0, _run(tmp_path, adam=adam))
    for step in range(2):
        stepped(model, optimizer, 0, step)
    weights = model.state_dict()
    record = _newest(tmp_path)
    seen = 0
    for name, entry in record["tensors"].items():
        for start, numel, file, offset, _ in entry["parts"].get("master", {"ranges": []})["ranges"]:
            path = tmp_path / record["files"][file]["name"]
            with safe_open(path, "pt") as opened:
                values = opened.get_tensor(f"{name}.master@{start}")
            assert values.equal(weights[name].flatten()[start : start + numel])
            assert offset % 4 == 0
            seen += numel
    assert seen == sum(param.numel() for param in model.parameters())
    assert ("exp_avg_scale" in record["tensors"]["inp.weight"]["parts"]) == (adam is MASTERS)


def test_a_directory_has_one_job(tmp_path: Path) -> None:
    model, _, _ = train(0, _run(tmp_path))
    says = error_of(lambda: train(0, _run(tmp_path, resume=True)))
    assert "another model of this process keeps states there" in says
    assert str(tmp_path / "rank_00000.lock") in says
    train(0, _run(tmp_path, durable=False))
    del model
    train(0, _run(tmp_path))


def _locked(rank: int, world_size: int, folder: str) -> str:
    return error_of(lambda: train(rank, _run(folder)))


def test_another_job_is_refused_on_every_rank(tmp_path: Path) -> None:
    model, _, _ = train(0, _run(tmp_path))
    first, second = run_ranks(2, _locked, str(tmp_path))
    assert "another job keeps states there" in first
    assert (
        "rank 0 failed: BlockingIOError: [Errno 11] shard: another job keeps states there" in second
    )
    assert model is not None


def test_a_path_may_be_under_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    train(0, _run("~/run7"))
    assert [path.name for path in tmp_path.iterdir()] == ["run7"]


def test_an_earlier_run_is_never_overwritten_unasked(tmp_path: Path) -> None:
    _trained(tmp_path)
    says = error_of(lambda: train(0, _run(tmp_path)))
    assert (
        f'{tmp_path} contains the committed step 3 of an earlier run. Pass offload={{"resume": '
        f"True}}" in says
    )
    model, _, _ = train(0, _run(tmp_path, resume=True))
    assert shardcore.resume(model) == 3
    del model
    model, _, _ = train(0, _run(tmp_path, resume=False))
    assert shardcore.resume(model) == 0
    assert not list(tmp_path.glob("*.commit_*"))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "other",
    [{"stage": 2, "adam": MASTERS}, {"precision": "fp32"}, {"ratio": 0.5}],
    ids=["8-bit", "fp32", "ratio"],
)
def test_other_states_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    _trained(tmp_path)
    says = error_of(lambda: train(0, _run(tmp_path, resume=True, **other)))
    assert (
        "rank_00000.slot_0.safetensors contains other states. Use the model, world size, stage, "
        "ratio" in says
    )
    train(0, _run(tmp_path, resume=True))


def test_a_slot_that_ends_early_is_told(tmp_path: Path) -> None:
    _trained(tmp_path)
    path = tmp_path / "rank_00000.slot_1.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 4096)
    says = error_of(lambda: train(0, _run(tmp_path, resume=True)))
    assert f"{path} ends at byte {size - 4096} of {size}." in says


def _refused(rank: int, world_size: int, folder: str) -> str:
    return error_of(lambda: train(rank, _run(folder, resume=True)))


def test_another_world_size_is_refused(tmp_path: Path) -> None:
    _trained(tmp_path)
    for says in run_ranks(2, _refused, str(tmp_path)):
        assert (
            "the ranks share no committed step (rank 0: step 2 of run" in says
            or "of 1 ranks; expected 2" in says
        )


def test_a_record_that_is_torn_is_none(tmp_path: Path) -> None:
    _trained(tmp_path)
    step = _newest(tmp_path)["commit"]["step"]
    path = next(
        p for p in tmp_path.glob("*.commit_*.json") if layout.read_json(p)["commit"]["step"] == step
    )
    path.write_bytes(path.read_bytes()[:-40])
    model, _, _ = train(0, _run(tmp_path, resume=True))
    assert shardcore.resume(model) == step - 1


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    _trained(tmp_path)
    for path in tmp_path.glob("*.commit_*.json"):
        record = layout.read_json(path)
        record.pop("crc32c", None)
        path.write_bytes(layout.json_bytes({**record, "version": 9}))
    says = error_of(lambda: train(0, _run(tmp_path, resume=True)))
    assert re.search(r"commit_\d\.json has version 9; expected 1", says)


def test_flipped_bits_are_named_and_never_trained_on(tmp_path: Path) -> None:
    _trained(tmp_path)
    record = _newest(tmp_path)
    _, numel, file, offset, _ = record["tensors"]["blocks.1.up.weight"]["parts"]["exp_avg"][
        "ranges"
    ][0]
    _flip(tmp_path / record["files"][file]["name"], offset + 4)
    model, optimizer, _ = train(0, _run(tmp_path, resume=True))
    up = dict(model.named_parameters())["blocks.1.up.weight"]
    before = up.clone()
    says = error_of(lambda: stepped(model, optimizer, 0, 3))
    assert f"in bytes {offset} to {offset + 4 * numel} differ from the bytes written" in says
    assert record["files"][file]["name"] in says
    assert up.equal(before)


def test_a_damaged_master_is_named_by_resume(tmp_path: Path) -> None:
    _trained(tmp_path)
    record = _newest(tmp_path)
    _, numel, file, offset, _ = record["tensors"]["head.weight"]["parts"]["master"]["ranges"][0]
    _flip(tmp_path / record["files"][file]["name"], offset)
    says = error_of(lambda: train(0, _run(tmp_path, resume=True)))
    assert f"is damaged in bytes {offset} to {offset + 4 * numel} (head.weight" in says


def test_the_newest_commit_of_all_is_chosen() -> None:
    a, b = "a" * 32, "b" * 32
    folders = ["x", "y"]
    assert chosen_of([{(a, 3, 2), (a, 4, 2)}, {(a, 3, 2), (a, 2, 2)}], folders, 2) == (a, 3, 2)
    assert chosen_of([{(a, 1, 2)}, set()], folders, 2) is None, (
        "a run that died in its first commit"
    )
    assert chosen_of([set(), set()], folders, 2) is None
    for found in ([{(a, 3, 2)}, set()], [{(a, 3, 2)}, {(b, 3, 2)}], [{(a, 3, 2)}, {(a, 5, 2)}]):
        with pytest.raises(
            ValueError,
            match=r"share no committed step.*rank 0: step 3 of run aaaaaaaa in x; rank 1: ",
        ):
            chosen_of(found, folders, 2)
    with pytest.raises(ValueError, match="x contains step 3 of 4 ranks; expected 2"):
        chosen_of([{(a, 3, 4)}, {(a, 3, 4)}], folders, 2)
