"""`shardcore report`: one page with plots of what shardcore.Metrics wrote to a directory.

The page is one file, without scripts, and loads nothing from elsewhere. Its plots are SVG in the colours of the page, which is
light or dark as the reader's system is.
"""

import argparse
import html
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcore.distributed.clock import PARTS
from shardcore.metrics.writers import FACTS, FILE, KINDS, TIERS, read_table

POINTS = 400  # of a line: of more rows the mean of so many ranges is drawn
_WIDTH, _HEIGHT, _RIGHT, _TOP, _BOTTOM = 560, 250, 16, 12, 216  # of the drawing; where its right, top and bottom edges are
_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BYTES = ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B"))
Column = list[float]  # NaN where it is not known


@dataclass(frozen=True)
class Plot:
    """A plot over steps: of one column, or of several on top of each other (by label). unit: "", "ms" or "B".

    from_zero: its axis begins there, so that noise looks as small as it is.
    """

    title: str
    unit: str
    columns: Mapping[str, str]
    stacked: bool = False
    about: str = ""
    from_zero: bool = False


def _memory(tier: str) -> dict[str, str]:
    return {kind: f"{kind}_{tier}_bytes" for kind in KINDS}


PLOTS = (
    Plot("Loss", "", {"loss": "loss"}, about="mean over ranks, and over the steps of a row"),
    Plot("Learning rate", "", {"lr": "lr"}, about="of the first param_group"),
    Plot("Gradient norm", "", {"gradient norm": "grad_norm"}, about="global, before clipping"),
    Plot("Tokens per second", "", {"tokens per second": "tokens_per_s"}, about="all ranks together", from_zero=True),
    Plot("TFLOP/s", "", {"TFLOP/s": "tflops_per_s"}, about="of a rank, matrix products and attention alone", from_zero=True),
    Plot(
        "Time of a step",
        "ms",
        {part.replace("exposed_", "waiting: "): f"{part}_ms" for part in PARTS} | {"other": "other_ms"},
        stacked=True,
        about="rank 0; waiting is what other work did not hide; other is data, the loss, saving",
    ),
    Plot(
        "Bytes moved in a step",
        "B",
        {
            "gradients sent": "sent_gradients_bytes",
            "weights sent": "sent_weights_bytes",
            "to host memory": "to_host_bytes",
            "from host memory": "from_host_bytes",
            "to files": "to_nvme_bytes",
            "from files": "from_nvme_bytes",
        },
        stacked=True,
        about="by rank 0",
    ),
    *(
        Plot(f"Memory: {name}", "B", _memory(tier), stacked=True, about="shardcore's on rank 0, activations not included")
        for tier, name in zip(TIERS, ("device", "host", "NVMe"), strict=True)
    ),
    Plot(
        "Device memory at its peak",
        "B",
        {"peak": "device_peak_bytes"},
        about="of torch's allocator on rank 0, all included",
        from_zero=True,
    ),
    Plot("Loss scale", "", {"loss scale": "loss_scale"}, about="float16"),
    Plot("Skipped steps", "", {"skipped steps": "skipped_steps"}, about="so far, for gradients that were not finite"),
)
# What is of interest only where it moves from this value.
_QUIET = {"loss_scale": 1.0, "skipped_steps": 0.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", metavar="DIR", help="the directory that shardcore.Metrics was given")
    parser.add_argument("--output", metavar="FILE", help="the page to write (default: DIR/report.html)")


def run(parsed: argparse.Namespace) -> int:
    """Write the page and say where it is. Raises OSError, or ValueError for a directory without metrics."""
    folder = Path(parsed.directory)
    path = Path(parsed.output) if parsed.output else folder / "report.html"
    path.write_text(page(folder), encoding="utf-8")
    print(f"wrote {path}")
    return 0


def page(folder: Path) -> str:
    """Return the page of a directory's metrics. Raises OSError, ValueError."""
    columns = _columns(read_table(folder, "report"))
    if not columns["step"]:
        raise ValueError(f"report: {folder / FILE} has no rows; expected the metrics of at least one step (see `every`)")
    facts = json.loads((folder / FACTS).read_text()) if (folder / FACTS).is_file() else {}
    drawn = [text for plot in PLOTS if (text := draw(plot, columns))]
    heading = html.escape(str(facts.get("model", folder.resolve().name)))
    return _PAGE.format(
        title=f"{heading}: metrics",
        heading=heading,
        facts=" · ".join(html.escape(text) for text in _said(facts)),
        cards="".join(f"<div class=card><b>{value}</b><span>{name}</span></div>" for name, value in _cards(columns)),
        plots="".join(drawn),
        folder=html.escape(str(folder)),
        rows=f"{len(columns['step']):,} rows to step {columns['step'][-1]:,.0f}",
    )


def _said(facts: Mapping[str, Any]) -> list[str]:
    """Return what is known of a run, in words."""
    forms = {"parameters": "{:,} parameters", "ranks": "{} ranks" if facts.get("ranks", 0) > 1 else "{} rank", "device": "{}"}
    return [forms.get(name, name + " {}").format(value) for name, value in facts.items() if name != "model"]


def _columns(rows: Sequence[Mapping[str, str]]) -> dict[str, Column]:
    """Return numbers by column, and the time of a step that no part has as "other_ms"."""
    names = list(rows[0]) if rows else ["step"]
    columns = {name: [float(row[name] or "nan") for row in rows] for name in names}
    if rows:
        parts = zip(*(columns[f"{part}_ms"] for part in PARTS), strict=True)
        columns["other_ms"] = [max(0.0, step - sum(of_step)) for step, of_step in zip(columns["step_ms"], parts, strict=True)]
    return columns


def _cards(columns: Mapping[str, Column]) -> list[tuple[str, str]]:
    """Return what stands above the plots: (name, value)."""

    def median(name: str) -> float:
        return statistics.median([value for value in columns[name] if math.isfinite(value)] or [math.nan])

    last = next((value for value in reversed(columns["loss"]) if math.isfinite(value)), math.nan)
    memory = sum(columns[column][-1] for tier in TIERS for column in _memory(tier).values())
    cards = [
        ("last loss", f"{last:.4g}", last),
        ("a step, median", _number(median("step_ms"), "ms"), median("step_ms")),
        ("tokens/s, median", _number(median("tokens_per_s"), ""), median("tokens_per_s")),
        ("TFLOP/s, median", f"{median('tflops_per_s'):.3g}", median("tflops_per_s")),
        ("held by rank 0", _number(memory, "B"), memory),
        ("skipped steps", f"{columns['skipped_steps'][-1]:.0f}", columns["skipped_steps"][-1]),
    ]
    return [(name, text) for name, text, value in cards if math.isfinite(value)]


# --- one plot ---------------------------------------------------------------------------------------------------------------


def draw(plot: Plot, columns: Mapping[str, Column]) -> str:
    """Return a plot as a figure of HTML; "" where there is nothing to see."""
    chosen = {number: columns[name] for number, name in enumerate(plot.columns.values()) if _is_there(name, columns[name])}
    if not chosen:
        return ""
    steps, lines = _thin(columns["step"]), {number: _thin(column) for number, column in chosen.items()}
    if plot.stacked:
        total = [0.0] * len(steps)
        for number, line in lines.items():
            total = [below + (value if math.isfinite(value) else 0.0) for below, value in zip(total, line, strict=True)]
            lines[number] = total
        shown = total
    else:
        shown = [value for line in lines.values() for value in line if math.isfinite(value)]
    if plot.stacked or plot.from_zero:
        shown = [0.0, *shown]
    size, suffix = _unit(max(map(abs, shown)), plot.unit)
    ticks = _ticks(min(shown) / size, max(shown) / size)
    labels = _labels(ticks, "" if plot.unit else suffix)
    left, low, high, span = 14.0 + 9.5 * max(5, *map(len, labels)), ticks[0], ticks[-1], steps[-1] - steps[0] or 1.0

    def at(step: float, value: float) -> tuple[float, float]:
        x = left + (step - steps[0]) / span * (_WIDTH - left - _RIGHT)
        return round(x, 1), round(_BOTTOM - (value / size - low) / (high - low) * (_BOTTOM - _TOP), 1)

    parts = []
    for tick, label in zip(ticks, labels, strict=True):
        y = at(steps[0], tick * size)[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{left - 7}" y="{y + 4}" text-anchor="end">{label}</text>')
    for step in _step_ticks(steps):
        parts.append(f'<text x="{at(step, 0)[0]}" y="{_BOTTOM + 20}" text-anchor="middle">{_step(step)}</text>')
    parts.append(f'<text x="{left - 7}" y="{_BOTTOM + 20}" text-anchor="end">step</text>')
    below = [at(step, 0.0) for step in steps]
    for number, line in lines.items():
        if plot.stacked:
            top = [at(step, value) for step, value in zip(steps, line, strict=True)]
            end = [(_WIDTH - _RIGHT, top[0][1]), (_WIDTH - _RIGHT, below[0][1])] if len(steps) == 1 else []  # one row: a bar
            parts.append(f'<polygon class="area c{number}" points="{_points([*top, *end, *below[::-1]])}"/>')
            below = top
        else:
            for run in _runs(steps, line):
                first = at(*run[0])
                dot = f'<circle class="dot" cx="{first[0]}" cy="{first[1]}" r="3"/>'
                points = _points([at(*point) for point in run])
                parts.append(dot if len(run) == 1 else f'<polyline class="line" points="{points}"/>')
    legend = "".join(f'<li><i class="c{number}"></i>{html.escape([*plot.columns][number])}</li>' for number in chosen)
    last = "" if plot.stacked else _number(columns[next(iter(plot.columns.values()))][-1], plot.unit)
    title = plot.title + (f" ({suffix.strip()})" if plot.unit else "")
    return (
        f"<figure><figcaption><h2>{html.escape(title)}</h2>"
        + (f"<output>{last}</output>" if last else "")
        + f"<p>{html.escape(plot.about)}</p></figcaption>"
        + f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(plot.title)}">{"".join(parts)}</svg>'
        + (f"<ul>{legend}</ul>" if plot.stacked else "")
        + "</figure>"
    )


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)


def _is_there(name: str, column: Column) -> bool:
    quiet = _QUIET.get(name)
    known = [value for value in column if math.isfinite(value)]
    if quiet is not None:
        return any(value != quiet for value in known)
    return bool(known) and (not name.endswith(("_ms", "_bytes")) or any(known))


def _thin(column: Column) -> Column:
    """Return at most POINTS values: means of ranges of equal length."""
    size = -(-len(column) // POINTS)
    if size == 1:
        return column
    ranges = (column[start : start + size] for start in range(0, len(column), size))
    return [statistics.fmean([v for v in values if math.isfinite(v)] or [math.nan]) for values in ranges]


def _runs(steps: Column, line: Column) -> list[list[tuple[float, float]]]:
    """Cut a line where values are not finite."""
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(steps, line, strict=True):
        if math.isfinite(value):
            runs[-1].append((step, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers at equal distances, the first at most `low` and the last at least `high`; about `count`."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * number for number in range(first, last + 1)]


def _step_ticks(steps: Column) -> list[float]:
    ticks = [tick for tick in _ticks(steps[0], steps[-1], 7) if steps[0] <= tick <= steps[-1] and tick == int(tick)]
    return ticks or [steps[0]]


def _step(step: float) -> str:
    return f"{step:,.0f}" if step < 100_000 else f"{step / 1000:,g}k"


def _labels(ticks: Sequence[float], suffix: str) -> list[str]:
    """Return the numbers of an axis, with as many digits as they need."""
    digits = next(
        (d for d in range(5) if all(abs(round(tick, d) - tick) < 1e-6 * (ticks[1] - ticks[0]) for tick in ticks)), None
    )
    if digits is None:
        return [f"{tick:.3g}{suffix}" for tick in ticks]
    return [f"{tick:,.{digits}f}{suffix if tick else ''}" for tick in ticks]


def _unit(value: float, unit: str) -> tuple[float, str]:
    if unit == "ms":
        return (1000.0, " s") if value >= 1000.0 else (1.0, " ms")
    names = _BYTES if unit == "B" else _LARGE
    return next(((size, name) for size, name in names if abs(value) >= size), (1.0, names[-1][1]))


def _number(value: float, unit: str) -> str:
    """Return a number for readers; "" if it is not known."""
    if math.isnan(value):
        return ""
    if not math.isfinite(value):
        return str(value)
    size, name = _unit(value, unit)
    return f"{value / size:.4g}{name}"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{
  color-scheme: light dark;
  --back: #f6f7f9; --card: #fff; --text: #1c2430; --soft: #657080; --grid: #e4e8ed; --edge: #dfe3e8;
  --c0: #3566d6; --c1: #7a9df0; --c2: #2fa58c; --c3: #e2574c; --c4: #f0943a; --c5: #f4c64e; --c6: #b9c1cc;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --back: #12161c; --card: #1b2129; --text: #e6eaf0; --soft: #93a0b0; --grid: #2b333e; --edge: #2b333e;
    --c0: #5b8cf5; --c1: #8fb0fa; --c2: #3fc0a4; --c3: #ee6c61; --c4: #f3a455; --c5: #f2cd66; --c6: #5f6b7a;
  }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; padding: 28px 20px 40px; background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }}
main {{ max-width: 1220px; margin: 0 auto; }}
h1 {{ margin: 0; font-size: 26px; letter-spacing: -0.01em; overflow-wrap: anywhere; }}
header p {{ margin: 4px 0 0; color: var(--soft); }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 20px 0; }}
.card, figure {{ background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }}
.card {{ padding: 12px 16px; }}
.card b {{ display: block; font-size: 22px; font-weight: 600; white-space: nowrap; }}
.card span {{ color: var(--soft); font-size: 13px; }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 14px; }}
figure {{ margin: 0; padding: 14px 16px 10px; display: flex; flex-direction: column; }}
figcaption {{ display: grid; grid-template-columns: 1fr auto; column-gap: 12px; }}
h2 {{ margin: 0; font-size: 16px; font-weight: 600; }}
output {{ font-weight: 600; white-space: nowrap; }}
figcaption p {{ grid-column: 1 / -1; margin: 0 0 6px; color: var(--soft); font-size: 13px; }}
svg {{ display: block; width: 100%; height: auto; }}
svg text {{ fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }}
.grid {{ stroke: var(--grid); }}
.line {{ fill: none; stroke: var(--c0); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }}
.dot {{ fill: var(--c0); }}
ul {{ list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 4px 0 2px; padding: 0; font-size: 13px; }}
li {{ display: flex; align-items: center; gap: 6px; white-space: nowrap; }}
i {{ width: 11px; height: 11px; border-radius: 3px; }}
{colours}
footer {{ margin-top: 18px; color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }}
@media (max-width: 520px) {{
  body {{ padding: 18px 10px 28px; }}
  svg text {{ font-size: 17px; }}
  .cards {{ grid-template-columns: 1fr 1fr; gap: 8px; }}
}}
</style>
</head>
<body>
<main>
<header><h1>{heading}</h1><p>{facts}</p></header>
<div class="cards">{cards}</div>
<div class="plots">{plots}</div>
<footer>shardcore report · {rows} · {folder}</footer>
</main>
</body>
</html>
""".replace(
    "{colours}",
    "\n".join(
        f"i.c{number} {{{{ background: var(--c{number}); }}}} .area.c{number} {{{{ fill: var(--c{number}); }}}}"
        for number in range(7)
    ),
)
