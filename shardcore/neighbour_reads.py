"""Ranks of one machine that read each other's memory (csrc/copy/neighbour_reads.h): one copy where a socket takes two.

Only on gloo and for tensors on the CPU; small messages stay with the backend. Whether two ranks may is tried, not assumed: the
kernel (kernel.yama.ptrace_scope above 1), containers apart, and another user forbid it. Then their pieces travel over the
backend. SHARDCORE_NEIGHBOUR_READS=0 (or off, no, false) on any rank leaves it to the backend, too.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from shardcore._native import _C

MIN_BYTES = 1 << 16  # of a piece: below, a message to say where it lies takes as long as the message itself


class Neighbours:
    """The ranks that this one can read, and that can read it."""

    def __init__(self, reads: _C.NeighbourReads, ranks: frozenset[int]) -> None:
        """Serve `ranks`, which `reads` is connected to."""
        self._reads, self._ranks = reads, ranks

    def serve(self, rank: int, piece: torch.Tensor) -> bool:
        """Whether a piece goes this way: the rank at the other end comes to the same answer."""
        return rank in self._ranks and piece.numel() >= MIN_BYTES and piece.device.type == "cpu"

    def send(self, piece: torch.Tensor, rank: int, tag: int) -> _C.Ticket:
        """Let `rank` read `piece` (bytes); the ticket's wait() returns when it has."""
        return self._reads.send(rank, tag, piece)

    def receive(self, piece: torch.Tensor, rank: int, tag: int) -> _C.Ticket:
        """Fill `piece` (bytes) with what `rank` sends under the same tag; the ticket's wait() returns when it is there."""
        return self._reads.receive(rank, tag, piece)


def meet(rank: int, world_size: int, seconds: float, gather_json: Callable[[Any], list[Any]]) -> Neighbours | None:
    """Find the ranks that can read this one and be read by it; None without any. Collective.

    seconds: what a wait for a piece may take. gather_json: Comm's.
    """
    reads = None
    if os.environ.get("SHARDCORE_NEIGHBOUR_READS", "1").lower() not in ("0", "off", "no", "false"):
        with suppress(RuntimeError):  # no descriptor or memory for it
            reads = _C.NeighbourReads(world_size, rank, seconds)
    addresses = gather_json(None if reads is None else reads.address())
    reached = []
    if reads is not None:
        others = [number for number, address in enumerate(addresses) if number != rank and address is not None]
        reached = [number for number in others if not reads.connect(number, addresses[number])]
    of_ranks = gather_json(reached)
    mutual = frozenset(number for number in reached if rank in of_ranks[number])
    return None if reads is None or not mutual else Neighbours(reads, mutual)
