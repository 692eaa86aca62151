"""What ranks tell each other at the end of a backward, in a byte a parameter: who used it, and who failed."""

from collections.abc import Collection, Sequence

import torch

from shardcore.comm import Comm, Traffic
from shardcore.engine.bucket import Managed

_USED, _LATE = 1, 2


def use_row_bytes(params: int) -> int:
    """Return the bytes that a rank tells of so many parameters."""
    return params + 1


def agree_on_use(
    comm: Comm, params: Sequence[Managed], late: Collection[Managed], failed: int
) -> tuple[set[Managed], list[int]]:
    """Learn which parameters got a gradient on any rank (`has_grad`) and start to count `used` anew. Collective.

    late: those with gradients that came after their bucket was sent; failed: the number of this rank's last backward that
    failed, 0 for none. Returns the parameters that are late on any rank, and what each rank said of failures.
    """
    if comm.world_size == 1:  # the device need not be asked, which would wait for the backward
        for managed in params:
            managed.has_grad |= managed.used
            managed.used = False
        return set(late), [failed]
    flags = [_USED * m.used + _LATE * (m in late) for m in params] + [min(failed, 255)]
    rows = comm.tell(torch.tensor(flags, dtype=torch.uint8, device="cpu"), Traffic.BACKWARD)
    is_used, is_late = ((rows[:, :-1] & flag).any(0).tolist() for flag in (_USED, _LATE))
    for managed, used in zip(params, is_used, strict=True):
        managed.has_grad |= used
        managed.used = False
    return {m for m, late_now in zip(params, is_late, strict=True) if late_now}, rows[:, -1].tolist()
