"""What ranks send of changed weights: places and values of each bit that is set, nothing else."""

from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.engine.changes import ChangedWeights, Changes
from shardcore.engine.full_weights import chunks_of
from tests.support.models import of_forward
from tests.support.ranks import run_ranks

SHAPE = 700, 600  # of several segments on each of three ranks


def make(world_size: int) -> tuple[Any, Any, Changes]:
    """Return a model of several ranges, its engine, and its changes after the first version."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(*SHAPE), nn.Linear(SHAPE[1], 3)) for _ in range(2)]
    model: Any = nn.Sequential(*blocks)
    optimizer = shardcore.FusedAdam(model.parameters())
    model, _ = shardcore.shard(model, optimizer, 3, precision="bf16", units=[*model.children()])
    engine = model._shardcore_engine
    changes = Changes(engine)
    changes.begin(engine)
    return model, engine, changes


def read(model: Any, engine: Any, changes: Changes, receivers: set[int]) -> dict[str, Any]:
    chunks = chunks_of(engine.buckets, set(model.parameters()), 1000)
    changed = ChangedWeights(engine, chunks, changes.begin(engine), receivers)
    return {managed.name: found for managed, *found in changed.values()}


def set_bits(engine: Any, places: dict[str, list[int]]) -> None:
    """Set the bits of these elements of parameters, as the step of the rank that has them does."""
    for bucket in engine.buckets:
        for managed in bucket.params:
            for piece in bucket.pieces_of(managed):
                for place in places.get(managed.name, ()):
                    at = piece.start + place - piece.param_start
                    if piece.param_start <= place < piece.param_start + piece.numel:
                        bucket.bits["device"][at // 8] |= 1 << (at % 8)


def _places(rank: int, world_size: int) -> None:
    model, engine, changes = make(world_size)
    numel = SHAPE[0] * SHAPE[1]
    first = [0, 1, 7, 8, 255, 256, 65535, 65536, 131071, 131072, numel // 3, numel - 1]
    cases: list[dict[str, list[int]]] = [
        {},
        {"0.0.weight": first},
        {"0.0.bias": [599], "0.1.weight": [0, 1799], "1.0.weight": [70000]},
        {name: [0] for name, param in model.named_parameters()},
    ]
    full = of_forward(model)
    for places in cases:
        for receivers in ({*range(world_size)}, {world_size - 1}):
            set_bits(engine, places)
            found = read(model, engine, changes, receivers)
            if rank not in receivers:
                assert found == {}
                continue
            assert {*found} == {*places}
            for name, (indices, values) in found.items():
                assert indices.tolist() == places[name]
                assert torch.equal(values, full[name].view(-1)[indices])


@pytest.mark.parametrize("world_size", [1, 3])
def test_places_and_values_of_all_bits_arrive(world_size: int) -> None:
    run_ranks(world_size, _places)


def _whole(rank: int, world_size: int) -> None:
    model, engine, changes = make(world_size)
    full = of_forward(model)
    for share, whole in ((0.45, False), (0.55, True)):
        count = int(share * SHAPE[0] * SHAPE[1])
        set_bits(engine, {"1.0.weight": [*range(count)]})
        found = read(model, engine, changes, {0, 1})
        indices, values = found["1.0.weight"]
        assert (indices is None) == whole
        expected = full["1.0.weight"] if whole else full["1.0.weight"].view(-1)[:count]
        assert torch.equal(values, expected)
        # what is beside it in a unit is sent with it
        assert {*found} == ({n for n in full if n[0] == "1"} if whole else {"1.0.weight"})
    if rank == 0:  # a writer of one rank is one of all
        engine.buckets[0].rewritten = True
    assert {name[0] for name in read(model, engine, changes, {0, 1})} == {"0"}


def test_a_unit_of_which_most_changed_is_sent_in_full() -> None:
    run_ranks(2, _whole)


def _later(rank: int, world_size: int) -> None:
    model, engine, changes = make(world_size)
    set_bits(engine, {"0.0.weight": [3]})
    taken = changes.begin(engine)
    set_bits(engine, {"0.0.weight": [5]})  # a step before the stream is read
    chunks = chunks_of(engine.buckets, set(model.parameters()), None)
    changed = ChangedWeights(engine, chunks, taken, {0, 1}).values()
    assert [places.tolist() for _, places, _ in changed] == [[3]]
    assert read(model, engine, changes, {0, 1})["0.0.weight"][0].tolist() == [5]


def test_changes_after_the_begin_of_a_version_are_of_the_next() -> None:
    run_ranks(2, _later)
