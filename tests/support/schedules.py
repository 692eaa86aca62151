"""Schedules of the overlapped step's worker that tests choose, so that a wait that is missing
shows in the bits.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

from shardcore.engine.units import UnitState
from shardcore.engine.unshard import Unsharder
from shardcore.offload.cpu_store import CpuStore
from shardcore.offload.overlap_step import OverlapStep
from tests.support.models import Run, train


class _OnTheWorker:
    """An OffloadPipeline whose steps are made when someone waits for them."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def begin(self, chunks: Any, grads: Any, hypers: Any, num_threads: int, **options: Any) -> None:
        self._pipeline.begin(chunks, grads, hypers, 0, **options)


class LateStore:
    """A store on whose worker a bucket is updated only when someone waits for it, or for one
    behind it: as late as allowed.
    """

    def __init__(self, overlap: OverlapStep) -> None:
        self._overlap, self._store, self._wait = overlap, overlap.store, overlap._wait_for_adam
        self._allowed: dict[int, threading.Event] = {}
        store = overlap.store
        if isinstance(store, CpuStore):
            store._pipeline = _OnTheWorker(store._pipeline)  # type: ignore[assignment]
        overlap.store = self  # type: ignore[assignment]
        overlap._wait_for_adam = self._waited  # type: ignore[method-assign]

    def _event(self, update: Any) -> threading.Event:
        return self._allowed.setdefault(id(update), threading.Event())

    def _waited(self, update: Any) -> None:
        for other in self._overlap._pending.values():
            self._event(other.spans).set()
            if other is update:
                break
        self._wait(update)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def steps(self, parts: Any, hypers: Any) -> Iterator[Any]:
        inner = self._store.steps(parts, hypers)
        for spans in parts:
            if threading.current_thread() is not threading.main_thread():
                assert self._event(spans).wait(30), "nobody waited"
                del self._allowed[id(spans)]
            yield next(inner)
        yield from inner


class SlowStore:
    """A store on whose worker each bucket takes a while."""

    def __init__(self, overlap: OverlapStep, seconds: float = 0.02) -> None:
        self._store, self._seconds = overlap.store, seconds
        overlap.store = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def steps(self, parts: Any, hypers: Any) -> Iterator[Any]:
        for left in self._store.steps(parts, hypers):
            time.sleep(self._seconds)
            yield left


def start(
    rank: int, run: Run, overlap: bool, late: bool = True, model: nn.Module | None = None
) -> tuple[Any, Any]:
    """Shard a model without training it."""
    run = Run(**{**vars(run), "steps": 0, "shard": {**run.shard, "overlap_step": overlap}})
    model, optimizer, _ = train(rank, run, model)
    if overlap and late:
        LateStore(optimizer._engine.overlap_step)
    return model, optimizer


@contextmanager
def recording() -> Iterator[list[str]]:
    """Note which units are gathered (+) and resharded (-), in order."""
    events: list[str] = []
    start, close = Unsharder._start, Unsharder._reshard

    def logged_start(weights: Unsharder, unit: Any) -> None:
        if unit.state is UnitState.SHARDED:
            events.append(f"+{unit.name or 'root'}")
        start(weights, unit)

    def logged_close(weights: Unsharder, unit: Any, keep: bool = False) -> None:
        was = unit.state is not UnitState.SHARDED
        close(weights, unit, keep)
        if was and unit.state is not UnitState.UNSHARDED:
            events.append(f"-{unit.name or 'root'}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unsharder, "_start", logged_start)
        patch.setattr(Unsharder, "_reshard", logged_close)
        yield events
