"""stream_params with changes: after a step only changed elements are sent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.distributed.comm import Traffic
from tests.support.logs import logged
from tests.support.models import (
    assert_equal,
    batch_of,
    error_of,
    hash_of_training,
    loss_of,
    made,
    make_net,
    of_forward,
)
from tests.support.ranks import run_ranks
from tests.support.slices import mesh_of, sharded_lm

LR = 1e-4  # at which few 16-bit weights change in a step


class Reader:
    """The weights that an inference engine has. drops: a twin that loses the first change."""

    def __init__(self, changes: shardcore.stream.Changes, drops: bool = False) -> None:
        self.changes, self.drops = changes, drops
        self.weights: dict[str, torch.Tensor] = {}
        self.version: int | None = None

    def sync(self, model: nn.Module, **options: Any) -> dict[str, float]:
        """Take a version. Return which share of each parameter came; 2: it came in full."""
        shares = {}
        for name, indices, values in shardcore.stream_params(
            model, changes=self.changes, since=self.version, **options
        ):
            if indices is None:
                self.weights[name] = values.clone()
                shares[name] = 2.0
                continue
            assert indices.dtype == torch.int64
            assert (indices[1:] > indices[:-1]).all()
            weight = self.weights[name].view(-1)
            shares[name] = len(indices) / weight.numel()
            if self.drops:
                indices, values = indices[1:], values[1:]
            weight[indices] = values
        self.version = self.changes.version
        return shares

    def check(self, weights: dict[str, torch.Tensor]) -> None:
        assert_equal({name: self.weights[name] for name in weights}, weights)


def tracked(rank: int, stage: int, **options: Any) -> tuple[Any, Any, Reader]:
    model: Any = make_net()
    optimizer = shardcore.FusedAdam(model.parameters(), lr=LR)
    model, optimizer = shardcore.shard(model, optimizer, stage, precision="bf16", **options)
    return model, optimizer, Reader(shardcore.track_changes(model))


def step(model: nn.Module, optimizer: Any, number: int, rank: int) -> None:
    x, target = batch_of(number, 0, rank)
    loss_of(model, (x.bfloat16(), target)).backward()
    optimizer.step()
    optimizer.zero_grad()


def is_whole(shares: dict[str, float], model: nn.Module) -> bool:
    return shares == {name: 2.0 for name, _ in model.named_parameters()}


def check_steps(rank: int, model: Any, optimizer: Any, reader: Reader, **options: Any) -> None:
    """Train, and check that the reader has the weights of forward after steps, and a twin has not.
    A read in full_params between two syncs is no change.
    """
    step(model, optimizer, 0, rank)
    assert is_whole(reader.sync(model, **options), model)
    for numbers in ((1,), (2, 3)):
        for number in numbers:
            step(model, optimizer, number, rank)
        shares = reader.sync(model, **options)
        assert 0 < min(shares.values()) < 0.5
        reader.check(of_forward(model))
        assert reader.sync(model, **options) == {}
    step(model, optimizer, 4, rank)
    reader.drops = True
    lossy = {name for name, share in reader.sync(model, **options).items() if share < 2}
    weights = of_forward(model)
    assert lossy == {n for n, value in weights.items() if not torch.equal(value, reader.weights[n])}
    assert lossy


def _steps(rank: int, world_size: int, stage: int) -> None:
    check_steps(rank, *tracked(rank, stage), bucket_bytes=500)
    hashes = []
    for streams in (False, True):
        model, optimizer, reader = tracked(rank, stage)
        for number in range(3):
            step(model, optimizer, number, rank)
            if streams:
                reader.sync(model)
        hashes.append(hash_of_training(model, optimizer))
        bits = [bucket.bits for bucket in model._shardcore_engine.buckets]
        assert all(bits) if streams else not any(bits)
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_copy_with_the_changes_has_the_weights_of_forward(stage: int, world_size: int) -> None:
    run_ranks(world_size, _steps, stage)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "split": lambda params: shardcore.FusedAdam(params, lr=LR, master="split"),
    "8bit": lambda params: shardcore.FusedAdam(params, lr=LR, state_dtype="8bit"),
    "stochastic": lambda params: shardcore.FusedAdam(params, lr=LR, stochastic_rounding=True),
}


def _optimizers(rank: int, world_size: int) -> None:
    for kind, of in OPTIMIZERS.items():
        model: Any = make_net() if kind == "8bit" else make_net().bfloat16()
        precision = "bf16" if kind == "8bit" else None
        model, optimizer = shardcore.shard(model, of(model.parameters()), 3, precision=precision)
        check_steps(rank, model, optimizer, Reader(shardcore.track_changes(model)))


def test_every_form_of_weights_and_states_notes_changes() -> None:
    run_ranks(2, _optimizers)


def _tiers(rank: int, world_size: int, offloads: list[dict[str, Any]]) -> None:
    for offload in offloads:
        for overlap in (False, True):
            if overlap and offload["optimizer"] == "nvme":
                continue
            options = {"offload": made(offload), "overlap_step": overlap}
            model, optimizer, reader = tracked(rank, 3, **options)
            check_steps(rank, model, optimizer, reader)
            del model, optimizer


def test_changes_are_noted_in_every_tier(tmp_path: Path) -> None:
    files = {"path": str(tmp_path), "gradients": "cpu", "resume": False}
    offloads = [
        {"optimizer": "cpu"},
        {"optimizer": "cpu", "ratio": 0.5},
        {"optimizer": "cpu", "params": "cpu"},
        {"optimizer": "nvme", "params": "cpu", **files},
        {"optimizer": "nvme", "params": "nvme", **files},
    ]
    run_ranks(2, _tiers, offloads)


def _resplit(rank: int, world_size: int) -> None:
    model, optimizer, reader = tracked(rank, 3, offload={"optimizer": "cpu", "ratio": "auto"})
    for number in range(3):  # the third step would choose by time
        step(model, optimizer, number, rank)
        reader.sync(model)
        if number == 1:
            model._shardcore_engine.ratio_tuner = None
            model._shardcore_engine.store.resplit(0.5)
            assert is_whole(reader.sync(model), model)
    assert all(len(b.bits) == 2 for b in model._shardcore_engine.buckets)
    check_steps(rank, model, optimizer, Reader(reader.changes))


def test_states_that_move_to_another_tier_take_changes_along() -> None:
    run_ranks(2, _resplit)


def _unfreeze(rank: int, world_size: int) -> None:
    model: Any = make_net()
    model.blocks[0].requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = shardcore.FusedAdam(params, lr=LR)
    model, optimizer = shardcore.shard(model, optimizer, 3, precision="bf16")
    reader = Reader(shardcore.track_changes(model))
    step(model, optimizer, 0, rank)
    reader.sync(model)
    optimizer.add_param_group({"params": [*model.blocks[0].parameters()]})
    shardcore.unfreeze(model.blocks[0])
    check_steps(rank, model, optimizer, Reader(reader.changes))


def test_weights_that_train_later_have_bits() -> None:
    run_ranks(2, _unfreeze)


def _unknown(rank: int, world_size: int, stage: int) -> list[int]:
    model, optimizer, reader = tracked(rank, stage)
    step(model, optimizer, 0, rank)
    whole: list[int] = []

    def sync(since: int | None, **options: Any) -> None:
        step(model, optimizer, len(whole), rank)
        reader.version = since
        whole.append(is_whole(reader.sync(model, **options), model))
        reader.check(of_forward(model))

    sync(0)  # no version has been streamed
    first = reader.changes.version
    sync(first)
    sync(None)
    sync(first)  # older than the last
    sync(reader.changes.version + 1)
    sync(reader.changes.version)
    sync(reader.changes.version, names=str.lower)
    return whole


@pytest.mark.parametrize("stage", [1, 3])
def test_a_version_that_is_not_the_last_one_is_a_whole_sync(stage: int) -> None:
    expected = [True, False, True, True, True, False, False]
    assert run_ranks(2, _unknown, stage) == [expected, expected]


def _receivers(rank: int, world_size: int) -> None:
    model, optimizer, reader = tracked(rank, 3)
    for number, ranks in enumerate(([1], [1], [0, 1], [0, 1])):
        step(model, optimizer, number, rank)
        shares = reader.sync(model, ranks=ranks)
        assert bool(shares) == (rank in ranks)
        if rank in ranks:
            assert is_whole(shares, model) == (number in (0, 2))  # rank 0 has no weights before
            reader.check(of_forward(model))
        else:
            of_forward(model)


def test_changes_for_other_ranks_are_a_whole_sync() -> None:
    run_ranks(3, _receivers)


def _left(rank: int, world_size: int, stage: int, whole: bool) -> list[str]:
    model, optimizer, reader = tracked(rank, stage)
    for number in range(2):
        step(model, optimizer, number, rank)
        reader.sync(model)
    step(model, optimizer, 2, rank)
    reader.version = None if whole else reader.version

    def loop() -> None:
        for _ in shardcore.stream_params(model, changes=reader.changes, since=reader.version):
            if rank == 1:
                break

    errors = [error_of(loop)]
    reader.version = reader.changes.version  # a reader that takes it for a version
    assert is_whole(reader.sync(model), model)
    reader.check(of_forward(model))
    return errors


@pytest.mark.parametrize(("stage", "whole"), [(3, False), (2, True), (3, True)])
def test_after_a_loop_that_ended_early_all_is_sent(stage: int, whole: bool) -> None:
    errors = run_ranks(2, _left, stage, whole)
    assert "rank 1 failed: _LeftEarlyError: its loop ended at tensor 1" in errors[0][0]
    assert errors[1] == ["no error"]


def _zipped(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """Return the warnings of the sync after a loop that takes all items, but not the end; and of
    a sync with an older version.
    """
    model, optimizer, reader = tracked(rank, 3)
    reader.sync(model)
    step(model, optimizer, 0, rank)
    changed = len(reader.sync(model))
    step(model, optimizer, 0, rank)
    items = shardcore.stream_params(model, changes=reader.changes, since=reader.version)
    taken = [name for _, (name, _, _) in zip(range(changed), items, strict=False)]
    assert len(taken) == changed
    del items
    reader.version = reader.changes.version
    with logged() as after_zip:
        assert is_whole(reader.sync(model), model)
    reader.version = 1
    with logged() as older:
        reader.sync(model)
    return after_zip, older


def test_the_warning_says_whether_a_loop_ended_early_or_the_version_is_older() -> None:
    for after_zip, older in run_ranks(2, _zipped):
        assert "the loop over version 3 did not reach its end; expected it to" in after_zip[0]
        assert "since is 1, not the last version (4)" in older[0]


def _writers(rank: int, world_size: int, stage: int, offload: Any, path: Path) -> None:
    model, optimizer, reader = tracked(rank, stage, offload=offload)
    ema = shardcore.EMA(model, 0.9)

    def edit() -> None:
        with shardcore.full_params(model), torch.no_grad():
            model.blocks[1].up.weight.add_(1)

    def swap() -> None:
        with ema.swap():
            pass

    def load_model() -> None:
        model.load_state_dict({name: v + 1 for name, v in model.state_dict().items()})

    def save_and_load() -> None:
        shardcore.save(path, model, optimizer)
        for number in range(4, 6):
            step(model, optimizer, number, rank)
        reader.sync(model)
        shardcore.load(path, model, optimizer)

    step(model, optimizer, 0, rank)
    for number, write in enumerate((edit, swap, load_model, save_and_load)):
        reader.sync(model)
        step(model, optimizer, 1 + number, rank)
        reader.sync(model)
        write()
        shares = reader.sync(model)
        assert any(share == 2 for share in shares.values()), write.__name__
        reader.check(of_forward(model))
        reader.sync(model)
        step(model, optimizer, 10 + number, rank)
        assert not all(share == 2 for share in reader.sync(model).values())
        reader.check(of_forward(model))


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        (0, None),
        (2, None),
        (3, None),
        (2, {"optimizer": "cpu"}),
        (3, {"optimizer": "cpu", "params": "cpu"}),
    ],
)
def test_all_that_others_than_steps_write_is_sent(stage: int, offload: Any, tmp_path: Path) -> None:
    run_ranks(2, _writers, stage, offload, tmp_path)


def _kept_in_full(rank: int, world_size: int, stage: int) -> None:
    model: Any = make_net()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer: Any = torch.optim.SGD(params, lr=1e-3)
    if stage == 3:
        optimizer = shardcore.FusedAdam(params, lr=LR)
    model, optimizer = shardcore.shard(
        model, optimizer, stage, precision="bf16", keep_fp32=(nn.LayerNorm,)
    )
    reader = Reader(shardcore.track_changes(model))
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    norms = {name for name in trained if ".norm." in name}
    for number in range(3):
        step(model, optimizer, number, rank)
        shares = reader.sync(model)
        in_full = {name for name, share in shares.items() if share == 2}
        if number:
            assert {*shares} <= trained
            assert in_full == (norms if stage == 3 else trained)
        reader.check(of_forward(model))
    with shardcore.full_params(model), torch.no_grad():
        model.blocks[0].down.weight.mul_(2)  # frozen
    assert reader.sync(model)["blocks.0.down.weight"] == 2
    reader.check(of_forward(model))


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_weights_are_sent_once_and_weights_without_bits_always(stage: int) -> None:
    run_ranks(2, _kept_in_full, stage)


class Hundredth(nn.Module):
    """A module of which a hundredth of the weights have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 600))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.view(-1)[::100].sum()


def _sent(rank: int, world_size: int, stage: int) -> tuple[int, int]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Hundredth() for _ in range(4)))
    optimizer = shardcore.FusedAdam(model.parameters(), lr=1.0)
    model, optimizer = shardcore.shard(
        model, optimizer, stage, precision="bf16", units=[*model.children()]
    )
    reader, sent = Reader(shardcore.track_changes(model)), model._shardcore_engine.comm.sent
    before = sent[Traffic.READ]
    dict(shardcore.stream_params(model, dtype=torch.float32))  # which gathers at each stage
    whole = (sent[Traffic.READ] - before) // 2
    reader.sync(model)
    model(torch.zeros(1)).sum().backward()
    optimizer.step()
    before = sent[Traffic.READ]
    shares = reader.sync(model)
    changed = sent[Traffic.READ] - before
    reader.check(of_forward(model))
    assert min(shares.values()) > 0.0099
    return whole, changed


@pytest.mark.parametrize("stage", [2, 3])
def test_three_hundredths_of_the_bytes_bring_each_hundredth_weight(stage: int) -> None:
    for whole, changed in run_ranks(2, _sent, stage):
        assert 0 < changed <= 0.03 * whole


def _refused(rank: int, world_size: int) -> list[str]:
    model, _, reader = tracked(rank, 3)
    other, _, _ = tracked(rank, 3)
    changes = reader.changes
    assert shardcore.track_changes(model) is changes
    calls: list[tuple[nn.Module, dict[str, Any]]] = [
        (model, {"changes": True}),
        (other, {"changes": changes}),
        (make_net(), {"changes": changes}),
        (model, {"since": 1}),
        (model, {"changes": changes, "since": "1"}),
        (model, {"changes": changes, "since": rank}),
        (model, {"changes": changes, "dtype": torch.float32}),
        (model, {"changes": changes, "merge_adapters": True}),
    ]
    errors = [
        error_of(lambda of=of, options=options: list(shardcore.stream_params(of, **options)))
        for of, options in calls
    ]
    errors.append(error_of(lambda: shardcore.track_changes(make_net())))
    lm, _ = sharded_lm(mesh_of(world_size, 2), 1)
    sliced = shardcore.track_changes(lm)
    errors.append(error_of(lambda: list(shardcore.stream_params(lm, changes=sliced))))
    return errors


def test_bad_arguments_are_refused_on_every_rank() -> None:
    errors = run_ranks(2, _refused)
    expected = [
        "changes is a bool; expected what track_changes returns",
        "changes is of another model; expected track_changes(model) of this one",
        "changes is of another model; expected track_changes(model) of this one",
        "since is 1; expected a version of changes, with changes=",
        "since is '1'; expected a version of changes, with changes=",
        "ranks disagree",
        "got changes with dtype=torch.float32",
        "got changes with dtype=None and merge_adapters=True",
        "is not sharded",
        "got changes for tensor-parallel slices; expected changes=None",
    ]
    for of_rank in errors:
        for error, text in zip(of_rank, expected, strict=True):
            assert text in error
