"""The page that `shardcore report` writes: every plot, with the values of the table, and nothing
from elsewhere.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="it draws the plots")

import shardcore
from shardcore import cli
from shardcore.distributed.clock import PARTS
from shardcore.metrics import report
from shardcore.metrics.writers import COLUMNS, Table
from tests.support.models import batch_of, loss_of, make_net


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    table = Table(folder, 0)
    for row in rows:
        quiet = {
            "step_ms": 1.0,
            "skipped_steps": 0,
            "loss_scale": 1.0,
            **{f"{part}_ms": 0.0 for part in PARTS},
        }
        table.write(dict.fromkeys(COLUMNS) | quiet | row)


def everything(step: int) -> dict[str, Any]:
    return {name: 1.0 + number * 0.5 + step for number, name in enumerate(COLUMNS)} | {
        "step": step,
        "step_ms": 200.0,
    }


def titles(text: str) -> list[str]:
    return [title.partition(" (")[0] for title in re.findall("<h2>(.*?)</h2>", text)]


def test_a_page_has_every_plot_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, [everything(step) for step in range(1, 9)])
    (tmp_path / "run.json").write_text(
        json.dumps({"model": "<Net>", "parameters": 12345, "ranks": 2, "device": "CPU", "stage": 3})
    )
    assert cli.main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert titles(text) == [plot.title for plot in report.PLOTS]
    assert len(re.findall("<svg", text)) == 13
    assert not re.search(r"src=|srcset|href=\"[^#]|url\([^#]|<script|<img|<link|@import", text)
    assert "<h1>&lt;Net&gt;</h1><p>12,345 parameters · 2 ranks · CPU · stage 3</p>" in text


def test_what_is_not_known_has_no_plot(tmp_path: Path) -> None:
    write(
        tmp_path,
        [{"step": step, "loss": 1.0 / step, "weights_device_bytes": 0} for step in (1, 2, 3)],
    )
    text = report.page(tmp_path)
    assert titles(text) == ["Loss", "Time of a step"]
    assert re.findall("<b>(.*?)</b>", text) == ["0.3333", "1 ms", "0"]


def drawn(
    monkeypatch: pytest.MonkeyPatch, folder: Path, title: str, other: Path | None = None
) -> Any:
    """Return the axes on which a plot of the page was drawn."""
    figures = []
    kind = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(
        "matplotlib.figure.Figure", lambda **options: figures.append(kind(**options)) or figures[-1]
    )
    text = report.page(folder, other)
    monkeypatch.undo()
    return figures[titles(text).index(title)].axes[0]


def test_lines_and_areas_have_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"forward_ms": 10.0, "backward_ms": 20.0, "exposed_reduce_ms": 5.0}
    losses = [4.0, 2.0, float("nan"), 0.0]
    write(
        tmp_path,
        [
            {"step": step, "loss": loss, "step_ms": 50.0, **parts}
            for step, loss in enumerate(losses, 1)
        ],
    )
    (line,) = drawn(monkeypatch, tmp_path, "Loss").lines
    assert [*line.get_xdata()] == [1, 2, 3, 4]
    assert [*line.get_ydata()] == pytest.approx(losses, nan_ok=True)
    assert line.get_markevery() == [3], "a value that stands alone"
    areas = drawn(monkeypatch, tmp_path, "Time of a step").collections
    assert [max(y for _, y in area.get_paths()[0].vertices) for area in areas] == [
        10,
        30,
        35,
        50,
    ], "15 ms are in no part"


def test_one_row_is_a_dot_or_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [everything(7)])
    assert len(titles(report.page(tmp_path))) == 13
    assert drawn(monkeypatch, tmp_path, "Loss").lines[0].get_markevery() == [0]
    bars = drawn(monkeypatch, tmp_path, "Time of a step").patches
    assert [above.get_y() for above in bars[1:]] == pytest.approx(
        [bar.get_y() + bar.get_height() for bar in bars[:-1]]
    )


def test_many_rows_are_drawn_as_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [{"step": step, "loss": float(step % 2)} for step in range(1, 1001)])
    (line,) = drawn(monkeypatch, tmp_path, "Loss").lines
    assert 300 < len(line.get_xdata()) <= report.POINTS


def test_numbers_for_readers() -> None:
    assert report._number(3 * 2.0**20, "B") == "3 MiB"
    assert report._number(1500.0, "ms") == "1.5 s"
    assert report._number(float("inf"), "") == "inf"
    assert report._number(float("nan"), "") == ""


def test_a_long_run_is_drawn_to_its_last_row() -> None:
    drawn = report._downsampled([float(row) for row in range(3 * report.POINTS - 2)], report.POINTS)
    assert len(drawn) == report.POINTS
    assert drawn[:2] == [1.0, 4.0]
    assert drawn[-1] == 3.0 * report.POINTS - 3.0


def test_a_real_training_has_a_page(tmp_path: Path) -> None:
    model: Any = make_net()
    model, optimizer = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), offload={"optimizer": "cpu"}
    )
    metrics = shardcore.Metrics(model, tmp_path, log=False)
    for step in range(3):
        with metrics.count_flops():
            loss = loss_of(model, batch_of(step, 0, 0))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics.step(loss=loss, tokens=4)
    assert cli.main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    shown = {
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Tokens per second",
        "TFLOP/s",
        "Time of a step",
        "Memory: host",
    }
    assert shown <= set(titles(text))
    assert "offload optimizer: cpu" in text
    assert "<h1>Net</h1>" in text


def test_the_step_in_which_runs_part_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        model: Any = make_net()
        optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
        model, optimizer = shardcore.shard(model, optimizer, 2)
        metrics = shardcore.Metrics(model, folder, digests=1, log=False)
        for step in range(1, 5):
            loss = loss_of(model, batch_of(9 if (folder, step) == (other, 3) else step, 0, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            metrics.step(loss=loss)
    path = one / "digests.jsonl"
    digests = path.read_text()
    path.write_text(digests[:-9])
    assert f"line 5 of {path} is cut short" in report.page(one), "a row that is being written"
    path.write_text(digests)
    assert "</p>" in report.page(one).partition(" · digests of steps 1 to 4, every 1")[2]
    assert cli.main(["report", str(one), "--against", str(other)]) == 0
    text = (one / "report.html").read_text()
    assert f" · against {other}: step 3: the batches differ, the weights after step 2 agree" in text
    line, mark = drawn(monkeypatch, one, "Loss", other).lines
    assert len(line.get_xdata()) == 4
    assert list(mark.get_xdata()) == [3, 3]
    assert len(drawn(monkeypatch, one, "Loss", one).lines) == 1


def test_without_matplotlib_the_page_has_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, [everything(step) for step in range(1, 25)])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert titles(text) == [plot.title for plot in report.PLOTS]
    assert "<svg" not in text
    loss = text.partition("<h2>Loss</h2>")[2].partition("</figure>")[0]
    first = 1.0 + 0.5 * COLUMNS.index("loss")
    assert "<tr><th>step</th><th>loss</th></tr>" in loss
    # a row has the mean of two steps
    assert f"<td>{first + 1.5:.4g}</td>" in loss
    assert loss.count("<tr>") == 1 + report.ROWS
    *_, wrote, why = capsys.readouterr().out.splitlines()
    assert wrote.startswith("wrote ")
    assert "shardcore[demo]" in why


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "contains no metrics.csv"),
        ("", "metrics.csv contains no rows"),
        (",".join(COLUMNS) + "\n", "metrics.csv contains no rows"),
        ("step,loss\n1,2\n", "contains other columns"),
    ],
)
def test_a_directory_without_metrics_is_named(
    content: str | None, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "metrics.csv").write_text(content)
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(tmp_path)])
    assert stop.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"shardcore report: error: {tmp_path}")
    assert cause in said
    assert not (tmp_path / "report.html").exists()
