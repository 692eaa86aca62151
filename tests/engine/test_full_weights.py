"""What is gathered at a time to read full weights, that two chunks have memory, and a rank that has
none for a chunk.
"""

import re
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.engine.changes import ChangedWeights
from shardcore.engine.full_weights import FullWeights, chunks_of
from tests.support.models import error_of, make_net, stepped
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


def _without_memory(rank: int, world_size: int, since: int | None) -> tuple[list[str], set[str]]:
    """Rank 1 has no memory for a unit. Return what a rank says, and what it started meanwhile."""
    model: Any = make_net()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-4)
    model, optimizer = shardcore.shard(model, optimizer, 3, precision="bf16")
    changes = shardcore.track_changes(model)
    list(shardcore.stream_params(model, changes=changes))
    stepped(model, optimizer, rank, 0)
    list(shardcore.stream_params(model, changes=changes, since=1))  # with bits from now on
    stepped(model, optimizer, rank, 1)
    where, name = (FullWeights, "_own_part") if since is None else (ChangedWeights, "_packed")
    take = getattr(where, name)

    def fails(weights: Any, part: Any, *args: Any) -> Any:
        if rank == 1 and part.bucket.unit == "blocks.1":
            raise torch.OutOfMemoryError("no more")
        return take(weights, part, *args)

    before = model._shardcore_engine.comm.collectives()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, fails)
        with pytest.raises(RuntimeError) as found:
            list(shardcore.stream_params(model, changes=changes, since=since))
    after = model._shardcore_engine.comm.collectives()
    said = [f"{found.type.__name__}: {found.value}", *getattr(found.value, "__notes__", [])]
    if rank == 1:  # goes on
        said.append(error_of(model.state_dict))
    return said, {name for name, count in after.items() if count > before.get(name, 0)}


@pytest.mark.parametrize("since", [None, 2])
def test_a_rank_without_memory_raises_at_once_and_the_others_at_that_gather(
    since: int | None,
) -> None:
    first, (own, started), third = run_ranks(3, _without_memory, since)
    unit = ("a stream of" if since is None else "changes of") + " blocks.1"
    assert own[0] == "OutOfMemoryError: no more"
    assert re.fullmatch(rf"this rank could not join {unit} \(\d+ bytes\)", own[1])
    assert f"{own[1]}: OutOfMemoryError: no more" in own[-1]
    assert not any("blocks.1" in name or "blocks.2" in name for name in started)
    for said, _ in (first, third):
        assert unit in said[0]
        assert "rank 1 does not take part: its engine is gone, or failed" in said[0]
