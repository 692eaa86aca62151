"""What sharded parameters say of themselves by DeepSpeed's names."""

import torch
from torch import nn

import shardcore as deepspeed
from shardcore.deepspeed.params import ZeroParamStatus
from tests.support.deepspeed import ds_config, start
from tests.support.ranks import run_ranks


def _attributes(rank: int, world_size: int) -> None:
    engine = start(ds_config(stage=3))
    weights = list(engine.module.parameters())
    assert len({weight.ds_id for weight in weights}) == len(weights)
    weight = engine.module.head.weight
    assert (weight.ds_shape, weight.ds_numel, weight.ds_status) == (
        (5, 24),
        120,
        ZeroParamStatus.NOT_AVAILABLE,
    )
    with deepspeed.zero.GatheredParameters(weight):
        assert weight.ds_status == ZeroParamStatus.AVAILABLE
    assert weight.ds_status == ZeroParamStatus.NOT_AVAILABLE
    other = nn.Parameter(torch.ones(1))
    for plain in (other, start(ds_config(stage=2)).module.head.weight):
        assert not any(
            hasattr(plain, name) for name in ("ds_id", "ds_shape", "ds_numel", "ds_status")
        )
    other.ds_id = 5  # as the real DeepSpeed does in the same process
    assert other.ds_id == 5


def test_sharded_parameters_say_so() -> None:
    run_ranks(2, _attributes)
