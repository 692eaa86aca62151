"""Batch sizes that change while an engine trains: the same weights as of an engine that had them
from the first.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.deepspeed import ds_config, start, train
from tests.support.ranks import run_ranks


def _weights(engine: Any) -> torch.Tensor:
    return torch.cat([value.flatten().float() for value in engine.module_state_dict().values()])


def _changed(rank: int, world_size: int, stage: int, first: int, then: int) -> None:
    for options in ({}, {"offload_optimizer": {"device": "cpu"}} if stage else {}):
        config = {"zero_optimization": {"stage": stage, **options}}
        engine, expected = start(ds_config(first, **config)), start(ds_config(then, **config))
        engine.set_train_batch_size(4 * then * world_size)
        sizes = (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        )
        assert sizes == (4 * then * world_size, 4, then)
        for one in (engine, expected):
            train(one, rank, 2)
            assert (one.global_steps, one.global_samples) == (2, 2 * sizes[0])
        assert torch.allclose(_weights(engine), _weights(expected), rtol=0, atol=2e-4)
        twin = start(ds_config(first, **config))
        train(twin, rank, 2)
        assert not torch.allclose(_weights(twin), _weights(expected), rtol=0, atol=2e-4)


@pytest.mark.parametrize(("world_size", "stage", "first", "then"), [(1, 0, 1, 3), (2, 3, 3, 1)])
def test_another_number_of_micro_batches(
    world_size: int, stage: int, first: int, then: int
) -> None:
    run_ranks(world_size, _changed, stage, first, then)


def _counted(rank: int, world_size: int, folder: str) -> None:
    engine = start(ds_config(2))
    train(engine, rank, 2)  # 4 micro-steps
    engine.set_train_batch_size(12)
    train(engine, rank, 1)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 7, 2 * 8 + 12)
    engine.save_checkpoint(folder)
    resumed = start(ds_config(2))
    resumed.load_checkpoint(folder)
    assert resumed.global_samples == 28
    train(resumed, rank, 1)
    assert (resumed.global_steps, resumed.global_samples) == (4, 36)


def test_counts_go_on_from_the_change(tmp_path: Path) -> None:
    run_ranks(1, _counted, str(tmp_path))


def test_another_number_of_samples_in_a_micro_batch() -> None:
    engine = start(ds_config(2))
    engine.set_train_micro_batch_size(5)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (10, 5)
    assert engine.gradient_accumulation_steps() == 2
    assert engine.deepspeed_io(list(range(20))).batch_size == 5


def test_sizes_that_cannot_be_are_refused() -> None:
    engine = start(ds_config(2))
    for wrong in (0, 6):
        with pytest.raises(
            ValueError, match=f"train_batch_size is {wrong}; expected a multiple of 4"
        ):
            engine.set_train_batch_size(wrong)
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        engine.set_train_micro_batch_size(0)
    engine.backward(engine(torch.zeros(4, 10)).float().sum())
    with pytest.raises(ValueError, match="between the micro-steps"):
        engine.set_train_batch_size(4)
    assert engine.train_batch_size() == 8
