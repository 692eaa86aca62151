"""The engine on a GPU over nccl, and on the CPU in its place: one hash over stages, and over where the states are stepped.

The gradients come from the same kernels on the same device; what differs is which code steps (CUDA or CPU) and what is moved.
"""

from typing import Any

import pytest
import torch

import shardcore
from shardcore._native import _C
from shardcore.offload import CpuStore
from tests.engine.models import batch_of, hash_of, hash_of_training, loss_of, make_net

OFFLOAD: dict[str, Any] = {"optimizer": "cpu"}
SPLIT = OFFLOAD | {"ratio": 0.6}
LEAVING = SPLIT | {"gradients": "cpu"}
STREAMING = OFFLOAD | {"gradients": "cpu", "params": "cpu"}
# By stage: what shard() takes there.
OFFLOADS = [(SPLIT,), (LEAVING,), (LEAVING, OFFLOAD | {"gradients": "cpu"}), (STREAMING, STREAMING | {"ratio": 0.6})]


def trained(device: torch.device, stage: int, offload: Any, **options: Any) -> str:
    model = make_net().to(device)
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    accumulate = options.get("accumulate", 1)
    model, optimizer = shardcore.shard(model, optimizer, stage, offload=offload, clip_grad_norm=0.5, **options)
    for step in range(3):
        for micro in range(accumulate):
            x, y = batch_of(step, micro, 0)
            optimizer.scale_loss(loss_of(model, (x.to(device), y.to(device))) / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(param.device.type == device.type for param in model.parameters())
    return hash_of_training(model, optimizer)


@pytest.mark.parametrize("options", [{"precision": "fp32"}, {"accumulate": 2}, {"precision": "fp16", "loss_scale": 256.0}])
def test_one_hash_over_stages_and_over_where_states_are_stepped(device: torch.device, options: dict[str, Any]) -> None:
    hashes = {trained(device, stage, offload, **options) for stage in range(4) for offload in (None, OFFLOAD, *OFFLOADS[stage])}
    assert len(hashes) == 1


def test_a_step_on_the_cpu_that_forgets_a_copy_is_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(device, 2, None)
    steps = CpuStore.steps
    monkeypatch.setattr(CpuStore, "steps", lambda store, parts, hypers: steps(store, [part[:-1] for part in parts], hypers))
    assert trained(device, 2, OFFLOAD) != expected
    assert trained(device, 2, None) == expected


def test_a_gpu_without_a_build_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_C, "build_info", lambda: {"cuda": ""})
    model = make_net()
    before = hash_of(model.parameters())
    with pytest.raises(ValueError, match=r"would train on cuda:0, but this shardcore is built without CUDA; expected"):
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()))
    assert hash_of(model.parameters()) == before
