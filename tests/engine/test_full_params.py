"""Contexts in which full weights are edited and saved, where ranks differ in what they do there."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.distributed.comm import Traffic
from shardcore.engine.full_params import digest_of
from tests.support.models import (
    Run,
    adam,
    assert_one,
    batch_of,
    hash_of,
    hash_of_training,
    loss_of,
    make_net,
    stepped,
    train,
)
from tests.support.ranks import run_ranks

GatheredParameters: Any = shardcore.zero.GatheredParameters  # type: ignore[attr-defined]


def _load(layer: nn.Linear) -> None:
    # bfloat16 rounds it to 1
    layer.load_state_dict({"weight": torch.full(layer.weight.shape, 1.001)})


@torch.no_grad()
def _copy(layer: nn.Linear) -> None:
    layer.weight.copy_(torch.full_like(layer.weight, 1.25))


def _behind_autograd(layer: nn.Linear) -> None:
    layer.weight.data.add_(1.0)


def _assign(layer: nn.Linear) -> None:
    layer.weight.data = torch.full_like(layer.weight, 1.5)


def _edit_inside(layer: nn.Linear) -> None:
    layer.weight.data.mul_(2.0)


EDITS: list[Callable[[nn.Linear], None]] = [_load, _copy, _behind_autograd, _assign, _edit_inside]


def _model(rank: int, stage: int) -> tuple[Any, Any]:
    return train(rank, Run(stage=stage, precision="bf16", steps=1))[:2]


def _error_of(block: AbstractContextManager[None], inside: Callable[[], Any]) -> str:
    try:
        with block:
            inside()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _one_rank_modifies(rank: int, world_size: int) -> list[list[str]]:
    found = []
    for edit in EDITS:
        hashes = []
        for stage in (0, 2, 3):
            model, optimizer = _model(rank, stage)
            with GatheredParameters(model.parameters(), modifier_rank=1):
                with (
                    GatheredParameters(model.parameters())
                    if edit is _edit_inside
                    else nullcontext()
                ):
                    if rank == 1:
                        edit(model.head)
                if rank == 0 and edit is not _edit_inside:  # is gone at the end
                    with torch.no_grad():
                        model.inp.weight.mul_(3)
            hashes.append(hash_of(model.state_dict().values()))
            stepped(model, optimizer, rank, 1)
            hashes.append(hash_of_training(model, optimizer))
        found.append(hashes)
    return found


def test_what_the_modifying_rank_wrote_becomes_every_ranks_weight_and_master() -> None:
    first, second = run_ranks(2, _one_rank_modifies)
    assert first == second
    for hashes in first:
        assert len(set(hashes[::2])) == len(set(hashes[1::2])) == 1, "the same at every stage"
    assert len({hashes[0] for hashes in first}) == len(EDITS)


def _one_rank_edits(rank: int, world_size: int) -> None:
    model, optimizer = _model(rank, 3)
    before = hash_of_training(model, optimizer)
    for edit in EDITS:
        blocks = [shardcore.full_params(model)] if edit is not _assign else []  # which refuses it
        for block in [*blocks, GatheredParameters([model.head.weight])]:
            error = _error_of(block, partial(edit, model.head) if rank == 0 else int)
            assert "rank 1 leaves the block with other values of head.weight than rank 0" in error
            assert "modifier_rank" in error
            assert hash_of_training(model, optimizer) == before
    with shardcore.full_params(model):
        _load(model.head)  # on every rank: the masters have it in float32
    assert bool((model.state_dict()["head.weight"] == 1.001).all())
    model.load_state_dict(train(rank, Run(stage=3, precision="bf16", steps=0))[0].state_dict())
    stepped(model, optimizer, rank, 1)


def test_an_edit_of_one_rank_is_an_error_on_all_that_changes_nothing() -> None:
    run_ranks(2, _one_rank_edits)


def _one_rank_saves(rank: int, world_size: int) -> list[str]:
    hashes = []
    for stage in (0, 2, 3):
        for modifier in (None, 0):
            model, optimizer = _model(rank, stage)
            saved: dict[str, torch.Tensor] = {}
            with GatheredParameters(model.parameters(), modifier_rank=modifier):
                if rank == 0:
                    saved = {
                        **model.state_dict(),
                        **{f"block.{k}": v for k, v in model.blocks[0].state_dict().items()},
                    }
            for name, value in model.state_dict().items():
                assert not saved or torch.equal(saved[name], value.to(saved[name].dtype))
            assert not saved or saved["head.weight"].dtype == torch.bfloat16
            stepped(model, optimizer, rank, 1)
            hashes.append(hash_of_training(model, optimizer))
    return hashes


def test_one_rank_saves_inside_gathered_parameters() -> None:
    assert_one(value for each in run_ranks(2, _one_rank_saves) for value in each)


def _fail() -> None:
    raise KeyError("mine")


def _trained(rank: int, world_size: int) -> str:
    return hash_of_training(*train(rank, Run(stage=3, precision="bf16", steps=2))[:2])


def _leaves_otherwise(rank: int, world_size: int) -> tuple[list[str], str]:
    """Rank 0 alone asks for a state dict, or raises; then both train on."""
    model, optimizer = _model(rank, 3)
    errors = []
    for block in (
        partial(shardcore.full_params, model),
        partial(GatheredParameters, [model.head.weight], modifier_rank=0),
    ):
        errors += [
            _error_of(block(), inside if rank == 0 else int) for inside in (model.state_dict, _fail)
        ]
    stepped(model, optimizer, rank, 1)
    return errors, hash_of_training(model, optimizer)


def test_a_rank_that_leaves_by_an_error_of_its_own_leaves_no_other_waiting() -> None:
    (first, trained), (second, other) = run_ranks(2, _leaves_otherwise)
    for errors in (first, second):
        for text in errors[::2]:
            assert text.startswith("OtherCallError: ")
            assert text.endswith(
                "or one rank alone to save inside deepspeed.zero.GatheredParameters"
            )
    assert "state_dict: rank 1 calls the end of full_params; expected" in first[0]
    assert (
        "the end of GatheredParameters(modifier_rank=0): rank 0 calls state_dict; expected"
        in second[2]
    )
    assert first[1::2] == ["KeyError: 'mine'"] * 2
    assert second[1::2] == [""] * 2
    assert trained == other == run_ranks(2, _trained)[0]


def test_a_modifier_that_does_not_train_the_model_is_refused() -> None:
    model, _, _ = train(0, Run(stage=3, steps=0))
    with pytest.raises(
        ValueError, match=r"got rank 5; expected one of the ranks that train this model: \[0\]"
    ):
        GatheredParameters(model.parameters(), modifier_rank=5).__enter__()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_digest_sees_each_bit_and_each_place(dtype: torch.dtype) -> None:
    values = torch.arange(1, 1 + (1 << 20) + 5, dtype=torch.int32).to(dtype)[1:]
    digest = int(digest_of(values))
    assert int(digest_of(values.clone())) == digest
    for place in (0, 777, values.numel() - 1):
        other = values.clone()
        other[place] += max(1, int(other[place]) // 2)
        assert int(digest_of(other)) != digest
    assert int(digest_of(values.roll(1))) != digest
    assert int(digest_of(values[:0])) == 0


def _one_after_another(rank: int, world_size: int) -> None:
    model = make_net()
    model, optimizer = shardcore.shard(model, adam(model), 3)
    comm = model._shardcore_engine.comm
    before = comm.sent[Traffic.WEIGHTS]
    expected = make_net().state_dict()
    # those of the root first: the model has them before and after the blocks
    for name, param in sorted(model.named_parameters(), key=lambda item: "blocks" in item[0]):
        with GatheredParameters([param]):
            assert torch.equal(param.detach(), expected[name])
        with pytest.raises(RuntimeError, match="is sharded"):
            param.sum()
    loop = comm.sent[Traffic.WEIGHTS] - before
    with shardcore.full_params(model):
        pass
    assert loop == comm.sent[Traffic.WEIGHTS] - before - loop, "each unit travels once"
    # what is kept of the last unit is neither taken for the weights of the next step, nor lost
    train_once(model, optimizer, rank)
    last = model.head.weight
    with GatheredParameters([last], modifier_rank=1):
        if rank == 1:
            last.data.fill_(3.0)
    with GatheredParameters([last]):
        assert bool((last == 3.0).all())
    train_once(model, optimizer, rank)
    now = model.state_dict()["head.weight"]
    with GatheredParameters([last]):
        assert torch.equal(last.detach(), now)
        assert not bool((last == 3.0).all())


def train_once(model: Any, optimizer: Any, rank: int) -> None:
    loss_of(model, batch_of(0, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_loop_over_parameters_gathers_each_unit_once() -> None:
    run_ranks(2, _one_after_another)
