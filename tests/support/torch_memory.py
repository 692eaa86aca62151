"""The peak of torch's CPU memory in a block of code, counted from each of its allocations."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from shardcore.distributed.comm import Comm

_broadcast = Comm.broadcast


@dataclass
class Memory:
    """Bytes that the block has taken: the most at one time, and those that are left at its end."""

    peak: int = 0
    kept: int = 0


def _broadcast_aside(comm: Comm, tensor: torch.Tensor, *args: Any) -> None:
    """Comm.broadcast of memory that is not torch's: gloo's threads may be the last to release the
    tensors they were given, and the profiler sees only this thread's frees.
    """
    aside = torch.frombuffer(
        bytearray(tensor.numel() * tensor.itemsize), dtype=tensor.dtype
    ).view_as(tensor)
    _broadcast(comm, aside.copy_(tensor), *args)
    tensor.copy_(aside)


@contextmanager
def recorded_memory() -> Iterator[Memory]:
    """Record a block, whose amounts are known after it."""
    gc.collect()  # else memory of earlier models comes back in between
    memory = Memory()
    with (
        pytest.MonkeyPatch.context() as patch,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
    ):
        patch.setattr(Comm, "broadcast", _broadcast_aside)
        yield memory
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        memory.kept += event.nbytes()
        memory.peak = max(memory.peak, memory.kept)
