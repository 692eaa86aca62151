"""What a foreign checkpoint has, compared with what its writer had; and damaged files."""

import random
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import is_dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcore.checkpoint.source import Source


def whole(source: Source, name: str, key: str, chunk: int = 37) -> torch.Tensor:
    """Read a tensor in ranges of `chunk` elements."""
    numel = prod(source.shapes[name])
    parts = [
        source.read(name, key, start, min(chunk, numel - start)) for start in range(0, numel, chunk)
    ]
    return torch.cat(parts).view(source.shapes[name]) if parts else torch.empty(source.shapes[name])


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and torch.equal(_bytes(left), _bytes(right))
    )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def differences(
    source: Source, weights: Mapping[str, torch.Tensor], states: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Return which tensors differ in a bit, or are of one side only. Every range of 37 elements
    is read.
    """
    found = [f"{name} of one side" for name in set(weights) ^ set(source.shapes)]
    for name, weight in weights.items():
        if name in source.shapes and not same_bits(whole(source, name, "weight"), weight):
            found.append(f"{name}.weight")
    for name in source.shapes:
        keys = set(source.keys(name)) - {"weight"}
        if keys != set(states.get(name, {})):
            found.append(f"{name} has {keys}")
        else:
            found += [
                f"{name}.{key}"
                for key in keys
                if not same_bits(whole(source, name, key), states[name][key])
            ]
    return found


def damaged(path: Path, count: int, seed: int = 0) -> list[tuple[str, bytes]]:
    """Return versions of a file: cut off, with a byte or a range of bytes changed, or with a
    part removed.
    """
    raw = path.read_bytes()
    draw = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(max(1, limit), (), generator=draw))

    found = []
    for number in range(count):
        at, what = below(len(raw)), number % 4
        if what == 0:
            found.append((f"cut at {at}", raw[:at]))
        elif what == 1:
            found.append(
                (f"byte {at}", raw[:at] + bytes([raw[at] ^ (1 << below(8))]) + raw[at + 1 :])
            )
        elif what == 2:
            end = min(len(raw), at + 1 + below(16))
            found.append(
                (
                    f"bytes {at} to {end}",
                    raw[:at] + bytes(below(256) for _ in range(end - at)) + raw[end:],
                )
            )
        else:
            end = min(len(raw), at + 1 + below(64))
            found.append((f"without {at} to {end}", raw[:at] + raw[end:]))
    return found


def read_damaged(path: Path, count: int, read: Callable[[], None], seed: int = 0) -> int:
    """Call `read` for versions of the file at `path`; returns how many were refused. Any other
    error than those is raised.
    """
    raw = path.read_bytes()
    refused = 0
    try:
        for what, version in damaged(path, count, seed):
            path.write_bytes(version)
            try:
                read()
            except (ValueError, OSError):
                refused += 1
            except Exception as error:
                raise AssertionError(f"{path.name}, {what}: {error!r}") from error
    finally:
        path.write_bytes(raw)
    return refused


def read_all(source: Source | None) -> None:
    """Read every tensor of a source."""
    assert source is not None
    for name in source.shapes:
        for key in source.keys(name):
            whole(source, name, key, 1 << 20)


_WRONG = (
    *(
        None,
        3,
        -1,
        0.5,
        float("nan"),
        True,
        1 << 70,
        "x",
        "",
        b"x",
        [],
        {},
        (),
        [[]],
        {0: {}},
        {"a": 1},
        (5.0,),
        (-1,),
    ),
    *(
        torch.float16,
        torch.Size([5]),
        torch.Size([1 << 60]),
        torch.ones(2),
        torch.ones(()),
        torch.zeros(0),
    ),
)


def replaced(tree: Any, count: int, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield copies of a tree of dicts, lists, tuples and dataclasses, in each of which something
    is other, or gone.
    """
    draw = random.Random(seed)
    ways = [way for way in _ways(tree, ()) if way]
    for _ in range(count):
        way, wrong = draw.choice(ways), draw.choice(_WRONG)
        gone = draw.random() < 0.3
        yield f"{way} {'gone' if gone else repr(wrong)[:50]}", _put(tree, way, wrong, gone)


def _ways(tree: Any, way: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield way
    for key, value in _items(tree):
        yield from _ways(value, (*way, key))


def _items(tree: Any) -> list[tuple[Any, Any]]:
    if isinstance(tree, dict):
        return list(tree.items())
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return list(enumerate(tree))
    return list(vars(tree).items()) if is_dataclass(tree) else []


def _put(tree: Any, way: tuple[Any, ...], value: Any, gone: bool) -> Any:
    if not way:
        return value
    key, rest = way[0], way[1:]
    items = dict(_items(tree))
    if gone and not rest and not is_dataclass(tree):
        del items[key]
    else:
        items[key] = _put(items[key], rest, value, gone)
    if is_dataclass(tree):
        made = copy(tree)
        object.__setattr__(made, key, items[key])  # some are frozen
        return made
    return type(tree)(items) if isinstance(tree, dict) else type(tree)(items.values())


class Model(nn.Module):
    """Odd sizes, a frozen layer, a shared weight, a buffer, and a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.mid = nn.Linear(13, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.head = nn.Linear(13, 3, bias=False)
        self.tied = nn.Linear(13, 3, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("offset", torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        x = self.frozen(x + self.mid(torch.tanh(self.norm(x))))
        return self.head(x) + self.tied(x)
