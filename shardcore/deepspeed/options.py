"""From a checked DeepSpeed configuration to the options of shardcore.shard."""

from typing import Any

from shardcore.deepspeed.config import Config


def shard_options(settings: Config) -> dict[str, Any]:
    """Return the keyword arguments of `shard` for a configuration, but those that depend on the loop.

    These are clip_grad_norm, accumulate and materialize. "stage" is among what is returned.
    """
    tiers = {
        "optimizer": settings.offload,
        "params": settings.params,
        "ratio": settings.ratio,
        "pin_memory": settings.pin_memory,
    }
    return {
        "stage": settings.stage,
        "offload": None if settings.offload is None else tiers,
        "precision": "fp16" if settings.fp16 else "bf16" if settings.bf16 else "fp32",
        "loss_scale": settings.loss_scale,
        "reduce_dtype": settings.communication_data_type,
        "cast_inputs": settings.auto_cast or not settings.fp16,
    }
