"""Sharded, offloaded training on torch.distributed: weights, gradients and optimizer states partitioned over ranks."""

from shardcore.optim import CPUAdam, FusedAdam, clip_grad_norm_
from shardcore.version import __version__

__all__ = ["CPUAdam", "FusedAdam", "__version__", "clip_grad_norm_"]
