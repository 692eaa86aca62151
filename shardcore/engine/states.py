"""Where optimizer states live and where Adam runs on them.

A store holds, for each bucket, flat tensors of the owned range: exp_avg, exp_avg_sq, max_exp_avg_sq
(amsgrad) and the master weights, kept as the bucket's `state_format` says. The device store keeps
them beside the weights; offload/cpu_store.py has the cpu tier. Both pass the same numbers to the
same kernel, so the tier never shows in the bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch

from shardcore._native import _C
from shardcore.distributed.comm import Started
from shardcore.engine.bucket import Bucket, Managed, allocate, assign
from shardcore.engine.units import Unit
from shardcore.optim.elementwise import ElementFormat
from shardcore.optim.float8 import plain_part
from shardcore.optim.state_format import SCALES, StateTensors, range_of, stored_values, values_of

# The scalars of a step: made by the host (AdamHyper or ElementStep), or (DeviceStore alone) where
# the weights are.
Scalars = Sequence[Any] | _C.DeviceScalars


class StepError(RuntimeError):
    """A step failed after it had begun: some weights are of the step before, some are not. Or it
    could not be committed.
    """


@dataclass(frozen=True)
class Span:
    """A range of a bucket's owned range that one set of scalars updates: `hypers[hyper]` of the
    step.

    key: of its random bits: (the parameter's index over all groups, the first of its elements
    here). Where none are drawn a span may hold several parameters.
    """

    bucket: Bucket
    start: int
    numel: int
    hyper: int
    key: tuple[int, int] = (0, 0)

    def part(self, offset: int, numel: int) -> "Span":
        """Return elements [offset, offset + numel) of the span; cut at 256-element boundaries."""
        index, first = self.key
        return Span(self.bucket, self.start + offset, numel, self.hyper, (index, first + offset))


class StateStore(Protocol):
    """What the engine needs of whatever keeps optimizer states.

    scratch_bytes: beside the states, what steps work in. weight_scratch_bytes: on the device, what
    weights of another tier are updated in. on_device: what keeps states on the device, if any are
    there.
    """

    tier: str

    @property
    def on_device(self) -> "DeviceStore | None": ...

    @property
    def scratch_bytes(self) -> int: ...

    @property
    def weight_scratch_bytes(self) -> int: ...

    def steps(
        self, parts: Sequence[Sequence[Span]], hypers: Scalars
    ) -> Iterator[_C.CopyEvent | None]:
        """Update states, masters and the owned weights from the buckets' reduced gradients, one
        part after the other.

        Each part is updated when its turn in the iteration comes. Yields an event of the copy of
        its new weights, None where they are written already, on CUDA in the order of the current
        stream. Gradients are read ahead.
        """

    def read(
        self, bucket: Bucket, key: str, start: int = 0, numel: int | None = None
    ) -> torch.Tensor:
        """Return part of one of `bucket.state_format.keys`, as state dicts show it; by default all
        of the owned range.

        (numel,) float32, or bfloat16 of bfloat16 moments; on any device, perhaps live: not to be
        written. The owned weights have to be as the last step, or `accept_weight_edits`, left them.
        Start and end as in optim/state_format.py.
        """

    def write(self, bucket: Bucket, key: str, start: int, values: torch.Tensor) -> None:
        """Overwrite part of a state with `values` (flat, any float dtype, any device); of a
        master, not its rounded weights.
        """

    def states_of(self, bucket: Bucket, start: int, numel: int) -> StateTensors:
        """View elements [start, start + numel) of a bucket's states as they are kept; not to be
        written.

        What lies on both tiers is joined on the CPU. Start and end as in optim/state_format.py.
        """

    def watch(self, before_change: Callable[[], object] | None) -> None:
        """Let it be called before states in host memory change, by the thread that changes them;
        None: nothing any more.
        """

    def forget_weights(self) -> None:
        """Keep no view of the weights of earlier steps: they are about to move."""

    def stored(self, bucket: Bucket) -> Iterator[tuple[str, str, int]]:
        """Yield (tier, key, bytes) of each tensor that keeps the bucket's states."""

    def replace(self, replaced: Sequence[Bucket], new_buckets: Sequence[Bucket]) -> None:
        """Free the states of some buckets, and keep zero states of others. Not where states are
        split, or in files.
        """

    def track(self, buckets: Sequence[Bucket]) -> None:
        """Let steps note which weights of these buckets they change (`Bucket.bits`). No step may be
        under way.
        """


class Audited(Protocol):
    """What steps need of the audits of an engine (engine/audit.py, which has the contracts)."""

    def next_step(self) -> None: ...

    def steps(
        self, store: StateStore, parts: Sequence[Sequence[Span]], hypers: Scalars
    ) -> Iterator[_C.CopyEvent | None]: ...

    def settle(self) -> None: ...

    def saved(self, path: str) -> None: ...


class HostStore(StateStore, Protocol):
    """A store with states in host memory. copies: the only way to and from there."""

    @property
    def copies(self) -> _C.HostTier: ...


class OverlappedStep(Protocol):
    """What the engine needs of whatever updates weights after `step` has returned
    (offload/overlap_step.py, which has the contracts).

    units: those of the model. has_worker: the CPU updates, on a thread of its own.
    """

    units: list[Unit]
    has_worker: bool

    @property
    def order(self) -> list[str]: ...

    def before_forward(self, index: int) -> None: ...

    def end_forward(self) -> None: ...

    def updates(self, buckets: Iterable[Bucket]) -> bool: ...

    def start(
        self,
        spans: Mapping[Bucket, Sequence[Span]],
        hypers: Scalars,
        same_order: bool,
        audit: Audited | None,
    ) -> None: ...

    def defer(self, gathers: Mapping[Bucket, list[Started]]) -> None: ...

    def finish(self) -> None: ...

    def wait_for(self, buckets: Iterable[Bucket]) -> None: ...


def lists_of(spans: Sequence[Span], states: Sequence[StateTensors]) -> dict[str, Any]:
    """Return what the Adam kernel is given beside weights and gradients: parallel lists, by its
    arguments' names.
    """
    return {
        "exp_avgs": [state.get("exp_avg") for state in states],
        "exp_avg_sqs": [state.get("exp_avg_sq") for state in states],
        "hyper_index": [span.hyper for span in spans],
        "masters": [state.get("master", state.get("remainder")) for state in states],
        "max_exp_avg_sqs": [state.get("max_exp_avg_sq") for state in states],
        "keys": [span.key for span in spans],
        "exp_avg_scales": [state.get(SCALES["exp_avg"]) for state in states],
        "exp_avg_sq_scales": [state.get(SCALES["exp_avg_sq"]) for state in states],
        "changed": [span.bucket.bits_of(span.start, span.numel) for span in spans],
    }


@dataclass(frozen=True)
class _Lists:
    """What the kernel is given for `spans`, kept for the next step: these views cost more to
    make than the kernel to start.
    """

    spans: Sequence[Span]
    params: list[torch.Tensor]
    states: list[StateTensors]
    arguments: dict[str, Any]


class DeviceStore:
    """States beside the weights, of each bucket's first `device_numel` elements.

    away: they are in host memory for a while, where they are read and written, but no step runs on
    them.
    """

    tier = "device"
    away = False
    scratch_bytes = weight_scratch_bytes = 0

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        """Allocate zero states for `buckets` on the device."""
        self._steppers = {bucket: _C.AdamStepper() for bucket in buckets}
        self._lists: dict[Bucket, _Lists] = {}  # of the last step, by the bucket of the first span
        self._make = partial(allocate, device=device)
        self._states = {
            bucket: bucket.state_format.new(bucket.device_numel, self._make) for bucket in buckets
        }

    def read(
        self, bucket: Bucket, key: str, start: int = 0, numel: int | None = None
    ) -> torch.Tensor:
        """See StateStore."""
        end = bucket.owned_numel if numel is None else start + numel
        return values_of(
            self.states_of(bucket, start, end - start), key, bucket.owned_weight[start:end]
        )

    def write(self, bucket: Bucket, key: str, start: int, values: torch.Tensor) -> None:
        """See StateStore."""
        states = range_of(self._states[bucket], start, values.numel())
        for name, source in stored_values(bucket.state_format, key, values).items():
            states[name].copy_(source)

    def states_of(self, bucket: Bucket, start: int, numel: int) -> StateTensors:
        """See StateStore."""
        return range_of(self._states[bucket], start, numel)

    def watch(self, before_change: Callable[[], object] | None) -> None:
        """See StateStore: there are none in host memory."""

    def forget_weights(self) -> None:
        """See StateStore."""
        self._lists.clear()

    @property
    def on_device(self) -> "DeviceStore":
        """See StateStore."""
        return self

    def replace(self, replaced: Sequence[Bucket], new_buckets: Sequence[Bucket]) -> None:
        """See StateStore."""
        self._lists.clear()
        for bucket in replaced:
            del self._steppers[bucket], self._states[bucket]
        for bucket in new_buckets:
            self._steppers[bucket] = _C.AdamStepper()
            self._states[bucket] = bucket.state_format.new(bucket.device_numel, self._make)

    def track(self, buckets: Sequence[Bucket]) -> None:
        """See StateStore."""
        self._lists.clear()
        for bucket in buckets:
            bucket.bits["device"] = self._make((bucket.device_numel + 7) // 8, torch.uint8)

    def to_host(self, tier: _C.HostTier) -> None:
        """Move all states to memory of `tier`, until `to_device`. MemoryError, with nothing
        moved, if it has too little.
        """
        self._move(tier.empty, tier.to_tier, tier)
        self.away = True

    def to_device(self, tier: _C.HostTier) -> None:
        """Move all states back from `tier`. torch's out-of-memory error, with nothing moved, if
        the device has too little.
        """
        self._move(self._make, tier.from_tier, tier)
        self.away = False

    def _move(
        self,
        make: Callable[[int, torch.dtype], torch.Tensor],
        copy: Callable[[torch.Tensor, torch.Tensor], _C.CopyEvent],
        tier: _C.HostTier,
    ) -> None:
        new = {
            bucket: {key: make(flat.numel(), flat.dtype) for key, flat in states.items()}
            for bucket, states in self._states.items()
        }
        self._lists.clear()
        for bucket, states in new.items():
            for key, target in states.items():
                copy(target, self._states[bucket].pop(key))
            self._states[bucket] = states
        tier.synchronize()

    def load(self, bucket: Bucket, states: StateTensors) -> None:
        """Overwrite all states of a bucket with those that another store kept."""
        for key, flat in states.items():
            self._states[bucket][key].copy_(flat)

    def stored(self, bucket: Bucket) -> Iterator[tuple[str, str, int]]:
        """See StateStore."""
        return (
            ("cpu" if self.away else self.tier, key, flat.nbytes)
            for key, flat in self._states[bucket].items()
        )

    def steps(
        self, parts: Sequence[Sequence[Span]], hypers: Scalars
    ) -> Iterator[_C.CopyEvent | None]:
        """See StateStore."""
        for spans in parts:
            self.step(spans, hypers)
            yield None

    def step(
        self, spans: Sequence[Span], hypers: Scalars, weights: torch.Tensor | None = None
    ) -> None:
        """Update one part. Queued on the current stream on CUDA. weights: of the spans' one
        bucket, in place of its own.
        """
        if not spans:
            return
        first = spans[0].bucket
        lists = self._lists.get(first)
        if lists is None or lists.spans != spans:
            fulls = [span.bucket.owned_weight if weights is None else weights for span in spans]
            params = [
                full[span.start : span.start + span.numel]
                for full, span in zip(fulls, spans, strict=True)
            ]
            states = [range_of(self._states[span.bucket], span.start, span.numel) for span in spans]
            lists = self._lists[first] = _Lists(spans, params, states, lists_of(spans, states))
        grads = []
        for span in spans:
            assert span.bucket.grad is not None
            grads.append(span.bucket.grad[span.start : span.start + span.numel])
        if isinstance(first.state_format, ElementFormat):
            update_elements(spans, lists.params, grads, lists.states, hypers)
        else:
            self._steppers[first].step(lists.params, grads, hypers=hypers, **lists.arguments)


def update_elements(
    spans: Sequence[Span],
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    states: Sequence[StateTensors],
    hypers: Scalars,
) -> None:
    """Update spans of elementwise optimizers, those of a bucket that have the same scalars at
    once.
    """
    assert not isinstance(hypers, _C.DeviceScalars)
    for (_, hyper), numbers in groupby(
        range(len(spans)), key=lambda i: (spans[i].bucket, spans[i].hyper)
    ):
        indices = list(numbers)
        hypers[hyper].update(
            [params[i] for i in indices], [grads[i] for i in indices], [states[i] for i in indices]
        )


# (start, numel) -> that range of a flattened parameter's new values; any float dtype, any device.
ReadPart = Callable[[int, int], torch.Tensor]


def part_of(values: torch.Tensor) -> ReadPart:
    """Return a function that reads parts of `values`, which have the parameter's shape (torchao's
    float8 weights, too).
    """
    flat = plain_part(values).detach().contiguous().view(-1)
    return lambda start, numel: flat[start : start + numel]


@torch.no_grad()
def set_weights(store: StateStore, bucket: Bucket, managed: Managed, read: ReadPart) -> None:
    """Set a parameter and this rank's part of its master from new values; only what the rank
    keeps is read.
    """
    if bucket.weight.numel() and not bucket.in_float8:
        values = read(0, managed.local.numel()).to(bucket.weight.device)
        assign(managed.slice_of(bucket.weight).view(-1), values)
        read = part_of(values)
    set_owned(store, bucket, managed, read)


@torch.no_grad()
def set_owned(store: StateStore, bucket: Bucket, managed: Managed, read: ReadPart) -> None:
    """Set the part of a parameter and its master that this rank owns."""
    master = bucket.state_format.master is not None
    for piece in bucket.pieces_of(managed):
        part = read(piece.param_start, piece.numel).to(bucket.owned_weight.device)
        bucket.assign(piece.start, part)
        if master:
            store.write(bucket, "master", piece.start, part)
    managed.version = managed.version_now
