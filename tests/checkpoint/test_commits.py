"""Every step is committed, and a run goes on from the last one bit for bit: weights, states,
counts, rates, random states.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.checkpoint import commits
from shardcore.checkpoint.save import random_states
from shardcore.engine.engine import engine_behind
from shardcore.estimate import predict
from shardcore.offload import nvme_states
from tests.support.choice import combinations
from tests.support.models import (
    Run,
    assert_one,
    error_of,
    hash_of,
    hash_of_training,
    made,
    micro_steps,
    stepped,
    steps_of_run,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.tiers import FORMS, WAYS, in_memory, run_on_disk


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_states, "CHUNK_NUMEL", 512)


def _hashes(rank: int, world_size: int, run: Run) -> tuple[list[str], list[int]]:
    """Return hashes of 4 steps in memory, and on disk in runs of 1, 2 and 1 steps; the steps
    that these went on from.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_states, "CHUNK_NUMEL", 512)
        plain = in_memory(run)
        model, optimizer, _ = train(rank, plain)
        steps_of_run(model, optimizer, plain, rank, range(4))
        found, begun = [hash_of_training(model, optimizer)], []
        for steps in (range(1), range(1, 3), range(3, 4)):
            model = optimizer = None
            model, optimizer, _ = train(rank, run)
            begun.append(shardcore.resume(model))
            steps_of_run(model, optimizer, run, rank, steps)
            last = hash_of_training(model, optimizer)
        return [*found, last], begun


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "form", "way"), combinations([0, 1, 2, 3], list(FORMS), list(WAYS), meet=1)
)
def test_a_resumed_run_is_the_same_run(stage: int, form: str, way: str, tmp_path: Path) -> None:
    for hashes, begun in run_ranks(
        2, _hashes, run_on_disk(str(tmp_path), stage, form, way, resume=True)
    ):
        assert_one(hashes)
        assert begun == [0, 1, 3]


class _Noisy(nn.Module):
    """Draws random numbers in its forward, counts its batches, and has a parameter that no step
    updates.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            nn.Linear(10, 40), nn.BatchNorm1d(40), nn.Dropout(0.3), nn.Linear(40, 5)
        )
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


class _Batches:
    """Batches in random order, with a position that can be saved."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        return (
            torch.randn(4, 10, generator=torch.Generator().manual_seed(self.position))
            * random.random()
        )

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _noisy(folder: Path) -> tuple[Any, Any, Any, Any, int]:
    torch.manual_seed(3)
    random.seed(3)
    model: Any = _Noisy()
    offload = {"optimizer": "nvme", "path": folder, "resume": True}
    adam = shardcore.FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = shardcore.shard(model, adam, 2, offload=made(offload))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=9)
    torch.rand(3)  # as a data loader may draw before the first step
    batches = _Batches()
    return (
        model,
        optimizer,
        scheduler,
        batches,
        shardcore.resume(model, scheduler=scheduler, stateful={"batches": batches}),
    )


def _noisy_steps(
    model: Any, optimizer: Any, scheduler: Any, batches: Any, count: int
) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(batches.next()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    model.state_dict()  # commits the last step
    return losses


def _two_halves(tmp_path: Path) -> tuple[list[float], list[float], list[str], list[str]]:
    first = _noisy(tmp_path / "whole")
    whole = _noisy_steps(*first[:4], 4)
    whole_hashes = [hash_of_training(*first[:2]), hash_of(first[0].buffers())]
    del first
    halves = []
    for begun, count in ((0, 2), (2, 2)):
        half = _noisy(tmp_path / "halves")
        assert half[4] == begun
        halves += _noisy_steps(*half[:4], count)
        hashes = [hash_of_training(*half[:2]), hash_of(half[0].buffers())]
        del half
    return whole, halves, whole_hashes, hashes


@pytest.mark.more
def test_random_states_data_and_learning_rates_go_on_too(tmp_path: Path) -> None:
    whole, halves, whole_hashes, hashes = _two_halves(tmp_path)
    assert whole == halves
    assert whole_hashes == hashes


@pytest.mark.more
@pytest.mark.parametrize("left_out", ["random", "stateful"])
def test_what_is_left_out_of_a_commit_is_seen(
    left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = (
        random_states(torch.device("cpu")) if left_out == "random" else {"batches": {"position": 0}}
    )
    restore = commits.restore_rank

    def forget(op: str, source: Any, *given: Any) -> None:
        of_rank = source.of_rank
        source.of_rank = lambda rank: {**of_rank(rank), left_out: empty}
        restore(op, source, *given)

    monkeypatch.setattr(commits, "restore_rank", forget)
    whole, halves, whole_hashes, hashes = _two_halves(tmp_path)
    assert whole != halves or whole_hashes != hashes


def _into_another_world(rank: int, world_size: int, folder: str, stage: int) -> str:
    model, optimizer, _ = train(rank, Run(stage, 0, precision="bf16", seed=5))
    shardcore.load(folder, model, optimizer)
    stepped(model, optimizer, 0, 9)
    return hash_of_training(model, optimizer)


def _two_steps(rank: int, world_size: int, folder: str, stage: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_states, "CHUNK_NUMEL", 512)
        run = run_on_disk(folder, stage, "masters", "a share", resume=True)
        model, optimizer, _ = train(rank, run)
        steps_of_run(model, optimizer, run, rank, range(2))
        hash_of_training(model, optimizer)
        run = in_memory(run)
        model, optimizer, _ = train(rank, run)
        steps_of_run(model, optimizer, run, rank, range(2))
        stepped(model, optimizer, 0, 9)
        return hash_of_training(model, optimizer)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_load_reads_the_last_commit_into_any_world(stage: int, tmp_path: Path) -> None:
    expected = run_ranks(2, _two_steps, str(tmp_path), stage)
    assert run_ranks(1, _into_another_world, str(tmp_path), 1) == expected[:1]


def test_skipped_steps_count(tmp_path: Path) -> None:
    run = Run(
        2,
        0,
        precision="fp16",
        shard={"offload": {"optimizer": "nvme", "path": str(tmp_path), "resume": True}},
    )
    model, optimizer, _ = train(0, run)
    for step in range(4):
        micro_steps(model, optimizer, 0, step, 1, overflow=step in (1, 3))
        optimizer.step()
        optimizer.zero_grad()
    scale, expected = engine_behind("", model).loss_scale, hash_of_training(model, optimizer)
    assert optimizer.skipped_steps == 2
    del model, optimizer
    model, optimizer, _ = train(0, run)
    assert shardcore.resume(model) == 4
    assert optimizer.skipped_steps == 2
    assert engine_behind("", model).loss_scale == scale
    assert hash_of_training(model, optimizer) == expected


def test_a_run_that_goes_on_without_resume_is_warned_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_on_disk(tmp_path, form="fp32", resume=True)
    warned = []
    for calls_it in (False, False, True):
        model = optimizer = None
        model, optimizer, _ = train(0, run)
        caplog.clear()
        if calls_it:
            assert shardcore.resume(model) == 4
        for step in range(2):
            stepped(model, optimizer, 0, step)
        optimizer.synchronize()
        warned.append(
            sum("shardcore.resume was not called" in record.message for record in caplog.records)
        )
    assert warned == [0, 1, 0], "a new run, one that goes on, one that goes on as it should"


def test_resume_says_what_it_needs(tmp_path: Path) -> None:
    model, _, _ = train(0, Run(2, 0))
    assert "the model commits no steps. Use shard(offload=" in error_of(
        lambda: shardcore.resume(model)
    )
    offload = {"optimizer": "nvme", "path": str(tmp_path), "durable": False}
    model, _, _ = train(0, Run(2, 1, shard={"offload": offload}))
    assert "the model commits no steps" in error_of(lambda: shardcore.resume(model))
    assert list(tmp_path.iterdir()) == []
    model, optimizer, _ = train(0, Run(2, 0, shard={"offload": {**offload, "durable": True}}))
    assert "stateful['data'] is of type list" in error_of(
        lambda: shardcore.resume(model, stateful={"data": []})
    )
    stepped(model, optimizer, 0, 0)
    assert "resume: step 1 is already made" in error_of(lambda: shardcore.resume(model))
    hash_of_training(model, optimizer)
    del model, optimizer
    model, optimizer, _ = train(
        0,
        Run(2, 0, shard={"offload": {"optimizer": "nvme", "path": str(tmp_path), "resume": True}}),
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    assert "resume: " in error_of(lambda: shardcore.resume(model, scheduler=scheduler))
    assert "stateful names data" in error_of(
        lambda: shardcore.resume(model, stateful={"data": _Batches()})
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("form", ["masters", "fp32", "split 8-bit"])
def test_weights_that_are_edited_after_a_step_are_committed(form: str, tmp_path: Path) -> None:
    run = run_on_disk(tmp_path, form=form, resume=True)

    def edited(model: Any, optimizer: Any, step: int) -> None:
        stepped(model, optimizer, 0, step)
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.2, 0.2)

    hashes = []
    for counts in ((4,), (2, 2)):
        begun = 0
        for count in counts:
            model, optimizer, _ = train(0, in_memory(run) if counts == (4,) else run)
            for step in range(begun, begun + count):
                edited(model, optimizer, step)
            begun += count
            hashes.append(hash_of_training(model, optimizer))
            del model, optimizer
    assert hashes[0] == hashes[2] != hashes[1]


def test_weights_that_are_edited_while_they_are_written_are_refused(tmp_path: Path) -> None:
    for form, refused in (("masters", False), ("fp32", True)):
        model, optimizer, _ = train(0, run_on_disk(tmp_path / form, form=form, resume=True))
        stepped(model, optimizer, 0, 0)
        micro_steps(model, optimizer, 0, 1, 1)
        with torch.no_grad():
            model.head.weight.add_(0.1)
        said = error_of(optimizer.step)
        assert (
            "head.weight was edited after a forward began and before the step" in said
        ) == refused


def test_a_parameter_without_a_group_is_committed(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model: Any = _Noisy()
        adam = shardcore.FusedAdam(
            [param for name, param in model.named_parameters() if name != "idle"], lr=1e-2
        )
        return shardcore.shard(
            model, adam, 2, offload={"optimizer": "nvme", "path": str(tmp_path), "resume": True}
        )

    model, optimizer = make(0)
    with torch.no_grad():
        model.idle.fill_(3)
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    del model, optimizer
    model, _ = make(1)
    assert model.idle.eq(3).all()


def test_space_on_disk_is_predicted_with_parameters_that_no_group_has(tmp_path: Path) -> None:
    model: Any = nn.ModuleDict({"used": nn.Linear(100, 1000), "idle": nn.Linear(300, 1000)})
    adam = shardcore.FusedAdam(model["used"].parameters(), lr=1e-2, master="fp32")
    options: dict[str, Any] = {
        "precision": "bf16",
        "offload": {"optimizer": "nvme", "path": str(tmp_path), "ratio": 0.5},
    }
    expected = predict(model, adam, 2, world_size=1, **options).disk
    assert expected is not None
    model, optimizer = shardcore.shard(model, adam, 2, **options)
    for _ in range(2):
        model["used"](torch.randn(4, 100).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.synchronize()
    found = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert found == pytest.approx(expected.space, rel=0.03), "beside the heads of files"


def test_an_evaluation_between_step_and_scheduler_changes_nothing(tmp_path: Path) -> None:
    rates = []
    for _ in range(2):
        model, optimizer, scheduler, batches, _ = _noisy(tmp_path)
        for _ in range(2):
            model(batches.next()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.zeros(4, 10))
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.synchronize()
        del model, optimizer, scheduler, batches
    expected = _noisy(tmp_path / "other")
    for _ in range(4):
        expected[0](expected[3].next()).sum().backward()
        expected[1].step()
        expected[2].step()
    assert rates[1] == expected[1].param_groups[0]["lr"]


class _Fails(_Batches):
    def state_dict(self) -> dict[str, int]:
        if self.position == 2:
            raise ValueError("no state")
        return super().state_dict()


def test_a_state_that_cannot_be_had_ends_the_training(tmp_path: Path) -> None:
    model, optimizer, _ = train(0, run_on_disk(tmp_path, form="fp32", resume=True))
    batches = _Fails()
    shardcore.resume(model, stateful={"batches": batches})
    for step in range(2):
        batches.next()
        stepped(model, optimizer, 0, step)
    for _ in range(2):
        assert "step 2 is made, but cannot be committed (ValueError: no state)" in error_of(
            optimizer.step
        )


def test_a_layer_that_got_another_name_is_committed_and_saved_under_it(tmp_path: Path) -> None:
    model, optimizer, _ = train(0, run_on_disk(tmp_path / "nvme", form="masters", resume=True))
    model.blocks[0].up = nn.Sequential(model.blocks[0].up)
    for step in range(2):
        stepped(model, optimizer, 0, step)
    shardcore.save(tmp_path / "saved", model, optimizer)
    optimizer.synchronize()
    expected = hash_of_training(model, optimizer)
    del model, optimizer
    for folder in ("nvme", "saved"):
        model, optimizer, _ = train(0, Run(precision="bf16", steps=0, seed=7))
        assert "missing blocks.0.up.weight" in error_of(
            lambda: shardcore.load(tmp_path / folder, model, optimizer)  # noqa: B023
        )
        model.blocks[0].up = nn.Sequential(model.blocks[0].up)
        shardcore.load(tmp_path / folder, model, optimizer)
        assert hash_of_training(model, optimizer) == expected
    said = error_of(lambda: train(0, run_on_disk(tmp_path / "nvme", form="masters", resume=True)))
    assert "missing blocks.0.up.weight" in said
