"""Digests of a run, as Metrics writes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore._native import _C
from tests.support.models import batch_of, hash_of_training, loss_of, make_net
from tests.support.pretend_cuda import run_pretended, why_not
from tests.support.ranks import run_ranks


def trained(
    rank: int, folder: str, digests: int | None, stage: int = 3, **options: Any
) -> tuple[Any, Any, list[str]]:
    """Train four steps of two micro-steps; returns the training, and the kernel calls by step."""
    model: Any = make_net()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = shardcore.shard(model, optimizer, stage, accumulate=2, **options)
    metrics = shardcore.Metrics(model, folder, digests=digests, log=False)
    calls: list[str] = []
    digest, device = _C.digest, next(model.parameters()).device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_C, "digest", lambda *a: (calls.append(str(step)), digest(*a))[1])
        for step in range(1, 5):
            for micro in range(2):
                x, y = (part.to(device) for part in batch_of(step, micro, rank))
                loss = loss_of(model, (x, y)) / 2
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            metrics.step(loss=loss, position=step)
    return model, optimizer, calls


def _alike(rank: int, world_size: int, path: str, stage: int) -> list[str]:
    hashes, steps = [], []
    for digests in (None, 2):
        folder = f"{path}/{digests}"
        model, optimizer, calls = trained(rank, folder, digests, stage)
        hashes.append(hash_of_training(model, optimizer))
        steps = sorted(set(calls))
        if digests is None:
            assert not calls
    assert hashes[0] == hashes[1]
    return steps


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_is_the_same_and_only_rows_read(stage: int, tmp_path: Path) -> None:
    for steps in run_ranks(2, _alike, str(tmp_path), stage):
        assert steps == ["2", "4"]
    head, *rows = map(json.loads, (tmp_path / "2" / "digests.jsonl").read_text().splitlines())
    assert not (tmp_path / "None" / "digests.jsonl").exists()
    assert [(row["step"], row["position"]) for row in rows] == [(2, 2), (4, 4)]
    assert head["ranks"] == 2
    for row in rows:
        assert set(row["weights"]) == set(row["grads"]) == set(row["before"]) == set(head["params"])
        assert {*row["forward"]} == {*head["units"]} == {*row["order"]}
        assert all(len(of_ranks) == 2 for of_ranks in row["local"].values())
        assert row["weights"] != row["before"]


def _batches(rank: int, world_size: int, folder: str) -> None:
    model: Any = nn.Sequential(nn.Linear(10, 5))
    optimizer: Any = shardcore.FusedAdam(model.parameters())
    model, optimizer = shardcore.shard(model, optimizer, 2)
    metrics = shardcore.Metrics(model, folder, digests=1, log=False)
    samples = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    model(samples[rank::world_size]).sum().backward()
    optimizer.step()
    metrics.step()


def test_batches_count_by_sample(tmp_path: Path) -> None:
    found = set()
    for world_size in (1, 2, 4):
        run_ranks(world_size, _batches, str(tmp_path / str(world_size)))
        lines = (tmp_path / str(world_size) / "digests.jsonl").read_text().splitlines()
        found.add(json.loads(lines[1])["batch"])
    assert len(found) == 1


def _on_cuda(rank: int, world_size: int, path: str) -> None:
    for number, offload in enumerate((None, {"optimizer": "cpu", "gradients": "cpu"})):
        trained(rank, f"{path}/{number}", 2, 2, offload=offload)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_streams_of_a_device(tmp_path: Path) -> None:
    """The pretended GPU raises for what streams or devices would get wrong."""
    run_pretended(2, _on_cuda, str(tmp_path))
    rows = [
        (tmp_path / str(number) / "digests.jsonl").read_text().splitlines()[1:]
        for number in range(2)
    ]
    assert [json.loads(row)["weights"] for row in rows[0]] == [
        json.loads(row)["weights"] for row in rows[1]
    ]
