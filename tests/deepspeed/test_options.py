"""shard_options gives `shard` what initialize gives it."""

from typing import Any

import pytest

import shardcore.deepspeed.initialize
from shardcore.deepspeed.config import read_config
from shardcore.deepspeed.options import shard_options
from tests.support.deepspeed import ds_config
from tests.support.models import make_net

CONFIGS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2, "bf16": {"enabled": True}},
    {"stage": 1, "fp16": {"enabled": True, "loss_scale_window": 7}},
    {"stage": 1, "fp16": {"enabled": True, "auto_cast": True, "loss_scale": 8}, "communication_data_type": "fp32"},
    {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5, "pin_memory": True}}},
    {"zero_optimization": {"stage": 3, **{f"offload_{what}": {"device": "cpu"} for what in ("optimizer", "param")}}},
]
OF_THE_LOOP = {"clip_grad_norm", "accumulate", "materialize"}


@pytest.mark.parametrize("changes", CONFIGS)
def test_options_are_those_that_initialize_passes_on(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = ds_config(**changes)
    passed: dict[str, Any] = {}

    def shard(model: Any, optimizer: Any, stage: int, **options: Any) -> None:
        passed.update(options, stage=stage)
        raise InterruptedError

    monkeypatch.setattr(shardcore.deepspeed.initialize, "shard", shard)
    with pytest.raises(InterruptedError):
        shardcore.initialize(model=make_net(), config=config)
    assert shard_options(read_config(config)) == {name: value for name, value in passed.items() if name not in OF_THE_LOOP}
    assert passed.keys() >= OF_THE_LOOP
