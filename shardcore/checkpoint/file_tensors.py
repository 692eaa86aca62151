"""Tensors in files that others wrote, read by ranges: strided views of a storage, and tensors in
several pieces or boxes.

Sizes are compared with the file before memory is taken. Files are read, not mapped: one that
shrinks while it is mapped would end the process.
Each read opens and closes its file, so descriptors never run out and threads can share a source.
`counts` has the bytes that this process has read, for benchmarks.
"""

import errno
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from reprlib import repr as short
from stat import S_ISDIR, S_ISREG
from typing import Any, BinaryIO, TypeAlias

import torch

from shardcore.checkpoint.source import Source

counts: Counter[str] = Counter()

_AT_ONCE = 1 << 22  # elements of a tensor that is not contiguous, read at once


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it, without waiting. Raises OSError, or ValueError for a pipe or a
    device.

    These have no size that a read could be checked against. Links are followed.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError(
        f"load: {path} is a pipe or a device; expected a regular file, or a link to one"
    )


@dataclass(frozen=True)
class Window:
    """Bytes [start, start + size) of a file. Each read opens the file, checks that its size is
    the same, and closes it.
    """

    path: Path
    start: int
    size: int
    file_size: int

    @classmethod
    def of(cls, path: Path) -> "Window":
        """Return all of a file. Raises OSError."""
        size = os.stat(path).st_size
        return cls(path, 0, size, size)

    def part(self, start: int, size: int) -> "Window":
        """Return bytes [start, start + size) of this window. Raises ValueError beyond its end."""
        counts = type(start) is int and type(size) is int
        if not counts or not 0 <= start <= start + size <= self.size:
            raise ValueError(
                f"load: {self} is {self.size} bytes long; expected {size} at offset {start}. The "
                "file may be cut off: copy it again"
            )
        return Window(self.path, self.start + start, size, self.file_size)

    def read(self, start: int = 0, size: int | None = None) -> bytearray:
        """Return bytes [start, start + size), or all. Raises OSError or ValueError."""
        part = self.part(start, self.size - start if size is None else size)
        content = bytearray(part.size)
        with open_regular(self.path) as file:
            now = os.fstat(file.fileno()).st_size
            if now != self.file_size:
                raise ValueError(
                    f"load: {self.path} is {now} bytes long; expected {self.file_size}, as when it "
                    "was opened"
                )
            file.seek(part.start)
            count = file.readinto(content)  # type: ignore[attr-defined]
        counts["bytes_read"] += count
        if count != part.size:
            raise ValueError(
                f"load: {self.path} ends at {part.start + count}; expected {part.size - count} "
                f"bytes more"
            )
        return content

    def __str__(self) -> str:
        whole = self.start == 0 and self.size == self.file_size
        return str(self.path) if whole else f"{self.path} at {self.start} ({self.size} bytes)"


Box: TypeAlias = tuple[range, ...]  # a part of a tensor: which indices of each dimension


def box_of(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    """Return the box that begins at `offsets`. Raises TypeError for what are no numbers."""
    return tuple(range(first, first + size) for first, size in zip(offsets, sizes, strict=False))


def boxes_of(shape: Sequence[int], start: int, numel: int, at_most: int = 1 << 62) -> Iterator[Box]:
    """Yield the boxes that make up elements [start, start + numel) of the flattened tensor, in
    order, each of at most `at_most` elements.
    """
    row = prod(shape[1:])
    while numel > 0:
        if not shape:
            yield ()
            return
        index, skipped = divmod(start, row)
        rows = 0 if skipped else min(numel, at_most) // row
        if rows > 0:
            count = rows * row
            yield (range(index, index + rows), *map(range, shape[1:]))
        else:
            count = min(numel, row - skipped)
            for box in boxes_of(shape[1:], skipped, count, at_most):
                yield (range(index, index + 1), *box)
        start, numel = start + count, numel - count


def sizes_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a part."""
    return tuple(map(len, box))


def slices_of(box: Box) -> tuple[slice, ...]:
    """Return a part as an index of the tensor."""
    return tuple(slice(indices.start, indices.stop) for indices in box)


def is_stored(value: Any) -> bool:
    """Return whether a value is a tensor on disk."""
    return hasattr(value, "read") and hasattr(value, "dtype") and hasattr(value, "shape")


def whole(tensor: "Stored") -> torch.Tensor:
    """Return all of a tensor. Raises OSError or ValueError."""
    return tensor.read(0, prod(tensor.shape)).view(tensor.shape)


def are_counts(values: object) -> bool:
    """Return whether a value is a tuple of counts, as a shape is."""
    return isinstance(values, tuple) and all(type(one) is int and one >= 0 for one in values)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of a contiguous tensor."""
    return tuple(prod(shape[index + 1 :]) for index in range(len(shape)))


class Stored(ABC):
    """A tensor on disk. grid: the shape in which it is cut into boxes, of as many elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grid: tuple[int, ...]

    @abstractmethod
    def part(self, box: Box) -> torch.Tensor:
        """Return a part that has elements, on the CPU. Raises OSError or ValueError."""

    def read(self, start: int, numel: int) -> torch.Tensor:
        """Return elements [start, start + numel) of it, flattened: (numel,), on the CPU. Raises
        OSError or ValueError.
        """
        if not 0 <= start <= start + numel <= prod(self.shape):
            raise ValueError(
                f"load: {self}: elements {start} to {start + numel} were requested; expected at "
                f"most {prod(self.shape)}"
            )
        boxes = list(boxes_of(self.grid, start, numel, _AT_ONCE))
        if len(boxes) == 1:
            return self.part(boxes[0]).reshape(-1)
        values = torch.empty(numel, dtype=self.dtype, device="cpu")
        cursor = 0
        for box in boxes:
            part = self.part(box)
            values[cursor : cursor + part.numel()] = part.reshape(-1)
            cursor += part.numel()
        return values


@dataclass(eq=False)
class FileTensor(Stored):
    """A strided view of a storage in a file. offset, stride: in elements, as torch's."""

    window: Window
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless every element is inside the storage."""
        if len(self.shape) != len(self.stride) or not are_counts(
            (self.offset, *self.shape, *self.stride)
        ):
            raise ValueError(
                f"load: {self.window}: a tensor has shape {self.shape} and stride {self.stride}; "
                "expected counts"
            )
        end = self.offset + _span(self.shape, self.stride)
        needed = end * self.dtype.itemsize if prod(self.shape) > 0 else 0
        if needed > self.window.size:
            raise ValueError(
                f"load: {self.window}: a tensor takes {self.window.size} bytes; expected {needed} "
                f"for shape {self.shape}. The file may be cut off"
            )
        dims = zip(self.shape, self.stride, row_major(self.shape), strict=True)
        is_contiguous = all(size == 1 or step == usual for size, step, usual in dims)
        self.grid = (prod(self.shape),) if is_contiguous else self.shape

    def __setstate__(self, state: object) -> None:
        """Refuse what a pickle gives a tensor: fields would not be checked."""
        raise ValueError("a tensor is given attributes")

    def __str__(self) -> str:
        return str(self.window)

    def narrow(self, start: int, numel: int) -> "FileTensor":
        """Return elements [start, start + numel) of a tensor of one dimension."""
        (step,) = self.stride
        return FileTensor(
            self.window, self.dtype, self.offset + start * step, (numel,), self.stride
        )

    @property
    def path(self) -> Path:
        """Of its file."""
        return self.window.path

    def part(self, box: Box) -> torch.Tensor:
        """See Stored. box: of its shape, or of its grid."""
        stride = self.stride if len(box) == len(self.shape) else (1,)
        sizes, itemsize = sizes_of(box), self.dtype.itemsize
        first = self.offset + sum(
            indices.start * step for indices, step in zip(box, stride, strict=True)
        )
        raw = self.window.read(first * itemsize, _span(sizes, stride) * itemsize)
        if self.dtype == torch.bool:  # other bytes than 0 and 1 are no bool
            elements = torch.frombuffer(raw, dtype=torch.uint8) != 0
        else:
            elements = torch.frombuffer(raw, dtype=self.dtype)
        return elements.as_strided(sizes, stride)


def _span(sizes: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements there are from a box's first to its last in the storage."""
    return 1 + sum((size - 1) * step for size, step in zip(sizes, stride, strict=True))


FP8_BLOCK = 128  # rows, and columns


class Fp8Blocks(Stored):
    """A float8 matrix with a float32 factor for each block of 128 x 128, read as float32.

    DeepSeek V3's format: `weight` and `weight_scale_inv`. Blocks at the ends of rows and columns
    may be smaller.
    """

    def __init__(self, name: str, codes: FileTensor, factors: FileTensor) -> None:
        """Raise ValueError unless there is a factor for each block."""
        self._codes, self._factors = codes, factors
        self.path, self.shape, self.dtype = codes.path, codes.shape, torch.float32
        self.grid = codes.shape
        expected = tuple(-(-size // FP8_BLOCK) for size in codes.shape)
        if len(codes.shape) != 2 or factors.shape != expected:
            raise ValueError(
                f"load: {name} in {codes.path} has shape {codes.shape} and factors of shape "
                f"{factors.shape}; expected a matrix with one factor for each block of "
                f"{FP8_BLOCK} x {FP8_BLOCK}, so {expected}"
            )

    def __str__(self) -> str:
        return str(self._codes)

    def part(self, box: Box) -> torch.Tensor:
        """See Stored."""
        blocks = tuple(range(each.start // FP8_BLOCK, -(-each.stop // FP8_BLOCK)) for each in box)
        factors = self._factors.part(blocks).to(torch.float32)
        rows, columns = (
            torch.arange(each.start, each.stop) // FP8_BLOCK - each.start // FP8_BLOCK
            for each in box
        )
        return self._codes.part(box).to(torch.float32) * factors[rows][:, columns]


class BoxTensor(Stored):
    """A tensor in boxes that do not overlap. `open_box` opens one, when it is first read."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        boxes: Collection[Box],
        open_box: Callable[[Box], FileTensor],
        grid: tuple[int, ...] | None = None,
    ) -> None:
        """Raise ValueError unless the boxes are inside the tensor and have as many elements as
        it.
        """
        self._name, self.shape, self.dtype = name, shape, dtype
        self.grid = shape if grid is None else grid
        self._boxes, self._open_box = boxes, cache(open_box)
        if not are_counts(shape):
            raise ValueError(f"load: {name} has shape {short(shape)}; expected counts")
        for box in boxes:
            if len(box) != len(self.grid) or any(
                indices.start < 0 or indices.stop > size
                for indices, size in zip(box, self.grid, strict=True)
            ):
                raise ValueError(f"load: {name}: the part at {box} is outside of shape {self.grid}")
        numel = sum(prod(sizes_of(box)) for box in boxes)
        if numel != prod(shape):
            raise ValueError(
                f"load: the parts of {name} hold {numel} elements; expected {prod(shape)} for "
                f"shape {shape}. A rank's file may be missing, or parts may overwrite each other"
            )

    def __str__(self) -> str:
        return self._name

    def part(self, box: Box) -> torch.Tensor:
        """See Stored."""
        values = torch.empty(sizes_of(box), dtype=self.dtype, device="cpu")
        missing = torch.ones(sizes_of(box), dtype=torch.bool, device="cpu")
        for stored in self._boxes:
            common = tuple(
                range(max(one.start, other.start), min(one.stop, other.stop))
                for one, other in zip(stored, box, strict=True)
            )
            if not all(common):
                continue
            tensor = self._open_box(stored)
            if tensor.shape != sizes_of(stored) or tensor.dtype != self.dtype:
                raise ValueError(
                    f"load: {self}: the part at {stored} has shape {tensor.shape} and "
                    f"{tensor.dtype}; expected {sizes_of(stored)} and {self.dtype}"
                )
            place = slices_of(_inside(common, box))
            values[place] = tensor.part(_inside(common, stored))
            missing[place] = False
        if missing.any():
            raise ValueError(
                f"load: {self}: parts overlap, and {int(missing.sum())} elements are in none"
            )
        return values


def _inside(box: Box, outer: Box) -> Box:
    """Return a box as a part of another one that has it."""
    return tuple(
        range(one.start - first.start, one.stop - first.start)
        for one, first in zip(box, outer, strict=True)
    )


def joined(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: Iterable[FileTensor]
) -> BoxTensor:
    """Return a tensor from pieces of one dimension, of the flattened tensor in order."""
    boxes: dict[Box, FileTensor] = {}
    end = 0
    for piece in pieces:
        boxes[(range(end, end + piece.shape[0]),)] = piece
        end += piece.shape[0]
    return BoxTensor(name, shape, dtype, boxes, boxes.__getitem__, grid=(end,))


class ForeignSource(Source):
    """A checkpoint that others wrote. No file is kept open, and nothing is changed by reading,
    so threads may share it.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Mapping[str, Stored]]) -> None:
        """Take tensors by name and key. Raise ValueError if a state has another number of
        elements than its weight.
        """
        self.path = path
        self._tensors = tensors
        self.shapes = {name: tuple(of_name["weight"].shape) for name, of_name in tensors.items()}
        for name, of_name in tensors.items():
            for key, tensor in of_name.items():
                if prod(tensor.shape) != prod(self.shapes[name]):
                    raise ValueError(
                        f"load: {path}: {key} of {name} has shape {tuple(tensor.shape)}; "
                        f"expected {self.shapes[name]}, as the weight. It may be the state of "
                        "another parameter"
                    )

    def keys(self, name: str) -> tuple[str, ...]:
        """See Source."""
        return tuple(self._of(name))

    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """See Source."""
        of_name = self._of(name)
        if key not in of_name:
            raise ValueError(
                f"load: {self.path} contains no {key} of {name}; expected one of "
                f"{', '.join(of_name)}"
            )
        return of_name[key].read(start, numel)

    def _of(self, name: str) -> Mapping[str, Stored]:
        if name not in self._tensors:
            raise ValueError(f"load: {self.path} contains no {name}. Pass a name from the file")
        return self._tensors[name]


def step_of(value: Any, where: str) -> int:
    """Return a count of steps that is a number, or a stored tensor of one. Raises OSError or
    ValueError.
    """
    number = whole(value).item() if is_stored(value) and prod(value.shape) == 1 else value
    if (
        isinstance(number, bool)
        or not isinstance(number, int | float)
        or not 0 <= number < 2**53
        or number != int(number)
    ):
        raise ValueError(f"load: {where} is {short(number)}; expected a count of steps")
    return int(number)
