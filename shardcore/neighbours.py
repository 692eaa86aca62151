"""What the ranks of one machine share: its memory and its cores."""

import socket
from pathlib import Path

from shardcore.comm import Comm
from shardcore.control_groups import read_text
from shardcore.host_cores import own_cores, quota, worker_cores, worker_threads
from shardcore.host_memory import free_address_bytes, free_bytes


def _here() -> list[str]:
    """Return what only ranks with the same memory and cores have in common.

    Machines may all have one name ("localhost"), so the kernel's number for its start belongs to it. The name stays: containers
    of one machine differ in it, and have limits of their own.
    """
    return [socket.gethostname(), read_text(Path("/proc/sys/kernel/random/boot_id")).strip()]


def short_of_memory(comm: Comm, needed: int) -> MemoryError | None:
    """Say whether this rank, or this machine's, need more host memory than is free; `needed`: bytes, of this rank."""
    here = _here()
    neighbours = [count for host, count in comm.gather_json([here, needed]) if host == here]
    limits = (
        (needed, free_address_bytes(), "this rank, whose address space (`ulimit -v`)"),
        (sum(neighbours), free_bytes(), f"the {len(neighbours)} ranks of {here[0]}, which"),
    )
    for wanted, free, whose in limits:
        if needed and free is not None and wanted > free:
            return MemoryError(
                f"shard: offload needs {wanted} bytes ({wanted / 2**30:.1f} GiB) of host memory for {whose} has {free} bytes "
                f"({free / 2**30:.1f} GiB) free; expected at least as many (free memory, raise the memory limit of the "
                "container, use more machines or a higher stage, or do not offload)"
            )
    return None


def worker_of(comm: Comm, threads: int | None) -> tuple[int, tuple[int, ...]]:
    """Return how many threads a worker gets, `threads` if the user says so, and on which cores. Collective."""
    here = _here()
    rows = comm.gather_json([here, own_cores()])
    neighbours = [rank for rank, (host, _) in enumerate(rows) if host == here]
    of_ranks = [rows[rank][1] for rank in neighbours]
    count = worker_threads(of_ranks, quota()) if threads is None else threads
    return count, tuple(worker_cores(of_ranks, neighbours.index(comm.rank), count))
