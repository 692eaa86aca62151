"""Ranks with different numbers of batches: the weights are those of a plain training over the
batches that there are.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.engine.reducer import Reducer
from tests.support.models import Net, adam, batch_of, loss_of
from tests.support.ranks import run_ranks

COUNTS = (5, 3, 4, 1)  # of each rank


class Normed(Net):
    """With statistics of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Normed()


class Stream:
    """Batches of a rank; entries of a batch are taken out by the loop."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(self.count):
            yield dict(zip("xy", batch_of(number, 0, self.rank), strict=True))


class Loader(Stream):
    def __len__(self) -> int:
        return self.count


def train_plain(
    world_size: int, accumulate: int
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Weights, and each rank's statistics."""
    model = make()
    optimizer = adam(model)
    statistics = [[b.clone() for b in model.norm.buffers()] for _ in range(world_size)]
    for number in range(max(COUNTS[:world_size])):
        for rank in range(world_size):
            if number < COUNTS[rank]:
                for buffer, own in zip(model.norm.buffers(), statistics[rank], strict=True):
                    buffer.copy_(own)
                (loss_of(model, batch_of(number, 0, rank)) / accumulate).backward()
                statistics[rank] = [b.clone() for b in model.norm.buffers()]
        if (number + 1) % accumulate == 0 or number + 1 == max(COUNTS[:world_size]):
            for param in model.parameters():
                param.grad = None if param.grad is None else param.grad / world_size
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach() for param in model.parameters()], statistics


def trains(rank: int, world_size: int, options: dict[str, Any], streams: bool) -> bool:
    """Whether it is the plain training, bit for bit where sums are made in one order."""
    model = make()
    model, optimizer = shardcore.shard(model, adam(model), **options)
    accumulate = options.get("accumulate", 1)
    loader: Iterable[Any] = (Stream if streams else Loader)(rank, COUNTS[rank])
    batches = shardcore.join(model, loader)
    if not streams:
        assert len(batches) == max(COUNTS[:world_size])
    seen = []
    for number, batch in enumerate(batches):
        seen.append((batches.has_batch, batches.active))
        x, y = batch.pop("x"), batch.pop("y")
        loss = loss_of(model, (x if batches.has_batch else x * float("nan"), y)) / accumulate
        loss.backward()
        if (number + 1) % accumulate == 0 or number + 1 == max(COUNTS[:world_size]):
            optimizer.step()
            optimizer.zero_grad()
    counts = COUNTS[:world_size]
    assert seen == [
        (number < counts[rank], sum(number < count for count in counts))
        for number in range(max(counts))
    ]
    weights, statistics = train_plain(world_size, accumulate)
    assert all(
        torch.equal(a, b) for a, b in zip(model.norm.buffers(), statistics[rank], strict=True)
    )
    with shardcore.full_params(model):
        close = torch.equal if accumulate == 1 else torch.allclose
        return optimizer.skipped_steps == 0 and all(
            close(a, b) for a, b in zip(model.parameters(), weights, strict=True)
        )


OFFLOADED = {"optimizer": "cpu", "gradients": "cpu", "params": "cpu"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("options", "streams", "world_size"),
    [
        ({"stage": 0}, False, 2),
        ({"stage": 1, "accumulate": 2}, False, 4),
        ({"stage": 2, "accumulate": 2}, True, 2),
        ({"stage": 2, "overlap_step": True}, True, 4),
        ({"stage": 3}, False, 2),
        ({"stage": 3, "offload": OFFLOADED, "overlap_step": True}, False, 2),
    ],
    ids=str,
)
def test_a_rank_without_batches_adds_nothing(
    options: dict[str, Any], streams: bool, world_size: int
) -> None:
    assert all(run_ranks(world_size, trains, options, streams))


def trains_unmuted(rank: int, world_size: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Reducer,
            "muted",
            property(lambda reducer: False, lambda reducer, value: None),
            raising=False,
        )
        return trains(rank, world_size, {"stage": 2}, False)


def test_a_batch_that_counts_twice_is_noticed() -> None:
    assert not any(run_ranks(2, trains_unmuted))


def evaluates(rank: int, world_size: int) -> None:
    """Forwards alone, which gather at stage 3; then what is refused, on every rank."""
    model = make()
    model, _ = shardcore.shard(model, adam(model), 3)
    model.eval()
    batches = shardcore.join(model, Loader(rank, COUNTS[rank]))
    with torch.no_grad():
        losses = [loss_of(model, (batch["x"], batch["y"])) for batch in batches]
    assert len(losses) == 5
    for _ in batches:  # a loop that ends early leaves nothing behind
        break
    for kind in (Stream, Loader):
        with pytest.raises(ValueError, match="rank 1 is empty"):
            list(shardcore.join(model, kind(rank, 1 - rank)))
        assert list(shardcore.join(model, kind(rank, 0))) == []
    with pytest.raises(TypeError, match="not define len"):
        len(shardcore.join(model, Stream(rank, 1)))
    synced = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    synced, _ = shardcore.shard(synced, adam(synced), 1)
    with pytest.raises(ValueError, match="1 is a SyncBatchNorm"):
        shardcore.join(synced, [])


def test_evaluation_and_what_is_refused() -> None:
    run_ranks(2, evaluates)
