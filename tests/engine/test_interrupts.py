"""Ctrl-C in the middle of a step: the step is whole on every rank, and the interrupt comes at its end."""

import signal
from typing import Any

import pytest

from shardcore.engine.reducer import Reducer
from shardcore.engine.state_store import DeviceStore
from shardcore.engine.step import Updater
from tests.engine.late import micro_steps, start
from tests.engine.models import Run, hash_of_training
from tests.ranks import run_ranks

IN_STEP: dict[str, tuple[Any, str]] = {
    "before it is decided": (Reducer, "reduce_pending"),
    "as it is decided": (Updater, "decide"),
    "while the weights change": (DeviceStore, "step"),
    "behind that": (Updater, "count"),
}


def _interrupted(rank: int, world_size: int, stage: int, place: str, who: int, lazy: bool) -> tuple[str, int]:
    """Train two steps; in the first one rank `who` is interrupted, and goes on."""
    model, optimizer = start(rank, Run(stage), lazy, late=False)
    owner, name = IN_STEP[place]
    call, came = getattr(owner, name), [0]

    def interrupted(*arguments: Any) -> Any:
        if rank == who and not came[0]:
            came[0] += 1
            signal.raise_signal(signal.SIGINT)
        return call(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        for step in range(2):
            micro_steps(model, optimizer, rank, step, 1)
            try:
                optimizer.step()
            except KeyboardInterrupt:
                came[0] += 1
            optimizer.zero_grad()
    return hash_of_training(model, optimizer), came[0]


@pytest.mark.parametrize(
    ("stage", "place", "lazy"),
    [*((2, place, False) for place in IN_STEP), (2, "as it is decided", True), (3, "behind that", True)],
)
def test_a_step_that_is_interrupted_is_whole(stage: int, place: str, lazy: bool) -> None:
    expected = [hashed for hashed, _ in run_ranks(2, _interrupted, stage, place, -1, lazy)]
    (first, none), (second, came) = run_ranks(2, _interrupted, stage, place, 1, lazy)
    assert [first, second] == expected
    assert (none, came) == (0, 2), "raised once, and passed on once"
