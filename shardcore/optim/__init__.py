"""The optimizers, their states, the exchange with torch.optim, and clipping."""

from shardcore.optim.adam import AdamOptimizer, CPUAdam, FusedAdam
from shardcore.optim.clip import clip_grad_norm_

__all__ = ["AdamOptimizer", "CPUAdam", "FusedAdam", "clip_grad_norm_"]
