"""Saving: what fails changes nothing and is named on every rank; what runs in the background
saves what was there before.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.nn.utils import prune

import shardcore
from shardcore.checkpoint import format as layout
from shardcore.checkpoint.consolidate import whole_state_dict
from shardcore.checkpoint.format import read_json
from shardcore.engine.engine import engine_behind
from tests.support.models import Run, batch_of, error_of, hash_of, loss_of, make_net, stepped, train
from tests.support.ranks import run_ranks

CPU = {"offload": {"optimizer": "cpu"}}


def _refusals(rank: int, world_size: int, folder: str) -> list[str]:
    model, optimizer, _ = train(rank, Run(stage=2, steps=1))
    _, other, _ = train(rank, Run(stage=2, steps=1))
    odd = rank == 1
    return [
        error_of(lambda: shardcore.save(folder, nn.Linear(1, 1))),
        error_of(lambda: shardcore.save(folder, model, other)),
        error_of(lambda: shardcore.save(folder, model, optimizer, tag="a/b" if odd else "a")),
        error_of(lambda: shardcore.save(folder, model, optimizer, tag="b" if odd else "a")),
        error_of(lambda: shardcore.save(folder, model, optimizer, keep_last=0)),
        error_of(lambda: shardcore.save(folder, model, optimizer, client_state={"x": [object()]})),
        error_of(
            lambda: shardcore.save(
                folder, model, optimizer, client_state=[1] if rank == 0 else None
            )
        ),
        error_of(lambda: shardcore.save(folder, model, optimizer, scheduler=3)),
        error_of(lambda: shardcore.save(folder, model, optimizer, stateful={"data": 3})),
        error_of(
            lambda: shardcore.save(folder if not odd else f"{folder}/other", model, optimizer)
        ),
        str(os.listdir(folder)),
    ]


def test_bad_arguments_are_refused_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, _refusals, str(tmp_path))
    assert first[0] == second[0]
    assert "Linear is not sharded" in first[0]
    assert "optimizer is a FusedAdam that does not belong to model" in first[1]
    assert "tag is 'a/b'; expected the name of a directory" in second[2]
    assert "rank 1 refused" in first[2]
    assert (
        first[3]
        == second[3]
        == "ValueError: save: ranks disagree: argument tag is b on rank 1 but a on rank 0; "
        "expected the same on every rank (nothing was saved)"
    )
    assert "keep_last is 0; expected a number of at least 1" in first[4]
    assert "client_state['x'][0] is of type object; expected plain data" in first[5]
    assert "rank 0 failed" in second[5]
    assert "client_state is of type list; expected a dict, or None" in first[6]
    assert "rank 0 failed" in second[6]
    assert "scheduler is of type int; expected an object with state_dict()" in first[7]
    assert "stateful['data'] is of type int" in first[8]
    assert re.match(
        "ValueError: save: ranks disagree: argument directory is .*/other on rank 1 but ",
        first[9],
    )
    assert first[10] in ("[]", "['.lock']")


def _no_path(rank: int, world_size: int, folder: str) -> list[str]:
    model, optimizer, _ = train(rank, Run(stage=2, steps=1))
    directory: Any = folder if rank == 0 else 5
    return [
        error_of(lambda: shardcore.save(directory, model, optimizer)),
        error_of(lambda: shardcore.load(directory, model, optimizer)),
    ]


def test_a_directory_that_is_no_path_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    others, own = run_ranks(2, _no_path, str(tmp_path))
    for op, other, error in zip(("save", "load"), others, own, strict=True):
        assert error == f"TypeError: {op}: directory is of type int; expected a path"
        assert f"{op}: rank 1 failed: {error}; nothing was" in other


def test_gradients_that_are_not_saved_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, _ = train(0, Run(stage=2, steps=1))
    caplog.clear()
    shardcore.save(tmp_path, model, optimizer)
    assert not caplog.messages
    loss_of(model, batch_of(1, 0, 0)).backward()
    shardcore.save(tmp_path, model)  # weights alone
    assert not caplog.messages
    shardcore.save(tmp_path, model, optimizer)
    optimizer.step()
    shardcore.save(tmp_path, model, optimizer)
    assert [
        "1 backward(s) ran since the last step, and gradients are not saved" in said
        for said in caplog.messages
    ] == [True]


class Kept:
    """Something with a position."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def _beside(rank: int, world_size: int, folder: str) -> None:
    model, optimizer, _ = train(rank, Run(stage=2, steps=1))
    of_torch = torch.optim.lr_scheduler
    parts = [of_torch.StepLR(optimizer, 1, gamma=0.5), of_torch.MultiStepLR(optimizer, [1, 1])]
    scheduler = of_torch.SequentialLR(optimizer, parts, [1])
    torch.manual_seed(rank)
    given = {"epoch": 2, "best": (0.5, None), "seen": torch.arange(3)}
    shardcore.save(
        folder,
        model,
        optimizer,
        scheduler=scheduler,
        client_state=given,
        stateful={"data": Kept([rank, 7])},
    )
    expected = torch.rand(4), scheduler.state_dict(), optimizer.param_groups[0]["lr"]
    scheduler.step()
    scheduler.step()
    optimizer.param_groups[0]["lr"] = 17.0
    data = Kept(None)
    loaded = shardcore.load(folder, model, optimizer, scheduler=scheduler, stateful={"data": data})
    assert torch.equal(torch.rand(4), expected[0]), "random states are those of each rank"
    assert scheduler.state_dict() == expected[1]
    assert optimizer.param_groups[0]["lr"] == expected[2]
    scheduler.step()  # the first of MultiStepLR, which needs its milestones' elements()
    assert data.value == [rank, 7]
    assert loaded.client_state["best"] == (0.5, None)
    assert loaded.client_state["seen"].tolist() == [0, 1, 2]


def test_what_is_beside_tensors_is_restored(tmp_path: Path) -> None:
    run_ranks(2, _beside, str(tmp_path))


def test_a_manifest_says_how_it_was_trained(tmp_path: Path) -> None:
    model, optimizer, _ = train(0, Run(stage=1, steps=1, shard=CPU))
    path = shardcore.save(tmp_path, model, optimizer).path
    numerics = read_json(path / "manifest.json")["numerics"]
    assert (numerics["stage"], numerics["reduction"], numerics["grad_dtype"]) == (
        1,
        "ordered",
        "fp32",
    )
    assert (
        numerics["offload"]["optimizer"],
        numerics["overlap_step"],
        numerics["clip_grad_norm"],
    ) == ("cpu", False, None)
    assert numerics["ranks"] == {"world_size": 1, "ranks_per_node": 1, "replicate": False}


def test_a_buffer_of_another_dtype_is_named(tmp_path: Path) -> None:
    model = make_net()
    model.register_buffer("freqs", torch.zeros(3, dtype=torch.complex64))
    model, optimizer, _ = train(0, Run(stage=2, steps=1), model)
    with pytest.raises(
        TypeError,
        match=r"freqs is a tensor of torch\.complex64, which .* a buffer with persistent=False",
    ):
        shardcore.save(tmp_path, model, optimizer)
    assert os.listdir(tmp_path) == [".lock"]


def _excluded(rank: int, world_size: int, folder: str, stage: int) -> None:
    def make() -> Any:
        model = make_net(rank + 3)
        model.blocks[0].requires_grad_(False)
        return train(rank, Run(stage=stage, steps=1, precision="bf16"), model)

    model, optimizer, _ = make()
    shardcore.save(folder, model, optimizer, exclude_frozen_parameters=True)
    weights = model.state_dict()
    model, optimizer, _ = make()
    frozen = model.state_dict()
    shardcore.load(folder, model, optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, (frozen if name.startswith("blocks.0.") else weights)[name]), name


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_may_be_left_out(tmp_path: Path, stage: int) -> None:
    run_ranks(2, _excluded, str(tmp_path), stage)


def _wrapped(rank: int, world_size: int, folder: str) -> None:
    model, optimizer, _ = train(rank, Run(stage=3, steps=1))
    apply_activation_checkpointing(model, check_fn=lambda module: type(module).__name__ == "Block")
    stepped(model, optimizer, rank, 1)
    shardcore.save(folder, model, optimizer)
    weights = list(model.state_dict().values())
    plain, its, _ = train(rank, Run(stage=2, steps=0))
    shardcore.load(folder, plain, its)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), weights, strict=True))
    shardcore.consolidate(model, Path(folder, "model.safetensors"))
    if rank == 0:
        head = Path(folder, "model.safetensors").read_bytes()[:4096]
        assert b"blocks.0.norm.weight" in head
        assert b"wrapped" not in head


def test_names_are_those_of_the_plain_model(tmp_path: Path) -> None:
    run_ranks(2, _wrapped, str(tmp_path))


def _edited(model: Any) -> Any:
    """Prune a layer, put a wrapper around another one, of which a weight is frozen, and give a
    third another name.
    """
    with shardcore.full_params(model):
        prune.random_unstructured(model.blocks[0].up, "weight", 0.5)
    model.blocks[1].down = nn.Sequential(model.blocks[1].down)
    model.top = model.head
    del model.head
    object.__setattr__(model, "head", model.top)  # for forward
    return model


def _renamed(rank: int, world_size: int, folder: str) -> None:
    def make(stage: int) -> Any:
        model = make_net(stage)
        model.blocks[1].down.bias.requires_grad_(False)
        return train(rank, Run(stage=stage, steps=1), model)

    for stage, other in ((1, 3), (3, 0)):
        model, optimizer, _ = make(stage)
        ema = shardcore.EMA(model)
        shardcore.save(folder, model, optimizer, tag=f"before{stage}")
        _edited(model)
        stepped(model, optimizer, rank, 1)
        ema.update()
        shardcore.save(folder, model, optimizer, tag=f"after{stage}", ema=ema)
        weights, states, averages = (
            model.state_dict(),
            optimizer.state_dict()["state"],
            ema.state_dict()["averages"],
        )
        names = {name for name, param in model.named_parameters() if param.requires_grad}
        assert (
            {"top.weight", "blocks.0.up.weight_orig", "blocks.1.down.0.weight"}
            <= names
            == set(averages)
        )
        assert {
            name.rpartition(".")[0] for name in shardcore.sharded_state_dict(optimizer)
        } == names
        shardcore.load_sharded_state_dict(optimizer, shardcore.sharded_state_dict(optimizer))
        ema.load_state_dict(ema.state_dict())
        whole = whole_state_dict(engine_behind("test", model))
        assert rank > 0 or whole.keys() == weights.keys()

        model, optimizer, _ = make(other)
        ema = shardcore.EMA(_edited(model))
        shardcore.load(folder, model, optimizer, tag=f"after{stage}", ema=ema)
        assert hash_of(model.state_dict().values()) == hash_of(weights.values())
        assert hash_of(ema.state_dict()["averages"].values()) == hash_of(averages.values())
        loaded = optimizer.state_dict()["state"]
        assert all(
            torch.equal(loaded[number][key], state[key])
            for number, state in states.items()
            for key in state
        )
        said = error_of(
            lambda m=model, o=optimizer, tag=f"before{stage}": shardcore.load(folder, m, o, tag=tag)
        )
        assert re.search(
            r"missing .*blocks\.1\.down\.0\.weight.*; unexpected .*blocks\.1\.down\.weight", said
        ), said


def test_names_are_those_that_the_model_has_now(tmp_path: Path) -> None:
    run_ranks(2, _renamed, str(tmp_path))


def _useless(rank: int, world_size: int, folder: str) -> list[str]:
    model, optimizer, _ = train(rank, Run(stage=2, steps=1))
    if rank == 1:
        model.blocks[1].down = nn.Sequential(model.blocks[1].down)
    said = [error_of(lambda: shardcore.save(folder, model, optimizer))]
    model.added = nn.Linear(2, 2)
    return [
        *said,
        error_of(lambda: shardcore.save(folder, model, optimizer)),
        error_of(lambda: shardcore.sharded_state_dict(optimizer)),
    ]


def test_a_model_whose_checkpoint_would_lack_weights_is_not_saved(tmp_path: Path) -> None:
    """One of which a rank has other names; one that has a parameter more."""
    for named, added, sharded in run_ranks(2, _useless, str(tmp_path)):
        assert "blocks.1.down.0." in named
        assert "added.weight was added and would not be trained" in added
        assert "added.weight was added and would not be trained" in sharded
    assert not [name for name in os.listdir(tmp_path) if name != ".lock"]


def test_the_one_that_latest_names_is_kept(tmp_path: Path) -> None:
    model, optimizer, _ = train(0, Run(stage=2, steps=1))
    for tag, latest in (("a", True), ("b", True), ("c", False), ("d", False)):
        shardcore.save(tmp_path, model, optimizer, tag=tag, save_latest=latest, keep_last=1)
    assert sorted(os.listdir(tmp_path)) == [".lock", "b", "d", "latest"]


def test_too_much_plain_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_MAX_PLAIN_BYTES", 100_000)
    model, optimizer, _ = train(0, Run(stage=2, steps=1))
    with pytest.raises(
        ValueError, match=r"plain data take .* bytes as JSON; expected at most 100000"
    ):
        shardcore.save(tmp_path, model, optimizer, client_state={"ema": torch.zeros(100_000)})
    # in the manifest, as ranges are, which may have more
    optimizer.param_groups[0]["name"] = "x" * 200_000
    shardcore.save(tmp_path, model, optimizer)
    shardcore.load(tmp_path, model, optimizer)
    monkeypatch.setattr(layout, "_MAX_JSON_BYTES", 200_000)
    with pytest.raises(
        ValueError,
        match=r"ranges of tensors, and .* take .* bytes as JSON; expected at most 200000",
    ):
        shardcore.save(tmp_path, model, optimizer)
