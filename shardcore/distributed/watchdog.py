"""Finds ranks that wait for different things, which can never end, and names ranks that are late.

While all goes well nothing is sent: a rank counts the collectives that it starts, by process group and name, and notes which
one it waits for. A thread looks once a second. When a wait has lasted LONG_S the rank writes it, and its counts, to the store
of the default process group, and reads what the ranks that are missing there have written.

Note [Proof]: two ranks can never go on if each waits for a collective that needs the other, and the other has not started it:
a rank starts nothing while it waits. The same holds for a rank whose engine is gone (`Log.left`). On NCCL, where the host does
not wait, collectives run in the order in which they were started, so two ranks can never go on, either, if they started others
in their place. The user's own collectives are not counted: that a rank waits in one shows in the frames of its main thread. It
is taken for endless where all of the group's ranks wait, some of them elsewhere, and only of a kind that nobody can leave
before all have come (`_SYMMETRIC`), called there, and not by `async_op` or another thread. What a rank wrote counts only while
it goes on to write (`beat`): it may have been stopped since. Slow ranks and networks prove nothing: about these one line a
minute is logged, and the group's timeout ends them.
Note [End]: what was proved is written to the store first, for each of the waits, so that every rank can say it. Then gloo's
connections are closed (a receive that times out does that), so that the waits raise; NCCL's communicator is aborted.
"""

import json
import logging
import sys
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

logger = logging.getLogger("shardcore")

LONG_S = 3.0  # a wait that is worth looking at
USERS_LONG_S = 6.0  # the same of the user's own collectives
PAUSE_S = 1.0  # between two looks
LATE_S = 60.0  # between two lines about ranks that are late
_OFTEN_S, _SELDOM_S = 15.0, 10.0  # a wait of more seconds is looked at once in so many
_REMEMBERED = 1 << 12  # names of collectives in their order, enough for the passes of a step
_TAIL = 64  # of them, as many are compared (NCCL)
_ASKED = 3  # ranks that are asked, of all that are missing
_BY_USER = "a collective of torch.distributed"
AGREEMENT = "an agreement"  # what ranks compare without an engine, or before they have one
_SYMMETRIC = {"all_reduce", "barrier", "monitored_barrier", "all_gather", "all_to_all", "all_to_all_single"}
_SYMMETRIC |= {
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
}
_NO_MESSAGE = 1 << 30  # a tag that no message has
_PACKAGE, _TORCH = str(Path(__file__).parent.parent), str(Path(torch.__file__).parent)


class Log:
    """The collectives that this rank has started on one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Begin with none."""
        self.group = weakref.ref(group)
        self.name: str = group.group_name
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.counts: Counter[str] = Counter()
        self.order: deque[str] = deque(maxlen=_REMEMBERED)
        self.started, self._digest = 0, 0
        self.in_order = False  # collectives run in the order in which they were started (NCCL)
        self.left = False  # the engine that used it is gone
        self.threads: set[int] = set()  # that have started some

    def begin_engine(self, nonce: str, in_order: bool) -> None:
        """Serve a new engine: under a name of its own, so that nothing in the store is of another one or of another run."""
        group = self.group()
        assert group is not None
        self.name, self.left, self.in_order = f"{group.group_name}/{nonce}", False, in_order

    def start(self, name: str, ranks: Sequence[int] | None = None) -> "Operation":
        """Count one more; `ranks` of the group take part, None: all."""
        self.counts[name] += 1
        self.threads.add(threading.get_ident())
        if self.in_order:
            self.started += 1
            self.order.append(name)
            self._digest = zlib.crc32(name.encode(), self._digest)
        return Operation(self, name, self.counts[name], ranks)

    def take_order(self) -> list[str]:
        """Return, for a comparison of ranks, what was started since the last call: the names of the last, a digest of all."""
        since = [f"collective {number}: {name}" for number, name in enumerate(self.order)]
        since += [f"digest of all collectives: {self._digest:x}"] * bool(since)
        self.order.clear()
        self._digest = 0
        return since


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective: the `number`-th of its name on a group; `ranks` of the group take part, None: all."""

    log: Log
    name: str
    number: int
    ranks: Sequence[int] | None = None

    def as_wait(self, shown: str = "") -> "Wait":
        """Return what other ranks are to know of it."""
        ranks = self.log.ranks if self.ranks is None else [self.log.ranks[rank] for rank in self.ranks]
        return Wait(self.log.name, self.name, self.number, tuple(ranks), shown or self.name)


@dataclass(frozen=True)
class Wait:
    """What a rank waits for, as ranks tell each other; `ranks` are those of the default group."""

    group: str
    name: str
    number: int
    ranks: tuple[int, ...]
    shown: str

    @property
    def key(self) -> str:
        """Name it in the store."""
        return f"{self.group}/{self.name}/{self.number}"

    def __str__(self) -> str:
        """Describe it in an error."""
        return f"{self.shown} (call {self.number})" if self.number else self.shown


class waiting:  # noqa: N801
    """Note that this thread waits for an operation inside. A class, since it is often entered."""

    __slots__ = ("_operation",)

    def __init__(self, operation: Operation | None) -> None:
        """Wait for `operation`, None: of a rank alone."""
        self._operation = operation

    def __enter__(self) -> None:
        """Begin."""
        if self._operation is not None:
            _waits[threading.get_ident()] = self._operation, time.monotonic()

    def __exit__(self, *_: object) -> None:
        """End, also in an error."""
        _waits.pop(threading.get_ident(), None)


_waits: dict[int, tuple[Operation, float]] = {}  # by thread
_logs: "weakref.WeakKeyDictionary[dist.ProcessGroup, Log]" = weakref.WeakKeyDictionary()


def log_of(group: dist.ProcessGroup) -> Log:
    """Return the log of a group, and start the thread that watches."""
    if group not in _logs:
        _logs[group] = Log(group)
        _watch.start()
    return _logs[group]


def reason_of(operation: Operation | None) -> str | None:
    """Return why a wait was ended, if a rank has proved that it could never end."""
    return None if operation is None else _watch.reason_of(operation.as_wait())


def on_device(operation: Operation, work: dist.Work) -> None:
    """Watch a collective that a device waits for (NCCL): whether it is done is asked."""
    _watch.on_device(operation, work)


class _Watch:
    """The thread that looks, and what it has told the others."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._clone: PrefixStore | None = None
        self._told: Wait | None = None
        self._looked_s = 0.0  # how long the wait that was told had lasted at the last look at others
        self._sure: dict[int, int] = {}  # ranks that were found never to come, with their beat then
        self._beat = 0  # of looks while something is told
        self._left: set[str] = set()  # groups that were told to be left
        self._reasons: dict[str, str] = {}
        self._ended: set[str] = set()
        self._lines = 0
        # Collectives of one group end in the order in which they were started: of those on their way one and the last are held.
        self._devices: dict[str, list[tuple[Operation, dist.Work, float]]] = {}
        self._lock = threading.Lock()  # of these
        self._by_user: tuple[tuple[str, str, int], float] | None = None  # group, function, what was started there; since when

    def start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="shardcore-watchdog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(PAUSE_S)
            try:
                self.look()
            except (RuntimeError, dist.DistError) as error:  # the store is gone, or the groups are being destroyed
                logger.debug("the watchdog cannot look: %s", error)
                self._told = None
            except Exception:
                logger.warning("the watchdog cannot look", exc_info=True)
                self._told = None

    # --- the store ----------------------------------------------------------------------------------------------------

    def _store(self) -> PrefixStore | None:
        """Return a connection of its own, since others wait in the group's; None while there is no default group.

        Only the thread connects, which may take long where the server is gone.
        """
        world = dist.group.WORLD
        if world is None or self._world is None or self._world() is not world:
            self._clone, self._told = None, None
            self._left, self._reasons, self._ended = set(), {}, set()
            if world is None:
                return None
            self._world = weakref.ref(world)
            store: Any = dist.distributed_c10d._get_default_store()
            self._clone = PrefixStore("shardcore/watchdog", store.clone())
        return self._clone

    def reason_of(self, wait: Wait) -> str | None:
        """Return why a wait was ended, or an earlier one on its group."""
        if wait.key not in self._reasons and self._clone is not None:
            with suppress(RuntimeError, ValueError, dist.DistError):
                for key in (wait.key, wait.group):
                    if self._clone.check([f"reason/{key}"]):
                        self._reasons[wait.key] = self._clone.get(f"reason/{key}").decode()
                        break
        return self._reasons.get(wait.key)

    def _tell_left(self, store: PrefixStore) -> None:
        for log in _logs_now():
            if log.left and log.name not in self._left:
                store.set(f"left/{log.name}/{dist.get_rank()}", json.dumps(dict(log.counts)))
                self._left.add(log.name)

    # --- what this rank waits for -------------------------------------------------------------------------------------

    def on_device(self, operation: Operation, work: dist.Work) -> None:
        with self._lock:
            entry = operation, work, time.monotonic()
            self._devices[operation.log.name] = [*self._devices.get(operation.log.name, [])[:1], entry]

    def _longest(self) -> tuple[Wait, float] | None:
        """Return what this rank has waited for longest, and for how many seconds."""
        now = time.monotonic()
        with self._lock:
            for name, entries in list(self._devices.items()):
                if _log_named(name) is None:
                    entries = []
                left = [entry for entry in entries if not entry[1].is_completed()]
                if not left:
                    del self._devices[name]
                elif left[0] is not entries[0]:  # others have ended meanwhile: the device gets on
                    self._devices[name] = [(*left[0][:2], now)]
            waits = [(operation, since) for entries in self._devices.values() for operation, _, since in entries[:1]]
        waits += list(_waits.values())
        if waits:
            operation, since = min(waits, key=lambda wait: wait[1])
            return operation.as_wait(), now - since
        return self._users(now)

    def _users(self, now: float) -> tuple[Wait, float] | None:
        """Return the collective of torch.distributed that the main thread is in, if it is the one of the look before."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        code = None if frame is None else frame.f_code
        mine = {threading.main_thread().ident}
        if (
            frame is None
            or code is None
            or code.co_filename != dist.distributed_c10d.__file__
            or code.co_name not in _SYMMETRIC
            or any(not log.threads <= mine for log in _logs_now())
        ):
            self._by_user = None
            return None
        group = frame.f_locals.get("group") or dist.group.WORLD
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename.startswith(_TORCH):
            caller = caller.f_back
        if not isinstance(group, dist.ProcessGroup) or (caller is not None and caller.f_code.co_filename.startswith(_PACKAGE)):
            self._by_user = None
            return None
        started: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # of anything on this group
        here = group.group_name, code.co_name, started
        if self._by_user is None or self._by_user[0] != here:
            self._by_user = here, now
        wait = Operation(log_of(group), _BY_USER, 0).as_wait(f"torch.distributed.{code.co_name}")
        return wait, now - self._by_user[1] - (USERS_LONG_S - LONG_S)

    @staticmethod
    def _order(group: str) -> tuple[int, list[str]] | None:
        """Return how many collectives were started on a group and the names of the last, where the order counts."""
        log = _log_named(group)
        return None if log is None or not log.in_order else (log.started, list(log.order)[-_TAIL:])

    # --- looking ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Tell what this rank waits for, if that takes long; find out whether it can ever end."""
        longest = self._longest() if dist.is_initialized() else None
        changes = any(log.left and log.name not in self._left for log in _logs_now())
        if not changes and self._told is None and (longest is None or longest[1] < LONG_S):
            return
        store = self._store()
        if store is None:
            return
        self._tell_left(store)
        wait, waited_s = longest or (None, 0.0)
        rank = dist.get_rank()
        if self._told is not None and self._told != wait:
            store.set(f"wait/{rank}", "")
            store.set(f"at/{self._told.key}", "")
            self._told = None
        if wait is None or waited_s < LONG_S:
            return
        counts, order = {log.name: dict(log.counts) for log in _logs_now()}, self._order(wait.group)
        if self._told is None:
            store.set(f"log/{rank}", json.dumps([counts, order]))
            store.append(f"at/{wait.key}", f"{rank} ")  # type: ignore[attr-defined]
            self._told, self._lines, self._looked_s, self._sure = wait, 0, 0.0, {}
        self._beat += 1
        store.set(f"wait/{rank}", json.dumps([self._beat, vars(wait)]))
        if waited_s > _OFTEN_S and waited_s - self._looked_s < _SELDOM_S:
            return
        self._looked_s = waited_s
        here = self._at(store, wait) or [rank]
        missing = [other for other in wait.ranks if other not in here]
        reason = self.reason_of(wait)
        if reason is None:
            proofs = (self._never(store, wait, here, counts, order, other) for other in missing[:_ASKED])
            found, waits = next(filter(None, proofs), ("", ()))
            for key in (*(one.key for one in waits), *(one.group for one in waits if one.name != _BY_USER)):
                reason = store.compare_set(f"reason/{key}", "", reason or found).decode()
        if reason is not None:
            self._end(wait, reason)
        elif missing and rank == min(here) and waited_s > LATE_S * (self._lines + 1):
            self._lines += 1
            said = {of: self._waits_for(store, of)[1] for of in missing[:_ASKED]}
            where = "; ".join(f"rank {of} waits for {at}" for of, at in said.items() if at is not None)
            waiting = f"waited {waited_s:.0f} s for {wait}, at which {_ranks(missing)} {_have(missing)} not arrived"
            logger.warning("%s %s %s%s", _ranks(here), _have(here), waiting, f" ({where})" if where else "")

    @staticmethod
    def _at(store: PrefixStore, wait: Wait) -> list[int]:
        """Return the ranks that have waited long for the same."""
        key = f"at/{wait.key}"
        return sorted({*map(int, store.get(key).split())}) if store.check([key]) else []

    @staticmethod
    def _waits_for(store: PrefixStore, rank: int) -> tuple[int, Wait | None]:
        """Return what a rank waits for, and its beat."""
        said = store.get(f"wait/{rank}").decode() if store.check([f"wait/{rank}"]) else ""
        if not said:
            return 0, None
        beat, entry = json.loads(said)
        return beat, Wait(**{**entry, "ranks": tuple(entry["ranks"])})

    def _never(
        self, store: PrefixStore, wait: Wait, here: Sequence[int], counts: Any, order: Any, other: int
    ) -> tuple[str, tuple[Wait, ...]] | None:
        """Return why `other` never comes to what this rank waits for, if that is sure, and which waits. See Note [Proof]."""
        left = f"left/{wait.group}/{other}"
        if wait.name != AGREEMENT and store.check([left]):
            if json.loads(store.get(left)).get(wait.name, 0) >= wait.number:
                return None
            return _reason(f"{_ranks(here)} for {wait}; rank {other} for nothing: its engine is gone"), (wait,)
        beat, theirs = self._waits_for(store, other)
        if theirs is None:
            return None
        their_counts, their_order = json.loads(store.get(f"log/{other}"))
        there = self._at(store, theirs) or [other]
        waiting = {*here, *there}
        swapped = theirs.group == wait.group and order is not None and _differ(order, their_order)
        if wait.name == theirs.name == _BY_USER or dist.get_rank() not in theirs.ranks:
            return None
        if not swapped and not (_lacks(wait, their_counts, waiting) and _lacks(theirs, counts, waiting)):
            return None
        if self._sure.setdefault(other, beat) == beat:  # at a later look, when the others have written, too, if it still waits
            return None
        groups = ("", "") if wait.group == theirs.group else (f" on group {wait.group}", f" on group {theirs.group}")
        return _reason(f"{_ranks(here)} for {wait}{groups[0]}; {_ranks(there)} for {theirs}{groups[1]}"), (wait, theirs)

    def _end(self, wait: Wait, reason: str) -> None:
        """Let the wait raise. See Note [End]."""
        log = _log_named(wait.group)
        group = None if log is None else log.group()
        if group is None or wait.key in self._ended:
            return
        self._ended.add(wait.key)
        self._reasons[wait.key] = reason
        if "nccl" in dist.get_backend_config(group):
            sys.stderr.write(f"shardcore: rank {dist.get_rank()}: {reason}\n")
            sys.stderr.flush()
            group.abort()
            return
        logger.error("%s", reason)
        here = dist.get_rank(group)
        for other in range(group.size()):  # to some a connection may be closed already: that closes no other
            with suppress(RuntimeError):
                if other != here:
                    group.recv([torch.empty(1, device="cpu")], other, _NO_MESSAGE).wait(timedelta(milliseconds=1))


def _reason(found: str) -> str:
    return (
        f"ranks wait for different things, which can never end: {found}; expected every rank to run the same units in the same "
        "order, and equally many backwards per step (leave out micro-batches that only some ranks have); what every rank calls "
        "(steps, state_dict, full_params, forwards at stage 3) no rank may leave out"
    )


def _logs_now() -> list[Log]:
    """Return the logs of groups that were not destroyed (a later group may have the name of one that was)."""
    return [log for group, log in list(_logs.items()) if group in dist.distributed_c10d._world.pg_map]


def _log_named(group: str) -> Log | None:
    return next((log for log in _logs_now() if log.name == group), None)


def _lacks(wait: Wait, counts: Mapping[str, Mapping[str, int]], waiting: Collection[int]) -> bool:
    """Whether a rank that waits for something else has not started `wait`; `counts` are its, `waiting` all that wait."""
    if wait.name == _BY_USER:
        return set(wait.ranks).issubset(waiting)
    return counts.get(wait.group, {}).get(wait.name, 0) < wait.number


def _differ(order: Any, other: Any) -> bool:
    """Whether two ranks (see `_Watch._order`) started different collectives in one place."""
    (started, names), (theirs, their_names) = order, other
    by_number = dict(zip(range(started - len(names), started), names, strict=True))
    return any(by_number.get(theirs - len(their_names) + at, name) != name for at, name in enumerate(their_names))


def _have(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_in_short(ranks)}"


def _in_short(ranks: Sequence[int]) -> str:
    """Name rising ranks in short: 0, 2 to 5."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


_watch = _Watch()
