""" "auto" is resolved as Hugging Face's Trainer does, and what contradicts the trainer is
refused.
"""

import copy
from typing import Any

import pytest

from shardcore.deepspeed.auto import resolve, sizes_by
from shardcore.deepspeed.config import read_config

CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
VALUES: dict[str, object] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "bf16.enabled": True,
    "fp16.enabled": False,
    "optimizer.params.lr": 3e-5,
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-6,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_min_lr": 0,
    **sizes_by(64),
}


def test_every_auto_is_replaced_and_said() -> None:
    before = copy.deepcopy(CONFIG)
    resolved, lines = resolve(CONFIG, VALUES)
    assert before == CONFIG, "what the user gave is not changed"
    settings = read_config(resolved)
    assert settings.batch_sizes(2).train == 16
    assert (settings.gradient_clipping, settings.bf16, settings.fp16, settings.stage) == (
        0.5,
        True,
        False,
        3,
    )
    assert settings.optimizer is not None
    assert {key: settings.optimizer[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 3e-5,
        "betas": (0.9, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.1,
    }
    assert len(lines) == 10
    assert 'config optimizer.params.betas "auto" is [0.9, 0.95]' in lines


def test_paths_that_the_configuration_lacks_are_not_added() -> None:
    assert resolve({"bf16": {"enabled": True}}, VALUES) == ({"bf16": {"enabled": True}}, [])


def test_the_auto_of_shard_is_left_to_it() -> None:
    for own in ({"offload": "auto"}, {"offload": {"ratio": "auto"}, "units": "auto"}):
        assert resolve({"shardcore": own}, VALUES) == ({"shardcore": own}, [])


def test_what_has_no_value_and_what_differs_is_named_at_once() -> None:
    config = {"train_batch_size": 32, "zero_optimization": {"stage": 1, "sub_group_size": "auto"}}
    with pytest.raises(
        ValueError, match=r"has 2 problems:\s+train_batch_size is 32; expected 16, as the training"
    ) as error:
        resolve(config, VALUES)
    assert 'zero_optimization.sub_group_size is "auto", for which there is no value here' in str(
        error.value
    )
    with pytest.raises(
        ValueError,
        match=r"^initialize: config optimizer.params.betas is \(0.9, 0.9\); expected \[0.9, "
        r"0.95\]",
    ):
        resolve({"optimizer": {"params": {"betas": (0.9, 0.9)}}}, VALUES)


def test_what_is_the_same_or_has_no_argument_is_left() -> None:
    config = {
        "optimizer": {"params": {"betas": (0.9, 0.95), "lr": 3e-5}},
        "gradient_accumulation_steps": 2.0,
        "zero_optimization": {"reduce_bucket_size": 5e8},
        "scheduler": {"params": {"warmup_min_lr": 1e-7}},
        "train_batch_size": None,
    }
    assert resolve(config, VALUES) == (config, [])
