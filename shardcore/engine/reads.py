"""Before any whole value is read, every rank says which read of what it makes, and whether it refuses.

So a rank that reads something else, or nothing, is an error on all of them, and no rank takes one value for another.
"""

import zlib

import torch

from shardcore.comm import Comm, Traffic

# What users call on every rank to read whole values.
READS = (
    "optimizer.state_dict",
    "state_dict",
    "full_grad",
    "full_state",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "clip_grad_value_",
    "sharded_state_dict",
    "load_sharded_state_dict",
)


def agree_on_read(comm: Comm, op: str, what: str, problem: Exception | None) -> None:
    """Raise on every rank if one has a `problem`, or ranks are in other reads than `op`, or read something else than `what`."""
    here = zlib.crc32(what.encode())
    row = torch.tensor([READS.index(op), problem is not None, here], device="cpu")
    others = comm.tell(row, Traffic.READ).tolist()
    if problem is not None:
        raise problem
    for rank, (read, refuses, there) in enumerate(others):
        if read != READS.index(op):
            raise ValueError(f"{op}: rank {rank} calls {READS[read]}; expected every rank to make the same calls in one order")
        if refuses:
            raise ValueError(f"{op}: rank {rank} refused; its own error says why")
        if there != here:
            raise ValueError(f"{op}: rank {rank} reads something else than {what}; expected the same on every rank")
