"""The machine that this rank runs on: its cores and its memory, less what control groups and the
machine's other ranks take.

Memory, quotas (control groups of version 2) and the topology of cores are read on Linux only.
Reclaimable file cache counts as free. `root`, the folder of the system's files, is for tests.
"""

import ctypes
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from shardcore.distributed.comm import Comm

# --- what ranks of one machine share --------------------------------------------------------------


def machine_id() -> list[str]:
    """Identify the machine: ranks that share its memory and cores return the same list.

    Host names may be equal ("localhost"), so the kernel's boot id is added. The name stays, since
    containers of one machine have different names, and limits of their own.
    """
    return [socket.gethostname(), read_text(Path("/proc/sys/kernel/random/boot_id")).strip()]


class FreedMemory:
    """Gives memory that was freed back to the system, on glibc. Its heap keeps freed blocks below
    one in use: weights that are made and freed in turn would fill the memory of all.
    """

    _AT_ONCE = 64 << 20

    def __init__(self) -> None:
        """Count from 0."""
        self._bytes = 0

    def add(self, freed_bytes: int) -> None:
        """Count bytes that were freed, and give back what there is of each 64 MiB."""
        self._bytes += freed_bytes
        if self._bytes >= self._AT_ONCE:
            self._bytes = 0
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)


def short_of_memory(comm: Comm, needed_bytes: int) -> MemoryError | None:
    """Return an error if the model's ranks on this machine need more host memory than is free.
    Collective (all parts).

    needed_bytes: of this rank.
    """
    machine, free = machine_id(), free_bytes()
    _, rows = _of_model(comm, [machine, needed_bytes])
    neighbors = [count for id_of_rank, count in rows if id_of_rank == machine]
    total = sum(neighbors)
    if not needed_bytes or free is None or total <= free:
        return None
    return MemoryError(
        f"shard: offload needs {total} bytes ({total / 2**30:.1f} GiB) of host memory for the "
        f"{len(neighbors)} ranks of "
        f"{machine[0]}, which has {free} bytes ({free / 2**30:.1f} GiB) free; expected at least as "
        f"many (free memory, raise the "
        "memory limit of the container, use more machines or a higher stage, or do not offload)"
    )


@dataclass(frozen=True)
class WorkerThreads:
    """How many threads the kernels of one worker use, and the cores they are bound to; empty:
    all that the process may use.
    """

    count: int
    cores: tuple[int, ...] = ()


def plan_worker(comm: Comm, threads: int | None, device: torch.device) -> WorkerThreads:
    """Return the threads of a worker (`threads` unless None) and the cores that it runs on.

    Collective (all parts). device: of this rank.
    """
    machine = machine_id()
    near = near_cores(pci_address(device.index)) if device.type == "cuda" else []
    own_row, rows = _of_model(comm, [machine, own_cores(), near])
    neighbors = [number for number, (id_of_rank, *_) in enumerate(rows) if id_of_rank == machine]
    of_ranks = divide_by_nodes(
        [rows[number][1] for number in neighbors], [rows[number][2] for number in neighbors]
    )
    index = neighbors.index(own_row)
    count = worker_threads(of_ranks, index, quota()) if threads is None else threads
    return WorkerThreads(count, tuple(worker_cores(of_ranks, index, count)))


def _of_model(comm: Comm, value: Any) -> tuple[int, list[Any]]:
    """Gather a value from all ranks of all parts of the model. Returns the index of this rank's
    value, and the values. Collective.
    """
    index, rows = comm.rank, comm.gather_json(value)
    for part in comm.across:
        rows_of_part = part.gather_json(rows)
        index += sum(map(len, rows_of_part[: part.rank]))
        rows = [row for rows_of_rank in rows_of_part for row in rows_of_rank]
    return index, rows


# --- cores ----------------------------------------------------------------------------------------


def own_cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of this process's control groups, in cores; None without a limit."""
    return min(_quotas(root), default=None)


def _quotas(root: Path) -> Iterator[float]:
    for folder in group_folders(root):
        words = read_text(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            yield int(words[0]) / int(words[1])


def divide_by_nodes(
    of_ranks: Sequence[Sequence[int]], near: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the cores of each rank, fewer where ranks have the same: those near its GPU.

    Cores that were set for each rank (by `shardcore run`, SLURM, taskset) stay. A rank alone keeps
    all cores, since the memory of one socket has half of the machine's bandwidth.
    of_ranks: the cores that each rank of the machine may run on; near: those of its GPU's NUMA
    node, [] where unknown.
    """
    parts = [
        sorted(set(allowed) & set(cores)) for allowed, cores in zip(of_ranks, near, strict=True)
    ]

    def divides(allowed: Sequence[int]) -> bool:
        sharing = [part for part, cores in zip(parts, of_ranks, strict=True) if cores == allowed]
        return len(sharing) > 1 and all(sharing)

    return [
        part if divides(allowed) else list(allowed)
        for part, allowed in zip(parts, of_ranks, strict=True)
    ]


def worker_threads(of_ranks: Sequence[Sequence[int]], rank: int, limit: float | None) -> int:
    """Return the number of threads of a rank's worker: its share of the cores that it has, less one
    for its main thread.

    of_ranks: the cores that each rank of the machine has; limit: their CPU quota together, in
    cores.
    """
    allowed = set(of_ranks[rank])
    share = len(allowed) // sum(not allowed.isdisjoint(cores) for cores in of_ranks)
    if limit is not None:
        share = min(share, int(limit) // len(of_ranks))
    return max(1, share - 1)


def worker_cores(
    of_ranks: Sequence[Sequence[int]], rank: int, threads: int, root: Path = Path("/")
) -> list[int]:
    """Return the cores that the worker of of_ranks[rank] is pinned to, its exclusive share; [] for
    no pinning.

    Ranks with the same cores divide them evenly, neighbors (by package, then by physical core)
    together. Nothing is pinned if a share has not at least one core more than `threads`, for the
    rank's main thread, or if ranks share only some cores.
    """
    allowed = set(of_ranks[rank])
    sharing = [index for index, cores in enumerate(of_ranks) if set(cores) == allowed]
    if any(allowed & set(cores) for index, cores in enumerate(of_ranks) if index not in sharing):
        return []
    share = cores_of_share(sorted(allowed), sharing.index(rank), len(sharing), root)
    return share if len(share) > threads else []


def cores_of_share(
    cores: Sequence[int], index: int, shares: int, root: Path = Path("/")
) -> list[int]:
    """Return the index-th of equal shares of cores; neighbors (by package, then by physical
    core) stay together.
    """
    ordered = sorted(cores, key=lambda core: _topology_of(core, root))
    return sorted(ordered[index * len(cores) // shares : (index + 1) * len(cores) // shares])


def physical_cores(cores: Sequence[int], root: Path = Path("/")) -> int:
    """Return how many physical cores these cores are: hardware threads of one count once."""
    firsts = (
        read_text(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").strip()
        for core in cores
    )
    return len({first or str(core) for core, first in zip(cores, firsts, strict=True)})


def parse_cores(text: str) -> list[int]:
    """Return the numbers of a list such as "0-3,8,10-11", in order. Raises ValueError."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{text!r} has {part!r}; expected numbers and ranges, such as 0-3,8")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(cores)


def format_cores(cores: Sequence[int]) -> str:
    """Return what `parse_cores` reads, for cores in order."""
    runs = [
        [core for _, core in run]
        for _, run in groupby(enumerate(cores), lambda pair: pair[1] - pair[0])
    ]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def numa_nodes(root: Path = Path("/")) -> dict[int, list[int]]:
    """Return the cores of each NUMA node that has some; {} where the machine has one such node,
    or does not say.
    """
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    lists = {
        int(folder.name.removeprefix("node")): read_text(folder / "cpulist") for folder in folders
    }
    nodes = {node: parse_cores(text) for node, text in sorted(lists.items()) if text.strip()}
    return nodes if len(nodes) > 1 else {}


def nodes_of(cores: Sequence[int], root: Path = Path("/")) -> list[int]:
    """Return the NUMA nodes that these cores are of; [] where the machine has one, or does not
    say.

    Optimizer states off the device lie by turns on the nodes of the cores that update them: those
    of the worker (overlap_step=True), else all that the process may run on.
    """
    return [node for node, its in numa_nodes(root).items() if not set(its).isdisjoint(cores)]


def near_cores(address: str, root: Path = Path("/")) -> list[int]:
    """Return the cores of the NUMA node that a PCI device (such as 0000:3b:00.0) is attached to.

    [] where the machine has one node, or the device's is unknown (virtual machines, Linux alone).
    """
    node = read_text(root / "sys/bus/pci/devices" / address.lower() / "numa_node").strip()
    return numa_nodes(root).get(int(node), []) if node.isdigit() else []


def pci_address(gpu: int | None) -> str:
    """Return where a GPU is attached, such as 0000:3b:00.0."""
    properties: Any = torch.cuda.get_device_properties(gpu)
    domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _topology_of(core: int, root: Path) -> tuple[int, int, int]:
    """Return (package, first core of the same physical core, core), zeros where unknown."""
    folder = root / f"sys/devices/system/cpu/cpu{core}/topology"
    numbers = (
        re.match(r"\d+", read_text(folder / name))
        for name in ("physical_package_id", "thread_siblings_list")
    )
    package, first = (int(match[0]) if match else 0 for match in numbers)
    return package, first, core


# --- memory ---------------------------------------------------------------------------------------


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of memory that this process can still allocate, or None where unknown."""
    limits = [*_available(root), *_free_in_groups(root)]
    return max(0, min(limits)) if limits else None


def _available(root: Path) -> Iterator[int]:
    for line in read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yield the free bytes of each control group that limits memory."""
    for folder in group_folders(root):
        limit = read_text(folder / "memory.max").strip()
        if limit.isdigit():
            current = int(read_text(folder / "memory.current").strip() or 0)
            statistics = dict(
                line.split() for line in read_text(folder / "memory.stat").splitlines()
            )
            yield int(limit) - current + int(statistics.get("inactive_file", "0"))


def group_folders(root: Path) -> Iterator[Path]:
    """Yield the folder of each control group (version 2) of this process, inner first."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            top = root / "sys/fs/cgroup"
            # In a container the path may be the one outside, and the group itself is at the top.
            inner = top / line.removeprefix("0::").strip("/")
            folders = dict.fromkeys([inner, *inner.parents, top])
            yield from (folder for folder in folders if folder.is_relative_to(top))


def read_text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
