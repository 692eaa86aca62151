"""Checkpoints of tensor-parallel models: any mesh, stage and tier loads them bit for bit, and
their weights are whole files.
"""

import os
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardcore
import shardcore.dcp
from shardcore._native import _C
from shardcore.checkpoint import format as layout
from shardcore.checkpoint import write
from shardcore.engine.bucket import Bucket
from shardcore.engine.slices import Slice
from shardcore.layout import Columns
from tests.support.choice import some
from tests.support.models import assert_one, error_of, hash_of_training
from tests.support.ranks import run_ranks
from tests.support.slices import make_lm, mesh_of, sharded_lm, train_lm

safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")

OFFLOAD = {"offload": {"optimizer": "cpu"}, "overlap_step": True}
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "8 bit": {"precision": "bf16", "adam": {"master": "split", "state_dtype": "8bit"}},
    "frozen": {"precision": "bf16", "frozen": "mlp"},
}


def _save(
    rank: int, world: int, tp: int, stage: int, folder: str, options: dict[str, Any]
) -> tuple[str, str]:
    """Returns the hash of what was saved, and that of two steps later."""
    mesh = mesh_of(world, tp)
    model, optimizer = sharded_lm(mesh, stage, **options)
    train_lm(model, optimizer, mesh, range(2))
    saved = hash_of_training(model, optimizer)
    saving = shardcore.save(folder, model, optimizer, client_state={"epoch": 3}, wait=stage < 2)
    train_lm(model, optimizer, mesh, range(2, 4))  # while it is written
    saving.wait()
    return saved, hash_of_training(model, optimizer)


def _load(
    rank: int,
    world: int,
    tp: int,
    stage: int,
    folder: str,
    options: dict[str, Any],
    again: str = "",
) -> tuple[str, str]:
    """As _save, of what is loaded, and saved to `again` if that is given."""
    mesh = mesh_of(world, tp)
    model, optimizer = sharded_lm(mesh, stage, **options)
    train_lm(model, optimizer, mesh, range(7, 8))
    assert shardcore.load(folder, model, optimizer).client_state == {"epoch": 3}
    loaded = hash_of_training(model, optimizer)
    if again:
        shardcore.save(again, model, optimizer, client_state={"epoch": 3})
    train_lm(model, optimizer, mesh, range(2, 4))
    return loaded, hash_of_training(model, optimizer)


@pytest.mark.more
def test_states_in_host_memory_go_on_on_nvme_and_back(tmp_path: Path) -> None:
    nvme = {"offload": {"optimizer": "nvme", "path": str(tmp_path / "states"), "durable": False}}
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    saved = run_ranks(4, _save, 2, 2, first, OFFLOAD)
    assert run_ranks(4, _load, 2, 1, first, nvme, second) == saved
    assert run_ranks(4, _load, 2, 2, second, OFFLOAD) == saved


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    saved = run_ranks(4, _save, 2, 3, str(tmp_path), FORMS["8 bit"])
    loaded = run_ranks(4, _load, 2, 3, str(tmp_path), FORMS["8 bit"])
    assert_one(hashes[0] for hashes in [*saved, *loaded])
    assert_one(hashes[1] for hashes in [*saved, *loaded])


MESHES = [(4, 2), (4, 4), (2, 2), (2, 1), (4, 1)]  # ranks, and how many of them slice
RESHARDED = [
    (a, b, form) for a in range(4) for b in range(5) for form in ("fp32", "frozen") if a != b
]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("before", "after", "form"), some(RESHARDED, [(0, 1, "frozen"), (3, 0, "fp32")])
)
def test_other_meshes_stages_and_tiers_load_it(
    before: int, after: int, form: str, tmp_path: Path
) -> None:
    (ranks, tp), (new_ranks, new_tp), options = MESHES[before], MESHES[after], FORMS[form]
    saved = run_ranks(ranks, _save, tp, before, str(tmp_path), options)
    loaded = run_ranks(
        new_ranks,
        _load,
        new_tp,
        3 - before,
        str(tmp_path),
        options | (OFFLOAD if after == 3 else {}),
    )
    assert_one(hashes[0] for hashes in [*saved, *loaded])
    assert_one(hashes[1] for hashes in loaded)


def _quantized(rank: int, world: int, folder: str) -> list[str]:
    """Save 8-bit states of whole weights; load them into slices, of which the second alone is
    rounded, and whole.
    """
    model, optimizer = sharded_lm(mesh_of(world, 1), 2, **FORMS["8 bit"])
    train_lm(model, optimizer, mesh_of(world, 1), range(1))
    states = optimizer.state_dict()
    for state in states["state"].values():
        state["exp_avg"].zero_()
        if state["exp_avg"].shape == (16, 48):  # a block of ones, and blocks of small values
            state["exp_avg"][:5, 24:], state["exp_avg"][6:, 24:] = 1.0, 1.125 * 2.0**-16
    optimizer.load_state_dict(states)
    shardcore.save(folder, model, optimizer)
    said = []
    for tp in (2, 1):
        model, optimizer = sharded_lm(mesh_of(world, tp), 2, **FORMS["8 bit"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shardcore.load(folder, model, optimizer)
        said += [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    return said


def test_states_that_are_quantized_anew_are_said_once_on_whatever_rank_they_are(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, _quantized, str(tmp_path))
    assert second == []
    assert len(first) == 1
    assert re.match(
        r"load: .*mlp\.down\.weight\.exp_avg is rounded .* 8-bit codes, .*quantized anew .*1 "
        r"more",
        first[0],
    )


# --- what is in it --------------------------------------------------------------------------------


def _export(rank: int, world: int, folder: str, fault: str) -> dict[str, Any]:
    with FAULTS[fault]():
        mesh = mesh_of(world, 2)
        model, optimizer = sharded_lm(mesh, 1, frozen="mlp")
        train_lm(model, optimizer, mesh, range(2))
        for tag in ("first", "second", "third"):
            shardcore.save(f"{folder}/saved", model, optimizer, tag=tag, keep_last=2)
        shardcore.consolidate(model, f"{folder}/model")
        return {name: value.tolist() for name, value in model.state_dict().items()}


FAULTS: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "slices of any dimension are rows": lambda: mock.patch.object(Slice, "_columns", _rows),
    "what all ranks have is written by each": lambda: mock.patch.object(
        Bucket, "counted", property(lambda bucket: True, lambda bucket, value: None), create=True
    ),
}


def _rows(self: Slice, dim: int, start: int, size: int) -> Columns:
    share = self.shape.numel() // self.shape[dim]
    return Columns(1, self.shape.numel(), start * share, size * share)


def _is_whole(folder: Path, expected: dict[str, Any]) -> bool:
    shardcore.consolidate(folder / "saved", folder / "checkpoint")
    same = True
    for kind in ("model", "checkpoint"):
        found = safetensors.load_file(folder / kind / "model.safetensors")
        plain = make_lm()
        plain.load_state_dict(found)
        same &= all(
            torch.equal(plain.state_dict()[name], torch.tensor(value))
            for name, value in expected.items()
        )
    read = {name: torch.zeros_like(value) for name, value in make_lm().state_dict().items()}
    dcp.load(read, storage_reader=shardcore.dcp.Reader(folder / "saved" / "third"))
    return same and all(
        torch.equal(read[name], torch.tensor(value)) for name, value in expected.items()
    )


def _fails(rank: int, world: int, folder: str) -> tuple[str, str]:
    model, optimizer = sharded_lm(mesh_of(world, 2), 2)
    shardcore.save(folder, model, optimizer, tag="first")
    write.file_engine = (
        (lambda: _C.FileEngine(faults="write:EIO@0")) if rank == 1 else layout.file_engine
    )
    said = error_of(lambda: shardcore.save(folder, model, optimizer, tag="second"))
    write.file_engine = layout.file_engine
    other = "" if rank == 2 else folder
    return said, error_of(lambda: shardcore.save(other, model, optimizer, tag="third"))


@pytest.mark.more
def test_an_error_on_one_rank_is_one_on_those_of_other_slices(tmp_path: Path) -> None:
    for rank, (failed, differ) in enumerate(run_ranks(4, _fails, str(tmp_path))):
        assert ("OSError" if rank == 1 else "RuntimeError: save: rank 1 failed") in failed
        assert "on rank 2 but" in differ
    assert sorted(os.listdir(tmp_path)) == [".lock", "first", "latest"]


FORGED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda entry: entry.update(rows=0), "do not fit together|elements"),
    (lambda entry: entry.update(rows=2), "elements of head.weight"),
    (lambda entry: entry["slices"].pop(), "do not fit together: 160 of 304 columns"),
    (
        lambda entry: entry["slices"].append(entry["slices"][1]),
        "lacks columns of head.weight from 304 on, or lists some twice",
    ),
    (lambda entry: entry["slices"][1]["parts"].pop("exp_avg"), "do not fit together"),
    (lambda entry: entry.update(slices=[]), "do not fit together"),
]


def test_its_weights_are_whole_files(tmp_path: Path) -> None:
    expected = run_ranks(4, _export, str(tmp_path), "none")
    assert _is_whole(tmp_path, expected[0])
    assert sorted(os.listdir(tmp_path / "saved")) == [".lock", "latest", "second", "third"]
    path = tmp_path / "saved" / "third" / layout.MANIFEST
    manifest = layout.read_json(path)
    assert manifest["version"] == 2, "shardcore from before slices refuses it"
    assert (manifest["world_size"], manifest["slices"]) == (4, 2)
    for change, message in FORGED:
        forged = layout.read_json(path)
        change(forged["tensors"]["head.weight"])
        path.write_bytes(layout.json_bytes(forged))
        with pytest.raises(ValueError, match=message):
            layout.Checkpoint(path.parent)
        path.write_bytes(layout.json_bytes(manifest))


@pytest.mark.more
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "none"])
def test_faults_are_seen(fault: str, tmp_path: Path) -> None:
    (expected, *_) = run_ranks(4, _export, str(tmp_path), fault)
    with (
        nullcontext()
        if fault.startswith("slices")
        else pytest.raises(ValueError, match="or lists some twice")
    ):
        assert not _is_whole(tmp_path, expected)
