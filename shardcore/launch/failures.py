"""How ranks ended, and the text about it, whose last part is one traceback.

A rank that raises makes others fail, whose tracebacks ("connection closed") say nothing. The
earliest other one is shown in full; each other failed rank has a line before it.
"""

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LINES = 8  # of other ranks
_LINE_CHARACTERS = 160
# gloo's errors on a rank whose peer ended, or ended a deadlock: the peer's own error says why.
_BY_ANOTHER_RANK = (
    "Application timeout caused pair closure",
    "Connection closed by peer",
    "Connection reset by peer",
)


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    rank: int
    time_ns: int  # when it raised, by its machine's clock; 0 if it raised nothing
    last: str  # the last line of its traceback, or how it ended
    text: str  # its traceback; "" if it raised nothing
    code: int  # the exit status that it had or, ended by a signal, would have in a shell


def collect(directory: Path, exits: Mapping[int, int]) -> list[Failure]:
    """Return the failures of a node's ranks: what they recorded in `directory`, and exits, rank ->
    status of its process.

    SIGTERM is what the launcher ends the others with, so it is left out unless no rank failed in
    another way.
    """
    failures = {}
    for path in directory.glob("*.json"):
        rank, record = int(path.stem), json.loads(path.read_text())
        failures[rank] = Failure(rank, record["time_ns"], record["last"], record["text"], 1)
    for rank, status in exits.items():
        if status == 0 or rank in failures:
            continue
        if status < 0:
            ending, code = f"was ended by {_signal(-status)}", 128 - status
        else:
            ending, code = f"ended with exit status {status}", status
        failures[rank] = Failure(rank, 0, ending, "", code)
    return without_ended(list(failures.values()))


def without_ended(failures: Sequence[Failure]) -> list[Failure]:
    """Leave out ranks that the launcher ended, unless there are no others."""
    sigterm = 128 + signal.SIGTERM
    others = [failure for failure in failures if failure.text or failure.code != sigterm]
    return others or list(failures)


def _signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return name + " (as the kernel does when memory runs out)" * (number == signal.SIGKILL)


def first(failures: Sequence[Failure]) -> Failure:
    """Return the failure that is shown in full: the earliest exception, if possible of a rank that
    did not only lose its connection to another one; without exceptions, the lowest rank's.
    """

    def order(failure: Failure) -> tuple[bool, bool, int, int]:
        lost = any(text in failure.last for text in _BY_ANOTHER_RANK)
        return not failure.text, lost, failure.time_ns, failure.rank

    return min(failures, key=order)


def report(failures: Sequence[Failure], world_size: int, op: str) -> str:
    """Return the text about failures (not empty), without a newline at the end: the first one's
    traceback last.
    """
    cause = first(failures)
    others = sorted(
        (failure for failure in failures if failure is not cause),
        key=lambda failure: (failure.time_ns, failure.rank),
    )
    lines = [
        f"{op}: rank {other.rank} of {world_size} {_in_a_line(other)}" for other in others[:_LINES]
    ]
    if len(others) > _LINES:
        lines.append(f"{op}: {len(others) - _LINES} more ranks failed")
    how = f"failed:\n{cause.text.rstrip()}" if cause.text else cause.last
    return "\n".join([*lines, f"{op}: rank {cause.rank} of {world_size} {how}"])


def _in_a_line(failure: Failure) -> str:
    if not failure.text:
        return failure.last
    last = failure.last
    if len(last) > _LINE_CHARACTERS:
        last = last[: _LINE_CHARACTERS - 3] + "..."
    return f"failed: {last}"
