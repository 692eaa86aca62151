"""Reads and checks a DeepSpeed configuration, and reports all its problems in one error.

Invariants: a key outside the table below is refused by its dotted path, so that no setting is ignored; checking needs no
process group and changes nothing. Only `Config.batch_sizes` depends on the number of ranks.
Source: the keys, defaults and batch arithmetic of https://www.deepspeed.ai/docs/config-json.
"""

import difflib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardcore.engine.loss_scale import LossScale

_OP = "initialize"
_PROBLEMS = (TypeError, ValueError, NotImplementedError)

# (dotted path, value as given) -> checked value; raises one of _PROBLEMS
Check = Callable[[str, Any], Any]


@dataclass(frozen=True)
class BatchSizes:
    """Samples: `train` for one optimizer step on all ranks, `micro` for one backward on one rank; train = micro *
    accumulation * world_size."""

    train: int
    micro: int
    accumulation: int


@dataclass(frozen=True)
class Config:
    """A checked configuration. Batch sizes are as given (None: to be derived); the rest has DeepSpeed's defaults.

    gradient_clipping: global norm, 0 for none. optimizer: FusedAdam's options, None without an optimizer. loss_scale: fixed or
    dynamic, None without fp16. offload: "cpu" or None, for states; ratio: their share; params: the same for weights.
    steps_per_print: None for never. given: dotted paths that the user wrote.
    """

    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float = 1.0
    bf16: bool = False
    fp16: bool = False
    auto_cast: bool = False
    loss_scale: LossScale | float | None = None
    communication_data_type: str | None = None
    stage: int = 0
    offload: str | None = None
    ratio: float = 1.0
    params: str | None = None
    pin_memory: bool = False
    optimizer: Mapping[str, Any] | None = None
    steps_per_print: int | None = 10
    given: frozenset[str] = field(default=frozenset(), compare=False)

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """Derive the missing batch sizes; ValueError if they contradict each other or are too few."""
        train, micro, steps = self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        if train is None and micro is None:
            raise ValueError(
                f"{_OP}: config has neither train_batch_size nor train_micro_batch_size_per_gpu; expected at least one of them"
            )
        if train is not None and micro is not None:
            steps = train // (micro * world_size) if steps is None else steps
        elif train is not None:
            steps = 1 if steps is None else steps
            micro = train // (steps * world_size)
        assert micro is not None
        steps = 1 if steps is None else steps
        train = micro * steps * world_size if train is None else train
        if micro * steps * world_size != train:
            given = [self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps]
            product = math.prod([size for size in given if size is not None]) * world_size
            expected = f"a multiple of {product}" if None in given else product
            raise ValueError(
                f"{_OP}: config train_batch_size has {train}; expected {expected}, the product of "
                f"train_micro_batch_size_per_gpu, gradient_accumulation_steps (where given) and world_size ({world_size})"
            )
        return BatchSizes(train, micro, steps)


# --- the table --------------------------------------------------------------------------------------------------------


def _has(where: str, value: Any, expected: str) -> str:
    if isinstance(value, str) and value == "auto":
        return f'{_OP}: config {where} has "auto", which a trainer must fill in first; expected {expected}'
    return f"{_OP}: config {where} has {value!r}; expected {expected}"


def _integer(least: int, most: float, expected: str, kind: str = "a whole number") -> Check:
    def check(where: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(_has(where, value, kind))
        if not least <= value <= most:
            raise ValueError(_has(where, value, expected))
        return value

    return check


def _word(*known: str, expected: str, otherwise: str = "") -> Check:
    def check(where: str, value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError(_has(where, value, expected))
        if value.lower() not in known:
            raise ValueError(_has(where, value, expected + otherwise))
        return value.lower()

    return check


def _or_none(check: Check) -> Check:
    return lambda where, value: None if value is None else check(where, value)


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(_has(where, value, "a number"))
    if not 0.0 <= value <= sys.float_info.max:  # of an int, too, which may be larger
        raise ValueError(_has(where, value, "a finite number of at least 0"))
    return float(value)


def _positive(where: str, value: Any) -> float:
    if _number(where, value) == 0.0:
        raise ValueError(_has(where, value, "a finite number above 0"))
    return float(value)


def _share(where: str, value: Any) -> float:
    if _number(where, value) > 1.0:
        raise ValueError(_has(where, value, "a number from 0 to 1 (the share that the CPU updates)"))
    return float(value)


def _betas(where: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise TypeError(_has(where, value, "two numbers [beta1, beta2]"))
    for i, beta in enumerate(value):
        if _number(f"{where}[{i}]", beta) >= 1.0:
            raise ValueError(_has(f"{where}[{i}]", beta, "a number in [0, 1)"))
    return float(value[0]), float(value[1])


def _flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(_has(where, value, "true or false"))
    return value


def _offload_device(where: str, value: Any) -> str | None:
    if value == "nvme":
        raise NotImplementedError(f'{_OP}: config {where} has "nvme", which is not built yet; expected "cpu" or "none"')
    if value not in ("cpu", "none"):
        raise (ValueError if isinstance(value, str) else TypeError)(_has(where, value, '"cpu" or "none"'))
    return "cpu" if value == "cpu" else None


def _refused(why: str) -> Check:
    def check(where: str, value: Any) -> None:
        raise ValueError(f"{_OP}: config {where} is not supported; expected it to be absent ({why})")

    return check


_count = _integer(1, math.inf, "at least 1")
_power = _integer(0, 127, "0 to 127 (the scale is 2 to that power, in float32)")
_stage = _integer(0, 3, "0, 1, 2 or 3", kind="0, 1, 2 or 3")
_dtype = _word("fp32", "bf16", "fp16", expected='"fp32", "bf16" or "fp16"')
_adam = _word("adam", "adamw", expected='"Adam" or "AdamW"', otherwise=" (shardcore trains with no other optimizer)")

Section = Mapping[str, "Check | Section"]

_SECTIONS: Section = {
    "train_batch_size": _count,
    "train_micro_batch_size_per_gpu": _count,
    "gradient_accumulation_steps": _count,
    "gradient_clipping": _number,
    "communication_data_type": _or_none(_dtype),
    "bf16": {"enabled": _flag},
    "fp16": {
        "enabled": _flag,
        "auto_cast": _flag,
        "loss_scale": _number,
        "initial_scale_power": _power,
        "loss_scale_window": _count,
        "hysteresis": _count,
        "min_loss_scale": _positive,
        "consecutive_hysteresis": _flag,
    },
    "zero_optimization": {
        "stage": _stage,
        "offload_optimizer": {"device": _offload_device, "pin_memory": _flag, "ratio": _share},
        "offload_param": {"device": _offload_device, "pin_memory": _flag},
    },
    "optimizer": {
        "type": _adam,
        "params": {
            "lr": _number,
            "betas": _betas,
            "eps": _number,
            "weight_decay": _number,
            "bias_correction": _flag,
            "adam_w_mode": _flag,
            "torch_adam": _refused("shardcore always runs its own Adam, which follows torch.optim's formula"),
            "max_grad_norm": _refused("clip with gradient_clipping"),
        },
    },
    "steps_per_print": _or_none(_count),
}


# The keys that are fields of Config as they are.
_FIELDS = {key: key for key, entry in _SECTIONS.items() if not isinstance(entry, Mapping)} | {
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "fp16.auto_cast": "auto_cast",
    "zero_optimization.stage": "stage",
    "zero_optimization.offload_optimizer.device": "offload",
    "zero_optimization.offload_optimizer.ratio": "ratio",
    "zero_optimization.offload_optimizer.pin_memory": "pin_memory",
    "zero_optimization.offload_param.device": "params",
}


def _paths(section: Section, prefix: str = "") -> Iterator[str]:
    for key, entry in section.items():
        yield prefix + key
        if isinstance(entry, Mapping):
            yield from _paths(entry, prefix + key + ".")


def _unknown(where: str, key: str, section: Section) -> ValueError:
    """Name the unknown key, and the key that was probably meant: a similar one here, or the same one in another section."""
    near = difflib.get_close_matches(key, list(section), n=1, cutoff=0.75)
    prefix = where.removesuffix(key)
    elsewhere = [path for path in _paths(_SECTIONS) if path.rsplit(".", 1)[-1] == key]
    meant = [prefix + near[0]] if near else elsewhere
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"known keys here: {', '.join(sorted(section))}"
    return ValueError(f"{_OP}: config {where} is not supported; expected it to be absent ({hint})")


def _walk(given: Any, section: Section, where: str, values: dict[str, Any], problems: list[Exception]) -> None:
    """Check `given` against the table, adding to `values` by dotted path: sections as True, invalid values as None."""
    if not isinstance(given, Mapping):
        problems.append(TypeError(_has(where, given, "an object with keys")))
        return
    for key, value in given.items():
        path = f"{where}.{key}" if where else str(key)
        entry = section.get(key)
        if entry is None:
            problems.append(_unknown(path, str(key), section))
        elif isinstance(entry, Mapping):
            if isinstance(value, Mapping):
                values[path] = True
            _walk(value, entry, path, values, problems)
        else:
            values[path] = None
            try:
                values[path] = entry(path, value)
            except _PROBLEMS as problem:
                problems.append(problem.with_traceback(None))  # which would hold this frame, and all that call it, in a cycle


# --- reading ----------------------------------------------------------------------------------------------------------


def read_config(config: Any, args: Any = None) -> Config:
    """Return the checked configuration from a dict, a path to a JSON file, or `args.deepspeed_config`.

    Raises ValueError, TypeError or NotImplementedError that names every problem; OSError if the file cannot be read.
    """
    from_args = getattr(args, "deepspeed_config", None)
    if config is not None and from_args is not None:
        raise ValueError(f"{_OP}: config is given twice, as config and as args.deepspeed_config; expected one of them")
    given = from_args if config is None else config
    if isinstance(given, str | os.PathLike):
        given = _read_json(given)
    if not isinstance(given, Mapping):
        raise TypeError(f"{_OP}: config has type {type(given).__name__}; expected a dict or the path of a JSON file")
    values: dict[str, Any] = {}
    problems: list[Exception] = []
    _walk(given, _SECTIONS, "", values, problems)
    problems += _contradictions(values)
    _raise_all(problems)
    fields = {name: values[path] for path, name in _FIELDS.items() if path in values}
    return Config(
        **fields,
        loss_scale=_loss_scale(values) if values.get("fp16.enabled") else None,
        optimizer=_adam_options(values) if "optimizer" in values else None,
        given=frozenset(values),
    )


def _contradictions(values: Mapping[str, Any]) -> Iterator[Exception]:
    if "optimizer" in values and "optimizer.type" not in values:
        yield ValueError(f'{_OP}: config optimizer.type is missing; expected "Adam" or "AdamW"')
    if values.get("optimizer.type") == "adamw" and values.get("optimizer.params.adam_w_mode") is False:
        yield ValueError(
            f'{_OP}: config optimizer.params.adam_w_mode has False for the type "AdamW"; expected the type "Adam", or true'
        )
    if values.get("fp16.enabled") and values.get("bf16.enabled"):
        yield ValueError(f"{_OP}: config fp16.enabled and bf16.enabled are both true; expected one of them")
    power, least = values.get("fp16.initial_scale_power", 16), values.get("fp16.min_loss_scale", 1.0)
    if not values.get("fp16.loss_scale") and power is not None and least is not None and least > 2.0**power:
        yield ValueError(
            f"{_OP}: config fp16.min_loss_scale has {least}; expected at most 2**initial_scale_power, {2.0**power:g}"
        )
    states, weights = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
    for section in (states, weights):
        if section in values and section + ".device" not in values:
            yield ValueError(f'{_OP}: config {section}.device is missing; expected "cpu" or "none"')
    if values.get(weights + ".device") == "cpu":
        if values.get("zero_optimization.stage", 0) != 3:
            yield ValueError(f'{_OP}: config {weights}.device has "cpu"; expected "none", or zero_optimization.stage 3')
        if values.get(states + ".device") != "cpu":
            yield NotImplementedError(
                f'{_OP}: config {weights}.device has "cpu" without {states}.device "cpu", which is not built yet; expected both'
            )
        pinned = [values.get(section + ".pin_memory", False) for section in (states, weights)]
        if pinned[0] != pinned[1]:
            yield ValueError(f"{_OP}: config {weights}.pin_memory has {pinned[1]}; expected {pinned[0]}, as {states} has")


def _loss_scale(values: Mapping[str, Any]) -> LossScale | float:
    """Return the fixed scale, or for 0 a dynamic one; the other keys count only then, as in DeepSpeed."""
    fixed: float = values.get("fp16.loss_scale", 0.0)
    names = {"initial_scale_power": "initial_power", "loss_scale_window": "window", "min_loss_scale": "minimum"}
    keys = (*names, "hysteresis", "consecutive_hysteresis")
    return fixed or LossScale(**{names.get(k, k): values[f"fp16.{k}"] for k in keys if f"fp16.{k}" in values})


def _adam_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return FusedAdam's arguments. "Adam" means AdamW, too, unless adam_w_mode is false, as in DeepSpeed."""
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    return {
        key: values.get(f"optimizer.params.{key}", default)
        for key, default in (defaults | {"bias_correction": True, "adam_w_mode": True}).items()
    }


def _raise_all(problems: list[Exception]) -> None:
    if len(problems) == 1:
        raise problems.pop()
    if problems:
        kinds = {type(problem) for problem in problems}
        kind = kinds.pop() if len(kinds) == 1 else ValueError
        lines = [str(problem).removeprefix(f"{_OP}: config ") for problem in problems]
        raise kind(f"{_OP}: config has {len(problems)} problems:\n  " + "\n  ".join(lines))


def _read_json(path: str | os.PathLike[str]) -> Any:
    with open(path, "rb") as file:
        text = file.read()
    try:
        return json.loads(text, object_pairs_hook=_once)
    except ValueError as problem:
        raise ValueError(f"{_OP}: config file {os.fspath(path)} is not valid: {problem}; expected JSON") from problem


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r} appears twice in one object")
        seen[key] = value
    return seen
