"""How much host memory is free, as the kernel and the control groups that this process is in say.

Memory that files fill and the kernel can take back counts as free. Only Linux says; elsewhere nothing is known.
"""

from collections.abc import Iterator
from pathlib import Path


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process can still take, or None where the system does not say. `root` is for tests."""
    limits = [*_available(root), *_groups(root)]
    return max(0, min(limits)) if limits else None


def _available(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _groups(root: Path) -> Iterator[int]:
    """Yield what is left in each group that limits memory, from the process's own up; both versions of control groups."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, used, cached = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit, used, cached = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # In a container the path may be that outside, and the group itself lies at the top.
        inner = top / path.strip("/")
        for folder in dict.fromkeys([inner, *inner.parents, top]):
            if folder.is_relative_to(top) and (most := _read(folder / limit).strip()).isdigit():
                taken = int(_read(folder / used).strip() or 0)
                reclaimable = dict(pair.split() for pair in _read(folder / "memory.stat").splitlines()).get(cached, "0")
                yield int(most) - taken + int(reclaimable)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
