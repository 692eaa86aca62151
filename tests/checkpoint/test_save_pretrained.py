"""save_pretrained of a sharded model, streamed: the files of transformers' own save_pretrained."""

import copy
import ctypes
import json
import os
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="tests with transformers")
safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")

import shardcore  # noqa: E402
from shardcore._native import _C  # noqa: E402
from shardcore.checkpoint import consolidate  # noqa: E402
from shardcore.offload.disk import ENGINE_BYTES  # noqa: E402
from tests.support.huggingface import tiny_gpt2  # noqa: E402
from tests.support.language_models import (  # noqa: E402
    KINDS,
    SIZES,
    plain_of,
    stepped_lm,
    tiny_llama,
)
from tests.support.models import error_of  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

SHARD_SIZE = 12_000  # bytes: some files for each model


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(safetensors.load_file(path))


def files_of(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def assert_same_files(found: Path, expected: Path) -> None:
    """The same files, with the same tensors, and the same JSON."""
    assert files_of(found) == files_of(expected)
    for name in files_of(expected):
        if name.endswith(".json"):
            assert json.loads((found / name).read_text()) == json.loads(
                (expected / name).read_text()
            ), name
        else:
            assert_same_tensors(tensors_of(found / name), tensors_of(expected / name))


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for path in folder.glob("*.safetensors")
        for name, value in tensors_of(path).items()
    }


def _save(rank: int, world_size: int, folder: str, name: str, stage: int, precision: Any) -> None:
    model = stepped_lm(KINDS[name], rank, stage, precision)
    dtype = torch.bfloat16 if precision else torch.float32
    plain = plain_of(model, KINDS[name], dtype)
    if rank == 0:
        plain.save_pretrained(f"{folder}/plain", max_shard_size=SHARD_SIZE)
        plain.save_pretrained(f"{folder}/plain_one")
    model.save_pretrained(f"{folder}/sharded", max_shard_size=SHARD_SIZE)
    model.save_pretrained(f"{folder}/sharded_one", is_main_process=rank == 0)


@pytest.mark.parametrize(
    ("name", "world_size", "stage", "precision"),
    [
        ("llama", 2, 3, "bf16"),
        ("llama", 3, 2, None),
        ("gpt2", 3, 3, "bf16"),
        ("gpt2", 2, 1, None),
    ],
)
def test_files_are_those_of_transformers(
    tmp_path: Path, name: str, world_size: int, stage: int, precision: Any
) -> None:
    run_ranks(world_size, _save, str(tmp_path), name, stage, precision)
    assert_same_files(tmp_path / "sharded", tmp_path / "plain")
    assert_same_files(tmp_path / "sharded_one", tmp_path / "plain_one")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > world_size

    # what the comparison has to reject: an element, and a tensor in another file
    first, second = sorted((tmp_path / "sharded").glob("model-*.safetensors"))[:2]
    values = tensors_of(first)
    wrong = {key: value.clone() for key, value in values.items()}
    next(iter(wrong.values())).view(-1)[-1] += 1
    for content in (wrong, {**values, **tensors_of(second)}):
        safetensors.save_file(content, first, {"format": "pt"})
        with pytest.raises(AssertionError):
            assert_same_files(tmp_path / "sharded", tmp_path / "plain")


@pytest.mark.parametrize(("world_size", "precision"), [(2, "bf16"), (3, None)])
def test_experts_are_converted_back(tmp_path: Path, world_size: int, precision: Any) -> None:
    """transformers keeps all experts of a layer in one file; streamed, the limit counts for them."""
    run_ranks(world_size, _save, str(tmp_path), "mixtral", 3, precision)
    assert_same_files(tmp_path / "sharded_one", tmp_path / "plain_one")
    found, expected = all_tensors(tmp_path / "sharded"), all_tensors(tmp_path / "plain")
    assert_same_tensors(found, expected)
    assert any("experts.3.w2" in name for name in found)
    files = list((tmp_path / "sharded").glob("model-*.safetensors"))
    assert len(files) > world_size
    assert all(sum(v.nbytes for v in tensors_of(file).values()) <= SHARD_SIZE for file in files)
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file.name for file in files for name in tensors_of(file)}
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in expected.values())
    loaded = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        for folder in ("sharded", "plain")
    ]
    assert_same_tensors(*loaded)


def _replace(rank: int, world_size: int, folder: str) -> list[list[str]]:
    """Save into one folder, with fewer files each time; return what the folder has."""
    model, seen = stepped_lm(tiny_gpt2, rank), []
    for size in (SHARD_SIZE, 2 * SHARD_SIZE, "1GB", SHARD_SIZE):
        model.save_pretrained(folder, max_shard_size=size)
        seen.append(files_of(Path(folder)))
    return seen


def test_an_older_model_is_replaced(tmp_path: Path) -> None:
    """transformers leaves model.safetensors beside several files, and then loads it."""
    (tmp_path / "notes.txt").write_text("")
    seen = run_ranks(2, _replace, str(tmp_path))[0]
    rest = ["config.json", "generation_config.json", "notes.txt"]
    count = [
        len([name for name in names if name not in rest and "index" not in name]) for names in seen
    ]
    assert count[0] > count[1] > count[2] == 1 < count[3] == count[0]
    assert seen[2] == sorted([*rest, "model.safetensors"])
    assert seen[0] == seen[3]
    assert "model.safetensors" not in seen[3]


# --- which rank writes which file, and errors -----------------------------------------------------


def _fails(rank: int, world_size: int, folder: str, size: Any) -> tuple[str, list[str]]:
    """Save where rank 1 cannot write; return the error and the files."""
    model = stepped_lm(tiny_llama, rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            engine = partial(_C.FileEngine, faults="write:ENOSPC@0")
            patch.setattr(consolidate, "file_engine", engine)
        said = error_of(lambda: model.save_pretrained(folder, max_shard_size=size))
    model.state_dict()  # ranks are still together
    return said, files_of(Path(folder))


def test_each_rank_writes_its_files_and_an_error_on_one_is_one_on_all(tmp_path: Path) -> None:
    plain = tiny_llama()
    plain.save_pretrained(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in files_of(tmp_path)}
    results = run_ranks(3, _fails, str(tmp_path), SHARD_SIZE)
    assert "model-00002-of-" in results[1][0]
    assert "No space left on device" in results[1][0]
    for said, _ in (results[0], results[2]):
        assert "rank 1 failed" in said
        assert "model-00002-of-" in said
    assert all(files == sorted(before) for _, files in results)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    # the only file is rank 0's
    results = run_ranks(3, _fails, str(tmp_path), "1GB")
    assert [said for said, _ in results] == ["no error"] * 3


def _on_own_disks(rank: int, world_size: int, folder: str) -> list[str]:
    """Save to a folder that only ranks 0 and 2 see."""
    model = stepped_lm(tiny_llama, rank)
    own = Path(folder, "others" if rank == 1 else "first")
    own.mkdir(exist_ok=True)
    here = Path.cwd()
    os.chdir(own)
    try:
        model.save_pretrained("saved", max_shard_size=SHARD_SIZE)
    finally:
        os.chdir(here)
    return files_of(own)


def test_ranks_that_do_not_see_the_folder_write_nothing(tmp_path: Path) -> None:
    assert run_ranks(3, _on_own_disks, str(tmp_path)) == [["saved"], [], ["saved"]]
    saved = tmp_path / "first" / "saved"
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in saved.glob("*.safetensors")}
    assert set(index["weight_map"]) == set(tiny_llama().state_dict())


def _bad_size(rank: int, world_size: int, folder: str) -> str:
    model = stepped_lm(tiny_llama, rank)
    return error_of(lambda: model.save_pretrained(folder, max_shard_size="5 elephants"))


def test_a_size_that_is_none_writes_nothing(tmp_path: Path) -> None:
    said = run_ranks(2, _bad_size, str(tmp_path / "out"))
    assert all("ValueError" in each for each in said)
    assert not (tmp_path / "out").exists()


# --- calls that do not stream ---------------------------------------------------------------------


def _given(rank: int, world_size: int, folder: str) -> None:
    model = stepped_lm(tiny_gpt2, rank)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    if rank == 0:
        model.save_pretrained(f"{folder}/given", state_dict=state)
    model.save_pretrained(f"{folder}/variant", variant="fp16", max_shard_size=SHARD_SIZE)
    model.save_pretrained(f"{folder}/own")


def test_given_weights_are_written_by_one_rank_and_a_variant_streams(tmp_path: Path) -> None:
    run_ranks(2, _given, str(tmp_path))
    given, own = (all_tensors(tmp_path / name) for name in ("given", "own"))
    assert given.keys() == own.keys() | {"lm_head.weight"}, "tied no more"
    assert not any(torch.equal(given[name], own[name]) for name in own)
    names = files_of(tmp_path / "variant")
    assert "model.safetensors.index.fp16.json" in names
    assert "model.fp16-00001-of" in " ".join(names)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "variant", variant="fp16")
    assert torch.equal(loaded.transformer.wte.weight, own["transformer.wte.weight"])


def test_a_copy_and_a_detached_model_save_by_transformers(tmp_path: Path) -> None:
    model = stepped_lm(tiny_gpt2, 0, 2, None)
    copied = copy.deepcopy(model)
    model.save_pretrained(tmp_path / "sharded")
    copied.save_pretrained(tmp_path / "copied")
    assert_same_files(tmp_path / "sharded", tmp_path / "copied")
    shutil.rmtree(tmp_path / "copied")
    with torch.no_grad():
        copied.transformer.wte.weight.add_(1)
    copied.save_pretrained(tmp_path / "copied")
    with pytest.raises(AssertionError):
        assert_same_files(tmp_path / "sharded", tmp_path / "copied")


# --- memory ---------------------------------------------------------------------------------------

LARGE = {**SIZES, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


class Peak:
    """How far a process's anonymous memory grows inside the context."""

    def __enter__(self) -> "Peak":
        self.grown_bytes, self._before, self._over = 0, anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.grown_bytes = max(self.grown_bytes, anonymous_bytes() - self._before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _peaks(rank: int, world_size: int, folder: str) -> tuple[int, int, int]:
    """Return the model's bytes, and the growth of a streamed save and of a whole state dict."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LARGE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = shardcore.shard(model, optimizer, 3)
    total = sum(param.numel() for param in model.parameters()) * 4
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    libc.malloc_trim(0)
    with Peak() as streamed:
        model.save_pretrained(f"{folder}/streamed", max_shard_size="40MB")
    with Peak() as whole:
        state = model.state_dict()
        assert len(state) > 100
    return total, streamed.grown_bytes, whole.grown_bytes


@pytest.mark.slow
def test_a_rank_never_has_more_than_some_units(tmp_path: Path) -> None:
    """Two that are gathered, one that is written, the buffers of a file, and a unit to spare."""
    for total, streamed, whole in run_ranks(2, _peaks, str(tmp_path)):
        unit = total // LARGE["num_hidden_layers"]
        bound = 4 * unit + ENGINE_BYTES
        assert 150e6 < total < 300e6
        assert streamed < bound, (streamed, total)
        assert whole > bound, (whole, total)


def _into_bad_paths(rank: int, world_size: int, folder: str) -> list[str]:
    model = stepped_lm(tiny_gpt2, rank)
    Path(folder, "file").touch()
    calls = model.save_pretrained, partial(shardcore.consolidate, model)
    bad = f"{folder}/file", f"{folder}/file/below"
    return [error_of(partial(call, path)) for call in calls for path in bad]


def test_a_bad_path_is_named_with_the_call_on_every_rank(tmp_path: Path) -> None:
    for said in run_ranks(2, _into_bad_paths, str(tmp_path)):
        for call, (file, below) in zip(
            ("save_pretrained", "consolidate"), (said[:2], said[2:]), strict=True
        ):
            assert f"{call}: {tmp_path}/file cannot be written: File exists" in file
            assert f"{call}: {tmp_path}/file/below cannot be written: Not a directory" in below
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
