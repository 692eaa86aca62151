"""How every benchmark here measures and reports.

A machine's memory bandwidth can swing by half within minutes, so a single time means little. Cases
take turns, in a new random order each round, with a pause before each (another library's threads
may still be spinning); what counts is the ratio of two cases within one round, and its median over
rounds. Results are written with commit, hardware and options.
"""

import gc
import json
import math
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from examples.pictures import new_figure, save_figure


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of samples."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def spread(samples: Sequence[float]) -> Spread:
    """Return median and quartiles (of few samples: the nearest ones)."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Spread(
        statistics.median(ordered),
        ordered[math.floor(last * 0.25)],
        ordered[math.ceil(last * 0.75)],
    )


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Return the spread of the ratios of samples from the same rounds."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def rates(
    seconds: list[float], limit: list[float], moved: int, limit_moved: int
) -> dict[str, object]:
    """Return the seconds, GB/s (median) and the share of the limit (paired by round) of a case
    that moves ``moved`` bytes.
    """
    shares = paired(limit, seconds)
    factor = moved / limit_moved
    return {
        "seconds": seconds,
        "gb_per_second": moved / spread(seconds).median / 1e9,
        "share": asdict(Spread(shares.median * factor, shares.low * factor, shares.high * factor)),
        "limit_gb_per_second": limit_moved / spread(limit).median / 1e9,
    }


def random_order(names: Sequence[str], rounds: int, seed: int) -> Iterator[list[str]]:
    """Yield the names in a new random order for each round; equal seeds give equal orders (ranks
    must agree).
    """
    generator = random.Random(seed)
    for _ in range(rounds):
        order = list(names)
        generator.shuffle(order)
        yield order


def wall_seconds(call: Callable[[], None], repeats: int) -> float:
    """Time ``repeats`` calls by the clock on the wall.

    Several measure a program at work, so two that do not count come first: after a pause a core may
    take milliseconds to wake, and caches hold what other cases left.
    """
    for _ in range(2 if repeats > 1 else 0):
        call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return time.perf_counter() - start


def interleave(
    cases: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    repeats: int | Mapping[str, int] = 1,
    pause_s: float = 0.05,
    warmup: int = 1,
    seed: int = 0,
    timer: Callable[[Callable[[], Any], int], float] = wall_seconds,
) -> dict[str, list[float]]:
    """Time every case once a round; returns the seconds of one call by case and round. ``warmup``
    rounds are thrown away.

    ``timer`` runs a case ``repeats`` times (of all cases, or by case) and returns the seconds that
    took. On a terminal a bar shows how far it is.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    bar = Bar((warmup + rounds) * len(cases))
    for order in random_order(list(cases), warmup + rounds, seed):
        for name in order:
            bar.advance(name)
            time.sleep(pause_s)
            times = repeats if isinstance(repeats, int) else repeats[name]
            seconds[name].append(timer(cases[name], times) / times)
    bar.clear()
    return {name: samples[warmup:] for name, samples in seconds.items()}


def disk_turns(
    cases: Mapping[str, Callable[[], float]], rounds: int, pause_s: float
) -> dict[str, list[float]]:
    """interleave, for cases that return their own seconds; each begins when all that was written
    is on disk.
    """

    def timer(case: Callable[[], float], repeats: int) -> float:
        gc.collect()
        os.sync()
        time.sleep(pause_s)
        return case()

    return interleave(cases, rounds, pause_s=0, timer=timer)


class Bar:
    """A progress bar on the last line of a terminal; nothing where standard error is none.

    It is drawn only by ``advance``, between samples: a bar with a thread of its own would take part
    in the measurement.
    """

    WIDTH = 30

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total, self.done = total, 0
        self.stream = sys.stderr if stream is None else stream

    def advance(self, name: str) -> None:
        """Show that the next of ``total`` samples begins, and of which case."""
        filled = self.WIDTH * self.done // self.total
        self._draw(
            f"{'#' * filled}{'.' * (self.WIDTH - filled)} {self.done}/{self.total}  {name[:40]}"
        )
        self.done += 1

    def clear(self) -> None:
        """Leave an empty line."""
        self._draw("")

    def _draw(self, line: str) -> None:
        if self.stream.isatty():
            self.stream.write(f"\r{line}\x1b[K")
            self.stream.flush()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as columns, the first aligned left; the first row is the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = ["-" * width for width in widths]
    lines = []
    for row in [rows[0], rule, *rows[1:]]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def save_json(path: Path, result: Mapping[str, object]) -> None:
    """Write ``result``, a list of numbers on one line; the directory must exist."""
    beside = path.with_name(path.name + ".new")  # whoever is interrupted keeps the old file whole
    text = re.sub(
        r'\[\n([^][{}"]+)\n *\]',
        lambda found: f"[{' '.join(found[1].split())}]",
        json.dumps(result, indent=1),
    )
    beside.write_text(text + "\n")
    beside.replace(path)


def write_json(path: Path, result: Mapping[str, object]) -> None:
    """save_json, and say so."""
    save_json(path, result)
    print(f"wrote {path}")


@dataclass(frozen=True)
class Panel:
    """One set of bars: a value with its spread for each name; ``ours`` says which names to set
    off by colour.
    """

    title: str
    x_label: str
    bars: Mapping[str, Spread]
    ours: Callable[[str], bool]
    mark: float | None = None  # a vertical line, such as 1.0 for "as fast as"


def write_png(path: Path, panels: Sequence[Panel], title: str) -> None:
    """Draw panels below each other; says so, and draws nothing, where matplotlib is missing."""
    heights = [len(panel.bars) + 1.5 for panel in panels]
    figure = new_figure(path, 9, 0.42 * sum(heights) + 0.6)
    if figure is None:
        return
    figure.suptitle(title, fontsize=11)
    all_axes = figure.subplots(len(panels), squeeze=False, gridspec_kw={"height_ratios": heights})[
        :, 0
    ]
    for axes, panel in zip(all_axes, panels, strict=True):
        names = list(panel.bars)[::-1]
        values = [panel.bars[name] for name in names]
        errors = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
        colours = ["tab:blue" if panel.ours(name) else "0.7" for name in names]
        bars = axes.barh(
            names, [v.median for v in values], xerr=errors, color=colours, ecolor="0.3", capsize=3
        )
        axes.bar_label(bars, [f" {v.median:.2f}" for v in values], padding=14)
        if panel.mark is not None:
            axes.axvline(panel.mark, color="0.2", linewidth=1, linestyle="--")
        axes.set_title(panel.title, fontsize=10, loc="left")
        axes.set_xlabel(panel.x_label)
        axes.margins(x=0.12)
    save_figure(figure, path)
