"""The cross product of options: each combination steps inside the float64 oracle, or a refusal names two options."""

import itertools
import re

import pytest
import torch

from shardcore.optim import CPUAdam, FusedAdam, hyper_of
from tests.choice import few

from .helpers import plant_scalars
from .oracle import Interval, Oracle, violations

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 0, 31, 255, 257, 600)
STORAGE = list(
    itertools.product(DTYPES, (None, "fp32", "split"), ("fp32", "bf16", "8bit"), (False, True), (False, True), (False, True))
)
MODES = list(itertools.product(DTYPES, (False, True), (False, True), (False, True)))
FEW_MODES = few(MODES)
COMMON = {"lr": 0.02, "betas": (0.85, 0.97), "eps": 1e-6, "weight_decay": 0.3}


def options_of(master, state_dtype, amsgrad, stochastic_rounding, capturable):
    return {
        "master": master,
        "state_dtype": state_dtype,
        "amsgrad": amsgrad,
        "stochastic_rounding": stochastic_rounding,
        "capturable": capturable,
    }


def conflicts(dtype, master, state_dtype, amsgrad, stochastic_rounding, capturable):
    """Every pair of words that a refusal of this combination may name; empty: it must step."""
    pairs = {
        ("capturable", "CPU"): capturable,
        ("amsgrad", "state_dtype"): amsgrad and state_dtype != "fp32",
        ("stochastic_rounding", "master"): stochastic_rounding and master is not None,
        ("float16", "master='split'"): dtype is torch.float16 and master == "split",
        ("float16", "stochastic_rounding"): dtype is torch.float16 and stochastic_rounding,
    }
    return [pair for pair, holds in pairs.items() if holds]


def wrong(dtype, options, modes, steps=2):
    """How many elements lie outside the oracle."""
    grad_dtype, adam_w_mode, maximize, bias_correction = modes
    options = {**COMMON, **options, "adam_w_mode": adam_w_mode, "maximize": maximize, "bias_correction": bias_correction}
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in SIZES]
    optimizer = FusedAdam(params, **options)
    has_master = options["master"] is not None and dtype is not torch.float32
    known = {key: value for key, value in options.items() if key not in ("master", "capturable")}
    oracles = [Oracle(Interval.of(p), dtype, has_master, **known) for p in params]
    for _ in range(steps):
        grads = [torch.randn(n, generator=generator).to(grad_dtype) for n in SIZES]
        optimizer.step(grads=grads, grad_scale=0.5)
        for oracle, grad in zip(oracles, grads, strict=True):
            oracle.step(grad, 0.5)
    count = 0
    for i, oracle in enumerate(oracles):
        state = optimizer.state_dict()["state"][i]
        count += violations(params[i], oracle.param)
        count += violations(state["exp_avg"], oracle.exp_avg) + violations(state["exp_avg_sq"], oracle.exp_avg_sq)
        if has_master:
            count += violations(state["master"], oracle.weight)
        if options["amsgrad"]:
            count += violations(state["max_exp_avg_sq"], oracle.max_exp_avg_sq)
    return count


def storage_id(storage):
    return "-".join(str(value).removeprefix("torch.") for value in storage)


@pytest.mark.slow
@pytest.mark.parametrize("storage", [s for s in STORAGE if not conflicts(*s)], ids=storage_id)
def test_each_combination_steps_in_every_mode(storage):
    dtype, *rest = storage
    assert [modes for modes in MODES if wrong(dtype, options_of(*rest), modes)] == []


@pytest.mark.parametrize("storage", STORAGE, ids=storage_id)
def test_each_combination_steps_or_is_refused(storage):
    dtype, *rest = storage
    options, pairs = options_of(*rest), conflicts(*storage)
    if not pairs:
        assert [modes for modes in FEW_MODES if wrong(dtype, options, modes)] == []
        return
    for make in (FusedAdam, CPUAdam):
        p = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        with pytest.raises(ValueError, match="expected") as caught:
            make([p], **options)
        assert any(all(word in str(caught.value) for word in pair) for pair in pairs), caught.value
        with pytest.raises(ValueError, match=re.escape(str(caught.value).split("has")[1].split(";")[0])):
            make([{"params": [p], **options}])
        # The same options set later are refused before a step writes.
        optimizer = make([p])
        optimizer.param_groups[0].update(options)
        with pytest.raises(ValueError, match="expected"):
            optimizer.step(grads=[torch.ones(4)])
        assert torch.equal(p, torch.ones(4, dtype=dtype))
        assert not optimizer.state


def test_how_many_combinations_step():
    """float32 and bfloat16: 12 without stochastic rounding, 4 with; float16: no split, no stochastic rounding."""
    assert sum(not conflicts(*storage) for storage in STORAGE) == 2 * (12 + 4) + 8


TWINS = {
    "wrong decay": {"weight_decay": 0.25},
    "no maximize": {"maximize": False},
    "no bias correction": {"bias_correction": False},
    "other beta2": {"betas": (0.85, 0.9)},
}


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("storage", [s for s in STORAGE if not conflicts(*s)], ids=storage_id)
def test_broken_scalars_are_rejected_in_every_combination(monkeypatch, storage, twin):
    dtype, *rest = storage
    plant_scalars(monkeypatch, lambda group, step, scale: hyper_of({**group, **TWINS[twin]}, step, scale))
    assert wrong(dtype, options_of(*rest), (torch.float32, True, True, True)) > 0


@pytest.mark.parametrize("storage", [s for s in STORAGE if not conflicts(*s)], ids=storage_id)
def test_a_stale_step_is_rejected_in_every_combination(monkeypatch, storage):
    dtype, *rest = storage
    plant_scalars(monkeypatch, lambda group, step, scale: hyper_of(group, max(1, step - 1), scale))
    assert wrong(dtype, options_of(*rest), (torch.float32, True, False, True)) > 0
