"""Time training steps whose states and gradients are in host memory, with a lazy step and a blocking one, beside the bound.

Runs on the CPU, where the parts of a step are as long as they are told to be, so that each can be the longest: units of a
model that only sleep in forward and backward (the device), the host-thread copy engine throttled to a link's speed, and the
real CPU Adam, slowed to a rate. What runs is the real engine: hooks, reduction, norm, clipping, worker, copies, events.

    lazy       overlap_step=True: Adam and weights back hide behind the next forward
    blocking   a step that is complete when it returns
    bound      what no exact schedule beats, and a chunk each way (benchmarks/offload_schedule.py); forward and backward are
               those of the same model without offload in the same run, bytes those that the engine moved
    DeepSpeed  computed for the same figures: gradients out beside backward, then Adam, then weights back

A bar of the picture is a unit; copies are drawn as the throttled link runs them.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

import shardcore
from benchmarks import harness, suite
from benchmarks.offload_schedule import Parts, blocking_time, deepspeed_spans, deepspeed_time, lazy_bound
from benchmarks.timeline import Chart, Span, draw
from examples.arguments import above_zero, positive
from shardcore._native import _C

UNITS = 24
DEVICE, OUT, CPU, BACK = LANES = ("device", "link: gradients out", "CPU", "link: weights back")
COLOURS = {"forward": "tab:blue", "backward": "tab:cyan", "out": "tab:orange", "adam": "tab:green", "back": "tab:red"}
WARMUP = 2
HOST = {"optimizer": "cpu", "gradients": "cpu"}
MODES: dict[str, dict[str, Any]] = {
    "no offload": {},
    "lazy": {"offload": HOST, "overlap_step": True},
    "blocking": {"offload": HOST},
}


@dataclass
class Log:
    """What ran when, in this process's clock."""

    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def took(self, lane: str, kind: str, at_least: float) -> Iterator[None]:
        """Note how long the context took, which is made to take as long as `at_least` seconds."""
        start = time.perf_counter()
        yield
        time.sleep(max(0.0, at_least - (time.perf_counter() - start)))
        self.spans.append(Span(lane, kind, start, time.perf_counter()))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, unit: "Unit") -> torch.Tensor:
        ctx.unit, ctx.like = unit, weight.detach()
        with unit.log.took(DEVICE, "forward", unit.forward_s):
            return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.unit.log.took(DEVICE, "backward", ctx.unit.backward_s):
            return grads[0].clone(), torch.full_like(ctx.like, 1e-3), None


class Unit(nn.Module):
    """A layer whose arithmetic is to wait."""

    def __init__(self, numel: int, forward_s: float, backward_s: float, log: Log) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))
        self.forward_s, self.backward_s, self.log = forward_s, backward_s, log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x, self.weight, self)


class Link:
    """A throttled HostTier that writes its copies down: each direction runs one after the other, at its speed."""

    caller_copies = False

    def __init__(self, tier: Any, gigabytes_per_second: float, log: Log) -> None:
        self.tier, self._bytes_per_second, self._log = tier, gigabytes_per_second * 1e9, log
        self._free = {OUT: 0.0, BACK: 0.0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tier, name)

    def note(self, lane: str, kind: str, nbytes: int, asked: float) -> None:
        """Write down a copy that was asked for then."""
        start = max(self._free[lane], asked)
        self._free[lane] = start + nbytes / self._bytes_per_second
        self._log.spans.append(Span(lane, kind, start, self._free[lane]))

    def to_tier(self, dst: torch.Tensor, src: torch.Tensor) -> Any:
        self.note(OUT, "out", src.nbytes, time.perf_counter())
        return self.tier.to_tier(dst, src)

    def from_tier(self, dst: torch.Tensor, src: torch.Tensor) -> Any:
        self.note(BACK, "back", src.nbytes, time.perf_counter())
        return self.tier.from_tier(dst, src)


class SlowSteps:
    """The TierSteps of a Link, with an Adam that updates so many parameters a second; what they did is written down."""

    def __init__(self, link: Link, steps: Any, log: Log) -> None:
        self._link, self._steps, self._log = link, steps, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps, name)

    def end(self) -> None:
        self._steps.end()
        for what, begin, end, amount in self._steps.events:
            if what == "adam":
                self._log.spans.append(Span(CPU, what, begin, end))
            elif what in ("to_tier", "from_tier"):
                self._link.note(*((OUT, "out") if what == "to_tier" else (BACK, "back")), amount, begin)


@dataclass(frozen=True)
class Case:
    """One cell of the grid. forward_s: of all units; backward takes twice as long."""

    forward_s: float
    gigabytes_per_second: float
    adam_per_second: float
    accumulate: int = 1


@contextmanager
def slowed(case: Case, log: Log) -> Iterator[None]:
    """Let tiers and steps that are made inside be slow."""
    tier, steps = _C.HostTier, _C.TierSteps
    rate = case.gigabytes_per_second

    def slow_steps(link: Link, places: int, *, passes: bool) -> SlowSteps:
        return SlowSteps(link, steps(link.tier, places, passes=passes, adam_per_second=case.adam_per_second), log)

    _C.HostTier = lambda *arguments: Link(tier(*arguments, gigabytes_per_second=rate), rate, log)  # type: ignore[misc,assignment]
    _C.TierSteps = slow_steps  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        _C.HostTier, _C.TierSteps = tier, steps  # type: ignore[misc]


@dataclass(frozen=True)
class Measured:
    """Medians over steps, in seconds; moved: bytes out and back in a step; spans: of the last two steps."""

    step: float
    forward: float
    backward: float
    moved: tuple[int, int]
    spans: list[Span]


def moved_by(optimizer: Any) -> tuple[int, int]:
    """Return the bytes that the engine has copied to and from host memory."""
    copies = getattr(optimizer._engine.store, "copies", None)
    return (0, 0) if copies is None else (copies.bytes_to_tier, copies.bytes_from_tier)


def run_mode(case: Case, mode: str, numel: int, rounds: int) -> Measured:
    """Train a model of UNITS units with `numel` parameters each."""
    log = Log()
    sizes = numel, case.forward_s / UNITS, 2 * case.forward_s / UNITS, log
    model = nn.Sequential(*(Unit(*sizes) for _ in range(UNITS)))
    plain = shardcore.CPUAdam(model.parameters(), lr=1e-3)
    with slowed(case, log) if MODES[mode] else nullcontext():
        model, optimizer = shardcore.shard(
            model, plain, 2, units=list(model), clip_grad_norm=1.0, accumulate=case.accumulate, precision="bf16", **MODES[mode]
        )
    x = torch.ones(1, requires_grad=True)
    times: dict[str, list[float]] = {"step": [], "forward": [], "backward": []}
    before = 0, 0
    for number in range(WARMUP + rounds):
        if number == WARMUP:
            optimizer.synchronize()  # or copies of the last step would count
            before = moved_by(optimizer)
        if number == WARMUP + rounds - 2:
            log.spans.clear()
        begin = time.perf_counter()
        for _ in range(case.accumulate):
            start = time.perf_counter()
            loss = model(x).sum()
            middle = time.perf_counter()
            loss.backward()
            times["forward"].append(middle - start)
            times["backward"].append(time.perf_counter() - middle)
        optimizer.step()
        optimizer.zero_grad()
        times["step"].append(time.perf_counter() - begin)
    spans = list(log.spans)
    optimizer.synchronize()
    out, back = ((now - then) // rounds for then, now in zip(before, moved_by(optimizer), strict=True))
    step, forward, backward = (statistics.median(samples[WARMUP:]) for samples in times.values())
    return Measured(step, forward, backward, (out, back), spans)


def parts_of(case: Case, base: Measured, host: Measured, numel: int) -> Parts:
    """Return the times of a step's parts: compute as measured without offload, copies and Adam as they are slowed."""
    out, back = (moved / (case.gigabytes_per_second * 1e9) for moved in host.moved)
    adam = UNITS * numel / case.adam_per_second
    return Parts(base.forward, base.backward, out / case.accumulate, adam, back, UNITS, case.accumulate)


def run_case(case: Case, options: argparse.Namespace) -> tuple[dict[str, Any], list[str], list[Chart]]:
    """Measure one cell; returns its result, its row of the table, and its charts."""
    runs = {mode: run_mode(case, mode, options.numel, options.rounds) for mode in MODES}
    parts = parts_of(case, runs["no offload"], runs["lazy"], options.numel)
    bound, chain, theirs = lazy_bound(parts), blocking_time(parts), deepspeed_time(parts)
    lazy, blocking = runs["lazy"].step, runs["blocking"].step
    milliseconds = [1e3 * seconds for seconds in (parts.forward, parts.backward, parts.out, parts.adam, parts.back)]
    row = [
        str(case.accumulate),
        " ".join(f"{value:.0f}" for value in milliseconds),
        f"{1e3 * lazy:.0f} / {1e3 * bound:.0f} = {lazy / bound:.3f}",
        f"{1e3 * blocking:.0f} / {1e3 * chain:.0f} = {blocking / chain:.3f}",
        f"{1e3 * theirs:.0f}",
        f"{theirs / lazy:.2f}",
    ]
    result = {
        "case": asdict(case),
        "parts": asdict(parts),
        "lazy": {"seconds": lazy, "bound": bound, "over_bound": lazy / bound},
        "blocking": {"seconds": blocking, "chain": chain, "over_chain": blocking / chain},
        "deepspeed": {"computed_seconds": theirs, "over_lazy": theirs / lazy},
        "no_offload_seconds": runs["no offload"].step,
    }
    charts = [
        Chart(f"shardcore, overlap_step=True: {1e3 * lazy:.0f} ms a step (two steps drawn)", runs["lazy"].spans, LANES),
        Chart(f"shardcore, overlap_step=False: {1e3 * blocking:.0f} ms a step (two)", runs["blocking"].spans, LANES),
        Chart(f"DeepSpeed's schedule, computed: {1e3 * theirs:.0f} ms a step (one)", list(deepspeed_spans(parts)), LANES),
    ]
    return result, row, charts


def grid(options: argparse.Namespace) -> list[Case]:
    """Return the cells: all combinations, and the last one with micro-steps."""
    cells = itertools.product(options.forward_ms, options.link, options.adam)
    cases = [Case(forward / 1e3, link, 1e6 * adam) for forward, link, adam in cells]
    return [*cases, replace(cases[-1], accumulate=2)]


def main() -> int:
    parser = suite.make_parser("offload_overlap", __doc__, rounds=5, pause=0.0)
    parser.add_argument("--numel", type=positive, default=1 << 19, help="parameters of each of 24 units (default: %(default)s)")
    several: dict[str, Any] = {"type": above_zero, "nargs": "+", "metavar": "X"}
    parser.add_argument("--forward-ms", **several, default=[100.0, 300.0], help="a third of compute (default: %(default)s)")
    parser.add_argument("--link", **several, default=[0.08, 0.3], help="GB/s in each direction (default: %(default)s)")
    parser.add_argument("--adam", **several, default=[50.0, 200.0], help="million parameters a second (default: %(default)s)")
    options = suite.parse(parser)
    rows = [["micro-steps", "F B out adam back, ms", "lazy / bound, ms", "blocking / its chain, ms", "DeepSpeed, ms", "/ lazy"]]
    results = []
    pictures: list[tuple[float, list[Chart]]] = []
    for case in grid(options):
        result, row, charts = run_case(case, options)
        print(" | ".join(row), file=sys.stderr, flush=True)
        results.append(result)
        rows.append(row)
        if case.accumulate == 1:
            pictures.append((result["deepspeed"]["over_lazy"], charts))
    print(f"{UNITS} units of {options.numel:,} parameters, one rank, stage 2, {options.rounds} steps of each kind, medians")
    print(harness.table(rows))
    harness.write_json(options.out / "offload_overlap.json", {**suite.about_run("offload_overlap", options), "cells": results})
    draw(options.out / "offload_overlap.png", max(pictures, key=lambda picture: picture[0])[1], COLOURS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
