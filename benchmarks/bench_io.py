"""Time the file engine beside fio, and DeepSpeed's asynchronous I/O where it runs: the same sizes, direct, in turns.

    shardcore   _C.FileEngine: FileWriter (checksums, reserved space, fdatasync), FileReader (reads of 16 MiB, three in flight)
    threads     the same over its threads instead of io_uring
    fio         io_uring, requests of 1 MiB, 16 in flight, O_DIRECT, fdatasync at the end of writing
    deepspeed   aio_handle of DeepSpeed: blocks of 1 MiB, 16 in flight; it neither syncs nor sums up

    fresh       write a new file
    overwrite   write over a file in place
    read        read a file from its beginning to its end
    mixed       read a file while another one is written over

Each round every case runs once, in a random order of the engines; what counts is the rate over fio's of the same round. fio's
time is the one that it reports, without its start. --dir must be on the disk to measure, with room for seven files of --mib.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
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
FIO = ["--bs=1M", f"--iodepth={DEPTH}", "--ioengine=io_uring", "--direct=1", "--output-format=json"]


class Shardcore:
    """The file engine."""

    def __init__(self, backend: str, folder: Path, data: torch.Tensor) -> None:
        self.engine = _C.FileEngine(backend, DEPTH)
        self.data, self.folder = data, folder
        self.file, self.other = folder / f"shardcore_{backend}", folder / f"shardcore_{backend}_other"

    def write(self, overwrite: bool) -> None:
        """Write the file."""
        writer = _C.FileWriter(self.engine, self.file, self.data.nbytes, overwrite=overwrite)
        writer.append(self.data)
        writer.finish()
        writer.close()

    def read(self) -> None:
        """Read the file, and drop what was read."""
        reader = _C.FileReader(self.engine, self.file)
        reads: deque[_C.FileRead] = deque()
        for offset in range(0, self.data.nbytes, READ_BYTES):
            reads.append(reader.start(offset, min(READ_BYTES, self.data.nbytes - offset)))
            if len(reads) == READS:
                reads.popleft().wait()
        while reads:
            reads.popleft().wait()

    def mixed(self) -> None:
        """Read the file while another one is written over."""
        reader = _C.FileReader(self.engine, self.file)
        writer = _C.FileWriter(self.engine, self.other, self.data.nbytes, overwrite=True)
        reads: deque[_C.FileRead] = deque()
        for offset in range(0, self.data.nbytes, READ_BYTES):
            reads.append(reader.start(offset, min(READ_BYTES, self.data.nbytes - offset)))
            writer.append(self.data[offset : offset + READ_BYTES])
            if len(reads) == READS:
                reads.popleft().wait()
        while reads:
            reads.popleft().wait()
        writer.finish()
        writer.close()

    def cases(self) -> dict[str, Callable[[], float]]:
        """Return what to run by name; each returns bytes per second."""
        size = self.data.nbytes
        return {
            "fresh": lambda: timed(lambda: self.write(False), size),
            "overwrite": lambda: timed(lambda: self.write(True), size),
            "read": lambda: timed(self.read, size),
            "mixed": lambda: timed(self.mixed, 2 * size),
        }

    def prepare(self, case: str) -> None:
        """Make, or remove, the files that a case begins with."""
        if case == "fresh":
            self.file.unlink(missing_ok=True)
        elif not self.file.exists():
            self.write(False)
        if case == "mixed" and not self.other.exists():
            self.other.write_bytes(b"")
            self.mixed()


class Fio:
    """fio, one process a sample."""

    def __init__(self, folder: Path, size_bytes: int, sync: bool = True) -> None:
        self.file, self.other = folder / "fio", folder / "fio_other"
        self.size_bytes, self.sync = size_bytes, sync

    def run(self, *jobs: tuple[str, Path]) -> float:
        """Run jobs (rw, file) at once; returns bytes per second of all."""
        command = ["fio", *FIO, f"--size={self.size_bytes}", "--group_reporting"]
        if len(jobs) > 1:  # in flight together as many as of one job
            command.append(f"--iodepth={DEPTH // len(jobs)}")
        for rw, file in jobs:
            command += [f"--name={rw}", f"--rw={rw}", f"--filename={file}"]
            command.append(f"--end_fsync={int(self.sync and rw == 'write')}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"bench_io: fio failed: {done.stderr[-500:]}")
        parts = [job[way] for job in json.loads(done.stdout[done.stdout.index("{") :])["jobs"] for way in ("read", "write")]
        return float(sum(part["io_bytes"] for part in parts) / max(part["runtime"] for part in parts) * 1000)

    def cases(self) -> dict[str, Callable[[], float]]:
        """Return what to run by name; each returns bytes per second."""
        return {
            "fresh": lambda: self.run(("write", self.file)),
            "overwrite": lambda: self.run(("write", self.file)),
            "read": lambda: self.run(("read", self.file)),
            "mixed": lambda: self.run(("read", self.file), ("write", self.other)),
        }

    def prepare(self, case: str) -> None:
        """Make, or remove, the files that a case begins with."""
        if case == "fresh":
            self.file.unlink(missing_ok=True)
        elif not self.file.exists():
            self.run(("write", self.file))
        if case == "mixed" and not self.other.exists():
            self.run(("write", self.other))


class DeepSpeed:
    """DeepSpeed's aio_handle; not mixed."""

    def __init__(self, folder: Path, data: torch.Tensor) -> None:
        from deepspeed.ops.op_builder import AsyncIOBuilder  # takes seconds, and compiles at the first use

        self.handle = AsyncIOBuilder().load(verbose=False).aio_handle(MIB, DEPTH, False, True, 1)
        self.file, self.data = folder / "deepspeed", data
        self.target = self.handle.new_cpu_locked_tensor(data.numel(), data)

    def write(self) -> None:
        """Write the file."""
        self.handle.sync_pwrite(self.data, str(self.file))

    def cases(self) -> dict[str, Callable[[], float]]:
        """Return what to run by name; each returns bytes per second."""
        size = self.data.nbytes
        return {
            "fresh": lambda: timed(self.write, size),
            "overwrite": lambda: timed(self.write, size),
            "read": lambda: timed(lambda: self.handle.sync_pread(self.target, str(self.file)), size),
        }

    def prepare(self, case: str) -> None:
        """Make, or remove, the file that a case begins with."""
        if case == "fresh":
            self.file.unlink(missing_ok=True)
        elif not self.file.exists():
            self.write()


def timed(call: Callable[[], None], size_bytes: int) -> float:
    """Run a case; returns bytes per second."""
    return size_bytes / harness.wall_seconds(call, 1)


def check(engine: Shardcore) -> None:
    """ValueError unless the engine's file holds what was written."""
    reader = _C.FileReader(engine.engine, engine.file)
    if _C.crc32c(reader.start(0, engine.data.nbytes).wait()) != _C.crc32c(engine.data):
        raise ValueError(f"bench_io: {engine.file} holds other bytes than were written; expected the same")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all cases in turns."""
    data = torch.randint(0, 256, (options.mib * MIB,), dtype=torch.uint8)
    engines: dict[str, Any] = {name: Shardcore(backend, folder, data) for name, backend in
                               (("shardcore", "auto"), ("threads", "threads"))}  # fmt: skip
    left_out = {}
    if shutil.which("fio"):
        engines["fio"] = Fio(folder, data.nbytes)
    else:
        left_out["fio"] = "fio is not on PATH (apt-get install fio)"
    if options.deepspeed:
        try:
            engines["deepspeed"] = DeepSpeed(folder, data)
        except Exception as error:  # whatever its compiler, or its absence, says
            left_out["deepspeed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
    else:
        left_out["deepspeed"] = "left out (--deepspeed)"
    rates: dict[str, dict[str, list[float]]] = {}
    for order in harness.random_order(list(engines), 1 + options.rounds, seed=0):
        for case in ("fresh", "overwrite", "read", "mixed"):
            for name in order:
                run = engines[name].cases().get(case)
                if run is not None:
                    engines[name].prepare(case)
                    time.sleep(options.pause)
                    rates.setdefault(case, {}).setdefault(name, []).append(run())
    check(engines["shardcore"])
    engine = engines["shardcore"].engine
    result: dict[str, Any] = {"backend": engine.backend, "note": engine.note, "left_out": left_out, "cases": {}}
    for case, by_name in rates.items():
        counted = {name: samples[1:] for name, samples in by_name.items()}  # the first round warms up
        result["cases"][case] = {
            name: {
                "bytes_per_second": samples,
                "gb_per_second": harness.spread(samples).median / 1e9,
                **({"over_fio": asdict(harness.paired(samples, counted["fio"]))} if "fio" in counted else {}),
            }
            for name, samples in counted.items()
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
    parser.add_argument("--mib", type=positive, default=1024, help="size of a file in MiB (default: %(default)s)")
    parser.add_argument("--dir", type=Path, default=Path("build"), help="folder on the disk to measure (default: %(default)s)")
    parser.add_argument("--deepspeed", action="store_true", help="also DeepSpeed's aio_handle (needs libaio; it is compiled)")
    options = suite.parse(parser)
    folder = options.dir / "bench_io"
    folder.mkdir(parents=True, exist_ok=True)
    options.dir = str(options.dir)
    try:
        result = measure(options, folder)
    finally:
        shutil.rmtree(folder)
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
    harness.save_json(options.out / "io.json", {**suite.about_run("io", options), **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
