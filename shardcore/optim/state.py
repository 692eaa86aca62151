"""The state of one parameter: torch's keys, with a step count that many parameters share.

Invariants: inside a ParamState the key "step" has a StepCount, which readers never see: every way
to read it makes a new tensor, as torch.optim has it (step_tensor). Parameters with equal counts
share one StepCount, so that a step over 100,000 tensors increments one integer; in a capturable
optimizer each has a DeviceStepCount. The other keys hold tensors on the parameter's device, with
its strides: exp_avg and exp_avg_sq of its shape (float32, bfloat16, or int8 and uint8 codes with
float32 exp_avg_scale and exp_avg_sq_scale, one for 256 elements), max_exp_avg_sq (float32), and
either master (float32) or remainder (int16).
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Self

import torch

from shardcore.optim.group_options import dtype_name, number
from shardcore.optim.state_format import zeros
from shardcore.torch_private import is_traceable_wrapper_subclass

# As state dicts have them (shardcore.optim.state_format: what else a state may keep).
TENSOR_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")


MAX_STEP = 2**53  # a float64 counts one by one up to here,
_MAX_FLOAT32_STEP = 2**24  # and a float32 to here


def step_tensor(count: int) -> torch.Tensor:
    """Return a step count as torch.optim keeps it: a new tensor of shape () on the CPU, float32,
    or float64 above 2**24.
    """
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
    """The same for one parameter of a capturable optimizer: in device memory, where a replayed
    graph increments it.

    Not shared: a graph counts the parameters that it was captured with, whatever other steps run in
    between.
    """

    __slots__ = ("counter",)

    def __init__(self, counter: torch.Tensor) -> None:
        self.counter = counter  # int64 of shape ()

    @property
    def value(self) -> int:
        """The count; synchronizes with the device."""
        return int(self.counter.item())

    def tensor(self) -> torch.Tensor:
        """Return the count as torch.optim.Adam(capturable=True) keeps it: a new float32 tensor
        of shape () on the device.
        """
        return self.counter.to(torch.float32)


_COUNTS = (StepCount, DeviceStepCount)


def _readable(value: Any) -> Any:
    return value.tensor() if isinstance(value, _COUNTS) else value


def step_count(op: str, name: str, value: object) -> int:
    """Return a step count given as a number or as a tensor of one element; ValueError if it is
    not a whole number >= 0.
    """
    x = number(op, name, value)
    if not (0 <= x <= MAX_STEP and x == int(x)):
        raise ValueError(
            f"{op}: {name} is {x}; expected a whole number of at least 0, and at most 2**53"
        )
    return int(x)


class ParamState(dict[str, Any]):
    """A parameter's state. Reading "step" gives a new tensor; writing it takes a number or a tensor
    of one element.

    It is no plain dict, because "step" has to be made on read: a tensor that is there would have
    to be written for each parameter in each step. ``copy()``, ``dict(state)`` and ``state | other``
    give plain dicts. ``deepcopy`` and ``pickle`` give ParamStates that share counts as these do.
    """

    __slots__ = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.update(*args, **kwargs)

    @property
    def count(self) -> "StepCount | DeviceStepCount":
        """The count itself, shared with other parameters. Raises KeyError when the state is
        empty.
        """
        count: StepCount | DeviceStepCount = dict.__getitem__(self, "step")
        return count

    @count.setter
    def count(self, count: "StepCount | DeviceStepCount") -> None:
        super().__setitem__("step", count)

    def stored(self, key: str) -> Any:
        """Return the tensor at a key other than "step", or None. Steps use this, as it is fast."""
        return dict.get(self, key)

    def __getitem__(self, key: str) -> Any:
        return _readable(super().__getitem__(key))

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "step" and not isinstance(value, _COUNTS):
            value = StepCount(step_count("state", "step", value))
        super().__setitem__(key, value)

    # dict(state) and {**state} read through keys() and [] only when __iter__ is not dict's own.
    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def pop(self, *args: Any) -> Any:
        return _readable(super().pop(*args))

    def popitem(self) -> tuple[str, Any]:
        key, value = super().popitem()
        return key, _readable(value)

    # By way of [].
    get = Mapping.get  # type: ignore[assignment]
    items = Mapping.items  # type: ignore[assignment]
    values = Mapping.values  # type: ignore[assignment]
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update

    def copy(self) -> dict[str, Any]:
        return {key: self[key] for key in self}

    __copy__ = copy

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    def __ne__(self, other: object) -> bool:
        return self.copy() != other

    __hash__ = None

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> Self:  # type: ignore[override]
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce__(self) -> tuple[Any, ...]:
        return ParamState, (), None, None, iter(dict.items(self))


def new_state(param: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
    """Return a new float32 tensor of param's shape and strides on param's device: zeros, or a
    copy of source.
    """
    state = zeros(param.shape, torch.float32, param.device, param)
    if source is not None:
        state.copy_(source.detach())
    return state


def check_tensor(op: str, name: str, value: object, shape: torch.Size) -> torch.Tensor:
    """Return value as a tensor that may become a float32 state of this shape, or raise TypeError
    or ValueError.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} is of type {type(value).__name__}; expected a tensor")
    if not value.is_floating_point():
        raise TypeError(
            f"{op}: {name} has dtype {dtype_name(value.dtype)}; expected a floating dtype"
        )
    if value.layout is not torch.strided:
        raise ValueError(f"{op}: {name} has layout {value.layout}; expected a dense tensor")
    if is_traceable_wrapper_subclass(value):
        raise TypeError(
            f"{op}: {name} is of type {type(value).__name__}; expected a plain tensor, as its "
            "parameter"
        )
    if value.is_meta or not has_memory(value):
        raise ValueError(
            f"{op}: {name} has no memory (device {value.device}); expected values to read"
        )
    if value.shape != shape:
        raise ValueError(
            f"{op}: {name} has shape {tuple(value.shape)}; expected {tuple(shape)}, as its "
            "parameter"
        )
    return value


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage holds every element (one that was released, or resized, does not)."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
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
    counts = iter(
        torch.tensor([count.value for count in on_host], dtype=torch.int64, device=device).unbind()
    )
    return [
        state.count if isinstance(state.count, DeviceStepCount) else DeviceStepCount(next(counts))
        for state in states
    ]
