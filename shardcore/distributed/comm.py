"""Collectives between ranks. The one place that calls torch.distributed's, whose names differ
between versions.

All data collectives move bytes (uint8 views), so every dtype works on every backend and nothing is
summed in transit: arithmetic on gradients happens in csrc/reduce, in rank order, unless the user
asks for the backend's (`reduce_scatter`). A world of one needs no process group and moves nothing.

On gloo pieces are sent pairwise, with tags (`Tags`), also in the gloo group beside NCCL. NCCL has
no tags: collectives of equal size could run in different orders on two ranks and nobody would wait,
so a step compares the order of all collectives before it writes (engine/step.py). With NCCL one
call gathers all weights of a unit. What ranks compare is small, and goes over gloo where that is
possible, in a number of rounds that grows with the logarithm of the number of ranks.
"""

import json
import random
import threading
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from functools import cached_property
from operator import methodcaller
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardcore.distributed import watchdog
from shardcore.distributed.clock import Clock, scope_type
from shardcore.distributed.compare import Entry, in_words
from shardcore.distributed.groups import (
    GroupSlot,
    NotAMemberError,
    backends_of,
    group_beside,
    group_of,
    host_group_beside,
    own_gpu,
    slots_in_use,
    slots_of,
)
from shardcore.distributed.launchers import launched_world_size
from shardcore.distributed.topology import topology_of

_TAGS_OF_A_SUBJECT = 1 << 4
_TAGS_OF_SUBJECTS = 1 << 19
_TAGS_OF_A_KIND = 1 << 28


class Tags:
    """The tags of one engine's messages, equal on all ranks that send the same messages.

    gloo pairs messages by tag, and ends the process where the sizes of a pair differ. A tag holds
    the kind of message and a number: of its subject (a bucket), or a count. So messages about
    different subjects are never paired.
    """

    def __init__(self) -> None:
        """Start counting."""
        self._count: Counter[tuple[int, int | None]] = Counter()

    def next(self, kind: int, of: int | None) -> int:
        """Return the tag of the next message of this kind, about subject number `of` (None:
        paired by the order of calls).
        """
        self._count[kind, of] += 1
        number = self._count[kind, of]
        if of is None:
            number %= _TAGS_OF_SUBJECTS
        else:
            number = (
                _TAGS_OF_SUBJECTS
                + (of * _TAGS_OF_A_SUBJECT + number % _TAGS_OF_A_SUBJECT) % _TAGS_OF_SUBJECTS
            )
        return kind * _TAGS_OF_A_KIND + number


T = TypeVar("T")
# torch 2.13 renamed reduce_scatter_tensor.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_flat(full: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Fill `full` with the flat, equal parts of a group's ranks, on CUDA in the order of the
    current stream.
    """
    _all_gather([full], [part], group).wait()


def exchange_flat(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send the i-th equal piece of `sent` to a group's i-th rank; `received` gets a piece from
    each, in their order.

    Both are contiguous and of one size. On CUDA in the order of the current stream.
    """
    dist.all_to_all_single(as_bytes(received), as_bytes(sent), group=group)


def _all_gather(
    fulls: list[torch.Tensor], pieces: list[torch.Tensor], group: dist.ProcessGroup | None
) -> dist.Work:
    """Start filling each of `fulls` with the pieces of all ranks. On NCCL one group of calls,
    which is one launch.
    """
    assert group is not None
    return group.allgather_into_tensor_coalesced(fulls, pieces)


class Traffic(IntEnum):
    """The kinds of messages, which have tags of their own."""

    BACKWARD = 1
    STEP = 2
    READ = 3  # for the user: state dicts, full gradients and states
    WEIGHTS = 4  # unsharding
    BATCHES = 5  # whether ranks have one (join)
    METRICS = 6


def _count(
    log: watchdog.Log, name: str, ranks: Sequence[int] | None = None, by_engine: bool = True
) -> watchdog.Operation:
    """Count a collective, in which `ranks` of the group (None: all) take part, before it starts.
    by_engine: see watchdog.Operation.

    The watchdog's thread reads the counts; its own code does not run in a step.
    """
    log.counts[name] += 1
    log.threads.add(threading.get_ident())
    if log.in_order:
        log.started += 1
        log.order.append(name)
        log.digest = zlib.crc32(name.encode(), log.digest)
    return watchdog.Operation(log, name, log.counts[name], ranks, by_engine)


class _waiting:  # noqa: N801
    """Let the watchdog see that this thread waits for an operation inside the context. (A class
    is entered faster than a generator.)
    """

    __slots__ = ("_operation",)

    def __init__(self, operation: watchdog.Operation) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        watchdog.waits[threading.get_ident()] = self._operation, time.monotonic()

    def __exit__(self, *_: object) -> None:
        watchdog.waits.pop(threading.get_ident(), None)


class Started:
    """A collective that was started: the messages of one operation."""

    __slots__ = ("_operation", "_works")

    def __init__(self, operation: watchdog.Operation, works: Iterable[dist.Work]) -> None:
        """Hold `works`, each of which is waited for once."""
        self._operation, self._works = operation, iter(works)

    def wait(self) -> None:
        """Wait: until done on the CPU, in stream order on CUDA. May be called again after an
        interrupt.
        """
        with _waiting(self._operation), _explain_errors(self._operation):
            # no Python between two works, where an interrupt loses one
            deque(map(methodcaller("wait"), self._works), maxlen=0)


class Comm:
    """Ranks that train a model: `rank` of `world_size` on `group` (None in a world of one), and
    their `topology`.

    clock: times the parts of their steps. scope: names what runs inside it in profiles.
    sent: the bytes that this rank has sent to others, by kind.
    across: over the ranks that hold other parts of the same model (tensor-parallel slices,
    pipeline stages), one Comm for each dimension of these; slices: those of them over which
    parameters are sliced.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        ranks_per_node: int | None = None,
        gpu: torch.device | None = None,
    ) -> None:
        """Join `group`, or the default group if torch.distributed is initialized, or be a world of
        one.

        group: a mesh of two dimensions replicates over the first and shards over the second.
        ranks_per_node: gradients are added within a node, then across nodes (default: over all
        ranks at once; for a mesh, its second dimension).
        gpu: the model's GPU, if any, over which NCCL sends. Raises TypeError if group has another
        type; ValueError if launched as several ranks (WORLD_SIZE > 1) without a process group, if
        ranks_per_node does not divide the world, and (NotAMemberError) for a group without this
        rank.
        """
        shard_dim = None
        if isinstance(group, DeviceMesh):
            group, shard_dim = group_of(group)
        elif (
            not isinstance(group, dist.ProcessGroup | None)
            and group is not dist.GroupMember.NON_GROUP_MEMBER
        ):
            raise TypeError(
                f"shard: process_group is {group!r}; expected a process group, a DeviceMesh, or "
                f"None for all ranks"
            )
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.group = group if group is not None else dist.group.WORLD
            self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
            if self.rank < 0:
                raise NotAMemberError(
                    "shard: process_group does not contain this rank; expected a group with this "
                    "rank"
                )
        elif group is not None:
            raise ValueError(
                "shard: process_group was given but torch.distributed is not initialized; expected "
                "init_process_group() before"
            )
        else:
            variable, size = launched_world_size()
            if size > 1:
                raise ValueError(
                    f"shard: {variable} is {size} but torch.distributed is not initialized (ranks "
                    f"would train alone); call shardcore.initialize() or "
                    f"torch.distributed.init_process_group() (it reads torchrun's variables) "
                    f"first; set WORLD_SIZE=1 to train in this process alone"
                )
        self.topology = topology_of(self.world_size, ranks_per_node, shard_dim)
        self._backends = {} if self.group is None else backends_of(self.group)
        self.uses_nccl = torch.cuda.is_available() and self._backends.get("cuda") == "nccl"
        # where data travels
        self.device = (gpu or own_gpu()) if self.uses_nccl else torch.device("cpu")
        self.tags, self.clock, self.sent = Tags(), Clock(), Counter[Traffic]()
        self.scope = scope_type()
        self.across: Sequence[Comm] = ()
        self.slices: Sequence[Comm] = ()
        self._slot = GroupSlot(None)
        self._stream: torch.cuda.Stream | None = None
        self._in_flight: list[Any] = []
        self._log: watchdog.Log | None = None
        self._logs: Sequence[watchdog.Log] = ()  # that one, and of the gloo group beside NCCL

    def acquire_group(self, keepers: int = 0) -> None:
        """Move to a group of the same ranks that no other engine uses while this object lives.
        Collective.

        Backwards of two models can interleave differently on different ranks, which would mix their
        messages on one group. A group is used again once its engine is gone on every rank, unless
        messages may be left on it. A group of NCCL alone gets a gloo group beside it, over which
        ranks compare (`compare_device`). On NCCL the ranks of each level of the topology, and so
        many consecutive `keepers`, get groups of their own: a collective of these is one call.
        """
        if self.group is None:
            return  # then it is across nothing, too
        slots = slots_of(self.group)
        free = [index for index, slot in enumerate(slots) if not slot.in_use]
        rows = self.gather_json([free, f"{random.SystemRandom().getrandbits(64):x}"])
        common = set(free).intersection(*(free_of_rank for free_of_rank, _ in rows))
        if not common:
            common.add(len(slots))
            with _explain_errors():
                ranks = dist.get_process_group_ranks(self.group)
                slots.append(GroupSlot(group_beside(self.group, ranks, self.device)))
        self._slot = slot = slots[min(common)]
        self.group = slot.group or self.group
        slot.in_use = True
        compares_by_nccl = self.uses_nccl and self._compares_by_nccl and self.world_size > 1
        if compares_by_nccl and not slot.host_tried:
            # where making one failed before, it is not tried again
            if not any(other.host_tried and other.host is None for other in slots):
                slot.host = host_group_beside(self.group, self.device, self.gather_json)
            slot.host_tried = True
        self._log = watchdog.log_of(self.group)
        if self.uses_nccl:
            self._make_parts(keepers)
        logs = [self._log]
        if slot.host is not None:
            logs.append(watchdog.log_of(slot.host))
        self._logs = logs
        for log in logs:
            log.begin_engine(rows[0][1], self.uses_nccl and log is self._log)
        weakref.finalize(self, _release, slot, self._in_flight, logs)
        for comm in self.across:
            comm.acquire_group()

    def _make_parts(self, keepers: int) -> None:
        assert self.group is not None
        first = self.rank - self.rank % (keepers or 1)
        for ranks in [*self.topology.levels(self.rank), range(first, first + keepers)]:
            if 1 < len(ranks) < self.world_size and ranks not in self._slot.parts:
                with _explain_errors():
                    globally = [self.global_rank(rank) for rank in ranks]
                    part = self._slot.parts[ranks] = group_beside(self.group, globally, self.device)
                watchdog.log_of(self.group).parts.append(weakref.ref(part))

    def _group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of exactly these ranks, in this order; None if there is none."""
        self.global_rank(0)  # raises if the group was destroyed
        if ranks == range(self.world_size):
            return self.group
        return self._slot.parts.get(ranks) if isinstance(ranks, range) else None

    @property
    def _compares_by_nccl(self) -> bool:
        return self._slot.host is None and self._backends.get("cpu") != "gloo"

    @property
    def compare_device(self) -> torch.device:
        """The device over which ranks compare: the CPU wherever there is gloo, so that the host
        waits for no GPU.
        """
        if self.world_size > 1 and self._compares_by_nccl:
            return self.device
        return torch.device("cpu")

    def keep_alive(self, in_flight: T) -> T:
        """Return `in_flight`, a container of buffers in flight, which the group keeps when this
        object is freed.

        NCCL itself keeps the memory that it uses.
        """
        if not self.uses_nccl:
            self._in_flight.append(in_flight)
        return in_flight

    def _start(self, name: str, ranks: Sequence[int] | None = None) -> watchdog.Operation:
        """Count a collective of this name, among `ranks` (None: all), before it is started."""
        if self._log is None:
            assert self.group is not None
            self._log = watchdog.log_of(self.group)
        return _count(self._log, name, ranks, by_engine=bool(self._logs))

    def _started(
        self, operation: watchdog.Operation, works: Sequence[dist.Work | None]
    ) -> list[Started]:
        started = [work for work in works if work is not None]
        if started and self.uses_nccl:
            watchdog.on_device(operation, started[-1], self.device)
        return [Started(operation, started)] if started else []

    def take_order(self) -> list[Entry]:
        """Return the collectives since the last call, for ranks to compare: on NCCL, where their
        order matters; else none.
        """
        return [] if self._log is None or not self.uses_nccl else self._log.take_order()

    @cached_property
    def shard_ranks(self) -> Sequence[int]:
        """The ranks whose shards, in this order, are a full buffer."""
        return self.topology.shard_ranks(self.rank)

    def collectives(self) -> dict[str, int]:
        """Return how many collectives this rank has started on the process group, by name."""
        return {} if self._log is None else dict(self._log.counts)

    @property
    def backend_sums(self) -> bool:
        """Whether `reduce_scatter` is available: with NCCL, or on one rank."""
        return self.uses_nccl or self.world_size == 1

    @property
    def broken(self) -> bool:
        """Whether a wait failed, or the watchdog ended one, so that nothing in flight may be
        waited for.
        """
        return bool(self._why_broken)

    @property
    def _why_broken(self) -> str:
        return self._slot.broken or next((log.ended for log in self._logs if log.ended), "")

    def refuse_if_broken(self) -> None:
        """Raise the error of a failed wait again."""
        why = self._why_broken
        if why:
            raise RuntimeError(why)

    @contextmanager
    def joining(self, what: str) -> Iterator[None]:
        """Take memory for a collective, and start it. A rank that cannot starts none afterwards:
        it would meet the other ranks, which wait for it at this one, with another message.
        """
        try:
            yield
        except Exception as error:
            failure = f"this rank could not join {what}"
            error.add_note(failure)
            if self.world_size > 1:
                slot = self._slot
                slot.broken = slot.broken or f"{failure}: {in_words(error)}"
                slot.spoiled = True
                for log in self._logs:  # the watchdog tells the other ranks
                    log.engine_gone = True
            raise

    def begin_backward(self) -> None:
        """Note that a backward begins, which may wait for other ranks."""
        for log in self._logs:
            log.in_backward = True

    def fail_backward(self, error: str = "") -> None:
        """Let the ranks that wait inside this backward know that it ended in an error here ("":
        one that is not known).
        """
        for log in self._logs:
            if not log.in_backward:
                continue
            # an unknown error does not replace what is known of the same backward
            is_first = log.failed is None or log.failed[0] < log.backwards
            if error or is_first:
                log.failed = log.backwards, error or "see its output"

    def leave_backward(self, failed: bool, reduced: bool = False) -> None:
        """Note that a backward ended, and whether it `reduced` gradients; or that what it left
        is dropped, as it `failed`.
        """
        for log in self._logs:
            log.in_backward = False
            if not failed:
                log.failed = None
            if failed or reduced:
                log.backwards += 1

    def start_backward(self) -> None:
        """Note that a backward begins to send."""
        self._slot.spoiled |= self._slot.in_backward
        self._slot.in_backward = True

    def end_backward(self) -> None:
        """Note that every message of this backward was received."""
        self._slot.in_backward = False

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        kind: Traffic,
        name: str,
        ranks: Sequence[int] | None = None,
        of: int | None = None,
    ) -> list[Started]:
        """Start sending the i-th equal piece of `sent` to ranks[i] (default: all ranks, in order),
        which include this one.

        `received` gets a piece from each other rank, in the same order; this rank's own piece in it
        is undefined. name: of the collective, in errors. of: a number by which messages are paired,
        instead of by the order of calls. With gloo pieces are sent pairwise, measured a third
        faster than its all_to_all.
        """
        ranks = range(self.world_size) if ranks is None else ranks
        group = self._group_of(ranks) if self.uses_nccl else None
        if group is not None:
            operation = self._start(name, ranks)
            self.sent[kind] += sent.nbytes // len(ranks) * (len(ranks) - 1)
            with _explain_errors(operation):
                work = dist.all_to_all_single(
                    as_bytes(received), as_bytes(sent), group=group, async_op=True
                )
            return self._started(operation, [work])
        return self._exchange(
            _pieces(sent, len(ranks)), _pieces(received, len(ranks)), kind, name, ranks, of
        )

    def reduce_scatter(
        self, received: torch.Tensor, sent: torch.Tensor, name: str
    ) -> list[Started]:
        """Start the backend's own sum of `sent` over all ranks; `received` gets this rank's
        piece (Topology.piece_index).
        """
        if sent.numel() == 0:
            return []
        operation = self._start(name)
        self.sent[Traffic.BACKWARD] += sent.nbytes // self.world_size * (self.world_size - 1)
        with _explain_errors(operation):
            if self.topology.nodes == 1:
                work = _reduce_scatter(received, sent, group=self.group, async_op=True)
            else:
                pieces = sent.chunk(self.world_size)
                of_ranks = [
                    pieces[self.topology.piece_index(rank)] for rank in range(self.world_size)
                ]
                work = dist.reduce_scatter(received, of_ranks, group=self.group, async_op=True)
        return self._started(operation, [work])

    def all_gather(
        self,
        fulls: Sequence[torch.Tensor],
        kind: Traffic,
        name: str,
        ranks: Sequence[int] | None = None,
        of: Sequence[int | None] | None = None,
    ) -> list[Started]:
        """Start filling `fulls`, an equal piece of each from each of `ranks` (default: all, in
        order).

        This rank's own pieces are there already. name, of: see all_to_all; `of` has a number for
        each of `fulls`.

        With NCCL they are one call, whatever their dtypes and sizes; a gather over nodes
        (Topology.ranks_by_piece) has two levels: among the ranks that have the same number in their
        nodes, whose pieces follow one another, and then, on a stream of its own, within the node.
        So a node sends each byte once. With gloo pieces are sent pairwise, measured three times
        faster than its all_gather.
        """
        ranks = range(self.world_size) if ranks is None else ranks
        numbers = of or [None] * len(fulls)
        numbered = [pair for pair in zip(fulls, numbers, strict=True) if pair[0].numel()]
        if len(ranks) == 1 or not numbered:
            return []
        flats = [as_bytes(full) for full, _ in numbered]
        if self.uses_nccl and self._group_of(ranks) is not None:
            return self._gather_in_place(flats, kind, name, ranks)
        if self.uses_nccl and len(ranks) == self.world_size and self._has_levels:
            return self._gather_by_levels(flats, kind, name)
        started: list[Started] = []
        try:
            for full, number in numbered:
                started += self.gather_parts(_pieces(full, len(ranks)), kind, name, ranks, number)
        except BaseException:
            self.keep_alive(started)
            raise
        return started

    @property
    def _has_levels(self) -> bool:
        return len(self.topology.levels(self.rank)) > 1

    def _gather_by_levels(
        self, flats: list[torch.Tensor], kind: Traffic, name: str
    ) -> list[Started]:
        within, across = self.topology.levels(self.rank)
        # of each, the pieces of the ranks that have this rank's number in their nodes
        mine = [flat.chunk(len(within))[within.index(self.rank)] for flat in flats]
        first = self._gather_in_place(mine, kind, f"{name}, across nodes", across)
        with self._after_current():
            wait_all(first)
            then = self._gather_in_place(flats, kind, f"{name}, within nodes", within)
        return [*first, *then]

    def _gather_in_place(
        self, flats: list[torch.Tensor], kind: Traffic, name: str, ranks: Sequence[int]
    ) -> list[Started]:
        pieces = [flat.chunk(len(ranks))[ranks.index(self.rank)] for flat in flats]
        self.sent[kind] += sum(piece.nbytes for piece in pieces) * (len(ranks) - 1)
        operation = self._start(name, ranks)
        group = self._group_of(ranks)
        with _explain_errors(operation):
            work = _all_gather(flats, pieces, group=group)
        return self._started(operation, [work])

    def _after_current(self) -> AbstractContextManager[Any]:
        """Return a context whose stream, on CUDA, goes on from the current one without delaying
        it.
        """
        if self.device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def gather_parts(
        self,
        parts: Sequence[torch.Tensor],
        kind: Traffic,
        name: str,
        ranks: Sequence[int],
        of: int | None = None,
        receivers: Sequence[int] | None = None,
    ) -> list[Started]:
        """Start filling parts[i] from ranks[i], this rank's own already there. Sizes may differ,
        and be zero.

        receivers: the ranks that get parts, None for all. On the other ranks all but the own part
        are empty.
        """
        received = [as_bytes(part) for part in parts]
        own = received[ranks.index(self.rank)]
        sent = [own if receivers is None or rank in receivers else own[:0] for rank in ranks]
        return self._exchange(sent, received, kind, name, ranks, of)

    def _exchange(
        self,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        kind: Traffic,
        name: str,
        ranks: Sequence[int],
        of: int | None,
    ) -> list[Started]:
        """Start sending sent[i] to ranks[i] and receiving received[i] from it, for all other ranks,
        with a tag of its own.

        Empty tensors are not sent.
        """
        tag, group = self.tags.next(kind, of), self.group
        me, size = ranks.index(self.rank), len(ranks)
        messages: list[tuple[Any, torch.Tensor, int]] = []
        for step in range(1, size):
            source, target = (me - step) % size, (me + step) % size
            source_rank, target_rank = (
                self.global_rank(ranks[source]),
                self.global_rank(ranks[target]),
            )
            if received[source].numel() > 0:
                messages.append((dist.irecv, received[source], source_rank))
            if sent[target].numel() > 0:
                messages.append((dist.isend, sent[target], target_rank))
                self.sent[kind] += sent[target].nbytes
        operation = self._start(name, ranks)
        if self.uses_nccl and messages:  # as one group of calls, which NCCL runs at once
            calls = [dist.P2POp(call, data, peer, group) for call, data, peer in messages]
            with _explain_errors(operation):
                started = dist.batch_isend_irecv(calls)
            return self._started(operation, started)
        with _explain_errors(operation):
            works = [call(data, peer, group=group, tag=tag) for call, data, peer in messages]
        return [Started(operation, filter(None, works))] if works else []

    def gather_rows(
        self, row: torch.Tensor, kind: Traffic | None = None, name: str = watchdog.AGREEMENT
    ) -> torch.Tensor:
        """Return the small tensors of all ranks stacked in rank order, shape (world_size,
        *row.shape), on row's device.

        kind: None before an engine exists, when ranks need not have sent the same messages before.
        """
        if self.world_size == 1:
            return row.unsqueeze(0)
        by_nccl = self.uses_nccl and (self._compares_by_nccl or row.device.type != "cpu")
        if kind is not None and not by_nccl:
            return self._gather_small(row, kind, name)
        rows = row.repeat(self.world_size, *(1,) * row.ndim)
        if self.uses_nccl:  # which would copy each row of a list by a kernel of its own
            wait_all(self.all_gather([rows], kind or Traffic.READ, name))
        else:
            operation = self._start(name)
            with _explain_errors(operation):
                work = dist.all_gather(
                    list(rows.unbind(0)), row.contiguous(), group=self.group, async_op=True
                )
            wait_all(self._started(operation, [work]))
        return rows

    def _gather_small(
        self, row: torch.Tensor, kind: Traffic, name: str, host: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """See gather_rows: over gloo, by Bruck's algorithm, in as many rounds as the world's size
        has binary digits.

        In each a rank sends all rows that it has, in the order of ranks from itself on, and gets as
        many that follow them.
        host: a gloo group to send over instead.
        """
        size, tag = self.world_size, self.tags.next(kind, None)
        operation = self._start(name) if host is None else _count(watchdog.log_of(host), name)
        rows = row.new_empty(size, *row.shape)
        rows[0] = row
        with _waiting(operation), _explain_errors(operation):
            group = host or self.group
            have = 1
            while have < size:
                count = min(have, size - have)
                sent, received = as_bytes(rows[:count]), as_bytes(rows[have : have + count])
                source = self.global_rank((self.rank + have) % size)
                target = self.global_rank((self.rank - have) % size)
                works = [
                    dist.irecv(received, source, group=group, tag=tag),
                    dist.isend(sent, target, group=group, tag=tag),
                ]
                self.sent[kind] += sent.nbytes
                for work in works:
                    if work is not None:
                        work.wait()
                have += count
        return rows.roll(self.rank, 0)

    def all_gather_cpu(
        self, row: torch.Tensor, kind: Traffic | None = None, name: str = watchdog.AGREEMENT
    ) -> torch.Tensor:
        """Return each rank's `row` (small, on the CPU), stacked in rank order on the CPU. It is
        sent on `compare_device`.

        kind, name: see gather_rows and all_to_all.
        """
        if self._slot.host is None:
            rows = self.gather_rows(
                row.to(self.compare_device, non_blocking=True), kind, name
            ).cpu()
            self.refuse_if_broken()  # NCCL: an aborted communicator fills in nothing
            return rows
        return self._gather_small(row, kind or Traffic.READ, name, self._slot.host)

    def of_parts(
        self,
        row: torch.Tensor,
        kind: Traffic | None = None,
        name: str = watchdog.AGREEMENT,
        over: "Sequence[Comm] | None" = None,
    ) -> torch.Tensor:
        """Return the `row` of each part of the model, stacked in rank order, on row's device; see
        gather_rows.

        over: some dimensions of the parts, None for `across`. Every rank of the model gets the same
        if the ranks of each part have the same row.
        """
        rows = row.unsqueeze(0)
        parts = self.across if over is None else over
        for comm in parts:
            gather = comm.all_gather_cpu if row.device.type == "cpu" else comm.gather_rows
            rows = gather(rows, kind, name).flatten(0, 1)
        return rows

    def broadcast(self, tensor: torch.Tensor, source: int = 0, name: str = "a broadcast") -> None:
        """Overwrite `tensor` with that of rank `source`."""
        if self.world_size > 1 and tensor.numel() > 0:
            operation = self._start(name)
            with _explain_errors(operation):
                work = dist.broadcast(
                    as_bytes(tensor), self.global_rank(source), group=self.group, async_op=True
                )
            wait_all(self._started(operation, [work]))

    def add_up(self, totals: torch.Tensor, name: str) -> None:
        """Add up an int64 tensor of every rank, modulo 2^64, in place. On `device`."""
        if self.world_size > 1 and totals.numel() > 0:
            operation = self._start(name)
            with _explain_errors(operation):
                work = dist.all_reduce(totals, group=self.group, async_op=True)
            wait_all(self._started(operation, [work]))

    def scatter(
        self, received: torch.Tensor, parts: torch.Tensor, source: int, name: str = "a scatter"
    ) -> None:
        """Fill `received` with this rank's part of `parts` on rank `source`: equal parts, in rank
        order.
        """
        if self.world_size == 1:
            received.copy_(parts)
        elif received.numel() > 0:
            own = _pieces(as_bytes(parts), self.world_size) if self.rank == source else None
            operation = self._start(name)
            with _explain_errors(operation):
                work = dist.scatter(
                    as_bytes(received), own, self.global_rank(source), self.group, async_op=True
                )
            wait_all(self._started(operation, [work]))

    def gather_json(self, value: Any) -> list[Any]:
        """Return what every rank passed, in rank order (sent as JSON text, never as pickle)."""
        if self.world_size == 1:
            return [json.loads(json.dumps(value))]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.all_gather_cpu(torch.tensor([text.numel()], device="cpu")).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: text.numel()] = text
        rows = self.all_gather_cpu(padded)
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]

    def rank_of(self, op: str, global_rank: int) -> int:
        """Return which of these ranks a rank of torch.distributed is. ValueError, in the name of
        `op`, if it is none.
        """
        ranks = [self.global_rank(rank) for rank in range(self.world_size)]
        if global_rank not in ranks:
            raise ValueError(
                f"{op}: got rank {global_rank}; expected one of the ranks that train this model: "
                f"{ranks}"
            )
        return ranks.index(global_rank)

    def global_rank(self, rank: int) -> int:
        """Return the rank of torch.distributed of one of these ranks."""
        if self.group is None:
            return rank
        try:
            return dist.get_global_rank(self.group, rank)
        except ValueError as error:
            raise RuntimeError(
                "the process group of this sharded model is gone (destroy_process_group); expected "
                "it to stay as long as the "
                "model trains (save its state dicts before, and shard a model anew after "
                "init_process_group)"
            ) from error


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as flat bytes."""
    return tensor.view(-1).view(torch.uint8)


def _pieces(full: torch.Tensor, count: int) -> list[torch.Tensor]:
    return list(as_bytes(full).chunk(count)) if full.numel() else [as_bytes(full)] * count


def wait_all(started: Iterable[Started]) -> None:
    """Wait for collectives: until done on the CPU, in stream order on CUDA."""
    for collective in started:
        collective.wait()


def _release(slot: GroupSlot, buffers: list[Any], logs: Sequence[watchdog.Log]) -> None:
    """Free a group for the next engine. buffers: that may still be in flight."""
    for log in logs:
        log.engine_gone = True
        slot.spoiled |= bool(log.ended)
    slot.release(buffers)


@contextmanager
def _explain_errors(operation: watchdog.Operation | None = None) -> Iterator[None]:
    """Explain an error of torch.distributed: another rank did not take part."""
    try:
        yield
    except RuntimeError as error:
        failure = watchdog.reason_of(operation) or (
            "waiting for the other ranks failed: a rank ended, raised an error, made other calls, "
            "or waited longer than init_process_group(timeout=...). Every rank must run the same "
            "backwards, steps and collective calls (state_dict, full_grad, ...). For loaders of "
            "different length, use shardcore.join. torch.distributed reports"
            f"{'' if operation is None else f', at {operation.name}'}: {error}"
        )
        for slot in slots_in_use():
            slot.broken, slot.spoiled = failure, True
        raise RuntimeError(failure) from error
