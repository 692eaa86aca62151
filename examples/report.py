"""Shows trainings: a progress bar while they run; a table, a JSON file and a picture of the loss
when they are done.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path

from examples.pictures import new_figure, save_figure
from examples.training import TAIL_STEPS, Training

try:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
except ImportError:
    Progress = None


class ProgressBar:
    """Shows step, loss and tokens/s of one training: a bar on a terminal that has rich, plain lines
    elsewhere.

    Use as a context manager; ``shown`` False (ranks above 0) prints nothing.
    """

    def __init__(self, title: str, steps: int, tokens_per_step: int, shown: bool) -> None:
        self.title = title
        self.steps = steps
        self.tokens_per_step = tokens_per_step
        self.shown = shown
        self.started, self.updates = time.perf_counter(), 0
        self.bar = None
        if shown and Progress is not None and Console().is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
            )
            self.bar = Progress(*columns, TimeRemainingColumn(), refresh_per_second=4)
            self.task = self.bar.add_task(title, total=steps, numbers="")

    def __enter__(self) -> "ProgressBar":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, step: int, loss: float, seconds: float) -> None:
        """Take note of step ``step`` (from 0), its loss and how long it took."""
        done = step + 1
        self.updates += 1  # fewer than done in a training that goes on from a checkpoint
        numbers = f"loss {loss:.3f}  {self.tokens_per_step / seconds:,.0f} tokens/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, numbers=numbers)
        elif self.shown and (done % max(1, self.steps // 10) == 0 or done in (1, self.steps)):
            left = (time.perf_counter() - self.started) / self.updates * (self.steps - done)
            print(
                f"{self.title}  step {done:4d}/{self.steps}  {numbers}  {left:.0f} s left",
                flush=True,
            )


def megabytes(count: int) -> str:
    """Format bytes as MB (10^6)."""
    return f"{count / 1e6:,.1f} MB"


def result_table(trainings: list[Training]) -> str:
    """Format one column a training: losses, step time, bytes per rank by kind, hash of the final
    weights.
    """
    kinds = list(
        dict.fromkeys(kind for training in trainings for kind in training.bytes_per_rank[0])
    )
    rows = [
        ["", *(str(training.placement) for training in trainings)],
        ["first loss", *(f"{training.losses[0]:.4f}" for training in trainings)],
        [
            f"last loss (mean of {min(TAIL_STEPS, len(trainings[0].losses))})",
            *(f"{training.last_loss:.4f}" for training in trainings),
        ],
        [
            "step time (median)",
            *(f"{training.median_step_seconds * 1e3:.0f} ms" for training in trainings),
        ],
        [
            "tokens/s",
            *(
                f"{training.tokens_per_step / training.median_step_seconds:,.0f}"
                for training in trainings
            ),
        ],
    ]
    if any(training.skipped_steps for training in trainings):
        rows.append(["skipped steps", *(str(training.skipped_steps) for training in trainings)])
    for kind in kinds:
        most = (
            max(of_rank.get(kind, 0) for of_rank in training.bytes_per_rank)
            for training in trainings
        )
        rows.append([f"{kind} per rank", *(megabytes(count) for count in most)])
    rows.append(
        ["weights sha256", *(training.weights_sha256[0][:16] + "..." for training in trainings)]
    )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def training_as_json(training: Training) -> dict[str, object]:
    """Turn a training into what JSON can hold."""
    return {
        "stage": training.placement.stage,
        "offload": training.placement.offload,
        "first_loss": training.losses[0],
        "last_loss": training.last_loss,
        "median_step_seconds": training.median_step_seconds,
        "tokens_per_step": training.tokens_per_step,
        "bytes_per_rank": training.bytes_per_rank,
        "weights_sha256": training.weights_sha256,
        "skipped_steps": training.skipped_steps,
        "losses": training.losses,
        "step_seconds": training.step_seconds,
    }


def write_json(path: Path, result: Mapping[str, object]) -> None:
    """Write ``result``; the directory must exist."""
    path.write_text(json.dumps(result, indent=1) + "\n")


def write_loss_png(path: Path, trainings: list[Training], title: str) -> None:
    """Draw the loss of each training over the steps."""
    figure = new_figure(path, 8, 4.5)
    if figure is None:
        return
    axes = figure.add_subplot()
    # Equal curves lie on each other: the first is wide and pale, the next a thin dashed line on top
    # of it.
    styles = [
        {"linewidth": 5, "alpha": 0.35},
        {"linewidth": 1.2, "linestyle": "--", "color": "black"},
    ]
    for training, style in zip(trainings, styles, strict=False):
        label = (
            f"{training.placement}: {training.last_loss:.3f} (mean of the last "
            f"{min(TAIL_STEPS, len(training.losses))})"
        )
        axes.plot(range(1, len(training.losses) + 1), training.losses, label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)
