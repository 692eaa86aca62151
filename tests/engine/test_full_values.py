"""Writes of full values: what they refuse, with nothing changed, and the norm after them. (What
else they do: tests/deepspeed/test_fragments.py.)
"""

import pytest
import torch

import shardcore
from shardcore.engine.engine import engine_behind
from shardcore.engine.full_values import set_full_grad, set_full_state
from tests.support.models import Run, batch_of, error_of, loss_of, make_net, train
from tests.support.ranks import run_ranks


def test_what_does_not_fit_is_refused() -> None:
    model = make_net()
    model.inp.requires_grad_(False)
    train(0, Run(stage=2, steps=1), model)
    engine, gain = engine_behind("a test", model), model.gain
    with pytest.raises(
        KeyError, match="has no state 'momentum'; expected one of master, exp_avg, exp_avg_sq"
    ):
        set_full_state(engine, gain, "momentum", torch.tensor(0.0))
    with pytest.raises(
        ValueError, match=r"value has shape \(2,\); expected \(\), as its parameter"
    ):
        set_full_state(engine, gain, "exp_avg", torch.zeros(2))
    with pytest.raises(TypeError, match="value has dtype int64"):
        set_full_grad(engine, gain, torch.tensor(1))
    with pytest.raises(ValueError, match="gain has no gradient; expected a backward"):
        set_full_grad(engine, gain, torch.tensor(1.0))
    with pytest.raises(ValueError, match="the parameter was frozen"):
        set_full_state(engine, model.inp.weight, "master", torch.zeros(24, 10))


def _different(rank: int, world_size: int) -> list[str]:
    model = train(rank, Run(stage=3, steps=1))[0]
    engine, value = engine_behind("a test", model), torch.tensor(float(rank))
    loss_of(model, batch_of(1, 0, rank)).backward()
    before = shardcore.full_state(model.gain, "exp_avg"), shardcore.full_grad(model.gain)
    errors = [
        error_of(lambda: set_full_state(engine, model.gain, "exp_avg", value)),
        error_of(lambda: set_full_grad(engine, model.gain, value)),
    ]
    with shardcore.full_params(model):
        errors.append(
            error_of(lambda: set_full_state(engine, model.gain, "master", torch.tensor(1.0)))
        )
    after = shardcore.full_state(model.gain, "exp_avg"), shardcore.full_grad(model.gain)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return errors


def test_values_that_differ_between_ranks_are_refused() -> None:
    for state, grad, inside in run_ranks(2, _different):
        assert "the value read is exp_avg of gain with the checksum" in state
        assert "the value read is gain with the checksum" in grad
        assert "called inside full_params" in inside


def _norm_after_a_write(rank: int, world_size: int, stage: int) -> tuple[float, float]:
    model, optimizer, _ = train(rank, Run(stage=stage, steps=1))
    loss_of(model, batch_of(1, 0, rank)).backward()
    for param in model.parameters():
        set_full_grad(engine_behind("a test", model), param, torch.full(param.shape, 3.0))
    count = sum(param.numel() for param in make_net().parameters())
    optimizer.step()
    return optimizer._engine.last_grad_norm, 3.0 * count**0.5


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_takes_the_norm_of_written_gradients_once_over_all_ranks(stage: int) -> None:
    for norm, expected in run_ranks(2, _norm_after_a_write, stage):
        assert norm == pytest.approx(expected, rel=1e-6)
