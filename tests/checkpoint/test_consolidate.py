"""Ordinary safetensors from shards: what transformers and plain torch load, from a checkpoint
and from a model.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardcore
import shardcore.dcp
from shardcore.checkpoint.consolidate import bytes_of, consolidate
from shardcore.checkpoint.directory import SaveLock
from tests.support.choice import combinations
from tests.support.models import Run, error_of, make_net, train
from tests.support.ranks import run_ranks

safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")


def tied_net() -> Any:
    model = make_net()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def load_all(path: Path) -> dict[str, torch.Tensor]:
    """Read as transformers does."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return dict(safetensors.load_file(path / "model.safetensors"))
    weight_map = json.loads(index.read_text())["weight_map"]
    return {name: safetensors.load_file(path / file)[name] for name, file in weight_map.items()}


def _write(
    rank: int, world_size: int, folder: str, stage: int, dtype: Any
) -> dict[str, torch.Tensor]:
    model, optimizer, _ = train(rank, Run(stage=stage, precision="bf16", steps=2), tied_net())
    shardcore.save(os.path.join(folder, "saved"), model, optimizer)
    shardcore.consolidate(model, os.path.join(folder, "model"), dtype=dtype, max_shard_bytes=8192)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("stage", "dtype"), combinations([0, 2, 3], [None, torch.bfloat16], meet=1)
)
def test_a_plain_model_loads_the_files(tmp_path: Path, stage: int, dtype: Any) -> None:
    expected = run_ranks(2, _write, str(tmp_path), stage, dtype)[0]
    files = consolidate(
        tmp_path / "saved", tmp_path / "checkpoint", dtype=dtype, max_shard_bytes=8192
    )
    for folder in ("model", "checkpoint"):
        found = load_all(tmp_path / folder)
        assert set(found) == set(expected) - {"blocks.2.up.weight"}, "tied weights once"
        for name, value in found.items():
            assert torch.equal(value, expected[name].to(dtype or expected[name].dtype)), name
        plain = tied_net()
        assert plain.load_state_dict(
            {n: v.float() for n, v in found.items()}, strict=False
        ).missing_keys == ["blocks.2.up.weight"]
        assert not [name for name in os.listdir(tmp_path / folder) if name.startswith(".")]
    index = json.loads((tmp_path / "checkpoint" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in found.values())
    assert len(files) == len(set(index["weight_map"].values())) + 1 > 2
    for name in set(index["weight_map"].values()):
        with safetensors.safe_open(tmp_path / "checkpoint" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}  # without it transformers refuses


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer, _ = train(0, Run(stage=2, steps=1))
    return shardcore.save(tmp_path / "saved", model, optimizer).path


def test_one_file(saved: Path, tmp_path: Path) -> None:
    assert consolidate(saved, tmp_path / "one.safetensors", max_shard_bytes=1) == [
        tmp_path / "one.safetensors"
    ]
    assert set(safetensors.load_file(tmp_path / "one.safetensors")) == set(make_net().state_dict())
    consolidate(saved, tmp_path / "folder")
    assert os.listdir(tmp_path / "folder") == ["model.safetensors"]


def test_an_older_model_is_replaced(saved: Path, tmp_path: Path) -> None:
    consolidate(saved, tmp_path / "out", max_shard_bytes=1000)
    (tmp_path / "out" / "config.json").write_text("{}")
    assert len(os.listdir(tmp_path / "out")) > 5
    consolidate(saved, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


def test_a_save_into_the_same_folder_leaves_what_is_written_there(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = shardcore.checkpoint.consolidate._publish

    def after_a_save(layout: Any, ending: str) -> Any:
        SaveLock(layout.folder, "step").release()
        return publish(layout, ending)

    monkeypatch.setattr("shardcore.checkpoint.consolidate._publish", after_a_save)
    assert consolidate(saved, saved.parent) == [saved.parent / "model.safetensors"]
    assert set(load_all(saved.parent)) == set(make_net().state_dict())


def test_damage_is_found_and_leaves_the_older_model(saved: Path, tmp_path: Path) -> None:
    consolidate(saved, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    data = saved / "rank_00000.safetensors"
    damaged = bytearray(data.read_bytes())
    damaged[4096] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(ValueError, match="is damaged in bytes"):
        consolidate(saved, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_files_without_their_manifest_are_refused(saved: Path, tmp_path: Path) -> None:
    """They hold ranges of tensors under names of their own."""
    (saved / "manifest.json").unlink()
    with pytest.raises(
        ValueError,
        match=r"consolidate: .* contains rank_00000.safetensors without manifest.json; expected both",
    ):
        consolidate(saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _unwritable(rank: int, world_size: int, folder: str) -> str:
    model, _, _ = train(rank, Run(stage=3, steps=1))
    said = error_of(lambda: shardcore.consolidate(model, os.path.join(folder, "file", "out")))
    model.state_dict()  # ranks are still together
    return said


def test_an_error_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run_ranks(2, _unwritable, str(tmp_path))
    assert "NotADirectoryError" in first
    assert "rank 0 failed: NotADirectoryError" in second


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": torch.int8}, "dtype is torch.int8; expected a floating dtype"),
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0"),
        ({"tag": "nothing"}, "saved/nothing does not exist. Pass a checkpoint"),
    ],
)
def test_bad_arguments(
    saved: Path, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    assert message in error_of(lambda: consolidate(saved.parent, tmp_path / "out", **arguments))
    assert not (tmp_path / "out").exists()


def test_a_transformers_model_is_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the transformers package")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = shardcore.FusedAdam(model.parameters())
    model, optimizer = shardcore.shard(model, optimizer, 2, precision="bf16")
    config.save_pretrained(tmp_path)
    shardcore.consolidate(model, tmp_path, max_shard_bytes=20_000)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_checkpoints_of_others_are_consolidated(tmp_path: Path) -> None:
    model = tied_net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 10)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1}
    torch.save(
        {**state, "ema": {name: value + 1 for name, value in model.state_dict().items()}},
        tmp_path / "last.pt",
    )
    weights, states = get_state_dict(model, optimizer)
    dcp.save(
        {"app": {"model": weights, "optim": states}}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    writer = shardcore.dcp.Writer(tmp_path / "written")
    dcp.save({"model": weights, "optim": states, "epoch": 1}, storage_writer=writer, no_dist=True)
    for source in ("last.pt", "dcp", "written"):
        consolidate(tmp_path / source, tmp_path / "out")
        found = load_all(tmp_path / "out")
        assert set(model.state_dict()) - set(found) <= (
            {"blocks.2.up.weight"} if source == "last.pt" else set()
        ), "tied once"
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.items())
        consolidate(tmp_path / "out", tmp_path / "again")  # as a folder of Hugging Face's
        assert set(load_all(tmp_path / "again")) == set(found)
    torch.save({"epoch": 1}, tmp_path / "none.pt")
    with pytest.raises(
        ValueError,
        match=r"^consolidate: .*none.pt contains no name of the model \(its keys are 'epoch'\)",
    ):
        consolidate(tmp_path / "none.pt", tmp_path / "out")


def test_names_of_other_files_are_refused(saved: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "model.pt"):
        with pytest.raises(
            ValueError, match=r"expected a directory, or the name of a \.safetensors file"
        ):
            consolidate(saved, tmp_path / name)
        assert not (tmp_path / name).exists()
    assert consolidate(saved, tmp_path / "llama-3.1") == [
        tmp_path / "llama-3.1" / "model.safetensors"
    ]


def test_sizes() -> None:
    sizes: dict[int | str, int] = {
        "2.5GB": 2_500_000_000,
        "5GB": 5 * 10**9,
        "10 MiB": 10 << 20,
        7: 7,
        "100": 100,
    }
    assert [bytes_of(text) for text in sizes] == list(sizes.values())
    for text in ("", "GB", "5 elephants", "-1GB", "1.2.3GB", "1e9"):
        with pytest.raises(ValueError, match="expected a number of bytes"):
            bytes_of(text)


def _halfway(rank: int, world_size: int, folder: str, stage: int) -> bool:
    """Whether files have the weights, not torch's rounding, of masters halfway between two bfloat16
    numbers.
    """
    model = torch.nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.fill_(1 + 2**-8)
    optimizer = shardcore.FusedAdam(model.parameters())
    model, optimizer = shardcore.shard(model, optimizer, stage, precision="bf16")
    with shardcore.full_params(model):
        weight = model.weight.detach().clone()
    assert not torch.equal(weight, torch.full((4, 4), 1 + 2**-8).bfloat16()), "the twin"
    shardcore.save(os.path.join(folder, "saved"), model, optimizer)
    path = os.path.join(folder, "model")
    shardcore.consolidate(model, path, dtype=torch.bfloat16)
    if rank == 0:
        consolidate(Path(folder, "saved"), Path(folder, "other"), dtype=torch.bfloat16)
        found = [load_all(Path(folder, name))["weight"] for name in ("model", "other")]
        return all(torch.equal(each, weight) for each in found)
    return True


@pytest.mark.parametrize("stage", [0, 3])
def test_16_bit_files_have_the_bits_of_the_weights(tmp_path: Path, stage: int) -> None:
    assert run_ranks(2, _halfway, str(tmp_path), stage) == [True, True]
