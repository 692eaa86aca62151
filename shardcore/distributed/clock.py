"""Names and times of the parts of steps: scopes for profilers, and a clock that measures once
something has asked for it.

On the CPU a scope shows the start and the end of the work, on CUDA the time of queueing. Scopes of
an overlapped step's worker are on its own thread. On CUDA a part is measured by two events on the
current stream, read a step later, so waits of the stream count. A part's time excludes the parts
inside it, so the parts add up.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from shardcore.torch_private import ProfilerScope, record_function_enter, record_function_exit

# Parts of a step: three of computation (OUTER), and inside these the waits for reduced gradients,
# for gathered weights, and for host memory with the update of states there.
PARTS = ("forward", "backward", "optimizer", "exposed_reduce", "exposed_gather", "exposed_offload")
OUTER = PARTS[:3]


class Clock:
    """Sums the time of each part, less that of parts inside it: the sums of all parts are the
    time in any of them.

    Until the clock is started a part costs one look at a flag. On a GPU times are those between
    events on the current stream, which are read when they are over, so nothing waits for them: a
    wait for a collective takes as long as the stream stands still for it. On the CPU they are those
    of the host.
    """

    def __init__(self) -> None:
        """Measure nothing until `start`."""
        self.on = False
        # Counts what runs inside as a part; None: as nothing. A step that is not measured does not
        # come here: it calls contextlib's own class.
        self.part: Callable[[str | None], AbstractContextManager[object]] = nullcontext
        self._device = torch.device("cpu")
        self._open: list[tuple[str, Any]] = []  # the parts begun, each with its mark
        # part, the one around it, first and last event
        self._over: deque[tuple[str, str | None, Any, Any]] = deque()
        self._unused_events: list[torch.cuda.Event] = []
        self._ms: defaultdict[str, float] = defaultdict(float)

    def start(self, device: torch.device) -> None:
        """Measure from now on, what runs on `device`."""
        self.on, self._device, self.part = True, device, self._inside

    def begin(self, part: str) -> None:
        """Begin a part. One of OUTER ends whatever was left open (by an error)."""
        if not self.on:
            return
        if part in OUTER:
            self._open.clear()
            self._read(wait=False)
        self._open.append((part, self._now()))

    def end(self, part: str) -> None:
        """End a part, and what was left open inside it; nothing if it was not begun."""
        while any(name == part for name, _ in self._open):
            name, first = self._open.pop()
            if name == part:
                last = self._now()
                if first is not None and last is not None:
                    around = self._open[-1][0] if self._open else None
                    self._over.append((part, around, first, last))
                return

    @contextmanager
    def _inside(self, part: str | None) -> Iterator[None]:
        if part is None:
            yield
            return
        self.begin(part)
        try:
            yield
        finally:
            self.end(part)

    def totals(self) -> dict[str, float]:
        """Return the milliseconds of each of PARTS since `start`. Waits for the device."""
        self._read(wait=True)
        return {part: self._ms[part] for part in PARTS}

    def _now(self) -> Any:
        """Return the time on the CPU, else an event; None while a CUDA graph is captured, which
        has no such events.
        """
        if self._device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = (
            self._unused_events.pop()
            if self._unused_events
            else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        )
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _read(self, wait: bool) -> None:
        while self._over:
            part, around, first, last = self._over[0]
            if isinstance(last, float):
                ms = 1000.0 * (last - first)
            elif wait or last.query():
                last.synchronize()
                ms = first.elapsed_time(last)
                self._unused_events += [first, last]
            else:
                return
            self._over.popleft()
            self._ms[part] += ms
            if around is not None:
                self._ms[around] -= ms


def scope_type() -> Callable[[str], AbstractContextManager[object]]:
    """Return a context manager's class that names the work inside it, on this thread.

    Names are `shardcore::<what>(<unit>)`, in traces of torch.profiler (record_function) and, with
    CUDA, of NVTX tools such as nsys: gather (unshard weights), reduce (send a unit's gradients),
    sum (add up the received ones), gather_grad (full gradients: stage 0 and replicas), adam (the
    update; of all units at once where no copy or collective of one overlaps with the update of the
    next), read (state dicts and the like). `shardcore::step` is around a step. Source: the
    documentation of torch.profiler and torch.cuda.nvtx.
    """
    return _NvtxScope if _has_nvtx() else ProfilerScope


class _NvtxScope:
    """An annotation of torch.profiler, which traces show beside the kernels, too; and the same
    range for NVTX.
    """

    __slots__ = ("_name", "_record")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._record = record_function_enter(self._name)
        torch.cuda.nvtx.range_push(self._name)  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        record_function_exit(self._record)


def _has_nvtx() -> bool:
    return torch.cuda.is_available()
