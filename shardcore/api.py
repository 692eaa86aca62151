"""shard(): checks everything on every rank, then lays the model out in shards and attaches the engine."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcore._native import _C
from shardcore.checkpoint import sharded as sharded_state
from shardcore.checkpoint.materialize import Materialize, plan_materialize
from shardcore.distributed.comm import Comm
from shardcore.distributed.compare import first_difference
from shardcore.distributed.groups import NotAMemberError, own_gpu, use_own_gpu
from shardcore.distributed.machine import short_of_memory, worker_of
from shardcore.engine import build
from shardcore.engine import hooks as model_io
from shardcore.engine.bucket import LIFETIMES
from shardcore.engine.cpu_store import CpuStore, host_bytes, warn_of_pageable
from shardcore.engine.engine import Engine
from shardcore.engine.host_gradients import GradHome, home_bytes
from shardcore.engine.loss_scale import LossScale
from shardcore.engine.optimizer_state import ShardedStates
from shardcore.engine.overlap_step import OverlapStep, WorkerThreads
from shardcore.engine.split_store import RatioTuner, SplitStore, split
from shardcore.engine.state_store import DeviceStore, StateStore
from shardcore.engine.units import UnitPolicy, plan_units
from shardcore.engine.unshard import Unsharder
from shardcore.optim import AdamOptimizer, CPUAdam, EngineRef, engine_of, joined_state, other_entries
from shardcore.optim.clip import reach_shards
from shardcore.options import (
    DTYPES,
    NoOptimizer,
    accept_optimizer,
    check_loss_scale,
    check_options,
    loss_scaler,
    offload_options,
    reduce_policy,
    replace_optimizer,
)


def _engine_of(op: str, thing: Any) -> Engine:
    engine = engine_of(thing) or getattr(thing, "_engine", None)
    if not isinstance(engine, Engine):
        gone = isinstance(getattr(thing, "_shardcore_engine", None), EngineRef)
        state = "is left of a sharded model that is gone, as is its optimizer" if gone else "is not sharded"
        raise ValueError(f"{op}: {type(thing).__name__} {state}; expected what shardcore.shard returned, or a parameter of it")
    return engine


def full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the averaged, unscaled gradient of a sharded model's parameter, whole. Collective: all ranks ask for the same one.

    A new tensor of the parameter's shape on the rank's device, in shard's `grad_dtype` (one rank alone may have the weight's
    dtype); None if no rank has a gradient for it. What was only added locally (`no_sync`, `accumulate`) is reduced first.
    Raises ValueError or TypeError, on every rank, for a frozen parameter and where ranks ask for different ones.
    """
    return _engine_of("full_grad", param).full_grad(param)


def full_state(param: nn.Parameter, key: str) -> torch.Tensor:
    """Return an optimizer state of a sharded model's parameter, whole. Collective: all ranks ask for the same one.

    key: "exp_avg", "exp_avg_sq", "master" where there is one, "max_exp_avg_sq" with amsgrad: a new tensor of the parameter's
    shape where the states live, float32 (bfloat16 moments as they are). "step": the count, a tensor of shape () on the CPU.
    Raises ValueError, TypeError or KeyError, on every rank, for a frozen parameter, another key and where ranks differ.
    """
    return _engine_of("full_state", param).full_state(param, key)


@contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """Make a sharded model's weights whole inside the context, to read or to edit in place. Collective.

    model: what shard returned, a module of it, or the engine that initialize returned. At stages 0 to 2 weights are always
    whole. Every rank makes the same edits; they reach the shards at the end of the context (stage 3), masters at the next step.

    Entering and leaving are collective; a forward inside is not, where all weights of the model are whole: ranks may run it as
    often as each needs (to generate sequences of different lengths), or one rank alone (to evaluate). Backward is. At stage 3 a
    gradient penalty (`autograd.grad` with create_graph) needs forward and backward inside.
    """
    if not isinstance(model, nn.Module):
        given, model = type(model).__name__, getattr(model, "module", model)  # an engine's
        if not isinstance(model, nn.Module):
            raise TypeError(f"full_params: got a {given}; expected a module that shardcore.shard returned, or an engine")
    params = set(model.parameters())
    engine = _engine_of("full_params", next((p for p in params if engine_of(p) is not None), model))
    with engine.unsharder.whole(params) if engine.unsharder is not None else nullcontext():
        yield


def sharded_state_dict(of: nn.Module | torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the state of a sharded model, or of its optimizer, without any rank holding the whole. Collective.

    For torch.distributed.checkpoint: `save` it; or let `load` fill it, then pass it to load_sharded_state_dict. The
    checkpoint has whole tensors (float32 from masters), which any world size, stage or plain model loads. Keys are the
    model's parameters (tied ones under each name) and persistent buffers; of an optimizer "parameter.exp_avg",
    "parameter.step" and so on, without its options, and, where the loss scale moves, "loss_scale.scale",
    "loss_scale.stable_steps" and "loss_scale.hysteresis_left" (of shape (), on the CPU). The values are copies of what this
    rank has. What modules keep beside tensors (`get_extra_state`) is left out, with a warning that names them.
    """
    engine = _engine_of("sharded_state_dict", of)
    return sharded_state.optimizer_state(engine) if isinstance(of, torch.optim.Optimizer) else sharded_state.model_state(engine)


def load_sharded_state_dict(of: nn.Module | torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Set a sharded model, or its optimizer, from what sharded_state_dict returned and a checkpoint filled. Collective.

    Moments that 8-bit codes cannot keep exactly are warned of; for bfloat16 ones torch.distributed.checkpoint rounds before.

    Raises ValueError or TypeError on every rank, with nothing changed, for other keys or shards, or a loss scale that is none.
    """
    engine = _engine_of("load_sharded_state_dict", of)
    if isinstance(of, torch.optim.Optimizer):
        sharded_state.load_optimizer_state(engine, state_dict)
    else:
        sharded_state.load_model_state(engine, state_dict)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Let backwards inside the context add their gradients locally in float32; the next reduction sends the sum.

    model: what shard returned, or the engine that initialize returned. Not collective, but every rank does the same.
    """
    with _engine_of("no_sync", model).no_sync():
        yield


logger = logging.getLogger("shardcore")

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    stage: int = 2,
    *,
    units: UnitPolicy = "auto",
    offload: Mapping[str, Any] | None = None,
    precision: str | None = None,
    loss_scale: LossScale | float | None = None,
    keep_fp32: Sequence[Any] = (),
    cast_inputs: bool = True,
    grad_dtype: str = "fp32",
    reduce_dtype: str | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    sync_each: bool | None = None,
    overlap_step: bool = False,
    reshard_after_forward: bool | int = True,
    reduction: str = "ordered",
    broadcast: bool = True,
    materialize: Materialize | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    ranks_per_node: int | None = None,
) -> tuple[Model, Any]:
    """Partition the training state of `model` over the ranks; returns the same model and the optimizer to use. Collective.

    model: changed in place; class, parameter names and Parameter objects stay. It moves to the rank's device.
    optimizer: FusedAdam or CPUAdam (the same object comes back), or torch's Adam or AdamW (a new FusedAdam comes back, which
        shares its param_groups, so that schedulers made before go on working). Its state is carried into the shards, kept as
        its options say, to the bits of the unsharded step. master=None is "fp32" here; with "split" the bfloat16 weights are
        the upper half of the masters; with stochastic_rounding there is no master, and weights start rounded to nearest.
        capturable=True (without offload): the device decides on each step, an lr tensor and step(grad_scale=) are read there,
        and on one rank a whole iteration can be captured in a CUDA graph, after one without; a replay logs no skipped step,
        and raises nothing at the minimum loss scale. Several ranks step outside of graphs, and do not compare such tensors.
        None for a model that only runs forward (a teacher, a reward model), and None comes back: its weights are sharded at
        stage 3, with offload={"params": "cpu"} in host memory, and whole on the device below. Gradients may flow through
        it; where one reaches a parameter, backward raises RuntimeError.

    What is sharded:

    stage: 0 shards nothing, 1 optimizer states and masters, 2 also gradients, 3 also weights (ZeRO; arXiv:1910.02054).
    units: what is gathered and reduced together: "auto" (the repeated blocks), a module class or several, a list of modules,
        or the least number of parameters of a unit. The parts of torch's MultiheadAttention and TransformerEncoderLayer,
        which read the weights of their parts without calling them, are no units of their own.
    reshard_after_forward: at stage 3, True frees a unit's whole weights between its forward and its backward (fewer bytes),
        False keeps them (one gather less); a number: so many consecutive ranks keep them together, a part each. At other
        stages nothing is freed, and no number is accepted.
    process_group: the ranks that share the model (default: all). A DeviceMesh of two dimensions replicates over the first and
        shards over the second (hybrid sharding): whole weights never leave a node, gradients are added over both.
        Of a part of the world: up to torch 2.13 its ranks must be in equally many process groups; with newer ones all ranks of
        the world must have made equally many. Else ranks may wait for each other until the timeout.
    ranks_per_node: add gradients over the ranks of a node, then over nodes (default: over all ranks in order, or as the mesh
        says). It is part of the numerics: other values give other bits; stage, mesh, tier and units do not.

    Where it lives:

    offload: None, or a dict. {"optimizer": "cpu"} keeps masters and states in host memory and steps there, with up to 360 MiB
        of staging a rank (20 bytes an element of the largest unit's shard; see `memory_report`). Beside it may stand
        "gradients": "cpu" (from stage 1 on): reduced gradients leave for host memory during backward, and add up there.
        "params": "cpu" (stage 3): so do the shards of weights, frozen ones too; each comes ahead of its unit's use.
        "ratio": the share of each shard that the CPU updates, 0 to 1 (default 1), as DeepSpeed's; the device updates the
        rest meanwhile. "auto" starts with 1, times three steps and forwards, and from the next zero_grad() that leaves
        no gradients (set_to_none=True) on lets the device keep the least share that hides the CPU's part behind a forward
        (with overlap_step), the same on all ranks, logged, and at most "device_memory_limit" bytes of states.
        "pin_memory": page-lock the host buffers of copies to and from a GPU, so that copies overlap (default True);
        "pin_memory_limit": at most so many bytes on this rank. What cannot be locked is pageable, with a warning.
        "cpu_threads": of overlap_step's worker. Default: the machine's ranks keep one core each, and their workers share the
        rest, at least one thread each. On Linux they stay on this rank's share of the cores, if it has one to spare.

    Precision:

    precision: None leaves every weight in its dtype; "bf16", "fp16" or "fp32" converts all of them (logged on rank 0, at level
        INFO). bfloat16 and float16 weights have float32 masters, which start from the weights as given, before any
        conversion. keep_fp32: module classes, or parameters by name, that are float32 in any case. cast_inputs: with "bf16"
        or "fp16", cast floating inputs of the root forward to that dtype; outputs are not cast.
    loss_scale: of float16 weights: backward runs on `optimizer.scale_loss(loss)`, and the reduction divides again, so every
        gradient you see is unscaled. A LossScale follows the gradients; a number is fixed; 1.0 leaves scaling to you
        (step(grad_scale=1 / s), or torch's GradScaler at stage 0). None is `LossScale()` with "fp16", else no scaling.
    grad_dtype: "fp32" or "bf16", of the reduced gradient. reduce_dtype: "fp32", "bf16" or "fp16", of what ranks send (sums are
        float32 always); None sends each parameter's own dtype, and float32 for micro-steps added locally. One rank alone
        sends nothing, and its gradients stay as they are.
    reduction: "ordered" adds gradients in float32, in rank order: the same bits on every backend and at every stage. "nccl"
        leaves the sum to NCCL (reduce_scatter), in the dtype that travels and an order of its own, so its bits may depend
        on NCCL, the machines, stage and units. float16 is divided by the number of ranks first.

    Steps:

    clip_grad_norm: global norm to clip to in every step.
    accumulate: how many backwards make a step. sync_each: reduce each of them and add the results (default from stage 2 on);
        False adds locally in float32 and reduces once. Divide the loss by `accumulate` yourself, as in torch.
    overlap_step: `step()` returns once norm, clipping and options are fixed, and weights are updated while training goes on,
        unit by unit in the order of the last forward: the same bits. Each unit's forward waits for its own weights, backward
        and the next step for all; so does what asks the model or the optimizer for values (parameters(), state_dict,
        deepcopy, eval(), full_params, the "params" of `optimizer.param_groups`, ...). Only references to parameters taken
        before the step need `optimizer.synchronize()`, and so does `destroy_process_group`. An error of such a step is
        raised by every later call that waits. With states on a GPU steps are asynchronous anyway, and nothing changes. On
        NCCL at stages 1 and 2 reading weights that are not gathered yet is an error, since one rank may read alone: every
        rank calls `optimizer.synchronize()`, or runs forward, before.

    How weights start:

    broadcast: take rank 0's weights and buffers. If False, every rank must have the same values: nothing compares them.
    materialize: fills a model built under `torch.device("meta")` (and the optimizer over it) straight into shards, with at most
        one unit in memory beside them. Default: each module's `reset_parameters()`, in models of the transformers package
        their `_init_weights` (their folders are read as `from_pretrained` reads them). Or a callable, which is given each
        module that owns such parameters or buffers, on the rank's device and full of NaN, to fill in place; modules come in
        the model's order, so one seed gives the bits of building there, unless the model draws in another order or
        initializes again what its modules did. A tied weight takes what the first of its modules makes. Or .safetensors
        files under the model's names: a path, a list, or a folder in Hugging Face's layout, the same on all ranks; each rank
        reads what it keeps, and masters start from the files' values. What no file has must be in memory, or comes from a
        callable in the list (`[folder, fill]`), as non-persistent buffers do (transformers models make those themselves).

    Afterwards:

    - Gradients are reduced during backward. At stage 0 `p.grad` is then the averaged gradient (not between micro-steps that
      add locally), a view that the next backward reuses: clone what you keep, edit it in place, not through `.data`. From
      stage 1 on it is None (`full_grad` gives it), and only `zero_grad()` of model or optimizer forgets gradients. Clip with
      `clip_grad_norm`, `shardcore.clip_grad_norm_`, or torch.nn.utils' own functions on every rank: from the first `shard` at
      stage 1 to 3 on these reach sharded parameters, unless they were imported by name before it. They clip what the step
      uses: averaged, unscaled gradients. One that is not finite skips the step even if `clip_grad_value_` would hide it.
    - Weights may be edited in place, not through `p.data`: float32 masters do not get that, and state dicts warn of it by name
      (without masters it counts, at stage 3 in `full_params`). At stage 3 weights are whole only during their unit's forward
      and backward, in calls of modules that lie in no unit but the root, and in `full_params`. An edit of a split master's
      weight is kept to the precision of bfloat16.
    - `model.state_dict()` and `optimizer.state_dict()` are whole, from the masters (float32), and collective. Frozen parameters
      have no master, so they keep the dtype of the weights there.
    - A step with a non-finite gradient is skipped on every rank; on a GPU without offload a later step logs it, or
      raises the error at the minimum loss scale.
    - Every rank runs the same number of backwards; at stage 3 also of forwards, with the same units in the same order.
    - On CPUs BatchNorm's weights stay float32, as its statistics are: name it in `keep_fp32`.

    Raises ValueError or TypeError on every rank, with nothing changed, for bad arguments and for ranks that disagree;
    NotImplementedError for what is not built yet; OSError for files that are not there; MemoryError where a machine's ranks
    would take more host memory than it has free. RuntimeError on every rank if one cannot take memory (nothing changed, if
    it says so), or fails in `materialize` or a copy: then the model is partly made, and to be built anew.
    """
    given: Any = NoOptimizer() if optimizer is None else optimizer
    if optimizer is None and isinstance(offload, Mapping):
        offload = {"optimizer": "cpu", **offload}  # there are no states: weights may go alone
    gpus = _gpus_of(model)
    if not gpus:
        use_own_gpu()
    comm, problem = _join(process_group, ranks_per_node, gpus.pop() if len(gpus) == 1 else None)
    if comm.group is not None and comm.world_size == 1 < dist.get_world_size():
        logger.warning(
            "shard: process_group has this rank (%d) alone, of %d: nothing is sharded, and its gradients are averaged with no "
            "other's; expected None, or a group of all ranks that train this model, unless it is to train alone",
            dist.get_rank(),
            dist.get_world_size(),
        )
    options: dict[str, Any] = {
        "stage": stage,
        "offload": offload,
        "precision": precision,
        "loss_scale": loss_scale,
        "grad_dtype": grad_dtype,
        "reduce_dtype": reduce_dtype,
        "clip_grad_norm": clip_grad_norm,
        "accumulate": accumulate,
        "sync_each": sync_each,
        "cast_inputs": cast_inputs,
        "overlap_step": overlap_step,
        "reshard_after_forward": reshard_after_forward,
        "reduction": reduction,
        "broadcast": broadcast,
        "ranks": repr(comm.topology),
        "sharers": len(comm.sharers),
        "backend_sums": comm.backend_sums,
    }
    # Check and plan on this rank; nothing changes before all ranks agree.
    entries: list[Any] = []
    needed = 0
    try:
        check_options(options)
        build.check_model(model, alone=comm.world_size == 1)
        adam = given if optimizer is None else accept_optimizer(given, offload)
        build.check_ownership(model, given)
        device = _rank_device(comm, model, adam, offload)
        specs = plan_units(model, units)
        kept = build.kept_params(model, keep_fp32)
        builder = build.Builder(
            comm, LIFETIMES[stage], None if precision is None else DTYPES[precision], kept, device, optimizer is not None
        )
        build.check_norms(model, builder)
        build.check_states(given, builder)
        filler = plan_materialize(model, materialize)
        buckets = builder.plan(model, specs, adam)
        check_loss_scale(loss_scale, precision, {bucket.dtype for bucket in buckets})
        updated = [bucket for bucket in buckets if bucket.group is not None]
        tiers = options["offload"] = offload_options(offload, stage)  # ranks may spell it differently
        policy, scaler = reduce_policy(options, comm.world_size), loss_scaler(options)
        if tiers.optimizer is not None:
            split(updated, tiers.ratio)
            needed = host_bytes(updated, tiers.gradients is not None, tiers.params is not None)
        if tiers.gradients is not None:
            needed += home_bytes(updated, policy, comm.world_size == 1 and not scaler.active)
        if tiers.params is not None:
            needed += sum(bucket.owned_numel * bucket.dtype.itemsize for bucket in buckets)
        entries = build.signature(model, specs, given, builder, options) + (filler.entries if filler is not None else [])
    except Exception as error:  # of any kind: the other ranks are waiting
        problem = problem or error
    short = short_of_memory(comm, needed)  # collective: every rank asks
    try:
        agree(comm, problem or short, entries)
    finally:
        problem = short = None  # an error that this frame held would hold it, and the model, in a cycle

    # Take memory, on the device and in the tier.
    comm.separate()
    make_host: Callable[[], CpuStore | SplitStore] = partial(
        SplitStore if tiers.auto or tiers.ratio < 1.0 else CpuStore,
        updated,
        device,
        tiers.pin_memory,
        tiers.pin_memory_limit,
        grads_leave=tiers.gradients is not None,
        weights_here=tiers.params is not None,
    )
    host: CpuStore | SplitStore | None
    store: StateStore
    with build.together(comm, "taking memory", "free memory, or take less; nothing was changed"):
        host = make_host() if tiers.params is not None else None  # the shards of weights lie in its tier
        for bucket in buckets:
            builder.allocate(bucket, None if host is None else host.copies)
        if tiers.optimizer is not None and host is None:
            host = make_host()
        store = DeviceStore(updated, device) if host is None else host
        others = other_entries(given.state)
        carried = {p: joined_state(state, p) for p, state in given.state.items() if state and p not in others}
    # Move the weights into it.
    if comm.rank == 0 and (conversions := builder.conversions(model)):
        logger.info("shard: precision=%r converts parameters: %s", precision, conversions)
    if adam is not given:
        replace_optimizer(given, adam, speak=comm.rank == 0)
    for bucket in buckets:
        builder.fill(bucket, store, broadcast)
    frozen = [(name, param) for name, param in model.named_parameters() if not builder.updates(param)]
    idle = [m.name for bucket in buckets if bucket.group is None and bucket.trainable for m in bucket.params]
    if idle and stage > 0 and comm.rank == 0:
        logger.warning(
            "shard: no group of the optimizer has these trainable parameters, so nothing updates them (from stage 1 on their "
            "gradients are in no p.grad that another optimizer could use; freeze them, or add them): %s",
            ", ".join(idle),
        )
    lost = [name for name, param in frozen if param in carried]
    if lost and comm.rank == 0:
        logger.warning("shard: the optimizer state of frozen parameters is dropped: %s", ", ".join(lost))
    sharded = {managed.param for bucket in buckets for managed in bucket.params}
    rest = [*(param for _, param in frozen if param not in sharded), *model.buffers()]
    builder.place_rest([tensor for tensor in rest if not tensor.is_meta], broadcast)
    if filler is not None:
        filler.fill(builder, buckets, store, broadcast)

    # Start the engine and hand it the optimizer's states.
    parts = build.units_of(specs, buckets)
    works = overlap_step or tiers.gradients is not None
    threads = WorkerThreads(*worker_of(comm, tiers.cpu_threads)) if works else WorkerThreads(1)
    with build.together(comm, "starting the engine"):
        overlapped: OverlapStep | None = None
        if overlap_step and (device.type == "cpu" or store.tier != "device"):  # else steps are asynchronous by themselves
            overlapped = OverlapStep(model, parts, store, comm, LIFETIMES[stage], device, threads, adam.param_groups)
        unsharder: Unsharder | None = None
        if not LIFETIMES[stage].full_weight_resident:
            unsharder = Unsharder(parts, comm, device, reshard_after_forward, overlapped)
        home: GradHome | None = None
        if host is not None and tiers.gradients is not None:
            home = GradHome(host.copies, updated, threads)
        ratio_tuner: RatioTuner | None = None
        if isinstance(host, SplitStore) and tiers.device_memory_limit is not None:
            ratio_tuner = RatioTuner(comm, device, host, tiers.device_memory_limit)
        engine = Engine(
            model,
            buckets,
            frozen,
            store,
            comm,
            LIFETIMES[stage],
            policy,
            clip_grad_norm,
            adam,
            device,
            unsharder,
            scaler,
            overlapped,
            home,
            ratio_tuner,
        )
    with build.together(comm, "taking over the optimizer's states"):
        given.state.clear()  # of a replaced one, too, which schedulers keep alive; each state goes as soon as it is carried
        adam._repeat = None  # it holds the whole states
        engine.state_io.carry(carried)
        engine.go_on_from(None)
        if optimizer is not None:  # from now on the engine has that state
            adam._skipped, adam._device_state = adam.skipped_steps, None
        model_io.attach(model, engine, builder.dtype if cast_inputs and precision != "fp32" else None)
        adam.state = ShardedStates(engine.updater.buckets, engine.settle, others)
        adam._engine = engine
        for name, param in frozen if optimizer is None else ():
            if param.requires_grad:
                build.refuse_backward(name, param)
    if stage > 0:
        reach_shards()
    if host is not None:
        warn_of_pageable(host.copies)
    return model, None if optimizer is None else adam


# --- agreement between ranks -------------------------------------------------------------------------------------------


def _join(
    group: dist.ProcessGroup | DeviceMesh | None, ranks_per_node: int | None, gpu: torch.device | None
) -> tuple[Comm, Exception | None]:
    """Return Comm(group, ranks_per_node, gpu); or the way to those who wait for this rank, and what it must tell them.

    A rank that `group` does not contain raises at once: nobody waits for it.
    """
    problem: Exception | None = None
    for arguments in ((group, ranks_per_node, gpu), (group, None, gpu)):
        try:
            return Comm(*arguments), problem
        except NotAMemberError:
            raise
        except Exception as error:  # of any kind: torch's, where `group` is none
            problem = problem or error
    return Comm(), problem


def _gpus_of(model: nn.Module) -> set[torch.device]:
    """Return the GPUs that hold a model; none for what is no model, which `shard` refuses on every rank."""
    if not isinstance(model, nn.Module):
        return set()
    return {tensor.device for tensor in [*model.parameters(), *model.buffers()] if tensor.is_cuda}


def _rank_device(comm: Comm, model: nn.Module, optimizer: AdamOptimizer, offload: Mapping[str, Any] | None) -> torch.device:
    """Return where this rank computes: the model's CUDA device, the local rank's, or the CPU where no GPU is to be used."""
    cuda = _gpus_of(model)
    if len(cuda) > 1:
        raise ValueError(f"shard: the model is spread over {sorted(map(str, cuda))}; expected one device")
    on_host = isinstance(optimizer, CPUAdam) and offload is None
    if cuda:
        device = cuda.pop()
    elif comm.group is not None:
        device = comm.device
    elif torch.cuda.is_available() and not on_host:
        device = own_gpu()
    else:
        device = torch.device("cpu")
    if device.type == "cuda" and comm.group is not None and not comm.uses_nccl:
        raise ValueError(
            f"shard: the model is on {device} but the process group has no nccl backend; expected nccl, or a CPU model"
        )
    if device.type == "cuda" and not _C.build_info()["cuda"]:
        raise ValueError(
            f"shard: the model would train on {device}, but this shardcore is built without CUDA; expected a build with it "
            "(install nvcc and a CUDA build of torch, then build again), or training on the CPU (with a gloo process group; "
            "CUDA_VISIBLE_DEVICES= hides the GPUs)"
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
        try:
            raise problem
        finally:
            problem = None  # else a cycle
    for rank, answer in enumerate(answers):
        if answer["problem"] is not None:
            raise ValueError(f"{op}: rank {rank} failed, so no rank was changed: {answer['problem']}")
    if any(answer["digest"] != digest for answer in answers):
        difference = first_difference(comm.gather_json(list(entries)))
        raise ValueError(f"{op}: ranks disagree: {difference}; expected the same model, optimizer and options on every rank")
