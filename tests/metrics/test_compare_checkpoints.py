"""`shardcore compare` of two checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.cli import main
from shardcore.metrics.compare_checkpoints import compare_checkpoints
from tests.support.ranks import run_ranks


def _saved(
    rank: int, world_size: int, folder: str, stage: int, fault: str = "", master: str = "split"
) -> None:
    """Make a step, whose gradients are the same on every rank, and save to `folder`."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))
    if fault == "shapes":
        model[2] = nn.Linear(64, 4)
    if fault == "names":
        model.append(nn.Linear(3, 3))
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2, master=master)
    model, optimizer = shardcore.shard(
        model, optimizer, stage, precision="bf16", keep_fp32=[nn.BatchNorm1d]
    )
    for _ in range(2 if fault == "steps" else 1):
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if fault == "weights":
        with shardcore.full_params(model), torch.no_grad():
            model[2].weight[1, 2] = 7.0
    if fault == "buffers":
        model[1].running_mean[5] = 7.0
    if fault == "states":
        states = optimizer.state_dict()
        states["state"][0]["exp_avg"].view(-1)[70] = 7.0
        optimizer.load_state_dict(states)
    shardcore.save(folder, model, optimizer)


def test_worlds_stages_and_masters_do_not_show(tmp_path: Path, capsys: Any) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    run_ranks(1, _saved, str(one), 0)
    run_ranks(2, _saved, str(other), 3, "", "fp32")
    assert main(["compare", str(one), str(other)]) == 0
    assert capsys.readouterr().out == (
        "equal: 9 tensors and 12 optimizer states; not compared: options of the optimizer, "
        "schedulers, loss scale, random states, client_state\n"
    )
    assert compare_checkpoints(next(one.glob("global*")), other).equal, "of one checkpoint"


@pytest.mark.parametrize(
    ("fault", "kind", "where", "text"),
    [
        ("weights", "weights", "2.weight", "differs in 1 of 192 elements, first in element 66: "),
        (
            "buffers",
            "weights",
            "1.running_mean",
            "differs in 1 of 64 elements, first in element 5: ",
        ),
        (
            "states",
            "states",
            "0.weight.exp_avg",
            "differs in 1 of 1024 elements, first in element 70: ",
        ),
        ("steps", "steps", "0.weight", "has had 1 updates in"),
        ("shapes", "shapes", "2.weight", "has the shape (3, 64) in"),
        ("names", "names", "3.weight", "is not stored in"),
    ],
)
def test_the_first_difference_is_named(
    fault: str, kind: str, where: str, text: str, tmp_path: Path, capsys: Any
) -> None:
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    _saved(0, 1, one, 2)
    _saved(0, 1, other, 2, fault)
    assert main(["compare", one, other, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"]
    assert (found["difference"]["kind"], found["difference"]["where"]) == (kind, where)
    assert text in found["difference"]["message"]
    assert main(["compare", other, one]) == 1, "either way"


def test_what_cannot_be_compared(tmp_path: Path, capsys: Any) -> None:
    saved, run, other = tmp_path / "saved", tmp_path / "run", tmp_path / "other"
    _saved(0, 1, str(saved), 2)
    run.mkdir()
    other.mkdir()
    (run / "digests.jsonl").write_text('{"format": "shardcore digests", "version": 1}')
    (other / "metrics.csv").write_text("step,loss")

    def said(one: Path, other: Path) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["compare", str(one), str(other)])
        assert ended.value.code == 2
        return capsys.readouterr().err

    for pair in ((run, saved), (saved, run)):
        assert f"{saved} contains no digests.jsonl" in said(*pair)
    assert f"{other} contains neither digests.jsonl nor manifest.json" in said(saved, other)
    data = next(saved.glob("*/rank_00000.safetensors"))
    whole = bytearray(data.read_bytes())
    whole[-5] ^= 1
    data.write_bytes(whole)
    assert "is damaged in bytes" in said(saved, saved)
