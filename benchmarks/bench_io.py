"""Time the file engine's writer and reader beside fio: the same sizes, direct, in turns.

    shardcore   _C.FileEngine: FileWriter (checksums, reserved space, fdatasync), FileReader (reads
                of 16 MiB, three in flight)
    threads     the same over its threads instead of io_uring
    fio         io_uring, requests of 1 MiB, 16 in flight, O_DIRECT, fdatasync at the end of writing

    fresh       write a new file
    read        read a file from its beginning to its end

Each round runs every case once, in a random order; what counts is the rate over fio's of the same
round. fio's time is the one that it reports, without its start. --dir must be on the disk to
measure, with room for three files of --mib. What is written in place (states on disk) is timed by
benchmarks.bench_nvme.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness, suite
from examples.arguments import positive
from shardcore._native import _C

MIB = 1 << 20
READ_BYTES, READS = 16 * MIB, 3
DEPTH = 16
TARGET = 0.95  # of fio's rate
CASES = ("fresh", "read")
FIO = ["--bs=1M", "--ioengine=io_uring", "--direct=1", "--output-format=json"]


def remove(file: Path) -> None:
    """Remove a file, on disk as well, so that this does not delay what follows."""
    file.unlink(missing_ok=True)
    os.sync()


class Shardcore:
    """The file engine."""

    def __init__(self, backend: str, folder: Path, data: torch.Tensor) -> None:
        self.engine = _C.FileEngine(backend, DEPTH)
        self.data, self.file = data, folder / f"shardcore_{backend}"

    def fresh(self) -> float:
        """Write a new file; returns the seconds."""
        remove(self.file)
        return harness.wall_seconds(self._write, 1)

    def read(self) -> float:
        """Read the file, and drop what was read; returns the seconds."""
        if not self.file.exists():
            self._write()
        return harness.wall_seconds(self._read, 1)

    def _write(self) -> None:
        writer = _C.FileWriter(self.engine, self.file, self.data.nbytes)
        writer.append(self.data)
        writer.finish()
        writer.close()

    def _read(self) -> None:
        reader = _C.FileReader(self.engine, self.file)
        reads: deque[_C.FileRead] = deque()
        for offset in range(0, self.data.nbytes, READ_BYTES):
            reads.append(reader.start(offset, min(READ_BYTES, self.data.nbytes - offset)))
            if len(reads) == READS:
                reads.popleft().wait()
        while reads:
            reads.popleft().wait()


class Fio:
    """fio, one process a sample, on files of its own; what moves bytes returns the seconds.
    RuntimeError where fio fails.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.file, self.other, self.size_bytes = folder / "fio", folder / "fio_other", size_bytes

    def fresh(self) -> float:
        """Write a new file, and make it durable."""
        remove(self.file)
        return self._run(("write", self.file), sync=True)

    def read(self) -> float:
        """Read the file."""
        self._make(self.file)
        return self._run(("read", self.file))

    def mixed(self) -> float:
        """Read the file while another one is written over."""
        self._make(self.file)
        self._make(self.other)
        return self._run(("read", self.file), ("write", self.other))

    def _make(self, file: Path) -> None:
        if not file.exists():
            self._run(("write", file))

    def _run(self, *jobs: tuple[str, Path], sync: bool = False) -> float:
        command = [
            "fio",
            *FIO,
            f"--size={self.size_bytes}",
            "--group_reporting",
            f"--end_fsync={int(sync)}",
        ]
        # in flight together as many as of one job
        command.append(f"--iodepth={DEPTH // len(jobs)}")
        for rw, file in jobs:
            command += [f"--name={rw}", f"--rw={rw}", f"--filename={file}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"bench_io: fio failed: {done.stderr[-500:]}")
        found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        parts = [job[way] for job in found for way in ("read", "write")]
        # bytes per millisecond
        rate = sum(part["io_bytes"] for part in parts) / max(part["runtime"] for part in parts)
        return float(self.size_bytes * len(jobs) / rate / 1000)


def check(engine: Shardcore) -> None:
    """ValueError unless the engine's file holds what was written."""
    reader = _C.FileReader(engine.engine, engine.file)
    if _C.crc32c(reader.start(0, engine.data.nbytes).wait()) != _C.crc32c(engine.data):
        raise ValueError(
            f"bench_io: {engine.file} holds other bytes than were written; expected the same"
        )


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all cases in turns."""
    data = torch.randint(0, 256, (options.mib * MIB,), dtype=torch.uint8)
    ours = Shardcore("auto", folder, data)
    engines: dict[str, Any] = {"shardcore": ours, "threads": Shardcore("threads", folder, data)}
    left_out = {}
    if shutil.which("fio"):
        engines["fio"] = Fio(folder, data.nbytes)
    else:
        left_out["fio"] = "fio is not on PATH (apt-get install fio)"
    calls = {
        f"{case}, {name}": getattr(engine, case)
        for case in CASES
        for name, engine in engines.items()
    }
    seconds = harness.disk_turns(calls, options.rounds, options.pause)
    check(ours)
    result: dict[str, Any] = {
        "backend": ours.engine.backend,
        "note": ours.engine.note,
        "left_out": left_out,
        "cases": {},
    }
    for case in CASES:
        by_name = {name: seconds[f"{case}, {name}"] for name in engines}
        result["cases"][case] = {
            name: {
                "seconds": samples,
                "gb_per_second": data.nbytes / harness.spread(samples).median / 1e9,
                **(
                    {"over_fio": asdict(harness.paired(by_name["fio"], samples))}
                    if "fio" in by_name
                    else {}
                ),
            }
            for name, samples in by_name.items()
        }
    return result


def shortfalls(cases: dict[str, Any]) -> list[str]:
    """Which of shardcore's rates are below the target."""
    return [
        f"{case}: {each['shardcore']['over_fio']['median']:.2f} of fio's rate; expected {TARGET}"
        for case, each in cases.items()
        if "over_fio" in each["shardcore"] and each["shardcore"]["over_fio"]["median"] < TARGET
    ]


def main() -> int:
    """Run, print a table, write io.json into --out."""
    parser = suite.make_parser("io", __doc__, rounds=7, pause=0.2)
    parser.add_argument(
        "--mib", type=positive, default=1024, help="size of a file in MiB (default: %(default)s)"
    )
    parser.add_argument("--dir", default=".", help="a folder on the disk to measure (default: .)")
    options = suite.parse(parser)
    with tempfile.TemporaryDirectory(prefix="bench_io_", dir=options.dir) as folder:
        result = measure(options, Path(folder))
    rows = [["case", "engine", "GB/s", "over fio's"]]
    for case, by_name in result["cases"].items():
        for name, each in by_name.items():
            ratio = str(harness.Spread(**each["over_fio"])) if "over_fio" in each else ""
            rows.append([case, name, f"{each['gb_per_second']:.2f}", ratio])
    print(harness.table(rows))
    for name, why in result["left_out"].items():
        print(f"{name}: {why}")
    short = shortfalls(result["cases"])
    print(*short, sep="\n", end="\n" if short else "")
    harness.write_json(options.out / "io.json", {**suite.about_run("io", options), **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
