"""Process groups that engines take one after the other, beside the one that the user gave, and what they run on."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist

from shardcore.neighbour_reads import Neighbours


@dataclass
class Place:
    """A process group that one engine at a time takes; `group` is None for the one that the user gave.

    neighbours: the ranks on it that read each other's memory, once they have met. in_backward: one has begun and not ended.
    broken: what was raised when a wait failed. spoiled: one did, or a backward was left, or ranks parted: messages that nobody
    took may lie there.
    """

    group: dist.ProcessGroup | None
    neighbours: Neighbours | None = None
    met: bool = False
    taken: bool = False
    in_backward: bool = False
    broken: str = ""
    spoiled: bool = False

    def release(self) -> None:
        """Leave it to the next engine, unless what this one left there would meet that one's messages."""
        self.taken = self.in_backward or self.spoiled


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend for each kind of device. (init_process_group() without a name chooses one that get_backend hides.)"""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


# The groups made beside each user's group, in the same order on every rank.
_places: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[Place]]" = weakref.WeakKeyDictionary()


def places_of(group: dist.ProcessGroup) -> list[Place]:
    """Return the places beside the user's `group`, which comes first; new ones are added to this list."""
    return _places.setdefault(group, [Place(None)])


def taken_places() -> Iterator[Place]:
    """Iterate over all that engines have taken."""
    return (place for places in _places.values() for place in places if place.taken)
