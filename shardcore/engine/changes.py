"""Changed elements of weights, for readers outside of training. After a step most 16-bit weights
are as they were.

Steps of Adam set a bit for each 16-bit weight that they change, in the pass that updates it
(`Bucket.bits`). All other writers mark a whole bucket (`Bucket.rewritten`). So do steps of other
optimizers, and of float32 weights.

Note [Wire]. A rank sends of each range the places and the values of its changed elements, as 16-bit
words: for each 65,536 of its elements how many changed (int32), the last 16 bits of each place, the
values. Where more than half of the elements changed the full range is smaller.
"""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from shardcore.distributed.comm import Traffic, wait_all
from shardcore.engine.bucket import Bucket, Managed
from shardcore.engine.engine import Engine
from shardcore.engine.full_weights import Chunk, FullWeights, Range, params_of
from shardcore.optim.elementwise import ElementFormat

_SEGMENT = 1 << 16  # elements whose places have 16 bits


def _notes_changes(bucket: Bucket) -> bool:
    """Whether steps can note which weights they change."""
    return (
        bucket.group is not None
        and bucket.dtype.itemsize == 2
        and not isinstance(bucket.state_format, ElementFormat)
    )


class Taken(NamedTuple):
    """What changed between two versions. bits: see `Bucket.take_changes`. rewritten: parameters
    that are in no bucket.
    """

    bits: Mapping[Bucket, torch.Tensor | None]
    rewritten: Collection[torch.nn.Parameter]


class Changes:
    """Which weights of a sharded model have changed, from `shardcore.track_changes`.

    version: the number of the last version that was streamed; 0 before the first. Pass it as
        `since` to the next `stream_params`.
    """

    def __init__(self, engine: Engine) -> None:
        """Let steps note changes from the first version on."""
        self._engine = weakref.ref(engine)
        self.version = 0
        self._streamed: object = None  # what the last stream yielded, and to whom; None: it failed

    def of(self, engine: Engine | None) -> bool:
        """Whether these are the changes of a model with this engine."""
        return engine is not None and self._engine() is engine

    def knows(self, since: int | None, streamed: object) -> bool:
        """Whether changes since version `since` are known to readers of `streamed`."""
        return since == self.version and self._streamed == streamed

    @property
    def unfinished(self) -> bool:
        """Whether the last stream did not reach its end, so that no reader has its version."""
        return self.version > 0 and self._streamed is None

    def begin(self, engine: Engine) -> Taken:
        """Begin a new version."""
        self.version += 1
        self._streamed = None
        new = [b for b in engine.updater.buckets if _notes_changes(b) and not b.bits]
        if new:
            engine.store.track(new)
        bits = {bucket: bucket.take_changes() for bucket in engine.buckets}
        rewritten = []
        for param, managed in engine.constant.items():
            if param not in engine.bucket_of and managed.rewritten:
                managed.rewritten = False
                rewritten.append(param)
        return Taken(bits, rewritten)

    def end(self, streamed: object) -> None:
        """Note that all readers of `streamed` have the version."""
        self._streamed = streamed


class ChangedWeights:
    """Reads what changed in the weights of one model once. receivers: the ranks of engine.comm that
    get it.
    """

    def __init__(
        self, engine: Engine, chunks: Sequence[Chunk], taken: Taken, receivers: Collection[int]
    ) -> None:
        """See the class."""
        self._engine, self._comm, self._taken = engine, engine.comm, taken
        self._chunks, self._receivers = chunks, receivers
        self._receives = self._comm.rank in receivers
        self._error: Exception | None = None

    @torch.no_grad()
    def values(self) -> Iterator[tuple[Managed, torch.Tensor | None, torch.Tensor]]:
        """Yield each parameter that changed, with the places of its changed elements (int64, in
        order) and their values; or None and its full value. Collective.
        """
        counts = self._counts()
        engine, whole, parts = self._engine, list[Chunk](), list[Chunk]()
        for chunk in self._chunks:
            full = [r for r in chunk if _is_smaller_whole(r, counts[_key(r)])]
            some = [r for r in chunk if r not in full and any(counts[_key(r)])]
            whole += [full] if full else []
            parts += [some] if some else []
        resident = engine.lifetimes.full_weight_resident
        full_weights = FullWeights(engine, () if resident else whole, None, self._receivers)
        left, values = iter(parts), full_weights.values()
        try:
            for managed in params_of([r for c in whole for r in c] if resident else []):
                if self._receives:
                    yield managed, None, managed.local.detach()
            for managed, value in values:
                yield managed, None, value
                del value
            for chunk in left:
                yield from self._changed(chunk, counts)
        finally:
            values.close()
            for chunk in left:  # the other ranks gather all of it
                if not self._comm.broken:
                    self._gather(chunk, counts)
        if self._error is not None:
            raise self._error

    def _counts(self) -> dict[tuple[Bucket, int], list[int]]:
        """Return how many elements of each range changed on each rank that has a part of it; -1
        where any may have. One exchange.
        """
        ranges = [part for chunk in self._chunks for part in chunk]
        with self._comm.joining("the counts of changes"):
            found = [self._count(part) for part in ranges]
            row = torch.stack(found).cpu() if found else torch.empty(0, dtype=torch.int64)
        ranks = self._ranks()
        rows = row[None]
        if len(ranks) > 1:
            gathered = self._comm.all_gather_cpu(row, Traffic.READ, "the counts of changes")
            rows = gathered[[*ranks]]
        return {_key(part): counts for part, counts in zip(ranges, rows.T.tolist(), strict=True)}

    def _count(self, part: Range) -> torch.Tensor:
        bits = self._taken.bits[part.bucket]
        if bits is None:
            return torch.tensor(-1, device=self._comm.device)
        start, numel = self._own(part)
        by_byte = torch.bincount(bits[start // 8 : (start + numel + 7) // 8], minlength=256)
        ones = torch.tensor([byte.bit_count() for byte in range(256)], device=bits.device)
        return (by_byte * ones).sum().to(self._comm.device)

    def _ranks(self) -> Sequence[int]:
        """Return the ranks that have parts of the weights."""
        comm = self._comm
        return [comm.rank] if self._engine.lifetimes.owns_everything else comm.shard_ranks

    def _own(self, part: Range) -> tuple[int, int]:
        """Return where this rank's part of a range begins in the owned range, and its length."""
        first, end = part.bucket.owned
        start = max(part.start, first)
        return start - first, max(0, min(part.end, end) - start)

    def _gather(
        self, chunk: Chunk, counts: Mapping[tuple[Bucket, int], list[int]]
    ) -> list[list[torch.Tensor]]:
        """Return what each rank sends of each range: see Note [Wire]. Nothing from others on ranks
        that do not receive.
        """
        comm, ranks = self._comm, self._ranks()
        me, started, gathered = ranks.index(comm.rank), [], []
        receivers = [rank for rank in ranks if rank in self._receivers]
        for part in chunk:
            cuts, of_ranks = part.cuts(len(ranks)), counts[_key(part)]
            words = [_words(b - a, n) for (a, b), n in zip(pairwise(cuts), of_ranks, strict=True)]
            name = f"changes of {part.bucket.unit or 'the root'}"
            with comm.joining(f"{name} ({2 * sum(words)} bytes)"):
                own = self._packed(part, of_ranks[me])
                parts = [own.new_empty(n if self._receives else 0) for n in words]
                parts[me] = own
                gathered.append(parts)
                if len(ranks) > 1:
                    started += comm.gather_parts(
                        parts, Traffic.READ, name, ranks, receivers=receivers
                    )
        wait_all(started)
        return gathered

    def _packed(self, part: Range, count: int) -> torch.Tensor:
        """Return what this rank sends of a range."""
        device = self._comm.device
        start, numel = self._own(part)
        if count == 0:
            return torch.empty(0, dtype=torch.int16, device=device)
        bits = self._taken.bits[part.bucket]
        assert bits is not None
        shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
        flags = (bits[start // 8 : (start + numel + 7) // 8, None] >> shifts) & 1
        places = flags.view(-1).nonzero().view(-1)
        segments = -(-numel // _SEGMENT)
        of_segment = torch.bincount(places // _SEGMENT, minlength=segments).to(torch.int32)
        try:
            values = part.bucket.owned_values(start, numel)
            values = values[places.to(values.device)].to(device)
        except Exception as error:  # raised at the end: the other ranks wait for the values
            self._error = self._error or error
            values = torch.zeros(count, dtype=part.bucket.dtype, device=device)
        low = (places % _SEGMENT - _SEGMENT // 2).to(torch.int16)
        words = [of_segment.view(torch.int16).to(device), low.to(device), values.view(torch.int16)]
        return torch.cat(words)

    def _changed(
        self, chunk: Chunk, counts: Mapping[tuple[Bucket, int], list[int]]
    ) -> Iterator[tuple[Managed, torch.Tensor, torch.Tensor]]:
        """Gather a chunk, and yield its changed parameters in the order of the model."""
        gathered = self._gather(chunk, counts)
        if not self._receives:
            return
        found = []
        for part, parts in zip(chunk, gathered, strict=True):
            places, values = _unpacked(part, parts, counts[_key(part)])
            starts = [managed.offset - part.start for managed in part.params]
            borders = torch.tensor(starts, device=places.device)
            cuts = [*torch.searchsorted(places, borders).tolist(), len(places)]
            for managed, at, (a, b) in zip(part.params, starts, pairwise(cuts), strict=True):
                if a < b:
                    found.append((managed, places[a:b] - at, values[a:b]))
        yield from sorted(found, key=lambda each: each[0].index)


def _key(part: Range) -> tuple[Bucket, int]:
    return part.bucket, part.start


def _is_smaller_whole(part: Range, counts: Sequence[int]) -> bool:
    """Whether a range is sent whole. See Note [Wire]."""
    return -1 in counts or 2 * sum(counts) > part.end - part.start


def _words(numel: int, count: int) -> int:
    """Return how many 16-bit words a rank with `numel` elements of a range sends."""
    return 2 * (-(-numel // _SEGMENT) + count) if count else 0


def _unpacked(
    part: Range, parts: Sequence[torch.Tensor], counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places in a range, in order, and the values that ranks have sent."""
    places, values = [], []
    for words, count, start in zip(parts, counts, part.cuts(len(parts)), strict=False):
        if count == 0:
            continue
        of_segment, low = words[: -2 * count].view(torch.int32), words[-2 * count : -count]
        segment = torch.arange(len(of_segment), device=words.device) * _SEGMENT
        first = torch.repeat_interleave(segment, of_segment, output_size=count)
        places.append(low.to(torch.int64) + (start + _SEGMENT // 2) + first)
        values.append(words[-count:].view(part.bucket.dtype))
    return torch.cat(places), torch.cat(values)
