"""FairScale's names, so that its scripts change their imports: `shardcore.integrations.fairscale`
in place of `fairscale`.

FairScale's paths work (`from shardcore.integrations.fairscale.nn.data_parallel import
FullyShardedDataParallel`), as `from shardcore.integrations.fairscale import
FullyShardedDataParallel` does. What there is instead of a name that is not here is in the error
that its call raises. Source: the public API of FairScale 0.4.13 (https://fairscale.readthedocs.io).
"""

import sys

from shardcore.extras.activations import checkpoint_wrapper
from shardcore.integrations.fairscale import names
from shardcore.integrations.fairscale.adascale import AdaScale, AdaScaleWrapper
from shardcore.integrations.fairscale.fsdp import (
    FullyShardedDataParallel,
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    get_fsdp_instances,
    wrap,
)
from shardcore.integrations.fairscale.oss import OSS, ShardedDataParallel
from shardcore.integrations.fairscale.sequential import OffloadModel, Pipe

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

names.install(sys.modules[__name__])
__getattr__ = names.refusal
del names, sys
