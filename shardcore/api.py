"""shard(): the native door. Checks everything on every rank, then lays the model out and attaches the engine."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardcore.comm import Comm, first_difference
from shardcore.engine import build, model_io
from shardcore.engine.bucket import LIFETIMES, allocate
from shardcore.engine.engine import Engine
from shardcore.engine.reducer import ReducePolicy
from shardcore.engine.store import DeviceStore, StateStore
from shardcore.offload import CpuStore
from shardcore.optim import AdamOptimizer, CPUAdam, FusedAdam, check_max_norm
from shardcore.units import UnitPolicy, plan_units

logger = logging.getLogger("shardcore")

Model = TypeVar("Model", bound=nn.Module)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard(
    model: Model,
    optimizer: torch.optim.Optimizer,
    stage: int = 2,
    *,
    units: UnitPolicy = "auto",
    offload: Mapping[str, str] | None = None,
    precision: str = "bf16",
    keep_fp32: Sequence[Any] = (),
    cast_inputs: bool = True,
    grad_dtype: str = "fp32",
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    sync_each: bool | None = None,
    overlap_step: bool = False,
    reduction: str = "ordered",
    broadcast: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Model, AdamOptimizer]:
    """Partition the training state of `model` over the ranks; returns the same model and the optimizer to use.

    model: changed in place; class, parameter names and Parameter objects stay. It moves to the rank's device.
    optimizer: FusedAdam or CPUAdam (the same object comes back), or torch's Adam or AdamW (a new FusedAdam comes back, which
        shares its param_groups, so that schedulers made before go on working). Its state is carried into the shards.
    stage: 0 shards nothing, 1 optimizer states and masters, 2 also gradients (ZeRO; arXiv:1910.02054).
    units: what is reduced together: "auto" (the repeated blocks), a module class or several, a list of modules, or the least
        number of parameters of a unit.
    offload: {"optimizer": "cpu"} keeps states and masters in host memory and steps there: the same bits, fewer device bytes.
    precision: "bf16" makes bfloat16 weights from float32 masters, which start from the weights as given; "fp32" trains in
        float32. keep_fp32 names module classes, or parameters by name, that stay float32. cast_inputs casts floating inputs
        of the root forward to bfloat16; outputs are not cast.
    grad_dtype: "fp32" or "bf16", of the reduced gradient.
    clip_grad_norm: global norm to clip to in every step.
    accumulate: how many backwards make a step. sync_each reduces each of them and adds the results (default from stage 2 on);
        False adds locally in float32 and reduces once. Divide the loss by `accumulate` yourself, as in torch.
    broadcast: take rank 0's weights and buffers. process_group: the ranks that share the model (default: all).

    Afterwards backward reduces gradients as it goes; `p.grad` is the averaged gradient at stage 0 and None from stage 1 on
    (`full_grad`). Steps with a non-finite gradient are skipped on every rank. `model.state_dict()` and
    `optimizer.state_dict()` are whole, and collective.

    Collective. Raises ValueError or TypeError on every rank, with nothing changed, for bad arguments and for ranks that
    disagree; NotImplementedError for what is not built yet.
    """
    comm = Comm(process_group)
    options = {
        "stage": stage,
        "offload": offload,
        "precision": precision,
        "grad_dtype": grad_dtype,
        "clip_grad_norm": clip_grad_norm,
        "accumulate": accumulate,
        "sync_each": sync_each,
        "cast_inputs": cast_inputs,
        "overlap_step": overlap_step,
        "reduction": reduction,
        "broadcast": broadcast,
    }
    problem: Exception | None = None
    entries: list[Any] = []
    try:
        _check_options(options)
        build.check_model(model)
        adam = _accept_optimizer(optimizer)
        build.check_ownership(model, optimizer)
        device = _rank_device(comm, model, adam, offload)
        specs = plan_units(model, units)
        kept = build.kept_params(model, keep_fp32)
        entries = build.signature(model, specs, optimizer, options)
    except (ValueError, TypeError, NotImplementedError) as error:
        problem = error
    agree(comm, problem, entries)

    carried = {param: dict(state) for param, state in optimizer.state.items() if state}
    if adam is not optimizer:
        _share_groups(optimizer, adam, comm)
    builder = build.Builder(comm, LIFETIMES[stage], _DTYPES[precision], kept, device)
    buckets = builder.plan(model, specs, adam)
    for bucket in buckets:
        bucket.weight = allocate(bucket.layout.numel, bucket.dtype, device)
    amsgrad = {bucket: bool(adam.param_groups[bucket.group]["amsgrad"]) for bucket in buckets if bucket.group is not None}
    store: StateStore
    if offload is None:
        store = DeviceStore(list(amsgrad), amsgrad)
    else:
        store = CpuStore(list(amsgrad), amsgrad, device, pin_memory=offload_options(offload)[1])
    for bucket in buckets:
        builder.fill(bucket, store, broadcast)
    frozen = [(name, param) for name, param in model.named_parameters() if not param.requires_grad]
    builder.place_rest(model, [param for _, param in frozen], broadcast)

    policy = ReducePolicy(accumulate, stage >= 2 if sync_each is None else sync_each, _DTYPES[grad_dtype])
    engine = Engine(model, buckets, frozen, store, comm, LIFETIMES[stage], policy, clip_grad_norm, adam, device)
    engine.state_io.carry(carried)
    model_io.attach(engine, _DTYPES[precision] if cast_inputs and precision != "fp32" else None)
    adam.state.clear()
    adam._engine = engine
    return model, adam


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_options(options: Mapping[str, Any]) -> None:
    stage = options["stage"]
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise TypeError(f"shard: stage is {stage!r}; expected 0, 1 or 2")
    if stage == 3:
        raise NotImplementedError("shard: stage is 3, which is not built yet; expected 0, 1 or 2")
    if stage not in LIFETIMES:
        raise ValueError(f"shard: stage is {stage}; expected 0, 1 or 2")
    for name in ("precision", "grad_dtype"):
        if options[name] not in _DTYPES:
            raise ValueError(f'shard: {name} is {options[name]!r}; expected "bf16" or "fp32"')
    clip = options["clip_grad_norm"]
    if clip is not None and check_max_norm("shard", clip) == 0.0:
        raise ValueError("shard: clip_grad_norm is 0; expected a positive number, or None not to clip")
    accumulate = options["accumulate"]
    if isinstance(accumulate, bool) or not isinstance(accumulate, int):
        raise TypeError(f"shard: accumulate is {accumulate!r}; expected a whole number of backwards a step")
    if accumulate < 1:
        raise ValueError(f"shard: accumulate is {accumulate}; expected at least 1")
    if options["sync_each"] not in (None, True, False):
        raise TypeError(f"shard: sync_each is {options['sync_each']!r}; expected True, False or None")
    if options["overlap_step"]:
        raise NotImplementedError("shard: overlap_step is True, which is not built yet; expected False")
    if options["reduction"] == "nccl":
        raise NotImplementedError('shard: reduction is "nccl", which is not built yet; expected "ordered"')
    if options["reduction"] != "ordered":
        raise ValueError(f'shard: reduction is {options["reduction"]!r}; expected "ordered"')
    offload_options(options["offload"])


def offload_options(offload: Mapping[str, Any] | None) -> tuple[str | None, bool]:
    """Return (tier of the optimizer states or None, whether to pin host memory); raise for anything else."""
    if offload is None:
        return None, False
    if not isinstance(offload, Mapping):
        raise TypeError(f'shard: offload is {offload!r}; expected None or {{"optimizer": "cpu"}}')
    for key in offload:
        if key in ("gradients", "weights"):
            raise NotImplementedError(f'shard: offload has "{key}", which is not built yet; expected only "optimizer"')
        if key not in ("optimizer", "pin_memory"):
            raise ValueError(f'shard: offload has the unknown key {key!r}; expected "optimizer" and perhaps "pin_memory"')
    tier = offload.get("optimizer")
    if tier == "nvme":
        raise NotImplementedError('shard: offload["optimizer"] is "nvme", which is not built yet; expected "cpu"')
    if tier != "cpu":
        raise ValueError(f'shard: offload["optimizer"] is {tier!r}; expected "cpu"')
    pin_memory = offload.get("pin_memory", True)
    if not isinstance(pin_memory, bool):
        raise TypeError(f'shard: offload["pin_memory"] is {pin_memory!r}; expected True or False')
    return tier, pin_memory


def _accept_optimizer(optimizer: object) -> AdamOptimizer:
    """Return the optimizer to use: the same one, or a new FusedAdam with the options of torch's Adam or AdamW."""
    if isinstance(optimizer, AdamOptimizer):
        if optimizer._engine is not None:
            raise ValueError("shard: the optimizer is already sharded; expected one that shard() has not changed")
        for index, group in enumerate(optimizer.param_groups):
            if group["stochastic_rounding"]:
                raise ValueError(
                    f"shard: param_groups[{index}].stochastic_rounding is True; expected False (sharded weights are "
                    "rounded from float32 masters)"
                )
        return optimizer
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise TypeError(
            f"shard: optimizer is a {type(optimizer).__name__}; expected shardcore.FusedAdam, shardcore.CPUAdam, "
            "torch.optim.Adam or torch.optim.AdamW"
        )
    assert isinstance(optimizer, torch.optim.Optimizer)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        for key in ("differentiable", "capturable"):
            if group.get(key):
                raise ValueError(f"shard: param_groups[{index}].{key} is True; expected False for a sharded optimizer")
        options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")}
        decoupled = bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))
        groups.append({"params": list(group["params"]), "adam_w_mode": decoupled, **options})
    return FusedAdam(groups)


def _share_groups(old: torch.optim.Optimizer, new: AdamOptimizer, comm: Comm) -> None:
    """Let the new optimizer use the old one's group dicts, so that schedulers of the old one drive it."""
    for index, group in enumerate(new.param_groups):
        shared = old.param_groups[index]
        shared.update({key: value for key, value in group.items() if key not in shared})
        new.param_groups[index] = shared
    old.__dict__["step"] = _Replaced(type(old).__name__)
    old.__dict__["_opt_called"] = True  # schedulers of the old one ask whether it has stepped; the new one does
    if comm.rank == 0:
        logger.warning(
            "shard: made a shardcore.FusedAdam from %s; use the optimizer that shard() returns (it shares param_groups with "
            "the old one, whose step() must not be called any more)",
            type(old).__name__,
        )


class _Replaced:
    """What is left of the `step` of an optimizer that a new one replaced."""

    _wrapped_by_lr_sched = True  # schedulers look for this name

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            f"step: this {self.kind} was replaced by shardcore.shard; expected step() of the optimizer it returned"
        )


def _rank_device(comm: Comm, model: nn.Module, optimizer: AdamOptimizer, offload: Mapping[str, Any] | None) -> torch.device:
    """Return where this rank computes: the model's CUDA device, the local rank's, or the CPU where no GPU is to be used."""
    cuda = {tensor.device for tensor in [*model.parameters(), *model.buffers()] if tensor.is_cuda}
    if len(cuda) > 1:
        raise ValueError(f"shard: the model is spread over {sorted(map(str, cuda))}; expected one device")
    on_host = isinstance(optimizer, CPUAdam) and offload is None
    if cuda:
        device = cuda.pop()
    elif comm.group is not None:
        device = comm.device
    elif torch.cuda.is_available() and not on_host:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    else:
        device = torch.device("cpu")
    if device.type == "cuda" and comm.group is not None and not comm.uses_nccl:
        raise ValueError(
            f"shard: the model is on {device} but the process group has no nccl backend; expected nccl, or a CPU model"
        )
    if device.type == "cuda" and on_host:
        raise ValueError(
            f'shard: CPUAdam was given for a model on {device}; expected FusedAdam, or offload={{"optimizer": "cpu"}} beside it'
        )
    return device


def agree(comm: Comm, problem: Exception | None, entries: Sequence[Any], op: str = "shard") -> None:
    """Raise on every rank if any rank has a problem or a model, optimizer or options unlike rank 0's."""
    digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    answers = comm.gather_json({"problem": None if problem is None else str(problem), "digest": digest})
    if problem is not None:
        raise problem
    for rank, answer in enumerate(answers):
        if answer["problem"] is not None:
            raise ValueError(f"{op}: rank {rank} failed, so no rank was changed: {answer['problem']}")
    if any(answer["digest"] != digest for answer in answers):
        difference = first_difference(comm.gather_json(list(entries)))
        raise ValueError(f"{op}: ranks disagree: {difference}; expected the same model, optimizer and options on every rank")


# --- whole values -----------------------------------------------------------------------------------------------------


def _engine_of(op: str, thing: Any) -> Engine:
    engine = getattr(thing, "_shardcore_engine", None)
    if not isinstance(engine, Engine):
        raise ValueError(
            f"{op}: {type(thing).__name__} is not sharded; expected what shardcore.shard returned, or a parameter of it"
        )
    return engine


def full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the averaged gradient of a sharded model's parameter, whole (in the gradient dtype), or None. Collective."""
    return _engine_of("full_grad", param).full_grad(param)


def full_state(param: nn.Parameter, key: str) -> torch.Tensor:
    """Return an optimizer state of a sharded model's parameter, whole ("step", "exp_avg", "master", ...). Collective."""
    return _engine_of("full_state", param).full_state(param, key)


@contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """Make a sharded model's weights whole and readable inside the context. Collective.

    At stages 0 to 2 they always are; edits in place reach the masters at the next step.
    """
    _engine_of("full_params", model)
    yield


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Add gradients of backwards inside locally in float32, without reduction; the next reduction takes the sum."""
    with _engine_of("no_sync", model).no_sync():
        yield
