"""What streams wait for in an overlapped step, seen without a GPU."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.engine.late import start
from tests.engine.models import Run, batch_of, loss_of


class _Streams:
    """Stands in for torch.cuda: writes down what streams wait for, a current stream for each thread as torch has."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._current = threading.local()

    def current_stream(self, device: Any = None) -> "_Stream":
        return getattr(self._current, "stream", None) or _Stream(self, threading.current_thread().name)

    @contextmanager
    def stream(self, stream: "_Stream") -> Iterator[None]:
        self._current.stream = stream
        yield
        self._current.stream = None

    def event(self) -> Any:
        streams = self

        class Event:
            def record(self, stream: "_Stream") -> None:
                self.after = f"{stream.name} after {streams.log[-1]}"

        return Event()


class _Stream:
    def __init__(self, streams: _Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_event(self, event: Any) -> None:
        self.streams.log.append(f"{self.name} waits for {event.after}")


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's for what step() was called after, and that of who reads for each bucket; no GPU is needed to see it."""
    streams = _Streams()
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    monkeypatch.setattr(torch.cuda, "Event", streams.event)
    _, optimizer = start(0, Run(stage=2, shard={"units": 10**9}), True, late=False)
    engine = optimizer._engine
    lazy, steps = engine.overlap_step, engine.store.steps
    lazy._stream = _Stream(streams, "worker")

    def logged(parts: Any, hypers: Any) -> Iterator[Any]:
        for left in steps(parts, hypers):
            streams.log.append(f"adam on {streams.current_stream().name}")
            yield left

    lazy.store = type("Logged", (), {"steps": staticmethod(logged)})()
    loss_of(engine.model, batch_of(0, 0, 0)).backward()
    streams.log.append("backward")
    optimizer.step()
    optimizer.synchronize()
    assert streams.log == [
        "backward",
        "worker waits for MainThread after backward",
        "adam on worker",
        "MainThread waits for worker after adam on worker",
    ]
