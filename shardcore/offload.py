"""The cpu tier of optimizer states: exact, chunk by chunk, through counted copies only.

States and masters live in the tier's buffers. A step copies each chunk of the reduced gradient to the tier (and of weights,
unless float32 masters replace them), runs the same Adam kernel there, and copies the new weights back. On CPU ranks the tier
is still memory of its own, so that what the copies do can be tested anywhere.

Note [Staging]. While Adam works on a chunk, the next one comes in and the one before goes back. So there are two places for
gradients, and three for weights, which are used in turn. A place is taken again when its last way back is done. Only these
places are pinned: states and masters never travel. Gradients that leave in backward (`Bucket.host_grad`) are there already, and
need none. Places are bytes, each element has those of a float32, so that gradients
of any dtype fit and all memory is taken before the first step.
Note [Passing]. On CPU ranks both sides of a copy are host memory, and a second thread that copies shares the core with Adam.
So there Adam's own threads copy (`caller_copies`), through the tier and counted as ever: a few thousand elements come, are
updated while they are in the caches, and go; each thread uses small parts of one place for gradients and one for weights, so
most pages of staging are never touched there. A simulated tier keeps to its queues.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch

from shardcore._native import _C
from shardcore.engine.bucket import Bucket
from shardcore.engine.kinds import Kept, kept_values, range_of
from shardcore.engine.store import Scalars, Span, read_part, step_spans
from shardcore.layout import BLOCK

logger = logging.getLogger("shardcore")

CHUNK_NUMEL = (1 << 24) + (1 << 21)  # a little above a power of two: so are units, by their biases and norms
GRAD_PLACES, WEIGHT_PLACES = 2, 3
_ITEM_BYTES = torch.float32.itemsize  # of the widest dtype of gradients and weights


def staging_numel(buckets: Sequence[Bucket], chunk_numel: int = CHUNK_NUMEL) -> int:
    """Return the elements of a chunk at most, which a place in staging has room for."""
    return min(chunk_numel, max((bucket.owned_numel for bucket in buckets), default=BLOCK))


def staging_bytes(
    buckets: Sequence[Bucket], chunk_numel: int = CHUNK_NUMEL, grads_leave: bool = False, weights_here: bool = False
) -> int:
    """Return the bytes of all places in staging; see CpuStore."""
    places = (0 if grads_leave else GRAD_PLACES) + (0 if weights_here else WEIGHT_PLACES)
    return places * staging_numel(buckets, chunk_numel) * _ITEM_BYTES


def host_bytes(buckets: Sequence[Bucket], grads_leave: bool = False, weights_here: bool = False) -> int:
    """Return the bytes of host memory that a CpuStore of these buckets takes."""
    states = sum(bucket.kind.nbytes(bucket.owned_numel) for bucket in buckets)
    return states + staging_bytes(buckets, CHUNK_NUMEL, grads_leave, weights_here)


_KEPT_PARTS = 1 << 12  # more than a step has; but steps that use now these parameters, now those have ever new ones


class _Place:
    """Memory in staging; each element has the bytes of the widest dtype."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._parts: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}

    def part(self, dtype: torch.dtype, start: int, numel: int) -> torch.Tensor:
        """Return elements [start, start + numel) as values of `dtype`. Kept: another dtype lets go of the GIL to be viewed."""
        key = dtype, start, numel
        if key not in self._parts:
            if len(self._parts) >= _KEPT_PARTS:
                self._parts.clear()
            first = start * _ITEM_BYTES
            self._parts[key] = self.memory[first : first + numel * dtype.itemsize].view(dtype)
        return self._parts[key]


@dataclass
class _Weights:
    """A place for weights, and the last copy that left it."""

    memory: "_Place"
    left: _C.CopyEvent | None = None


@dataclass
class _Chunk:
    """A chunk on its way through the tier: what Adam is given, where its weights belong, when the last copy has come.

    part: which of a step's parts it is of. homes: where gradients pass from (None: they are there) and weights belong.
    """

    part: int
    spans: Sequence[Span]
    grads: list[torch.Tensor]
    params: list[torch.Tensor]
    grad_homes: list[torch.Tensor | None]
    weights: list[torch.Tensor]
    place: _Weights | None
    arrived: _C.CopyEvent | None


class CpuStore:
    """Optimizer states in host memory; `copies` is the only way to and from it."""

    tier = "cpu"

    def __init__(
        self,
        buckets: Sequence[Bucket],
        device: torch.device,
        pin_memory: bool,
        pin_memory_limit: int | None = None,
        chunk_numel: int = CHUNK_NUMEL,
        *,
        grads_leave: bool = False,
        weights_here: bool = False,
    ) -> None:
        """Allocate zero states for `buckets`, whose weights are on `device`, and staging for chunks of `chunk_numel` elements.

        At most `pin_memory_limit` bytes are pinned; what cannot be is pageable. grads_leave: in backward (`Bucket.host_grad`),
        so that none come in a step. weights_here: the buckets' shards of weights lie in this tier (`Bucket.tier`).
        """
        if chunk_numel < BLOCK or chunk_numel % BLOCK:
            raise ValueError(f"offload: chunk_numel is {chunk_numel}; expected a multiple of {BLOCK}")
        self.copies, self._device = _C.HostTier(device, pin_memory, pin_memory_limit), device
        self._stepper = _C.AdamStepper()
        self._chunk_numel = staging_numel(buckets, chunk_numel)
        place_bytes = self._chunk_numel * _ITEM_BYTES
        self._grads = [self._place(place_bytes) for _ in range(0 if grads_leave else GRAD_PLACES)]
        self._weights = [_Weights(self._place(place_bytes)) for _ in range(0 if weights_here else WEIGHT_PLACES)]
        self._turn = 0  # chunks so far that did not pass: says whose turn it is
        make = partial(self.copies.empty, pinned=False)
        self._states: dict[Bucket, Kept] = {bucket: bucket.kind.new(bucket.owned_numel, make) for bucket in buckets}

    def _place(self, size: int) -> _Place:
        return _Place(self.copies.empty(size, torch.uint8))

    @property
    def scratch_bytes(self) -> int:
        """See StateStore."""
        return sum(place.memory.nbytes for place in [*self._grads, *(weights.memory for weights in self._weights)])

    @property
    def weight_scratch_bytes(self) -> int:
        """See StateStore."""
        return 0

    def read(self, bucket: Bucket, key: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """See StateStore."""
        return read_part(self._states[bucket], bucket, key, start, numel)

    def give_up(self, bucket: Bucket, end: Bucket) -> Kept:
        """Keep of a bucket's states those of `end`, a bucket of the end of its owned range, in memory of that size.

        Returns the others.
        """
        first = bucket.owned_numel - end.owned_numel
        kept = self._states.pop(bucket)
        self._states[end] = kept
        if first:
            self._states[end] = end.kind.new(end.owned_numel, partial(self.copies.empty, pinned=False))
            for key, flat in range_of(kept, first, end.owned_numel).items():
                self._states[end][key].copy_(flat)
        return range_of(kept, 0, first)

    def write(self, bucket: Bucket, key: str, start: int, values: torch.Tensor) -> None:
        """See StateStore."""
        kept = range_of(self._states[bucket], start, values.numel())
        for name, source in kept_values(bucket.kind, key, values.to(self._device)).items():
            self.copies.to_tier(kept[name], source.to(kept[name].dtype).contiguous().view(-1)).synchronize()

    def stored(self, bucket: Bucket) -> Iterator[tuple[str, str, int]]:
        """See StateStore."""
        return ((self.tier, key, flat.nbytes) for key, flat in self._states[bucket].items())

    def steps(
        self,
        parts: Sequence[Sequence[Span]],
        hypers: Scalars,
        beside: Callable[[int], None] = lambda index: None,
    ) -> Iterator[_C.CopyEvent | None]:
        """See StateStore.

        beside: is called with each part's index once its first copies are queued. They do not wait for what it queues.
        RuntimeError if a copy failed: then only some chunks were updated, and every later step raises it, too.
        """
        try:
            if not self._weights:
                self.copies.synchronize()  # weights that still leave for the device must not change
            # Each chunk is fetched before the one before it is updated, of the next part, too: it travels meanwhile.
            chunks = _one_ahead(self._fetch(index, spans) for index, part in enumerate(parts) for spans in self._chunks(part))
            for index, of_part in groupby(chunks, key=lambda chunk: chunk.part):
                left: _C.CopyEvent | None = None
                for number, chunk in enumerate(of_part):
                    if number == 0:
                        beside(index)
                    left = self._update(chunk, hypers) or left
                yield left
        except BaseException:  # GeneratorExit among them
            self.copies.drain()  # what is in flight reads gradients, which the next backward overwrites
            raise

    def _update(self, chunk: _Chunk, hypers: Scalars) -> _C.CopyEvent | None:
        """Run Adam on a chunk when it has come, and let its weights leave; returns the event of the last."""
        if chunk.arrived is not None:
            chunk.arrived.synchronize()
        states = [range_of(self._states[span.bucket], span.start, span.numel) for span in chunk.spans]
        left: _C.CopyEvent | None = None
        if self.copies.caller_copies:
            param_homes = chunk.weights if chunk.place is not None else [None] * len(chunk.spans)
            homes = {"tier": self.copies, "grad_homes": chunk.grad_homes, "param_homes": param_homes}
            step_spans(self._stepper, hypers, chunk.spans, chunk.params, chunk.grads, states, **homes)
            return None
        step_spans(self._stepper, hypers, chunk.spans, chunk.params, chunk.grads, states)
        if chunk.place is not None:
            for weight, param in zip(chunk.weights, chunk.params, strict=True):
                left = chunk.place.left = self.copies.from_tier(weight, param)
        return left

    def _fetch(self, part: int, spans: Sequence[Span]) -> _Chunk:
        """Let a chunk's gradients, and weights that are the master or half of it, come to staging, unless they will pass."""
        passes = self.copies.caller_copies
        turn = self._turn
        if not passes:  # else nothing lies in a place from one chunk to the next
            self._turn += 1
        place = self._weights[turn % WEIGHT_PLACES] if self._weights else None
        if place is not None and place.left is not None:
            place.left.synchronize()
        chunk_grads, params, weights = [], [], []
        grad_homes: list[torch.Tensor | None] = []
        cursor = 0
        arrived: _C.CopyEvent | None = None
        for span in spans:
            bucket, end = span.bucket, span.start + span.numel
            weight = bucket.owned_weight[span.start : end]
            param = weight if place is None else place.memory.part(bucket.dtype, cursor, span.numel)
            grad_home = None
            if bucket.host_grad is not None:
                grad = bucket.host_grad[span.start : end]
            else:
                assert bucket.grad is not None
                grad_place = self._grads[turn % GRAD_PLACES]  # Adam is done with it: it has worked on the chunk before the last
                grad = grad_place.part(bucket.grad.dtype, cursor, span.numel)
                grad_home = bucket.grad[span.start : end]
                if not passes:
                    arrived = self.copies.to_tier(grad, grad_home)
            if place is not None and bucket.kind.reads_weights and not passes:
                arrived = self.copies.to_tier(param, weight)
            chunk_grads.append(grad)
            grad_homes.append(grad_home)
            params.append(param)
            weights.append(weight)
            cursor += _whole_blocks(span.numel)
        return _Chunk(part, spans, chunk_grads, params, grad_homes, weights, place, arrived)

    def _chunks(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Cut spans at block boundaries into as few lists as can be, of about equal size; of none one empty list."""
        if not spans:
            yield []
            return
        numel = sum(_whole_blocks(span.numel) for span in spans)
        most = _whole_blocks(-(-numel // -(-numel // self._chunk_numel)))
        chunk: list[Span] = []
        room = most
        for span in spans:
            done = 0
            while done < span.numel:
                part = span.part(done, min(span.numel - done, room))
                chunk.append(part)
                done, room = done + part.numel, room - _whole_blocks(part.numel)
                if room <= 0:
                    yield chunk
                    chunk, room = [], most
        if chunk:
            yield chunk


def _one_ahead(chunks: Iterator[_Chunk]) -> Iterator[_Chunk]:
    """Yield each chunk once the next one is made."""
    here = next(chunks, None)
    while here is not None:
        ahead = next(chunks, None)
        yield here
        here = ahead


def _whole_blocks(numel: int) -> int:
    return -(-numel // BLOCK) * BLOCK


def warn_of_pageable(copies: _C.HostTier) -> None:
    """Say once what it costs if memory of the tier should be pinned and is not."""
    if copies.pin_refusal:
        logger.warning(
            "offload: %d of %d bytes that copies use cannot be pinned, so they are pageable: the same bits, but copies of them "
            "do not overlap with anything, and whoever needs them waits (%s; expected a higher limit of locked memory, "
            '`ulimit -l`, and of offload={"pin_memory_limit": ...})',
            copies.bytes_refused,
            copies.bytes_refused + copies.bytes_pinned,
            copies.pin_refusal,
        )
