"""States that are in host memory between two phases of training: the same bits afterwards, and
their device memory free.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from shardcore.engine.states import DeviceStore
from tests.support.models import Run, batch_of, error_of, hash_of_training, loss_of, stepped, train
from tests.support.ranks import run_ranks
from tests.support.tiers import GRADS

SPLIT = {"optimizer": "cpu", "ratio": 0.5}


def _kinds_on_device(model: Any) -> dict[str, int]:
    kept: dict[str, int] = {}
    for line in shardcore.memory_report(model).lines:
        if line.tier == "device":
            kept[line.kind] = kept.get(line.kind, 0) + line.bytes
    return kept


def _interrupted(
    rank: int, world: int, run: Run, folder: Path | None = None, twin: bool = False
) -> tuple[str, str]:
    """Train four steps with the states away after two; returns the hash, and what a step in
    between says.
    """
    with pytest.MonkeyPatch.context() as patch:
        if twin:  # the copies back are left out
            patch.setattr(
                DeviceStore, "to_device", lambda store, tier: setattr(store, "away", False)
            )
            moved = DeviceStore.to_host
            patch.setattr(
                DeviceStore, "to_host", lambda store, tier: (moved(store, tier), _zero(store))[0]
            )
        model, optimizer, _ = train(rank, run)
        before, kept = hash_of_training(model, optimizer), _kinds_on_device(model)
        assert (kept.get("states", 0) > 0) == (run.shard.get("offload") != GRADS)
        optimizer.offload_states()
        optimizer.offload_states()  # nothing is left to move
        away = _kinds_on_device(model)
        assert away["weights"] <= kept["weights"]
        assert {kind: size for kind, size in away.items() if size} == {
            "weights": away["weights"]
        }, away
        with torch.no_grad():
            assert torch.isfinite(loss_of(model, batch_of(0, 0, rank)))  # forwards run
        if not twin:
            assert hash_of_training(model, optimizer) == before  # as do reads
        if folder is not None:
            shardcore.save(folder, model, optimizer)
        loss_of(model, batch_of(9, 0, rank)).backward()
        # nothing was moved: a step would run
        said = "" if run.shard.get("offload") == GRADS else error_of(optimizer.step)
        optimizer.zero_grad()
        optimizer.reload_states()
        assert _kinds_on_device(model).get("states", 0) == kept.get("states", 0)
        for step in (run.steps, run.steps + 1):
            stepped(model, optimizer, rank, step)
        return hash_of_training(model, optimizer), said


def _zero(store: DeviceStore) -> None:
    for kept in store._states.values():
        for flat in kept.values():
            flat.zero_()


def _straight(rank: int, world: int, run: Run) -> str:
    return hash_of_training(
        *train(rank, Run(run.stage, run.steps + 2, precision=run.precision, shard=run.shard))[:2]
    )


@pytest.mark.parametrize(
    ("world", "stage", "precision", "offload"),
    [
        (1, 2, "bf16", None),
        (2, 0, "fp32", None),
        (2, 1, "bf16", None),
        (2, 3, "bf16", None),
        (2, 2, "bf16", SPLIT),
        (2, 2, "fp32", GRADS),
    ],
)
def test_the_same_bits_after_a_pause(world: int, stage: int, precision: str, offload: Any) -> None:
    run = Run(stage, 2, precision=precision, shard={"offload": offload, "clip_grad_norm": 0.5})
    expected = run_ranks(world, _straight, run)
    for found, said in run_ranks(world, _interrupted, run):
        assert found == expected[0]
        if offload != GRADS:
            assert said.startswith(
                "ValueError: step: the optimizer's states are in host memory since offload_states()"
            )


def test_a_lost_state_shows() -> None:
    run = Run(2, 2, precision="bf16")
    found = run_ranks(2, _interrupted, run, None, True)[0][0]
    assert found != run_ranks(2, _straight, run)[0]


def _resumed(rank: int, world: int, run: Run, folder: Path) -> str:
    model, optimizer, _ = train(rank, Run(run.stage, 0, precision=run.precision, seed=7))
    shardcore.load(folder, model, optimizer)
    for step in (run.steps, run.steps + 1):
        stepped(model, optimizer, rank, step)
    return hash_of_training(model, optimizer)


def test_saves_while_states_are_away(tmp_path: Path) -> None:
    run = Run(3, 2, precision="bf16")
    expected = run_ranks(2, _straight, run)[0]
    assert run_ranks(2, _interrupted, run, tmp_path)[0][0] == expected
    assert run_ranks(2, _resumed, run, tmp_path)[0] == expected


@pytest.mark.gpu
def test_device_memory_is_free_meanwhile() -> None:
    """16-bit weights of 2^20 elements a layer: masters and moments take 12 bytes an element, and
    leave the device.
    """

    def trained(pauses: bool) -> str:
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
        optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
        model, optimizer = shardcore.shard(model, optimizer, 3, precision="bf16")
        x = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if pauses:
                before = torch.cuda.memory_allocated()
                optimizer.offload_states()
                assert before - torch.cuda.memory_allocated() >= 4 * 12 * 2**20
                optimizer.reload_states()
        return hash_of_training(model, optimizer)

    assert trained(True) == trained(False)


def _refusals(rank: int, world: int) -> list[str]:
    model, optimizer, _ = train(rank, Run(2, 1))
    loss_of(model, batch_of(1, 0, rank)).backward()
    said = [error_of(optimizer.offload_states)]
    optimizer.offload_states(include="optim_states")
    said.append(error_of(optimizer.step))
    optimizer.reload_states()
    optimizer.reload_states()  # nothing is away
    optimizer.step()
    optimizer.zero_grad()
    optimizer.offload_states()
    shardcore.unfreeze(model)  # brings them back itself
    stepped(model, optimizer, rank, 2)
    said += [
        error_of(partial(optimizer.offload_states, include=[name]))
        for name in ("lp_params", "moments")
    ]
    said += [error_of(lambda: optimizer.offload_states(device="nvme"))]
    return said


def test_refusals() -> None:
    for said in run_ranks(2, _refusals):
        assert "gradients of backwards since the last zero_grad() exist" in said[0]
        assert "in host memory since offload_states()" in said[1]
        assert "include contains ['lp_params']" in said[2]
        assert "weights stay" in said[2]
        assert "include contains ['moments']; expected some of ['optim_states', " in said[3]
        assert "device is 'nvme'; expected \"cpu\"" in said[4]
    alone = shardcore.FusedAdam(torch.nn.Linear(2, 2).parameters())
    for call in (alone.offload_states, alone.reload_states):
        assert "is not sharded. Use the optimizer returned by shardcore.shard" in error_of(call)
