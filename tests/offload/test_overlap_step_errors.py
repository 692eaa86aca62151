"""The overlapped step when things go wrong: the worker fails, Ctrl-C, forks, exit; and two
models at once.
"""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from shardcore.engine.step import Updater
from shardcore.offload.overlap_step import OverlapStep
from tests.support.models import Run, assert_one, batch_of, hash_of_training, stepped
from tests.support.ranks import run_ranks
from tests.support.schedules import SlowStore, start
from tests.support.tiers import tier_with

X = batch_of(99, 0, 0)[0]


class _Failing:
    def __init__(self, owner: OverlapStep | Updater, unit: str, count: int) -> None:
        self._store, self._unit, self._left = owner.store, unit, count
        owner.store = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def steps(self, parts: Any, hypers: Any) -> Iterator[Any]:
        inner = self._store.steps(parts, hypers)
        for spans in parts:
            self._left -= bool(spans) and spans[0].bucket.unit == self._unit
            if self._left == 0:
                raise OSError("planted")
            yield next(inner)
        yield from inner


def _failing(rank: int, world_size: int, stage: int, overlap: bool) -> list[str]:
    model, optimizer = start(rank, Run(stage=stage), overlap, late=False)
    engine = optimizer._engine
    if rank == 0:
        _Failing(engine.overlap_step or engine.updater, "blocks.1", 2)
    calls: list[Callable[[], Any]] = [
        lambda: stepped(model, optimizer, rank, 0),
        lambda: stepped(model, optimizer, rank, 1),
    ]
    calls += [optimizer.step, optimizer.step, model.state_dict, optimizer.state_dict]
    if rank == 0:
        calls += [
            optimizer.synchronize,
            *([lambda: model(X), lambda: list(model.blocks[1].parameters())] if overlap else []),
        ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error} from {type(error.__cause__).__name__}")
    optimizer.zero_grad()
    return said


@pytest.mark.parametrize(("stage", "overlap"), [(0, True), (2, True), (3, True), (2, False)])
def test_an_error_on_the_way_of_a_step_surfaces_with_its_origin(stage: int, overlap: bool) -> None:
    """An overlapped step's at the next call, else at once; and no other rank waits for the
    weights that do not come.
    """
    mine, others = run_ranks(2, _failing, stage, overlap)
    assert mine[: 1 + overlap] == others[:2][: 1 + overlap] == ["nothing"] * (1 + overlap)
    for text in mine[1 + overlap :]:
        assert "StepError: step 2: updating the weights of blocks.1 failed" in text or not overlap
        assert "StepError: step: updating the weights failed on its way" in text or overlap
        assert "OSError: planted" in text
        assert text.endswith("from OSError")
    assert others[1] == "nothing"
    assert all("step: rank 0 refused: " in text for text in others[2:4])
    assert all("rank 0 refused: StepError: " in text for text in others[4:])


def test_nothing_is_updated_behind_a_gather_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cpu tier's steps go on by themselves, on a thread of their own: they have to be ended."""
    tier_with(monkeypatch, gigabytes_per_second=2e-4)  # 20 ms a unit and more
    model, optimizer = start(
        0, Run(stage=2, shard={"offload": {"optimizer": "cpu"}}), True, late=False
    )
    overlap = optimizer._engine.overlap_step
    updated: list[int] = []

    def gather(*_: Any) -> list[Any]:
        updated.append([what for what, *_ in overlap.store._pipeline.events].count("update"))
        time.sleep(0.1)
        if len(updated) == 1:
            raise OSError("planted")
        return []

    monkeypatch.setattr(overlap, "_worker_gathers", True)
    monkeypatch.setattr(overlap.comm, "all_gather", gather)
    stepped(model, optimizer, 0, 0)
    with pytest.raises(
        RuntimeError,
        match=r"updating the weights of .* failed after step.. had returned .OSError: planted",
    ):
        optimizer.synchronize()
    assert len(updated) == len(overlap.units)
    assert_one(updated[1:])


def test_an_error_at_the_end_of_a_step_is_its_error() -> None:
    """A store waits there for the last of its copies."""
    model, optimizer = start(0, Run(stage=2), True, late=False)
    steps = optimizer._engine.store.steps

    def fails_at_the_end(*arguments: Any) -> Iterator[Any]:
        yield from steps(*arguments)
        raise OSError("planted")

    optimizer._engine.overlap_step.store = type(
        "FailsAtTheEnd", (), {"steps": staticmethod(fails_at_the_end)}
    )()
    stepped(model, optimizer, 0, 0)
    with pytest.raises(RuntimeError, match=r"failed after step.. had returned .OSError: planted"):
        optimizer.synchronize()


def _fails_ahead(rank: int, world_size: int) -> list[str]:
    model, optimizer = start(rank, Run(stage=3), True, late=False)
    for step in range(2):
        stepped(model, optimizer, rank, step)
    optimizer.synchronize()
    overlap = optimizer._engine.overlap_step
    steps = overlap.store.steps

    def fails_late(parts: Any, hypers: Any) -> Iterator[Any]:
        inner = steps(parts, hypers)
        for spans in parts:
            if rank == 0 and spans[0].bucket.unit == "blocks.2":
                time.sleep(0.3)
                raise OSError("planted")
            yield next(inner)
        yield from inner

    overlap.store = type("FailsLate", (), {"steps": staticmethod(fails_late)})()
    stepped(model, optimizer, rank, 2)
    said = []
    # Rank 0's step is what rank 1 meets in its forward: with a step of its own it would be alone,
    # to the group's timeout.
    for call in (lambda: model(X), optimizer.step)[: 2 - rank]:
        try:
            call()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    return said


@pytest.mark.more
def test_a_worker_that_fails_behind_a_gather_is_an_error() -> None:
    """At stage 3 the others wait for the weights that this rank owes; at its next call they
    learn that it goes elsewhere.
    """
    mine, others = run_ranks(2, _fails_ahead)
    assert "updating the weights of blocks.2 failed" in mine[0]
    assert "ranks wait for different things, which can never end: " in others[0]
    assert "rank 1 for the weights of blocks.2" in others[0]
    assert len(mine) == 2


def test_ctrl_c_while_waiting_loses_nothing() -> None:
    expected = hash_of_training(*_steps_of(start(0, Run(stage=2), False), 3))
    model, optimizer = start(0, Run(stage=2), True, late=False)
    gate = threading.Event()
    steps = optimizer._engine.store.steps
    optimizer._engine.overlap_step.store = type(
        "Gate", (), {"steps": lambda self, *a: (gate.wait(30), steps(*a))[1]}
    )()
    stepped(model, optimizer, 0, 0)
    main = threading.main_thread().ident
    assert main is not None
    for wait in (lambda: model(X), lambda: list(model.parameters()), optimizer.step):
        timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            wait()
        timer.join()
    gate.set()
    for index in (1, 2):
        stepped(model, optimizer, 0, index)
    assert hash_of_training(model, optimizer) == expected


def _with_a_handler(rank: int, world_size: int, overlap: bool) -> tuple[str, bool]:
    """A signal handler reads all weights, as one that saves does, while the main thread waits
    for some.
    """
    model, optimizer = start(rank, Run(stage=2), overlap, late=False)
    read: list[bool] = []
    main = threading.main_thread().ident
    assert main is not None

    def handler(*_: Any) -> None:
        pending = overlap and len(optimizer._engine.overlap_step._pending) > 0
        assert list(model.parameters())
        read.append(pending and not optimizer._engine.overlap_step._pending)

    old = signal.signal(signal.SIGUSR1, handler)
    if overlap:
        SlowStore(optimizer._engine.overlap_step, 0.05)
    for step in range(3):
        stepped(model, optimizer, rank, step)
        timer = threading.Timer(0.02 * (step + 1), signal.pthread_kill, (main, signal.SIGUSR1))
        timer.start()
        model(X)
        timer.join()
    signal.signal(signal.SIGUSR1, old)
    return hash_of_training(model, optimizer), any(read)


@pytest.mark.more
def test_a_signal_handler_may_read_weights_that_are_waited_for() -> None:
    overlap, plain = run_ranks(2, _with_a_handler, True), run_ranks(2, _with_a_handler, False)
    assert [bits for bits, _ in overlap] == [bits for bits, _ in plain]
    assert all(read for _, read in overlap), "the handler ran while nothing was waited for"


def _steps_of(pair: tuple[Any, Any], steps: int) -> tuple[Any, Any]:
    for step in range(steps):
        stepped(*pair, 0, step)
    return pair


def _two(rank: int, world_size: int, overlap: bool) -> list[str]:
    pairs = [start(rank, Run(stage=stage, seed=stage), overlap, late=rank == 0) for stage in (1, 3)]
    for step in range(3):
        for pair in pairs:
            stepped(*pair, rank, step)
    return [hash_of_training(*pair) for pair in pairs]


@pytest.mark.more
def test_two_models_at_once() -> None:
    assert run_ranks(2, _two, True) == run_ranks(2, _two, False)


_SCRIPT = """
import atexit, os, sys, torch
from tests.support.schedules import SlowStore, start
from tests.support.models import Run, hash_of, stepped

plain, other = start(0, Run(stage=2), False)
for step in range(3):
    stepped(plain, other, 0, step)
    print(hash_of(plain.parameters()), flush=True)
model, optimizer = start(0, Run(stage=2), True, late=False)


def at_exit():
    print("at exit", hash_of(model.parameters()), flush=True)
    stepped(model, optimizer, 0, 2)  # no thread starts any more
    try:
        list(model.parameters())
    except RuntimeError as error:
        print(str(error)[:40], flush=True)


atexit.register(at_exit)
SlowStore(optimizer._engine.overlap_step, 0.02)
stepped(model, optimizer, 0, 0)
child = os.fork()
if child == 0:
    print("child", hash_of(model.parameters()), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
stepped(model, optimizer, 0, 1)
"""


@pytest.mark.slow
def test_fork_and_exit_with_a_step_in_flight() -> None:
    # torch's own threads do not survive a fork; Python 3.12 and newer warn of it.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore::DeprecationWarning",
    }
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second, _, *lines = done.stdout.splitlines()
    assert lines == [
        f"child {first}",
        f"at exit {second}",
        "step 3: updating the weights of the root",
    ]


def _forks_alone(rank: int, world_size: int, overlap: bool) -> str:
    model, optimizer = start(rank, Run(stage=1), overlap, late=False)
    if overlap:
        optimizer._engine.overlap_step._worker_gathers = False  # as on NCCL
    stepped(model, optimizer, rank, 0)
    if overlap and rank == 0:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    stepped(model, optimizer, rank, 1)
    return hash_of_training(model, optimizer)


def test_a_rank_that_forks_asks_no_other_to_gather() -> None:
    assert run_ranks(2, _forks_alone, True) == run_ranks(2, _forks_alone, False)


def _let_go(rank: int, world_size: int) -> tuple[bool, int]:
    """Once the step in flight, which uses the engine, is through."""
    model, optimizer = start(rank, Run(stage=2), True, late=False)
    stepped(model, optimizer, rank, 0)
    overlap = weakref.ref(optimizer._engine.overlap_step)
    dist.barrier()
    del model, optimizer
    workers, deadline = 1, time.monotonic() + 10
    while (overlap() is not None or workers) and time.monotonic() < deadline:
        gc.collect()
        workers = sum(thread.name.startswith("shardcore-step") for thread in threading.enumerate())
        time.sleep(0.01)
    return overlap() is None, workers


def test_a_model_that_is_freed_ends_its_worker() -> None:
    assert run_ranks(2, _let_go) == [(True, 0)] * 2
