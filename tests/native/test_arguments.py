"""Tensors that only the kernels look at (states are the user's to edit) are refused before anything is written."""

import pytest
import torch

from shardcore._native import _C
from tests.native.helpers import make_hyper, nothing_written


def step_with(**changes):
    """AdamStepper.step on two good tensors, with some arguments changed."""
    arguments = {
        "params": [torch.ones(4), torch.ones(6)],
        "grads": [torch.ones(4), torch.ones(6)],
        "exp_avgs": [torch.zeros(4), torch.zeros(6)],
        "exp_avg_sqs": [torch.zeros(4), torch.zeros(6)],
        "hypers": [make_hyper()],
        "hyper_index": [0, 0],
    } | changes
    tensors = [t for value in arguments.values() if isinstance(value, list) for t in value if isinstance(t, torch.Tensor)]
    dense = [t for t in tensors if t.layout == torch.strided and t.device.type == "cpu"]
    with nothing_written(*dense):
        _C.AdamStepper().step(**arguments)


ONE = torch.ones(4)
SIX = torch.ones(6)
EIGHT_BIT = {
    "exp_avgs": [ONE.to(torch.int8), SIX],
    "exp_avg_sqs": [ONE.to(torch.uint8), SIX],
    "exp_avg_scales": [torch.ones(1), None],
    "exp_avg_sq_scales": [torch.ones(1), None],
}
STEP_VALUE_ERRORS = [
    ({"grads": [ONE]}, "AdamStepper.step: grads has 1 items; expected 2 (one for each of params)"),
    ({"masters": [None]}, "AdamStepper.step: masters has 1 items; expected 2 (one for each of params)"),
    ({"grads": [ONE, ONE]}, "AdamStepper.step: grads[1] has shape [4]; expected [6] (as params)"),
    ({"exp_avgs": [ONE, ONE]}, "AdamStepper.step: exp_avgs[1] has shape [4]; expected [6] (as params)"),
    ({"masters": [None, ONE]}, "AdamStepper.step: masters[1] has shape [4]; expected [6] (as params)"),
    ({"max_exp_avg_sqs": [ONE, ONE]}, "AdamStepper.step: max_exp_avg_sqs[1] has shape [4]; expected [6] (as params)"),
    (
        {"params": [ONE, torch.ones(3, 4).t()[::2]]},
        "AdamStepper.step: params[1] has shape [2, 3] with strides [2, 4]; expected memory without gaps or overlaps (call "
        "contiguous())",
    ),
    (
        {key: [ONE, torch.ones(2, 3)] for key in ("params", "grads", "exp_avgs", "exp_avg_sqs")}
        | {"exp_avg_sqs": [ONE, torch.ones(3, 2).t()]},
        "AdamStepper.step: exp_avg_sqs[1] has strides [1, 2]; expected [3, 1] (as params: an optimizer's "
        "load_state_dict(state_dict()) makes its states anew)",
    ),
    (
        {"grads": [ONE, torch.ones(6).to_sparse()]},
        "AdamStepper.step: grads[1] has layout Sparse; expected a dense tensor (call to_dense())",
    ),
    (
        {"grads": [ONE, torch.ones(6, device="meta")]},
        "AdamStepper.step: grads[1] has device meta; expected cpu (all tensors of a call on one device)",
    ),
    ({"params": [torch.ones(4, device="meta"), ONE]}, "AdamStepper.step: params[0] has device meta; expected cpu or cuda"),
    (
        {"exp_avgs": [ONE.to(torch.int8), SIX], "exp_avg_sqs": [ONE.to(torch.uint8), SIX]},
        "AdamStepper.step: exp_avg_scales[0] has None; expected a tensor (scales go with 8-bit codes)",
    ),
    (
        {"exp_avg_scales": [None, torch.ones(1)]},
        "AdamStepper.step: exp_avg_scales[1] has a tensor; expected None (scales go with 8-bit codes)",
    ),
    (
        EIGHT_BIT | {"exp_avg_sq_scales": [torch.ones(2), None]},
        "AdamStepper.step: exp_avg_sq_scales[0] has 2 elements; expected 1 (one for 256 elements of params)",
    ),
    (
        EIGHT_BIT | {"max_exp_avg_sqs": [ONE, None]},
        "AdamStepper.step: max_exp_avg_sqs[0] has a tensor; expected None (amsgrad needs float32 moments)",
    ),
]


@pytest.mark.parametrize("changes, message", STEP_VALUE_ERRORS, ids=[m[:60] for _, m in STEP_VALUE_ERRORS])
def test_step_value_errors(changes, message):
    with pytest.raises(ValueError) as error:
        step_with(**changes)
    assert str(error.value) == message


STEP_TYPE_ERRORS = [
    ({"params": ONE}, "AdamStepper.step: params has type Tensor; expected a list of tensors"),
    ({"params": None}, "AdamStepper.step: params has type NoneType; expected a list of tensors"),
    ({"grads": [ONE, 1.0]}, "AdamStepper.step: grads[1] has type float; expected a tensor"),
    ({"grads": [ONE, None]}, "AdamStepper.step: grads[1] has type NoneType; expected a tensor"),
    ({"masters": [ONE, 2]}, "AdamStepper.step: masters[1] has type int; expected a tensor or None"),
    (
        {"params": [torch.ones(4, dtype=torch.float64), torch.ones(6)]},
        "AdamStepper.step: params[0] has dtype Double; expected Float, BFloat16 or Half",
    ),
    (
        {"grads": [torch.ones(4, dtype=torch.int64), torch.ones(6)]},
        "AdamStepper.step: grads[0] has dtype Long; expected Float, BFloat16 or Half",
    ),
    (
        {"exp_avgs": [torch.ones(4, dtype=torch.bfloat16), torch.ones(6)]},
        "AdamStepper.step: exp_avg_sqs[0] has dtype Float; expected BFloat16 (as exp_avgs says)",
    ),
    (
        {"exp_avgs": [torch.ones(4, dtype=torch.float16), torch.ones(6)]},
        "AdamStepper.step: exp_avgs[0] has dtype Half; expected Float, BFloat16 or Char (8-bit codes)",
    ),
    (
        {"masters": [None, torch.ones(6, dtype=torch.int16)]},
        "AdamStepper.step: masters[1] has dtype Short (a split master) for a parameter of Float; expected BFloat16 parameters",
    ),
    ({"masters": [None, torch.ones(6).half()]}, "AdamStepper.step: masters[1] has dtype Half; expected Float"),
]


@pytest.mark.parametrize("changes, message", STEP_TYPE_ERRORS, ids=[m[:60] for _, m in STEP_TYPE_ERRORS])
def test_step_type_errors(changes, message):
    with pytest.raises(TypeError) as error:
        step_with(**changes)
    assert str(error.value) == message


def test_the_good_call_itself_is_accepted():
    with pytest.raises(AssertionError):  # it writes, as it should: the refusals above are not refusals of everything
        step_with()


OUT = torch.zeros(4)
OPS = [
    (
        lambda: _C.sq_norm([ONE, torch.ones(2, dtype=torch.int32)]),
        TypeError,
        "sq_norm: tensors[1] has dtype Int; expected Float, BFloat16 or Half",
    ),
    (lambda: _C.sq_norm(ONE), TypeError, "sq_norm: tensors has type Tensor; expected a list of tensors"),
    (
        lambda: _C.sq_norm([torch.ones(4, 4)[:, 1]]),
        ValueError,
        "sq_norm: tensors[0] has shape [4] with strides [4]; expected memory without gaps or overlaps (call contiguous())",
    ),
    (lambda: _C.cast([OUT], []), ValueError, "cast: srcs has 0 items; expected 1 (one for each of dsts)"),
    (lambda: _C.cast([OUT], [torch.ones(5)]), ValueError, "cast: srcs[0] has 5 elements; expected 4 (as dsts)"),
    (
        lambda: _C.cast([OUT, OUT], [ONE, torch.ones(4, dtype=torch.bool)]),
        TypeError,
        "cast: srcs[1] has dtype Bool; expected Float, BFloat16 or Half",
    ),
]


@pytest.mark.parametrize("call, kind, message", OPS, ids=[m[:60] for _, _, m in OPS])
def test_op_refusals(call, kind, message):
    with nothing_written(OUT, ONE), pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
