"""One call over 100,000 tiny tensors, 20,000 where slow tests are left out: every element has the bits of the same step done
another way, for every kind of state.
"""

from itertools import product

import pytest
import torch

from shardcore._native import _C
from shardcore.optim import CPUAdam
from tests.choice import some

COUNT = 100_000
STEPS = 2
OPTIONS = {"lr": 0.02, "betas": (0.85, 0.97), "eps": 1e-6, "weight_decay": 0.3}
# Elementwise kinds: one flat tensor has the same bits.
FLAT = {
    "fp32": (torch.float32, {}),
    "fp32-amsgrad-adam": (torch.float32, {"amsgrad": True, "adam_w_mode": False}),
    "fp16": (torch.float16, {}),
    "bf16": (torch.bfloat16, {}),
    "bf16-master": (torch.bfloat16, {"master": "fp32"}),
    "bf16-split": (torch.bfloat16, {"master": "split"}),
}
# Kinds keyed by the parameter's index, or in blocks: each tensor alone, with its key.
KEYED = {
    "bf16-stochastic": (torch.bfloat16, {"stochastic_rounding": True}),
    "bf16-states": (torch.float32, {"state_dtype": "bf16"}),
    "8bit-states": (torch.bfloat16, {"state_dtype": "8bit"}),
    "8bit-states-split": (torch.bfloat16, {"state_dtype": "8bit", "master": "split"}),
}


def tiny(dtype, seed, count=COUNT):
    """`count` views of 0 to 6 elements each, into one buffer."""
    sizes = (torch.arange(count) * 2654435761 % 7).tolist()
    flat = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)).to(dtype)
    return flat, list(flat.split(sizes))


def stepped(dtype, options, left_out=None, count=COUNT):
    """Steps in one call each; the last with gradients of its own. left_out: a tensor without gradient there."""
    flat, views = tiny(dtype, 0, count)
    params = [torch.nn.Parameter(v) for v in views]
    optimizer = CPUAdam(params, **OPTIONS, **options)
    for step in range(STEPS - 1):
        for p, grad in zip(params, tiny(dtype, step + 1, count)[1], strict=True):
            p.grad = grad
        optimizer.step(grad_scale=0.5)
    optimizer.step(grads=[None if i == left_out else g for i, g in enumerate(tiny(dtype, STEPS, count)[1])], grad_scale=0.5)
    return flat, params, optimizer


def flat_step(dtype, options, count=COUNT):
    whole = torch.nn.Parameter(tiny(dtype, 0, count)[0].clone())
    optimizer = CPUAdam([whole], **OPTIONS, **options)
    for step in range(STEPS):
        optimizer.step(grads=[tiny(dtype, step + 1, count)[0]], grad_scale=0.5)
    return whole, optimizer.state[whole]


@pytest.mark.parametrize(("kind", "count"), some(product(FLAT, (COUNT, COUNT // 5)), [("bf16-split", COUNT // 5)]))
def test_elementwise_kinds_have_the_bits_of_one_flat_tensor(kind, count):
    dtype, options = FLAT[kind]
    flat, params, optimizer = stepped(dtype, options, count=count)
    whole, state = flat_step(dtype, options, count)
    assert torch.equal(flat, whole)
    for key in state.keys() - {"step"}:
        assert torch.equal(torch.cat([optimizer.state[p].stored(key) for p in params]), state[key]), key
    assert {optimizer.state[p].count.value for p in params} == {STEPS}


@pytest.mark.parametrize("count", [COUNT // 10, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_one_left_out_is_rejected(count):
    views = tiny(torch.float32, 0, count)[1]
    tail = next(i for i in range(count - 1, 0, -1) if views[i].numel())
    assert not torch.equal(stepped(torch.float32, {}, tail, count)[0], flat_step(torch.float32, {}, count)[0])


@pytest.mark.parametrize(("kind", "count"), some(product(KEYED, (COUNT, COUNT // 10)), [("8bit-states", COUNT // 10)]))
def test_keyed_kinds_have_the_bits_of_each_tensor_alone(kind, count):
    dtype, options = KEYED[kind]
    flat, params, optimizer = stepped(dtype, options, count=count)
    expected, views = tiny(dtype, 0, count)
    beta1, beta2 = OPTIONS["betas"]
    scalars = {key: OPTIONS[key] for key in ("lr", "eps", "weight_decay")}
    rounding = options.get("stochastic_rounding", False)
    state_dtype = options.get("state_dtype", "fp32")
    dtypes = {"fp32": (torch.float32,) * 2, "bf16": (torch.bfloat16,) * 2, "8bit": (torch.int8, torch.uint8)}[state_dtype]
    states = [[torch.zeros(expected.numel(), dtype=d) for d in dtypes], [torch.zeros(count), torch.zeros(count)]]
    sizes = [v.numel() for v in views]
    moments = [list(t.split(sizes)) for t in states[0]]
    scales = [[t[i : i + 1] if n else t[:0] for i, n in enumerate(sizes)] for t in states[1]]
    remainders = list(torch.zeros(expected.numel(), dtype=torch.int16).split(sizes))
    stepper = _C.AdamStepper()
    for step in range(STEPS):
        hypers = [
            _C.AdamHyper(
                beta1=beta1, beta2=beta2, step=step + 1, grad_scale=0.5, stochastic_rounding=rounding, **scalars
            )
        ]  # fmt: skip
        for i, (view, grad) in enumerate(zip(views, tiny(dtype, step + 1, count)[1], strict=True)):
            more = {"exp_avg_scales": [scales[0][i]], "exp_avg_sq_scales": [scales[1][i]]} if state_dtype == "8bit" else {}
            if "master" in options:
                more["masters"] = [remainders[i]]
            stepper.step([view], [grad], [moments[0][i]], [moments[1][i]], hypers, [0], keys=[(i, 0)], **more)
    assert torch.equal(flat, expected)
    for key, kept in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        assert torch.equal(torch.cat([optimizer.state[p].stored(key) for p in params]), torch.cat(kept))
    if kind == "8bit-states":  # the twin: another seed
        assert not torch.equal(stepped(dtype, {**options, "seed": 1}, count=count)[0], expected)
