"""The machine that this rank runs on: its cores, its memory, and what control groups and the other ranks there leave of both.

Only Linux tells of memory, quotas and which cores are neighbours; elsewhere nothing is known of them. Memory that files fill
and the kernel can take back counts as free. `root`, where the system's files lie, is for tests.
"""

import mmap
import os
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardcore.distributed.comm import Comm

# --- what ranks of one machine share ----------------------------------------------------------------------------------


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


def plan_worker(comm: Comm, threads: int | None) -> tuple[int, tuple[int, ...]]:
    """Return how many threads a worker gets, `threads` if the user says so, and on which cores. Collective."""
    here = _here()
    rows = comm.gather_json([here, own_cores()])
    neighbours = [rank for rank, (host, _) in enumerate(rows) if host == here]
    of_ranks = [rows[rank][1] for rank in neighbours]
    count = worker_threads(of_ranks, quota()) if threads is None else threads
    return count, tuple(worker_cores(of_ranks, neighbours.index(comm.rank), count))


# --- cores ------------------------------------------------------------------------------------------------------------


def own_cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def quota(root: Path = Path("/")) -> float | None:
    """Return how many cores' time the control groups of this process leave it, None for no limit."""
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> Iterator[float]:
    for folder, unified in group_folders(root, "cpu"):
        if unified:
            words = read_text(folder / "cpu.max").split()
        else:
            words = [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() for word in words):  # "max", or -1, where there is no limit
            yield int(words[0]) / int(words[1])


def worker_threads(of_ranks: Sequence[Sequence[int]], limit: float | None) -> int:
    """Return the threads of each rank's worker: what the main threads leave of the cores, which ranks share.

    of_ranks: the cores that each rank of the machine may run on; limit: how many cores' time they have together.
    """
    cores, ranks = len({core for cores in of_ranks for core in cores}), len(of_ranks)
    usable = cores if limit is None else min(cores, int(limit))
    return max(1, (usable - ranks) // ranks)


def worker_cores(of_ranks: Sequence[Sequence[int]], rank: int, threads: int, root: Path = Path("/")) -> list[int]:
    """Return the cores that the worker of of_ranks[rank] stays on: this rank's share of its cores, nobody else's; [] for all.

    Ranks with the same cores divide them evenly, neighbours (of a package, then of a physical core) together. All may be used
    where a share has no core more than `threads`, one for the rank's main thread, or where ranks have some cores in common
    and others not, so that nobody can say whose they are.
    """
    own = set(of_ranks[rank])
    sharing = [other for other, cores in enumerate(of_ranks) if set(cores) == own]
    if any(own & set(cores) for other, cores in enumerate(of_ranks) if other not in sharing):
        return []
    place, cores = sharing.index(rank), sorted(own, key=lambda core: _place_of(core, root))
    share = cores[place * len(cores) // len(sharing) : (place + 1) * len(cores) // len(sharing)]
    return sorted(share) if len(share) > threads else []


def _place_of(core: int, root: Path) -> tuple[int, int, int]:
    """Return what cores are ordered by: package, first core of the same physical one, core. Zeros where Linux does not tell."""
    folder = root / f"sys/devices/system/cpu/cpu{core}/topology"
    numbers = (re.match(r"\d+", read_text(folder / name)) for name in ("physical_package_id", "thread_siblings_list"))
    package, first = (int(found[0]) if found else 0 for found in numbers)
    return package, first, core


# --- memory -----------------------------------------------------------------------------------------------------------


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still take, or None where the system does not say."""
    limits = [*_available(root), *_left_in_groups(root)]
    return max(0, min(limits)) if limits else None


def free_address_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process alone may still map (`ulimit -v`), or None for no limit."""
    for line in read_text(root / "proc/self/limits").splitlines():
        if line.startswith("Max address space") and (most := line.split()[3]).isdigit():
            pages = int(read_text(root / "proc/self/statm").split()[0])
            return max(0, int(most) - pages * mmap.PAGESIZE)
    return None


def _available(root: Path) -> Iterator[int]:
    for line in read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield what is left in each group that limits memory."""
    for folder, unified in group_folders(root, "memory"):
        if unified:
            limit, used, cached = "memory.max", "memory.current", "inactive_file"
        else:
            limit, used, cached = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        if (most := read_text(folder / limit).strip()).isdigit():
            taken = int(read_text(folder / used).strip() or 0)
            reclaimable = dict(pair.split() for pair in read_text(folder / "memory.stat").splitlines()).get(cached, "0")
            yield int(most) - taken + int(reclaimable)


# --- control groups, of both versions ---------------------------------------------------------------------------------


def group_folders(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each group that may limit this process by `controller`, from its own up; whether it is version 2."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        unified = controllers == ""
        if not unified and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" if unified else root / "sys/fs/cgroup" / controller
        # In a container the path may be that outside, and the group itself lies at the top.
        inner = top / path.strip("/")
        for folder in dict.fromkeys([inner, *inner.parents, top]):
            if folder.is_relative_to(top):
                yield folder, unified


def read_text(path: Path) -> str:
    """Return what a file says; nothing if it is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""
