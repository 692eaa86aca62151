"""Inputs that are cast at every unit: the bits of a model with the casts written into its
forward.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from tests.support.models import Block, Net, adam, batch_of, hash_of_training, loss_of
from tests.support.ranks import run_ranks


class Router(nn.Module):
    """Takes float32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return torch.softmax(x * self.weight, -1)


class Mixed(Net):
    """Its blocks get what a softmax in float32 has made, by keyword. written: with casts of its
    own.
    """

    def __init__(self, written: bool = False) -> None:
        super().__init__()
        self.routers = nn.ModuleList([Router() for _ in self.blocks])
        self.written = written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for router, block in zip(self.routers, self.blocks, strict=True):
            assert x.dtype == self.inp.weight.dtype
            y = router(x.float() if self.written else x)
            x = x + block(x=y.to(x.dtype) if self.written else y)
        return self.head(x)


OPTIONS: dict[str, Any] = {"precision": "bf16", "keep_fp32": [Router], "units": [Block, Router]}


def trained(rank: int, stage: int, written: bool, **options: Any) -> str:
    torch.manual_seed(0)
    model = Mixed(written)
    model, optimizer = shardcore.shard(model, adam(model), stage, **{**OPTIONS, **options})
    for step in range(3):
        loss_of(model, batch_of(step, 0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    made = hash_of_training(model, optimizer)
    with shardcore.full_params(model):
        copied = copy.deepcopy(model)
    copied(batch_of(0, 0, rank)[0])
    return made


def equals_written(rank: int, world_size: int) -> bool:
    expected = trained(rank, 0, True)
    return all(trained(rank, stage, False, cast_inputs="units") == expected for stage in (1, 3))


@pytest.mark.more
def test_casts_at_units_are_those_that_a_model_could_have_written() -> None:
    assert all(run_ranks(2, equals_written))


def fails_without(rank: int, world_size: int) -> None:
    with pytest.raises(AssertionError):  # the router's
        trained(rank, 3, False)
    with pytest.raises(RuntimeError, match="dtype"):  # the block's
        trained(rank, 3, False, cast_inputs="units", units=[Router])


def test_other_casts_do_not_do() -> None:
    run_ranks(2, fails_without)


def test_weights_that_keep_their_dtype_get_inputs_of_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3))
    model, _ = shardcore.shard(model, adam(model), units=[nn.Linear], cast_inputs="units")
    assert model(torch.ones(2, 3)).dtype == torch.float32


class Cached(nn.Module):
    """Writes to its arguments; one of them has something to cast."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(
        self, x: torch.Tensor, cache: dict[str, Any], losses: list[torch.Tensor]
    ) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        cache["x"] = x
        losses.append(x.float().mean())
        return x


@pytest.mark.parametrize("cast_inputs", [True, "units", False])
def test_arguments_without_anything_to_cast_stay_the_callers(cast_inputs: Any) -> None:
    model: Any = Cached()
    model, _ = shardcore.shard(model, adam(model), 1, precision="bf16", cast_inputs=cast_inputs)
    cache: dict[str, Any] = {"step": 1}
    losses: list[torch.Tensor] = []
    model(torch.ones(2, 4, dtype=torch.bfloat16), cache, losses=losses)
    assert (cache["x"].dtype, len(losses)) == (torch.bfloat16, 1)
    if cast_inputs:
        assert model(torch.ones(2, 4), {}, losses=[]).dtype == torch.bfloat16
