"""Optimizer states off the device: updated on the CPU, chunk by chunk, with the same bits as on the
device.

States and masters live in host buffers (HostStates), or in files (offload/nvme_states.py). A step
copies each chunk of the reduced gradient to the host (and of weights, unless float32 masters
replace them), runs the same Adam kernel there, and copies the new weights back. On CPU ranks the
tier is still separate memory, so that the copies can be tested without a GPU.

Note [Staging]. While a chunk is updated, the next one is copied in and the one before copied back,
by csrc/offload. A staging buffer of each kind is used again once the chunk before is through with
it.
Only staging buffers are pinned, since states and masters are never copied.

A chunk is checked and converted to plain data once, and used by every step whose weights are at the
same addresses. A blocking step runs in the thread that waits, a chunk at a time, so that an
interrupt is noticed. An overlapped one runs on a C++ thread that never needs the GIL, so a caller
that computes in Python delays no update; the Python worker only waits for buckets and starts their
gathers. Torch's own steps (RMSprop and others) are called for each chunk on the waiting thread.
Where weights are the master, or half of it (split), they are copied in for the step, so edits by
the user count.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from shardcore._native import _C
from shardcore.engine.bucket import Bucket, allocate
from shardcore.engine.states import DeviceStore, Scalars, Span, lists_of, update_elements
from shardcore.layout import BLOCK, round_up
from shardcore.offload.disk import ENGINE_BYTES
from shardcore.offload.nvme_states import WEIGHT, NvmeStates, StateFiles
from shardcore.offload.nvme_weights import NvmeWeights
from shardcore.offload.workers import on_worker
from shardcore.optim.elementwise import ElementFormat, ElementStep, own_state
from shardcore.optim.state_format import StateTensors, range_of, stored_values, values_of

logger = logging.getLogger("shardcore")

# A staging buffer of float32 has 72 MiB: small beside the states of a model with such units, and
# large enough that waking the threads for a chunk is short beside its Adam. A little above a power
# of two: so are units, by their biases and norms.
CHUNK_NUMEL = (1 << 24) + (1 << 21)
# One is copied in while another is updated; of weights a third one is copied back.
GRAD_BUFFERS, WEIGHT_BUFFERS = 2, 3
# Of the widest dtype of gradients and weights: any fits, and all memory is allocated before the
# first step.
_ITEM_BYTES = torch.float32.itemsize


def staging_numel(buckets: Sequence[Bucket]) -> int:
    """Return the capacity of a staging buffer in elements: that of the largest chunk."""
    return min(CHUNK_NUMEL, max((bucket.host_numel for bucket in buckets), default=0))


@dataclass(frozen=True)
class OffloadOptions:
    """The placement of states, gradients and weights in host memory or in files.

    optimizer: the tier of states and masters ("cpu", or "nvme": in files under the directories
    `path`), or None: on the device. ratio: the share of states (and of the step) on that tier; the
    rest stays on the device. auto: the ratio starts as 1 and is chosen after a few steps, so that
    at most device_memory_limit bytes of states stay on the device (None: as many as the measured
    peak leaves room for). gradients: the tier of reduced gradients, or None: the device. params:
    the tier of the shards of weights, or None; "nvme": in a file under `path`, as states.
    pin_memory: whether host memory that a GPU reads or writes is page-locked. pin_memory_limit: the
    most bytes of it on this rank, None for the system's limit. cpu_threads: of the worker of an
    overlapped step, None for this rank's share of the machine. durable: whether files under `path`
    have the last committed step at any instant. resume: whether to resume from a committed step
    there, None if there may be none.
    """

    optimizer: str | None = None
    ratio: float = 1.0
    auto: bool = False
    device_memory_limit: int | None = None
    gradients: str | None = None
    params: str | None = None
    pin_memory: bool = False
    pin_memory_limit: int | None = None
    cpu_threads: int | None = None
    path: tuple[str, ...] | None = None
    durable: bool = True
    resume: bool | None = None


@dataclass(frozen=True)
class _Chunk:
    """A chunk of a step, and the tensors in the tier that update its spans. grads: staging buffers,
    if there are some.
    """

    native: _C.OffloadChunk
    spans: list[Span]
    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    states: list[StateTensors]


@dataclass(frozen=True)
class _Part:
    """The chunks of one part of a step. The next step uses them again if spans and dtypes of
    gradients are the same.

    on_device: the spans that the device updates.
    """

    spans: Sequence[Span]
    grad_dtypes: list[torch.dtype]
    chunks: list[_Chunk]
    on_device: list[Span]


class HostStates:
    """Optimizer states in host memory: flat tensors of each bucket's part in the tier. Ranges
    count from the beginning of that part.
    """

    tier = "cpu"
    scratch_bytes = 0
    places = 1  # of chunks, which take turns

    def __init__(
        self, buckets: Sequence[Bucket], allocate: Callable[[int, torch.dtype], torch.Tensor]
    ) -> None:
        """Allocate zero states for `buckets`, to be updated in chunks."""
        self.chunk_numel, self._allocate = staging_numel(buckets), allocate
        self._states = {bucket: self._zeros(bucket) for bucket in buckets}

    def _zeros(self, bucket: Bucket) -> StateTensors:
        return bucket.state_format.new(bucket.host_numel, self._allocate)

    def replace(self, replaced: Sequence[Bucket], new_buckets: Sequence[Bucket]) -> None:
        """See StateStore."""
        for bucket in replaced:
            del self._states[bucket]
        self._states |= {bucket: self._zeros(bucket) for bucket in new_buckets}

    def stored(self, bucket: Bucket) -> Iterator[tuple[str, int]]:
        """Yield (key, bytes) of each tensor that keeps a bucket's states."""
        return ((key, flat.nbytes) for key, flat in self._states[bucket].items())

    def states_of(self, bucket: Bucket, start: int, numel: int) -> StateTensors:
        """View states of elements [start, start + numel); not to be written."""
        return range_of(self._states[bucket], start, numel)

    def change(
        self, bucket: Bucket, start: int, numel: int
    ) -> Iterator[tuple[int, int, StateTensors]]:
        """Yield (start, numel, states to write to) of each part of a range. The caller's writes are
        final when it requests the next part.
        """
        yield start, numel, self.states_of(bucket, start, numel)

    def shrink(self, bucket: Bucket) -> StateTensors:
        """See CpuStore."""
        states, first = self._states[bucket], bucket.device_numel
        if first:
            self._states[bucket] = self._zeros(bucket)
            for key, flat in range_of(states, first, bucket.host_numel).items():
                self._states[bucket][key].copy_(flat)
        return range_of(states, 0, first)

    def cut(self, spans: Sequence[Span]) -> Iterator[list[Span]]:
        """Cut spans at block boundaries into as few lists as can be, of about equal size."""
        numel = sum(round_up(span.numel, BLOCK) for span in spans)
        most = round_up(-(-numel // -(-numel // self.chunk_numel)), BLOCK)
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

    def of_chunk(self, spans: Sequence[Span], turn: int) -> list[StateTensors]:
        """View the states of each span of chunk `turn` of a step, where they are while Adam
        works on them.
        """
        return [
            self.states_of(span.bucket, span.start - span.bucket.device_numel, span.numel)
            for span in spans
        ]


class CpuStore:
    """Optimizer states that the CPU updates, of each bucket's elements from `device_numel` on, in
    host memory or in files.

    `copies` is the only way to and from host memory.
    """

    weight_scratch_bytes = 0
    on_device: DeviceStore | None = None

    def __init__(
        self,
        buckets: Sequence[Bucket],
        copies: _C.HostTier,
        device: torch.device,
        tiers: OffloadOptions,
        files: StateFiles | None = None,
        nodes: Sequence[int] = (),
    ) -> None:
        """Allocate zero states for `buckets`, whose weights are on `device`, and staging for chunks
        of CHUNK_NUMEL elements.

        copies: allocates host memory. tiers: gradients in host memory are copied in backward
        (`Bucket.host_grad`), not in a step; weights in host memory need no staging, either. files:
        for states in files, not in host memory. nodes: the NUMA nodes over which states alternate.
        """
        self._buckets, self.copies, self._device = list(buckets), copies, device
        # states and masters are never copied: staging buffers alone are pinned
        allocate = partial(self.copies.empty, pinned=False, nodes=nodes)
        self.in_files: NvmeStates | None = None
        self.weight_files: NvmeWeights | None = None
        self._states: HostStates | NvmeStates
        if files is None:
            self._states, self._files, engine_bytes = HostStates(buckets, allocate), [], 0
        else:  # the engine is one of the process, for all of its files
            self._states = self.in_files = NvmeStates(buckets, files, allocate)
            self._files, engine_bytes = [self.in_files], ENGINE_BYTES
        self.tier = self._states.tier
        size = self._states.chunk_numel * _ITEM_BYTES
        self._grads = [
            self.copies.empty(size, torch.uint8)
            for _ in range(0 if tiers.gradients else GRAD_BUFFERS)
        ]
        self._weights = [
            self.copies.empty(size, torch.uint8)
            for _ in range(0 if tiers.params else WEIGHT_BUFFERS)
        ]
        self.scratch_bytes = (
            size * (len(self._grads) + len(self._weights))
            + self._states.scratch_bytes
            + engine_bytes
        )
        # of the last steps, by the first span's bucket and first buffers
        self._parts: dict[tuple[Bucket, int], _Part] = {}
        self._before_change: Callable[[], object] | None = None

    @cached_property
    def _pipeline(self) -> _C.OffloadPipeline:
        return _C.OffloadPipeline(self.copies, len(self._weights))

    def keep_weights(
        self, buckets: Sequence[Bucket], files: StateFiles, prefetch: int
    ) -> NvmeWeights:
        """Store the weights of `buckets`, updated and frozen ones in unit order, in files from now
        on. Raises OSError.
        """
        self.weight_files = NvmeWeights(buckets, files, self.copies, self._device, prefetch)
        self._files.append(self.weight_files)
        self.scratch_bytes += self.weight_files.scratch_bytes
        return self.weight_files

    @property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes so far between the device and host memory, and between that and files."""
        return {
            "to_host": self.copies.bytes_to_tier,
            "from_host": self.copies.bytes_from_tier,
            "to_nvme": sum(files.bytes_written for files in self._files),
            "from_nvme": sum(files.bytes_read for files in self._files),
        }

    def read(
        self, bucket: Bucket, key: str, start: int = 0, numel: int | None = None
    ) -> torch.Tensor:
        """See StateStore."""
        end = bucket.owned_numel if numel is None else start + numel
        split = key == "master" and bucket.state_format.master == "split"
        weight = bucket.owned_values(start, end - start) if split else bucket.owned_weight[:0]
        states = self._states.states_of(bucket, start - bucket.device_numel, end - start)
        return values_of(states, key, weight)

    def write(self, bucket: Bucket, key: str, start: int, values: torch.Tensor) -> None:
        """See StateStore."""
        self._wait_to_change()
        first, sources = (
            start - bucket.device_numel,
            stored_values(bucket.state_format, key, values.to(self._device)),
        )
        for at, numel, states in self._states.change(bucket, first, values.numel()):
            for name, source in range_of(sources, at - first, numel).items():
                self.copies.to_tier(
                    states[name], source.to(states[name].dtype).contiguous().view(-1)
                ).synchronize()

    def states_of(self, bucket: Bucket, start: int, numel: int) -> StateTensors:
        """See StateStore."""
        return self._states.states_of(bucket, start - bucket.device_numel, numel)

    def watch(self, before_change: Callable[[], object] | None) -> None:
        """See StateStore."""
        self._before_change = before_change

    def forget_weights(self) -> None:
        """See StateStore."""
        self._parts.clear()
        if self.on_device is not None:
            self.on_device.forget_weights()

    def _wait_to_change(self) -> None:
        if (before_change := self._before_change) is not None:  # another thread may end it
            before_change()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that states and buffers take."""
        stored = (entry for bucket in self._buckets for entry in self.stored(bucket))
        return self.scratch_bytes + sum(size for tier, _, size in stored if tier == "cpu")

    def stored(self, bucket: Bucket) -> Iterator[tuple[str, str, int]]:
        """See StateStore."""
        return ((self.tier, key, nbytes) for key, nbytes in self._states.stored(bucket))

    def shrink(self, bucket: Bucket) -> StateTensors:
        """Return the states of a bucket's first `device_numel` elements, and keep only those of the
        others; before, all were here.
        """
        assert isinstance(self._states, HostStates)
        self._parts.clear()
        return self._states.shrink(bucket)

    def replace(self, replaced: Sequence[Bucket], new_buckets: Sequence[Bucket]) -> None:
        """See StateStore. Not of files."""
        assert isinstance(self._states, HostStates)
        self._parts.clear()
        self._states.replace(replaced, new_buckets)

    def track(self, buckets: Sequence[Bucket]) -> None:
        """See StateStore."""
        self._parts.clear()
        for bucket in buckets:
            bucket.bits["host"] = allocate(
                (bucket.host_numel + 7) // 8, torch.uint8, torch.device("cpu")
            )

    def steps(
        self, parts: Sequence[Sequence[Span]], hypers: Scalars
    ) -> Iterator[_C.CopyEvent | None]:
        """See StateStore."""
        return self._steps(parts, hypers)

    def _steps(
        self,
        parts: Sequence[Sequence[Span]],
        hypers: Scalars,
        update_on_device: Callable[[Sequence[Span]], None] | None = None,
    ) -> Iterator[_C.CopyEvent | None]:
        """Update the CPU's spans of each part.

        update_on_device: called with the device's spans of each part, once the part's first copies
        are queued, so that copies do not wait for it. RuntimeError if a copy failed: then only some
        chunks are updated.
        """
        self._wait_to_change()
        planned: list[_Part] = []
        turn = 0
        for spans in parts:
            planned.append(self._part(spans, turn))
            turn += len(planned[-1].chunks)
        chunks = [chunk for part in planned for chunk in part.chunks]
        buckets = [span.bucket for chunk in chunks for span in chunk.spans]
        alone = not self._files
        scalars = self._scalars(chunks, hypers)
        # 0: chunks are updated in the waits below
        threads = on_worker.threads if alone and not callable(scalars) else 0
        try:
            # Weights in host memory that are still being copied to the device must not change.
            if not chunks and not self._weights:
                self.copies.synchronize()
            for files in self._files:
                files.begin([chunk.spans for chunk in chunks])
            self._pipeline.begin(
                [chunk.native for chunk in chunks],
                [_grad_of(bucket)[0] for bucket in buckets],
                scalars,
                threads,
                weights_leave=not self._weights,
                arrivals=[bucket.arrival for bucket in buckets],
                any_order=alone,
            )
            last = 0
            for part in planned:
                first, last = last, last + len(part.chunks)
                if update_on_device is not None:
                    self._pipeline.wait_fetched(first + 2)
                    update_on_device(part.on_device)
                # so that an interrupt need not wait for all
                for number in range(first, last if threads == 0 else first):
                    for files in self._files:
                        files.before(number)
                    self._pipeline.wait_updated(number, number + 1)
                    for files in self._files:
                        files.after(number)
                yield self._pipeline.wait_updated(first, last)
        except BaseException:  # GeneratorExit among them
            self._pipeline.end()
            # copies in flight read gradients, which the next backward overwrites
            self.copies.drain()
            raise
        self._pipeline.end()

    def _scalars(self, chunks: Sequence[_Chunk], hypers: Scalars) -> Any:
        """Return the scalars of a kernel (Adam, SGD, Adagrad, Lion) that the pipeline runs itself;
        for torch's other optimizers `_update`, which it calls for each chunk.
        """
        assert not isinstance(hypers, _C.DeviceScalars)
        if not any(isinstance(hyper, ElementStep) for hyper in hypers):
            return hypers
        scalars = [hyper.scalars for hyper in hypers]
        missing = any(scalar is None for scalar in scalars)
        return partial(self._update, chunks, hypers) if missing else scalars

    def _update(self, chunks: Sequence[_Chunk], hypers: Scalars, number: int) -> None:
        chunk = chunks[number]
        grads = chunk.grads or [_grad_part(span) for span in chunk.spans]
        update_elements(chunk.spans, chunk.params, grads, chunk.states, hypers)

    def _part(self, spans: Sequence[Span], turn: int) -> _Part:
        """Return the chunks of `spans`, of which the first is chunk `turn` of the step."""
        if not spans:
            return _Part([], [], [], [])
        key = spans[0].bucket, turn % (GRAD_BUFFERS * WEIGHT_BUFFERS * self._states.places)
        grad_dtypes = [
            _grad_of(bucket)[0].dtype for bucket in dict.fromkeys(span.bucket for span in spans)
        ]
        part = self._parts.get(key)
        if part is None or part.spans != spans or part.grad_dtypes != grad_dtypes:
            on_device, on_cpu = [], []
            for span in spans:
                first = max(0, min(span.bucket.device_numel - span.start, span.numel))
                if first:
                    on_device.append(span.part(0, first))
                if first < span.numel:
                    on_cpu.append(span.part(first, span.numel - first))
            cut = self._states.cut(on_cpu) if on_cpu else ()
            chunks = [self._chunk(of_chunk, turn + number) for number, of_chunk in enumerate(cut)]
            part = self._parts[key] = _Part(list(spans), grad_dtypes, chunks, on_device)
        return part

    def _chunk(self, spans: list[Span], turn: int) -> _Chunk:
        """Make chunk `turn`, with staging buffers for gradients and weights on the device."""
        grads = [_grad_part(span) for span in spans]
        if self.weight_files is not None:
            weights = [states[WEIGHT] for states in self.weight_files.of_chunk(spans, turn)]
        else:
            weights = [
                span.bucket.owned_weight[span.start : span.start + span.numel] for span in spans
            ]
        params, states = weights, self._states.of_chunk(spans, turn)
        staged = []
        if self._grads:  # the chunk before the last, which used the same buffer, is updated
            grads = staged = _places(self._grads[turn % GRAD_BUFFERS], grads)
        if self._weights:
            params = _places(self._weights[turn % WEIGHT_BUFFERS], weights)
        common: dict[str, Any] = dict(
            params=params,
            grads=grads,
            weights=weights if self._weights else [None] * len(spans),
            grad_starts=[span.start - _grad_of(span.bucket)[1] for span in spans],
            grads_come=bool(self._grads),
            place=turn % WEIGHT_BUFFERS if self._weights else 0,
        )
        if not isinstance(spans[0].bucket.state_format, ElementFormat):
            native = self._pipeline.chunk(**common, **lists_of(spans, states))
        else:
            native = self._pipeline.element_chunk(
                **common,
                states=[own_state(state) for state in states],
                masters=[state.get("master") for state in states],
                hyper_index=[span.hyper for span in spans],
            )
        return _Chunk(native, spans, params, staged, states)


def _places(buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """View a staging buffer as places for these tensors, each from a block boundary on."""
    places, first = [], 0
    for part in parts:
        places.append(buffer[first : first + part.nbytes].view(part.dtype))
        first += round_up(part.numel(), BLOCK) * _ITEM_BYTES
    return places


def _grad_of(bucket: Bucket) -> tuple[torch.Tensor, int]:
    """Return the gradient that the CPU reads (in host memory, or the device's), and its start in
    the owned range.
    """
    if bucket.host_grad is not None:
        return bucket.host_grad, bucket.device_numel
    assert bucket.grad is not None
    return bucket.grad, 0


def _grad_part(span: Span) -> torch.Tensor:
    grad, first = _grad_of(span.bucket)
    return grad[span.start - first : span.start - first + span.numel]


def warn_of_pageable(copies: _C.HostTier) -> None:
    """Log a warning if memory of the tier should be pinned and is not."""
    if copies.pin_refusal:
        logger.warning(
            "offload: %d of %d bytes for copies cannot be pinned, so they are pageable: the same "
            "bits, but their copies block and do not overlap with anything (%s). Raise the limit "
            'of locked memory (`ulimit -l`), or offload={"pin_memory_limit": ...}',
            copies.bytes_refused,
            copies.bytes_refused + copies.bytes_pinned,
            copies.pin_refusal,
        )


def warn_of_misplaced(copies: _C.HostTier) -> None:
    """Log a warning if states should lie on certain NUMA nodes and the system refused."""
    if copies.node_refusal:
        logger.warning(
            "offload: optimizer states are stored on any NUMA node: the same bits, but a step may "
            "be slower (%s). Docker allows the placement with --cap-add SYS_NICE",
            copies.node_refusal,
        )
