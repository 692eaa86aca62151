"""Before any whole value is read, every rank says which read of what it makes, and whether it refuses.

So a rank that reads something else, or nothing, is an error on all of them, and no rank takes one value for another.
"""

import zlib

import torch

from shardcore.comm import Comm, Traffic
from shardcore.telling import READS, uneven


def agree_on_read(comm: Comm, op: str, what: str, backwards: int, problem: Exception | None) -> None:
    """Raise on every rank if one has a `problem`, or ranks are in other reads than `op`, or read something else than `what`.

    backwards: Reducer.count, where gradients are read, else 0.
    """
    here = zlib.crc32(what.encode())
    row = torch.tensor([READS.index(op), problem is not None, here, backwards], device="cpu")
    others = comm.tell(row, Traffic.READ, op, READS.index(op)).tolist()
    if problem is not None:
        try:
            raise problem
        finally:
            problem = None  # as in Engine.step
    for rank, (read, refuses, there, count) in enumerate(others):
        if read != READS.index(op):
            raise ValueError(f"{op}: rank {rank} calls {READS[read]}; expected every rank to make the same calls in one order")
        if refuses:
            raise ValueError(f"{op}: rank {rank} refused; its own error says why")
        if there != here:
            raise ValueError(f"{op}: rank {rank} reads something else than {what}; expected the same on every rank")
        if count != backwards:
            raise uneven([row[3] for row in others])
