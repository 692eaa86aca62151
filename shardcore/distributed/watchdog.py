"""Finds ranks that wait for different things, which can never end, and names ranks that are late.

Nothing is sent while training runs: a rank counts the collectives that it starts, by process group
and name, and notes which one it waits for. A thread looks once a second. When a wait has lasted
LONG_S, the thread writes the wait and the counts to the store of the default process group, and
reads what the ranks missing from it have written.

Note [Proof]: a rank starts nothing while it waits. So two ranks are stuck for good if each waits
for a collective that needs the other, which the other has not started; the other cases are in
`_Watch._proof`. That a rank waits in a collective of the user's shows in the frames of its main
thread. It counts only if it is of a kind that no rank leaves before all have entered it
(`_SYMMETRIC`), called there, without `async_op` and by no other thread. What a rank wrote counts
only while it keeps writing (`beat`), since its wait may have ended. Slow ranks and networks prove
nothing: they get one log line per minute, and the group's timeout.
"""

import atexit
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from shardcore._native import _C
from shardcore.distributed.compare import Entry, name_ranks
from shardcore.torch_private import default_store, is_group_alive, sequence_number_of

logger = logging.getLogger("shardcore")

LONG_S = 3.0  # waits that last longer are examined
USERS_LONG_S = 6.0  # the same for the user's own collectives
_EXIT_S = 5.0  # at most, that the end of the process waits for the thread
PAUSE_S = 1.0  # between two looks
LATE_S = 60.0  # between two log lines about late ranks
# waits longer than the first are examined at intervals of the second
_OFTEN_S, _SELDOM_S = 15.0, 10.0
_REMEMBERED = 1 << 12  # names of collectives in order, enough for the passes of a step
_TAIL = 64  # how many of them are compared (NCCL)
_EXAMINED = 3  # how many of the missing ranks are examined
_BY_USER = "a collective of torch.distributed"
AGREEMENT = "an agreement"  # a comparison without an engine, or before there is one
_SYMMETRIC = {
    "all_reduce",
    "barrier",
    "monitored_barrier",
    "all_gather",
    "all_to_all",
    "all_to_all_single",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
}
# in the names of collectives of forwards, backwards and steps
_OF_TRAINING = (
    "the weights of",
    "the gradients of",
    "the reduction of",
    "the end of a backward",
    "a step",
)
_NO_MESSAGE = 1 << 30  # a tag that is never sent
_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_C10D = dist.distributed_c10d.__file__
_Store: TypeAlias = Any  # a dist.Store, which is no type in torch's stubs


class Log:
    """The collectives that this rank has started on one process group: comm.py counts them here."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Start with empty counts."""
        self.group = weakref.ref(group)
        # groups of some of its ranks, whose collectives are logged here
        self.parts: list[weakref.ref[dist.ProcessGroup]] = []
        self.name: str = group.group_name
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.counts: Counter[str] = Counter()
        self.order: deque[str] = deque(maxlen=_REMEMBERED)
        self.started, self.digest = 0, 0
        self.in_order = False  # collectives run in the order in which they were started (NCCL)
        self.engine_gone = False  # its engine is gone, or joins no collective any more
        # how many have reduced gradients or failed; one on this rank alone (autograd.grad) does not
        # count
        self.backwards = 0
        self.in_backward = False
        # How many there were before one that failed, and its error; None: the last one succeeded.
        self.failed: tuple[int, str] | None = None
        self.ended = ""  # why its waits were ended: nothing is sent over the group any more
        self.threads: set[int] = set()  # those that have started collectives

    def begin_engine(self, nonce: str, in_order: bool) -> None:
        """Serve a new engine, under a unique name, so that nothing in the store is another
        engine's or another run's.
        """
        group = self.group()
        assert group is not None
        self.engine_gone, self.in_order = False, in_order
        self.backwards, self.in_backward, self.failed = 0, False, None
        # last: the thread writes what it finds under the name that it read before
        self.name = f"{group.group_name}/{nonce}"

    def take_order(self) -> list[Entry]:
        """Return what was started since the last call, for ranks to compare: the last names, and
        a digest of all.
        """
        since: list[Entry] = [
            ("collective", str(number), name) for number, name in enumerate(self.order)
        ]
        since += [("digest of all collectives", "", f"{self.digest:x}")] * bool(since)
        self.order.clear()
        self.digest = 0
        return since


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective: the `number`-th of its name on a group, in which `ranks` of the group
    (None: all) take part. by_engine: false of what ranks compare before there is an engine, in
    `shard`.
    """

    log: Log
    name: str
    number: int
    ranks: Sequence[int] | None = None
    by_engine: bool = True

    def as_wait(self, label: str = "") -> "Wait":
        """Return it as it is written to the store."""
        ranks = self.log.ranks
        if self.ranks is not None:
            ranks = [self.log.ranks[rank] for rank in self.ranks]
        return Wait(
            self.log.name,
            self.name,
            self.number,
            tuple(ranks),
            label or self.name,
            self.by_engine and self.name != AGREEMENT,
        )


@dataclass(frozen=True)
class Wait:
    """What a rank waits for, as it is written to the store; `ranks` are those of the default
    group.
    """

    group: str
    name: str
    number: int
    ranks: tuple[int, ...]
    label: str
    by_engine: bool = False  # a rank whose engine is gone never takes part

    @property
    def key(self) -> str:
        """Return its key in the store."""
        return f"{self.group}/{self.name}/{self.number}"

    def __str__(self) -> str:
        """Describe it for an error."""
        return f"{self.label} (call {self.number})" if self.number else self.label


# What each thread waits for, and since when: comm.py writes it.
waits: dict[int, tuple[Operation, float]] = {}
_logs: "weakref.WeakKeyDictionary[dist.ProcessGroup, Log]" = weakref.WeakKeyDictionary()


def log_of(group: dist.ProcessGroup) -> Log:
    """Return the log of a group, and start the thread that watches."""
    if group not in _logs:
        _logs[group] = Log(group)
        _watch.start()
    return _logs[group]


def reason_of(operation: Operation | None) -> str | None:
    """Return why a wait was ended, if a rank proved that it is stuck."""
    return None if operation is None else _watch.reason_of(operation.as_wait())


def on_device(operation: Operation, work: dist.Work, device: torch.device) -> None:
    """Watch a collective that a device waits for (NCCL), by polling whether it is done."""
    _watch.on_device(operation, work, device)


class _Watch:
    """The thread that looks, and what it has written to the store."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._clone: _Store | None = None
        self._written: Wait | None = None
        self._examined_s = 0.0  # how long that wait had lasted when other ranks were last examined
        self._stuck_at_beat: dict[
            int, int
        ] = {}  # ranks that were found stuck, with their beat then
        self._beat = 0  # counts writes of the wait
        self._gone_written: set[str] = set()  # logs whose `left` is written
        self._failed_written: dict[
            str, tuple[int, str] | None
        ] = {}  # what is written of their `failed`
        self._reasons: dict[str, str] = {}
        self._ended: set[str] = set()
        self._lines = 0
        # Collectives of a group end in the order in which they were started: of those running, one
        # and the last are held.
        self._devices: dict[tuple[str, range | None], list[tuple[Operation, dist.Work, float]]] = {}
        self._device = torch.device("cpu")  # of the last one
        self._lock = threading.Lock()  # of these
        # group, function, what was started there; since when
        self._by_user: tuple[tuple[str, str, int], float] | None = None

    def start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, name="shardcore-watchdog", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while not self._ends.wait(PAUSE_S):
            try:
                self.look()
            except Exception as error:
                # The store is gone, or groups are being destroyed: RuntimeError, KeyError, or
                # ValueError from get_rank().
                is_usual = isinstance(error, RuntimeError | KeyError | dist.DistError)
                ends = is_usual or not dist.is_initialized()
                level = logging.DEBUG if ends else logging.WARNING
                logger.log(level, "the watchdog cannot look", exc_info=True)
                self._written = None

    def stop(self) -> None:
        """End the thread. Still inside C++ when the interpreter ends, it would abort the
        process.
        """
        self._ends.set()
        if self._thread is not None:
            self._thread.join(_EXIT_S)

    # --- the store --------------------------------------------------------------------------------

    def _store(self) -> _Store | None:
        """Return the thread's own connection, since others block the group's; None while there is
        no default group.

        Only this thread connects, which may take long if the server is gone.
        """
        world = dist.group.WORLD
        if world is None or self._world is None or self._world() is not world:
            self._clone, self._written = None, None
            self._gone_written, self._failed_written, self._reasons, self._ended = (
                set(),
                {},
                {},
                set(),
            )
            if world is None:
                return None
            self._world = weakref.ref(world)
            store: _Store = default_store()
            self._clone = dist.PrefixStore("shardcore/watchdog", store.clone())  # type: ignore[attr-defined]
        return self._clone

    def reason_of(self, wait: Wait) -> str | None:
        """Return why a wait, or an earlier one on its group, was ended."""
        if wait.key not in self._reasons and self._clone is not None:
            with suppress(RuntimeError, ValueError, dist.DistError):
                for key in (wait.key, wait.group):
                    if self._clone.check([f"reason/{key}"]):
                        self._reasons[wait.key] = self._clone.get(f"reason/{key}").decode()
                        break
        return self._reasons.get(wait.key)

    # --- what this rank waits for -----------------------------------------------------------------

    def on_device(self, operation: Operation, work: dist.Work, device: torch.device) -> None:
        self._device = device
        with self._lock:
            entry = operation, work, time.monotonic()
            ranks = operation.ranks if isinstance(operation.ranks, range) else None
            key = (operation.log.name, ranks)
            self._devices[key] = [*self._devices.get(key, [])[:1], entry]

    def _longest(self) -> tuple[Wait, float] | None:
        """Return the longest wait of this rank, and its seconds."""
        now = time.monotonic()
        # a new thread's first question about an event would open device 0
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            _C.allow_captures()
        with self._lock:
            for key, entries in list(self._devices.items()):
                if _log_named(key[0]) is None:
                    entries = []
                unfinished = [entry for entry in entries if not entry[1].is_completed()]
                if not unfinished:
                    del self._devices[key]
                elif unfinished[0] is not entries[0]:
                    # collectives before it have ended: the device makes progress
                    operation, work, _ = unfinished[0]
                    self._devices[key] = [(operation, work, now)]
            running = [
                (operation, since)
                for entries in self._devices.values()
                for operation, _, since in entries[:1]
            ]
        running += list(waits.values())
        if running:
            operation, since = min(running, key=lambda wait: wait[1])
            return operation.as_wait(), now - since
        return self._users_wait(now)

    def _users_wait(self, now: float) -> tuple[Wait, float] | None:
        """Return the collective of torch.distributed that the main thread is in, and for how
        long it has been seen there.
        """
        last_seen, self._by_user = self._by_user, None
        main = threading.main_thread().ident or 0
        frame = sys._current_frames().get(main)
        if frame is None or frame.f_code.co_filename != _C10D:
            return None
        # another thread may start what the ranks wait for
        if any(not log.threads <= {main} for log in _logs_now()):
            return None
        name, group = frame.f_code.co_name, frame.f_locals.get("group") or dist.group.WORLD
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename.startswith(_TORCH):
            caller = caller.f_back
        ours = caller is not None and caller.f_code.co_filename.startswith(_PACKAGE)
        if name not in _SYMMETRIC or ours or not isinstance(group, dist.ProcessGroup):
            return None
        # of anything on this group
        position = group.group_name, name, sequence_number_of(group)
        self._by_user = (
            last_seen if last_seen is not None and last_seen[0] == position else (position, now)
        )
        wait = Operation(log_of(group), _BY_USER, 0).as_wait(f"torch.distributed.{name}")
        return wait, now - self._by_user[1] - (USERS_LONG_S - LONG_S)

    @staticmethod
    def _order(group: str) -> tuple[int, list[str]] | None:
        """Return how many collectives were started on a group and the names of the last, if
        their order matters (NCCL).
        """
        log = _log_named(group)
        return None if log is None or not log.in_order else (log.started, list(log.order)[-_TAIL:])

    # --- looking ----------------------------------------------------------------------------------

    def look(self) -> None:
        """Write what this rank waits for, if that takes long; find out whether it is stuck."""
        longest = self._longest() if dist.is_initialized() else None
        # names first: the main thread may begin another engine meanwhile (`Log.begin_engine`)
        logs = [(log.name, log) for log in _logs_now()]
        gone = {
            name: log for name, log in logs if log.engine_gone and name not in self._gone_written
        }
        failed = {name: log.failed for name, log in logs}
        failed = {
            name: error for name, error in failed.items() if error != self._failed_written.get(name)
        }
        waits_long = longest is not None and longest[1] >= LONG_S
        if not gone and not failed and self._written is None and not waits_long:
            return
        store = self._store()
        if store is None:
            return
        rank = dist.get_rank()
        for name, log in gone.items():
            store.set(f"left/{name}/{rank}", json.dumps(dict(log.counts)))
            self._gone_written.add(name)
        for name, error in failed.items():
            store.set(f"failed/{name}/{rank}", json.dumps(error))
            self._failed_written[name] = error
        wait, waited_s = longest or (None, 0.0)
        if self._written is not None and self._written != wait:
            store.set(f"wait/{rank}", "")
            store.set(f"at/{self._written.key}", "")
            self._written = None
        if wait is None or waited_s < LONG_S:
            return
        counts = {log.name: dict(log.counts) for log in _logs_now()}
        order = self._order(wait.group)
        if self._written is None:
            store.set(f"log/{rank}", json.dumps([counts, order]))
            store.append(f"at/{wait.key}", f"{rank} ")
            self._written = wait
            self._lines, self._examined_s, self._stuck_at_beat = 0, 0.0, {}
        self._beat += 1
        store.set(f"wait/{rank}", json.dumps([self._beat, vars(wait)]))
        if waited_s > _OFTEN_S and waited_s - self._examined_s < _SELDOM_S:
            return
        self._examined_s = waited_s
        self._examine(store, wait, waited_s, counts, order)

    def _examine(self, store: _Store, wait: Wait, waited_s: float, counts: Any, order: Any) -> None:
        """End the wait if a rank that is missing from it never comes; else log who is late."""
        rank = dist.get_rank()
        arrived = self._ranks_at(store, wait) or [rank]
        missing = [other for other in wait.ranks if other not in arrived]
        examined = missing[:_EXAMINED]
        reason = self.reason_of(wait)
        if reason is None:
            proofs = (self._proof(store, wait, arrived, counts, order, other) for other in examined)
            text, waits = next(filter(None, proofs), ("", []))
            # The proof is written first, for each of the waits, so that every rank can report it;
            # those of groups before others: the rank of the other wait ends its own as soon as its
            # reason is there.
            groups = [proved.group for proved in waits if proved.name != _BY_USER]
            for key in (*groups, *(proved.key for proved in waits)):
                reason = store.compare_set(f"reason/{key}", "", reason or text).decode()
        if reason is not None:
            self._end_wait(wait, reason)
        elif missing and rank == min(arrived) and waited_s > LATE_S * (self._lines + 1):
            self._lines += 1
            waits_of = {other: self._waits_for(store, other)[1] for other in examined}
            elsewhere = "; ".join(
                f"rank {other} waits for {its}"
                for other, its in waits_of.items()
                if its is not None
            )
            logger.warning(
                "%s %s waited %.0f s for %s, at which %s %s not arrived%s",
                name_ranks(arrived),
                _have(arrived),
                waited_s,
                wait,
                name_ranks(missing),
                _have(missing),
                f" ({elsewhere})" if elsewhere else "",
            )

    @staticmethod
    def _ranks_at(store: _Store, wait: Wait) -> list[int]:
        """Return the ranks that have waited long for the same collective."""
        key = f"at/{wait.key}"
        return sorted({*map(int, store.get(key).split())}) if store.check([key]) else []

    @staticmethod
    def _waits_for(store: _Store, rank: int) -> tuple[int, Wait | None]:
        """Return what a rank waits for, and its beat."""
        written = store.get(f"wait/{rank}").decode() if store.check([f"wait/{rank}"]) else ""
        if not written:
            return 0, None
        beat, entry = json.loads(written)
        return beat, Wait(**{**entry, "ranks": tuple(entry["ranks"])})

    def _proof(
        self,
        store: _Store,
        wait: Wait,
        arrived: Sequence[int],
        counts: Any,
        order: Any,
        other: int,
    ) -> tuple[str, list[Wait]] | None:
        """Return why `other` never starts what this rank waits for, if that is proved, and the
        waits. See Note [Proof].
        """
        # the engine of the other rank is gone
        gone = f"left/{wait.group}/{other}"
        if wait.by_engine and store.check([gone]):
            if json.loads(store.get(gone)).get(wait.name, 0) >= wait.number:
                return None
            return _reason(
                f"{name_ranks(arrived)} for {wait}; rank {other} does not take part: its engine is "
                f"gone, or failed"
            ), [wait]
        # A backward that failed on a rank sends nothing more: ranks that wait inside the same
        # backward are stuck (`Log.failed`).
        log, errors = _log_named(wait.group), self._errors(store, wait.group, other)
        backward = log.backwards if log is not None and log.in_backward else None
        if other in errors and errors[other][0] == backward:
            return _reason(
                f"{name_ranks(arrived)} for {wait}; rank {other} does not take part", errors
            ), [wait]
        beat, other_wait = self._waits_for(store, other)
        if other_wait is None or dist.get_rank() not in other_wait.ranks:
            return None
        if other_wait.name == _BY_USER:  # a rank in it finds out
            return None
        waits = [wait, other_wait]
        if wait.name == _BY_USER:
            # The user's own collectives are not counted. A rank is stuck in one if all other ranks
            # wait for what it has not started.
            if arrived[0] != dist.get_rank():
                return None
            # Not by `_ranks_at`: of the collectives that run on devices, ranks may have seen
            # different ones.
            elsewhere = [rank for rank in wait.ranks if rank not in arrived]
            waits_of_missing = [self._waits_for(store, rank)[1] for rank in elsewhere]
            waits += [missing for missing in waits_of_missing if missing is not None]
            stuck = all(
                missing is not None and arrived[0] in missing.ranks and _lacks(counts, missing)
                for missing in waits_of_missing
            )
        else:
            # Each waits for a collective that needs the other, which the other has not started. On
            # NCCL collectives run in the order in which they were started, so ranks are also stuck
            # if they started different ones in the same place.
            other_counts, other_order = json.loads(store.get(f"log/{other}"))
            is_ordered = other_wait.group == wait.group and order is not None
            swapped = is_ordered and _differ(order, other_order)
            stuck = swapped or (_lacks(other_counts, wait) and _lacks(counts, other_wait))
        # until it has written again, it may have ended its wait
        if not stuck or self._stuck_at_beat.setdefault(other, beat) == beat:
            return None
        on_group = on_other_group = ""
        if wait.group != other_wait.group:
            on_group, on_other_group = f" on group {wait.group}", f" on group {other_wait.group}"
        with_other = self._ranks_at(store, other_wait) or [other]
        return _reason(
            f"{name_ranks(arrived)} for {wait}{on_group}; {name_ranks(with_other)} for "
            f"{other_wait}{on_other_group}",
            errors,
        ), waits

    @staticmethod
    def _errors(store: _Store, group: str, other: int) -> dict[int, tuple[int, str]]:
        """Return the failed backwards of this rank and another one, by rank: their numbers and
        errors.
        """
        errors: dict[int, tuple[int, str]] = {}
        log = _log_named(group)
        if log is not None and log.failed is not None:
            errors[dist.get_rank()] = log.failed
        key = f"failed/{group}/{other}"
        written = json.loads(store.get(key)) if store.check([key]) else None
        if written is not None:
            backwards, error = written
            errors[other] = backwards, error
        return errors

    def _end_wait(self, wait: Wait, reason: str) -> None:
        """End the wait with an error: abort NCCL's communicator, and close gloo's connections,
        beside it too.
        """
        log = _log_named(wait.group)
        group = None if log is None else log.group()
        if log is None or group is None or wait.key in self._ended:
            return
        self._ended.add(wait.key)
        self._reasons[wait.key] = log.ended = reason
        groups = [group, *filter(None, (part() for part in log.parts))]
        config = dist.get_backend_config(group)
        if "nccl" in config:
            sys.stderr.write(f"shardcore: rank {dist.get_rank()}: {reason}\n")
            sys.stderr.flush()
            for part in groups:
                part.abort()  # which ends no wait of gloo's
        else:
            logger.error("%s", reason)
        if "gloo" not in config:
            return
        for part in groups:
            rank = dist.get_rank(part)
            for other in range(part.size()):
                if other == rank:
                    continue
                with suppress(RuntimeError):  # the connection may be closed already
                    # a receive that times out closes the connection, so that the waits raise
                    never_sent = part.recv([torch.empty(1, device="cpu")], other, _NO_MESSAGE)
                    never_sent.wait(timedelta(milliseconds=1))


def _reason(proof: str, errors: Mapping[int, tuple[int, str]] | None = None) -> str:
    reason = f"ranks wait for different things, which can never end: {proof}"
    if errors:
        failures = "; ".join(
            f"the backward of rank {rank} ended in an error: {error}"
            for rank, (_, error) in sorted(errors.items())
        )
        return (
            f"{reason}; {failures}; expected each backward to succeed, or to end at the same place "
            f"on every rank (mend that error, and start again from the last checkpoint)"
        )
    expected = "expected every rank to make the same calls in the same order"
    if "state_dict" in proof:
        expected += " (one rank alone may save inside deepspeed.zero.GatheredParameters)"
    if any(name in proof for name in _OF_TRAINING):
        expected += (
            ": forwards and backwards of the same units, and the same number of backwards per "
            "step. For loaders of different length, use shardcore.join."
        )
    return f"{reason}; {expected}"


def _logs_now() -> list[Log]:
    """Return the logs of groups that were not destroyed (whose names later groups may have)."""
    return [log for group, log in list(_logs.items()) if is_group_alive(group)]


def _log_named(group: str) -> Log | None:
    return next((log for log in _logs_now() if log.name == group), None)


def _lacks(counts: Mapping[str, Mapping[str, int]], wait: Wait) -> bool:
    """Whether a rank that started `counts` has not started `wait`."""
    return counts.get(wait.group, {}).get(wait.name, 0) < wait.number


def _differ(order: Any, other: Any) -> bool:
    """Whether two ranks (see `_Watch._order`) started different collectives in the same place."""
    (started, names), (other_started, other_names) = order, other
    by_number = dict(zip(range(started - len(names), started), names, strict=True))
    return any(
        by_number.get(other_started - len(other_names) + index, name) != name
        for index, name in enumerate(other_names)
    )


def _have(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


_watch = _Watch()
atexit.register(_watch.stop)
