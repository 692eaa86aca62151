"""A detached model is an ordinary one: full weights from the masters, hooks that do nothing, and
it can be sharded anew.
"""

import copy

import pytest
import torch

import shardcore
from shardcore.engine.hooks import detach
from shardcore.optim.interface import engine_of
from tests.support.models import Net, adam, batch_of, hash_of_training, loss_of, stepped
from tests.support.ranks import run_ranks


def _net() -> Net:
    torch.manual_seed(0)
    model = Net()
    model.blocks[1].up = model.blocks[0].up  # tied
    model.inp.weight.requires_grad_(False)
    return model


def _detaches(rank: int, world_size: int, stage: int, precision: str | None) -> tuple[str, str]:
    options = {"precision": precision, "overlap_step": stage == 1}
    model, optimizer = (
        shardcore.shard(_net(), None, stage, precision=precision) if stage == 2 else (_net(), None)
    )
    if stage != 2:  # which only ran forward
        model, optimizer = shardcore.shard(model, adam(model), stage, **options)
        stepped(model, optimizer, rank, 0)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    detach(model)
    assert engine_of(model) is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert model.blocks[1].up.weight is model.blocks[0].up.weight
    assert [name for name, param in model.named_parameters() if not param.requires_grad] == [
        "inp.weight"
    ]
    if rank == 0:  # no collective any more
        alone = copy.deepcopy(model).float()
        loss_of(alone, batch_of(1, 0, rank)).backward()
        assert alone.head.weight.grad is not None
    fresh = _net()
    for name, param in fresh.named_parameters():
        param.data = weights[name].clone()
    hashes = []
    for each in (model, fresh):
        each, optimizer = shardcore.shard(each, adam(each), 3, precision=precision)
        stepped(each, optimizer, rank, 1)
        hashes.append(hash_of_training(each, optimizer))
    return hashes[0], hashes[1]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("stage", "precision"), [(0, None), (1, "bf16"), (2, "bf16"), (3, "bf16")])
def test_detached_models_are_ordinary_ones(stage: int, precision: str | None) -> None:
    for again, fresh in run_ranks(2, _detaches, stage, precision):
        assert again == fresh
