"""FairScale's names, so that its scripts change their imports: `shardcore.integrations.fairscale` in place of `fairscale`.

FairScale's paths work (`from shardcore.integrations.fairscale.nn.data_parallel import FullyShardedDataParallel`), as
`from shardcore.integrations.fairscale import FullyShardedDataParallel` does. What there is instead of a name that is not here
is in the error that its call raises. Source: the public API of FairScale 0.4.13 (https://fairscale.readthedocs.io).
"""

import sys
from types import ModuleType
from typing import Any

from shardcore.activations import checkpoint_wrapper
from shardcore.integrations.fairscale_adascale import AdaScale, AdaScaleWrapper
from shardcore.integrations.fairscale_fsdp import (
    FullyShardedDataParallel,
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    get_fsdp_instances,
    wrap,
)
from shardcore.integrations.fairscale_oss import OSS, ShardedDataParallel
from shardcore.integrations.fairscale_sequential import OffloadModel, Pipe

__all__ = [
    "OSS",
    "AdaScale",
    "AdaScaleWrapper",
    "FullyShardedDataParallel",
    "OffloadModel",
    "Pipe",
    "ShardedDataParallel",
    "auto_wrap",
    "checkpoint_wrapper",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "get_fsdp_instances",
    "wrap",
]

_SCALE = (
    "expected FullyShardedDataParallel(..., mixed_precision=True), or ShardedDataParallel(..., "
    "loss_scale=shardcore.LossScale()), with optimizer.scale_loss(loss).backward() and optimizer.step(), which unscales, skips "
    "and moves the scale"
)
# Names whose call raises, and what there is instead.
REFUSED = {
    "ShardedGradScaler": _SCALE,
    "GradScaler": _SCALE,
    "Adam": "expected shardcore.FusedAdam",
    "Precision": "expected shardcore.FusedAdam(state_dtype=...)",
    "FlattenParamsWrapper": "expected the module itself: shard lays weights out flat",
    "SlowMoDistributedDataParallel": "expected ShardedDataParallel",
    "LayerwiseGradientScaler": "expected shardcore.shard(loss_scale=shardcore.LossScale())",
    "PipeRPCWrapper": "expected torch.distributed.pipelining",
    "MOELayer": "expected experts as ordinary modules",
    "Top2Gate": "expected experts as ordinary modules",
    "MEVO": "expected shardcore.chunked_cross_entropy",
    "SyncBatchNorm": "expected torch.nn.SyncBatchNorm",
    "auto_wrap_bn": "expected FullyShardedDataParallel(..., keep_fp32=[torch.nn.BatchNorm2d])",
}


def _refusing(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{name}: shardcore.integrations.fairscale has no {name}; {REFUSED[name]}")

    refuse.__name__, refuse.__doc__ = name, f"Refuse: {REFUSED[name]}."
    return refuse


_refusals = {name: _refusing(name) for name in REFUSED}
# FairScale's modules, by path below the package.
PATHS = {
    "nn": [
        *("FullyShardedDataParallel", "ShardedDataParallel", "Pipe", "checkpoint_wrapper", "FlattenParamsWrapper", "MOELayer"),
        *(
            "PipeRPCWrapper",
            "Top2Gate",
            "auto_wrap",
            "config_auto_wrap_policy",
            "default_auto_wrap_policy",
            "enable_wrap",
            "wrap",
        ),
    ],
    "nn.checkpoint": ["checkpoint_wrapper"],
    "nn.data_parallel": ["FullyShardedDataParallel", "ShardedDataParallel", "auto_wrap_bn", "get_fsdp_instances"],
    "nn.misc": ["FlattenParamsWrapper"],
    "nn.pipe": ["Pipe", "PipeRPCWrapper"],
    "nn.wrap": ["auto_wrap", "config_auto_wrap_policy", "default_auto_wrap_policy", "enable_wrap", "wrap"],
    "optim": ["OSS", "AdaScale", "AdaScaleWrapper", "Adam", "Precision", "GradScaler"],
    "optim.adascale": ["AdaScale", "AdaScaleWrapper"],
    "optim.grad_scaler": ["GradScaler", "ShardedGradScaler"],
    "optim.oss": ["OSS"],
    "experimental": [],
    "experimental.nn": ["MEVO", "OffloadModel", "SyncBatchNorm"],
    "experimental.nn.data_parallel": ["SlowMoDistributedDataParallel"],
    "experimental.nn.offload": ["OffloadModel"],
    "nn.data_parallel.fully_sharded_data_parallel": ["FullyShardedDataParallel"],
    "nn.data_parallel.sharded_ddp": ["ShardedDataParallel"],
}


def _install() -> None:
    """Register the modules of PATHS. `nn` and `optim` are attributes of this one."""
    names = globals() | _refusals
    for path, own in PATHS.items():
        module = ModuleType(f"{__name__}.{path}", f"Names of FairScale's {path}, over shardcore.")
        vars(module).update({name: names[name] for name in own}, __path__=[])
        sys.modules[module.__name__] = module
        above, _, last = path.rpartition(".")
        vars(sys.modules[f"{__name__}.{above}" if above else __name__]).setdefault(last, module)  # nn.wrap is the function


_install()


def __getattr__(name: str) -> Any:
    """Return what refuses a name of FairScale's that is not here."""
    if name in _refusals:
        return _refusals[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
