"""`shardcore compare` of two checkpoints: the first parameter, buffer or state that differs.

Both are read range by range, and their bits compared. So other worlds, stages, tiers and slices do
not show, nor how a master is stored. Checksums are checked in the same pass: digests in manifests
alone would not show a file that is damaged.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from shardcore.checkpoint.digested import label_of
from shardcore.checkpoint.directory import find
from shardcore.checkpoint.format import MANIFEST, Checkpoint, cut
from shardcore.engine.digests import dtype_text


@dataclass(frozen=True)
class CheckpointDifference:
    """What differs first between two checkpoints.

    kind: "names", "shapes", "steps", "dtypes", "weights" or "states". where: the parameter or
    buffer; of a state with its key ("0.weight.exp_avg").
    """

    kind: str
    where: str
    message: str


@dataclass(frozen=True)
class CheckpointComparison:
    """The result for two checkpoints. tensors, states: how many are equal, up to the difference;
    None if there is none. Buffers count as tensors. uncompared: what else checkpoints have.
    """

    tensors: int
    states: int
    difference: CheckpointDifference | None
    uncompared: str = (
        "not compared: options of the optimizer, schedulers, loss scale, random states, "
        "client_state"
    )

    @property
    def equal(self) -> bool:
        """Whether all names, shapes, step counts and values agree."""
        return self.difference is None

    def __str__(self) -> str:
        """Say it in words."""
        if self.difference is not None:
            return self.difference.message
        return (
            f"equal: {self.tensors} tensors and {self.states} optimizer states; {self.uncompared}"
        )


def compare_checkpoints(one: Path, other: Path) -> CheckpointComparison:
    """Compare two checkpoints of shardcore.save: directories given to it (of each the latest), or
    one checkpoint.

    Raises OSError or ValueError for files that cannot be read or are damaged.
    """
    with _opened(one) as first, _opened(other) as second:
        if (found := _outlines(first, second)) is not None:
            return CheckpointComparison(0, 0, found)
        same = {True: 0, False: 0}
        for name, key in _stored(first):
            found = _values(first, second, name, key)
            if found is not None:
                break
            same[key == "weight"] += 1
        return CheckpointComparison(same[True], same[False], found)


def _opened(folder: Path) -> Checkpoint:
    path = find("compare", folder, None)
    if not (path / MANIFEST).exists():
        raise ValueError(
            f"compare: {path} contains neither digests.jsonl nor {MANIFEST}; expected a directory "
            "given to shardcore.Metrics(digests=N), or a checkpoint of shardcore.save"
        )
    return Checkpoint(path)


def _stored(source: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield all weights, then all states; tied ones once."""
    names = [name for name in source.shapes if name not in source.tied]
    yield from ((name, "weight") for name in names)
    yield from ((name, key) for name in names for key in source.keys(name)[1:])


def _outlines(one: Checkpoint, other: Checkpoint) -> CheckpointDifference | None:
    """Return what differs without a value being read."""
    outlines: tuple[tuple[str, str, Callable[[Checkpoint], Mapping[str, object]], object], ...] = (
        (
            "names",
            "{} is {} in {} and {} in {}",
            lambda s: {label_of(*each): "stored" for each in _stored(s)},
            "not stored",
        ),
        ("shapes", "{} has the shape {} in {} and {} in {}", lambda s: s.shapes, None),
        ("steps", "{} has had {} updates in {} and {} in {}", lambda s: s.steps, 0),
    )
    for kind, text, outline_of, absent in outlines:
        mine, others = outline_of(one), outline_of(other)
        for where in dict.fromkeys([*mine, *others]):
            a, b = mine.get(where, absent), others.get(where, absent)
            if a != b:
                message = text.format(where, a, one.path, b, other.path)
                return CheckpointDifference(kind, where, message)
    return None


def _values(one: Checkpoint, other: Checkpoint, name: str, key: str) -> CheckpointDifference | None:
    """Return in which elements the bits of a tensor differ."""
    where, total = label_of(name, key), prod(one.shapes[name])
    differing, first = 0, ""
    for start, numel in cut(0, total):
        mine, others = (source.read(name, key, start, numel) for source in (one, other))
        if mine.dtype != others.dtype:
            message = (
                f"{where} is {dtype_text(mine.dtype)} in {one.path} and "
                f"{dtype_text(others.dtype)} in {other.path}"
            )
            return CheckpointDifference("dtypes", where, message)
        bits, others_bits = (
            values.contiguous().view(torch.uint8).view(numel, -1) for values in (mine, others)
        )
        if torch.equal(bits, others_bits):
            continue
        at = (bits != others_bits).any(1).nonzero().flatten()
        differing += len(at)
        first = first or (
            f"{start + int(at[0])}: {mine[at[0]].item()!r} in {one.path} and "
            f"{others[at[0]].item()!r} in {other.path}"
        )
    if not differing:
        return None
    message = f"{where} differs in {differing} of {total} elements, first in element {first}"
    return CheckpointDifference("weights" if key == "weight" else "states", where, message)
