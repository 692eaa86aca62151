"""Saving in the background: a thread writes while training goes on.

Note [In the background]. What lies on the device is copied to host memory first (`stage`, whose
memory is kept). States in host memory and in files are read from where they are, beside forward and
backward: a step, or whatever else is about to overwrite them, waits until this rank has written its
file (`StateStore.watch`). Threads cannot take part in collectives, so those of the ranks exchange
what they wrote over the store of the process group (`Mailbox`), and rank 0's gives the checkpoint
its name.
"""

import json
import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardcore._native import _C
from shardcore.checkpoint.write import Item
from shardcore.distributed.compare import in_words
from shardcore.distributed.everyone import Ranks
from shardcore.engine.engine import Engine
from shardcore.torch_private import default_store

logger = logging.getLogger("shardcore")

AS_BEFORE = "earlier checkpoints are unchanged"
_POLL_S, _PATIENCE_S, _PATIENCE_AT_EXIT_S = 0.02, 3600.0, 60.0
_ALIGNMENT = 16
_PART_BYTES = 4 << 20  # of a message; TCPStore closes the connection at a value of more than 8 MiB


def stage(items: Sequence[Item], engine: Engine) -> None:
    """Copy items to `engine.save_staging`, which is made anew if it is too small, and from where
    they are read then.

    Page-locked beside a GPU where the system allows it; not by torch, which takes up to twice as
    much and keeps it. Waits for the copies.
    """
    sizes = [-(-item.nbytes // _ALIGNMENT) * _ALIGNMENT for item in items]
    if engine.save_staging is None or engine.save_staging.numel() < sum(sizes):
        engine.save_staging = None  # freed before there is another
        engine.save_staging = _C.HostTier(engine.device, pin_memory=True).empty(
            sum(sizes), torch.uint8
        )
    cursor = 0
    try:
        for item, size in zip(items, sizes, strict=True):
            values = engine.save_staging[cursor : cursor + item.nbytes].view(item.dtype)
            values.copy_(item.read(), non_blocking=True)
            item.read = partial(identity, values)
            cursor += size
    finally:
        if engine.device.type == "cuda":
            torch.cuda.current_stream(engine.device).synchronize()


def identity(values: torch.Tensor) -> torch.Tensor:
    """Return the values."""
    return values


class Mailbox:
    """Messages of all ranks to rank 0, and its answer, over the store of the process group."""

    def __init__(self, comm: Ranks, token: str) -> None:
        """token: unique, the same on every rank."""
        self.rank, self._size = comm.rank, comm.world_size
        self._message: Any = None
        if self._size > 1:
            world_store = default_store()
            self._keep = world_store  # it may serve the other ranks
            store: Any = dist.PrefixStore(f"shardcore/save/{token}", world_store.clone())  # type: ignore[attr-defined]
            self._store = store

    def send(self, message: Any) -> None:
        """Send rank 0 a message, of JSON values."""
        if self._size == 1:
            self._message = message
        else:
            text = json.dumps(message)
            starts = range(0, len(text), _PART_BYTES)
            for number, start in enumerate(starts):
                self._store.set(f"rank{self.rank}.{number}", text[start : start + _PART_BYTES])
            self._store.set(f"rank{self.rank}", str(len(starts)))

    def receive_all(self) -> list[Any]:
        """Return, on rank 0, the message of each rank; waits for all."""
        if self.rank != 0:
            return []
        if self._size == 1:
            return [self._message]
        return [json.loads(self._joined(f"rank{rank}")) for rank in range(self._size)]

    def _joined(self, key: str) -> bytes:
        parts = int(self._receive(key))
        return b"".join([self._receive(f"{key}.{number}") for number in range(parts)])

    def answer(self, problem: str) -> None:
        """Send the other ranks the error, or "". Waits until they have read it: this process may
        serve the store.
        """
        if self._size > 1:
            self._store.set("outcome", problem)
            for rank in range(1, self._size):
                self._receive(f"read{rank}")
            self._store.delete_key("outcome")

    def outcome(self) -> str:
        """Wait for what rank 0 answers."""
        outcome = self._receive("outcome").decode()
        self._store.set(f"read{self.rank}", "")
        return outcome

    def _receive(self, key: str) -> bytes:
        until = time.monotonic() + _PATIENCE_S
        while not self._store.check([key]):
            # the process is to end: a rank may have died, and ended it
            if not threading.main_thread().is_alive():
                until = min(until, time.monotonic() + _PATIENCE_AT_EXIT_S)
            if time.monotonic() > until:
                raise RuntimeError(
                    f"save: timed out waiting for {key}. Every rank must write its part; check "
                    "whether a rank died"
                )
            time.sleep(_POLL_S)
        value = bytes(self._store.get(key))
        if key != "outcome":
            self._store.delete_key(key)
        return value


class Saving:
    """A running or complete save. `path` is the path of the complete checkpoint; raised is True
    after wait() raised the save's error on this rank.
    """

    def __init__(self, path: Path, job: Any) -> None:
        """See `save`. job: what this rank does, save._Job."""
        self.path, self._job = path, job
        self.thread: threading.Thread | None = None
        self._ended = threading.Event()  # joining a thread is not safe to interrupt
        self._problem: Exception | None = None
        self.raised = False

    def __repr__(self) -> str:
        """Say where, and whether it is there."""
        return f"Saving({str(self.path)!r}, done={self.done})"

    def __fspath__(self) -> str:
        """Return the path."""
        return str(self.path)

    def start(self, mailbox: Mailbox) -> None:
        """Write in a thread of its own. The interpreter waits for it before it ends."""
        thread = threading.Thread(target=self._run, args=(mailbox,), name="shardcore-save")
        thread.start()
        self.thread = thread

    def _run(self, mailbox: Mailbox) -> None:
        message: Any = None
        try:
            try:
                message = {"written": self._job.write()}
            except Exception as error:
                message, self._problem = {"problem": in_words(error)}, error
            mailbox.send(message)
            outcome = self._commit(mailbox) if mailbox.rank == 0 else mailbox.outcome()
            if outcome and self._problem is None:
                self._problem = RuntimeError(f"{outcome}; {AS_BEFORE}")
        except Exception as error:
            self._problem = self._problem or error
        finally:
            self._job.end()
            if self._problem is not None:
                logger.error("save: %s was not saved: %s", self.path, self._problem)
            self._ended.set()

    def _commit(self, mailbox: Mailbox) -> str:
        """Commit on rank 0, if all is well; returns what is not."""
        messages = mailbox.receive_all()
        failures = (
            f"rank {rank} failed: {message['problem']}"
            for rank, message in enumerate(messages)
            if "problem" in message
        )
        problem = next(failures, "")
        if not problem:
            try:
                self._job.commit([message["written"] for message in messages])
            except Exception as error:
                self._problem = error
                problem = f"rank 0 failed: {in_words(error)}"
        mailbox.answer(problem)
        return problem

    @property
    def done(self) -> bool:
        """Whether the save is complete or failed."""
        return self.thread is None or self._ended.is_set()

    def wait(self) -> Path:
        """Wait until the checkpoint is on disk; returns its path. Raises RuntimeError, on each
        call, if the save failed. Not collective.
        """
        if self.thread is not None:
            self._ended.wait()
        if self._problem is not None:
            self.raised = True
            raise RuntimeError(
                f"save: {self.path} was not saved in the background: {self._problem}"
            ) from self._problem
        return self.path
