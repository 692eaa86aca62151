"""Faults are planted where the table says, and a run tells which tests see them."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tools import faults
from tools.faults import ROOT, Fault, main, read_table, rooms_above, sample_of

WRONG_SIGN = Fault("shardcore/sums.py: a wrong sign", "shardcore/sums.py", "a + b", "a - b")


@pytest.fixture
def checkout(tmp_path):
    """A small checkout, of which `write` adds a file: `sums` is below `parts/twice`, `user` above
    both.
    """

    def write(path: str, text: str) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    write("shardcore/__init__.py", "from shardcore.user import six\n")
    write("shardcore/sums.py", "def add(a, b):\n    return a + b\n\n\ndef name(a, b):\n    pass\n")
    write("shardcore/parts/__init__.py", "")
    write("shardcore/parts/twice.py", "from shardcore.sums import add\n")
    write("shardcore/parts/alone.py", "import math\n")
    write("shardcore/users/__init__.py", "")
    write("shardcore/users/six.py", "from shardcore.parts import twice\n")
    write("shardcore/user.py", "from shardcore.users.six import twice as six\n")
    for path in ("sums", "sums_negative", "user", "parts/twice", "users/six", "support/help"):
        folder, _, name = path.rpartition("/")
        write(f"tests/{folder}/test_{name}.py", "def test_nothing():\n    pass\n")
    return write


def table(*entries: str) -> str:
    head = '[["shardcore/sums.py"]]\nfault = '
    return "\n".join(head + entry for entry in entries)


SEEN = '"a wrong sign"\nold = "a + b"\nnew = "a - b"\n'
UNSEEN = '"another name"\nold = "def name(a, b)"\nnew = "def name(b, a)"\n'


def test_the_table_is_read_in_its_order(checkout):
    root = checkout("tests/faults.toml", table(SEEN, UNSEEN))
    found = read_table(root)
    assert found[0] == WRONG_SIGN
    assert [fault.name for fault in found] == [
        "shardcore/sums.py: a wrong sign",
        "shardcore/sums.py: another name",
    ]


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("a + b", "a - b", None),
        ("a * b", "a - b", "its text is 0 times in the file; expected once"),
        ("(a, b)", "(b, a)", "its text is 2 times in the file; expected once"),
        ("a + b", "a + b", "old and new are equal; expected a change"),
    ],
)
def test_a_fault_has_to_fit_the_code(checkout, old, new, problem):
    root = checkout("tests/faults.toml", "")
    found = Fault("sums: a fault", "shardcore/sums.py", old, new).problem(root)
    assert found == (None if problem is None else f"tests/faults.toml: sums: a fault: {problem}")


def test_a_fault_of_a_file_that_is_gone_does_not_fit(checkout):
    root = checkout("tests/faults.toml", "")
    assert "0 times" in Fault("gone: a fault", "shardcore/gone.py", "a", "b").problem(root)


def test_rooms_above_a_module_are_those_that_import_it_directly_or_not(checkout):
    root = checkout("tests/faults.toml", "")
    assert rooms_above("shardcore/sums.py", root) == ["", "parts", "users"]
    assert rooms_above("shardcore/parts/twice.py", root) == ["", "users"]
    assert rooms_above("shardcore/users/six.py", root) == [""]
    assert rooms_above("shardcore/user.py", root) == []
    assert rooms_above("shardcore/parts/alone.py", root) == []


def test_tests_of_a_module_run_first_then_its_room_then_rooms_above(checkout):
    root = checkout("tests/faults.toml", "")
    short, more, top = "not slow and not more", "more and not slow", ["tests/test_user.py"]
    sums = ["tests/test_sums.py", "tests/test_sums_negative.py"]
    assert faults.tests_of("shardcore/sums.py", root) == [
        (short, sums),
        (more, sums),
        (short, top),
        (short, ["tests/parts/test_twice.py", "tests/users/test_six.py"]),
    ]
    assert faults.tests_of("shardcore/parts/twice.py", root) == [
        (short, ["tests/parts/test_twice.py"]),
        (more, ["tests/parts/test_twice.py"]),
        (short, [*sums, *top, "tests/users/test_six.py"]),
    ]


def test_samples_of_some_days_have_each_fault_once():
    table = [Fault(str(number), "", "", "") for number in range(19)]
    samples = [sample_of(table, 8, day) for day in range(100, 108)]
    assert sorted(map(len, samples)) == [2, 2, 2, 2, 2, 3, 3, 3]
    assert Counter(fault.name for sample in samples for fault in sample) == Counter(
        fault.name for fault in table
    )


TEST = "from shardcore.sums import add\n"


@pytest.fixture
def tested(checkout):
    """The checkout with a table of two faults, of which its tests see the first."""
    checkout("shardcore/__init__.py", "")
    checkout("pyproject.toml", '[tool.pytest.ini_options]\nmarkers = ["slow", "more"]\n')
    checkout("tests/test_sums.py", TEST + "def test_add():\n    assert add(1, 2) == 3\n")
    six = "from shardcore.sums import add\n\ndef test_six():\n    assert add(3, 3) == 6\n"
    checkout("tests/users/test_six.py", six)
    return checkout("tests/faults.toml", table(SEEN, UNSEEN))


def test_a_fault_that_a_test_sees_is_no_error(tested, capsys):
    assert main(["--only", "wrong sign"], tested) == 0
    assert capsys.readouterr().out.splitlines() == [
        "shardcore/sums.py: a wrong sign",
        "    tests/test_sums.py::test_add",
        "faults: 1 planted, 0 not seen",
    ]
    assert "a + b" in (tested / "shardcore/sums.py").read_text()


def test_a_whole_run_writes_every_test_that_sees_a_fault_and_goes_on_where_it_ended(
    tested, capsys, monkeypatch
):
    assert main([], tested) == 1
    out = capsys.readouterr().out
    assert "no test sees shardcore/sums.py: another name; expected one that fails" in out
    seen = json.loads((tested / faults.SEEN).read_text())
    assert seen == {
        "shardcore/sums.py: a wrong sign": [
            "tests/test_sums.py::test_add",
            "tests/users/test_six.py::test_six",
        ],
        "shardcore/sums.py: another name": [],
    }
    monkeypatch.setattr(faults, "run", lambda *_: pytest.fail("it has a result"))
    assert main([], tested) == 1


def test_a_fault_that_lets_tests_wait_forever_is_seen(tested, monkeypatch):
    (tested / "tests/test_sums.py").write_text(
        TEST + "def test_add():\n    while add(1, 2) != 3:\n        pass\n"
    )
    monkeypatch.setattr(faults, "LIMIT_S", 3)
    assert faults.run(WRONG_SIGN, True, tested) == [
        "tests/test_sums.py, or a file after it, does not end"
    ]


def test_a_test_that_fails_without_the_fault_does_not_see_it(tested):
    (tested / "tests/test_sums.py").write_text("def test_add():\n    assert False\n")
    assert faults.run(WRONG_SIGN, False, tested) == ["tests/users/test_six.py::test_six"]
    assert faults.run(WRONG_SIGN, True, tested) == []


def test_check_runs_no_test_and_names_what_does_not_fit(tested, capsys, monkeypatch):
    monkeypatch.setattr(faults, "run", lambda *_: pytest.fail("a check plants nothing"))
    assert main(["--check"], tested) == 0
    (tested / "shardcore/sums.py").write_text("def name(a, b):\n    pass\n")
    assert main(["--check"], tested) == 1
    assert "a wrong sign: its text is 0 times" in capsys.readouterr().out


def test_each_room_has_at_least_five_faults():
    folders = {path.parent for path in (ROOT / "shardcore").rglob("*.py") if path.stat().st_size}
    rooms = {
        folder.relative_to(ROOT).as_posix() for folder in folders if "stand_in" not in str(folder)
    }
    counts = Counter(Path(fault.file).parent.as_posix() for fault in read_table())
    assert {room: counts[room] for room in rooms if counts[room] < 5} == {}
