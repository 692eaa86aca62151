"""A source of any kind is loaded: what it has by name and by ranges is what the model and its
optimizer get.
"""

from functools import partial
from itertools import combinations, pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from shardcore.checkpoint import source as source_module
from shardcore.checkpoint.format import RANGE_NUMEL, cut
from shardcore.checkpoint.load import LoadOptions, load_from
from shardcore.checkpoint.source import Source, gathered
from shardcore.engine.engine import engine_behind
from shardcore.layout import BLOCK, Columns
from tests.support.models import Run, make_net, train
from tests.support.ranks import run_ranks


class InMemory(Source):
    """Full tensors, of which it is written down which parts were read."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.path = Path("memory")
        self.shapes = {name: tuple(value.shape) for name, value in make_net().state_dict().items()}
        trained = [name for name, _ in make_net().named_parameters()]
        self.steps = dict.fromkeys(trained, 5)
        self.tensors = {
            (name, key): torch.randn(self.shapes[name], generator=generator).abs()
            for name in self.shapes
            for key in self.keys(name)
        }
        self.read_numel = 0

    def keys(self, name: str) -> tuple[str, ...]:
        return ("weight", "exp_avg", "exp_avg_sq") if name in self.steps else ("weight",)

    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        self.read_numel += numel
        return self.tensors[name, key].reshape(-1)[start : start + numel].clone()


def _load(rank: int, world_size: int, stage: int) -> tuple[int, int]:
    model, optimizer, _ = train(rank, Run(stage=stage, steps=1, precision="bf16"))
    source = InMemory(3)
    with source:
        load_from(source, engine_behind("load", model), LoadOptions())
    numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    weights, states = model.state_dict(), optimizer.state_dict()["state"]
    for (name, key), value in source.tensors.items():
        found = weights[name] if key == "weight" else states[numbers[name]][key]
        assert torch.equal(found.cpu(), value), (name, key)
    assert {float(state["step"]) for state in states.values()} == {5.0}
    return source.read_numel, sum(value.numel() for value in source.tensors.values())


@pytest.mark.cases(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_source_is_loaded(stage: int) -> None:
    results = run_ranks(2, _load, stage)
    read = [numel for numel, _ in results]
    if stage == 0:
        assert read == [results[0][1]] * 2
    else:  # each rank reads what it keeps
        assert sum(read) < 1.1 * results[0][1]


def _names(rank: int, world_size: int) -> list[Any]:
    model, _, _ = train(rank, Run(stage=2, steps=1))
    engine = engine_behind("load", model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    source = InMemory(3)
    del source.shapes["gain"]  # type: ignore[attr-defined]
    source.shapes["other"] = (3,)  # type: ignore[index]
    said = []
    try:
        load_from(source, engine, LoadOptions())
    except ValueError as error:
        said.append(str(error))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    loaded = load_from(source, engine, LoadOptions(strict=False))
    assert torch.equal(model.state_dict()["gain"], before["gain"])
    assert torch.equal(model.state_dict()["head.weight"], source.tensors["head.weight", "weight"])
    source.shapes["head.weight"] = (24, 5)  # type: ignore[index]
    try:
        load_from(source, engine, LoadOptions(strict=False))
    except ValueError as error:
        said.append(str(error))
    return [*said, loaded.missing, loaded.unexpected]


def test_names_and_shapes_are_compared_first() -> None:
    for names, shapes, missing, unexpected in run_ranks(2, _names):
        assert "and the model differ in names: missing gain; unexpected other" in names
        assert "head.weight has shape (24, 5) in memory; expected (5, 24)" in shapes
        assert (missing, unexpected) == (["gain"], ["other"])


def _weights_only(rank: int, world_size: int) -> None:
    model, optimizer, _ = train(rank, Run(stage=3, steps=2))
    states = optimizer.state_dict()["state"]
    source = InMemory(3)
    load_from(source, engine_behind("load", model), LoadOptions(states=False))
    assert torch.equal(model.state_dict()["head.weight"], source.tensors["head.weight", "weight"])
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, states[number][key]) for key, value in state.items())


def test_weights_alone() -> None:
    run_ranks(2, _weights_only)


# --- slices ---------------------------------------------------------------------------------------

# Shape, sliced dimension, blocks of it, and how many ranks have slices before and after.
CUTS = [
    ((6, 10), 1, 1, 2, 5),
    ((7, 3), 0, 1, 3, 2),
    ((3, 8, 5), 1, 2, 2, 4),
    ((12,), 0, 3, 4, 2),
    ((2, 9, 2), 1, 1, 4, 1),
]


def _columns(shape: tuple[int, ...], dim: int, blocks: int, ranks: int) -> list[Columns]:
    length, inner = shape[dim] // blocks, prod(shape[dim + 1 :])
    starts = [min(length, rank * -(-length // ranks)) * inner for rank in range(ranks + 1)]
    rows, width = prod(shape[:dim]) * blocks, length * inner
    return [Columns(rows, width, a, b - a) for a, b in pairwise(starts) if b > a]


def _all_windows_are_right() -> bool:
    for shape, dim, blocks, before, after in CUTS:
        full = torch.arange(prod(shape))
        parts, wanted = _columns(shape, dim, blocks, before), _columns(shape, dim, blocks, after)
        values = {
            c: full.view(c.rows, c.width)[:, c.first : c.first + c.count].flatten().contiguous()
            for c in (*parts, *wanted)
        }
        reads = {part: partial(values[part].narrow, 0) for part in parts}
        for columns in wanted:
            for start, end in combinations(range(values[columns].numel() + 1), 2):
                if not torch.equal(
                    gathered(columns, start, end - start, reads), values[columns][start:end]
                ):
                    return False
    return True


@pytest.mark.parametrize("long", [1, 1 << 20], ids=["long rows", "short rows"])
def test_slices_are_read_from_other_slices(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_LONG", long)
    assert _all_windows_are_right()
    monkeypatch.setattr(
        Columns, "before", lambda self, row, column: row * self.count + max(column - self.first, 0)
    )
    with pytest.raises((RuntimeError, AssertionError)):
        assert _all_windows_are_right()


@pytest.mark.parametrize("numel", [5, 1000, RANGE_NUMEL + 3])
def test_ranges_of_a_slice_are_its_share(numel: int) -> None:
    for columns in _columns((64, 4096), 1, 1, 3):
        ranges = list(cut(256, numel, columns))
        assert sum(count for _, count in ranges) == numel
        assert all(start % BLOCK == 0 for start, _ in ranges)
        assert max(count for _, count in ranges) <= RANGE_NUMEL * columns.count // columns.width
