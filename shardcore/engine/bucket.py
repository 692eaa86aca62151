"""The run-time form of a unit: flat buffers that its parameters are views into.

A unit has one bucket for each (dtype, optimizer group). Every rank keeps the bucket's whole weights; what else it keeps, and
for how long, is the lifetimes table (`Lifetimes`), the only place where ZeRO stages differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from shardcore._native import _C
from shardcore.layout import FlatLayout, Piece

_HUGE_BYTES = 1 << 21


@dataclass(frozen=True)
class Lifetimes:
    """What a stage keeps (see docs/architecture.md, Lifetimes).

    owns_everything: the reduced gradient, master and states cover the whole bucket, not only the rank's shard.
    full_grad_resident: the whole local gradient stays allocated between steps instead of only until it is reduced.
    """

    owns_everything: bool
    full_grad_resident: bool


LIFETIMES = {
    0: Lifetimes(owns_everything=True, full_grad_resident=True),
    1: Lifetimes(owns_everything=False, full_grad_resident=True),
    2: Lifetimes(owns_everything=False, full_grad_resident=False),
}


@dataclass(eq=False)
class Managed:
    """One parameter of the model under the engine, with what must be remembered about it between backward and step.

    used: this rank contributed to its gradient since the last reduction. has_grad: some rank did since zero_grad.
    step: how many updates it has had. grad_view: what stage 0 handed out as `param.grad`.
    address, version: where the parameter's data lies, and its version counter when the engine last knew its value (in-place
    edits by the user move it).
    """

    name: str
    param: nn.Parameter
    index: int
    group: int | None
    offset: int = 0
    used: bool = False
    has_grad: bool = False
    step: int = 0
    grad_view: torch.Tensor | None = None
    address: int = 0
    version: int = 0

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """View this parameter's slot of a whole-bucket buffer in the parameter's shape."""
        return flat[self.offset : self.offset + self.param.numel()].view(self.param.shape)


class Bucket:
    """The parameters of one unit with one dtype and one optimizer group, and their buffers.

    weight: (layout.numel,) in `dtype`, whole on every rank; the parameters are views into it.
    grad: (owned_numel,), the reduced gradient of the owned range, averaged over ranks; meaningful while `reduced`.
    sq_norm: its squared norm (high, low) over this rank's shard.
    wire: (layout.numel,), the local gradient while it is collected: in `dtype`, or float32 sums over micro-steps.
    resident: the wire buffers that stay allocated (Lifetimes.full_grad_resident), by dtype.
    """

    def __init__(
        self,
        unit: str,
        dtype: torch.dtype,
        group: int | None,
        params: list[Managed],
        layout: FlatLayout,
        owned: tuple[int, int],
    ) -> None:
        """Describe the bucket; `owned` is the range of the whole buffer that this rank updates."""
        self.unit, self.dtype, self.group, self.params, self.layout, self.owned = unit, dtype, group, params, layout, owned
        for managed, slot in zip(params, layout.slots, strict=True):
            managed.offset = slot.offset
        self.pieces: tuple[Piece, ...] = layout.pieces(*owned)
        self._gaps = tuple(layout.gaps())
        self._views: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.weight = torch.empty(0)
        self.grad: torch.Tensor | None = None
        self.wire: torch.Tensor | None = None
        self.resident: dict[torch.dtype, torch.Tensor] = {}
        self.reduced = False
        self.sq_norm = torch.zeros(2, dtype=torch.float64)

    @property
    def owned_numel(self) -> int:
        """Length of the owned range in elements, padding included."""
        return self.owned[1] - self.owned[0]

    @property
    def needs_master(self) -> bool:
        """Whether the weights are of lower precision than the float32 that is optimized."""
        return self.group is not None and self.dtype != torch.float32

    def owned_slice(self, whole: torch.Tensor) -> torch.Tensor:
        """View the owned range of a whole-bucket buffer."""
        return whole[self.owned[0] : self.owned[1]]

    def shard_slice(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """View the rank's shard of a buffer of the owned range (which is all of it unless the rank owns everything)."""
        start, end = self.layout.shard_range(rank)
        return flat[start - self.owned[0] : end - self.owned[0]]

    def owned_views(self, flat: torch.Tensor) -> Iterable[tuple[Managed, Piece, torch.Tensor]]:
        """Yield each owned parameter piece with its view of `flat`, a buffer of the owned range."""
        for piece in self.pieces:
            yield self.params[piece.slot], piece, flat[piece.start : piece.start + piece.numel]

    def views(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's slot of a long-lived whole-bucket buffer. Kept: they cost more to make than to fill."""
        key = (whole.data_ptr(), whole.dtype)
        if key not in self._views:
            self._views[key] = [managed.slice_of(whole) for managed in self.params]
        return self._views[key]

    def zero_unused(self, whole: torch.Tensor) -> None:
        """Zero the padding and the slots of parameters that are not `used`, so that a sum over ranks reads no stale bytes."""
        for start, end in self._gaps:
            whole[start:end].zero_()
        for managed in self.params:
            if not managed.used:
                managed.slice_of(whole).zero_()


class BufferPool:
    """Keeps released buffers for the next user of the same size and dtype, and counts what exists."""

    def __init__(self, device: torch.device) -> None:
        """Make an empty pool of buffers on `device`."""
        self.device = device
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.allocated_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer (numel,) with undefined content."""
        free = self._free.get((numel, dtype))
        if free:
            return free.pop()
        self.allocated_bytes += numel * dtype.itemsize
        return allocate(numel, dtype, self.device)

    def give(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; the caller must not touch it again."""
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zero-filled flat tensor; large ones on the CPU ask for huge pages."""
    if device.type == "cpu" and numel * dtype.itemsize >= _HUGE_BYTES:
        return _C.empty_huge(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=device)
