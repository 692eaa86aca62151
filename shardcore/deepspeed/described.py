"""What the engine object of a DeepSpeed-style loop says of its configuration and of the ranks."""

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from shardcore.deepspeed.config import BatchSizes, Config
from shardcore.engine.engine import Engine


class Described:
    """See the module."""

    _core: Engine
    _config: Config
    _sizes: BatchSizes

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self._config.stage

    def fp16_enabled(self) -> bool:
        """Whether weights train in float16."""
        return self._config.fp16

    def bfloat16_enabled(self) -> bool:
        """Whether weights train in bfloat16."""
        return self._config.bf16

    def train_batch_size(self) -> int:
        """Return the samples per optimizer step over all ranks."""
        return self._sizes.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per backward and rank."""
        return self._sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-steps per optimizer step."""
        return self._sizes.accumulation

    def managed_gradient_accumulation(self) -> bool:
        """Whether step() counts micro-steps; if not, every step() updates the weights."""
        return self._config.managed_gradient_accumulation

    def gradient_clipping(self) -> float:
        """Return the global norm that gradients are clipped to; 0 for none."""
        return self._config.gradient_clipping

    def zero_optimization(self) -> bool:
        """Whether there is a ZeRO stage above 0."""
        return self._config.stage > 0

    def steps_per_print(self) -> int | None:
        """Return the steps between two lines of progress; None for none."""
        return self._config.steps_per_print

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the configuration as it was given (the model's own is `module.config`)."""
        return self._config.source

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether the configuration lets whole weights be gathered to save them at stage 3."""
        return self._config.gathers_to_save

    @property
    def local_rank(self) -> int:
        """This rank's number on its machine, as its launcher set LOCAL_RANK; 0 without a
        launcher.
        """
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def global_rank(self) -> int:
        """This rank's number."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def dp_world_size(self) -> int:
        """How many ranks have batches of their own."""
        return self._core.comm.world_size

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the ranks that train; None without one."""
        return self._core.comm.group
