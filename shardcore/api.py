"""shard(): checks everything on every rank, then lays the model out in shards and attaches the
engine.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcore._native import _C
from shardcore.checkpoint import save_pretrained
from shardcore.checkpoint import sharded as sharded_state
from shardcore.checkpoint.commits import Commits
from shardcore.checkpoint.materialize import FromFiles, FromInit, Materialize, plan_materialize
from shardcore.checkpoint.slots import Slots
from shardcore.distributed.comm import Comm
from shardcore.distributed.compare import Entry
from shardcore.distributed.everyone import Everyone
from shardcore.distributed.groups import own_gpu, use_own_gpu
from shardcore.distributed.joining import advise_nodes, join
from shardcore.distributed.machine import (
    WorkerThreads,
    nodes_of,
    own_cores,
    plan_worker,
    short_of_memory,
)
from shardcore.engine import build, full_values, quantized, relay
from shardcore.engine import full_params as of_engine
from shardcore.engine.agreement import agree, together
from shardcore.engine.audit import Audit
from shardcore.engine.bucket import LIFETIMES
from shardcore.engine.compiled import compile_units
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.hooks import attach
from shardcore.engine.loss_scale import LossScale
from shardcore.engine.mistakes import warn_of_compiled
from shardcore.engine.optimizer_state import ShardedStates
from shardcore.engine.pieces import checked_pieces, hide, lay_out, partitioned_params, show
from shardcore.engine.plan import Plan, input_casts
from shardcore.engine.regroup import regroup
from shardcore.engine.slices import refuse_slices, slice_mesh
from shardcore.engine.states import DeviceStore
from shardcore.engine.units import UnitPolicy, plan_units
from shardcore.engine.unshard import keepers_of
from shardcore.estimate import fit, probe
from shardcore.estimate.predict import Prediction, predict_rank
from shardcore.offload.cpu_store import (
    CpuStore,
    OffloadOptions,
    warn_of_misplaced,
    warn_of_pageable,
)
from shardcore.offload.disk import make_directory, space_of
from shardcore.offload.host_gradients import host_grad_bytes, host_grads_of
from shardcore.offload.nvme_states import NvmeStates, Scratch, StateFiles, check_directories
from shardcore.offload.overlap_step import overlap_step_of
from shardcore.offload.split_store import (
    host_store,
    planned_store,
    ratio_tuner_of,
)
from shardcore.optim import CPUAdam, ShardableOptimizer
from shardcore.optim.base import refuse_others
from shardcore.optim.clip import reach_shards
from shardcore.optim.dtensor import is_dtensor
from shardcore.optim.float8 import float8_formats
from shardcore.optim.interface import engine_of
from shardcore.optim.muon import MuonKind
from shardcore.optim.state_dict import joined_state, other_entries
from shardcore.options import (
    OPTIONS,
    NoOptimizer,
    ShardOptions,
    accept_optimizer,
    check_names,
    replace_optimizer,
    without_states,
)
from shardcore.parallel.tensor import slice_adapters


def full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full averaged, unscaled gradient of a sharded model's parameter. Collective: every
    rank must ask for the same parameter.

    Returns a new tensor of the parameter's shape on the rank's device, or None if no rank has a
    gradient for it. The dtype is the `grad_dtype` of `shard` (on a single rank it may be the dtype
    of the weight). Gradients that were only added locally (`no_sync`, `accumulate`) are reduced
    first.

    Raises ValueError or TypeError, on every rank, for a frozen parameter and if ranks ask for
    different parameters.
    """
    return full_values.full_grad(engine_behind("full_grad", param), param)


def full_state(param: nn.Parameter, key: str) -> torch.Tensor:
    """Return a full optimizer state of a sharded model's parameter. Collective: every rank must ask
    for the same parameter and key.

    key: "exp_avg", "exp_avg_sq", "master" (if the weight has one), "max_exp_avg_sq" (with amsgrad)
        or "step".

    "step" returns the count as a tensor of shape () on the CPU. Other keys return a new tensor of
    the parameter's shape, on the device where the states are stored. It is float32; bfloat16
    moments stay bfloat16.

    Raises ValueError, TypeError or KeyError, on every rank, for a frozen parameter, for another
    key, and if ranks ask for different states.
    """
    return full_values.full_state(engine_behind("full_state", param), param, key)


@contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """Unshard a sharded model's weights inside the context, to read them or to edit them in place.
    Collective.

    model: the model that `shard` returned, a module of it, or the engine of `initialize`.

    At stages 0 to 2 weights are never sharded, and the context is local. Every rank must make the
    same edits, as under DDP. At stage 3 the end of the context copies edits to the shards; the next
    step copies them to masters. At stage 3 ranks compare their weights at the end. If they differ,
    every rank raises ValueError and keeps the weights from before.

    Entering and leaving are collective. If all weights of the model are unsharded, a forward inside
    is not collective. Each rank may then run it any number of times (to generate sequences of
    different lengths), or one rank alone may run it (to evaluate). Backward is collective. At stage
    3 a gradient penalty (`autograd.grad` with create_graph) needs forward and backward inside the
    context.
    """
    if not isinstance(model, nn.Module):
        type_name = type(model).__name__
        model = getattr(model, "module", model)  # of an engine
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"full_params: got a {type_name}; expected a module that shardcore.shard "
                f"returned, or an engine"
            )
    engine_of_model = engine_of(model)
    if engine_of_model is not None:
        engine_of_model.synchronize()  # before parameters are read, which starts no gather
    params = {param for _, param in quantized.with_parts(model.named_parameters())}
    sharded = next((param for param in params if engine_of(param) is not None), model)
    engine = engine_behind("full_params", sharded)
    with of_engine.full_params(engine, params):
        yield


def sharded_state_dict(of: nn.Module | torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the state of a sharded model, or of its optimizer, without gathering it on any rank.
    Collective.

    Use it with torch.distributed.checkpoint. `save` writes the returned dict. `load` fills it; pass
    it to load_sharded_state_dict afterwards. The checkpoint has full tensors, in float32 from
    masters. A model of any world size or stage, or a plain model, loads it.

    - Of a model: keys are the parameters (tied ones under each name) and persistent buffers.
    - Of an optimizer: keys are "parameter.exp_avg", "parameter.step" and so on, without options. A
      dynamic loss scale adds "loss_scale.scale", "loss_scale.stable_steps" and
      "loss_scale.hysteresis_left" (of shape (), on the CPU).

    The values are copies of this rank's parts. Extra states of modules (`get_extra_state`) are left
    out, with a warning that names them.
    """
    engine = engine_behind("sharded_state_dict", of)
    if isinstance(of, torch.optim.Optimizer):
        return sharded_state.optimizer_state(engine)
    return sharded_state.model_state(engine)


def load_sharded_state_dict(
    of: nn.Module | torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Set a sharded model, or its optimizer, from a dict of sharded_state_dict that a checkpoint
    filled. Collective.

    Logs a warning if 8-bit codes cannot keep moments exactly. For bfloat16 moments
    torch.distributed.checkpoint rounds before.

    Raises ValueError or TypeError, on every rank and with nothing changed, for other keys or
    shards, or for an invalid loss scale.
    """
    engine = engine_behind("load_sharded_state_dict", of)
    if isinstance(of, torch.optim.Optimizer):
        sharded_state.load_optimizer_state(engine, state_dict)
    else:
        sharded_state.load_model_state(engine, state_dict)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Add the gradients of backwards inside the context locally in float32. The next reduction
    sends the sum.

    model: the model that `shard` returned, or the engine of `initialize`. The context is not
        collective, but every rank must enter it for the same backwards.
    """
    with engine_behind("no_sync", model).no_sync():
        yield


logger = logging.getLogger("shardcore")

Model = TypeVar("Model", bound=nn.Module)


def shard(
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    stage: int = 2,
    *,
    units: UnitPolicy = "auto",
    offload: Mapping[str, Any] | str | None = None,
    precision: str | torch.dtype | None = None,
    loss_scale: LossScale | float | None = None,
    keep_fp32: Sequence[Any] = (),
    cast_inputs: bool | str = True,
    grad_dtype: str | torch.dtype = "fp32",
    reduce_dtype: str | torch.dtype | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    sync_each: bool | None = None,
    overlap_step: bool = False,
    reshard_after_forward: bool | int = True,
    prefetch: int = 1,
    compile: bool | Mapping[str, Any] = False,
    reduction: str = "ordered",
    broadcast: bool = True,
    materialize: Materialize | None = None,
    audit: int | Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    model_parallel_group: dist.ProcessGroup | DeviceMesh | None = None,
    ranks_per_node: int | None = None,
) -> tuple[Model, Any]:
    """Partition the training state of `model` over ranks (ZeRO), and return the same model and the
    optimizer to use. Collective.

    Create the optimizer before, and use the returned one afterwards. The guide (docs/guide.md)
    explains the options further.

    Example:
        dist.init_process_group()  # not needed in a single process
        model = build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        model, optimizer = shardcore.shard(model, optimizer, stage=3, precision="bf16")
        for batch in loader:
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        model: The model to shard. It is changed in place and moved to the rank's device. Its class,
            parameter names and Parameter objects stay the same. It may be on the meta device. It
            may be tensor-parallel (parallelize_module), on a mesh of one dimension beside
            process_group (docs/tensor_parallel.md).
        optimizer: The optimizer of the model. Its existing states are carried into the shards.
            - FusedAdam or CPUAdam: returned.
            - torch's Adam or AdamW: replaced by a FusedAdam that shares its param_groups.
            - Lion, Muon or another elementwise optimizer of torch.optim: replaced by an optimizer
              of the same kind that runs its steps on shards.
            - An optimizer whose class sets `elementwise = True`: replaced in the same way.
            - None: the model only runs forward.
        stage: The ZeRO stage (arXiv:1910.02054). 0 shards nothing. 1 shards optimizer states and
            masters (float32 copies of 16-bit weights), 2 also gradients, 3 also weights.
        units: The groups of modules to gather and reduce together. "auto" chooses the repeated
            blocks. A module class, several classes or a list of modules names the units. A number
            is the least number of parameters per unit. A list may begin with "auto" or a number;
            the classes and modules after it stay whole, without units inside. At stage 3 ranks may
            run different parts of a unit, such as different experts.
        offload: None keeps everything on the device. "auto" chooses None or a placement in host
            memory with the ratio "auto". It takes the fastest placement that fits, with a tenth of
            the device left for activations. It measures free memory, the link and Adam for at most
            a second, and logs a table of the candidates. On the CPU it is None. A dict chooses by
            these keys:
            - "optimizer": "cpu" keeps masters and states in host memory and runs Adam there. "nvme"
              keeps them in files under "path" and reads and writes them chunk by chunk. The files
              hold the last committed step at any instant (see "durable").
            - "path": with "nvme", a directory, or a list of directories to use all of their disks.
            - "resume": with "nvme", True continues from the last committed step, and False begins
              anew over it. Without the key, files of an earlier run raise an error.
            - "durable": with "nvme", False keeps one copy, which is lost when the process ends.
            - "gradients": "cpu" moves reduced gradients to host memory (stages 1 to 3).
            - "params": "cpu" keeps the shards of weights in host memory, and "nvme" in a file
              (stage 3). With an optimizer, "nvme" requires "optimizer": "nvme".
            - "ratio": the share of states to update on the CPU, from 0 to 1. "auto" measures and
              chooses it.
            - "device_memory_limit": with the ratio "auto", the most bytes of states on the device.
              By default the peak of the first steps decides how many fit.
            - "pin_memory": whether to page-lock host memory (default True).
            - "pin_memory_limit": the most bytes to page-lock.
            - "cpu_threads": the number of threads of an overlapped step.
        overlap_step: True lets `step()` return before the weights are updated. The forward of each
            unit waits for its own update. The bits are the same.
        precision: "bf16", "fp16" or "fp32" converts all weights. None keeps the dtype of each.
            16-bit weights get float32 masters, copied from the weights before the conversion.
            precision, grad_dtype and reduce_dtype also accept torch.bfloat16, "bfloat16" and so on.
        keep_fp32: Module classes, parameter names or parameters to keep in float32.
        cast_inputs: With "bf16" or "fp16", True casts floating inputs of the model's forward to
            that dtype. "units" casts the inputs of every unit's forward to the dtype of its
            weights.
        loss_scale: A LossScale or a fixed number, for float16 weights or for float32 weights under
            autocast to float16. None means `LossScale()` with "fp16", else no scaling.
        grad_dtype: The dtype of the reduced gradient, "fp32" or "bf16".
        reduce_dtype: The dtype that ranks send, "fp32", "bf16" or "fp16". None sends each
            parameter's own dtype. Sums are always float32.
        reduction: "ordered" adds gradients in rank order, in float32. The bits are the same on
            every backend and at every stage. "nccl" leaves the sum to NCCL, in the dtype that ranks
            send.
        clip_grad_norm: The global norm to clip to in every step. None does not clip.
        accumulate: The number of backwards per step. Divide the loss by it yourself, as in torch.
        sync_each: True reduces after each of these backwards (default at stages 2 and 3). False
            adds locally and reduces once (default at stages 0 and 1).
        reshard_after_forward: At stage 3, True frees full weights between forward and backward, and
            False keeps them. A number keeps them in parts on so many consecutive ranks.
        prefetch: At stage 3, the number of units to gather ahead of the unit that computes. Weights
            on NVMe are read into host memory for as many units more.
        compile: True compiles the forward of each unit except the root by torch.compile. A dict has
            the arguments of torch.compile: backend, mode, dynamic, fullgraph, options.
        broadcast: True takes the weights and buffers of rank 0. False requires equal values on all
            ranks, which `shard()` does not compare.
        materialize: The values of a model on the meta device. None calls `reset_parameters()` of
            each module. A callable is called with each module. A path, a list of paths or a Hugging
            Face folder names .safetensors files. A list may combine files with a callable.
        audit: Every how many steps to check that the hardware computes right bits. None checks
            nothing. A dict has "every", "on_corruption" ("log", or "raise" for SilentCorruption)
            and "sweep", the most audits that cover the whole shard (docs/reproducibility.md).
        process_group: The ranks that share the model (default: all). A 2-D DeviceMesh replicates
            over its first dimension and shards over its second (hybrid sharding).
        model_parallel_group: The ranks with the other parts of this model (pipeline stages), as a
            group or a mesh of one dimension. process_group then has the ranks with this part. All
            parts share the norm of the gradients, and are clipped and skipped together. An error of
            a step or of `shard()` on one rank is an error on all of them. Each part keeps its own
            buckets, state dicts and checkpoints.
        ranks_per_node: Add gradients within nodes of so many ranks first. No other placement option
            changes the bits.

    After the call:

    - Gradients are reduced during backward. At stage 0 `p.grad` is the averaged gradient. At stages
      1 to 3 `p.grad` is None; `full_grad` returns the gradient, and `zero_grad()` clears it.
    - `state_dict()` of model and optimizer is collective and returns full tensors, in float32 from
      the masters.
    - A step with a non-finite gradient is skipped on every rank.
    - Weights may be edited in place, at stage 3 inside `full_params`. Do not edit through `p.data`.
    - Every rank must run the same number of backwards. At stage 3 every rank must also run the same
      number of forwards, with the same units in the same order.

    Streams: a rank's work is queued on the current CUDA stream. Collectives and copies run on
    streams of their own. These streams and the current stream wait for each other. A forward may
    fork streams (branches, overlapped experts) and join them. Their gradients are reduced on the
    stream on which backward began, and the caller of backward waits for that stream.

    Raises:
        ValueError, TypeError: For bad arguments, and if ranks disagree. Every rank raises, with
            nothing changed.
        NotImplementedError: For options and models that shardcore does not support yet.
        OSError: For files that cannot be read. Also for an offload path that does not exist, if
            its folder would be on the root file system or a tmpfs.
        MemoryError: If the ranks of a machine need more host memory than is free, or if nothing
            fits for "auto".
        RuntimeError: If a rank cannot allocate memory (nothing is changed), or if `materialize` or
            a copy fails (the model is partly made: build it anew). Every rank raises.
    """
    options = {name: value for name, value in locals().items() if name in OPTIONS}
    return shard_and_log(
        model,
        optimizer,
        logging.WARNING,
        process_group=process_group,
        model_parallel_group=model_parallel_group,
        ranks_per_node=ranks_per_node,
        **options,
    )


def shard_and_log(
    model: Model,
    optimizer: torch.optim.Optimizer | None,
    level: int = logging.INFO,
    *,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    model_parallel_group: dist.ProcessGroup | DeviceMesh | None = None,
    ranks_per_node: int | None = None,
    **given: Any,
) -> tuple[Model, Any]:
    """`shard`, for integrations: `level` of the log line about a replaced optimizer is INFO, since
    their users cannot act on it. Collective.
    """
    check_names("shard", given, OPTIONS)
    user_optimizer: Any = NoOptimizer() if optimizer is None else optimizer
    if optimizer is None:
        given["offload"] = without_states(given.get("offload"))
    options = ShardOptions(**given)
    partitioned = show(partitioned_params(model))
    try:
        plan, filler, options = _plan(
            model, user_optimizer, options, process_group, model_parallel_group, ranks_per_node
        )
        _shard(plan, filler, user_optimizer, options, level)
    finally:
        hide(partitioned)
    if optimizer is not None and "SHARDCORE_DIGESTS" in os.environ:  # a room above this file
        import_module("shardcore.metrics.run_digests").record_first_steps(plan.optimizer)
    return model, None if optimizer is None else plan.optimizer


def _shard(
    plan: Plan,
    filler: FromInit | FromFiles | None,
    user_optimizer: Any,
    options: ShardOptions,
    level: int,
) -> None:
    """Take memory, move the weights there, and start the engine. Collective."""
    old = engine_of(plan.model)
    if old is not None:  # the new engine takes its place
        relay.begin("initialize", old)
        plan.builder.values_of_params = partial(relay.values_in, old)
    advise_nodes(plan.comm, plan.policy.backend_sums)
    files = _files(plan, options.tiers)
    try:
        states, other_entries_of_state = _allocate(plan, user_optimizer, options.tiers, files)
        _fill(plan, filler, user_optimizer, states, options, old, level)
        _start(plan, user_optimizer, states, other_entries_of_state, options)
        _commit_steps(plan, files)
    except BaseException:
        if isinstance(files, Slots):
            files.close()
        raise


def _plan(
    model: nn.Module,
    user_optimizer: Any,
    options: ShardOptions,
    process_group: dist.ProcessGroup | DeviceMesh | None,
    model_parallel_group: dist.ProcessGroup | DeviceMesh | None,
    ranks_per_node: int | None,
) -> tuple[Plan, FromInit | FromFiles | None, ShardOptions]:
    """Check everything on every rank and compare it; nothing changes.

    Returns the plan, what gives values to weights, and the options, with an offload that is not
    "auto".
    """
    gpus = _gpus_of(model)
    if not gpus:
        use_own_gpu()
    mesh, slices_problem = _slices_of(model, user_optimizer)
    comm, problem = join(
        process_group,
        mesh,
        model_parallel_group,
        ranks_per_node,
        gpus.pop() if len(gpus) == 1 else None,
    )
    problems: list[BaseException] = [
        error for error in (problem, slices_problem) if error is not None
    ]
    # an error that this frame held would hold it, and the model, in a cycle
    problem = slices_problem = None
    alone = comm.group is not None and comm.world_size == 1 and not comm.across
    if alone and dist.get_world_size() > 1:
        logger.warning(
            "shard: process_group has this rank (%d) alone, of %d: nothing is sharded, and its "
            "gradients are averaged with no "
            "other's; expected None, or a group of all ranks that train this model, unless it is "
            "to train alone",
            dist.get_rank(),
            dist.get_world_size(),
        )
    plan: Any = None
    filler = None
    entries: list[Entry] = []
    host_bytes = 0
    figures: Any = None  # of this rank, where it is to choose
    if options.chooses_offload:
        try:
            figures = _figures(_rank_device(comm, model, user_optimizer, options.offload))
        except Exception as error:
            figures = _FAILED
            problems.append(error)
    figures_of_ranks = comm.gather_json(figures)
    try:
        options.check(len(comm.shard_ranks), comm.backend_sums)
        if options.tiers.path is not None and options.tiers.durable:
            refuse_slices(
                "shard: states in files that outlast the process",
                bool(comm.slices),
                '"durable": False',
            )
        pieces = checked_pieces(comm, model)
        build.check_model(model, alone=comm.world_size == 1)
        trains = not isinstance(user_optimizer, NoOptimizer)
        optimizer = user_optimizer
        if trains:
            optimizer = accept_optimizer(user_optimizer, options.offload, options.overlap_step)
            options.check_audit(optimizer.param_groups)
        build.check_ownership(model, user_optimizer)
        device = _rank_device(comm, model, optimizer, options.offload)
        quantized.check_model(model, options.stage, device, trains)
        if options.chooses_offload:
            refuse_slices('shard: offload="auto"', bool(comm.slices), "an offload of your choice")
            options = replace(
                options, offload=_choose(comm, model, optimizer, options, figures_of_ranks)
            )
        specs = plan_units(model, options.units)
        fixed_dtypes = build.fixed_dtypes_of(model, options.keep_fp32)
        builder = build.Builder(
            comm, LIFETIMES[options.stage], options.dtype, fixed_dtypes, device, trains
        )
        builder.float8 = float8_formats(model)
        build.check_norms(model, builder)
        whole_matrices = bool(comm.slices) and trains and isinstance(optimizer.kind, MuonKind)
        refuse_slices(
            "shard: Muon", whole_matrices, "an elementwise optimizer, as it takes whole matrices"
        )
        build.check_states(user_optimizer, optimizer.kind, builder)
        builder.late = set(pieces)
        filler = plan_materialize(model, options.materialize)
        buckets = builder.plan(model, specs, optimizer)
        options.check_loss_scale({bucket.dtype for bucket in buckets})
        plan = Plan(
            model,
            optimizer,
            comm,
            builder,
            build.units_of(specs, buckets),
            buckets,
            options.reduce_policy(comm.world_size),
            options.loss_scaler(),
            options.compared(),
            {spec.name: [name for name, _ in spec.params] for spec in specs},
            overlap_step_of,
            host_grads_of,
            ratio_tuner_of,
        )
        host_bytes = _host_bytes(plan, options.tiers)
        ranks = {
            "ranks": repr(comm.topology),
            "shard_world_size": len(comm.shard_ranks),
            "backend_sums": comm.backend_sums,
        }
        entries = build.signature(
            model, specs, user_optimizer, optimizer, builder, options.compared() | ranks
        )
        entries += filler.entries if filler is not None else []
    except BaseException as error:  # of any kind: the other ranks are waiting
        problems.append(error)
    try:
        agree(comm, "shard", problems, entries, over=comm.across)
        # all ranks of all parts are here by now
        problems.extend(filter(None, [short_of_memory(comm, host_bytes)]))
        agree(comm, "shard", problems, over=comm.across)
    finally:
        problems.clear()
    return plan, filler, options


_FAILED, _ON_CPU = "failed", "cpu"  # in place of a rank's figures


def _figures(device: torch.device) -> Any:
    return _ON_CPU if device.type == "cpu" else probe.measure(device)


def _choose(
    comm: Comm,
    model: nn.Module,
    optimizer: ShardableOptimizer,
    options: ShardOptions,
    figures: Sequence[Any],
) -> Mapping[str, Any] | None:
    """Return the offload for "auto", the same on all ranks, whose figures these are. Not
    collective; raises MemoryError.
    """
    if isinstance(optimizer, NoOptimizer):
        raise ValueError(
            'shard: offload is "auto" without an optimizer; expected None, or {"params": "cpu"} at '
            "stage 3"
        )
    if None in figures:
        raise ValueError(
            f'shard: offload is "auto", but not on rank {figures.index(None)}; expected the same '
            f"on every rank"
        )
    if _FAILED in figures:  # `agree` says why
        return None
    if _ON_CPU in figures:
        if comm.rank == 0:
            logger.info(
                'shard: offload="auto" chose None: this rank computes on the CPU, whose memory is '
                "the host's"
            )
        return None
    machine, rates = probe.agreed(figures)

    def predicted(stage: int, offload: Mapping[str, Any] | None) -> Prediction:
        return predict_rank(model, optimizer, replace(options, offload=offload), comm.topology)

    candidates = fit.fit(
        machine,
        rates,
        comm.world_size,
        predicted,
        options.stage,
        not isinstance(optimizer.kind, MuonKind),
    )
    best = fit.chosen_of(candidates)
    explanation = (
        f"{machine.device / 2**30:.1f} GiB of device memory ({machine.activations / 2**30:.1f} "
        f"left for activations) and "
        f"{machine.host / 2**30:.1f} GiB of host memory per rank, {rates.to_host / 1e9:.1f} GB/s "
        f"to it and {rates.from_host / 1e9:.1f} back, Adam there {rates.adam / 1e9:.2f}e9 "
        f"elements/s\n{fit.table(candidates)}"
    )
    if best is None:
        raise MemoryError(
            f'shard: offload is "auto", and nothing fits {explanation}\nexpected more memory or '
            'ranks, a higher stage, smaller states, or {"optimizer": "nvme", "path": DIR}'
        )
    if comm.rank == 0:
        logger.info('shard: offload="auto" chose %s, by %s', best.argument, explanation)
    return best.argument


def _host_bytes(plan: Plan, tiers: OffloadOptions) -> int:
    """Return the bytes of host memory that offload takes on this rank."""
    host_bytes = 0
    if tiers.optimizer is not None:
        prefetch = plan.options["prefetch"]
        host_bytes = planned_store(plan.buckets, plan.updated, tiers, prefetch).host_bytes
    if tiers.gradients is not None:
        host_bytes += host_grad_bytes(
            plan.updated, plan.policy, plan.comm.world_size == 1 and not plan.scaler.active
        )
    if tiers.params == "cpu":
        host_bytes += sum(bucket.owned_numel * bucket.dtype.itemsize for bucket in plan.buckets)
    return host_bytes


def _files(plan: Plan, tiers: OffloadOptions) -> StateFiles | None:
    """Return what states on disk are to be in, if they are. Collective."""
    if tiers.path is None:
        return None
    folders, comm = [Path(path) for path in tiers.path], plan.comm
    files: Scratch | Slots
    with together(comm, "shard", "nothing was changed"):
        check_directories(folders)
        make_directory(folders[0])
        files = Slots(folders, comm.rank) if tiers.durable else Scratch(folders)
    try:
        if isinstance(files, Slots):
            files.choose(comm, tiers.resume)
        with together(comm, "shard", "nothing was changed"):
            resumes = isinstance(files, Slots) and files.record is not None
            for folder in folders[:0] if resumes else folders:
                make_directory(folder)
            for folder in filter(Path.exists, folders) if comm.rank == 0 else ():
                logger.info("shard: files of offload go to %s, on %s", folder, space_of(folder))
    except BaseException:
        if isinstance(files, Slots):
            files.close()
        raise
    return files


def _commit_steps(plan: Plan, files: StateFiles | None) -> None:
    """Resume from the chosen committed step, and commit the following ones. Collective."""
    if isinstance(files, Slots):
        engine = engine_behind("shard", plan.model)
        engine.commits = Commits(engine, files, _in_files(plan))


def _in_files(plan: Plan) -> NvmeStates:
    assert isinstance(plan.host, CpuStore)
    assert plan.host.in_files is not None
    return plan.host.in_files


def _allocate(
    plan: Plan, user_optimizer: Any, tiers: OffloadOptions, files: StateFiles | None
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Take memory, on the device and in the tier; returns the optimizer's states, and its other
    entries. Collective.
    """
    comm, options = plan.comm, plan.options
    comm.acquire_group(keepers_of(options["reshard_after_forward"]))
    # collective, whether this part has a worker or not: other parts may have one
    worker = plan_worker(comm, tiers.cpu_threads, plan.device)
    has_worker = options["overlap_step"] or tiers.gradients is not None
    plan.threads = worker if has_worker else WorkerThreads(1)
    update_cores = options["overlap_step"] and plan.threads.cores
    with together(
        Everyone(comm), "shard: taking memory", "make room, or ask for less; nothing was changed"
    ):
        if tiers.optimizer is not None:  # first: the shards of weights may lie in its tier
            tier = _C.HostTier(plan.device, tiers.pin_memory, tiers.pin_memory_limit)
            nodes = nodes_of(update_cores or own_cores())
            plan.host = host_store(plan.updated, tier, plan.device, tiers, files, nodes)
        weights = None
        if tiers.params == "nvme":
            assert isinstance(plan.host, CpuStore)
            folders = [Path(path) for path in tiers.path or ()]
            scratch = Scratch(folders, _in_files(plan).files.rates)
            weights = plan.host.keep_weights(plan.buckets, scratch, options["prefetch"])
        copies = None if plan.host is None or tiers.params is None else plan.host.copies
        for bucket in plan.buckets:
            plan.builder.allocate(bucket, copies, weights)
        plan.store = DeviceStore(plan.updated, plan.device) if plan.host is None else plan.host
        other_entries_of_state = other_entries(user_optimizer.state)
        states = {}
        for param, state in user_optimizer.state.items():
            # a slice has only what a constructor made
            if state and param not in other_entries_of_state and not is_dtensor(param):
                states[param] = joined_state(state, param)
    return states, other_entries_of_state


def _fill(
    plan: Plan,
    filler: FromInit | FromFiles | None,
    user_optimizer: Any,
    states: Mapping[Any, Any],
    options: ShardOptions,
    old: Engine | None,
    level: int,
) -> None:
    """Move weights into the plan's memory: those of the model, of `filler`, or of the engine `old`.
    Collective. level: see `shard_and_log`.
    """
    builder, buckets, first = plan.builder, plan.buckets, plan.comm.rank == 0
    for note in builder.notes(plan.model, options.precision) if first else ():
        logger.info("shard: %s", note)
    if old is not None:
        old.zero_grad()
    if plan.optimizer is not user_optimizer:
        replace_optimizer(user_optimizer, plan.optimizer, level if first else None)
    for bucket in buckets:
        builder.fill(bucket, plan.store, options.broadcast)
    idle: list[str] = []
    for bucket in buckets:
        if bucket.group is None and bucket.trainable:
            idle += [managed.name for managed in bucket.params]
    leaves_others = getattr(user_optimizer, "leaves_others", False)  # by initialize
    if idle and not leaves_others and not builder.lifetimes.owns_everything and first:
        logger.warning(
            "shard: these trainable parameters are in no group of the optimizer, so nothing "
            "updates them: %s. Freeze them, or add them to a group. From stage 1 on another "
            "optimizer cannot update them, because p.grad is None.",
            ", ".join(idle),
        )
    lost = [name for name, param in plan.frozen if param in states]
    if lost and first:
        logger.warning(
            "shard: the optimizer state of frozen parameters is dropped: %s", ", ".join(lost)
        )
    sharded = {managed.param for bucket in buckets for managed in bucket.params}
    replicated: list[Any] = [
        *(param for _, param in plan.frozen if param not in sharded),
        *plan.model.buffers(),
        *(mean for _, mean in quantized.named_means(plan.model)),
    ]
    if old is not None:
        relay.bring_back(old, replicated)
        relay.end(old)
    has_values = [t for t in replicated if not t.is_meta and t not in builder.late]
    builder.move_rest(has_values, options.broadcast)
    if filler is not None:
        filler.fill(builder, buckets, plan.store, options.broadcast)
    lay_out(builder, buckets, plan.store, plan.model)


def _start(
    plan: Plan,
    user_optimizer: Any,
    states: dict[Any, Any],
    other_entries_of_state: dict[Any, Any],
    options: ShardOptions,
) -> None:
    """Start the engine and hand it the optimizer's states. Collective."""
    optimizer: Any = plan.optimizer
    with plan.builder.together("starting the engine"):
        engine = Engine(plan)
    with plan.builder.together("taking over the optimizer's states"):
        # frees each state once it is carried; schedulers keep a replaced optimizer alive
        user_optimizer.state.clear()
        engine.state_io.carry(states)
        engine.go_on_from(None)
        if plan.builder.trains:  # from now on the engine has that state
            optimizer._skipped, optimizer._device_state = optimizer.skipped_steps, None
        attach(plan.model, engine, input_casts(plan, options.cast_inputs))
        save_pretrained.attach(plan.model, engine)
        compile_units(engine, options.compile_arguments)
        optimizer.state = ShardedStates(
            engine.updater.buckets, engine.settle, other_entries_of_state
        )
        optimizer._engine, optimizer._regroup = engine, regroup
        if options.audits is not None and plan.builder.trains:
            engine.updater.audit = engine.reducer.audit = Audit(engine, options.audits)
        if not plan.builder.trains:
            for name, param in plan.frozen:
                if param.requires_grad:
                    engine.handles.append(build.refuse_backward(name, param))
    if engine.grads_in_shards:
        reach_shards()
        refuse_others()
    if plan.comm.rank == 0:
        warn_of_compiled(plan.model, [u.name for u in plan.units], plan.options["stage"] == 3)
    if plan.host is not None:
        warn_of_pageable(plan.host.copies)
        if plan.comm.rank == 0:
            warn_of_misplaced(plan.host.copies)


def _slices_of(model: nn.Module, optimizer: Any) -> tuple[DeviceMesh | None, Exception | None]:
    """Return the mesh over which parameters are sliced, and what is wrong with it, if anything.

    The adapters of sliced layers are sliced here, and replaced in the optimizer.
    """
    try:
        mesh = slice_mesh(model) if isinstance(model, nn.Module) else None
    except ValueError as error:
        return None, error
    try:
        replaced: dict[Any, nn.Parameter] = {} if mesh is None else slice_adapters(model)
    except (NotImplementedError, ValueError) as error:
        return mesh, error
    if not replaced:
        return mesh, None
    for group in getattr(optimizer, "param_groups", ()):
        group["params"] = [replaced.get(param, param) for param in group["params"]]
    for old in replaced:
        optimizer.state.pop(old, None)  # a constructor's, which are made anew
    return mesh, None


def _gpus_of(model: nn.Module) -> set[torch.device]:
    """Return the GPUs that hold a model; none for what is no model, which `shard` refuses on
    every rank.
    """
    if not isinstance(model, nn.Module):
        return set()
    return {tensor.device for tensor in [*model.parameters(), *model.buffers()] if tensor.is_cuda}


def _rank_device(
    comm: Comm, model: nn.Module, optimizer: object, offload: Mapping[str, Any] | str | None
) -> torch.device:
    """Return where this rank computes: the model's CUDA device, the local rank's, or the CPU
    where no GPU is to be used.
    """
    cuda = _gpus_of(model)
    if len(cuda) > 1:
        raise ValueError(
            f"shard: the model is spread over {sorted(map(str, cuda))}; expected one device"
        )
    on_host = isinstance(optimizer, CPUAdam) and (offload is None or isinstance(offload, str))
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
            f"shard: the model is on {device} but the process group has no nccl backend; expected "
            f"nccl, or a CPU model"
        )
    if device.type == "cuda" and not _C.build_info()["cuda"]:
        raise ValueError(
            f"shard: the model would train on {device}, but this shardcore is built without CUDA; "
            f"expected a build with it "
            "(install nvcc and a CUDA build of torch, then build again), or training on the CPU "
            "(with a gloo process group; CUDA_VISIBLE_DEVICES= hides the GPUs)"
        )
    if device.type == "cuda" and on_host:
        raise ValueError(
            f"shard() got CPUAdam and a model on {device}. Use FusedAdam, or add "
            f'offload={{"optimizer": "cpu"}}.'
        )
    return device
