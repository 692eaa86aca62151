"""How optimizer states are stored, sharded or not: dtypes, masters, and blocks of 8-bit codes.

State dicts have them in torch.optim's form: float32 values in place of codes, and a float32 master
in place of a remainder and its weight. Both conversions are exact: loading an exported state gives
the same stored values.

Invariant of sharded states: a range of a flat buffer starts at a 256-element boundary and ends at
one, or at the end of its parameter, so that no block of 8-bit moments is ever cut.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardcore._native import _C
from shardcore.layout import BLOCK
from shardcore.optim.group_options import MASTERED_DTYPES, draws_random_bits

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = {"exp_avg": "exp_avg_scale", "exp_avg_sq": "exp_avg_sq_scale"}

# What is kept beside a weight for the option "master": its key and dtype.
MASTER_STORAGE: Mapping[str | None, tuple[str | None, torch.dtype | None]] = {
    None: (None, None),
    "fp32": ("master", torch.float32),
    "split": ("remainder", torch.int16),
}

# CPU states of this size or more ask for huge pages; smaller ones would waste the rest of their
# last page.
_HUGE_STATE_BYTES = 4 << 20


# What the option "state_dtype" stores moments as; 8-bit codes have scales beside them.
MOMENT_DTYPES = {
    "fp32": {"exp_avg": torch.float32, "exp_avg_sq": torch.float32},
    "bf16": {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16},
    "8bit": {"exp_avg": torch.int8, "exp_avg_sq": torch.uint8},
}


def zeros(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, like: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a zero-filled state; large ones on the CPU ask for huge pages.

    like: of this shape; if it is dense its strides are the state's (kernels read both in memory
    order).
    """
    numel = shape.numel()
    if device.type == "cpu" and numel * dtype.itemsize >= _HUGE_STATE_BYTES:
        state = _C.empty_huge(numel, dtype).view(shape)
    else:
        state = torch.zeros(shape, dtype=dtype, device=device)
    if like is None or like.is_contiguous() or not _C.is_dense(like):
        return state
    return state.as_strided(shape, like.stride())


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """View the elements of a dense tensor in memory order: (n,)."""
    return tensor.as_strided((tensor.numel(),), (1,))


def new_moments(
    shape: torch.Size, state_dtype: str, make: Callable[[torch.Size, torch.dtype], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the moments of a parameter of this shape before its first step; `make` returns
    zero-filled tensors.
    """
    moments = {key: make(shape, dtype) for key, dtype in MOMENT_DTYPES[state_dtype].items()}
    if state_dtype == "8bit":
        blocks = torch.Size([-(-shape.numel() // BLOCK)])
        moments |= {SCALES[key]: make(blocks, torch.float32) for key in MOMENTS}
    return moments


def moment_values(state: Mapping[str, Any], key: str) -> torch.Tensor:
    """Return a moment as a state dict has it: the live tensor, or the float32 values of 8-bit
    codes.
    """
    stored: torch.Tensor = state[key]
    if key not in SCALES or SCALES[key] not in state:
        return stored
    scales = state[SCALES[key]]
    return (
        _C.decode_moment(stored.reshape(-1).cpu(), scales.cpu())
        .view(stored.shape)
        .to(stored.device)
    )


def stored_moment(
    key: str,
    values: torch.Tensor,
    state_dtype: str,
    device: torch.device,
    like: torch.Tensor | None = None,
) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the stored form of a moment with these values (any floating dtype), and whether every
    value is stored exactly.

    like: lends its strides (zeros), but not to 8-bit codes.
    """
    dtype, values = MOMENT_DTYPES[state_dtype][key], values.detach()
    if state_dtype != "8bit":
        stored = zeros(values.shape, dtype, device, like)
        stored.copy_(values)
        return {key: stored}, dtype == values.dtype or bool(
            (stored.to(values.dtype) == values.to(device)).all()
        )
    flat = values.to("cpu", torch.float32).contiguous().view(-1)
    codes, scales = _C.encode_moment(flat, dtype)
    exact = torch.equal(_C.decode_moment(codes, scales), flat)
    stored, stored_scales = (
        zeros(values.shape, dtype, device),
        zeros(scales.shape, torch.float32, device),
    )
    stored.view(-1).copy_(codes)
    stored_scales.copy_(scales)
    return {key: stored, SCALES[key]: stored_scales}, exact


def joined_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the float32 master that a bfloat16 parameter and its remainder make."""
    flat = _C.join_split(param.detach().reshape(-1).cpu(), remainder.reshape(-1).cpu())
    return flat.view(param.shape).to(param.device)


def split_remainder(
    master: torch.Tensor, device: torch.device, like: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the remainder of a float32 master; its weight is the master rounded to nearest. like:
    lends its strides (zeros).
    """
    remainder = zeros(master.shape, torch.int16, device, like)
    remainder.copy_(
        _C.split_master(master.detach().cpu().contiguous().view(-1))[1].view(master.shape)
    )
    return remainder


# (numel, dtype) -> a zero-filled flat tensor
Allocate = Callable[[int, torch.dtype], torch.Tensor]
StateTensors = dict[str, torch.Tensor]  # a bucket's states as they are kept, or a range of them


@dataclass(frozen=True)
class StateFormat:
    """The storage of states, for weights of one dtype and the options of one group.

    master: "fp32", "split", or None if weights have no master. random: a step draws random bits,
    which are keyed by parameter and element.
    """

    master: str | None = None
    state_dtype: str = "fp32"
    amsgrad: bool = False
    random: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The states of each element, as state dicts name them."""
        return (
            *MOMENTS,
            *["max_exp_avg_sq"] * self.amsgrad,
            *["master"] * (self.master is not None),
        )

    @property
    def reads_weights(self) -> bool:
        """Whether a step needs the weights themselves: they are the master, or half of it."""
        return self.master != "fp32"

    def new(self, numel: int, make: Allocate) -> StateTensors:
        """Return the states of `numel` elements that made no step yet."""
        states = new_moments(
            torch.Size([numel]), self.state_dtype, lambda shape, dtype: make(shape.numel(), dtype)
        )
        if self.amsgrad:
            states["max_exp_avg_sq"] = make(numel, torch.float32)
        key, dtype = MASTER_STORAGE[self.master]
        if key is not None and dtype is not None:
            states[key] = make(numel, dtype)
        return states

    def _on_meta(self, numel: int) -> StateTensors:
        return self.new(numel, lambda n, dtype: torch.empty(n, dtype=dtype, device="meta"))

    def nbytes(self, numel: int) -> int:
        """Return the bytes that the states of `numel` elements take."""
        return sum(flat.nbytes for flat in self._on_meta(numel).values())

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of each stored tensor; the keys are those of `new`."""
        return {key: flat.dtype for key, flat in self._on_meta(0).items()}


NO_STATES = StateFormat()  # of buckets that no optimizer group updates; never used


def format_of(group: Mapping[str, Any], dtype: torch.dtype) -> StateFormat:
    """Return the format of states of weights of `dtype`, by the options of `group`, which may be
    one of torch.optim.

    Sharded weights below float32 have float32 masters, unless the group asks for split ones, or for
    stochastic rounding, which takes the place of a master.
    """
    master = None
    if dtype in MASTERED_DTYPES and not group.get("stochastic_rounding", False):
        master = group.get("master") or "fp32"
    return StateFormat(
        master, group.get("state_dtype", "fp32"), bool(group["amsgrad"]), draws_random_bits(group)
    )


def range_of(states: StateTensors, start: int, numel: int) -> StateTensors:
    """View the states of elements [start, start + numel)."""
    blocks = slice(start // BLOCK, -(-(start + numel) // BLOCK))
    return {
        key: flat[blocks if key in SCALES.values() else slice(start, start + numel)]
        for key, flat in states.items()
    }


def values_of(states: StateTensors, key: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a range of one state as a state dict has it, live if it is stored so; `weight`: the
    same range of the weights.
    """
    return (
        joined_master(weight, states["remainder"])
        if key == "master" and "remainder" in states
        else moment_values(states, key)
    )


def stored_values(state_format: StateFormat, key: str, values: torch.Tensor) -> StateTensors:
    """Return the stored tensors of one state's range with these `values` (any floating dtype); the
    caller copies them into place.
    """
    if key == "master" and state_format.master == "split":
        return {"remainder": split_remainder(values.to(torch.float32), values.device)}
    if key in SCALES and state_format.state_dtype == "8bit":
        return stored_moment(key, values, state_format.state_dtype, values.device)[0]
    return {key: values}
