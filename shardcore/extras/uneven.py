"""Loops in which ranks have different numbers of batches: a rank that has none left repeats its
last one without effect.

DDP's Join lets such a rank answer the collectives of the others. Here it also owns a part of the
states, which is updated with the same options: schedulers, clipping and averages have to go on
there, too. So it runs the body of the loop itself.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from shardcore.distributed.comm import Traffic
from shardcore.engine.agreement import Payload, agree, attempt, together
from shardcore.engine.engine import engine_behind
from shardcore.torch_private import pytree

Batch = TypeVar("Batch")


class Joined(Generic[Batch]):
    """What `join` returns."""

    def __init__(self, model: nn.Module, loader: Iterable[Batch]) -> None:
        """Exchange how many batches the ranks have, where all loaders have a length. Collective."""
        self._engine, self._loader = engine_behind("join", model), loader
        engine = self._engine
        with together(engine.comm, "join", "no batch was taken"):
            described = self._described()
        of_ranks = engine.comm.gather_json(described)
        sync_norms = [name for _, names in of_ranks for name in names]
        if sync_norms:
            raise ValueError(
                f"join: {sync_norms[0]} is a SyncBatchNorm, and its statistics would count "
                "repeated batches. Use batch norms over each rank's own samples, or equally many "
                "batches"
            )
        lengths = [length for length, _ in of_ranks]
        self._lengths: list[int] | None = None if None in lengths else lengths
        self.has_batch, self.active = True, self._engine.comm.world_size

    def _described(self) -> tuple[int | None, list[str]]:
        """Return the loader's length, None without one, and the names of SyncBatchNorms."""
        self._engine.synchronize()
        try:
            length: int | None = len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            length = None
        return length, [
            name
            for name, module in self._engine.model.named_modules()
            if isinstance(module, nn.SyncBatchNorm)
        ]

    def __len__(self) -> int:
        """Return how often every rank runs the body. TypeError where a rank's loader has no
        length.
        """
        if self._lengths is None:
            raise TypeError(
                "join: the loader of some rank does not define len(). Use loaders with len() on "
                "every rank"
            )
        return max(self._lengths)

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's batches, then its last one again until no rank has more."""
        engine, batches = self._engine, iter(self._loader)
        last: Any = None
        buffers: dict[str, torch.Tensor] = {}
        number = 0
        while self._lengths is None or number < max(self._lengths):
            batch = next(batches, batches)
            self.has_batch = batch is not batches
            self.active = self._agree(number)
            if self.active == 0:
                return
            if self.has_batch:
                last = batch
            elif not buffers:
                buffers = {name: buffer.clone() for name, buffer in engine.model.named_buffers()}
            number += 1
            engine.reducer.muted = not self.has_batch
            try:
                yield _fresh(last)
            finally:
                engine.reducer.muted = False
                if buffers:
                    for name, buffer in engine.model.named_buffers():
                        buffer.data.copy_(buffers[name])

    def _agree(self, number: int) -> int:
        """Return how many ranks have batch `number`. ValueError, on every rank, if one has none
        at all.
        """
        if self._lengths is not None:
            counts = [number < length for length in self._lengths]
        else:
            problems: list[BaseException] = []
            attempt(problems, self._engine.synchronize)  # as before each collective
            has_batch = {"has_batch": torch.tensor([self.has_batch], device="cpu")}
            agreed = agree(
                self._engine.comm,
                "join",
                problems,
                payload=Payload(has_batch, Traffic.BATCHES),
                then="no batch was taken",
            )
            counts = agreed.ranks["has_batch"][:, 0].tolist()
        if number == 0 and any(counts) and not all(counts):
            raise ValueError(
                f"join: the loader of rank {counts.index(False)} is empty. Give every rank at "
                "least one batch; it is repeated while other ranks continue"
            )
        return sum(counts)


def _fresh(batch: Any) -> Any:
    """Copy what holds the tensors: a loop may take entries out of a batch."""
    return pytree.tree_map(
        lambda leaf: leaf if isinstance(leaf, torch.Tensor) else copy.copy(leaf), batch
    )


def join(model: nn.Module, loader: Iterable[Batch]) -> Joined[Batch]:
    """Iterate over `loader` on every rank until the longest loader of all ranks ends. Collective.

    A rank whose loader ended repeats its last batch, so it takes part in everything the loop body
    exchanges: gathers, reductions, steps, clipping and schedulers. Its gradients are excluded
    exactly, even NaN, and its buffers do not change. Gradients are still divided by the number of
    ranks, as with DDP's `divide_by_initial_world_size=True`. For a mean over the ranks with a
    batch, multiply the loss by world size / `active`.

    The returned iterable provides `has_batch` (whether the current batch is this rank's own:
    exclude other batches from logs), `active` (the number of ranks with a batch of their own) and
    `len()`, if all loaders define it. Lengths are exchanged once and must be correct. Without
    lengths, the ranks agree before each batch, which waits for an overlapped step.

    Args:
        model: The model returned by shard, or the engine returned by initialize.
        loader: Any iterable of batches.

    The loop body must be the same on every rank: leave it by `break` on all ranks, or on none.

    Raises ValueError, on every rank, if a loader is empty, and for models with SyncBatchNorm.
    """
    return Joined(model, loader)
