"""The control groups that this process is in (Linux): where their limits are written. Both versions of control groups."""

from collections.abc import Iterator
from pathlib import Path


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
