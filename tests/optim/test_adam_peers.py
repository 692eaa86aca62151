"""The combinations of size, dtype and options that DeepSpeed's and Apex's own Adam tests try, elementwise in intervals of ulps.

Facts only, from deepspeed's tests/unit/ops/adam (test_cpu_adam.py, test_adamw.py at 0.19) and Apex's
tests/L0/run_optimizers (test_adam.py, test_fused_optimizer.py). They compare norms to 1e-2, or elements to 1e-3; here every
element of weights, moments and masters lies in the float64 interval of a correct float32 kernel, and a broken twin does not.
"""

import itertools
from dataclasses import dataclass, field

import pytest
import torch

from shardcore.optim import CPUAdam, FusedAdam
from shardcore.optim.options import hyper_of
from tests.support.oracle import Interval, Oracle, violations
from tests.support.params import plant_scalars

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SLICE = 1 << 20  # the oracle keeps a dozen float64 arrays


@dataclass(frozen=True)
class Case:
    """One list of tensors and the options of its optimizer. uniform: weights and gradients in [0, 1), as Apex draws them."""

    sizes: tuple[int, ...]
    steps: int
    dtype: torch.dtype = F32
    grad_dtype: torch.dtype | None = None  # None: as dtype
    options: dict = field(default_factory=dict)
    grad_scale: float = 1.0
    uniform: bool = False


def draw(case, seed, i, n, dtype):
    generator = torch.Generator().manual_seed(1000 * seed + i)
    return (torch.rand if case.uniform else torch.randn)(n, generator=generator).to(dtype)


def stepped(case, make):
    """The weights, gradients of each step and states of a training by `make`, and the weights as they began."""
    params = [torch.nn.Parameter(draw(case, 99, i, n, case.dtype)) for i, n in enumerate(case.sizes)]
    starts = [p.detach().clone() for p in params]
    optimizer = make(params, **case.options)
    grads = [
        [draw(case, step, i, n, case.grad_dtype or case.dtype) for i, n in enumerate(case.sizes)] for step in range(case.steps)
    ]
    for step in range(case.steps):
        optimizer.step(grads=grads[step], grad_scale=case.grad_scale)
    states = optimizer.state_dict()["state"]
    return params, grads, states, starts


def wrong(case):
    """How many elements the oracle rejects."""
    params, grads, states, starts = stepped(case, CPUAdam)
    known = {key: value for key, value in case.options.items() if key != "master"}
    mastered = "master" in case.options and case.dtype is not F32
    count = 0
    for i, n in enumerate(case.sizes):
        state = states[i]
        for first in range(0, n, SLICE):
            part = slice(first, first + SLICE)
            oracle = Oracle(Interval.of(starts[i][part]), case.dtype, mastered, **known)
            for step in range(case.steps):
                oracle.step(grads[step][i][part], case.grad_scale)
            count += violations(params[i][part], oracle.param)
            count += violations(state["exp_avg"][part], oracle.exp_avg)
            count += violations(state["exp_avg_sq"][part], oracle.exp_avg_sq)
            count += violations(state["master"][part], oracle.weight) if mastered else 0
    return count


APEX = {"lr": 5e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "adam_w_mode": False}
APEX_SIZES = (4096 * 1024, 4096, 4096 * 2048, 32320 * 1024, 1)
DEEPSPEED_ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
MIXED = itertools.product((F16, BF16), (False, True), (False, True), (0.0, 0.1), (1.0, 128.0))

CASES = {
    # test_cpu_adam.py: torch.optim.AdamW and FusedAdam defaults, ten steps, three dtypes
    **{
        f"deepspeed-{n}-{dtype}-wd{wd}": Case((n,), 10, dtype, options={"weight_decay": wd})
        for n, dtype, wd in itertools.product((64, 22, 55, 128, 1024, 1048576), (F16, BF16, F32), (0.0, 0.01))
        if n != 1048576 or wd
    },
    # the same file: lists for the fused call, serial against parallel, slices over threads; bfloat16 moments
    **{f"deepspeed-list-{dtype}": Case((64, 22, 1024, 1048576), 5, dtype) for dtype in (F16, BF16, F32)},
    **{f"deepspeed-slices-{dtype}": Case((3, 1000, 100003), 5, dtype) for dtype in (BF16, F32)},
    **{f"deepspeed-bf16-states-{n}": Case((n,), 10, BF16, options={"state_dtype": "bf16"}) for n in (64, 1024)},
    # test_adamw.py
    **{
        f"deepspeed-{'adamw' if mode else 'adam'}-{dtype}": Case(
            (1024,) * 3, 5, dtype, options={**DEEPSPEED_ADAMW, "adam_w_mode": mode}
        )
        for mode, dtype in itertools.product((True, False), (F32, BF16, F16))
    },
    # the same file: float32 weights or masters under 16-bit gradients, with every mode and a loss scale
    **{
        f"deepspeed-mixed-{dtype}-adamw{mode}-correct{correct}-wd{wd}-scale{scale}-{kind}": Case(
            (1003,),
            5,
            F32 if kind == "weight" else dtype,
            dtype,
            {
                **DEEPSPEED_ADAMW,
                "weight_decay": wd,
                "adam_w_mode": mode,
                "bias_correction": correct,
                **({} if kind == "weight" else {"master": "fp32"}),
            },
            1 / scale,
        )
        for (dtype, mode, correct, wd, scale), kind in itertools.product(list(MIXED), ("weight", "master"))
    },
    "deepspeed-groups-a": Case((1003,), 5, F32, F16, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}, 1 / 128),
    "deepspeed-groups-b": Case(
        (1003,), 8, F32, BF16, {"lr": 2e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}, 1 / 128
    ),
    # test_adam.py, test_fused_optimizer.py: seven steps; a size that nothing divides; one element with other options
    **{f"apex-{dtype}": Case((278011,), 7, dtype, options=APEX, uniform=True) for dtype in (F32, F16, BF16)},
    "apex-scale": Case((278011,), 7, F32, F16, APEX, 1 / 437.0, uniform=True),
    "apex-fp16-output": Case((278011,), 7, F16, F16, {**APEX, "master": "fp32"}, uniform=True),
    "apex-option": Case((1,), 7, F32, options={**APEX, "lr": 0.01, "betas": (0.6, 0.9), "eps": 3e-6}, uniform=True),
}


# A million elements are tried in float32 alone and in float16 in a list; bfloat16 has up to 278,011 elsewhere.
LONG = (
    *(f"deepspeed-1048576-torch.{dtype}-wd0.01" for dtype in ("float16", "bfloat16")),
    *(f"deepspeed-list-torch.{dtype}" for dtype in ("float32", "bfloat16")),
)
MARKED = [pytest.param(case, id=k.replace("torch.", ""), marks=[pytest.mark.slow] * (k in LONG)) for k, case in CASES.items()]


@pytest.mark.cases(8)
@pytest.mark.parametrize("case", MARKED)
def test_every_element_is_inside_the_oracle(case):
    assert wrong(case) == 0
    if sum(case.sizes) < 10_000:  # the same kernel: no need to wait for large ones twice
        (params, _, states, _), (fused_params, _, fused_states, _) = (stepped(case, make) for make in (CPUAdam, FusedAdam))
        for i, (param, fused) in enumerate(zip(params, fused_params, strict=True)):
            assert torch.equal(param, fused)
            assert states[i].keys() == fused_states[i].keys()
            assert all(torch.equal(states[i][key], fused_states[i][key]) for key in states[i])


@pytest.mark.slow
def test_apex_large_list_is_inside_the_oracle():
    """Apex's list of five tensors, 46 million elements."""
    assert wrong(Case(APEX_SIZES, 7, options=APEX, uniform=True)) == 0


TWINS = {
    "lr off by 1e-3": lambda group, step, scale: hyper_of({**group, "lr": group["lr"] * 1.001}, step, scale),
    "other beta2": lambda group, step, scale: hyper_of({**group, "betas": (group["betas"][0], 0.998)}, step, scale),
    "stale step": lambda group, step, scale: hyper_of(group, max(1, step - 1), scale),
    "scale ignored": lambda group, step, scale: hyper_of(group, step, scale * 1.0001),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("twin", TWINS)
def test_broken_twins_are_rejected(monkeypatch, twin):
    """Differences that the peers' tolerances let through."""
    plant_scalars(monkeypatch, TWINS[twin])
    for name in ("deepspeed-1024-torch.float32-wd0.01", "deepspeed-adamw-torch.float32", "apex-torch.float32", "apex-option"):
        assert wrong(CASES[name]) > 0, name
