"""clip_grad_norm_ beside torch's, and the global norm."""

import math

import pytest
import torch

from shardcore._native import _C
from shardcore.optim import clip_grad_norm_
from shardcore.optim.clip import global_norm


@pytest.mark.parametrize("as_list", [False, True])
def test_clip_grad_norm_is_torchs(as_list):
    for max_norm in (0.5, 1e9, 0.0):
        model, reference = torch.nn.Linear(20, 30), torch.nn.Linear(20, 30)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        given = list(model.parameters()) if as_list else model
        norm = clip_grad_norm_(given, max_norm)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        torch.testing.assert_close(norm, expected)
        assert norm.dtype == torch.float32
        assert norm.shape == ()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert clip_grad_norm_(torch.nn.Parameter(torch.ones(2)), 1.0) == 0.0
    p = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    p.grad = torch.full((2, 2), 3.0, dtype=torch.bfloat16).t()
    assert clip_grad_norm_([p], 3.0) == 6.0
    assert p.grad[0, 0] == 1.5
    p.grad[0, 0] = math.nan
    assert clip_grad_norm_(p, 1.0).isnan()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_leaves_what_torchs_leaves(bad):
    params, reference = ([torch.nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in range(2))
    for some in (params, reference):
        some[0].grad, some[1].grad = torch.tensor([1.0, bad, 2.0]), torch.ones(3)
    norm = clip_grad_norm_(params, 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference, 1.0), equal_nan=True)
    for p, q in zip(params, reference, strict=True):
        torch.testing.assert_close(p.grad, q.grad, equal_nan=True)
        assert not torch.equal(p.grad, torch.ones(3))


@pytest.mark.parametrize("norm_type", [1, 1.5, 2, 3.0, math.inf, "inf"])
def test_norms_of_other_types_are_torchs(norm_type):
    for dtype in (torch.float32, torch.bfloat16):
        params, reference = (
            [torch.nn.Parameter(torch.ones(size)) for size in (3, 0, 700)] for _ in range(2)
        )
        for p, q in zip(params, reference, strict=True):
            grad = torch.randn(p.shape).to(dtype)
            p.data, p.grad, q.grad = p.data.to(dtype), grad.clone(), grad.float()
        norm = clip_grad_norm_(params, 0.5, norm_type)
        torch.testing.assert_close(
            norm, torch.nn.utils.clip_grad_norm_(reference[::2], 0.5, norm_type)
        )
        for p, q in zip(params[::2], reference[::2], strict=True):
            torch.testing.assert_close(p.grad, q.grad.to(dtype))
    assert clip_grad_norm_([], 1.0, norm_type) == 0.0


def test_error_if_nonfinite_raises_before_anything_is_scaled():
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([math.inf, 1.0])
    with pytest.raises(
        RuntimeError,
        match="the gradients' norm is inf, and error_if_nonfinite is True",
    ):
        clip_grad_norm_(param, 1.0, error_if_nonfinite=True)
    assert param.grad.tolist() == [math.inf, 1.0]


@pytest.mark.parametrize(
    ("norm_type", "error", "message"),
    [
        (0, ValueError, "is 0.0; expected a number above 0, or inf"),
        (-math.inf, ValueError, "is -inf; expected a number above 0"),
        (math.nan, ValueError, "is nan"),
        ("two", TypeError, "is of type str; expected a number"),
        (None, TypeError, "is of type NoneType"),
    ],
)
def test_norm_types_that_are_none_are_refused(norm_type, error, message):
    with pytest.raises(error, match="clip_grad_norm_: norm_type " + message):
        clip_grad_norm_(torch.nn.Parameter(torch.ones(2)), 1.0, norm_type)


def test_norm_does_not_depend_on_grouping():
    x = torch.randn(5 * 256) * 10.0 ** torch.randint(-10, 10, (5 * 256,))
    assert (
        global_norm([x]) == global_norm(list(x.split(256))) == global_norm(list(x.split(512))[::-1])
    )
    assert global_norm([]) == 0.0
    assert global_norm([x]) == pytest.approx(x.double().norm().item(), rel=2**-23)


def test_clip_coefficient():
    assert _C.clip_coefficient(0.0, 1.0) == 1.0
    assert _C.clip_coefficient(2.0, 1.0) == 1.0 / (2.0 + 1e-6)
    assert _C.clip_coefficient(math.inf, 1.0) == 0.0
    assert math.isnan(_C.clip_coefficient(math.nan, 1.0))
    assert _C.clip_coefficient(5.0, math.inf) == 1.0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            5,
            TypeError,
            "model_or_params is of type int; expected a module, a parameter or parameters",
        ),
        ([5], TypeError, r"params\[0\] is of type int; expected a tensor"),
        ({"a": 1}, TypeError, r"params\[0\] is of type str; expected a tensor"),
        (
            torch.float64,
            TypeError,
            r"grads\[0\] has dtype float64; expected float32, bfloat16 or float16",
        ),
        (
            torch.sparse_coo,
            ValueError,
            r"grads\[0\] has layout torch.sparse_coo; expected a dense gradient",
        ),
    ],
)
def test_clip_grad_norm_refuses_what_it_cannot_scale(given, error, message):
    if isinstance(given, torch.dtype | torch.layout):
        sparse = given is torch.sparse_coo
        param = torch.nn.Parameter(torch.ones(3, dtype=torch.float32 if sparse else given))
        param.grad = torch.ones(3).to_sparse() if sparse else torch.ones(3, dtype=given)
        given = [param]
    with pytest.raises(error, match="clip_grad_norm_: " + message):
        clip_grad_norm_(given, 1.0)
