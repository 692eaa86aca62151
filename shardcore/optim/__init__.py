"""The optimizers, their states, the exchange with torch.optim, and clipping."""

from shardcore.optim.adam import AdamOptimizer, CPUAdam, FusedAdam
from shardcore.optim.base import ShardableOptimizer
from shardcore.optim.clip import clip_grad_norm_
from shardcore.optim.elementwise import Elementwise
from shardcore.optim.lion import Lion
from shardcore.optim.muon import Muon

__all__ = [
    "AdamOptimizer",
    "CPUAdam",
    "Elementwise",
    "FusedAdam",
    "Lion",
    "Muon",
    "ShardableOptimizer",
    "clip_grad_norm_",
]
