"""Collectives between ranks, and how ranks agree. The one place that knows torch's names for them.

All data collectives move bytes (uint8 views), so every dtype works on every backend and nothing is summed in transit:
arithmetic on gradients happens in csrc/reduce, in rank order. A world of one needs no process group and moves nothing.
"""

import json
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed all_gather_into_tensor to all_gather_single.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Traffic(IntEnum):
    """What messages are for. Each kind has tags of its own, so that a rank's gradients can never arrive as another's states."""

    BACKWARD = 1
    STEP = 2
    READ = 3  # what the user asks for: state dicts, whole gradients and states


# Tags of one backward: ranks that left one early never pair the next one's messages with those of the old.
_TAGS_A_BACKWARD = 1 << 14
_TAGS_A_KIND = 1 << 28


@dataclass
class _Place:
    """A process group that engines take one after the other; `group` is None for the one that the user gave.

    in_backward: one has begun and not ended. spoiled: one was left, or a wait failed: messages that nobody took may lie there.
    """

    group: dist.ProcessGroup | None
    taken: bool = False
    in_backward: bool = False
    spoiled: bool = False

    def release(self) -> None:
        self.taken = self.in_backward or self.spoiled


# The groups made beside each user's group, in the same order on every rank.
_places: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[_Place]]" = weakref.WeakKeyDictionary()


class Comm:
    """The ranks that share a model: `rank` of `world_size`, on `group` (None when alone)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Join `group`, or the default group if torch.distributed is initialized, or be a world of one.

        Raises ValueError if launched as several ranks (WORLD_SIZE > 1) without an initialized process group, and for a
        group that this rank is not part of.
        """
        self.group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.group = group if group is not None else dist.group.WORLD
            self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
            if self.rank < 0:
                raise ValueError("shard: process_group does not contain this rank; expected a group that this rank belongs to")
        elif group is not None:
            raise ValueError("shard: process_group was given but torch.distributed is not initialized")
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                f"shard: WORLD_SIZE is {os.environ['WORLD_SIZE']} but torch.distributed is not initialized; "
                "call torch.distributed.init_process_group() first (each rank would train alone)"
            )
        self.uses_nccl = self.group is not None and torch.cuda.is_available() and "nccl" in dist.get_backend(self.group)
        local_rank = os.environ.get("LOCAL_RANK")
        self.device = torch.device("cpu")  # where small messages travel
        if self.uses_nccl:
            self.device = torch.device("cuda", torch.cuda.current_device() if local_rank is None else int(local_rank))
        self._count = dict.fromkeys(Traffic, 0)
        self._place = _Place(None)

    def separate(self) -> None:
        """Move to another group of the same ranks if an engine uses this one, as long as this object lives. Collective.

        Two models' backwards can interleave differently on different ranks; on one group their messages would mix. Groups
        whose engines are gone on every rank are used again, unless an engine left a backward there, or a wait failed.
        """
        if self.group is None:
            return
        places = _places.setdefault(self.group, [_Place(None)])
        free = [index for index, place in enumerate(places) if not place.taken]
        common = set(free).intersection(*self.gather_json(free))
        if not common:
            common.add(len(places))
            places.append(_Place(self._new_group(self.group)))
        self._place = place = places[min(common)]
        self.group = place.group or self.group
        place.taken = True
        weakref.finalize(self, place.release)

    def _new_group(self, like: dist.ProcessGroup) -> dist.ProcessGroup:
        group: dist.ProcessGroup | None = dist.new_group(
            dist.get_process_group_ranks(like),
            timeout=like._get_backend(self.device).options._timeout,
            backend=dist.get_backend(like),
            use_local_synchronization=True,
        )
        assert group is not None
        return group

    def start_backward(self) -> None:
        """Give the messages of the backward that begins tags of their own."""
        self._place.spoiled |= self._place.in_backward
        self._place.in_backward = True
        self._count[Traffic.BACKWARD] = (self._count[Traffic.BACKWARD] // _TAGS_A_BACKWARD + 1) * _TAGS_A_BACKWARD

    def end_backward(self) -> None:
        """Say that every message of this backward was sent and taken."""
        self._place.in_backward = False

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, kind: Traffic) -> list[dist.Work]:
        """Start sending the r-th equal piece of `sent` to rank r; `received` gets a piece from each other rank, in rank order.

        This rank's own piece need not move: what `received` holds in its place is undefined.

        With gloo the pieces go pairwise: measured a third faster there than its all_to_all.
        """
        if self.uses_nccl:
            work = dist.all_to_all_single(as_bytes(received), as_bytes(sent), group=self.group, async_op=True)
            return [work] if work is not None else []
        return self._exchange(self._pieces(sent), self._pieces(received), kind)

    def all_gather(self, whole: torch.Tensor, kind: Traffic) -> list[dist.Work]:
        """Start filling `whole` (world_size equal pieces, this rank's own already in place) with every rank's piece.

        With gloo the pieces go pairwise: measured three times faster there than its all_gather.
        """
        if self.world_size == 1 or whole.numel() == 0:
            return []
        places = self._pieces(whole)
        if self.uses_nccl:
            work = _all_gather(as_bytes(whole), places[self.rank], group=self.group, async_op=True)
            return [work] if work is not None else []
        return self._exchange([places[self.rank]] * self.world_size, places, kind)

    def _pieces(self, whole: torch.Tensor) -> list[torch.Tensor]:
        return list(as_bytes(whole).chunk(self.world_size)) if whole.numel() else [as_bytes(whole)] * self.world_size

    def _exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], kind: Traffic) -> list[dist.Work]:
        """Start sending sent[r] to every other rank r and receiving received[r] from it, under a tag of its own."""
        if sent[0].numel() == 0:
            return []
        self._count[kind] += 1
        tag = kind * _TAGS_A_KIND + self._count[kind] % _TAGS_A_KIND
        works = []
        for step in range(1, self.world_size):
            source, target = (self.rank - step) % self.world_size, (self.rank + step) % self.world_size
            works.append(dist.irecv(received[source], self._global(source), group=self.group, tag=tag))
            works.append(dist.isend(sent[target], self._global(target), group=self.group, tag=tag))
        return [work for work in works if work is not None]

    def gather_rows(self, row: torch.Tensor, kind: Traffic | None = None) -> torch.Tensor:
        """Return the small tensors of all ranks stacked in rank order, shape (world_size, *row.shape), on row's device."""
        if self.world_size == 1:
            return row.unsqueeze(0)
        whole = torch.empty((self.world_size, *row.shape), dtype=row.dtype, device=row.device)
        if kind is None or self.uses_nccl:
            with _explained():
                dist.all_gather(list(whole.unbind(0)), row.contiguous(), group=self.group)
        else:
            whole[self.rank].copy_(row)
            wait_all(self.all_gather(whole, kind))
        return whole

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor` with rank 0's."""
        if self.world_size > 1 and tensor.numel() > 0:
            dist.broadcast(as_bytes(tensor), self._global(0), group=self.group)

    def gather_json(self, value: Any) -> list[Any]:
        """Return what every rank passed, in rank order (sent as JSON text, never as pickle)."""
        if self.world_size == 1:
            return [json.loads(json.dumps(value))]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = self.gather_rows(torch.tensor([text.numel()], device=self.device)).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: text.numel()] = text
        rows = self.gather_rows(padded).cpu()
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths, strict=True)]

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank) if self.group is not None else rank


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as flat bytes."""
    return tensor.view(-1).view(torch.uint8)


def wait_all(works: Sequence[dist.Work]) -> None:
    """Wait for collectives: until done on the CPU, in stream order on CUDA."""
    with _explained():
        for work in works:
            work.wait()


@contextmanager
def _explained() -> Iterator[None]:
    """Say what an error of torch.distributed means here: another rank did not take part."""
    try:
        yield
    except RuntimeError as error:
        for place in (place for places in _places.values() for place in places):
            place.spoiled |= place.taken
        raise RuntimeError(
            "waiting for the other ranks failed; expected every rank to run the same backwards, steps and collective calls "
            "(state_dict, full_grad, ...): a rank that ended, failed or did another thing leaves the rest waiting. "
            f"torch.distributed says: {error}"
        ) from error


def first_difference(signatures: Sequence[Sequence[Any]]) -> str | None:
    """Describe the first place where a rank's signature (a list of JSON values) differs from rank 0's, or return None."""
    reference = signatures[0]
    for rank, signature in enumerate(signatures[1:], start=1):
        for index in range(max(len(reference), len(signature))):
            a = reference[index] if index < len(reference) else "nothing"
            b = signature[index] if index < len(signature) else "nothing"
            if a != b:
                return f"entry {index} is {b} on rank {rank} but {a} on rank 0"
    return None
