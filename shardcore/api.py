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

from shardcore.arguments import DTYPES, accept_optimizer, check_options, offload_options, replace_optimizer
from shardcore.comm import Comm, first_difference
from shardcore.engine import build, model_io
from shardcore.engine.bucket import LIFETIMES, allocate
from shardcore.engine.engine import Engine
from shardcore.engine.reducer import ReducePolicy
from shardcore.engine.state_io import ShardedStates
from shardcore.engine.store import DeviceStore, StateStore
from shardcore.offload import CpuStore
from shardcore.optim import AdamOptimizer, CPUAdam
from shardcore.units import UnitPolicy, plan_units

logger = logging.getLogger("shardcore")

Model = TypeVar("Model", bound=nn.Module)


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

    Afterwards backward reduces gradients as it goes. At stage 0 `p.grad` is then the averaged gradient (once it is reduced: not
    between micro-steps that add locally), a view that the next backward reuses: clone what you keep, edit it in place. From
    stage 1 on it is None (`full_grad`), and only `optimizer.zero_grad()` and `model.zero_grad()` forget gradients. `full_grad`
    and `clip_grad_norm_` reduce what was only added locally, as `step` would. Weights may be edited in place; edits through
    `p.data` do not reach masters. Steps with a non-finite gradient are skipped on every rank. Every rank runs the same number
    of backwards. `model.state_dict()` and `optimizer.state_dict()` are whole, and collective; frozen parameters have no master,
    so with "bf16" they are bfloat16 in it, too. Layers that keep buffers of statistics beside weights (BatchNorm) need
    `keep_fp32` with "bf16" on CPUs.

    Collective. Raises ValueError or TypeError on every rank, with nothing changed, for bad arguments and for ranks that
    disagree; NotImplementedError for what is not built yet.
    """
    comm = Comm(process_group)
    options: dict[str, Any] = {
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
        check_options(options)
        build.check_model(model)
        adam = accept_optimizer(optimizer)
        build.check_ownership(model, optimizer)
        device = _rank_device(comm, model, adam, offload)
        specs = plan_units(model, units)
        kept = build.kept_params(model, keep_fp32)
        builder = build.Builder(comm, LIFETIMES[stage], DTYPES[precision], kept, device)
        build.check_states(optimizer, builder)
        entries = build.signature(model, specs, optimizer, builder, options)
    except Exception as error:  # of any kind: the other ranks are waiting
        problem = error
    agree(comm, problem, entries)

    comm.separate()
    carried = {param: dict(state) for param, state in optimizer.state.items() if state}
    if adam is not optimizer:
        replace_optimizer(optimizer, adam, speak=comm.rank == 0)
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
    idle = [managed.name for bucket in buckets if bucket.group is None for managed in bucket.params]
    if idle and stage > 0 and comm.rank == 0:
        logger.warning(
            "shard: no group of the optimizer has these trainable parameters, so nothing updates them (from stage 1 on their "
            "gradients are in no p.grad that another optimizer could use; freeze them, or add them): %s",
            ", ".join(idle),
        )
    lost = [name for name, param in frozen if param in carried]
    if lost and comm.rank == 0:
        logger.warning("shard: the optimizer state of frozen parameters is dropped: %s", ", ".join(lost))
    builder.place_rest(model, [param for _, param in frozen], broadcast)

    policy = ReducePolicy(accumulate, stage >= 2 if sync_each is None else sync_each, DTYPES[grad_dtype])
    engine = Engine(model, buckets, frozen, store, comm, LIFETIMES[stage], policy, clip_grad_norm, adam, device)
    engine.state_io.carry(carried)
    optimizer.state.clear()  # the whole states of a replaced optimizer, too: its schedulers keep it alive
    model_io.attach(engine, DTYPES[precision] if cast_inputs and precision != "fp32" else None)
    adam.state = ShardedStates(engine.updater.buckets)  # type: ignore[assignment]
    adam._repeat = None  # it holds the whole states
    adam._engine = engine
    return model, adam


# --- agreement between ranks -------------------------------------------------------------------------------------------


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
    if not isinstance(model, nn.Module):
        raise TypeError(f"full_params: got a {type(model).__name__}; expected a module that shardcore.shard returned")
    _engine_of("full_params", model)
    yield


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Add gradients of backwards inside locally in float32, without reduction; the next reduction takes the sum."""
    with _engine_of("no_sync", model).no_sync():
        yield
