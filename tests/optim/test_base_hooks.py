"""torch.optim's wrapper around step is entered when somebody listens, and only then."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardcore.optim import CPUAdam
from tests.support.params import params_of


def stepped(steps=3, make=CPUAdam):
    (p,) = params_of(3)
    optimizer = make([p])
    p.grad = torch.ones(3)
    for _ in range(steps):
        optimizer.step()
    return optimizer


def test_hooks_of_one_optimizer_and_of_all_run_in_torchs_order():
    optimizer, seen = stepped(), []
    optimizer.register_step_post_hook(lambda *a: seen.append("post"))
    optimizer.step()
    optimizer.register_step_pre_hook(lambda *a: seen.append("pre"))
    handles = [
        register_optimizer_step_pre_hook(lambda *a: seen.append("pre of all")),
        register_optimizer_step_post_hook(lambda *a: seen.append("post of all")),
    ]
    try:
        optimizer.step()
        for handle in handles:
            handle.remove()
            stepped(1)
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    alone, of_all = ["pre", "post"], ["pre of all", "pre", "post", "post of all"]
    assert seen == ["post", *of_all, "post of all", *alone]


def test_a_pre_hook_may_change_the_arguments():
    optimizer = stepped()
    optimizer.register_step_pre_hook(lambda self, args, kwargs: (args, {**kwargs, "max_norm": 1.0, "grad_scale": float("inf")}))
    with pytest.raises(ValueError, match="grad_scale has inf"):
        optimizer.step()


def test_a_profiler_sees_the_steps_that_it_records():
    class Mine(CPUAdam):
        pass

    optimizers = [stepped(), stepped(make=Mine)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for optimizer in optimizers:
            optimizer.step()
    names = [event.name for event in profiler.events() if event.name.startswith("Optimizer.step#")]
    assert names == ["Optimizer.step#CPUAdam.step", "Optimizer.step#Mine.step"]


def test_nobody_listens(monkeypatch):
    def refuse(name):
        raise AssertionError(name)

    optimizer = stepped()
    monkeypatch.setattr(torch.autograd.profiler, "record_function", refuse)
    optimizer.step()
    handle = optimizer.register_step_post_hook(lambda *a: None)
    with pytest.raises(AssertionError, match=r"Optimizer\.step#CPUAdam\.step"):
        optimizer.step()
    handle.remove()
    optimizer.step()
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] == 5
