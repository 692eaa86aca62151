"""The lock of a directory of checkpoints, between processes."""

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from shardcore.checkpoint.directory import SaveLock, unfinished
from tests.support.ranks import context, start


def _hold(folder: Path, pipe: Connection) -> None:
    lock = SaveLock(folder, "theirs")
    if (child := os.fork()) == 0:
        time.sleep(60)  # as a DataLoader's worker, in the middle of a sample
    pipe.send(child)
    time.sleep(60)
    lock.release()


def test_a_second_job_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    ours, theirs = context.Pipe()
    holder = start(_hold, tmp_path, theirs)
    child = ours.recv()
    try:
        with pytest.raises(
            BlockingIOError,
            match=rf'another job is saving there: .*"pid": {holder.pid}, "tag": "theirs"',
        ):
            SaveLock(tmp_path, "ours")
        assert unfinished(tmp_path, "theirs").exists()
        holder.kill()
        holder.join()
        os.kill(child, 0)  # what it has forked goes on, and holds nothing
        SaveLock(tmp_path, "ours").release()
        assert os.listdir(tmp_path) == [".lock"]
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
