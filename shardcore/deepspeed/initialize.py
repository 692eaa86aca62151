"""initialize(): runs a DeepSpeed configuration through shardcore.shard.

Invariants: all arithmetic is that of `shard`; this file only starts the process group, and
translates the configuration. Whatever fails on one rank up to `shard` fails on all of them, with
nothing changed but that the process group is started (and, last, that folders and runs of metrics
are begun, and the model is sliced). Source: the behaviour documented at
https://deepspeed.readthedocs.io/en/latest/initialize.html and .../training.html.
"""

import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardcore._native import _C
from shardcore.api import shard_and_log
from shardcore.checkpoint.materialize import Materialize, required
from shardcore.deepspeed import checkpointing
from shardcore.deepspeed.config import Config, read_config, shard_options
from shardcore.deepspeed.hf_trainer import stream_saves
from shardcore.deepspeed.leaf_modules import mark_configured
from shardcore.deepspeed.loaders import ShardedLoader
from shardcore.deepspeed.lr_schedules import make as make_scheduler
from shardcore.deepspeed.monitor import SECTIONS as MONITORS
from shardcore.deepspeed.monitor import MonitorMaster
from shardcore.deepspeed.params import name_sharded_params
from shardcore.deepspeed.pipe_engine import PipelineEngine
from shardcore.deepspeed.pipe_module import PipelineModule
from shardcore.deepspeed.training_engine import ForwardEngine, TrainingEngine, supersede
from shardcore.deepspeed.trl import stream_to_vllm
from shardcore.distributed.comm import Comm
from shardcore.distributed.compare import Entry
from shardcore.distributed.groups import use_own_gpu
from shardcore.distributed.launchers import env_int, follow_launcher, launched_world_size
from shardcore.engine.agreement import agree, together
from shardcore.engine.engine import Engine
from shardcore.engine.pieces import assemble, hide, partitioned_params, show
from shardcore.engine.slices import slice_mesh
from shardcore.engine.unshard import tensors_in
from shardcore.optim import FusedAdam, Muon, ShardableOptimizer
from shardcore.optim.elementwise import is_elementwise, not_elementwise
from shardcore.optim.group_options import dtype_name
from shardcore.optim.interface import engine_of
from shardcore.options import DTYPES, refuse_other_blocks
from shardcore.parallel.tensor import tensor_parallel
from shardcore.torch_private import timeout_of

logger = logging.getLogger("shardcore")

_OP = "initialize"
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# param_groups, each with options that it had
_Options = list[tuple[dict[str, Any], dict[str, Any]]]
_meshes: "WeakKeyDictionary[Any, DeviceMesh]" = WeakKeyDictionary()  # by the group of all ranks


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    materialize: Materialize | None = required,
) -> tuple["TrainingEngine", ShardableOptimizer, "ShardedLoader | None", Any]:
    """Shard `model` by a DeepSpeed configuration and return (engine, optimizer, dataloader,
    lr_scheduler). Collective.

    The arguments are DeepSpeed's, in its order. Most callers give them by name.

    Example:
        engine, optimizer, loader, scheduler = shardcore.initialize(
            model=model, config="ds_config.json", training_data=dataset
        )
        for inputs, targets in loader:
            inputs, targets = inputs.to(engine.device), targets.to(engine.device)
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            engine.step()

    Args:
        model: Required. The model to shard. If it is sharded already, the new engine continues from
            its masters, with new optimizer states. The gradients of the model are cleared. During
            the call both engines use memory. Afterwards calls of the first engine and optimizer
            raise ValueError.
        model_parameters: The parameters to optimize, as a list of parameters or of param_groups.
            Default: all trainable parameters.
        config: A dict or the path of a JSON file. `args.deepspeed_config` and `config_params` are
            alternatives. Files with comments (Hjson) need the package hjson. A JSON object in
            base64 also works. docs/deepspeed_keys.md lists the keys; unknown keys raise an error.
        optimizer: An optimizer that shard accepts, or a function from parameters to an optimizer.
            Default: the optimizer of the configuration, which is otherwise ignored. With the key
            zero_allow_untested_optimizer any class works if a trial finds its steps elementwise. If
            the optimizer holds only some of model_parameters, it updates only these; the log prints
            their number.
        training_data: A dataset with a length. The loader yields this rank's micro-batches, in a
            new order each epoch.
        collate_fn: The collate_fn of this loader and of the loaders of engine.deepspeed_io.
        lr_scheduler: A scheduler of the given optimizer, or a function from an optimizer to a
            scheduler. Default: the scheduler of the configuration, if any.
        distributed_port: The value of MASTER_PORT if the environment does not set it.
        dist_init_required: False requires a started process group.
        mpu: The result of UlyssesSPAttentionHF.register_with_transformers, for long sequences. Any
            other mpu, and mesh_param, may only describe parallelism over 1 rank.
        materialize: Required for a model on the meta device: its values, as in shard. None
            initializes it at random. A model of zero.Init has its values.

    Returns a TrainingEngine as the engine. Without an optimizer here and in the configuration, the
    engine is a ForwardEngine, whose backward raises an error. The returned optimizer is then None,
    and model_parameters has no effect. Without training_data the dataloader is None. Without a
    scheduler the lr_scheduler is None.

    If torch.distributed is not initialized, `initialize` starts it from the environment:

    - From torchrun's variables, or from the variables of mpirun or srun. In the second case it sets
      RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Over several nodes mpirun must pass
      MASTER_ADDR, the host of rank 0.
    - Without any of these variables, the world is this process.
    - With CUDA the backend is nccl. The device is GPU LOCAL_RANK, unless a GPU other than 0 is the
      current device.

    Raises:
        ValueError, TypeError: For bad arguments or keys.
        NotImplementedError: For settings that shardcore does not support yet.
        OSError: For a configuration file that cannot be read.

    Every rank raises these errors, with nothing changed except that the process group is started.
    If shard raises, metrics may be started already, and with tensor_parallel the model may be
    sliced.
    """
    both_configs = config is not None and config_params is not None
    config = config_params if config is None else config
    if dist.is_available() and not dist.is_initialized():
        read_config(config, args)  # before a group is started
        if dist_init_required is False:
            raise ValueError(
                f"{_OP}: dist_init_required is False, but no process group is started; expected "
                f"None, or one"
            )
        start_process_group(_OP, distributed_port)
    comm = Comm()
    problems: list[BaseException] = []
    entries: list[Entry] = []
    chosen: Any = None  # the optimizer to shard
    options_before: _Options = []
    old = engine_of(model)
    partitioned = show(partitioned_params(model))
    try:
        if both_configs:
            raise ValueError(
                f"{_OP}: config and config_params are both given; expected config alone"
            )
        if old is not None:
            old.synchronize()  # before parameters are read
        settings = read_config(config, args)
        pipe = model if isinstance(model, PipelineModule) else None
        of_sequences = _check_parallelism(
            mpu if pipe is None else None, mesh_param, settings.sequence_parallel_size
        )
        if of_sequences > 1 and settings.gradient_allreduce_op == "sum":
            raise ValueError(
                f'{_OP}: config gradient_allreduce_op is "sum" with sequences over ranks; '
                'expected "mean"'
            )
        slices = _check_tensor_parallel(model, settings, of_sequences, comm.world_size)
        ranks = of_sequences * slices  # that train on the same samples
        part = comm.world_size // ranks, comm.rank // ranks
        if pipe is not None:
            part = pipe.mpu().data_parallel_size, pipe.mpu().data_parallel_id
        # of all ranks, as DeepSpeed counts, whose slices see the same samples
        sizes = settings.batch_sizes(part[0] * slices)
        sizes = replace(sizes, train=sizes.train // slices)
        check_model(model, settings)
        _check_mesh(settings.shardcore.get("mesh"), comm.world_size)
        params = _parameters(model, model_parameters)
        trains = (optimizer, settings.optimizer, lr_scheduler) != (None, None, None)
        if trains:
            chosen = _optimizer(model, params, settings, optimizer)
            if settings.zero_allow_untested_optimizer:
                _try(chosen, log=comm.rank == 0)
            if model_parameters is not None and isinstance(optimizer, torch.optim.Optimizer):
                _compare_parameters(params, optimizer, log=comm.rank == 0)
        _check_scheduler(lr_scheduler, chosen, optimizer)
        muon = isinstance(chosen, Muon)
        if slices > 1 and (muon or (chosen is not None and chosen.state)):
            what = "Muon" if muon else "an optimizer that has states"
            raise NotImplementedError(
                f"{_OP}: config tensor_parallel is given with {what}; expected a new optimizer, "
                "such as Adam (Adagrad creates its states at once)"
            )
        if pipe is not None:
            _check_pipeline(pipe, settings, chosen)
        loader = None
        if training_data is not None:
            _check_dataset(training_data)
            loader = ShardedLoader(
                training_data,
                part,
                pipe is None,
                batch_size=sizes.micro,
                collate_fn=collate_fn,
                drop_last=settings.dataloader_drop_last,
                pin_memory=torch.cuda.is_available(),
            )
        options_before = [] if chosen is None else _options_of(chosen)  # which a scheduler sets
        scheduler = lr_scheduler(chosen) if _is_function(lr_scheduler) else lr_scheduler
        if chosen is not None and scheduler is None and settings.scheduler is not None:
            scheduler = make_scheduler(*settings.scheduler, chosen)
        samples: Any = () if loader is None else loader.dataset
        entries = [
            *(
                ("config", f.name, str(getattr(settings, f.name)))
                for f in fields(settings)
                if f.compare
            ),
            ("optimizer", "", "given" if trains else "none"),
            ("number of slices", "", str(slices)),
            ("model", "", "not sharded" if old is None else "sharded"),
            ("training_data", "", f"{len(samples)} samples"),
        ]
    # of any kind: user functions run here, and the other ranks are waiting
    except BaseException as error:
        problems.append(error)
    try:
        agree(comm, _OP, problems, entries)
        monitor = _open_monitor(settings, comm)
        if settings.log_level is not None:
            logger.setLevel(settings.log_level.upper())
        if "activation_checkpointing.cpu_checkpointing" in settings.explicit:
            checkpointing.configure(checkpoint_in_cpu=settings.cpu_checkpointing)
        if comm.rank == 0:
            _explain(settings, optimizer, lr_scheduler, pipe)
        mark_configured(model, settings, log=comm.rank == 0)
        options = shard_options(settings, muon)
        if of_sequences > 1:
            mpu.enable(model)  # which checks it first
        if pipe is not None:
            options = _pipeline_options(pipe, settings, options)
        if slices > 1:
            assemble(partitioned)  # slices are cut from full weights
            mesh = _slice(model, chosen, slices, comm.device)
            options["process_group"] = mesh["dp"]
        if old is not None:
            old.gives_way = True
        model, adam = shard_and_log(
            model,
            chosen,
            **options,
            clip_grad_norm=settings.gradient_clipping or None,
            accumulate=sizes.accumulation,
            materialize=materialize,
        )
    except BaseException:
        _put_back(options_before)
        if isinstance(old, Engine):
            old.gives_way = False
        raise
    finally:
        problems.clear()
        hide(partitioned)
    if old is not None:
        supersede(old)
    if adam is not None and adam is not chosen:
        kinds: Any = type(adam), type(chosen)
        adam.__class__ = _counts_as(*kinds)
    if settings.gradient_allreduce_op == "sum":
        engine_of(model).sum_gradients()
    cast_buffers(model, settings)
    stream_to_vllm()
    if settings.stage == 3:
        name_sharded_params()
        stream_saves()
    elif engine_of(model).overlap_step is None:  # else a read on one rank would start gathers there
        engine_of(model).own_weights = True  # scripts read them on rank 0 alone, and save them
    if slices > 1:
        _compare_inputs(model, mesh["tp"].get_group())
    engine: Any
    if adam is None:
        engine = ForwardEngine(model, engine_of(model), settings, sizes, part, loader)
    else:
        kind = TrainingEngine if pipe is None else PipelineEngine
        engine = kind(model, adam, scheduler, loader, settings, sizes, part, monitor)
    engine.collate_fn = collate_fn
    return engine, adam, loader, scheduler


def _options_of(optimizer: torch.optim.Optimizer) -> _Options:
    """Return each param_group with a copy of its options, of which lr may be a tensor."""
    return [
        (group, {k: deepcopy(value) for k, value in group.items() if k != "params"})
        for group in optimizer.param_groups
    ]


def _put_back(options_before: _Options) -> None:
    for group, options in options_before:
        for name in group.keys() - options.keys() - {"params"}:
            del group[name]  # of torch's schedulers: initial_lr, which the next one would begin at
        for name, value in options.items():
            if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


def _open_monitor(settings: Config, comm: Comm) -> MonitorMaster:
    """Open what metrics are written to. What fails on rank 0, which alone writes, fails on all
    ranks.
    """
    with together(comm, _OP, "nothing was changed"):
        return MonitorMaster({name: getattr(settings, name) for name in MONITORS}, comm.rank)


def _explain(
    settings: Config, optimizer: Any, lr_scheduler: Any, pipe: PipelineModule | None
) -> None:
    """Log what a reader of the configuration may not expect."""
    if settings.activation_checkpoint_interval and pipe is None:
        logger.warning(
            "initialize: config pipeline.activation_checkpoint_interval is ignored: the model is "
            "not a PipelineModule"
        )
    for line in settings.accepted:
        logger.warning("initialize: config is ignored here: %s", line)
    if "gradient_clipping" not in settings.explicit:
        logger.warning(
            "initialize: config omits gradient_clipping, so the global norm is clipped to %s, "
            "DeepSpeed's default (in older releases 0.0, off); set the limit, or 0.0",
            settings.gradient_clipping,
        )
    if optimizer is not None and settings.optimizer is not None:
        logger.warning(
            "initialize: optimizer= replaces the optimizer of the config, masters and states "
            "included, as in DeepSpeed"
        )
    if lr_scheduler is not None and settings.scheduler is not None:
        logger.warning(
            "initialize: lr_scheduler= replaces the scheduler of the config, as in DeepSpeed"
        )
    if settings.dump_state:
        values = {f.name: getattr(settings, f.name) for f in fields(settings) if f.compare}
        logger.warning("initialize: config is %s", values)


def start_process_group(
    op: str, port: int, timeout: timedelta | None = None, backend: str | None = None
) -> None:
    """Start torch.distributed if the environment describes a world. port: MASTER_PORT, where it
    has none.
    """
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if ("RANK" in os.environ or launched_world_size()[1] > 1) and "MASTER_ADDR" in os.environ:
        os.environ.setdefault("MASTER_PORT", str(port))
    follow_launcher(op)
    # bound to the group, else NCCL guesses it from the rank
    device = use_own_gpu() if "nccl" in backend else None
    if "RANK" not in os.environ and launched_world_size()[1] == 1:
        return
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        raise ValueError(
            f"{op}: {', '.join(missing)} not set in the environment; expected all of "
            f"{', '.join(_RENDEZVOUS)} (torchrun sets them), or neither RANK nor WORLD_SIZE for a "
            "single process"
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        env_int(name)
    dist.init_process_group(backend, timeout=timeout, device_id=device)


def _check_parallelism(mpu: Any, mesh_param: Any, configured: int) -> int:
    """Return how many ranks have a sequence; ValueError for model parallelism, or sequences that
    others divide.
    """
    for kind in ("model", "tensor_model", "pipe"):
        name = f"get_{kind}_parallel_world_size"
        size = getattr(mpu, name, lambda: 1)()
        if size > 1:
            raise ValueError(
                f"{_OP}: mpu.{name}() is {size}; expected 1, or config tensor_parallel without mpu"
            )
    if mesh_param is not None and tuple(mesh_param)[1:] not in ((), (1,)):
        raise ValueError(
            f"{_OP}: mesh_param is {mesh_param!r}; expected (ranks, 1), or for sequences over "
            f"ranks "
            "mpu=UlyssesSPAttentionHF.register_with_transformers(...) (docs/long_sequences.md)"
        )
    ranks: int = getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)()
    if ranks > 1 and not hasattr(mpu, "enable"):
        raise ValueError(
            f"{_OP}: mpu describes sequences over {ranks} ranks; expected the mpu of "
            "UlyssesSPAttentionHF.register_with_transformers, or enable_sequence_parallel "
            "(docs/long_sequences.md)"
        )
    if configured not in (1, ranks):
        raise ValueError(
            f"{_OP}: config sequence_parallel_size is {configured}, and mpu {ranks}; expected the "
            f"same, with "
            "mpu=UlyssesSPAttentionHF.register_with_transformers(...) (docs/long_sequences.md)"
        )
    return ranks


def _check_tensor_parallel(model: Any, settings: Config, of_sequences: int, world_size: int) -> int:
    """Return how many ranks have slices of each weight: of the configuration, or of
    tp_model_init; ValueError for others.
    """
    size, is_module = settings.autotp_size, isinstance(model, nn.Module)
    modules = model.modules() if is_module else ()
    recorded = max((getattr(module, "_autotp_size", 1) for module in modules), default=1)
    if 1 < size != recorded > 1:
        raise ValueError(
            f"{_OP}: config tensor_parallel.autotp_size is {size}, and tp_model_init {recorded}; "
            f"expected the same"
        )
    size = max(size, recorded)
    if size == 1:
        return size
    sliced = slice_mesh(model) if is_module else None
    obstacle = ""
    if isinstance(model, PipelineModule):
        obstacle = "a PipelineModule"
    elif of_sequences > 1:
        obstacle = "sequences over ranks"
    elif settings.shardcore.get("mesh") is not None:
        obstacle = "shardcore.mesh"
    elif sliced is not None and sliced.size() != size:
        obstacle = f"a model in {sliced.size()} slices"
    elif world_size % size:
        obstacle = f"{world_size} ranks, which it does not divide"
    if obstacle:
        raise ValueError(
            f"{_OP}: config tensor_parallel.autotp_size is {size} with {obstacle}; expected a "
            "size that fits, or 1"
        )
    return size


def tensor_mesh() -> DeviceMesh | None:
    """Return the mesh (dp, tp) that `make_tensor_mesh` made last; None without one."""
    return _meshes.get(dist.group.WORLD) if dist.is_initialized() else None


def make_tensor_mesh(size: int, device: torch.device) -> DeviceMesh:
    """Return a mesh (dp, tp) of all ranks on such devices, `size` adjacent ones for "tp".
    Collective, unless it is there.
    """
    mesh, world = tensor_mesh(), dist.group.WORLD
    if mesh is None or mesh["tp"].size() != size:
        assert world is not None
        ranks = torch.arange(world.size(), device="cpu").view(-1, size)
        timeout = timeout_of(world, device)
        groups: Any = dist.new_subgroups_by_enumeration
        dp, tp = (groups(rows.tolist(), timeout=timeout)[0] for rows in (ranks.T, ranks))
        mesh = _meshes[world] = DeviceMesh.from_group(
            [dp, tp], device.type, ranks, mesh_dim_names=("dp", "tp")
        )
    return mesh


def _slice(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, size: int, device: torch.device
) -> DeviceMesh:
    """Slice a model over adjacent ranks, and give its optimizer the slices. Returns the mesh
    (dp, tp).
    """
    if device.type == "cuda":
        use_own_gpu()
    mesh = make_tensor_mesh(size, device)
    before = dict(model.named_parameters(remove_duplicate=False))
    if slice_mesh(model) is None:
        tensor_parallel(model, mesh["tp"])
    now = {param: model.get_parameter(name) for name, param in before.items()}
    for group in () if optimizer is None else optimizer.param_groups:
        group["params"] = [now.get(param, param) for param in group["params"]]
    return mesh


def _compare_inputs(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the first forward compare what the ranks of a sliced model are given, as DeepSpeed
    does.
    """
    comm = Comm(group)

    def compare(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        entries = [
            ("checksum of input", str(index), str(_C.crc32c(tensor.detach().cpu().contiguous())))
            for index, tensor in enumerate(tensors_in([args, kwargs]))
        ]
        agree(comm, "forward", entries=entries, explain=_other_inputs)

    handle = model.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)


def _other_inputs() -> ValueError:
    return ValueError(
        "forward: ranks that have slices of one model are given different inputs; expected the "
        "same (a sampler with num_replicas and rank of "
        "deepspeed.utils.groups.get_data_parallel_world_size() and _rank(), or training_data)"
    )


def _check_mesh(mesh: Sequence[int] | None, world_size: int) -> None:
    if mesh is not None and math.prod(mesh) != world_size:
        raise ValueError(
            f"{_OP}: config shardcore.mesh is {mesh}; expected numbers whose product is "
            f"{world_size}, the ranks"
        )


def _check_pipeline(pipe: PipelineModule, settings: Config, optimizer: Any) -> None:
    """Raise ValueError for what a pipeline does not train with."""
    if not settings.managed_gradient_accumulation:
        raise ValueError(
            f"{_OP}: config managed_gradient_accumulation is False for a PipelineModule; expected "
            "true, since train_batch calls the step"
        )
    if optimizer is None:
        raise ValueError(
            f"{_OP}: a PipelineModule is given without an optimizer; expected one, or "
            f'{{"optimizer": ...}} in config'
        )
    if pipe.world_size != (dist.get_world_size() if dist.is_initialized() else 1):
        raise ValueError(
            f"{_OP}: the PipelineModule was made for {pipe.world_size} ranks, and there are "
            f"{dist.get_world_size()}; expected deepspeed.init_distributed() before it is made"
        )
    if settings.stage == 3 and pipe.tied:
        raise ValueError(
            f"{_OP}: config zero_optimization.stage is 3 for a PipelineModule with weights tied "
            "over stages; expected 0 to 2"
        )
    for name in ("mesh", "ranks_per_node"):
        if settings.shardcore.get(name) is not None and pipe.num_stages > 1:
            raise ValueError(
                f"{_OP}: config shardcore.{name} is given for a PipelineModule; expected it for "
                f"other models alone"
            )


def _pipeline_options(
    pipe: PipelineModule, settings: Config, options: dict[str, Any]
) -> dict[str, Any]:
    """Return the options of `shard` for this rank's stage. The micro-batches of a step are added
    up before they are reduced.
    """
    if settings.activation_checkpoint_interval:
        pipe.activation_checkpoint_interval = settings.activation_checkpoint_interval
    if pipe.stage_id > 0:
        options["cast_inputs"] = False  # they are as the stage before computed them
    if pipe.num_stages > 1:
        options |= {
            "process_group": pipe.mpu().dp_proc_group,
            "model_parallel_group": pipe.mpu().pp_proc_group,
        }
    return {"sync_each": False, **options}


def check_model(model: Any, settings: Config) -> None:
    """Raise TypeError or ValueError for a model that the configuration cannot be followed with."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{_OP}: model has type {type(model).__name__}; expected a torch.nn.Module")
    if settings.bf16 or settings.fp16:
        return
    taken = {torch.float32, torch.bfloat16} if settings.autocast == "bf16" else {torch.float32}
    for name, param in model.named_parameters():
        if param.is_floating_point() and param.dtype not in taken:
            raise ValueError(
                f"{_OP}: model parameter {name} has dtype {dtype_name(param.dtype)} but config "
                f"enables "
                'neither bf16 nor fp16; expected float32 weights, or {"bf16": {"enabled": true}}'
            )


def cast_buffers(model: nn.Module, settings: Config) -> None:
    """Cast the buffers beside 16-bit weights: to float32 what is kept in it, the others to
    data_types.buffer_dtype.
    """
    if not (settings.bf16 or settings.fp16):
        return
    pattern = _kept_in_fp32(model, settings)
    dtype = None if settings.buffer_dtype is None else DTYPES[settings.buffer_dtype]
    for name, buffer in model.named_buffers():
        wanted = torch.float32 if pattern is not None and pattern.search(name) else dtype
        if wanted is not None and buffer.is_floating_point() and buffer.dtype != wanted:
            buffer.data = buffer.data.to(wanted)


def _kept_in_fp32(model: nn.Module, settings: Config) -> re.Pattern[str] | None:
    """Return what the names of buffers match that stay in float32, if there are any.

    Patterns, in which "*" is any text, are the configuration's, or those that transformers' models
    have by module.
    """
    if settings.keep_in_fp32_modules is not None:
        patterns = [name.replace("*", ".*") for name in settings.keep_in_fp32_modules]
    else:
        lists = ["_keep_in_fp32_modules_strict"] + ["_keep_in_fp32_modules"] * settings.fp16
        patterns = [
            (f"^{re.escape(path)}\\..*" if path else "") + name.replace("*", ".*")
            for path, module in model.named_modules()
            for attribute in lists
            for name in getattr(module, attribute, None) or ()
        ]
    return re.compile("|".join(patterns)) if patterns else None


def _is_function(thing: Any) -> bool:
    """Whether `thing` makes an optimizer or scheduler: a class, or a callable without a `step`."""
    return isinstance(thing, type) or (callable(thing) and not hasattr(thing, "step"))


def _parameters(model: nn.Module, model_parameters: Any) -> list[Any]:
    """Return what to optimize: parameters or param_groups."""
    if model_parameters is None:
        return [p for p in model.parameters() if p.requires_grad]
    others = (torch.Tensor, nn.Module, Mapping, str, set, frozenset)
    if not isinstance(model_parameters, Iterable) or isinstance(model_parameters, others):
        raise TypeError(
            f"{_OP}: model_parameters has type {type(model_parameters).__name__}; expected a list "
            f"of parameters or of param_groups (model.parameters())"
        )
    return list(model_parameters)


def _try(optimizer: torch.optim.Optimizer, log: bool) -> None:
    """Let `shard` take an optimizer of an unknown class whose steps a trial finds elementwise;
    else raise TypeError.
    """
    known = isinstance(optimizer, ShardableOptimizer) or type(optimizer) in (
        torch.optim.Adam,
        torch.optim.AdamW,
    )
    if known or isinstance(optimizer, Muon) or is_elementwise(optimizer):
        return
    refuse_other_blocks(_OP, optimizer)  # the trial's tensors are too small for 8-bit states
    name = type(optimizer).__name__
    if (why := not_elementwise(optimizer)) is not None:
        raise TypeError(
            f"{_OP}: steps of the optimizer {name} are not elementwise: {why}. Shards are flat "
            "ranges of many parameters; expected an optimizer whose elements depend on their own "
            "weight, gradient and states alone"
        )
    optimizer.elementwise = True  # type: ignore[attr-defined]
    if log:
        logger.warning(
            "initialize: %s is accepted: three of its steps on a tensor and on its flat parts "
            "gave equal bits",
            name,
        )


def _compare_parameters(params: list[Any], optimizer: torch.optim.Optimizer, log: bool) -> None:
    """Say how many of `params` the optimizer has; ValueError if it has others."""
    wanted, updated = _trainable(FusedAdam(params)), _trainable(optimizer)
    if not updated <= wanted:
        raise ValueError(
            f"{_OP}: model_parameters lacks parameters of optimizer; expected all of them, or only "
            f"optimizer=..."
        )
    if updated == wanted:
        return
    optimizer.leaves_others = True  # type: ignore[attr-defined]
    if log:
        logger.warning(
            "initialize: optimizer= updates %d of the %d trainable parameters in "
            "model_parameters; the others keep their values",
            len(updated),
            len(wanted),
        )


def _optimizer(
    model: nn.Module, params: list[Any], settings: Config, optimizer: Any
) -> torch.optim.Optimizer:
    if optimizer is not None and settings.shardcore.get("optimizer"):
        raise ValueError(
            f"{_OP}: config shardcore.optimizer is given, but optimizer= takes the place of the "
            f"optimizer there; expected "
            "optimizer=FusedAdam(...) with these options, or config alone"
        )
    if optimizer is None:
        if settings.optimizer is None:
            raise ValueError(
                f"{_OP}: there is no optimizer; expected optimizer=..., or "
                f'{{"optimizer": {{"type": "Adam"}}}} in config. For a model that only runs '
                "forward, call shardcore.shard(model, None)"
            )
        return configured_optimizer(model, params, settings)
    if _is_function(optimizer):
        returned = optimizer(params)
        if not isinstance(returned, torch.optim.Optimizer):
            raise TypeError(
                f"{_OP}: optimizer(...) returned a {type(returned).__name__}; expected a "
                f"torch.optim.Optimizer"
            )
        return returned
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{_OP}: optimizer has type {type(optimizer).__name__}; expected a "
            f"torch.optim.Optimizer or a function"
        )
    return optimizer


def configured_optimizer(
    model: nn.Module, params: list[Any], settings: Config
) -> torch.optim.Optimizer:
    """Return the optimizer that the configuration has, over parameters or param_groups of the
    model.
    """
    assert settings.optimizer is not None
    if settings.optimizer_type is Muon:
        return Muon(_muon_groups(model, params, settings.optimizer["halves"]))
    return settings.optimizer_type(params, **settings.optimizer)


def _muon_groups(
    model: nn.Module, params: list[Any], halves: Mapping[bool, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Split each group in two, as DeepSpeed does: Muon takes matrices but those with embed or
    lm_head in their names.
    """
    names = {param: name.lower() for name, param in model.named_parameters()}

    def uses_muon(param: nn.Parameter) -> bool:
        name = names.get(param, "")
        return param.ndim >= 2 and "embed" not in name and "lm_head" not in name

    groups = []
    for group in params if params and isinstance(params[0], dict) else [{"params": params}]:
        members = list(group["params"])  # which may be an iterator
        for use_muon, options in halves.items():
            chosen = [param for param in members if uses_muon(param) == use_muon]
            own = {key: value for key, value in group.items() if key in options}
            if chosen:
                groups.append({"params": chosen, "use_muon": use_muon, **options, **own})
    return groups


def _trainable(optimizer: torch.optim.Optimizer) -> set[torch.Tensor]:
    return {
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    }


@cache
def _counts_as(kind: type, replaced: type) -> type:
    """Return the kind of an optimizer that isinstance takes for one of the `replaced` class,
    too.

    Libraries that wrap it derive a class from its __class__, in which its own methods come first.
    """
    both = type(replaced.__name__, (kind, replaced), {})
    return type(kind.__name__, (kind,), {"__class__": property(lambda self: both)})


def _check_scheduler(lr_scheduler: Any, chosen: torch.optim.Optimizer, optimizer: Any) -> None:
    if lr_scheduler is None or _is_function(lr_scheduler):
        return
    if not callable(getattr(lr_scheduler, "step", None)):
        raise TypeError(
            f"{_OP}: lr_scheduler has type {type(lr_scheduler).__name__}; expected a scheduler "
            f"with step(), or a function"
        )
    if getattr(lr_scheduler, "optimizer", chosen) is not chosen:
        raise ValueError(
            f"{_OP}: lr_scheduler drives another optimizer than initialize uses; expected one made "
            f"over the optimizer= given, or a function: lr_scheduler=lambda optimizer: ..."
        )
    if optimizer is not chosen:
        raise ValueError(
            f"{_OP}: lr_scheduler is an object but the optimizer is made here; expected a "
            f"function: lr_scheduler=lambda optimizer: ..."
        )


def _check_dataset(data: Any) -> None:
    has_items = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, DataLoader | IterableDataset) or not has_items:
        raise TypeError(
            f"{_OP}: training_data has type {type(data).__name__}; expected a dataset with "
            f"__getitem__ and __len__ (make the loader of a stream yourself, with a part of it for "
            f"each rank)"
        )
