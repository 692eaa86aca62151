"""Dicts that stand in for others while weights are on their way: who reads weights through them waits first.

They delegate to the dict that they stand for, which is put back when the weights are there; what was read meanwhile, and the
dict itself, stay good. Their own content, which C code may look at, is that of the other dict when they were made.
"""

from collections.abc import Callable, Iterator
from typing import Any


class Waiting(dict[str, Any]):
    """`module._parameters` while some of them are on their way: what reads or changes it waits first."""

    def __init__(self, own: dict[str, Any], wait: Callable[[], None]) -> None:
        """Stand in for `own` until `wait` returns, which puts `own` back."""
        super().__init__(own)
        self.own, self._wait = own, wait

    def __iter__(self) -> Iterator[str]:
        """Tell names, without a wait. (Were it dict's own, dict(waiting) would call no method at all.)"""
        return iter(self.own)

    def now(self) -> dict[str, Any]:
        """Wait; returns what this stands for."""
        self._wait()
        return self.own

    def __reduce__(self) -> tuple[Any, ...]:
        """Wait, and be copied as what this stands for."""
        return dict, (self.now(),)


def _waits(name: str) -> Callable[..., Any]:
    return lambda self, *arguments, **options: getattr(self.now(), name)(*arguments, **options)


# All methods of dict but those that tell names only.
for _name in ("__getitem__", "__setitem__", "__delitem__", "__eq__", "__or__", "__ror__", "__ior__", "__repr__"):
    setattr(Waiting, _name, _waits(_name))
for _name in ("get", "items", "values", "copy", "pop", "popitem", "setdefault", "update", "clear"):
    setattr(Waiting, _name, _waits(_name))


class WaitingGroup(Waiting):
    """An entry of `optimizer.param_groups` in that time: who reads "params", or all values, waits.

    Options are read, written and added without a wait, as schedulers do after each step; the step has its own copy of them.
    """


def _waits_for_params(name: str) -> Callable[..., Any]:
    def method(self: WaitingGroup, key: str, *arguments: Any) -> Any:
        return getattr(self.now() if key == "params" else self.own, name)(key, *arguments)

    return method


for _name in ("__getitem__", "__setitem__", "get", "setdefault"):
    setattr(WaitingGroup, _name, _waits_for_params(_name))
for _name in ("__contains__", "__len__", "keys"):  # of options that were added meanwhile, too
    setattr(WaitingGroup, _name, lambda self, *arguments, name=_name: getattr(self.own, name)(*arguments))
