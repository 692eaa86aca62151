"""FusedAdam over torchao's float8 weights, plain and inside FSDP2's DTensors, and what becomes of
such a Parameter.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.optim.float8 import float8_formats, is_float8_weight, plain_part, unwrap
from tests.support.float8 import ADAM, float8_net
from tests.support.models import batch_of, loss_of
from tests.support.ranks import run_ranks

pytest.importorskip("torchao.float8", reason="needs torchao")


def _grads(model, rank, step):
    model.zero_grad()
    loss_of(model, batch_of(step, 0, rank)).backward()


def test_fused_adam_has_the_bits_of_plain_weights():
    wrapped, plain = float8_net(), float8_net(flag=False)
    optimizers = [shardcore.FusedAdam(model.parameters(), **ADAM) for model in (wrapped, plain)]
    version = wrapped.blocks[0].up.weight._version
    for step in range(3):
        for model, optimizer in zip((wrapped, plain), optimizers, strict=True):
            _grads(model, 0, step)
            optimizer.step()
    for a, b in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(plain_part(a), b)
    assert wrapped.blocks[0].up.weight._version >= version + 3
    first, second = (optimizer.state_dict()["state"] for optimizer in optimizers)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[i]["exp_avg"], second[i]["exp_avg"]) for i in first)
    optimizers[0].load_state_dict(optimizers[0].state_dict())


def _under_fsdp2(rank, world_size, scale):
    """The largest difference of weights and states to a step of the full weights."""
    model, full = float8_net(hidden=36), float8_net(hidden=36, flag=False)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = shardcore.FusedAdam(model.parameters(), **ADAM)
    expected = shardcore.FusedAdam(full.parameters(), **ADAM)
    for step in range(3):
        _grads(model, rank, step)
        for param, own in zip(full.parameters(), model.parameters(), strict=True):
            param.grad = own.grad.full_tensor() * scale
        optimizer.step()
        expected.step()
    weights = [p.full_tensor() for p in model.parameters()]
    states, others = optimizer.state_dict()["state"], expected.state_dict()["state"]
    kinds = {type(entry["exp_avg"]) is DTensor for entry in states.values()}
    same = all(map(torch.equal, weights, full.parameters()))
    same &= all(
        torch.equal(states[i]["exp_avg"].full_tensor(), others[i]["exp_avg"]) for i in states
    )
    return same, kinds


@pytest.mark.parametrize(("scale", "same"), [(1.0, True), (1.25, False)])
def test_fused_adam_takes_fsdp2s_float8_weights(scale, same):
    assert run_ranks(2, _under_fsdp2, scale) == [(same, {True})] * 2


def test_an_unwrapped_weight_is_the_same_parameter():
    model = float8_net()
    weight = model.blocks[0].up.weight
    optimizer = shardcore.FusedAdam(model.parameters(), **ADAM)
    weight.mark, inside = "user's", plain_part(weight)
    formats = float8_formats(model)
    calls = []
    weight.register_post_accumulate_grad_hook(calls.append)
    assert is_float8_weight(weight)
    unwrap(weight)
    assert type(weight) is nn.Parameter
    assert weight.data_ptr() == inside.data_ptr()
    assert vars(weight).keys() >= {"mark"}
    assert not hasattr(weight, "_tensor")
    assert any(weight is param for param in optimizer.param_groups[0]["params"])
    assert float8_formats(model) == formats
    assert len(formats) == 6
