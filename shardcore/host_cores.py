"""Which cores ranks of a machine may use, as affinity and control groups say, and who gets how many threads on which."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardcore.control_groups import group_folders, read_text


def own_cores() -> list[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def quota(root: Path = Path("/")) -> float | None:
    """Return how many cores' time the control groups of this process leave it, None for no limit. `root` is for tests."""
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
