"""Writes metrics of a training to TensorBoard, CSV files and Weights & Biases, as a DeepSpeed configuration asks for.

Invariants: only rank 0 writes; packages are imported only there and only where their section is enabled, all of them before
anything is opened. Names, folders and file contents are DeepSpeed's.
Source: https://www.deepspeed.ai/docs/config-json/#monitoring-module; files are compared with those of version 0.19.8.
"""

import csv
import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardcore.metrics.writers import Event, Write, import_package, open_tensorboard, open_wandb

_FILES = {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"}
SECTIONS: dict[str, dict[str, Any]] = {  # keys of each section, and their defaults; all but `enabled` are text
    "tensorboard": _FILES,
    "wandb": {"enabled": False, "group": None, "team": None, "project": "deepspeed"},
    "csv_monitor": _FILES,
}


def check_section(where: str, value: Any) -> dict[str, Any] | None:
    """Return a section with its defaults, None if it is not enabled. where: its name, one of SECTIONS.

    Raises TypeError, or ValueError for an unknown key.
    """
    op, defaults = f"initialize: config {where}", SECTIONS[where]
    if not isinstance(value, Mapping):
        raise TypeError(f"{op} has {value!r}; expected an object with keys")
    for key, given in value.items():
        if key not in defaults:
            near = difflib.get_close_matches(str(key), list(defaults), n=1)
            hint = f"did you mean {where}.{near[0]}?" if near else f"known keys here: {', '.join(sorted(defaults))}"
            raise ValueError(f"{op}.{key} is not supported; expected it to be absent ({hint})")
        if isinstance(defaults[key], bool):
            if not isinstance(given, bool):
                raise TypeError(f"{op}.{key} has {given!r}; expected true or false")
        elif not (isinstance(given, str) or given is defaults[key]):
            raise TypeError(f"{op}.{key} has {given!r}; expected text")
    found = {**defaults, **value}
    return found if found["enabled"] else None


def step_events(samples: int, **metrics: Any) -> list[Event]:
    """Return events with DeepSpeed's names, such as Train/Samples/lr for lr=; metrics that are None are left out."""
    return [(f"Train/Samples/{name}", value, samples) for name, value in metrics.items() if value is not None]


class MonitorMaster:
    """Writes events to what is enabled, on rank 0; elsewhere nothing.

    enabled: whether any section is, on every rank.
    """

    def __init__(self, sections: Mapping[str, Mapping[str, Any] | None], rank: int | None = None) -> None:
        """Open what is enabled: folders and files under output_path/job_name, a run of Weights & Biases.

        sections: by their names in the configuration, as written or as check_section returns them. rank: default, that in
        torch.distributed's group, 0 without one. Raises ValueError, TypeError, OSError, and ImportError (on rank 0) for a
        package that is not installed.
        """
        for name in sections:
            if name not in SECTIONS:
                raise ValueError(f"MonitorMaster: sections has {name!r}; expected {', '.join(SECTIONS)}")
        checked = {name: check_section(name, value) for name, value in sections.items() if value is not None}
        chosen = {name: options for name, options in checked.items() if options is not None}
        self.enabled = bool(chosen)
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._writers: list[Write] = []
        if rank != 0:
            return
        packages = {
            name: import_package(name, f"initialize: config {name}.enabled is true") for name in chosen if name != "csv_monitor"
        }
        for name, options in chosen.items():
            self._writers.append(_OPEN[name](options, packages.get(name)))

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write (name, value, samples so far) to each; a tensor's value is waited for. Raises OSError."""
        if not self._writers:
            return
        events = [(name, value.item() if isinstance(value, torch.Tensor) else value, step) for name, value, step in event_list]
        for write in self._writers:
            write(events)


def _folder(options: Mapping[str, Any]) -> Path:
    path: Path = Path(options["output_path"]) / options["job_name"]
    path.mkdir(parents=True, exist_ok=True)
    return path


def _open_csv(options: Mapping[str, Any], _: Any) -> Write:
    """A file for each name: "step" and the last part of the name, then a line for each event.

    A file that is there already is continued; DeepSpeed writes its head again, between the lines.
    """
    folder = _folder(options)

    def write(events: list[Event]) -> None:
        for name, value, step in events:
            with open(folder / (name.replace("/", "_").replace(" ", "_") + ".csv"), "a", newline="") as file:
                rows = csv.writer(file)
                if file.tell() == 0:
                    rows.writerow(["step", name.rsplit("/", 1)[-1]])
                rows.writerow([step, value])

    return write


_OPEN: dict[str, Callable[[Mapping[str, Any], Any], Write]] = {
    "tensorboard": lambda options, package: open_tensorboard(package, _folder(options)),
    "wandb": lambda options, package: open_wandb(
        package, {"project": options["project"], "group": options["group"], "entity": options["team"]}
    ),
    "csv_monitor": _open_csv,
}
