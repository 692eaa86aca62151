"""DeepSpeed's other names, so that a script changes one word: ``import shardcore as deepspeed``.

The modules that scripts import (deepspeed.zero, deepspeed.ops.adam, deepspeed.accelerator, ...) are
made of the functions below; `MODULES` lists what each has. `install` registers them under a
package's name: shardcore's at its import, and deepspeed's where as_deepspeed.py is asked to. What
is not here is an ImportError or AttributeError, as in any package. Source: the public API of
https://deepspeed.readthedocs.io, 0.19.8; and what transformers 5.24, accelerate 1.15, TRL 1.16 and
PEFT 0.21 use of it.
"""

import argparse
import enum
import importlib
import logging
import random
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardcore.deepspeed import (
    fragments,
    groups,
    leaf_modules,
    lr_schedules,
    op_builder,
    pipe_engine,
    pipe_module,
    tiled,
)
from shardcore.deepspeed.accelerator import (
    Accelerator,
    get_accelerator,
    is_current_accelerator_supported,
)
from shardcore.deepspeed.checkpointing import checkpoint, configure, is_configured, reset
from shardcore.deepspeed.config import read_config
from shardcore.deepspeed.initialize import initialize, make_tensor_mesh, start_process_group
from shardcore.deepspeed.loaders import RepeatingLoader
from shardcore.deepspeed.monitor import MonitorMaster
from shardcore.deepspeed.training_engine import TrainingEngine
from shardcore.deepspeed.zero_init import Init, gathered_parameters
from shardcore.distributed.comm import Comm
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.pieces import ZeroParamStatus
from shardcore.extras.generation import fits_whole, generate_together
from shardcore.optim import CPUAdam, FusedAdam, Lion, ShardableOptimizer

logger = logging.getLogger("shardcore")

ShardableOptimizer.cur_scale = property(lambda self: self.loss_scale)  # type: ignore[attr-defined]
ShardableOptimizer.dynamic_loss_scale = property(  # type: ignore[attr-defined]
    lambda self: isinstance(self._engine, Engine) and self._engine.scaler.options is not None
)

# of DeepSpeed, whose names these are; what asks for deepspeed's version after install_as_deepspeed
# gets it
VERSION = "0.19.8"


# --- the package itself ---------------------------------------------------------------------------


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed from the environment, as `initialize` does; nothing if it is started
    already.

    dist_backend: nccl with CUDA, else gloo, by default. timeout: torch's own by default.
    init_method, rank and world_size are given on to torch.distributed if any of them is given.
    config, auto_mpi_discovery, verbose: accepted.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    if init_method is None and rank < 0 and world_size < 0:
        start_process_group("init_distributed", distributed_port, timeout, dist_backend)
        return
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config to a parser, and return it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's configuration")
    group.add_argument(
        "--deepspeed", default=False, action="store_true", help="train as the configuration says"
    )
    group.add_argument(
        "--deepspeed_config", default=None, type=str, help="the JSON file of the configuration"
    )
    return parser


def init_inference(*args: Any, **kwargs: Any) -> None:
    """Refuse: there is no inference engine here."""
    raise NotImplementedError(
        "init_inference: shardcore trains only; expected shardcore.consolidate(...), and an "
        "inference engine of your choice"
    )


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, tp_group: Any = None
) -> nn.Module:
    """Mark `model` for tensor parallelism over this many ranks, and return it. `initialize` then
    slices it, as with tensor_parallel.autotp_size. Collective.

    dtype, config: accepted; the configuration of `initialize` decides.
    tp_group: raises ValueError.

    If torch.distributed is started, `utils.groups` returns these ranks at once.
    """
    if tp_group is not None:
        raise ValueError(
            "tp_model_init: tp_group is given; expected None (adjacent ranks share a model)"
        )
    if dist.is_initialized() and dist.get_world_size() % tp_size == 0:
        make_tensor_mesh(tp_size, Comm().device)
    model._autotp_size = tp_size  # type: ignore[assignment]
    return model


class MoE:
    """Refused when one is made; scripts import it in any case, and ask `isinstance(module,
    MoE)`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Refuse."""
        raise NotImplementedError(
            "deepspeed.moe: shardcore does not support expert parallelism; expected a model whose "
            "experts are ordinary modules (they are sharded like any others)"
        )


def is_moe_param(param: nn.Parameter) -> bool:
    """Return False: there are no expert parameters of DeepSpeed's (see MoE)."""
    return False


def has_moe_layers(module: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): whether there are MoE layers, and how many experts they have."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Any, max_group_size: int | None = None
) -> Any:
    """Return a list of the param_groups as they are: no parameter of theirs is an expert's.
    max_group_size: of experts'.
    """
    return [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)


class DeepSpeedConfig:
    """A checked configuration: train_batch_size, train_micro_batch_size_per_gpu,
    gradient_accumulation_steps, zero_enabled.

    config: a dict, or the path of a JSON file. Raises what `initialize` does for it.
    """

    def __init__(
        self, config: Mapping[str, Any] | str, mpu: Any = None, mesh_device: Any = None
    ) -> None:
        """Read it for the ranks of torch.distributed; one if that is not started. mpu,
        mesh_device: accepted.
        """
        settings = read_config(config)
        sizes = settings.batch_sizes(dist.get_world_size() if dist.is_initialized() else 1)
        self.train_batch_size, self.train_micro_batch_size_per_gpu = sizes.train, sizes.micro
        self.gradient_accumulation_steps, self.zero_enabled = sizes.accumulation, settings.stage > 0


def _refused(name: str) -> type:
    """Return a class that is refused when an object of it is made: mmengine imports its name
    whenever it finds DeepSpeed.
    """

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"{name}: not built; expected FusedAdam, Lion, Muon or another optimizer "
            f"(docs/optimizers.md)"
        )

    return type(name, (), {"__init__": refuse, "__doc__": "Refuse: see docs/deepspeed.md."})


# --- zero -----------------------------------------------------------------------------------------


class OffloadDeviceEnum(enum.StrEnum):
    """Where states may be offloaded to: an argument of engine.offload_states, which takes "cpu"."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """What engine.offload_states may be told to move."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return nested dicts, lists and tuples with their tensors copied to `device`; tied ones are
    one copy.

    A file of the copies has no more than these.
    """
    return _cloned(item, device, {})


def _cloned(item: Any, device: torch.device | str, copies: dict[Any, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        place = item.device, item.data_ptr(), item.dtype, item.shape, item.stride()
        if item.numel() == 0 or place not in copies:
            copies[place] = item.detach().clone().to(device)
        return copies[place]
    if isinstance(item, list | tuple):
        return type(item)(_cloned(entry, device, copies) for entry in item)
    if isinstance(item, Mapping):
        return type(item)({key: _cloned(entry, device, copies) for key, entry in item.items()})  # type: ignore[call-arg]
    return item


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Yield the engine that initialize returned, to generate inside the context. Collective.

    All weights are unsharded, if they take at most half of the free memory of each rank. Else each
    forward gathers one unit after the other, and all ranks have to run the same number of forwards.
    `generate` of transformers' models does so.
    """
    engine = engine_behind("unwrap_model_for_generation", model.module)
    generate_together(model.module, engine)
    with gathered_parameters(model.module, enabled=fits_whole(engine)):
        yield model


class OnDevice:
    """A context in which tensors are made on a device, and those of floating point in a dtype:
    see torch.device.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True
    ) -> None:
        """Choose them."""
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._contexts = ExitStack()

    def __enter__(self) -> None:
        """Begin it."""
        if self.enabled:
            self._contexts.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.dtype)
            self._contexts.enter_context(torch.device(self.device))

    def __exit__(self, *error: object) -> None:
        """End it."""
        self._contexts.close()


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Return nested dicts, lists and tuples with their tensors on `device`. Those that
    criterion_func chooses are moved.
    """
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device)
        return item
    if isinstance(item, list | tuple):
        moved = [move_to_device(entry, device, criterion_func) for entry in item]
        return moved if isinstance(item, list) else tuple(moved)
    if isinstance(item, dict):
        return {key: move_to_device(entry, device, criterion_func) for key, entry in item.items()}
    return item.to(device)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter that another module uses is gathered with its unit."""


# --- ops, utils -----------------------------------------------------------------------------------


class DeepSpeedCPUAdam(CPUAdam):
    """CPUAdam by DeepSpeed's name and arguments. AdamW unless adamw_mode is false."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        """See the class. fp32_optimizer_states: false for moments in bfloat16."""
        super().__init__(
            model_params,
            lr,
            betas,
            eps,
            weight_decay,
            adam_w_mode=adamw_mode,
            amsgrad=amsgrad,
            bias_correction=bias_correction,
            state_dtype="fp32" if fp32_optimizer_states else "bf16",
        )


class _EveryFusedAdam(type):
    """The kind of a class that every FusedAdam counts as an instance of: also one that a
    configuration made.
    """

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, FusedAdam)


class DeepSpeedFusedAdam(FusedAdam, metaclass=_EveryFusedAdam):
    """FusedAdam by DeepSpeed's arguments."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        """See the class. set_grad_none: accepted; zero_grad() has its own argument."""
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            adam_w_mode=adam_w_mode,
            amsgrad=amsgrad,
            bias_correction=bias_correction,
        )


def _check_states(name: str, fp32_optimizer_states: bool) -> None:
    if not fp32_optimizer_states:
        raise ValueError(
            f"{name}: fp32_optimizer_states is False; expected True: its state is float32 on shards"
        )


def fused_lion(
    params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> Lion:
    """Return a Lion by the arguments of DeepSpeed's FusedLion. set_grad_none: accepted, as by
    FusedAdam.
    """
    return Lion(params, lr, betas, weight_decay)


def cpu_lion(
    model_params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> Lion:
    """Return a Lion by the arguments of DeepSpeedCPULion. ValueError for
    fp32_optimizer_states=False: shards have float32.
    """
    _check_states("DeepSpeedCPULion", fp32_optimizer_states)
    return Lion(model_params, lr, betas, weight_decay)


def cpu_adagrad(
    model_params: Any,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Adagrad:
    """Return torch's Adagrad, which shards, by the arguments of DeepSpeedCPUAdagrad. amsgrad:
    accepted, as it is there.

    ValueError for fp32_optimizer_states=False: shards have float32.
    """
    _check_states("DeepSpeedCPUAdagrad", fp32_optimizer_states)
    return torch.optim.Adagrad(model_params, lr, eps=eps, weight_decay=weight_decay)


def compute_elastic_config(*args: Any, **kwargs: Any) -> None:
    """Refuse: batch sizes are given, not found."""
    raise NotImplementedError(
        "compute_elastic_config: shardcore chooses no batch sizes; expected train_batch_size and "
        "train_micro_batch_size_per_gpu in the configuration (a checkpoint loads into any number "
        "of ranks)"
    )


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """Whether Megatron, or another library, has marked a parameter as a slice."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as it is: parts of a step have NVTX ranges of their own
    (distributed/clock.py).
    """
    return func


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks (None, or -1 among them: on all)."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    chosen = list(ranks or [-1])
    if -1 in chosen or rank in chosen:
        logger.log(level, "[Rank %d] %s", rank, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print on rank 0 what torch has on the GPU, and the most since the last call, and the
    process's peak in host memory.

    Nothing without force, as in DeepSpeed.
    """
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    print(message)
    if torch.cuda.is_available():
        memory = {
            "MA": torch.cuda.memory_allocated(),
            "Max_MA": torch.cuda.max_memory_allocated(),
            "CA": torch.cuda.memory_reserved(),
            "Max_CA": torch.cuda.max_memory_reserved(),
        }
        print(" ".join(f"{name} {size / 2**30:.2f} GB" for name, size in memory.items()))
        torch.cuda.reset_peak_memory_stats()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"host memory of this process: peak {peak:.2f} GB", flush=True)


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return what a model has by a name with dots."""
    return attrgetter(module_name)(model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Set what a model has by a name with dots."""
    above, _, own = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, own, module)


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether torch's version is in a range. ValueError without both ends."""
    if not (min_version or max_version):
        raise ValueError(
            "required_torch_version: no version is given; expected min_version or max_version"
        )
    if min_version and torch.__version__ < str(min_version):
        return False
    return not (max_version and torch.__version__ > str(max_version))


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and torch's random generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _late(module: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for the names of a module that is imported when one is asked for."""

    def get(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(importlib.import_module(module), name)

    return get


# --- the modules ----------------------------------------------------------------------------------


def _named(*things: Any) -> dict[str, Any]:
    return {thing.__name__: thing for thing in things}


_CPU_ADAM = {"DeepSpeedCPUAdam": DeepSpeedCPUAdam}
_FUSED_ADAM = {"FusedAdam": DeepSpeedFusedAdam}
_CPU_ADAGRAD = {"DeepSpeedCPUAdagrad": cpu_adagrad}
_CPU_LION = {"DeepSpeedCPULion": cpu_lion}
_FUSED_LION = {"FusedLion": fused_lion}
_FUSED_LAMB = {"FusedLamb": _refused("FusedLamb")}
_SCHEDULES = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES} | {
    "VALID_LR_SCHEDULES": list(lr_schedules.VALID_LR_SCHEDULES),
    **lr_schedules.CONSTANTS,
}
_CHECKPOINTING = _named(checkpoint, configure, is_configured, reset) | {
    "non_reentrant_checkpoint": checkpoint
}
_ZERO = {
    "Init": Init,
    "GatheredParameters": gathered_parameters,
    "register_external_parameter": register_external_parameter,
    "unregister_external_parameter": register_external_parameter,
    "ZeroParamStatus": ZeroParamStatus,
}
_PARTITION: dict[str, Any] = {
    **_ZERO,
    # What DeepSpeed's Init puts around torch.empty and the like. transformers replaces it, for its
    # own effect inside Init; Init here changes none of torch's functions.
    "zero_wrapper_for_fp_tensor_constructor": None,
}
_PIPE = _named(pipe_module.PipelineModule, pipe_module.LayerSpec, pipe_module.TiedLayerSpec)
_TOPOLOGY = (
    pipe_module.ProcessTopology,
    pipe_module.PipeDataParallelTopology,
    pipe_module.PipeModelDataParallelTopology,
    pipe_module.PipelineParallelGrid,
)
_ABSTRACT_ACCELERATOR = {"DeepSpeedAccelerator": Accelerator}
_ACCELERATOR = _named(get_accelerator, is_current_accelerator_supported)
_NVTX = {"instrument_w_nvtx": instrument_w_nvtx}
# DeepSpeed's type aliases: what `initialize` takes as optimizer and lr_scheduler
_CALLABLES = {
    "DeepSpeedOptimizerCallable": Callable[
        [Iterable[nn.Parameter] | dict[str, Iterable[Any]]], torch.optim.Optimizer
    ],
    "DeepSpeedSchedulerCallable": Callable[
        [torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler
    ],
}
_TILED = (tiled.TiledMLP, tiled.TiledFusedLogitsLoss, tiled.sequence_tiled_compute)
_RECURSIVE = {"recursive_getattr": recursive_getattr, "recursive_setattr": recursive_setattr}
# by path below the package; a module comes before what is in it
MODULES: dict[str, dict[str, Any]] = {
    "zero": {**_ZERO, "unwrap_model_for_generation": unwrap_model_for_generation},
    "checkpoint": {},
    "checkpoint.utils": {"clone_tensors_for_torch_save": clone_tensors_for_torch_save},
    "checkpointing": _CHECKPOINTING,
    "accelerator": {**_ACCELERATOR, **_ABSTRACT_ACCELERATOR},
    "accelerator.abstract_accelerator": _ABSTRACT_ACCELERATOR,
    "accelerator.real_accelerator": _ACCELERATOR,
    "compression": {},
    "compression.helper": _RECURSIVE,
    "comm": {name: value for name, value in vars(dist).items() if not name.startswith("_")}
    | {"init_distributed": init_distributed, **groups.OF_COMM},
    "elasticity": {"compute_elastic_config": compute_elastic_config},
    "constants": {
        "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500,
        "CROSS_RANK": "CROSS_RANK",
        "CROSS_SIZE": "CROSS_SIZE",
    },
    "git_version_info": {"version": VERSION, **op_builder.INFO},
    "moe": {},
    "moe.layer": {"MoE": MoE},
    "moe.utils": _named(
        has_moe_layers, is_moe_param, split_params_into_different_moe_groups_for_optimizer
    ),
    "monitor": {},
    "monitor.monitor": {"MonitorMaster": MonitorMaster},
    "ops": {"__compatible_ops__": op_builder.compatible_ops()},
    "ops.op_builder": op_builder.NAMES,
    "ops.op_builder.all_ops": {"ALL_OPS": op_builder.ALL_OPS},
    "ops.op_builder.builder": {"OpBuilder": op_builder.OpBuilder},
    "ops.adam": {**_CPU_ADAM, **_FUSED_ADAM},
    "ops.adam.cpu_adam": _CPU_ADAM,
    "ops.adam.fused_adam": _FUSED_ADAM,
    "ops.adagrad": _CPU_ADAGRAD,
    "ops.adagrad.cpu_adagrad": _CPU_ADAGRAD,
    "ops.lamb": _FUSED_LAMB,
    "ops.lamb.fused_lamb": _FUSED_LAMB,
    "ops.lion": {**_CPU_LION, **_FUSED_LION},
    "ops.lion.cpu_lion": _CPU_LION,
    "ops.lion.fused_lion": _FUSED_LION,
    "pipe": _PIPE,
    "profiling": {},
    "profiling.flops_profiler": {"__getattr__": _late("shardcore.deepspeed.flops_profiler")},
    "profiling.flops_profiler.profiler": {
        "__getattr__": _late("shardcore.deepspeed.flops_profiler")
    },
    "runtime": {},
    "runtime.base_optimizer": {"DeepSpeedOptimizer": ShardableOptimizer},
    "runtime.pipe": {**_PIPE, "ProcessTopology": pipe_module.ProcessTopology},
    "runtime.pipe.engine": _named(pipe_engine.PipelineEngine, pipe_engine.PipelineError),
    "runtime.pipe.module": {**_PIPE, "PipelineError": pipe_engine.PipelineError},
    "runtime.pipe.schedule": {"__getattr__": _late("shardcore.deepspeed.pipe_schedule")},
    "runtime.pipe.topology": _named(*_TOPOLOGY) | {"_prime_factors": pipe_module.prime_factors},
    "runtime.dataloader": {"RepeatingLoader": RepeatingLoader},
    "runtime.fp16": {},
    "runtime.fp16.onebit": {
        name: _refused(name) for name in ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
    },
    "runtime.engine": {"DeepSpeedEngine": TrainingEngine, **_CALLABLES},
    "runtime.lr_schedules": _SCHEDULES,
    "runtime.sequence_parallel": {},
    "runtime.sequence_parallel.ulysses_sp": _named(*_TILED)
    | {"__getattr__": _late("shardcore.integrations.ulysses")},
    # what a bad value raises here
    "runtime.config": {"DeepSpeedConfig": DeepSpeedConfig, "DeepSpeedConfigError": ValueError},
    "runtime.utils": _named(
        is_model_parallel_parameter, move_to_device, see_memory_usage, set_random_seed
    ),
    "zero.partition_parameters": _PARTITION,
    "runtime.zero": {**_ZERO, "unwrap_model_for_generation": unwrap_model_for_generation},
    "runtime.zero.offload_config": {
        "OffloadDeviceEnum": OffloadDeviceEnum,
        "OffloadStateTypeEnum": OffloadStateTypeEnum,
    },
    "runtime.zero.partition_parameters": _PARTITION,
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "sequence": {},
    "sequence.layer": {"__getattr__": _late("shardcore.deepspeed.distributed_attention")},
    "utils": {
        "logger": logger,
        "log_dist": log_dist,
        "OnDevice": OnDevice,
        "RepeatingLoader": RepeatingLoader,
        **_RECURSIVE,
        **_NVTX,
        **fragments.NAMES,
        **leaf_modules.NAMES,
    },
    "utils.groups": groups.NAMES,
    "utils.init_on_device": {"OnDevice": OnDevice},
    "utils.logging": {"logger": logger, "log_dist": log_dist},
    "utils.module_utils": _RECURSIVE,
    "utils.nvtx": _NVTX,
    "utils.tensor_fragment": fragments.NAMES,
    "utils.torch": {"required_torch_version": required_torch_version},
    "utils.z3_leaf_module": leaf_modules.NAMES,
    # else `python -m` warns
    "utils.zero_to_fp32": {"__getattr__": _late("shardcore.deepspeed.zero_to_fp32")},
}
TOP: dict[str, Any] = {
    "__git_branch__": op_builder.INFO["git_branch"],
    "__git_hash__": op_builder.INFO["git_hash"],
    "logger": logger,
    "DeepSpeedConfigError": ValueError,
    "DeepSpeedEngine": TrainingEngine,
    "DeepSpeedOptimizer": ShardableOptimizer,
    **_named(initialize, init_distributed, add_config_arguments, init_inference, tp_model_init),
    **_named(get_accelerator, log_dist, DeepSpeedConfig, OnDevice),
    **_named(pipe_engine.PipelineEngine, pipe_module.PipelineModule),
    **_CALLABLES,
}


def install(package: ModuleType) -> None:
    """Give a package these names, and register its modules, so that `from package.ops.adam
    import FusedAdam` works.
    """
    vars(package).update(TOP)
    for path, names in MODULES.items():
        name = f"{package.__name__}.{path}"
        module = sys.modules.get(name)  # shardcore.checkpoint is a package of its own
        if module is None:
            module = new_module(name, f"Names of DeepSpeed's {path}, over shardcore.")
        vars(module).update(names)
        above, _, own = path.rpartition(".")
        parent = sys.modules[f"{package.__name__}.{above}"] if above else package
        vars(parent).setdefault(own, module)  # utils.z3_leaf_module is the function


def new_module(name: str, text: str) -> ModuleType:
    """Register and return a new package, which importlib.util.find_spec and inspect find: its
    file is this one.
    """
    module = module_from_spec(ModuleSpec(name, None, origin=__file__, is_package=True))
    module.__doc__, module.__file__ = text, __file__
    sys.modules[name] = module
    return module
