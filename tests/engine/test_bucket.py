"""Buckets collect gradients, small ones together, in buffers that are used again."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.engine.bucket import BufferPool
from shardcore.engine.reducer import LocalGrad
from tests.support.models import Run, assert_one, batch_of, hash_of_training, loss_of, train
from tests.support.ranks import run_ranks

ADAM = {"lr": 1e-2, "weight_decay": 0.1}


def test_few_gradients_wait_in_a_model_of_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    most, real = 0, LocalGrad.add

    def add(local: LocalGrad, slot: int, grad: torch.Tensor) -> None:
        nonlocal most
        real(local, slot, grad)
        most = max(most, len(local._waiting))

    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(40)), nn.Linear(10, 5))
    model, _, _ = train(
        0, Run(steps=0, accumulate=2, shard={"units": [], "sync_each": False}), model
    )
    monkeypatch.setattr(LocalGrad, "add", add)
    loss_of(model, batch_of(0, 0, 0)).backward()
    assert most == 31, "82 come in this backward, which reduces nothing"


def test_units_whose_weights_are_all_empty_take_no_buffer_of_the_pool() -> None:
    pool = BufferPool(torch.device("cpu"))
    pool.release(pool.acquire(64, torch.float32))
    pool.release(pool.acquire(0, torch.float32))
    pool.acquire(64, torch.float32)
    assert pool.allocated_bytes == 4 * 64


def _collected(patch: pytest.MonkeyPatch, small_bytes: int, sync_each: bool, **twin: Any) -> str:
    patch.setattr("shardcore.engine.reducer._SMALL_BYTES", small_bytes)
    for name, method in twin.items():
        patch.setattr(LocalGrad, name, method)
    model, optimizer, _ = train(
        0, Run(steps=2, accumulate=2, precision="bf16", shard={"sync_each": sync_each})
    )
    return hash_of_training(model, optimizer)


@pytest.mark.parametrize("sync_each", [True, False])
def test_gradients_that_wait_to_be_copied_together_have_the_same_bits(
    sync_each: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = _collected(monkeypatch, -1, sync_each)
    assert _collected(monkeypatch, 100, sync_each) == alone  # norms and biases wait, others do not
    assert _collected(monkeypatch, 1 << 16, sync_each) == alone
    assert _collected(monkeypatch, 100, sync_each, copy_waiting=LocalGrad.discard_waiting) != alone


def _large_gradients(rank: int, world_size: int, stage: int) -> tuple[bool, bool]:
    torch.manual_seed(0)
    model = nn.Linear(400, 400)  # 640 kB: a gradient that is copied by itself
    batches = torch.randn(world_size, 5, 400)
    local = []
    for batch in batches:
        twin = copy.deepcopy(model)
        twin(batch).square().sum().backward()
        local.append(twin.weight.grad)
    model, _ = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters(), **ADAM), stage=stage, precision="fp32"
    )
    model(batches[rank]).square().sum().backward()
    grad = shardcore.full_grad(model.weight)
    return torch.equal(grad, (local[0] + local[1]) * 0.5), torch.equal(grad, local[rank])


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_larger_than_caches_arrive_whole(stage: int) -> None:
    assert run_ranks(2, _large_gradients, stage) == [(True, False)] * 2


def _many_sizes(rank: int, world_size: int, stage: int) -> tuple[str, int, int, int]:
    """Train units of many sizes; returns the hash and the bytes of communication, of gradients
    and of the largest unit.
    """
    torch.manual_seed(0)
    sizes = [64, 320, 128, 448, 192, 384, 256, 416, 96, 352, 160, 288, 224, 64]
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))
    model, optimizer = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), stage, units=list(model), precision="fp32"
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * rank + step)
        model(torch.randn(4, 64, generator=generator)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = shardcore.memory_report(model).by_kind
    largest = max(4 * bucket.layout.numel for bucket in optimizer._engine.buckets)
    return hash_of_training(model, optimizer), kept["communication"], kept["gradients"], largest


def test_stage_2_keeps_few_buffers_whatever_the_sizes_of_units_and_the_bits_of_stage_0() -> None:
    zero, one, two = (run_ranks(2, _many_sizes, stage) for stage in (0, 1, 2))
    _, communication, gradients, largest = two[0]
    assert communication <= 6 * largest  # two in flight and one that fills, each sent and received
    assert gradients + communication < 0.8 * sum(one[0][1:3])
    assert_one(hash_ for hash_, *_ in zero + one + two)
