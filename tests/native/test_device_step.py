"""_C.device_step on CPU tensors: the bits of the host's scalars and loss scale; wrong arguments
are refused.
"""

import math

import pytest
import torch

from shardcore._native import _C
from shardcore.engine.loss_scale import LossScale, LossScaler
from tests.support.kernels import Lists, bits, make_hyper, nothing_written

SCALE, STABLE, LEFT, UNSCALE, NORM, SKIPPED = range(6)
FLOATS = (SCALE, UNSCALE, NORM)


def lists():
    made = Lists()
    for i, numel in enumerate((300, 0, 7)):
        made.add(numel, torch.float32, torch.bfloat16, i == 0, i == 2, seed=i)
    return made


def counters(*values):
    return [torch.tensor(value) for value in values]


def number(value, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


def words_of(scaler=None, ranks=1):
    words = torch.zeros(6, dtype=torch.int64)
    if scaler is not None:
        words.view(torch.float64)[SCALE], words.view(torch.float64)[UNSCALE] = (
            scaler.scale,
            1.0 / (ranks * scaler.scale),
        )
        words[STABLE], words[LEFT] = scaler.stable_steps, scaler.hysteresis_left
    return words


def read(words):
    return [(words.view(torch.float64) if i in FLOATS else words)[i].item() for i in range(6)]


def squares(*norms):
    return torch.tensor([[norm * norm, 0.0] for norm in norms], dtype=torch.float64)


def decide(words=None, parts=None, counts=None, hypers=None, index=None, **terms):
    words = words_of() if words is None else words
    counts = counters(2) if counts is None else counts
    return _C.device_step(
        words, parts, counts, index or [0] * len(counts), hypers or [make_hyper()], **terms
    )


def update(made, scalars, index=None):
    made.step(scalars, index or list(range(3)), keys=[(i, 0) for i in range(3)])


@pytest.mark.parametrize("scaled", [False, True])
def test_one_step_is_the_step_with_the_hosts_numbers(scaled):
    got, want = lists(), lists()
    counts, words = counters(4, 4, 2**24), words_of()
    parts = torch.stack([_C.sq_norm(want.grads[:2]), _C.sq_norm(want.grads[2:])])
    factor, terms = 1.0, {}
    if scaled:
        terms = {
            "grad_scale": number(-0.75, torch.float64),
            "loss_scale": number(8.0),
            "max_norm": 0.3,
        }
        norm = _C.norm_from_sq(_C.sq_norm_add(parts))
        factor = _C.clipped_scale(-0.75 / 8.0, norm, 0.3)
    hypers = [
        make_hyper(lr=number(0.05, torch.float64), step=1, grad_scale=7.0),
        make_hyper(lr=0.2, beta1=0.5),
    ]
    update(got, decide(words, parts if scaled else None, counts, hypers, [0, 0, 1], **terms))
    same = {"grad_scale": factor}
    want.step(
        [make_hyper(step=5, **same), make_hyper(lr=0.2, beta1=0.5, step=2**24 + 1, **same)],
        [0, 0, 1],
    )
    assert bits(got) == bits(want)
    assert [count.item() for count in counts] == [5, 5, 2**24 + 1]
    assert read(words)[NORM:] == [norm * 0.75 / 8.0 if scaled else 0.0, 0]


@pytest.mark.parametrize(
    "terms",
    [
        {"found_inf": number(1.0)},
        {"bad": math.inf},
        {"bad": math.nan},
        {"bad": 1e39},
        {"loss_scale": number(0.0)},
    ],
    ids=str,
)
def test_a_skipped_step_only_counts(terms):
    """1e39 is finite in float64, and no float32."""
    terms = dict(terms)
    parts = squares(1.0, terms.pop("bad", 2.0))
    made, counts, words = lists(), counters(4, 4, 4), words_of()
    with nothing_written(*counts):
        before = bits(made)
        for skipped in (1, 2):
            update(made, decide(words, parts, counts, **terms))
            assert (bits(made), read(words)[SKIPPED]) == (before, skipped)


OPTIONS = [
    LossScale(window=1, hysteresis=1),
    LossScale(window=3, hysteresis=2),
    LossScale(window=2, hysteresis=3, consecutive_hysteresis=True),
    LossScale(initial_power=126, window=1),
    LossScale(initial_power=3, hysteresis=1, minimum=3.0),
    LossScale(initial_power=0, hysteresis=1, minimum=0.1),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("overflows", ["......", "!.!!..!!!.", "..!!....!.....", "!!!!!!"])
def test_the_loss_scale_moves_as_on_the_host(options, overflows):
    scaler, ranks = LossScaler(options), 3
    words = words_of(scaler, ranks)
    for step in overflows:
        decide(words, squares(math.inf if step == "!" else 2.0), rule=scaler.rule, ranks=ranks)
        try:
            scaler.after_update() if step == "." else scaler.after_overflow()
        except RuntimeError:
            assert scaler.scale == options.minimum
        assert read(words)[:4] == [*scaler.state_now, 1.0 / (ranks * scaler.scale)]
    assert read(words)[SKIPPED] == overflows.count("!")


META = torch.ones((), device="meta")
BAD = [
    ({"hypers": [make_hyper(lr=META)]}, ValueError, "hypers.lr[0] has device meta; expected cpu"),
    ({"grad_scale": "1"}, TypeError, "grad_scale has type str; expected a number"),
    ({"grad_scale": META}, ValueError, "grad_scale has device meta; expected cpu"),
    (
        {"found_inf": torch.tensor(1)},
        TypeError,
        "found_inf has dtype Long; expected Float or Double",
    ),
    ({"loss_scale": torch.ones(2)}, ValueError, "loss_scale has 2 elements; expected 1"),
]


@pytest.mark.parametrize(
    "arguments, error, message", BAD, ids=[message[:50] for *_, message in BAD]
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error) as raised:
        decide(**arguments)
    assert f"device_step: {message}" in str(raised.value)


def test_a_call_with_these_scalars_is_checked_as_always():
    made = lists()
    with (
        nothing_written(*made.all()),
        pytest.raises(ValueError, match=r"hypers\[0\] has a tensor as lr; expected a number"),
    ):
        made.step([make_hyper(lr=number(0.1))])
    with pytest.raises(TypeError, match="lr has dtype BFloat16"):
        make_hyper(lr=torch.ones((), dtype=torch.bfloat16))


@pytest.mark.parametrize("value", [0.25, 1.0 / 3.0, 1.0 / (3 * 0.1)])
def test_a_sum_takes_its_scale_from_a_tensor(value):
    pieces, out, want = torch.randn(3 * 700), torch.empty(700), torch.empty(700)
    scale = torch.tensor([7.0, value], dtype=torch.float64)[1]
    assert torch.equal(
        _C.ordered_sum(pieces, 3, scale, out), _C.ordered_sum(pieces, 3, value, want)
    )
    assert torch.equal(out, want)
