"""A step has the same bits wherever it runs: every combination of dtypes, states and masters, sizes and misalignments."""

import itertools
import math

import pytest
import torch

from shardcore.optim import FusedAdam, clip_grad_norm_
from tests.native.helpers import DTYPES, tensor
from tests.placement import device_of, each_place, first_difference, moved, running_at

SIZES = [*range(0, 36, 3), 255, 256, 257, 1000, 70_001]
STEPS = 4


def combinations():
    """(weight dtype, options): all that the constructor takes."""
    for weight, state_dtype, master in itertools.product(DTYPES, ("fp32", "bf16", "8bit"), (None, "fp32", "split")):
        if weight == torch.float16 and master == "split":
            continue
        options = {"state_dtype": state_dtype, "master": master}
        yield weight, options
        if state_dtype == "fp32":
            yield weight, {**options, "amsgrad": True}
        if master is None and weight == torch.bfloat16:
            yield weight, {**options, "stochastic_rounding": True, "seed": 7}


# Each combination has one of these, so that every formula meets every storage somewhere.
FORMULAS = [
    {},
    {"adam_w_mode": False},
    {"maximize": True},
    {"bias_correction": False},
    {"adam_w_mode": False, "maximize": True},
]
CASES = [(weight, options, FORMULAS[i % len(FORMULAS)]) for i, (weight, options) in enumerate(combinations())]
each_case = pytest.mark.parametrize(("weight", "options", "formula"), CASES, ids=str)


def starting_weights(dtype):
    generator = torch.Generator().manual_seed(0)
    return [tensor(n, dtype, generator, misalign=i % 4) for i, n in enumerate(SIZES)]


def gradients(step, index=None):
    """Gradients of changing dtype over many magnitudes, with exact zeros and subnormal numbers."""
    generator = torch.Generator().manual_seed(100 + step)
    grads = []
    for i, n in enumerate(SIZES):
        dtype = DTYPES[i % 3 if index is None else index]
        grad = tensor(n, dtype, generator, misalign=(i + 1) % 4)
        grad.mul_(10.0 ** torch.randint(-8, 3, (n,), generator=generator))
        grad[::17] = 0.0
        grad[5::31] = 1e-40
        grads.append(grad)
    return grads


class Run:
    """One training at one device, from the same weights and gradients everywhere."""

    def __init__(self, device, weight, **options):
        self.device = device
        self.params = [torch.nn.Parameter(moved(w, device)) for w in starting_weights(weight)]
        self.optimizer = FusedAdam(self.params, lr=0.01, weight_decay=0.1, eps=1e-6, **options)

    def steps(self, count=STEPS, first=0, **arguments):
        for step in range(first, first + count):
            for param, grad in zip(self.params, gradients(step), strict=True):
                if param.dtype != grad.dtype:
                    param.grad_dtype = grad.dtype
                param.grad = moved(grad, self.device)
            self.optimizer.step(grad_scale=0.37, **arguments)
        return self

    def tensors(self):
        """Weights and states, with what lies around them."""
        states = [self.optimizer.state[p] for p in self.params]
        return [p.detach() for p in self.params] + [s[key] for s in states for key in sorted(s) if key != "step"]


@each_place
@each_case
def test_every_combination_has_the_same_bits(place, weight, options, formula):
    expected = Run(torch.device("cpu"), weight, **options, **formula).steps()
    with running_at(place):
        actual = Run(device_of(place), weight, **options, **formula).steps()
    assert first_difference(actual.tensors(), expected.tensors()) is None
    for param, start in zip(actual.params, starting_weights(weight), strict=True):  # it did train
        assert param.numel() == 0 or not torch.equal(param.detach().cpu(), start)


@each_place
@pytest.mark.parametrize("grad", range(3), ids=[str(d) for d in DTYPES])
@pytest.mark.parametrize("weight", DTYPES, ids=str)
def test_every_mix_of_dtypes_has_the_same_bits(place, weight, grad):
    """With gradients of one dtype, given to step: the whole list takes one path through the kernel."""

    def run(device):
        run = Run(device, weight, master="fp32")
        for step in range(STEPS):
            run.optimizer.step(grads=[moved(g, device) for g in gradients(step, grad)])
        return run.tensors()

    expected = run(torch.device("cpu"))
    with running_at(place):
        assert first_difference(run(device_of(place)), expected) is None


@each_place
def test_the_comparison_sees_one_bit(place):
    expected = Run(torch.device("cpu"), torch.bfloat16, master="split", state_dtype="8bit").steps().tensors()
    for broken in ("stale step", "other seed", "a bit", "behind the end"):
        with running_at(place):
            run = Run(device_of(place), torch.bfloat16, master="split", state_dtype="8bit", seed=int(broken == "other seed"))
            run.steps(STEPS - (broken == "stale step"))
        last = run.params[-1].detach()
        if broken == "a bit":
            last.view(torch.int16)[-1] ^= 1
        if broken == "behind the end":
            torch.as_strided(last, (1,), (1,), last.storage_offset() + last.numel()).add_(1)
        assert first_difference(run.tensors(), expected) is not None, broken


@each_place
def test_not_a_number_reaches_the_same_elements(place):
    def run(device):
        run = Run(device, torch.float32, amsgrad=True)
        for step in range(3):
            grads = gradients(step)
            for grad in grads:
                grad[step::40] = (math.nan, math.inf, -math.inf)[step]
            run.optimizer.step(grads=[moved(g, device) for g in grads])
        return run.tensors()

    expected = run(torch.device("cpu"))
    assert any(t.isnan().any() for t in expected)
    with running_at(place):
        assert first_difference(run(device_of(place)), expected) is None


@each_place
@pytest.mark.parametrize("weight", DTYPES, ids=str)
def test_clipping_inside_the_step_has_the_same_bits(place, weight):
    expected = Run(torch.device("cpu"), weight).steps(max_norm=1.0)
    with running_at(place):
        actual = Run(device_of(place), weight).steps(max_norm=1.0)
    assert first_difference(actual.tensors(), expected.tensors()) is None
    unclipped = Run(torch.device("cpu"), weight).steps()
    assert first_difference(unclipped.tensors(), expected.tensors()) is not None


@each_place
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_with_a_norm_that_is_not_finite_writes_nothing(place, bad):
    with running_at(place):
        run = Run(device_of(place), torch.bfloat16, master="split").steps(2)
        before = [t.clone() for t in run.tensors()]
        grads = [moved(g, run.device) for g in gradients(2)]
        grads[-1][-1] = bad
        run.optimizer.step(grads=grads, max_norm=1.0)
        assert run.optimizer.skipped_steps == 1
        assert all(torch.equal(a, b) for a, b in zip(run.tensors(), before, strict=True))
        assert run.optimizer.state[run.params[0]]["step"] == 2
        run.steps(1, first=2, max_norm=1.0)
        assert run.optimizer.state[run.params[0]]["step"] == 3


@each_place
def test_clip_grad_norm_measures_the_same_bits(place):
    def clipped(device, max_norm):
        run = Run(device, torch.float32)
        for param, grad in zip(run.params, gradients(0), strict=True):
            param.grad = moved(grad.float(), device)
        norm = clip_grad_norm_(run.params, max_norm)
        assert norm.device.type == device.type
        return norm.cpu(), [p.grad.cpu() for p in run.params]

    for max_norm in (0.5, 1e12):
        norm, grads = clipped(torch.device("cpu"), max_norm)
        with running_at(place):
            norm_there, grads_there = clipped(device_of(place), max_norm)
        assert torch.equal(norm_there, norm)
        torch.testing.assert_close(grads_there, grads, rtol=2.0**-22, atol=0)
