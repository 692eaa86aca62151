"""Timelines: what ran when, in lanes below each other, drawn as bars."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.pictures import new_figure, save_figure


@dataclass(frozen=True)
class Span:
    """Something of one kind that ran in a lane from `start` to `end`, in seconds of any clock."""

    lane: str
    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Chart:
    """One timeline: its spans, and its lanes from top to bottom."""

    title: str
    spans: Sequence[Span]
    lanes: Sequence[str]


def draw(path: Path, charts: Sequence[Chart], colours: Mapping[str, str]) -> None:
    """Draw charts above each other, on one axis of milliseconds; says so, and draws nothing, where matplotlib is missing.

    colours: by kind of span.
    """
    figure = new_figure(path, 12, sum(0.6 * len(chart.lanes) + 0.6 for chart in charts) + 1.2)
    if figure is None:
        return
    heights = [len(chart.lanes) for chart in charts]
    rows = figure.subplots(len(charts), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    for (axes,), chart in zip(rows, charts, strict=True):
        begin = min(span.start for span in chart.spans)
        for height, lane in enumerate(reversed(chart.lanes)):
            for kind in sorted({span.kind for span in chart.spans if span.lane == lane}):
                spans = [span for span in chart.spans if span.lane == lane and span.kind == kind]
                bars = [((span.start - begin) * 1e3, (span.end - span.start) * 1e3) for span in spans]
                axes.broken_barh(bars, (height - 0.4, 0.8), facecolors=colours[kind], edgecolors="white", linewidth=0.3)
        axes.set_yticks(range(len(chart.lanes)), list(chart.lanes)[::-1])
        axes.set_title(chart.title, fontsize=10, loc="left")
    for kind in [kind for kind in colours if any(span.kind == kind for chart in charts for span in chart.spans)]:
        rows[-1][0].broken_barh([], (0, 0), facecolors=colours[kind], label=kind)
    rows[-1][0].set_xlabel("ms")
    figure.legend(loc="outside lower center", ncols=8)
    save_figure(figure, path)
