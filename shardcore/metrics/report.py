"""`shardcore report`: one page with plots of what shardcore.Metrics wrote to a directory.

The page is one file without scripts, and loads nothing from elsewhere. matplotlib, which is
optional, draws the plots, in colours for light and dark pages; without it the page has tables.
"""

import argparse
import html
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from shardcore.distributed.clock import PARTS
from shardcore.metrics import run_digests
from shardcore.metrics.compare import compare, read_run
from shardcore.metrics.writers import FACTS, FILE, KINDS, TIERS, read_table

POINTS = 400  # of a line: of more rows the mean of so many ranges is drawn
ROWS = 12  # of a table, which is in place of a plot without matplotlib
_COLOURS = ("#3566d6", "#7a9df0", "#2fa58c", "#e2574c", "#f0943a", "#f4c64e", "#9aa5b3")
_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BYTES = ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B"))
Column = list[float]  # NaN where it is not known


@dataclass(frozen=True)
class Plot:
    """A plot over steps: of one column, or of several on top of each other (by label). unit: "",
    "ms" or "B".

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
    Plot(
        "Tokens per second",
        "",
        {"tokens per second": "tokens_per_s"},
        about="all ranks together",
        from_zero=True,
    ),
    Plot(
        "TFLOP/s",
        "",
        {"TFLOP/s": "tflops_per_s"},
        about="of a rank, matrix products and attention alone",
        from_zero=True,
    ),
    Plot(
        "Time of a step",
        "ms",
        {part.replace("exposed_", "waiting: "): f"{part}_ms" for part in PARTS}
        | {"other": "other_ms"},
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
        Plot(
            f"Memory: {name}",
            "B",
            _memory(tier),
            stacked=True,
            about="shardcore's on rank 0, activations not included",
        )
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
    Plot(
        "Skipped steps",
        "",
        {"skipped steps": "skipped_steps"},
        about="so far, for gradients that were not finite",
    ),
)
# What is of interest only where it moves from this value.
_QUIET = {"loss_scale": 1.0, "skipped_steps": 0.0}
_WITHOUT_PLOTS = (
    "the page has tables instead of plots, because matplotlib is not installed; install the extra "
    "shardcore[demo], or matplotlib alone"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("directory", metavar="DIR", help="directory passed to shardcore.Metrics")
    parser.add_argument(
        "--output", metavar="FILE", help="HTML page to write (default: DIR/report.html)"
    )
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="directory of another run; marks the first step whose digests differ",
    )


def run(parsed: argparse.Namespace) -> int:
    """Write the page and say where it is. Raises OSError, or ValueError for a directory without
    metrics.
    """
    folder = Path(parsed.directory)
    path = Path(parsed.output) if parsed.output else folder / "report.html"
    other = Path(parsed.against) if parsed.against else None
    path.write_text(page(folder, other), encoding="utf-8")
    print(f"wrote {path}")
    if _matplotlib() is None:
        print(_WITHOUT_PLOTS)
    return 0


def page(folder: Path, other: Path | None = None) -> str:
    """Return the page of a directory's metrics. other: of a run to compare digests with. Raises
    OSError, ValueError.
    """
    columns = _columns(read_table(folder, "report"))
    if not columns["step"]:
        raise ValueError(
            f"report: {folder / FILE} contains no rows yet. Let Metrics run for at least one step "
            "(see `every`)"
        )
    facts = json.loads((folder / FACTS).read_text()) if (folder / FACTS).is_file() else {}
    digests, differs = _digests(folder, other)
    drawn = list(filter(None, (draw(plot, columns, differs) for plot in PLOTS)))
    heading = html.escape(str(facts.get("model", folder.resolve().name)))
    return _PAGE.format(
        title=f"{heading}: metrics",
        heading=heading,
        facts=" · ".join(html.escape(text) for text in [*_described_run(facts), *digests]),
        cards="".join(
            f"<div class=card><b>{value}</b><span>{name}</span></div>"
            for name, value in _cards(columns)
        ),
        plots="".join(drawn),
        folder=html.escape(str(folder)),
        rows=f"{len(columns['step']):,} rows to step {columns['step'][-1]:,.0f}",
    )


def _described_run(facts: Mapping[str, Any]) -> list[str]:
    """Return a description of a run."""
    forms = {
        "parameters": "{:,} parameters",
        "ranks": "{} ranks" if facts.get("ranks", 0) > 1 else "{} rank",
        "device": "{}",
    }
    return [
        forms.get(name, name + " {}").format(value)
        for name, value in facts.items()
        if name != "model"
    ]


def _digests(folder: Path, other: Path | None) -> tuple[list[str], int | None]:
    """Return a description of a run's digests, and the first step that differs from the other's."""
    if other is None and not (folder / run_digests.FILE).is_file():
        return [], None
    try:
        run = read_run(folder)
    except ValueError as error:  # the last row of a run that is training may be half written
        if other is not None:
            raise
        return [str(error)], None
    described = []
    if steps := [*run.rows]:
        every = run.heads[steps[-1]]["every"]
        described.append(f"digests of steps {steps[0]} to {steps[-1]}, every {every}")
    if other is None:
        return described, None
    result = compare(run, read_run(other))
    step = None if result.difference is None else result.difference.step
    return [*described, f"against {other}: {result}"], step


def _columns(rows: Sequence[Mapping[str, str]]) -> dict[str, Column]:
    """Return numbers by column, and the time of a step that no part has as "other_ms"."""
    names = list(rows[0]) if rows else ["step"]
    columns = {name: [float(row[name] or "nan") for row in rows] for name in names}
    if rows:
        parts = zip(*(columns[f"{part}_ms"] for part in PARTS), strict=True)
        columns["other_ms"] = [
            max(0.0, step - sum(of_step))
            for step, of_step in zip(columns["step_ms"], parts, strict=True)
        ]
    return columns


def _cards(columns: Mapping[str, Column]) -> list[tuple[str, str]]:
    """Return the figures above the plots: (name, value)."""

    def median(name: str) -> float:
        finite = [value for value in columns[name] if math.isfinite(value)]
        return statistics.median(finite or [math.nan])

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


# --- one plot -------------------------------------------------------------------------------------


def draw(plot: Plot, columns: Mapping[str, Column], mark: int | None = None) -> str:
    """Return a plot as a figure of HTML, with a line at the step `mark`; "" without data."""
    matplotlib = _matplotlib()
    points = ROWS if matplotlib is None else POINTS
    chosen = {
        label: _downsampled(columns[name], points)
        for label, name in plot.columns.items()
        if _is_drawn(name, columns[name])
    }
    if not chosen:
        return ""
    steps = _downsampled(columns["step"], points)
    if matplotlib is None:
        return _figure(plot, plot.title, columns, _table(steps, chosen, plot.unit))
    if plot.stacked:
        chosen = {
            label: [value if math.isfinite(value) else 0.0 for value in column]
            for label, column in chosen.items()
        }
        greatest: float = max(map(sum, zip(*chosen.values(), strict=True)))
    else:
        greatest = max(
            abs(value) for column in chosen.values() for value in column if math.isfinite(value)
        )
    size, suffix = _unit(greatest, plot.unit)
    lines = [[value / size for value in column] for column in chosen.values()]
    colours = [_COLOURS[number] for number, label in enumerate(plot.columns) if label in chosen]
    figure = matplotlib.figure.Figure(figsize=(5.6, 2.5), layout="tight")
    axes = figure.subplots()
    if plot.stacked and len(steps) == 1:
        below = [sum(line[0] for line in lines[:number]) for number in range(len(lines))]
        axes.bar(
            steps * len(lines), [line[0] for line in lines], bottom=below, width=0.5, color=colours
        )
    elif plot.stacked:
        axes.stackplot(steps, *lines, colors=colours)
    else:
        # a value between two unknown ones is in no line: it gets a mark
        finite = [False, *map(math.isfinite, lines[0]), False]
        alone = [
            index
            for index in range(len(lines[0]))
            if finite[index + 1] and not finite[index] and not finite[index + 2]
        ]
        axes.plot(steps, lines[0], color=colours[0], marker="o", markevery=alone)
    if mark is not None:
        axes.axvline(mark, color=_COLOURS[3], linestyle="--", linewidth=1.0)
    if plot.stacked or plot.from_zero:
        axes.set_ylim(bottom=0.0)
    axes.margins(x=0.0 if len(steps) > 1 else 1.0)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[:].set_visible(False)
    for text in (
        axes.xaxis.label,
        *axes.get_xticklabels(),
        *axes.get_yticklabels(),
        axes.yaxis.get_offset_text(),
    ):
        text.set(color="#76808f", fontsize=9)
    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(
            written, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    svg = written.getvalue().partition("<svg")[2]
    legend = "".join(
        f'<li><i style="background: {colour}"></i>{html.escape(label)}</li>'
        for label, colour in zip(chosen, colours, strict=True)
    )
    title = plot.title + (f" ({suffix.strip()})" if suffix.strip() else "")
    return _figure(
        plot,
        title,
        columns,
        f'<svg role="img" aria-label="{html.escape(plot.title)}"{svg}'
        + (f"<ul>{legend}</ul>" if plot.stacked else ""),
    )


def _figure(plot: Plot, title: str, columns: Mapping[str, Column], content: str) -> str:
    """Return a figure of HTML, with its caption."""
    last = ""
    if not plot.stacked:
        name = next(iter(plot.columns.values()))
        last = _number(columns[name][-1], plot.unit)
    return (
        f"<figure><figcaption><h2>{html.escape(title)}</h2>"
        + (f"<output>{last}</output>" if last else "")
        + f"<p>{html.escape(plot.about)}</p></figcaption>{content}</figure>"
    )


def _table(steps: Column, chosen: Mapping[str, Column], unit: str) -> str:
    """Return a table of HTML: a row for each step, a column for each label."""
    names = "".join(f"<th>{html.escape(label)}</th>" for label in ("step", *chosen))
    rows = [
        "".join(f"<td>{_number(value, unit)}</td>" for value in values)
        for values in zip(*chosen.values(), strict=True)
    ]
    body = "".join(
        f"<tr><td>{step:,.0f}</td>{row}</tr>" for step, row in zip(steps, rows, strict=True)
    )
    return f"<table><tr>{names}</tr>{body}</table>"


def _matplotlib() -> Any:
    """Return matplotlib; None if it is not installed."""
    try:
        import_module("matplotlib.figure")
    except ImportError:
        return None
    return import_module("matplotlib")


def _is_drawn(name: str, column: Column) -> bool:
    quiet = _QUIET.get(name)
    finite = [value for value in column if math.isfinite(value)]
    if quiet is not None:
        return any(value != quiet for value in finite)
    return bool(finite) and (not name.endswith(("_ms", "_bytes")) or any(finite))


def _downsampled(column: Column, points: int) -> Column:
    """Return at most so many values: means of ranges of equal length."""
    size = -(-len(column) // points)
    if size == 1:
        return column
    means = []
    for start in range(0, len(column), size):
        finite = [value for value in column[start : start + size] if math.isfinite(value)]
        means.append(statistics.fmean(finite or [math.nan]))
    return means


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
  --back: #f6f7f9; --card: #fff; --text: #1c2430; --soft: #657080; --edge: #dfe3e8;
}}
@media (prefers-color-scheme: dark) {{
  :root {{ --back: #12161c; --card: #1b2129; --text: #e6eaf0; --soft: #93a0b0; --edge: #2b333e; }}
}}
body {{ margin: 0 auto; max-width: 1220px; padding: 24px 16px;
  background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1, h2, header p, figure, figcaption p {{ margin: 0; }}
h2 {{ font-size: 16px; }}
header p, .card span, figcaption p, footer {{ color: var(--soft); font-size: 13px; }}
.cards, .plots {{ display: grid; gap: 12px; margin: 16px 0; }}
.cards {{ grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }}
.plots {{ grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); }}
.card, figure {{
  background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 12px 16px;
}}
.card b {{ display: block; font-size: 22px; white-space: nowrap; }}
figcaption {{ display: grid; grid-template-columns: 1fr auto; }}
output {{ font-weight: 600; }}
figcaption p {{ grid-column: 1 / -1; }}
svg {{ display: block; width: 100%; height: auto; }}
ul {{ list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px;
  margin: 4px 0 0; padding: 0; font-size: 13px; }}
table {{ border-spacing: 14px 2px; font-size: 13px; text-align: right; }}
i {{ display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }}
</style>
</head>
<body>
<header><h1>{heading}</h1><p>{facts}</p></header>
<div class="cards">{cards}</div>
<div class="plots">{plots}</div>
<footer>shardcore report · {rows} · {folder}</footer>
</body>
</html>
"""
