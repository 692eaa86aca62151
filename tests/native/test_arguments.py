"""Every wrong argument is refused with the wording of the style rule, before anything is written."""

import math

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
    "keys": [(0, 0), (1, 0)],
}
KEY_EXPECTED = "expected (parameter index, index of element 0 in the whole parameter), both 0 or more"
STEP_VALUE_ERRORS = [
    ({"grads": [ONE]}, "AdamStepper.step: grads has 1 items; expected 2 (one for each of params)"),
    ({"masters": [None]}, "AdamStepper.step: masters has 1 items; expected 2 (one for each of params)"),
    ({"hyper_index": [0]}, "AdamStepper.step: hyper_index has 1 items; expected 2 (one for each of params)"),
    ({"hyper_index": [0, 1]}, "AdamStepper.step: hyper_index[1] has 1; expected an index of hypers, which has 1 items"),
    ({"hyper_index": [2**64, 0]}, f"AdamStepper.step: hyper_index[0] has {2**64}; expected an int of 64 bits"),
    ({"hyper_index": [-1, 0]}, "AdamStepper.step: hyper_index[0] has -1; expected an index of hypers, which has 1 items"),
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
    ({"keys": [(0, 0)]}, "AdamStepper.step: keys has 1 items; expected 2 (one for each of params)"),
    (
        {"keys": [(0, 0), (0, -1)]},
        f"AdamStepper.step: keys[1] has (0, -1); {KEY_EXPECTED}",
    ),
    (
        {"keys": [(0, 0), 3]},
        f"AdamStepper.step: keys[1] has 3; {KEY_EXPECTED}",
    ),
    (
        {"hypers": [make_hyper(stochastic_rounding=True)], "params": [ONE, torch.ones(6, dtype=torch.bfloat16)]},
        "AdamStepper.step: keys has None; expected a key for each of params (params[1] is bfloat16 without a master, "
        "rounded stochastically)",
    ),
    (
        {"exp_avgs": [ONE.bfloat16(), SIX], "exp_avg_sqs": [ONE.bfloat16(), SIX]},
        "AdamStepper.step: keys has None; expected a key for each of params (params[0] has moments that are rounded "
        "stochastically)",
    ),
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
    ({"hypers": 5}, "AdamStepper.step: hypers has type int; expected a list of AdamHyper"),
    ({"keys": 5}, "AdamStepper.step: keys has type int; expected a list of pairs of int"),
    ({"hyper_index": None}, "AdamStepper.step: hyper_index has type NoneType; expected a list of int"),
    ({"hyper_index": [0, 0.5]}, "AdamStepper.step: hyper_index[1] has type float; expected an int"),
    ({"hypers": [None]}, "AdamStepper.step: hypers[0] has type NoneType; expected AdamHyper"),
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


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lr": -0.1}, "AdamHyper: lr has -0.1; expected a finite number, 0 or more"),
        ({"lr": math.nan}, "AdamHyper: lr has nan; expected a finite number, 0 or more"),
        ({"beta1": 1.0}, "AdamHyper: beta1 has 1; expected a number in [0, 1)"),
        ({"beta2": -0.5}, "AdamHyper: beta2 has -0.5; expected a number in [0, 1)"),
        ({"beta2": math.nan}, "AdamHyper: beta2 has nan; expected a number in [0, 1)"),
        ({"eps": math.nan}, "AdamHyper: eps has nan; expected a finite number, 0 or more"),
        ({"weight_decay": -1.0}, "AdamHyper: weight_decay has -1; expected a finite number, 0 or more"),
        ({"step": 0}, "AdamHyper: step has 0; expected 1 or more (the first step is 1)"),
        ({"step": 2**63}, f"AdamHyper: step has {2**63}; expected an int of 64 bits"),
        ({"lr": 2**5000}, "AdamHyper: lr has an int too large for a double; expected a number"),
    ],
)
def test_hyper_refusals(changes, message):
    with pytest.raises(ValueError) as error:
        make_hyper(**changes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lr": "fast"}, "AdamHyper: lr has type str; expected a number"),
        ({"grad_scale": None}, "AdamHyper: grad_scale has type NoneType; expected a number"),
        ({"step": 1.5}, "AdamHyper: step has type float; expected an int"),
        ({"maximize": 1}, "AdamHyper: maximize has type int; expected a bool"),
        ({"seed": 0.5}, "AdamHyper: seed has type float; expected an int"),
    ],
)
def test_hyper_type_refusals(changes, message):
    with pytest.raises(TypeError) as error:
        make_hyper(**changes)
    assert str(error.value) == message


def test_any_python_int_is_a_seed():
    for seed in (0, -1, 2**64 - 1, 2**70):
        make_hyper(seed=seed)


CPU = torch.device("cpu")
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
    (lambda: _C.sq_norm_add(torch.zeros(3)), TypeError, "sq_norm_add: parts has dtype Float; expected Double"),
    (
        lambda: _C.sq_norm_add(torch.zeros(3, dtype=torch.float64)),
        ValueError,
        "sq_norm_add: parts has shape [3]; expected [n, 2] (high, low)",
    ),
    (
        lambda: _C.norm_from_sq(torch.zeros(1, 2, dtype=torch.float64)),
        ValueError,
        "norm_from_sq: total has shape [1, 2]; expected [2] (high, low)",
    ),
    (
        lambda: _C.ordered_sum(torch.ones(7), 2, 1.0, OUT),
        ValueError,
        "ordered_sum: pieces has 7 elements; expected 2 * 4 (world_size pieces, each as out)",
    ),
    (lambda: _C.ordered_sum(torch.ones(8), 0, 1.0, OUT), ValueError, "ordered_sum: world_size has 0; expected 1 or more"),
    (
        lambda: _C.ordered_sum(torch.ones(1), 2, 1.0, torch.zeros(0)),
        ValueError,
        "ordered_sum: pieces has 1 elements; expected 2 * 0 (world_size pieces, each as out)",
    ),
    (
        lambda: _C.ordered_sum(torch.ones(8), 2, 1.0, torch.zeros(4, dtype=torch.float16)),
        TypeError,
        "ordered_sum: out has dtype Half; expected Float or BFloat16",
    ),
    (
        lambda: _C.ordered_sum(OUT, 1, 1.0, OUT),
        ValueError,
        "ordered_sum: out has memory that pieces has too; expected a tensor of its own",
    ),
    (
        lambda: _C.ordered_sum(torch.ones(8), 2, 1.0, OUT, own=torch.ones(5)),
        ValueError,
        "ordered_sum: own has 5 elements; expected 4 (as out)",
    ),
    (
        lambda: _C.ordered_sum(torch.ones(8), 2, 1.0, OUT, own=torch.ones(4).half()),
        TypeError,
        "ordered_sum: own has dtype Half; expected that of pieces, Float",
    ),
    (
        lambda: _C.ordered_sum(torch.ones(8), 2, 1.0, OUT, own=ONE, rank=2),
        ValueError,
        "ordered_sum: rank has 2; expected 0 to 1",
    ),
    (
        lambda: _C.ordered_sum(torch.ones(8), 2, 1.0, OUT, rank=99),  # wrong even where it is not used
        ValueError,
        "ordered_sum: rank has 99; expected 0 to 1",
    ),
    (
        lambda: _C.ordered_sum(torch.ones(8), 2.0, 1.0, OUT),
        TypeError,
        "ordered_sum: world_size has type float; expected an int",
    ),
    (lambda: _C.ordered_sum(torch.ones(8), 2, "1", OUT), TypeError, "ordered_sum: scale has type str; expected a number"),
    (lambda: _C.ordered_sum(torch.ones(8), 2, 1.0, OUT, 1), TypeError, "ordered_sum: accumulate has type int; expected a bool"),
    (lambda: _C.encode_moment(ONE, int), TypeError, "encode_moment: dtype has type type; expected torch.dtype"),
    (lambda: _C.dense(ONE), TypeError, "dense: tensors has type Tensor; expected a list of tensors"),
    (lambda: _C.set_cpu_isa(2), TypeError, "set_cpu_isa: name has type int; expected a str"),
    (
        lambda: _C.ordered_sum(torch.ones(8), 2, 1.0, SIX[1:5], own=SIX[:4]),
        ValueError,
        "ordered_sum: out has part of own's memory; expected all of it, or none",
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
