"""What a rank says before NCCL's watchdog ends it. Gloo stands in for NCCL; a small part of the timeout for most of it."""

import contextlib
import io
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from shardcore import overdue
from shardcore.overdue import Overdue
from tests.engine.forced import as_on_nccl
from tests.engine.models import Run, batch_of, hash_of_training, loss_of, train
from tests.ranks import run_ranks


def _late(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 1 begins its step when the others have said that they wait for it."""
    report = Overdue._report
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())

    def reported(self: Overdue, *wait: Any) -> None:
        report(self, *wait)
        store.set(str(rank), "reported")

    said = io.StringIO()
    with as_on_nccl() as patch, contextlib.redirect_stderr(said):
        patch.setattr(overdue, "PART", 0.02)  # of 60 s
        patch.setattr(overdue, "ANSWERS_S", 1.0)
        patch.setattr(Overdue, "_report", reported)
        model, optimizer, _ = train(rank, Run(stage=3, steps=1))
        if rank == 1:
            store.wait(["0", "2"], timedelta(seconds=60))
        loss_of(model, batch_of(1, 0, rank)).backward()
        optimizer.step()
        return said.getvalue(), hash_of_training(model, optimizer)


def test_ranks_that_wait_for_another_say_where_before_they_are_ended() -> None:
    (first, trained), (late, _), (third, _) = run_ranks(3, _late)
    expected = run_ranks(3, _on_time)
    assert trained == expected[0], "they went on when it came"
    for rank, text in ((0, first), (2, third)):
        assert text.startswith(f"shardcore: rank {rank} has waited ")
        assert "s for the other ranks, and at 60 s NCCL ends the process, or gloo the wait: " in text
        assert "ranks 0, 2 at the weights of" in text
        assert "rank 1 not waiting (ended, failed, or busy elsewhere)" in text
        assert text.count("\n") == 1, "once"
    assert late == ""


def _on_time(rank: int, world_size: int) -> str:
    return hash_of_training(*train(rank, Run(stage=3, steps=2))[:2])


class Work:
    """Stands in for a collective."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done


class Place:
    def where(self) -> str:
        return "a step"


def test_what_was_started_after_a_look_is_seen_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many only one and the last are held; a report is made once for each wait, and taken back."""
    monkeypatch.setattr(Overdue, "_pause_s", 1000.0)  # its thread never looks
    place, store = Place(), dist.HashStore()
    watched = Overdue(lambda: store, "g", 0, 1, timedelta(seconds=0.01), place.where)
    works: list[Any] = [Work() for _ in range(5)]
    for work in works:
        watched.started(work, "cuda")
    for work in works[:4]:
        work.done = True
    watched.look()  # the first is done, the last is not
    assert capsys.readouterr().err == ""
    time.sleep(0.02)
    for _ in range(2):
        watched.look()
    assert capsys.readouterr().err.count("rank 0 at a step") == 1
    assert watched.said() == {0: "a step"}
    works[4].done = True
    watched.look()
    assert watched.said() == {}
    watched.look()
    assert capsys.readouterr().err == ""


def test_what_another_backend_has_done_since_hides_no_wait(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ranks tell each other on the CPU ends while NCCL still waits."""
    monkeypatch.setattr(Overdue, "_pause_s", 1000.0)
    place, store = Place(), dist.HashStore()
    watched = Overdue(lambda: store, "g", 0, 1, timedelta(seconds=0.01), place.where)
    done, stuck, told = works = [Work() for _ in range(3)]
    for work, device in zip(works, ("cuda", "cuda", "cpu"), strict=True):
        watched.started(work, device)  # type: ignore[arg-type]
    done.done = told.done = True
    watched.look()
    time.sleep(0.02)
    watched.look()
    assert "rank 0 at a step" in capsys.readouterr().err
    stuck.done = True
    watched.look()
    assert watched.said() == {}


def test_a_wait_that_ends_while_others_are_asked_is_not_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Overdue, "_pause_s", 1000.0)
    store, work = dist.HashStore(), Work()

    class Ends(Place):
        def where(self) -> str:
            work.done = True
            return "a step"

    place = Ends()
    watched = Overdue(lambda: store, "g", 0, 1, timedelta(seconds=0.01), place.where)
    watched.started(work, "cuda")  # type: ignore[arg-type]
    time.sleep(0.02)
    watched.look()
    assert work.done
    assert watched.said() == {0: "a step"}
    watched.look()
    assert capsys.readouterr().err == ""
    assert watched.said() == {}


def test_many_ranks_are_named_in_short(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And asked for in a few messages."""
    monkeypatch.setattr(Overdue, "_pause_s", 1000.0)
    place, store, calls = Place(), dist.HashStore(), list[str]()
    absent = {3, 5000, 5001}
    others = dist.PrefixStore("shardcore/overdue/g", store)
    for rank in set(range(1, 10000)) - absent:
        others.append("said", f"{rank} a step\n")
        others.add("waiting", 1)
    for call in ("get", "check", "add", "append"):
        plain = getattr(dist.PrefixStore, call)
        counted = lambda store, *given, call=call, plain=plain: (calls.append(call), plain(store, *given))[1]  # noqa: E731
        monkeypatch.setattr(dist.PrefixStore, call, counted)
    watched = Overdue(lambda: store, "g", 0, 10000, timedelta(seconds=0.01), place.where)
    watched.started(Work(), "cuda")  # type: ignore[arg-type]
    monkeypatch.setattr(watched._stop, "wait", time.sleep)
    monkeypatch.setattr(Overdue, "_pause_s", 0.0005)
    time.sleep(0.02)
    watched.look()
    said = capsys.readouterr().err
    assert "ranks 0 to 2, 4 to 4999, 5002 to 9999 at a step; ranks 3, 5000, 5001 not waiting" in said
    assert len(said) < 1000
    assert len(calls) < 20
