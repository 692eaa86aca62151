"""Sharded, offloaded training on torch.distributed: weights, gradients and optimizer states partitioned over ranks."""

from importlib import import_module
from typing import TYPE_CHECKING

from shardcore.api import full_grad, full_params, full_state, load_sharded_state_dict, no_sync, shard, sharded_state_dict
from shardcore.engine.loss_scale import LossScale
from shardcore.engine.memory_report import MemoryReport, memory_report
from shardcore.optim import CPUAdam, FusedAdam, clip_grad_norm_
from shardcore.version import __version__

if TYPE_CHECKING:
    from shardcore.deepspeed.initialize import initialize

__all__ = [
    "CPUAdam",
    "FusedAdam",
    "LossScale",
    "MemoryReport",
    "__version__",
    "clip_grad_norm_",
    "full_grad",
    "full_params",
    "full_state",
    "initialize",
    "load_sharded_state_dict",
    "memory_report",
    "no_sync",
    "shard",
    "sharded_state_dict",
]

if not TYPE_CHECKING:  # else type checkers would believe in every name

    def __getattr__(name):
        """Import what `initialize` needs at its first use: most programs never use it, and it is much of the import time."""
        if name not in ("initialize", "deepspeed"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()["initialize"] = import_module("shardcore.deepspeed.initialize").initialize
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *__all__})
