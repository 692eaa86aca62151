"""The scripts around the checks: .ci/run knows its parts, and tools/lint.sh shows clang-format
every C++ file.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tools.check_includes import CPP_SUFFIXES, SOURCE_FOLDERS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("names", [["typo"], ["--help"]])
def test_unknown_part_is_refused_with_the_names(names):
    done = subprocess.run(
        ["bash", ".ci/run", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    known = re.fullmatch(
        rf"\.ci/run: argument has {names[0]}; expected parts of: (.*) \(none: all of them\)\n",
        done.stderr,
    )
    assert known
    assert known[1].split() == re.findall(
        r'^part ".*" (\w+)\b', (ROOT / ".ci/run").read_text(), re.MULTILINE
    )


def test_clang_format_sees_every_file(tmp_path):
    seen = tmp_path / "seen"
    formatter = tmp_path / "clang-format"
    formatter.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>{seen}\n')
    formatter.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "true"}
    done = subprocess.run(
        ["bash", "tools/lint.sh"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    sources = {
        str(path.relative_to(ROOT))
        for folder in SOURCE_FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in CPP_SUFFIXES
    }
    assert len(sources) > 50
    assert sources <= set(seen.read_text().splitlines())
