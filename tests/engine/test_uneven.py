"""Ranks that run different numbers of backwards per step get an error that says so, before anything is sent."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

import shardcore
from tests.engine.forced import as_on_nccl
from tests.engine.models import Run, batch_of, loss_of, make_net, train
from tests.ranks import run_ranks


def _backward(model: Any, rank: int, micro: int = 0) -> None:
    loss_of(model, batch_of(0, micro, rank)).backward()


def _no_sync_once_more(model: Any, optimizer: Any, rank: int) -> None:
    if rank == 0:
        with shardcore.no_sync(model):
            _backward(model, rank)
    _backward(model, rank, 1)
    optimizer.step()


def _one_more(model: Any, optimizer: Any, rank: int, then: Callable[[Any, Any], Any]) -> None:
    for micro in range(3 - rank):
        _backward(model, rank, micro)
    then(model, optimizer)


# By numbers of backwards, or by what each rank waits for.
NAMED = re.compile(
    "[12] backwards since the last step|can never end: .*equally many backwards per step|backwards=. on rank 1 but"
)

UNEVEN: dict[str, Callable[[Any, Any, int], None]] = {
    "no_sync once more": _no_sync_once_more,
    "one more, step": lambda *given: _one_more(*given, lambda model, optimizer: optimizer.step()),
    "one more, clip": lambda *given: _one_more(*given, lambda model, optimizer: shardcore.clip_grad_norm_(model, 1.0)),
    "one more, full_grad": lambda *given: _one_more(*given, lambda model, optimizer: shardcore.full_grad(model.head.weight)),
}


def _uneven(rank: int, world_size: int, what: str, stage: int, precision: str, accumulate: int, nccl: bool) -> str:
    with as_on_nccl() if nccl else nullcontext():
        run = Run(stage, steps=1, accumulate=accumulate, precision=precision, shard={"sync_each": False})
        model, optimizer, _ = train(rank, run)
        try:
            UNEVEN[what](model, optimizer, rank)
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "nothing"


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("what", "precision", "accumulate"),
    [
        ("no_sync once more", "bf16", 1),
        ("no_sync once more", "fp32", 1),
        *((what, "fp32", accumulate) for what in UNEVEN if what.startswith("one") for accumulate in (3, 4)),
    ],
)
def test_uneven_backwards_are_an_error_on_every_rank(what: str, precision: str, accumulate: int, stage: int) -> None:
    for said in run_ranks(2, _uneven, what, stage, precision, accumulate, False):
        assert NAMED.search(said), said


@pytest.mark.parametrize(("what", "precision"), [("no_sync once more", "fp32"), ("one more, step", "fp32")])
def test_uneven_backwards_are_an_error_on_nccl(what: str, precision: str) -> None:
    for said in run_ranks(2, _uneven, what, 2, precision, 4 if "step" in what else 1, True):
        assert NAMED.search(said), said


def _one_engine_backward_more(rank: int, world_size: int, stage: int) -> str:
    model = make_net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    }
    engine, *_ = shardcore.initialize(model=model, model_parameters=model.parameters(), config=config)
    try:
        for micro in range(2):
            engine.backward(loss_of(engine, batch_of(0, micro, rank)))
            if micro == rank == 0:
                engine.backward(loss_of(engine, batch_of(0, 2, rank)))
            engine.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_engine_backward_more_is_an_error_on_every_rank(stage: int) -> None:
    for said in run_ranks(2, _one_engine_backward_more, stage):
        assert "equally many backwards per step" in said
