"""Collectives between ranks, and how ranks agree. The one place that knows torch's names for them.

All data collectives move bytes (uint8 views), so every dtype works on every backend and nothing is summed in transit:
arithmetic on gradients happens in csrc/reduce, in rank order, unless the user asks for the backend's (`reduce_scatter`). A
world of one needs no process group and moves nothing.
"""

import json
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from operator import methodcaller
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardcore import neighbour_reads, telling
from shardcore.launchers import warn_of_idle_tasks, world_told
from shardcore.overdue import Overdue
from shardcore.process_groups import (
    GroupSlot,
    NotAMemberError,
    backends_of,
    group_beside,
    group_of,
    host_group_beside,
    own_gpu,
    slots_of,
    taken_slots,
    timeout_of,
)
from shardcore.tags import Tags
from shardcore.telling import as_bytes
from shardcore.topology import topology_of

T = TypeVar("T")
# torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Traffic(IntEnum):
    """What messages are for. Each kind has tags of its own, so that a rank's gradients can never arrive as another's states."""

    BACKWARD = 1
    STEP = 2
    READ = 3  # what the user asks for: state dicts, whole gradients and states
    WEIGHTS = 4  # whole weights around their use
    NOTICE = 5  # where a rank is, see engine/meeting.py


class Comm:
    """The ranks that share a model: `rank` of `world_size`, on `group` (None when alone), lying as `topology` says."""

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        ranks_per_node: int | None = None,
        gpu: torch.device | None = None,
    ) -> None:
        """Join `group`, or the default group if torch.distributed is initialized, or be a world of one.

        group: a mesh of two dimensions replicates over the first and shards over the second. ranks_per_node: gradients are
        added over the ranks of a node, then over nodes (default: over all ranks at once; of a mesh, its second dimension).
        gpu: where the model is, if that is a GPU: each rank needs its own, also for the first message.
        Raises TypeError for what is no group; ValueError if launched as several ranks (WORLD_SIZE > 1) without an initialized
        process group, for ranks that no nodes can be made of, and (NotAMemberError) for a group that this rank is not part of.
        """
        sharded = None
        if isinstance(group, DeviceMesh):
            group, sharded = group_of(group)
        elif not isinstance(group, dist.ProcessGroup | None) and group is not dist.GroupMember.NON_GROUP_MEMBER:
            raise TypeError(f"shard: process_group is {group!r}; expected a process group, a DeviceMesh, or None for all ranks")
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.group = group if group is not None else dist.group.WORLD
            self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
            if self.rank < 0:
                raise NotAMemberError("shard: process_group does not contain this rank; expected a group that it belongs to")
        elif group is not None:
            raise ValueError(
                "shard: process_group was given but torch.distributed is not initialized; expected init_process_group() before"
            )
        elif (told := world_told())[1] > 1:
            raise ValueError(
                f"shard: {told[0]} is {told[1]} but torch.distributed is not initialized (each rank would train alone); "
                "call shardcore.initialize() or torch.distributed.init_process_group() (it reads torchrun's variables) first; "
                "WORLD_SIZE=1 in the environment says that this process is to train alone"
            )
        else:
            warn_of_idle_tasks()
        self.topology = topology_of(self.world_size, ranks_per_node, sharded)
        self._backends = {} if self.group is None else backends_of(self.group)
        self.uses_nccl = torch.cuda.is_available() and self._backends.get("cuda") == "nccl"
        self.device = (gpu or own_gpu()) if self.uses_nccl else torch.device("cpu")  # where data travels
        self.tags = Tags()
        self._slot = GroupSlot(None)
        self._on_way: list[Any] = []
        self._overdue: Overdue | None = None

    def separate(self) -> None:
        """Move to another group of the same ranks if an engine uses this one, as long as this object lives. Collective.

        Two models' backwards can interleave differently on different ranks; on one group their messages would mix. Groups
        whose engines are gone on every rank are used again, unless an engine left a backward there, or a wait failed. A group
        of NCCL alone gets one of gloo beside it, for what the ranks tell each other (`tell_device`).
        """
        if self.group is None:
            return
        slots = slots_of(self.group)
        free = [index for index, slot in enumerate(slots) if not slot.taken]
        common = set(free).intersection(*self.gather_json(free))
        if not common:
            common.add(len(slots))
            with _explained():
                ranks = dist.get_process_group_ranks(self.group)
                slots.append(GroupSlot(group_beside(self.group, ranks, self.device)))
        self._slot = slot = slots[min(common)]
        self.group = slot.group or self.group
        slot.taken = True
        weakref.finalize(self, slot.release, self._on_way)
        if slot.met or self.world_size == 1:
            return
        if self.uses_nccl and self._tells_by_nccl and not any(other.met for other in slots if other.host is None):
            slot.host = host_group_beside(self.group, self.device, self.gather_json)
        elif not self.uses_nccl and self._backends.get("cpu") == "gloo":
            slot.neighbours = neighbour_reads.meet(
                self.rank, self.world_size, timeout_of(self.group, self.device).total_seconds(), self.gather_json
            )
        slot.met = True

    @property
    def _tells_by_nccl(self) -> bool:
        return self._slot.host is None and self._backends.get("cpu") != "gloo"

    @property
    def tell_device(self) -> torch.device:
        """Where what ranks `tell` each other travels: the CPU, which waits for no device, wherever gloo is there for that."""
        return self.device if self.world_size > 1 and self._tells_by_nccl else torch.device("cpu")

    def keeps(self, on_way: T) -> T:
        """Return `on_way`, a container of what travels: what is in it when this object goes stays with the group.

        Not on NCCL, which keeps the memory of what it was given itself.
        """
        if not self.uses_nccl:
            self._on_way.append(on_way)
        return on_way

    def watch(self, where: Callable[[], str]) -> None:
        """Say where ranks are before NCCL's watchdog ends the process; `where` tells of this one. After `separate`."""
        if self.uses_nccl and self.group is not None and self.world_size > 1:
            store, timeout = dist.distributed_c10d._get_default_store, timeout_of(self.group, self.device)
            self._overdue = Overdue(store, self.group.group_name, self.rank, self.world_size, timeout, where)

    def _started(self, work: dist.Work | None, sent: torch.Tensor) -> list[dist.Work]:
        if work is None:
            return []
        if self._overdue is not None:
            self._overdue.started(work, sent.device.type)
        return [work]

    @property
    def sharers(self) -> Sequence[int]:
        """The ranks whose owned ranges, in this order, make a whole buffer."""
        return self.topology.sharers(self.rank)

    @property
    def backend_sums(self) -> bool:
        """Whether `reduce_scatter` may be chosen: only NCCL's own sum is, and one rank has none."""
        return self.uses_nccl or self.world_size == 1

    @property
    def broken(self) -> bool:
        """Whether a wait failed: nothing that is in flight may be waited for."""
        return bool(self._slot.broken)

    def refuse_if_broken(self) -> None:
        """Raise again what a wait that failed raised."""
        if self._slot.broken:
            raise RuntimeError(self._slot.broken)

    def start_anew(self) -> None:
        """Give messages other tags from now on, as every rank does at this point: some of the old may never be taken."""
        self._slot.spoiled = True
        self._slot.in_backward = False
        self.tags.part()

    def start_backward(self) -> None:
        """Give the messages of the backward that begins tags of their own."""
        self._slot.spoiled |= self._slot.in_backward
        self._slot.in_backward = True
        self.tags.start_backward(Traffic.BACKWARD)

    def end_backward(self) -> None:
        """Say that every message of this backward was sent and taken."""
        self._slot.in_backward = False

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        kind: Traffic,
        ranks: Sequence[int] | None = None,
        of: int | None = None,
    ) -> list[dist.Work]:
        """Start sending the i-th equal piece of `sent` to ranks[i] (default: all ranks, in order), which include this one.

        of: the number of what this is, if that rather than the order of calls tells which messages belong together. `received`
        gets a piece from each other rank, in the same order. This rank's own piece need not move: what `received` holds in its
        place is undefined. With gloo pieces go pairwise: measured a third faster than its all_to_all.
        """
        if self.uses_nccl and ranks is None:
            self._global(0)  # raises if the group is gone
            work = dist.all_to_all_single(as_bytes(received), as_bytes(sent), group=self.group, async_op=True)
            return self._started(work, sent)
        ranks = range(self.world_size) if ranks is None else ranks
        return self._exchange(_pieces(sent, len(ranks)), _pieces(received, len(ranks)), kind, ranks, of)

    def all_to_nobody(self, sink: torch.Tensor, zeros: torch.Tensor, kind: Traffic, ranks: Sequence[int], of: int) -> list[Any]:
        """Take part in all_to_all(of=of) with the piece `zeros` for everyone, and put all pieces into `sink`. Not on NCCL."""
        return self._exchange([zeros] * len(ranks), [sink] * len(ranks), kind, ranks, of)

    def reduce_scatter(self, received: torch.Tensor, sent: torch.Tensor) -> list[dist.Work]:
        """Start adding `sent` over all ranks as the backend does it; `received` gets this rank's piece (Topology.place)."""
        if sent.numel() == 0:
            return []
        if self.topology.nodes == 1:
            work = _reduce_scatter(received, sent, group=self.group, async_op=True)
        else:
            pieces = sent.chunk(self.world_size)
            of_ranks = [pieces[self.topology.place(rank)] for rank in range(self.world_size)]
            work = dist.reduce_scatter(received, of_ranks, group=self.group, async_op=True)
        return self._started(work, sent)

    def all_gather(
        self, whole: torch.Tensor, kind: Traffic, ranks: Sequence[int] | None = None, of: int | None = None
    ) -> list[dist.Work]:
        """Start filling `whole`, an equal piece for each of `ranks` (default: all, in order), this rank's own already in place.

        of: see all_to_all. With gloo the pieces go pairwise: measured three times faster there than its all_gather.
        """
        in_order = ranks is None or ranks == range(self.world_size)
        ranks = range(self.world_size) if ranks is None else ranks
        if len(ranks) == 1 or whole.numel() == 0:
            return []
        if self.uses_nccl and in_order:
            return self._gather_into(whole, self.group)
        places = _pieces(whole, len(ranks))
        return self._exchange([places[ranks.index(self.rank)]] * len(ranks), places, kind, ranks, of)

    def gather_parts(self, parts: Sequence[torch.Tensor], kind: Traffic, ranks: Sequence[int]) -> list[dist.Work]:
        """Start filling parts[i] from ranks[i], this rank's own already in place. Their sizes may differ, and be zero."""
        places = [as_bytes(part) for part in parts]
        return self._exchange([places[ranks.index(self.rank)]] * len(ranks), places, kind, ranks, None)

    def _gather_into(self, whole: torch.Tensor, group: dist.ProcessGroup | None) -> list[dist.Work]:
        self._global(0)  # raises if the group is gone
        flat = as_bytes(whole)
        size = flat.numel() // self.world_size
        own = flat.narrow(0, self.rank * size, size)
        return self._started(_all_gather(flat, own, group=group, async_op=True), own)

    def _exchange(
        self,
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        kind: Traffic,
        ranks: Sequence[int],
        of: int | None,
    ) -> list[dist.Work]:
        """Start sending sent[i] to every other one of `ranks` and receiving received[i] from it, under a tag of its own.

        What is empty is not sent.
        """
        tag = self.tags.next(kind, of)
        me, size = ranks.index(self.rank), len(ranks)
        works: list[Any] = []
        operations: list[tuple[Any, torch.Tensor, int]] = []
        neighbours = self._slot.neighbours
        for step in range(1, size):
            source, target = (me - step) % size, (me + step) % size
            for call, data, rank in ((dist.irecv, received[source], ranks[source]), (dist.isend, sent[target], ranks[target])):
                peer = self._global(rank)
                if data.numel() == 0:
                    continue
                if neighbours is not None and neighbours.serve(rank, data):
                    works.append((neighbours.receive if call is dist.irecv else neighbours.send)(data, rank, tag))
                else:
                    operations.append((call, data, peer))
        if self.uses_nccl and operations:  # as one group of calls: NCCL would wait for them one after the other
            works = dist.batch_isend_irecv([dist.P2POp(call, data, peer, self.group) for call, data, peer in operations])
            return [*works[:-1], *self._started(works[-1] if works else None, sent[0])]
        with _explained():
            works += [call(data, peer, group=self.group, tag=tag) for call, data, peer in operations]
        return [work for work in works if work is not None]

    def gather_rows(self, row: torch.Tensor, kind: Traffic | None = None) -> torch.Tensor:
        """Return the small tensors of all ranks stacked in rank order, shape (world_size, *row.shape), on row's device."""
        if self.world_size == 1:
            return row.unsqueeze(0)
        whole = torch.empty((self.world_size, *row.shape), dtype=row.dtype, device=row.device)
        if kind is None and not self.uses_nccl:
            with _explained():
                dist.all_gather(list(whole.unbind(0)), row.contiguous(), group=self.group)
        else:  # NCCL would copy each row of a list by a kernel of its own
            whole[self.rank].copy_(row)
            wait_all(self.all_gather(whole, kind or Traffic.READ))
        return whole

    def tell(self, row: torch.Tensor, kind: Traffic | None = None, read: int = 0) -> torch.Tensor:
        """Return each rank's `row` (small, on the CPU), stacked in rank order on the CPU. It travels on `tell_device`.

        read: which of telling.READS this is for, for the error of ranks that are elsewhere.
        """
        if self._slot.host is None:
            return self.gather_rows(row.to(self.tell_device, non_blocking=True), kind).cpu()
        return telling.tell(row, kind or 0, read, self.rank, self.world_size, self._gather_on_host)

    def _gather_on_host(self, whole: torch.Tensor) -> None:
        wait_all(self._gather_into(whole, self._slot.host))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor` with rank 0's."""
        if self.world_size > 1 and tensor.numel() > 0:
            with _explained():
                dist.broadcast(as_bytes(tensor), self._global(0), group=self.group)

    def gather_json(self, value: Any) -> list[Any]:
        """Return what every rank passed, in rank order (sent as JSON text, never as pickle)."""
        if self.world_size == 1:
            return [json.loads(json.dumps(value))]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.tell(torch.tensor([text.numel()], device="cpu")).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: text.numel()] = text
        rows = self.tell(padded)
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]

    def _global(self, rank: int) -> int:
        if self.group is None:
            return rank
        try:
            return dist.get_global_rank(self.group, rank)
        except ValueError as error:
            raise RuntimeError(
                "the process group of this sharded model is gone (destroy_process_group); expected it to stay as long as the "
                "model trains (save its state dicts before, and shard a model anew after init_process_group)"
            ) from error


def _pieces(whole: torch.Tensor, count: int) -> list[torch.Tensor]:
    return list(as_bytes(whole).chunk(count)) if whole.numel() else [as_bytes(whole)] * count


def wait_all(works: Iterable[dist.Work]) -> None:
    """Wait for collectives: until done on the CPU, in stream order on CUDA.

    Each can be waited for once. So that an interrupt loses none, an iterator may be passed again: it is advanced by C alone,
    and Python's signal handlers run before or after.
    """
    with _explained():
        deque(map(methodcaller("wait"), works), maxlen=0)


@contextmanager
def _explained() -> Iterator[None]:
    """Say what an error of torch.distributed means here: another rank did not take part."""
    try:
        yield
    except RuntimeError as error:
        failure = (
            "waiting for the other ranks failed; expected every rank to run the same backwards, steps and collective calls "
            "(state_dict, full_grad, ...): a rank that ended, failed, did another thing or was given another "
            "group leaves the rest waiting, at most for the process group's timeout (init_process_group(timeout=...)). "
            f"The reason given: {error}"
        )
        for slot in taken_slots():
            slot.broken, slot.spoiled = failure, True
        raise RuntimeError(failure) from error
