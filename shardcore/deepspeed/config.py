"""Reads and checks a DeepSpeed configuration, and reports all its problems in one error.

Invariants: a key outside the table (keys.py) is refused by its dotted path, so that no setting is
ignored; checking needs no process group and changes nothing. Only `Config.batch_sizes` depends on
the number of ranks. Source: the keys, defaults and batch arithmetic of
https://www.deepspeed.ai/docs/config-json.
"""

import base64
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardcore.deepspeed.checks import unexpected
from shardcore.deepspeed.keys import (
    KEYS,
    OP,
    OTHER_OPTIMIZERS,
    SECTIONS,
    Key,
    canonical,
    is_note,
)
from shardcore.deepspeed.monitor import SECTIONS as MONITORS
from shardcore.engine.loss_scale import LossScale
from shardcore.optim import FusedAdam, Lion, Muon
from shardcore.options import nearest

_PROBLEMS = (TypeError, ValueError, NotImplementedError)
ZERO = "zero_optimization"
_STATES, _WEIGHTS = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"
_LEAF_CLASSES = tuple(  # DeepSpeed's default
    f"transformers.models.{name}.modeling_{name}.{kind}SparseMoeBlock"
    for name, kind in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
)
_LOW_STATES, _LOW_MASTERS = "bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"


@dataclass(frozen=True)
class BatchSizes:
    """Samples: `train` for one optimizer step on all ranks, `micro` for one backward on one rank;
    train = micro * accumulation * world_size."""

    train: int
    micro: int
    accumulation: int


@dataclass(frozen=True)
class Config:
    """A checked configuration. Batch sizes are as given (None: to be derived); the rest has
    DeepSpeed's defaults.

    gradient_clipping: global norm, 0 for none. optimizer: options of optimizer_type, None without
    one. loss_scale: fixed or dynamic, None where nothing runs in float16. keep_in_fp32_modules:
    None for the model's own lists.
    offload: "cpu", "nvme" (under nvme_path) or None, for states; ratio: their share; params: "cpu"
    or None, for weights. scheduler: (type, arguments). autocast: the dtype of torch.autocast around
    forward, None for none.
    steps_per_print: None for never. tensorboard and so on: these sections, None if off.
    flops_profiler: whether to count operations; profile_step, module_depth, top_modules, detailed,
    profile_file: its other keys. explicit: dotted paths that the user wrote. accepted: of the keys
    that mean nothing here, a line for each reason. source: the configuration as it was given.
    """

    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    managed_gradient_accumulation: bool = True
    gradient_clipping: float = 1.0
    bf16: bool = False
    fp16: bool = False
    auto_cast: bool = False
    autocast: str | None = None
    loss_scale: LossScale | float | None = None
    communication_data_type: str | None = None
    gradient_allreduce_op: str = "mean"
    buffer_dtype: str | None = None
    keep_in_fp32_modules: tuple[str, ...] | None = None
    grad_dtype: str | None = None
    stage: int = 0
    hpz_partition_size: int = 1
    prefetch_bucket_size: float = 1.0
    leaf_classes: tuple[str, ...] = _LEAF_CLASSES
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()
    gathers_to_save: bool = True
    tag_validation: str = "warn"
    ignore_unused_parameters: bool = True
    offload: str | None = None
    nvme_path: str | None = None
    ratio: float = 1.0
    params: str | None = None
    pin_memory: bool = True
    optimizer: Mapping[str, Any] | None = None
    optimizer_type: type[torch.optim.Optimizer] = FusedAdam
    zero_allow_untested_optimizer: bool = False
    scheduler: tuple[str, Mapping[str, Any]] | None = None
    cpu_checkpointing: bool = False
    dataloader_drop_last: bool = False
    steps_per_print: int | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: str | None = None
    tensorboard: Mapping[str, Any] | None = None
    csv_monitor: Mapping[str, Any] | None = None
    wandb: Mapping[str, Any] | None = None
    comms_logger: bool = False
    flops_profiler: bool = False
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    profile_file: str | None = None
    activation_checkpoint_interval: int = 0
    sequence_parallel_size: int = 1
    autotp_size: int = 1
    shardcore: Mapping[str, Any] = field(default_factory=dict)
    explicit: frozenset[str] = field(default=frozenset(), compare=False)
    accepted: tuple[str, ...] = field(default=(), compare=False)
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """Derive the missing batch sizes; ValueError if they contradict each other or are too
        few.
        """
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        steps = self.gradient_accumulation_steps
        if train is None and micro is None:
            raise ValueError(
                f"{OP}: config has neither train_batch_size nor train_micro_batch_size_per_gpu; "
                f"expected at least one of them"
            )
        if micro is None:
            steps = steps or 1
            micro = (train or 0) // (steps * world_size)
        if steps is None:
            steps = 1 if train is None else train // (micro * world_size)
        train = micro * steps * world_size if train is None else train
        if micro * steps * world_size != train:
            sizes = [self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps]
            product = math.prod(size for size in sizes if size is not None) * world_size
            expected = f"a multiple of {product}" if None in sizes else product
            raise ValueError(
                f"{OP}: config train_batch_size is {train}; expected {expected}, the product of "
                "train_micro_batch_size_per_gpu, gradient_accumulation_steps (if given) and "
                f"world_size ({world_size})"
            )
        return BatchSizes(train, micro, steps)


# --- walking through it ---------------------------------------------------------------------------

_FIELDS = {
    path: key.field or path
    for path, key in KEYS.items()
    if (key.field or path) in Config.__dataclass_fields__
}
# What TRL writes beside the section: "zero_optimization.reduce_bucket_size". DeepSpeed ignores it.
_WRITTEN_BY_TRL = {
    f"{ZERO}.{name}"
    for name in ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold")
}


@dataclass
class _Checked:
    """A configuration while it is checked. values: of honoured keys, by dotted path; sections as
    True, invalid values as None.

    accepted: the accepted keys by why they mean nothing. paths: all keys.
    """

    values: dict[str, Any] = field(default_factory=dict)
    accepted: dict[str, list[str]] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    problems: list[Exception] = field(default_factory=list)

    def ignore(self, why: str, *paths: str) -> None:
        if paths:
            self.accepted.setdefault(why, []).extend(paths)

    def refuse(self, text: str, kind: type[Exception] = ValueError) -> None:
        self.problems.append(kind(f"{OP}: config {text}"))


def _unknown(where: str) -> str:
    """Name the unknown key, and the key that was probably meant: a similar one here, or the same
    one in another section.
    """
    section, dot, name = where.rpartition(".")
    prefix = section + dot
    keys = sorted(
        {path.removeprefix(prefix).split(".")[0] for path in KEYS if path.startswith(section)}
    )
    near = nearest(name, keys)
    elsewhere = [path for path in (*KEYS, *SECTIONS) if path.rpartition(".")[2] == name]
    meant = elsewhere if near is None else [prefix + near]
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"known keys here: {', '.join(keys)}"
    return f"key {where} is unknown; {hint}"


def _walk(section: Any, where: str, checked: _Checked) -> None:
    """Check a section against the table. A section in it that is null is absent."""
    if not isinstance(section, Mapping):
        expected = "an object with keys"
        if f"{where}.enabled" in KEYS:
            expected = f'{{"enabled": {json.dumps(bool(section))}}}'
        checked.problems.append(TypeError(unexpected(f"{OP}: config {where}", section, expected)))
        return
    of_other = where == "optimizer.params" and checked.values.get("optimizer.type", "") is None
    for name, value in section.items():
        path = canonical(f"{where}.{name}" if where else str(name))
        is_of_other_optimizer = of_other and path not in KEYS
        is_of_trl = "." in str(name) and path in _WRITTEN_BY_TRL
        if is_of_other_optimizer or is_of_trl or is_note(str(name)):
            continue
        if path in checked.paths:
            checked.refuse(f"{path} is given in two spellings; expected one")
            continue
        checked.paths.add(path)
        if path in KEYS:
            _check_key(path, KEYS[path], value, checked)
        elif path in SECTIONS:
            if isinstance(value, Mapping):
                checked.values[path] = True
            if value is not None:
                _walk(value, path, checked)
        else:
            checked.refuse(_unknown(path))


def _check_key(path: str, key: Key, value: Any, checked: _Checked) -> None:
    if key.kind == "accepted":
        checked.ignore(key.note, path)
    elif key.kind == "honoured":
        checked.values[path] = None
        try:
            checked.values[path] = key.check(f"{OP}: config {path}", value)
        except _PROBLEMS as problem:
            # which would hold this frame, and all that call it, in a cycle
            checked.problems.append(problem.with_traceback(None))
    elif not key.is_off(value):
        removed = " (DeepSpeed removed it, too)" if key.kind == "removed" else ""
        checked.refuse(f"{path} is not supported{removed}. Remove it, or turn it off: {key.note}")


def _translated(config: Mapping[str, Any], checked: _Checked) -> Mapping[str, Any]:
    """Return the configuration with zero_optimization in its present form: not a bool, nor
    cpu_offload keys.
    """
    zero = config.get(ZERO)
    if isinstance(zero, bool):
        return {**config, ZERO: {"stage": int(zero)}}
    if not isinstance(zero, Mapping):
        return config
    zero = dict(zero)
    old = {"cpu_offload": _STATES, "cpu_offload_param": _WEIGHTS, "cpu_offload_params": _WEIGHTS}
    values = {name: zero.pop(name) for name in old if name in zero}
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for name, value in values.items():
        section = old[name].rpartition(".")[2]
        if value not in (True, False, None):
            text = unexpected(
                f"{OP}: config {ZERO}.{name}", value, f"true or false, or {old[name]} in its place"
            )
            checked.problems.append(TypeError(text))
        elif section in zero:
            checked.refuse(f"has {ZERO}.{name} and {old[name]}; expected the latter alone")
        else:
            zero[section] = {"device": "cpu" if value else "none"}
            if pinned is not None:
                zero[section]["pin_memory"] = pinned
    return {**config, ZERO: zero}


# --- reading --------------------------------------------------------------------------------------


def read_config(config: Any, args: Any = None) -> Config:
    """Return the checked configuration from a dict, a path to a JSON file (or Hjson, or base64), or
    `args.deepspeed_config`.

    Raises ValueError, TypeError or NotImplementedError that names every problem; OSError if the
    file cannot be read.
    """
    from_args = getattr(args, "deepspeed_config", None)
    if config is not None and from_args is not None:
        raise ValueError(
            f"{OP}: config is given twice, as config and as args.deepspeed_config; expected one of "
            f"them"
        )
    config = from_args if config is None else config
    if config is None:
        raise TypeError(
            f"{OP}: there is no config; expected config=, or args= with deepspeed_config "
            f"(--deepspeed_config FILE)"
        )
    if isinstance(config, str | os.PathLike):
        config = read_json(config)
    if not isinstance(config, Mapping):
        raise TypeError(
            f"{OP}: config has type {type(config).__name__}; expected a dict or the path of a JSON "
            f"file"
        )
    checked = _Checked()
    section, other = _without_other_optimizer(_translated(config, checked), checked)
    _walk(section, "", checked)
    values = checked.values
    for text in _contradictions(values):
        checked.refuse(text)
    # an error that this frame held would hold it, and all that call it, in a cycle
    problems, checked.problems = checked.problems, []
    _raise_all(problems)
    fields = {name: values[path] for path, name in _FIELDS.items() if path in values}
    for monitor in MONITORS:
        if values.get(f"{monitor}.enabled"):
            prefix = f"{monitor}."
            fields[monitor] = {
                path.removeprefix(prefix): values[path]
                for path in values
                if path.startswith(prefix)
            }
    stage, offload = fields.get("stage", 0), fields.get("offload")
    if stage != 3 and fields.get("params"):
        fields["params"] = None
        checked.ignore("weights are offloaded at stage 3 only, as in DeepSpeed", _WEIGHTS)
    if fields.get("ignore_unused_parameters") is False and (
        stage not in (1, 2) or offload != "cpu"
    ):
        fields["ignore_unused_parameters"] = True
        why = (
            "parameters that no rank used are skipped, but at stages 1 and 2 with "
            "offload_optimizer on cpu, as in DeepSpeed"
        )
        checked.ignore(why, f"{ZERO}.ignore_unused_parameters")
    if fields.get("buffer_dtype") and not (fields.get("bf16") or fields.get("fp16")):
        why = "buffers are cast beside 16-bit weights only, as in DeepSpeed"
        checked.ignore(why, "data_types.buffer_dtype")
    if values.get("bf16.enabled") and values.get(_LOW_MASTERS):
        fields["grad_dtype"] = fields.get("grad_dtype") or "bf16"
    if "optimizer" not in values:
        why = (
            "masters and states are reduced in the configuration's Adam alone, or your "
            "FusedAdam(state_dtype=, master=)"
        )
        checked.ignore(why, *(path for path in (_LOW_STATES, _LOW_MASTERS) if values.get(path)))
    pinned = [
        values.get(f"{section}.pin_memory", True)
        for section in (_STATES, _WEIGHTS)
        if values.get(f"{section}.device")
    ]
    if len(set(pinned)) == 2:
        why = "there is one setting for states and weights, and one of them is not to be pinned"
        checked.ignore(why, f"{_STATES}.pin_memory", f"{_WEIGHTS}.pin_memory")
    return Config(
        **fields,
        pin_memory=all(pinned),
        autocast=_autocast(values),
        loss_scale=_loss_scale(values),
        optimizer=_adam_options(values) if "optimizer" in values else other and other[1],
        optimizer_type=FusedAdam if other is None else other[0],
        explicit=frozenset(values),
        source=config,
        accepted=tuple(f"{', '.join(paths)}: {why}" for why, paths in checked.accepted.items()),
    )


def shard_options(settings: Config, muon: bool = False) -> dict[str, Any]:
    """Return the keyword arguments of `shard` for a configuration, but those that depend on the
    loop.

    These are clip_grad_norm, accumulate and materialize. "stage" is among what is returned.
    """
    own = dict(settings.shardcore)
    own.pop("optimizer", None)
    own_tiers, mesh = own.pop("offload", {}), own.pop("mesh", ())
    if math.prod(mesh) > 1:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        own["process_group"] = init_device_mesh(device, tuple(mesh))
    tiers: dict[str, Any] = {"params": settings.params, "pin_memory": settings.pin_memory}
    overlap_step = False
    if settings.offload is not None:
        tiers |= {"optimizer": settings.offload, "ratio": settings.ratio}
    if settings.offload == "nvme":
        # as DeepSpeed's swap files; save_checkpoint is its way
        tiers |= {"path": settings.nvme_path, "durable": False}
    elif settings.offload == "cpu" and settings.stage > 0 and not muon:
        # Muon orthogonalizes gradients on the device.
        if own_tiers == "auto" or own_tiers.get("ratio", settings.ratio) != 0.0:
            tiers["gradients"] = "cpu"  # as in ZeRO-Offload
        # at 1 and 2 new weights are gathered, before which NCCL's ranks must not read
        overlap_step = settings.stage == 3
    offload: Any = "auto"
    if own_tiers != "auto":
        is_offloaded = settings.offload or settings.params or own_tiers
        offload = tiers | own_tiers if is_offloaded else None
    precision = "fp32" if settings.autocast is None else None
    if settings.fp16:
        precision = "fp16"
    elif settings.bf16:
        precision = "bf16"
    reshard: bool | int = True
    if settings.stage == 3 and settings.hpz_partition_size > 1:
        reshard = settings.hpz_partition_size
    return {
        "stage": settings.stage,
        "offload": offload,
        "precision": precision,
        "loss_scale": settings.loss_scale,
        "reduce_dtype": settings.communication_data_type,
        "grad_dtype": settings.grad_dtype or "fp32",
        "cast_inputs": settings.auto_cast or not settings.fp16,
        "reshard_after_forward": reshard,
        "prefetch": 0 if settings.stage == 3 and settings.prefetch_bucket_size == 0 else 1,
        "overlap_step": overlap_step,
        **own,
    }


def _without_other_optimizer(
    config: Mapping[str, Any], checked: _Checked
) -> tuple[Mapping[str, Any], tuple[type[torch.optim.Optimizer], dict[str, Any]] | None]:
    """Take an optimizer that is not Adam out of the configuration: its class and arguments,
    which the class itself checks.
    """
    section = config.get("optimizer")
    name = section.get("type") if isinstance(section, Mapping) else None
    cls = OTHER_OPTIMIZERS.get(name.lower()) if isinstance(name, str) else None
    if section is None or cls is None:
        return config, None
    options: Any = section.get("params") or {}
    own = (config.get("shardcore") or {}).get("optimizer")
    unknown = sorted({str(key) for key in section} - {"type", "params", "legacy_fusion"})
    text = ""
    if own:
        text = f"shardcore.optimizer is {own} for {name}; expected it with Adam alone"
    elif unknown:
        text = f"optimizer.{unknown[0]} is not supported; expected type and params"
    if text:
        checked.refuse(text)
    elif not isinstance(options, Mapping):
        checked.refuse(f"optimizer.params is {options!r}; expected an object with keys", TypeError)
    else:
        try:
            options = _tried(cls, options)
        except (TypeError, ValueError) as error:
            checked.refuse(
                f"optimizer.params are not those of {cls.__name__}; expected its own: {error}",
                type(error),
            )
    options = dict(options) if isinstance(options, Mapping) else {}
    return {key: value for key, value in config.items() if key != "optimizer"}, (cls, options)


def _tried(cls: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of an optimizer, which one over a small tensor accepts."""
    if cls is Muon:
        halves = muon_halves(options)
        cls([{"params": [torch.zeros(1, 1)], "use_muon": use, **halves[use]} for use in halves])
        return {"halves": halves}
    if cls is Lion:  # DeepSpeed's defaults; Lion has its paper's
        options = {"lr": 1e-3, "betas": (0.9, 0.999), **options}
    cls([torch.zeros(1, requires_grad=True)], **options)
    return options


def muon_halves(params: Mapping[str, Any]) -> dict[bool, dict[str, Any]]:
    """Return the options of Muon's groups, by their use_muon: DeepSpeed's names and defaults.

    TypeError for another name, ValueError for a value of DeepSpeed's alone.
    """
    halves: dict[bool, dict[str, Any]] = {
        True: {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0},
        False: {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
    }
    same = {
        "ns_method": ("gram", "standard"),
        "per_head_muon": (False,),
        "adam_w_mode": (True,),
        "torch_adam": (False, True),
    }
    for name, value in params.items():
        if name in same and value not in same[name]:
            raise ValueError(f"{name} is {value!r}; expected {' or '.join(map(repr, same[name]))}")
        if name not in (*same, "muon_lr", "adam_lr", *halves[True], *halves[False]):
            raise TypeError(
                f"{name} is unknown; expected {', '.join({**halves[True], **halves[False]})}, "
                f"muon_lr, adam_lr"
            )
        for options in halves.values():
            if name in options:
                options[name] = value
    for use_muon, name in ((True, "muon_lr"), (False, "adam_lr")):
        halves[use_muon]["lr"] = params.get(name, halves[use_muon]["lr"])
    return halves


def _contradictions(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what keys say against each other, as the texts of errors."""
    own = values.get("shardcore") or {}
    device_of_states = values.get(f"{_STATES}.device")
    if own.get("offload") == "auto":
        for section in (_STATES, _WEIGHTS):
            if values.get(f"{section}.device") is not None:
                yield f'has shardcore.offload "auto" and {section}; expected one of them'
    if "optimizer" not in values and own.get("optimizer"):
        yield (
            "shardcore.optimizer is given without optimizer; expected both (or "
            "optimizer=FusedAdam(...))"
        )
    if "optimizer" in values and "optimizer.type" not in values:
        yield 'optimizer.type is missing; expected "Adam" or "AdamW"'
    is_decoupled = values.get("optimizer.params.adam_w_mode")
    if values.get("optimizer.type") == "adamw" and is_decoupled is False:
        yield (
            'optimizer.params.adam_w_mode is False for the type "AdamW"; expected the type '
            '"Adam", or true'
        )
    for other in ("bf16", "torch_autocast"):
        if values.get("fp16.enabled") and values.get(f"{other}.enabled"):
            yield f"fp16.enabled and {other}.enabled are both true; expected one of them"
    power = values.get("fp16.initial_scale_power", 16)
    least = values.get("fp16.min_loss_scale", 1.0)
    if not values.get("fp16.loss_scale") and None not in (power, least) and least > 2.0**power:
        yield (
            f"fp16.min_loss_scale is {least}; expected at most 2**initial_scale_power, "
            f"{2.0**power:g}"
        )
    path = values.get(f"{_STATES}.nvme_path")
    if device_of_states == "nvme" and path is None:
        yield f"{_STATES}.nvme_path is missing; expected a directory on the disk to use"
    if values.get(f"{_WEIGHTS}.device") == "nvme" and values.get(f"{ZERO}.stage") == 3:
        if device_of_states != "nvme":
            yield (
                f'{_WEIGHTS}.device is "nvme" and {_STATES}.device {device_of_states!r}; expected '
                f'"nvme" for both, since a step reads and writes both'
            )
        elif values.get(f"{_WEIGHTS}.nvme_path") not in (None, path):
            yield (
                f"{_WEIGHTS}.nvme_path is {values[f'{_WEIGHTS}.nvme_path']!r}; expected that of "
                f"{_STATES}.nvme_path, or none"
            )
    size = values.get("tensor_parallel.autotp_size", 1)
    if values.get("tensor_parallel.tp.tp_size", 1) not in (1, size):
        yield (
            f"tensor_parallel.tp.tp_size differs from tensor_parallel.autotp_size; expected {size}"
        )
    trained = next((name for name in ("fp16", "bf16") if values.get(f"{name}.enabled")), "fp32")
    if (dtype := values.get("data_types.param_dtype")) not in (None, trained):
        yield (
            f"data_types.param_dtype is {dtype!r}, and fp16 and bf16 ask for {trained!r}; "
            f"expected the same"
        )
    if values.get("gradient_allreduce_op") == "sum" and values.get(f"{ZERO}.stage") == 3:
        yield 'gradient_allreduce_op is "sum" at stage 3; expected "mean", or a stage below'
    if trained == "bf16" and _autocast(values) == "fp16":
        yield (
            'torch_autocast.dtype is "fp16" with bf16.enabled; expected "bf16", or weights in '
            "float32"
        )


def _autocast(values: Mapping[str, Any]) -> str | None:
    if not values.get("torch_autocast.enabled"):
        return None
    return values.get("torch_autocast.dtype") or "bf16"


def _loss_scale(values: Mapping[str, Any]) -> LossScale | float | None:
    """Return the fixed scale, or for 0 a dynamic one; the other keys count only then, as in
    DeepSpeed.

    Under autocast to float16 it is a scale with the options of torch's GradScaler.
    """
    if not values.get("fp16.enabled"):
        if _autocast(values) == "fp16":
            return LossScale(window=2000, hysteresis=1, minimum=2.0**-126)
        return None
    options = {
        "initial_scale_power": "initial_power",
        "loss_scale_window": "window",
        "min_loss_scale": "minimum",
        "hysteresis": "hysteresis",
        "consecutive_hysteresis": "consecutive_hysteresis",
    }
    fixed: float = values.get("fp16.loss_scale", 0.0)
    return fixed or LossScale(
        **{name: values[f"fp16.{key}"] for key, name in options.items() if f"fp16.{key}" in values}
    )


def _adam_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return FusedAdam's arguments. "Adam" means AdamW, too, unless adam_w_mode is false, as in
    DeepSpeed.
    """
    params = "optimizer.params."
    options: dict[str, Any] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "bias_correction": True,
        "adam_w_mode": True,
        "amsgrad": False,
        "maximize": False,
    }
    if values.get(f"{params}torch_adam") and values.get(f"{params}adam_w_mode", True):
        options["weight_decay"] = 0.01  # of torch's AdamW, which DeepSpeed makes then
    options |= {key: values[params + key] for key in options if params + key in values}
    low = values.get("bf16.enabled", False)
    keeps_fp32 = values.get(f"{params}fp32_optimizer_states", True)
    if keeps_fp32 is False or (low and values.get(_LOW_STATES)):
        options["state_dtype"] = "bf16"
    if low and values.get(_LOW_MASTERS):
        options["master"] = "split"
    return {**options, **(values.get("shardcore") or {}).get("optimizer", {})}


def _raise_all(problems: list[Exception]) -> None:
    if len(problems) == 1:
        raise problems.pop()
    if problems:
        kinds = {type(problem) for problem in problems}
        kind = kinds.pop() if len(kinds) == 1 else ValueError
        lines = [str(problem).removeprefix(f"{OP}: config ") for problem in problems]
        raise kind(f"{OP}: config has {len(problems)} problems:\n  " + "\n  ".join(lines))


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return what a JSON file has, or one of Hjson (comments, trailing commas) where the package
    hjson is installed.

    `path` may also be a JSON object in base64, as gpt-neox gives it. OSError, or ValueError for
    another text, and for a key that is there twice.
    """
    text = _in_base64(path)
    if text is None and not Path(path).exists():
        raise FileNotFoundError(errno.ENOENT, f"{OP}: config file {os.fspath(path)} does not exist")
    text = Path(path).read_bytes() if text is None else text
    try:
        return json.loads(text, object_pairs_hook=_once)
    except ValueError as problem:
        config, hint = None, ""
        try:
            # what DeepSpeed reads them with
            config = import_module("hjson").loads(text.decode(), object_pairs_hook=_once)
        except ImportError:
            hint = " (comments and trailing commas: pip install hjson)"
        except ValueError as other:
            hint = f", or Hjson: {other}"
        if config and isinstance(config, Mapping):  # Hjson takes nearly every text as a string
            return config
        raise ValueError(
            f"{OP}: config file {os.fspath(path)} is not valid: {problem}; expected JSON{hint}"
        ) from problem


def _in_base64(path: str | os.PathLike[str]) -> bytes | None:
    if isinstance(path, str) and not os.path.exists(path):
        with suppress(ValueError):
            text = base64.urlsafe_b64decode(path)
            return text if text.startswith(b"{") else None
    return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r} appears twice in one object")
        seen[key] = value
    return seen
