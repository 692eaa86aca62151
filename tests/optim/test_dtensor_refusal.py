"""A rank that refuses a step or a clipping which is collective: it raises its own error, all others name it, none writes."""

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.optim import FusedAdam

from ..ranks import run_ranks
from .fsdp2 import F32, OPTIONS, SHAPES, backward, sharded_net, whole


class Training:
    """A sharded model and its optimizer on one rank; `refuses` says whether this rank gives the bad arguments."""

    def __init__(self, mesh, rank, refuses):
        self.rank, self.refuses, self.steps = rank, refuses, 0
        self.net = sharded_net(SHAPES, F32, mesh)
        self.params = list(self.net.parameters())
        self.optimizer = FusedAdam(self.params, **OPTIONS)
        self.backward()
        self.good_step()
        self.backward()

    def backward(self):
        """Equal until the next good step, gradients included."""
        backward(self.net, self.rank, self.steps)

    def good_step(self):
        self.optimizer.step(max_norm=1.0)
        self.steps += 1

    def pick(self, bad, good):
        return bad if self.refuses else good

    def local(self):
        """Copies of this rank's part of weights, gradients and states."""
        tensors = [*self.params, *(p.grad for p in self.params if p.grad is not None)]
        states = [v for _, state in sorted(self.optimizer.state_dict()["state"].items()) for v in state.values()]
        return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors + states]

    def grads(self):
        return [
            None if p.grad is None else DTensor.from_local(
                p.grad.to_local().clone(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
            for p in self.params
        ]  # fmt: skip


def bad_max_norm(t):
    t.optimizer.step(max_norm=t.pick(math.nan, 1.0))


def bad_grad_scale(t):
    t.optimizer.step(max_norm=1.0, grad_scale=t.pick(math.inf, 1.0))


def bad_list(t):
    t.optimizer.step(max_norm=1.0, grads=t.pick([], t.grads()))


def bad_grad(t):
    grads = t.grads()
    grads[0] = t.pick(torch.ones(2), grads[0])
    t.optimizer.step(max_norm=1.0, grads=grads)


def released_grad(t):
    """Noticed only while its squares are summed."""
    grads = t.grads()
    if t.refuses:
        grads[0].to_local().untyped_storage().resize_(0)
    t.optimizer.step(max_norm=1.0, grads=grads)


def bad_option(t):
    t.optimizer.param_groups[0]["lr"] = t.pick(-1.0, OPTIONS["lr"])
    try:
        t.optimizer.step(max_norm=1.0)
    finally:
        t.optimizer.param_groups[0]["lr"] = OPTIONS["lr"]


def bad_state(t):
    kept = t.optimizer.state[t.params[0]]
    if t.refuses:
        t.optimizer.state[t.params[0]] = {"step": 1}
    try:
        t.optimizer.step(max_norm=1.0)
    finally:
        t.optimizer.state[t.params[0]] = kept


def bad_closure_step(t):
    """The closure is collective, so it must run on all ranks; it makes the gradients that are there already."""
    t.optimizer.step(t.backward, max_norm=1.0, grad_scale=t.pick("2", 1.0))


def bad_limit(t):
    shardcore.clip_grad_norm_(t.params, t.pick(-1.0, 1e-3))


def bad_norm_type(t):
    shardcore.clip_grad_norm_(t.params, 1e-3, t.pick(-1.0, 1.0))


def bad_param(t):
    shardcore.clip_grad_norm_(t.pick([*t.params, None], t.params), 1e-3)


CASES = {
    bad_max_norm: "ValueError: FusedAdam: max_norm has nan",
    bad_grad_scale: "ValueError: FusedAdam: grad_scale has inf",
    bad_list: "ValueError: FusedAdam: grads has 0 entries",
    bad_grad: "TypeError: FusedAdam: grads[0] has type Tensor",
    released_grad: "ValueError: sq_norm: tensors[0] has",
    bad_option: "ValueError: FusedAdam: param_groups[0].lr has -1.0",
    bad_state: "ValueError: FusedAdam: state[params[0]] has no 'exp_avg'",
    bad_closure_step: "TypeError: FusedAdam: grad_scale has type str",
    bad_limit: "ValueError: clip_grad_norm_: max_norm has -1.0",
    bad_norm_type: "ValueError: clip_grad_norm_: norm_type has -1.0",
    bad_param: "TypeError: clip_grad_norm_: params[7] has type NoneType",
}


def _refusals(rank, world_size, shape, refusing):
    """Every case, then a good step; returns the errors' texts, whether nothing was written, and the weights at the end."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    training = Training(mesh, rank, rank in refusing)
    texts, untouched = [], []
    for case in CASES:
        before = training.local()
        try:
            case(training)
        except (TypeError, ValueError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        else:
            texts.append("accepted")
        untouched.append(all(torch.equal(a, b) for a, b in zip(training.local(), before, strict=True)))
    training.good_step()
    unhurt = Training(mesh, rank, False)
    unhurt.good_step()
    same = all(torch.equal(a, b) for a, b in zip(whole(training.params), whole(unhurt.params), strict=True))
    return texts, untouched, same


@pytest.mark.parametrize(
    ("shape", "refusing"), [((2,), [1]), ((3,), [0]), ((3,), [2, 1]), ((2, 2), [1]), ((2, 2), [3, 2])], ids=str
)
def test_a_rank_that_refuses_tells_the_others(shape, refusing):
    results = run_ranks(math.prod(shape), _refusals, shape, refusing)
    for rank, (texts, untouched, same) in enumerate(results):
        for case, own, text in zip(CASES, CASES.values(), texts, strict=True):
            op = "clip_grad_norm_" if "clip_grad_norm_" in own else "FusedAdam"
            told = f"ValueError: {op}: rank {min(refusing)} refused, so no rank wrote anything; its own error says why"
            assert text.startswith(own) if rank in refusing else text == told, (case.__name__, text)
        assert all(untouched), [case.__name__ for case, ok in zip(CASES, untouched, strict=True) if not ok]
        assert same
