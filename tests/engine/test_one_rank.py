"""What one rank is given, does or suffers alone: every rank says so, at once, and no replica drifts away in silence."""

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore.engine import build
from shardcore.engine import state_store as store
from shardcore.engine import unshard as gather
from shardcore.engine.engine import Engine
from shardcore.engine.unshard import Unsharder
from tests.engine.models import Net, Run, batch_of, hash_of_training, loss_of, make_net, train
from tests.ranks import run_ranks

# --- groups -----------------------------------------------------------------------------------------------------------


def _in_group(rank: int, world_size: int) -> list[list[str]]:
    texts: list[list[str]] = []
    logger, handler = logging.getLogger("shardcore"), logging.Handler()
    handler.emit = lambda record: texts[-1].append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    own = [dist.new_group([each]) for each in range(world_size)][rank]
    for group in (own, None):
        texts.append([])
        train(rank, Run(steps=0, shard={"process_group": group}))
    logger.removeHandler(handler)
    return texts


def test_a_group_of_one_rank_among_many_is_told() -> None:
    for rank, (own, everyone) in enumerate(run_ranks(2, _in_group)):
        assert f"process_group has this rank ({rank}) alone, of 2: nothing is sharded" in own[0]
        assert not everyone


# --- values -----------------------------------------------------------------------------------------------------------


def _edit(model: Any, optimizer: Any, value: float) -> None:
    with torch.no_grad():
        model.blocks[0].up.weight.add_(value)


def _edit_frozen(model: Any, optimizer: Any, value: float) -> None:
    with torch.no_grad():
        model.inp.weight.add_(value)


def _load(model: Any, optimizer: Any, value: float) -> None:
    model.head.load_state_dict({"weight": torch.full((5, 24), value)})


def _load_frozen(model: Any, optimizer: Any, value: float) -> None:
    model.inp.load_state_dict({"weight": torch.full((24, 10), value)}, strict=False)


def _load_states(model: Any, optimizer: Any, value: float) -> None:
    state = {number: {"step": 1, "exp_avg": p + value, "exp_avg_sq": p} for number, p in enumerate(_shapes(model))}
    groups = [group | {"params": list(range(len(group["params"])))} for group in optimizer.param_groups]  # there is one
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _shapes(model: Any) -> list[torch.Tensor]:
    return [torch.zeros(param.shape) for param in model.parameters()]


# what rank 1 does alone -> what the next step says
DOINGS: list[tuple[Callable[..., None], str]] = [
    (
        _load,
        "head.weight with a gradient after 1 steps, loaded on rank 1 but head.weight with a gradient after 1 steps on rank 0",
    ),
    (_load_frozen, "inp.weight, which no step updates, loaded on rank 1 but nothing on rank 0"),
    (_load_states, "an optimizer state was loaded on rank 1 but nothing on rank 0"),
    (_edit, "blocks.0.up.weight with a gradient after 1 steps, edited on rank 1"),
    (_edit_frozen, "inp.weight, which no step updates, edited on rank 1"),
]


def _with_values(rank: int, world_size: int, stage: int) -> list[tuple[str, str]]:
    found = []
    for doing, _ in DOINGS[: 3 if stage == 3 else None]:  # at stage 3 no weight that is edited has replicas
        model = make_net()
        model.inp.weight.requires_grad_(False)
        model, optimizer, _ = train(rank, Run(stage=stage, steps=1), model)
        if rank == 1:
            doing(model, optimizer, 1.0)
        loss_of(model, batch_of(1, 0, rank)).backward()
        with pytest.raises(ValueError) as refusal:
            optimizer.step()
        optimizer.zero_grad()
        hash_ = ""
        if doing not in (_edit, _edit_frozen):  # nothing is held against a load that makes all equal again
            doing(model, optimizer, 0.5)
            loss_of(model, batch_of(1, 0, rank)).backward()
            optimizer.step()
            hash_ = hash_of_training(model, optimizer)
        found.append((str(refusal.value), hash_))
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_one_rank_loads_or_edits_alone_is_refused(stage: int) -> None:
    first, second = run_ranks(2, _with_values, stage)
    for (_, expected), (text, hash_), (same, other) in zip(DOINGS, first, second, strict=False):
        assert text == same
        assert expected in text
        assert hash_ == other


def _loaded_alone(rank: int, world_size: int) -> str:
    model, optimizer, _ = train(rank, Run(stage=1, steps=1))
    if rank == 0:
        _load(model, optimizer, 1.0)
    with pytest.raises(ValueError) as refusal:
        model.state_dict()
    return str(refusal.value)


def test_a_read_after_a_load_on_one_rank_is_refused() -> None:
    here, there = run_ranks(2, _loaded_alone)
    assert "rank 1 reads something else than that of the model after 1 of its weights were loaded or edited" in here
    assert "rank 0 reads something else than that of the model; expected the same" in there


# --- failures ---------------------------------------------------------------------------------------------------------


def _renewed(rank: int, world_size: int, fails: bool) -> tuple[list[str], int]:
    texts = []
    options = {"offload": {"optimizer": "cpu", "params": "cpu"}}
    model, optimizer, _ = train(rank, Run(stage=3, steps=1, shard=options))
    real, calls = gather.Gatherer.bring, []

    def bring(bucket: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return real(bucket)

    try:
        with shardcore.full_params(model):
            loss_of(model, batch_of(1, 0, rank)).backward()
            with pytest.MonkeyPatch.context() as patch:
                if fails and rank == 1:
                    patch.setattr(gather.Gatherer, "bring", staticmethod(bring))
                optimizer.step()
    except RuntimeError as error:
        texts.append(str(error))
    return texts, int(optimizer.state[model.gain]["step"])


def test_a_copy_that_fails_after_a_step_in_full_params_stops_all_ranks_and_undoes_no_step() -> None:
    (_, steps), _ = run_ranks(2, _renewed, False)
    (others, other_steps), (own, own_steps) = run_ranks(2, _renewed, True)
    assert own == ["planted"]
    assert "ranks wait for different things, which can never end: rank 0 for the weights of blocks.0" in others[0]
    assert other_steps == own_steps == steps == 2


def _out_of_memory(rank: int, world_size: int) -> list[tuple[str, bool]]:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("planted")

    places: list[tuple[Any, str]] = [(build, "allocate"), (store, "allocate"), (Engine, "__init__"), (Unsharder, "__init__")]
    found = []
    for where, name in places:
        model = Net()
        begun = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(where, name, fail)
            with pytest.raises(RuntimeError) as failure:
                shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 3, precision="fp32")
        found.append((str(failure.value), time.monotonic() - begun < 30))  # the timeout is 60 seconds
    return found


def test_memory_that_one_rank_lacks_is_tell_device_all() -> None:
    for answers in run_ranks(2, _out_of_memory):
        for text, at_once in answers:
            assert "failed on rank 1: MemoryError: planted" in text
            assert at_once
