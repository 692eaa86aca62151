"""Which names of FairScale's are where, and the ones that raise an error which says what to use
instead.
"""

import sys
from types import ModuleType
from typing import Any

_SCALE = (
    "expected FullyShardedDataParallel(..., mixed_precision=True), or ShardedDataParallel(..., "
    "loss_scale=shardcore.LossScale()), with optimizer.scale_loss(loss).backward() and "
    "optimizer.step(), which unscales, skips and moves the scale"
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
        raise NotImplementedError(
            f"{name}: shardcore.integrations.fairscale has no {name}; {REFUSED[name]}"
        )

    refuse.__name__, refuse.__doc__ = name, f"Refuse: {REFUSED[name]}."
    return refuse


_refusals = {name: _refusing(name) for name in REFUSED}
# FairScale's modules, by path below the package.
PATHS = {
    "nn": [
        *(
            "FullyShardedDataParallel",
            "ShardedDataParallel",
            "Pipe",
            "checkpoint_wrapper",
            "FlattenParamsWrapper",
            "MOELayer",
        ),
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
    "nn.data_parallel": [
        "FullyShardedDataParallel",
        "ShardedDataParallel",
        "auto_wrap_bn",
        "get_fsdp_instances",
    ],
    "nn.misc": ["FlattenParamsWrapper"],
    "nn.pipe": ["Pipe", "PipeRPCWrapper"],
    "nn.wrap": [
        "auto_wrap",
        "config_auto_wrap_policy",
        "default_auto_wrap_policy",
        "enable_wrap",
        "wrap",
    ],
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


def install(package: ModuleType) -> None:
    """Register the modules of PATHS under a package, which has their names already. Its `nn` and
    `optim` become attributes.
    """
    names = vars(package) | _refusals
    for path, names_of_path in PATHS.items():
        module = ModuleType(
            f"{package.__name__}.{path}", f"Names of FairScale's {path}, over shardcore."
        )
        vars(module).update({name: names[name] for name in names_of_path}, __path__=[])
        sys.modules[module.__name__] = module
        above, _, last = path.rpartition(".")
        parent = sys.modules[f"{package.__name__}.{above}" if above else package.__name__]
        vars(parent).setdefault(last, module)  # nn.wrap stays the function


def refusal(name: str) -> Any:
    """Return what refuses a name of FairScale's that is not here; the package's `__getattr__`."""
    if name in _refusals:
        return _refusals[name]
    raise AttributeError(f"module 'shardcore.integrations.fairscale' has no attribute {name!r}")
