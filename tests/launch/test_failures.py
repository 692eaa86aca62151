"""What is shown of ranks that failed: each once, the earliest traceback last."""

import json
import signal
from pathlib import Path

from shardcore.launch.failures import Failure, collect, first, report, without_ended

CAUSE = Failure(
    3, 100, "ValueError: boom", "Traceback (most recent call last):\n  x\nValueError: boom\n", 1
)
LATER = [
    Failure(rank, 200 + rank, "RuntimeError: closed", "Traceback ...\nRuntimeError: closed\n", 1)
    for rank in (0, 1)
]


def test_the_earliest_traceback_is_last() -> None:
    text = report([LATER[0], CAUSE, LATER[1]], 4, "run")
    assert text.splitlines() == [
        "run: rank 0 of 4 failed: RuntimeError: closed",
        "run: rank 1 of 4 failed: RuntimeError: closed",
        "run: rank 3 of 4 failed:",
        *CAUSE.text.splitlines(),
    ]


def test_a_lost_connection_is_not_the_cause_though_it_is_earlier() -> None:
    """Of ranks that wait for different things, one prints what gloo says of the other."""
    for said in (
        "RuntimeError: Application timeout caused pair closure",
        "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:2252. GLHF!",
        "RuntimeError: waiting for the other ranks failed: ... Connection reset by peer",
    ):
        lost = Failure(0, CAUSE.time_ns - 50, said, f"Traceback ...\n{said}\n", 1)
        assert first([lost, CAUSE]) is CAUSE
        assert first([lost, *LATER]) is LATER[0]
        assert report([lost, CAUSE], 4, "run").splitlines() == [
            f"run: rank 0 of 4 failed: {said}",
            "run: rank 3 of 4 failed:",
            *CAUSE.text.splitlines(),
        ]
        killed = Failure(2, 0, "was ended by SIGKILL", "", 137)
        assert first([killed, lost]) is lost, "as for any traceback"


def test_many_ranks_take_few_lines() -> None:
    text = report(
        [CAUSE, *(Failure(rank, 900, "E: " + "x" * 1000, "...", 1) for rank in range(10, 74))],
        80,
        "run",
    )
    assert len(text.splitlines()) == 8 + 1 + 1 + 3
    assert "run: 56 more ranks failed" in text
    assert max(map(len, text.splitlines())) < 200


def test_a_signal_comes_before_what_it_caused(tmp_path: Path) -> None:
    told = {
        "time_ns": 5,
        "last": "RuntimeError: closed",
        "text": "Traceback\nRuntimeError: closed\n",
    }
    (tmp_path / "0.json").write_text(json.dumps(told))
    (tmp_path / "2.part").write_text("half")
    failures = collect(tmp_path, {0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM, 3: 0})
    assert [failure.rank for failure in failures] == [0, 1], "SIGTERM is the launcher's"
    assert report(failures, 4, "run").splitlines() == [
        "run: rank 1 of 4 was ended by SIGKILL (as the kernel does when memory runs out)",
        "run: rank 0 of 4 failed:",
        "Traceback",
        "RuntimeError: closed",
    ]
    assert [failure.code for failure in failures] == [1, 128 + 9]


def test_ranks_without_a_traceback(tmp_path: Path) -> None:
    failures = collect(tmp_path, {1: 7, 0: -signal.SIGTERM, 2: -77})
    assert report(failures, 3, "run").splitlines() == [
        "run: rank 2 of 3 was ended by signal 77",
        "run: rank 1 of 3 ended with exit status 7",
    ]
    alone = collect(tmp_path, {0: -signal.SIGTERM})
    assert report(alone, 1, "run") == "run: rank 0 of 1 was ended by SIGTERM"
    assert without_ended([*alone, CAUSE]) == [CAUSE]
    assert first([*failures, CAUSE]) is CAUSE
