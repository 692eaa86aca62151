"""Bad options, parameters, gradients and states: an error in one wording, and nothing has
changed.
"""

import math

import pytest
import torch

from shardcore._native import _C
from shardcore.optim import CPUAdam, FusedAdam
from shardcore.optim.clip import global_norm
from tests.support.kernels import nothing_written
from tests.support.params import Snapshot, param, params_of

OURS = pytest.mark.parametrize("make", [CPUAdam, FusedAdam])


BAD_OPTIONS = [
    ({"lr": -1.0}, ValueError),
    ({"lr": math.nan}, ValueError),
    ({"lr": math.inf}, ValueError),
    ({"lr": "fast"}, TypeError),
    ({"lr": None}, TypeError),
    ({"lr": True}, TypeError),
    ({"lr": torch.ones(2)}, TypeError),
    ({"lr": torch.tensor(True)}, TypeError),
    ({"lr": torch.tensor(1.0, device="meta")}, TypeError),
    ({"lr": torch.tensor(-1.0)}, ValueError),
    ({"betas": (1.0, 0.9)}, ValueError),
    ({"betas": (0.9, -0.1)}, ValueError),
    ({"betas": (0.9, math.nan)}, ValueError),
    ({"betas": 0.9}, TypeError),
    ({"betas": (0.9,)}, TypeError),
    ({"betas": ("a", 0.9)}, TypeError),
    ({"eps": -1e-8}, ValueError),
    ({"eps": math.nan}, ValueError),
    ({"weight_decay": -0.1}, ValueError),
    ({"weight_decay": math.nan}, ValueError),
    ({"adam_w_mode": 1}, TypeError),
    ({"amsgrad": None}, TypeError),
    ({"maximize": "no"}, TypeError),
    ({"bias_correction": 0}, TypeError),
    ({"stochastic_rounding": "yes"}, TypeError),
    ({"stochastic_rounding": True, "master": "fp32"}, ValueError),
    ({"seed": 0.5}, TypeError),
    ({"seed": -1}, ValueError),
    ({"seed": 2**64}, ValueError),
    ({"master": "fp16"}, ValueError),
    ({"master": torch.float32}, TypeError),
    ({"state_dtype": "fp64"}, ValueError),
    ({"state_dtype": None}, ValueError),
    ({"state_dtype": torch.bfloat16}, TypeError),
    ({"capturable": True}, ValueError),
    ({"capturable": 1}, TypeError),
    ({"amsgrad": True, "state_dtype": "bf16"}, ValueError),
    ({"amsgrad": True, "state_dtype": "8bit"}, ValueError),
    ({"stochastic_rounding": True, "master": "split"}, ValueError),
]


def option_id(value):
    return (
        "-".join(f"{k}={v}" for k, v in value.items())
        if isinstance(value, dict)
        else value.__name__
    )


@OURS
@pytest.mark.parametrize("options, error", BAD_OPTIONS, ids=option_id)
def test_bad_options(make, options, error):
    name = next(iter(options))
    with pytest.raises(error, match=rf"^{make.__name__}: .*{name}.* (is|has|have) .*expected "):
        make([param()], **options)
    with pytest.raises(error, match=rf"param_groups\[0\]\.{name}"):
        make([{"params": [param()], **options}])
    optimizer = make([param()])
    with pytest.raises(error, match=rf"param_groups\[1\]\.{name}"):
        optimizer.add_param_group({"params": [param()], **options})
    assert len(optimizer.param_groups) == 1
    # Options that change later are checked before a step writes anything.
    p = optimizer.param_groups[0]["params"][0]
    optimizer.param_groups[0].update(options)
    with pytest.raises(error, match=name):
        optimizer.step(grads=[torch.ones(4)])
    assert torch.equal(p, torch.ones(4))
    assert not optimizer.state


BAD_PARAMS = [
    (list, ValueError, "empty parameter list"),
    (lambda: torch.ones(2), TypeError, "iterable of Tensors"),
    (lambda: [{"params": [param()]}, param()], TypeError, "must be a dict"),
    (lambda: [{"params": {param()}}], TypeError, "ordered collections"),
    (
        lambda: [{"params": [param()], "differentiable": True}],
        ValueError,
        r"param_groups\[0\].differentiable is True",
    ),
    (
        lambda: [{"params": [param()], "adam_w_mode": True, "decoupled_weight_decay": False}],
        ValueError,
        r"param_groups\[0\].adam_w_mode is True, but decoupled_weight_decay is False",
    ),
    (
        lambda: [param(dtype=torch.float64)],
        TypeError,
        r"params\[0\] has dtype float64; expected float32, bfloat16 or float16",
    ),
    (
        lambda: [param(), param(dtype=torch.complex64)],
        TypeError,
        r"params\[1\] has dtype complex64",
    ),
    (lambda: [torch.ones(3, dtype=torch.int32)], TypeError, "has dtype int32"),
    (
        lambda: [torch.nn.Parameter(torch.ones(8)[::2])],
        ValueError,
        r"strides \(2,\) for .* without gaps or overlaps.*contiguous",
    ),
    (
        lambda: [torch.nn.Parameter(torch.ones(6, 4).t()[:3])],
        ValueError,
        r"strides \(1, 4\) .* without gaps or overlaps",
    ),
    (
        lambda: [torch.nn.Parameter(torch.ones(4, 1).expand(4, 6))],
        ValueError,
        r"strides \(1, 0\) .* without gaps or overlaps",
    ),
    (
        lambda: [torch.ones(5).as_strided((3, 3), (1, 1))],
        ValueError,
        r"strides \(1, 1\) .* without gaps or overlaps",
    ),
    (
        lambda: [torch.ones(3, 3).to_sparse()],
        ValueError,
        "layout torch.sparse_coo; expected a dense",
    ),
    (lambda: [p := param(), p], ValueError, r"params\[1\] is given twice"),
    (lambda: [param(), param() * 2], ValueError, "non-leaf"),
    (
        lambda: [{"params": [p := param()]}, {"params": [p]}],
        ValueError,
        "more than one parameter group",
    ),
]


@OURS
@pytest.mark.parametrize("make_params, error, match", BAD_PARAMS, ids=[m for _, _, m in BAD_PARAMS])
def test_bad_parameters(make, make_params, error, match):
    with pytest.raises(error, match=match):
        make(make_params())


class SaysCuda(torch.nn.Parameter):
    """Stands in for a CUDA parameter where there is no GPU."""

    device = torch.device("cuda:0")


def test_cuda_parameters_are_not_for_cpu_adam():
    with pytest.raises(
        ValueError,
        match=r"CPUAdam: params\[0\] is on device cuda:0; expected cpu\. .* use shardcore.FusedAdam",
    ):
        CPUAdam([SaysCuda(torch.ones(2))])


BAD_GRADS = [
    (torch.ones(5), ValueError, r"grads\[1\] has shape \(5,\); expected \(4,\)"),
    (torch.ones(4, 1), ValueError, r"grads\[1\] has shape \(4, 1\)"),
    (torch.ones(4).to_sparse(), ValueError, r"grads\[1\] has layout torch.sparse_coo"),
    (torch.ones(4, dtype=torch.float64), TypeError, r"grads\[1\] has dtype float64"),
    (torch.ones(4, dtype=torch.complex64), TypeError, r"grads\[1\] has dtype complex64"),
    (torch.ones(4, dtype=torch.int64), TypeError, r"grads\[1\] has dtype int64"),
    (torch.ones(4, device="meta"), ValueError, r"grads\[1\] is on device meta; expected cpu"),
    ([1.0] * 4, TypeError, r"grads\[1\] is of type list"),
]


@OURS
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("grad, error, match", BAD_GRADS, ids=[m for _, _, m in BAD_GRADS])
def test_bad_gradients(make, stepped, grad, error, match):
    optimizer = make([param(), param(), param()])
    if stepped:
        optimizer.step(grads=[torch.ones(4)] * 3)
    snapshot = Snapshot(optimizer)
    with pytest.raises(error, match=match):
        optimizer.step(grads=[torch.ones(4), grad, torch.ones(4)])
    with pytest.raises(error, match=match):
        optimizer.step(grads=[torch.ones(4), grad, torch.ones(4)], max_norm=1.0)
    snapshot.check()
    if stepped:
        assert len(optimizer.state) == 3


BAD_ARGUMENTS = [
    ({"grads": [torch.ones(4)]}, ValueError, "grads contains 1 entries; expected 2"),
    ({"grads": torch.ones(2, 4)}, TypeError, "grads is of type Tensor"),
    ({"grads": iter([None, None])}, TypeError, "grads is of type list_iterator"),
    ({"grad_scale": math.nan}, ValueError, "grad_scale is nan"),
    ({"grad_scale": math.inf}, ValueError, "grad_scale is inf"),
    (
        {"grad_scale": 1e39},
        ValueError,
        "grad_scale is 1e\\+39 .*; expected finite numbers, and a quotient within float32",
    ),
    ({"grad_scale": torch.ones(2)}, TypeError, "grad_scale is a float32 tensor of shape"),
    ({"grad_scale": "1"}, TypeError, "grad_scale is of type str"),
    ({"max_norm": -1.0}, ValueError, "max_norm is -1.0"),
    ({"max_norm": math.nan}, ValueError, "max_norm is nan"),
    ({"max_norm": "1"}, TypeError, "max_norm is of type str"),
]


@OURS
@pytest.mark.parametrize(
    "arguments, error, match", BAD_ARGUMENTS, ids=[m for _, _, m in BAD_ARGUMENTS]
)
def test_bad_step_arguments(make, arguments, error, match):
    optimizer = make([param(), param()])
    optimizer.step(grads=[torch.ones(4)] * 2)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones(4)
    snapshot = Snapshot(optimizer)
    with pytest.raises(error, match=match):
        optimizer.step(**arguments)
    snapshot.check()


@OURS
def test_state_that_does_not_fit(make):
    for key, bad, error in [
        ("exp_avg", torch.zeros(8)[::2], ValueError),
        ("exp_avg_sq", torch.zeros(5), ValueError),
        ("exp_avg", torch.zeros(4, dtype=torch.bfloat16), TypeError),
    ]:
        optimizer = make([param(), param()])
        optimizer.step(grads=[torch.ones(4)] * 2)
        optimizer.state[optimizer.param_groups[0]["params"][1]][key] = bad
        snapshot = Snapshot(optimizer)
        with pytest.raises(error, match="expected"):
            optimizer.step(grads=[torch.ones(4)] * 2)
        snapshot.check()
    (p,) = params = [param()]
    optimizer = make(params)
    optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(4)}
    with pytest.raises(ValueError, match="contains no 'exp_avg_sq'"):
        optimizer.step(grads=[torch.ones(4)])


@OURS
def test_a_parameter_whose_dtype_or_device_changed(make):
    optimizer = make([torch.nn.Parameter(torch.ones(4, 6))])
    (p,) = optimizer.param_groups[0]["params"]
    optimizer.step(grads=[torch.ones(4, 6)])
    p.data = p.data.double()
    with pytest.raises(TypeError, match=r"params\[0\] has dtype float64"):
        optimizer.step(grads=[torch.ones(4, 6)])
    p.data = torch.ones(6, 4).t()
    with pytest.raises(ValueError, match=r"exp_avgs\[0\] has strides \[6, 1\]; expected \[1, 4\]"):
        optimizer.step(grads=[torch.ones(4, 6)])
    p.data = torch.ones(6, 8).t()[::2]
    with pytest.raises(ValueError, match="without gaps"):
        optimizer.step(grads=[torch.ones(4, 6)])
    assert torch.equal(p, torch.ones(4, 6))
    assert optimizer.state[p]["step"] == 1


@OURS
def test_parameters_that_share_memory_are_refused(make):
    buffer = torch.ones(12)
    optimizer = make([torch.nn.Parameter(buffer[:8]), torch.nn.Parameter(buffer[4:])])
    with (
        nothing_written(buffer),
        pytest.raises(
            ValueError, match=r"params\[1\] has memory that params\[0\] has too; expected"
        ),
    ):
        optimizer.step(grads=[torch.ones(8)] * 2)


def test_native_functions_refuse_what_python_cannot_see():
    with pytest.raises((TypeError, ValueError)):
        global_norm([torch.ones(2, dtype=torch.int32)])
    stepper = _C.AdamStepper()
    with pytest.raises((TypeError, ValueError)):
        stepper.step([torch.ones(2)], [], [], [], [], [])


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
    (
        lambda o: o.param_groups.append(o.param_groups[1]),
        ValueError,
        r"params\[[45]\] has memory that params\[[23]\] has too",
    ),
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
    with pytest.raises(
        ValueError,
        match=r"exp_avgs\[3\] has memory that grads\[3\] has too|grads\[3\] has .* exp_avgs\[3\]",
    ):
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
