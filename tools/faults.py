"""Plants faults in the package, one at a time, and tells which tests see each.

    python -m tools.faults --check      whether every fault still fits the code: runs no test
    python -m tools.faults --only TEXT  faults whose names have TEXT, each to the first failure
    python -m tools.faults --sample 8   the same of one fault in eight, another eighth each day
    python -m tools.faults              all faults, and all tests that see them

A fault of tests/faults.toml is a file, text that is in it exactly once, and what replaces it. It is
planted in a copy of the checkout. There run the tests of its module, those marked more after the
others, then those of its room, and of rooms that import the module. A test that fails sees it,
unless it fails in a copy without the fault, too. A fault that no test sees is an error.

A whole run takes many hours. It writes the tests that see a fault to tests/faults_seen.json after
each fault, and a later run goes on with those that are not there. A test may be deleted if it sees
at least one fault, and other tests see all of its faults.
"""

import argparse
import ast
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE, SEEN = Path("tests/faults.toml"), Path("tests/faults_seen.json")
_SHORT, _MORE = "not slow and not more", "more and not slow"  # pytest's -m
LIMIT_S = 3600  # for the tests of a room: a fault may let ranks wait for each other forever
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)
_PASSED, _NONE_CHOSEN = 0, 5  # exit statuses of pytest


@dataclass(frozen=True)
class Fault:
    """`old` in `file` becomes `new`. name: the file, and what breaks."""

    name: str
    file: str
    old: str
    new: str

    def problem(self, root: Path) -> str | None:
        """Return why it does not fit the code; None if it does."""
        path = root / self.file
        count = path.read_text().count(self.old) if path.is_file() else 0
        if count != 1:
            return f"{TABLE}: {self.name}: its text is {count} times in the file; expected once"
        if self.old == self.new:
            return f"{TABLE}: {self.name}: old and new are equal; expected a change"
        return None

    def plant(self, root: Path) -> None:
        """Change the file in the checkout at `root`."""
        path = root / self.file
        path.write_text(path.read_text().replace(self.old, self.new))


def read_table(root: Path = ROOT) -> list[Fault]:
    """Return the faults of the table, in its order."""
    table = tomllib.loads((root / TABLE).read_text())
    return [
        Fault(f"{file}: {entry['fault']}", file, entry["old"], entry["new"])
        for file, entries in table.items()
        for entry in entries
    ]


# --- which tests ----------------------------------------------------------------------------------


def rooms_above(file: str, root: Path = ROOT) -> list[str]:
    """Return the rooms of modules that import `file`, directly or not, sorted. A room is a folder
    of the package, "" its top level.
    """
    paths = [path.relative_to(root) for path in (root / "shardcore").rglob("*.py")]
    imports = {path: set(_imported(path, root)) for path in paths}
    above = {Path(file)}
    while more := {path for path, used in imports.items() if used & above} - above:
        above |= more
    return sorted({_room(path) for path in above - {Path(file)}})


def _imported(path: Path, root: Path) -> Iterator[Path]:
    """Yield the files of the package that a file imports."""
    if path == Path("shardcore/__init__.py"):
        return  # it gives users the names of all rooms, and is above none
    for node in ast.walk(ast.parse((root / path).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardcore."):
            module = Path(*str(node.module).split("."))
            for name in (module, *(module / alias.name for alias in node.names)):
                yield name.with_suffix(".py")
                yield name / "__init__.py"


def _room(path: Path) -> str:
    return "/".join(path.parts[1:-1])


def tests_of(file: str, root: Path) -> list[tuple[str, list[str]]]:
    """Return what pytest is given (marks, files), likeliest to fail first: the tests of a module,
    the others of its room, and those of rooms above.
    """
    path = Path(file)
    room = _test_files([_room(path)], root)
    own = [test for test in room if re.match(rf"test_{path.stem}(_|\.)", Path(test).name)]
    others = [test for test in room if test not in own]
    above = _test_files([other for other in rooms_above(file, root) if other != _room(path)], root)
    runs = [(_SHORT, own), (_MORE, own), (_SHORT, others), (_SHORT, above)]
    return [(marks, tests) for marks, tests in runs if tests]


def _test_files(rooms: Iterable[str], root: Path) -> list[str]:
    folders = [root / "tests" / room for room in rooms]
    return [str(f.relative_to(root)) for d in folders for f in sorted(d.glob("test_*.py"))]


# --- a run ----------------------------------------------------------------------------------------


def run(fault: Fault, stop_at_first: bool, root: Path = ROOT) -> list[str]:
    """Plant a fault in a copy of the checkout at `root`, and return the tests that see it."""
    failed: list[str] = []
    with _copy_of(root) as copy:
        fault.plant(copy)
        for marks, tests in tests_of(fault.file, root):
            failed += _failures(copy, marks, tests, stop_at_first)
            if failed and stop_at_first:
                break
    named = [test for test in failed if "::" in test]
    with _copy_of(root) as copy:
        anyway = _failures(copy, "", named, False) if named else []
    return [test for test in failed if test not in anyway]


@contextmanager
def _copy_of(checkout: Path) -> Iterator[Path]:
    """Copy the files that git does not ignore, and the built extension, for as long as the context
    lasts.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True)
    built = [str(path.relative_to(checkout)) for path in (checkout / "shardcore").glob("_C.*")]
    with tempfile.TemporaryDirectory(prefix="shardcore-fault-") as folder:
        for name in {*listed.stdout.split("\0")[:-1], *built}:
            if (checkout / name).is_file():
                to = Path(folder, name)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(checkout / name, to)
        yield Path(folder)


def _failures(root: Path, marks: str, tests: Sequence[str], stop_at_first: bool) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-m", marks]
    with subprocess.Popen(
        [*command, *(["-x"] if stop_at_first else []), *tests],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return [f"{tests[0]}, or a file after it, does not end"]
        finally:
            with suppress(ProcessLookupError):  # what is left of it, and of the ranks it started
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode in (_PASSED, _NONE_CHOSEN):
        return []
    return _FAILED.findall(output) or [f"pytest itself: exit status {process.returncode}"]


def sample_of(faults: Sequence[Fault], share: int, day: int) -> list[Fault]:
    """Return every `share`-th fault; in `share` days each fault once."""
    return list(faults[day % share :: share])


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line on the checkout at `root`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--sample", type=int, metavar="N")
    given = parser.parse_args(arguments)
    table = read_table(root)
    problems = [problem for fault in table if (problem := fault.problem(root))]
    if problems or given.check:
        print("\n".join(problems) or f"faults: {len(table)} fit the code")
        return 1 if problems else 0
    faults = [fault for fault in table if given.only in fault.name]
    if given.sample:
        faults = sample_of(faults, given.sample, datetime.date.today().toordinal())
    unseen = _run_some(faults, root) if given.only or given.sample else _run_all(faults, root)
    for fault in unseen:
        print(f"no test sees {fault.name}; expected one that fails")
    print(f"faults: {len(faults)} planted, {len(unseen)} not seen")
    return 1 if unseen else 0


def _run_some(faults: Iterable[Fault], root: Path) -> list[Fault]:
    """Return the faults that no test sees."""
    unseen = []
    for fault in faults:
        seen = run(fault, True, root)
        print(fault.name, *seen, sep="\n    ", flush=True)
        unseen += [] if seen else [fault]
    return unseen


def _run_all(faults: Sequence[Fault], root: Path) -> list[Fault]:
    """Write which tests see each fault, of those not written yet; return those that none sees."""
    path = root / SEEN
    written = json.loads(path.read_text()) if path.is_file() else {}
    seen = {fault.name: written[fault.name] for fault in faults if fault.name in written}
    for fault in faults:
        if fault.name not in seen:
            seen[fault.name] = run(fault, False, root)
            path.write_text(json.dumps(seen, indent=1) + "\n")
            print(f"{len(seen[fault.name])} tests see {fault.name}", flush=True)
    return [fault for fault in faults if not seen[fault.name]]


if __name__ == "__main__":
    sys.exit(main())
