"""Time saving and loading a checkpoint beside torch.save, torch.distributed.checkpoint and fio, and
the pause of a save.

    shardcore     shardcore.save and load: O_DIRECT, a checksum per 4 MiB, every file and directory
                  synced
    torch.save    one file, synced afterwards; torch.load(mmap=True), then a copy to where the
                  tensors are
    dcp           torch.distributed.checkpoint with its FileSystemWriter, which syncs files
                  (sync_files=True)
    huggingface   the same with its HuggingFaceStorageWriter; weights and states by name
    fio           writes, or reads, as many bytes: io_uring, requests of 1 MiB, 16 in flight,
                  O_DIRECT (where it is installed)

The state is that of bfloat16 weights on one rank: float32 masters and Adam states, 12 bytes per
parameter, of which the peers are given the same tensors. Each round runs every case once, in a
random order. What is saved is new, the older one removed before; before a load the page cache is
told to drop the files. Reported are ratios within rounds.

    pause         of a save in the background, beside torch.distributed.checkpoint.async_save: what
                  the call takes, and by how much the next step is longer than one without a save
    memory        by how much the resident memory of this process grows, at most, during one save,
                  and one load

--dir must be on the disk to measure, with room for five checkpoints of --mib. The process holds the
state twice, for the peers have a copy of their own; HuggingFaceStorageWriter and async_save make a
third one, which --peers and --no-pause leave out.
"""

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shardcore
from benchmarks import harness, suite
from benchmarks.bench_io import Fio
from examples.arguments import positive

WIDTH = 1024
BYTES_PER_PARAM = 12
TARGET_OF_FIO, TARGET_PAUSE = 0.9, 0.1
PEERS = ("torch.save", "dcp", "huggingface")


class Job:
    """A model with its optimizer, and what every case saves and loads."""

    def __init__(self, mib: int, folder: Path, peers: Sequence[str] = PEERS) -> None:
        self.peers = peers
        layers = max(1, round(mib * 2**20 / BYTES_PER_PARAM / (WIDTH * (WIDTH + 1))))
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        optimizer = shardcore.FusedAdam(model.parameters(), lr=1e-3)
        self.model, self.optimizer = shardcore.shard(
            model, optimizer, 2, precision="bf16", offload={"optimizer": "cpu"}
        )
        self.folder = folder
        self.step()
        self.tensors = {
            f"{name}.{key}": shardcore.full_state(param, key)
            for name, param in self.model.named_parameters()
            for key in ("master", "exp_avg", "exp_avg_sq")
        }
        self.size_bytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def step(self) -> None:
        """Train a step."""
        x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
        self.model(x).float().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    # --- saving ---

    def save_shardcore(self) -> None:
        shardcore.save(self.folder / "shardcore", self.model, self.optimizer, tag="step")

    def save_torch(self) -> None:
        path = self.folder / "torch.pt"
        with open(path, "wb") as file:
            torch.save(self.tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def save_dcp(self) -> None:
        writer = dcp.FileSystemWriter(self.folder / "dcp", sync_files=True, overwrite=True)
        dcp.save(self.tensors, storage_writer=writer, no_dist=True)

    def save_huggingface(self) -> None:
        dcp.save(
            self.tensors,
            storage_writer=dcp.HuggingFaceStorageWriter(str(self.folder / "hf")),
            no_dist=True,
        )

    def remove(self, name: str) -> None:
        """Remove what a case, or fio, has saved: each save is a new one, whose time has no
        removal in it.
        """
        path = self.folder / {"torch.save": "torch.pt", "huggingface": "hf"}.get(name, name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    # --- loading ---

    def load_shardcore(self) -> None:
        shardcore.load(self.folder / "shardcore", self.model, self.optimizer)

    def load_torch(self) -> None:
        for name, value in torch.load(
            self.folder / "torch.pt", weights_only=True, mmap=True
        ).items():
            self.tensors[name].copy_(value)

    def load_dcp(self) -> None:
        dcp.load(
            self.tensors, storage_reader=dcp.FileSystemReader(self.folder / "dcp"), no_dist=True
        )

    def load_huggingface(self) -> None:
        dcp.load(
            self.tensors,
            storage_reader=dcp.HuggingFaceStorageReader(str(self.folder / "hf")),
            no_dist=True,
        )

    def cases(self, what: str) -> dict[str, Callable[[], None]]:
        """Return what to time by name; what: "save" or "load"."""
        return {
            name: getattr(self, f"{what}_{name.removesuffix('.save')}")
            for name in ("shardcore", *self.peers)
        }


def drop_cache(folder: Path) -> None:
    """Tell the page cache to drop all files of a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure(job: Job, what: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return seconds by case and round."""

    def prepared(name: str, call: Callable[[], float]) -> float:
        if what == "load":
            drop_cache(job.folder)
        else:
            job.remove(name)
            os.sync()
        return call()

    cases = {name: partial(harness.wall_seconds, call, 1) for name, call in job.cases(what).items()}
    if shutil.which("fio"):
        fio = Fio(job.folder, job.size_bytes)
        cases["fio"] = fio.fresh if what == "save" else fio.read
    turns = {name: partial(prepared, name, call) for name, call in cases.items()}
    return harness.disk_turns(turns, options.rounds, options.pause)


def measure_pause(job: Job, rounds: int) -> dict[str, list[float]]:
    """Return the pauses of saves in the background, and the length of a step, by round."""
    found: dict[str, list[float]] = {
        name: [] for name in ("step", "shardcore", "shardcore, step", "dcp", "dcp, step")
    }
    for _ in range(rounds + 1):
        found["step"].append(harness.wall_seconds(job.step, 1))
        begun = time.perf_counter()
        saving = shardcore.save(
            job.folder / "pause", job.model, job.optimizer, tag="step", wait=False
        )
        found["shardcore"].append(time.perf_counter() - begun)
        found["shardcore, step"].append(harness.wall_seconds(job.step, 1))
        saving.wait()
        found["step"][-1] = (found["step"][-1] + harness.wall_seconds(job.step, 1)) / 2
        writer = dcp.FileSystemWriter(job.folder / "pause_dcp", sync_files=True, overwrite=True)
        begun = time.perf_counter()
        future: Any = dcp.async_save(job.tensors, storage_writer=writer)
        found["dcp"].append(time.perf_counter() - begun)
        found["dcp, step"].append(harness.wall_seconds(job.step, 1))
        future.result()
    return {name: samples[1:] for name, samples in found.items()}


def grown_bytes(call: Callable[[], None]) -> int:
    """Return by how much resident memory grows, at most, during a call."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) << 10


def shortfalls(result: dict[str, Any]) -> list[str]:
    """Return what falls short of its target, in words."""
    found = []
    for what in ("save", "load"):
        for peer, ratio in result[what]["times_faster_than"].items():
            target = TARGET_OF_FIO if peer == "fio" else 1.0
            if ratio["median"] < target:
                found.append(
                    f"{what}: {ratio['median']:.2f} of the speed of {peer}; expected {target:g}"
                )
    if "pause" in result and result["pause"]["ratio"] > TARGET_PAUSE:
        found.append(
            f"pause: {result['pause']['ratio']:.2f} of async_save's; expected {TARGET_PAUSE:g}"
        )
    return found


def main() -> int:
    parser = suite.make_parser("checkpoint", __doc__, rounds=5, pause=0.0)
    parser.add_argument(
        "--mib", type=positive, nargs="+", default=[1024], help="MiB of states (default: 1024)"
    )
    parser.add_argument("--dir", default=".", help="a folder on the disk to measure (default: .)")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        default=PEERS,
        help="which to compare with (default: all)",
    )
    parser.add_argument(
        "--no-pause", action="store_true", help="leave out saving in the background"
    )
    options = suite.parse(parser)
    warnings.filterwarnings("ignore", message=".*assuming the intent is.*")
    # async_save needs one
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    report: dict[str, Any] = {**suite.about_run("checkpoint", options), "sizes": []}
    rows = [
        [
            "",
            "save, s",
            "fio's",
            "torch.save's",
            "dcp's",
            "hf's",
            "load, s",
            "fio's",
            "torch's",
            "dcp's",
            "hf's",
        ]
    ]
    for mib in options.mib:
        folder = Path(tempfile.mkdtemp(prefix="bench_checkpoint_", dir=options.dir))
        try:
            result = of_size(Job(mib, folder, options.peers), options)
        finally:
            shutil.rmtree(folder)
        report["sizes"].append(result)
        harness.save_json(options.out / "checkpoint.json", report)
        row = [f"{mib} MiB"]
        for what in ("save", "load"):
            row.append(f"{result[what]['seconds_median']['shardcore']:.2f}")
            ratios = result[what]["times_faster_than"]
            row += [
                str(harness.Spread(**ratios[peer])) if peer in ratios else "-"
                for peer in ("fio", *PEERS)
            ]
        rows.append(row)
        if "pause" in result:
            pause = result["pause"]
            print(
                f"{mib} MiB: pause {pause['shardcore_ms']:.1f} ms (dcp.async_save "
                f"{pause['dcp_ms']:.1f} ms, ratio "
                f"{pause['ratio']:.3f}), with what the next step takes longer "
                f"{pause['with_next_step_ms']}"
            )
        print(
            f"{mib} MiB: memory: save {result['grown_mib']['save']:.0f} MiB, load "
            f"{result['grown_mib']['load']:.0f} MiB"
        )
        print("\n".join(shortfalls(result) or ["every target is met"]))
    print("how many times faster than each (fio: a fraction of its rate)")
    print(harness.table(rows))
    harness.write_json(options.out / "checkpoint.json", report)
    dist.destroy_process_group()
    return 0


def summary_of_pauses(pauses: dict[str, list[float]]) -> dict[str, Any]:
    """Return what is reported of `measure_pause`'s."""
    whole = {
        name: [
            call + max(0.0, longer - usual)
            for call, longer, usual in zip(
                pauses[name], pauses[f"{name}, step"], pauses["step"], strict=True
            )
        ]
        for name in ("shardcore", "dcp")
    }
    return {
        "seconds": pauses,
        "shardcore_ms": 1e3 * harness.spread(pauses["shardcore"]).median,
        "dcp_ms": 1e3 * harness.spread(pauses["dcp"]).median,
        "ratio": harness.paired(pauses["shardcore"], pauses["dcp"]).median,
        "with_next_step_ms": {
            name: 1e3 * harness.spread(samples).median for name, samples in whole.items()
        },
    }


def of_size(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything at one size."""
    result: dict[str, Any] = {"state_bytes": job.size_bytes}
    for what in ("save", "load"):
        seconds = measure(job, what, options)
        result[what] = {
            "seconds": seconds,
            "seconds_median": {
                name: harness.spread(samples).median for name, samples in seconds.items()
            },
            "times_faster_than": {
                peer: asdict(harness.paired(samples, seconds["shardcore"]))
                for peer, samples in seconds.items()
                if peer != "shardcore"
            },
        }
    if not options.no_pause:
        result["pause"] = summary_of_pauses(measure_pause(job, options.rounds))
    result["grown_mib"] = {
        what: grown_bytes(job.cases(what)["shardcore"]) / 2**20 for what in ("save", "load")
    }
    return result


if __name__ == "__main__":
    sys.exit(main())
