"""Hostfiles, --include and --exclude: what DeepSpeed's launcher makes of them, and clear errors
for the rest.
"""

from pathlib import Path

import pytest

from shardcore.launch.hosts import read_hostfile, select, trim

POOL = {"w0": [0, 1, 2, 3], "w1": [0, 1, 2, 3], "w2": [0, 1]}
FILTERS = [
    ("", "", POOL),
    ("w1", "", {"w1": [0, 1, 2, 3]}),
    ("w1:2,0@w0:3", "", {"w0": [3], "w1": [0, 2]}),
    ("w1:1@w1:0,1", "", {"w1": [0, 1]}),
    ("", "w1", {"w0": [0, 1, 2, 3], "w2": [0, 1]}),
    ("", "w0:0,3@w2:0,1", {"w0": [1, 2], "w1": [0, 1, 2, 3]}),
]


@pytest.mark.parametrize(("include", "exclude", "expected"), FILTERS)
def test_filters(include: str, exclude: str, expected: dict[str, list[int]]) -> None:
    slots = select(POOL, include, exclude)
    assert slots == expected
    assert list(slots) == list(expected), "ranks are in the hostfile's order"


@pytest.mark.slow
def test_filters_are_those_of_deepspeed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    runner = pytest.importorskip(
        "deepspeed.launcher.runner", reason="compares with DeepSpeed's launcher"
    )
    pool = {host: len(slots) for host, slots in POOL.items()}
    for include, exclude, expected in FILTERS:
        assert dict(runner.parse_inclusion_exclusion(pool, include, exclude)) == expected
    lines = ["w0 slots=4\n", "# no\n", "\n", "  w1   slots=2\n"]
    path = tmp_path / "hosts"
    path.write_text("".join(lines))
    assert dict(runner.fetch_hostfile(str(path))) == {
        host: len(slots) for host, slots in read_hostfile(path).items()
    }


@pytest.mark.parametrize(
    ("include", "exclude", "text"),
    [
        ("w9", "", "--include names the host 'w9'; expected one of w0, w1, w2"),
        ("", "w2:2", "--exclude names slot 2 of w2; expected one of 0 to 1"),
        ("w0:a", "", "--include has 'w0:a'; expected HOST or HOST:SLOT,SLOT"),
        ("w0:", "", "--include has 'w0:'"),
        ("w0", "w1", "--include and --exclude are both given"),
        ("", "w0@w1@w2", "leaves nothing of w0 (4 slots), w1"),
    ],
)
def test_filters_that_name_what_is_not_there(include: str, exclude: str, text: str) -> None:
    with pytest.raises(ValueError) as error:
        select(POOL, include, exclude)
    assert text in str(error.value)


def test_trim() -> None:
    assert trim(POOL, None, None) == POOL
    assert trim(POOL, 2, 3) == {"w0": [0, 1, 2], "w1": [0, 1, 2]}
    with pytest.raises(ValueError, match="--num_nodes is 4 but there are 3 hosts: w0"):
        trim(POOL, 4, None)
    with pytest.raises(ValueError, match="--num_gpus is 3 but w2 has 2 slots"):
        trim(POOL, None, 3)


def test_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("w0 slots=4  # the first\n\n# a comment\n  me@w1   slots=2\n")
    slots = read_hostfile(path)
    assert slots == {"w0": [0, 1, 2, 3], "me@w1": [0, 1]}
    for line, text in [
        ("w0", "line 2 of .* is 'w0'; expected HOST slots=N"),
        ("w0 slots=0", "with N above 0"),
        ("w1 slots=2", "has w1 again"),
        ("-oProxyCommand=x slots=1", "expected a name"),
    ]:
        path.write_text(f"w1 slots=1\n{line}\n")
        with pytest.raises(ValueError, match=text):
            read_hostfile(path)
    path.write_text("# nothing\n")
    with pytest.raises(ValueError, match="has no host"):
        read_hostfile(path)
    with pytest.raises(OSError, match="absent"):
        read_hostfile(tmp_path / "absent")
