"""Where metrics go: TensorBoard's files read back, Weights & Biases by a stand-in, the CSV file."""

import csv
import errno
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardcore
from shardcore.metrics.writers import COLUMNS, Table, as_events, as_line, read_table
from tests.support.models import make_net

ROW = dict.fromkeys(COLUMNS) | {
    "step": 20,
    "loss": 2.5,
    "lr": 3e-4,
    "loss_scale": 1.0,
    "skipped_steps": 0,
    "step_ms": 12.34,
    "tokens_per_s": 12345.6,
}


def watched(folder: Path | None, **options: Any) -> Any:
    model = make_net()
    model, optimizer = shardcore.shard(model, shardcore.FusedAdam(model.parameters()))
    return optimizer, shardcore.Metrics(model, folder, log=False, **options)


def test_tensorboard_has_what_is_known(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, metrics = watched(tmp_path, tensorboard=True)
    rows = [metrics.step(loss=loss) for loss in (2.0, 1.5)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.5)]
    assert set(events.Tags()["scalars"]) == {
        name for name in COLUMNS if name != "step" and rows[0][name] is not None
    }


def test_wandb_gets_rows_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    stand_in = SimpleNamespace(
        init=lambda **options: calls.append(options),
        log=lambda data, step: calls.append((data, step)),
    )
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    _, metrics = watched(None, wandb={"project": "p", "name": "n"})
    row = metrics.step(loss=2.0)
    assert calls[0] == {"project": "p", "name": "n"}
    assert calls[1:] == [({name: value}, 1) for name, value, _ in as_events(row)]
    assert ({"loss": 2.0}, 1) in calls


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    message = (
        rf"Metrics: {name} is True, but the package {name} cannot be imported .*pip install "
        rf"{name}\), or set {name} to False"
    )
    with pytest.raises(ImportError, match=message):
        watched(tmp_path / "new", **{name: True})
    assert list(tmp_path.iterdir()) == []


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    Table(tmp_path, 0).write(ROW)
    (row,) = read_table(tmp_path, "op")
    assert row == {name: "" if value is None else str(value) for name, value in ROW.items()}
    with pytest.raises(
        ValueError, match="dict contains fields not in fieldnames: 'weights_tape_bytes'"
    ):
        Table(tmp_path, 20).write(ROW | {"weights_tape_bytes": 1})
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("40,1.5")  # a job that was killed while it wrote
    assert [row["step"] for row in read_table(tmp_path, "op")] == ["20"]
    Table(tmp_path, 30).write(ROW | {"step": 31})
    assert [row["step"] for row in read_table(tmp_path, "op")] == ["20", "31"]


def test_rows_stay_if_the_disk_is_full_when_a_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(writer: Any, rows: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    Table(tmp_path, 0).write(ROW)
    monkeypatch.setattr(csv.DictWriter, "writerows", full)
    with pytest.raises(OSError, match="No space left on device"):
        Table(tmp_path, 20)
    assert [row["step"] for row in read_table(tmp_path, "op")] == ["20"]


def test_a_line_shows_what_changes() -> None:
    assert as_line(ROW) == "step 20 | loss 2.5000 | lr 0.0003 | step_ms 12.3 | tokens_per_s 12,346"
    scaled = as_line(ROW | {"loss_scale": 65536.0, "skipped_steps": 2})
    assert " | loss_scale 65536 | skipped_steps 2 | " in scaled
