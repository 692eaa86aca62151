"""The page that `shardcore report` writes: every plot, with the values of the table, and nothing from elsewhere."""

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import shardcore
from shardcore import cli
from shardcore.distributed.clock import PARTS
from shardcore.metrics import report
from shardcore.metrics.writers import COLUMNS, Table
from tests.support.models import batch_of, loss_of, make_net

VOID = {"meta", "line", "polyline", "polygon", "circle"}


class Page(HTMLParser):
    """Checks that elements are closed, and collects figures: title -> the points of each line or area."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.figures: dict[str, list[list[tuple[float, float]]]] = {}
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        found = dict(attributes)
        assert not {"src", "href", "srcset"} & set(found)
        if tag not in VOID:
            self.open.append(tag)
        self.take(tag, found)

    def take(self, tag: str, found: dict[str, str]) -> None:
        if tag == "svg":
            self.figures[found["aria-label"]] = []
        elif "points" in found:
            points = [tuple(map(float, point.split(","))) for point in found["points"].split()]
            self.figures[list(self.figures)[-1]].append(points)  # type: ignore[arg-type]

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.take(tag, dict(attributes))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    table = Table(folder, 0)
    for row in rows:
        quiet = {"step_ms": 1.0, "skipped_steps": 0, "loss_scale": 1.0, **{f"{part}_ms": 0.0 for part in PARTS}}
        table.write(dict.fromkeys(COLUMNS) | quiet | row)


def everything(step: int) -> dict[str, Any]:
    return {name: 1.0 + number * 0.5 + step for number, name in enumerate(COLUMNS)} | {"step": step, "step_ms": 200.0}


def test_a_page_has_every_plot_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, [everything(step) for step in range(1, 9)])
    (tmp_path / "run.json").write_text(
        json.dumps({"model": "<Net>", "parameters": 12345, "ranks": 2, "device": "CPU", "stage": 3})
    )
    assert cli.main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert [*page.figures] == [plot.title for plot in report.PLOTS]
    assert len(page.figures) == 13
    assert all(len(page.figures[plot.title]) == (len(plot.columns) if plot.stacked else 1) for plot in report.PLOTS)
    assert not re.search(r"http|//|url\(|<script|<img|<link|@import", text.replace(str(tmp_path), ""))
    assert "<Net>" in page.text["h1"]
    assert "12,345 parameters · 2 ranks · CPU · stage 3" in page.text["p"]


def test_what_is_not_known_has_no_plot(tmp_path: Path) -> None:
    write(tmp_path, [{"step": step, "loss": 1.0 / step, "weights_device_bytes": 0} for step in (1, 2, 3)])
    page = Page(report.page(tmp_path))
    assert [*page.figures] == ["Loss", "Time of a step"]
    assert page.text["b"] == ["0.3333", "1 ms", "0"]


def heights(folder: Path, title: str) -> list[list[float]]:
    return [[y for _, y in line] for line in Page(report.page(folder)).figures[title]]


def test_lines_are_as_high_as_values(tmp_path: Path) -> None:
    losses = [4.0, 2.0, 3.0, 0.0]
    write(tmp_path, [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)])
    (line,) = heights(tmp_path, "Loss")
    bottom, top = line[3], line[0]
    assert bottom > top, "y goes down"
    assert [(bottom - y) / (bottom - top) * 4.0 for y in line] == pytest.approx(losses, abs=0.01)
    write(tmp_path / "other", [{"step": step, "loss": loss} for step, loss in enumerate([4.0, 1.0, 3.0, 0.0], 1)])
    assert heights(tmp_path / "other", "Loss") != [line]


def test_areas_lie_on_each_other(tmp_path: Path) -> None:
    parts = {"forward_ms": 10.0, "backward_ms": 20.0, "exposed_reduce_ms": 5.0}
    write(tmp_path, [{"step": step, "step_ms": 50.0, **parts} for step in (1, 2)])
    areas = heights(tmp_path, "Time of a step")
    assert len(areas) == 4, "15 ms are in no part"
    ms = (areas[0][-1] - areas[-1][0]) / 50.0
    assert [(area[-1] - area[0]) / ms for area in areas] == pytest.approx([10, 20, 5, 15], abs=0.1)
    assert all(above[-1] == below[0] for below, above in pairwise(areas))


def test_gaps_one_row_and_equal_values(tmp_path: Path) -> None:
    norms = [1.0, 2.0, float("inf"), float("nan"), 3.0, 2.0, None]
    write(tmp_path, [{"step": step, "grad_norm": norm, "loss": 2.0} for step, norm in enumerate(norms, 1)])
    assert [len(run) for run in heights(tmp_path, "Gradient norm")] == [2, 2]
    assert len({*heights(tmp_path, "Loss")[0]}) == 1
    write(tmp_path / "one", [everything(7)])
    page = Page(report.page(tmp_path / "one"))
    assert len(page.figures) == 13
    assert len(page.figures["Memory: host"][0]) == 4, "a bar"
    nothing = [{"step": 1, "loss": float("nan")}]
    write(tmp_path / "nan", nothing)
    assert "Loss" not in Page(report.page(tmp_path / "nan")).figures


def test_many_rows_are_drawn_as_means(tmp_path: Path) -> None:
    write(tmp_path, [{"step": step, "loss": float(step % 2)} for step in range(1, 1001)])
    (line,) = heights(tmp_path, "Loss")
    assert 300 < len(line) <= report.POINTS
    assert report._thin([1.0, 2.0]) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (2.5, 5.6, [2, 3, 4, 5, 6]),
        (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]),
        (3.0, 3.0, [1, 2, 3, 4, 5]),
        (0.0, 0.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (1e-4, 3e-4, [1e-4, 1.5e-4, 2e-4, 2.5e-4, 3e-4]),
    ],
)
def test_ticks_are_round_and_around_the_values(low: float, high: float, expected: list[float]) -> None:
    assert report._ticks(low, high) == pytest.approx(expected)


def test_numbers_of_axes_have_the_digits_that_they_need() -> None:
    assert report._labels([0.0, 0.25, 0.5], "") == ["0.00", "0.25", "0.50"]
    assert report._labels([0.0, 2000.0], "k") == ["0", "2,000k"]
    assert report._labels([0.0, 1.5e-6, 3e-6], "") == ["0", "1.5e-06", "3e-06"]
    assert report._number(3 * 2.0**20, "B") == "3 MiB"
    assert report._number(1500.0, "ms") == "1.5 s"
    assert report._number(float("inf"), "") == "inf"
    assert report._number(float("nan"), "") == ""


def test_a_real_training_has_a_page(tmp_path: Path) -> None:
    model: Any = make_net()
    model, optimizer = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), offload={"optimizer": "cpu"})
    metrics = shardcore.Metrics(model, tmp_path, log=False)
    for step in range(3):
        with metrics.count_flops():
            loss = loss_of(model, batch_of(step, 0, 0))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics.step(loss=loss, tokens=4)
    assert cli.main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0
    page = Page((tmp_path / "page.html").read_text())
    shown = {"Loss", "Learning rate", "Gradient norm", "Tokens per second", "TFLOP/s", "Time of a step", "Memory: host"}
    assert shown <= set(page.figures)
    assert "offload optimizer: cpu" in page.text["p"][0]
    assert page.text["h1"] == ["Net"]


@pytest.mark.parametrize("content", [None, ",".join(COLUMNS) + "\n", "step,loss\n1,2\n"])
def test_a_directory_without_metrics_is_named(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(tmp_path)])
    assert stop.value.code == 2
    assert re.search(r"report: .*(has no metrics.csv|has no rows|has other columns); expected", capsys.readouterr().err)
    assert not (tmp_path / "report.html").exists()
