"""DeepSpeed's activation checkpointing by its names, over shardcore/extras/activations.py.

`initialize` follows the section activation_checkpointing of its configuration by calling
`configure`. What DeepSpeed partitions over model-parallel ranks is kept whole.
Source: https://deepspeed.readthedocs.io/en/latest/activation-checkpointing.html.
"""

from collections.abc import Callable
from typing import Any

from shardcore.deepspeed.config import read_config
from shardcore.extras.activations import CheckpointOptions, run_checkpointed

# whether inputs are kept in host memory; None: `configure` was not called
_on_cpu: bool | None = None


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Choose whether `checkpoint` keeps its inputs in host memory. Other arguments have no effect.

    deepspeed_config: a configuration or its path. Its activation_checkpointing.cpu_checkpointing
        applies unless checkpoint_in_cpu is given. Raises the errors of `initialize` for it.
    """
    global _on_cpu
    configured = deepspeed_config is not None and read_config(deepspeed_config).cpu_checkpointing
    _on_cpu = bool(configured if checkpoint_in_cpu is None else checkpoint_in_cpu)


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _on_cpu is not None


def checkpoint(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run function(*args, **kwargs) without keeping activations. Backward computes them again."""
    names = tuple(kwargs)

    def run(*inputs: Any) -> Any:  # inputs by name are kept as the others are
        return function(*inputs[: len(args)], **dict(zip(names, inputs[len(args) :], strict=True)))

    return run_checkpointed(
        CheckpointOptions(offload_to_cpu=bool(_on_cpu)), run, *args, *kwargs.values()
    )


def reset() -> None:
    """Do nothing: forwards without a backward, of an evaluation, leave nothing behind."""
