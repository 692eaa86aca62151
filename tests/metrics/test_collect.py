"""Metrics of trainings beside what is computed without them: losses, norms, speed, operations,
bytes and memory.
"""

import csv
import gc
import json
import math
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import shardcore
from shardcore.distributed.comm import Comm, Traffic
from shardcore.estimate import predict
from shardcore.metrics import collect
from tests.support.deepspeed import ds_config, start
from tests.support.models import batch_of, error_of, loss_of, make_net
from tests.support.ranks import run_ranks

HEAD = (
    "step,loss,lr,grad_norm,loss_scale,skipped_steps,step_ms,tokens_per_s,tflops_per_s,"
    "forward_ms,backward_ms,optimizer_ms,exposed_reduce_ms,exposed_gather_ms,exposed_offload_ms,"
    "sent_gradients_bytes,sent_weights_bytes,to_host_bytes,from_host_bytes,to_nvme_bytes,from_nvme_bytes,"
    "weights_device_bytes,gradients_device_bytes,master_device_bytes,states_device_bytes,communication_device_bytes,"
    "weights_cpu_bytes,gradients_cpu_bytes,master_cpu_bytes,states_cpu_bytes,communication_cpu_bytes,"
    "weights_nvme_bytes,gradients_nvme_bytes,master_nvme_bytes,states_nvme_bytes,communication_nvme_bytes,device_peak_bytes"
)


def sharded(stage: int = 2, **options: Any) -> tuple[Any, Any]:
    model = make_net()
    return shardcore.shard(
        model, shardcore.FusedAdam(model.parameters(), lr=1e-2), stage, **options
    )


def train(
    rank: int,
    steps: int,
    model: Any,
    optimizer: Any,
    metrics: Any,
    scale: float = 1.0,
    accumulate: int = 1,
) -> tuple[list[Any], list[float]]:
    """Return the rows and this rank's losses; the learning rate halves after each step."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rows, losses = [], []
    for step in range(steps):
        total = torch.zeros(())
        for micro in range(accumulate):
            x, y = batch_of(step, micro, rank)
            loss = loss_of(model, (x * scale if step == 1 else x, y)) / accumulate
            optimizer.scale_loss(loss).backward()
            total += loss.detach()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rows.append(metrics.step(loss=total, tokens=10 + rank))
        losses.append(total.item())
    return rows, losses


def norm_of(world_size: int) -> float:
    """The norm of the averaged gradients at the first step, by torch alone."""
    model = make_net()
    (
        sum(loss_of(model, batch_of(0, 0, rank)) for rank in range(world_size)) / world_size
    ).backward()
    return float(nn.utils.get_total_norm([param.grad.double() for param in model.parameters()]))


OFFLOADS: list[Any] = [None, {"optimizer": "cpu"}]


def _own_loss(patch: pytest.MonkeyPatch) -> None:
    gathered = Comm.all_gather_cpu

    def own(
        comm: Comm, row: torch.Tensor, kind: Traffic | None = None, name: str = ""
    ) -> torch.Tensor:
        rows = gathered(comm, row, kind, name)
        return row.unsqueeze(0) if name == "Metrics.step" else rows

    patch.setattr(Comm, "all_gather_cpu", own)


def _late_rate(patch: pytest.MonkeyPatch) -> None:
    read = collect.Metrics._read

    def late(metrics: Any, problems: list[BaseException]) -> Any:
        return read(metrics, problems) | {"lr": metrics._optimizer.param_groups[0]["lr"]}

    patch.setattr(collect.Metrics, "_read", late)


def _no_steps(patch: pytest.MonkeyPatch) -> None:
    counts = collect.Metrics._counts
    patch.setattr(
        collect.Metrics, "_counts", lambda metrics: counts(metrics) | {"sent_weights_bytes": 0}
    )


TWINS = {"loss": _own_loss, "lr": _late_rate, "bytes": _no_steps}


def _measured(
    rank: int, world_size: int, stage: int, offload: Any, folder: str, twin: str | None
) -> tuple[Any, ...]:
    with pytest.MonkeyPatch.context() as patch:
        if twin is not None:
            TWINS[twin](patch)
        model, optimizer = sharded(stage, offload=offload)
        metrics = shardcore.Metrics(
            model, Path(folder, f"{stage}{offload}{twin}"), every=2, log=False
        )
        rows, losses = train(rank, 4, model, optimizer, metrics)
        report = shardcore.memory_report(model)
    return rows, losses, report.lines


def wrong(rank: int, stage: int, offload: Any, results: list[tuple[Any, ...]]) -> set[str]:
    """Name what a rank's rows have otherwise than is expected."""
    rows, _, lines = results[rank]
    assert rows[0] is None
    assert rows[2] is None
    found = set()
    for step in (2, 4):
        row = rows[step - 1]
        losses = [loss for _, of_rank, _ in results for loss in of_rank[step - 2 : step]]
        if row["loss"] != pytest.approx(sum(losses) / 4, rel=1e-12):
            found.add("loss")
        if row["lr"] != 1e-2 * 0.5 ** (step - 1):
            found.add("lr")
    row = rows[3]
    predicted = predict(make_net(), None, stage, world_size=2, rank=rank, offload=offload)
    if row["sent_gradients_bytes"] + row["sent_weights_bytes"] != predicted.sent_bytes:
        found.add("bytes")
    for tier in ("device", "cpu"):
        for kind in ("weights", "master", "states"):
            state_bytes = sum(
                line.bytes for line in lines if (line.kind, line.tier) == (kind, tier)
            )
            if row[f"{kind}_{tier}_bytes"] != state_bytes:
                found.add("memory")
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rows_are_what_is_computed_without_them(stage: int, tmp_path: Path) -> None:
    for offload in OFFLOADS:
        results = run_ranks(2, _measured, stage, offload, str(tmp_path), None)
        for rank in range(2):
            assert wrong(rank, stage, offload, results) == set()
            row = results[rank][0][3]
            assert row["grad_norm"] > 0
            assert row["skipped_steps"] == 0
            assert row["loss_scale"] == 1.0
            assert row["device_peak_bytes"] is None
            assert row["tflops_per_s"] is None
            parts = {part: row[f"{part}_ms"] for part in collect.writers.PARTS}
            assert all(ms >= 0 for ms in parts.values())
            assert sum(parts.values()) <= row["step_ms"]
            assert all(
                parts[part] > 0 for part in ("forward", "backward", "optimizer", "exposed_reduce")
            )
            assert (parts["exposed_gather"] > 0) == (stage > 0)
            assert (parts["exposed_offload"] > 0) == (offload is not None)
            assert (
                (row["to_host_bytes"] > 0) == (row["from_host_bytes"] > 0) == (offload is not None)
            )
        (folder,) = tmp_path.glob(f"{stage}{offload}None")
        text = (folder / "metrics.csv").read_text().splitlines()
        assert text[0] == HEAD
        written = list(csv.DictReader(text))
        row = results[0][0][3]
        assert written[1] == {
            name: "" if value is None else str(value) for name, value in row.items()
        }
        assert [line["step"] for line in written] == ["2", "4"]


@pytest.mark.parametrize("twin", list(TWINS))
def test_a_row_that_is_wrong_is_rejected(twin: str, tmp_path: Path) -> None:
    results = run_ranks(2, _measured, 2, None, str(tmp_path), twin)
    assert wrong(0, 2, None, results) == {twin}


def _first_row(rank: int, world_size: int, stage: int) -> Any:
    model, optimizer = sharded(stage)
    rows, _ = train(rank, 1, model, optimizer, shardcore.Metrics(model, log=False))
    return rows[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_norm_is_torchs(stage: int) -> None:
    first, second = run_ranks(2, _first_row, stage)
    assert first["grad_norm"] == second["grad_norm"] == pytest.approx(norm_of(2), rel=1e-6)
    assert first["grad_norm"] != pytest.approx(norm_of(1), rel=1e-3)


def test_overflows_show_in_loss_scale_and_skipped_steps() -> None:
    model, optimizer = sharded(
        precision="fp16", loss_scale=shardcore.LossScale(initial_power=8, hysteresis=1)
    )
    rows, _ = train(0, 3, model, optimizer, shardcore.Metrics(model, log=False), scale=float("inf"))
    assert [row["skipped_steps"] for row in rows] == [0, 1, 1]
    assert [row["loss_scale"] for row in rows] == [256.0, 128.0, 128.0]
    assert [math.isfinite(row["grad_norm"]) for row in rows] == [True, False, True]
    assert math.isnan(rows[1]["loss"])
    assert math.isfinite(rows[2]["loss"])


class Time:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.s = 100.0
        patch.setattr(collect, "perf_counter", lambda: self.s)


def _speed(rank: int, world_size: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        time = Time(patch)
        model, _ = sharded()
        metrics = shardcore.Metrics(model, every=2, log=False, flops=1e12 * (rank + 1))
        rows = []
        for seconds in (1.0, 3.0, 0.25, 0.25):
            time.s += seconds
            rows.append(metrics.step(tokens=100 + 100 * rank))
    return rows[1::2]


def test_speed_is_of_all_ranks_over_the_steps_of_a_row() -> None:
    for rows in run_ranks(2, _speed):
        assert [row["step_ms"] for row in rows] == [2000.0, 250.0]
        assert [row["tokens_per_s"] for row in rows] == [600 / 4.0, 600 / 0.5]
        assert [row["tflops_per_s"] for row in rows] == [1.5 / 2.0, 1.5 / 0.25], "the mean of ranks"
        assert rows[0]["loss"] is None
        assert rows[0]["lr"] is None, "the optimizer made no step"


@pytest.mark.parametrize("micros", [1, 3])
def test_operations_of_a_linear_layer_by_hand(micros: int, monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    model: Any = nn.Linear(6, 5)
    model, optimizer = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), 3, accumulate=micros
    )
    metrics = shardcore.Metrics(model, log=False)
    rows = []
    for _ in range(2):
        for _ in range(micros):
            with metrics.count_flops():
                model(torch.randn(7, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.s += 2.0
        rows.append(metrics.step())
    # 7 * 6 * 5 products and as many sums in forward; the same for the weight's gradient, and none
    # for the input's.
    assert [row["tflops_per_s"] for row in rows] == [
        pytest.approx(micros * 2 * 2 * 7 * 6 * 5 / 2.0 / 1e12, rel=1e-12)
    ] * 2


class _Reads(TorchDispatchMode):
    """Counts reads of tensors' values, for which the host waits for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_between_rows() -> None:
    model, _ = sharded()
    metrics = shardcore.Metrics(model, every=3, log=False)
    loss = torch.tensor([2.0], requires_grad=True)
    counts = []
    for _ in range(3):
        with _Reads() as reads:
            metrics.step(loss=loss)
        counts.append(reads.count)
        with torch.no_grad():
            loss += 1  # a loss that changes later is noted as it was
    assert counts[:2] == [0, 0]
    assert counts[2] > 0
    for _ in range(2):
        metrics.step(loss=1.0)
    assert metrics.step(loss=4)["loss"] == 2.0


def test_evaluation_is_not_in_forward() -> None:
    model, optimizer = sharded()
    metrics = shardcore.Metrics(model, log=False)
    with torch.no_grad():
        model(torch.randn(2, 10))
    assert metrics.step()["forward_ms"] == 0.0
    loss_of(model, batch_of(0, 0, 0)).backward()
    optimizer.step()
    row = metrics.step()
    assert row["forward_ms"] > 0
    assert row["gradients_device_bytes"] > 0, "before zero_grad"


def test_an_overlapped_step_is_not_waited_for_to_measure_memory() -> None:
    model, optimizer = sharded(offload={"optimizer": "cpu"}, overlap_step=True)
    metrics = shardcore.Metrics(model, log=False)
    rows, losses = train(0, 4, model, optimizer, metrics)
    plain_model, plain = sharded()
    _, expected = train(0, 4, plain_model, plain, shardcore.Metrics(plain_model, log=False))
    assert losses == expected
    assert rows[-1]["states_cpu_bytes"] > 0


def test_states_in_files_are_read_and_written_once_a_step(tmp_path: Path) -> None:
    model, optimizer = sharded(offload={"optimizer": "nvme", "path": str(tmp_path), "ratio": 0.75})
    rows, _ = train(0, 3, model, optimizer, shardcore.Metrics(model, log=False))
    state_bytes, moved = rows[2]["states_nvme_bytes"], rows[2]["from_nvme_bytes"]
    blocks = sum(bucket.host_numel > 0 for bucket in optimizer._engine.buckets)
    assert state_bytes <= moved == rows[2]["to_nvme_bytes"] <= state_bytes + 4096 * blocks
    assert rows[2]["states_device_bytes"] > 0
    assert rows[2]["to_host_bytes"] > 0


def test_a_line_for_each_row_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = sharded()
    train(0, 4, model, optimizer, shardcore.Metrics(model, every=2))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 2", "step 4"]
    assert " | lr 0.005 | " in lines[0]


def test_a_training_goes_on_in_its_directory(tmp_path: Path) -> None:
    def steps() -> list[str]:
        return [row["step"] for row in csv.DictReader((tmp_path / "metrics.csv").open())]

    model, optimizer = sharded()
    train(0, 5, model, optimizer, shardcore.Metrics(model, tmp_path, log=False))
    model, optimizer = sharded()
    train(0, 2, model, optimizer, shardcore.Metrics(model, tmp_path, start=3, log=False))
    assert steps() == ["1", "2", "3", "4", "5"]
    shardcore.Metrics(model, tmp_path, start=3, log=False)
    assert steps() == ["1", "2", "3"]
    with pytest.raises(
        FileExistsError,
        match=r"metrics.csv already exists\. Use another directory",
    ):
        shardcore.Metrics(model, tmp_path, log=False)


def test_an_engine_of_initialize_is_watched() -> None:
    engine = start(ds_config(2))
    metrics = shardcore.Metrics(engine, log=False)
    for micro in range(2):
        engine.backward(loss_of(engine, batch_of(0, micro, 0)))
        engine.step()
    row = metrics.step(loss=1.0)
    assert row["grad_norm"] == engine.get_global_grad_norm()
    assert row["backward_ms"] > 0


@pytest.mark.more
def test_a_model_that_is_gone_is_not_kept() -> None:
    model, optimizer = sharded()
    metrics = shardcore.Metrics(model, log=False)
    train(0, 1, model, optimizer, metrics)
    engine = weakref.ref(metrics._engine)
    gc.collect()
    gc.disable()
    try:
        del metrics
        loss_of(model, batch_of(0, 0, 0)).backward()
        optimizer.step()  # without what watched it
        del model, optimizer
        assert engine() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "Metrics: every is 0; expected at least 1"),
        ({"every": True}, "Metrics: every is True; expected a whole number"),
        ({"start": -1}, "Metrics: start is -1; expected at least 0"),
        ({"start": 1.5}, "Metrics: start is 1.5; expected a whole number"),
        ({"flops": 0}, "Metrics: flops is 0; expected more than 0"),
        ({"flops": "1"}, "Metrics: flops is '1'; expected a number"),
        ({"tensorboard": True}, "Metrics: tensorboard is True without a directory"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    model, _ = sharded()
    with pytest.raises((ValueError, TypeError), match=message):
        shardcore.Metrics(model, **options)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="Metrics: Net is not sharded"):
        shardcore.Metrics(make_net())
    model, _ = shardcore.shard(make_net(), None)
    with pytest.raises(ValueError, match="Metrics: the model was sharded without an optimizer"):
        shardcore.Metrics(model)
    model, optimizer = sharded()
    metrics = shardcore.Metrics(model, log=False)
    with pytest.raises(
        ValueError, match=r"Metrics.step: loss has shape \(2,\); expected one element"
    ):
        metrics.step(loss=torch.zeros(2))
    with pytest.raises(TypeError, match="step: loss is of type str"):
        metrics.step(loss="1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="step: tokens is of type float"):
        metrics.step(tokens=1.0)  # type: ignore[arg-type]
    del optimizer, metrics
    with pytest.raises(
        ValueError, match="Metrics: the model was sharded without an optimizer, or its optimizer"
    ):
        shardcore.Metrics(model)


class UsageError(Exception):
    """As wandb raises without a key."""


def _without_key() -> None:
    raise UsageError("No API key configured.")


def _full_disk(row: Any) -> None:
    raise OSError("no space")


def _fails(rank: int, world_size: int, folder: str) -> list[str]:
    model, _optimizer = sharded()
    messages = []
    for options in (
        {"every": 1 + rank},
        {"every": 0 if rank == 1 else 1},
        {"directory": folder},
        {"wandb": True},
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "wandb", SimpleNamespace(init=_without_key))
            try:
                shardcore.Metrics(model, log=False, **options)  # type: ignore[arg-type]
                messages.append("")
            except (ValueError, RuntimeError, OSError, UsageError) as error:
                messages.append(f"{type(error).__name__}: {error}")
    metrics = shardcore.Metrics(model, log=False)
    messages.append(error_of(lambda: metrics.step(loss=[1.0, "1"][rank])))  # type: ignore[arg-type]
    if rank == 0:
        metrics._write.append(_full_disk)
    messages.append(error_of(metrics.step))
    return messages


def test_an_error_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").touch()
    first, second = run_ranks(2, _fails, str(tmp_path))
    assert first[0] == second[0]
    assert "Metrics: ranks disagree: argument every is 2 on rank 1 but 1 on rank 0" in first[0]
    assert first[1].startswith(
        "ValueError: Metrics: rank 1 refused: ValueError: Metrics: every is 0"
    )
    assert second[1].startswith("ValueError: Metrics: every is 0")
    assert first[2].startswith("FileExistsError: Metrics: ")
    assert second[2].startswith("RuntimeError: Metrics: rank 0 failed: FileExistsError: ")
    assert first[3] == "UsageError: No API key configured."
    assert second[3] == f"RuntimeError: Metrics: rank 0 failed: {first[3]}; nothing is measured"
    text = "Metrics.step: loss is of type str"
    assert text in second[4]
    assert f"Metrics.step: rank 1 refused: TypeError: {text}" in first[4]
    assert "no space" in first[5]
    assert "Metrics.step: rank 0 failed: OSError: no space; the row is written in" in second[5]


def _in_parts(rank: int, world_size: int, folder: str) -> tuple[Any, str]:
    """Two parts of a model, of which the second alone has a loss, over two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    model, _ = sharded(process_group=mesh["dp"], model_parallel_group=mesh["pp"])
    metrics = shardcore.Metrics(model, folder, log=False, flops=1e12 * (rank + 1))
    row = metrics.step(loss=float(rank) if rank % 2 else None, tokens=10 + rank // 2)
    return row, error_of(lambda: shardcore.Metrics(model, folder, log=False))


def test_one_rank_writes_of_a_model_in_parts(tmp_path: Path) -> None:
    results = run_ranks(4, _in_parts, str(tmp_path))
    for row, message in results:
        assert row["loss"] == 2.0, "of ranks 1 and 3"
        assert row["tokens_per_s"] * row["step_ms"] / 1000 == pytest.approx(10 + 11), (
            "once for all parts"
        )
        assert row["tflops_per_s"] * row["step_ms"] / 1000 == pytest.approx(2.5), (
            "the mean of ranks"
        )
        assert "metrics.csv already exists" in message
    (written,) = csv.DictReader((tmp_path / "metrics.csv").open())
    assert written == {
        name: "" if value is None else str(value) for name, value in results[0][0].items()
    }
    assert json.loads((tmp_path / "run.json").read_text())["ranks"] == 4
