"""What a DeepSpeed configuration asks to print of steps: the time of their parts, memory, collectives, operations.

All of it is off by default, and costs nothing then. On a GPU times are of the device, by events that are read when a step is
reported, so nothing waits in between. Source: wall_clock_breakdown, memory_breakdown, comms_logger and flops_profiler of
https://www.deepspeed.ai/docs/config-json.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardcore.deepspeed.config import Config
from shardcore.distributed.comm import Comm
from shardcore.engine.memory_report import memory_report


class StepReport:
    """Collects what is asked for, and prints it on rank 0 when steps end."""

    def __init__(self, config: Config, module: nn.Module, comm: Comm, device: torch.device) -> None:
        """Begin. See the head of this file."""
        self._config, self._module, self._comm, self._device = config, module, comm, device
        self._ms: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._collectives: Counter[str] = Counter()
        flops = config.flops_profiler
        self._profiled = flops.get("profile_step", 1) if flops.get("enabled") else 0
        self._flops: dict[str, Counter[str]] = {}  # by module, by operation

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside as that of a part of the step."""
        if not self._config.wall_clock_breakdown:
            yield
        elif self._device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            yield
            last.record()
            self._events.append((name, first, last))
        else:
            began = time.perf_counter()
            yield
            self._add(name, 1000.0 * (time.perf_counter() - began))

    @contextmanager
    def operations(self, step: int) -> Iterator[None]:
        """Count the floating-point operations inside, if `step` (from 1) is the one to be profiled."""
        if step != self._profiled:
            yield
            return
        with FlopCounterMode(display=False) as counter:  # which counts from 0 whenever it is entered
            yield
        for module, counts in counter.get_flop_counts().items():
            self._flops.setdefault(module, Counter()).update({str(op): count for op, count in counts.items()})

    def end_step(self, step: int, every: int | None) -> None:
        """Print what is due after `step` (from 1); every: steps between two lines of progress, None for a line after each."""
        lines = []
        if self._flops:
            lines += self._operations(step)
        if step % (every or 1) == 0:
            if self._config.wall_clock_breakdown:
                lines.append("time (ms) | " + " | ".join(f"{name}: {ms:.2f}" for name, ms in self._times().items()))
            if self._config.memory_breakdown:
                lines.append(f"memory\n{memory_report(self._module)}")
            if self._config.comms_logger.get("enabled"):
                lines.append(self._communication())
        if self._comm.rank == 0:
            for line in lines:
                print(f"step={step} {line}", flush=True)

    def _times(self) -> dict[str, float]:
        if self._events:
            self._events[-1][2].synchronize()
        for name, first, last in self._events:
            self._add(name, first.elapsed_time(last))
        self._events.clear()
        found, self._ms = self._ms, {}
        return found

    def _add(self, name: str, ms: float) -> None:
        self._ms[name] = self._ms.get(name, 0.0) + ms

    def _communication(self) -> str:
        counts = Counter(self._comm.collectives())
        new, self._collectives = counts - self._collectives, counts
        return "collectives | " + (" | ".join(f"{name}: {count}" for name, count in sorted(new.items())) or "none")

    def _operations(self, step: int) -> list[str]:
        depth = self._config.flops_profiler.get("module_depth", -1)
        total = sum(self._flops.get("Global", {}).values())
        lines = [f"floating-point operations on this rank: {total:,}"]
        for module, counts in self._flops.items():
            if depth < 0 or module.count(".") <= depth:
                lines.append(f"  {module}: " + ", ".join(f"{op} {count:,}" for op, count in counts.items()))
        text = "\n".join(lines)
        self._flops, self._profiled = {}, 0
        output = self._config.flops_profiler.get("output_file")
        if output is None:
            return [text]
        if self._comm.rank == 0:
            Path(output).write_text(f"step={step} {text}\n")
        return []
