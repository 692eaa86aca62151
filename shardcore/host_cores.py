"""How many cores ranks of a machine may use, as their affinity and their control groups say, and who gets how many threads."""

import os
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
