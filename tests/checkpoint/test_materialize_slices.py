"""Tensor-parallel models on the meta device: the bits of the model in memory, then sliced; each
rank reads what it keeps.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import shardcore
from shardcore.checkpoint import materialize
from shardcore.checkpoint.file_tensors import FileTensor
from shardcore.engine.slices import Slice
from tests.support.meta import init, meta, save
from tests.support.models import error_of, hash_of_training
from tests.support.ranks import run_ranks
from tests.support.slices import VOCAB, WIDTH, Lm, mesh_of, slice_lm, train_lm


class Tied(Lm):
    """With one weight for embedding and head, buffers that files do and do not have, and frozen
    slices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.register_buffer("gain", torch.ones(WIDTH))
        self.register_buffer("places", torch.arange(4), persistent=False)
        for name in ("norm.bias", "blocks.0.mlp.down.weight", "blocks.1.attention.query.weight"):
            self.get_parameter(name).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> Any:
        return super().forward(tokens) * self.places[1]


def fill(module: nn.Module) -> None:
    """What building does."""
    if isinstance(module, Tied):
        module.gain.fill_(1.0)
        module.places.copy_(torch.arange(4))
    else:
        init(module)


def _sliced(
    model: Any, mesh: Any, stage: int, given: Any = None, **options: Any
) -> tuple[Any, Any]:
    tied = model.head.weight is model.embedding.weight
    slice_lm(model, mesh["tp"], sequence=True)
    if tied:
        model.head.weight = model.embedding.weight
    optimizer: Any = shardcore.FusedAdam(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2
    )
    return shardcore.shard(
        model, optimizer, stage, process_group=mesh["dp"], materialize=given, **options
    )


Case = tuple[int, str]
CASES: list[Case] = [(0, "fp32"), (1, "bf16"), (3, "bf16")]  # 2 makes weights as 1 does
_read, _read_columns, _cut = FileTensor.read, materialize.read_columns, Slice.cut


def _next_column(read: Any, columns: Any, start: int, numel: int) -> torch.Tensor:
    values = _read_columns(read, columns, start, numel)
    return values.roll(1) if columns is not None and columns.rows > 1 else values


def _first_slice(self: Slice, full: torch.Tensor) -> torch.Tensor:
    return _cut(self, full) if self.dim is None else full.narrow(self.dim, 0, self.size)


def _another_range(start: int, numel: int, columns: Any) -> list[tuple[int, int]]:
    return [(0, numel)]


FAULTS: dict[str, Callable[[], Any]] = {
    "columns that begin elsewhere": lambda: mock.patch.object(
        materialize, "read_columns", _next_column
    ),
    "another range": lambda: mock.patch.object(materialize, "cut", _another_range),
    "every rank has the first slice": lambda: mock.patch.object(Slice, "cut", _first_slice),
}


def _trained(
    rank: int, world: int, on_meta: bool, folder: str | None, cases: list[Case], fault: str = ""
) -> list[tuple[str, float, int]]:
    """Train on from random numbers, each rank's own, or a folder: the hash, the next random
    number, the elements read.
    """
    mesh, found, read = mesh_of(world, 2), [], 0

    def counting(tensor: FileTensor, start: int, numel: int) -> torch.Tensor:
        nonlocal read
        read += numel
        return _read(tensor, start, numel)

    for stage, precision in cases:
        torch.manual_seed(rank)
        model: Any = meta(Tied) if on_meta else Tied()
        if folder is not None and not on_meta:
            model.load_state_dict(_weights() | {"head.weight": _weights()["embedding.weight"]})
        given = None if not on_meta else fill if folder is None else [folder, _places]
        buffers, read = dict(model.named_buffers()), 0
        # so that weights are read in several ranges
        short = mock.patch("shardcore.checkpoint.format.RANGE_NUMEL", 256)
        with (
            mock.patch.object(FileTensor, "read", counting),
            FAULTS.get(fault, nullcontext)(),
            short,
        ):
            model, optimizer = _sliced(model, mesh, stage, given, precision=precision)
        drawn = torch.rand(1).item()
        assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
        assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
        assert model.head.weight is model.embedding.weight
        train_lm(model, optimizer, mesh, range(1))
        found.append((hash_of_training(model, optimizer), drawn, read))
    return found


def _is_another(found: list[Any], expected: list[Any]) -> bool:
    """Whether the last case has other weights on every rank."""
    return all(one[-1][0] != other[-1][0] for one, other in zip(found, expected, strict=True))


def test_a_function_makes_the_bits_of_building() -> None:
    expected = run_ranks(4, _trained, False, None, CASES)
    assert run_ranks(4, _trained, True, None, CASES) == expected
    assert _is_another(
        run_ranks(4, _trained, True, None, CASES[-1:], "every rank has the first slice"), expected
    )


def _weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    weights = {name: torch.randn_like(value) for name, value in Tied().state_dict().items()}
    del weights["head.weight"]  # tied weights are stored once, under either name
    return weights


def _files(folder: Path) -> str:
    """The weights in two files and an index."""
    weights = _weights()
    files = {"one.safetensors": [*weights][::2], "two.safetensors": [*weights][1::2]}
    for file, names in files.items():
        save(folder / file, {name: weights[name] for name in names})
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return str(folder)


def _places(module: nn.Module) -> None:
    """Fill the buffer that no file has."""
    assert isinstance(module, Tied), "files have all of the others"
    module.places.copy_(torch.arange(4))


def _most(tp: int) -> int:
    """How many elements the ranks of a slice have to read of each weight at most, where they
    keep all of it.
    """
    total = 0
    for name, value in _weights().items():
        rows = name.endswith("up.bias") or (
            value.dim() == 2 and not name.endswith(("out.weight", "down.weight"))
        )
        # of columns whole rows, and all of what all ranks have
        total += (value.chunk(2)[tp] if rows else value).numel()
    return total


def test_files_give_the_bits_that_they_hold(tmp_path: Path) -> None:
    folder = _files(tmp_path)
    found, expected = (
        run_ranks(4, _trained, True, folder, CASES),
        run_ranks(4, _trained, False, folder, CASES),
    )
    assert [[one[0] for one in of_rank] for of_rank in found] == [
        [one[0] for one in of_rank] for of_rank in expected
    ]
    assert max(_most(0), _most(1)) < 0.75 * sum(value.numel() for value in _weights().values())
    for number, (stage, _) in enumerate(CASES):
        for tp in (0, 1):
            reads = [found[rank][number][2] for rank in (tp, tp + 2)]
            # 1.2: norms, and rows that are cut
            assert 0 < (sum(reads) / 1.2 if stage == 3 else max(reads)) <= _most(tp)
    for fault in ("columns that begin elsewhere", "another range"):
        assert _is_another(run_ranks(4, _trained, True, folder, CASES[-1:], fault), expected)


# --- options --------------------------------------------------------------------------------------


def _options(rank: int, world: int, folder: str) -> list[str]:
    """Host memory, torch's optimizer, a pair of a file and a function, ranks that do not take
    the first one's values.
    """
    mesh, found = mesh_of(world, 2), []
    tiers: dict[str, Any] = {"optimizer": "cpu", "params": "cpu", "gradients": "cpu"}
    nvme = {
        "optimizer": "nvme",
        "path": folder,
        "params": "nvme",
        "gradients": "cpu",
        "durable": False,
    }
    for on_meta in (False, True):
        for options in ({"offload": tiers}, {"offload": nvme}, {"broadcast": False}):
            torch.manual_seed(0)
            model = meta(Lm) if on_meta else Lm()
            slice_lm(model, mesh["tp"], sequence=False)
            if not on_meta:
                model.norm.weight.data.copy_(torch.ones(WIDTH))
            theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer = shardcore.shard(
                model, theirs, 3, process_group=mesh["dp"], precision="bf16", **options
            )
            train_lm(model, optimizer, mesh, range(1))
            found.append(hash_of_training(model, optimizer))
    return found


def test_tiers_and_torchs_optimizer(tmp_path: Path) -> None:
    assert (
        len({hashed for of_rank in run_ranks(4, _options, str(tmp_path)) for hashed in of_rank})
        == 1
    )


# --- errors ---------------------------------------------------------------------------------------


def _refused(rank: int, world: int, good: str, folders: list[str], alone: bool) -> list[str]:
    """Errors of shard, for each of the folders. alone: only the last rank has it, the others
    have a good one.
    """
    mesh, texts = mesh_of(world, 2), []
    for folder in folders:
        model, given = meta(Lm), good if alone and rank < world - 1 else folder
        texts.append(error_of(partial(_sliced, model, mesh, 2, given)))
        assert all(param.is_meta for param in model.parameters()), "nothing was changed"
    return texts


def _plain(folder: str) -> str:
    model = meta(Lm)
    return error_of(
        lambda: shardcore.shard(model, shardcore.FusedAdam(model.parameters()), materialize=folder)
    )


def test_bad_files_have_the_errors_of_a_model_that_is_not_sliced(tmp_path: Path) -> None:
    weights = dict(Lm().state_dict())
    down = "blocks.1.mlp.down.weight"
    tensors = {
        "missing": {name: value for name, value in weights.items() if name != down},
        "unexpected": weights | {"blocks.2.mlp.down.weight": torch.zeros(3)},
        "shape": weights | {down: torch.zeros(WIDTH, WIDTH)},
        "slice": weights | {"head.weight": torch.zeros((VOCAB + 1) // 2, WIDTH)},
        "dtype": weights | {down: torch.zeros(WIDTH, 3 * WIDTH, dtype=torch.int64)},
    }
    folders = [
        str(save(tmp_path / f"{name}.safetensors", of_name)) for name, of_name in tensors.items()
    ]
    good = str(save(tmp_path / "good.safetensors", weights))
    expected = [_plain(folder) for folder in folders]
    assert "no error" not in expected
    assert run_ranks(2, _refused, good, folders, False) == [expected, expected]
    first, *_, last = run_ranks(4, _refused, good, folders, True)
    assert last == expected
    assert all(text.startswith("ValueError: shard: rank 3 refused: ") for text in first)


def _failing(rank: int, world: int) -> str:
    """The function fails on the rank with the last shard of the last slice."""

    def fails(module: nn.Module) -> None:
        init(module)
        if rank == world - 1 and isinstance(module, nn.LayerNorm):
            raise KeyError("no such weight")

    return error_of(lambda: _sliced(meta(Lm), mesh_of(world, 2), 3, fails))


def test_an_error_on_one_rank_is_one_on_the_ranks_of_other_slices() -> None:
    *others, own = run_ranks(4, _failing)
    assert own == "KeyError: 'no such weight'"
    for text in others:
        assert "filling blocks.0.first (LayerNorm): rank 3 failed: KeyError: no such w" in text
