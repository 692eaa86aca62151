"""DeepSpeed's learning rate schedules by their own names, and the "scheduler" section of a
configuration.

Invariants: learning rates are DeepSpeed's, bit for bit (the order of operations is part of a
formula); a schedule's state is its iteration alone, so state dicts exchange with DeepSpeed's.
Values are checked before the optimizer is changed. Source: the schedules documented at
https://deepspeed.readthedocs.io/en/latest/schedulers.html, compared with version 0.19.8.
"""

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shardcore.deepspeed.checks import (
    BELOW_1,
    COUNT,
    FINITE,
    FLAG,
    NOT_NEGATIVE,
    POSITIVE,
    SIZE,
    Check,
    integer,
    word,
)

logger = logging.getLogger("shardcore")

# One number, or a list of one for each param_group; in a schedule always a list.
_PerGroup: TypeAlias = Any
_PER_GROUP = (
    *("lr_range_test_min_lr", "warmup_min_lr", "warmup_max_lr"),
    *("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"),
)
_BETA2 = 0.99  # DeepSpeed's OneCycle sets it beside the momentum, whatever the optimizer had

# NOT_NEGATIVE, for arguments that are not here.
_CHECKS: dict[str, Check] = {
    "last_batch_iteration": integer(-1, math.inf, "at least -1"),
    "lr_range_test_step_size": COUNT,
    "lr_range_test_step_rate": FINITE,
    "lr_range_test_staircase": FLAG,
    "cycle_first_step_size": POSITIVE,
    "cycle_first_stair_count": integer(-math.inf, math.inf, "a whole number"),
    "cycle_second_stair_count": integer(-math.inf, math.inf, "a whole number"),
    "cycle_momentum": FLAG,
    "cycle_min_mom": BELOW_1,
    "cycle_max_mom": BELOW_1,
    "decay_mom_rate": FINITE,
    "warmup_num_steps": SIZE,
    "warmup_type": word("log", "linear", expected='"log" or "linear"'),
}


class _Schedule(LRScheduler):
    """The mechanics of all schedules. A subclass adds its arguments, as a dataclass, and a formula,
    get_lr. `last_batch_iteration`: steps taken so far, less one; -1 before the first.

    They are torch's LRSchedulers for code that asks (Lightning does), but LRScheduler.__init__ is
    not run: it would take a step, and add "initial_lr" to the param_groups. Arithmetic is in
    double, of tensor learning rates, too, which are filled.
    """

    _step_count = 0  # as in LRScheduler: Accelerate's AcceleratedScheduler adds to it
    optimizer: Any
    last_batch_iteration: int

    def __post_init__(self) -> None:
        """Check the arguments. Set the first learning rates, unless an iteration is given."""
        arguments = dict(vars(self))
        optimizer = arguments.pop("optimizer")
        if not isinstance(optimizer, Optimizer):
            self.optimizer = getattr(optimizer, "optimizer", None)
        if not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"{type(self).__name__}: optimizer has type {type(optimizer).__name__}; expected a "
                "torch.optim.Optimizer, or an object whose attribute optimizer is one"
            )
        self._last_lr = []
        self._initial_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        for name, value in arguments.items():
            setattr(self, name, self._checked(name, value))
        if self.last_batch_iteration == -1:
            self._set_lr()

    def _checked(self, name: str, value: Any) -> Any:
        check, where = _CHECKS.get(name, NOT_NEGATIVE), f"{type(self).__name__}: {name}"
        if name not in _PER_GROUP:
            return check(where, value)
        groups = len(self.optimizer.param_groups)
        if name == "warmup_max_lr" and value is None:
            return self._initial_lrs
        if not isinstance(value, list | tuple):
            return [check(where, value)] * groups
        if len(value) != groups:
            raise ValueError(
                f"{where} has {len(value)} values; expected one number, or {groups} (the "
                f"param_groups)"
            )
        return [check(f"{where}[{i}]", one) for i, one in enumerate(value)]

    def _set_lr(self) -> None:
        groups, lrs = self.optimizer.param_groups, self.get_lr()
        if len(groups) != len(lrs):
            raise ValueError(
                f"{type(self).__name__}: optimizer has {len(groups)} param_groups; expected "
                f"{len(lrs)}, as when the schedule was made"
            )
        self._last_lr = lrs
        for group, lr in zip(groups, lrs, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rates that were set last, or that belong to the state loaded
        since. ValueError without any.
        """
        if not self._last_lr:
            raise ValueError(
                f"get_last_lr: this {type(self).__name__} set no learning rate yet; call step() or "
                "load_state_dict first"
            )
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the learning rates of the next iteration, or of the one given."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = self._checked("last_batch_iteration", last_batch_iteration)
        self._set_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return {"last_batch_iteration": int}, as DeepSpeed does."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state, DeepSpeed's too. The optimizer keeps its learning rates until
        step(). Raises ValueError.
        """
        if set(state_dict) != {"last_batch_iteration"}:
            raise ValueError(
                f"load_state_dict: the keys of state_dict are {list(state_dict)}; expected "
                f"last_batch_iteration alone, the state of a {type(self).__name__} (this state is "
                "from another scheduler)"
            )
        self.last_batch_iteration = self._checked("last_batch_iteration", *state_dict.values())
        self._last_lr = self.get_lr()


@dataclass(eq=False, repr=False)
class LRRangeTest(_Schedule):
    """Raise the learning rate without end, to find the largest that trains: min_lr * (1 + step_rate
    * n / step_size). n is the number of steps.

    lr_range_test_min_lr: a number, or one for each param_group.
    lr_range_test_step_size: in steps.
    lr_range_test_staircase: True raises the learning rate only at whole multiples of step_size.

    Raises ValueError or TypeError.
    """

    optimizer: Any
    lr_range_test_min_lr: _PerGroup = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: int = -1

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each param_group at `last_batch_iteration`."""
        intervals = (self.last_batch_iteration + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        increase = 1 + self.lr_range_test_step_rate * intervals
        return [lr * increase for lr in self.lr_range_test_min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        """Set the learning rates of the next iteration, or of the one given."""
        super().step(batch_iteration)


@dataclass(eq=False, repr=False)
class OneCycle(_Schedule):
    """Raise the learning rate from min to max and lower it again, and move momentum in the other
    direction. Then decay the learning rate.

    cycle_min_lr, cycle_max_lr, cycle_min_mom, cycle_max_mom: a number, or one for each param_group.

    Sizes are in steps. The default size of the second half is the size of the first. Stair counts
    are the number of stairs of a half. 0, the default, moves at every step; the default of the
    second half is the count of the first.

    After n steps past the cycle the learning rate is min_lr / (1 + decay_lr_rate * n /
    decay_step_size), and the momentum is max_mom * (1 + decay_mom_rate * n / decay_step_size). A
    size of 0 means no decay.

    cycle_momentum sets `betas` to (momentum, 0.99), as DeepSpeed does. For optimizers without betas
    it is off, with a warning. Raises ValueError or TypeError.
    """

    optimizer: Any
    cycle_min_lr: _PerGroup
    cycle_max_lr: _PerGroup
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = 2000
    cycle_second_step_size: Any = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: Any = None
    decay_step_size: float = 0
    cycle_momentum: bool = True
    cycle_min_mom: _PerGroup = 0.8
    cycle_max_mom: _PerGroup = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1

    def __post_init__(self) -> None:
        """See above; set the smallest momentum, too."""
        if self.cycle_second_step_size is None:
            self.cycle_second_step_size = self.cycle_first_step_size
        if self.cycle_second_stair_count is None:
            self.cycle_second_stair_count = self.cycle_first_stair_count
        super().__post_init__()
        if self.cycle_momentum and "betas" not in self.optimizer.defaults:
            logger.warning(
                "OneCycle: %s does not use betas, so its momentum is not changed",
                type(self.optimizer).__name__,
            )
            self.cycle_momentum = False
        if self.cycle_momentum and self.last_batch_iteration == -1:
            self._set_betas([(momentum, _BETA2) for momentum in self.cycle_min_mom])

    def _height(self) -> float:
        """Return how far the learning rate is from min (0) to max (1)."""
        first: float = self.cycle_first_step_size
        second: float = self.cycle_second_step_size
        total, iteration = first + second, self.last_batch_iteration + 1
        x = 1.0 + iteration / total - math.floor(1 + iteration / total)
        top = first / total
        rising = x <= top
        stairs: int = self.cycle_first_stair_count if rising else self.cycle_second_stair_count
        if stairs <= 0:
            return x / top if rising else (x - 1) / (top - 1)
        # not x, which is rounded, and may be just below a stair
        within = iteration % total
        stair = within * stairs / first if within <= first else (total - within) * stairs / second
        return math.floor(stair) / stairs

    def _decay(self) -> float | None:
        """Return the intervals of decay so far, None within the cycle."""
        total = self.cycle_first_step_size + self.cycle_second_step_size
        if self.last_batch_iteration < total:
            return None
        steps: float = self.last_batch_iteration - total + 1
        return steps / self.decay_step_size if self.decay_step_size else 0.0

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each param_group at `last_batch_iteration`."""
        limits, decay = zip(self.cycle_min_lr, self.cycle_max_lr, strict=True), self._decay()
        if decay is None:
            height = self._height()
            return [low + (high - low) * height for low, high in limits]
        return [low / (1 + self.decay_lr_rate * decay) for low, _ in limits]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each param_group at `last_batch_iteration`; None without
        cycle_momentum.
        """
        if not self.cycle_momentum:
            return None
        limits, decay = zip(self.cycle_min_mom, self.cycle_max_mom, strict=True), self._decay()
        if decay is None:
            height = self._height()
            return [(high - (high - low) * height, _BETA2) for low, high in limits]
        return [(high * (1 + self.decay_mom_rate * decay), _BETA2) for _, high in limits]

    def _set_betas(self, betas: Sequence[tuple[float, float]]) -> None:
        for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = pair

    def step(self, batch_iteration: int | None = None) -> None:
        """Set learning rates and momentum of the next iteration, or of the one given."""
        super().step(batch_iteration)
        if (betas := self.get_mom()) is not None:
            self._set_betas(betas)


class _Warmup(_Schedule):
    """A schedule that begins with a warm-up."""

    warmup_num_steps: int
    warmup_type: str

    def __post_init__(self) -> None:
        """See above."""
        super().__post_init__()
        self.warmup_num_steps = max(2, self.warmup_num_steps)  # 1 would divide by log(1)
        total = getattr(self, "total_num_steps", math.inf)
        if total < self.warmup_num_steps:
            logger.warning(
                "%s: total_num_steps is %g, less than the warm-up's %d",
                type(self).__name__,
                total,
                self.warmup_num_steps,
            )

    def _warmup(self) -> float | None:
        """Return the share of the warm-up that is done, None after it."""
        steps = self.last_batch_iteration
        if steps < 0:
            return 0.0
        if steps >= self.warmup_num_steps:
            return None
        if self.warmup_type == "linear":
            return steps / self.warmup_num_steps
        return 1.0 / math.log(self.warmup_num_steps) * math.log(steps + 1)


@dataclass(eq=False, repr=False)
class WarmupLR(_Warmup):
    """Raise the learning rate from warmup_min_lr to warmup_max_lr within warmup_num_steps, and keep
    it.

    warmup_min_lr, warmup_max_lr: a number, or one for each param_group. Default of warmup_max_lr:
        the learning rate of the group.
    warmup_type: "log", by the logarithm of the step, or "linear".
    warmup_num_steps: at least 2. 0 (set by trainers without a warm-up) and 1 mean 2.

    Raises ValueError or TypeError.
    """

    optimizer: Any
    warmup_min_lr: _PerGroup = 0.0
    warmup_max_lr: _PerGroup = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def _after_warmup(self) -> float:
        return 1.0

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each param_group at `last_batch_iteration`."""
        warmup = self._warmup()
        share = self._after_warmup() if warmup is None else warmup
        limits = zip(self.warmup_min_lr, self.warmup_max_lr, strict=True)
        return [low + (high - low) * share for low, high in limits]


class WarmupDecayLR(WarmupLR):
    """Warm up as WarmupLR, then lower the learning rate linearly, from warmup_max_lr to
    warmup_min_lr at total_num_steps.

    total_num_steps: optimizer steps of the whole training, the warm-up's included. The other
    arguments: see WarmupLR.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: float,
        warmup_min_lr: _PerGroup = 0.0,
        warmup_max_lr: _PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Set warmup_min_lr."""
        self.total_num_steps: float = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )

    def _after_warmup(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


@dataclass(eq=False, repr=False)
class WarmupCosineLR(_Warmup):
    """Raise the learning rate from warmup_min_ratio of each param_group's own to all of it, then
    lower it along a cosine.

    It falls to cos_min_ratio at total_num_steps and stays there. The own learning rate is the
    group's when the schedule is made; before the first step the learning rate is 0, as in
    DeepSpeed. The other arguments: see WarmupLR, WarmupDecayLR.
    """

    optimizer: Any
    total_num_steps: float
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def get_lr_ratio(self) -> float:
        """Return the share of the own learning rate at `last_batch_iteration`."""
        if self.last_batch_iteration < 0:
            return 0.0
        warmup = self._warmup()
        if warmup is not None:
            return self.warmup_min_ratio + warmup * (1.0 - self.warmup_min_ratio)
        steps = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, steps / max(1, self.total_num_steps - self.warmup_num_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each param_group at `last_batch_iteration`."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self._initial_lrs]


# --- the section of a configuration ---------------------------------------------------------------

_OWN: dict[str, type[LRScheduler]] = {
    c.__name__: c for c in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(_OWN)
# DeepSpeed's names for the words of that section, which scripts import: WARMUP_MIN_LR is
# "warmup_min_lr".
_WORDS = (
    "lr_schedule lr_range_test_min_lr lr_range_test_step_rate lr_range_test_step_size "
    "lr_range_test_staircase edge_value mid_value cycle_first_step_size cycle_first_stair_count "
    "cycle_second_step_size cycle_second_stair_count decay_step_size cycle_min_lr cycle_max_lr "
    "decay_lr_rate cycle_min_mom cycle_max_mom decay_mom_rate warmup_min_lr warmup_max_lr "
    "warmup_num_steps warmup_type warmup_min_ratio cos_min_ratio total_num_steps"
)
CONSTANTS = {word.upper(): word for word in _WORDS.split()} | {
    "LR_RANGE_TEST": "LRRangeTest",
    "ONE_CYCLE": "OneCycle",
    "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR",
    "WARMUP_COSINE_LR": "WarmupCosineLR",
    "WARMUP_LOG_RATE": "log",
    "WARMUP_LINEAR_RATE": "linear",
}


# Those that a configuration may name: DeepSpeed's, and torch's that are made over an optimizer
# alone.
_NOT_ALONE = ("LRScheduler", "ChainedScheduler", "SequentialLR")
_KINDS: dict[str, Any] = _OWN | {
    name: getattr(lr_scheduler, name)
    for name in lr_scheduler.__all__
    if name not in (*_OWN, *_NOT_ALONE)
}


def _kind(where: str, name: Any) -> Any:
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError(f"{where} is {name!r}; expected one of {', '.join(_KINDS)}")
    return _KINDS[name]


def check_scheduler(where: str, value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return (type, params) of a "scheduler" section, None if it names no type. Values of params
    are checked by `make`.

    type: a schedule of this file, or a class of torch.optim.lr_scheduler, as in DeepSpeed. where:
    what messages begin with. Raises TypeError, or ValueError for an unknown type or
    parameter, one that is missing, and for "auto".
    """
    if not isinstance(value, Mapping) or not {*value} <= {"type", "params"}:
        raise TypeError(
            f'{where} is {value!r}; expected an object {{"type": ..., "params": {{...}}}}, '
            "without other keys"
        )
    name, params = value.get("type"), value.get("params") or {}
    if not isinstance(params, Mapping):
        raise TypeError(
            f"{where}.params is {params!r}; expected an object with the arguments of the scheduler"
        )
    if name is None and not params:
        return None
    arguments = inspect.signature(_kind(f"{where}.type", name))
    for key in params:
        if isinstance(params[key], str) and params[key] == "auto":
            raise ValueError(
                f'{where}.params.{key} is "auto"; expected a value (a trainer must fill it in '
                "first)"
            )
    problem = None
    try:
        arguments.bind(None, **params)
    except TypeError as error:
        problem = str(error)
    if problem:  # not inside except: the error would hold this frame, and all that call it
        expected = ", ".join([*arguments.parameters][1:])
        raise ValueError(f"{where}.params: {name} {problem}; expected its arguments: {expected}")
    return str(name), dict(params)


def make(name: str, params: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """Return the scheduler of that name over `optimizer`, whose learning rates it sets.

    Raises ValueError for another name, and what the scheduler raises for its arguments.
    """
    scheduler: LRScheduler = _kind("make: name", name)(optimizer, **params)
    return scheduler
