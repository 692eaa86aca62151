"""What a DeepSpeed configuration asks to print of steps: the time of their parts, memory,
collectives, operations.

All of it is off by default, and costs nothing then. Times are those of the engine's clock
(distributed/clock.py). Source: wall_clock_breakdown, memory_breakdown, comms_logger and
flops_profiler of https://www.deepspeed.ai/docs/config-json.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn

from shardcore.deepspeed.config import Config
from shardcore.distributed.comm import Comm
from shardcore.engine.memory_report import memory_report


class StepReport:
    """Collects what is asked for, and prints it on rank 0 (of a pipeline that of its first
    stage) when steps end.
    """

    def __init__(self, config: Config, module: nn.Module, comm: Comm, device: torch.device) -> None:
        """Begin. See the head of this file."""
        self._config, self._module, self._comm = config, module, comm
        self._speaks = all(one.rank == 0 for one in (comm, *comm.across))
        if config.wall_clock_breakdown:
            comm.clock.start(device)
        self._ms: dict[str, float] = {}
        self._collectives: Counter[str] = Counter()
        self._profiler: Any = None  # a FlopsProfiler

    @contextmanager
    def forward(self, steps: int) -> Iterator[None]:
        """Profile the forward inside, if it is the one to be profiled after so many steps; of
        several micro-steps the last one stays.
        """
        if not self._config.flops_profiler or steps != self._config.profile_step:
            yield
            return
        # `import shardcore` leaves it out
        profiler = import_module("shardcore.deepspeed.flops_profiler").FlopsProfiler(self._module)
        profiler.start_profile()
        try:
            yield
        finally:
            profiler.stop_profile()
        self._profiler = profiler

    def end_step(self, step: int, every: int | None) -> None:
        """Print what is due after `step` (from 1); every: steps between two lines of progress,
        None for a line after each.
        """
        lines = []
        if self._profiler is not None and self._speaks:
            self._profiler.print_model_profile(
                self._config.profile_step,
                self._config.module_depth,
                self._config.top_modules,
                self._config.detailed,
                self._config.profile_file,
            )
        self._profiler = None
        if step % (every or 1) == 0:
            if self._config.wall_clock_breakdown:
                lines.append(self._times())
            if self._config.memory_breakdown:
                lines.append(f"memory\n{memory_report(self._module)}")
            if self._config.comms_logger:
                lines.append(self._communication())
        if self._speaks:
            for line in lines:
                print(f"step={step} {line}", flush=True)

    def _times(self) -> str:
        totals, before = self._comm.clock.totals(), self._ms
        self._ms = totals
        new = {part.replace("_", " "): ms - before.get(part, 0.0) for part, ms in totals.items()}
        return "time (ms) | " + " | ".join(f"{part}: {ms:.2f}" for part, ms in new.items())

    def _communication(self) -> str:
        counts = Counter(self._comm.collectives())
        new, self._collectives = counts - self._collectives, counts
        return "collectives | " + (
            " | ".join(f"{name}: {count}" for name, count in sorted(new.items())) or "none"
        )
