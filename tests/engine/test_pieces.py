"""Parameters in pieces before they are sharded: cut, gathered, copied, and laid out in units."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore
from shardcore.distributed.comm import Comm
from shardcore.engine import pieces
from shardcore.engine.pieces import ZeroParamStatus
from tests.support.models import (
    Net,
    adam,
    batch_of,
    error_of,
    hash_of,
    hash_of_training,
    loss_of,
    make_net,
)
from tests.support.ranks import run_ranks

SHAPES: list[tuple[int, ...]] = [(), (1,), (0, 3), (7,), (3, 5), (64, 33)]


def _partitioned(model: nn.Module) -> nn.Module:
    pieces.partition(Comm(), model.parameters(), source=0)
    return model


def _cut(rank: int, world_size: int) -> None:
    comm = Comm()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in SHAPES:
            full = torch.arange(2 * rank, 2 * rank + torch.Size(shape).numel()).reshape(shape)
            of_rank_0 = (full - 2 * rank).to(dtype)
            param: Any = nn.Parameter(full.to(dtype), requires_grad=False)
            pieces.partition(comm, [param], source=0)
            assert (param.shape, param.dtype) == ((0,), dtype)
            assert (param.ds_shape, param.ds_numel) == (torch.Size(shape), of_rank_0.numel())
            assert param.ds_status is ZeroParamStatus.NOT_AVAILABLE
            assert param.ds_tensor.numel() == -(-of_rank_0.numel() // world_size)
            twin = copy.deepcopy([param, param])
            assert twin[0] is twin[1] is not param
            assert twin[0].ds_id != param.ds_id
            twin[0].ds_tensor.zero_()
            pieces.gather(comm, [param])
            assert torch.equal(param, of_rank_0)
            assert param.ds_status is ZeroParamStatus.AVAILABLE
            assert torch.equal(copy.deepcopy(param), of_rank_0), "a full copy"


@pytest.mark.parametrize("world_size", [2, 3])
def test_pieces_have_the_values_of_rank_0(world_size: int) -> None:
    run_ranks(world_size, _cut)


def test_a_world_of_one_has_one_piece() -> None:
    _cut(0, 1)


def _edited(rank: int, world_size: int) -> list[str]:
    model: Any = _partitioned(make_net(rank))
    weight, other = model.head.weight, model.inp.weight
    zero = shardcore.zero  # type: ignore[attr-defined]
    messages = []
    with zero.GatheredParameters([weight, other], modifier_rank=1):
        assert weight.shape == (5, 24)
        weight.data.fill_(rank)
        with zero.GatheredParameters({other}):
            other.data.mul_(0.0)
        assert other.shape == (24, 10), "the outer context has it"
    assert weight.shape == (0,)
    with zero.GatheredParameters(weight):
        assert (weight == 1.0).all()
        weight.data = torch.full_like(weight, 2.0)
    with zero.GatheredParameters(weight):
        assert (weight == 2.0).all()

    def differ() -> None:
        with zero.GatheredParameters([weight]):
            weight.data[0, 0] = rank

    messages.append(error_of(differ))
    with zero.GatheredParameters(weight):
        assert (weight == 2.0).all(), "as before"

    def fail() -> None:
        with zero.GatheredParameters(weight, modifier_rank=0):
            if rank == 1:
                raise KeyError("on one rank")

    messages.append(error_of(fail))
    assert weight.shape == (0,)

    def others() -> None:
        zero.GatheredParameters([weight, other][rank]).__enter__()

    messages.append(error_of(others))
    return messages


def test_edits_inside_gathered_parameters_reach_the_pieces() -> None:
    of_ranks = run_ranks(2, _edited)
    for differs, _, others in of_ranks:
        assert "ranks disagree: values of weight" in differs
        assert "the weight number" in others
    assert [failed for _, failed, _ in of_ranks] == ["no error", "KeyError: 'on one rank'"]


def _trained(rank: int, world_size: int, how: str, options: dict[str, Any]) -> list[Any]:
    """how: "full", "pieces", "mixed" (some parameters have none), or "broken" (a piece has another
    value).
    """
    model: Any = make_net(0 if how == "full" else rank)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.head.weight.mark = "kept"
    objects = list(model.parameters())
    if how != "full":
        mixed = [model.inp.weight, model.blocks[0].up.bias, model.blocks[1].down.weight]
        chosen = [p for p in objects if how != "mixed" or not any(p is each for each in mixed)]
        pieces.partition(Comm(), chosen, source=0)
    if how == "broken" and rank == world_size - 1:
        model.blocks[1].norm.bias.ds_tensor[0] += 1e-6
    model, optimizer = shardcore.shard(model, adam(model), **options)
    assert all(p is q for p, q in zip(objects, model.parameters(), strict=True))
    assert model.head.weight.mark == "kept"
    assert not any(pieces.has_piece(p) for p in model.parameters())
    losses = []
    for step in range(2):
        loss = loss_of(model, batch_of(step, 0, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    frozen = [value for name, value in model.state_dict().items() if name.startswith("blocks.1")]
    return [hash_of_training(model, optimizer), hash_of(frozen), losses]


OPTIONS: list[dict[str, Any]] = [
    {"stage": 3, "precision": "bf16"},
    {"stage": 3, "precision": "bf16", "offload": {"optimizer": "cpu", "params": "cpu"}},
    {"stage": 0, "precision": "fp32"},
    {"stage": 1, "precision": "bf16"},
    {"stage": 2, "precision": "bf16", "offload": {"optimizer": "cpu"}},
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_pieces_train_to_the_bits_of_full_weights(options: dict[str, Any]) -> None:
    full, in_pieces, mixed, broken = (
        run_ranks(2, _trained, how, options) for how in ("full", "pieces", "mixed", "broken")
    )
    assert in_pieces == mixed == full
    assert broken != full, "the test sees one wrong element of one piece"


def _cast(rank: int, world_size: int, in_pieces: bool) -> str:
    model = make_net()
    if in_pieces:
        _partitioned(model)
    model.bfloat16()
    model, optimizer = shardcore.shard(model, adam(model), 3)
    return hash_of_training(model, optimizer)


def test_pieces_follow_a_cast_of_the_model() -> None:
    assert run_ranks(2, _cast, True) == run_ranks(2, _cast, False)


def _refused(rank: int, world_size: int) -> list[str]:
    model = _partitioned(Net())
    before = hash_of(p.ds_tensor for p in model.parameters())
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    messages = [
        error_of(lambda: shardcore.shard(model, adam(model), 3, clip_grad_norm=[-1.0, 2.0][rank])),
        error_of(lambda: shardcore.shard(model, adam(model), 3, process_group=alone)),
        error_of(lambda: shardcore.shard(model, adam(model), 3, materialize="nowhere")),
    ]
    assert all(p.shape == (0,) for p in model.parameters())
    assert before == hash_of(p.ds_tensor for p in model.parameters())
    shardcore.shard(model, adam(model), 3)
    return messages


def test_a_refused_shard_leaves_the_pieces() -> None:
    for clipping, group, files in run_ranks(2, _refused):
        assert "clip_grad_norm" in clipping
        assert "over 2 ranks, and shard() got 1" in group
        assert "materialize" in files
