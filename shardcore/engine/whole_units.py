"""Moving whole weights that exist only around their use (stage 3): each unit's are gathered, waited for, lent and let go.

When they move is decided in engine/weights.py; memory lies in a pool that all units share.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from shardcore._native import _C
from shardcore.comm import Comm
from shardcore.engine.bucket import Bucket, Managed, closed_message
from shardcore.engine.buffers import BufferPool
from shardcore.engine.gather import Gatherer, keepers_of
from shardcore.engine.lazy import LazyStep
from shardcore.engine.trace import scope
from shardcore.engine.unit import Unit, take_edits


class WholeUnits:
    """Makes the weights of units whole on this rank, and lets them go."""

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Comm,
        device: torch.device,
        reshard_after_forward: bool | int,
        lazy: LazyStep | None,
    ) -> None:
        """See Weights."""
        self.units, self.comm, self.lazy = list(units), comm, lazy
        keepers = keepers_of(reshard_after_forward)
        first = comm.rank - comm.rank % keepers if keepers else 0
        self._keepers = range(first, first + keepers)
        self.pool = BufferPool(device)
        self._gatherer = Gatherer([bucket for unit in units for bucket in unit.buckets], comm, device)
        self._lost: list[Any] = comm.keeps([])  # gathers that nobody waits for, and their memory
        self._place = {m.param: (unit, bucket, m) for unit in units for bucket in unit.buckets for m in bucket.params}
        self.all_held = False  # inside full_params(model): a forward needs no other rank
        self._scratch: list[tuple[Unit, Managed]] = []

    def __del__(self) -> None:
        """Leave with the group what a forward that failed has started."""
        self._lost += [unit.gathers for unit in self.units if unit.gathers is not None]

    def _start(self, unit: Unit) -> None:
        """Start to gather a unit. Waits for its update: by how fast Adam is, ranks would start collectives in other orders."""
        if unit.open or unit.gathers is not None:
            return
        if self.lazy is not None:
            self.lazy.wait(unit.buckets)
        self._gather(unit)

    def _gather(self, unit: Unit) -> None:
        """Start to gather a unit's weights, where it is open into the memory that they have."""
        gathers: list[Any] = []
        with scope("gather", unit.name):
            try:
                for start in self._bring(unit):
                    gathers += start()
                unit.gathers = gathers
            except BaseException:
                unit.gathers, unit.kept = gathers, None
                self._lose(unit)  # or the next use would take what is there for the weights
                raise

    def _bring(self, unit: Unit) -> Sequence[Callable[[], list[Any]]]:
        """Give a unit memory with this rank's part in place, or on its way there; returns what starts to gather the rest."""
        starts, arrivals = [], []
        for bucket in unit.buckets:
            if not self._gatherer.apart:
                bucket.weight = bucket.owned_weight
                continue
            if not unit.open:
                bucket.weight = self.pool.take(bucket.layout.numel, bucket.dtype)
            if unit.kept:
                part = unit.kept.pop(0)
                self._kept_part(bucket).copy_(part)
                self.pool.give(part)
                starts.append(partial(self._gatherer.gather_kept, bucket, self._keepers))
            else:
                arrivals.append(self._gatherer.bring(bucket))
                starts.append(partial(self._gatherer.gather, bucket, arrivals[-1]))
        unit.kept = None
        self._gatherer.find_errors(arrivals)
        return starts

    def _wait(self, unit: Unit) -> None:
        """Wait until a unit's weights are whole; can be interrupted, and done again until its `gathers` are None."""
        try:
            if unit.gathers is not None:
                self._gatherer.wait(unit.gathers)
        except Exception:
            self._lose(unit)
            raise

    def _lose(self, unit: Unit) -> None:
        """Give up what is being gathered; it may still come, into memory that is kept."""
        if unit.gathers is not None:
            self._lost.append((unit.gathers, [bucket.let_go() for bucket in unit.buckets]))
            unit.gathers = None

    def _exchange(self, bucket: Bucket, op: str, call: Callable[..., None], *arguments: Any) -> None:
        """Exchange memory; if that fails because a parameter lies elsewhere name it here."""
        try:
            call(*arguments)
        except (TypeError, ValueError):
            bucket.check_in_place(op)
            raise

    def _open(self, unit: Unit) -> None:
        self._start(unit)
        if unit.open:
            return
        self._wait(unit)
        unit.gathers = None
        for bucket in unit.buckets:
            self._exchange(bucket, "making weights whole", bucket.lend)
        unit.open = True

    def _kept_part(self, bucket: Bucket) -> torch.Tensor:
        return bucket.weight.chunk(len(self._keepers))[self._keepers.index(self.comm.rank)]

    def _keep_part(self, unit: Unit) -> None:
        unit.kept = []
        for bucket in unit.buckets:
            part = self._kept_part(bucket)
            unit.kept.append(self.pool.take(part.numel(), part.dtype).copy_(part))

    def _close(self, unit: Unit, keep: bool = False) -> None:
        if unit.held:
            return
        if keep and unit.open and unit.kept is None and len(self._keepers) > 1 and len(self.comm.sharers) > 1:
            self._keep_part(unit)
        if unit.gathers is not None:
            self._wait(unit)
        unit.gathers = None
        for bucket in unit.buckets:
            if unit.open and any(managed.edited for managed in bucket.params):
                bucket.take_edits()
        self._withdraw(unit)
        for bucket in unit.buckets:
            memory = bucket.let_go()
            if self._gatherer.apart:
                self.pool.give(memory)

    def _withdraw(self, unit: Unit) -> None:
        for bucket in unit.buckets if unit.open else ():
            self._exchange(bucket, "letting go of whole weights", bucket.withdraw)
        unit.open = False

    def close_all(self) -> None:
        """Let go of every unit's whole weights: new ones come into the shards, or nobody needs them now."""
        for unit in self.units:
            unit.calls = 0
            if unit.held:
                take_edits(unit)
            elif unit.open or unit.gathers is not None:
                self._close(unit)
            for part in unit.kept or []:
                self.pool.give(part)
            unit.kept = None

    @torch.no_grad()
    def renew(self) -> None:
        """Bring the weights that `full_params` holds in line with the shards, which a step has changed. Collective."""
        held = [unit for unit in self.units if unit.held]
        try:
            for unit in held:
                if self.lazy is not None:
                    self.lazy.wait(unit.buckets)
                self._gather(unit)
            for unit in held:
                self._wait(unit)
                unit.gathers = None
        except Exception:
            for unit in held:  # closed: the weights of the step before would be taken for edits at the end of the context
                self._withdraw(unit)
                unit.gathers = unit.gathers or []
                self._lose(unit)
            raise

    @contextmanager
    def whole(self, params: set[nn.Parameter]) -> Iterator[None]:
        """Keep the units of `params` whole inside the context; edits in place reach the shards at its end. Collective.

        What this takes is given up at the end: the pool would keep as much as the whole model.
        """
        before = self.pool.allocated_bytes
        chosen = [u for u in self.units if any(m.param in params for bucket in u.buckets for m in bucket.params)]
        held: list[Unit] = []
        try:
            for unit in chosen:  # all of them before the first is waited for: a wait takes long for small ones
                self._start(unit)
            for unit in chosen:
                self._open(unit)
                unit.held += 1
                held.append(unit)
            self.all_held = all(unit.held for unit in self.units)
            yield
        except Exception:
            for unit in chosen:  # gathers that nobody uses now: their memory goes back
                if unit.gathers is not None and not self.comm.broken:
                    with suppress(Exception):  # the first error is the one to tell
                        self._close(unit)
            raise
        finally:
            for unit in held:
                unit.held -= 1
            self.all_held = all(unit.held for unit in self.units)
            for unit in held:
                take_edits(unit)
                self._close(unit)
            self.pool.shrink(before)

    def lend_scratch(self, params: Sequence[nn.Parameter]) -> None:
        """Give closed parameters memory of undefined content, for someone who writes all of it and reads none.

        What is being gathered (a forward that failed left it) has the old values: it is let go.
        """
        chosen = [self._place[param] for param in params if param in self._place]
        for unit, bucket, managed in chosen:
            if unit.gathers is not None:
                self._close(unit)
            if unit.open:
                continue
            memory = torch.empty_like(managed.param).detach().view(-1)
            self._exchange(bucket, "load_state_dict", _C.lend, [managed.param], memory, [0])
            self._scratch.append((unit, managed))

    def end_scratch(self) -> None:
        """Take back what `lend_scratch` gave."""
        for unit, managed in self._scratch:
            _C.withdraw([managed.param], [closed_message(managed.name, unit.name)])
            managed.version = managed.param._version
        self._scratch = []
