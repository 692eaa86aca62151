"""Tensors in others' files: views, pieces and boxes, read by ranges and compared bit for bit;
and sources that hold them.
"""

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from shardcore.checkpoint import file_tensors
from shardcore.checkpoint.file_tensors import (
    Box,
    BoxTensor,
    FileTensor,
    Stored,
    Window,
    box_of,
    joined,
    sizes_of,
    step_of,
)
from shardcore.checkpoint.foreign.unpickle import load_file

BASE = torch.arange(2 * 3 * 5 * 7.0).view(2, 3, 5, 7)
VIEWS = {
    "whole": BASE,
    "transposed": BASE.transpose(1, 3),
    "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "strided": BASE[:, 1:, ::2, 3],
    "expanded": torch.randn(3, 1).expand(3, 9),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "ones": BASE[:1, :1].transpose(0, 1),
}


def _saved(folder: Path, value: Any, name: str = "file.pt") -> Path:
    torch.save(value, folder / name)
    return folder / name


def _stored(folder: Path, tensor: torch.Tensor, name: str = "file.pt") -> FileTensor:
    stored = load_file(_saved(folder, tensor, name))
    assert isinstance(stored, FileTensor)
    return stored


def _check(stored: Stored, tensor: torch.Tensor, numel: int) -> None:
    """Compare ranges of a tensor from each element on, and none beyond its ends."""
    assert stored.shape == tensor.shape
    flat = tensor.reshape(-1)
    for start in range(len(flat)):
        end = min(start + numel, len(flat))
        assert torch.equal(stored.read(start, end - start), flat[start:end])
    for start in (0, len(flat)):  # callers learn its dtype so
        assert torch.equal(stored.read(start, 0), flat[:0])
        assert stored.read(start, 0).dtype == tensor.dtype
    for start, beyond in ((-1, 1), (0, len(flat) + 1), (len(flat), 1)):
        with pytest.raises(ValueError, match="expected at most"):
            stored.read(start, beyond)


@pytest.mark.parametrize("at_once", [1, 4, 1 << 22])
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_by_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, view: str, at_once: int
) -> None:
    monkeypatch.setattr(file_tensors, "_AT_ONCE", at_once)
    stored, read, numels = _stored(tmp_path, VIEWS[view]), FileTensor.part, [0]

    def part(self: FileTensor, box: Box) -> torch.Tensor:
        numels.append(prod(sizes_of(box)))
        return read(self, box)

    monkeypatch.setattr(FileTensor, "part", part)
    _check(stored, VIEWS[view], 11)
    assert max(numels) <= at_once
    assert torch.equal(stored.read(0, VIEWS[view].numel()), VIEWS[view].reshape(-1))


def test_only_the_range_is_read(tmp_path: Path) -> None:
    path = _saved(tmp_path, torch.arange(1 << 20))
    stored = load_file(path)
    before = _bytes_read()
    assert stored.read(777_777, 3).tolist() == [777_777, 777_778, 777_779]
    assert _bytes_read() - before < 10_000
    with open(path, "ab") as file:
        file.write(b"more")
    with pytest.raises(
        ValueError, match=r"file\.pt is \d+ bytes long; expected \d+, as when it was opened"
    ):
        stored.read(0, 1)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        stored.read(0, 1)


def _bytes_read() -> int:
    match = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert match
    return int(match[1])


SHAPE = (7, 5, 3)
BOXES = [
    box_of((0, 0, 0), (3, 2, 3)),
    box_of((0, 2, 0), (3, 3, 3)),
    box_of((3, 0, 0), (4, 5, 2)),
    box_of((3, 0, 2), (4, 5, 1)),
]


def _boxed(*boxes: Box, shape: Any = SHAPE) -> BoxTensor:
    """A tensor of boxes that are never opened."""
    return BoxTensor("x", shape, torch.float32, boxes, lambda _: pytest.fail("opened"))


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_one_box_of_a_scalar_or_of_nothing(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    box, stored = box_of((0,) * len(shape), shape), _stored(tmp_path, tensor)
    _check(BoxTensor("x", shape, torch.float32, [box], lambda _: stored), tensor, 1)


@pytest.mark.parametrize("at_once", [1, 4, 1 << 22])
def test_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(file_tensors, "_AT_ONCE", at_once)
    tensor = torch.randn(SHAPE)
    stored = {}
    for box in BOXES:
        where = tuple(slice(one.start, one.stop) for one in box)
        stored[box] = _stored(tmp_path, tensor[where].clone(), f"{len(stored)}")
    _check(BoxTensor("x", SHAPE, torch.float32, stored, stored.__getitem__), tensor, 13)


def test_only_boxes_of_the_range_are_opened(tmp_path: Path) -> None:
    part = torch.randn(4, 5, 1)
    opened = []

    def open_box(box: Box) -> FileTensor:
        opened.append(box)
        return _stored(tmp_path, part)

    tensor = BoxTensor("x", SHAPE, torch.float32, BOXES, open_box)
    for row in range(2):
        assert tensor.read(3 * 15 + 2 + 3 * row, 1) == part[0, row]
    assert opened == BOXES[3:], "once"


@pytest.mark.parametrize(
    ("boxes", "shape", "text"),
    [
        (BOXES[1:], SHAPE, "hold 87 elements; expected 105"),
        ([box_of((5, 0, 0), (3, 5, 3))], SHAPE, "outside of shape"),
        ([box_of((-1, 0, 0), SHAPE)], SHAPE, "outside of shape"),
        ([box_of((0, 0), (7, 15))], SHAPE, "outside of shape"),
        *((BOXES, shape, "expected counts") for shape in ((7.0, 5, 3), [7, 5, 3], (-7,), None)),
    ],
)
def test_boxes_that_do_not_make_up_the_tensor_are_refused(
    boxes: list[Box], shape: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        _boxed(*boxes, shape=shape)


def test_boxes_that_overlap_or_are_other_than_said(tmp_path: Path) -> None:
    boxes = (box_of((0, 0, 0), (4, 5, 3)), box_of((1, 0, 0), (3, 5, 3)))
    stored = {box: _stored(tmp_path, torch.zeros(sizes_of(box)), str(len(box[0]))) for box in boxes}
    with pytest.raises(ValueError, match="parts overlap, and 45 elements"):
        BoxTensor("x", SHAPE, torch.float32, stored, stored.__getitem__).read(0, 105)
    box = box_of((0, 0, 0), SHAPE)
    tensor = BoxTensor("x", SHAPE, torch.float16, [box], lambda _: stored[boxes[0]])
    with pytest.raises(
        ValueError,
        match=r"has shape \(4, 5, 3\) and torch.float32; expected \(7, 5, 3\) and torch.float16",
    ):
        tensor.read(0, 1)


def test_pieces(tmp_path: Path) -> None:
    flat = torch.randn(prod(SHAPE))
    first, rest = _stored(tmp_path, flat[:40].clone(), "a"), _stored(tmp_path, flat[20:], "b")
    pieces = [first, rest.narrow(0, 0), rest.narrow(20, 65)]
    for numel in (1, 13, prod(SHAPE)):
        _check(joined("x", SHAPE, torch.float32, pieces), flat.view(SHAPE), numel)
    with pytest.raises(ValueError, match="hold 104 elements; expected 105"):
        joined("x", SHAPE, torch.float32, [first, rest.narrow(20, 64)])
    with pytest.raises(ValueError, match="takes 420 bytes; expected 424"):
        rest.narrow(20, 66)


@pytest.mark.parametrize(
    ("start", "size"),
    [(-1, 1), (0, 51), (50, 1), (51, 0), (1, -1), (1 << 60, 1), (float("nan"), 1), (0, True)],
)
def test_windows(tmp_path: Path, start: Any, size: Any) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    window = Window.of(path).part(10, 50)
    assert window.read() == bytes(range(10, 60))
    assert window.part(5, 10).read(2, 3) == bytes(range(17, 20))
    assert window.read(50, 0) == b""
    for read in (window.read, window.part):
        with pytest.raises(ValueError, match=r"file at 10 \(50 bytes\) is 50 bytes long; expected"):
            read(start, size)
    with pytest.raises(ValueError, match="file is 100 bytes long; expected"):
        Window.of(path).part(0, 101)
    with pytest.raises(ValueError, match="file ends at 100; expected 1 bytes more"):
        Window(path, 90, 11, 100).read()  # as of one that shrinks while it is read


def test_steps(tmp_path: Path) -> None:
    for value in (
        3,
        3.0,
        _stored(tmp_path, torch.tensor(3.0), "a"),
        _stored(tmp_path, torch.tensor([3]), "b"),
    ):
        assert step_of(value, "x") == 3
    for bad in (
        -1,
        1.5,
        True,
        None,
        "3",
        float("nan"),
        float("inf"),
        1 << 60,
        _stored(tmp_path, torch.ones(2), "c"),
    ):
        with pytest.raises(ValueError, match=r"x is .*; expected a count of steps"):
            step_of(bad, "x")


def test_bools_are_bools(tmp_path: Path) -> None:
    raw = torch.tensor([0, 1, 2, 255], dtype=torch.uint8)
    bools = _stored(tmp_path, raw.view(torch.bool)).read(0, 4)
    assert bools.view(torch.uint8).tolist() == [0, 1, 1, 1]
