"""What step takes: gradients of any dtype and layout, grad_scale, max_norm; GradScaler's protocol; skipped steps."""

import logging
import math

import pytest
import torch

from shardcore._native import _C
from shardcore.optim import CPUAdam, FusedAdam

from .helpers import grads_of, params_of, same, snapshot

pytestmark = pytest.mark.parametrize("make", [CPUAdam, FusedAdam])


def test_gradients_of_another_dtype(make):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        (p,), (q,) = params_of(9, dtype=torch.bfloat16), params_of(9, dtype=torch.bfloat16)
        grad = grads_of([p])[0].to(dtype)
        p.grad_dtype = dtype
        p.grad = grad
        optimizer = make([p])
        optimizer.step()
        make([q]).step(grads=[grad])
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg"].float())


def test_gradients_may_be_strided(make):
    (p,), (q,) = ([torch.nn.Parameter(torch.ones(4, 6))] for _ in range(2))
    grad = torch.randn(6, 4).t()
    assert not grad.is_contiguous()
    make([p]).step(grads=[grad])
    make([q]).step(grads=[grad.contiguous()])
    assert torch.equal(p, q)


def test_grad_scale_multiplies(make):
    runs = []
    for scale, factor in [(0.25, 1.0), (torch.tensor(0.25), 1.0), (torch.tensor([0.5]), 0.5), (None, 0.25), (1, 0.25)]:
        params = params_of(20, 3)
        make(params).step(grads=[g * factor for g in grads_of(params)], grad_scale=scale)
        runs.append(params)
    assert all(same(run, runs[0]) for run in runs)


def test_max_norm_clips_after_the_scale(make):
    """step(max_norm=) is step(grad_scale=) with the coefficient of the scaled norm, and rewrites no gradient."""
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


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(make, unscale):
    ours, theirs = params_of(4, 3), params_of(4, 3)
    optimizer, reference = make(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.0)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for step in range(5):
        for scaler, opt, params in zip(scalers, (optimizer, reference), (ours, theirs), strict=True):
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


def test_grad_scaler_with_max_norm(make):
    (p,), (q,) = params_of(40), params_of(40)
    p.grad = grads_of([p])[0] * 1024
    optimizer = make([p], eps=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer, max_norm=1.0)
    make([q], eps=1e-2).step(grads=grads_of([q]), max_norm=1.0)
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("found", [1.0, 0.5, -1.0, math.nan, torch.tensor(1.0), torch.tensor([math.nan])])
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
