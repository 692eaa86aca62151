"""How optimizers hand their work to an engine, and how parameters refer to it."""

import copy

import pytest
import torch

import shardcore
from shardcore.optim import CPUAdam, FusedAdam
from shardcore.optim.interface import EngineRef, engine_of, weakly
from tests.support.params import params_of


class FakeEngine:
    device = torch.device("cpu")

    def __init__(self):
        self.calls = []

    loss_scale = 8.0

    def step(self, closure, grads, grad_scale, max_norm, problem):
        self.calls.append(("step", closure, grads, grad_scale, max_norm, problem))
        return "loss"

    def scale_loss(self, loss):
        return loss * self.loss_scale

    def zero_grad(self, set_to_none):
        self.calls.append(("zero_grad", set_to_none))

    def state_dict(self):
        self.calls.append(("state_dict",))
        return {"state": {}, "param_groups": []}

    def load_state_dict(self, state_dict):
        self.calls.append(("load_state_dict", state_dict))


@pytest.mark.parametrize("make", [CPUAdam, FusedAdam])
def test_engine_takes_over(make):
    (p,) = params_of(3)
    optimizer = make([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # made before, goes on
    loss = torch.tensor(0.5)
    assert optimizer.scale_loss(loss) is loss
    engine = optimizer._engine = FakeEngine()
    assert (optimizer.loss_scale, optimizer.scale_loss(loss).item()) == (8.0, 4.0)
    with pytest.raises(TypeError, match="scale_loss: loss is of type float"):
        optimizer.scale_loss(0.5)
    optimizer.grad_scale = torch.tensor(4.0)
    assert optimizer.step(grad_scale=2.0, max_norm=3) == "loss"
    del optimizer.grad_scale
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    names = [call[0] for call in engine.calls]
    assert names == ["step", "zero_grad", "state_dict", "load_state_dict"]
    assert engine.calls[0][1:] == (None, None, 0.5, 3.0, [])
    with pytest.raises(TypeError, match="sharded"):
        copy.deepcopy(optimizer)


def test_parameters_refer_weakly_to_their_engine_and_copies_to_none():
    engine = FakeEngine()
    (p,) = params_of(3)
    assert engine_of(p) is None
    p._shardcore_engine = EngineRef(engine)
    assert engine_of(p) is engine
    assert engine_of(copy.deepcopy(p)) is None
    call = weakly(engine.zero_grad)
    call(True)
    assert engine.calls == [("zero_grad", True)]
    del engine
    assert engine_of(p) is None
    assert call(True) is None


def test_a_file_of_sharded_parameters_is_loaded_by_torch(tmp_path):
    model = torch.nn.Linear(3, 2)
    model, _ = shardcore.shard(model, FusedAdam(model.parameters()), 2)
    torch.save(dict(model.named_parameters()), tmp_path / "params.pt")
    loaded = torch.load(tmp_path / "params.pt", weights_only=True)
    assert torch.equal(loaded["weight"], model.weight)
    assert engine_of(loaded["weight"]) is None
    other = torch.nn.Linear(3, 2)
    shardcore.load(
        tmp_path / "params.pt", *shardcore.shard(other, FusedAdam(other.parameters()), 2)[:1]
    )
    assert torch.equal(other.weight, model.weight)
