"""Reads and writes of one parameter by DeepSpeed's names: a step after the writes is the step of
those values.
"""

from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from tests.support.deepspeed import ADAM, ds_config, start
from tests.support.models import batch_of, loss_of, make_net
from tests.support.ranks import run_ranks

utils: Any = shardcore.utils  # type: ignore[attr-defined]
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {
        "fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 4},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "split": {"bf16": {"enabled": True}, "shardcore": {"optimizer": {"master": "split"}}},
}


def _values(name: str, shape: torch.Size, key: str) -> torch.Tensor:
    """Numbers that bfloat16 has, so that gradients of that dtype keep them; squares are
    positive.
    """
    seed = torch.Generator().manual_seed(sum((name + key).encode()))
    drawn = torch.randn(shape, generator=seed).bfloat16().float()
    return drawn.abs() if key == "exp_avg_sq" else drawn


def _written(rank: int, world_size: int, stage: int, zero: dict[str, Any], precision: str) -> None:
    config = ds_config(stage=stage, **PRECISIONS[precision])
    engine = start({**config, "zero_optimization": {"stage": stage, **zero}})
    for step in range(2):
        engine.backward(loss_of(engine, batch_of(step, 0, rank)))
        if step == 0:
            engine.step()
    expected: dict[str, torch.Tensor] = {}
    for name, param in engine.module.named_parameters():
        values = {
            key: _values(name, param.shape, key)
            for key in ("weight", "grad", "exp_avg", "exp_avg_sq")
        }
        utils.safe_set_full_fp32_param(param, values["weight"])
        utils.safe_set_full_grad(param, values["grad"])
        utils.safe_set_full_optimizer_state(param, values["exp_avg"], "exp_avg")
        utils.safe_set_full_optimizer_state(param, values["exp_avg_sq"], "exp_avg_sq")
        assert torch.equal(utils.safe_get_full_fp32_param(param), values["weight"])
        assert torch.equal(utils.safe_get_full_grad(param).float(), values["grad"])
        assert torch.equal(utils.safe_get_full_optimizer_state(param, "exp_avg"), values["exp_avg"])
        plain = nn.Parameter(values["weight"].clone())
        adam = torch.optim.AdamW([plain], **ADAM)
        plain.grad = values["grad"].clone()
        adam.state[plain] = {
            "step": torch.tensor(1.0),
            "exp_avg": values["exp_avg"],
            "exp_avg_sq": values["exp_avg_sq"],
        }
        adam.step()
        expected[name] = plain.detach()
    state_dict = engine.module_state_dict()  # what is written is used by a forward, too
    assert torch.equal(
        state_dict["inp.weight"], _values("inp.weight", state_dict["inp.weight"].shape, "weight")
    )
    norm = torch.stack(
        [_values(name, value.shape, "grad").double().norm() for name, value in expected.items()]
    ).norm()
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-6)
    for name, param in engine.module.named_parameters():
        torch.testing.assert_close(
            utils.safe_get_full_fp32_param(param), expected[name], rtol=1e-5, atol=1e-6
        )


CASES = [
    (0, {}, "bf16"),
    (1, OFFLOAD, "split"),
    (2, {}, "fp16"),
    (3, OFFLOAD, "fp32"),
    (3, {}, "split"),
    (2, OFFLOAD, "bf16"),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize("stage, zero, precision", CASES)
def test_a_step_uses_what_was_written(stage: int, zero: dict[str, Any], precision: str) -> None:
    run_ranks(2, _written, stage, zero, precision)


def _forward_sees_it(rank: int, world_size: int) -> None:
    for stage in (1, 3):
        engine = start(ds_config(stage=stage))
        x = batch_of(0, 0, 0)[0]
        before = engine(x)
        utils.safe_set_full_fp32_param(engine.module.gain, torch.tensor(0.0))
        assert before.abs().sum() > 0
        assert engine(x).abs().sum() == 0


def test_the_next_forward_uses_written_weights() -> None:
    run_ranks(2, _forward_sees_it)


def _updated(rank: int, world_size: int) -> None:
    engine = start(ds_config(stage=2))
    engine.backward(loss_of(engine, batch_of(0, 0, rank)))
    params = list(engine.module.parameters())
    before = [utils.safe_get_full_grad(param) for param in params]
    utils.safe_update_full_grad_vectorized(params, lambda grad, param: grad * 2)
    for param, old in zip(params, before, strict=True):
        assert torch.equal(utils.safe_get_full_grad(param), old * 2)


def test_gradients_are_updated_by_a_function() -> None:
    run_ranks(2, _updated)


def test_parameters_that_do_not_train_have_no_values() -> None:
    model = make_net()
    model.inp.requires_grad_(False)
    engine = start(ds_config(stage=2), model)
    engine.backward(loss_of(engine, batch_of(0, 0, 0)))
    for param in (engine.module.inp.weight, nn.Parameter(torch.ones(2))):
        old = param.detach().clone()
        assert utils.safe_get_full_fp32_param(param) is None
        assert utils.safe_get_full_grad(param) is None
        assert utils.safe_get_full_optimizer_state(param, "exp_avg") is None
        utils.safe_set_full_fp32_param(param, torch.zeros_like(param))
        utils.safe_set_full_optimizer_state(param, torch.zeros_like(param), "exp_avg")
        utils.safe_set_full_grad(param, torch.zeros_like(param))
        assert torch.equal(param, old)


def _divided(rank: int, world_size: int) -> None:
    """A micro-step's gradient is the same by engine.backward and by the loss's own backward, and
    so is a step after a write.
    """
    tensors = []
    for plain in (False, True):
        engine = start(ds_config(accumulation=2, stage=2))
        param = engine.module.inp.weight
        for micro in range(2):
            loss = loss_of(engine, batch_of(0, micro, rank))
            loss.backward() if plain else engine.backward(loss)
            tensors.append(utils.safe_get_full_grad(param))
            if micro == 0:
                engine.step()
        for other in engine.module.parameters():
            utils.safe_set_full_grad(other, _values("grad", other.shape, "grad"))
        assert torch.equal(utils.safe_get_full_grad(param), _values("grad", param.shape, "grad"))
        engine.step()
        tensors += [
            torch.tensor(engine.get_global_grad_norm()),
            engine.module_state_dict()["inp.weight"],
        ]
    for one, other in zip(tensors[:4], tensors[4:], strict=True):
        torch.testing.assert_close(one, other)
    assert tensors[0].abs().sum() > 0


def test_gradients_are_divided_by_the_accumulation_whatever_backward() -> None:
    run_ranks(2, _divided)
