"""Sharded, offloaded training on torch.distributed: weights, gradients and optimizer states partitioned over ranks."""

from shardcore.version import __version__

__all__ = ["__version__"]
