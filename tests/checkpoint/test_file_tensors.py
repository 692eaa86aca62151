"""Tensors in others' files: views, pieces and boxes, read by ranges and compared bit for bit;
and sources that hold them.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardcore.checkpoint.file_tensors import (
    Box,
    BoxTensor,
    FileTensor,
    JoinedTensor,
    Window,
    step_of,
)
from shardcore.checkpoint.foreign.unpickle import load_file


def _saved(folder: Path, value: Any) -> Path:
    torch.save(value, folder / "file.pt")
    return folder / "file.pt"


def test_views_are_read_by_ranges(tmp_path: Path) -> None:
    base = torch.arange(2 * 3 * 5 * 7.0).view(2, 3, 5, 7)
    views = {
        "whole": base,
        "transposed": base.transpose(1, 3),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "strided": base[:, 1:, ::2, 3],
        "expanded": torch.randn(3, 1).expand(3, 9),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "ones": base[:1, :1].transpose(0, 1),
    }
    held = load_file(_saved(tmp_path, views))
    for name, tensor in views.items():
        assert held[name].shape == tensor.shape, name
        for start in range(0, tensor.numel(), 11):
            numel = min(11, tensor.numel() - start)
            assert torch.equal(
                held[name].read(start, numel), tensor.reshape(-1)[start : start + numel]
            ), name
        for start, numel in ((-1, 1), (0, tensor.numel() + 1), (tensor.numel(), 1)):
            with pytest.raises(ValueError, match="expected at most"):
                held[name].read(start, numel)


def test_only_the_range_is_read(tmp_path: Path) -> None:
    path = _saved(tmp_path, torch.zeros(64 << 20, dtype=torch.uint8))
    os.truncate(path, 64 << 20)  # without the end, the directory of the zip
    with pytest.raises(ValueError, match="torn or no file"):
        load_file(path)
    path = _saved(tmp_path, torch.arange(1 << 20))
    held = load_file(path)
    before = _bytes_read()
    assert held.read(777_777, 3).tolist() == [777_777, 777_778, 777_779]
    assert _bytes_read() - before < 10_000
    with open(path, "ab") as file:
        file.write(b"more")
    with pytest.raises(
        ValueError, match=r"file\.pt has \d+ bytes; expected \d+, as when it was opened"
    ):
        held.read(0, 1)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        held.read(0, 1)


def _bytes_read() -> int:
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found
    return int(found[1])


def _stored(folder: Path, tensor: torch.Tensor, name: str) -> FileTensor:
    torch.save(tensor, folder / name)
    held = load_file(folder / name)
    assert isinstance(held, FileTensor)
    return held


def test_boxes_and_pieces(tmp_path: Path) -> None:
    tensor = torch.randn(7, 5, 3)
    boxes = [
        ((0, 0, 0), (3, 2, 3)),
        ((0, 2, 0), (3, 3, 3)),
        ((3, 0, 0), (4, 5, 2)),
        ((3, 0, 2), (4, 5, 1)),
    ]
    held = {}
    for index, (offsets, sizes) in enumerate(boxes):
        part = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        stored = _stored(tmp_path, part.clone(), f"box{index}")
        held[Box(offsets, sizes)] = lambda stored=stored: stored
    whole = BoxTensor("x", (7, 5, 3), torch.float32, held)
    for start in range(0, 105, 13):
        numel = min(13, 105 - start)
        assert torch.equal(whole.read(start, numel), tensor.view(-1)[start : start + numel])
    with pytest.raises(ValueError, match=r"parts of \d+ elements; expected 105"):
        BoxTensor("x", (7, 5, 3), torch.float32, dict(list(held.items())[1:]))
    for bad in ((7.0, 5, 3), [7, 5, 3], (7, 5, -3), (True,), None):
        with pytest.raises(ValueError, match="expected counts"):
            BoxTensor("x", bad, torch.float32, {})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="expected counts"):
            JoinedTensor("x", bad, torch.float32, [])  # type: ignore[arg-type]
    (first, other), shape = list(held.items())[:2], (7, 5, 3)
    with pytest.raises(ValueError, match="inside shape"):
        BoxTensor("x", shape, torch.float32, {Box((5, 0, 0), (3, 5, 3)): first[1]})
    overlapping = {Box((0, 0, 0), (4, 5, 3)): held[first[0]], Box((1, 0, 0), (3, 5, 3)): other[1]}
    stored = (
        _stored(tmp_path, torch.zeros(4, 5, 3), "a"),
        _stored(tmp_path, torch.zeros(3, 5, 3), "b"),
    )
    overlapping = dict(zip(overlapping, [lambda: stored[0], lambda: stored[1]], strict=True))
    with pytest.raises(ValueError, match="parts overlap, and 45 elements"):
        BoxTensor("x", shape, torch.float32, overlapping).read(0, 105)
    with pytest.raises(
        ValueError,
        match=r"has shape \(4, 5, 3\) and torch.float32; expected \(7, 5, 3\) and torch.float16",
    ):
        BoxTensor("x", shape, torch.float16, {Box((0, 0, 0), shape): lambda: stored[0]}).read(0, 1)
    pieces = [
        (_stored(tmp_path, tensor.view(-1)[:40].clone(), "c"), 0, 40),
        (_stored(tmp_path, tensor.clone(), "d"), 40, 65),
    ]
    joined = JoinedTensor("x", shape, torch.float32, pieces)
    for start in range(105):
        assert torch.equal(joined.read(start, 105 - start), tensor.view(-1)[start:])
    with pytest.raises(ValueError, match="has 104 elements; expected 105"):
        JoinedTensor("x", shape, torch.float32, [pieces[0], (pieces[1][0], 40, 64)])


def test_windows(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    window = Window.of(path).part(10, 50)
    assert window.read() == bytes(range(10, 60))
    assert window.part(5, 10).read(2, 3) == bytes(range(17, 20))
    assert window.read(50, 0) == b""
    for start, size in ((-1, 1), (0, 51), (50, 1), (1, -1), (float("nan"), 1), (0, True)):
        with pytest.raises(ValueError, match=r"file at 10 \(50 bytes\) has 50 bytes; expected"):
            window.read(start, size)
    for start, size in ((-1, 1), (0, 101), (1 << 60, 1), (0, -1)):
        with pytest.raises(ValueError, match="file has 100 bytes; expected"):
            Window.of(path).part(start, size)


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
