"""Reads and checks a DeepSpeed configuration, and reports all its problems in one error.

Invariants: a key outside the table (keys.py) is refused by its dotted path, so that no setting is
ignored; checking needs no process group and changes nothing. Only `Config.batch_sizes` depends on
the number of ranks. Source: the keys, defaults and batch arithmetic of
https://www.deepspeed.ai/docs/config-json.
"""

import base64
import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardcore.deepspeed.keys import (
    KEYS,
    OP,
    OTHER_OPTIMIZERS,
    SECTIONS,
    Key,
    canonical,
    has,
    is_note,
)
from shardcore.deepspeed.monitor import SECTIONS as MONITORS
from shardcore.engine.loss_scale import LossScale
from shardcore.optim import FusedAdam, Lion, Muon

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
    profile_file: its other keys. given: dotted paths that the user wrote. accepted: of the keys
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
    given: frozenset[str] = field(default=frozenset(), compare=False)
    accepted: tuple[str, ...] = field(default=(), compare=False)
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """Derive the missing batch sizes; ValueError if they contradict each other or are too
        few.
        """
        train, micro, steps = (
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
        )
        if train is None and micro is None:
            raise ValueError(
                f"{OP}: config has neither train_batch_size nor train_micro_batch_size_per_gpu; "
                f"expected at least one of them"
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
                f"{OP}: config train_batch_size has {train}; expected {expected}, the product of "
                f"train_micro_batch_size_per_gpu, gradient_accumulation_steps (where given) and "
                f"world_size ({world_size})"
            )
        return BatchSizes(train, micro, steps)


# --- walking through it ---------------------------------------------------------------------------

# The keys that are fields of Config as they are.
_FIELDS = {
    path: path
    for path, key in KEYS.items()
    if "." not in path and path in Config.__dataclass_fields__
} | {
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "fp16.auto_cast": "auto_cast",
    "data_types.grad_accum_dtype": "grad_dtype",
    "data_types.buffer_dtype": "buffer_dtype",
    "data_types.keep_in_fp32_modules": "keep_in_fp32_modules",
    f"{ZERO}.stage": "stage",
    f"{ZERO}.zero_hpz_partition_size": "hpz_partition_size",
    f"{ZERO}.prefetch_bucket_size": "prefetch_bucket_size",
    f"{ZERO}.leaf_module.classes": "leaf_classes",
    f"{ZERO}.leaf_module.names": "leaf_names",
    f"{ZERO}.leaf_module.name_suffixes": "leaf_suffixes",
    f"{ZERO}.gather_16bit_weights_on_model_save": "gathers_to_save",
    "checkpoint.tag_validation": "tag_validation",
    f"{ZERO}.ignore_unused_parameters": "ignore_unused_parameters",
    f"{_STATES}.device": "offload",
    f"{_STATES}.nvme_path": "nvme_path",
    f"{_STATES}.ratio": "ratio",
    f"{_WEIGHTS}.device": "params",
    "activation_checkpointing.cpu_checkpointing": "cpu_checkpointing",
    "comms_logger.enabled": "comms_logger",
    "flops_profiler.enabled": "flops_profiler",
    "flops_profiler.profile_step": "profile_step",
    "flops_profiler.module_depth": "module_depth",
    "flops_profiler.top_modules": "top_modules",
    "flops_profiler.detailed": "detailed",
    "flops_profiler.output_file": "profile_file",
    "pipeline.activation_checkpoint_interval": "activation_checkpoint_interval",
    "tensor_parallel.autotp_size": "autotp_size",
}
# What TRL writes beside the section: "zero_optimization.reduce_bucket_size". DeepSpeed ignores it.
_WRITTEN_BY_TRL = {
    f"{ZERO}.{name}"
    for name in ("reduce_bucket_size", "prefetch_bucket_size", "param_persistence_threshold")
}


@dataclass
class _Found:
    """What a configuration has. values: of honoured keys, by dotted path; sections as True, invalid
    values as None.

    accepted: the accepted keys by why they mean nothing. seen: all keys.
    """

    values: dict[str, Any] = field(default_factory=dict)
    accepted: dict[str, list[str]] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    problems: list[Exception] = field(default_factory=list)


def _unknown(where: str) -> ValueError:
    """Name the unknown key, and the key that was probably meant: a similar one here, or the same
    one in another section.
    """
    prefix, _, name = where.rpartition(".")
    here = sorted(
        {
            path.removeprefix(f"{prefix}." if prefix else "").split(".")[0]
            for path in KEYS
            if path.startswith(prefix)
        }
    )
    near = difflib.get_close_matches(name, here, n=1, cutoff=0.75)
    elsewhere = [path for path in (*KEYS, *SECTIONS) if path.rpartition(".")[2] == name]
    meant = [f"{prefix}.{near[0]}" if prefix else near[0]] if near else elsewhere
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"known keys here: {', '.join(here)}"
    return ValueError(f"{OP}: config {where} is not supported; expected it to be absent ({hint})")


def _walk(given: Any, where: str, found: _Found) -> None:
    """Check `given`, a section, against the table. A section in it that is null is absent."""
    if not isinstance(given, Mapping):
        found.problems.append(TypeError(has(where, given, "an object with keys")))
        return
    # another optimizer's
    of_other = where == "optimizer.params" and found.values.get("optimizer.type", "") is None
    for name, value in given.items():
        path = canonical(f"{where}.{name}" if where else str(name))
        if of_other and path not in KEYS:
            continue
        if is_note(str(name)) or ("." in str(name) and path in _WRITTEN_BY_TRL):
            continue
        if path in found.seen:
            found.problems.append(
                ValueError(f"{OP}: config {path} is given in two spellings; expected one")
            )
            continue
        found.seen.add(path)
        if path in KEYS:
            _take(path, KEYS[path], value, found)
        elif path in SECTIONS:
            if isinstance(value, Mapping):
                found.values[path] = True
            if value is not None:
                _walk(value, path, found)
        else:
            found.problems.append(_unknown(path))


def _take(path: str, key: Key, value: Any, found: _Found) -> None:
    if key.kind == "accepted":
        found.accepted.setdefault(key.note, []).append(path)
        return
    if key.kind != "honoured":
        if not key.is_off(value):
            removed = " (DeepSpeed removed it, too)" if key.kind == "removed" else ""
            why = (
                f"{OP}: config {path} is not supported{removed}; expected it to be absent, or "
                f"off: {key.note}"
            )
            found.problems.append(ValueError(why))
        return
    found.values[path] = None
    try:
        found.values[path] = key.check(path, value)
    except _PROBLEMS as problem:
        # which would hold this frame, and all that call it, in a cycle
        found.problems.append(problem.with_traceback(None))


def _translated(given: Any, problems: list[Exception]) -> Any:
    """Return the configuration with zero_optimization in its present form: not a bool, nor
    cpu_offload keys.
    """
    zero = given.get("zero_optimization")
    if isinstance(zero, bool):
        return {**given, "zero_optimization": {"stage": int(zero)}}
    if not isinstance(zero, Mapping):
        return given
    zero = dict(zero)
    old = {"cpu_offload": _STATES, "cpu_offload_param": _WEIGHTS, "cpu_offload_params": _WEIGHTS}
    wanted = {name: zero.pop(name) for name in old if name in zero}
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for name, value in wanted.items():
        section = old[name].rpartition(".")[2]
        if value not in (True, False, None):
            problems.append(
                TypeError(
                    has(f"{ZERO}.{name}", value, f"true or false, or {old[name]} in its place")
                )
            )
        elif section in zero:
            problems.append(
                ValueError(
                    f"{OP}: config has {ZERO}.{name} and {old[name]}; expected the latter alone"
                )
            )
        else:
            zero[section] = {"device": "cpu" if value else "none"} | (
                {} if pinned is None else {"pin_memory": pinned}
            )
    return {**given, "zero_optimization": zero}


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
    given = from_args if config is None else config
    if given is None:
        raise TypeError(
            f"{OP}: there is no config; expected config=, or args= with deepspeed_config "
            f"(--deepspeed_config FILE)"
        )
    if isinstance(given, str | os.PathLike):
        given = read_json(given)
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{OP}: config has type {type(given).__name__}; expected a dict or the path of a JSON "
            f"file"
        )
    found = _Found()
    source = given
    given, other = _without_other_optimizer(_translated(given, found.problems), found.problems)
    _walk(given, "", found)
    values = found.values
    problems = [*found.problems, *_contradictions(values)]
    # an error that this frame held would hold it, and all that call it, in a cycle
    found.problems.clear()
    _raise_all(problems)
    fields = {name: values[path] for path, name in _FIELDS.items() if path in values}
    for section in MONITORS:
        if values.get(f"{section}.enabled"):
            fields[section] = {
                path.partition(".")[2]: values[path]
                for path in values
                if path.startswith(f"{section}.")
            }
    if fields.get("stage", 0) != 3 and fields.get("params"):
        fields["params"] = None
        found.accepted.setdefault(
            "weights are offloaded at stage 3 only, as in DeepSpeed", []
        ).append(_WEIGHTS)
    if fields.get("ignore_unused_parameters") is False and not (
        fields.get("stage", 0) in (1, 2) and fields.get("offload") == "cpu"
    ):
        fields["ignore_unused_parameters"] = True
        why = (
            "parameters that no rank used are skipped, but at stages 1 and 2 with "
            "offload_optimizer on cpu, as in DeepSpeed"
        )
        found.accepted[why] = [f"{ZERO}.ignore_unused_parameters"]
    if fields.get("buffer_dtype") and not (fields.get("bf16") or fields.get("fp16")):
        found.accepted["buffers are cast beside 16-bit weights only, as in DeepSpeed"] = [
            "data_types.buffer_dtype"
        ]
    if values.get("bf16.enabled") and values.get(_LOW_MASTERS):
        fields["grad_dtype"] = fields.get("grad_dtype") or "bf16"
    if "optimizer" not in values and (
        low := [path for path in (_LOW_STATES, _LOW_MASTERS) if values.get(path)]
    ):
        why = (
            "masters and states are reduced in the configuration's Adam alone, or your "
            "FusedAdam(state_dtype=, master=)"
        )
        found.accepted[why] = low
    pinned = [
        values.get(f"{section}.pin_memory", True)
        for section in (_STATES, _WEIGHTS)
        if values.get(f"{section}.device")
    ]
    if len(set(pinned)) == 2:
        found.accepted[
            "there is one setting for states and weights, and one of them is not to be pinned"
        ] = [f"{section}.pin_memory" for section in (_STATES, _WEIGHTS)]
    return Config(
        **fields,
        pin_memory=all(pinned),
        autocast=_autocast(values),
        loss_scale=_loss_scale(values),
        optimizer=_adam_options(values) if "optimizer" in values else other and other[1],
        optimizer_type=FusedAdam if other is None else other[0],
        given=frozenset(values),
        source=source,
        accepted=tuple(f"{', '.join(paths)}: {why}" for why, paths in found.accepted.items()),
    )


def shard_options(settings: Config, muon: bool = False) -> dict[str, Any]:
    """Return the keyword arguments of `shard` for a configuration, but those that depend on the
    loop.

    These are clip_grad_norm, accumulate and materialize. "stage" is among what is returned.
    """
    own = {
        name: value
        for name, value in settings.shardcore.items()
        if name not in ("offload", "optimizer", "mesh")
    }
    if math.prod(settings.shardcore.get("mesh", ())) > 1:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        own["process_group"] = init_device_mesh(device, tuple(settings.shardcore["mesh"]))
    own_tiers = settings.shardcore.get("offload", {})
    tiers: dict[str, Any] = {"params": settings.params, "pin_memory": settings.pin_memory}
    overlap_step = False
    if settings.offload is not None:
        tiers |= {"optimizer": settings.offload, "ratio": settings.ratio}
        if settings.offload == "nvme":
            # as DeepSpeed's swap files; save_checkpoint is its way
            tiers |= {"path": settings.nvme_path, "durable": False}
        elif settings.stage > 0 and not muon:  # which orthogonalizes gradients on the device
            if own_tiers == "auto" or own_tiers.get("ratio", settings.ratio) != 0.0:
                tiers["gradients"] = "cpu"  # as in ZeRO-Offload
            # at 1 and 2 new weights are gathered, before which NCCL's ranks must not read
            overlap_step = settings.stage == 3
    offload: Any = own_tiers  # "auto"
    if own_tiers != "auto":
        tiers |= own_tiers
        offload = tiers if settings.offload or settings.params or own_tiers else None
    return {
        "stage": settings.stage,
        "offload": offload,
        "precision": "fp16"
        if settings.fp16
        else "bf16"
        if settings.bf16
        else "fp32"
        if settings.autocast is None
        else None,
        "loss_scale": settings.loss_scale,
        "reduce_dtype": settings.communication_data_type,
        "grad_dtype": settings.grad_dtype or "fp32",
        "cast_inputs": settings.auto_cast or not settings.fp16,
        "reshard_after_forward": settings.hpz_partition_size
        if settings.stage == 3 and settings.hpz_partition_size > 1
        else True,
        "prefetch": 0 if settings.stage == 3 and settings.prefetch_bucket_size == 0 else 1,
        "overlap_step": overlap_step,
        **own,
    }


def _without_other_optimizer(
    given: Mapping[str, Any], problems: list[Exception]
) -> tuple[Mapping[str, Any], tuple[type[torch.optim.Optimizer], dict[str, Any]] | None]:
    """Take an optimizer that is not Adam out of the configuration: its class and arguments,
    which the class itself checks.
    """
    section = given.get("optimizer")
    name = section.get("type") if isinstance(section, Mapping) else None
    cls = OTHER_OPTIMIZERS.get(name.lower()) if isinstance(name, str) else None
    if cls is None:
        return given, None
    assert isinstance(section, Mapping)
    options, own = section.get("params") or {}, (given.get("shardcore") or {}).get("optimizer")
    try:
        if own:
            raise ValueError(
                f"config shardcore.optimizer has {own} for {name}; expected it with Adam alone"
            )
        if unknown := sorted({str(key) for key in section} - {"type", "params", "legacy_fusion"}):
            raise ValueError(
                f"config optimizer.{unknown[0]} is not supported; expected type and params"
            )
        if not isinstance(options, Mapping):
            raise TypeError(
                f"config optimizer.params has {options!r}; expected an object with keys"
            )
        if cls is Muon:
            options = {"halves": muon_halves(options)}
            cls(
                [
                    {"params": [torch.zeros(1, 1)], "use_muon": half, **of}
                    for half, of in options["halves"].items()
                ]
            )
        else:
            if cls is Lion:
                # DeepSpeed's defaults; Lion has its paper's
                options = {"lr": 1e-3, "betas": (0.9, 0.999), **options}
            cls([torch.zeros(1, requires_grad=True)], **options)
    except (TypeError, ValueError) as error:
        said = str(error)
        where = (
            ""
            if said.startswith("config")
            else f"config optimizer.params are not those of {cls.__name__}; expected its own: "
        )
        problems.append(type(error)(f"{OP}: {where}{said}"))
        options = {}
    return {key: value for key, value in given.items() if key != "optimizer"}, (cls, dict(options))


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
            raise ValueError(f"{name} has {value!r}; expected {' or '.join(map(repr, same[name]))}")
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


def _contradictions(values: Mapping[str, Any]) -> Iterator[Exception]:
    if (values.get("shardcore") or {}).get("offload") == "auto":
        for section in (_STATES, _WEIGHTS):
            if values.get(f"{section}.device") is not None:
                yield ValueError(
                    f'{OP}: config has shardcore.offload "auto" and {section}; expected one of them'
                )
    if "optimizer" not in values and (values.get("shardcore") or {}).get("optimizer"):
        yield ValueError(
            f"{OP}: config shardcore.optimizer is given without optimizer; expected both (or "
            f"optimizer=FusedAdam(...))"
        )
    if "optimizer" in values and "optimizer.type" not in values:
        yield ValueError(f'{OP}: config optimizer.type is missing; expected "Adam" or "AdamW"')
    if (
        values.get("optimizer.type") == "adamw"
        and values.get("optimizer.params.adam_w_mode") is False
    ):
        yield ValueError(
            f'{OP}: config optimizer.params.adam_w_mode has False for the type "AdamW"; expected '
            f'the type "Adam", or true'
        )
    if values.get("fp16.enabled") and values.get("bf16.enabled"):
        yield ValueError(
            f"{OP}: config fp16.enabled and bf16.enabled are both true; expected one of them"
        )
    power, least = (
        values.get("fp16.initial_scale_power", 16),
        values.get("fp16.min_loss_scale", 1.0),
    )
    if (
        not values.get("fp16.loss_scale")
        and power is not None
        and least is not None
        and least > 2.0**power
    ):
        yield ValueError(
            f"{OP}: config fp16.min_loss_scale has {least}; expected at most "
            f"2**initial_scale_power, {2.0**power:g}"
        )
    if values.get(f"{_STATES}.device") == "nvme" and values.get(f"{_STATES}.nvme_path") is None:
        yield ValueError(
            f"{OP}: config {_STATES}.nvme_path is missing; expected a directory on the disk to use"
        )
    if values.get(f"{_WEIGHTS}.device") == "nvme" and values.get(f"{ZERO}.stage") == 3:
        states, path = values.get(f"{_STATES}.device"), values.get(f"{_WEIGHTS}.nvme_path")
        if states != "nvme":
            yield ValueError(
                f'{OP}: config {_WEIGHTS}.device has "nvme" and {_STATES}.device {states!r}; '
                f'expected "nvme" for both, since a '
                "step reads and writes both"
            )
        elif path not in (None, values.get(f"{_STATES}.nvme_path")):
            yield ValueError(
                f"{OP}: config {_WEIGHTS}.nvme_path has {path!r}; expected that of "
                f"{_STATES}.nvme_path, or none"
            )
    size = values.get("tensor_parallel.autotp_size", 1)
    if values.get("tensor_parallel.tp.tp_size", 1) not in (1, size):
        yield ValueError(
            f"{OP}: config tensor_parallel.tp.tp_size differs from tensor_parallel.autotp_size; "
            f"expected {size}"
        )
    trained = next((name for name in ("fp16", "bf16") if values.get(f"{name}.enabled")), "fp32")
    if (asked := values.get("data_types.param_dtype")) not in (None, trained):
        yield ValueError(
            f"{OP}: config data_types.param_dtype has {asked!r}, and fp16 and bf16 ask for "
            f"{trained!r}; expected the same"
        )
    if values.get("gradient_allreduce_op") == "sum" and values.get(f"{ZERO}.stage") == 3:
        yield ValueError(
            f'{OP}: config gradient_allreduce_op has "sum" at stage 3; expected "mean", or a stage '
            f"below"
        )
    if trained == "bf16" and _autocast(values) == "fp16":
        yield ValueError(
            f'{OP}: config torch_autocast.dtype has "fp16" with bf16.enabled; expected "bf16", or '
            f"weights in float32"
        )
    if values.get("torch_autocast.enabled") and values.get("fp16.enabled"):
        yield ValueError(
            f"{OP}: config torch_autocast.enabled and fp16.enabled are both true; expected one of "
            f"them"
        )


def _autocast(values: Mapping[str, Any]) -> str | None:
    return (
        (values.get("torch_autocast.dtype") or "bf16")
        if values.get("torch_autocast.enabled")
        else None
    )


def _loss_scale(values: Mapping[str, Any]) -> LossScale | float | None:
    """Return the fixed scale, or for 0 a dynamic one; the other keys count only then, as in
    DeepSpeed.

    Under autocast to float16 it is a scale with the options of torch's GradScaler.
    """
    if not values.get("fp16.enabled"):
        return (
            LossScale(window=2000, hysteresis=1, minimum=2.0**-126)
            if _autocast(values) == "fp16"
            else None
        )
    fixed: float = values.get("fp16.loss_scale", 0.0)
    names = {
        "initial_scale_power": "initial_power",
        "loss_scale_window": "window",
        "min_loss_scale": "minimum",
    }
    keys = (*names, "hysteresis", "consecutive_hysteresis")
    return fixed or LossScale(
        **{names.get(k, k): values[f"fp16.{k}"] for k in keys if f"fp16.{k}" in values}
    )


def _adam_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return FusedAdam's arguments. "Adam" means AdamW, too, unless adam_w_mode is false, as in
    DeepSpeed.
    """
    defaults = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "bias_correction": True,
    }
    defaults |= {"adam_w_mode": True, "amsgrad": False, "maximize": False}
    if values.get("optimizer.params.torch_adam") and values.get(
        "optimizer.params.adam_w_mode", True
    ):
        defaults["weight_decay"] = 0.01  # of torch's AdamW, which DeepSpeed makes then
    options = {
        key: values.get(f"optimizer.params.{key}", default) for key, default in defaults.items()
    }
    low = values.get("bf16.enabled", False)
    if (low and values.get(_LOW_STATES)) or values.get(
        "optimizer.params.fp32_optimizer_states"
    ) is False:
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
    if text is None:
        with open(path, "rb") as file:
            text = file.read()
    try:
        return json.loads(text, object_pairs_hook=_once)
    except ValueError as problem:
        found, hint = None, ""
        try:
            # what DeepSpeed reads them with
            found = import_module("hjson").loads(text.decode(), object_pairs_hook=_once)
        except ImportError:
            hint = " (comments and trailing commas: pip install hjson)"
        except ValueError as other:
            hint = f", or Hjson: {other}"
        if found and isinstance(found, Mapping):  # Hjson takes nearly every text as a string
            return found
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
