"""The cpu tier of optimizer states: exact, chunk by chunk, through counted copies only.

States and masters live in the tier's buffers. A step copies each chunk of the reduced gradient to the tier (and of weights
that have no master: float32 ones), runs the same Adam kernel there, and copies the new weights back. On CPU ranks the tier
is still memory of its own, so that what the copies do can be tested anywhere.

Note [Staging]. While Adam works on a chunk, the next one comes in and the one before goes back. So there are two places for
gradients, and three for weights, which are used in turn. A place is taken again when its last way back is done. Only these
places are pinned: states and masters never travel. Gradients that leave in backward (`Bucket.host_grad`) are there already, and
need none. Places are bytes, each element has those of a float32, so that gradients
of any dtype fit and all memory is taken before the first step.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch

from shardcore._native import _C
from shardcore.engine.bucket import Bucket
from shardcore.engine.store import Span, state_keys, step_spans
from shardcore.layout import BLOCK

logger = logging.getLogger("shardcore")

CHUNK_NUMEL = 1 << 22
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


def host_bytes(
    buckets: Sequence[Bucket], amsgrad: Mapping[Bucket, bool], grads_leave: bool = False, weights_here: bool = False
) -> int:
    """Return the bytes of host memory that a CpuStore of these buckets takes."""
    states = sum(bucket.owned_numel * len(state_keys(amsgrad[bucket], bucket.needs_master)) for bucket in buckets)
    return states * torch.float32.itemsize + staging_bytes(buckets, CHUNK_NUMEL, grads_leave, weights_here)


@dataclass
class _Weights:
    """A place for weights, and the last copy that left it."""

    memory: torch.Tensor
    left: _C.CopyEvent | None = None


@dataclass
class _Chunk:
    """A chunk on its way through the tier: what Adam is given, where its weights belong, when the last copy has come."""

    spans: Sequence[Span]
    grads: list[torch.Tensor]
    params: list[torch.Tensor]
    weights: list[torch.Tensor]
    place: _Weights | None
    arrived: _C.CopyEvent | None


class CpuStore:
    """Optimizer states in host memory; `copies` is the only way to and from it."""

    tier = "cpu"

    def __init__(
        self,
        buckets: Sequence[Bucket],
        amsgrad: Mapping[Bucket, bool],
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
        self._grads = [self.copies.empty(place_bytes, torch.uint8) for _ in range(0 if grads_leave else GRAD_PLACES)]
        self._weights = [
            _Weights(self.copies.empty(place_bytes, torch.uint8)) for _ in range(0 if weights_here else WEIGHT_PLACES)
        ]
        self._turn = 0  # chunks so far: says whose turn it is
        self._states = {
            bucket: {
                key: self.copies.empty(bucket.owned_numel, torch.float32, pinned=False)
                for key in state_keys(amsgrad[bucket], bucket.needs_master)
            }
            for bucket in buckets
        }

    @property
    def scratch_bytes(self) -> int:
        """See StateStore."""
        return sum(memory.nbytes for memory in [*self._grads, *(place.memory for place in self._weights)])

    @property
    def weight_scratch_bytes(self) -> int:
        """See StateStore."""
        return 0

    def states(self, bucket: Bucket) -> Mapping[str, torch.Tensor]:
        """See StateStore."""
        return self._states[bucket]

    def tiers(self, bucket: Bucket) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """See StateStore."""
        return {"cpu": self._states[bucket]}

    def replace(self, bucket: Bucket, end: Bucket) -> None:
        """Keep of a bucket's states those of `end`, a bucket of the end of its owned range, in memory of that size."""
        first = bucket.owned_numel - end.owned_numel
        kept = self._states.pop(bucket)
        for key, flat in kept.items() if first else ():
            kept[key] = self.copies.empty(end.owned_numel, flat.dtype, pinned=False)
            kept[key].copy_(flat[first:])
        self._states[end] = kept

    def write(self, bucket: Bucket, key: str, start: int, values: torch.Tensor) -> None:
        """See StateStore."""
        source = values.to(self._device, torch.float32).contiguous().view(-1)
        self.copies.to_tier(self._states[bucket][key][start : start + source.numel()], source).synchronize()

    def step(self, spans: Sequence[Span], hypers: Sequence[_C.AdamHyper], meanwhile: Callable[[], None] = lambda: None) -> None:
        """See StateStore. Complete when it returns, on CUDA in the order of the current stream.

        meanwhile: is called once the first copies are queued. They do not wait for what it queues, as later ones do.
        RuntimeError if a copy failed: then only some chunks were updated, and every later step raises it, too.
        """
        left: _C.CopyEvent | None = None
        try:
            if not self._weights:
                self.copies.synchronize()  # weights that still leave for the device must not change
            # Each chunk is fetched before the one before it is updated: it travels meanwhile.
            chunks = _one_ahead(self._fetch(spans) for spans in self._chunks(spans))
            first = list(islice(chunks, 1))
            meanwhile()
            for chunk in chain(first, chunks):
                if chunk.arrived is not None:
                    chunk.arrived.synchronize()
                states = [self._states_of(span) for span in chunk.spans]
                step_spans(self._stepper, hypers, [span.hyper for span in chunk.spans], chunk.params, chunk.grads, states)
                if chunk.place is not None:
                    for weight, param in zip(chunk.weights, chunk.params, strict=True):
                        left = chunk.place.left = self.copies.from_tier(weight, param)
            if left is not None:
                left.wait()
        except BaseException:
            self.copies.drain()  # what is in flight reads gradients, which the next backward overwrites
            raise

    def _fetch(self, spans: Sequence[Span]) -> _Chunk:
        """Let a chunk's gradients, and weights that have no master, come to staging."""
        turn, self._turn = self._turn, self._turn + 1
        place = self._weights[turn % WEIGHT_PLACES] if self._weights else None
        if place is not None and place.left is not None:
            place.left.synchronize()
        chunk_grads, params, weights = [], [], []
        cursor = 0
        arrived: _C.CopyEvent | None = None
        for span in spans:
            bucket, end = span.bucket, span.start + span.numel
            weight = bucket.owned_weight[span.start : end]
            param = weight if place is None else _part(place.memory, bucket.dtype, cursor, span.numel)
            if bucket.host_grad is not None:
                grad = bucket.host_grad[span.start : end]
            else:
                assert bucket.grad is not None
                grad_place = self._grads[turn % GRAD_PLACES]  # Adam is done with it: it has worked on the chunk before the last
                grad = _part(grad_place, bucket.grad.dtype, cursor, span.numel)
                arrived = self.copies.to_tier(grad, bucket.grad[span.start : end])
            if place is not None and not bucket.needs_master:
                arrived = self.copies.to_tier(param, weight)
            chunk_grads.append(grad)
            params.append(param)
            weights.append(weight)
            cursor += _whole_blocks(span.numel)
        return _Chunk(spans, chunk_grads, params, weights, place, arrived)

    def _states_of(self, span: Span) -> dict[str, torch.Tensor]:
        return {key: flat[span.start : span.start + span.numel] for key, flat in self._states[span.bucket].items()}

    def _chunks(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Cut spans at block boundaries and pack them into lists of at most `chunk_numel` elements."""
        chunk: list[Span] = []
        room = self._chunk_numel
        for span in spans:
            start, left = span.start, span.numel
            while left:
                numel = min(left, room)
                chunk.append(Span(span.bucket, start, numel, span.hyper))
                start, left, room = start + numel, left - numel, room - _whole_blocks(numel)
                if room <= 0:
                    yield chunk
                    chunk, room = [], self._chunk_numel
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


def _part(place: torch.Tensor, dtype: torch.dtype, start: int, numel: int) -> torch.Tensor:
    """Return elements [start, start + numel) of a place in staging, as values of `dtype`."""
    first = start * _ITEM_BYTES
    return place[first : first + numel * dtype.itemsize].view(dtype)


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
