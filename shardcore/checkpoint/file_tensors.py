"""Tensors in files that others wrote, read by ranges: strided views of a storage, and tensors in
several pieces or boxes.

Sizes are compared with the file before memory is taken. Files are read, not mapped: one that
shrinks while it is mapped would end the process.
"""

import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, gt, lt, mul, sub
from pathlib import Path
from reprlib import repr as short
from stat import S_ISDIR, S_ISREG
from typing import Any, BinaryIO, Protocol

import torch

from shardcore.checkpoint.source import Source

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
                f"load: {self} has {self.size} bytes; expected {size} at offset {start} (is it cut "
                f"off? copy it again)"
            )
        return Window(self.path, self.start + start, size, self.file_size)

    def read(self, start: int = 0, size: int | None = None) -> bytearray:
        """Return bytes [start, start + size), or all. Raises OSError or ValueError."""
        part = self.part(start, self.size - start if size is None else size)
        found = bytearray(part.size)
        with open_regular(self.path) as file:
            now = os.fstat(file.fileno()).st_size
            if now != self.file_size:
                raise ValueError(
                    f"load: {self.path} has {now} bytes; expected {self.file_size}, as when it was "
                    f"opened"
                )
            file.seek(part.start)
            count = file.readinto(found)  # type: ignore[attr-defined]
        if count != part.size:
            raise ValueError(
                f"load: {self.path} ends at {part.start + count}; expected {part.size - count} "
                f"bytes more"
            )
        return found

    def __str__(self) -> str:
        whole = self.start == 0 and self.size == self.file_size
        return str(self.path) if whole else f"{self.path} at {self.start} ({self.size} bytes)"


class Stored(Protocol):
    """A tensor on disk; `read` returns elements [start, start + numel) of it, flattened: (numel,),
    on the CPU.

    `read` raises OSError or ValueError.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, start: int, numel: int) -> torch.Tensor: ...


def is_stored(value: Any) -> bool:
    """Return whether a value is a tensor on disk."""
    return hasattr(value, "read") and hasattr(value, "dtype") and hasattr(value, "shape")


def whole(tensor: Stored) -> torch.Tensor:
    """Return all of a tensor. Raises OSError or ValueError."""
    return tensor.read(0, prod(tensor.shape)).view(tensor.shape)


def are_counts(values: object) -> bool:
    """Return whether a value is a tuple of counts, as a shape is."""
    return isinstance(values, tuple) and all(type(one) is int and one >= 0 for one in values)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of a contiguous tensor."""
    return tuple(prod(shape[index + 1 :]) for index in range(len(shape)))


def _check_shape(where: str, shape: tuple[int, ...]) -> None:
    if not are_counts(shape):
        raise ValueError(f"load: {where} has shape {short(shape)}; expected counts")


def _check_range(where: object, shape: tuple[int, ...], start: int, numel: int) -> None:
    """Raise ValueError unless [start, start + numel) is inside a tensor of that shape."""
    if not 0 <= start <= start + numel <= prod(shape):
        raise ValueError(
            f"load: {where}: asked for elements {start} to {start + numel}; expected at most "
            f"{prod(shape)}"
        )


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins in each dimension, and its shape."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        """Where it ends in each dimension."""
        return tuple(map(add, self.offsets, self.sizes))


def _cut(
    found: torch.Tensor, shape: tuple[int, ...], start: int
) -> Iterator[tuple[torch.Tensor, Box]]:
    """Cut a range of a flattened tensor, from element `start` on, into boxes of a bounded size.
    Yield each with its place in `found`, which is as long as the range.
    """
    row = prod(shape[1:])
    while found.numel() > 0:
        if not shape:
            yield found.view(()), Box((), ())
            return
        index, skipped = divmod(start, row)
        rows = min(found.numel(), _AT_ONCE) // row
        if skipped or rows == 0:
            numel = min(found.numel(), row - skipped)
            for part, box in _cut(found[:numel], shape[1:], skipped):
                yield part[None], Box((index, *box.offsets), (1, *box.sizes))
        else:
            numel = rows * row
            sizes = (rows, *shape[1:])
            yield found[:numel].view(sizes), Box((index, *[0] * (len(shape) - 1)), sizes)
        found, start = found[numel:], start + numel


@dataclass(frozen=True, eq=False)
class FileTensor:
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
                f"load: {self.window} has a tensor of shape {self.shape}, stride {self.stride}; "
                f"expected counts"
            )
        end = self.offset + _span(self.shape, self.stride)
        needed = end * self.dtype.itemsize if prod(self.shape) > 0 else 0
        if needed > self.window.size:
            raise ValueError(
                f"load: {self.window} has {self.window.size} bytes of a tensor; expected {needed} "
                f"for shape {self.shape} (is it cut off?)"
            )

    def __setstate__(self, state: object) -> None:
        """Refuse what a pickle gives a tensor: fields would not be checked."""
        raise ValueError("a tensor is given attributes")

    def read(self, start: int, numel: int) -> torch.Tensor:
        """See Stored."""
        _check_range(self.window, self.shape, start, numel)
        dims = zip(self.shape, self.stride, row_major(self.shape), strict=True)
        if numel > 0 and all(size == 1 or step == usual for size, step, usual in dims):
            return self._elements(self.offset + start, numel)
        found = torch.empty(numel, dtype=self.dtype, device="cpu")
        for part, box in _cut(found, self.shape, start):
            part.copy_(self.part(box))
        return found

    def part(self, box: Box) -> torch.Tensor:
        """Return a part of it, which has elements. Raises OSError or ValueError."""
        first = self.offset + sum(map(mul, box.offsets, self.stride))
        elements = self._elements(first, _span(box.sizes, self.stride))
        return elements.as_strided(box.sizes, self.stride)

    def _elements(self, first: int, numel: int) -> torch.Tensor:
        raw = self.window.read(first * self.dtype.itemsize, numel * self.dtype.itemsize)
        if self.dtype == torch.bool:  # other bytes than 0 and 1 are no bool
            return torch.frombuffer(raw, dtype=torch.uint8) != 0
        return torch.frombuffer(raw, dtype=self.dtype)


def _span(sizes: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return how many elements there are from a box's first to its last in the storage."""
    return 1 + sum((size - 1) * step for size, step in zip(sizes, stride, strict=True))


@dataclass(frozen=True, eq=False)
class JoinedTensor:
    """A tensor in pieces, in order: of each a tensor, and the range of it (flattened) that is
    meant.
    """

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Sequence[tuple[Stored, int, int]]

    def __post_init__(self) -> None:
        """Raise ValueError unless the pieces have one dtype and make up the tensor."""
        _check_shape(self.where, self.shape)
        for tensor, start, numel in self.pieces:
            _check_range(self.where, tensor.shape, start, numel)
            if tensor.dtype != self.dtype:
                raise ValueError(
                    f"load: {self.where} has pieces of {tensor.dtype} and of {self.dtype}; "
                    f"expected one dtype"
                )
        found = sum(numel for _, _, numel in self.pieces)
        if found != prod(self.shape):
            raise ValueError(
                f"load: {self.where} has {found} elements; expected {prod(self.shape)}, for shape "
                f"{self.shape}"
            )

    def read(self, start: int, numel: int) -> torch.Tensor:
        """See Stored."""
        _check_range(self.where, self.shape, start, numel)
        found = [torch.empty(0, dtype=self.dtype, device="cpu")]
        begin = 0
        for tensor, first, length in self.pieces:
            low, high = max(start, begin), min(start + numel, begin + length)
            if low < high:
                found.append(tensor.read(first + low - begin, high - low))
            begin += length
        return found[-1] if len(found) <= 2 else torch.cat(found)


class BoxTensor:
    """A tensor in boxes that do not overlap. `open_box` opens one, when it is first read."""

    def __init__(
        self,
        where: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        boxes: Collection[Box],
        open_box: Callable[[Box], FileTensor],
    ) -> None:
        """Raise ValueError unless the boxes are inside the tensor and have as many elements as
        it.
        """
        self.where, self.shape, self.dtype = where, shape, dtype
        for given in (shape, *(part for box in boxes for part in (box.offsets, box.sizes))):
            _check_shape(where, given)
        for box in boxes:
            ranks = {len(box.offsets), len(box.sizes), len(shape)}
            if len(ranks) > 1 or any(map(gt, box.ends, shape)):
                raise ValueError(
                    f"load: {where} has a part at {box.offsets} of shape {box.sizes}; expected it "
                    f"inside shape {shape}"
                )
        found = sum(prod(box.sizes) for box in boxes)
        if found != prod(shape):
            raise ValueError(
                f"load: {where} has parts of {found} elements; expected {prod(shape)}, for shape "
                f"{shape} (is a rank's file missing, or did parts overwrite each other?)"
            )
        self._boxes, self._open_box = boxes, open_box
        self._open: dict[Box, FileTensor] = {}

    def read(self, start: int, numel: int) -> torch.Tensor:
        """See Stored."""
        _check_range(self.where, self.shape, start, numel)
        found = torch.empty(numel, dtype=self.dtype, device="cpu")
        missing = 0
        for part, within in _cut(found, self.shape, start):
            reached = torch.zeros(part.shape, dtype=torch.bool, device="cpu")
            for box in self._boxes:
                low = tuple(map(max, box.offsets, within.offsets))
                high = tuple(map(min, box.ends, within.ends))
                if all(map(lt, low, high)):
                    local = Box(tuple(map(sub, low, box.offsets)), tuple(map(sub, high, low)))
                    where = tuple(
                        map(slice, map(sub, low, within.offsets), map(sub, high, within.offsets))
                    )
                    part[where] = self._box(box).part(local)
                    reached[where] = True
            missing += part.numel() - int(reached.sum())
        if missing > 0:
            raise ValueError(
                f"load: {self.where}: parts overlap, and {missing} elements of those from {start} "
                f"on are in none"
            )
        return found

    def _box(self, box: Box) -> FileTensor:
        """Open a box once; threads that do so together find the same."""
        if box not in self._open:
            tensor = self._open_box(box)
            if tensor.shape != box.sizes or tensor.dtype != self.dtype:
                raise ValueError(
                    f"load: {self.where}: the part at {box.offsets} has shape {tensor.shape} "
                    f"and {tensor.dtype}; expected {box.sizes} and {self.dtype}"
                )
            self._open[box] = tensor
        return self._open[box]


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
                        f"load: {path}: {key} of {name} has shape {tuple(tensor.shape)}; expected "
                        f"{self.shapes[name]}, as the "
                        "weight (is it the state of another parameter?)"
                    )

    def keys(self, name: str) -> tuple[str, ...]:
        """See Source."""
        return tuple(self._of(name))

    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """See Source."""
        of_name = self._of(name)
        if key not in of_name:
            raise ValueError(
                f"load: {self.path} has no {key} of {name}; expected one of {', '.join(of_name)}"
            )
        return of_name[key].read(start, numel)

    def _of(self, name: str) -> Mapping[str, Stored]:
        if name not in self._tensors:
            raise ValueError(f"load: {self.path} has no {name}; expected a name that it has")
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
