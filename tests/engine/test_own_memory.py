"""Weights whose memory others change (by sharing it, or in forward), or that do not lie row by row: refused by name."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardcore
from tests.engine.models import Net, hash_of, make_net
from tests.ranks import run_ranks


def _weights(model: Net) -> None:
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data


def _rows(model: Net) -> None:
    model.part = nn.Parameter(model.head.weight.data[2:4])


def _frozen(model: Net) -> None:
    model.part = nn.Parameter(model.head.weight.data[:2], requires_grad=False)


def _of_a_frozen_one(model: Net) -> None:
    model.head.weight.requires_grad_(False)
    model.part = nn.Parameter(model.head.weight.data[4:])


def _buffer(model: Net) -> None:
    model.register_buffer("part", model.head.weight.detach())


def _transposed(model: Net) -> None:
    model.register_buffer("part", model.head.weight.detach().t())


def _assigned(model: Net) -> None:
    """What is tied comes from a file as two tensors of one memory."""
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.load_state_dict(dict(model.state_dict()), assign=True)


def _behind_another(model: Net) -> None:
    """The long one is not its neighbour in memory."""
    both = torch.randn(20)
    model.long, model.inner = nn.Parameter(both), nn.Parameter(both[4:8], requires_grad=False)
    model.part = nn.Parameter(both[12:16])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "share", [_weights, _rows, _frozen, _of_a_frozen_one, _buffer, _transposed, _assigned, _behind_another]
)
def test_memory_that_two_have_is_refused(share: Callable[[Net], None], device: str) -> None:
    with torch.device(device):
        model = make_net()
        share(model)
    before = hash_of(model.parameters()) if device == "cpu" else ""
    filled = {"materialize": lambda module: None} if device == "meta" else {}
    with pytest.raises(ValueError, match=r"has memory that \S+ has, too; expected memory of its own, or one Parameter"):
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 3, precision="bf16", **filled)  # type: ignore[arg-type]
    assert device == "meta" or hash_of(model.parameters()) == before


def test_memory_side_by_side_is_not() -> None:
    """As flat weights of an RNN lie; and what does not change may be shared."""
    model = make_net()
    both = torch.randn(20)
    model.one, model.two = nn.Parameter(both[:8]), nn.Parameter(both[8:])
    model.none = nn.Parameter(both[4:4])
    model.register_buffer("three", torch.zeros(4))
    model.register_buffer("four", model.three[1:3])
    model.five = nn.Parameter(model.three[2:], requires_grad=False)
    model.six = model.one  # one Parameter in both places
    shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 3, precision="bf16")


@pytest.mark.parametrize("make", [shardcore.FusedAdam, torch.optim.AdamW])
@pytest.mark.parametrize("stage", [0, 3])
def test_weights_in_another_order_of_memory_are_refused(make: Callable[..., torch.optim.Optimizer], stage: int) -> None:
    """The optimizers alone take them. Frozen ones may have any order."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3), nn.Linear(6, 5)).to(memory_format=torch.channels_last)
    model[0].requires_grad_(False)
    before = hash_of(model.parameters())
    with pytest.raises(ValueError, match=r"shard: 1.weight has strides \(36, 1, 12, 4\) for .* expected contiguous memory"):
        shardcore.shard(model, make([p for p in model.parameters() if p.requires_grad]), stage, precision="bf16")
    assert hash_of(model.parameters()) == before
    model[1].weight.data = model[1].weight.data.contiguous()
    model[2].weight.data = model[2].weight.data.t().contiguous().t()
    with pytest.raises(ValueError, match=r"shard: 2.weight has strides \(1, 5\) for shape \(5, 6\)"):
        shardcore.shard(model, make([p for p in model.parameters() if p.requires_grad]), stage, precision="bf16")
    model[2].weight.data = model[2].weight.data.contiguous()
    shardcore.shard(model, make([p for p in model.parameters() if p.requires_grad]), stage, precision="bf16")


def _normalizes(rank: int, world_size: int, bag: bool, stage: int) -> str:
    model = make_net()
    model.table = (nn.EmbeddingBag if bag else nn.Embedding)(8, 10, max_norm=0.5)
    try:
        model, optimizer = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), stage, precision="bf16")
    except ValueError as error:
        return str(error)
    rows = model.table(torch.tensor([[1, 2]]))
    model(rows.view(-1, 10)).sum().backward()
    optimizer.step()
    return "trains"


@pytest.mark.parametrize(("bag", "stage"), [(False, 3), (False, 1), (True, 3)])
def test_embeddings_that_normalize_their_rows_are_refused_over_several_ranks(bag: bool, stage: int) -> None:
    assert run_ranks(1, _normalizes, bag, stage) == ["trains"]
    for error in run_ranks(2, _normalizes, bag, stage):
        assert "shard: table has max_norm=0.5, by which each rank's forward changes the rows that its own batch uses" in error
