"""Flat buffers: their allocation, and the pool that many buckets share."""

from collections.abc import Callable

import torch

from shardcore._native import _C
from shardcore.telling import as_bytes

_HUGE_BYTES = 1 << 21


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zero-filled flat tensor; large ones on the CPU ask for huge pages."""
    if device.type == "cpu" and numel * dtype.itemsize >= _HUGE_BYTES:
        return _C.empty_huge(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=device)


class BufferPool:
    """Lends a few buffers to many buckets, whatever their sizes, and counts what exists.

    A buffer is lent to whoever fits in; where none is large enough, the largest free one makes room for a larger one. So
    there are as many as are in use at once, and none is larger than the largest use.
    """

    def __init__(self, device: torch.device, dropped: Callable[[torch.Tensor], None] = lambda memory: None) -> None:
        """Make an empty pool of buffers on `device`. `dropped` is told of memory that is given up: views keep it alive."""
        self.device, self._dropped = device, dropped
        self._free: list[torch.Tensor] = []  # bytes
        self._lent: dict[int, torch.Tensor] = {}  # the whole memory, by storage (on meta there are no addresses)
        self.allocated_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer (numel,) with undefined content, for a short time."""
        size = numel * dtype.itemsize
        fitting = [(memory.numel(), index) for index, memory in enumerate(self._free) if memory.numel() >= size]
        if fitting:
            memory = self._free.pop(min(fitting)[1])
        else:
            if self._free:
                self._drop(max((memory.numel(), index) for index, memory in enumerate(self._free))[1])
            memory = as_bytes(self.keep(numel, dtype))
        if size:
            self._lent[memory.untyped_storage()._cdata] = memory
        return memory[:size].view(dtype)

    def keep(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of exactly this size with undefined content, for a long time; it may be given to the pool later."""
        for index, memory in enumerate(self._free):
            if memory.numel() == numel * dtype.itemsize:
                return self._free.pop(index).view(dtype)
        self.allocated_bytes += numel * dtype.itemsize
        return allocate(numel, dtype, self.device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; the caller must not touch it again."""
        if buffer.numel():
            self._free.append(self._lent.pop(buffer.untyped_storage()._cdata, as_bytes(buffer)))

    def shrink(self, limit_bytes: int) -> None:
        """Give up free buffers while there are more than `limit_bytes` in all."""
        while self._free and self.allocated_bytes > limit_bytes:
            self._drop(-1)

    def _drop(self, index: int) -> None:
        memory = self._free.pop(index)
        self.allocated_bytes -= memory.numel()
        self._dropped(memory)
