"""A step has the same bits wherever it runs, in one large tensor or in 100,000 tiny ones,
compiled around or not.
"""

import functools
import itertools
import math
from itertools import product

import pytest
import torch

import shardcore
from shardcore._native import _C
from shardcore.distributed.machine import free_bytes
from shardcore.optim import CPUAdam, FusedAdam, clip_grad_norm_
from shardcore.optim.clip import global_norm
from tests.support.choice import some
from tests.support.kernels import DTYPES, tensor
from tests.support.params import same
from tests.support.placement import device_of, each_place, first_difference, moved, running_at

SIZES = [*range(0, 36, 3), 255, 256, 257, 1000, 20_001]
STEPS = 4


def combinations():
    """(weight dtype, options): all that the constructor takes."""
    for weight, state_dtype, master in itertools.product(
        DTYPES, ("fp32", "bf16", "8bit"), (None, "fp32", "split")
    ):
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
CASES = [
    (weight, options, FORMULAS[i % len(FORMULAS)])
    for i, (weight, options) in enumerate(combinations())
]
each_case = pytest.mark.parametrize(("weight", "options", "formula"), CASES, ids=str)


@functools.cache
def starting_weights(dtype):
    generator = torch.Generator().manual_seed(0)
    return [tensor(n, dtype, generator, misalign=i % 4) for i, n in enumerate(SIZES)]


@functools.cache
def gradients(step, index=None):
    """Gradients, not to be written to, of changing dtype over many magnitudes, with exact zeros
    and subnormal numbers.
    """
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
        return [p.detach() for p in self.params] + [
            s[key] for s in states for key in sorted(s) if key != "step"
        ]


@pytest.mark.cases(36)
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
    """With gradients of one dtype, given to step: the whole list takes one path through the
    kernel.
    """

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
    expected = (
        Run(torch.device("cpu"), torch.bfloat16, master="split", state_dtype="8bit")
        .steps()
        .tensors()
    )
    for broken in ("stale step", "other seed", "a bit", "behind the end"):
        with running_at(place):
            run = Run(
                device_of(place),
                torch.bfloat16,
                master="split",
                state_dtype="8bit",
                seed=int(broken == "other seed"),
            )
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
            grads = [moved(g, g.device) for g in gradients(step)]
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


COUNT = 100_000
TINY_STEPS = 2
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
    """Steps in one call each; the last with gradients of its own. left_out: a tensor without
    gradient there.
    """
    flat, views = tiny(dtype, 0, count)
    params = [torch.nn.Parameter(v) for v in views]
    optimizer = CPUAdam(params, **OPTIONS, **options)
    for step in range(TINY_STEPS - 1):
        for p, grad in zip(params, tiny(dtype, step + 1, count)[1], strict=True):
            p.grad = grad
        optimizer.step(grad_scale=0.5)
    optimizer.step(
        grads=[
            None if i == left_out else g for i, g in enumerate(tiny(dtype, TINY_STEPS, count)[1])
        ],
        grad_scale=0.5,
    )
    return flat, params, optimizer


def flat_step(dtype, options, count=COUNT):
    whole = torch.nn.Parameter(tiny(dtype, 0, count)[0].clone())
    optimizer = CPUAdam([whole], **OPTIONS, **options)
    for step in range(TINY_STEPS):
        optimizer.step(grads=[tiny(dtype, step + 1, count)[0]], grad_scale=0.5)
    return whole, optimizer.state[whole]


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "count"), some(product(FLAT, (COUNT, COUNT // 20)), [("bf16-split", COUNT // 20)])
)
def test_elementwise_kinds_have_the_bits_of_one_flat_tensor(kind, count):
    dtype, options = FLAT[kind]
    flat, params, optimizer = stepped(dtype, options, count=count)
    whole, state = flat_step(dtype, options, count)
    assert torch.equal(flat, whole)
    for key in state.keys() - {"step"}:
        assert torch.equal(
            torch.cat([optimizer.state[p].stored(key) for p in params]), state[key]
        ), key
    assert {optimizer.state[p].count.value for p in params} == {TINY_STEPS}


@pytest.mark.parametrize("count", [COUNT // 20, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_one_left_out_is_rejected(count):
    views = tiny(torch.float32, 0, count)[1]
    tail = next(i for i in range(count - 1, 0, -1) if views[i].numel())
    assert not torch.equal(
        stepped(torch.float32, {}, tail, count)[0], flat_step(torch.float32, {}, count)[0]
    )


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "count"), some(product(KEYED, (COUNT, COUNT // 50)), [("8bit-states", COUNT // 50)])
)
def test_keyed_kinds_have_the_bits_of_each_tensor_alone(kind, count):
    dtype, options = KEYED[kind]
    flat, params, optimizer = stepped(dtype, options, count=count)
    expected, views = tiny(dtype, 0, count)
    beta1, beta2 = OPTIONS["betas"]
    scalars = {key: OPTIONS[key] for key in ("lr", "eps", "weight_decay")}
    rounding = options.get("stochastic_rounding", False)
    state_dtype = options.get("state_dtype", "fp32")
    dtypes = {
        "fp32": (torch.float32,) * 2,
        "bf16": (torch.bfloat16,) * 2,
        "8bit": (torch.int8, torch.uint8),
    }[state_dtype]
    states = [
        [torch.zeros(expected.numel(), dtype=d) for d in dtypes],
        [torch.zeros(count), torch.zeros(count)],
    ]
    sizes = [v.numel() for v in views]
    moments = [list(t.split(sizes)) for t in states[0]]
    scales = [[t[i : i + 1] if n else t[:0] for i, n in enumerate(sizes)] for t in states[1]]
    remainders = list(torch.zeros(expected.numel(), dtype=torch.int16).split(sizes))
    stepper = _C.AdamStepper()
    for step in range(TINY_STEPS):
        hypers = [
            _C.AdamHyper(
                beta1=beta1,
                beta2=beta2,
                step=step + 1,
                grad_scale=0.5,
                stochastic_rounding=rounding,
                **scalars,
            )
        ]
        for i, (view, grad) in enumerate(zip(views, tiny(dtype, step + 1, count)[1], strict=True)):
            more = (
                {"exp_avg_scales": [scales[0][i]], "exp_avg_sq_scales": [scales[1][i]]}
                if state_dtype == "8bit"
                else {}
            )
            if "master" in options:
                more["masters"] = [remainders[i]]
            stepper.step(
                [view], [grad], [moments[0][i]], [moments[1][i]], hypers, [0], keys=[(i, 0)], **more
            )
    assert torch.equal(flat, expected)
    for key, kept in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        assert torch.equal(
            torch.cat([optimizer.state[p].stored(key) for p in params]), torch.cat(kept)
        )
    if kind == "8bit-states":  # the twin: another seed
        assert not torch.equal(stepped(dtype, {**options, "seed": 1}, count=count)[0], expected)


NUMEL = (1 << 31) + 1000
PERIOD = 1 << 20
WINDOW = 5120
# Where to look (multiples of 256): both ends, and around the places where 31 and 32 bits of
# elements or bytes end.
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
    moments = [
        torch.zeros(weight.numel(), dtype=d)
        for d in ((torch.int8, torch.uint8) if eight else (torch.bfloat16,) * 2)
    ]
    more = {}
    if eight:
        scales = [torch.zeros(-(-weight.numel() // 256)) for _ in range(2)]
        more = {"exp_avg_scales": [scales[0]], "exp_avg_sq_scales": [scales[1]]}
    if "master" in options:
        more["masters"] = [torch.zeros(weight.numel(), dtype=torch.int16)]
    rounding = options.get("stochastic_rounding", False)
    hyper = _C.AdamHyper(
        lr=0.01,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.1,
        step=1,
        stochastic_rounding=rounding,
        seed=seed,
    )
    _C.AdamStepper().step(
        [weight], [grad], [moments[0]], [moments[1]], [hyper], [0], keys=[(0, first)], **more
    )
    return [weight, *moments, *more.get("masters", [])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_more_than_2_to_the_31_elements(kind):
    options, bytes_each = KINDS[kind]
    need = bytes_each * NUMEL + (2 << 30)
    if (free_bytes() or need) < need:
        pytest.skip(f"needs {need >> 30} GiB of free memory")
    grad, grad_period = periodic(1)
    exact = math.sqrt(
        (1 << 31) / PERIOD * grad_period.double().square().sum().item()
        + grad[1 << 31 :].double().square().sum()
    )
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
        # The twin: an index cut to 31 bits keys other random bits, one that was never reached
        # leaves the weights.
        other = small_step(
            options,
            window(weight_period, first),
            window(grad_period, first),
            (first + (1 << 31)) % (1 << 32),
        )
        assert not all(torch.equal(a, b) for a, b in zip(got, other, strict=True))
        assert not torch.equal(got[0], window(weight_period, first))


X = torch.linspace(-1, 1, 24).view(4, 6)


def train(compile_step, steps=2):
    """The weights after some steps, and whether each step's bookkeeping was traced (seen from
    functions that it calls).
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = shardcore.CPUAdam(model.parameters(), lr=0.1)
    params, traced = list(model.parameters()), []

    def watched(value):
        traced.append(torch.compiler.is_compiling())
        return value

    def step():
        optimizer.zero_grad()
        model(X).square().mean().backward()
        shardcore.clip_grad_norm_((watched(p) for p in params), 0.1)
        optimizer.step(lambda: watched(0.0), max_norm=0.05)

    run = torch.compile(step, backend="eager") if compile_step else step
    for _ in range(steps):
        run()
    return [p.detach() for p in params], traced


@pytest.mark.more
def test_a_compiled_step_leaves_ours_alone():
    weights, _ = train(False)
    compiled, traced = train(True)
    assert same(weights, compiled)
    assert len(traced) == 6
    assert not any(traced)
