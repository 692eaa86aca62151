"""State dicts of optimizers over DTensors: torch.distributed.checkpoint, other world sizes, torch.optim, whole tensors."""

import tempfile
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardcore.optim import CPUAdam, FusedAdam
from tests.ranks import run_ranks

from .fsdp2 import F32, KINDS, OPTIONS, SHAPES, Net, placed_grads, sharded_net, state_differs, whole, whole_state

CHECKPOINT_KINDS = ["fp32", "bf16-split", "bf16-fp32", "fp32-bf16states"]


def _save(rank, world_size, kind, folder):
    dtype, options = KINDS[kind]
    net = sharded_net(SHAPES, dtype)
    optimizer = FusedAdam(net.parameters(), **OPTIONS, **options)
    for step in range(3):
        optimizer.step(grads=placed_grads(net, step))
    dcp.save({"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder)


def _resume(rank, world_size, kind, folder):
    """Load into another world, go on, and compare with the unsharded run."""
    dtype, options = KINDS[kind]
    net = sharded_net(SHAPES, dtype)
    optimizer = FusedAdam(net.parameters(), **{**OPTIONS, "lr": 0.5}, **options)
    with torch.no_grad():
        for p in net.parameters():
            p.to_local().zero_()
    state = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(net, state["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_optimizer_state_dict(net, optimizer, state["optimizer"])
        full = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
        set_optimizer_state_dict(net, optimizer, full, options=StateDictOptions(full_state_dict=True))
    plain = Net(SHAPES, dtype)
    expected = CPUAdam(plain.parameters(), **OPTIONS, **options)
    for step in range(5):
        expected.step(grads=whole(placed_grads(net, step)))
        if step >= 3:
            optimizer.step(grads=placed_grads(net, step))
    weights = [torch.equal(a, b) for a, b in zip(whole(net.parameters()), plain.parameters(), strict=True)]
    return all(weights), state_differs(whole_state(optimizer), whole_state(expected)), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("kind", CHECKPOINT_KINDS)
def test_distributed_checkpoints_go_on_in_another_world(kind):
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, _save, kind, folder)
        assert run_ranks(3, _resume, kind, folder) == [(True, [], OPTIONS["lr"])] * 3


def _exchange(rank, world_size):
    """To torch.optim.AdamW over the same DTensors and back; whole plain tensors load too."""
    net = sharded_net(SHAPES, F32)
    ours = FusedAdam(net.parameters(), **OPTIONS)
    for step in range(2):
        ours.step(grads=placed_grads(net, step))
    theirs = torch.optim.AdamW(net.parameters(), **OPTIONS)
    theirs.load_state_dict(ours.state_dict())
    for p, grad in zip(net.parameters(), placed_grads(net, 2), strict=True):
        p.grad = grad
    theirs.step()
    again = CPUAdam(net.parameters())
    again.load_state_dict(theirs.state_dict())
    differs = state_differs(whole_state(again), whole_state(theirs))
    saved = again.state_dict()
    saved["state"] = {i: {key: whole([value])[0] for key, value in entry.items()} for i, entry in saved["state"].items()}
    third = CPUAdam(net.parameters())
    third.load_state_dict(saved)
    return differs, state_differs(whole_state(third), whole_state(theirs)), int(again.state_dict()["state"][0]["step"])


def test_states_go_to_torch_and_back():
    assert run_ranks(2, _exchange) == [([], [], 3)] * 2
