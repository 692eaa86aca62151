"""Steps on disk outlast any end of the process: killed at any instant, ranks one commit apart, a
disk that fills.

A few times each; make crash-test does it often.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from shardcore.checkpoint import slots
from shardcore.checkpoint.directory import checkpoints
from shardcore.offload import disk, nvme_states
from tests.support.crash import times
from tests.support.models import (
    Run,
    error_of,
    hash_of_training,
    make_net,
    micro_steps,
    stepped,
    train,
)
from tests.support.ranks import free_port, join_group, run_ranks, start

pytestmark = pytest.mark.crash

Record = Callable[[str, Any], None]
STEPS = 400  # more than any job here makes
ANEW = 100  # after so many steps a run begins anew


def _run(folder: Path | str, disks: int = 1) -> Run:
    paths = [str(folder), f"{folder}.other"][:disks]
    tiers = {"optimizer": "nvme", "path": paths if disks > 1 else paths[0], "resume": True}
    return Run(stage=2, steps=0, precision="bf16", shard={"offload": tiers})


def _as_others() -> None:
    """Have small chunks, and compute as the ranks of run_ranks do: torch's sums depend on how
    many threads it has.
    """
    nvme_states.CHUNK_NUMEL = 512
    nvme_states.measure = lambda *_: disk.Rates(1, 1, 1)
    torch.set_num_threads(1)


def _reference(rank: int, world_size: int, count: int) -> list[str]:
    """Return a hash of the training after 0, 1, ... steps, of states in memory."""
    model, optimizer, _ = train(rank, Run(stage=2, steps=0, precision="bf16"))
    hashes = [hash_of_training(model, optimizer)]
    for step in range(count):
        stepped(model, optimizer, rank, step)
        hashes.append(hash_of_training(model, optimizer))
    return hashes


def _train_forever(rank: int, world_size: int, port: str, folder: str, one_slot: bool) -> None:
    """Go on from the last commit; `folder`.begun has its step and hash, `folder`.made how many
    steps have returned since.

    one_slot: the broken twin, which writes a chunk where it was read.
    """
    _as_others()
    if one_slot:
        write = nvme_states.NvmeStates._start_write

        def write_over(self: Any, chunk: Any, place: int) -> None:
            chunk.committed = None
            write(self, chunk, place)

        nvme_states.NvmeStates._start_write = write_over
    if world_size > 1:
        join_group(rank, world_size, port)
    model, optimizer, _ = train(rank, _run(folder, 3 - world_size), make_net())
    step = shardcore.resume(model)
    begun = hash_of_training(model, optimizer)
    made = os.open(f"{folder}.made", os.O_CREAT | os.O_WRONLY)
    if rank == 0:
        os.pwrite(made, f"{step:8d}".encode(), 0)
        Path(f"{folder}.begun.new").write_text(f"{step} {begun}")
        os.rename(f"{folder}.begun.new", f"{folder}.begun")
    for number in range(step, STEPS):
        stepped(model, optimizer, rank, number)
        if rank == 0:
            os.pwrite(made, f"{number + 1:8d}".encode(), 0)
        if number % 3 == 0:
            shardcore.save(f"{folder}.saved", model, optimizer, tag=f"{number + 1}", keep_last=2)


def _killed_job(
    folder: Path, world_size: int, chance: random.Random, steps: int, one_slot: bool = False
) -> tuple[int, str, int]:
    """Kill a job after so many steps; returns the step that it went on from, its hash then, and
    how many had returned.
    """
    begun, made = Path(f"{folder}.begun"), Path(f"{folder}.made")
    for path in (begun, made):
        path.unlink(missing_ok=True)
    port = free_port()
    ranks = [
        start(_train_forever, rank, world_size, port, str(folder), one_slot)
        for rank in range(world_size)
    ]
    until = time.monotonic() + 120
    try:
        while (
            not begun.exists() or int(made.read_text()) < int(begun.read_text().split()[0]) + steps
        ):
            assert time.monotonic() < until, "a job trains"
            assert all(rank.is_alive() for rank in ranks), "nothing but the signal ends a job"
            time.sleep(0.0005)
        time.sleep(chance.random() * 0.02)
    finally:
        for rank in chance.sample(ranks, world_size):
            rank.kill()
            time.sleep(chance.random() * 0.02)
        for rank in ranks:
            rank.join()
    step, hash_ = begun.read_text().split(maxsplit=1)
    return int(step), hash_, int(made.read_text())


def _check_saved(folder: Path, expected: list[str]) -> int:
    """Load what a killed job has saved, which has the files of committed steps; returns how many
    checkpoints there are.
    """
    saved = Path(f"{folder}.saved")
    found = checkpoints(saved) if saved.exists() else []
    model, optimizer, _ = train(0, Run(stage=2, steps=0, precision="bf16", seed=5))
    for path in found:
        shardcore.load(path, model, optimizer)
        assert hash_of_training(model, optimizer) == expected[int(path.name)]
    return len(found)


@pytest.mark.cases(1)
@pytest.mark.parametrize("world_size", [1, 2])  # the one has two directories
def test_a_killed_job_goes_on_from_its_last_step(
    tmp_path: Path, world_size: int, record_property: Record
) -> None:
    chance, folder, count = random.Random(world_size), tmp_path / "nvme", times("commits", 6) // 2
    expected = run_ranks(world_size, _reference, min(ANEW, 8 * count) + 8)[0]
    made = saved = 0
    for number in range(count):
        # of four, one is followed by a save
        step, hash_, next_made = _killed_job(folder, world_size, chance, 4 - number % 5)
        saved += _check_saved(folder, expected)
        assert step >= made - 1, "a step that the next one has followed is not lost"
        assert hash_ == expected[step], "states, weights and counts are those of one step"
        made = next_made if next_made < ANEW else 0
        if not made:
            for path in [*folder.iterdir(), *tmp_path.glob("nvme.other/*")]:
                path.unlink()
    assert made > 2, "jobs have trained"
    assert saved > 0, "and saved"
    what = f"killed while training, {world_size} process{'es' * (world_size - 1)}"
    record_property("crash", (what, count, "0 steps lost that another had followed"))


@pytest.mark.more
def test_one_slot_alone_is_torn(tmp_path: Path) -> None:
    chance, folder = random.Random(0), tmp_path / "nvme"
    expected = run_ranks(1, _reference, 160)[0]

    def kill_jobs() -> None:
        for _ in range(20):
            step, hash_, _ = _killed_job(folder, 1, chance, chance.randrange(5), one_slot=True)
            assert hash_ == expected[step]

    with pytest.raises(AssertionError):
        kill_jobs()


def _dies_before_its_commit(rank: int, port: str, folder: str) -> None:
    _as_others()
    join_group(rank, 2, port)
    model, optimizer, _ = train(rank, _run(folder), make_net())
    if rank == 1:
        write = slots.Slots.write_record

        def die(self: Any, manifest: Any, step: int, states: Any) -> None:
            if step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, manifest, step, states)

        slots.Slots.write_record = die
    error_of(lambda: [stepped(model, optimizer, rank, step) for step in range(5)])


def _resumed(rank: int, world_size: int, folder: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_states, "CHUNK_NUMEL", 512)
        model, optimizer, _ = train(rank, _run(folder), make_net())
        step = shardcore.resume(model)
        first = hash_of_training(model, optimizer)
        stepped(model, optimizer, rank, step)
        return step, first, hash_of_training(model, optimizer)


@pytest.mark.more
def test_ranks_whose_last_commits_differ_go_on_from_the_one_that_both_have(tmp_path: Path) -> None:
    folder, port = tmp_path / "nvme", free_port()
    ranks = [start(_dies_before_its_commit, rank, port, str(folder)) for rank in range(2)]
    ranks[1].join(100)
    until = time.monotonic() + 100
    while not any('"step": 3' in path.read_text() for path in folder.glob("rank_00000.commit_*")):
        assert time.monotonic() < until, "the other rank commits step 3"
        time.sleep(0.01)
    ranks[0].kill()
    ranks[0].join()
    expected = run_ranks(2, _reference, 3)[0]
    for _ in range(2):  # the second time both have committed step 3 anew
        found = run_ranks(2, _resumed, str(folder))
        step = found[0][0]
        assert (
            found[0]
            == found[1]
            == (step, expected[step], expected[step + 1] if step < 3 else found[0][2])
        )
        assert step in (2, 3)


def _edits_before_the_other_commits(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_states, "CHUNK_NUMEL", 512)
        model, optimizer, _ = train(rank, _run(folder), make_net())
        for step in range(3):
            stepped(model, optimizer, rank, step)
        if rank == 1:
            patch.setattr(
                slots.Slots,
                "write_record",
                lambda *_: (_ for _ in ()).throw(OSError(5, "slow disk")),
            )
        micro_steps(model, optimizer, rank, 3, 1)
        with torch.no_grad():
            model.head.weight.mul_(0.9)
        said = error_of(optimizer.step)
        loaded = error_of(lambda: model.load_state_dict(make_net(3).state_dict()))
        return said, loaded


@pytest.mark.more
def test_edits_wait_until_every_rank_has_committed(tmp_path: Path) -> None:
    found = run_ranks(2, _edits_before_the_other_commits, str(tmp_path))
    for said, loaded in found:
        assert "commit" in said
        assert "commit" in loaded
    expected = run_ranks(2, _reference, 3)[0]
    for step, first, _ in run_ranks(2, _resumed, str(tmp_path)):
        assert (step, first) == (2, expected[2])
