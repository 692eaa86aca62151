"""Data loaders: of initialize's training_data, of other data, and one without an end."""

import pytest
import torch
from torch.utils.data import SequentialSampler, TensorDataset

import shardcore
import shardcore as deepspeed
from tests.support.deepspeed import ds_config, start
from tests.support.models import make_net
from tests.support.ranks import run_ranks


def _passes(rank: int, world_size: int) -> list[list[list[int]]]:
    data = TensorDataset(torch.arange(16))
    loader = shardcore.initialize(model=make_net(), config=ds_config(), training_data=data)[2]
    passes = [[batch[0].tolist() for batch in loader] for _ in range(3)]
    loader.set_epoch(0)
    assert [batch[0].tolist() for batch in loader] == passes[0]
    assert len(loader) == 2
    return passes


def test_every_rank_loads_its_part_in_a_new_order_each_pass() -> None:
    first, second = run_ranks(2, _passes)
    for mine, other in zip(first, second, strict=True):
        assert [len(batch) for batch in mine + other] == [4] * 4
        assert sorted(item for batch in mine + other for item in batch) == list(range(16))
    assert first[0] != first[1] != first[2]


def _loaders(rank: int, world_size: int) -> list[list[int]]:
    engine = start(ds_config(dataloader_drop_last=True))
    data = list(range(18))
    evaluation = [batch.tolist() for batch in engine.deepspeed_io(data, batch_size=3, route="eval")]
    assert evaluation == [[rank + 2 * (3 * batch + i) for i in range(3)] for batch in range(3)]
    loader = engine.deepspeed_io(data)
    epochs = [[int(i) for batch in loader for i in batch] for _ in range(2)]
    assert [len(batch) for batch in loader] == [4, 4], (
        "micro-batches, without the last, smaller one"
    )
    sampled = engine.deepspeed_io(data, data_sampler=SequentialSampler(data), collate_fn=tuple)
    assert next(iter(sampled)) == (0, 1, 2, 3)
    return epochs


def test_loaders_of_other_data_are_made() -> None:
    first, second = run_ranks(2, _loaders)
    assert first[0] != first[1], "a new order in each epoch"
    assert not set(first[0]) & set(second[0])


def test_a_repeating_loader_begins_anew() -> None:
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(StopIteration):
        next(deepspeed.runtime.dataloader.RepeatingLoader([]))
