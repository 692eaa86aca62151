"""What is gathered at a time to read full weights, and that two chunks have memory."""

from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.engine.full_weights import FullWeights, chunks_of
from tests.support.models import make_net
from tests.support.ranks import run_ranks

WIDTH = 512


def _chunks(rank: int, world_size: int, bucket_bytes: int | None) -> list[list[str]]:
    model, _ = shardcore.shard(make_net(), None, 3)
    wanted = set(model.parameters())
    chunks = chunks_of(model._shardcore_engine.buckets, wanted, bucket_bytes)
    assert chunks == chunks_of(model._shardcore_engine.buckets, wanted, bucket_bytes)
    return [[m.name for part in chunk for m in part.params] for chunk in chunks]


def test_the_root_is_cut_around_units_and_by_size() -> None:
    blocks = [
        [f"blocks.{i}.{name}" for name, _ in make_net().blocks[0].named_parameters()]
        for i in range(3)
    ]
    before, after = ["gain", "inp.weight", "inp.bias"], ["head.weight"]
    assert run_ranks(2, _chunks, None)[0] == [before, *blocks, after]
    single = [["gain"], ["inp.weight"], ["inp.bias"]]
    assert run_ranks(2, _chunks, 1)[0] == [*single, *blocks, after]
    assert run_ranks(2, _chunks, 4 * 241)[0] == [before[:2], before[2:], *blocks, after]


def wide() -> Any:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(6)]
    return nn.Sequential(*blocks)


def _live(rank: int, world_size: int, keeps: bool) -> int:
    """Return how many gathered tensors were alive at once, of any unit. keeps: the reader keeps
    what it gets.
    """
    model, _ = shardcore.shard(wide(), None, 3)
    engine = model._shardcore_engine
    stream = FullWeights(
        engine, chunks_of(engine.buckets, set(model.parameters()), None), None, {0, 1}
    )
    live: dict[int, Any] = {}
    most, kept = 0, []
    with pytest.MonkeyPatch.context() as patch:
        empty = torch.empty

        def counted(*args: Any, **options: Any) -> torch.Tensor:
            nonlocal most
            tensor = empty(*args, **options)
            if tensor.numel() >= 2 * WIDTH * WIDTH:
                live[len(live)] = torch.multiprocessing.reductions.StorageWeakRef(
                    tensor.untyped_storage()
                )
                most = max(most, sum(not ref.expired() for ref in live.values()))
            return tensor

        patch.setattr(torch, "empty", counted)
        for _, value in stream.values():
            kept += [value] if keeps else []
    return most


def test_two_units_have_memory_at_a_time() -> None:
    assert run_ranks(2, _live, False) == [2, 2]
    assert run_ranks(2, _live, True) == [6, 6]
