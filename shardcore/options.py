"""What shard() accepts: its options, and the optimizer to shard. All checks here change nothing."""

import difflib
import logging
import math
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from shardcore.checkpoint.materialize import Materialize
from shardcore.engine import compiled
from shardcore.engine.audit import AuditOptions
from shardcore.engine.bucket import LIFETIMES, ReducePolicy
from shardcore.engine.loss_scale import LossScale, LossScaler
from shardcore.engine.units import UnitPolicy
from shardcore.offload.cpu_store import OffloadOptions
from shardcore.optim import AdamOptimizer, Elementwise, FusedAdam, ShardableOptimizer
from shardcore.optim.adam import AdamKind
from shardcore.optim.elementwise import ELEMENTWISE, ElementKind, is_elementwise
from shardcore.optim.group_options import check_capturable
from shardcore.optim.muon import Muon, MuonKind
from shardcore.torch_private import mark_stepped, share_optimizer_hooks

logger = logging.getLogger("shardcore")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHOICES: dict[str, tuple[str | None, ...]] = {
    "precision": ("bf16", "fp16", "fp32", None),
    "grad_dtype": ("bf16", "fp32"),
    "reduce_dtype": ("bf16", "fp16", "fp32", None),
    "reduction": ("nccl", "ordered"),
}
_LONG_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


def dtype_name(dtype: Any) -> Any:
    """Return "bf16" for torch.bfloat16 and "bfloat16", and so on; anything else as it is."""
    if isinstance(dtype, str | torch.dtype):
        return _LONG_NAMES.get(str(dtype).removeprefix("torch."), dtype)
    return dtype


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name that is spelled most like `name`; None if all differ too much."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.75)), None)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest name, or all of them."""
    names = list(known)
    near = nearest(name, names)
    return f"expected one of {', '.join(names)}" if near is None else f"did you mean {near!r}?"


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """The options of shard, under its names and as given, with its defaults; `check` refuses
    what cannot be followed.
    """

    stage: int = 2
    units: UnitPolicy = "auto"
    offload: Mapping[str, Any] | str | None = None
    precision: str | None = None
    loss_scale: LossScale | float | None = None
    keep_fp32: Sequence[Any] = ()
    cast_inputs: bool | str = True
    grad_dtype: str = "fp32"
    reduce_dtype: str | None = None
    clip_grad_norm: float | None = None
    accumulate: int = 1
    sync_each: bool | None = None
    overlap_step: bool = False
    reshard_after_forward: bool | int = True
    prefetch: int = 1
    compile: bool | Mapping[str, Any] = False
    reduction: str = "ordered"
    broadcast: bool = True
    materialize: Materialize | None = None
    audit: int | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Shorten the names of dtypes."""
        for name in ("precision", "grad_dtype", "reduce_dtype"):
            object.__setattr__(self, name, dtype_name(getattr(self, name)))

    def check(self, shard_world_size: int, backend_sums: bool) -> None:
        """Raise TypeError, ValueError or NotImplementedError for an option that cannot be followed.

        shard_world_size: how many ranks share weights; backend_sums: whether the process group can
        add gradients by itself.
        """
        if not _is_int(self.stage):
            raise TypeError(f"shard: stage is {self.stage!r}; expected 0, 1, 2 or 3")
        if self.stage not in LIFETIMES:
            raise ValueError(f"shard: stage is {self.stage}; expected 0, 1, 2 or 3")
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"shard: {name} is {value!r}; {_expected(value, choices)}")
        if not isinstance(self.cast_inputs, bool) and self.cast_inputs != "units":
            raise TypeError(
                f'shard: cast_inputs is {self.cast_inputs!r}; expected True, False or "units"'
            )
        for name in ("broadcast", "overlap_step"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"shard: {name} is {getattr(self, name)!r}; expected True or False")
        if self.sync_each is not None and not isinstance(self.sync_each, bool):
            raise TypeError(f"shard: sync_each is {self.sync_each!r}; expected True, False or None")
        clip = self.clip_grad_norm
        if clip is not None:
            if isinstance(clip, bool) or not isinstance(clip, int | float):
                raise TypeError(
                    f"shard: clip_grad_norm is {clip!r}; expected a number, or None not to clip"
                )
            # an int may be too large for a float
            if not clip > 0 or sys.float_info.max < clip < math.inf:
                raise ValueError(
                    f"shard: clip_grad_norm is {clip}; expected a positive number, or None not to "
                    f"clip"
                )
        accumulate = self.accumulate
        if not _is_int(accumulate):
            raise TypeError(
                f"shard: accumulate is {accumulate!r}; expected a whole number of backwards a step"
            )
        if accumulate < 1:
            raise ValueError(f"shard: accumulate is {accumulate}; expected at least 1")
        if not _is_int(self.prefetch):
            raise TypeError(
                f"shard: prefetch is {self.prefetch!r}; expected a whole number of units"
            )
        if self.prefetch < 0 or (self.stage != 3 and self.prefetch != 1):
            raise ValueError(
                f"shard: prefetch is {self.prefetch} at stage {self.stage}; expected how many "
                f"units ahead weights are gathered "
                "at stage 3, 0 or more, or nothing at other stages"
            )
        _ = self.compile_arguments  # raises for what torch.compile does not accept
        _ = self.audits  # likewise
        if self.reduction == "nccl" and not backend_sums:
            raise ValueError(
                'shard: reduction is "nccl" but the process group has no nccl backend; expected '
                '"ordered" (the same bits on every backend), or init_process_group("nccl")'
            )
        threads = self.tiers.cpu_threads
        if threads is not None and not self.overlap_step:
            raise ValueError(
                f'shard: offload["cpu_threads"] is {threads} but overlap_step is False; expected '
                f"None (a step that is complete "
                "when it returns uses torch's threads: torch.set_num_threads), or overlap_step=True"
            )
        reshard = self.reshard_after_forward
        if not isinstance(reshard, int):
            raise TypeError(
                f"shard: reshard_after_forward is {reshard!r}; expected True, False or a number of "
                f"ranks"
            )
        if _is_int(reshard) and (reshard < 1 or shard_world_size % reshard):
            raise ValueError(
                f"shard: reshard_after_forward is {reshard}; expected a divisor of "
                f"{shard_world_size}, the ranks that share weights"
            )
        if not isinstance(reshard, bool) and self.stage != 3:
            raise ValueError(
                f"shard: reshard_after_forward is {reshard} at stage {self.stage}, which keeps "
                f"them; expected stage 3, or no number"
            )

    def check_audit(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raise ValueError for audits of steps that a CUDA graph may replay."""
        if self.audits is not None and any(group.get("capturable") for group in groups):
            raise ValueError(
                "shard: audit is given with capturable=True, and replays of a CUDA graph are not "
                "audited; expected audit=None, or capturable=False"
            )

    def check_loss_scale(self, dtypes: Collection[torch.dtype]) -> None:
        """Raise TypeError or ValueError for a `loss_scale` that cannot be followed with weights
        of these dtypes.
        """
        if self.loss_scale is None:
            return
        if self.precision != "fp16" and not {torch.float16, torch.float32} & set(dtypes):
            precision = "None" if self.precision is None else f'"{self.precision}"'
            raise ValueError(
                f"shard: loss_scale is {self.loss_scale!r} with precision={precision}, and no "
                "weight is float16, or float32 for a forward under torch.autocast; expected None, "
                "or such weights"
            )
        if isinstance(self.loss_scale, LossScale):
            return
        if isinstance(self.loss_scale, bool) or not isinstance(self.loss_scale, int | float):
            raise TypeError(
                f"shard: loss_scale is {self.loss_scale!r}; expected a number, "
                f"shardcore.LossScale(...) or None"
            )
        if not 0.0 < self.loss_scale <= sys.float_info.max:
            raise ValueError(f"shard: loss_scale is {self.loss_scale}; expected a positive number")

    @property
    def dtype(self) -> torch.dtype | None:
        """What `precision` converts weights to; None leaves them as they are."""
        return None if self.precision is None else DTYPES[self.precision]

    @property
    def chooses_offload(self) -> bool:
        """Whether `offload` is "auto", and has to be replaced by what is chosen."""
        return isinstance(self.offload, str) and self.offload == "auto"

    @cached_property
    def tiers(self) -> "OffloadOptions":
        """What `offload` asks for; nothing as long as it is "auto"."""
        return offload_options(None if self.chooses_offload else self.offload, self.stage)

    @cached_property
    def compile_arguments(self) -> dict[str, Any] | None:
        """The arguments of torch.compile for the units; None compiles nothing."""
        return compiled.compile_arguments("shard", self.compile, self.stage == 3)

    @cached_property
    def audits(self) -> AuditOptions | None:
        """What `audit` asks for; None audits nothing."""
        return audit_options(self.audit)

    def reduce_policy(self, world_size: int) -> ReducePolicy:
        """How gradients are reduced over this many ranks."""
        return ReducePolicy(
            self.accumulate,
            self.stage >= 2 if self.sync_each is None else self.sync_each,
            DTYPES[self.grad_dtype],
            None if self.reduce_dtype is None or world_size == 1 else DTYPES[self.reduce_dtype],
            backend_sums=self.reduction == "nccl",
        )

    def loss_scaler(self) -> LossScaler:
        """What scales losses, and gradients back."""
        default = LossScale() if self.precision == "fp16" else None
        return LossScaler(default if self.loss_scale is None else self.loss_scale)

    def compared(self) -> dict[str, Any]:
        """The options that have to be equal on all ranks; of the others what follows from them
        has to be.
        """
        names = [
            field.name
            for field in fields(self)
            if field.name not in ("units", "keep_fp32", "materialize")
        ]
        values = {name: getattr(self, name) for name in names}
        return values | {
            "offload": self.tiers,
            "compile": compiled.in_words(self.compile),
            "audit": self.audits,
        }


def _expected(value: object, choices: Iterable[str | None]) -> str:
    """Return the end of a message about a value: the nearest choice, or all of them."""
    words = [choice for choice in choices if choice is not None]
    near = None if value in tuple(DTYPES) else nearest(value, words)
    if near is not None:
        return f'did you mean "{near}"?'
    expected = " or ".join("None" if choice is None else f'"{choice}"' for choice in choices)
    dtypes = ", ".join(str(DTYPES[word]) for word in words if word in DTYPES)
    return f"expected {expected}" + (f" ({dtypes})" if dtypes else "")


OPTIONS = tuple(field.name for field in fields(ShardOptions))
GROUPS = ("process_group", "model_parallel_group", "ranks_per_node")  # the other ones of shard


def check_names(op: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a name that is not among the known options."""
    for name in names:
        if name not in known:
            raise TypeError(f"{op}: {name!r} is no option of shard(); {did_you_mean(name, known)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def audit_options(audit: int | Mapping[str, Any] | None) -> AuditOptions | None:
    """Return what shard's `audit` asks for; raise for anything else."""
    if audit is None:
        return None
    if _is_int(audit):
        audit = {"every": audit}
    if not isinstance(audit, Mapping):
        raise TypeError(
            f'shard: audit is {audit!r}; expected None, a number of steps, or {{"every": K}}'
        )
    keys = tuple(field.name for field in fields(AuditOptions))
    for key in audit:
        if key not in keys:
            raise ValueError(f"shard: audit has the unknown key {key!r}; {did_you_mean(key, keys)}")
    if "every" not in audit:
        raise ValueError('shard: audit has no "every"; add "every": K, a number of steps')
    for key in ("every", "sweep"):
        if key in audit and not (_is_int(audit[key]) and audit[key] > 0):
            raise ValueError(
                f'shard: audit["{key}"] is {audit[key]!r}; expected a whole number of at least 1'
            )
    options = AuditOptions(**audit)
    if options.on_corruption not in ("log", "raise"):
        raise ValueError(
            f'shard: audit["on_corruption"] is {options.on_corruption!r}; '
            f"{_expected(options.on_corruption, ('log', 'raise'))}"
        )
    return options


def offload_options(offload: Mapping[str, Any] | str | None, stage: int) -> OffloadOptions:
    """Return what shard's `offload` asks for at this stage; raise for anything else."""
    if offload is None:
        return OffloadOptions()
    if not isinstance(offload, Mapping):
        raise TypeError(
            f'shard: offload is {offload!r}; expected None, "auto" or {{"optimizer": "cpu"}}'
        )
    keys = tuple(field.name for field in fields(OffloadOptions) if field.name != "auto")
    for key in offload:
        if key == "device":
            raise ValueError(
                f'shard: offload has the unknown key "device"; write '
                f'{{"optimizer": "{offload[key]}"}}'
            )
        if key not in keys:
            raise ValueError(
                f"shard: offload has the unknown key {key!r}; {did_you_mean(key, keys)}"
            )
    tier = offload.get("optimizer")
    if tier is None and offload.get("params") == "cpu" and "ratio" not in offload:
        # weights alone are offloaded: all states are on the device
        tier, offload = "cpu", {**offload, "ratio": 0.0}
    if offload.get("params") == "nvme" and (tier != "nvme" or offload.get("ratio", 1.0) != 1.0):
        raise ValueError(
            f'shard: offload["params"] is "nvme" with the optimizer on {tier!r} and the ratio '
            f"{offload.get('ratio', 1.0)!r}; "
            'expected the optimizer on "nvme", too, and no ratio'
        )
    if tier is None:
        given = ", ".join(map(str, offload)) or "no key"
        raise ValueError(
            f'shard: offload has {given} without "optimizer"; add "optimizer": "cpu" or "nvme"'
        )
    if tier not in ("cpu", "nvme"):
        expected = _expected(tier, ("cpu", "nvme"))
        raise ValueError(f'shard: offload["optimizer"] is {tier!r}; {expected}')
    path_option = offload.get("path")
    path = _paths_of(path_option)
    if path is None and tier == "nvme":
        raise ValueError(
            'shard: offload["optimizer"] is "nvme" without "path"; add "path": DIR, a directory on '
            "the disk to use"
        )
    if path is not None and tier == "cpu":
        raise ValueError(
            f'shard: offload["path"] is {path_option!r} with the optimizer on "cpu"; remove it, or '
            'use "optimizer": "nvme"'
        )
    pin_memory = offload.get("pin_memory", True)
    if not isinstance(pin_memory, bool):
        raise TypeError(f'shard: offload["pin_memory"] is {pin_memory!r}; expected True or False')
    limit = _bytes_of(offload, "pin_memory_limit")
    if limit is not None and not pin_memory:
        raise ValueError(
            f'shard: offload["pin_memory_limit"] is {limit} but "pin_memory" is False; expected '
            f"None, or True to pin"
        )
    auto = offload.get("ratio") == "auto"
    device_limit = _bytes_of(offload, "device_memory_limit")
    if device_limit is not None and not auto:
        raise ValueError(
            f'shard: offload["device_memory_limit"] is {device_limit} with the ratio '
            f"{offload.get('ratio', 1.0)!r}; expected None, or "
            'the ratio "auto"'
        )
    gradients, params = offload.get("gradients"), offload.get("params")
    for key, value, tiers in (
        ("gradients", gradients, ("cpu",)),
        ("params", params, ("cpu", "nvme")),
    ):
        if value not in (None, *tiers):
            raise ValueError(
                f'shard: offload["{key}"] is {value!r}; expected {", ".join(map(repr, tiers))} or '
                f"None"
            )
    if params is not None and stage != 3:
        raise ValueError(
            f'shard: offload["params"] is "{params}" at stage {stage}, which keeps full weights on '
            f"the device; expected stage 3, or None"
        )
    if gradients is not None and stage == 0:
        raise ValueError(
            'shard: offload["gradients"] is "cpu" at stage 0, where p.grad shows them on the '
            "device; expected None, or a stage from 1 on"
        )
    if auto and tier == "nvme":
        raise ValueError(
            'shard: offload["ratio"] is "auto" with the optimizer on "nvme"; expected a number '
            "from 0 to 1"
        )
    ratio = 1.0 if auto else _ratio_of(offload.get("ratio", 1.0))
    if gradients is not None and ratio == 0.0:
        raise ValueError(
            f'shard: offload["gradients"] is "cpu" with the optimizer on '
            f"{offload.get('optimizer')!r} and the ratio 0: all "
            'states, and the gradients for them, are on the device; expected "optimizer": "cpu" '
            "and a ratio above 0, or None"
        )
    threads = _threads_of(offload.get("cpu_threads"))
    durable, resume = offload.get("durable", True), offload.get("resume")
    for key, value, allowed in (
        ("durable", durable, (True, False)),
        ("resume", resume, (True, False, None)),
    ):
        if not any(value is choice for choice in allowed):
            raise TypeError(
                f'shard: offload["{key}"] is {value!r}; expected one of '
                f"{', '.join(map(str, allowed))}"
            )
        if key in offload and tier == "cpu":
            raise ValueError(
                f'shard: offload["{key}"] is {value} with the optimizer on "cpu"; expected it with '
                f'"nvme" alone'
            )
    if resume and not durable:
        raise ValueError(
            'shard: offload["resume"] is True but "durable" is False, which commits nothing; '
            "expected one of them"
        )
    return OffloadOptions(
        tier,
        ratio,
        auto,
        device_limit,
        gradients,
        params,
        pin_memory,
        limit,
        threads,
        path,
        durable,
        resume,
    )


def _paths_of(path: Any) -> tuple[str, ...] | None:
    if path is None:
        return None
    paths = [path] if isinstance(path, str | os.PathLike) else path
    are_paths = isinstance(paths, Sequence) and all(
        isinstance(folder, str | os.PathLike) for folder in paths
    )
    if not are_paths or not paths:
        raise TypeError(
            f'shard: offload["path"] is {path!r}; expected a directory on the disk to use, or a '
            f"list of some"
        )
    if not all(map(os.fspath, paths)):
        raise ValueError(
            f'shard: offload["path"] is {path!r}; expected a directory ("." is the current one)'
        )
    return tuple(os.path.expanduser(folder) for folder in paths)


def _threads_of(threads: Any) -> int | None:
    if threads is None:
        return None
    if not _is_int(threads):
        raise TypeError(
            f'shard: offload["cpu_threads"] is {threads!r}; expected a whole number of threads, or '
            f"None"
        )
    if not 1 <= threads <= 4096:
        raise ValueError(
            f'shard: offload["cpu_threads"] is {threads}; expected 1 to 4096 threads, or None'
        )
    return int(threads)


def _bytes_of(offload: Mapping[str, Any], key: str) -> int | None:
    limit = offload.get(key)
    if limit is None:
        return None
    if not _is_int(limit):
        raise TypeError(
            f'shard: offload["{key}"] is {limit!r}; expected a whole number of bytes, or None'
        )
    if not 0 <= limit < 1 << 63:
        raise ValueError(
            f'shard: offload["{key}"] is {limit}; expected 0 to 2**63 - 1 bytes, or None'
        )
    return int(limit)


def _ratio_of(ratio: object) -> float:
    where = f'shard: offload["ratio"] is {ratio!r}'
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise TypeError(
            f'{where}; expected a number from 0 to 1, the share that the CPU updates, or "auto"'
        )
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"{where}; expected a number from 0 to 1, the share that the CPU updates")
    return float(ratio)


def without_states(offload: Any) -> Any:
    """Complete `offload` for a model without an optimizer, which can offload weights alone."""
    if not isinstance(offload, Mapping):
        return offload
    tier: dict[str, Any] = {"optimizer": "cpu"}
    if offload.get("params") == "nvme":
        tier = {"optimizer": "nvme", "durable": False}
    return {**tier, **offload}


class NoOptimizer:
    """In place of an optimizer for a model that only runs forward: it has no parameters and no
    states.
    """

    kind = AdamKind()

    def __init__(self) -> None:
        """Update nothing."""
        self.param_groups: list[dict[str, Any]] = []
        self.state: Any = {}

    def forget(self) -> None:
        """See ShardableOptimizer: there is nothing to forget."""


def _check_places(optimizer: ShardableOptimizer, offload: object, overlap_step: bool) -> None:
    """Raise NotImplementedError for tiers and steps that Adam alone has."""
    if isinstance(offload, Mapping) and offload.get("optimizer") == "nvme":
        raise NotImplementedError(
            f'shard: offload["optimizer"] is "nvme" with {optimizer.kind.name}; expected "cpu" '
            f"(files have states of Adam alone)"
        )
    in_host = isinstance(offload, Mapping) and offload.get("gradients") is not None
    if isinstance(optimizer.kind, MuonKind) and (overlap_step or in_host):
        raise NotImplementedError(
            'shard: Muon does not support overlap_step=True or offload["gradients"]="cpu". Its '
            "step orthogonalizes gradients on the device."
        )


# their states have blocks and scales of their own, which flat shards would cut
_OWN_BLOCKS = ("bitsandbytes.optim", "torchao.optim", "torchao.prototype.low_bit_optim")


def refuse_other_blocks(op: str, optimizer: object) -> None:
    """Raise TypeError for a low-bit, paged or offloading optimizer of bitsandbytes or torchao.
    Imports neither.
    """
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith(_OWN_BLOCKS):
            package = cls.__module__.partition(".")[0]
            raise TypeError(
                f"{op}: optimizer is a {type(optimizer).__name__} of {package}, whose states "
                'cannot be sharded. Use shardcore.FusedAdam(..., state_dtype="8bit"), with '
                'offload={"optimizer": "cpu"} to keep the states in host memory'
            )


def accept_optimizer(
    optimizer: object, offload: object = None, overlap_step: bool = False
) -> ShardableOptimizer:
    """Return the optimizer to use: the same one, a FusedAdam for torch's Adam or AdamW, an
    Elementwise for others.
    """
    refuse_other_blocks("shard", optimizer)
    for index, group in enumerate(getattr(optimizer, "param_groups", ())):
        if group.get("capturable") and offload is not None:
            raise ValueError(
                f"shard: param_groups[{index}].capturable is True with offload; expected False "
                f"(the host steps over what is in its memory, and has to know the norm for that)"
            )
    if isinstance(optimizer, ShardableOptimizer):
        if optimizer._engine is not None:
            raise ValueError(
                "shard: the optimizer is already sharded; expected one that shard() has not changed"
            )
        if not isinstance(optimizer, AdamOptimizer):  # Trainer converted it before
            _check_places(optimizer, offload, overlap_step)
            return optimizer
        check_capturable("shard", optimizer.param_groups, optimizer._capture_type)
        return optimizer
    if isinstance(optimizer, Muon) or (
        isinstance(optimizer, torch.optim.Optimizer) and is_elementwise(optimizer)
    ):
        kind = (
            MuonKind() if isinstance(optimizer, Muon) else ElementKind(type(optimizer), optimizer)
        )
        accepted = Elementwise(optimizer, kind)
        _check_places(accepted, offload, overlap_step)
        return accepted
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        name = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            if isinstance(optimizer, type):
                name = f"class ({optimizer.__name__})"
            raise TypeError(
                f"shard: optimizer is a {name}; expected an optimizer over the model's parameters, "
                "such as torch.optim.AdamW(model.parameters()), or None for a model that only runs "
                "forward"
            )
        if f"{type(optimizer).__module__}.".startswith("torch.optim."):
            name = f"torch.optim.{name}"
        why = ""
        if isinstance(optimizer, torch.optim.NAdam | torch.optim.ASGD):
            why = " It keeps numbers of past learning rates or betas for each parameter."
        elementwise = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        raise TypeError(
            f"shard: optimizer is a {name}, which cannot run on shards.{why} Use "
            "shardcore.FusedAdam, CPUAdam, Lion or shardcore.Muon, torch.optim's Adam, AdamW, "
            f"{elementwise}, or a class with elementwise = True"
        )
    assert isinstance(optimizer, torch.optim.Optimizer)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ValueError(
                f"shard: param_groups[{index}].differentiable is True; expected False for a "
                f"sharded optimizer"
            )
        keys = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
        options = {key: group[key] for key in keys}
        options["capturable"] = bool(group.get("capturable"))
        is_adamw = isinstance(optimizer, torch.optim.AdamW)
        decoupled = bool(group.get("decoupled_weight_decay", is_adamw))
        groups.append({"params": list(group["params"]), "adam_w_mode": decoupled, **options})
    return FusedAdam(groups)


def replace_optimizer(
    old: torch.optim.Optimizer, new: ShardableOptimizer, level: int | None
) -> None:
    """Let `new` take over: it shares `old`'s group dicts (so schedulers drive it) and hooks;
    `old` refuses to work.

    level: of the log line about it; None logs nothing.
    """
    for index, group in enumerate(new.param_groups):
        shared = old.param_groups[index]
        shared.update({key: value for key, value in group.items() if key not in shared})
        new.param_groups[index] = shared
    share_optimizer_hooks(new, old)
    kind = type(old).__name__
    for method in ("step", "add_param_group", "state_dict", "load_state_dict"):
        old.__dict__[method] = _Replaced(kind, method)
    old.__dict__["zero_grad"] = new.zero_grad
    # schedulers of the old one ask whether it has stepped; the new one does
    mark_stepped(old)
    if level is not None:
        logger.log(
            level,
            "shard: made %s from %s. Use the optimizer that shard() returns: it shares "
            "param_groups with the old optimizer, whose step() now raises an error.",
            "a shardcore.FusedAdam" if isinstance(new, AdamOptimizer) else "a sharded optimizer",
            kind,
        )


class _Replaced:
    """What is left of a method of an optimizer that a new one replaced."""

    def __init__(self, kind: str, method: str) -> None:
        self.kind, self.method = kind, method

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            f"{self.method}: this {self.kind} was replaced by shardcore.shard; expected "
            f"{self.method}() of the optimizer that shard returned"
        )
