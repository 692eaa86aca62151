"""The format: what is written is ordinary safetensors, each damaged byte is found, and no file
makes a reader crash or hang.
"""

import faulthandler
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from shardcore.checkpoint import format as layout
from shardcore.checkpoint.directory import checkpoints
from shardcore.checkpoint.format import Checkpoint, json_bytes, read_json
from shardcore.checkpoint.save import items_of
from shardcore.checkpoint.write import write_manifest, write_ranges
from tests.support.crash import times
from tests.support.models import Run, train

FULL = {"exp_avg", "exp_avg_sq"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint, and the full tensors that it was made of."""
    folder = tmp_path_factory.mktemp("saved")
    model, optimizer, _ = train(0, Run(stage=2, precision="bf16", steps=2))
    path = shardcore.save(folder, model, optimizer, client_state={"epoch": 1}).path
    return path, dict(model.state_dict())


@pytest.fixture
def copied(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


def read_everything(path: Path) -> dict[str, torch.Tensor]:
    found = {}
    with Checkpoint(path) as checkpoint:
        for name, shape in checkpoint.shapes.items():
            numel = torch.Size(shape).numel()
            for key in checkpoint.keys(name):
                found[f"{name}.{key}"] = checkpoint.read(name, key, 0, numel).view(shape)
            checkpoint.of_rank(0)
    return found


def test_tensors_are_read_as_they_were(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, expected = saved
    found = read_everything(path)
    for name, value in expected.items():
        assert torch.equal(found[f"{name}.weight"], value), name
    assert {name.rpartition(".")[2] for name in found} == {"weight", *FULL}


def test_any_part_is_read(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = saved
    random.seed(0)
    with Checkpoint(path) as checkpoint:
        for name, value in expected.items():
            for _ in range(5):
                start = random.randint(0, value.numel())
                numel = random.randint(0, value.numel() - start)
                part = checkpoint.read(name, "weight", start, numel)
                assert torch.equal(part, value.reshape(-1)[start : start + numel])


def test_a_data_file_is_ordinary_safetensors(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")
    path, expected = saved
    tensors = safetensors.load_file(path / layout.data_file(0))
    assert torch.equal(tensors["head.weight.master@0"], expected["head.weight"].view(-1))
    head = int.from_bytes((path / layout.data_file(0)).read_bytes()[:8], "little") + 8
    assert head % layout.ALIGNMENT == 0, "data are aligned, for O_DIRECT"


def test_a_checkpoint_of_many_ranks_needs_few_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_MAX_OPEN", 3)
    monkeypatch.setattr(layout, "RANGE_NUMEL", 16)
    expected = torch.arange(8 * 16.0)
    items = list(items_of("weight", expected))
    said = [
        write_ranges(tmp_path, layout.data_file(rank), [item]) for rank, item in enumerate(items)
    ]
    tensors = {"weight": {"shape": [8 * 16], "dtype": "F32", "step": None}}
    rest = {
        "tied": {},
        "extra_state": {},
        "counters": {},
        "frozen": [],
        "groups": None,
        "loss_scale": None,
        "scheduler": None,
    }
    write_manifest(tmp_path, said, tensors, rest)
    with Checkpoint(tmp_path) as checkpoint:
        for _ in range(2):
            assert torch.equal(checkpoint.read("weight", "weight", 0, 8 * 16), expected)
        files = {os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()}
        assert len([one for one in files if one.startswith(f"{tmp_path}/")]) == 3


def test_ranges_are_cut_where_loads_cut() -> None:
    for start, numel in (
        (0, 0),
        (0, 5),
        (256, 3 * layout.RANGE_NUMEL),
        (layout.RANGE_NUMEL - 1, 2),
    ):
        ranges = list(layout.cut(start, numel))
        assert sum(count for _, count in ranges) == numel
        cursor = start
        for first, count in ranges:
            assert first == cursor
            assert first // layout.RANGE_NUMEL == (first + count - 1) // layout.RANGE_NUMEL
            cursor += count


@pytest.mark.more
def test_each_flipped_byte_of_data_is_found_and_named(copied: Path) -> None:
    file = copied / layout.data_file(0)
    whole = bytearray(file.read_bytes())
    manifest = read_json(copied / layout.MANIFEST)
    used = [0] * len(whole)
    for entry in manifest["tensors"].values():
        for part in entry["parts"].values():
            size = layout.DTYPES[part["dtype"]].itemsize
            for _, numel, _, offset, _ in part["ranges"]:
                for index in range(offset, offset + numel * size):
                    used[index] += 1
    head = manifest["files"][0]["head_bytes"]
    assert used == [0] * head + [1] * (len(whole) - head), (
        "every byte is in the head or in one range"
    )
    random.seed(1)
    for offset in [0, head - 1, head, len(whole) - 1, *random.sample(range(len(whole)), 30)]:
        damaged = whole.copy()
        damaged[offset] ^= 1 << random.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=r"rank_00000\.safetensors is damaged in bytes (\d+) to (\d+)"
        ) as caught:
            read_everything(copied)
        first, end = map(
            int,
            str(caught.value)
            .partition("in bytes ")[2]
            .partition(" (")[0]
            .split(",")[0]
            .split(" to "),
        )
        assert first <= offset < end


@pytest.mark.parametrize("name", [layout.MANIFEST, layout.CLIENT_STATE, layout.rank_file(0)])
def test_each_flipped_byte_of_json_is_found_and_named(copied: Path, name: str) -> None:
    whole = (copied / name).read_bytes()
    random.seed(2)
    for offset in [0, len(whole) - 1, *random.sample(range(len(whole)), min(40, len(whole)))]:
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << random.randrange(8)
        (copied / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{name} is damaged"):
            read_everything(copied)


def test_a_torn_file_is_named(copied: Path) -> None:
    for name in os.listdir(copied):
        whole = (copied / name).read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 1):
            (copied / name).write_bytes(whole[:size])
            with pytest.raises(ValueError, match=name):
                read_everything(copied)
        (copied / name).unlink()
        with pytest.raises(FileNotFoundError, match=name):
            read_everything(copied)
        (copied / name).write_bytes(whole)
    read_everything(copied)


def _rewrite(path: Path, change: Any) -> None:
    """Change a manifest and give it a right checksum, as an attacker would."""
    manifest = read_json(path / layout.MANIFEST)
    change(manifest)
    (path / layout.MANIFEST).write_bytes(
        json_bytes({k: v for k, v in manifest.items() if k != "crc32c"})
    )


def _file(m: Any, **changes: Any) -> None:
    m["files"][0].update(changes)


def _part(m: Any) -> Any:
    return m["tensors"]["head.weight"]["parts"]["master"]


FORGED = {
    "another format": (lambda m: m.update(format="zip"), "is in format 'zip'"),
    "a newer version": (lambda m: m.update(version=99), "version 99"),
    "a file outside": (
        lambda m: _file(m, name="../../secret"),
        r"names the file '\.\./\.\./secret'",
    ),
    "an absolute file": (lambda m: _file(m, name="/etc/passwd"), "names the file '/etc/passwd'"),
    "a strange file": (lambda m: _file(m, name="rank_00000.safetensors\n"), "names the file"),
    "another size": (lambda m: _file(m, bytes=10), "bytes long; expected 10"),
    "a huge head": (lambda m: _file(m, head_bytes=1 << 60), "damaged|bytes"),
    "a huge shape": (
        lambda m: m["tensors"]["head.weight"].update(shape=[1 << 40, 1 << 40]),
        "lists .* elements of head.weight",
    ),
    "a negative shape": (
        lambda m: m["tensors"]["head.weight"].update(shape=[-1, -120]),
        "is no count",
    ),
    "a huge range": (
        lambda m: _part(m)["ranges"][0].__setitem__(1, 1 << 50),
        "lacks elements|some twice",
    ),
    "a negative offset": (lambda m: _part(m)["ranges"][0].__setitem__(3, -8), "is no count"),
    "an offset outside": (
        lambda m: _part(m)["ranges"][0].__setitem__(3, 1 << 50),
        "beyond the end",
    ),
    "a file number outside": (
        lambda m: _part(m)["ranges"][0].__setitem__(2, 99),
        "is not a valid manifest",
    ),
    "a range twice": (
        lambda m: _part(m).update(ranges=_part(m)["ranges"] * 2),
        "lacks elements|some twice",
    ),
    "no ranges": (lambda m: _part(m).update(ranges=[]), "lists 0 elements"),
    "another dtype": (lambda m: _part(m).update(dtype="F64"), "unknown dtype 'F64'"),
    "no weight": (
        lambda m: m["tensors"]["head.weight"]["parts"].pop("master"),
        "do not fit together",
    ),
    "half a master": (
        lambda m: m["tensors"]["head.weight"]["parts"].update(
            remainder={"dtype": "I16", "ranges": []}
        ),
        "elements",
    ),
    "codes alone": (
        lambda m: m["tensors"]["gain"]["parts"]["exp_avg"].update(dtype="I8"),
        "do not fit together",
    ),
    "an unknown dtype": (lambda m: _part(m).update(dtype="object"), "unknown dtype 'object'"),
    "an unknown part": (
        lambda m: m["tensors"]["head.weight"]["parts"].update({"a b": _part(m)}),
        r"head.weight\.a b",
    ),
    "no tensors": (lambda m: m.pop("tensors"), "is not a valid manifest"),
    "a list": (lambda m: m.update(tensors=[]), "is not a valid manifest"),
    "an alias of nothing": (lambda m: m.update(tied={"a": "nothing"}), "is not a valid manifest"),
    "code in the groups": (
        lambda m: m.update(groups=[{"$eval": "1"}]),
        "'groups' is wrong .*a value is damaged",
    ),
    "groups of nothing": (lambda m: m.update(groups=[]), "'groups' is wrong"),
    "a group without names": (
        lambda m: m.update(groups=[{"lr": 1.0}]),
        "'groups' is wrong .*params",
    ),
    "names in a list": (lambda m: m.update(groups=[{"params": [["gain"]]}]), "'groups' is wrong"),
    "a dict of groups": (lambda m: m.update(groups={"lr": {}}), "'groups' is wrong"),
    "a huge step": (
        lambda m: m["tensors"]["gain"].update(step=1 << 80),
        "'tensors' is wrong .*no count",
    ),
    "too large a step": (
        lambda m: m["tensors"]["gain"].update(step=1 << 60),
        "'tensors' is wrong .*step of gain",
    ),
    "no ranks": (lambda m: m.update(world_size=0), "'world_size' is wrong"),
    "a huge counter": (
        lambda m: m.update(counters={"skipped_steps": 1 << 80}),
        "'counters' is wrong",
    ),
    "a loss scale": (lambda m: m.update(loss_scale=3), "'loss_scale' is wrong"),
    "frozen by letter": (lambda m: m.update(frozen="gain"), "'frozen' is wrong"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_refused(copied: Path, name: str) -> None:
    change, message = FORGED[name]
    _rewrite(copied, change)
    with pytest.raises(ValueError, match=message):
        read_everything(copied)


@pytest.mark.parametrize("name", [layout.CLIENT_STATE, layout.rank_file(0)])
@pytest.mark.parametrize("held", [{}, {"value": 3}, {"value": {"$eval": 1}}])
def test_a_forged_file_of_plain_data_is_named(copied: Path, name: str, held: Any) -> None:
    (copied / name).write_bytes(json_bytes(held))
    _rewrite(
        copied,
        lambda m: next(file for file in m["files"] if file["name"] == name).update(
            bytes=len(json_bytes(held))
        ),
    )
    with pytest.raises(ValueError, match=name):
        read_everything(copied)


@pytest.mark.parametrize(
    "name", [layout.MANIFEST, layout.CLIENT_STATE, layout.rank_file(0), layout.data_file(0)]
)
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused_and_not_waited_for(
    copied: Path, name: str
) -> None:
    (copied / name).rename(copied / "real")
    (copied / name).symlink_to("real")
    read_everything(copied)  # a link to a file is one
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir):
        (copied / name).unlink()
        make(copied / name)
        faulthandler.dump_traceback_later(20, exit=True)  # a hang ends the test
        if name != layout.MANIFEST:
            size = os.stat(copied / name).st_size
            _rewrite(
                copied,
                lambda m, size=size: next(f for f in m["files"] if f["name"] == name).update(
                    bytes=size
                ),
            )
        try:
            with pytest.raises((ValueError, IsADirectoryError), match=name):
                read_everything(copied)
            assert checkpoints(copied.parent) == ([] if name == layout.MANIFEST else [copied])
        finally:
            faulthandler.cancel_dump_traceback_later()


SOME_JSON = [
    None,
    -1,
    0,
    1,
    2**63,
    2**64,
    1e308,
    "",
    "x",
    "../x",
    [],
    {},
    [[]],
    {"$tuple": 1},
    True,
    [0] * 5,
    [1 << 62] * 5,
]


def _mutate(value: Any, chance: random.Random) -> Any:
    """Replace, remove or repeat something somewhere in JSON."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        return {**value, key: _mutate(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        index = chance.randrange(len(value))
        kind = chance.randrange(4)
        if kind == 0:
            return value[:index] + value[index + 1 :]
        if kind == 1:
            return [*value, value[index]]
        return [*value[:index], _mutate(value[index], chance), *value[index + 1 :]]
    return chance.choice(SOME_JSON)


def _mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = chance.randrange(len(damaged))
        kind = chance.randrange(4)
        if kind == 0:
            damaged[at] = chance.randrange(256)
        elif kind == 1:
            del damaged[at : at + chance.choice((1, 4, 4096))]
        elif kind == 2:
            damaged[at:at] = chance.randbytes(chance.choice((1, 8, 100)))
        else:
            del damaged[at:]
        if not damaged:
            return b""
    return bytes(damaged)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The files that were opened since, by Python or by the file engine."""
    found: set[Path] = set()

    def watch(where: Any, name: str, position: int) -> None:
        real = getattr(where, name)

        def call(*arguments: Any, **how: Any) -> Any:
            found.add(Path(arguments[position]).resolve())
            return real(*arguments, **how)

        monkeypatch.setattr(where, name, call)

    watch(io, "open", 0)
    watch(os, "open", 0)
    watch(layout._C, "FileReader", 1)
    return found


def _fuzz(copied: Path, count: int, seed: int) -> int:
    """Read `count` mutated checkpoints; returns how many were refused. Anything but OSError or
    ValueError is an error.
    """
    chance = random.Random(seed)
    originals = {name: (copied / name).read_bytes() for name in os.listdir(copied)}
    manifest = json.loads(originals[layout.MANIFEST])
    del manifest["crc32c"]
    refused = 0
    for number in range(count):
        if number % 2:
            name, damaged = layout.MANIFEST, json_bytes(_mutate(manifest, chance) or {"empty": 0})
        else:
            name = chance.choice(sorted(originals))
            damaged = _mutate_bytes(originals[name], chance)
        (copied / name).write_bytes(damaged)
        faulthandler.dump_traceback_later(120, exit=True)  # a hang ends the test
        try:
            read_everything(copied)
        except (OSError, ValueError):
            refused += 1
        finally:
            faulthandler.cancel_dump_traceback_later()
        (copied / name).write_bytes(originals[name])
    return refused


@pytest.mark.more
@pytest.mark.crash
def test_mutated_files_end_in_an_error(
    copied: Path, opened: set[Path], record_property: Callable[[str, Any], None]
) -> None:
    # some manifests name it: "../x"
    canary = Path(shutil.copy(copied / layout.data_file(0), copied.parent / "x"))
    count = times("mutations", 120)
    refused = _fuzz(copied, count, 0)
    assert refused > 0.7 * count  # the others mean the same: another version of torch, say
    inside = {copied.resolve() / name for name in os.listdir(copied)}
    assert opened == inside, "all of its files were read, and no other"
    record_property(
        "crash",
        (
            "mutated manifests, headers, truncated files",
            count,
            f"0 crashes, {refused} refused, 0 read outside",
        ),
    )
    layout._C.FileReader(layout._C.FileEngine(), str(canary)).close()
    canary.read_bytes()
    assert opened == inside | {canary.resolve()}, "a read outside would have been noticed"
