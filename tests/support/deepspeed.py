"""A DeepSpeed configuration and the training of what initialize returns."""

from typing import Any

from torch import nn

import shardcore
from shardcore.deepspeed.config import read_config
from tests.support.models import batch_of, make_net

ADAM = {"lr": 1e-2, "weight_decay": 0.1}


def ds_config(accumulation: int = 1, stage: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": dict(ADAM)},
        **more,
    }


def start(config: dict[str, Any], model: nn.Module | None = None, **options: Any) -> Any:
    return shardcore.initialize(
        model=make_net() if model is None else model, config=config, **options
    )[0]


def train(engine: Any, rank: int, steps: int) -> None:
    accumulation = engine.gradient_accumulation_steps()
    for micro_step in range(steps * accumulation):
        x, y = batch_of(micro_step // accumulation, micro_step % accumulation, rank)
        engine.backward(((engine(x).float() - y) ** 2).mean())
        engine.step()


def config_of(train: Any = None, micro: Any = None, steps: Any = None) -> Any:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return read_config(
        {
            key: value
            for key, value in zip(keys, (train, micro, steps), strict=True)
            if value is not None
        }
    )
