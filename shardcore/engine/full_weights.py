"""Full weights, chunk after chunk, for readers outside of training: an inference engine.

A chunk is what one gather brings: a unit, or parameters of the root up to a number of bytes. The
next chunk is gathered while one is read. Nothing of the training state changes: values are gathered
into memory of their own, which belongs to the reader.

Order: that of the model's parameters. Parameters of the root come before and after the units that
they are before and after in the model. It is the same before the first forward and after it, so a
reader may ask for names once.

Note [Errors]: a rank that cannot read its shard sends undefined values, so that the other ranks do
not wait for it. The error is raised after the last chunk. A rank without memory for a chunk cannot
take part: it raises at once, and the other ranks fail at this gather (`Comm.joining`).
"""

from collections.abc import Collection, Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from shardcore.distributed.comm import Traffic, wait_all
from shardcore.engine.bucket import Bucket, Managed, rounded
from shardcore.engine.engine import Engine


class Range(NamedTuple):
    """Consecutive parameters of a bucket: elements [start, end) of its full values."""

    bucket: Bucket
    params: list[Managed]

    @property
    def start(self) -> int:
        """Where the first parameter begins."""
        return self.params[0].offset

    @property
    def end(self) -> int:
        """Where the last parameter ends."""
        return self.params[-1].offset + self.params[-1].local.numel()

    @property
    def nbytes(self) -> int:
        """The bytes of the weights."""
        return (self.end - self.start) * self.bucket.dtype.itemsize

    def cuts(self, ranks: int) -> list[int]:
        """Return where the parts of so many ranks begin in the range, and its end."""
        size, numel = self.bucket.layout.numel // ranks, self.end - self.start
        return [min(max(0, rank * size - self.start), numel) for rank in range(ranks + 1)]


Chunk: TypeAlias = list[Range]


def chunks_of(
    buckets: Sequence[Bucket], wanted: Collection[torch.Tensor], bucket_bytes: int | None
) -> list[Chunk]:
    """Return what is gathered at a time to read the parameters `wanted`, in order.

    bucket_bytes: the size of a chunk of the root; a larger parameter is a chunk alone. None: the
    size of the largest unit.
    """
    of_unit: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        if any(managed.param in wanted for managed in bucket.params):
            of_unit.setdefault(bucket.unit, []).append(bucket)
    root = of_unit.pop("", [])
    chunks = [[Range(bucket, bucket.params) for bucket in unit] for unit in of_unit.values()]
    first = sorted(params_of(chunk)[0].index for chunk in chunks)
    if bucket_bytes is None:
        bucket_bytes = max(
            (sum(part.nbytes for part in chunk) for chunk in chunks), default=1 << 28
        )
    chunks += _of_root(root, wanted, first, bucket_bytes)
    return sorted(chunks, key=lambda chunk: params_of(chunk)[0].index)


def _of_root(
    buckets: Sequence[Bucket],
    wanted: Collection[torch.Tensor],
    borders: Sequence[int],
    bucket_bytes: int,
) -> Iterator[Chunk]:
    """Yield chunks of the root, which end at `borders`: the first parameters of units."""
    params = sorted(
        ((m.index, m, bucket) for bucket in buckets for m in bucket.params if m.param in wanted),
        key=lambda each: each[0],
    )
    ranges: dict[Bucket, list[Managed]] = {}
    size, gap = 0, -1
    for index, managed, bucket in params:
        nbytes = managed.local.numel() * bucket.dtype.itemsize
        gap_now = sum(border <= index for border in borders)
        last = ranges.get(bucket, [None])[-1]
        follows = last is None or bucket.params.index(last) + 1 == bucket.params.index(managed)
        if ranges and (size + nbytes > bucket_bytes or gap_now != gap or not follows):
            yield [Range(*item) for item in ranges.items()]
            ranges, size = {}, 0
        ranges.setdefault(bucket, []).append(managed)
        size, gap = size + nbytes, gap_now
    if ranges:
        yield [Range(*item) for item in ranges.items()]


def params_of(chunk: Chunk) -> list[Managed]:
    """Return the parameters of a chunk in the order of the model."""
    return sorted((m for part in chunk for m in part.params), key=lambda managed: managed.index)


def _name_of(chunk: Chunk) -> str:
    return f"a stream of {chunk[0].bucket.unit or 'the root'}"


def read_dtype(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which weights of the dtype `own` are read."""
    return own if asked is None or not own.is_floating_point else asked


def _reads_masters(bucket: Bucket, asked: torch.dtype | None) -> bool:
    has_masters = bucket.state_format.master is not None
    return has_masters and read_dtype(bucket.dtype, asked) != bucket.dtype


def travels(engine: Engine, bucket: Bucket, asked: torch.dtype | None) -> bool:
    """Whether the values of a bucket have to be gathered; else the parameters have them."""
    return not engine.lifetimes.full_weight_resident or _reads_masters(bucket, asked)


class _Arriving(NamedTuple):
    """A chunk that is being gathered: its full values, range by range; None on other ranks than the
    receivers.
    """

    chunk: Chunk
    fulls: list[torch.Tensor | None]
    gathers: list[Any]


class FullWeights:
    """Reads the weights of one model once.

    dtype: of the values; None: that of the weights that forward uses. receivers: the ranks of
    engine.comm that get them.
    """

    def __init__(
        self,
        engine: Engine,
        chunks: Sequence[Chunk],
        dtype: torch.dtype | None,
        receivers: Collection[int],
    ) -> None:
        """See the class."""
        self._engine, self._comm, self._dtype = engine, engine.comm, dtype
        self._chunks = iter(chunks)
        ranks = self._comm.shard_ranks
        # slices are assembled by all ranks
        self._receivers = (
            [*ranks] if self._comm.slices else [rank for rank in ranks if rank in receivers]
        )
        self._receives = self._comm.rank in self._receivers
        self._error: Exception | None = None

    @torch.no_grad()
    def values(self) -> Generator[tuple[Managed, torch.Tensor]]:
        """Yield parameters with full values; nothing on ranks that do not receive. Collective.

        The next chunk is started when the first value of one is taken. Then the reader has dropped
        the values of the chunk before, so that two chunks have memory.
        """
        coming = self._start()
        try:
            while coming is not None:
                arriving, coming = coming, None
                wait_all(arriving.gathers)
                values = self._tensors(arriving) if self._receives else []
                del arriving
                if not values:
                    coming = self._start()
                for number, item in enumerate(values):
                    yield item
                    if number == 0:
                        coming = self._start()
                    del item
                del values
        finally:
            coming = coming or self._start()
            while coming is not None:  # the other ranks gather all of it
                wait_all(coming.gathers)
                coming = self._start()
        if self._error is not None:
            raise self._error

    def _start(self) -> _Arriving | None:
        """Start to gather the next chunk; None if there is none, or a gather failed."""
        chunk = None if self._comm.broken else next(self._chunks, None)
        if chunk is None:
            return None
        sizes = [(r.end - r.start) * self._sent_dtype(r.bucket).itemsize for r in chunk]
        with (
            self._comm.scope(f"shardcore::stream({chunk[0].bucket.label})"),
            self._comm.joining(f"{_name_of(chunk)} ({sum(sizes)} bytes)"),
        ):
            fulls, own_parts = zip(*(self._own_part(part) for part in chunk), strict=True)
            return _Arriving(chunk, [*fulls], self._gather(chunk, fulls, own_parts))

    def _own_part(self, part: Range) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the memory of a range, and in it what this rank has. Without a gather: the range
        itself, and None.
        """
        bucket, masters = part.bucket, _reads_masters(part.bucket, self._dtype)
        first = max(part.start, bucket.owned[0])
        numel = max(0, min(part.end, bucket.owned[1]) - first)
        values = self._read(bucket, first - bucket.owned[0], numel, masters)
        if bucket.owned_numel == bucket.layout.numel:
            return values, None
        if not self._receives:
            return None, values
        full = torch.empty(part.end - part.start, dtype=values.dtype, device=self._comm.device)
        own = full[first - part.start : first - part.start + numel]
        return full, own.copy_(values)

    def _sent_dtype(self, bucket: Bucket) -> torch.dtype:
        """Return the smaller of the dtype that is read and the dtype that is asked for."""
        read = torch.float32 if _reads_masters(bucket, self._dtype) else bucket.dtype
        return min(read, read_dtype(bucket.dtype, self._dtype), key=lambda each: each.itemsize)

    def _read(self, bucket: Bucket, start: int, numel: int, masters: bool) -> torch.Tensor:
        """Return owned values on the device, in the dtype in which they are sent."""
        dtype = read_dtype(bucket.dtype, self._dtype)
        try:
            if masters:
                values = self._engine.store.read(bucket, "master", start, numel)
            else:
                values = bucket.owned_values(start, numel)
            if dtype.itemsize < values.dtype.itemsize:
                values = rounded(values, dtype)
            return values.to(self._comm.device)
        except Exception as error:  # see Note [Errors]
            self._error = self._error or error
            return torch.zeros(numel, dtype=self._sent_dtype(bucket), device=self._comm.device)

    def _gather(
        self,
        chunk: Chunk,
        fulls: Sequence[torch.Tensor | None],
        own_parts: Sequence[torch.Tensor | None],
    ) -> list[Any]:
        comm, ranks = self._comm, self._comm.shard_ranks
        travels = [
            (part, full, own)
            for part, full, own in zip(chunk, fulls, own_parts, strict=True)
            if own is not None
        ]
        if not travels or not self._receivers:
            return []
        name = _name_of(chunk)
        whole = all(part.end - part.start == part.bucket.layout.numel for part, _, _ in travels)
        if whole and len(self._receivers) == len(ranks):
            return comm.all_gather(
                [full for _, full, _ in travels if full is not None], Traffic.READ, name, ranks
            )
        started: list[Any] = []
        for part, full, own in travels:
            cuts = part.cuts(len(ranks))
            if full is None:
                parts = [own[:0]] * len(ranks)
                parts[ranks.index(comm.rank)] = own
            else:
                parts = [full[a:b] for a, b in pairwise(cuts)]
            started += comm.gather_parts(
                parts, Traffic.READ, name, ranks, receivers=self._receivers
            )
        return started

    def _tensors(self, arriving: _Arriving) -> list[tuple[Managed, torch.Tensor]]:
        """Return a chunk's parameters with their values, in the order of the model."""
        value_of: dict[Managed, torch.Tensor] = {}
        for part, full in zip(arriving.chunk, arriving.fulls, strict=True):
            assert full is not None
            dtype = read_dtype(part.bucket.dtype, self._dtype)
            for managed in part.params:
                at = managed.offset - part.start
                value = full[at : at + managed.local.numel()].view(managed.local.shape)
                value_of[managed] = managed.full(rounded(value, dtype))
        return [(managed, value_of[managed]) for managed in params_of(arriving.chunk)]
