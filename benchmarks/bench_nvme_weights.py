"""Time forward and backward whose weights are read from a disk beside what bounds them: fio reading the bytes, and no reading.

    nvme    forward and backward at stage 3 with offload={"optimizer": "nvme", "params": "nvme"}: each unit's weights read ahead
    late    the same with prefetch=0: read when they are needed
    cpu     the same with "params": "cpu": what it computes, and its copies, which the bound has as well
    fio     reads as many bytes of one file: io_uring, 1 MiB, 16 in flight, O_DIRECT

The bound of a round is the larger of fio's and cpu's time. The model is a row of square bfloat16 layers on one rank, each a unit;
--tokens sets how long they compute. Each round runs every case once, in a random order. --dir must be on the disk to measure,
with room for 15 times --mib.
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
from torch import nn

import shardcore
from benchmarks import harness, suite
from benchmarks.bench_io import Fio
from examples.arguments import positive
from shardcore.engine.engine import engine_behind

WIDTH = 2048
PEERS = ("fio", "cpu", "late")


class Job:
    """A model whose forward and backward can run again and again."""

    def __init__(self, options: argparse.Namespace, path: Path, params: str, prefetch: int = 1) -> None:
        layers = max(2, round(options.mib * 2**20 / 2 / (WIDTH * WIDTH)))
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        offload = {"optimizer": "nvme", "params": params, "path": str(path), "durable": False}
        adam = shardcore.FusedAdam(model.parameters(), lr=1e-3)
        self.model, self.optimizer = shardcore.shard(model, adam, 3, precision="bf16", offload=offload, prefetch=prefetch)
        self.x = torch.randn(options.tokens, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
        self.host_bytes = shardcore.memory_report(self.model).by_tier["cpu"]
        self.seconds()  # the order of units is known from now on

    @property
    def bytes_read(self) -> int:
        """What was read from the disk so far."""
        return int(engine_behind("bench_nvme_weights", self.model).store.moved_bytes["from_nvme"])

    def seconds(self) -> float:
        """Return the time of a forward and its backward."""
        begun = time.perf_counter()
        self.model(self.x).float().square().mean().backward()
        took = time.perf_counter() - begun
        self.optimizer.zero_grad()
        return took


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all cases in turns."""
    jobs = {
        "nvme": Job(options, folder, "nvme"),
        "late": Job(options, folder, "nvme", prefetch=0),
        "cpu": Job(options, folder, "cpu"),
    }
    before = jobs["nvme"].bytes_read
    jobs["nvme"].seconds()
    size = jobs["nvme"].bytes_read - before
    fio = Fio(folder, size, sync=False)
    fio.prepare("read")
    cases = {name: job.seconds for name, job in jobs.items()}
    cases["fio"] = lambda: size / fio.cases()["read"]()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for order in harness.random_order(list(cases), 1 + options.rounds, seed=0):
        for name in order:
            os.sync()
            time.sleep(options.pause)
            seconds[name].append(cases[name]())
    seconds = {name: samples[1:] for name, samples in seconds.items()}
    bound = [max(pair) for pair in zip(seconds["fio"], seconds["cpu"], strict=True)]
    return {
        "bytes_read": size,
        "host_bytes": {name: job.host_bytes for name, job in jobs.items()},
        "seconds": seconds,
        "over": {
            "bound": asdict(harness.paired(seconds["nvme"], bound)),
            **{name: asdict(harness.paired(seconds["nvme"], seconds[name])) for name in PEERS},
        },
    }


def main() -> int:
    """Run, print a table, write nvme_weights.json into --out."""
    parser = suite.make_parser("nvme_weights", __doc__, rounds=7, pause=0.2)
    parser.add_argument("--mib", type=positive, default=512, help="MiB of weights (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=128, help="rows of the input (default: %(default)s)")
    parser.add_argument("--dir", default=".", help="a folder on the disk to measure (default: .)")
    options = suite.parse(parser)
    if shutil.which("fio") is None:
        print("bench_nvme_weights: fio is not on PATH; expected it there (apt-get install fio)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="bench_nvme_weights_", dir=options.dir) as folder:
        result = measure(options, Path(folder))
    rows = [
        ["MiB read", "MiB of host memory", "forward and backward, s", "over the bound", *(f"over {peer}" for peer in PEERS)]
    ]
    median = harness.spread(result["seconds"]["nvme"]).median
    over = [str(harness.Spread(**result["over"][name])) for name in ("bound", *PEERS)]
    host = result["host_bytes"]["nvme"]
    rows.append([f"{result['bytes_read'] / 2**20:.0f}", f"{host / 2**20:.0f}", f"{median:.3f}", *over])
    print(harness.table(rows))
    harness.write_json(options.out / "nvme_weights.json", {**suite.about_run("nvme_weights", options), **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
