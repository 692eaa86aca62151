"""The outputs of metrics: a CSV file, TensorBoard, Weights & Biases.

Packages are imported when a setting asks for them, on the rank that writes.
"""

import csv
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from shardcore.checkpoint.directory import replacing
from shardcore.distributed.clock import PARTS

# (name, value, step): the name as "Train/Samples/lr"
Event = tuple[str, Any, int]
Write = Callable[[list[Event]], None]

FILE, FACTS = "metrics.csv", "run.json"
KINDS = ("weights", "gradients", "master", "states", "communication")
TIERS = ("device", "cpu", "nvme")
COLUMNS = (
    *(
        "step",
        "loss",
        "lr",
        "grad_norm",
        "loss_scale",
        "skipped_steps",
        "step_ms",
        "tokens_per_s",
        "tflops_per_s",
    ),
    *(f"{part}_ms" for part in PARTS),
    *(
        "sent_gradients_bytes",
        "sent_weights_bytes",
        "to_host_bytes",
        "from_host_bytes",
        "to_nvme_bytes",
        "from_nvme_bytes",
    ),
    *(f"{kind}_{tier}_bytes" for tier in TIERS for kind in KINDS),
    "device_peak_bytes",
)
_PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def import_package(name: str, setting: str) -> Any:
    """Import the package for "tensorboard" or "wandb". ImportError if it is not installed.

    setting: the setting that asks for it, such as "Metrics: wandb is True".
    """
    try:
        return import_module(_PACKAGES[name])
    except ImportError as error:
        option, value = setting.rsplit(" is ", 1)
        off = "false" if value == "true" else "False"
        raise ImportError(
            f"{setting}, but the package {name} cannot be imported ({error}). Install it (pip "
            f"install {name}), or set {option.split()[-1]} to {off}"
        ) from error


def open_tensorboard(package: Any, folder: Path) -> Write:
    """Return a writer of events to TensorBoard's files in `folder`."""
    writer = package.SummaryWriter(log_dir=str(folder))

    def write(events: list[Event]) -> None:
        for event in events:
            writer.add_scalar(*event)
        writer.flush()

    return write


def open_wandb(package: Any, options: Mapping[str, Any]) -> Write:
    """Begin a run of Weights & Biases (`options` are those of its init) and return a writer of
    events to it.
    """
    package.init(**options)

    def write(events: list[Event]) -> None:
        for name, value, step in events:
            package.log({name: value}, step=step)

    return write


class Table:
    """The CSV file: COLUMNS, then the rows. Unknown values are empty."""

    def __init__(self, folder: Path, start: int) -> None:
        """Begin the file, or go on after step `start` of one that is there: later rows are left
        out.

        Raises FileExistsError if there is one and `start` is 0; ValueError for one with other
        columns; OSError.
        """
        self._path = folder / FILE
        rows: list[dict[str, str]] = []
        if self._path.exists():
            if start == 0:
                raise FileExistsError(
                    f"Metrics: {self._path} already exists. Use another directory, or continue "
                    "after step N with start=N"
                )
            rows = [row for row in read_table(folder, "Metrics") if int(row["step"]) <= start]
        # which may fail: the rows stay
        with replacing(self._path) as new, open(new, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row. Raises OSError."""
        with open(self._path, "a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)


def read_table(folder: Path, op: str) -> list[dict[str, str]]:
    """Return the rows of a directory's CSV file. Raises FileNotFoundError if there is none,
    ValueError for other columns.
    """
    path = folder / FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{op}: {folder} contains no {FILE}. Pass the directory given to shardcore.Metrics"
        )
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames  # read while the file is open: None in an empty file
        rows = [row for row in reader if None not in row.values()]  # but for one that is cut off
    if names is not None and tuple(names) != COLUMNS:
        raise ValueError(
            f"{op}: {path} contains other columns than shardcore.Metrics writes "
            f"({', '.join(COLUMNS[:4])}, ...)"
        )
    return rows


def as_events(row: Mapping[str, Any]) -> list[Event]:
    """Return a row as events, without unknown values."""
    step = row["step"]
    return [
        (name, value, step) for name, value in row.items() if name != "step" and value is not None
    ]


def as_line(row: Mapping[str, Any]) -> str:
    """Return a row as a line of progress: the values that change from step to step."""
    formats: Iterable[tuple[str, str]] = (
        ("loss", "{:.4f}"),
        ("lr", "{:.3g}"),
        ("grad_norm", "{:.3g}"),
        ("loss_scale", "{:g}"),
        ("skipped_steps", "{}"),
        ("step_ms", "{:.1f}"),
        ("tokens_per_s", "{:,.0f}"),
        ("tflops_per_s", "{:.3g}"),
    )
    hidden = {"loss_scale": 1.0, "skipped_steps": 0}
    parts = [
        f"{name} {form.format(row[name])}"
        for name, form in formats
        if row[name] is not None and row[name] != hidden.get(name)
    ]
    return " | ".join([f"step {row['step']}", *parts])
