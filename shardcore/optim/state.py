"""The state of one parameter: torch's keys, with a step count that many parameters share.

Invariants: inside a ParamState the key "step" holds a StepCount, which no reader ever sees: every way to read it makes a
fresh tensor, as torch.optim keeps it (step_tensor). Parameters with equal counts share one StepCount, so that a step over
100,000 tensors moves one integer; only in a capturable optimizer has each a DeviceStepCount. The other keys hold tensors on
the parameter's device, with its strides: exp_avg and exp_avg_sq of its shape (float32, bfloat16, or int8 and uint8 codes with
float32 exp_avg_scale and exp_avg_sq_scale, one for 256 elements), max_exp_avg_sq (float32), and either master (float32) or
remainder (int16).
"""

import weakref
from collections import defaultdict
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardcore.optim.options import dtype_name, number
from shardcore.optim.state_format import zeros

# As state dicts have them (shardcore.optim.state_format: what else a state may keep).
TENSOR_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")


MAX_STEP = 2**53  # a float64 counts one by one up to here,
_MAX_FLOAT32_STEP = 2**24  # and a float32 to here


class Changes:
    """Counts every change of which tensors any optimizer's states hold, so that a step can tell that there was none.

    Who keeps such tensors (``keep``) is told of the next change, to ``forget()`` them: states that are moved or dropped between
    steps must free their memory then.
    """

    count = 0
    _keepers: ClassVar[set[weakref.ref[Any]]] = set()

    @classmethod
    def keep(cls, keeper: Any) -> None:
        cls._keepers.add(weakref.ref(keeper, cls._keepers.discard))

    @classmethod
    def note(cls) -> None:
        cls.count += 1
        if cls._keepers:
            for keeper in [ref() for ref in list(cls._keepers)]:
                if keeper is not None:
                    keeper.forget()
            cls._keepers.clear()


class States(defaultdict[torch.Tensor, Any]):
    """``optimizer.state``: a defaultdict of ParamState that counts its changes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(ParamState, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return States, (), None, None, iter(self.items())

    def __setitem__(self, key: torch.Tensor, value: Any) -> None:
        Changes.note()
        super().__setitem__(key, value)

    def __delitem__(self, key: torch.Tensor) -> None:
        Changes.note()
        super().__delitem__(key)

    def pop(self, *args: Any) -> Any:
        Changes.note()
        return super().pop(*args)

    def popitem(self) -> tuple[torch.Tensor, Any]:
        Changes.note()
        return super().popitem()

    def clear(self) -> None:
        Changes.note()
        super().clear()

    def update(self, *args: Any, **kwargs: Any) -> None:
        Changes.note()
        super().update(*args, **kwargs)

    def __ior__(self, other: Any) -> "States":  # type: ignore[override, misc]
        Changes.note()
        super().update(other)
        return self


def step_tensor(count: int) -> torch.Tensor:
    """Return a step count as torch.optim keeps it: a new tensor of shape () on the CPU, float32, or float64 above 2**24."""
    dtype = torch.float32 if count <= _MAX_FLOAT32_STEP else torch.float64
    return torch.tensor(float(count), dtype=dtype, device="cpu")


class StepCount:
    """How many steps the parameters that share this object have made."""

    __slots__ = ("value",)

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def tensor(self) -> torch.Tensor:
        """Return the count as torch.optim keeps it. See step_tensor."""
        return step_tensor(self.value)


class DeviceStepCount:
    """The same for one parameter of a capturable optimizer: in device memory, where a replayed graph moves it on.

    Not shared: a graph goes on counting the parameters that it was captured with, whatever other steps do meanwhile.
    """

    __slots__ = ("counter",)

    def __init__(self, counter: torch.Tensor) -> None:
        self.counter = counter  # int64 of shape ()

    @property
    def value(self) -> int:
        """The count; waits for the device."""
        return int(self.counter.item())

    def tensor(self) -> torch.Tensor:
        """Return the count as torch.optim.Adam(capturable=True) keeps it: a new float32 tensor of shape () on the device."""
        return self.counter.to(torch.float32)


_COUNTS = (StepCount, DeviceStepCount)


def step_count(op: str, name: str, value: object) -> int:
    """Return a step count given as a number or as a tensor of one element; ValueError if it is not a whole number >= 0."""
    x = number(op, name, value)
    if not (0 <= x <= MAX_STEP and x == int(x)):
        raise ValueError(f"{op}: {name} has {x}; expected a whole number of at least 0, and at most 2**53")
    return int(x)


class ParamState(dict[str, Any]):
    """A parameter's state. Reading "step" gives a new tensor; writing it takes a number or a tensor of one element.

    ``copy()``, ``dict(state)`` and ``state | other`` give plain dicts; ``deepcopy`` and ``pickle`` keep the kind, and keep
    counts shared within one call.
    """

    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    @property
    def count(self) -> StepCount | DeviceStepCount:
        """The count itself, shared with other parameters. Raises KeyError when the state is empty."""
        count: StepCount | DeviceStepCount = super().__getitem__("step")
        return count

    @count.setter
    def count(self, count: StepCount | DeviceStepCount) -> None:
        Changes.note()
        super().__setitem__("step", count)

    def moment(self, key: str) -> torch.Tensor:
        """Return the tensor at "exp_avg" or "exp_avg_sq": the short way that a step takes."""
        tensor: torch.Tensor = super().__getitem__(key)
        return tensor

    def extra(self, key: str) -> torch.Tensor | None:
        """Return the tensor at another key, or None if there is none yet."""
        tensor: torch.Tensor | None = super().get(key)
        return tensor

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return value.tensor() if isinstance(value, _COUNTS) else value

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "step" and not isinstance(value, _COUNTS):
            value = StepCount(step_count("state", "step", value))
        Changes.note()
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        Changes.note()
        super().__delitem__(key)

    def clear(self) -> None:
        Changes.note()
        super().clear()

    # dict(state) and {**state} read through keys() and [] only when __iter__ is not dict's own.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return self.copy().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return self.copy().values()

    def copy(self) -> dict[str, Any]:
        return {key: self[key] for key in self}

    __copy__ = copy

    def pop(self, key: str, *default: Any) -> Any:
        Changes.note()
        value = super().pop(key, *default)
        return value.tensor() if isinstance(value, _COUNTS) else value

    def popitem(self) -> tuple[str, Any]:
        key = next(reversed(self))
        return key, self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {**other, **self}

    def __ior__(self, other: Any) -> "ParamState":  # type: ignore[override, misc]
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (), None, None, iter([(key, super(ParamState, self).__getitem__(key)) for key in self])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()


def _rebuild() -> ParamState:
    return ParamState()


def new_state(param: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
    """Return a new float32 tensor of param's shape and strides on param's device: zeros, or a copy of source."""
    state = zeros(param.shape, torch.float32, param.device, param)
    if source is not None:
        state.copy_(source.detach())
    return state


def check_tensor(op: str, name: str, value: object, shape: torch.Size) -> torch.Tensor:
    """Return value as a tensor that may become a float32 state of this shape, or raise TypeError or ValueError."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} has type {type(value).__name__}; expected a tensor")
    if not value.is_floating_point():
        raise TypeError(f"{op}: {name} has dtype {dtype_name(value.dtype)}; expected a floating dtype")
    if value.layout is not torch.strided:
        raise ValueError(f"{op}: {name} has layout {value.layout}; expected a dense tensor")
    if is_traceable_wrapper_subclass(value):
        raise TypeError(f"{op}: {name} has type {type(value).__name__}; expected a plain tensor, as its parameter is one")
    if value.is_meta or not has_memory(value):
        raise ValueError(f"{op}: {name} has no memory (device {value.device}); expected values to read")
    if value.shape != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(value.shape)}; expected {tuple(shape)}, the parameter's")
    return value


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage holds every element (one that was released, or resized, does not)."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end_bytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() >= end_bytes


def share_counts(states: Iterable[ParamState]) -> None:
    """Make states with equal counts share one StepCount."""
    shared: dict[int, StepCount | DeviceStepCount] = {}
    for state in states:
        state.count = shared.setdefault(state.count.value, state.count)


def device_counts(states: Sequence[ParamState], device: torch.device) -> list[DeviceStepCount]:
    """Return a count on the device for each state: its own, or a new one of the same value."""
    on_host = [state.count for state in states if isinstance(state.count, StepCount)]
    if not on_host:
        return [state.count for state in states if isinstance(state.count, DeviceStepCount)]
    made = iter(torch.tensor([count.value for count in on_host], dtype=torch.int64, device=device).unbind())
    return [state.count if isinstance(state.count, DeviceStepCount) else DeviceStepCount(next(made)) for state in states]
