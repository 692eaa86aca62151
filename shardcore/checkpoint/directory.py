"""The directory that checkpoints are saved to: their names, what is complete, the lock, and what
dead saves left.

Note [Commit]. Files are written to ".TAG.saving" beside the others; each is synced, then that
directory, then it is renamed (or exchanged with the directory that has the name), then "latest" is
replaced by rename; each rename is synced, too. So a crash at any instant leaves the old checkpoint
or the new one. Nothing but checkpoints of shardcore is replaced or removed, known by how their
manifests begin, with the time that orders them. What a dead save leaves, or cannot remove, has a
name that begins with a dot, and the next save removes it. Rank 0 holds a lock (flock) on ".lock"
meanwhile, which ends with its process.
"""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardcore._native import _C
from shardcore.checkpoint.file_tensors import open_regular
from shardcore.checkpoint.format import FORMAT, MANIFEST

logger = logging.getLogger("shardcore")

LATEST, LOCK = "latest", ".lock"
_SAVING, _REPLACED, _REMOVED = ".saving", ".replaced", ".removed"
# of a manifest, as write_manifest writes it
_BEGIN = re.compile(rf'{{"format": "{FORMAT}", "time": (\d+\.?\d*)'.encode())


def check_tag(op: str, tag: object) -> None:
    """Raise ValueError for a tag that is no name of a directory."""
    if (
        not isinstance(tag, str)
        or not tag.isprintable()  # so that UTF-8 has it, too
        or tag in ("", LATEST)
        or tag.startswith(".")
        or tag != tag.strip()
        or "/" in tag
        or len(tag.encode()) > 200
    ):
        raise ValueError(
            f"{op}: tag is {tag!r}; expected the name of a directory: at most 200 bytes, not "
            f"{LATEST!r}, no dot at the start, no blanks at the ends, no slash and no unprintable "
            "characters"
        )


def unfinished(folder: Path, tag: str) -> Path:
    """Return where a checkpoint is written."""
    return folder / f".{tag}{_SAVING}"


def checkpoints(folder: Path) -> list[Path]:
    """Return shardcore's checkpoints in a directory, in the order in which they were written."""
    paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return [path for time, path in sorted((saved_at(path), path) for path in paths) if time > 0]


def saved_at(path: Path) -> float:
    """Return when a checkpoint of shardcore's was saved (seconds since 1970, UTC); 0 for
    anything else, which is not ours.
    """
    try:
        with open_regular(path / MANIFEST) as file:
            match = _BEGIN.match(file.read(100))
    except (OSError, ValueError):
        match = None
    return 0.0 if match is None else float(match[1])


def check_ours(path: Path) -> None:
    """Raise FileExistsError unless a save may replace what is there: a checkpoint, an empty
    directory or nothing.
    """
    if not os.path.lexists(path) or saved_at(path):
        return
    is_empty_directory = path.is_dir() and not any(path.iterdir())
    if not is_empty_directory:
        raise FileExistsError(
            errno.EEXIST,
            "save: this path exists, but is not a checkpoint of shardcore, so save does not "
            "replace it. Pass another tag",
            str(path),
        )


def find(op: str, folder: Path, tag: str | None) -> Path:
    """Return the directory of the checkpoint that is meant, which may be another library's.

    Raises FileNotFoundError or ValueError.
    """
    by_latest = tag is None
    if tag is None:
        tag = _latest(folder)
    if tag is None:
        # a directory that is a checkpoint, or a file or directory of another library
        has_files = folder.is_dir() and any(folder.iterdir())
        foreign = folder.is_file() or (has_files and not checkpoints(folder))
        if (folder / MANIFEST).exists() or foreign:
            return folder
        if not folder.exists():
            raise FileNotFoundError(
                errno.ENOENT,
                f"{op}: {folder} does not exist. Pass the directory given to save",
            )
        raise FileNotFoundError(
            errno.ENOENT,
            f"{op}: found neither {LATEST!r} nor {MANIFEST}. Pass the directory given to save, or "
            f"one of its checkpoints as tag= ({_names(folder)})",
            str(folder),
        )
    check_tag(f"{op}: {folder / LATEST} is damaged" if by_latest else op, tag)
    path, replaced = folder / tag, folder / f".{tag}{_REPLACED}"
    if not path.exists() and (replaced / MANIFEST).exists():
        return replaced  # a crash came between the two renames of `commit`
    if not path.exists():
        named = f", although {LATEST!r} names it" if by_latest else ""
        raise FileNotFoundError(
            errno.ENOENT,
            f"{op}: the checkpoint {path} does not exist{named}. Pass a checkpoint written by save "
            f"as tag= ({_names(folder)})",
        )
    return path


def _latest(folder: Path) -> str | None:
    """Return the tag that "latest" has; None without that file."""
    if not (folder / LATEST).is_file():
        return None
    with open_regular(folder / LATEST) as file:
        return file.read(1000).decode("utf-8", "replace").strip()


def _names(folder: Path) -> str:
    names = [path.name for path in checkpoints(folder)] if folder.is_dir() else []
    return ", ".join(names) or "there are none"


@contextmanager
def _naming_path(path: Path) -> Iterator[None]:
    """Let an OSError name the file: those of writes do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_synced(path: Path, data: bytes) -> None:
    """Write a small file, which is on disk when this returns. OSError, with the path."""
    with _naming_path(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make durable which names a directory has: files made, renamed and removed in it. OSError,
    with the path.
    """
    with _naming_path(path):
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file that is to become `path`: on disk, at once, and only if no
    error ends the context.
    """
    unfinished = path.with_name(f".{path.name}{_SAVING}")
    with _naming_path(unfinished):
        yield unfinished
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
    os.rename(unfinished, path)
    sync_directory(path.parent)


def commit(folder: Path, tag: str, save_latest: bool, keep_last: int | None) -> None:
    """Give what was written its name: Note [Commit]. keep_last: then remove all but so many, the
    newest.
    """
    path, written, replaced = folder / tag, unfinished(folder, tag), folder / f".{tag}{_REPLACED}"
    check_ours(path)  # somebody may have put something there meanwhile
    sync_directory(written)
    if not os.path.lexists(path):
        os.rename(written, path)
    elif not _C.exchange_paths(str(written), str(path)):
        # The file system cannot exchange. After a crash between these renames, `find` takes the
        # checkpoint that was to be replaced.
        os.rename(path, replaced)
        os.rename(written, path)
    sync_directory(folder)
    if save_latest:
        point_latest(folder, tag)
    _discard(written)
    _discard(replaced)
    if keep_last is not None:
        latest = _latest(folder)
        older = [checkpoint for checkpoint in checkpoints(folder) if checkpoint.name != tag]
        for checkpoint in older[: max(0, len(older) + 1 - keep_last)]:
            if checkpoint.name != latest:
                _discard(checkpoint)


def point_latest(folder: Path, tag: str) -> None:
    """Let "latest" name a checkpoint."""
    with replacing(folder / LATEST) as new:
        new.write_text(tag, "utf-8")


def _discard(path: Path) -> None:
    """Free the name of what is not needed, if it is there, and remove it; a warning, no error,
    if that is not possible.
    """
    if not os.path.lexists(path):
        return
    removed = path.with_name(f".{uuid.uuid4().hex}{_REMOVED}")
    try:
        os.rename(path, removed)
        shutil.rmtree(removed, ignore_errors=True)  # all that can be
        _remove(removed)
    except OSError as error:
        logger.warning(
            "save: %s is no longer needed, but %s cannot be removed: %s (the next save tries "
            "again)",
            path,
            removed,
            error,
        )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


class FileLock:
    """An exclusive lock (flock) on a file, which says who holds it; it ends with the process,
    whatever that has forked.
    """

    def __init__(
        self, path: Path, op: str, about: Mapping[str, Any], another: str, this: str
    ) -> None:
        """Lock. about: what the file is to say.

        BlockingIOError if it is locked: with `another`, or `this` if by this process, in which {}
        is what the file says.
        """
        self._file = os.fdopen(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", 0
        )
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = self._file.read(4096).decode(errors="replace").strip() or "unknown"
            self._file.close()
            by_this_process = holder.startswith(json.dumps(process)[:-1] + ",")
            text = (this if by_this_process else another).format(holder)
            raise BlockingIOError(error.errno, f"{op}: {text}", str(path)) from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                self._file.close()
                raise
            logger.warning(
                "%s: the file system of %s does not support locks (%s). A second job in this "
                "directory would go unnoticed",
                op,
                path,
                error,
            )
        _locks.add(self)
        with _naming_path(path):
            self._file.truncate(0)
            self._file.write(json.dumps({**process, **about, "since": time.ctime()}).encode())

    def release(self) -> None:
        """Unlock, also where a process that was forked meanwhile would keep the lock."""
        with suppress(OSError, ValueError):
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()


_locks: "weakref.WeakSet[FileLock]" = weakref.WeakSet()


# such as a DataLoader's worker, which may outlive a parent that is killed
def _close_in_child() -> None:
    for lock in list(_locks):
        lock._file.close()


os.register_at_fork(after_in_child=_close_in_child)


class SaveLock:
    """Held while a process saves `tag` into `folder`; it ends with the process."""

    def __init__(self, folder: Path, tag: str) -> None:
        """Lock, remove what dead saves left, and make the directory to write to.

        BlockingIOError if another save holds it, which is named. FileExistsError: see check_ours.
        """
        check_ours(folder / tag)
        self._folder, self._tag = folder, tag
        for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            missing.mkdir(exist_ok=True)
            sync_directory(missing.parent)
        self._file = FileLock(
            folder / LOCK,
            "save",
            {"tag": tag},
            another="another job is saving there: {}. Wait for it, or end it",
            this=(
                "a save of this process is still running there: {}. Call its wait() first, or use "
                "one folder per model"
            ),
        )
        try:
            self._clean()
            unfinished(folder, tag).mkdir()
        except BaseException:
            self._file.release()
            raise

    def _clean(self) -> None:
        for path in self._folder.iterdir():
            if not path.name.startswith("."):
                continue
            checkpoint = self._folder / path.name[1 : -len(_REPLACED)]
            if path.name.endswith(_REPLACED) and not checkpoint.exists():
                os.rename(path, checkpoint)
            elif path.name.endswith((_SAVING, _REMOVED, _REPLACED)):
                _discard(path)

    def release(self) -> None:
        """Remove what this save has left, if it failed, and unlock."""
        try:
            _discard(unfinished(self._folder, self._tag))
        finally:
            self._file.release()
