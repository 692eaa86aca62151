"""When the loss scale moves: step by step, against the rule as DeepSpeed documents it, and
against rules that are wrong.
"""

import math
from typing import Any

import pytest

from shardcore.engine.loss_scale import LossScale, LossScaler


def scales(scaler: LossScaler, steps: str) -> list[float]:
    """The exponent of the scale after each step: "." updated, "!" overflowed."""
    found = []
    for step in steps:
        scaler.after_update() if step == "." else scaler.after_overflow()
        found.append(math.log2(scaler.scale))
    return found


CASES = [
    # It doubles once `window` steps without an overflow lie behind it, at the next such step; then
    # every `window` steps.
    (LossScale(window=1), "....", [16, 17, 18, 19]),
    (LossScale(window=2), ".......", [16, 16, 17, 17, 18, 18, 19]),
    (LossScale(window=3), "........", [16, 16, 16, 17, 17, 17, 18, 18]),
    # An overflow begins the window anew, whatever it did to the scale.
    (LossScale(window=2, hysteresis=1), "..!...", [16, 16, 15, 15, 15, 16]),
    (LossScale(window=2, hysteresis=9), "..!...", [16, 16, 16, 16, 16, 17]),
    # The overflow that halves is the one of that number; those after it halve, too, until the scale
    # has doubled.
    (LossScale(hysteresis=1), "!!!", [15, 14, 13]),
    (LossScale(hysteresis=2), "!!!", [16, 15, 14]),
    (LossScale(hysteresis=3), "!.!.!.!", [16, 16, 16, 16, 15, 15, 14]),
    (LossScale(window=2, hysteresis=2), "!!...!!", [16, 15, 15, 15, 16, 16, 15]),
    # With consecutive_hysteresis only overflows in a row count.
    (
        LossScale(hysteresis=2, consecutive_hysteresis=True),
        "!.!.!!.!",
        [16, 16, 16, 16, 16, 15, 15, 15],
    ),
    # The minimum need not be a power of two.
    (LossScale(initial_power=2, hysteresis=1, minimum=3.0), "!", [math.log2(3)]),
]


@pytest.mark.parametrize(("options", "steps", "expected"), CASES)
def test_every_step_of_the_rule(options: LossScale, steps: str, expected: list[float]) -> None:
    assert scales(LossScaler(options), steps) == expected


class _GrowsTooEarly(LossScaler):
    def after_update(self) -> None:
        self.stable_steps += self.stable_steps == 0
        super().after_update()


class _ForgetsToCountAnew(LossScaler):
    def after_overflow(self) -> str:
        stable = self.stable_steps
        try:
            return super().after_overflow()
        finally:
            self.stable_steps = stable


class _NeverRefills(LossScaler):
    def after_update(self) -> None:
        left = self.hysteresis_left
        super().after_update()
        self.hysteresis_left = left


class _RefillsAfterHalving(LossScaler):
    def after_overflow(self) -> str:
        before = self.scale
        text = super().after_overflow()
        if self.scale < before and self.options is not None:
            self.hysteresis_left = self.options.hysteresis
        return text


@pytest.mark.parametrize(
    "twin", [_GrowsTooEarly, _ForgetsToCountAnew, _NeverRefills, _RefillsAfterHalving]
)
def test_rules_that_are_wrong_are_rejected(twin: type[LossScaler]) -> None:
    assert any(scales(twin(options), steps) != expected for options, steps, expected in CASES)


def test_at_its_minimum_it_says_what_to_do() -> None:
    scaler = LossScaler(LossScale(initial_power=1, minimum=0.5))
    assert scaler.after_overflow() == "; the loss scale stays 2 (overflows until it halves: 1)"
    assert scaler.after_overflow() == "; the loss scale goes from 2 to 1"
    assert scaler.after_overflow() == "; the loss scale goes from 1 to 0.5"
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match=r"the loss scale is at its minimum, 0\.5; nothing was "
            r"updated.*LossScale\(minimum",
        ):
            scaler.after_overflow()
    assert scaler.scale == 0.5


def test_it_stays_within_float32() -> None:
    scaler = LossScaler(LossScale(initial_power=126, window=1))
    assert scales(scaler, "....") == [126, 127, 127, 127]


@pytest.mark.parametrize(
    ("options", "scale", "active"), [(None, 1.0, False), (1.0, 1.0, False), (128, 128.0, True)]
)
def test_a_fixed_scale_never_moves(options: Any, scale: float, active: bool) -> None:
    scaler = LossScaler(options)
    assert (scaler.scale, scaler.active, scaler.state()) == (scale, active, None)
    assert scales(scaler, "..!!..!") == [math.log2(scale)] * 7


@pytest.mark.parametrize(
    ("option", "value", "kind", "text"),
    [
        ("initial_power", 1.5, TypeError, "initial_power has 1.5; expected a whole number"),
        ("initial_power", -1, ValueError, "initial_power has -1; expected at least 0"),
        ("initial_power", 128, ValueError, "initial_power has 128; expected at most 127"),
        ("window", 0, ValueError, "window has 0; expected at least 1"),
        ("window", True, TypeError, "window has True"),
        ("hysteresis", 0, ValueError, "hysteresis has 0; expected at least 1"),
        ("minimum", 0.0, ValueError, "minimum has 0.0; expected more than 0"),
        ("minimum", float("nan"), ValueError, "minimum has nan"),
        ("minimum", 2.0**17, ValueError, "minimum has 131072.0"),
        ("minimum", "1", TypeError, "minimum has '1'; expected a number"),
        (
            "consecutive_hysteresis",
            1,
            TypeError,
            "consecutive_hysteresis has 1; expected True or False",
        ),
    ],
)
def test_bad_options(option: str, value: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"LossScale: {text}"):
        LossScale(**{option: value})


def test_the_state_goes_on_where_it_was() -> None:
    options = LossScale(window=3, hysteresis=3)
    steps = ".!..!....!!!..."
    for cut in range(len(steps)):
        whole, first, second = LossScaler(options), LossScaler(options), LossScaler(options)
        expected = scales(whole, steps)
        scales(first, steps[:cut])
        second.load_state(first.state())
        assert scales(second, steps[cut:]) == expected[cut:]


def test_a_loaded_scale_is_not_below_the_minimum() -> None:
    scaler = LossScaler(LossScale(minimum=8.0))
    scaler.load_state({"scale": 2.0, "stable_steps": 0, "hysteresis_left": 1})
    assert scaler.scale == 8.0


@pytest.mark.parametrize(
    "state", [3, {"scale": 1.0}, {"scale": "1", "stable_steps": 0, "hysteresis_left": 1}]
)
def test_a_state_that_is_none(state: Any) -> None:
    with pytest.raises(TypeError, match=r"load: state_dict\[.loss_scale.\]"):
        LossScaler(LossScale()).check_state("load", state)


@pytest.mark.parametrize(
    ("key", "value"),
    [("scale", 0.0), ("scale", -1.0), ("stable_steps", -1), ("hysteresis_left", 0)],
)
def test_a_state_that_no_scale_had(key: str, value: float) -> None:
    scaler = LossScaler(LossScale())
    state = scaler.state()
    assert state is not None
    with pytest.raises(ValueError, match=r"expected a scale above 0 and counts"):
        scaler.check_state("load", state | {key: value})
