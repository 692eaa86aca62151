"""DeepSpeed's other names, so that a script changes one word: ``import shardcore as deepspeed``.

The modules that scripts import (deepspeed.zero, deepspeed.ops.adam, deepspeed.accelerator, ...) are made of the functions
below; `MODULES` lists what each has. `install` registers them under a package's name: shardcore's at its import, and with
`shardcore run --as-deepspeed` also deepspeed's. What is not here is an ImportError or AttributeError, as in any package.
Source: the public API of https://deepspeed.readthedocs.io, 0.19.8.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shardcore.api import full_grad, full_state
from shardcore.deepspeed import lr_schedules, zero_to_fp32
from shardcore.deepspeed.engine import TrainingEngine
from shardcore.deepspeed.initialize import initialize, start_process_group
from shardcore.engine.engine import Engine
from shardcore.optim import CPUAdam, FusedAdam
from shardcore.optim.interface import engine_of

logger = logging.getLogger("shardcore")


# --- the package itself -----------------------------------------------------------------------------------------------


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
    """Start torch.distributed from the environment, as `initialize` does; nothing if it is started already.

    dist_backend, init_method, rank and world_size are given on to torch.distributed if any of them is given. The backend is
    nccl with CUDA, else gloo; torch's own timeout is the default. config, auto_mpi_discovery, verbose: accepted.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    if init_method is None and rank < 0 and world_size < 0 and dist_backend is None:
        start_process_group("init_distributed", distributed_port, timeout)
        return
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config to a parser, and return it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's configuration")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train as the configuration says")
    group.add_argument("--deepspeed_config", default=None, type=str, help="the JSON file of the configuration")
    return parser


def init_inference(*args: Any, **kwargs: Any) -> None:
    """Refuse: there is no inference engine here."""
    raise NotImplementedError(
        "init_inference: shardcore trains only; expected shardcore.consolidate(...), and an inference engine of your choice"
    )


# --- zero -------------------------------------------------------------------------------------------------------------


class Init:
    """A context in which DeepSpeed cuts weights as they are made. Here they are made as anywhere, and cut by `initialize`."""

    def __init__(self, module: nn.Module | None = None, *args: Any, enabled: bool = True, **kwargs: Any) -> None:
        """Log how a model that does not fit into host memory is built. The arguments mean nothing here."""
        if enabled:
            logger.warning(
                "zero.Init: weights are made in full in host memory, and sharded by initialize; for a model that does not fit "
                'there build it under torch.device("meta"), and give initialize(materialize=...)'
            )

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


@contextmanager
def gathered_parameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Keep parameters unsharded inside the context. Collective.

    params: a parameter, several, or a module. modifier_rank: the rank whose edits in place count; None: edits, if there are
    any, have to be the same on all ranks. Parameters that are not sharded are left as they are.
    """
    given = params.parameters() if isinstance(params, nn.Module) else [params] if isinstance(params, nn.Parameter) else params
    chosen = [param for param in given if isinstance(engine_of(param), Engine)] if enabled else []
    engine: Engine | None = engine_of(chosen[0]) if chosen else None
    unsharder = None if engine is None else engine.unsharder
    with nullcontext() if unsharder is None else unsharder.full_params(set(chosen)):
        before = [param._version for param in chosen]
        yield
        if modifier_rank is not None and dist.is_initialized() and dist.get_world_size() > 1:
            edited = torch.tensor([param._version != old for param, old in zip(chosen, before, strict=True)])
            edited = edited.to(chosen[0].device) if chosen else edited
            dist.broadcast(edited, modifier_rank)
            for param, is_edited in zip(chosen, edited.tolist(), strict=True):
                if is_edited:  # masters of others keep what the weights have lost in rounding
                    dist.broadcast(param.detach(), modifier_rank)
                    torch.autograd.graph.increment_version(param)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter that another module uses is gathered with its unit."""


# --- checkpointing (of activations) -----------------------------------------------------------------------------------

_saved_on_cpu = False
_is_configured = False


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Choose whether `checkpoint` keeps its inputs in host memory; the other arguments mean nothing here."""
    global _saved_on_cpu, _is_configured
    section = deepspeed_config.get("activation_checkpointing", {}) if isinstance(deepspeed_config, dict) else {}
    _saved_on_cpu = bool(section.get("cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu)
    _is_configured = True


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _is_configured


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run `function` without keeping its activations, which backward computes again: torch.utils.checkpoint's."""
    if not _saved_on_cpu:
        return torch_checkpoint(function, *args, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return torch_checkpoint(function, *args, use_reentrant=False)


# --- accelerator ------------------------------------------------------------------------------------------------------


class Accelerator:
    """What get_accelerator() returns: torch.cuda, or a CPU. Other attributes are those of torch.cuda (torch.cpu)."""

    def __init__(self) -> None:
        """Look for a GPU."""
        self._name = "cuda" if torch.cuda.is_available() else "cpu"

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of torch.cuda, or torch.cpu."""
        return getattr(torch.cuda if self._name == "cuda" else torch.cpu, name)

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda", "cuda:1" or "cpu"."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """Return the name of the current device."""
        return self.device_name(torch.cuda.current_device() if self._name == "cuda" else None)

    def device_count(self) -> int:
        """Return how many GPUs there are; 1 without any."""
        return max(1, torch.cuda.device_count())

    def set_device(self, device_index: int) -> None:
        """Make a GPU the current one; nothing without any."""
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the device."""
        return torch.device(self.device_name(device_index))

    def communication_backend_name(self) -> str:
        """Return "nccl" or "gloo"."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_available(self) -> bool:
        """Return True: a CPU trains, too."""
        return True

    def is_bf16_supported(self) -> bool:
        """Whether weights may be bfloat16."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Whether weights may be float16."""
        return True

    def manual_seed_all(self, seed: int) -> None:
        """Seed the random generators of all GPUs, or of the CPU."""
        torch.cuda.manual_seed_all(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def empty_cache(self) -> None:
        """Free memory that torch keeps on the GPU; nothing without any."""
        torch.cuda.empty_cache()


_accelerator = Accelerator()


def get_accelerator() -> Accelerator:
    """Return what describes the device that this process trains on."""
    return _accelerator


# --- ops, utils -------------------------------------------------------------------------------------------------------


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
        options: dict[str, Any] = {"bias_correction": bias_correction, "amsgrad": amsgrad, "adam_w_mode": adamw_mode}
        low = "fp32" if fp32_optimizer_states else "bf16"
        super().__init__(model_params, lr, betas, eps, weight_decay, state_dtype=low, **options)


class DeepSpeedFusedAdam(FusedAdam):
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
        options: dict[str, Any] = {"bias_correction": bias_correction, "amsgrad": amsgrad, "adam_w_mode": adam_w_mode}
        super().__init__(params, lr, betas, eps, weight_decay, **options)


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full float32 master of a sharded parameter; None for any other parameter. Collective."""
    if not isinstance(engine := engine_of(param), Engine) or not engine.trains(param):
        return None
    return full_state(param, "master") if param.dtype != torch.float32 else _full_weight(param)


def _full_weight(param: nn.Parameter) -> torch.Tensor:
    with gathered_parameters(param):
        return param.detach().clone()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full averaged gradient of a sharded parameter; None if it has none. Collective."""
    return full_grad(param) if isinstance(engine_of(param), Engine) else param.grad


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a full state of a sharded parameter ("exp_avg", "exp_avg_sq"); None for any other parameter. Collective."""
    return full_state(param, optim_state_key) if isinstance(engine_of(param), Engine) else None


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks (None, or -1 among them: on all)."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    chosen = list(ranks or [-1])
    if -1 in chosen or rank in chosen:
        logger.log(level, "[Rank %d] %s", rank, message)


def _data_parallel_group() -> Any:
    return dist.group.WORLD


def _data_parallel_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _data_parallel_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# --- the modules ------------------------------------------------------------------------------------------------------

_GROUPS: dict[str, Any] = {
    f"{underscore}get_data_parallel_{what}": function
    for underscore in ("", "_")
    for what, function in (
        ("group", _data_parallel_group),
        ("world_size", _data_parallel_world_size),
        ("rank", _data_parallel_rank),
    )
}
_FRAGMENTS = {
    function.__name__: function for function in (safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state)
}
_ADAMS = {"DeepSpeedCPUAdam": DeepSpeedCPUAdam, "FusedAdam": DeepSpeedFusedAdam}
_SCHEDULES = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
_CHECKPOINTING = {function.__name__: function for function in (checkpoint, configure, is_configured)}
MODULES: dict[str, dict[str, Any]] = {  # by path below the package; a module comes before what is in it
    "zero": {
        "Init": Init,
        "GatheredParameters": gathered_parameters,
        "register_external_parameter": register_external_parameter,
        "unregister_external_parameter": register_external_parameter,
    },
    "checkpointing": _CHECKPOINTING,
    "accelerator": {"get_accelerator": get_accelerator},
    "comm": {name: value for name, value in vars(dist).items() if not name.startswith("_")}
    | {"init_distributed": init_distributed},
    "ops": {},
    "ops.adam": _ADAMS,
    "runtime": {},
    "runtime.engine": {"DeepSpeedEngine": TrainingEngine},
    "runtime.lr_schedules": _SCHEDULES,
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "utils": {"logger": logger, "log_dist": log_dist, **_FRAGMENTS},
    "utils.groups": _GROUPS,
    "utils.logging": {"logger": logger, "log_dist": log_dist},
    "utils.zero_to_fp32": {name: value for name, value in vars(zero_to_fp32).items() if name.endswith("checkpoint")}
    | {"convert_zero_checkpoint_to_fp32_state_dict": zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict},
}
TOP: dict[str, Any] = {
    "initialize": initialize,
    "init_distributed": init_distributed,
    "add_config_arguments": add_config_arguments,
    "init_inference": init_inference,
    "get_accelerator": get_accelerator,
    "log_dist": log_dist,
    "DeepSpeedEngine": TrainingEngine,
}


def install(package: ModuleType) -> None:
    """Give a package these names, and register its modules, so that `from package.ops.adam import FusedAdam` works."""
    vars(package).update(TOP)
    for path, names in MODULES.items():
        name = f"{package.__name__}.{path}"
        module = ModuleType(name, f"Names of DeepSpeed's {path}, over shardcore.")
        module.__path__ = []  # a package, which other modules may be in
        vars(module).update(names)
        above, _, own = path.rpartition(".")
        setattr(sys.modules[f"{package.__name__}.{above}"] if above else package, own, module)
        sys.modules[name] = module
