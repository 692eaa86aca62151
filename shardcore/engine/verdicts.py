"""What becomes of a step: decided on the device where it can be, and learned of on the host.

Note [Verdicts]: where nothing of a step lies in host memory, the host does not wait for the norm. The device adds the squares
of all ranks, decides (clip coefficient, or skip), makes the scalars of Adam from its own step counts and moves its loss scale
(csrc/adam/step_verdict.h). The host gets the norm alone, later, and then does what it does where it decides itself: the same
rule from the same number, so both stay the same to the bit. At each step it looks for norms that have come, and it waits for
them where someone asks for what they say: `Outcomes.settle`. Any thread may ask, but not while a step is planned from what
they say: that holds `Outcomes.lock`.
Note [Counts]: until then the host does not know which steps counted. `Managed.pending` has a bit for each of them in which
the parameter had a gradient, and the device has the bits of those that were not skipped. What is in both is added to
`Managed.step`: so parameters with equal bits have equal scalars. A word has 64 bits, and the host is never further behind.
"""

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from shardcore._native import _C
from shardcore.comm import Comm
from shardcore.engine.bucket import Managed
from shardcore.engine.loss_scale import LossScaler

logger = logging.getLogger("shardcore")

_STEPS = 64  # of which the device knows whether they counted


def decides_on_device(device: torch.device, tier: str, comm: Comm, lazy: bool) -> bool:
    """Whether a step needs nothing of the host: states on the device, and ranks that agree without it (Comm.tell_device)."""
    return device.type == "cuda" and tier == "device" and not lazy and comm.tell_device.type == "cpu"


class Arrival:
    """One number on its way to the host, which may read it when it is `here`, or wait for it."""

    def __init__(self, value: torch.Tensor) -> None:
        """Send `value` (float64, one element) as it is now, in stream order."""
        self._event: torch.cuda.Event | None = None
        self._host = torch.empty((), dtype=torch.float64, device="cpu", pin_memory=value.is_cuda)
        self._host.copy_(value, non_blocking=True)
        if value.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(value.device))

    @property
    def here(self) -> bool:
        """Whether `wait` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> float:
        """Return the number."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.item()


class DeviceVerdicts:
    """The verdicts on one model's steps, in the memory of its device. See Note [Verdicts]."""

    def __init__(self, device: torch.device, ranks: int, scaler: LossScaler) -> None:
        """Decide for `ranks`, and move the loss scale in place of `scaler`, which follows later."""
        self._words = torch.zeros(8, dtype=torch.int64, device=device)  # csrc/adam/step_verdict.h says what each is
        floats = self._words.view(torch.float64)
        self._norm, self._ranks, self._scaler = floats[5], ranks, scaler
        self._steps = 0
        if scaler.options is not None:
            scaler.live, scaler.live_unscale = floats[0], floats[3]
            self.take_scale()

    def take_scale(self) -> None:
        """Go on from the scale that the host knows, if it moves."""
        if self._scaler.options is None:
            return
        words = torch.zeros(4, dtype=torch.int64, device="cpu")
        words[1], words[2] = self._scaler.stable_steps, self._scaler.hysteresis_left
        floats = words.view(torch.float64)
        floats[0], floats[3] = self._scaler.scale, 1.0 / (self._ranks * self._scaler.scale)
        self._words[:4].copy_(words)

    def decide(
        self,
        squares: torch.Tensor,
        hypers: Sequence[_C.AdamHyper],
        since: Sequence[int],
        grad_scale: float,
        max_norm: float | None,
    ) -> tuple["_C.DeviceScalars", "Outcome"]:
        """Queue the verdict on a step; returns the scalars of `hypers`, and what will tell the host.

        squares: (n, 2) float64 on the device, of each rank's gradients. since: Managed.pending of what each hyper updates.
        """
        number = self._steps % _STEPS
        self._steps += 1
        scalars = _C.step_verdict(
            squares,
            hypers,
            since,
            self._words,
            grad_scale=grad_scale,
            max_norm=max_norm,
            number=number,
            ranks=self._ranks,
            rule=self._scaler.rule,
        )
        return scalars, Outcome(Arrival(self._norm), 1 << number)


def verdicts_for(device: torch.device, tier: str, comm: Comm, lazy: bool, scaler: LossScaler) -> DeviceVerdicts | None:
    """Return what decides on steps on the device, or None where the host does."""
    return DeviceVerdicts(device, comm.world_size, scaler) if decides_on_device(device, tier, comm, lazy) else None


@dataclass(frozen=True)
class Outcome:
    """What the host will learn of a step: the norm, which says all. bit: of the step (Note [Counts])."""

    norm: Arrival
    bit: int


class Outcomes:
    """Learns what became of steps, in their order: counts, loss scale, log."""

    def __init__(self, optimizer: Any, scaler: LossScaler, late: bool) -> None:
        """Count skipped steps in `optimizer`. late: outcomes come after their steps, so that any thread may be first to ask."""
        self.lock = threading.RLock() if late else nullcontext()
        self._optimizer, self._scaler = weakref.ref(optimizer), scaler
        self._coming: deque[tuple[Outcome, Sequence[Managed]]] = deque()
        self._late: RuntimeError | None = None
        self.last_norm: float | None = None

    def add(self, outcome: "float | Outcome", updated: Sequence[Managed]) -> None:
        """Learn that a step has been made that updates `updated`, unless the norm says no.

        outcome: the norm, if the host knows it by now: then RuntimeError if the loss scale would fall below its minimum.
        """
        if isinstance(outcome, float):
            self._learn(outcome, updated)
            return
        for managed in updated:
            managed.pending |= outcome.bit
        self._coming.append((outcome, updated))
        if len(self._coming) == _STEPS:
            self._learn_next()

    def poll(self) -> None:
        """Learn of what has come."""
        with self.lock:
            while self._coming and self._coming[0][0].norm.here:
                self._learn_next()

    def settle(self) -> None:
        """Learn of all steps so far. Waits for the device."""
        with self.lock:
            while self._coming:
                self._learn_next()

    def raise_late(self) -> None:
        """Raise what `add` would have raised by itself, if the norm had been there."""
        late, self._late = self._late, None
        if late is not None:
            raise late

    def forget_late(self) -> None:
        """Log what `raise_late` would raise: it is of a state in whose place another was loaded."""
        if self._late is not None:
            logger.warning("%s (before load_state_dict)", self._late)
        self._late = None

    def _learn_next(self) -> None:
        outcome, updated = self._coming[0]
        norm = outcome.norm.wait()  # may be interrupted, also by a signal handler that asks itself, and has learned this then
        if not self._coming or self._coming[0][0] is not outcome:
            return
        self._coming.popleft()
        for managed in updated:
            managed.pending &= ~outcome.bit
        try:
            self._learn(norm, updated)
        except RuntimeError as error:
            self._late = self._late or error

    def _learn(self, norm: float, updated: Sequence[Managed]) -> None:
        self.last_norm = norm
        if math.isfinite(norm):
            for managed in updated:
                managed.step += 1
            self._scaler.after_update()
            return
        for managed in updated:
            managed.skips += 1
        optimizer = self._optimizer()
        skipped = "not counted, as the optimizer is gone" if optimizer is None else optimizer._count_skip()
        logger.warning(
            "step: the global gradient norm is %s; nothing was updated on any rank (skipped steps so far: %s)%s",
            norm,
            skipped,
            self._scaler.after_overflow(),
        )
