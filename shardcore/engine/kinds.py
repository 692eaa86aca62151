"""How a bucket's states are kept: which flat tensors, and the way between them and what state dicts show.

The formulas are those of unsharded optimizers (shardcore.optim), on ranges of a flat buffer. Invariant: a range starts at a
256-element boundary and ends at one, or where its parameter does, so that no block of 8-bit moments is ever cut.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardcore.layout import BLOCK
from shardcore.optim import (
    MASTER_STORAGE,
    MASTERED_DTYPES,
    MOMENTS,
    SCALES,
    draws_random_bits,
    joined_master,
    moment_values,
    new_moments,
    split_remainder,
    stored_moment,
)

# (numel, dtype) -> a zero-filled flat tensor
Allocate = Callable[[int, torch.dtype], torch.Tensor]
Kept = dict[str, torch.Tensor]  # a bucket's states as they are kept, or a range of them


@dataclass(frozen=True)
class StateKind:
    """How states are kept, for weights of one dtype under the options of one group.

    master: "fp32", "split", or None where weights are their own. random: a step draws random bits, which are keyed by
    parameter and element.
    """

    master: str | None = None
    state_dtype: str = "fp32"
    amsgrad: bool = False
    random: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The states of each element, as state dicts name them."""
        return (*MOMENTS, *["max_exp_avg_sq"] * self.amsgrad, *["master"] * (self.master is not None))

    @property
    def reads_weights(self) -> bool:
        """Whether a step needs the weights themselves: they are the master, or half of it."""
        return self.master != "fp32"

    def new(self, numel: int, make: Allocate) -> Kept:
        """Return the states of `numel` elements that made no step yet."""
        kept = new_moments(torch.Size([numel]), self.state_dtype, lambda shape, dtype: make(shape.numel(), dtype))
        if self.amsgrad:
            kept["max_exp_avg_sq"] = make(numel, torch.float32)
        key, dtype = MASTER_STORAGE[self.master]
        if key is not None and dtype is not None:
            kept[key] = make(numel, dtype)
        return kept

    def nbytes(self, numel: int) -> int:
        """Return the bytes that the states of `numel` elements take."""
        kept = self.new(numel, lambda n, dtype: torch.empty(n, dtype=dtype, device="meta"))
        return sum(flat.nbytes for flat in kept.values())


NO_STATES = StateKind()  # of buckets that no optimizer group updates: never asked for any


def kind_of(group: Mapping[str, Any], dtype: torch.dtype) -> StateKind:
    """Return how states of weights of `dtype` are kept by the options of `group`, which may be one of torch.optim.

    Sharded weights below float32 have float32 masters, unless the group asks for split ones, or for stochastic rounding,
    which takes the place of a master.
    """
    master = None
    if dtype in MASTERED_DTYPES and not group.get("stochastic_rounding", False):
        master = group.get("master") or "fp32"
    return StateKind(master, group.get("state_dtype", "fp32"), bool(group["amsgrad"]), draws_random_bits(group))


def range_of(kept: Kept, start: int, numel: int) -> Kept:
    """View the states of elements [start, start + numel)."""
    blocks = slice(start // BLOCK, -(-(start + numel) // BLOCK))
    return {key: flat[blocks if key in SCALES.values() else slice(start, start + numel)] for key, flat in kept.items()}


def values_of(kept: Kept, key: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a range of one state as a state dict shows it: live where kept so; `weight`: the same range of the weights."""
    return joined_master(weight, kept["remainder"]) if key == "master" and "remainder" in kept else moment_values(kept, key)


def kept_values(kind: StateKind, key: str, values: torch.Tensor) -> Kept:
    """Return what is to be copied to where a range of one state is kept, to keep `values` (any floating dtype)."""
    if key == "master" and kind.master == "split":
        return {"remainder": split_remainder(values.to(torch.float32), values.device)}
    if key in SCALES and kind.state_dtype == "8bit":
        return stored_moment(key, values, kind.state_dtype, values.device)[0]
    return {key: values}
