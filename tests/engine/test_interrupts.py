"""Ctrl-C in the middle of what must be done as a whole: the pass that it ended can be made again, to the same bits."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from shardcore._native import _C
from shardcore.engine import reducer as reducer_module
from shardcore.engine.exchange import Exchange
from shardcore.engine.gather import Gatherer
from shardcore.engine.host_grads import HostGrads
from shardcore.engine.meeting import Meetings
from shardcore.engine.reducer import Reducer
from shardcore.engine.store import DeviceStore
from shardcore.engine.updater import Updater
from shardcore.engine.weights import Weights
from tests.engine.late import micro_steps, start
from tests.engine.models import Run, hash_of_training
from tests.ranks import run_ranks

EVERYTHING = {"optimizer": "cpu", "gradients": "cpu", "params": "cpu", "ratio": 0.6}
PLACES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "drain": (HostGrads, lambda call: call),  # the end of backward
    "bring": (Gatherer, staticmethod),
    "withdraw": (_C, lambda call: call),
}


def _until_done(call: Callable[[], Any]) -> None:
    while True:
        try:
            return call()
        except KeyboardInterrupt:
            pass


def _trained(place: str, number: int, patch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Train, interrupted before the n-th call of what is at `place`; returns also how often it was called."""
    calls = 0
    model, optimizer = start(0, Run(3, accumulate=2, precision="bf16", shard={"offload": EVERYTHING}), True, late=False)
    engine, (owner, kind) = optimizer._engine, PLACES[place]
    call = getattr(owner, place)

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            signal.raise_signal(signal.SIGINT)
        return call(*arguments)

    patch.setattr(owner, place, kind(interrupted))

    def whole_step(step: int) -> None:
        if engine.lazy.steps == step:
            _until_done(optimizer.zero_grad)
            micro_steps(model, optimizer, 0, step, 2)
            optimizer.step()
        optimizer.zero_grad()

    def fails(grad: Any) -> None:
        raise OSError("planted")

    handle = model.blocks[0].up.weight.register_hook(fails)
    with pytest.raises((OSError, KeyboardInterrupt)):
        micro_steps(model, optimizer, 0, 9, 1)
    handle.remove()
    for step in range(2):
        _until_done(lambda step=step: whole_step(step))
    _until_done(optimizer.synchronize)
    patch.undo()
    return hash_of_training(model, optimizer), calls


@pytest.mark.parametrize("place", PLACES)
def test_what_was_interrupted_can_be_made_again(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, calls = _trained(place, 0, monkeypatch)
    assert calls > 0
    for number in {1, 2, calls // 2, calls} - {0}:
        assert _trained(place, number, monkeypatch)[0] == expected, f"call {number} of {calls}"


# --- on some of the ranks ---------------------------------------------------------------------------------------------

IN_STEP: dict[str, tuple[Any, str]] = {
    "before ranks meet": (Reducer, "settle"),
    "as they meet": (Meetings, "meet"),
    "behind that": (Updater, "decide"),
    "while the weights change": (DeviceStore, "step"),
}
IN_BACKWARD: dict[str, tuple[Any, str]] = {
    "as gradients leave": (Exchange, "send"),
    "as its end begins": (Weights, "end_backward"),
    "as ranks tell what they used": (reducer_module, "agree_on_use"),
}


def _interrupted(rank: int, world_size: int, stage: int, place: str, who: int, lazy: bool) -> tuple[str, list[str], bool]:
    """Train three steps; the second is interrupted on the ranks that `who` has bits for. Errors let a rank make it again."""
    model, optimizer = start(rank, Run(stage), lazy, late=False)
    owner, name = (IN_STEP | IN_BACKWARD)[place]
    param = next(model.parameters())
    call, came, said = getattr(owner, name), [False], []

    def interrupted(*arguments: Any) -> Any:
        if not came[0]:
            came[0] = True
            signal.raise_signal(signal.SIGINT)
        return call(*arguments)

    with pytest.MonkeyPatch.context() as patch:

        def arm() -> None:
            if who >> rank & 1 and done == 1:
                patch.setattr(owner, name, interrupted)

        while (done := int(optimizer.state[param]["step"])) < 3:
            try:
                if place in IN_BACKWARD:
                    arm()
                micro_steps(model, optimizer, rank, done, 1)
                arm()
                optimizer.step()
            except (KeyboardInterrupt, RuntimeError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
            patch.undo()
            optimizer.zero_grad()
    return hash_of_training(model, optimizer), said, came[0]


@pytest.mark.parametrize(
    ("stage", "place", "lazy"),
    [
        *((2, place, False) for place in IN_STEP),
        (2, "behind that", True),
        *((3, place, False) for place in IN_BACKWARD),
        (2, "as gradients leave", True),
        (2, "as ranks tell what they used", True),
    ],
)
def test_a_step_that_was_interrupted_is_made_by_all_ranks_or_by_none(stage: int, place: str, lazy: bool) -> None:
    """Whoever goes on without it is told so at once, and nobody waits for who has left."""
    expected = [hashed for hashed, *_ in run_ranks(2, _interrupted, stage, place, 0, lazy)]
    for who in (0b10, 0b11):
        results = run_ranks(2, _interrupted, stage, place, who, lazy)
        assert [hashed for hashed, *_ in results] == expected
        for rank, (_, said, came) in enumerate(results):
            assert came == bool(who >> rank & 1)
            assert said[:came] == ["KeyboardInterrupt: "] * came
            told = ("different ways", "refused the step", "a backward of rank")
            assert all(any(part in text for part in told) for text in said[came:]), said
