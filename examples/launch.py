"""Runs one function on every rank: joins torchrun when it is there, or starts the ranks of this
machine itself.

Ranks that we start meet through a file, so no port can be taken. The first rank that fails ends all
of them, and its traceback (not the "connection closed" that it causes in the others) is what the
user sees.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

from examples.machine import usable_cores
from shardcore.launch.failures import collect, report
from shardcore.launch.rank import record


@dataclass(frozen=True)
class Rank:
    """The place of this process: its rank, how many there are, and its device."""

    rank: int
    world_size: int
    device: torch.device


def under_torchrun() -> bool:
    """Tell if a launcher such as torchrun has started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def default_nproc(device: str) -> int:
    """Choose how many ranks to start: one a GPU, or two on the CPU."""
    return torch.cuda.device_count() if device == "cuda" else 2


def launch(
    function: Callable[..., int], nproc: int, device: str, threads: int | None, *args: object
) -> int:
    """Run ``function(Rank, *args)`` on every rank and return rank 0's result as an exit code.

    ``function`` must be importable by name. ``device`` is "cpu" or "cuda". ``threads`` a rank is
    the share of this machine's cores unless given. Under torchrun ``nproc`` is not used. Prints the
    first failing rank's traceback last and returns 1 if a rank fails; returns 130 if it is
    interrupted.
    """
    try:
        return _launch(function, nproc, device, threads, args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _launch(
    function: Callable[..., int],
    nproc: int,
    device: str,
    threads: int | None,
    args: tuple[object, ...],
) -> int:
    if under_torchrun():
        return _run_rank(function, "env://", device, threads, args)
    if sys.platform == "linux":
        # all ranks are here; a host name may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as directory:
        if nproc == 1:
            return _run_rank(function, f"file://{directory}/store", device, threads, args)
        context = mp.start_processes(
            _spawned_rank,
            (directory, function, nproc, device, threads, args),
            nprocs=nproc,
            join=False,
            start_method="spawn",
        )
        try:
            while not context.join():
                pass
        except ProcessException:
            exits = {rank: process.exitcode or 0 for rank, process in enumerate(context.processes)}
            print(report(collect(Path(directory), exits), nproc, "launch"), file=sys.stderr)
            return 1
        finally:
            for process in context.processes:
                process.kill()
        return int(Path(directory, "result").read_text())


def _spawned_rank(
    rank: int,
    directory: str,
    function: Callable[..., int],
    nproc: int,
    device: str,
    threads: int | None,
    args: tuple[object, ...],
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc)
    )
    try:
        result = _run_rank(function, f"file://{directory}/store", device, threads, args)
    except Exception as error:
        record(directory, rank, error, error.__traceback__)
        raise
    if rank == 0:
        Path(directory, "result").write_text(str(result))
    sys.stdout.flush()
    sys.stderr.flush()
    # threads of torch's process groups may abort an interpreter that ends (2.13, on a busy machine)
    os._exit(0)


def _run_rank(
    function: Callable[..., int],
    init_method: str,
    device: str,
    threads: int | None,
    args: tuple[object, ...],
) -> int:
    """Set up this process as the rank that torchrun's variables name (rank 0 of 1 without them)
    and run the function.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if threads is not None or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(
            threads or max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        )
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(place)
    # Also for one rank: the group says which device is meant (a CPU run on a machine with GPUs).
    ours = {"backend": "nccl", "device_id": place} if place.type == "cuda" else {"backend": "gloo"}
    dist.init_process_group(init_method=init_method, rank=rank, world_size=world_size, **ours)
    result = function(Rank(rank, world_size, place), *args)
    dist.destroy_process_group()
    return result
