"""What a model costs and where it runs: work by the number of parameters, and a GPU with the CPU
in its place.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore._native import _C
from shardcore.offload.cpu_store import CpuStore
from tests.support.models import batch_of, hash_of, hash_of_training, loss_of, make_net

OFFLOAD: dict[str, Any] = {"optimizer": "cpu"}
SPLIT = OFFLOAD | {"ratio": 0.6}
LEAVING = SPLIT | {"gradients": "cpu"}
STREAMING = OFFLOAD | {"gradients": "cpu", "params": "cpu"}
# By stage: what shard() takes there.
OFFLOADS = [
    (SPLIT,),
    (LEAVING,),
    (LEAVING, OFFLOAD | {"gradients": "cpu"}),
    (STREAMING, STREAMING | {"ratio": 0.6}),
]


def trained(device: torch.device, stage: int, offload: Any, **options: Any) -> str:
    model = make_net().to(device)
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    accumulate, options = options.get("accumulate", 1), {"precision": "bf16"} | options
    model, optimizer = shardcore.shard(
        model, optimizer, stage, offload=offload, clip_grad_norm=0.5, **options
    )
    for step in range(3):
        for micro in range(accumulate):
            x, y = batch_of(step, micro, 0)
            optimizer.scale_loss(
                loss_of(model, (x.to(device), y.to(device))) / accumulate
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(param.device.type == device.type for param in model.parameters())
    return hash_of_training(model, optimizer)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "options",
    [{"precision": "fp32"}, {"accumulate": 2}, {"precision": "fp16", "loss_scale": 256.0}],
)
def test_one_hash_over_stages_and_over_where_states_are_stepped(
    device: torch.device, options: dict[str, Any]
) -> None:
    hashes = {
        trained(device, stage, offload, **options)
        for stage in range(4)
        for offload in (None, OFFLOAD, *OFFLOADS[stage])
    }
    assert len(hashes) == 1


def test_a_step_on_the_cpu_that_forgets_a_copy_is_seen(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(device, 2, None)
    steps = CpuStore.steps
    monkeypatch.setattr(
        CpuStore,
        "steps",
        lambda store, parts, hypers: steps(store, [part[:-1] for part in parts], hypers),
    )
    assert trained(device, 2, OFFLOAD) != expected
    assert trained(device, 2, None) == expected


def test_a_gpu_without_a_build_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_C, "build_info", lambda: {"cuda": ""})
    model = make_net()
    before = hash_of(model.parameters())
    with pytest.raises(
        ValueError,
        match=r"would train on cuda:0, but this shardcore is built without CUDA; expected",
    ):
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()))
    assert hash_of(model.parameters()) == before


ROOM = str(Path(shardcore.__file__).parent)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Cells(nn.Module):
    """Modules under names of their own, so that they form one unit."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for index in range(count):
            setattr(self, f"cell{index}", Cell())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for cell in self.children():
            x = cell(x)
        return x


def lines_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """How many lines of shardcore a call runs, rounds of loops within a line included; and what
    it returns.
    """
    count = 0

    def in_room(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return in_room

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        return in_room if frame.f_code.co_filename.startswith(ROOM) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return count, result


def _work(count: int, units: bool, stage: int) -> dict[str, int]:
    """Lines by call, for a model of `count` parameters."""
    model: nn.Module = nn.Sequential(*(Cell() for _ in range(count))) if units else Cells(count)
    optimizer = shardcore.FusedAdam(model.parameters(), lr=1e-3)
    lines: dict[str, int] = {}

    def run(name: str, call: Callable[[], Any]) -> Any:
        lines[name], result = lines_of(call)
        return result

    def whole() -> None:
        with shardcore.full_params(model):
            pass

    run("shard", lambda: shardcore.shard(model, optimizer, stage, precision="fp32"))
    for _ in range(2):
        loss = run("forward", lambda: model(torch.ones(3)).sum())
        run("backward", loss.backward)
        run("step", optimizer.step)
    run("clip_grad_norm_", lambda: shardcore.clip_grad_norm_(model, 1.0))
    run("zero_grad", optimizer.zero_grad)
    run("full_params", whole)
    run("memory_report", lambda: shardcore.memory_report(model))
    for name, part in (("model", model), ("optimizer", optimizer)):
        state = run(f"{name}.state_dict", part.state_dict)
        run(f"{name}.load_state_dict", lambda part=part, state=state: part.load_state_dict(state))
        shards = run(
            f"sharded_state_dict({name})", lambda part=part: shardcore.sharded_state_dict(part)
        )
        run(
            f"load_sharded_state_dict({name})",
            lambda p=part, s=shards: shardcore.load_sharded_state_dict(p, s),
        )
    return lines


@pytest.mark.cases(1)
@pytest.mark.parametrize(("units", "stage"), [(False, 0), (True, 3)])
def test_work_grows_with_the_number_of_parameters(units: bool, stage: int) -> None:
    few, many = (_work(count, units, stage) for count in (30, 120))
    grown = {name: many[name] / few[name] for name in few}
    assert {name: factor for name, factor in grown.items() if factor > 4.2} == {}
