"""The time of a step's parts: with a clock of the test's own, and with events of a device that
the test plays.
"""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardcore.distributed import clock as module
from shardcore.distributed.clock import PARTS, Clock

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


class Now:
    """A time that only the test moves: seconds on the CPU, and where events are recorded."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.s, self.done_s, self.capturing, self.events = 0.0, 0.0, False, 0
        patch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.s))
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))


class Event:
    def __init__(self, now: Now) -> None:
        self.now, self.s = now, -1.0
        now.events += 1

    def record(self, stream: Any) -> None:
        self.s = self.now.s

    def query(self) -> bool:
        return self.s <= self.now.done_s

    def synchronize(self) -> None:
        self.now.done_s = max(self.now.done_s, self.s)

    def elapsed_time(self, last: "Event") -> float:
        assert max(self.s, last.s) <= self.now.done_s, "read before it is over"
        return 1000.0 * (last.s - self.s)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    return Now(monkeypatch)


def step(clock: Clock, now: Now) -> None:
    """10 s: 2 forward, of which 0.5 are a gather; 1 between; 6 backward, of which 2 and 1 are
    waits; 1 optimizer.
    """
    with clock.part("forward"):
        now.s += 0.25
        with clock.part("exposed_gather"):
            now.s += 0.5
        now.s += 1.25
    now.s += 1
    clock.begin("backward")
    for wait, seconds in (("exposed_reduce", 2), ("exposed_offload", 1)):
        with clock.part(wait):
            now.s += seconds
        now.s += 1.5
    clock.end("backward")
    with clock.part("optimizer"), clock.part(None):
        now.s += 1


EXPECTED = {
    "forward": 1500.0,
    "backward": 3000.0,
    "optimizer": 1000.0,
    "exposed_reduce": 2000.0,
    "exposed_gather": 500.0,
    "exposed_offload": 1000.0,
}


class Twice(Clock):
    """A twin that counts waits in the parts around them, too."""

    def end(self, part: str) -> None:
        super().end(part)
        self._over = type(self._over)(
            (name, None, first, last) for name, _, first, last in self._over
        )


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("kind", [Clock, Twice])
def test_each_part_has_its_own_time(kind: type[Clock], device: torch.device, now: Now) -> None:
    clock = kind()
    clock.start(device)
    step(clock, now)
    first = clock.totals()
    assert tuple(first) == PARTS
    assert (first == EXPECTED) == (kind is Clock)
    assert (sum(first.values()) == 9000.0) == (kind is Clock), "the time in any part"
    step(clock, now)
    assert clock.totals() == {part: 2 * ms for part, ms in first.items()}


def test_nothing_is_measured_before_it_is_asked_for(now: Now) -> None:
    clock = Clock()
    step(clock, now)
    assert not any(clock.totals().values())


def test_a_part_that_an_error_left_open_is_forgotten(now: Now) -> None:
    clock = Clock()
    clock.start(CPU)
    clock.begin("forward")
    clock.begin("exposed_gather")  # neither ends
    now.s += 100
    step(clock, now)
    assert clock.totals() == EXPECTED
    clock.end("backward")  # nor does this begin
    with suppress(KeyError), clock.part("optimizer"):
        clock.begin("exposed_gather")
        now.s += 1
        raise KeyError
    assert clock.totals() == EXPECTED | {"optimizer": 2000.0}


def test_events_are_read_when_they_are_over_and_used_again(now: Now) -> None:
    clock = Clock()
    clock.start(CUDA)
    for _ in range(50):
        step(clock, now)
        # the device is a step behind: an event that is read too early fails
        now.done_s = now.s - 10
    assert now.events <= 4 * 2 * len(PARTS)
    assert clock.totals() == {part: 50 * ms for part, ms in EXPECTED.items()}


def test_a_step_that_is_captured_is_not_timed(now: Now) -> None:
    clock = Clock()
    clock.start(CUDA)
    now.capturing = True
    step(clock, now)
    now.capturing = False
    assert not any(clock.totals().values())
    clock.begin("forward")
    now.capturing = True
    clock.end("forward")
    assert not any(clock.totals().values())
    assert now.events == 1
