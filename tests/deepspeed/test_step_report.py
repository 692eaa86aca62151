"""What is printed of steps: times, memory, collectives and operations, where a configuration
asks for them.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardcore.deepspeed.flops_profiler import FlopsProfiler
from shardcore.deepspeed.pipe_module import PipelineModule
from tests.support.deepspeed import ds_config, start, train
from tests.support.models import Net
from tests.support.ranks import run_ranks

EVERYTHING = {
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "comms_logger": {"enabled": True},
    "steps_per_print": 2,
}


def _reported(rank: int, world_size: int, path: str) -> None:
    with open(f"{path}.{rank}", "w") as file, contextlib.redirect_stdout(file):
        train(start(ds_config(2, **EVERYTHING)), rank, 4)


def test_what_is_asked_for_is_printed_by_rank_0_with_each_line_of_progress(tmp_path: Path) -> None:
    run_ranks(2, _reported, str(tmp_path / "out"))
    printed = (tmp_path / "out.0").read_text()
    assert (tmp_path / "out.1").read_text() == ""
    for step in (2, 4):
        times = next(
            line for line in printed.splitlines() if line.startswith(f"step={step} time (ms)")
        )
        parts = dict(part.split(": ") for part in times.split(" | ")[1:])
        waits = {"exposed reduce", "exposed gather", "exposed offload"}
        assert set(parts) == {"forward", "backward", "optimizer"} | waits
        assert all((float(ms) > 0) == (part != "exposed offload") for part, ms in parts.items())
        assert f"step={step} memory\n" in printed
        assert f"step={step} collectives | " in printed
    assert "the reduction of" in printed
    assert "step=3" not in printed


def _reported_by_stages(rank: int, world_size: int, path: str) -> None:
    module = PipelineModule(
        [nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=nn.functional.mse_loss
    )
    engine = start(ds_config(**EVERYTHING), module)
    batches = [(torch.ones(4, 4), torch.zeros(4, 4))] * 2
    with open(f"{path}.{rank}", "w") as file, contextlib.redirect_stdout(file):
        for batch in batches:
            engine.train_batch(iter([batch]))


def test_of_a_pipeline_the_first_stage_speaks(tmp_path: Path) -> None:
    run_ranks(2, _reported_by_stages, str(tmp_path / "out"))
    assert "step=2 time (ms)" in (tmp_path / "out.0").read_text()
    assert (tmp_path / "out.1").read_text() == ""


def test_nothing_is_printed_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    train(start(ds_config(2)), 0, 2)
    assert capsys.readouterr().out == ""


def test_the_forward_of_one_step_is_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Watched(FlopsProfiler):
        def print_model_profile(self, *args: Any) -> None:
            asked.append((*args, engine.global_steps, self.get_total_flops()))
            super().print_model_profile(*args)

    monkeypatch.setattr("shardcore.deepspeed.flops_profiler.FlopsProfiler", Watched)
    flops: dict[str, Any] = {
        "enabled": True,
        "profile_step": 2,
        "module_depth": 1,
        "top_modules": 3,
        "detailed": False,
        "output_file": str(tmp_path / "flops"),
    }
    engine = start(ds_config(2, flops_profiler=flops))
    train(engine, 0, 4)
    weights = sum(param.numel() for param in Net().parameters() if param.dim() == 2)
    # a forward of one micro-batch: 2 operations per weight and sample
    file = str(tmp_path / "flops")
    assert asked == [(2, 1, 3, False, file, 3, 2 * 4 * weights)]
    text = (tmp_path / "flops").read_text()
    assert text.startswith("profile of step 2, ")
    assert "(model)" not in text
    assert capsys.readouterr().out == ""
    train(start(ds_config(flops_profiler={"enabled": True})), 0, 2)
    printed = capsys.readouterr().out
    assert printed.count("profile of step 1, ") == 1
    assert "(model)" in printed


def test_metrics_are_written_where_a_section_says(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    engine = start(
        ds_config(
            2,
            csv_monitor=section,
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        )
    )
    train(engine, 0, 3)
    rows = (tmp_path / "run" / "Train_Samples_lr.csv").read_text().split()
    assert rows[0] == "step,lr"
    assert [row.split(",")[0] for row in rows[1:]] == ["8", "16", "24"], "samples so far"
    assert float(rows[-1].split(",")[1]) == engine.get_lr()[0]
    losses = (tmp_path / "run" / "Train_Samples_train_loss.csv").read_text().split()[1:]
    assert len(losses) == 3
    assert json.loads(losses[0].split(",")[1]) > 0
