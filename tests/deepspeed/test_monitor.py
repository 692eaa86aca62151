"""Metrics of a training: CSV files against DeepSpeed's own, TensorBoard's read back, Weights &
Biases by a stand-in.
"""

import csv
import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardcore.deepspeed.config import read_config
from shardcore.deepspeed.keys import KEYS
from shardcore.deepspeed.monitor import _OPEN, MonitorMaster, step_events
from tests.support.ranks import run_ranks

EVENTS = [
    step_events(8, lr=1e-3, loss_scale=65536.0),
    [("Train/Samples/elapsed time ms", 12, 8), ("plain", 0.1, 8), ("a/b c/d e", float("nan"), 8)],
    step_events(16, lr=1e-4 / 3, loss_scale=32768.0, train_loss=2.5),
]


def section(folder: Path, **options: Any) -> dict[str, Any]:
    return {"enabled": True, "output_path": str(folder), **options}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def written(folder: Path, events: Any = EVENTS, **options: Any) -> dict[str, bytes]:
    writer = MonitorMaster({"csv_monitor": section(folder, **options)})
    for some in events:
        writer.write_events(some)
    return contents(folder)


@pytest.mark.parametrize("options", [{}, {"job_name": "my job"}, {"job_name": "a/b"}])
def test_csv_files_are_deepspeeds(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed", reason="comparisons with DeepSpeed need it")
    from deepspeed.monitor import config, csv_monitor

    monkeypatch.setattr(csv_monitor.dist, "get_rank", lambda: 0)  # there is no group
    theirs = csv_monitor.csvMonitor(config.CSVConfig(**section(tmp_path / "theirs", **options)))
    for events in EVENTS:
        theirs.write_events(events)
    expected = contents(tmp_path / "theirs")
    assert len(expected) == 6
    assert written(tmp_path / "ours", **options) == expected
    assert written(tmp_path / "short", EVENTS[:2], **options) != expected
    assert (
        written(tmp_path / "other", [*EVENTS[:2], step_events(17, lr=0.1)], **options) != expected
    )


def test_defaults_are_deepspeeds() -> None:
    pytest.importorskip("deepspeed", reason="comparisons with DeepSpeed need it")
    from deepspeed.monitor import config

    theirs = {
        "tensorboard": config.TensorBoardConfig,
        "wandb": config.WandbConfig,
        "csv_monitor": config.CSVConfig,
    }
    for name, kind in theirs.items():
        ours = {
            key: argument.default
            for key, argument in list(signature(_OPEN[name]).parameters.items())[1:]
        }
        assert ours == kind().model_dump()
        assert {f"{name}.{key}" for key in ours} == {
            path for path in KEYS if path.startswith(f"{name}.")
        }


def test_a_csv_file_by_hand_and_continued(tmp_path: Path) -> None:
    path = "DeepSpeedJobName/Train_Samples_lr.csv"
    assert written(tmp_path, [step_events(8, lr=0.25)])[path] == b"step,lr\r\n8,0.25\r\n"
    assert (
        written(tmp_path, [step_events(16, lr=torch.tensor(0.5))])[path]
        == b"step,lr\r\n8,0.25\r\n16,0.5\r\n"
    )


def test_the_default_folder_is_in_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    MonitorMaster({"csv_monitor": {"enabled": True}}).write_events(EVENTS[0])
    assert sorted(path.name for path in (tmp_path / "DeepSpeedJobName").iterdir()) == [
        "Train_Samples_loss_scale.csv",
        "Train_Samples_lr.csv",
    ]


def test_tensorboard_has_the_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MonitorMaster({"tensorboard": section(tmp_path, job_name="job")})
    for events in EVENTS:
        writer.write_events(events)
    found = EventAccumulator(str(tmp_path / "job"))
    found.Reload()
    points = [(event.step, event.value) for event in found.Scalars("Train/Samples/lr")]
    assert [step for step, _ in points] == [8, 16]
    assert [value for _, value in points] == pytest.approx([1e-3, 1e-4 / 3])
    assert [event.value for event in found.Scalars("Train/Samples/train_loss")] == [2.5]


def test_wandb_gets_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    stand_in = SimpleNamespace(
        init=lambda **options: calls.append(options),
        log=lambda data, step: calls.append((dict(data), step)),
    )
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    writer = MonitorMaster({"wandb": {"enabled": True, "group": "g", "team": "t"}})
    assert calls == [{"project": "deepspeed", "group": "g", "entity": "t"}]
    writer.write_events(step_events(8, lr=0.5, train_loss=torch.tensor([2.0]), loss_scale=None))
    assert calls[1:] == [({"Train/Samples/lr": 0.5}, 8), ({"Train/Samples/train_loss": 2.0}, 8)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_opened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    sections = {"csv_monitor": section(tmp_path), name: {"enabled": True}}
    message = (
        rf"config {name}.enabled is true, but the package {name} cannot be imported .*pip "
        rf"install {name}\)"
    )
    with pytest.raises(ImportError, match=message):
        MonitorMaster(sections)
    assert list(tmp_path.iterdir()) == []
    assert not MonitorMaster({name: {"enabled": False}}).enabled
    assert MonitorMaster(sections, rank=1).enabled  # which writes nothing


def _on_rank(rank: int, world_size: int, folder: str) -> bool:
    writer = MonitorMaster({"csv_monitor": section(Path(folder))})
    writer.write_events(step_events(8, lr=rank + 0.5))
    return writer.enabled


def test_rank_0_alone_writes(tmp_path: Path) -> None:
    assert run_ranks(2, _on_rank, str(tmp_path)) == [True, True]
    (path,) = (tmp_path / "DeepSpeedJobName").iterdir()
    assert list(csv.reader(path.open())) == [["step", "lr"], ["8", "0.5"]]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("csv_monitor", [], r"config csv_monitor is \[\]; expected {\"enabled\": false}"),
        ("csv_monitor", {"enabled": 1}, "config csv_monitor.enabled is 1; expected true or false"),
        (
            "tensorboard",
            {"jobname": "x"},
            r"config key tensorboard.jobname is unknown; did you mean tensorboard.job_name\?",
        ),
        (
            "wandb",
            {"output_path": "x"},
            r"key wandb.output_path is unknown; did you mean tensorboard.output_path or csv_",
        ),
        (
            "tensorboard",
            {"output_path": None},
            "config tensorboard.output_path is None; expected text",
        ),
        ("wandb", {"group": 3}, "config wandb.group is 3; expected text"),
    ],
)
def test_what_is_wrong_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        read_config({"train_batch_size": 1, name: value})


def test_what_a_caller_gives_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="sections has 'csv'; expected tensorboard, wandb, csv_monitor"
    ):
        MonitorMaster({"csv": {"enabled": True}})
    with pytest.raises(TypeError, match="unexpected keyword argument 'jobname'"):
        MonitorMaster({"csv_monitor": section(tmp_path, jobname="x")})
    assert not MonitorMaster({"csv_monitor": None, "wandb": {}}).enabled
