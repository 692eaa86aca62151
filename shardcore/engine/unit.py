"""A unit at run time: its buckets, and where its whole weights are in their coming and going (engine/weights.py)."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardcore.engine.bucket import Bucket


@dataclass(eq=False)
class Unit:
    """A unit at run time.

    stays: it is the root or holds other units, so it stays whole through a backward (engine/weights.py, Note [Letting go in
        backward]).
    open: its parameters have memory. held: how many `full_params` keep it so. guest: the id of the module inside, called on its
        own, for whose sake alone it is open; 0 for none.
    gathers: the collectives under way that nobody has waited for, None if there are none.
    kept: this rank's parts, one a bucket, of what a few ranks keep from forward to backward; None if nothing is kept.
    calls: how many backwards of it have begun and not ended. incomplete: its buckets whose gradients are not all there.
    began: the sequence number of autograd's next node when the forward under way began.
    """

    name: str
    buckets: list[Bucket]
    stays: bool
    held: int = 0
    gathers: list[Any] | None = None
    open: bool = False
    calls: int = 0
    incomplete: set[Bucket] = field(default_factory=set)
    kept: list[torch.Tensor] | None = None
    guest: int = 0
    began: int = 0

    @property
    def has_frozen(self) -> bool:
        """Whether some of its parameters are frozen."""
        return any(not bucket.trainable for bucket in self.buckets)


def callable_parts(model: nn.Module, unit: Unit, units: Sequence[Unit]) -> list[nn.Module]:
    """Return the modules inside a unit that holds others which use its weights and are in no other unit, but may be one.

    Only these make their unit whole when they are called on their own: hooks on every layer would cost time and would
    split what torch.compile makes of a block.
    """
    if not unit.stays:
        return []
    modules = {model.get_submodule(other.name) for other in units}
    own = {managed.param for bucket in unit.buckets for managed in bucket.params}
    return list(dict.fromkeys(_users_in(model.get_submodule(unit.name), own, modules)))


def _users_in(module: nn.Module, own: set[nn.Parameter], units: Collection[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if not own.isdisjoint(child.parameters()):
            yield child
            if child not in units:
                yield from _users_in(child, own, units)


@torch.no_grad()
def take_edits(unit: Unit) -> None:
    """Bring shards in line with weights that someone had the time to edit, through `.data` too, which no counter tells."""
    for bucket in unit.buckets:
        bucket.take_edits()
