"""Digests in checkpoints: of each tensor and state as it was saved, to compare with what is read.

Checksums find a byte that changed on disk. Digests find a value in another place than the save had
it: a range under another name, or at another start. They are those of shardcore.digest: of split
masters that of the masters, of 8-bit codes with their scales. A tensor-parallel slice has one of
its own, under its stored name.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import torch

from shardcore.distributed.comm import Comm
from shardcore.engine.digests import dtype_text, key_of, signed, unsigned
from shardcore.optim.state_format import SCALES

# Of parts that are stored apart: which tensor or state they belong to.
_KEYS = {"master": "weight", "remainder": "weight", **{scale: key for key, scale in SCALES.items()}}


def key_of_part(part: str) -> str:
    """Return the key, such as "weight", whose digest covers a stored part."""
    return _KEYS.get(part, part)


def label_of(name: str, key: str) -> str:
    """Return what the digest of a stored tensor, or of its state, is of."""
    return name if key == "weight" else f"{name}.{key}"


def digest_key(
    name: str, part: str, dtype: torch.dtype, shape: Iterable[int], has_rest: bool
) -> tuple[str, int]:
    """Return the label of a part, and the key of its digest (engine/digests.key_of).

    dtype: the part's. shape: of the full tensor. has_rest: of a weight with a remainder, or of
    codes with scales.
    """
    label, text = label_of(name, key_of_part(part)), dtype_text(dtype)
    if has_rest:
        text = "float32" if key_of_part(part) == "weight" else "8bit"
    return label, key_of(label, text, tuple(shape))


class Saved(NamedTuple):
    """A digest that a checkpoint has: of all `numel` elements of what `label` names. key: see
    key_of.
    """

    label: str
    key: int
    numel: int
    digest: int


# Values that were read, and which digest covers them and what they add to it; None where none does.
Digested: TypeAlias = tuple[torch.Tensor, tuple[Saved, int] | None]


class Comparison:
    """Adds up the digests of what is read of a checkpoint, to compare them with the saved ones."""

    def __init__(self, saved: Mapping[str, Saved]) -> None:
        """saved: by label, alike on every rank."""
        self._saved = saved
        self._read: dict[str, tuple[int, int]] = {}  # the sum of digests, and of elements

    def add(self, label: str, numel: int, digest: int) -> None:
        """Add a range of `numel` elements, which no other rank adds."""
        before, elements = self._read.get(label, (0, 0))
        self._read[label] = before + digest, elements + numel

    def add_up(self, comms: Iterable[Comm], device: torch.device) -> None:
        """Add up over ranks. Collective."""
        read = [self._read.get(label, (0, 0)) for label in self._saved]
        sums = torch.tensor(
            [[signed(digest), numel] for digest, numel in read], dtype=torch.int64, device="cpu"
        )
        sums = sums.to(device)
        for comm in comms:
            comm.add_up(sums, "load")
        self._read = {
            label: (digest, numel)
            for label, (digest, numel) in zip(self._saved, sums.tolist(), strict=True)
        }

    @property
    def differing(self) -> list[str]:
        """What was read whole and has another digest than the saved one."""
        return [
            label
            for label, (digest, numel) in self._read.items()
            if numel == self._saved[label].numel and unsigned(digest) != self._saved[label].digest
        ]
