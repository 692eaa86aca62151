"""Time a step whose states are in files beside what bounds it: fio moving the same bytes, and the same step in host memory.

    nvme    optimizer.step() with offload={"optimizer": "nvme"}: each chunk read, updated, written; each step committed
    scratch the same with "durable": False, which commits nothing
    cpu     the same with "cpu": Adam, which the bound has as well
    DeepSpeed   with --deepspeed: engine.step() of ZeRO-Infinity, whose backward has written the gradients to disk before
    fio     reads as many bytes of one file as it writes over in another: io_uring, 1 MiB, 16 in flight, O_DIRECT, no fsync

The bound of a round is the larger of fio's and cpu's time. Steps follow one another, so what one leaves to be written is
counted in the next. The states are those of bfloat16 weights on one rank: float32 masters, and moments of --state-dtype. Each
round runs every case once, in a random order. --dir must be on the disk to measure, with room for five times --mib (seven with
DeepSpeed). Steps come without a forward between them, beside which a commit is hidden in a training. --deepspeed needs
deepspeed and libaio-dev, and for the first time minutes, in which DeepSpeed compiles what it reads, writes and updates with.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardcore
from benchmarks import harness, suite
from benchmarks.bench_io import Fio
from examples.arguments import positive
from shardcore.engine.nvme_states import CHUNK_NUMEL

WIDTH = 1024
PEERS = ("fio", "cpu", "scratch")
STEPS = 3  # in a row, of which each case's time is the mean
TARGET = 1.10  # of the bound


def model_of(options: argparse.Namespace) -> nn.Module:
    """Return a model whose states take --mib."""
    per_param = 12 if options.state_dtype == "fp32" else 8
    layers = max(1, round(options.mib * 2**20 / per_param / (WIDTH * WIDTH)))
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


class Job:
    """A model with gradients, whose optimizer can step again and again."""

    def __init__(self, options: argparse.Namespace, offload: dict[str, Any]) -> None:
        model = model_of(options)
        adam = shardcore.FusedAdam(model.parameters(), lr=1e-3, state_dtype=options.state_dtype)
        self.model, self.optimizer = shardcore.shard(model, adam, 2, precision="bf16", offload=offload)
        self.model(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().sum().backward()
        self.optimizer.step()
        report = shardcore.memory_report(self.model)
        self.state_bytes = report.by_kind["master"] + report.by_kind["states"]
        self.host_bytes = report.by_tier["cpu"]

    def seconds(self) -> float:
        """Return the time of a step."""
        self.optimizer.step()
        begun = time.perf_counter()
        for _ in range(STEPS):
            self.optimizer.step()
        return (time.perf_counter() - begun) / STEPS


class DeepSpeedJob:
    """The same of DeepSpeed's, which steps once for a backward."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = model_of(options).bfloat16()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "steps_per_print": 10**9,
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": CHUNK_NUMEL,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": str(folder),
                    "pipeline_read": True,
                    "pipeline_write": True,
                    "buffer_count": 16,  # 4, its default, is an AssertionError with both pipelines
                },
            },
            "aio": {"block_size": 1 << 20, "queue_depth": 16, "overlap_events": True},
        }
        adam = DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)

    def seconds(self) -> float:
        """Return the time of a step, of those that follow the first."""
        spent = 0.0
        for step in range(1 + STEPS):
            self.engine.backward(self.engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().mean())
            begun = time.perf_counter()
            self.engine.step()
            spent += time.perf_counter() - begun if step else 0.0
        return spent / STEPS


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all cases in turns."""
    jobs = {
        "nvme": Job(options, {"optimizer": "nvme", "path": str(folder / "slots")}),
        "scratch": Job(options, {"optimizer": "nvme", "path": str(folder / "scratch"), "durable": False}),
        "cpu": Job(options, {"optimizer": "cpu"}),
    }
    size = jobs["nvme"].state_bytes
    cases = {name: job.seconds for name, job in jobs.items()}
    peers = PEERS
    if options.deepspeed:
        cases["DeepSpeed"], peers = DeepSpeedJob(options, folder / "deepspeed").seconds, (*PEERS, "DeepSpeed")
    cases["fio"] = Fio(folder, size).mixed
    seconds = harness.disk_turns(cases, options.rounds, options.pause)
    bound = [max(pair) for pair in zip(seconds["fio"], seconds["cpu"], strict=True)]
    return {
        "state_bytes": size,
        "host_bytes": {name: job.host_bytes for name, job in jobs.items()},
        "seconds": seconds,
        "over": {
            "bound": asdict(harness.paired(seconds["nvme"], bound)),
            **{name: asdict(harness.paired(seconds["nvme"], seconds[name])) for name in peers},
            "scratch over bound": asdict(harness.paired(seconds["scratch"], bound)),
        },
    }


def main() -> int:
    """Run, print a table, write nvme_step.json into --out."""
    parser = suite.make_parser("nvme_step", __doc__, rounds=7, pause=0.2)
    parser.add_argument("--mib", type=positive, default=1024, help="MiB of states (default: %(default)s)")
    parser.add_argument("--state-dtype", choices=["fp32", "bf16"], default="fp32", help="of moments (default: %(default)s)")
    parser.add_argument("--dir", default=".", help="a folder on the disk to measure (default: .)")
    parser.add_argument("--deepspeed", action="store_true", help="beside DeepSpeed's, of float32 moments")
    options = suite.parse(parser)
    if options.deepspeed and options.state_dtype != "fp32":
        parser.error("argument --deepspeed: its moments are float32; expected --state-dtype fp32")
    if shutil.which("fio") is None:
        print("bench_nvme_step: fio is not on PATH; expected it there (apt-get install fio)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="bench_nvme_step_", dir=options.dir) as folder:
        result = measure(options, Path(folder))
    peers = [peer for peer in (*PEERS, "DeepSpeed") if peer in result["over"]]
    rows = [["MiB of states", "MiB of host memory", "step, s", "over the bound", *(f"over {peer}" for peer in peers)]]
    median = harness.spread(result["seconds"]["nvme"]).median
    over = [str(harness.Spread(**result["over"][name])) for name in ("bound", *peers)]
    host = result["host_bytes"]["nvme"]
    rows.append([f"{result['state_bytes'] / 2**20:.0f}", f"{host / 2**20:.0f}", f"{median:.3f}", *over])
    print(harness.table(rows))
    if result["over"]["bound"]["median"] > TARGET:
        print(f"{result['over']['bound']['median']:.2f} of the bound; expected at most {TARGET}")
    harness.write_json(options.out / "nvme_step.json", {**suite.about_run("nvme_step", options), **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
