"""From a checked DeepSpeed configuration to the options of shardcore.shard."""

from typing import Any

from shardcore.deepspeed.config import Config


def shard_options(settings: Config) -> dict[str, Any]:
    """Return the keyword arguments of `shard` for a configuration, but those that depend on the loop.

    These are clip_grad_norm, accumulate and materialize. "stage" is among what is returned.
    """
    tiers: dict[str, Any] = {"params": settings.params, "pin_memory": settings.pin_memory}
    if settings.offload is not None:
        tiers |= {"optimizer": settings.offload, "ratio": settings.ratio}
    return {
        "stage": settings.stage,
        "offload": tiers if settings.offload is not None or settings.params is not None else None,
        "precision": "fp16" if settings.fp16 else "bf16" if settings.bf16 else "fp32",
        "loss_scale": settings.loss_scale,
        "reduce_dtype": settings.communication_data_type,
        "grad_dtype": settings.grad_dtype or "fp32",
        "cast_inputs": settings.auto_cast or not settings.fp16,
        "reshard_after_forward": settings.hpz_partition_size
        if settings.stage == 3 and settings.hpz_partition_size > 1
        else True,
    }
