"""Groups edited by hand between steps: torch's result, or an error that names the parameter, and nothing has changed."""

import pytest
import torch

from shardcore.optim import CPUAdam, FusedAdam

from .helpers import params_of

OURS = pytest.mark.parametrize("make", [CPUAdam, FusedAdam])


def two_groups(make):
    """Two groups of two parameters, stepped once; the first one never has a gradient."""
    params = params_of(5, 6, 7, 8)
    optimizer = make([{"params": params[:2]}, {"params": params[2:]}])
    for p in params[1:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return params, optimizer


def add_again(optimizer):
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[1]["params"][0])


EDITS = [
    (add_again, ValueError, r"params\[4\] has memory that params\[2\] has too"),
    (lambda o: o.param_groups.append(o.param_groups[1]), ValueError, r"params\[[45]\] has memory that params\[[23]\] has too"),
]


@OURS
@pytest.mark.parametrize("edit, error, match", EDITS, ids=[m for _, _, m in EDITS])
def test_an_edit_that_no_step_can_use(make, edit, error, match):
    params, optimizer = two_groups(make)
    before = [p.detach().clone() for p in params]
    edit(optimizer)
    for arguments in ({}, {"max_norm": 1.0}):
        with pytest.raises(error, match=match):
            optimizer.step(**arguments)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert optimizer.state[params[2]]["step"] == 1


@OURS
def test_groups_that_were_emptied_step_nothing_and_can_be_filled_again(make):
    params, optimizer = two_groups(make)
    groups = list(optimizer.param_groups)
    optimizer.param_groups.clear()
    before = [p.detach().clone() for p in params]
    optimizer.step()
    optimizer.step(max_norm=1.0)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    for group in groups:
        optimizer.add_param_group(group)
    optimizer.step()
    assert [optimizer.state[p]["step"].item() for p in params[1:]] == [2, 2, 2]


@OURS
@pytest.mark.parametrize("repeats", [False, True])
def test_errors_number_parameters_as_the_groups_do(make, repeats):
    """Not as the kernel does, which sees only those with a gradient."""
    params, optimizer = two_groups(make)
    if repeats:
        optimizer.step()
    own = params[3].grad
    params[3].grad = optimizer.state[params[3]]["exp_avg"]
    with pytest.raises(ValueError, match=r"exp_avgs\[3\] has memory that grads\[3\] has too|grads\[3\] has .* exp_avgs\[3\]"):
        optimizer.step()
    params[3].grad = own
    params[2].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"params\[2\] has a storage of 0 bytes; expected 28"):
        optimizer.step()
    params[2].untyped_storage().resize_(28)
    params[2].data.zero_()  # the new memory may hold NaN, which no comparison finds equal
    optimizer.state[params[1]]["exp_avg_sq"] = torch.zeros(9)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"exp_avg_sqs\[1\] has shape \[9\]; expected \[6\]"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
