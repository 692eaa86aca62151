"""One tensor of more than 2^31 elements, for the kinds of state that fit: its parts have the bits of small tensors so keyed.

Alone on a machine with the memory that each kind names. tests/cpp/large_index_test.cpp shows the indices of every kind.
"""

import math

import pytest
import torch

from examples.machine import available_bytes
from shardcore._native import _C
from shardcore.optim import CPUAdam, global_norm

NUMEL = (1 << 31) + 1000
PERIOD = 1 << 20
WINDOW = 5120
# Where to look (multiples of 256): both ends, and around the places where 31 and 32 bits of elements or bytes end.
STARTS = (0, (1 << 29) - 2560, (1 << 30) - 2560, (1 << 31) - 2560, NUMEL // 256 * 256 - 4096)
# name: options and bytes an element, with bfloat16 weights and gradients
KINDS = {
    "8bit-stochastic": ({"state_dtype": "8bit", "stochastic_rounding": True}, 6),
    "8bit-split": ({"state_dtype": "8bit", "master": "split"}, 8),
    "bf16": ({"state_dtype": "bf16"}, 8),
}


def periodic(seed):
    """NUMEL bfloat16 values that repeat, and one period of them."""
    period = torch.randn(PERIOD, generator=torch.Generator().manual_seed(seed)).bfloat16()
    whole = torch.empty(NUMEL, dtype=torch.bfloat16)
    whole[: 1 << 31].view(-1, PERIOD).copy_(period)
    whole[1 << 31 :].copy_(period[: NUMEL - (1 << 31)])
    return whole, period


def window(period, first):
    return period[(torch.arange(first, min(first + WINDOW, NUMEL)) % PERIOD)].clone()


def small_step(options, weight, grad, first, seed=1):
    """The step of one window alone, keyed by its place. Returns weights, moments and the rest."""
    eight = options["state_dtype"] == "8bit"
    moments = [torch.zeros(weight.numel(), dtype=d) for d in ((torch.int8, torch.uint8) if eight else (torch.bfloat16,) * 2)]
    more = {}
    if eight:
        scales = [torch.zeros(-(-weight.numel() // 256)) for _ in range(2)]
        more = {"exp_avg_scales": [scales[0]], "exp_avg_sq_scales": [scales[1]]}
    if "master" in options:
        more["masters"] = [torch.zeros(weight.numel(), dtype=torch.int16)]
    rounding = options.get("stochastic_rounding", False)
    hyper = _C.AdamHyper(
        lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1, stochastic_rounding=rounding, seed=seed
    )
    _C.AdamStepper().step(
        [weight], [grad], [moments[0]], [moments[1]], [hyper], [0], keys=[(0, first)], **more
    )  # fmt: skip
    return [weight, *moments, *more.get("masters", [])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_more_than_2_to_the_31_elements(kind):
    options, bytes_each = KINDS[kind]
    need = bytes_each * NUMEL + (2 << 30)
    if (available_bytes() or need) < need:
        pytest.skip(f"needs {need >> 30} GiB of free memory")
    grad, grad_period = periodic(1)
    exact = math.sqrt((1 << 31) / PERIOD * grad_period.double().square().sum().item() + grad[1 << 31 :].double().square().sum())
    assert global_norm([grad]) == torch.tensor(exact).float().item()
    param, weight_period = periodic(0)
    optimizer = CPUAdam([param], lr=0.01, weight_decay=0.1, seed=1, **options)
    optimizer.step(grads=[grad])
    state = optimizer.state[param]
    keys = ["exp_avg", "exp_avg_sq", *(["remainder"] if "master" in options else [])]
    for first in STARTS:
        part = slice(first, first + WINDOW)
        got = [t[part] for t in (param, *(state[key] for key in keys))]
        want = small_step(options, window(weight_period, first), window(grad_period, first), first)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), first
        # The twin: an index cut to 31 bits keys other random bits, one that was never reached leaves the weights.
        other = small_step(options, window(weight_period, first), window(grad_period, first), (first + (1 << 31)) % (1 << 32))
        assert not all(torch.equal(a, b) for a, b in zip(got, other, strict=True))
        assert not torch.equal(got[0], window(weight_period, first))
