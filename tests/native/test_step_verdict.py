"""_C.step_verdict on CPU tensors: the loss scale by the host's rule, scalars by the host's formula, wrong arguments refused."""

import math

import pytest
import torch

from shardcore._native import _C
from shardcore.engine.loss_scale import LossScale, LossScaler
from tests.native.helpers import Lists, bits, make_hyper, nothing_written

SCALE, STABLE, LEFT, UNSCALE, UPDATES, NORM, GRAD_SCALE, SKIP = range(8)
FLOATS = (SCALE, UNSCALE, NORM, GRAD_SCALE)


def words_of(scaler: LossScaler, ranks: int = 1) -> torch.Tensor:
    words = torch.zeros(8, dtype=torch.int64)
    words.view(torch.float64)[SCALE], words.view(torch.float64)[UNSCALE] = scaler.scale, 1.0 / (ranks * scaler.scale)
    words[STABLE], words[LEFT] = scaler.stable_steps, scaler.hysteresis_left
    return words


def read(words: torch.Tensor) -> list[float]:
    return [(words.view(torch.float64) if i in FLOATS else words)[i].item() for i in range(8)]


def squares(*norms: float) -> torch.Tensor:
    return torch.tensor([[norm * norm, 0.0] for norm in norms], dtype=torch.float64)


def decide(words, parts, hypers=(), since=(), *, max_norm=None, number=0, ranks=1, rule=None, grad_scale=1.0):
    more = {"grad_scale": grad_scale, "max_norm": max_norm, "number": number, "ranks": ranks, "rule": rule}
    return _C.step_verdict(parts, hypers, since, words, **more)


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
    for number, step in enumerate(overflows):
        decide(words, squares(math.inf if step == "!" else 2.0), rule=scaler.rule, ranks=ranks, number=number)
        try:
            scaler.after_update() if step == "." else scaler.after_overflow()
        except RuntimeError:
            assert scaler.scale == options.minimum
        state = [scaler.scale, scaler.stable_steps, scaler.hysteresis_left, 1.0 / (ranks * scaler.scale)]
        assert read(words)[:4] == state
    assert read(words)[UPDATES] == sum(1 << number for number, step in enumerate(overflows) if step == ".")


def lists():
    made = Lists()
    for i, numel in enumerate((300, 7, 129)):
        made.add(numel, torch.float32, torch.bfloat16, i == 0, i == 2, seed=i)
    return made


@pytest.mark.parametrize("max_norm", [None, 0.3, 1e9])
@pytest.mark.parametrize("grad_scale", [1.0, -0.37])
def test_the_step_is_that_with_the_hosts_numbers(max_norm, grad_scale):
    got, want = lists(), lists()
    words = words_of(LossScaler(None))
    words[UPDATES] = 0b1011
    parts = torch.stack([_C.sq_norm(want.grads[:2]), _C.sq_norm(want.grads[2:])])
    norm = _C.norm_from_sq(_C.sq_norm_add(parts))
    hypers, since = [make_hyper(step=5, grad_scale=7.0), make_hyper(lr=0.2, beta1=0.5, step=3)], [0b1110, 0b0100]
    scalars = decide(words, parts, hypers, since, max_norm=max_norm, number=6, grad_scale=grad_scale)
    got.step(scalars, [0, 0, 1])
    factor = grad_scale if max_norm is None else _C.clipped_scale(grad_scale, norm, max_norm)
    want.step([make_hyper(step=7, grad_scale=factor), make_hyper(lr=0.2, beta1=0.5, step=3, grad_scale=factor)], [0, 0, 1])
    assert bits(got) == bits(want)
    found = read(words)
    assert (found[UPDATES], found[NORM], found[GRAD_SCALE], found[SKIP]) == (0b1001011, norm * abs(grad_scale), factor, 0)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1e39])
def test_a_skipped_step_writes_nothing_and_takes_its_bit_back(bad):
    """1e39 is finite in float64, and no float32."""
    made, words = lists(), words_of(LossScaler(None))
    words[UPDATES] = 0b110
    before = bits(made)
    made.step(decide(words, squares(1.0, bad), [make_hyper()], [0], number=2), [0, 0, 0])
    assert bits(made) == before
    assert (read(words)[UPDATES], read(words)[SKIP]) == (0b010, 1)
    made.step(decide(words, squares(1.0, 2.0), [make_hyper()], [0], number=63), [0, 0, 0])
    assert bits(made) != before
    assert (words[UPDATES].item(), read(words)[SKIP]) == (0b010 - 2**63, 0)


BAD = [
    (lambda: decide(torch.zeros(7).long(), squares(1.0)), ValueError, "words has 7 elements; expected 8"),
    (lambda: decide(torch.zeros(8), squares(1.0)), TypeError, "words has dtype Float; expected Long"),
    (lambda: decide(torch.zeros(8).long(), torch.zeros(3).double()), ValueError, r"squares has shape [3]; expected [n, 2]"),
    (lambda: decide(torch.zeros(8).long(), torch.zeros(1, 2)), TypeError, "squares has dtype Float; expected Double"),
    (lambda: decide(torch.zeros(8).long(), squares(1.0), [make_hyper()], []), ValueError, "since has 0 items; expected 1"),
    (
        lambda: decide(torch.zeros(8).long(), squares(1.0), [make_hyper()], [0.5]),
        TypeError,
        "since[0] has type float; expected an",
    ),
    (lambda: decide(torch.zeros(8).long(), squares(1.0), number=64), ValueError, "number has 64; expected 0 to 63"),
    (lambda: decide(torch.zeros(8).long(), squares(1.0), ranks=0), ValueError, "ranks has 0; expected 1 or more"),
    (
        lambda: decide(torch.zeros(8).long(), squares(1.0), max_norm=-1.0),
        ValueError,
        "max_norm has -1; expected a number of at",
    ),
    (
        lambda: decide(torch.zeros(8).long(), squares(1.0), rule=3),
        TypeError,
        "rule has type int; expected LossScaleRule or None",
    ),
]


@pytest.mark.parametrize("call, error, message", BAD, ids=[message[:40] for *_, message in BAD])
def test_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert f"step_verdict: {message}" in str(raised.value)


def test_a_wrong_rule_and_wrong_steps_are_refused():
    good = {"window": 1, "hysteresis": 1, "minimum": 1.0, "consecutive_hysteresis": False}
    for name, value, message in [
        ("window", 0, "LossScaleRule: window has 0; expected 1 or more"),
        ("hysteresis", 0, "LossScaleRule: hysteresis has 0; expected 1 or more"),
        ("minimum", 0.0, "LossScaleRule: minimum has 0; expected more than 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            _C.LossScaleRule(**good | {name: value})
    made, words = lists(), words_of(LossScaler(None))
    scalars = decide(words, squares(1.0), [make_hyper()], [0])
    with nothing_written(*made.all()), pytest.raises(ValueError, match="device_step has a value; expected None with"):
        made.step(scalars, [0, 0, 0], device_step=_C.DeviceStep([torch.tensor(i) for i in range(3)], torch.tensor(0)))


@pytest.mark.parametrize("value", [0.25, 1.0 / 3.0, 1.0 / (3 * 0.1)])
def test_a_sum_takes_its_scale_from_a_tensor(value):
    pieces, out, want = torch.randn(3 * 700), torch.empty(700), torch.empty(700)
    scale = torch.tensor([7.0, value], dtype=torch.float64)[1]
    assert torch.equal(_C.ordered_sum(pieces, 3, scale, out), _C.ordered_sum(pieces, 3, value, want))
    assert torch.equal(out, want)
