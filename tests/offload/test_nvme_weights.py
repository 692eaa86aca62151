"""Weights in files: the same bits as anywhere else, read ahead, never old ones; memory, disk and
time predicted.
"""

import gc
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore._native import _C
from shardcore.engine.engine import engine_behind
from shardcore.engine.units import UnitState
from shardcore.estimate import predict
from shardcore.offload import nvme_states
from shardcore.offload.nvme_weights import NvmeWeights
from tests.support.choice import few
from tests.support.models import (
    Net,
    Reused,
    Run,
    assert_one,
    batch_of,
    error_of,
    failing_forward,
    hash_of,
    hash_of_training,
    loss_of,
    make_net,
    micro_steps,
    stepped,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.tiers import FORMS, Wrapped, hashes_of, partly_frozen


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_states, "CHUNK_NUMEL", 512)


def _run(form: str, folder: Path | str | None, **shard: Any) -> Run:
    precision, adam = FORMS[form]
    if folder is not None:
        shard["offload"] = {
            "optimizer": "nvme",
            "params": "nvme",
            "path": str(folder),
            "durable": False,
        }
    return Run(3, 4, precision=precision, shard=shard, adam={"lr": 1e-2, **adam})


def _hashes(rank: int, world_size: int, runs: list[Run]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_states, "CHUNK_NUMEL", 512)
        return hashes_of(rank, world_size, runs)


OPTIONS: dict[str, dict[str, Any]] = {
    "none ahead": {"prefetch": 0},
    "three ahead": {"prefetch": 3},
    "overlapped": {"overlap_step": True},
    "kept": {"reshard_after_forward": False},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("form", "way"), few([*product(FORMS, OPTIONS)], meet=1))
def test_one_hash_with_skipped_steps_edits_and_loads(form: str, way: str, tmp_path: Path) -> None:
    runs = [_run(form, None), _run(form, tmp_path, **OPTIONS[way])]
    assert_one(hash_ for hashes in run_ranks(2, _hashes, runs) for hash_ in hashes)
    assert list(tmp_path.iterdir()) == [], "no file has a name"


@pytest.mark.parametrize("what", ["a write", "an edit"])
def test_what_does_not_reach_the_file_changes_the_hash(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = hashes_of(0, 1, [_run("masters", None)])
    if what == "a write":
        monkeypatch.setattr(NvmeWeights, "_start_write", lambda self, chunk, place: None)
    else:
        monkeypatch.setattr(NvmeWeights, "assign", lambda self, bucket, start, values: None)
    assert hashes_of(0, 1, [_run("masters", tmp_path)]) != expected


class _OfAGpu(Wrapped):
    """Copies of a tier whose device is another one than the CPU: there are no values here, only
    which tensors it is given.
    """

    def to_tier(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        assert source.device.type == "meta"
        return self._tier.to_tier(target, torch.ones_like(source, device="cpu"))


def test_values_from_the_host_go_by_way_of_the_device(tmp_path: Path) -> None:
    """A tier copies between its device and its own memory alone."""
    _model, optimizer, _ = train(0, _run("masters", tmp_path))
    files = optimizer._engine.store.weight_files
    files._copies, files._device = _OfAGpu(files._copies), torch.device("meta")
    for bucket in optimizer._engine.buckets:
        bucket.assign(0, torch.zeros(bucket.owned_numel))
        assert bool((bucket.owned_values(0, bucket.owned_numel) == 1).all())


def test_weights_that_were_read_ahead_of_an_edit_are_read_again(tmp_path: Path) -> None:
    _model, optimizer, _ = train(0, _run("masters", tmp_path))
    files = optimizer._engine.store.weight_files
    for bucket in optimizer._engine.buckets:
        files.read_ahead(bucket)
        bucket.assign(0, torch.zeros(bucket.owned_numel))
        found = torch.ones(bucket.owned_numel, dtype=bucket.dtype)
        if (copied := files.fetch(bucket, found)) is not None:
            copied.synchronize()
        assert not found.any()


def _after_a_failed_forward(folder: Path | None) -> str:
    torch.manual_seed(0)
    model, optimizer, _ = train(0, _run("fp32", folder), Net(depth=5))
    micro_steps(model, optimizer, 0, 4, 1)
    failing_forward(model, 0)  # some units are read ahead, and never used
    optimizer.step()
    optimizer.zero_grad()
    stepped(model, optimizer, 0, 5)
    return hash_of_training(model, optimizer)


def test_what_was_read_ahead_of_a_step_is_not_used_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _after_a_failed_forward(None)
    assert _after_a_failed_forward(tmp_path) == expected
    monkeypatch.setattr(NvmeWeights, "_drop", lambda self, chunk: None)
    with pytest.raises(OSError, match=r"weights of .* differ from the bytes written"):
        _after_a_failed_forward(tmp_path)


def _others(rank: int, world_size: int, folder: str | None) -> list[str]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_states, "CHUNK_NUMEL", 512)
        for model in (partly_frozen(), Reused()):
            torch.manual_seed(1)
            trained, optimizer, _ = train(rank, _run("masters", folder, prefetch=2), model)
            found.append(hash_of_training(trained, optimizer))
    return found


@pytest.mark.more
def test_frozen_weights_and_units_used_twice(tmp_path: Path) -> None:
    expected, found = run_ranks(2, _others, None), run_ranks(2, _others, str(tmp_path))
    assert found == expected


def test_every_shard_is_read_once_per_use_and_ahead_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, _, _ = train(0, _run("masters", tmp_path), Net(depth=5))
    seen: list[str] = []
    start, bring = NvmeWeights._start_reading, NvmeWeights.fetch

    def starts(self: Any, chunk: Any) -> Any:
        if chunk.first == 0:
            seen.append("read " + (chunk.bucket.unit or "the root"))
        return start(self, chunk)

    def brings(self: Any, bucket: Any, target: torch.Tensor) -> Any:
        seen.append("use " + (bucket.unit or "the root"))
        return bring(self, bucket, target)

    monkeypatch.setattr(NvmeWeights, "_start_reading", starts)
    monkeypatch.setattr(NvmeWeights, "fetch", brings)
    loss = loss_of(model, batch_of(9, 0, 0))
    ahead = [f"{what} blocks.{block}" for block in range(1, 5) for what in ("read", "use")]
    assert seen == ["use the root", "read the root", "use blocks.0", "read blocks.0", *ahead]
    seen.clear()
    loss.backward()
    assert seen == [
        f"{what} blocks.{block}" for block in (3, 2, 1, 0) for what in ("read", "use")
    ], "the last one stayed"


def test_a_step_reads_and_writes_what_is_predicted(tmp_path: Path) -> None:
    run = _run("masters", tmp_path)
    model, optimizer, _ = train(0, run)
    store = engine_behind("test", model).store
    before = dict(store.moved_bytes)
    stepped(model, optimizer, 0, 9)
    moved = {key: store.moved_bytes[key] - before[key] for key in before}
    twin = make_net()
    disk = predict(
        twin, shardcore.FusedAdam(twin.parameters()), 3, world_size=1, precision="bf16", **run.shard
    ).disk
    assert disk is not None
    assert moved["to_nvme"] == disk.written
    assert 0.7 * disk.read < moved["from_nvme"] <= disk.read, (
        "the root and the last block are read once, not twice"
    )


@pytest.mark.more
def test_memory_is_bounded_and_predicted(tmp_path: Path) -> None:
    for prefetch in (0, 2):
        run = _run("masters", tmp_path, prefetch=prefetch)
        model, _, _ = train(0, run)
        found, twin = shardcore.memory_report(model), make_net()
        expected = predict(
            twin,
            shardcore.FusedAdam(twin.parameters()),
            3,
            world_size=1,
            precision="bf16",
            **run.shard,
        ).resting
        assert found.by_tier == expected.by_tier
        numel = sum(p.numel() for p in Net().parameters())
        assert found.by_tier["nvme"] >= 14 * numel


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ("flip:read@4096", r"weights of .* in bytes 4096 to .* differ from the bytes written"),
        ("write:EIO@4096", "write at offset 4096"),
    ],
)
def test_errors_name_file_and_offset(
    faults: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []

    def engine() -> Any:
        made.append(True)
        return _C.FileEngine(faults=faults) if len(made) == 2 else _C.FileEngine()  # the weights'

    monkeypatch.setattr(nvme_states, "file_engine", engine)
    with pytest.raises((OSError, RuntimeError), match=says) as error:
        train(0, _run("fp32", tmp_path))
    assert str(tmp_path) in str(error.value)


def _edited_by_data(rank: int, world_size: int, run: Run) -> tuple[str, bool]:
    """Return the hash after an edit of p.data and a step, and whether a read alone wrote files."""
    model, optimizer, _ = train(rank, run)
    wrote = False

    def noted(weights: NvmeWeights, bucket: Any, start: int, values: torch.Tensor) -> None:
        nonlocal wrote
        wrote = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NvmeWeights, "assign", noted)
        with shardcore.full_params(model):
            pass
    with shardcore.full_params(model):
        model.blocks[1].up.weight.data.clamp_(-0.01, 0.01)
    stepped(model, optimizer, rank, run.steps)
    return hash_of_training(model, optimizer), wrote


@pytest.mark.parametrize("form", ["masters", "stochastic"])
def test_full_params_writes_what_was_edited_through_data_and_nothing_else(
    form: str, tmp_path: Path
) -> None:
    found = [run_ranks(2, _edited_by_data, _run(form, folder)) for folder in (None, tmp_path)]
    assert_one(hash_ for ranks in found for hash_, _ in ranks)
    assert not any(wrote for ranks in found for _, wrote in ranks)


def test_a_model_that_only_runs_forward(tmp_path: Path) -> None:
    plain, model = make_net(), make_net()
    shardcore.shard(model, None, 3, offload={"params": "nvme", "path": str(tmp_path)})
    x, _ = batch_of(0, 0, 0)
    for _ in range(3):
        with torch.no_grad():
            assert model(x).equal(plain(x))
    assert hash_of(model.state_dict().values()) == hash_of(plain.state_dict().values())


@pytest.mark.more
def test_nothing_grows(tmp_path: Path) -> None:
    model, optimizer, _ = train(0, _run("masters", tmp_path, prefetch=2))
    gc.collect()  # models of other tests
    before = len(os.listdir("/proc/self/fd"))
    for step in range(10):
        stepped(model, optimizer, 0, step)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("stage", "offload", "says"),
    [
        (2, {}, 'offload["params"] is "nvme" at stage 2'),
        (3, {"optimizer": "cpu", "path": None}, "with the optimizer on 'cpu'"),
        (3, {"ratio": 0.5}, "and the ratio 0.5"),
    ],
)
def test_what_is_refused(stage: int, offload: dict[str, Any], says: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    given = {"optimizer": "nvme", "params": "nvme", "path": str(tmp_path), **offload}
    assert says in error_of(
        lambda: shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), stage, offload=given
        )
    )


def test_prefetch_is_checked() -> None:
    for stage, prefetch, says in (
        (2, 2, "at stage 2"),
        (3, -1, "0 or more"),
        (3, 1.5, "whole number"),
    ):
        model = nn.Linear(4, 4)
        assert says in error_of(
            lambda m=model, s=stage, p=prefetch: shardcore.shard(m, None, s, prefetch=p)
        )


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_units_are_gathered_as_far_ahead_as_prefetch_says(
    prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, _, _ = train(
        0, Run(3, shard={"prefetch": prefetch, "offload": {"params": "cpu"}}), Net(depth=5)
    )
    most = 0
    units = engine_behind("test", model).unsharder.units

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, sum(unit.state is not UnitState.SHARDED for unit in units[1:]))

    model.blocks[1].down.register_forward_pre_hook(look)
    loss_of(model, batch_of(9, 0, 0))
    assert most == 1 + prefetch
    twin = Net(depth=5)
    adam = shardcore.FusedAdam(twin.parameters())
    options = {"prefetch": prefetch, "offload": {"params": "cpu"}, "precision": "fp32"}
    expected = predict(twin, adam, 3, world_size=1, **options).resting.by_tier
    assert shardcore.memory_report(model).by_tier == expected
