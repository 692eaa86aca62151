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
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

logger = logging.getLogger("shardcore")

_BETA2 = 0.99  # what DeepSpeed's OneCycle sets beside the momentum, whatever the optimizer had


class _Schedule(LRScheduler):
    """What the schedules share. `last_batch_iteration`: steps taken so far, less one; -1 before the
    first.

    They are torch's LRSchedulers for code that asks (Lightning does), but LRScheduler.__init__ is
    not run: it would take a step, and add "initial_lr" to the param_groups. Arithmetic is in
    double, of tensor learning rates, too, which are filled.
    """

    _step_count = 0  # as in LRScheduler: Accelerate's AcceleratedScheduler adds to it

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        found = (
            optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", None)
        )
        if not isinstance(found, Optimizer):
            raise TypeError(
                f"{self._op}: optimizer has type {type(optimizer).__name__}; expected a "
                f"torch.optim.Optimizer, or an object that has one as its attribute optimizer"
            )
        self.optimizer = found
        self.last_batch_iteration = _count(
            self._op, "last_batch_iteration", last_batch_iteration, -1
        )
        self._last_lr = []

    @property
    def _op(self) -> str:
        return type(self).__name__

    def _begin(self) -> None:
        """Set the first learning rates, unless the schedule was made to go on from an iteration."""
        if self.last_batch_iteration == -1:
            self._set_lr()

    def _set_lr(self) -> None:
        groups, lrs = self.optimizer.param_groups, self.get_lr()
        if len(groups) != len(lrs):
            raise ValueError(
                f"{self._op}: optimizer has {len(groups)} param_groups; expected {len(lrs)}, as "
                f"when the schedule was made"
            )
        self._last_lr = lrs
        for group, lr in zip(groups, lrs, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _per_group(self, name: str, value: Any, most: float = math.inf) -> list[float]:
        """Return a number of each param_group, from 0 to below `most`; `value` is one for all,
        or a list.
        """
        groups = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [_number(self._op, name, value, 0.0, most)] * groups
        if len(value) != groups:
            raise ValueError(
                f"{self._op}: {name} has {len(value)} values; expected one number, or {groups} "
                f"(the param_groups)"
            )
        return [_number(self._op, f"{name}[{i}]", item, 0.0, most) for i, item in enumerate(value)]

    def _group_lrs(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each param_group at `last_batch_iteration`."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rates that were set last, or that belong to the state loaded
        since. ValueError without any.
        """
        if not self._last_lr:
            raise ValueError(
                f"get_last_lr: this {self._op} has set no learning rate yet; expected step() or "
                f"load_state_dict first"
            )
        return list(self._last_lr)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the learning rates of the next iteration, or of the one given."""
        self._step(last_batch_iteration)

    def _step(self, iteration: int | None) -> None:
        self.last_batch_iteration = (
            self.last_batch_iteration + 1
            if iteration is None
            else _count("step", "the iteration", iteration, -1)
        )
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
                f"load_state_dict: state_dict has the keys {list(state_dict)}; expected "
                f"last_batch_iteration alone (the state "
                f"of a {self._op}; this one is another scheduler's)"
            )
        name = "state_dict['last_batch_iteration']"
        self.last_batch_iteration = _count(
            "load_state_dict", name, state_dict["last_batch_iteration"], -1
        )
        self._last_lr = self.get_lr()


class LRRangeTest(_Schedule):
    """Raise the learning rate without end, to find the largest that trains: min_lr * (1 + step_rate
    * n / step_size).

    n: steps so far. lr_range_test_min_lr: one number, or one for each param_group.
    lr_range_test_step_size: in steps.
    lr_range_test_staircase: raise it at each whole multiple of step_size only. Raises ValueError or
    TypeError.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        """Set the smallest learning rate."""
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = _count(self._op, "lr_range_test_step_size", lr_range_test_step_size, 1)
        self.step_rate = _number(self._op, "lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = _flag(self._op, "lr_range_test_staircase", lr_range_test_staircase)
        self._begin()

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each param_group at `last_batch_iteration`."""
        intervals = float(self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [lr * increase for lr in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        """Set the learning rates of the next iteration, or of the one given."""
        self._step(batch_iteration)


class OneCycle(_Schedule):
    """Raise the learning rate from min to max and lower it again, momentum the other way; then
    decay the learning rate.

    cycle_min_lr, cycle_max_lr, cycle_min_mom, cycle_max_mom: one number, or one for each
    param_group. Sizes are in steps; that of the second half is the first's by default. Stair
    counts: in how many stairs a half goes (0, the default: at every step; the second half's is the
    first's by default). After n steps past the cycle the learning rate is min_lr / (1 +
    decay_lr_rate * n / decay_step_size) and the momentum max_mom * (1 + decay_mom_rate * n /
    decay_step_size); a size of 0 means no decay. cycle_momentum sets `betas` to (momentum, 0.99),
    as DeepSpeed does, and is off, with a warning, for optimizers without betas. Raises ValueError
    or TypeError.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        """Set the smallest learning rate and momentum."""
        super().__init__(optimizer, last_batch_iteration)
        first = _number(self._op, "cycle_first_step_size", cycle_first_step_size)
        if first <= 0:
            raise ValueError(
                f"{self._op}: cycle_first_step_size has {cycle_first_step_size!r}; expected a "
                f"number above 0"
            )
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        stairs = (
            cycle_first_stair_count
            if cycle_second_stair_count is None
            else cycle_second_stair_count
        )
        self.first_step_size = first
        self.second_step_size = _number(self._op, "cycle_second_step_size", second, 0.0)
        self.total_size = self.first_step_size + self.second_step_size
        self.first_stair_count = _count(
            self._op, "cycle_first_stair_count", cycle_first_stair_count
        )
        self.second_stair_count = _count(self._op, "cycle_second_stair_count", stairs)
        self.decay_step_size = _number(self._op, "decay_step_size", decay_step_size, 0.0)
        self.min_lrs = self._per_group("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._per_group("cycle_max_lr", cycle_max_lr)
        self.decay_lr_rate = _number(self._op, "decay_lr_rate", decay_lr_rate, 0.0)
        self.cycle_momentum = _flag(self._op, "cycle_momentum", cycle_momentum)
        self.min_moms = self._per_group("cycle_min_mom", cycle_min_mom, 1.0)
        self.max_moms = self._per_group("cycle_max_mom", cycle_max_mom, 1.0)
        self.decay_mom_rate = _number(self._op, "decay_mom_rate", decay_mom_rate)
        if self.cycle_momentum and "betas" not in self.optimizer.defaults:
            logger.warning(
                "OneCycle: %s has no betas, so its momentum stays as it is",
                type(self.optimizer).__name__,
            )
            self.cycle_momentum = False
        self._begin()
        if self.cycle_momentum and self.last_batch_iteration == -1:
            self._set_betas(self.min_moms)

    def _height(self) -> float:
        """Return how far the learning rate is from min (0) to max (1)."""
        iteration = self.last_batch_iteration + 1
        cycles = iteration / self.total_size
        x = 1.0 + cycles - math.floor(1 + cycles)
        top = self.first_step_size / self.total_size
        rising = x <= top
        stairs = self.first_stair_count if rising else self.second_stair_count
        if stairs <= 0:
            return x / top if rising else (x - 1) / (top - 1)
        # not x, which is rounded, and may be just below a stair
        within = iteration % self.total_size
        if within <= self.first_step_size:
            stair = within * stairs / self.first_step_size
        else:
            stair = (self.total_size - within) * stairs / self.second_step_size
        return math.floor(stair) / stairs

    def _decay(self) -> float | None:
        """Return the intervals of decay so far, None within the cycle."""
        if self.last_batch_iteration < self.total_size:
            return None
        steps = self.last_batch_iteration - self.total_size + 1
        return steps / self.decay_step_size if self.decay_step_size else 0.0

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each param_group at `last_batch_iteration`."""
        decay = self._decay()
        if decay is not None:
            return [low / (1 + self.decay_lr_rate * decay) for low in self.min_lrs]
        height = self._height()
        return [
            low + (high - low) * height
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each param_group at `last_batch_iteration`; None without
        cycle_momentum.
        """
        if not self.cycle_momentum:
            return None
        decay = self._decay()
        if decay is not None:
            return [(high * (1 + self.decay_mom_rate * decay), _BETA2) for high in self.max_moms]
        height = self._height()
        return [
            (high - (high - low) * height, _BETA2)
            for low, high in zip(self.min_moms, self.max_moms, strict=True)
        ]

    def _set_betas(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (momentum, _BETA2)

    def step(self, batch_iteration: int | None = None) -> None:
        """Set learning rates and momentum of the next iteration, or of the one given."""
        self._step(batch_iteration)
        betas = self.get_mom()
        if betas is not None:
            self._set_betas([momentum for momentum, _ in betas])


class _Warmup(_Schedule):
    """A schedule that begins with a warm-up."""

    def __init__(
        self, optimizer: Any, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_type not in ("log", "linear"):
            raise ValueError(
                f'{self._op}: warmup_type has {warmup_type!r}; expected "log" or "linear"'
            )
        self.warmup_type = warmup_type
        # 1 would divide by log(1)
        self.warmup_num_steps = max(2, _count(self._op, "warmup_num_steps", warmup_num_steps, 0))

    def _warmup(self) -> float | None:
        """Return the share of the warm-up that is done, None after it."""
        if self.last_batch_iteration >= self.warmup_num_steps:
            return None
        if self.warmup_type == "linear":
            return self.last_batch_iteration / self.warmup_num_steps
        return 1.0 / math.log(self.warmup_num_steps) * math.log(self.last_batch_iteration + 1)

    def _warn_if_short(self, total: float) -> None:
        if total < self.warmup_num_steps:
            logger.warning(
                "%s: total_num_steps has %g, less than the warm-up's %d",
                self._op,
                total,
                self.warmup_num_steps,
            )


class WarmupLR(_Warmup):
    """Raise the learning rate from warmup_min_lr to warmup_max_lr within warmup_num_steps, and keep
    it.

    The limits are one number, or one for each param_group; warmup_max_lr is the group's own
    learning rate by default.
    warmup_type: "log", by the logarithm of the step, or "linear". warmup_num_steps: at least 2 are
    taken (0, which trainers fill in where there is no warm-up, and 1 mean 2). Raises ValueError or
    TypeError.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Set warmup_min_lr."""
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.min_lrs = self._per_group("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._per_group(
            "warmup_max_lr", self._group_lrs() if warmup_max_lr is None else warmup_max_lr
        )
        self._begin()

    def _after_warmup(self) -> float:
        return 1.0

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the learning rate of each param_group at `last_batch_iteration`."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        warmup = self._warmup()
        gamma = self._after_warmup() if warmup is None else warmup
        return [
            low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]


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
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Set warmup_min_lr."""
        # Checked before the optimizer is changed, by the next line.
        self.total_num_steps = _number(self._op, "total_num_steps", total_num_steps, 0.0)
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )
        self._warn_if_short(self.total_num_steps)

    def _after_warmup(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Raise the learning rate from warmup_min_ratio of each param_group's own to all of it, then
    lower it along a cosine.

    It falls to cos_min_ratio at total_num_steps and stays there. The own learning rate is the
    group's when the schedule is made; before the first step the learning rate is 0, as in
    DeepSpeed. The other arguments: see WarmupLR, WarmupDecayLR.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: float,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Set learning rates of 0."""
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = _number(self._op, "total_num_steps", total_num_steps, 0.0)
        self.warmup_min_ratio = _number(self._op, "warmup_min_ratio", warmup_min_ratio, 0.0)
        self.cos_min_ratio = _number(self._op, "cos_min_ratio", cos_min_ratio, 0.0)
        self.org_lrs = self._group_lrs()
        self._warn_if_short(self.total_num_steps)
        self._begin()

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
        return [lr * ratio for lr in self.org_lrs]


# --- checks of values -----------------------------------------------------------------------------


def _number(
    op: str, name: str, value: Any, least: float = -math.inf, below: float = math.inf
) -> float:
    limits = (f" of at least {least:g}" if least > -math.inf else "") + (
        f" and below {below:g}" if below < math.inf else ""
    )
    expected = (
        f"{op}: {name} has {value!r}; expected a "
        f"{'' if below < math.inf else 'finite '}number{limits}"
    )
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(expected)
    try:
        number = float(value)
    except OverflowError:  # of an int
        number = math.inf
    if not (math.isfinite(number) and least <= number < below):
        raise ValueError(expected)
    return number


def _count(op: str, name: str, value: Any, least: float = -math.inf) -> int:
    number = _number(op, name, value, least)
    if not number.is_integer():  # 1e3 is taken, as in JSON files
        raise ValueError(f"{op}: {name} has {value!r}; expected a whole number")
    return int(number)


def _flag(op: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} has {value!r}; expected True or False")
    return value


# --- the section of a configuration ---------------------------------------------------------------

_OWN: dict[str, type[LRScheduler]] = {
    c.__name__: c for c in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
VALID_LR_SCHEDULES = list(_OWN)
# DeepSpeed's names for the words of that section, which scripts import: WARMUP_MIN_LR is
# "warmup_min_lr".
_WORDS = (
    "lr_schedule lr_range_test_min_lr lr_range_test_step_rate lr_range_test_step_size "
    "lr_range_test_staircase edge_value "
    "mid_value cycle_first_step_size cycle_first_stair_count cycle_second_step_size "
    "cycle_second_stair_count decay_step_size "
    "cycle_min_lr cycle_max_lr decay_lr_rate cycle_min_mom cycle_max_mom decay_mom_rate "
    "warmup_min_lr warmup_max_lr "
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
        raise ValueError(f"{where} has {name!r}; expected one of {', '.join(_KINDS)}")
    return _KINDS[name]


def check_scheduler(where: str, value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return (type, params) of a "scheduler" section, None if it names no type. Values of params
    are checked by `make`.

    type: a schedule of this file, or a class of torch.optim.lr_scheduler, as in DeepSpeed. where:
    the path of the section in messages. Raises TypeError, or ValueError for an unknown type or
    parameter, one that is missing, and for "auto".
    """
    op = f"initialize: config {where}"
    if not isinstance(value, Mapping) or not {*value} <= {"type", "params"}:
        raise TypeError(
            f'{op} has {value!r}; expected an object {{"type": ..., "params": {{...}}}}, with no '
            f"other keys"
        )
    name, params = value.get("type"), value.get("params") or {}
    if not isinstance(params, Mapping):
        raise TypeError(
            f"{op}.params has {params!r}; expected an object with the arguments of the scheduler"
        )
    if name is None and not params:
        return None
    arguments = inspect.signature(_kind(f"{op}.type", name))
    for key, given in params.items():
        if isinstance(given, str) and given == "auto":
            raise ValueError(
                f'{op}.params.{key} has "auto", which a trainer must fill in first; expected a '
                f"value"
            )
    problem = ""
    try:
        arguments.bind(None, **params)
    except TypeError as error:
        problem = str(error)
    if problem:  # not inside except: the error would hold this frame, and all that call it
        expected = ", ".join([*arguments.parameters][1:])
        raise ValueError(f"{op}.params: {name} {problem}; expected its arguments: {expected}")
    return str(name), dict(params)


def make(name: str, params: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """Return the scheduler of that name over `optimizer`, whose learning rates it sets.

    Raises ValueError for another name, and what the scheduler raises for its arguments.
    """
    made: LRScheduler = _kind("make: name", name)(optimizer, **params)
    return made
