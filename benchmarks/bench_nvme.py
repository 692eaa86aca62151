"""Time states, and weights, that are in files beside what bounds them: fio moving the same bytes,
and all in host memory.

--what states: optimizer.step(), of bfloat16 weights on one rank: --mib of float32 masters and
moments

    nvme    offload={"optimizer": "nvme"}: each chunk read, updated, written; each step committed
    scratch the same with "durable": False, which commits nothing
    cpu     the same with "cpu": Adam, which the bound has as well
    DeepSpeed   with --deepspeed: engine.step() of ZeRO-Infinity, whose backward has written the
                gradients to disk before
    fio     reads as many bytes of one file as it writes over in another: io_uring, 1 MiB, 16 in
            flight, O_DIRECT, no fsync

--what weights: a forward and a backward of --tokens at stage 3, of --mib of bfloat16 weights, and
no step

    nvme    offload={"params": "nvme"}: each unit's weights read while another computes
    late    the same with prefetch=0: read when they are needed
    cpu     the same with {"params": "cpu"}: the compute, which the bound has as well
    fio     reads as many bytes of one file

The bound of a round is the larger of fio's and cpu's time. Each round runs every case once, in a
random order. Steps follow one another, without a forward between them (beside which a commit is
hidden in a training), so what one leaves to be written is counted in the next. --dir must be on the
disk to measure, with room for seven times --mib (weights: fifteen times; the host needs eight
times). --deepspeed needs deepspeed and libaio-dev, and for the first time minutes, in which it
compiles.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
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
from shardcore.engine.engine import engine_behind
from shardcore.offload.nvme_states import CHUNK_NUMEL

STATES_WIDTH, WEIGHTS_WIDTH = 1024, 2048
STEPS = 3  # in a row, of which each case's time is the mean
Cases = dict[str, Callable[[], float]]


def model_of(width: int, bytes_per_param: int, options: argparse.Namespace) -> nn.Module:
    """Return a model of which what is in files takes --mib."""
    layers = max(2, round(options.mib * 2**20 / bytes_per_param / width**2))
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


class Steps:
    """A model with gradients, whose optimizer can step again and again."""

    def __init__(self, options: argparse.Namespace, offload: dict[str, Any]) -> None:
        model = model_of(STATES_WIDTH, 12, options)
        adam = shardcore.FusedAdam(model.parameters(), lr=1e-3)
        self.model, self.optimizer = shardcore.shard(
            model, adam, 2, precision="bf16", offload=offload
        )
        self.model(torch.ones(1, STATES_WIDTH, dtype=torch.bfloat16)).float().sum().backward()
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


class DeepSpeedSteps:
    """The same of DeepSpeed's, which steps once for a backward."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
        )
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = model_of(STATES_WIDTH, 12, options).bfloat16()
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
            self.engine.backward(
                self.engine(torch.ones(1, STATES_WIDTH, dtype=torch.bfloat16)).float().mean()
            )
            begun = time.perf_counter()
            self.engine.step()
            spent += time.perf_counter() - begun if step else 0.0
        return spent / STEPS


class Passes:
    """A sharded model that can run forward and backward again and again."""

    def __init__(
        self, options: argparse.Namespace, where: str, folder: Path, prefetch: int = 1
    ) -> None:
        model = model_of(WEIGHTS_WIDTH, 2, options)
        offload = {"optimizer": "nvme", "params": where, "path": str(folder), "durable": False}
        adam = shardcore.FusedAdam(model.parameters())
        self.model, self.optimizer = shardcore.shard(
            model, adam, 3, precision="bf16", offload=offload, prefetch=prefetch
        )
        self.batch = torch.ones(options.tokens, WEIGHTS_WIDTH, dtype=torch.bfloat16)

    def seconds(self) -> float:
        """Return the time of a forward and a backward."""
        begun = time.perf_counter()
        self.model(self.batch).float().sum().backward()
        taken = time.perf_counter() - begun
        self.optimizer.zero_grad()
        return taken

    def read_bytes(self) -> int:
        """Return what a forward and a backward read from files."""
        store = engine_behind("bench_nvme", self.model).store
        before = store.moved_bytes["from_nvme"]
        self.seconds()
        return store.moved_bytes["from_nvme"] - before


def states_cases(options: argparse.Namespace, folder: Path) -> tuple[Cases, dict[str, Any]]:
    """Return what to time by name, and what is known of it."""
    for name in ("slots", "scratch"):  # shard makes none on the root file system
        (folder / name).mkdir()
    nvme = {"optimizer": "nvme", "path": str(folder / "slots")}
    jobs = {
        "nvme": Steps(options, nvme),
        "scratch": Steps(options, nvme | {"path": str(folder / "scratch"), "durable": False}),
        "cpu": Steps(options, {"optimizer": "cpu"}),
    }
    cases = {name: job.seconds for name, job in jobs.items()}
    if options.deepspeed:
        cases["DeepSpeed"] = DeepSpeedSteps(options, folder / "deepspeed").seconds
    size = jobs["nvme"].state_bytes
    cases["fio"] = Fio(folder, size).mixed
    return cases, {
        "state_bytes": size,
        "host_bytes": {name: job.host_bytes for name, job in jobs.items()},
    }


def weights_cases(options: argparse.Namespace, folder: Path) -> tuple[Cases, dict[str, Any]]:
    """Return what to time by name, and what is known of it."""
    for name in ("nvme", "late", "cpu"):
        (folder / name).mkdir()
    jobs = {
        "nvme": Passes(options, "nvme", folder / "nvme"),
        "late": Passes(options, "nvme", folder / "late", prefetch=0),
        "cpu": Passes(options, "cpu", folder / "cpu"),
    }
    size = jobs["nvme"].read_bytes()
    return {name: job.seconds for name, job in jobs.items()} | {"fio": Fio(folder, size).read}, {
        "read_bytes": size
    }


WHAT = {"states": states_cases, "weights": weights_cases}


def main() -> int:
    """Run, print a table, write nvme.json into --out."""
    parser = suite.make_parser("nvme", __doc__, rounds=7, pause=0.2)
    parser.add_argument(
        "--what", choices=list(WHAT), default="states", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--mib",
        type=positive,
        default=1024,
        help="MiB of states, or of weights (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        default=256,
        help="rows of a batch, for weights (default: %(default)s)",
    )
    parser.add_argument("--dir", default=".", help="a folder on the disk to measure (default: .)")
    parser.add_argument("--deepspeed", action="store_true", help="states: beside DeepSpeed's")
    options = suite.parse(parser)
    if shutil.which("fio") is None:
        parser.exit(
            2, f"{parser.prog}: fio is not on PATH; expected it there (apt-get install fio)\n"
        )
    with tempfile.TemporaryDirectory(prefix="bench_nvme_", dir=options.dir) as folder:
        cases, facts = WHAT[options.what](options, Path(folder))
        seconds = harness.disk_turns(cases, options.rounds, options.pause)
    peers = {name: samples for name, samples in seconds.items() if name != "nvme"}
    peers["bound"] = [max(pair) for pair in zip(seconds["fio"], seconds["cpu"], strict=True)]
    over = {name: harness.paired(seconds["nvme"], samples) for name, samples in peers.items()}
    median = harness.spread(seconds["nvme"]).median
    print(
        harness.table(
            [
                ["nvme, s", *(f"over {name}" for name in over)],
                [f"{median:.3f}", *map(str, over.values())],
            ]
        )
    )
    report = {
        **facts,
        "seconds": seconds,
        "over": {name: asdict(ratio) for name, ratio in over.items()},
    }
    harness.write_json(options.out / "nvme.json", {**suite.about_run("nvme", options), **report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
