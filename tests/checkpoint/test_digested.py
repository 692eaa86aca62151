"""Digests in checkpoints: those of shardcore.digest, wherever the model is, and what is loaded is
compared with them.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from shardcore import cli
from shardcore.checkpoint import format as layout
from shardcore.checkpoint.consolidate import check
from shardcore.checkpoint.digested import Comparison
from tests.support.digests import FORMS, trained
from tests.support.models import Net, Run, error_of, make_net, stepped, train
from tests.support.ranks import run_ranks
from tests.support.slices import mesh_of, sharded_lm, train_lm

ONE, OTHER = "blocks.0.up.weight", "blocks.1.up.weight"  # of one shape


def saved_in(folder: str | Path) -> dict[str, int]:
    """Return the digests that the manifest of a checkpoint has, by label."""
    manifest = layout.read_json(Path(folder) / layout.MANIFEST)
    found = {}
    for name, entry in manifest["tensors"].items():
        for stored in entry.get("slices", [entry]):
            place = "[{}:{}]".format(*_ends(stored["columns"])) if "slices" in entry else ""
            for key, text in stored.get("digests", {}).items():
                found[f"{name}{place}" + (f".{key}" if key != "weight" else "")] = int(text, 16)
    return found


def _ends(columns: list[int]) -> tuple[int, int]:
    return columns[0], columns[0] + columns[1]


def compared_by(load: Callable[[], object]) -> list[str]:
    """Return what a load compares with digests: what ranks have read whole."""
    compared: list[str] = []
    differing = Comparison.differing.fget  # type: ignore[attr-defined]

    def whole(self: Comparison) -> Any:
        compared.extend(
            label for label, (_, numel) in self._read.items() if numel == self._saved[label].numel
        )
        return differing(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comparison, "differing", property(whole))
        load()
    return compared


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest; its checksum is right."""
    manifest = layout.read_json(folder / layout.MANIFEST)
    change(manifest)
    (folder / layout.MANIFEST).write_bytes(layout.json_bytes(manifest))


def swap(manifest: dict[str, Any], part: str = "exp_avg") -> None:
    """Let two tensors have each other's ranges: all checksums match."""
    one, other = (manifest["tensors"][name]["parts"] for name in (ONE, OTHER))
    one[part], other[part] = other[part], one[part]


# --- saving ---------------------------------------------------------------------------------------


def _placed(rank: int, world_size: int, form: str, folder: str) -> list[Any]:
    options, adam = FORMS[form]
    offloads: dict[str, Any] = {
        "device": None,
        "cpu": {"optimizer": "cpu"},
        "a share": {"optimizer": "cpu", "ratio": 0.4},
        "nvme": {"optimizer": "nvme", "path": f"{folder}/states", "durable": False},
    }
    found = []
    for stage, tier in ((0, "a share"), (1, "nvme"), (2, "cpu"), (3, "device"), (3, "a share")):
        units: Any = 100 if tier == "cpu" else "auto"
        model, optimizer = trained(stage, adam, **options, offload=offloads[tier], units=units)
        expected = shardcore.digest(model, by="param") | {
            name: digest
            for name, digest in shardcore.digest(model, "states", by="param").items()
            if not name.endswith(".step")
        }
        saving = shardcore.save(folder, model, optimizer, tag=f"{stage}{tier}", wait=stage > 1)
        saved = saved_in(saving.wait())
        assert {name: digest for name, digest in saved.items() if name in expected} == expected
        assert saved.keys() - expected.keys() == {"offset"}, "buffers have digests, too"
        compared = compared_by(partial(shardcore.load, saving.path, model, optimizer))
        assert sorted(compared) == sorted(saved)
        found.append(saved)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_digests_are_those_of_the_model_wherever_it_is(form: str, tmp_path: Path) -> None:
    of_ranks = [
        found
        for world_size in (1, 2)
        for found in run_ranks(world_size, _placed, form, str(tmp_path / str(world_size)))
    ]
    assert all(saved == of_ranks[0][0] for found in of_ranks for saved in found)


def _in_background(rank: int, world_size: int, folder: str) -> bool:
    """Train on while a save runs; its digests are of what was saved."""
    run = Run(
        stage=3,
        steps=2,
        precision="bf16",
        shard={"offload": {"optimizer": "cpu", "ratio": 0.37}},
        adam={"lr": 1e-2, "master": "split", "state_dtype": "8bit"},
    )
    torch.manual_seed(0)
    model, optimizer, _ = train(rank, run, Net(width=64, hidden=1500))
    before = shardcore.digest(model, by="param")
    saving = shardcore.save(folder, model, optimizer, wait=False)
    for step in (5, 6):
        stepped(model, optimizer, rank, step)
    saved = saved_in(saving.wait())
    assert shardcore.digest(model, by="param") != before
    compared = compared_by(lambda: shardcore.load(folder, model, optimizer))
    return before.items() <= saved.items() and sorted(compared) == sorted(saved)


def test_a_save_in_the_background_has_the_digests_of_its_values(tmp_path: Path) -> None:
    assert run_ranks(2, _in_background, str(tmp_path)) == [True, True]


def test_linked_files_have_no_digests(tmp_path: Path) -> None:
    shard = {"offload": {"optimizer": "nvme", "path": str(tmp_path / "states")}}
    model, optimizer, _ = train(0, Run(stage=2, steps=2, precision="bf16", shard=shard))
    path = shardcore.save(tmp_path / "saved", model, optimizer).path
    assert any("slot" in name for name in os.listdir(path))
    assert list(saved_in(path)) == ["offset"]
    shardcore.load(path, model, optimizer)


# --- loading --------------------------------------------------------------------------------------


def _save(rank: int, world_size: int, folder: str, form: str) -> None:
    options, adam = FORMS[form]
    model, optimizer, _ = train(rank, Run(stage=2, steps=2, **options, adam={"lr": 1e-2, **adam}))
    shardcore.save(folder, model, optimizer)


def _load(rank: int, world_size: int, folder: str, form: str, stage: int) -> list[str]:
    options, adam = FORMS[form]
    run = Run(stage=stage, steps=1, **options, adam={"lr": 1e-2, **adam})
    model, optimizer, _ = train(rank, run, make_net(7))
    return compared_by(lambda: shardcore.load(folder, model, optimizer))


@pytest.mark.parametrize("form", ["8bit", "split"])
def test_other_worlds_compare_everything(form: str, tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path), form)
    expected = sorted(saved_in(tmp_path / "global_step2"))
    for world_size, stage in ((3, 3), (3, 0), (1, 1)):
        for compared in run_ranks(world_size, _load, str(tmp_path), form, stage):
            assert sorted(compared) == expected


def _refused(rank: int, world_size: int, folder: str) -> list[str]:
    found = []
    for stage in (0, 3):
        model, optimizer, _ = train(rank, Run(stage=stage, steps=1, adam=FORMS["fp32"][1]))
        found.append(error_of(partial(shardcore.load, folder, model, optimizer)))
    return found


def test_values_of_another_name_are_found_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, _save, str(tmp_path), "fp32")
    path = tmp_path / "global_step2"
    edit(path, swap)
    of_ranks = run_ranks(3, _refused, str(tmp_path))
    for errors in of_ranks:
        assert errors == of_ranks[0]
        for error in errors:
            assert error.startswith(f"ValueError: load: {path} has other values of {ONE}.exp_avg")
            assert f"{OTHER}.exp_avg than were saved" in error
    checked = check(path)
    assert checked.differing == [f"{ONE}.exp_avg", f"{OTHER}.exp_avg"]


def _swap_digests(manifest: dict[str, Any]) -> None:
    swap(manifest)
    one, other = (manifest["tensors"][name]["digests"] for name in (ONE, OTHER))
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def test_a_digest_is_of_one_name(tmp_path: Path) -> None:
    run_ranks(1, _save, str(tmp_path), "fp32")
    edit(tmp_path / "global_step2", _swap_digests)
    assert check(tmp_path).differing == [f"{ONE}.exp_avg", f"{OTHER}.exp_avg"]


def _without(manifest: dict[str, Any]) -> None:
    del manifest["digest_version"]
    for entry in manifest["tensors"].values():
        del entry["digests"]


@pytest.mark.parametrize(
    "change", [_without, lambda manifest: manifest.update(digest_version=99)], ids=["old", "new"]
)
def test_checkpoints_without_known_digests_are_loaded(
    change: Callable[[dict[str, Any]], object], tmp_path: Path
) -> None:
    run_ranks(1, _save, str(tmp_path), "8bit")
    edit(tmp_path / "global_step2", change)
    assert run_ranks(2, _load, str(tmp_path), "8bit", 2) == [[], []]
    checked = check(tmp_path)
    assert (checked.differing, checked.same, checked.without) == ([], 0, 67)


def test_digests_that_are_none_are_refused(tmp_path: Path) -> None:
    run_ranks(1, _save, str(tmp_path), "fp32")
    path = tmp_path / "global_step2"
    for digests in ({"weight": "much"}, {"weight": 5}, {"mass": "00"}, 5):
        edit(path, lambda manifest: manifest["tensors"][ONE].update(digests=digests))  # noqa: B023
        error = error_of(lambda: check(path))
        assert error.startswith("ValueError: load: ")
        assert "'digests'" in error


# --- tensor-parallel slices -----------------------------------------------------------------------


def _save_slices(rank: int, world: int, folder: str) -> None:
    mesh = mesh_of(world, 2)
    model, optimizer = sharded_lm(mesh, 2)
    train_lm(model, optimizer, mesh, range(2))
    shardcore.save(folder, model, optimizer)


def _load_slices(rank: int, world: int, folder: str, tp: int) -> list[str]:
    model, optimizer = sharded_lm(mesh_of(world, tp), 3)
    return compared_by(lambda: shardcore.load(folder, model, optimizer))


@pytest.mark.more
def test_slices_are_compared_by_those_who_have_the_same(tmp_path: Path) -> None:
    run_ranks(4, _save_slices, str(tmp_path))
    path = tmp_path / "global_step2"
    saved = sorted(saved_in(path))
    whole = [label for label in saved if "[" not in label]
    assert 0 < len(whole) < len(saved)
    for ranks, tp, expected in ((2, 2, saved), (4, 2, saved), (4, 4, whole), (1, 1, whole)):
        for compared in run_ranks(ranks, _load_slices, str(tmp_path), tp):
            assert sorted(compared) == expected
    checked = check(path)
    assert (checked.differing, checked.same, checked.without) == ([], len(saved), 0)


# --- shardcore consolidate --check ----------------------------------------------------------------


def test_the_command_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, _save, str(tmp_path), "split")
    path = tmp_path / "global_step2"
    before = sorted(path.iterdir())
    assert cli.main(["consolidate", "--check", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        f"{path}: all checksums match; 67 digests match, 0 differ, 0 tensors and states have none\n"
    )
    assert sorted(path.iterdir()) == before
    edit(path, lambda manifest: swap(manifest, "remainder"))
    assert cli.main(["consolidate", "--check", str(tmp_path)]) == 1
    assert capsys.readouterr().out == (
        f"{ONE} has other values than were saved\n{OTHER} has other values than were saved\n"
        f"{path}: all checksums match; 65 digests match, 2 differ, 0 tensors and states have none\n"
    )
    for bad in (["out"], ["--dtype", "bf16"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(["consolidate", "--check", str(tmp_path), *bad])
        assert stop.value.code == 2
        assert "--check writes nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["consolidate", "--check", str(tmp_path), "--tag", "nothing"])
