"""torch.optim's wrapper around step is entered once a step, sharded or not."""

import pytest
import torch

import shardcore
from shardcore.optim import CPUAdam
from tests.support.params import params_of


def check_one_step_is_seen(optimizer, name):
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    seen += [event.name for event in profiler.events() if event.name.startswith("Optimizer.step#")]
    assert seen == ["pre", "post", f"Optimizer.step#{name}.step"]


@pytest.mark.parametrize(("make", "name"), [(CPUAdam, "CPUAdam"), (torch.optim.SGD, "Elementwise")])
def test_hooks_and_the_profiler_see_a_step_once(make, name):
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.parameters())
    if make is CPUAdam:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        check_one_step_is_seen(optimizer, name)
        optimizer.zero_grad()
    model, optimizer = shardcore.shard(model, optimizer)
    model(torch.ones(3)).sum().backward()
    check_one_step_is_seen(optimizer, name)


def test_a_pre_hook_may_change_the_arguments():
    optimizer = CPUAdam(params_of(3))
    optimizer.register_step_pre_hook(
        lambda self, args, kwargs: (args, {**kwargs, "max_norm": 1.0, "grad_scale": float("inf")})
    )
    with pytest.raises(ValueError, match="grad_scale is inf"):
        optimizer.step()
