"""AdaScale: the paper's estimate in float64, the same one for plain models, DDP and every stage
of shard.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import shardcore
from shardcore.integrations.fairscale import (
    OSS,
    AdaScale,
    AdaScaleWrapper,
    FullyShardedDataParallel,
    ShardedDataParallel,
)
from shardcore.integrations.fairscale import adascale as fairscale_adascale
from tests.support.ranks import run_ranks

# Inputs of a step, one per micro-batch or rank, and the gains that FairScale's tests state for a
# Linear(2, 2).
GAINS = [
    ([[1.0, 0.0], [0.0, 1.0]], 4.0 / 3),
    ([[1.0, 1.0], [1.0, 1.0]], 1.0000001249999846),
    ([[-1.0, 1.0], [1.0, -1.0]], 2.0),
    ([[1.0, 4.0], [5.0, 0.5]], 1.4688796680497926),
]


class Oracle:
    """Appendix B.3 in float64 from the single gradients of a step; averages without bias."""

    def __init__(self, scale, count, smoothing):
        self.scale, self.count, self.smoothing = scale, count, smoothing
        self.sums, self.weight = torch.zeros(2, dtype=torch.float64), 0.0

    def step(self, grads):
        rows = torch.stack([grad.double().flatten() for grad in grads])
        mean = rows.mean(0)
        var = self.scale / (self.count - 1) * (rows.square().sum(1).mean() - mean.square().sum())
        sqr = mean.square().sum() - var / self.scale
        now = torch.stack([var.clamp(min=1e-6), sqr.clamp(min=0)])
        self.sums = self.smoothing * self.sums + (1 - self.smoothing) * now
        self.weight = self.smoothing * self.weight + (1 - self.smoothing)
        var, sqr = (self.sums / self.weight).tolist()
        return (var + sqr) / (var / self.scale + sqr)


@pytest.mark.parametrize("is_scaled_loss", [True, False])
@pytest.mark.parametrize("inputs, gain", GAINS)
def test_gains_of_fairscales_tests(inputs, gain, is_scaled_loss):
    model, count = nn.Linear(2, 2), len(inputs)
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1),
        num_gradients_to_accumulate=count,
        is_scaled_loss=is_scaled_loss,
    )
    for x in inputs:
        loss = model(torch.tensor(x)).sum()
        (loss / count if is_scaled_loss else loss).backward()
        if x is inputs[0]:
            with pytest.raises(RuntimeError, match="step: 1 of 2 backwards"):
                optimizer.step()
    if not is_scaled_loss:
        optimizer.scale_grad_by_num_grads_to_accum()
    assert optimizer.gain() == pytest.approx(gain, rel=1e-5)
    assert torch.allclose(model.weight.grad, torch.tensor(inputs).mean(0).expand(2, 2))
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.allclose(before - model.weight, 0.1 * gain * model.weight.grad)
    assert optimizer.param_groups[0]["lr"] == 0.1


def _batches(steps, micros, world_size):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(steps, micros, world_size, 3, 6, generator=generator)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def _groups(model):
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 3e-3}]


def _wrap(kind, model):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model), torch.optim.AdamW(
            _groups(model), lr=1e-2
        )
    if kind == "oss":
        optimizer = OSS(_groups(model), lr=1e-2)  # SGD
        return ShardedDataParallel(model, optimizer), optimizer
    if kind == "fsdp":
        groups = _groups(model)
        return FullyShardedDataParallel(model), torch.optim.AdamW(groups, lr=1e-2)
    return shardcore.shard(model, torch.optim.AdamW(_groups(model), lr=1e-2), int(kind))


def _trains(rank, world_size, steps=2, micros=3):
    batches = _batches(steps, micros, world_size)
    found = {}
    for kind in ("ddp", "oss", "fsdp", "0"):
        model, optimizer = _wrap(kind, _net())
        optimizer = AdaScale(optimizer, num_gradients_to_accumulate=micros, smoothing=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        wanted = [Oracle(world_size * micros, world_size * micros, 0.5) for _ in range(2)]
        gains = []
        for step in range(steps):
            if kind != "ddp":  # every single gradient, of the weights as they are
                plain = _net()
                plain.load_state_dict(
                    model.module.state_dict() if kind == "oss" else model.state_dict()
                )
                rows = [[], []]
                for x in batches[step].flatten(0, 1):
                    grads = torch.autograd.grad(plain(x).square().mean(), list(plain.parameters()))
                    for row, some in zip(rows, (grads[:2], grads[2:]), strict=True):
                        row.append(torch.cat([grad.flatten() for grad in some]))
                oracles = [oracle.step(row) for oracle, row in zip(wanted, rows, strict=True)]
            for micro in range(micros):
                last = micro == micros - 1
                sync = (
                    model.no_sync() if kind in ("ddp", "oss", "fsdp") else shardcore.no_sync(model)
                )
                with nullcontext() if last else sync:
                    (model(batches[step, micro, rank]).square().mean() / micros).backward()
            gains.append([optimizer.gain(0), optimizer.gain(1), optimizer.gain()])
            if kind != "ddp":
                assert gains[-1][:2] == pytest.approx(oracles, rel=1e-4), kind
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        found[kind] = gains
    return found


@pytest.mark.more
def test_gains_are_the_papers_and_the_same_sharded():
    first, *others = run_ranks(2, _trains)
    assert all(other == first for other in others)
    first.pop("oss")  # another optimizer, so other weights
    for kind, gains in first.items():
        for step, plain in zip(gains, first["ddp"], strict=True):
            assert step == pytest.approx(plain, rel=1e-4), kind
    assert all(1.0 < gain < 6 for step in first["0"] for gain in step)


def _twin(rank, world_size):
    fairscale_adascale.clip_grad_norm_ = lambda params, limit: sum(
        p.grad.square().sum() for p in params if p.grad is not None
    )
    try:  # the norm of what p.grad has: nothing, in shards
        _trains(rank, world_size, steps=1)
    except AssertionError:
        return True
    finally:
        fairscale_adascale.clip_grad_norm_ = shardcore.clip_grad_norm_


def test_the_oracle_rejects_norms_of_nothing():
    assert all(run_ranks(2, _twin))


def test_states_scales_and_groups():
    def train(optimizer, model, seed):
        torch.manual_seed(seed)
        for _ in range(4):
            for _ in range(3):
                (model(torch.rand(6)).sum() / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.gain()

    model = _net()
    optimizer = AdaScale(
        shardcore.CPUAdam(model.parameters(), lr=0.1), num_gradients_to_accumulate=3
    )
    train(optimizer, model, 1)
    states = {
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "optimizer": copy.deepcopy(optimizer.state_dict()),
    }
    gain = train(optimizer, model, 2)
    again = _net()
    other = AdaScale(shardcore.CPUAdam(again.parameters(), lr=0.1), num_gradients_to_accumulate=3)
    again.load_state_dict(states["model"])
    other.load_state_dict(states["optimizer"])
    assert train(other, again, 2) == gain
    var, sqr = (
        float(other.state_dict()["state"]["adascale"][name])
        for name in ("grad_var_avg", "grad_sqr_avg")
    )
    other.set_scale(6.0)
    assert other.gain() == pytest.approx((var / 2 + sqr) / (var / 12 + sqr))
    other.set_num_gradients_to_accumulate(6)
    assert (other.scale, other.smoothing) == (6.0, 1 - 6 / 1000)
    other.set_num_gradients_to_accumulate(3)
    assert 1.0 <= train(other, again, 3) <= 6.0
    wrapped = AdaScaleWrapper(
        _net().parameters(), num_gradients_to_accumulate=2, optim_cls=torch.optim.SGD, lr=0.1
    )
    wrapped.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert wrapped.gain(1) == 1.0
    assert wrapped.defaults["lr"] == 0.1


def test_what_it_cannot_estimate_is_refused():
    optimizer = torch.optim.SGD(_net().parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="one rank with num_gradients_to_accumulate=1"):
        AdaScale(optimizer)
    scaled = AdaScale(optimizer, num_gradients_to_accumulate=2)
    with pytest.raises(ValueError, match=r"scale is 0.5"):
        scaled.set_scale(0.5)
    with pytest.raises(RuntimeError, match="is_scaled_loss is True"):
        scaled.scale_grad_by_num_grads_to_accum()
