"""How much host memory is free, as the kernel, the control groups that this process is in, and its own limits say.

Memory that files fill and the kernel can take back counts as free. Only Linux says; elsewhere nothing is known.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

from shardcore.control_groups import group_folders, read_text


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still take, or None where the system does not say. `root` is for tests."""
    limits = [*_available(root), *_groups(root)]
    return max(0, min(limits)) if limits else None


def free_address_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process alone may still map (`ulimit -v`), or None for no limit. `root` is for tests."""
    for line in read_text(root / "proc/self/limits").splitlines():
        if line.startswith("Max address space") and (most := line.split()[3]).isdigit():
            pages = int(read_text(root / "proc/self/statm").split()[0])
            return max(0, int(most) - pages * mmap.PAGESIZE)
    return None


def _available(root: Path) -> Iterator[int]:
    for line in read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _groups(root: Path) -> Iterator[int]:
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
