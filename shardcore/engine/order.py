"""What hooks ask about a pass over a model: the order in which units are used, whether it is a backward, and which tensors go
in and come out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils import _pytree as pytree

T = TypeVar("T")


class Order(Generic[T]):
    """The order in which units are used in one kind of pass: learned in one, expected in the next."""

    def __init__(self) -> None:
        self._known: list[T] = []
        self._uses: list[T] | None = None
        self._on_track = False

    def begin(self) -> None:
        """Begin a pass."""
        self._uses, self._on_track = [], True

    def use(self, unit: T) -> None:
        """Note a use; several in a row count as one."""
        if self._uses is not None and (not self._uses or self._uses[-1] is not unit):
            self._on_track &= len(self._uses) < len(self._known) and self._known[len(self._uses)] is unit
            self._uses.append(unit)

    @property
    def now(self) -> list[T]:
        """The units used so far in this pass."""
        return self._uses or []

    @property
    def next(self) -> T | None:
        """The unit after the one used last, or None if that was the last one or is not known."""
        if self._uses is None or not self._on_track or len(self._uses) == len(self._known):
            return None
        return self._known[len(self._uses)]

    def is_last(self, unit: T) -> bool:
        """Whether the pass, known as it is, ends with the use of `unit` that was just noted."""
        return self._uses is not None and self._on_track and len(self._uses) == len(self._known) and self._known[-1] is unit

    def end(self) -> None:
        """End the pass: the next one is expected to be like it."""
        if self._uses is not None:
            self._known, self._uses = self._uses, None


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module takes or returns: nested sequences, mappings, dataclasses, and what pytree knows."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors_in(getattr(value, entry.name, None))
    else:
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
