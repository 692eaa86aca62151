"""Both optimizers against the float64 oracle: every mix of dtypes, the cross product of options;
and broken twins.
"""

import itertools
import re

import numpy as np
import pytest
import torch

from shardcore._native import _C
from shardcore.optim import CPUAdam, FusedAdam, adam
from shardcore.optim.group_options import hyper_of
from tests.support.choice import few
from tests.support.oracle import Interval, Oracle, violations
from tests.support.params import plant_scalars

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIXES = [
    (p, g, m)
    for p, g in itertools.product(DTYPES, DTYPES)
    for m in ((None, "fp32") if p != torch.float32 else (None,))
]
W = 16  # the widest vector: float32 lanes of AVX-512
SIZES = [*range(2 * W + 4), 255, 256, 257, 0, 1000, 0]
PAD = 8
SENTINEL = 12345.0
STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")


def mix_id(value):
    return "none" if value is None else str(value).removeprefix("torch.")


class Views:
    """Tensors that are views into larger buffers, at offsets that no vector is aligned to, with
    sentinels around.
    """

    def __init__(self) -> None:
        self.buffers: list[tuple[torch.Tensor, torch.Tensor, slice]] = []

    def view(self, values: torch.Tensor, offset: int) -> torch.Tensor:
        buffer = torch.full((values.numel() + 2 * PAD + offset,), SENTINEL, dtype=values.dtype)
        inside = slice(PAD + offset, PAD + offset + values.numel())
        buffer[inside] = values
        self.buffers.append((buffer, buffer.clone(), inside))
        return buffer[inside]

    def damaged(self) -> int:
        """How many elements around the views have changed."""
        count = 0
        for buffer, before, inside in self.buffers:
            same = buffer == before
            same[inside] = True
            count += int((~same).sum())
        return count


class Run:
    """A list of tensors of all SIZES, stepped by an optimizer and by oracles side by side."""

    def __init__(
        self, mix, steps=3, grad_scale=1.0 / 3.0, make=CPUAdam, stepper=None, sizes=SIZES, **options
    ):
        p_dtype, self.g_dtype, master = mix
        options = {"lr": 0.02, "betas": (0.85, 0.97), "eps": 1e-6, "weight_decay": 0.3, **options}
        self.random = torch.Generator().manual_seed(5)
        self.views = Views()
        starts = [torch.randn(n, generator=self.random).to(p_dtype) for n in sizes]
        self.params = [torch.nn.Parameter(self.views.view(x, i % 5)) for i, x in enumerate(starts)]
        self.optimizer = make(self.params, master=master, **options)
        if stepper is not None:
            self.optimizer._steppers[torch.device("cpu")] = stepper
        for i, p in enumerate(self.params):
            state = {
                key: self.views.view(torch.zeros(p.numel()), (i + k) % 5)
                for k, key in enumerate(STATES[:3])
            }
            if master and p_dtype != torch.float32:
                state["master"] = self.views.view(p.detach().float(), (i + 3) % 5)
            self.optimizer.state[p] = {"step": 0, **state}
        self.oracles = [
            Oracle(Interval.of(p), p_dtype, bool(master) and p_dtype != torch.float32, **options)
            for p in self.params
        ]
        for _ in range(steps):
            grads = [self.grad(i, p.numel()) for i, p in enumerate(self.params)]
            self.optimizer.step(grads=grads, grad_scale=grad_scale)
            for oracle, grad in zip(self.oracles, grads, strict=True):
                oracle.step(grad, grad_scale)

    def grad(self, i: int, numel: int) -> torch.Tensor:
        magnitude = 10.0 ** torch.empty(numel).uniform_(-3, 0, generator=self.random)
        sign = torch.randint(0, 2, (numel,), generator=self.random) * 2 - 1
        return self.views.view((magnitude * sign).to(self.g_dtype), (i + 2) % 5)

    def wrong(self) -> int:
        """How many elements, of parameters and of states, the oracle rejects."""
        count = self.views.damaged()
        for p, oracle in zip(self.params, self.oracles, strict=True):
            state = self.optimizer.state[p]
            count += violations(p, oracle.param)
            count += violations(state["exp_avg"], oracle.exp_avg) + violations(
                state["exp_avg_sq"], oracle.exp_avg_sq
            )
            count += violations(state["max_exp_avg_sq"], oracle.max_exp_avg_sq)
            if oracle.master:
                count += violations(state["master"], oracle.weight)
            count += int(state["step"].item() != oracle.step_count)
        return count


@pytest.mark.cases(5)
@pytest.mark.parametrize("mix", MIXES, ids=lambda m: "-".join(map(mix_id, m)))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"adam_w_mode": False},
        {"amsgrad": True, "maximize": True},
        {"adam_w_mode": False, "bias_correction": False},
    ],
    ids=["adamw", "adam", "amsgrad-maximize", "adam-uncorrected"],
)
def test_every_mix_is_inside_the_oracle(mix, options):
    assert Run(mix, **options).wrong() == 0


@pytest.mark.parametrize(
    "longer",
    [{"sizes": [9, 0, 200_003, 33]}, {"sizes": [33], "steps": 100}],
    ids=["large", "100 steps"],
)
def test_large_lists_and_many_steps_are_inside_the_oracle(longer, monkeypatch):
    assert Run(MIXES[0], **longer).wrong() == 0
    monkeypatch.setattr(Oracle, "step", without_last(Oracle.step))
    assert Run(MIXES[0], **longer).wrong() > 0


def without_last(step):
    """Return a step that leaves the last element of what it updates out."""

    def broken(oracle, grad, grad_scale):
        return step(
            oracle, torch.cat([grad[:-1], torch.zeros(1)]) if grad.numel() else grad, grad_scale
        )

    return broken


@pytest.fixture
def keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.cases(1)
@pytest.mark.parametrize("make", [CPUAdam, FusedAdam])
def test_large_tensors_over_threads(make, keep_threads):
    """Sizes past every tile and chunk, split over threads."""
    torch.set_num_threads(2)
    for mix in [(torch.float32, torch.float32, None), (torch.bfloat16, torch.bfloat16, "fp32")]:
        assert Run(mix, make=make, sizes=[70_001, 0, 3, 1 << 17], steps=2).wrong() == 0


def test_oracle_is_narrow():
    """The check means something: before cancellation could matter the bound is a few ulps, and
    16-bit weights are exact.
    """
    first = Run((torch.float32, torch.float32, None), steps=1, sizes=[4096]).oracles[0]
    # Roundings on the way, each half an ulp (a full one where the product falls to the bottom of
    # its binade): m: scale, scale*g, 1-beta1, product, sum = 5; v: the same with g twice = 8.
    assert first.exp_avg.width_ulps().max() <= 5
    assert first.exp_avg_sq.width_ulps().max() <= 8
    # p: its own two (decay, product) and the sum, plus the update's ten or so, at 0.02 of the size
    # of a typical weight.
    assert np.median(first.weight.width_ulps()) <= 3
    third = Run((torch.bfloat16, torch.float32, None), sizes=[4096]).oracles[0].param
    assert (third.lo == third.hi).mean() > 0.95


def changed_group(**change):
    """A twin of hyper_of that reads other options than it was given."""

    def twin(group, step, grad_scale):
        return hyper_of(
            {**group, **{key: f(group[key]) for key, f in change.items()}}, step, grad_scale
        )

    return twin


HYPER_TWINS = {
    "wrong decay": changed_group(weight_decay=lambda wd: wd * 0.9),
    "no decay": changed_group(weight_decay=lambda wd: 0.0),
    "adam for adamw": changed_group(adam_w_mode=lambda mode: not mode),
    "lr off by 1e-3": changed_group(lr=lambda lr: lr * 1.001),
    "stale step": lambda group, step, grad_scale: hyper_of(group, max(1, step - 1), grad_scale),
    "grad_scale ignored": lambda group, step, grad_scale: hyper_of(group, step, 1.0),
}


class Twin:
    """A stepper that gets its lists as they are."""

    def repeat(self, lists, grads, hypers):
        self.step(**lists, grads=grads, hypers=hypers)


class NoOp(Twin):
    def step(self, *args, **kwargs):
        pass


class DroppedTail(Twin):
    """Leaves what is past the last whole vector as it was."""

    def step(self, params, grads, exp_avgs, exp_avg_sqs, *args, **kwargs):
        tails = [
            t[t.numel() // W * W :] for tensors in (params, exp_avgs, exp_avg_sqs) for t in tensors
        ]
        before = [t.clone() for t in tails]
        _C.AdamStepper().step(params, grads, exp_avgs, exp_avg_sqs, *args, **kwargs)
        for tail, old in zip(tails, before, strict=True):
            tail.copy_(old)


class WritesPastTheEnd(Twin):
    """Touches one element behind a tensor."""

    def step(self, params, *args, **kwargs):
        _C.AdamStepper().step(params, *args, **kwargs)
        last = params[5].detach()
        torch.as_strided(last, (1,), (1,), last.storage_offset() + last.numel()).fill_(0)


class Truncates(Twin):
    """Rounds 16-bit weights towards zero instead of to nearest."""

    def step(self, params, *args, masters=None, **kwargs):
        _C.AdamStepper().step(params, *args, masters=masters, **kwargs)
        for p, master in zip(params, masters, strict=True):
            if master is not None:
                p.copy_((master.view(torch.int32) & ~0xFFFF).view(torch.float32))


STEPPER_TWINS = [NoOp, DroppedTail, WritesPastTheEnd, Truncates]


@pytest.mark.cases(9)
@pytest.mark.parametrize(
    "mix", [MIXES[0], MIXES[4], MIXES[-1]], ids=lambda m: "-".join(map(mix_id, m))
)
@pytest.mark.parametrize("twin", HYPER_TWINS)
def test_broken_scalars_are_rejected(monkeypatch, mix, twin):
    plant_scalars(monkeypatch, HYPER_TWINS[twin])
    assert Run(mix).wrong() > 0


class Lists(dict):
    """AdamLists that twins of the stepper can read."""

    def release_states(self, states):
        """Each step makes lists anew."""


@pytest.mark.parametrize("twin", STEPPER_TWINS, ids=lambda twin: twin.__name__)
def test_broken_kernels_are_rejected(monkeypatch, twin):
    monkeypatch.setattr(_C, "AdamLists", Lists)
    monkeypatch.setattr(adam.Update, "find", lambda *arguments: None)
    assert Run((torch.bfloat16, torch.float32, "fp32"), stepper=twin()).wrong() > 0


def test_stochastic_rounding_goes_to_a_neighbour():
    assert (
        Run((torch.bfloat16, torch.bfloat16, None), steps=1, stochastic_rounding=True).wrong() == 0
    )


OPTIONS_SIZES = (1, 0, 31, 255, 257, 600)
STORAGE = list(
    itertools.product(
        DTYPES,
        (None, "fp32", "split"),
        ("fp32", "bf16", "8bit"),
        (False, True),
        (False, True),
        (False, True),
    )
)
MODES = list(itertools.product(DTYPES, (False, True), (False, True), (False, True)))
FEW_MODES = few(MODES)
COMMON = {"lr": 0.02, "betas": (0.85, 0.97), "eps": 1e-6, "weight_decay": 0.3}


def options_of(master, state_dtype, amsgrad, stochastic_rounding, capturable):
    return {
        "master": master,
        "state_dtype": state_dtype,
        "amsgrad": amsgrad,
        "stochastic_rounding": stochastic_rounding,
        "capturable": capturable,
    }


def conflicts(dtype, master, state_dtype, amsgrad, stochastic_rounding, capturable):
    """Every pair of words that a refusal of this combination may name; empty: it must step."""
    pairs = {
        ("capturable", "CPU"): capturable,
        ("amsgrad", "state_dtype"): amsgrad and state_dtype != "fp32",
        ("stochastic_rounding", "master"): stochastic_rounding and master is not None,
        ("float16", "master='split'"): dtype is torch.float16 and master == "split",
        ("float16", "stochastic_rounding"): dtype is torch.float16 and stochastic_rounding,
    }
    return [pair for pair, holds in pairs.items() if holds]


def wrong(dtype, options, modes, steps=2):
    """How many elements lie outside the oracle."""
    grad_dtype, adam_w_mode, maximize, bias_correction = modes
    options = {
        **COMMON,
        **options,
        "adam_w_mode": adam_w_mode,
        "maximize": maximize,
        "bias_correction": bias_correction,
    }
    generator = torch.Generator().manual_seed(3)
    params = [
        torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in OPTIONS_SIZES
    ]
    optimizer = FusedAdam(params, **options)
    has_master = options["master"] is not None and dtype is not torch.float32
    known = {key: value for key, value in options.items() if key not in ("master", "capturable")}
    oracles = [Oracle(Interval.of(p), dtype, has_master, **known) for p in params]
    for _ in range(steps):
        grads = [torch.randn(n, generator=generator).to(grad_dtype) for n in OPTIONS_SIZES]
        optimizer.step(grads=grads, grad_scale=0.5)
        for oracle, grad in zip(oracles, grads, strict=True):
            oracle.step(grad, 0.5)
    count = 0
    for i, oracle in enumerate(oracles):
        state = optimizer.state_dict()["state"][i]
        count += violations(params[i], oracle.param)
        count += violations(state["exp_avg"], oracle.exp_avg) + violations(
            state["exp_avg_sq"], oracle.exp_avg_sq
        )
        if has_master:
            count += violations(state["master"], oracle.weight)
        if options["amsgrad"]:
            count += violations(state["max_exp_avg_sq"], oracle.max_exp_avg_sq)
    return count


def storage_id(storage):
    return "-".join(str(value).removeprefix("torch.") for value in storage)


@pytest.mark.slow
@pytest.mark.parametrize("storage", [s for s in STORAGE if not conflicts(*s)], ids=storage_id)
def test_each_combination_steps_in_every_mode(storage):
    dtype, *rest = storage
    assert [modes for modes in MODES if wrong(dtype, options_of(*rest), modes)] == []


@pytest.mark.cases(30)
@pytest.mark.parametrize("storage", STORAGE, ids=storage_id)
def test_each_combination_steps_or_is_refused(storage):
    dtype, *rest = storage
    options, pairs = options_of(*rest), conflicts(*storage)
    if not pairs:
        assert [modes for modes in FEW_MODES if wrong(dtype, options, modes)] == []
        return
    for make in (FusedAdam, CPUAdam):
        p = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        with pytest.raises(ValueError, match="expected") as caught:
            make([p], **options)
        assert any(all(word in str(caught.value) for word in pair) for pair in pairs), caught.value
        with pytest.raises(
            ValueError, match=re.escape(re.split(" has | is ", str(caught.value))[1].split(";")[0])
        ):
            make([{"params": [p], **options}])
        # The same options set later are refused before a step writes.
        optimizer = make([p])
        optimizer.param_groups[0].update(options)
        with pytest.raises(ValueError, match="expected"):
            optimizer.step(grads=[torch.ones(4)])
        assert torch.equal(p, torch.ones(4, dtype=dtype))
        assert not optimizer.state


def test_how_many_combinations_step():
    """float32 and bfloat16: 12 without stochastic rounding, 4 with; float16: no split, no
    stochastic rounding.
    """
    assert sum(not conflicts(*storage) for storage in STORAGE) == 2 * (12 + 4) + 8


TWINS = {
    "wrong decay": {"weight_decay": 0.25},
    "no maximize": {"maximize": False},
    "no bias correction": {"bias_correction": False},
    "other beta2": {"betas": (0.85, 0.9)},
}


def twin_of_each():
    """Every storage with one of the twins, so that each of them meets each dtype and each
    option.
    """
    storages = [s for s in STORAGE if not conflicts(*s)]
    return [
        (storage, list(TWINS)[(number + number // 4) % len(TWINS)])
        for number, storage in enumerate(storages)
    ]


@pytest.mark.parametrize(
    ("storage", "twin"),
    twin_of_each(),
    ids=lambda value: value if value in TWINS else storage_id(value),
)
def test_broken_scalars_are_rejected_in_every_combination(monkeypatch, storage, twin):
    dtype, *rest = storage
    plant_scalars(
        monkeypatch, lambda group, step, scale: hyper_of({**group, **TWINS[twin]}, step, scale)
    )
    assert wrong(dtype, options_of(*rest), (torch.float32, True, True, True)) > 0


@pytest.mark.parametrize("storage", [s for s in STORAGE if not conflicts(*s)], ids=storage_id)
def test_a_stale_step_is_rejected_in_every_combination(monkeypatch, storage):
    dtype, *rest = storage
    plant_scalars(monkeypatch, lambda group, step, scale: hyper_of(group, max(1, step - 1), scale))
    assert wrong(dtype, options_of(*rest), (torch.float32, True, False, True)) > 0
