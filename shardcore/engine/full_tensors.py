"""Full weights, gradients and states for reads, gathered from the parts that ranks own.

Before a full value is gathered, ranks agree which call reads which value (engine/agreement.py), so
no rank receives another value than it asked for.

Small gathers take long to wait for and little else, so what is read one after the other is gathered
one ahead.

What is clipped apart from a step is not gathered: `OwnGrads` are this rank's parts of gradients.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from shardcore.distributed.comm import Comm, Traffic, wait_all
from shardcore.engine.bucket import Bucket, Lifetimes, Managed, sq_norm_of
from shardcore.engine.states import ReadPart
from shardcore.optim.clip import join, norm_part


class Gathered:
    """The parameters in the GatheredParameters that are open: see engine/full_params.py, Note
    [Local].
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._open: list[tuple[frozenset[torch.nn.Parameter], bool]] = []

    @contextmanager
    def opened(self, params: Iterable[torch.nn.Parameter], spread: bool) -> Iterator[None]:
        """Have these, too, inside the context. spread: one rank's become those of all at its
        end.
        """
        self._open.append((frozenset(params), spread))
        try:
            yield
        finally:
            self._open.pop()

    def covers(self, params: Iterable[torch.nn.Parameter], spread: bool = False) -> bool:
        """Whether all of these are there; spread: with one rank's becoming those of all."""
        contexts = [chosen for chosen, is_spread in self._open if is_spread or not spread]
        return bool(contexts) and all(
            any(param in chosen for chosen in contexts) for param in params
        )


class FullTensors:
    """Gathers over `comm`, on `device`. Every rank asks for the same in the same order."""

    def __init__(self, comm: Comm, device: torch.device) -> None:
        """See the class."""
        self._comm, self._device = comm, device

    def of_buckets(self, parts: Iterable[tuple[Bucket, torch.Tensor]]) -> Iterator[torch.Tensor]:
        """Yield full buffers of buckets from owned ranges, on the devices of these (the range
        itself if it is all). Collective.

        Each is gathered while the one before is waited for and used, so three are there at most.
        """
        started = (self._start(bucket, owned) for bucket, owned in parts)
        coming = next(started, None)
        while coming is not None:
            (full, gathers, device), coming = coming, next(started, None)
            wait_all(gathers)
            full = full.to(device)
            yield full
            del full

    def _start(
        self, bucket: Bucket, owned: torch.Tensor
    ) -> tuple[torch.Tensor, list[Any], torch.device]:
        if owned.numel() == bucket.layout.numel:
            return owned, [], owned.device
        full = torch.empty(bucket.layout.numel, dtype=owned.dtype, device=self._device)
        with self._comm.scope(f"shardcore::read({bucket.label})"):
            bucket.owned_slice(full).copy_(owned)
            return (
                full,
                self._comm.all_gather([full], Traffic.READ, _name(bucket), self._comm.shard_ranks),
                owned.device,
            )

    def of_param(self, bucket: Bucket, managed: Managed, read: ReadPart) -> torch.Tensor:
        """Return a new tensor of a parameter's shape; nothing else of its bucket travels.
        Collective.

        `read` reads from this rank's owned range; the result is on the device of what it returns.
        """
        like, ranks, numel = read(0, 0), self._comm.shard_ranks, managed.local.numel()
        travels = bucket.owned_numel < bucket.layout.numel
        full = torch.empty(numel, dtype=like.dtype, device=self._device if travels else like.device)
        for piece in bucket.pieces_of(managed):
            full[piece.param_start : piece.param_start + piece.numel] = read(
                piece.start, piece.numel
            )
        if travels:
            size = bucket.layout.numel // len(ranks)
            cuts = [
                min(max(0, number * size - managed.offset), numel)
                for number in range(len(ranks) + 1)
            ]
            with self._comm.scope(f"shardcore::read({bucket.label})"):
                wait_all(
                    self._comm.gather_parts(
                        [full[a:b] for a, b in pairwise(cuts)], Traffic.READ, _name(bucket), ranks
                    )
                )
        return managed.full(full.view(managed.local.shape).to(like.device))


class OwnGrads:
    """This rank's parts of the reduced gradients of some parameters.

    part: the norm of all ranks' parts, those of the model included, see shardcore.optim.norm_part;
    device: the engine's.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        chosen: Collection[torch.Tensor] | None,
        norm_type: float | None,
        comm: Comm,
        lifetimes: Lifetimes,
        device: torch.device,
        edited: Callable[[], None],
    ) -> None:
        """Find the gradients of the chosen parameters (None: all), and take their norm, unless
        norm_type is None. Collective.

        edited: is called when they have other values.
        """
        self.device, self._edited = device, edited
        self._views: dict[Bucket, list[torch.Tensor]] = {}
        for bucket in buckets:
            for start, part in bucket.grads() if bucket.reduced else ():
                for managed, _, view in bucket.owned_views(part, start):
                    if managed.has_grad and (chosen is None or managed.param in chosen):
                        self._views.setdefault(bucket, []).append(view)
        self.part = torch.zeros(2, dtype=torch.float64, device="cpu")
        if norm_type is not None:
            self.part = norm_part(
                [v for bucket, views in self._views.items() if bucket.counted for v in views],
                norm_type,
            )
            if not lifetimes.owns_everything:
                rows = comm.all_gather_cpu(self.part, Traffic.READ, "a norm")
                self.part = join([rows[sorted(comm.shard_ranks)]], norm_type)
            self.part = join([comm.of_parts(self.part, Traffic.READ, "a norm")], norm_type)

    def scale(self, coefficient: float) -> None:
        """Multiply them."""
        if coefficient == 1.0:
            return
        for bucket, views in self._views.items():
            torch._foreach_mul_(views, coefficient)
            bucket.sq_norm = self._sq_norm(bucket)
        self._edited()

    def clamp(self, limit: float) -> None:
        """Clip each element to [-limit, limit]. What was not finite goes on to skip the step."""
        for bucket, views in self._views.items():
            before = self._sq_norm(bucket) if bucket.sq_norm is None else bucket.sq_norm
            torch._foreach_clamp_min_(views, -limit)
            torch._foreach_clamp_max_(views, limit)
            bucket.sq_norm = torch.where(before.isfinite().all(), self._sq_norm(bucket), before)
        self._edited()

    def _sq_norm(self, bucket: Bucket) -> torch.Tensor:
        return sq_norm_of(bucket.own_grads(), self.device)


def _name(bucket: Bucket) -> str:
    return f"a read of {bucket.unit or 'the root'}"
