"""State dicts in shards: what torch.distributed.checkpoint writes and reads of them, between
stages and world sizes.
"""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

import shardcore
from shardcore.checkpoint.file_tensors import boxes_of, slices_of
from shardcore.checkpoint.sharded import Shards
from tests.support.choice import combinations
from tests.support.meta import frozen_net
from tests.support.models import (
    Net,
    Run,
    batch_of,
    error_of,
    failing_forward,
    hash_of_training,
    loss_of,
    make_net,
    train,
)
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("shape", [(), (7,), (1, 9), (5, 6), (3, 4, 5), (2, 1, 3, 2), (1, 1, 1)])
def test_boxes_are_the_range(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    for start in range(whole.numel()):
        for numel in range(1, whole.numel() - start + 1):
            boxes = list(boxes_of(shape, start, numel))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            parts = [whole[slices_of(box)].reshape(-1) for box in boxes]
            assert torch.cat(parts).tolist() == list(range(start, start + numel))


def _model(frozen: bool) -> nn.Module:
    return frozen_net() if frozen else Net()


def _saved(rank: int, world_size: int, run: Run, folder: str, frozen: bool) -> tuple[str, int]:
    torch.manual_seed(2)
    model, optimizer, _ = train(rank, run, _model(frozen))
    weights, states = shardcore.sharded_state_dict(model), shardcore.sharded_state_dict(optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    distinct = {
        id(shards): shards for shards in weights.values() if isinstance(shards, Shards)
    }.values()
    held = sum(values.numel() for shards in distinct for _, values in shards.ranges)
    return _after_a_step(rank, model, optimizer), held


def _after_a_step(rank: int, model: nn.Module, optimizer: Any) -> str:
    loss_of(model, batch_of(9, 0, 0)).backward()
    optimizer.step()
    return hash_of_training(model, optimizer)


def _loaded(rank: int, world_size: int, run: Run, folder: str, frozen: bool) -> tuple[str, str]:
    torch.manual_seed(7)
    model, optimizer, _ = train(rank, run, _model(frozen))
    state = {
        "model": shardcore.sharded_state_dict(model),
        "optimizer": shardcore.sharded_state_dict(optimizer),
    }
    before = hash_of_training(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    assert hash_of_training(model, optimizer) == before, "loading fills copies"
    optimizer.zero_grad()
    shardcore.load_sharded_state_dict(model, state["model"])
    shardcore.load_sharded_state_dict(optimizer, state["optimizer"])
    return _after_a_step(rank, model, optimizer), before


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "precision", "frozen"),
    combinations([0, 1, 2, 3], ["fp32", "bf16"], [False, True], meet=1),
)
def test_a_checkpoint_of_shards_resumes_in_other_worlds(
    tmp_path: Path, stage: int, precision: str, frozen: bool
) -> None:
    run = Run(stage=stage, precision=precision, steps=1)
    if stage == 1:
        run.shard = {"offload": {"optimizer": "cpu", "ratio": 0.37}}
    saved = run_ranks(2, _saved, run, str(tmp_path), frozen)
    numel = sum(p.numel() for p in _model(frozen).parameters() if stage == 3 or p.requires_grad)
    assert sum(held for _, held in saved) == (2 * numel if stage == 0 else numel), (
        "no rank holds more than its shards"
    )
    for world_size, other in ((2, stage), (3, 3 - stage)):
        for resumed, unrelated in run_ranks(
            world_size,
            _loaded,
            Run(**{**run.__dict__, "stage": other, "steps": 1}),
            str(tmp_path),
            frozen,
        ):
            assert unrelated != resumed
            if world_size == 2:  # another number of ranks adds other gradients
                assert resumed == saved[0][0]


def named_in_order(model: nn.Module) -> list[str]:
    """The keys of model.state_dict(), parameters first."""
    params = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return params + [key for key in model.state_dict() if key not in params]


def test_a_plain_model_loads_the_checkpoint(tmp_path: Path) -> None:
    model = make_net()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model, _, _ = train(0, Run(stage=3, precision="bf16"), model)
    assert list(shardcore.sharded_state_dict(model)) == list(named_in_order(model))
    dcp.save(shardcore.sharded_state_dict(model), checkpoint_id=str(tmp_path))
    plain = make_net(3)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path))
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name


def _refused(rank: int, world_size: int, how: str) -> tuple[str, bool]:
    model, optimizer, _ = train(rank, Run(stage=2, steps=1))
    state: Any = shardcore.sharded_state_dict(model)
    before = hash_of_training(model, optimizer)
    if rank == 1 and how == "missing":
        del state["gain"]
    elif rank == 1 and how == "more":
        state["other"] = torch.zeros(1)
    elif rank == 1 and how == "whole":
        state["head.weight"] = torch.zeros(5, 24)
    elif rank == 1 and how == "nothing":
        state = None
    said = error_of(lambda: shardcore.load_sharded_state_dict(model, state))
    return said, hash_of_training(model, optimizer) == before


WRONG = [
    ("missing", "gain is missing from state_dict"),
    ("more", "other is unexpected in state_dict"),
    ("whole", "head.weight is tensor"),
    ("nothing", "is of type NoneType"),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize("how, text", WRONG)
def test_what_does_not_fit_is_refused_on_every_rank(how: str, text: str) -> None:
    other, own = run_ranks(2, _refused, how)
    assert text in own[0]
    assert "rank 1 refused" in other[0]
    assert own[1]
    assert other[1]


def _refused_step(rank: int, world_size: int, step: Any) -> tuple[str, bool]:
    model, optimizer, _ = train(rank, Run(stage=2, steps=1))
    state: Any = shardcore.sharded_state_dict(optimizer)
    before = hash_of_training(model, optimizer)
    for name, value in state.items():
        if isinstance(value, Shards):
            for _, values in value.ranges:
                values.fill_(3.0)
        elif rank == 1 and name == "head.weight.step":
            state[name] = step
    said = error_of(lambda: shardcore.load_sharded_state_dict(optimizer, state))
    return said, hash_of_training(model, optimizer) == before


@pytest.mark.parametrize("step", [None, float("nan"), -5, torch.tensor(2.5)])
def test_a_step_count_that_is_none_is_refused_before_anything_changes(step: Any) -> None:
    (other, as_before), (own, own_as_before) = run_ranks(2, _refused_step, step)
    assert "load_sharded_state_dict: head.weight.step is" in own
    assert "rank 1 refused" in other
    assert as_before
    assert own_as_before


def test_shards_are_loaded_after_a_forward() -> None:
    model, _, _ = train(0, Run(stage=3, steps=1))
    saved, expected = shardcore.sharded_state_dict(model), model.state_dict()
    for leave in (lambda: model(batch_of(8, 0, 0)[0]), lambda: failing_forward(model, 0)):
        with shardcore.full_params(model), torch.no_grad():
            model.head.weight.zero_()
        leave()
        shardcore.load_sharded_state_dict(model, saved)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    with (
        shardcore.full_params(model),
        pytest.raises(ValueError, match="called inside full_params; expected it after"),
    ):
        shardcore.load_sharded_state_dict(model, saved)


def test_names_are_those_of_the_plain_model() -> None:
    wrapped = make_net()
    apply_activation_checkpointing(
        wrapped, check_fn=lambda module: type(module).__name__ == "Block"
    )
    (plain, adam, _), (model, optimizer, _) = (
        train(0, Run(stage=3, steps=1), net) for net in (make_net(), wrapped)
    )
    for of_plain, one in ((plain, model), (adam, optimizer)):
        expected = shardcore.sharded_state_dict(of_plain)
        assert list(shardcore.sharded_state_dict(one)) == list(expected)
        shardcore.load_sharded_state_dict(one, expected)


class Counting(nn.Linear):
    """Keeps more than tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}


def test_extra_state_that_is_left_out_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    model.head = Counting(24, 5, bias=False)
    model, _, _ = train(0, Run(stage=3, steps=0), model)
    caplog.clear()
    assert set(model.state_dict()) - set(shardcore.sharded_state_dict(model)) == {
        "head._extra_state"
    }
    assert ["extra state of head is left out" in text for text in caplog.messages] == [True]


def test_shards_are_for_checkpoints_only() -> None:
    model, _, _ = train(0, Run(stage=3, steps=0))
    shards = shardcore.sharded_state_dict(model)["head.weight"]
    assert shards.shape == (5, 24)
    assert repr(shards) == "Shards(120 of the 120 elements of a (5, 24) torch.float32)"
    with pytest.raises(
        TypeError, match=r"for torch\.distributed\.checkpoint only\. Use the full tensor"
    ):
        torch.add(shards, 1)
    with pytest.raises(ValueError, match="sharded_state_dict: Net is not sharded"):
        shardcore.sharded_state_dict(make_net())


def _through_files(
    rank: int, world_size: int, folder: str, precision: str, names: list[str], how: str
) -> str:
    """Save the named weights, load them into zeroed copies; returns the error, or which elements
    differ.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(37, 37), nn.LayerNorm(6000, bias=False), nn.Linear(37, 37))
    model, _ = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), 3, precision=precision
    )
    own = {name: shardcore.sharded_state_dict(model)[name] for name in names}
    whole = {name: model.state_dict()[name] for name in names}
    writer: Any = dcp.FileSystemWriter(folder)
    if how.startswith("safetensors"):
        writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=how == "safetensors")
    try:
        if how == "safetensors, whole":
            if rank == 0:
                dcp.save(whole, storage_writer=writer, no_dist=True)
            torch.distributed.barrier()
        else:
            dcp.save(own, storage_writer=writer)
    except dcp.CheckpointException as error:
        return str(error)
    loaded: Any = {name: shardcore.sharded_state_dict(model)[name] for name in names}
    for shards in loaded.values():
        for _, values in shards.ranges:
            values.zero_()
    is_file = isinstance(writer, dcp.HuggingFaceStorageWriter)
    dcp.load(
        loaded,
        storage_reader=(dcp.HuggingFaceStorageReader if is_file else dcp.FileSystemReader)(folder),
    )
    for name in names:
        for start, values in loaded[name].ranges:
            differ = int((values != whole[name].flatten()[start : start + values.numel()]).sum())
            if differ:
                return f"{differ} of {values.numel()} elements of {name} differ"
    return "all equal"


@pytest.mark.parametrize(
    ("world_size", "precision", "how"), [(3, "bf16", "torch"), (2, "fp32", "safetensors, whole")]
)
def test_every_element_is_restored_from_files(
    tmp_path: Path, world_size: int, precision: str, how: str
) -> None:
    pytest.importorskip("safetensors", reason="HuggingFaceStorageWriter needs it")
    names = ["0.weight", "0.bias", "1.weight", "2.weight"]
    assert set(run_ranks(world_size, _through_files, str(tmp_path), precision, names, how)) == {
        "all equal"
    }


@pytest.mark.parametrize("how", ["safetensors", "safetensors, rank 0"])
def test_a_writer_that_keeps_one_box_a_file_refuses_several(tmp_path: Path, how: str) -> None:
    pytest.importorskip("safetensors", reason="HuggingFaceStorageWriter needs it")
    for text in run_ranks(
        2, _through_files, str(tmp_path / "matrix"), "bf16", ["0.weight", "1.weight"], how
    ):
        assert "0.weight is in " in text
        assert "with a FileSystemWriter" in text
    # A vector is one box on each rank, which has a file of its own.
    said = run_ranks(2, _through_files, str(tmp_path / "vector"), "bf16", ["1.weight"], how)
    assert all(
        ("all equal" if how == "safetensors" else "1.weight is in ") in text for text in said
    )
