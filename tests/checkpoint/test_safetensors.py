"""Models on the meta device read from safetensors files; and how much memory making a model
takes, from files or functions.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardcore
from shardcore.checkpoint.file_tensors import FileTensor, Window
from shardcore.checkpoint.safetensors import open_files
from tests.support.choice import combinations
from tests.support.meta import frozen_net, init, meta, save
from tests.support.models import (
    Block,
    Net,
    Run,
    error_of,
    hash_of,
    hash_of_training,
    make_net,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.slices import mesh_of
from tests.support.torch_memory import recorded_memory


def _parts(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A folder in Hugging Face's layout: two files and an index."""
    names = list(tensors)
    files = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, of_file in files.items():
        save(folder / file, {name: tensors[name] for name in of_file})
    weight_map = {name: file for file, of_file in files.items() for name in of_file}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def _from_files(rank: int, world_size: int, run: Run, folder: str, frozen: bool) -> tuple[str, int]:
    """Train on from files; also returns how many elements this rank read."""
    count, read = 0, FileTensor.read

    def counting(tensor: FileTensor, start: int, numel: int) -> torch.Tensor:
        nonlocal count
        count += numel
        return read(tensor, start, numel)

    with mock.patch.object(FileTensor, "read", counting):
        model = meta(frozen_net if frozen else Net)
        model, optimizer, _ = train(rank, replace(run, shard={"materialize": folder}), model)
    return hash_of_training(model, optimizer), count


def _from_memory(rank: int, world_size: int, run: Run, frozen: bool) -> str:
    torch.manual_seed(5)
    model, optimizer, _ = train(rank, run, frozen_net() if frozen else Net())
    return hash_of_training(model, optimizer)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "precision", "frozen"),
    combinations([0, 1, 2, 3], ["fp32", "bf16"], [False, True], meet=1),
)
def test_files_give_the_bits_that_they_hold(
    tmp_path: Path, stage: int, precision: str, frozen: bool
) -> None:
    torch.manual_seed(5)
    model = frozen_net() if frozen else Net()
    tensors = dict(model.state_dict())
    if frozen:
        del tensors["blocks.0.up.weight"]  # tied weights are stored once, under either name
    folder = _parts(tmp_path, tensors)
    run = Run(stage=stage, precision=precision, steps=1)
    got = run_ranks(2, _from_files, run, str(folder), frozen)
    assert [entry[0] for entry in got] == run_ranks(2, _from_memory, run, frozen)
    if stage == 3:  # every parameter is read once, over all ranks; buffers by each
        assert sum(read for _, read in got) == sum(p.numel() for p in model.parameters()) + 5 * 2


def test_masters_start_from_the_files_values(tmp_path: Path) -> None:
    given = {key: torch.randn_like(value) for key, value in make_net().state_dict().items()}
    for dtype in (torch.float32, torch.float16, torch.float64):
        path = save(
            tmp_path / f"{dtype}.safetensors",
            {key: value.to(dtype) for key, value in given.items()},
        )
        model = meta(lambda: Net().to(torch.bfloat16))
        model, _ = shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), 3, materialize=path, precision="bf16"
        )
        for name, param in model.named_parameters():
            assert torch.equal(
                shardcore.full_state(param, "master"), given[name].to(dtype).float()
            ), name
            with shardcore.full_params(model):
                assert param.dtype == torch.bfloat16


def test_what_is_in_memory_and_in_no_file_is_kept(tmp_path: Path) -> None:
    """Adapters beside a base model: the base comes from files, the adapters are as they were
    made.
    """
    given = make_net(4).state_dict()
    path = save(
        tmp_path / "base.safetensors",
        {k: v for k, v in given.items() if not k.startswith(("head", "offset"))},
    )
    for stage in (2, 3):
        model = meta()
        head = torch.randn(5, 24)
        model.head.weight = nn.Parameter(head.clone())
        # in memory, and in the file: the file's
        model.inp.weight = nn.Parameter(torch.zeros(24, 10))
        model.register_buffer("offset", torch.ones(5))
        model, _ = shardcore.shard(
            model,
            shardcore.FusedAdam(model.parameters()),
            stage,
            precision="fp32",
            materialize=[str(path)],
        )
        state = model.state_dict()
        assert torch.equal(state["head.weight"], head)
        assert torch.equal(state["inp.weight"], given["inp.weight"])
        assert torch.equal(state["offset"], torch.ones(5))


def _files_and_function(rank: int, world_size: int, path: str, stage: int) -> tuple[str, bool]:
    torch.manual_seed(rank)
    model = meta()
    given = [path, init]
    model, _ = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), stage, precision="fp32", materialize=given
    )
    state = model.state_dict()
    torch.manual_seed(0)
    return hash_of(state.values()), torch.equal(
        state["head.weight"], nn.Linear(24, 5, bias=False).weight
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_a_function_fills_what_files_lack(tmp_path: Path, stage: int) -> None:
    given = make_net(4).state_dict()
    lacking = ("head.weight", "gain", "offset")
    path = save(tmp_path / "base.safetensors", {k: v for k, v in given.items() if k not in lacking})
    answers = run_ranks(2, _files_and_function, str(path), stage)
    assert answers[0] == answers[1]
    assert answers[0][1], "rank 0's values, and no module that the files have draws random numbers"
    cut = save(tmp_path / "cut.safetensors", {k: v for k, v in given.items() if k != "inp.bias"})
    model = meta()
    with pytest.raises(
        ValueError,
        match=r"bias of inp \(Linear\) are on the meta device, while weight is in memory",
    ):
        shardcore.shard(
            model,
            shardcore.FusedAdam(model.parameters()),
            materialize=[cut, init],
            precision="bf16",
        )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_function_fills_a_buffer_beside_parameters_that_files_have(
    tmp_path: Path, stage: int
) -> None:
    given = make_net(4).state_dict()
    path = save(
        tmp_path / "no_buffer.safetensors", {k: v for k, v in given.items() if k != "offset"}
    )

    def fill(module: Any) -> None:
        module.offset.fill_(0.5)
        module.gain.data.fill_(9.0)  # of a stand-in

    model = meta()
    model, _ = shardcore.shard(
        model,
        shardcore.FusedAdam(model.parameters()),
        stage,
        materialize=[str(path), fill],
        precision="bf16",
    )
    state = model.state_dict()
    assert torch.equal(state["gain"], given["gain"])
    assert torch.equal(state["offset"], torch.full((5,), 0.5))


def _torn(folder: Path, how: str) -> Any:
    tensors = dict(make_net().state_dict())
    if how == "missing":
        del tensors["blocks.1.up.bias"], tensors["gain"]
    elif how == "unexpected":
        tensors["blocks.9.up.bias"] = torch.zeros(3)
    elif how == "shape":
        tensors["head.weight"] = torch.zeros(6, 24)
    elif how == "dtype":
        tensors["head.weight"] = torch.zeros(5, 24, dtype=torch.int64)
    path = save(folder / "model.safetensors", tensors)
    if how == "torn":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "unknown dtype":
        path.write_bytes(path.read_bytes().replace(b'"dtype": "F32"', b'"dtype": "F4" ', 1))
    elif how == "no file":
        path.unlink()
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"gain": "model.safetensors"}}'
        )
    elif how == "empty folder":
        path.unlink()
    elif how == "torn index":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    elif how == "twice":
        return [path, save(folder / "more.safetensors", {"gain": torch.zeros(())})]
    elif how == "pickle":
        return folder / "pytorch_model.bin"
    return folder


FAULTS = [
    (
        "missing",
        r"gain \(and 1 more: blocks\.1\.up\.bias\) is on the meta device and not in "
        r".*model\.safetensors",
    ),
    ("unexpected", r"model\.safetensors contains blocks\.9\.up\.bias, which the model lacks"),
    ("shape", r"head\.weight has shape \(6, 24\) in .*model\.safetensors; expected \(5, 24\)"),
    (
        "dtype",
        r"head\.weight has dtype torch\.int64 in .*model\.safetensors; expected a dtype "
        r"convertible to torch\.float32",
    ),
    (
        "torn",
        r"model\.safetensors is torn or not a safetensors file .* Copy it again",
    ),
    ("unknown dtype", r"model\.safetensors contains [\w.]+ as F4; expected tensors of F64, F32, "),
    ("no file", r"the file .*model\.safetensors does not exist"),
    ("empty folder", r"expected model\.safetensors\.index\.json or model\.safetensors in it"),
    ("torn index", r"index\.json is torn or not an index"),
    (
        "twice",
        r"gain is in .*model\.safetensors and in .*more\.safetensors; expected it in one file",
    ),
    (
        "pickle",
        r"pytorch_model\.bin; expected a \.safetensors file or a folder \(pickle is never read\)",
    ),
]


def _refused_files(rank: int, world_size: int, good: str, bad: Any) -> tuple[str, bool]:
    """Only rank 1 has the bad files."""
    model = meta()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    try:
        shardcore.shard(
            model,
            optimizer,
            3,
            materialize=bad if rank == world_size - 1 else good,
            precision="bf16",
        )
    except (ValueError, TypeError, OSError) as error:
        untouched = all(p.is_meta for p in model.parameters()) and not hasattr(
            model, "_shardcore_engine"
        )
        shardcore.shard(model, optimizer, 3, materialize=good, precision="bf16")
        return str(error), untouched
    return "no error", False


@pytest.mark.parametrize("how, text", FAULTS, ids=[how for how, _ in FAULTS])
def test_bad_files_are_refused(tmp_path: Path, how: str, text: str) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    good, bad = str(_torn(tmp_path / "good", "fine")), _torn(tmp_path / "bad", how)
    alone = [_refused_files(0, 1, good, bad)]
    for answer, untouched in run_ranks(2, _refused_files, good, bad) if how == "missing" else alone:
        assert re.search(text, answer), answer
        assert untouched


def _disagreeing(rank: int, world_size: int, folder: str) -> str:
    dtype = torch.bfloat16 if rank == 1 else torch.float32
    tensors = {name: value.to(dtype) for name, value in make_net().state_dict().items()}
    path, model = save(Path(folder) / f"rank{rank}.safetensors", tensors), meta()
    return error_of(
        lambda: shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), materialize=path, precision="bf16"
        )
    )


def test_ranks_with_other_files_are_refused(tmp_path: Path) -> None:
    for answer in run_ranks(2, _disagreeing, str(tmp_path)):
        assert "ranks disagree" in answer
        assert "torch.bfloat16" in answer


def _unreadable(rank: int, world_size: int, path: str) -> str:
    read = FileTensor.read

    def fails(tensor: FileTensor, start: int, numel: int) -> torch.Tensor:
        if rank == 1 and tensor.shape == make_net().blocks[2].down.weight.shape:
            raise OSError("input/output error")
        return read(tensor, start, numel)

    model = meta()
    with mock.patch.object(FileTensor, "read", fails):
        return error_of(
            lambda: shardcore.shard(
                model,
                shardcore.FusedAdam(model.parameters()),
                3,
                materialize=path,
                precision="bf16",
            )
        )


def test_a_read_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    path = str(save(tmp_path / "model.safetensors", dict(make_net().state_dict())))
    other, own = run_ranks(2, _unreadable, path)
    assert own == "OSError: input/output error"
    assert "reading files: rank 1 failed: OSError: input/output error" in other


# --- memory ---------------------------------------------------------------------------------------


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(96, 400) for _ in range(12)])


_read = Window.read


def _peak(
    rank: int,
    world_size: int,
    stage: int,
    precision: str,
    path: str | None,
    whole_first: bool,
    tp: int = 1,
) -> list[int]:
    """Bytes of torch's CPU memory and of what files are read into: the peak above what is kept in
    the end, one unit's whole float32 weights, the model's.

    tp: over how many ranks the model is sliced.
    """
    mesh, model = mesh_of(world_size, tp) if tp > 1 else None, meta(Tower)
    if mesh is not None:
        shardcore.tensor_parallel(
            model, mesh["tp"], {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        )
    optimizer = shardcore.FusedAdam(model.parameters())
    reads = [0]

    def counted(window: Window, start: int = 0, size: int | None = None) -> bytearray:
        """Window.read, into memory that is not torch's."""
        content = _read(window, start, size)
        reads.append(len(content))
        return content

    with pytest.MonkeyPatch.context() as patch, recorded_memory() as memory:
        patch.setattr(Window, "read", counted)
        if whole_first:  # what shard would do if it made the model before it cut it
            model.to_empty(device="cpu")
            optimizer = shardcore.FusedAdam(model.parameters())
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        group = None if mesh is None else mesh["dp"]
        shardcore.shard(
            model, optimizer, stage, precision=precision, materialize=path, process_group=group
        )
    unit = sum(p.numel() for p in model.blocks[0].parameters()) * 4
    above = memory.peak - memory.kept + max(reads)
    return [above, unit, unit * len(model.blocks), memory.kept]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("world_size", "precision", "source"), [(1, "fp32", "files"), (2, "bf16", "function")]
)
def test_the_peak_is_one_unit_above_the_shards(
    tmp_path: Path, world_size: int, precision: str, source: str
) -> None:
    path = None
    if source == "files":
        path = str(save(tmp_path / "model.safetensors", dict(Tower().state_dict())))
    for stage in (2, 3):
        for above, unit, model, kept in run_ranks(world_size, _peak, stage, precision, path, False):
            assert 0 < above <= unit < model / 10
            assert kept > model / world_size, "states are counted"
    if source == "function":
        for above, unit, model, _ in run_ranks(world_size, _peak, 3, precision, None, True):
            assert above >= model > 10 * unit, "a model that is made whole is seen"


@pytest.mark.parametrize("source", ["function", "files"])
def test_the_peak_of_slices_is_one_unit_above_them(tmp_path: Path, source: str) -> None:
    path = None
    if source == "files":
        path = str(save(tmp_path / "model.safetensors", dict(Tower().state_dict())))
    for stage in (2, 3):
        for above, unit, model, kept in run_ranks(4, _peak, stage, "bf16", path, False, 2):
            assert 0 < above <= unit < model / 10
            assert model / 4 < kept < model * 2, "slices of weights, and shards of their states"


@pytest.mark.parametrize("size", [3, 20])
def test_a_cut_file_is_named_once(size: int, tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    path.write_bytes(((64).to_bytes(8, "little") + b"{" * 64)[:size])
    with pytest.raises(ValueError, match=f"is {size} bytes long; expected ") as raised:
        open_files(path)
    text = str(raised.value)
    assert text.startswith(f"shard: {path} is torn or not a safetensors file (")
    assert text.count("opy it again") == 1
    assert "ValueError" not in text
    assert "load:" not in text
