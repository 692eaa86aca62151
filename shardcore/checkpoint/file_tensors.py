"""Tensors in files that others wrote, read by ranges: strided views of a storage, and tensors in
several pieces or boxes.

Sizes are compared with the file before memory is taken. Files are read, not mapped: one that
shrinks while it is mapped would end the process.
"""

import errno
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from reprlib import repr as short
from stat import S_ISDIR, S_ISREG
from typing import Any, BinaryIO, Protocol

import torch

from shardcore.checkpoint.source import Source

_MAX_INDICES = 1 << 20  # of elements of a tensor that is not contiguous, read at once


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
        if (
            type(start) is not int
            or type(size) is not int
            or start < 0
            or size < 0
            or start + size > self.size
        ):
            raise ValueError(
                f"load: {self} has {self.size} bytes; expected {size} at offset {start} (is it cut "
                f"off? copy it again)"
            )
        return Window(self.path, self.start + start, size, self.file_size)

    def read(self, start: int = 0, size: int | None = None) -> bytearray:
        """Return bytes [start, start + size), or all. Raises OSError or ValueError."""
        part = self.part(start, self.size - start if size is None else size)
        found = bytearray(part.size)
        done = 0
        with open_regular(self.path) as file:
            descriptor = file.fileno()
            now = os.fstat(descriptor).st_size
            if now != self.file_size:
                raise ValueError(
                    f"load: {self.path} has {now} bytes; expected {self.file_size}, as when it was "
                    f"opened"
                )
            while done < part.size:
                count = os.preadv(descriptor, [memoryview(found)[done:]], part.start + done)
                if count == 0:
                    raise ValueError(
                        f"load: {self.path} ends at {part.start + done}; expected "
                        f"{part.size - done} bytes more"
                    )
                done += count
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
        values = (self.offset, *self.shape, *self.stride)
        if len(self.shape) != len(self.stride) or any(
            type(value) is not int or value < 0 for value in values
        ):
            raise ValueError(
                f"load: {self.window} has a tensor of shape {self.shape}, stride {self.stride}; "
                f"expected counts"
            )
        last = self.offset + sum(
            (size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)
        )
        needed = (last + 1) * self.dtype.itemsize if prod(self.shape) > 0 else 0
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
        check_range(str(self.window), self.shape, start, numel)
        if numel == 0:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        if _is_contiguous(self.shape, self.stride):
            return self._span(self.offset + start, numel)
        found = torch.empty(numel, dtype=self.dtype, device="cpu")
        for done in range(0, numel, _MAX_INDICES):
            part = found[done : done + _MAX_INDICES]
            at = torch.full_like(part, self.offset, dtype=torch.int64)
            for index, step in zip(
                coordinates(self.shape, start + done, part.numel()), self.stride, strict=True
            ):
                at += index * step
            first, last = int(at.min()), int(at.max())
            part.copy_(self._span(first, last + 1 - first)[at - first])
        return found

    def _span(self, first: int, numel: int) -> torch.Tensor:
        raw = self.window.read(first * self.dtype.itemsize, numel * self.dtype.itemsize)
        if self.dtype == torch.bool:  # other bytes than 0 and 1 are no bool
            return torch.frombuffer(raw, dtype=torch.uint8) != 0
        return torch.frombuffer(raw, dtype=self.dtype)


def check_shape(where: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a shape is a tuple of counts."""
    if not isinstance(shape, tuple) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"load: {where} has shape {short(shape)}; expected counts")


def check_range(where: str, shape: tuple[int, ...], start: int, numel: int) -> None:
    """Raise ValueError unless [start, start + numel) is inside a tensor of that shape."""
    if not 0 <= start <= start + numel <= prod(shape):
        raise ValueError(
            f"load: {where}: asked for elements {start} to {start + numel}; expected at most "
            f"{prod(shape)}"
        )


def coordinates(shape: tuple[int, ...], start: int, numel: int) -> list[torch.Tensor]:
    """Return the index in each dimension of elements [start, start + numel) of a flattened
    tensor: int64, (numel,) each.
    """
    left = torch.arange(start, start + numel, device="cpu")
    found = []
    for size in reversed(shape):
        found.append(left % size)
        left = left // size
    return found[::-1]


def _is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def whole(tensor: Stored) -> torch.Tensor:
    """Return all of a tensor. Raises OSError or ValueError."""
    return tensor.read(0, prod(tensor.shape)).view(tensor.shape)


def is_stored(value: Any) -> bool:
    """Return whether a value is a tensor on disk."""
    return hasattr(value, "read") and hasattr(value, "dtype") and hasattr(value, "shape")


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
        check_shape(self.where, self.shape)
        for tensor, start, numel in self.pieces:
            check_range(self.where, tensor.shape, start, numel)
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
        check_range(self.where, self.shape, start, numel)
        begins = list(accumulate((piece[2] for piece in self.pieces), initial=0))
        index = max(0, bisect_right(begins, start) - 1)
        found = []
        while numel > 0:
            tensor, first, length = self.pieces[index]
            skipped = start - begins[index]
            taken = min(numel, length - skipped)
            if taken > 0:
                found.append(tensor.read(first + skipped, taken))
            start, numel, index = start + taken, numel - taken, index + 1
        return (
            found[0]
            if len(found) == 1
            else torch.cat(found)
            if found
            else torch.empty(0, dtype=self.dtype, device="cpu")
        )


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins in each dimension, and its shape."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class BoxTensor:
    """A tensor in boxes that do not overlap, each of which is found (by `open_box`) when it is
    first read.
    """

    def __init__(
        self,
        where: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        boxes: Mapping[Box, Callable[[], Stored]],
    ) -> None:
        """Raise ValueError unless the boxes are inside the tensor and have as many elements as
        it.
        """
        check_shape(where, shape)
        self.where, self.shape, self.dtype = where, shape, dtype
        for box in boxes:
            check_shape(where, box.offsets)
            check_shape(where, box.sizes)
            inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
                offset + size <= limit
                for offset, size, limit in zip(box.offsets, box.sizes, shape, strict=True)
            )
            if not inside:
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
        self._boxes = [(box, open_box) for box, open_box in boxes.items() if prod(box.sizes) > 0]
        self._boxes.sort(key=lambda item: item[0].offsets)
        self._open: dict[Box, Stored] = {}
        self._lock = threading.Lock()

    def read(self, start: int, numel: int) -> torch.Tensor:
        """See Stored."""
        check_range(self.where, self.shape, start, numel)
        found = torch.empty(numel, dtype=self.dtype, device="cpu")
        filled = 0
        for done in range(0, numel, _MAX_INDICES):
            part = found[done : done + _MAX_INDICES]
            filled += self._fill(part, start + done)
        if filled != numel:
            raise ValueError(
                f"load: {self.where}: parts overlap, and {numel - filled} elements of those from "
                f"{start} on are in none"
            )
        return found

    def _fill(self, part: torch.Tensor, start: int) -> int:
        """Fill `part` with elements from `start` on; return how many there are."""
        at: list[torch.Tensor] | None = None
        reached = torch.zeros(part.numel(), dtype=torch.bool, device="cpu")
        for box, open_box in self._boxes:
            # rows: one range of the flattened tensor, as FSDP2's shards are
            if box.sizes[1:] == self.shape[1:]:
                row = prod(self.shape[1:])
                first = (box.offsets[0] if self.shape else 0) * row
                begin, end = max(start, first), min(start + part.numel(), first + prod(box.sizes))
                if begin < end:
                    part[begin - start : end - start] = self._box(box, open_box).read(
                        begin - first, end - begin
                    )
                    reached[begin - start : end - start] = True
                continue
            if at is None:
                at = coordinates(self.shape, start, part.numel())
            inside = torch.ones(part.numel(), dtype=torch.bool, device="cpu")
            local = torch.zeros(part.numel(), dtype=torch.int64, device="cpu")
            for index, offset, size in zip(at, box.offsets, box.sizes, strict=True):
                inside &= (index >= offset) & (index < offset + size)
                local = local * size + (index - offset)
            where = inside.nonzero().view(-1)
            if where.numel() > 0:
                local = local[where]
                low, high = int(local[0]), int(local[-1])
                part[where] = self._box(box, open_box).read(low, high + 1 - low)[local - low]
                reached[where] = True
        return int(reached.sum())

    def _box(self, box: Box, open_box: Callable[[], Stored]) -> Stored:
        with self._lock:
            if box not in self._open:
                tensor = open_box()
                if tuple(tensor.shape) != box.sizes or tensor.dtype != self.dtype:
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
