"""Time forward and backward with weights in files beside what bounds them: fio reading the same bytes, and weights in memory.

    nvme    a forward and a backward at stage 3 with offload={"params": "nvme"}: each unit's weights read while another computes
    late    the same with prefetch=0: read when they are needed
    cpu     the same with {"params": "cpu"}: the compute, which the bound has as well
    fio     reads as many bytes of one file: io_uring, 1 MiB, 16 in flight, O_DIRECT

The bound of a round is the larger of fio's and cpu's time. The weights are bfloat16, of one rank. Each round runs every case
once, in a random order, and steps of the optimizer are left out (benchmarks.bench_nvme_step). --dir must be on the disk to
measure, with room for fifteen times --mib; the host needs eight times --mib.
"""

import argparse
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
    """A sharded model that can run forward and backward again and again."""

    def __init__(self, options: argparse.Namespace, where: str, folder: Path, prefetch: int = 1) -> None:
        layers = max(2, round(options.mib * 2**20 / (2 * WIDTH * WIDTH)))
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        offload = {"optimizer": "nvme", "params": where, "path": str(folder), "durable": False}
        adam = shardcore.FusedAdam(model.parameters())
        self.model, self.optimizer = shardcore.shard(model, adam, 3, precision="bf16", offload=offload, prefetch=prefetch)
        self.batch = torch.ones(options.tokens, WIDTH, dtype=torch.bfloat16)

    def seconds(self) -> float:
        """Return the time of a forward and a backward."""
        begun = time.perf_counter()
        self.model(self.batch).float().sum().backward()
        taken = time.perf_counter() - begun
        self.optimizer.zero_grad()
        return taken

    def read_bytes(self) -> int:
        """Return what a forward and a backward read from files."""
        store = engine_behind("bench_nvme_weights", self.model).store
        before = store.moved_bytes["from_nvme"]
        self.seconds()
        return store.moved_bytes["from_nvme"] - before


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all cases in turns."""
    jobs = {
        "nvme": Job(options, "nvme", folder / "nvme"),
        "late": Job(options, "nvme", folder / "late", prefetch=0),
        "cpu": Job(options, "cpu", folder / "cpu"),
    }
    size = jobs["nvme"].read_bytes()
    cases = {name: job.seconds for name, job in jobs.items()}
    cases["fio"] = Fio(folder, size).read
    seconds = harness.disk_turns(cases, options.rounds, options.pause)
    bound = [max(pair) for pair in zip(seconds["fio"], seconds["cpu"], strict=True)]
    return {
        "read_bytes": size,
        "seconds": seconds,
        "over": {
            "bound": asdict(harness.paired(seconds["nvme"], bound)),
            **{name: asdict(harness.paired(seconds["nvme"], seconds[name])) for name in PEERS},
        },
    }


def main() -> int:
    """Run, print a table, write nvme_weights.json into --out."""
    parser = suite.make_parser("nvme_weights", __doc__, rounds=9, pause=0.2)
    parser.add_argument("--mib", type=positive, default=256, help="MiB of weights (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=256, help="rows of a batch (default: %(default)s)")
    parser.add_argument("--dir", default=".", help="a folder on the disk to measure (default: .)")
    options = suite.parse(parser)
    if shutil.which("fio") is None:
        print("bench_nvme_weights: fio is not on PATH; expected it there (apt-get install fio)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="bench_nvme_weights_", dir=options.dir) as folder:
        result = measure(options, Path(folder))
    over = [str(harness.Spread(**result["over"][name])) for name in ("bound", *PEERS)]
    median = harness.spread(result["seconds"]["nvme"]).median
    rows = [["MiB read", "forward and backward, s", "over the bound", *(f"over {peer}" for peer in PEERS)]]
    rows.append([f"{result['read_bytes'] / 2**20:.0f}", f"{median:.3f}", *over])
    print(harness.table(rows))
    harness.write_json(options.out / "nvme_weights.json", {**suite.about_run("nvme_weights", options), **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
