"""Saving in the background: it saves what was there before, while training goes on."""

import os
import signal
import threading
import time
import weakref
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore._native import _C
from shardcore.checkpoint import background, write
from shardcore.checkpoint import format as layout
from shardcore.offload.cpu_store import CpuStore
from tests.support.choice import some
from tests.support.models import Net, Run, error_of, hash_of_training, stepped, train
from tests.support.ranks import run_ranks

CPU = {"offload": {"optimizer": "cpu"}}


def _in_background(rank: int, world_size: int, folder: str, run: Run) -> bool:
    """Save while slow writes go on, and train meanwhile. Returns whether the checkpoint has what
    was there.
    """
    torch.manual_seed(0)
    # some MiB, of which one is on its way at a time
    model, optimizer, _ = train(rank, run, Net(width=64, hidden=1500))
    expected = hash_of_training(model, optimizer)
    write.file_engine = lambda: _C.FileEngine(depth=1, faults="delay:100")
    try:
        begun = shardcore.save(folder, model, optimizer, wait=False)
        assert not begun.done
        assert not os.path.exists(os.path.join(folder, "latest"))
        for step in (5, 6):
            stepped(model, optimizer, rank, step)
        trained = hash_of_training(model, optimizer)
        path = begun.wait()
    finally:
        write.file_engine = layout.file_engine
    assert begun.done
    assert path == Path(folder) / f"global_step{run.steps}"
    dist.barrier()
    shardcore.load(folder, model, optimizer)
    if hash_of_training(model, optimizer) != expected:
        return False
    for step in (5, 6):
        stepped(model, optimizer, rank, step)
    assert hash_of_training(model, optimizer) == trained, "saving changed nothing"
    return True


OFFLOADS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload": {"optimizer": "cpu"}},
    "split": {"offload": {"optimizer": "cpu", "ratio": 0.37}},
    "all": {"offload": {"optimizer": "cpu", "gradients": "cpu", "params": "cpu"}},
    "overlapped": {"offload": {"optimizer": "cpu"}, "overlap_step": True},
}
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "split 8-bit": {"master": "split", "state_dtype": "8bit"},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("offload", "form"), some(product(OFFLOADS, FORMS), zip(OFFLOADS, [*FORMS] * 3, strict=False))
)
def test_a_background_save_has_what_was_there(tmp_path: Path, offload: str, form: str) -> None:
    run = Run(
        stage=3,
        steps=2,
        precision="bf16",
        shard=OFFLOADS[offload],
        adam={"lr": 1e-2, **FORMS[form]},
    )
    assert run_ranks(2, _in_background, str(tmp_path), run) == [True, True]


def _unwatched(rank: int, world_size: int, folder: str) -> bool:
    """As above, but no step waits until what it overwrites is written."""
    with pytest.MonkeyPatch.context() as patch:  # the rank makes other tests, too
        patch.setattr(CpuStore, "watch", lambda self, before_change: None)
        run, found = Run(stage=2, steps=2, shard=CPU), [False]
        error = error_of(lambda: found.append(_in_background(rank, world_size, folder, run)))
        # where a step came between the file and the digest of a range
        assert error == "no error" or "has other values of" in error
        return found[-1]


def test_without_waits_the_background_save_would_have_other_values(tmp_path: Path) -> None:
    assert run_ranks(1, _unwatched, str(tmp_path)) == [False]


def test_a_step_waits_for_no_more_than_it_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in host memory are copied before a save goes on in the background."""
    model, optimizer, _ = train(0, Run(stage=3, steps=1, shard={"offload": {"params": "cpu"}}))
    gate = threading.Event()
    monkeypatch.setattr(write, "file_engine", lambda: gate.wait(60) and layout.file_engine())
    saving = shardcore.save(tmp_path, model, optimizer, wait=False)
    stepped(model, optimizer, 0, 1)
    assert not saving.done
    gate.set()
    saving.wait()


def _heard_by_one(rank: int, world_size: int, folder: str) -> tuple[list[str], str]:
    """The save in the background fails on rank 1; rank 0 alone waits for it, and goes on."""
    model, optimizer, _ = train(rank, Run(stage=2, steps=1))
    write.file_engine = (
        (lambda: _C.FileEngine(faults="write:EIO@0")) if rank == 1 else layout.file_engine
    )
    saving = shardcore.save(folder, model, optimizer, tag="first", wait=False)
    said = [error_of(saving.wait) for _ in range(2 * (rank == 0))]
    while not saving.done:
        time.sleep(0.01)
    write.file_engine = layout.file_engine
    said.append(error_of(lambda: shardcore.save(folder, model, optimizer, tag="second")))
    stepped(model, optimizer, rank, 1)
    saving = shardcore.save(folder, model, optimizer, tag="third", wait=False)
    saving.wait()
    shardcore.save(folder, model, optimizer, tag="fourth")
    return said, Path(folder, "latest").read_text()


def test_an_error_in_the_background_is_raised_by_the_next_save_and_ranks_stay_together(
    tmp_path: Path,
) -> None:
    (first, latest), (second, _) = run_ranks(2, _heard_by_one, str(tmp_path))
    assert ["first was not saved in the background" in text for text in first] == [True, True, True]
    assert ["first was not saved in the background" in text for text in second] == [True]
    assert "rank 1 failed" in first[2]
    assert all("Input/output error" in text for text in (*first, *second))
    assert latest == "fourth"
    assert sorted(os.listdir(tmp_path)) == [".lock", "fourth", "latest", "third"]


def _many(rank: int, world_size: int, folder: str) -> None:
    model, optimizer, _ = train(rank, Run(stage=1, steps=1, shard=CPU))
    for number in range(5):
        shardcore.save(folder, model, optimizer, tag=f"number{number}", wait=False, keep_last=2)
        stepped(model, optimizer, rank, number)
    shardcore.save(folder, model, optimizer, tag="last", keep_last=2)


def test_saves_follow_each_other(tmp_path: Path) -> None:
    run_ranks(2, _many, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [".lock", "last", "latest", "number4"]


def _loads_at_once(rank: int, world_size: int, folder: str) -> None:
    model, optimizer, _ = train(rank, Run(stage=2, steps=1, shard=CPU))
    shardcore.save(folder, model, optimizer, tag="old")
    stepped(model, optimizer, rank, 1)
    expected = hash_of_training(model, optimizer)
    write.file_engine = lambda: _C.FileEngine(faults="delay:100")
    begun = shardcore.save(folder, model, optimizer, tag="new", wait=False)
    write.file_engine = layout.file_engine
    assert "done=False" in repr(begun)
    assert shardcore.load(folder, model, optimizer).path.name == "new"
    assert hash_of_training(model, optimizer) == expected


def test_a_load_waits_for_the_save_before_it(tmp_path: Path) -> None:
    run_ranks(2, _loads_at_once, str(tmp_path))


@pytest.mark.more
def test_a_wait_may_be_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, _ = train(0, Run(stage=2, steps=1, shard=CPU))
    monkeypatch.setattr(write, "file_engine", lambda: _C.FileEngine(faults="delay:300"))
    begun = shardcore.save(tmp_path, model, optimizer, wait=False)
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        begun.wait()
    assert not begun.done
    monkeypatch.undo()
    shardcore.save(tmp_path, model, optimizer, tag="next")
    assert begun.done
    assert (tmp_path / "global_step1").exists()


def _long_messages(rank: int, world_size: int) -> list[int]:
    """TCPStore takes 8 MiB at once."""
    mailbox = background.Mailbox(SimpleNamespace(rank=rank, world_size=world_size), "long")  # type: ignore[arg-type]
    mailbox.send([rank] * (3 << 20))
    found = [sum(one) for one in mailbox.receive_all()]
    mailbox.answer("") if rank == 0 else mailbox.outcome()
    return found


def test_a_rank_may_have_written_a_million_ranges() -> None:
    assert run_ranks(2, _long_messages) == [[0, 3 << 20], []]


def _unsent(rank: int, world_size: int, folder: str) -> str:
    def send(self: Any, message: Any) -> None:
        raise OSError("the connection is lost")

    model, optimizer, _ = train(rank, Run(stage=2, steps=1))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(background.Mailbox, "send", send)
        return error_of(lambda: shardcore.save(folder, model, optimizer))


def test_a_message_that_is_not_sent_is_an_error_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(2, _unsent, str(tmp_path))
    assert "save: rank 1 failed: OSError: the connection is lost" in first
    assert "the connection is lost" in second


# --- what lies on the device ----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_host_memory_is_kept_or_freed_before_there_is_more(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine: Any = SimpleNamespace(device=torch.device(where), save_staging=None)
    before: list[Any] = []
    tier = _C.HostTier

    def make(*arguments: Any, **named: Any) -> Any:
        assert all(one() is None for one in before)
        return tier(*arguments, **named)

    monkeypatch.setattr(_C, "HostTier", make)
    for count, most in ((3, 3), (2, 3), (5, 5)):
        values = torch.arange(count * 1000.0).split(1000)
        items = [
            write.Item("w", "weight", one.dtype, 0, 1000, partial(one.to, where)) for one in values
        ]
        background.stage(items, engine)
        assert all(torch.equal(item.read(), one) for item, one in zip(items, values, strict=True))
        assert engine.save_staging.nbytes == most * 4000
        assert engine.save_staging.is_pinned() == (where == "cuda")
        before.append(weakref.ref(engine.save_staging))
        del items
