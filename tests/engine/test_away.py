"""Models that leave the device between two phases of training: the same bits afterwards, and an
error by name meanwhile.
"""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from shardcore._native import _C
from shardcore.engine import away
from shardcore.engine.away import WeightsAway
from tests.support.models import (
    Run,
    batch_of,
    error_of,
    hash_of,
    hash_of_training,
    loss_of,
    make_net,
    stepped,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.slices import mesh_of, sharded_lm, train_lm
from tests.support.tiers import GRADS

SPLIT = {"optimizer": "cpu", "ratio": 0.5}
AWAY = (
    "in host memory since shardcore.offload_states(model); expected shardcore.reload_states(model)"
)


def _on_device(model: Any) -> int:
    return shardcore.memory_report(model).by_tier.get("device", 0)


def _paused(
    rank: int, world: int, run: Run, lora: bool, pauses: bool, twin: bool = False
) -> tuple[str, Any]:
    """Train two steps, pause, and train two more; returns the hash and what the pause showed."""
    model = make_net()
    if lora:  # most weights are frozen, as under adapters
        model.blocks.requires_grad_(False)
    model, optimizer, _ = train(rank, run, model)
    shown: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if twin:  # the copies back are left out
            patch.setattr(WeightsAway, "_on_device", _zeros)
        if pauses:
            before = _on_device(model)
            freed = shardcore.offload_states(model)
            shown += [freed, _on_device(model), before, shardcore.offload_states(model)]
            shardcore.reload_states(model)
            shardcore.reload_states(model)  # nothing is away
            shown.append(_on_device(model))
    for step in (run.steps, run.steps + 1):
        stepped(model, optimizer, rank, step)
    return hash_of_training(model, optimizer), shown


def _zeros(moved: WeightsAway, on_host: Any) -> Any:
    return {owner: torch.zeros(flat.numel(), dtype=flat.dtype) for owner, flat in on_host.items()}


CASES = [
    (1, 3, "bf16", None, False),
    (2, 0, "fp32", None, False),
    (2, 1, "bf16", None, True),
    (2, 2, "bf16", SPLIT, False),
    (2, 2, "fp32", GRADS, True),
    (2, 3, "bf16", None, True),
    (2, 3, "bf16", {"optimizer": "cpu", "params": "cpu"}, False),
]


@pytest.mark.parametrize(("world", "stage", "precision", "offload", "lora"), CASES)
def test_the_same_bits_after_a_pause(
    world: int, stage: int, precision: str, offload: Any, lora: bool
) -> None:
    run = Run(stage, 2, precision=precision, shard={"offload": offload, "clip_grad_norm": 0.5})
    expected = run_ranks(world, _paused, run, lora, False)
    for (found, shown), (straight, _) in zip(
        run_ranks(world, _paused, run, lora, True), expected, strict=True
    ):
        assert found == straight
        freed, left, before, again, after = shown
        assert left == 0 or offload is not None
        assert freed == before - left
        assert again == 0
        assert after <= before  # buffers come back when they are needed
        assert freed > 0 or offload is not None


def test_lost_weights_show() -> None:
    run = Run(2, 2, precision="bf16")
    straight = run_ranks(2, _paused, run, True, False)[0][0]
    assert run_ranks(2, _paused, run, True, True, True)[0][0] != straight


def _uses(model: Any, optimizer: Any, folder: Path, rank: int) -> dict[str, Callable[[], Any]]:
    def unsharded() -> None:
        with shardcore.full_params(model):
            pass

    x, _ = batch_of(9, 0, rank)
    return {
        "forward": lambda: model(x),
        "part": lambda: model.head(torch.ones(1, 24, dtype=model.head.weight.dtype)),
        "step": optimizer.step,
        "read": lambda: model.blocks[1].up.weight.sum(),
        "frozen": lambda: model.inp.bias.sum(),
        "full_params": unsharded,
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict(make_net().state_dict()),
        "save": lambda: shardcore.save(folder, model, optimizer),
        "stream_params": lambda: list(shardcore.stream_params(model)),
        "deepcopy": lambda: copy.deepcopy(model),
        "unfreeze": lambda: shardcore.unfreeze(model),
    }


def _refusals(rank: int, world: int, stage: int, folder: Path) -> dict[str, str]:
    model = make_net()
    model.inp.requires_grad_(False)
    model, optimizer, _ = train(rank, Run(stage, 1, precision="bf16"), model)
    loss_of(model, batch_of(1, 0, rank)).backward()
    said = {"gradients": error_of(lambda: shardcore.offload_states(model))}
    optimizer.zero_grad()
    if stage == 3:
        with shardcore.full_params(model):
            said["inside"] = error_of(lambda: shardcore.offload_states(model))
    before = hash_of_training(model, optimizer)
    shardcore.offload_states(model)
    said |= {name: error_of(use) for name, use in _uses(model, optimizer, folder, rank).items()}
    optimizer.reload_states()  # the weights stay away
    said["states alone"] = error_of(lambda: model(batch_of(9, 0, rank)[0]))
    shardcore.reload_states(model)
    if stage == 3:
        said["back"] = error_of(lambda: model.blocks[1].up.weight.sum())
    assert hash_of_training(model, optimizer) == before
    stepped(model, optimizer, rank, 2)
    return said


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_uses_meanwhile_raise_by_name(stage: int, tmp_path: Path) -> None:
    for said in run_ranks(2, _refusals, stage, tmp_path):
        gradients = said.pop("gradients")
        assert "gradients of backwards since the last zero_grad() exist; expected" in gradients
        assert "include" not in gradients
        if stage == 3:
            assert "called inside full_params" in said.pop("inside")
            assert "is sharded (stage 3)" in said.pop("back")
        for name, message in said.items():
            assert AWAY in message, (name, message)


def _without_optimizer(rank: int, world: int, stage: int) -> tuple[str, str, int]:
    model, _ = shardcore.shard(make_net(), None, stage)
    x, _ = batch_of(0, 0, rank)
    with torch.no_grad():
        expected = hash_of([model(x)])
        freed = shardcore.offload_states(model, pin_memory=False)
        assert AWAY in error_of(lambda: model(x))
        shardcore.reload_states(model)
        return expected, hash_of([model(x)]), freed


def test_without_an_optimizer() -> None:
    for stage in (2, 3):
        for expected, found, freed in run_ranks(2, _without_optimizer, stage):
            assert found == expected
            assert freed > 0


def _sliced(rank: int, world: int, stage: int, pauses: bool) -> str:
    mesh = mesh_of(world, 2)
    model, optimizer = sharded_lm(mesh, stage, True)
    train_lm(model, optimizer, mesh, range(1))
    if pauses:
        assert shardcore.offload_states(model) > 0
        shardcore.reload_states(model)
    train_lm(model, optimizer, mesh, range(1, 2))
    return hash_of_training(model, optimizer)


def test_tensor_parallel_slices() -> None:
    for stage in (2, 3):
        assert run_ranks(2, _sliced, stage, True) == run_ranks(2, _sliced, stage, False)


def _edited(rank: int, world: int, pauses: bool) -> str:
    model, optimizer, _ = train(rank, Run(2, 1, precision="bf16"))
    with torch.no_grad():
        model.head.weight.mul_(2)
    if pauses:
        shardcore.offload_states(model)
        shardcore.reload_states(model)
    stepped(model, optimizer, rank, 2)
    return hash_of_training(model, optimizer)


def test_edits_before_a_pause_are_kept() -> None:
    assert run_ranks(2, _edited, True) == run_ranks(2, _edited, False)


def _weights_alone(rank: int, world: int, stage: int, pauses: bool) -> Any:
    model, optimizer, _ = train(rank, Run(stage, 2, precision="bf16"))
    streamed = {name: w.clone() for name, w in shardcore.stream_params(model)}
    if pauses:
        before = _on_device(model)
        freed = shardcore.offload_states(model)
        shardcore.reload_states(model, states=False)
        assert 0 < _on_device(model) <= before - freed // 2  # masters and moments take the most
        for name, weight in shardcore.stream_params(model):
            assert torch.equal(weight, streamed.pop(name))
        assert not streamed
        assert "in host memory since offload_states()" in error_of(optimizer.step)
        shardcore.offload_states(model)
        assert _on_device(model) == 0
        shardcore.reload_states(model)
    stepped(model, optimizer, rank, 2)
    return hash_of_training(model, optimizer)


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_come_back_alone(stage: int) -> None:
    straight = run_ranks(2, _weights_alone, stage, False)
    assert run_ranks(2, _weights_alone, stage, True) == straight


@pytest.mark.parametrize("offload", [None, {"optimizer": "cpu"}, SPLIT])
@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_keeps_the_memory_of_weights(stage: int, offload: Any) -> None:
    model, optimizer, _ = train(0, Run(stage, 2, precision="bf16", shard={"offload": offload}))
    engine = model._shardcore_engine
    memory = [
        weakref.ref((b.weight if stage < 3 else b.owned_weight).untyped_storage())
        for b in engine.buckets
    ]
    assert all(ref() is not None for ref in memory)
    shardcore.offload_states(model)
    gc.collect()
    assert not any(ref() is not None for ref in memory)
    shardcore.reload_states(model)
    stepped(model, optimizer, 0, 2)


def test_too_little_host_memory_moves_no_weight() -> None:
    model, optimizer, _ = train(0, Run(2, 1))

    class Full(_C.HostTier):
        def empty(self, *arguments: Any, **options: Any) -> Any:
            raise MemoryError("no more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(away._C, "HostTier", Full)
        with pytest.raises(MemoryError):
            shardcore.offload_states(model)
    shardcore.reload_states(model)
    stepped(model, optimizer, 0, 2)


def test_only_sharded_models() -> None:
    for call in (shardcore.offload_states, shardcore.reload_states):
        assert "is not sharded" in error_of(partial(call, make_net()))
