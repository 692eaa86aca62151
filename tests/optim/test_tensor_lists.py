"""What a step takes: scales, norms, signs; and tensors that change between steps. Dtypes and
strides: test_adam_*.py.
"""

import logging
import math
import warnings

import pytest
import torch

from shardcore._native import _C
from shardcore.optim import CPUAdam, FusedAdam
from tests.support.params import (
    digest,
    each_kind,
    grads_of,
    made,
    params_of,
    release,
    same,
    snapshot,
)

each_step = pytest.mark.parametrize("make", [CPUAdam, FusedAdam])


@each_step
def test_grad_scale_multiplies(make):
    runs = []
    for scale, factor in [
        (0.25, 1.0),
        (torch.tensor(0.25), 1.0),
        (torch.tensor([0.5]), 0.5),
        (None, 0.25),
        (1, 0.25),
    ]:
        params = params_of(20, 3)
        make(params).step(grads=[g * factor for g in grads_of(params)], grad_scale=scale)
        runs.append(params)
    assert all(same(run, runs[0]) for run in runs)


@each_step
def test_max_norm_clips_after_the_scale(make):
    """step(max_norm=) is step(grad_scale=) with the coefficient of the scaled norm, and rewrites
    no gradient.
    """
    a, b, c = params_of(300, 7), params_of(300, 7), params_of(300, 7)
    grads = grads_of(a)
    kept = [g.clone() for g in grads]
    norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in grads)) * 0.5
    make(a, eps=1e-2).step(grads=grads, grad_scale=0.5, max_norm=1.0)
    make(b, eps=1e-2).step(grads=grads, grad_scale=0.5 * _C.clip_coefficient(norm, 1.0))
    assert same(grads, kept)
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    make(c, eps=1e-2).step(grads=grads, grad_scale=0.5)
    assert not torch.allclose(a[0], c[0], rtol=1e-3)
    d = params_of(300, 7)
    make(d, eps=1e-2).step(grads=grads, grad_scale=0.5, max_norm=1e6)
    assert same(c, d)


@each_step
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("first", [True, False])
def test_a_norm_that_is_not_finite_skips(make, caplog, value, first):
    params = params_of(5, 0, 300)
    optimizer = make(params)
    if not first:
        optimizer.step(grads=grads_of(params))
    before = snapshot(optimizer)
    grads = grads_of(params)
    grads[2][299] = value
    with caplog.at_level(logging.WARNING, logger="shardcore"):
        optimizer.step(grads=grads, max_norm=1.0)
    assert same(snapshot(optimizer), before)
    assert optimizer.skipped_steps == 1
    assert "skipped" in caplog.text
    assert len(optimizer.state) == (0 if first else 3)
    optimizer.step(grads=grads)  # raw: through to the weights, as in torch
    assert not params[2][299].isfinite()
    assert params[2][:299].isfinite().all()
    assert optimizer.skipped_steps == 1


@each_step
@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(make, unscale):
    ours, theirs = params_of(4, 3), params_of(4, 3)
    optimizer, reference = make(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.0)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for step in range(5):
        for scaler, opt, params in zip(
            scalers, (optimizer, reference), (ours, theirs), strict=True
        ):
            opt.zero_grad()
            factor = math.inf if step == 1 else float(step + 1)
            scaler.scale(sum((p * p).sum() for p in params) * factor).backward()
            if unscale:
                scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert optimizer.skipped_steps == 1
    assert optimizer.state[ours[0]]["step"] == 4
    assert not hasattr(optimizer, "grad_scale")


@each_step
def test_grad_scaler_with_max_norm(make):
    (p,), (q,) = params_of(40), params_of(40)
    p.grad = grads_of([p])[0] * 1024
    optimizer = make([p], eps=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer, max_norm=1.0)
    make([q], eps=1e-2).step(grads=grads_of([q]), max_norm=1.0)
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@each_step
@pytest.mark.parametrize(
    "found", [1.0, 0.5, -1.0, math.nan, torch.tensor(1.0), torch.tensor([math.nan])]
)
def test_any_found_inf_but_zero_skips(make, found):
    (p,) = params = params_of(5)
    optimizer = make(params, lr=0.1)
    before = p.detach().clone()
    optimizer.found_inf = found
    optimizer.step(grads=grads_of(params))
    assert torch.equal(p, before)
    assert optimizer.skipped_steps == 1
    optimizer.found_inf = torch.zeros(())
    optimizer.step(grads=grads_of(params))
    assert not torch.equal(p, before)
    assert optimizer.state[p]["step"] == 1


def refused(params, optimizer, error, match):
    before = digest(params, optimizer)
    for arguments in ({}, {"max_norm": 1.0}, {"grad_scale": 0.5}):
        with pytest.raises(error, match=match):
            optimizer.step(**arguments)
        assert digest(params, optimizer) == before


# before the first, before and after the short way is taken
STEPS = pytest.mark.parametrize("steps", [0, 1, 2])


@each_kind
@STEPS
def test_a_parameter_whose_memory_was_released(kind, steps):
    params, optimizer = made(kind, steps)
    params[1].grad = torch.ones_like(params[1])
    release(params[1].data)
    refused(
        params,
        optimizer,
        ValueError,
        r"params\[[01]\] has (a storage of 0 bytes|no memory).*[Rr]estore",
    )


@each_kind
def test_a_gradient_whose_memory_was_released(kind):
    for transposed in (False, True):
        params, optimizer = made(kind)
        params[0].grad = (
            torch.ones(6, 4).to(params[0].dtype).t() if transposed else torch.ones_like(params[0])
        )
        release(params[0].grad)
        refused(
            params,
            optimizer,
            ValueError,
            r"\[0\] has a storage of 0 bytes; expected \d+ .*restore it",
        )


@each_kind
def test_a_state_whose_memory_was_released(kind):
    params, optimizer = made(kind)
    for key in [key for key in optimizer.state[params[1]] if key != "step"]:
        params, optimizer = made(kind)
        release(optimizer.state[params[1]][key])
        refused(
            params,
            optimizer,
            ValueError,
            r"\[1\] has a storage of 0 bytes; expected \d+ .*restore it",
        )


@each_kind
def test_states_on_another_device(kind):
    params, optimizer = made(kind)
    for key in [key for key in optimizer.state[params[1]] if key != "step"]:
        params, optimizer = made(kind)
        optimizer.state[params[1]][key] = optimizer.state[params[1]][key].to("meta")
        refused(params, optimizer, ValueError, r"s\[1\] has device meta; expected cpu")


class Elsewhere(torch.nn.Parameter):
    """Says that it moved; stands in for a parameter that was moved to a GPU where there is none."""

    moved = False

    @property
    def device(self):
        return torch.device("cuda:0") if self.moved else torch.device("cpu")


@pytest.mark.parametrize("make", [FusedAdam, CPUAdam])
def test_a_parameter_that_moved_to_another_device(make, monkeypatch):
    # torch without CUDA cannot be asked
    monkeypatch.setattr("shardcore.optim.base.capturing", lambda device: False)
    p = Elsewhere(torch.ones(4))
    optimizer = make([p])
    for _ in range(2):
        p.grad = torch.ones(4)
        optimizer.step()
    p.moved = True
    optimizer._repeat = None  # the short way sees the tensor itself
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"grads\[0\] is on device cpu; expected cuda:0"):
        optimizer.step(grads=[torch.ones(4)])
    assert torch.equal(p.detach(), before)


CHANGES = {
    "same elements, other shape": (
        lambda p: p.reshape(6, 4),
        ValueError,
        r"has shape \[4, 6\]; expected \[6, 4\]",
    ),
    "more elements": (
        lambda p: torch.ones(5, 6).to(p.dtype),
        ValueError,
        r"has shape \[4, 6\]; expected \[5, 6\]",
    ),
    "no elements": (lambda p: p[:0], ValueError, r"has shape \[4, 6\]; expected \[0, 6\]"),
    "strides": (
        lambda p: p.t().contiguous().t(),
        ValueError,
        r"exp_avgs\[0\] has strides \[6, 1\]; expected \[1, 4\] .*load_state_dict|"
        r"params\[0\] has strides \(1, 4\) .* with (state_dtype|stochastic_rounding)=.* expected "
        r"contiguous",
    ),
    "gaps": (
        lambda p: torch.ones(6, 8).to(p.dtype).t()[::2],
        ValueError,
        r"params\[0\] has strides \(2, 8\).*(without gaps|contiguous)",
    ),
    "float64": (
        lambda p: p.double(),
        TypeError,
        r"params\[0\] has dtype float64; expected float32, bfloat16 or float16",
    ),
}


@each_kind
@pytest.mark.parametrize("change", CHANGES)
def test_other_data(kind, change):
    params, optimizer = made(kind)
    make, error, match = CHANGES[change]
    params[0].grad = None
    params[0].data = make(params[0].detach())
    params[0].grad = torch.ones_like(params[0]) if change != "float64" else None
    if change == "float64":
        with pytest.raises(error, match=match):
            optimizer.step(grads=[torch.ones(p.shape) for p in params])
        return
    refused(params, optimizer, error, match)


@pytest.mark.parametrize("kind, key", [("master", "master"), ("split", "remainder")])
def test_a_mastered_parameter_that_became_float32(kind, key):
    params, optimizer = made(kind)
    params[0].grad = None
    params[0].data = params[0].detach().float()
    params[0].grad = torch.ones(4, 6)
    refused(
        params,
        optimizer,
        TypeError,
        rf"state\[params\[0\]\].{key} has dtype \w+; expected none for a float32 parameter with "
        rf"master=",
    )


MASTERS = {
    (
        "master",
        "split",
    ): "master has dtype float32; expected none for a bfloat16 parameter with master='split'",
    (
        "master",
        None,
    ): "master has dtype float32; expected none for a bfloat16 parameter with master=None",
    (
        "split",
        "fp32",
    ): "remainder has dtype int16; expected none for a bfloat16 parameter with master='fp32'",
    (
        "split",
        None,
    ): "remainder has dtype int16; expected none for a bfloat16 parameter with master=None",
}


@pytest.mark.parametrize("kind, master", MASTERS)
@pytest.mark.parametrize("steps", [1, 2])
def test_another_kind_of_master_than_the_states_have(kind, master, steps):
    """It would go on from rounded weights, and leave the old master behind. load_state_dict
    converts.
    """
    params, optimizer = made(kind, steps)
    optimizer.param_groups[0]["master"] = master
    refused(
        params,
        optimizer,
        TypeError,
        rf"state\[params\[0\]\].{MASTERS[kind, master]}.*load_state_dict",
    )
    exact = {i: entry["master"].clone() for i, entry in optimizer.state_dict()["state"].items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(optimizer.state_dict())
    assert [str(w.message).split(":")[0:2] for w in caught] == (
        [["FusedAdam", " state[0].master is left out"]] if master is None else []
    )
    if master is not None:
        assert all(
            torch.equal(optimizer.state_dict()["state"][i]["master"], values)
            for i, values in exact.items()
        )
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, params, strict=True))


BAD_STATES = {
    ("fp32", "exp_avg"): (
        None,
        "exp_avg is of type NoneType; expected float32 for state_dtype='fp32'",
    ),
    ("8bit", "exp_avg"): ([1.0], "exp_avg is of type list; expected int8 for state_dtype='8bit'"),
    ("master", "master"): (
        torch.zeros(300, dtype=torch.int16),
        "master has dtype int16; expected float32 for a bfloat16",
    ),
    ("split", "remainder"): (
        torch.zeros(300),
        "remainder has dtype float32; expected int16 for a bfloat16",
    ),
    ("fp32", "remainder"): (
        torch.zeros(300, dtype=torch.int16),
        "remainder has dtype int16; expected none for a float32",
    ),
}


@pytest.mark.parametrize("kind, key", BAD_STATES)
def test_states_that_are_something_else(kind, key):
    params, optimizer = made(kind)
    optimizer.state[params[1]][key], message = BAD_STATES[kind, key]
    before = [p.detach().clone() for p in params]
    with pytest.raises(TypeError, match=rf"^FusedAdam: state\[params\[1\]\].{message}"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))


@pytest.mark.parametrize(
    "kind, option", [("split", "master='split'"), ("stochastic", "stochastic_rounding=True")]
)
@STEPS
def test_a_bfloat16_parameter_that_became_float16(kind, option, steps):
    params, optimizer = made(kind, steps)
    params[0].grad = None
    params[0].data = params[0].detach().half()
    params[0].grad = torch.ones_like(params[0])
    params[1].grad, params[2].grad = torch.ones_like(params[1]), torch.ones_like(params[2])
    refused(params, optimizer, ValueError, rf"params\[0\] has dtype float16 with {option}")


def test_what_is_put_right_again_goes_on():
    """After each refusal the optimizer is as before: restored, it ends at the bits of one that
    was never disturbed.
    """
    (params, optimizer), (others, undisturbed) = made("split"), made("split")
    kept = params[1].detach().clone()
    release(params[1].data)
    refused(params, optimizer, ValueError, "restore it")
    params[1].data.untyped_storage().resize_(kept.numel() * kept.element_size())
    params[1].data.copy_(kept)
    optimizer.step()
    undisturbed.step()
    assert digest(params, optimizer) == digest(others, undisturbed)


OURS = pytest.mark.parametrize("make", [CPUAdam, FusedAdam])


def param(n=8):
    return torch.nn.Parameter(torch.ones(n))


@OURS
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("through_grads", [True, False])
def test_a_gradient_with_the_negative_bit_counts_with_its_sign(make, max_norm, through_grads):
    grad = torch._neg_view(torch.ones(8))  # what z.conj().imag is
    assert grad.is_neg()
    assert grad[0] == -1
    grad.requires_grad_()  # as create_graph leaves it
    p, plain = param(), param()
    ours, reference = make([p], lr=0.1), make([plain], lr=0.1)
    if not through_grads:
        p.grad = grad
    ours.step(grads=[grad] if through_grads else None, max_norm=max_norm)
    reference.step(grads=[torch.full((8,), -1.0)], max_norm=max_norm)
    assert torch.equal(p, plain)
    assert p[0] > 1
    assert grad.is_neg()  # the caller's gradient is left as it was
