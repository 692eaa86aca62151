"""torch's own Adam and AdamW cases (torch.testing._internal.common_optimizers), held to our float64 intervals."""

import pytest
import torch

from shardcore.optim import CPUAdam, FusedAdam

from .oracle import Interval, Oracle, violations

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
from torch.testing._internal.common_optimizers import optim_db

OURS = [FusedAdam, CPUAdam]
INFOS = {info.optim_cls: info for info in optim_db if info.optim_cls in (torch.optim.Adam, torch.optim.AdamW)}
# What torch refuses only because of its foreach and fused ways, which are no arguments here.
NOT_OURS = ("foreach", "fused", "betas must be either both floats or both Tensors")
STEPS = 7


def cases():
    for cls, info in INFOS.items():
        for device in ("cpu", "cuda"):  # the kwargs only: the CUDA list has tensors as lr and betas
            for case in info.optim_inputs_func(device=device):
                kwargs = {key: value for key, value in case.kwargs.items() if key != "capturable"}
                yield pytest.param(cls, kwargs, id=f"{cls.__name__}-{device}-{case.desc}")


def oracle_options(cls, kwargs):
    options = {key: float(value) if key == "lr" else value for key, value in kwargs.items()}
    if "betas" in options:
        options["betas"] = tuple(float(beta) for beta in options["betas"])
    defaults = cls([torch.zeros(1)]).defaults
    return {"weight_decay": defaults["weight_decay"], "adam_w_mode": cls is torch.optim.AdamW, **options}


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize(("cls", "kwargs"), list(cases()))
def test_torchs_cases_are_inside_the_oracle(make, cls, kwargs):
    options = oracle_options(cls, kwargs)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        shapes = [(10, 5), (10,), (0,), ()]
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
        ours = {**kwargs, "weight_decay": options["weight_decay"]}
        optimizer = make(params, adam_w_mode=options["adam_w_mode"], **ours)
        oracles = [Oracle(Interval.of(p), dtype, master=False, **options) for p in params]
        for step in range(STEPS):
            skipped = step % 3  # a parameter without a gradient keeps its state
            grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
            for i, (p, oracle, grad) in enumerate(zip(params, oracles, grads, strict=True)):
                p.grad = None if i == skipped else grad
                if i != skipped:
                    oracle.step(grad)
            optimizer.step()
        for p, oracle in zip(params, oracles, strict=True):
            assert violations(p, oracle.param) == 0
            if p.numel():
                assert optimizer.state[p]["step"] == oracle.step_count


@pytest.mark.parametrize("cls", INFOS)
def test_torchs_cases_can_fail(cls):
    """A twin: the other class's decay, a wrong beta."""
    p = torch.nn.Parameter(torch.ones(50))
    optimizer = FusedAdam([p], lr=0.01, weight_decay=0.1, adam_w_mode=cls is not torch.optim.AdamW)
    oracle = Oracle(Interval.of(p), p.dtype, False, **oracle_options(cls, {"lr": 0.01, "weight_decay": 0.1}))
    for step in range(STEPS):
        grad = torch.full((50,), 0.1 * (step + 1))
        p.grad = grad
        optimizer.step()
        oracle.step(grad)
    assert violations(p, oracle.param) == 50


@pytest.mark.parametrize("make", OURS)
@pytest.mark.parametrize("cls", INFOS)
def test_torchs_error_inputs_are_errors(make, cls):
    seen = 0
    for case in INFOS[cls].optim_error_inputs_func("cpu", torch.float32):
        if any(word in case.error_regex for word in NOT_OURS):
            continue
        given = case.optimizer_error_input
        params = [torch.nn.Parameter(torch.ones(2))] if given.params is None else given.params
        with pytest.raises((ValueError, TypeError)):
            make(params, **given.kwargs)
        seen += 1
    assert seen >= 6


def test_the_list_is_not_empty():
    assert len(list(cases())) >= 20
