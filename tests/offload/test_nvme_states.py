"""States in files: the same bits as anywhere else, bounded memory, no file left behind, damage
and full disks named.
"""

import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from shardcore._native import _C
from shardcore.estimate import predict
from shardcore.offload import disk, nvme_states
from tests.support.choice import combinations
from tests.support.models import (
    Net,
    Run,
    assert_one,
    batch_of,
    error_of,
    hash_of,
    hash_of_training,
    loss_of,
    make_net,
    stepped,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.tiers import FORMS, WAYS, in_memory, run_on_disk


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_states, "CHUNK_NUMEL", 512)


def _run(folder: Path | str, stage: int = 2, form: str = "masters", way: str = "states") -> Run:
    return replace(run_on_disk(str(folder), stage, form, way, durable=False), steps=4)


def _hashes(rank: int, world_size: int, runs: list[Run]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_states, "CHUNK_NUMEL", 512)
        return [hash_of_training(*train(rank, run)[:2]) for run in runs]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "form", "way"), combinations([0, 1, 2, 3], list(FORMS), list(WAYS), meet=1)
)
def test_one_hash_wherever_states_lie(stage: int, form: str, way: str, tmp_path: Path) -> None:
    run = _run(tmp_path, stage, form, way)
    runs = [in_memory(run), run]
    assert_one(hash_ for hashes in run_ranks(2, _hashes, runs) for hash_ in hashes)
    assert list(tmp_path.iterdir()) == [], "no file has a name"


def test_a_write_that_is_left_out_changes_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    run = _run(tmp_path)
    expected = hash_of_training(*train(0, run)[:2])
    after, left = nvme_states.NvmeStates.after, [3]

    def leave_one_out(self: Any, number: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            self._start_write = lambda chunk, place: None
        after(self, number)
        self.__dict__.pop("_start_write", None)

    monkeypatch.setattr(nvme_states.NvmeStates, "after", leave_one_out)
    assert hash_of_training(*train(0, run)[:2]) != expected


def _saves_and_loads(rank: int, world_size: int, folder: str, wait: bool) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_states, "CHUNK_NUMEL", 512)
        run = _run(f"{folder}/nvme", form="split 8-bit")
        model, optimizer, _ = train(rank, run)
        saving = shardcore.save(f"{folder}/saved", model, optimizer, wait=wait)
        stepped(model, optimizer, rank, 4)
        saving.wait()
        other, other_optimizer, _ = train(rank, replace(run, seed=5, steps=1))
        shardcore.load(f"{folder}/saved", other, other_optimizer)
        stepped(other, other_optimizer, rank, 4)
        plain, plain_optimizer, _ = train(rank, in_memory(run, stage=1))
        stepped(plain, plain_optimizer, rank, 4)
        return [
            hash_of_training(*pair)
            for pair in ((model, optimizer), (other, other_optimizer), (plain, plain_optimizer))
        ]


def test_a_background_save_reads_files_when_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    model, optimizer, _ = train(0, _run(tmp_path / "nvme"))
    read: list[int] = []
    kept = nvme_states.NvmeStates.states_of
    monkeypatch.setattr(
        nvme_states.NvmeStates, "states_of", lambda *args: read.append(args[3]) or kept(*args)
    )
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    saving = shardcore.save(tmp_path / "saved", model, optimizer, wait=False)
    assert read == [], "nothing is kept in host memory until then"
    monkeypatch.undo()
    saving.thread.start()
    saving.wait()


@pytest.mark.cases(1)
@pytest.mark.parametrize("wait", [True, False])
def test_checkpoints_hold_what_is_in_files(wait: bool, tmp_path: Path) -> None:
    for hashes in run_ranks(2, _saves_and_loads, str(tmp_path), wait):
        assert_one(hashes)


def test_memory_is_bounded_and_predicted(tmp_path: Path, small: None) -> None:
    run = _run(tmp_path)
    model, _, _ = train(0, run)
    found = shardcore.memory_report(model)
    twin = make_net()
    expected = predict(
        twin, shardcore.FusedAdam(twin.parameters()), 2, world_size=1, precision="bf16", **run.shard
    ).resting
    assert (
        found.by_tier["nvme"]
        == expected.by_tier["nvme"]
        >= 12 * sum(p.numel() for p in Net().parameters())
    )
    assert found.by_tier["cpu"] == expected.by_tier["cpu"]
    place = 2 * 4096 + 4096  # a chunk in whole blocks, and what aligns it
    of_chunks = (nvme_states.PLACES + 1) * place + 5 * 512 * 4
    assert found.by_tier["cpu"] == of_chunks + disk.ENGINE_BYTES, (
        "as large as the largest chunk alone"
    )


def test_nothing_grows(tmp_path: Path, small: None) -> None:
    model, optimizer, _ = train(0, _run(tmp_path, 3))
    before = len(os.listdir("/proc/self/fd"))
    for step in range(10):
        stepped(model, optimizer, 0, step)
    assert len(os.listdir("/proc/self/fd")) == before
    del model, optimizer
    assert list(tmp_path.iterdir()) == []


def _with_faults(monkeypatch: pytest.MonkeyPatch, faults: str) -> None:
    monkeypatch.setattr(nvme_states, "file_engine", lambda: _C.FileEngine(faults=faults))


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ("read:EIO@8192", "read at offset 8192.*Input/output error"),
        ("write:EIO@8192", "write at offset 8192.*Input/output error"),
        ("flip:read@8192", r"states of .* in bytes 8192 to .* differ from the bytes written"),
    ],
)
def test_errors_name_file_and_offset(
    faults: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    _with_faults(monkeypatch, faults)
    run = _run(tmp_path, form="fp32")
    with pytest.raises((OSError, RuntimeError), match=says) as error:
        train(0, run)
    assert str(tmp_path) in str(error.value)


def test_a_full_disk_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_faults(monkeypatch, "reserve:ENOSPC")
    with pytest.raises(OSError, match=r"No space left on device"):
        train(0, _run(tmp_path, form="fp32"))
    assert list(tmp_path.iterdir()) == []
    run = _run(tmp_path, form="fp32")
    run.shard["offload"]["durable"] = True
    with pytest.raises(OSError, match=r"No space left on device") as raised:
        train(0, run)
    assert raised.value.__notes__ == [
        "shard: taking memory: make room, or ask for less; nothing was changed"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["rank_00000.lock"], (
        "what there is no room for takes none"
    )


def test_a_failed_step_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    model, optimizer, _ = train(0, _run(tmp_path, form="fp32"))
    monkeypatch.setattr(
        nvme_states.NvmeStates,
        "_check",
        lambda self, chunk, place: (_ for _ in ()).throw(OSError(5, "bad")),
    )
    loss_of(model, batch_of(4, 0, 0)).backward()
    assert "updating the weights failed on its way" in error_of(optimizer.step)
    assert "some weights are new, some are not" in error_of(optimizer.step)


def test_an_error_of_a_sync_is_raised_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """The kernel tells it once, whatever it has dropped."""
    _, optimizer, _ = train(0, _run(tmp_path, form="fp32"))
    states, errors = optimizer._engine.store.in_files, [OSError(5, "Input/output error")]

    class Disk:
        def sync(self) -> None:
            if errors:
                raise errors.pop()

    monkeypatch.setattr(states, "_files", [Disk()])
    for _ in range(3):
        assert "Input/output error" in error_of(states.flush)


def test_two_models_use_one_directory(tmp_path: Path, small: None) -> None:
    run = _run(tmp_path)
    pairs = [train(0, run)[:2], train(0, run)[:2]]
    for model, optimizer in pairs:
        stepped(model, optimizer, 0, 9)
    assert list(tmp_path.iterdir()) == [], "so a killed job leaves none"
    assert hash_of_training(*pairs[0]) == hash_of_training(*pairs[1])


def test_parts_are_read_and_written_across_chunks(tmp_path: Path, small: None) -> None:
    model, optimizer, _ = train(0, _run(tmp_path, 0, "fp32"))
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["exp_avg"] = torch.randn(
            entry["exp_avg"].shape, generator=torch.Generator().manual_seed(1)
        )
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()
    kept = hash_of([entry["exp_avg"] for entry in again["state"].values()])
    assert kept == hash_of([entry["exp_avg"] for entry in state["state"].values()])
    for param, entry in zip(model.parameters(), state["state"].values(), strict=True):
        assert shardcore.full_state(param, "exp_avg").equal(entry["exp_avg"])


# 384 MiB of states; beside weights and gradients (4 bytes per parameter) the process may take a
# third of that, and 64 MiB. Or 1.1 GiB of states and weights, all on disk: the process may take a
# third of that, and 48 MiB, gradients included. Weights in memory do not fit then.
LARGE = """
import re, resource, sys, torch, shardcore
from shardcore.offload import nvme_states
from tests.support.models import hash_of_training, made
nvme_states.CHUNK_NUMEL = 1 << 18
torch.set_num_threads(1)
torch.manual_seed(0)
limited, tier, folder, weights = sys.argv[1:]
with torch.device("meta" if weights == "weights" else "cpu"):
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(320 if weights == "weights" else 128))).bfloat16()
numel = sum(param.numel() for param in model.parameters())
x = torch.randn(4, 512, dtype=torch.bfloat16)
warm = model if weights != "weights" else torch.nn.Linear(512, 512, dtype=torch.bfloat16)
warm(x).float().sum().backward()  # starts torch's threads
warm.zero_grad()
limit, hard = resource.getrlimit(resource.RLIMIT_DATA)
if limited == "limited":
    held = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
    limit = held + (14 * numel // 3 + (48 << 20) if weights == "weights" else 4 * numel + 12 * numel // 3 + (64 << 20))
resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
offload = {"optimizer": "cpu"} if tier == "cpu" else made({"optimizer": "nvme", "path": folder})
if weights == "weights":
    offload["params"] = "nvme" if tier == "nvme" else "cpu"
adam = shardcore.FusedAdam(model.parameters(), lr=1e-3)
stage = 3 if weights == "weights" else 2
model, optimizer = shardcore.shard(model, adam, stage, precision="bf16", offload=offload)
for _ in range(3):
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
print(hash_of_training(model, optimizer))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("on_disk", "too_much"), [("states", "cpu"), ("weights", "only states")])
def test_states_three_times_as_large_as_memory_train_to_the_same_bits(
    on_disk: str, too_much: str, tmp_path: Path
) -> None:
    def ends(*arguments: str) -> Any:
        command = [sys.executable, "-c", LARGE, *arguments, str(tmp_path / arguments[1]), on_disk]
        # else glibc keeps what was freed between small allocations
        own = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=own)

    limited, free, too_large = (
        ends("limited", "nvme"),
        ends("free", "cpu"),
        ends("limited", too_much),
    )
    assert limited.returncode == 0, limited.stderr
    assert limited.stdout == free.stdout
    assert too_large.returncode == 1
    assert re.search("MemoryError|can't (allocate memory|start new thread)", too_large.stderr), (
        too_large.stderr
    )


# A small training first, so that threads, code and caches are there; then one whose memory is
# compared with what is predicted.
RESIDENT = """
import ctypes, gc, sys, torch, shardcore
from pathlib import Path
from shardcore.estimate import predict
torch.set_num_threads(1)
offload = {"optimizer": "nvme", "path": sys.argv[1], "durable": sys.argv[2] == "durable"}

def make(width, depth):
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
    return model, shardcore.FusedAdam(model.parameters())

def train(width, depth, name):
    tiers = {**offload, "path": f"{sys.argv[1]}/{name}"}
    Path(tiers["path"]).mkdir()
    model, optimizer = shardcore.shard(*make(width, depth), 2, offload=tiers)
    for _ in range(3):
        model(torch.ones(1, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    shardcore.full_state(next(model.parameters()), "exp_avg")  # through a buffer that steps do not use
    return model, optimizer

def resident():
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

small = train(64, 2, "small")
before = resident()
model, optimizer = train(1024, 48, "large")
grown = resident() - before
with torch.device("meta"):
    expected = predict(*make(1024, 48), 2, world_size=1, offload=offload).resting.by_tier
found = shardcore.memory_report(model).by_tier
assert found == expected, (found, expected)
print(grown, found["device"] + found["cpu"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("durable", ["durable", "scratch"])
def test_resident_memory_is_what_is_predicted(durable: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RESIDENT, str(tmp_path), durable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown, predicted = map(int, done.stdout.split())
    # is allocated, and resident where io_uring has locked it
    unused = 0 if durable == "durable" else disk.ENGINE_BYTES
    assert 0.98 * predicted - unused < grown < 1.02 * predicted


@pytest.mark.parametrize("durable", [True, False])
def test_a_directory_on_the_root_disk_is_made_by_the_user(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a mistyped path would fill it. Existing ones are taken, and named with their space."""
    monkeypatch.setattr(disk, "_is_on_root", lambda folder: True)
    one, two = tmp_path / "one", tmp_path / "two"
    offload = {"optimizer": "nvme", "path": [one, two], "durable": durable}
    model = make_net()
    optimizer: Any = shardcore.FusedAdam(model.parameters())
    for missing in (one, two):
        with pytest.raises(FileNotFoundError, match=rf"{missing}.*root file system.*mkdir -p"):
            shardcore.shard(model, optimizer, 2, offload=offload)
        assert not missing.exists()
        missing.mkdir()
    caplog.set_level("INFO", "shardcore")
    shardcore.shard(model, optimizer, 2, offload=offload)
    for folder in (one, two):
        assert re.search(rf"files of offload go to {folder}, on .* GiB free", caplog.text)
