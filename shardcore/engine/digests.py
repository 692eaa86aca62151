"""Digests of tensors: 64 bits each, which shards add up to, however a tensor was cut.

The format (csrc/digest/digest_math.h) is that of docs/reproducibility.md. A tensor has a key, which
its name, dtype and shape make, so that sums of several tensors are digests, too. All sums are
modulo 2^64, in int64, whose additions wrap around.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from hashlib import sha256

import torch

from shardcore._native import _C
from shardcore.engine.bucket import Bucket, Managed
from shardcore.engine.engine import Engine
from shardcore.layout import BLOCK, Piece
from shardcore.optim.state_format import SCALES, StateTensors

VERSION = 1
_MOST = 1 << 24  # elements that are read at a time: those in files are copies
_AS_THEY_ARE = (torch.int32, torch.int8, torch.uint8, torch.bool)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@cache
def key_of(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Return the key of a tensor: 64 bits."""
    text = f"shardcore digest {VERSION}\n{name}\n{dtype}\n{[*shape]}"
    return int.from_bytes(sha256(text.encode()).digest()[:8], "little")


def dtype_text(dtype: torch.dtype) -> str:
    """Return a dtype as keys have it, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def unsigned(total: int) -> int:
    """Return a sum in int64 as the number of 64 bits that it stands for."""
    return total % (1 << 64)


def signed(total: int) -> int:
    """Return a sum as the int64 that stands for it."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _words(flat: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the words of a flat tensor, as `_C.digest` takes them, and how many an element has."""
    if flat.dtype in (*_FLOATS, *_AS_THEY_ARE):
        return flat, 1
    if flat.dtype == torch.complex64:
        return torch.view_as_real(flat).reshape(-1), 2
    if flat.dtype.itemsize == 1:
        return flat.view(torch.uint8), 1
    if flat.dtype.itemsize == 2:
        return flat.view(torch.int16).to(torch.int32) & 0xFFFF, 1
    return flat.view(torch.int32), flat.dtype.itemsize // 4


@dataclass
class _List:
    """The arguments of one `_C.digest`, and to which sum each result is added."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    first_blocks: list[int] = field(default_factory=list)
    rests: list[torch.Tensor | None] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)


class Digests:
    """The digests of tensors by name, from ranges of them."""

    def __init__(self) -> None:
        """Begin with none."""
        self._numbers: dict[str, int] = {}
        self._lists: dict[torch.device, _List] = {}
        self._done: list[tuple[list[int], torch.Tensor]] = []

    @property
    def names(self) -> list[str]:
        """The names, in the order in which they came."""
        return [*self._numbers]

    def name(self, name: str) -> None:
        """Have a digest of this name, 0 if nothing is added."""
        self._numbers.setdefault(name, len(self._numbers))

    def add(
        self,
        name: str,
        key: int,
        flat: torch.Tensor,
        start: int = 0,
        rest: torch.Tensor | None = None,
    ) -> None:
        """Add elements from `start` on, a multiple of 256, of a tensor with this key. `flat` has to
        stay as it is until `flush`, or on CUDA until what is queued there has run.

        rest: of a split master, the remainder; of 8-bit codes, their scales.
        """
        self.name(name)
        words, per_element = _words(flat)
        items = self._lists.setdefault(flat.device, _List())
        items.tensors.append(words)
        items.keys.append(key)
        items.first_blocks.append(start * per_element // BLOCK)
        items.rests.append(rest)
        items.sums.append(self._numbers[name])

    def flush(self) -> None:
        """Compute what was added: one launch for each device."""
        for items in self._lists.values():
            part = _C.digest(items.tensors, items.keys, items.first_blocks, items.rests)
            self._done.append((items.sums, part))
        self._lists.clear()

    def totals(self, device: torch.device) -> torch.Tensor:
        """Return the digests in the order of `names`: int64, on `device`."""
        self.flush()
        totals = torch.zeros(len(self._numbers), dtype=torch.int64, device=device)
        for of_device in {part.device for _, part in self._done}:
            done = [(sums, part) for sums, part in self._done if part.device == of_device]
            at = torch.tensor([number for sums, _ in done for number in sums], device="cpu")
            parts = torch.cat([part for _, part in done]).to(device)
            totals.index_add_(0, at.to(device), parts)
        return totals


def digest_of(
    key: int, flat: torch.Tensor, start: int = 0, rest: torch.Tensor | None = None
) -> int:
    """Return what a range of a tensor adds to its digest. See Digests.add; waits for the result.

    On the CPU, the calling thread alone computes it; it has no threads of its own (use_threads).
    """
    digests = Digests()
    digests.add("", key, flat, start, rest)
    _C.use_threads(1)  # ranges in files are small: to wake torch's threads for each takes longer
    try:
        return int(digests.totals(torch.device("cpu")))
    finally:
        _C.use_threads(0)


# (start, numel) of an owned range -> its values and their rest (see Digests.add)
ReadStored = Callable[[int, int], tuple[torch.Tensor, torch.Tensor | None]]


def stored_weight(engine: Engine, bucket: Bucket) -> tuple[torch.dtype, ReadStored]:
    """Return the dtype of a bucket's weights as the optimizer sees them, and what reads them as
    they are stored: the masters, where there are any.
    """
    if bucket.state_format.master is None:
        return bucket.dtype, lambda start, numel: (bucket.owned_values(start, numel), None)

    def read(start: int, numel: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        states = engine.store.states_of(bucket, start, numel)
        if "remainder" not in states:
            return states["master"], None
        remainder = states["remainder"]
        return bucket.owned_values(start, numel).to(remainder.device), remainder

    return torch.float32, read


def stored_states(engine: Engine, bucket: Bucket) -> dict[str, tuple[str, ReadStored]]:
    """Return the dtypes of a bucket's optimizer states, without masters, and what reads them as
    they are stored, by key.
    """

    def read(key: str, start: int, numel: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        states: StateTensors = engine.store.states_of(bucket, start, numel)
        return states[key], states.get(SCALES.get(key, ""))

    dtypes = bucket.state_format.dtypes
    return {
        key: (
            "8bit" if SCALES.get(key) in dtypes else dtype_text(dtype),
            partial(read, key),
        )
        for key, dtype in dtypes.items()
        if key not in ("master", "remainder", *SCALES.values())
    }


def ranges_on_one_tier(bucket: Bucket, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut [start, end) of an owned range so that no part is large or on two tiers."""
    while start < end:
        stop = min(end, start + _MOST)
        if start < bucket.device_numel < stop:
            stop = bucket.device_numel
        yield start, stop
        start = stop


def own_pieces(bucket: Bucket, managed: Managed) -> Iterator[Piece]:
    """Yield the pieces of a parameter of which this rank alone gives the digest, cut so that none
    is large or on two tiers. None of what another tensor-parallel rank counts.
    """
    if not bucket.counted:
        return
    low, high = bucket.reduces
    for piece in bucket.pieces_of(managed):
        own = max(piece.start, low), min(piece.start + piece.numel, high)
        for start, stop in ranges_on_one_tier(bucket, *own):
            first = piece.param_start + start - piece.start
            yield replace(piece, start=start, param_start=first, numel=stop - start)


def add_param(
    digests: Digests,
    name: str,
    key: int,
    bucket: Bucket,
    managed: Managed,
    read: ReadStored,
) -> None:
    """Add this rank's part of a parameter, or of its gradient or a state, to its digest."""
    digests.name(name)
    for piece in own_pieces(bucket, managed):
        values, rest = read(piece.start, piece.numel)
        digests.add(name, key, values, piece.param_start, rest)


def units_of(engine: Engine, names: Mapping[torch.Tensor, str]) -> dict[str, str]:
    """Return the unit of each parameter, by plain names. Of parameters that are in no unit's
    buffers (frozen ones below stage 3): that of the module around them.
    """
    units = sorted({bucket.unit for bucket in engine.buckets}, key=len, reverse=True)
    found = {}
    for param, name in names.items():
        bucket = engine.bucket_of.get(param)  # type: ignore[call-overload]
        if bucket is not None:
            found[name] = bucket.unit
        else:
            found[name] = next((u for u in units if name.startswith(f"{u}.")), "")
    return found
