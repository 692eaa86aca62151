"""torch's own Adam and AdamW cases (torch.testing._internal.common_optimizers), held to our
float64 intervals.
"""

import pytest
import torch

from shardcore.optim import CPUAdam, FusedAdam
from tests.support.oracle import Interval, Oracle, violations
from tests.support.params import OnCpu

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
from torch.testing._internal.common_optimizers import optim_db

OURS = [FusedAdam, CPUAdam]
INFOS = {
    info.optim_cls: info
    for info in optim_db
    if info.optim_cls in (torch.optim.Adam, torch.optim.AdamW)
}
# What torch refuses only because of its foreach and fused ways, which are no arguments here.
NOT_OURS = ("foreach", "fused", "betas must be either both floats or both Tensors")
STEPS = 11  # so that StepLR has made its first step


def cases():
    for cls, info in INFOS.items():
        # the kwargs only: the CUDA list has capturable, and tensors as lr and betas
        for device in ("cpu", "cuda"):
            for case in info.optim_inputs_func(device=device):
                for make in [OnCpu] if case.kwargs.get("capturable") else OURS:
                    yield pytest.param(
                        make,
                        cls,
                        case.kwargs,
                        id=f"{make.__name__}-{cls.__name__}-{device}-{case.desc}",
                    )


def scheduler_cases():
    for cls, info in INFOS.items():
        for i, schedulers in enumerate(info.scheduler_inputs):
            for make in OURS:
                yield pytest.param(
                    make, cls, schedulers, id=f"{make.__name__}-{cls.__name__}-schedulers{i}"
                )


def oracle_options(cls, kwargs):
    options = {
        key: float(value) if key == "lr" else value
        for key, value in kwargs.items()
        if key != "capturable"
    }
    if "betas" in options:
        options["betas"] = tuple(float(beta) for beta in options["betas"])
    defaults = cls([torch.zeros(1)]).defaults
    return {
        "weight_decay": defaults["weight_decay"],
        "adam_w_mode": cls is torch.optim.AdamW,
        **options,
    }


def check_inside_the_oracle(make, cls, kwargs, schedulers=()):
    """Run the optimizer beside an oracle for each weight; returns every learning rate that there
    was.
    """
    options, rates = oracle_options(cls, kwargs), set()
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        shapes = [(10, 5), (10,), (0,), ()]
        params = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for shape in shapes
        ]
        ours = {**kwargs, "weight_decay": options["weight_decay"]}
        optimizer = make(params, adam_w_mode=options["adam_w_mode"], **ours)
        running = [scheduler(optimizer) for scheduler in schedulers]
        oracles = [Oracle(Interval.of(p), dtype, master=False, **options) for p in params]
        for step in range(STEPS):
            skipped = step % 3  # a parameter without a gradient keeps its state
            grads = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
            for i, (p, oracle, grad) in enumerate(zip(params, oracles, grads, strict=True)):
                p.grad = None if i == skipped else grad
                oracle.lr = float(optimizer.param_groups[0]["lr"])
                rates.add(oracle.lr)
                if i != skipped:
                    oracle.step(grad)
            optimizer.step()
            for scheduler in running:
                scheduler.step(
                    *[1.0] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                )
        for p, oracle in zip(params, oracles, strict=True):
            assert violations(p, oracle.param) == 0
            if p.numel():
                assert optimizer.state[p]["step"] == oracle.step_count
    return rates


@pytest.mark.cases(9)
@pytest.mark.parametrize(("make", "cls", "kwargs"), list(cases()))
def test_torchs_cases_are_inside_the_oracle(make, cls, kwargs):
    check_inside_the_oracle(make, cls, kwargs)


@pytest.mark.cases(4)
@pytest.mark.parametrize(("make", "cls", "schedulers"), list(scheduler_cases()))
def test_torchs_schedulers_are_followed_inside_the_oracle(make, cls, schedulers):
    for lr in (0.01, torch.tensor(0.01)):
        rates = check_inside_the_oracle(make, cls, {"lr": lr}, schedulers)
        assert len(rates) > 1


@pytest.mark.parametrize("cls", INFOS)
def test_torchs_cases_can_fail(cls):
    """A twin: the other class's decay, a wrong beta."""
    p = torch.nn.Parameter(torch.ones(50))
    optimizer = FusedAdam([p], lr=0.01, weight_decay=0.1, adam_w_mode=cls is not torch.optim.AdamW)
    oracle = Oracle(
        Interval.of(p), p.dtype, False, **oracle_options(cls, {"lr": 0.01, "weight_decay": 0.1})
    )
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
        if any(word in case.error_regex for word in NOT_OURS) or issubclass(
            case.error_type, Warning
        ):
            continue
        given = case.optimizer_error_input
        params = [torch.nn.Parameter(torch.ones(2))] if given.params is None else given.params
        with pytest.raises((ValueError, TypeError)):
            make(params, **given.kwargs)
        seen += 1
    assert seen >= 6


def test_the_list_is_not_empty():
    assert len(list(cases())) >= 20
