"""Writes metrics of a training to TensorBoard, CSV files and Weights & Biases, as a DeepSpeed
configuration asks for.

Invariants: only rank 0 writes; packages are imported only there and only where their section is
enabled, all of them before anything is opened. Names, folders and file contents are DeepSpeed's.
Source: https://www.deepspeed.ai/docs/config-json/#monitoring-module; files are compared with those
of version 0.19.8.
"""

import csv
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardcore.metrics.writers import Event, Write, import_package, open_tensorboard, open_wandb


def step_events(samples: int, **metrics: Any) -> list[Event]:
    """Return events with DeepSpeed's names, such as Train/Samples/lr for lr=; metrics that are
    None are left out.
    """
    return [
        (f"Train/Samples/{name}", value, samples)
        for name, value in metrics.items()
        if value is not None
    ]


class MonitorMaster:
    """Writes events to what is enabled, on rank 0; elsewhere nothing.

    enabled: whether any section is, on every rank.
    """

    def __init__(
        self, sections: Mapping[str, Mapping[str, Any] | None], rank: int | None = None
    ) -> None:
        """Open what is enabled: folders and files under output_path/job_name, a run of Weights &
        Biases.

        sections: by their names in the configuration, as they are there; None for one that is off.
        rank: default, that in torch.distributed's group, 0 without one. Raises ValueError for
        another name; on rank 0 TypeError for another key, OSError, and ImportError for a package
        that is not installed.
        """
        for name in sections:
            if name not in _OPEN:
                raise ValueError(
                    f"MonitorMaster: sections has {name!r}; expected {', '.join(_OPEN)}"
                )
        chosen = {
            name: options
            for name, options in sections.items()
            if options and options.get("enabled")
        }
        self.enabled = bool(chosen)
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._writers: list[Write] = []
        if rank != 0:
            return
        packages = {
            name: import_package(name, f"initialize: config {name}.enabled is true")
            for name in chosen
            if name != "csv_monitor"
        }
        for name, options in chosen.items():
            self._writers.append(_OPEN[name](packages.get(name), **options))

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write (name, value, samples so far) to each; a tensor's value is waited for. Raises
        OSError.
        """
        if not self._writers:
            return
        events = [
            (name, value.item() if isinstance(value, torch.Tensor) else value, step)
            for name, value, step in event_list
        ]
        for write in self._writers:
            write(events)


def _folder(output_path: str, job_name: str) -> Path:
    path = Path(output_path) / job_name
    path.mkdir(parents=True, exist_ok=True)
    return path


# What opens each section: its keys are arguments, with DeepSpeed's defaults.


def _open_tensorboard(
    package: Any, enabled: bool = False, output_path: str = "", job_name: str = "DeepSpeedJobName"
) -> Write:
    return open_tensorboard(package, _folder(output_path, job_name))


def _open_wandb(
    package: Any,
    enabled: bool = False,
    group: str | None = None,
    team: str | None = None,
    project: str = "deepspeed",
) -> Write:
    return open_wandb(package, {"project": project, "group": group, "entity": team})


def _open_csv(
    package: Any, enabled: bool = False, output_path: str = "", job_name: str = "DeepSpeedJobName"
) -> Write:
    """A file for each name: "step" and the last part of the name, then a line for each event.

    A file that is there already is continued; DeepSpeed writes its head again, between the lines.
    """
    folder = _folder(output_path, job_name)

    def write(events: list[Event]) -> None:
        for name, value, step in events:
            with open(
                folder / (name.replace("/", "_").replace(" ", "_") + ".csv"), "a", newline=""
            ) as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(["step", name.rsplit("/", 1)[-1]])
                rows.writerow([step, value])

    return write


_OPEN: dict[str, Callable[..., Write]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "csv_monitor": _open_csv,
}
SECTIONS = tuple(_OPEN)
