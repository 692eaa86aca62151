"""Steps that the device decides on (tests/support/groups.py): overflows, what ranks refuse,
states, initialize's scheduler.
"""

import copy
import pickle
import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.engine.device_step import PendingResult, StepResult
from tests.support.groups import LIVELY, PATIENT, RUNS, device_decides, lines_logged, said_of
from tests.support.models import Run, batch_of, hash_of_training, loss_of, make_net, stepped, train
from tests.support.ranks import run_ranks

# --- overflows ------------------------------------------------------------------------------------


def _at_the_minimum(
    rank: int, world_size: int, late: list[bool]
) -> tuple[list[str], bool, int, str]:
    options = shardcore.LossScale(initial_power=1, hysteresis=1)
    with device_decides(late[rank]):
        model, optimizer, _ = train(
            rank, Run(precision="fp16", steps=0, shard={"loss_scale": options})
        )
        before, found = hash_of_training(model, optimizer), []
        for step in range(5):
            x, y = batch_of(step, 0, rank)
            optimizer.scale_loss(
                loss_of(model, (x / 0 if rank == 1 and step < 2 else x, y))
            ).backward()
            try:
                optimizer.step()
                found.append("stepped")
            except RuntimeError as error:
                found.append(str(error))
            optimizer.zero_grad()
            if step == 2:
                same = hash_of_training(model, optimizer) == before
        return found, same, optimizer.skipped_steps, optimizer.state_dict()["loss_scale"]


@pytest.mark.cases(2)
@pytest.mark.parametrize("late", [[False, False], [False, True], [True, False]])
def test_at_the_minimum_the_next_step_is_refused_on_every_rank(late: list[bool]) -> None:
    """Even if only one rank has the norm by then."""
    first, second = run_ranks(2, _at_the_minimum, late)
    assert first == second
    found, same, skipped, _ = first
    assert [text == "stepped" for text in found] == [True, True, False, True, True]
    assert (
        "gradients are not finite though the loss scale is at its minimum, 1; nothing was updated"
        in found[2]
    )
    assert (same, skipped) == (True, 2)


def _refuses(rank: int, world_size: int) -> tuple[list[str], bool, bool]:
    with device_decides():
        model, optimizer, _ = train(
            rank, Run(precision="fp16", steps=3, shard={"loss_scale": LIVELY})
        )
        before, found = hash_of_training(model, optimizer), []
        for attempt in range(3):
            optimizer.scale_loss(loss_of(model, batch_of(attempt, 0, rank))).backward()
            try:
                optimizer.step(
                    max_norm=-1.0
                    if attempt == 0 and rank == 1
                    else (None, 1.0 + rank, 1.0)[attempt]
                )
                found.append("stepped")
            except ValueError as error:
                found.append(str(error))
            optimizer.zero_grad()
            if attempt == 1:
                same = hash_of_training(model, optimizer) == before
        return found, same, hash_of_training(model, optimizer) != before


def test_what_a_rank_refuses_is_an_error_at_once() -> None:
    first, second = run_ranks(2, _refuses)
    assert "step: rank 1 refused: " in first[0][0]
    assert "max_norm is -1.0" in second[0][0]
    for found, same, changed in (first, second):
        assert "max_norm is 2.0 on rank 1 but 1.0 on rank 0; expected the same" in found[1]
        assert (found[2], same, changed) == ("stepped", True, True)


def _one_learns_later(rank: int, world_size: int) -> tuple[Any, ...]:
    with device_decides(late=rank == 0):
        return said_of(*train(rank, RUNS["fp16"])[:2])


def test_ranks_may_learn_at_different_times() -> None:
    expected = run_ranks(2, _one_learns_later)
    assert expected[0] == expected[1]


def _differs(rank: int, world_size: int, what: str) -> str:
    with device_decides():
        model, optimizer, _ = train(
            rank, Run(precision="fp16", steps=2, shard={"loss_scale": LIVELY})
        )
        if what == "scale":
            state = optimizer.state_dict()
            optimizer.load_state_dict(
                state | {"loss_scale": state["loss_scale"] | {"scale": 4.0 + rank}}
            )
        elif rank == 1:
            next(iter(optimizer._engine.managed.values())).tried += 1
        optimizer.scale_loss(loss_of(model, batch_of(2, 0, rank))).backward()
        with pytest.raises(ValueError) as error:
            optimizer.step()
        return str(error.value)


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("count", ["is at step 3 on rank 1"]),
        ("scale", ["the optimizer state is loaded", "'scale': 5.0"]),
    ],
)
def test_ranks_that_count_or_scale_differently_are_refused(what: str, texts: list[str]) -> None:
    assert all(part in said for said in run_ranks(2, _differs, what) for part in texts)


# --- state, losses, initialize --------------------------------------------------------------------


def _resume(rank: int, world_size: int, stage: int, forced: tuple[bool, bool]) -> bool:
    """Whether going on from a state dict is the same as not to have stopped; saved and loaded by
    either kind of steps.
    """
    run = Run(stage=stage, precision="fp16", steps=5, shard={"loss_scale": PATIENT})
    found = []
    for first, second in ((forced[0], None), forced):
        with device_decides(forced=first):
            model, optimizer, _ = train(rank, run)
        if second is not None:
            weights, saved = model.state_dict(), optimizer.state_dict()
            with device_decides(forced=second):
                # of which nobody asked
                model, optimizer, _ = train(rank, Run(**{**vars(run), "steps": 2}), make_net(7))
            model.load_state_dict(weights)
            optimizer.load_state_dict(saved)
        for step in range(5, 9):
            stepped(model, optimizer, rank, step)
        said = said_of(model, optimizer)
        found.append((said[0], said[1], *said[3:]))  # skipped_steps are no part of the state
    return found[0] == found[1]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "forced"), [(0, (True, True)), (2, (False, True)), (3, (True, False))]
)
def test_state_dicts_go_both_ways(stage: int, forced: tuple[bool, bool]) -> None:
    assert run_ranks(2, _resume, stage, forced) == [True, True]


def test_a_scaled_loss_may_be_used_after_a_step_if_the_scale_stayed() -> None:
    for options, error in (
        (shardcore.LossScale(initial_power=4, window=100), ""),
        (LIVELY, "without the scale"),
    ):
        with device_decides():
            model, optimizer, _ = train(
                0, Run(stage=1, precision="fp16", steps=0, shard={"loss_scale": options})
            )
            x = torch.ones(4, 10, requires_grad=True)
            early = optimizer.scale_loss(loss_of(nn.Linear(10, 5), (x, torch.ones(4, 5))))
            stepped(model, optimizer, 0, 0)
            late = loss_of(model, batch_of(1, 0, 0)) + 0.0 * early
            late.backward()
            if error:
                with pytest.raises(ValueError, match=error):
                    optimizer.step()
            else:
                optimizer.step()


def test_a_loss_scaled_before_another_scale_was_loaded_is_refused() -> None:
    with device_decides():
        model, optimizer, _ = train(
            0, Run(stage=1, precision="fp16", steps=1, shard={"loss_scale": PATIENT})
        )
        state = optimizer.state_dict()
        state["loss_scale"] = state["loss_scale"] | {"scale": 4.0}
        early = optimizer.scale_loss(loss_of(model, batch_of(1, 0, 0)))
        optimizer.load_state_dict(state)
        early.backward()
        with pytest.raises(ValueError, match="a loss without the scale 4;"):
            optimizer.step()


def _loads_after_the_minimum(rank: int, world_size: int) -> tuple[Any, ...]:
    with device_decides():
        options = shardcore.LossScale(initial_power=0, hysteresis=1)
        model, optimizer, _ = train(
            rank, Run(stage=1, precision="fp16", steps=1, shard={"loss_scale": options})
        )
        weights, state = model.state_dict(), optimizer.state_dict()
        with lines_logged() as messages:
            for step, factor in enumerate((float("inf"), 1.0)):
                x, y = batch_of(step, 0, rank)
                optimizer.scale_loss(loss_of(model, (x * factor, y))).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    model.load_state_dict(weights)
                    optimizer.load_state_dict(state)
        return messages, optimizer.state_dict()["state"][0]["step"].item()


def test_an_error_of_before_a_load_is_logged_and_refuses_no_step() -> None:
    for messages, steps in run_ranks(2, _loads_after_the_minimum):
        assert steps == 2
        assert len(messages) == 1
        assert "though the loss scale is at its minimum, 1; nothing was updated" in messages[0]
        assert messages[0].endswith("(before load_state_dict)")


def _asks_again(optimizer: Any) -> None:
    """Read a count while a norm is waited for, as the handler of a signal may."""
    wait, nested = PendingResult.result, [True]

    def waits(pending: PendingResult) -> StepResult:
        norm = wait(pending)
        if nested:
            nested.clear()
            assert optimizer.skipped_steps > 0
        return norm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingResult, "result", waits)
        assert optimizer.skipped_steps > 0


def _asks_from_two_threads(optimizer: Any) -> None:
    wait, both, found = PendingResult.result, threading.Barrier(2), list[int]()

    def waits(pending: PendingResult) -> StepResult:
        with suppress(threading.BrokenBarrierError):  # one waits at a time
            both.wait(0.2)
        return wait(pending)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PendingResult, "result", waits)
        threads = [
            threading.Thread(target=lambda: found.append(optimizer.skipped_steps)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 2
    assert found[0] == found[1]


@pytest.mark.parametrize("ask", [_asks_again, _asks_from_two_threads])
def test_whoever_asks_first_the_others_learn_the_same(ask: Any) -> None:
    expected = said_of(*train(0, RUNS["fp16"])[:2])
    with device_decides():
        model, optimizer, _ = train(0, RUNS["fp16"])
        ask(optimizer)
        assert said_of(model, optimizer) == expected


@pytest.mark.parametrize("made", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_a_copy_of_the_states_is_what_they_show(made: Any) -> None:
    with device_decides():
        _, optimizer, _ = train(0, Run(steps=2))
        assert [entry["step"].item() for entry in made(optimizer.state).values()] == [2] * len(
            optimizer.state
        )


FP16 = {
    "enabled": True,
    "auto_cast": True,
    "initial_scale_power": 18,
    "loss_scale_window": 2,
    "hysteresis": 1,
}


def _initialize(rank: int, world_size: int, forced: bool, scheduler: bool) -> tuple[Any, ...]:
    with device_decides(forced=forced) as waits:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "fp16": FP16,
        }
        engine, optimizer, _, _ = shardcore.initialize(
            model=make_net(),
            config=config,
            lr_scheduler=(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
            if scheduler
            else None,
        )
        rates = []
        for micro_step in range(12):
            x, y = batch_of(micro_step // 2, micro_step % 2, rank)
            engine.backward(((engine(x).float() - y) ** 2).mean())
            engine.step()
            rates.append(engine.get_lr()[0])
        waited = waits.count
        said = engine.skipped_steps, engine.get_global_grad_norm(), engine.global_steps, rates
        return hash_of_training(engine, optimizer), *said, waited


@pytest.mark.cases(1)
@pytest.mark.parametrize("scheduler", [True, False])
def test_a_scheduler_of_initialize_stays_behind_at_an_overflow(scheduler: bool) -> None:
    host, device = (run_ranks(2, _initialize, forced, scheduler)[0] for forced in (False, True))
    assert host[:-1] == device[:-1]
    skipped, rates = device[1], device[4]
    assert 0 < skipped < 6
    assert rates[-1] == 1e-2 * 0.5 ** (6 - skipped if scheduler else 0)
    assert device[-1] == (6 if scheduler else 0), "only a scheduler asks"
