"""Training of real architectures: plain, in one process on the whole batch, and sharded over
ranks.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shardcore
from tests.support.architectures import ARCHITECTURES
from tests.support.models import hash_of_training

BATCH = 4  # samples of a step, over all ranks
STEPS = 20
ADAM = {"lr": 2e-3, "weight_decay": 0.01}


@dataclass(frozen=True)
class Training:
    """A training run of architecture `name`; `prepare` changes the model before it is sharded."""

    name: str
    stage: int = 3
    steps: int = STEPS
    seed: int = 0
    lr: float = ADAM["lr"]
    precision: str = "fp32"
    prepare: Callable[[Any], None] | None = None
    shard: dict[str, Any] = field(default_factory=dict)


def make(run: Training) -> Any:
    torch.manual_seed(run.seed)
    model = ARCHITECTURES[run.name].make()
    if run.prepare is not None:
        run.prepare(model)
    return model


def batch_of(run: Training, step: int) -> dict[str, torch.Tensor]:
    """The whole batch of a step (-1: one for evaluation). A task that can be learned: a few
    samples come again and again.
    """
    generator = torch.Generator().manual_seed(1000 * run.seed + (step + 1) % 4)
    return ARCHITECTURES[run.name].batch(generator, BATCH)


def part_of(batch: dict[str, torch.Tensor], rank: int, world_size: int) -> dict[str, torch.Tensor]:
    size = BATCH // world_size
    return {key: value[rank * size : (rank + 1) * size] for key, value in batch.items()}


def train(
    rank: int, world_size: int, run: Training, between: Callable[[Any], None] | None = None
) -> tuple[Any, Any, list[float]]:
    """Shard and train on this rank's part of every batch, with `between(model)` after each step;
    returns the rank's losses.
    """
    model = make(run)
    optimizer: Any = shardcore.FusedAdam(
        model.parameters(), lr=run.lr, weight_decay=ADAM["weight_decay"]
    )
    model, optimizer = shardcore.shard(
        model, optimizer, run.stage, precision=run.precision, **run.shard
    )
    losses = []
    for step in range(run.steps):
        loss = model(**part_of(batch_of(run, step), rank, world_size)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if between is not None:
            between(model)
    return model, optimizer, losses


def losses_and_hash(
    rank: int, world_size: int, runs: list[Training], between: Any = None
) -> list[tuple[list[float], str]]:
    """For each run: this rank's losses, and a hash of all weights and states after it."""
    results = []
    for run in runs:
        model, optimizer, losses = train(rank, world_size, run, between)
        results.append((losses, hash_of_training(model, optimizer)))
    return results


@functools.cache
def _plain(name: str, seed: int, lr: float, steps: int) -> tuple[list[float], nn.Module]:
    run = Training(name, seed=seed, lr=lr, steps=steps)
    model = make(run)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=ADAM["weight_decay"]
    )
    losses = []
    for step in range(steps):
        loss = model(**batch_of(run, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def plain_losses(run: Training) -> list[float]:
    """The losses of ordinary training on whole batches (`prepare` and everything about sharding
    left out).
    """
    return _plain(run.name, run.seed, run.lr, run.steps)[0]


def worst_difference(expected: list[float], parts: list[list[float]]) -> float:
    """The largest relative difference between losses and the mean of the ranks' losses, over
    steps.
    """
    means = [sum(losses) / len(parts) for losses in zip(*parts, strict=True)]
    return max(abs(a - b) / abs(a) for a, b in zip(expected, means, strict=True))
