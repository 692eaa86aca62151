"""DeepSpeed's schedules: every learning rate and momentum against DeepSpeed's own, and a table
of values without it.
"""

import copy
import inspect
import logging
import math
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import shardcore
from shardcore.deepspeed import lr_schedules
from shardcore.deepspeed.lr_schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    check_scheduler,
    make,
)

STEPS = 300
LRS = (3e-3, 0.7, 1e-5)  # of the param_groups, before a schedule changes them


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    """DeepSpeed's module."""
    pytest.importorskip("deepspeed", reason="comparisons with DeepSpeed need it")
    from deepspeed.runtime import lr_schedules as module
    from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns whenever a schedule is made
    yield module
    logger.setLevel(level)


def adam(groups: int = 3, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    params = [torch.nn.Parameter(torch.full((3,), float(i + 1))) for i in range(groups)]
    return kind([{"params": [p], "lr": lr} for p, lr in zip(params, LRS, strict=False)], **options)


def test_constants_have_deepspeeds_values(theirs: Any) -> None:
    expected = {
        name: value
        for name, value in vars(theirs).items()
        if name.isupper() and isinstance(value, str)
    }
    assert expected == lr_schedules.CONSTANTS


def test_constants_are_names_of_the_module_that_scripts_import() -> None:
    module = shardcore.runtime.lr_schedules  # type: ignore[attr-defined]
    assert (module.WARMUP_LR, module.WARMUP_MIN_LR, module.TOTAL_NUM_STEPS) == (
        "WarmupLR",
        "warmup_min_lr",
        "total_num_steps",
    )


# --- every parameter, drawn -----------------------------------------------------------------------


FROM = "last_batch_iteration"
REQUIRED = ("total_num_steps", "cycle_min_lr", "cycle_max_lr")


def drawn(name: str, seed: int) -> dict[str, Any]:
    """Parameters of any values; the last of 4 goes on from an iteration."""
    rng = random.Random(f"{name} {seed}")
    size, total = rng.choice([1, 2, rng.randint(3, 200)]), rng.randint(1, 300)
    rates = [rng.uniform(0, 1) for _ in range(3)]
    warmup = {"warmup_num_steps": size, "warmup_type": rng.choice(["log", "linear"])}
    limits = {"warmup_min_lr": rates, "warmup_max_lr": rng.uniform(0, 1), **warmup}
    cosine = {"warmup_min_ratio": rng.random(), "cos_min_ratio": rng.random(), **warmup}
    params: dict[str, dict[str, Any]] = {
        "LRRangeTest": {
            "lr_range_test_min_lr": rates,
            "lr_range_test_step_size": size,
            "lr_range_test_step_rate": rng.uniform(0, 3),
            "lr_range_test_staircase": rng.random() < 0.5,
        },
        "OneCycle": {
            "cycle_min_lr": rates,
            "cycle_max_lr": rng.uniform(0, 2),
            "cycle_first_step_size": rng.uniform(1, 100),
            "cycle_second_step_size": rng.uniform(0, 100),
            "cycle_first_stair_count": rng.randint(-1, 20),
            "cycle_second_stair_count": rng.randint(-1, 20),
            "decay_step_size": rng.randint(0, 20),
            "decay_lr_rate": rng.uniform(0, 1),
            "cycle_min_mom": [0.9 * rate for rate in rates],
            "cycle_max_mom": rng.uniform(0, 0.99),
            "decay_mom_rate": rng.uniform(-0.1, 0.1),
            "cycle_momentum": seed % 5 != 4,
        },
        "WarmupLR": limits,
        "WarmupDecayLR": {"total_num_steps": total, **limits},
        "WarmupCosineLR": {"total_num_steps": total, **cosine},
    }
    return params[name] | ({FROM: rng.randint(0, 250)} if seed % 4 == 3 else {})


def seen(schedule: Any) -> tuple[Any, ...]:
    """What a step leaves, and what the methods return."""
    groups = [(group["lr"], group["betas"]) for group in schedule.optimizer.param_groups]
    momenta = schedule.get_mom() if hasattr(schedule, "get_mom") else None
    last = schedule.get_last_lr() if getattr(schedule, "_last_lr", None) else None
    return groups, schedule.get_lr(), momenta, last, schedule.state_dict()


def trace(kind: Any, params: dict[str, Any], steps: int = STEPS) -> list[tuple[Any, ...]]:
    schedule = kind(adam(), **copy.deepcopy(params))
    values = [seen(schedule)]
    for _ in range(steps):
        schedule.step()
        values.append(seen(schedule))
    # DeepSpeed's get_last_lr of OneCycle raises before the first step
    if hasattr(schedule, "get_mom"):
        values[0] = (*values[0][:3], None, values[0][4])
    return values


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_equals_deepspeed_for_drawn_parameters(name: str, theirs: Any) -> None:
    for seed in range(24):
        params = drawn(name, seed)
        # half of them at their defaults, of which some are None
        for key in [*params] if seed % 2 else ():
            if key not in REQUIRED and random.Random(f"{key} {seed}").random() < 0.5:
                del params[key]
        assert trace(getattr(lr_schedules, name), params) == trace(getattr(theirs, name), params), (
            params
        )


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_arguments_and_defaults_are_deepspeeds(name: str, theirs: Any) -> None:
    def arguments(function: Any) -> list[tuple[str, Any]]:
        return [
            (argument.name, argument.default)
            for argument in inspect.signature(function).parameters.values()
        ]

    ours = getattr(lr_schedules, name)
    assert arguments(ours.__init__) == arguments(getattr(theirs, name).__init__)
    assert arguments(ours.step) == arguments(getattr(theirs, name).step)


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_a_given_iteration_is_taken(name: str, theirs: Any) -> None:
    params = drawn(name, 0)
    ours, reference = (getattr(of, name)(adam(), **params) for of in (lr_schedules, theirs))
    for iteration in (17, 3, 250, 0):
        ours.step(iteration)
        reference.step(iteration)
        assert seen(ours) == seen(reference)


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_state_dicts_go_both_ways_in_the_middle_of_a_run(
    name: str, ours_first: bool, theirs: Any
) -> None:
    modules = (lr_schedules, theirs) if ours_first else (theirs, lr_schedules)
    before, after = (getattr(module, name) for module in modules)
    for seed in range(4):
        params = drawn(name, seed)
        whole = trace(before, params)
        first = before(adam(), **params)
        for _ in range(100):
            first.step()
        second = after(adam(), **params)
        second.load_state_dict(first.state_dict())
        assert second.get_lr() == whole[100][1]
        for step in range(101, STEPS + 1):
            second.step()
            assert seen(second) == whole[step], step


# --- broken twins ---------------------------------------------------------------------------------


class Late(WarmupLR):
    """Sets the learning rate of the iteration before."""

    def step(self, last_batch_iteration: int | None = None) -> None:
        self._set_lr()
        self.last_batch_iteration += 1


class OneGroup(WarmupDecayLR):
    """Changes the first param_group only."""

    def _set_lr(self) -> None:
        others = [group["lr"] for group in self.optimizer.param_groups[1:]]
        super()._set_lr()
        for group, lr in zip(self.optimizer.param_groups[1:], others, strict=True):
            group["lr"] = lr


class EndsLate(WarmupDecayLR):
    """Decays over all steps, not over those after the warm-up."""

    def _after_warmup(self) -> float:
        return max(0.0, (self.total_num_steps - self.last_batch_iteration) / self.total_num_steps)


class LateCosine(WarmupCosineLR):
    """Is a step behind."""

    def get_lr_ratio(self) -> float:
        self.last_batch_iteration -= 1
        ratio = super().get_lr_ratio()
        self.last_batch_iteration += 1
        return ratio


class KeepsBetas(OneCycle):
    """Leaves the momentum as it was."""

    def _set_betas(self, betas: Any) -> None:
        pass


class NoDecay(OneCycle):
    """Stays at the smallest learning rate after the cycle."""

    def _decay(self) -> float | None:
        return None if super()._decay() is None else 0.0


class Smooth(LRRangeTest):
    """Has no stairs."""

    def get_lr(self) -> Any:
        self.lr_range_test_staircase = False
        return super().get_lr()


TWINS = [Late, OneGroup, EndsLate, LateCosine, KeepsBetas, NoDecay, Smooth]


LINEAR = {"warmup_max_lr": 1.0, "warmup_num_steps": 8, "warmup_type": "linear"}
COSINE = {"warmup_min_ratio": 0.5, "warmup_num_steps": 8, "warmup_type": "linear"}
CYCLE = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 8}
RANGE = {"lr_range_test_min_lr": 0.25, "lr_range_test_step_size": 4}
# schedule, arguments, {steps taken: learning rate of a group whose own is 0.7, and of cycles its
# first beta}, by hand from the formulas.
TABLE: list[tuple[Any, dict[str, Any], dict[int, Any]]] = [
    (WarmupLR, LINEAR, {0: 0.0, 1: 0.0, 2: 0.125, 8: 0.875, 9: 1.0, 50: 1.0}),
    (
        WarmupLR,
        {"warmup_min_lr": 0.1, "warmup_num_steps": 8},  # log of 2 and 4 over that of 8
        {0: 0.1, 1: 0.1, 2: 0.3, 4: 0.5, 8: 0.7, 9: 0.7},
    ),
    (
        WarmupDecayLR,
        {"total_num_steps": 16, **LINEAR},
        {0: 0.0, 5: 0.5, 9: 1.0, 13: 0.5, 17: 0.0, 30: 0.0},
    ),
    (
        WarmupCosineLR,
        {"total_num_steps": 16, "cos_min_ratio": 0.0, **COSINE},
        {0: 0.0, 1: 0.35, 5: 0.525, 12: 0.35, 16: 0.0, 30: 0.0},
    ),
    (
        OneCycle,
        {"decay_step_size": 4, "decay_lr_rate": 1.0, **CYCLE},
        {
            0: (1.0, 0.8),
            4: (2.0, 0.85),
            8: (3.0, 0.8),
            12: (2.0, 0.85),
            16: (1.0, 0.9),
            17: (0.8, 0.9),
            20: (0.5, 0.9),
        },
    ),
    (
        OneCycle,
        {"cycle_first_stair_count": 2, **CYCLE},
        {
            4: (2.0, 0.85),
            7: (2.0, 0.85),
            8: (3.0, 0.8),
            9: (2.0, 0.85),
            12: (2.0, 0.85),
            13: (1.0, 0.9),
        },
    ),
    (LRRangeTest, {"lr_range_test_step_rate": 2.0, **RANGE}, {0: 0.25, 1: 0.375, 4: 0.75}),
    (
        LRRangeTest,
        {"lr_range_test_staircase": True, **RANGE},
        {0: 0.25, 3: 0.25, 4: 0.5, 8: 0.75},
    ),
]


def wrong(kind: Any, params: dict[str, Any], expected: dict[int, Any]) -> list[int]:
    """After how many steps the group has other values than expected."""
    schedule, steps_with_others = kind(adam(), **params), []
    group = schedule.optimizer.param_groups[1]
    for steps in range(max(expected) + 1):
        values = group["lr"], group["betas"][0]
        wanted = expected.get(steps, values)
        wanted = wanted if isinstance(wanted, tuple) else (wanted, 0.9)
        if values != pytest.approx(wanted, rel=1e-12, abs=1e-15):
            steps_with_others.append(steps)
        schedule.step()
    return steps_with_others


@pytest.mark.parametrize(("kind", "params", "expected"), TABLE)
def test_values_by_hand(kind: Any, params: dict[str, Any], expected: dict[int, Any]) -> None:
    assert wrong(kind, params, expected) == []


@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_twin_differs_from_the_values_by_hand(twin: Any) -> None:
    assert any(
        wrong(twin, params, expected)
        for kind, params, expected in TABLE
        if kind is twin.__bases__[0]
    )


# --- over optimizers ------------------------------------------------------------------------------


def test_tensor_learning_rates_are_filled() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    lr = optimizer.param_groups[0]["lr"]
    schedule = WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    assert lr.item() == 0.0
    values = []
    for _ in range(6):
        schedule.step()
        values.append(lr.item())
    assert optimizer.param_groups[0]["lr"] is lr
    assert values == [0.0, 0.125, 0.25, 0.375, 0.5, 0.5]
    assert schedule.get_last_lr() == [0.5]


def test_an_optimizer_inside_another_object_is_found() -> None:
    inner = adam()
    assert WarmupLR(SimpleNamespace(optimizer=inner)).optimizer is inner
    with pytest.raises(
        TypeError,
        match=r"WarmupLR: optimizer has type SimpleNamespace; expected a torch.optim.Optimizer",
    ):
        WarmupLR(SimpleNamespace(optimizer=3))


def test_momentum_is_left_alone_where_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    schedule = OneCycle(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), 0.1, 0.2)
    assert "OneCycle: SGD does not use betas" in caplog.text
    assert schedule.get_mom() is None
    schedule.step()
    assert "betas" not in schedule.optimizer.param_groups[0]


def test_no_key_is_added_to_the_groups_and_no_step_is_taken() -> None:
    optimizer = adam()
    keys, step = set(optimizer.param_groups[0]), optimizer.step
    assert WarmupLR(optimizer).state_dict() == {FROM: -1}
    assert set(optimizer.param_groups[0]) == keys
    assert optimizer.step == step


def test_the_last_learning_rates() -> None:
    schedule = WarmupLR(adam(1), 0.0, 1.0, 4, "linear", 2)
    assert schedule.optimizer.param_groups[0]["lr"] == LRS[0]  # it goes on, so nothing is set yet
    with pytest.raises(
        ValueError, match="get_last_lr: this WarmupLR set no learning rate yet; call step"
    ):
        schedule.get_last_lr()
    schedule.load_state_dict({FROM: 3})
    assert schedule.get_last_lr() == [0.75]
    assert schedule.optimizer.param_groups[0]["lr"] == LRS[0]
    schedule.step()
    assert schedule.get_last_lr() == [1.0]


def test_a_group_that_is_added_later_is_refused() -> None:
    schedule = WarmupLR(adam(2))
    schedule.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(
        ValueError,
        match="WarmupLR: optimizer has 3 param_groups; expected 2, as when the schedule was made",
    ):
        schedule.step()


# --- refusals -------------------------------------------------------------------------------------


AT_LEAST_0 = "a finite number of at least 0"


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        (WarmupLR, "warmup_num_steps", -1, "is -1; expected at least 0"),
        (WarmupLR, "warmup_type", "cosine", 'is \'cosine\'; expected "log" or "linear"'),
        (WarmupLR, "warmup_max_lr", [1.0], "has 1 values; expected one number, or 3 (the param_gr"),
        (WarmupLR, "warmup_max_lr[2]", math.nan, f"is nan; expected {AT_LEAST_0}"),
        (WarmupLR, "warmup_min_lr", -1e-3, f"is -0.001; expected {AT_LEAST_0}"),
        (WarmupLR, FROM, -2, "is -2; expected at least -1"),
        (WarmupDecayLR, "total_num_steps", -1, f"is -1; expected {AT_LEAST_0}"),
        (WarmupCosineLR, "cos_min_ratio", [0.1], "is [0.1]; expected a number"),
        (OneCycle, "cycle_max_lr", math.inf, f"is inf; expected {AT_LEAST_0}"),
        (OneCycle, "cycle_first_step_size", 0, "is 0; expected a finite number above 0"),
        (OneCycle, "cycle_second_step_size", -1, f"is -1; expected {AT_LEAST_0}"),
        (OneCycle, "cycle_max_mom", 1.0, "is 1.0; expected a number in [0, 1)"),
        (OneCycle, "cycle_momentum", "no", "is 'no'; expected true or false"),
        (LRRangeTest, "lr_range_test_step_size", 0, "is 0; expected at least 1"),
        (LRRangeTest, "lr_range_test_staircase", 1, "is 1; expected true or false"),
    ],
)
def test_a_bad_value_is_named_and_changes_nothing(
    kind: Any, name: str, value: Any, message: str
) -> None:
    optimizer, needed = adam(), inspect.signature(kind).parameters.keys() & {*REQUIRED}
    argument, of_group, _ = name.partition("[")
    params = dict.fromkeys(needed, 9.0) | {argument: [1.0, 2.0, value] if of_group else value}
    with pytest.raises((ValueError, TypeError)) as error:
        kind(optimizer, **params)
    assert str(error.value).startswith(f"{kind.__name__}: {name} {message}")
    assert [group["lr"] for group in optimizer.param_groups] == list(LRS)
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.999)}


def test_no_warmup_is_a_warmup_of_two_steps() -> None:
    assert trace(WarmupLR, {"warmup_num_steps": 0}, 5) == trace(
        WarmupLR, {"warmup_num_steps": 2}, 5
    )


def test_a_training_shorter_than_its_warmup_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for kind in (WarmupDecayLR, WarmupCosineLR):
        caplog.clear()
        kind(adam(), total_num_steps=5, warmup_num_steps=10)
        assert f"{kind.__name__}: total_num_steps is 5, less than the warm-up's 10" in caplog.text


def test_the_state_of_another_scheduler_is_refused() -> None:
    schedule, other = WarmupLR(adam()), lr_scheduler.ConstantLR(adam())
    with pytest.raises(ValueError, match=r"load_state_dict: the keys of state_dict are \['factor'"):
        schedule.load_state_dict(other.state_dict())
    with pytest.raises(TypeError, match="WarmupLR: last_batch_iteration is None; expected a whole"):
        schedule.load_state_dict({FROM: None})
    assert schedule.state_dict() == {FROM: -1}


# --- the section of a configuration ---------------------------------------------------------------


def test_a_section_makes_its_schedule() -> None:
    section = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3}}
    checked = check_scheduler("scheduler", section)
    assert checked == ("WarmupDecayLR", section["params"])
    schedule = make(*checked, adam())
    assert isinstance(schedule, WarmupDecayLR)
    assert isinstance(schedule, lr_scheduler.LRScheduler)
    assert (schedule.total_num_steps, schedule.warmup_num_steps) == (9, 3)
    assert type(schedule.last_batch_iteration) is int
    assert check_scheduler("scheduler", {"type": "WarmupLR"}) == ("WarmupLR", {})
    assert (
        check_scheduler("scheduler", {})
        is check_scheduler("scheduler", {"type": None, "params": {}})
        is None
    )


def test_torchs_schedulers_go_by_their_names() -> None:
    own, expected = (
        make("CosineAnnealingLR", {"T_max": 7}, adam()),
        lr_scheduler.CosineAnnealingLR(adam(), T_max=7),
    )
    assert type(own) is lr_scheduler.CosineAnnealingLR
    for schedule in (own, expected) * 5:
        schedule.optimizer.step()
        schedule.step()
    assert own.get_last_lr() == expected.get_last_lr()
    halved = make("LambdaLR", {"lr_lambda": lambda step: 0.5}, adam())
    assert halved.get_last_lr() == [lr / 2 for lr in LRS]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("WarmupLR", "config scheduler is 'WarmupLR'; expected an object"),
        (
            {"type": "WarmupLr"},
            "scheduler.type is 'WarmupLr'; expected one of LRRangeTest, .*WarmupLR, "
            ".*CosineAnnealingLR",
        ),
        ({"type": "Optimizer"}, "scheduler.type is 'Optimizer'"),
        ({"type": "ChainedScheduler"}, "scheduler.type is 'ChainedScheduler'"),
        ({"type": [3]}, r"scheduler.type is \[3\]; expected one of"),
        (
            {"params": {"warmup_min_lr": 0.0}},
            "scheduler.type is None; expected one of LRRangeTest, OneCycle",
        ),
        (
            {"type": "WarmupLR", "param": {}},
            r"scheduler is \{.*; expected an object .* without other keys",
        ),
        ({"type": "WarmupLR", "params": [1]}, r"scheduler.params is \[1\]; expected an object"),
        (
            {"type": "WarmupLR", "params": {"warmup_steps": 3}},
            "scheduler.params: WarmupLR got an unexpected keyword argument 'warmup_steps'; "
            "expected .*, warmup_num_steps",
        ),
        (
            {"type": "WarmupLR", "params": {"optimizer": 3}},
            "scheduler.params: WarmupLR .* 'optimizer'",
        ),
        ({"type": "StepLR", "params": {"step_sizes": 3}}, "scheduler.params: StepLR .*'step_size"),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            'scheduler.params.warmup_num_steps is "auto"; expected a',
        ),
        (
            {"type": "WarmupDecayLR"},
            "scheduler.params: WarmupDecayLR missing a required argument: 'total_num_steps'",
        ),
    ],
)
def test_a_bad_section_is_refused_by_name(section: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        check_scheduler("config scheduler", section)


def test_make_checks_names_and_values() -> None:
    with pytest.raises(ValueError, match=r"make: name is 'warmuplr'; expected one of .*WarmupLR"):
        make("warmuplr", {}, adam())
    with pytest.raises(
        ValueError, match="WarmupLR: warmup_max_lr has 2 values; expected one number"
    ):
        make("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, adam())
