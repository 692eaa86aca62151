"""The word "auto" in a DeepSpeed configuration: a trainer's own values take its place.

Source: the rules of Hugging Face's Trainer, https://huggingface.co/docs/transformers/deepspeed
(what is "auto" is taken from the training arguments; what both name has to be the same).
"""

from collections.abc import Mapping
from typing import Any

_OP = "initialize"

_KEPT = "shardcore."  # what is "auto" there is for shard
# What a trainer has a value for, but no argument that could contradict the configuration.
_ONLY_FILLED = frozenset(
    {
        "scheduler.params.warmup_min_lr",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    }
)


def resolve(
    config: Mapping[str, Any], values: Mapping[str, object]
) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of `config` with every "auto" replaced, and lines for the log that say by what.

    values: what the trainer has, by dotted path ("optimizer.params.lr"). A path that the
    configuration lacks is not added. Raises ValueError that names every "auto" without a value, and
    every value that differs from the trainer's.
    """
    lines: list[str] = []
    problems: list[str] = []

    def of(where: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                key: of(f"{where}.{key}" if where else str(key), entry)
                for key, entry in value.items()
            }
        if value == "auto" and not where.startswith(_KEPT):
            if where not in values:
                problems.append(
                    f'{where} is "auto", for which there is no value here; expected one of your own'
                )
                return value
            lines.append(f'config {where} "auto" is {values[where]!r}')
            return values[where]
        if (
            value is not None
            and where in values
            and where not in _ONLY_FILLED
            and not _equal(value, values[where])
        ):
            problems.append(
                f"{where} is {value!r}; expected {values[where]!r}, as the training arguments "
                f'have, or "auto"'
            )
        return value

    resolved = of("", config)
    if problems:
        head = [f"has {len(problems)} problems:"] if len(problems) > 1 else []
        raise ValueError(f"{_OP}: config " + "\n  ".join([*head, *problems]))
    return resolved, lines


def sizes_by(hidden_size: int) -> dict[str, int]:
    """Return the values that Hugging Face gives to bucket sizes and thresholds, by the model's
    hidden size.
    """
    square = hidden_size * hidden_size
    return {
        "zero_optimization.reduce_bucket_size": square,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * square),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }


def _equal(value: Any, own: Any) -> bool:
    """Whether two values are the same: lists and tuples are, and numbers of different types."""
    if isinstance(value, list | tuple) and isinstance(own, list | tuple):
        return list(value) == list(own)
    return bool(value == own)
