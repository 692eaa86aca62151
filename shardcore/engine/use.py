"""What ranks compare at the end of a backward: who used which parameter, in a byte per parameter, and how many ran."""

from collections.abc import Collection, Sequence

import torch

from shardcore.comm import Comm, Traffic
from shardcore.engine.bucket import Managed
from shardcore.telling import uneven

_USED, _LATE = 1, 2


def use_row_bytes(params: int) -> int:
    """Return the bytes that a rank sends for so many parameters."""
    return params + 2


def agree_on_use(comm: Comm, params: Sequence[Managed], late: Collection[Managed], backwards: int) -> set[Managed]:
    """Learn which parameters got a gradient on any rank (`has_grad`) and start to count `used` anew. Collective.

    late: those with gradients that came after their bucket was sent; backwards: Reducer.count. Returns the parameters that are
    late on any rank; RuntimeError on every rank if the counts differ.
    """
    if comm.world_size == 1:  # the device need not be asked, which would wait for the backward
        for managed in params:
            managed.has_grad |= managed.used
            managed.used = False
        return set(late)
    flags = [_USED * m.used + _LATE * (m in late) for m in params] + [backwards % 256, backwards // 256 % 256]
    rows = comm.tell(torch.tensor(flags, dtype=torch.uint8, device="cpu"), Traffic.BACKWARD, "the end of a backward")
    counts = [low + 256 * high for low, high in rows[:, -2:].tolist()]
    if len(set(counts)) > 1:
        raise uneven(counts)
    is_used, is_late = ((rows[:, :-2] & flag).any(0).tolist() for flag in (_USED, _LATE))
    for managed, used in zip(params, is_used, strict=True):
        managed.has_grad |= used
        managed.used = False
    return {m for m, late_now in zip(params, is_late, strict=True) if late_now}
