"""Sharded, offloaded training on torch.distributed: weights, gradients and optimizer states
partitioned over ranks.

DeepSpeed's other names are here, too (shardcore.zero, shardcore.ops.adam, ...): see
shardcore.deepspeed.names.
"""

import sys

from shardcore.api import (
    full_grad,
    full_params,
    full_state,
    load_sharded_state_dict,
    no_sync,
    shard,
    sharded_state_dict,
)
from shardcore.checkpoint.background import Saving
from shardcore.checkpoint.commits import resume
from shardcore.checkpoint.consolidate import consolidate
from shardcore.checkpoint.load import Loaded, load
from shardcore.checkpoint.save import save
from shardcore.deepspeed import names
from shardcore.deepspeed.initialize import initialize
from shardcore.digest import digest
from shardcore.engine.audit import SilentCorruption
from shardcore.engine.away import offload_states, reload_states
from shardcore.engine.hooks import register_forward_method
from shardcore.engine.loss_scale import LossScale
from shardcore.engine.memory_report import MemoryReport, memory_report
from shardcore.engine.regroup import unfreeze
from shardcore.extras.activations import apply_activation_checkpointing, checkpoint_wrapper
from shardcore.extras.cross_entropy import chunked_cross_entropy
from shardcore.extras.determinism import Determinism, check_determinism
from shardcore.extras.ema import EMA
from shardcore.extras.pipeline import shard_pipeline
from shardcore.extras.uneven import join
from shardcore.launch.notebook import notebook_launcher
from shardcore.metrics import Metrics
from shardcore.optim import CPUAdam, FusedAdam, Lion, Muon, clip_grad_norm_
from shardcore.parallel.sequence import SequenceParallelLoader, split_sequences, ulysses_attention
from shardcore.parallel.tensor import tensor_parallel
from shardcore.stream import ParamMetadata, param_metadata, stream_params, track_changes
from shardcore.version import __version__

__all__ = [
    "EMA",
    "CPUAdam",
    "Determinism",
    "FusedAdam",
    "Lion",
    "Loaded",
    "LossScale",
    "MemoryReport",
    "Metrics",
    "Muon",
    "ParamMetadata",
    "Saving",
    "SequenceParallelLoader",
    "SilentCorruption",
    "__version__",
    "apply_activation_checkpointing",
    "check_determinism",
    "checkpoint_wrapper",
    "chunked_cross_entropy",
    "clip_grad_norm_",
    "consolidate",
    "digest",
    "full_grad",
    "full_params",
    "full_state",
    "initialize",
    "join",
    "load",
    "load_sharded_state_dict",
    "memory_report",
    "no_sync",
    "notebook_launcher",
    "offload_states",
    "param_metadata",
    "register_forward_method",
    "reload_states",
    "resume",
    "save",
    "shard",
    "shard_pipeline",
    "sharded_state_dict",
    "split_sequences",
    "stream_params",
    "tensor_parallel",
    "track_changes",
    "ulysses_attention",
    "unfreeze",
]

names.install(sys.modules[__name__])
del names, sys
