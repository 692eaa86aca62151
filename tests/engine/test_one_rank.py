"""What one rank is given, does or suffers alone: every rank says so, at once, and no replica drifts away in silence."""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore.engine import bucket, build, gather, store
from shardcore.engine.engine import Engine
from shardcore.engine.weights import Weights
from tests.engine.made import meta, save
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
    model.inp.load_state_dict({"weight": torch.full((24, 10), value), "bias": torch.ones(24)})


def _load_states(model: Any, optimizer: Any, value: float) -> None:
    state = {number: {"step": 3, "exp_avg": p + value, "exp_avg_sq": p} for number, p in enumerate(_shapes(model))}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _shapes(model: Any) -> list[torch.Tensor]:
    return [torch.zeros(param.shape) for param in model.parameters()]


# what each rank does with a value of its own -> what the next step says
DOINGS: list[tuple[Callable[..., None], str]] = [
    (_load, "head.weight with a gradient after 1 steps, loaded (digest"),
    (_load_frozen, "inp.weight, which no step updates, loaded (digest"),
    (_load_states, "an optimizer state was loaded (digest"),
    (_edit, "blocks.0.up.weight with a gradient after 1 steps, edited (digest"),
    (_edit_frozen, "inp.weight, which no step updates, edited (digest"),
]


def _with_values(rank: int, world_size: int, stage: int) -> list[tuple[str, str]]:
    found = []
    for doing, _ in DOINGS[: 3 if stage == 3 else None]:  # at stage 3 no weight that is edited has replicas
        model = make_net()
        model.inp.weight.requires_grad_(False)
        model, optimizer, _ = train(rank, Run(stage=stage, steps=1), model)
        doing(model, optimizer, float(rank))
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
def test_values_that_differ_between_ranks_are_refused(stage: int) -> None:
    first, second = run_ranks(2, _with_values, stage)
    for (_, expected), (text, hash_), (same, other) in zip(DOINGS, first, second, strict=False):
        assert text == same
        assert text.count(expected) == 2, text
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
    assert "rank 1 reads something else than that of the model after weights were loaded or edited (digest" in here
    assert "rank 0 reads something else than that of the model; expected the same" in there


def _own_weights(rank: int, world_size: int, folder: str, how: str) -> str:
    """Each rank has weights, or a file, of its own."""
    model = make_net(seed=rank)
    options: dict[str, Any] = {"broadcast": False}
    if how == "files":
        path = save(Path(folder) / str(rank) / "model.safetensors", dict(model.state_dict()))
        model, options = meta(), {"materialize": path}
    model.inp.requires_grad_(False)
    model, optimizer, _ = train(rank, Run(stage=1, steps=0, shard=options), model)
    loss_of(model, batch_of(0, 0, rank)).backward()
    with pytest.raises(ValueError) as refusal:
        optimizer.step()
    return str(refusal.value)


@pytest.mark.parametrize("how", ["broadcast", "files"])
def test_weights_that_each_rank_brings_are_compared(tmp_path: Path, how: str) -> None:
    if how == "files":
        pytest.importorskip("safetensors", reason="reading files needs safetensors")
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for text in run_ranks(2, _own_weights, str(tmp_path), how):
        assert re.search(r"0 steps, loaded \(digest \w+\) on rank 1 but", text)


def test_digests_tell_values_apart() -> None:
    values = torch.linspace(-1, 1, 513)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool):
        given = (values * 100).to(dtype)
        other = given.clone()
        other[300] = not other[300] if dtype == torch.bool else other[300] + 1
        assert bucket.digest_of(given) == bucket.digest_of(given.clone().view(27, 19).t().contiguous().t())
        assert bucket.digest_of(given) != bucket.digest_of(other)
        assert bucket.digest_of(given[1:]) == bucket.digest_of(given[1:].clone()), "not aligned"
        assert bucket.digest_of(given[:1]) != bucket.digest_of(other[300:301]), "shorter than a word"
    assert bucket.digest_of(torch.zeros(0)) == "0"
    assert bucket.digest_of(torch.zeros(4)) != bucket.digest_of(torch.ones(4))
    assert bucket.digest_of(-torch.ones(4)) != bucket.digest_of(torch.ones(4))


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

    places: list[tuple[Any, str]] = [(build, "allocate"), (store, "allocate"), (Engine, "__init__"), (Weights, "__init__")]
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
