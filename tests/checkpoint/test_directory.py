"""Names on disk: what is complete has its name, the old or the new is there at any instant, one
job saves at a time.
"""

import errno
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from shardcore._native import _C
from shardcore.checkpoint import directory
from shardcore.checkpoint.directory import (
    SaveLock,
    check_tag,
    checkpoints,
    commit,
    find,
    unfinished,
)
from shardcore.checkpoint.format import FORMAT, MANIFEST

BAD_TAGS = [
    "",
    ".",
    "..",
    ".hidden",
    "a/b",
    "/abs",
    "a\0b",
    "latest",
    3,
    "a ",
    " a",
    "a\nb",
    "\udcff",
    "x" * 201,
    "ü" * 101,
]


@pytest.mark.parametrize("tag", BAD_TAGS)
def test_a_tag_is_a_name(tag: Any) -> None:
    with pytest.raises(ValueError, match=r"save: tag is .*; expected the name of a directory"):
        check_tag("save", tag)


@pytest.mark.parametrize("tag", ["a b", "ü", "x" * 200, "-rf"])
def test_other_tags_are_found(tmp_path: Path, tag: str) -> None:
    write(tmp_path, tag)
    assert find("load", tmp_path, None) == find("load", tmp_path, tag) == tmp_path / tag


def write(
    folder: Path, tag: str, content: str = "new", keep_last: int | None = None, latest: bool = True
) -> None:
    """What a save does before it commits."""
    lock = SaveLock(folder, tag)
    try:
        manifest = {"format": FORMAT, "time": time.time(), "content": content}
        (unfinished(folder, tag) / MANIFEST).write_text(json.dumps(manifest))
        commit(folder, tag, latest, keep_last)
    finally:
        lock.release()


def content_of(checkpoint: Path) -> str:
    return str(json.loads((checkpoint / MANIFEST).read_text())["content"])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_a_checkpoint_is_found_by_name_or_as_the_latest(tmp_path: Path) -> None:
    for tag in ("one", "two"):
        write(tmp_path, tag)
    assert find("load", tmp_path, None) == tmp_path / "two"
    assert find("load", tmp_path, "one") == tmp_path / "one"
    assert find("load", tmp_path / "one", None) == tmp_path / "one"
    assert names(tmp_path) == {"one", "two", "latest"}


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"load: .*/nothing does not exist\. Pass the d"):
        find("load", tmp_path / "nothing", None)
    write(tmp_path, "one")
    (tmp_path / "latest").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"neither 'latest' nor .* one of its checkpoints as tag= \(one\)"
    ):
        find("load", tmp_path, None)
    with pytest.raises(
        FileNotFoundError,
        match=r"the checkpoint .*/two does not exist\. Pass .* as tag= \(one\)$",
    ):
        find("load", tmp_path, "two")
    (tmp_path / "latest").write_text("two")
    with pytest.raises(
        FileNotFoundError,
        match=r"/two does not exist, although 'latest' names it\. Pass .*\(one\)$",
    ):
        find("load", tmp_path, None)
    (tmp_path / "latest").write_text("../outside")
    with pytest.raises(ValueError, match=r"/latest is damaged: tag is '\.\./outside'"):
        find("load", tmp_path, None)
    (tmp_path / "latest").write_bytes(b"\xff")
    with pytest.raises(FileNotFoundError, match=r"although 'latest' names it\. Pass .*\(one\)"):
        find("load", tmp_path, None)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_tag_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(_C, "exchange_paths", lambda a, b: False)
    write(tmp_path, "tag", "old")
    write(tmp_path, "tag", "new")
    assert content_of(tmp_path / "tag") == "new"
    assert names(tmp_path) == {"tag", "latest"}


def test_a_small_file_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "old")

    def fail(file: int) -> None:
        # as those of write and fsync: without a name
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(directory.os, "fsync", fail)
    for attempt, name in (
        (lambda: directory.write_synced(tmp_path / "small", b"x"), "small"),
        (lambda: directory.point_latest(tmp_path, "new"), ".latest.saving"),
        (lambda: directory.sync_directory(tmp_path), ""),
    ):
        with pytest.raises(OSError, match=re.escape(f"'{tmp_path / name}'")):
            attempt()
    assert find("load", tmp_path, None) == tmp_path / "old"


class Died(BaseException):
    pass


STEPS = ["rename", "sync_directory", "exchange_paths", "rmtree", "unlink", "write_synced"]


def _dying(monkeypatch: pytest.MonkeyPatch, at: int, exchanges: bool) -> list[str]:
    """Let the process "die" at its `at`-th change of names; returns what it did until then."""
    done: list[str] = []

    def watch(where: Any, name: str) -> None:
        real = getattr(where, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if len(done) == at:
                raise Died
            done.append(name)
            return (
                False if name == "exchange_paths" and not exchanges else real(*arguments, **named)
            )

        monkeypatch.setattr(where, name, call)

    watch(directory.os, "rename")
    watch(directory.shutil, "rmtree")
    watch(directory, "write_synced")
    watch(directory, "sync_directory")
    watch(_C, "exchange_paths")
    return done


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_crash_at_any_instant_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    for at in range(30):
        folder = tmp_path / str(at)
        write(folder, "before")
        write(folder, "tag", "old")
        with monkeypatch.context() as patch:
            done = _dying(patch, at, exchanges)
            try:
                write(folder, "tag", "new")
                finished = True
            except Died:
                finished = False
        found = content_of(find("load", folder, "tag"))
        assert found in ("old", "new"), done
        assert find("load", folder, None).name in ("tag", ".tag.replaced")
        assert (folder / "before" / MANIFEST).exists()
        write(folder, "next")  # which removes what was left
        assert names(folder) == {"before", "tag", "next", "latest"}, done
        assert content_of(folder / "tag") in ("old", "new")
        if finished:
            assert content_of(folder / "tag") == "new"
            break
    assert finished, "a save makes fewer changes"
    assert at > 5, "dying was tried at each of them"


def test_old_ones_are_removed_when_the_new_one_is_there(tmp_path: Path) -> None:
    (tmp_path / "somebody's").mkdir()
    (tmp_path / "somebody's" / MANIFEST).write_text(
        '{"name": "a web page", "format": "shardcore checkpoint", "time": 1}'
    )
    (tmp_path / "a file").write_text("")
    for number in (3, 1, 4, 2):  # names and times have other orders
        write(tmp_path, f"step{number}", keep_last=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step4", "step2"]
    assert names(tmp_path) == {"step4", "step2", "latest", "somebody's", "a file"}


@pytest.mark.parametrize("exchanges", [True, False])
def test_what_cannot_be_removed_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    exchanges: bool,
) -> None:
    unlink = os.unlink

    def refuse(path: Any, **where: Any) -> None:
        if os.path.basename(path) == "theirs":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        unlink(path, **where)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        patch.setattr(
            _C, "exchange_paths", (lambda a, b: False) if not exchanges else _C.exchange_paths
        )
        for number, tag in enumerate(("tag", "tag", "other", "tag", "other")):
            write(tmp_path, tag, str(number), keep_last=1)
            (tmp_path / tag / "theirs").write_text("x")
    assert (find("load", tmp_path, None), content_of(tmp_path / "other")) == (
        tmp_path / "other",
        "4",
    )
    hidden = names(tmp_path) - {"other", "latest"}
    assert [os.listdir(tmp_path / name) for name in hidden] == [["theirs"]] * 4, (
        "all else is removed"
    )
    assert re.search(
        rf"{tmp_path / 'tag'} is no longer needed, but .* cannot be removed: .*theirs", caplog.text
    )
    write(tmp_path, "next", keep_last=1)
    assert names(tmp_path) == {"next", "latest"}


def test_the_newest_of_copies_is_kept(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / "first", f"step{number}")
    for tag in ("step2", "step1", "step0"):  # in an order of cp -r's
        shutil.copytree(
            tmp_path / "first" / tag, tmp_path / "second" / tag, copy_function=shutil.copy
        )
        time.sleep(0.01)  # file systems count time in ticks
    write(tmp_path / "second", "step3", keep_last=2)
    assert names(tmp_path / "second") == {"step2", "step3", "latest"}


def test_only_checkpoints_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "train.log").write_text("x")
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / MANIFEST).write_text("{}")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    before = set(tmp_path.rglob("*"))
    for tag in ("theirs", "page", "file", "link"):
        with pytest.raises(
            FileExistsError,
            match=rf"is not a checkpoint of shardcore.*another tag.*{tag}'",
        ):
            write(tmp_path, tag)
    assert set(tmp_path.rglob("*")) == before, "not even a lock"
    (tmp_path / "empty").mkdir()
    write(tmp_path, "empty")
    assert find("load", tmp_path, None) == tmp_path / "empty"


def test_what_comes_while_it_is_saved_is_kept(tmp_path: Path) -> None:
    lock = SaveLock(tmp_path, "tag")
    (tmp_path / "tag").mkdir()
    (tmp_path / "tag" / "train.log").write_text("x")
    with pytest.raises(FileExistsError):
        commit(tmp_path, "tag", save_latest=True, keep_last=None)
    lock.release()
    assert os.listdir(tmp_path / "tag") == ["train.log"]


def test_a_lock_leaves_no_descriptor(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        write(tmp_path, "tag")
    (tmp_path / ".x.saving").mkdir()
    held = SaveLock(tmp_path, "tag")
    with pytest.raises(
        BlockingIOError,
        match=r'a save of this process is still running there: .*"tag".*its wait\(\)',
    ):
        SaveLock(tmp_path, "other")
    held.release()
    assert len(os.listdir("/proc/self/fd")) == len(before)
