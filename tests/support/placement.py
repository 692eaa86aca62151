"""What tests of "the same bits wherever it runs" share: the places, tensors moved there, and bits
to compare.

A place is compared with the CPU's default instruction set. Besides CUDA (marked gpu) there is a
place that every machine has, the CPU's plainest instruction set, so that these tests run, and can
fail, without a GPU too.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from shardcore._native import _C

PLACES = [pytest.param("plainest CPU"), pytest.param("cuda", marks=pytest.mark.gpu)]
each_place = pytest.mark.parametrize("place", PLACES)


def device_of(place: str) -> torch.device:
    return torch.device("cuda" if place == "cuda" else "cpu")


@contextmanager
def running_at(place: str) -> Iterator[None]:
    """Within it CPU kernels use the place's instruction set."""
    if place == "cuda":
        yield
        return
    before = _C.cpu_isa()
    _C.set_cpu_isa(_C.cpu_isas()[-1])
    try:
        yield
    finally:
        _C.set_cpu_isa(before)


def storage_of(t: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor: what lies before and behind it too."""
    return torch.tensor([], dtype=t.dtype, device=t.device).set_(t.detach().untyped_storage())


def moved(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a one-dimensional tensor and of what lies around it in its storage, so with its
    misalignment.
    """
    storage = storage_of(t).to(device, copy=True)
    return storage[t.storage_offset() : t.storage_offset() + t.numel()]


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor's whole storage as integers on the CPU; every NaN is one and the
    same.
    """
    whole = storage_of(t).cpu()
    if whole.is_floating_point():
        whole = torch.where(whole.isnan(), torch.tensor(float("nan"), dtype=whole.dtype), whole)
    return whole.view(INTEGERS[whole.dtype.itemsize])


@dataclass(frozen=True)
class Difference:
    """Where two lists of tensors first differ."""

    tensor: int
    element: int


def first_difference(
    ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]
) -> Difference | None:
    """Compare storages bit by bit; None if they are equal."""
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        x, y = bits(a), bits(b)
        if x.shape != y.shape or x.dtype != y.dtype:
            return Difference(number, -1)
        if not torch.equal(x, y):
            return Difference(number, int((x != y).nonzero()[0]))
    return None
