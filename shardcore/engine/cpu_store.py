"""The cpu tier of optimizer states: exact, chunk by chunk, through counted copies only.

States and masters live in the tier's buffers. A step copies each chunk of the reduced gradient to the tier (and of weights,
unless float32 masters replace them), runs the same Adam kernel there, and copies the new weights back. On CPU ranks the tier
is still memory of its own, so that what the copies do can be tested anywhere.

Note [Staging]. While Adam works on a chunk, the next one comes in and the one before goes back. So there are two places for
gradients, and three for weights, which are used in turn. A place is taken again when its last way back is done. Only these
places are pinned: states and masters never travel. Gradients that leave in backward (`Bucket.host_grad`) are there already, and
need none. Places are bytes, each element has those of a float32, so that gradients of any dtype fit and all memory is taken
before the first step.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardcore._native import _C
from shardcore.engine.bucket import Bucket
from shardcore.engine.overlap_step import own_thread_count
from shardcore.engine.state_store import Scalars, Span, lists_of, read_part
from shardcore.layout import BLOCK, round_up
from shardcore.optim.state_format import Kept, kept_values, range_of

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
    states = sum(bucket.state_format.nbytes(bucket.owned_numel) for bucket in buckets)
    return states + staging_bytes(buckets, CHUNK_NUMEL, grads_leave, weights_here)


class _Place:
    """Memory in staging; each element has the bytes of the widest dtype."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def part(self, dtype: torch.dtype, start: int, numel: int) -> torch.Tensor:
        """Return elements [start, start + numel) as values of `dtype`."""
        first = start * _ITEM_BYTES
        return self.memory[first : first + numel * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class _Part:
    """The chunks of one part of a step, kept for the next one.

    memory: what they were made for, see _memory_of. buckets: those of the spans of all chunks, in order.
    """

    spans: Sequence[Span]
    memory: dict[Bucket, tuple[int, torch.dtype]]
    chunks: list[_C.OffloadChunk]
    buckets: list[Bucket]


def _memory_of(spans: Sequence[Span]) -> dict[Bucket, tuple[int, torch.dtype]]:
    """Return where the weights of the spans' buckets lie, which chunks keep, and the dtypes of the gradients of a step."""
    buckets = {span.bucket: None for span in spans}
    return {bucket: (bucket.owned_weight.data_ptr(), _grad_of(bucket).dtype) for bucket in buckets}


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
        self._chunk_numel = staging_numel(buckets, chunk_numel)
        place_bytes = self._chunk_numel * _ITEM_BYTES
        self._grads = [self._place(place_bytes) for _ in range(0 if grads_leave else GRAD_PLACES)]
        self._weights = [self._place(place_bytes) for _ in range(0 if weights_here else WEIGHT_PLACES)]
        self._pipeline = _C.OffloadPipeline(self.copies, len(self._weights))
        self._parts: dict[tuple[Bucket, int], _Part] = {}  # of the last steps, by the bucket of the first span and its turn
        make = partial(self.copies.empty, pinned=False)
        self._states: dict[Bucket, Kept] = {bucket: bucket.state_format.new(bucket.owned_numel, make) for bucket in buckets}

    def _place(self, size: int) -> _Place:
        return _Place(self.copies.empty(size, torch.uint8))

    @property
    def scratch_bytes(self) -> int:
        """See StateStore."""
        return sum(place.memory.nbytes for place in [*self._grads, *self._weights])

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
        self._parts.clear()
        first = bucket.owned_numel - end.owned_numel
        kept = self._states.pop(bucket)
        self._states[end] = kept
        if first:
            self._states[end] = end.state_format.new(end.owned_numel, partial(self.copies.empty, pinned=False))
            for key, flat in range_of(kept, first, end.owned_numel).items():
                self._states[end][key].copy_(flat)
        return range_of(kept, 0, first)

    def write(self, bucket: Bucket, key: str, start: int, values: torch.Tensor) -> None:
        """See StateStore."""
        kept = range_of(self._states[bucket], start, values.numel())
        for name, source in kept_values(bucket.state_format, key, values.to(self._device)).items():
            self.copies.to_tier(kept[name], source.to(kept[name].dtype).contiguous().view(-1)).synchronize()

    def stored(self, bucket: Bucket) -> Iterator[tuple[str, str, int]]:
        """See StateStore."""
        return ((self.tier, key, flat.nbytes) for key, flat in self._states[bucket].items())

    def steps(
        self,
        parts: Sequence[Sequence[Span]],
        hypers: Scalars,
        beside: Callable[[int], None] | None = None,
    ) -> Iterator[_C.CopyEvent | None]:
        """See StateStore.

        beside: is called with each part's index once its first copies are queued. They do not wait for what it queues.
        RuntimeError if a copy failed: then only some chunks were updated, and every later step raises it, too.
        """
        kept: list[_Part] = []
        turn = 0
        for spans in parts:
            kept.append(self._part(spans, turn))
            turn += len(kept[-1].chunks)
        chunks = [chunk for part in kept for chunk in part.chunks]
        grads = [_grad_of(bucket) for part in kept for bucket in part.buckets]
        threads = own_thread_count()
        assert not isinstance(hypers, _C.DeviceScalars)
        try:
            # Weights that lie here and still leave for the device must not change.
            if not chunks and not self._weights:
                self.copies.synchronize()
            self._pipeline.begin(chunks, grads, hypers, threads, weights_leave=not self._weights)
            last = 0
            for index, part in enumerate(kept):
                first, last = last, last + len(part.chunks)
                if beside is not None:
                    self._pipeline.wait_fetched(first + 2)
                    beside(index)
                for number in range(first, last if threads == 0 else first):  # so that an interrupt need not wait for all
                    self._pipeline.wait_updated(number, number + 1)
                yield self._pipeline.wait_updated(first, last)
        except BaseException:  # GeneratorExit among them
            self._pipeline.end()
            self.copies.drain()  # what is in flight reads gradients, which the next backward overwrites
            raise
        self._pipeline.end()

    def _part(self, spans: Sequence[Span], turn: int) -> _Part:
        """Return the chunks of `spans`, the first of which takes the places whose turn it is."""
        if not spans:
            return _Part([], {}, [], [])
        key, memory = (spans[0].bucket, turn % (GRAD_PLACES * WEIGHT_PLACES)), _memory_of(spans)
        part = self._parts.get(key)
        if part is None or part.spans != spans or part.memory != memory:
            cut = list(self._chunks(spans))
            chunks = [self._chunk(of_chunk, turn + number) for number, of_chunk in enumerate(cut)]
            part = _Part(list(spans), memory, chunks, [span.bucket for of_chunk in cut for span in of_chunk])
            self._parts[key] = part
        return part

    def _chunk(self, spans: Sequence[Span], turn: int) -> _C.OffloadChunk:
        """Give each span its places, those whose turn it is: its gradient's and its weights', unless they lie in the tier."""
        params, grads = [], []
        weights: list[torch.Tensor | None] = []
        cursor = 0
        for span in spans:
            bucket, here = span.bucket, slice(span.start, span.start + span.numel)
            weight, grad = bucket.owned_weight[here], _grad_of(bucket)
            if self._grads:  # Adam is done with the place: it has worked on the chunk before the last
                grads.append(self._grads[turn % GRAD_PLACES].part(grad.dtype, cursor, span.numel))
            else:
                grads.append(grad[here])
            if self._weights:
                params.append(self._weights[turn % WEIGHT_PLACES].part(bucket.dtype, cursor, span.numel))
            else:
                params.append(weight)
            weights.append(weight if self._weights else None)
            cursor += round_up(span.numel, BLOCK)
        return self._pipeline.chunk(
            params=params,
            grads=grads,
            weights=weights,
            grad_starts=[span.start for span in spans],
            grads_come=bool(self._grads),
            place=turn % WEIGHT_PLACES if self._weights else 0,
            **lists_of(spans, [range_of(self._states[span.bucket], span.start, span.numel) for span in spans]),
        )

    def _chunks(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Cut spans at block boundaries into as few lists as can be, of about equal size."""
        numel = sum(round_up(span.numel, BLOCK) for span in spans)
        most = round_up(-(-numel // -(-numel // self._chunk_numel)), BLOCK)
        chunk: list[Span] = []
        room = most
        for span in spans:
            done = 0
            while done < span.numel:
                part = span.part(done, min(span.numel - done, room))
                chunk.append(part)
                done, room = done + part.numel, room - round_up(part.numel, BLOCK)
                if room <= 0:
                    yield chunk
                    chunk, room = [], most
        if chunk:
            yield chunk


def _grad_of(bucket: Bucket) -> torch.Tensor:
    """Return the gradient of a bucket's owned range: in the tier if it has left, else on the device."""
    grad = bucket.grad if bucket.host_grad is None else bucket.host_grad
    assert grad is not None
    return grad


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
