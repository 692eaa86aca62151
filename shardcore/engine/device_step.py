"""The outcome of a step: decided on the device where it can be, and read by the host.

Note [Device steps]: where a step uses no host memory, the host does not wait for the norm. The
device adds the squared norms of all ranks, decides (clip coefficient, or skip), counts each
parameter's steps, computes the scalars of Adam from the counts and updates the loss scale
(csrc/adam/device_step.h). These values stay on the device. Each step also copies its result to the
host, which reads it at a later step once the copy is done, or waits for it when a value is needed
(`DeviceOutcomes.settle`). Replays of a CUDA graph run no Python, so once a graph is captured
`settle` reads the values from the device.
Note [Cohorts]: a step is planned on the host, which does not know the counts. Parameters with equal
`Managed.cohort` have equal counts: they had equal ones once, and were updated by the same steps
since. So they share the scalars of a step. Those parameters of a cohort that a step updates become
a new cohort.
Note [Late results]: a skipped step is logged by a later step or read. The error at the minimum loss
scale is raised by a later step, on every rank; after the last step no call raises it, and
`load_state_dict` logs it. A skipped step moves the version counters of parameters, as the host does
not know that nothing was written. `initialize` with a scheduler waits for each step, since the
scheduler must not advance at an overflow.
Note [Captured iterations]: with capturable=True one rank can capture forward, backward and step in
one CUDA graph, after one iteration without it, which allocates the memory. Several ranks cannot,
since they compare over the host. Nor can offload, whose step runs on the host.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from shardcore._native import _C
from shardcore.distributed.comm import Comm
from shardcore.engine.bucket import Managed
from shardcore.engine.loss_scale import LossScaler
from shardcore.optim.group_options import capturing, hyper_of
from shardcore.optim.tensor_lists import DeviceScale, DeviceState

logger = logging.getLogger("shardcore")

_WORDS = 6


def decides_on_device(
    device: torch.device, tier: str, comm: Comm, overlap_step: bool, capturable: bool
) -> bool:
    """Whether a step is decided on the device: if `capturable`, or on CUDA if ranks compare
    their calls on the CPU.
    """
    if overlap_step or tier != "device":
        return False
    on_cpu = all(one.compare_device.type == "cpu" for one in (comm, *comm.across))
    return capturable or (device.type == "cuda" and on_cpu)


class StepResult(NamedTuple):
    """The result of a step on the device: see DeviceState."""

    scale: tuple[float, int, int]
    norm: float
    skipped: int


def _result(words: torch.Tensor) -> StepResult:
    floats = words.view(torch.float64)
    return StepResult(
        (floats[0].item(), int(words[1]), int(words[2])), floats[4].item(), int(words[5])
    )


class PendingResult:
    """A copy to the host of a step's result on the device."""

    def __init__(self, words: torch.Tensor) -> None:
        """Queue the copy of the words as they are now, in stream order."""
        self._event: torch.cuda.Event | None = None
        self._host = torch.empty(
            words.shape, dtype=torch.int64, device="cpu", pin_memory=words.is_cuda
        )
        self._host.copy_(words, non_blocking=True)
        if words.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(words.device))

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        """Wait for the copy; returns what was copied."""
        if self._event is not None:
            self._event.synchronize()
        return _result(self._host)


class DeviceStep:
    """The decisions on one model's steps and their counts, in the memory of its device. See Note
    [Device steps].
    """

    def __init__(
        self, device: torch.device, ranks: int, scaler: LossScaler, params: Sequence[Managed]
    ) -> None:
        """Decide for `ranks` ranks, count the steps of `params`, and update the loss scale of
        `scaler`.
        """
        self._memory = torch.zeros(_WORDS + len(params) + 1, dtype=torch.int64, device=device)
        self.state = DeviceState(self._memory[:_WORDS])
        self._counter = dict(zip(params, self._memory[_WORDS:-1].unbind(), strict=True))
        self._device, self.ranks, self._scaler = device, ranks, scaler
        self._cohorts = itertools.count(-1, -1)  # loaded counts name cohorts as well
        self._counted = False  # counts changed since the host read them
        # a graph was captured, so that the host does not know how many steps there were
        self.replayed = False
        if scaler.options is not None:
            floats = self.state.words.view(torch.float64)
            scaler.live, scaler.live_unscale = floats[0], floats[3]

    def load(self) -> None:
        """Copy the host's loss scale and counts to the device, after a state was loaded."""
        memory = self._memory.cpu()
        floats = memory.view(torch.float64)
        floats[0], memory[1], memory[2] = self._scaler.state_now
        floats[3] = 1.0 / (self.ranks * self._scaler.scale)
        for index, managed in enumerate(self._counter, _WORDS):
            memory[index] = managed.tried = managed.cohort = managed.step
        self._memory.copy_(memory)

    def decide(
        self,
        squares: torch.Tensor,
        updated: Sequence[Managed],
        groups: Sequence[Mapping[str, Any]],
        scale: "float | DeviceScale",
        max_norm: float | None,
    ) -> tuple["_C.DeviceScalars", PendingResult | None]:
        """Queue the decision on a step; returns the scalars of each of `updated`, and the copy of
        the result.

        squares: (n, 2) float64 on the device, of each rank's gradients. scale: multiplies these.
        """
        if not isinstance(scale, DeviceScale):
            scale = DeviceScale(self.state, scale)
        scalars = replace(scale, max_norm=max_norm).decide(
            squares,
            # other parts of the model are updated
            [self._counter[managed] for managed in updated] or [self._memory[-1]],
            [managed.group or 0 for managed in updated] or [0],
            [hyper_of(group) for group in groups],
            self.ranks,
            self._scaler.rule,
        )
        self._counted = True
        cohorts: dict[int, int] = {}
        for managed in updated:
            managed.tried += 1
            if managed.cohort not in cohorts:
                cohorts[managed.cohort] = next(self._cohorts)
            managed.cohort = cohorts[managed.cohort]
        if capturing(self._device):
            self.replayed = True
            return scalars, None
        return scalars, PendingResult(self.state.words)

    def read_counts(self) -> None:
        """Set `Managed.step` of each parameter. Waits for the device."""
        if self._counted or self.replayed:
            self._counted = False
            for managed, count in zip(self._counter, self._memory[_WORDS:-1].tolist(), strict=True):
                managed.step = count

    def read(self) -> StepResult:
        """Return the result of the last step, replays included. Waits for the device."""
        return _result(self.state.words.cpu())


class DeviceOutcomes:
    """Brings the outcomes of steps that the device decided on to the host, in their order. They can
    be read on any thread.
    """

    def __init__(
        self,
        device_step: DeviceStep,
        record: Callable[[float, int, tuple[float, int, int] | None], None],
        count_skips: Callable[[int], int | None],
    ) -> None:
        """Read what `device_step` decides. record, count_skips: of the engine's Outcomes."""
        self._lock = threading.RLock()
        self._device_step, self._record, self._count_skips = device_step, record, count_skips
        self._pending: deque[PendingResult] = deque()
        self._skipped = 0  # on the device, as far as the host knows
        self._late: RuntimeError | None = None

    def add(self, result: PendingResult) -> None:
        """Note a step, whose result is on its way to the host."""
        self._pending.append(result)

    def poll(self) -> None:
        """Read the results that have been copied."""
        with self._lock:
            while self._pending and self._pending[0].done:
                self._read_next()

    def settle(self, counts: bool = False) -> None:
        """Read the results of all steps so far, and each parameter's step count if `counts`.
        Waits for the device.
        """
        with self._lock:
            while self._pending:
                self._read_next()
            if self._device_step.replayed:  # nothing of replays is logged
                result = self._device_step.read()
                self._count_skips(self._new_skips(result))
                self._record(result.norm, 0, result.scale)
            if counts:
                self._device_step.read_counts()

    def raise_late(self) -> None:
        """Raise the error that a step would have raised if the norm had been known then."""
        late, self._late = self._late, None
        if late is not None:
            raise late

    def forget_late(self) -> None:
        """Log the error that `raise_late` would raise: the state that it is about was replaced
        by a loaded one.
        """
        if self._late is not None:
            logger.warning("%s (before load_state_dict)", self._late)
        self._late = None

    def _read_next(self) -> None:
        pending = self._pending[0]
        result = pending.result()  # a signal handler that calls settle may have read it meanwhile
        if not self._pending or self._pending[0] is not pending:
            return
        self._pending.popleft()
        try:
            self._record(result.norm, self._new_skips(result), result.scale)
        except RuntimeError as error:
            self._late = self._late or error

    def _new_skips(self, result: StepResult) -> int:
        new, self._skipped = result.skipped - self._skipped, result.skipped
        return new
