"""Steps that the device decides on: the bits, counts, scale and errors of those on which the host
does, without a wait for it.

CPU tensors stand in for a GPU's (tests/support/groups.py); what is marked gpu runs the same on one.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from shardcore._native import _C
from shardcore.engine import device_step
from shardcore.engine import engine as engine_module
from shardcore.engine.bucket import Managed
from shardcore.engine.loss_scale import LossScaler
from shardcore.optim import group_options as options
from tests.support.choice import combinations, few
from tests.support.groups import RUNS, device_decides, said_of
from tests.support.models import (
    Run,
    assert_one,
    batch_of,
    hash_of_training,
    loss_of,
    make_net,
    train,
)
from tests.support.params import OnCpu
from tests.support.ranks import run_ranks


def _both(rank: int, world_size: int, run: Run) -> tuple[Any, list[Any]]:
    """What a run by the host leaves at stage 2, and one by the device at each stage, with its
    waits: in training, at all.
    """
    found = []
    for stage in range(4):
        with device_decides() as waits:
            model, optimizer, _ = train(rank, replace(run, stage=stage))
            assert optimizer._engine.device_step is not None
            waited = waits.count
            found.append((said_of(model, optimizer), waited, waits.count))
    return said_of(*train(rank, run)[:2]), found


ORDERS = [(1, None), (2, True), (2, False)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("world_size", "name", "order"), few([*product([2, 1, 3], RUNS, ORDERS)], meet=1)
)
def test_the_bits_of_the_hosts_decision(world_size: int, name: str, order: tuple[int, Any]) -> None:
    accumulate, sync_each = order
    run = replace(
        RUNS[name], accumulate=accumulate, shard={**RUNS[name].shard, "sync_each": sync_each}
    )
    found = run_ranks(world_size, _both, run)
    host = found[0][0]
    assert all(by_host == host for by_host, _ in found)
    assert all(by_device == [(host, 0, run.steps)] * 4 for _, by_device in found)
    assert (host[2] > 0) == (name in ("fp16", "hysteresis")), "skipped steps"


def _over_nodes(rank: int, world_size: int, stage: int) -> list[tuple[Any, ...]]:
    said = []
    for forced in (False, True):
        mesh = init_device_mesh("cpu", (2, 2))
        run = replace(
            RUNS["fp16"], stage=stage, steps=5, shard=RUNS["fp16"].shard | {"process_group": mesh}
        )
        with device_decides(forced=forced):
            said.append(said_of(*train(rank, run)[:2]))
    return said


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_bits_of_the_hosts_decision_with_hybrid_sharding(stage: int) -> None:
    found = run_ranks(4, _over_nodes, stage)
    assert_one(said for of_rank in found for said in of_rank)


def _counts_for_all(patch: pytest.MonkeyPatch) -> None:
    """Moves on one count of each step, and not each parameter's."""
    step = _C.device_step
    patch.setattr(
        _C,
        "device_step",
        lambda w, s, c, *more, **terms: step(
            w, s, [c[0], *(x.clone() for x in c[1:])], *more, **terms
        ),
    )


def _never_skips(patch: pytest.MonkeyPatch) -> None:
    step = _C.device_step
    patch.setattr(
        _C,
        "device_step",
        lambda w, s, *more, **terms: step(w, s.nan_to_num(1.0, 1.0), *more, **terms),
    )


def _leaves_the_scale(patch: pytest.MonkeyPatch) -> None:
    step = _C.device_step
    patch.setattr(_C, "device_step", lambda *more, **terms: step(*more, **{**terms, "rule": None}))


def _scales_as_the_host_knows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LossScaler, "unscale", lambda scaler, ranks: 1.0 / (ranks * scaler.scale))


@pytest.mark.parametrize(
    "twin", [_counts_for_all, _never_skips, _leaves_the_scale, _scales_as_the_host_knows]
)
def test_twins_have_other_bits(twin: Any) -> None:
    run = RUNS["fp16"]
    expected = said_of(*train(0, run)[:2])
    with device_decides(), pytest.MonkeyPatch.context() as patch:
        twin(patch)
        model, optimizer, _ = train(0, run)
        assert said_of(model, optimizer, whole=False) != expected
    with device_decides():
        assert said_of(*train(0, run)[:2]) == expected


# --- parameters that have a gradient in some steps only -------------------------------------------


class Sometimes(nn.Module):
    """A layer for each expert, of which a step uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.experts = nn.ModuleList(nn.Linear(10, 5) for _ in range(4))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        return sum((self.experts[i](x) for i in used), torch.zeros(len(x), 5))


USES = [(0, 1, 2, 3), (0,), (1, 2), (0, 1), (0, 1, 2, 3), (3,), (2, 3)]


def _experts(rank: int, world_size: int, stage: int, forced: bool, steps: int) -> tuple[Any, ...]:
    with device_decides(forced=forced) as waits:
        model: Any = Sometimes()
        optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
        model, optimizer = shardcore.shard(model, optimizer, stage, precision="fp32", units=60)
        for step in range(steps):
            x, y = batch_of(step, 0, rank)
            x = x * float("inf") if step % 5 == 3 and rank == 0 else x
            ((model(x, USES[step % len(USES)]) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        waited = waits.count
        counts = [int(optimizer.state[param]["step"]) for param in model.parameters()]
        return hash_of_training(model, optimizer), counts, optimizer.skipped_steps, waited


def test_a_twin_that_takes_one_count_for_all_has_other_bits() -> None:
    expected = _experts(0, 1, 1, False, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Managed, "cohort", property(lambda managed: 0, lambda managed, value: None))
        assert _experts(0, 1, 1, True, 12) != expected


@pytest.mark.cases(2)
@pytest.mark.parametrize(("world_size", "stage"), [(2, 0), (1, 2), (2, 3)])
def test_each_parameter_has_its_own_count(world_size: int, stage: int) -> None:
    for one, other in zip(
        *(run_ranks(world_size, _experts, stage, forced, 12) for forced in (False, True)),
        strict=True,
    ):
        assert one == other
        assert other[2:] == (2, 0)


# --- capturable -----------------------------------------------------------------------------------


def _steps(
    rank: int, stage: int, name: str, make: Any, before_step: Any = lambda step: None
) -> tuple[Any, ...]:
    """Train with a learning rate and a scale that change."""
    run, model = RUNS[name], make_net()
    lr = torch.tensor(0.0, dtype=torch.float64)
    groups = [
        {"params": list(model.parameters())[:3], "weight_decay": 0.3},
        {"params": list(model.parameters())[3:]},
    ]
    optimizer: Any = make(groups, **{**run.adam, "lr": lr, "capturable": make is OnCpu})
    model, optimizer = shardcore.shard(
        model, optimizer, stage, precision=run.precision, **run.shard
    )
    for step in range(run.steps):
        optimizer.scale_loss(loss_of(model, batch_of(step, 0, rank))).backward()
        lr.fill_(0.01 / (step + 1))
        before_step(step)
        optimizer.step(grad_scale=torch.tensor(0.5 + step))
        optimizer.zero_grad()
    return model, optimizer


def _capturable(rank: int, world_size: int, name: str) -> list[Any]:
    found = [said_of(*_steps(rank, 2, name, shardcore.FusedAdam))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "on_device", lambda value: isinstance(value, torch.Tensor))
        for stage in range(4):
            model, optimizer = _steps(rank, stage, name, OnCpu)
            assert optimizer._engine.device_step is not None
            found.append(said_of(model, optimizer))
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize(("world_size", "name"), few([*product([1, 2], RUNS)], meet=1))
def test_capturable_has_the_bits_of_the_ordinary_step(world_size: int, name: str) -> None:
    assert_one(said for of_rank in run_ranks(world_size, _capturable, name) for said in of_rank)


@pytest.mark.parametrize("name", ["fp16", "fp32"])
def test_what_a_graph_replays_is_read_from_the_device(name: str) -> None:
    """As in a replay the host learns of no step, from the third on."""
    expected = said_of(*_steps(0, 2, name, OnCpu))
    with pytest.MonkeyPatch.context() as patch:

        def capture(step: int) -> None:
            for module in (device_step, engine_module):
                patch.setattr(module, "capturing", lambda device: step >= 2)

        model, optimizer = _steps(0, 2, name, OnCpu, capture)
        assert (
            len(optimizer._engine.device_outcomes._pending) <= 1
        )  # of the step before the first of them
        assert said_of(model, optimizer) == expected


def _captures(rank: int, world_size: int) -> str:
    with pytest.MonkeyPatch.context() as patch:

        def capture(step: int) -> None:
            patch.setattr(engine_module, "capturing", lambda device: True)

        with pytest.raises(ValueError) as error:
            _steps(rank, 2, "fp32", OnCpu, capture)
        return str(error.value)


def test_a_graph_takes_one_rank() -> None:
    for text in run_ranks(2, _captures):
        assert "step: several ranks run a step while a CUDA graph is captured" in text


def test_capturable_and_offload_exclude_each_other() -> None:
    model = make_net()
    optimizer = OnCpu(model.parameters(), capturable=True)
    with pytest.raises(
        ValueError, match=r"param_groups\[0\].capturable is True with offload; expected False"
    ):
        shardcore.shard(model, optimizer, offload={"optimizer": "cpu"})


def test_skipped_steps_of_before_shard_count() -> None:
    model = make_net()
    optimizer: Any = OnCpu(model.parameters(), capturable=True)
    optimizer.step(
        grads=[torch.full_like(p, float("inf")) for p in model.parameters()], max_norm=1.0
    )
    model, optimizer = shardcore.shard(model, optimizer)
    loss_of(model, batch_of(0, 0, 0)).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 1


# --- on a GPU -------------------------------------------------------------------------------------


def _on(device: torch.device, run: Run, watched: bool) -> tuple[Any, ...]:
    """Train; watched: torch raises at what waits for the GPU, and a step returns while that is
    busy with what came before.
    """
    model: Any = make_net().to(device)
    optimizer: Any = shardcore.FusedAdam(model.parameters(), **run.adam)
    model, optimizer = shardcore.shard(
        model, optimizer, run.stage, precision=run.precision, **run.shard
    )
    batches = [tuple(t.to(device) for t in batch_of(step, 0, 0)) for step in range(8)]
    watched &= device.type == "cuda"
    for step, batch in enumerate(batches):
        if watched and step == 3:  # the first steps take memory
            torch.cuda.synchronize()
            torch.cuda._sleep(3_000_000_000)  # cycles
            awake = torch.cuda.Event()
            awake.record()
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.scale_loss(loss_of(model, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if watched and step == 3:
                assert not awake.query()
        finally:
            if watched:
                torch.cuda.set_sync_debug_mode("default")
    return said_of(model, optimizer)


@pytest.mark.parametrize(("stage", "name"), combinations([0, 1, 2, 3], list(RUNS), meet=1))
def test_on_a_gpu_no_step_waits_and_the_bits_are_the_hosts(
    device: torch.device, stage: int, name: str
) -> None:
    """On the CPU the same bits, without a GPU to wait for."""
    # CUDA's layer norm takes one dtype
    shard = {key: value for key, value in RUNS[name].shard.items() if key != "keep_fp32"}
    run = replace(RUNS[name], stage=stage, shard=shard)
    with device_decides(late=None, forced=device.type == "cpu") as waits:
        got = _on(device, run, True)
        assert waits.count == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "decides_on_device", lambda *_: False)
        assert _on(device, run, False) == got


def _of_graph(stage: int, name: str, graphed: bool) -> tuple[Any, ...]:
    """Train by replays of a whole step, or without a graph, over equal batches; steps 0 and 1
    run before the capture.
    """
    run, model = RUNS[name], make_net().cuda()
    shard_options = {key: value for key, value in run.shard.items() if key != "keep_fp32"}
    lr = torch.zeros((), dtype=torch.float64, device="cuda")
    optimizer: Any = shardcore.FusedAdam(
        model.parameters(), **{**run.adam, "lr": lr, "capturable": graphed}
    )
    model, optimizer = shardcore.shard(
        model, optimizer, stage, precision=run.precision, **shard_options
    )
    x, y = (t.cuda() for t in batch_of(0, 0, 0))

    def step() -> None:
        optimizer.scale_loss(loss_of(model, (x, y))).backward()
        optimizer.step()
        optimizer.zero_grad()

    def feed(number: int) -> None:
        for target, source in zip((x, y), batch_of(number, 0, 0), strict=True):
            target.copy_(source)
        lr.fill_(0.01 / (number + 1))

    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    for number in range(8):
        feed(number)
        if number < 2 or not graphed:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()
            torch.cuda.current_stream().wait_stream(side)
            continue
        if number == 2:
            with torch.cuda.graph(graph):
                step()
        graph.replay()
    torch.cuda.synchronize()
    return said_of(model, optimizer)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(RUNS))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replays_of_a_whole_step_have_the_bits_of_steps_without_a_graph(
    stage: int, name: str
) -> None:
    assert _of_graph(stage, name, True) == _of_graph(stage, name, False)
