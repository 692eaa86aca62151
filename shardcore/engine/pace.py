"""How large a share of a step the CPU can take while a forward pass runs: measured in the first steps, agreed by all ranks.

Note [Choosing a share]: of a step in which the CPU takes all, `step_s` seconds go for its Adam and the copies around it, until
the last weights are back; a forward takes `forward_s`. So the CPU's share may be forward_s / step_s: the rest, on the device,
is the least that hides the CPU's part. The least of all ranks' shares counts. What the device then keeps must fit the limit
that was given, else the CPU takes more than it can hide. No share changes a bit, so a measurement may choose it.
Neither Adam nor the link is timed alone: what counts is what both take here, overlapped as they are, with all ranks at work.
"""

import logging
import time
from collections.abc import Callable

import torch

from shardcore.comm import Comm, Traffic

logger = logging.getLogger("shardcore")

MEASURED_STEPS = 3  # the first is not counted: it takes memory, and caches are cold
_STEPS_OF_ONE = 64  # shares are multiples of 1 / 64


def choose_ratio(affordable: float, limit_bytes: int, device_bytes: Callable[[float], int]) -> float:
    """Return the largest share of at most `affordable` that leaves no more than `limit_bytes` on the device, else the least."""
    steps = int(min(1.0, max(0.0, affordable)) * _STEPS_OF_ONE)
    while steps < _STEPS_OF_ONE and device_bytes(steps / _STEPS_OF_ONE) > limit_bytes:
        steps += 1
    return steps / _STEPS_OF_ONE


class Pace:
    """Times forwards and steps until it has chosen a ratio, which `take` gives once."""

    def __init__(
        self,
        comm: Comm,
        device: torch.device,
        spent_s: Callable[[], float],
        limit_bytes: int,
        device_bytes: Callable[[float], int],
    ) -> None:
        """Choose for all ranks of `comm`. spent_s: seconds of all steps so far; the rest: see choose_ratio."""
        self._comm, self._device, self._spent_s = comm, device, spent_s
        self._limit_bytes, self._device_bytes = limit_bytes, device_bytes
        self.updated = False  # the last step updated the weights
        self._steps = 0
        self._before_s = 0.0
        self._forward_s, self._step_s = float("inf"), float("inf")
        self._begun: float | torch.cuda.Event | None = None
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._chosen: float | None = None

    @property
    def measures(self) -> bool:
        """Whether the next forward is timed. No step may be under way beside it: its waits would count as forward."""
        return 0 < self._steps < MEASURED_STEPS

    def begin_forward(self) -> None:
        """Learn that a forward of the whole model begins."""
        self._begun = self._now() if self.measures else None

    def end_forward(self) -> None:
        """Learn that it ends."""
        begun, self._begun = self._begun, None
        if isinstance(begun, float):
            self._forward_s = min(self._forward_s, time.perf_counter() - begun)
        elif begun is not None:
            self._pairs.append((begun, self._event()))

    def begin_step(self) -> None:
        """Learn that a step begins, and all before it are complete. Collective where the ratio is chosen."""
        if not self.updated:  # the last step was skipped, on every rank
            return
        self.updated = False
        spent_s = self._spent_s()
        took_s, self._before_s = spent_s - self._before_s, spent_s
        if self.measures:
            self._step_s = min(self._step_s, took_s)
        self._steps += 1
        if self._steps != MEASURED_STEPS:
            return
        for begun, ended in self._pairs:
            ended.synchronize()
            self._forward_s = min(self._forward_s, begun.elapsed_time(ended) / 1e3)
        self._pairs.clear()
        times = torch.tensor([self._forward_s, self._step_s], dtype=torch.float64, device="cpu")
        rows = self._comm.tell(times, Traffic.STEP, "a step").tolist()
        affordable = min(forward_s / step_s if step_s > 0 else 1.0 for forward_s, step_s in rows)  # 0: the step failed
        self._chosen = choose_ratio(affordable, self._limit_bytes, self._device_bytes)
        if self._comm.rank == 0:
            kept = self._device_bytes(self._chosen)
            logger.info(
                'offload: "auto" chose the ratio %g: forwards of the ranks take %s ms, steps on the CPU %s; the device keeps '
                "%d bytes of states (of at most %d)%s",
                self._chosen,
                *(", ".join(f"{1e3 * row[i]:.1f}" for row in rows) for i in (0, 1)),
                kept,
                self._limit_bytes,
                "" if self._chosen <= affordable else "; the CPU's part is longer than a forward",
            )

    def take(self) -> float | None:
        """Return the ratio that was chosen, once."""
        chosen, self._chosen = self._chosen, None
        return chosen

    def _now(self) -> "float | torch.cuda.Event":
        return self._event() if self._device.type == "cuda" else time.perf_counter()

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
