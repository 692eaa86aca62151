"""Sharded, offloaded training on torch.distributed: weights, gradients and optimizer states partitioned over ranks."""

from shardcore.api import full_grad, full_params, full_state, no_sync, shard
from shardcore.deepspeed import initialize
from shardcore.engine.memory import MemoryReport, memory_report
from shardcore.optim import CPUAdam, FusedAdam, clip_grad_norm_
from shardcore.version import __version__

__all__ = [
    "CPUAdam",
    "FusedAdam",
    "MemoryReport",
    "__version__",
    "clip_grad_norm_",
    "full_grad",
    "full_params",
    "full_state",
    "initialize",
    "memory_report",
    "no_sync",
    "shard",
]
