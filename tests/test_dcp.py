"""torch.distributed.checkpoint over shardcore's format: all is restored, and what fails is named
and loses nothing.
"""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardcore
import shardcore.dcp
from shardcore._native import _C
from shardcore.checkpoint import directory, write
from shardcore.checkpoint.directory import SaveLock
from shardcore.checkpoint.format import RANGE_NUMEL, Checkpoint, data_file, json_bytes, read_json
from tests.support.models import Run, batch_of, hash_of, hash_of_training, loss_of, train
from tests.support.ranks import run_ranks

Runs = Callable[[tuple[int, ...], tuple[int, ...], tuple[int, ...]], Iterator[tuple[int, int]]]


def _wrong_boxes(runs_of: Runs, shape: tuple[int, ...]) -> list[Any]:
    """The boxes whose runs are not their elements, in order."""
    flat = torch.arange(prod(shape))
    found = []
    for offsets in product(*(range(size) for size in shape)):
        for sizes in product(
            *(range(size - offset + 1) for size, offset in zip(shape, offsets, strict=True))
        ):
            box = flat.view(shape)[
                tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            ]
            parts = [flat[start : start + numel] for start, numel in runs_of(shape, offsets, sizes)]
            if torch.cat([*parts, flat[:0]]).tolist() != box.flatten().tolist():
                found.append((offsets, sizes))
    return found


SHAPES = [(), (7,), (1, 9), (5, 6), (3, 4, 5), (2, 1, 3, 2), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_runs_are_the_box(shape: tuple[int, ...]) -> None:
    assert not _wrong_boxes(shardcore.dcp.runs_of, shape)


def test_a_box_taken_for_one_run_is_found() -> None:
    def broken(shape: Any, offsets: Any, sizes: Any) -> Iterator[tuple[int, int]]:
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
        yield sum(o * s for o, s in zip(offsets, strides, strict=True)), prod(sizes)

    assert _wrong_boxes(broken, (5, 6))


def test_rows_are_one_run() -> None:
    assert list(shardcore.dcp.runs_of((9, 4, 5), (3, 0, 0), (2, 4, 5))) == [(60, 40)]
    assert list(shardcore.dcp.runs_of((9, 4, 5), (3, 1, 0), (1, 2, 5))) == [(65, 10)]


# --- what is restored -----------------------------------------------------------------------------


def _digest(state: Any, name: str = "") -> dict[str, str]:
    """What a state dict has, in full, by name. Collective."""
    if isinstance(state, dict):
        return {
            key: text
            for k, value in state.items()
            for key, text in _digest(value, f"{name}/{k}").items()
        }
    if isinstance(state, DTensor):
        state = state.full_tensor()
    return {name: hash_of([state]) if isinstance(state, torch.Tensor) else repr(state)}


def _fsdp2(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Uneven rows; fewer rows than ranks in the last."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(33, 7), nn.LayerNorm(7), nn.Linear(7, 41, bias=False), nn.Linear(41, 1)
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        model(torch.randn(4, 33, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


def _zero(state: Any) -> None:
    for value in state.values():
        if isinstance(value, dict):
            _zero(value)
        elif isinstance(value, torch.Tensor):
            value.detach().zero_()


def _save_fsdp2(rank: int, world_size: int, path: str) -> dict[str, str]:
    model, optimizer = _fsdp2(0, 3)
    state = _state_of(model, optimizer)
    expected = _digest(state)
    dcp.save(state, storage_writer=shardcore.dcp.Writer(f"{path}/writer"))
    dcp.save(
        state,
        checkpoint_id=f"{path}/checkpoint_id",
        storage_writer=shardcore.dcp.Writer("elsewhere/x"),
    )
    pending = dcp.async_save(state, storage_writer=shardcore.dcp.Writer(f"{path}/async"))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(17.0)
    pending.result()  # type: ignore[union-attr]
    return expected


def _load_fsdp2(rank: int, world_size: int, paths: list[str]) -> list[dict[str, str]]:
    restored = []
    for path in paths:
        model, optimizer = _fsdp2(1, 1)
        state = _state_of(model, optimizer)
        _zero(state)
        state["optimizer"]["param_groups"][0]["lr"] = 3.0
        zeroed = _digest(state)
        dcp.load(state, storage_reader=shardcore.dcp.Reader(path))
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        found = _digest(_state_of(model, optimizer))
        same = [
            name for name in found if found[name] == zeroed[name] and "param_groups" not in name
        ]
        assert not same, f"the twin that loads nothing is not told apart by {same}"
        restored.append(found)
    return restored


def test_fsdp2_models_and_optimizers_are_restored(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    expected, again = run_ranks(2, _save_fsdp2, str(folder))
    assert expected == again
    assert sorted(os.listdir(folder)) == [".lock", "async", "checkpoint_id", "writer"]
    paths = [str(folder / name) for name in ("writer", "checkpoint_id", "async")]
    for found in [*run_ranks(2, _load_fsdp2, paths), *run_ranks(1, _load_fsdp2, paths[:1])]:
        assert all(state == expected for state in found)
    for path in paths:
        assert sorted(os.listdir(path)) == ["manifest.json", data_file(0), data_file(1)], (
            "one file per rank, and no pickle"
        )


CUT = (3, RANGE_NUMEL // 2 + 5)
TENSORS = {"matrix": (5, 8), "cut": CUT, "block": (4, 3, 6), "row": (2, 1), "vector": (9,)}
DTYPES = {
    "matrix": torch.float32,
    "cut": torch.bfloat16,
    "block": torch.int64,
    "row": torch.bool,
    "vector": torch.float64,
}


def _tensor(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(0, 120, TENSORS[name], generator=generator).to(DTYPES[name])


def _save_tensors(rank: int, world_size: int, path: str, dim: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    state: Any = {
        name: distribute_tensor(_tensor(name), mesh, [Shard(min(dim, len(shape) - 1))])
        for name, shape in TENSORS.items()
    }
    dcp.save(
        {**state, "one": torch.tensor(2.5), "none": torch.empty(0, 4)},
        storage_writer=shardcore.dcp.Writer(path),
    )


def _load_tensors(rank: int, world_size: int, path: str, dim: int | None) -> None:
    state: Any = {name: torch.zeros(shape, dtype=DTYPES[name]) for name, shape in TENSORS.items()}
    if dim is not None:
        mesh = init_device_mesh("cpu", (world_size,))
        state = {
            name: distribute_tensor(t, mesh, [Shard(min(dim, t.dim() - 1))])
            for name, t in state.items()
        }
    state |= {"one": torch.zeros(()), "none": torch.ones(0, 4)}
    dcp.load(state, storage_reader=shardcore.dcp.Reader(path))
    for name in TENSORS:
        full = state[name].full_tensor() if dim is not None else state[name]
        assert torch.equal(full, _tensor(name)), name
    assert state["one"] == 2.5


@pytest.mark.cases(1)
@pytest.mark.parametrize(("saved", "loaded"), [(1, 0), (0, 1), (2, 1)])
def test_other_dimensions_are_restored(tmp_path: Path, saved: int, loaded: int) -> None:
    path = str(tmp_path / "x")
    run_ranks(2, _save_tensors, path, saved)
    run_ranks(2, _load_tensors, path, loaded)
    run_ranks(1, _load_tensors, path, None)
    with Checkpoint(Path(path)) as checkpoint:
        for name, shape in TENSORS.items():
            found = checkpoint.read(name, "weight", 0, prod(shape)).view(shape)
            assert torch.equal(found, _tensor(name)), "layout.Checkpoint reads it, too"


def _save_shards(rank: int, world_size: int, path: str, stage: int) -> str:
    model, optimizer, _ = train(rank, Run(stage=stage, steps=2, precision="bf16"))
    state = {
        "model": shardcore.sharded_state_dict(model),
        "optimizer": shardcore.sharded_state_dict(optimizer),
    }
    dcp.save(state, storage_writer=shardcore.dcp.Writer(path))
    return hash_of_training(model, optimizer)


def _load_shards(rank: int, world_size: int, path: str, stage: int) -> str:
    model, optimizer, _ = train(rank, Run(stage=stage, steps=1, precision="bf16"))
    state = {
        "model": shardcore.sharded_state_dict(model),
        "optimizer": shardcore.sharded_state_dict(optimizer),
    }
    dcp.load(state, storage_reader=shardcore.dcp.Reader(path))
    shardcore.load_sharded_state_dict(model, state["model"])
    shardcore.load_sharded_state_dict(optimizer, state["optimizer"])
    return hash_of_training(model, optimizer)


@pytest.mark.more
def test_shards_are_restored_in_other_worlds_and_stages(tmp_path: Path) -> None:
    first, second = run_ranks(2, _save_shards, str(tmp_path / "x"), 3)
    assert [first] * 3 == [second, *run_ranks(1, _load_shards, str(tmp_path / "x"), 2), first]
    assert run_ranks(3, _load_shards, str(tmp_path / "x"), 3) == [first] * 3


PLAIN = {
    "nested": {"list": [1, (2, 3.5), {"deep": None}], "text": "x$", "flag": True},
    "bytes": b"\x80\x04",
    "numbers": {"nan": float("inf"), "big": 1 << 80},
    "$odd": {"$tuple": [1]},
}


def _save_alone(state: Any, path: Path, **options: Any) -> Any:
    return dcp.save(state, storage_writer=shardcore.dcp.Writer(path, **options), no_dist=True)


def _load_alone(state: Any, path: Path) -> Any:
    dcp.load(state, storage_reader=shardcore.dcp.Reader(path), no_dist=True)
    return state


def test_plain_data_is_restored(tmp_path: Path) -> None:
    saved = _save_alone({**PLAIN, "weight": torch.ones(3)}, tmp_path / "x")
    empty = {
        "nested": {"list": [0, (), {"deep": 1}], "text": "", "flag": None},
        "bytes": b"",
        "numbers": {"nan": 0, "big": 0},
        "$odd": {"$tuple": [0]},
        "weight": torch.zeros(3),
    }
    found = _load_alone(empty, tmp_path / "x")
    assert found.pop("weight").tolist() == [1, 1, 1]
    assert found == PLAIN
    assert shardcore.dcp.Reader(tmp_path / "x").read_metadata().planner_data == saved.planner_data
    for file in (tmp_path / "x").iterdir():
        assert b"torch" not in file.read_bytes().partition(b'"torch":')[2], (
            f"{file.name} names no class to unpickle"
        )


def test_what_shardcore_saves_and_loads_is_exchanged(tmp_path: Path) -> None:
    model, optimizer, _ = train(0, Run(stage=2, steps=2))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = shardcore.save(tmp_path / "own", model, optimizer)
    found = _load_alone(
        {name: torch.zeros_like(value) for name, value in weights.items()}, tmp_path / "own"
    )
    assert all(torch.equal(found[name], value) for name, value in weights.items()), (
        "Reader finds the latest of a directory"
    )
    _save_alone(weights, tmp_path / "runs" / "x", save_latest=True)
    other, its, _ = train(0, Run(stage=2, steps=1))
    with pytest.raises(ValueError, match="contains no optimizer states"):
        shardcore.load(tmp_path / "runs", other, its)
    assert shardcore.load(tmp_path / "runs", other).path.name == "x"
    assert all(torch.equal(other.state_dict()[name], value) for name, value in weights.items())
    assert saved.path.exists()


@pytest.mark.cases(1)
@pytest.mark.parametrize("flattened", [False, True])
def test_shardcore_loads_models_with_their_optimizers(tmp_path: Path, flattened: bool) -> None:
    """As it does from FileSystemWriter, bit for bit."""
    plain, _, _ = train(0, Run(stage=2, steps=0))
    model = type(plain)()
    adam = torch.optim.AdamW(model.parameters(), lr=0.02)
    loss_of(model, batch_of(0, 0, 0)).backward()
    adam.step()
    weights, states = get_state_dict(
        model, adam, options=StateDictOptions(flatten_optimizer_state_dict=flattened)
    )
    state = {"model": weights, "optimizer": states, "epoch": 3, "scheduler": {"last": [1]}}
    _save_alone(state, tmp_path / "ours")
    dcp.save(state, checkpoint_id=tmp_path / "torchs", no_dist=True)
    hashes = set()
    for written in ("ours", "torchs"):
        other, its, _ = train(0, Run(stage=2, steps=1))
        assert shardcore.load(tmp_path / written, other, its).client_state == {"epoch": 3}
        assert its.param_groups[0]["lr"] == 0.02
        hashes.add(hash_of_training(other, its))
    assert hashes == {hash_of_training(model, adam)}
    data = tmp_path / "ours" / data_file(0)
    raw = bytearray(data.read_bytes())
    raw[4096] ^= 1
    data.write_bytes(raw)
    with pytest.raises(ValueError, match="is damaged in bytes"):
        shardcore.load(tmp_path / "ours", other, its)


@pytest.mark.slow
def test_shardcore_alone_does_not_import_it() -> None:
    code = (
        "import sys, shardcore; assert 'torch.distributed.checkpoint' not in sys.modules; "
        "import shardcore.dcp"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- what fails -----------------------------------------------------------------------------------


def _save_with_fault(
    rank: int, world_size: int, path: str, fault: str, bad: int
) -> tuple[str, list[str]]:
    def save(value: float) -> None:
        mesh = init_device_mesh("cpu", (world_size,))
        state = {"x": distribute_tensor(torch.full((4, 512), value), mesh, [Shard(0)])}
        dcp.save(state, storage_writer=shardcore.dcp.Writer(path))

    save(1.0)
    write.file_engine = lambda: _C.FileEngine(faults=fault if rank == bad else "")
    said = ""
    try:
        save(2.0)
    except dcp.CheckpointException as error:
        write.file_engine = _C.FileEngine
        said = str(error)
        found = {"x": torch.zeros(4, 512)}
        dcp.load(found, storage_reader=shardcore.dcp.Reader(path))
        assert found["x"].eq(1).all(), "the old one is whole"
        dist.barrier()
        save(3.0)  # with another Writer, while the error still refers to the first one
        dcp.load(found, storage_reader=shardcore.dcp.Reader(path))
        assert found["x"].eq(3).all()
    finally:
        write.file_engine = _C.FileEngine
    return said, sorted(os.listdir(Path(path).parent))


@pytest.mark.parametrize(
    ("fault", "name", "bad"),
    [
        ("write:EIO@4096", "Input/output error", 0),
        ("reserve:ENOSPC", "No space left", 1),
        ("sync:EIO", "Input/output error", 1),
    ],
)
def test_a_write_that_fails_is_named_on_every_rank(
    tmp_path: Path, fault: str, name: str, bad: int
) -> None:
    for said, left in run_ranks(2, _save_with_fault, str(tmp_path / "x"), fault, bad):
        assert name in said
        assert data_file(bad) in said
        assert left == [".lock", "x"]


def test_a_manifest_that_is_not_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save_alone({"x": torch.ones(3)}, tmp_path / "x")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_synced", full)
        with pytest.raises(dcp.CheckpointException, match="No space left"):
            _save_alone({"x": torch.zeros(3)}, tmp_path / "x")
    assert sorted(os.listdir(tmp_path)) == [".lock", "x"], "unlocked, and nothing is left"
    assert _load_alone({"x": torch.zeros(3)}, tmp_path / "x")["x"].tolist() == [1, 1, 1]


def test_each_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    path = tmp_path / "x"
    _save_alone({"a": torch.ones(300), "b": torch.ones(300), "plain": [1]}, path)
    file = path / data_file(0)
    whole = file.read_bytes()
    head = read_json(path / "manifest.json")["files"][0]["head_bytes"]
    for offset, named in (
        (9, "bytes 0 to"),
        (head, f"bytes {head} to"),
        (len(whole) - 1, f"to {len(whole)} \\(b"),
    ):
        damaged = bytearray(whole)
        damaged[offset] ^= 16
        file.write_bytes(damaged)
        with pytest.raises(
            dcp.CheckpointException, match=f"(?s){data_file(0)} is damaged in .*{named}"
        ):
            _load_alone({"a": torch.zeros(300), "b": torch.zeros(300)}, path)
    found = _load_alone({"a": torch.zeros(300), "plain": 0}, path)
    assert found["a"].eq(1).all(), "what is not asked for, the damaged end, is not read"
    manifest = path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"[1]", b"[2]"))
    with pytest.raises(dcp.CheckpointException, match=r"manifest\.json is damaged"):
        _load_alone({"plain": 0}, path)


def _load_rows(rank: int, world_size: int, path: str) -> list[int]:
    rows = distribute_tensor(
        torch.zeros(4, RANGE_NUMEL // 2), init_device_mesh("cpu", (world_size,)), [Shard(0)]
    )
    try:
        dcp.load({"x": rows}, storage_reader=shardcore.dcp.Reader(path))
    except dcp.CheckpointException as error:
        return list(error.failures)
    return []


def test_a_rank_reads_only_its_own_ranges(tmp_path: Path) -> None:
    _save_alone({"x": torch.zeros(4, RANGE_NUMEL // 2)}, tmp_path / "x")
    with open(tmp_path / "x" / data_file(0), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    assert run_ranks(2, _load_rows, str(tmp_path / "x")) == [[1], [1]]


@pytest.mark.parametrize(
    "own", [5, [], {"objects": 1, "planner_data": None}, {"objects": {"x": {"$eval": "1"}}}]
)
def test_forged_plain_data_is_refused(tmp_path: Path, own: Any) -> None:
    _save_alone({"x": 1}, tmp_path / "x")
    manifest = tmp_path / "x" / "manifest.json"
    held = {key: value for key, value in read_json(manifest).items() if key != "crc32c"}
    manifest.write_bytes(json_bytes({**held, "dcp": own}))
    with pytest.raises(ValueError, match=r"manifest\.json"):
        shardcore.dcp.Reader(tmp_path / "x").read_metadata()


def test_the_checkpoint_of_a_name_is_replaced(tmp_path: Path) -> None:
    writer = shardcore.dcp.Writer(tmp_path / "x")
    for value in (1.0, 2.0):
        dcp.save({"x": torch.full((3,), value), "y": 7}, storage_writer=writer, no_dist=True)
    _save_alone({"x": torch.full((3,), 5.0)}, tmp_path / "x")
    assert _load_alone({"x": torch.zeros(3)}, tmp_path / "x")["x"].tolist() == [5, 5, 5]
    assert "y" not in shardcore.dcp.Reader(tmp_path / "x").read_metadata().state_dict_metadata
    assert sorted(os.listdir(tmp_path)) == [".lock", "x"]


def test_what_is_no_plain_data_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x"
    _save_alone({"x": 1}, path)
    with pytest.raises(
        dcp.CheckpointException, match=r"model\.a.* is of type object; expected plain data"
    ):
        _save_alone({"model": {"a": [{"b": object()}]}, "w": torch.ones(3)}, path)
    with pytest.raises(dcp.CheckpointException, match=r"c@0 is a tensor of torch\.complex64"):
        _save_alone({"c": torch.zeros(2, dtype=torch.complex64)}, path)
    assert _load_alone({"x": 0}, path) == {"x": 1}


def _columns(rank: int, world_size: int, path: str) -> tuple[str, str]:
    mesh = init_device_mesh("cpu", (world_size,))
    shardcore.dcp._MAX_RANGES, usual = 15, shardcore.dcp._MAX_RANGES
    try:
        rows, columns = (distribute_tensor(torch.ones(8, 8), mesh, [Shard(dim)]) for dim in (0, 1))
        return _said({"x": rows}, path), _said({"x": columns}, path)
    finally:
        shardcore.dcp._MAX_RANGES = usual


def test_too_many_ranges_are_refused_with_what_to_do(tmp_path: Path) -> None:
    for rows, columns in run_ranks(2, _columns, str(tmp_path / "x")):
        assert rows == "no error"
        assert "16 ranges are too many for a manifest; expected at most 15" in columns
        assert "shard dimension 0, or use FileSystemWriter" in columns


def test_torchs_own_folder_is_named(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.raises(
        dcp.CheckpointException, match=r"was written by FileSystemWriter; .* use FileSystemReader"
    ):
        _load_alone({"x": torch.zeros(3)}, tmp_path / "x")


def test_a_path_that_is_no_checkpoint_is_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("")
    with pytest.raises(
        dcp.CheckpointException,
        match="exists, but is not a checkpoint of shardcore",
    ):
        _save_alone({"x": 1}, tmp_path / "mine")
    with pytest.raises(dcp.CheckpointException, match=r"tag is '\.x'"):
        _save_alone({"x": 1}, tmp_path / ".x")
    assert os.listdir(tmp_path / "mine") == ["thesis"]
    with pytest.raises(dcp.CheckpointException, match="missing"):
        _load_alone({"x": 1}, tmp_path / "missing")


def _said(state: Any, path: str, **options: Any) -> str:
    try:
        dcp.save(state, storage_writer=shardcore.dcp.Writer(path), **options)
    except dcp.CheckpointException as error:
        return str(error)
    return "no error"


def _unlike_ranks(rank: int, world_size: int, path: str) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    x: Any = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    odd = DTensor.from_local(
        torch.ones(2, 3, dtype=torch.int32 if rank else torch.float32), mesh, [Shard(0)]
    )
    said = [
        _said({"x": x}, path, no_dist=True) if rank == 0 else "",
        _said({"x": x}, f"{path}{rank}"),
        _said({"x": odd}, path),
    ]
    dist.barrier()
    lock = SaveLock(Path(path).parent, "y") if rank == 1 else None
    dist.barrier()
    said.append(_said({"x": x}, path))
    dist.barrier()
    if lock is not None:
        lock.release()
    dist.barrier()
    return [*said, _said({"x": x}, path)]


def test_ranks_that_do_not_make_a_whole_are_refused(tmp_path: Path) -> None:
    first, second = run_ranks(2, _unlike_ranks, str(tmp_path / "x"))
    assert "no whole checkpoint" in first[0]
    assert "lists 6 elements of x (weight); expected 12" in first[0]
    for said in (first, second):
        assert "rank 1 does not see" in said[1]
        assert "x is of F32 on one rank and of I32 on another" in said[2]
        assert "another job is saving there" in said[3]
        assert said[4] == "no error"
    assert sorted(os.listdir(tmp_path)) == [".lock", "x"]


@pytest.mark.more
def test_a_failed_save_is_cleared_away(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    assert "type object" in _said({"x": object()}, path, no_dist=True)
    gc.collect()
    assert os.listdir(tmp_path) == [".lock"]
    for _ in range(3):  # in threads, whose errors still refer to their Writers
        failing = dcp.async_save(
            {"x": _Held()}, storage_writer=shardcore.dcp.Writer(path), no_dist=True
        )
        with pytest.raises(dcp.CheckpointException, match="type _Held; expected plain data"):
            failing.result()  # type: ignore[union-attr]
        dcp.async_save({"x": 1}, storage_writer=shardcore.dcp.Writer(path), no_dist=True).result()  # type: ignore[union-attr]
    assert sorted(os.listdir(tmp_path)) == [".lock", "x"]


class _Held:
    """What is no plain data."""


@pytest.mark.more
def test_a_writer_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def slow() -> Any:
        began.set()
        goes_on.wait(60)
        return _C.FileEngine()

    monkeypatch.setattr(write, "file_engine", slow)
    writer = shardcore.dcp.Writer(tmp_path / "a")
    first: Any = dcp.async_save({"x": torch.ones(3)}, storage_writer=writer, no_dist=True)
    try:
        assert began.wait(60)
        second: Any = dcp.async_save(
            {"x": torch.zeros(3)}, checkpoint_id=tmp_path / "b", storage_writer=writer, no_dist=True
        )
        with pytest.raises(
            dcp.CheckpointException, match="a is still being written by this Writer"
        ):
            second.result()
        assert "a save of this process is still running there" in _said(
            {"x": torch.zeros(3)}, str(tmp_path / "a"), no_dist=True
        )
    finally:
        goes_on.set()
    first.result()
    assert _load_alone({"x": torch.zeros(3)}, tmp_path / "a")["x"].tolist() == [1, 1, 1]
    assert sorted(os.listdir(tmp_path)) == [".lock", "a"]
