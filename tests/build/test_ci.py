"""The scripts around the checks: the parts that .ci/run runs and skips; tools/lint.sh shows
clang-format every C++ file.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.check_includes import CPP_SUFFIXES, SOURCE_FOLDERS

ROOT = Path(__file__).resolve().parents[2]


EVERY_CHANGE = ["packages", "tests", "lint", "cpp_asan", "cuda_build", "docs"]
ASAN, CUDA = "C++ tests with asan", "CUDA build against torch 2.11.0"
# Stands for each program that .ci/run calls: writes down its name and arguments. FAIL: a pattern of
# calls that fail.
STUB = """#!/bin/bash
call="${0##*/} $*"
echo "$call" >>"$CALLS"
case $call in
  *"-m venv"*) mkdir -p "${@: -1}/bin" "${@: -1}/lib/python3/site-packages" && cp "$0" "${@: -1}/bin/python" ;;
  "make test"*) echo "=== 7 passed in 1.00s ===" ;;
  *"pip install"*"-e .") echo "filename=shardcore-0_built_for_CPU_because_of_this_test.whl" ;;
esac
[[ -z ${FAIL:-} || $call != *$FAIL* ]]
"""


@pytest.mark.parametrize("names", [["typo"], ["--help"], ["nightly", "lint"]])
def test_unknown_part_is_refused_with_the_names(names):
    done = subprocess.run(
        ["bash", ".ci/run", *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    known = re.fullmatch(
        rf"\.ci/run: argument has {names[0]}; expected nightly alone, or parts of: (.*) \(none: "
        rf"(.*) \)\n",
        done.stderr,
    )
    assert known
    calls = re.findall(
        r'^(?:cpp_)?part "[^"]*" (\w+)\b', (ROOT / ".ci/run").read_text(), re.MULTILINE
    )
    assert sorted(known[1].split()) == sorted(calls)
    assert known[2].split() == EVERY_CHANGE


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A folder with .ci/run and a C++ file, beside programs that stand for those that it calls."""
    programs = (
        "make",
        "cmake",
        "ctest",
        "git",
        "nvcc",
        "g++",
        "apt-get",
        "sudo",
        "dpkg-query",
        "python3",
    )
    root = tmp_path / "checkout"
    for name in programs:
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(STUB)
        stub.chmod(0o755)
    for folder in (".ci", "csrc", "build"):
        (root / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", root / ".ci/run")
    (root / "csrc/adam.cpp").write_text("int adam();\n")
    (root / "build/python").write_text("python3\n")
    return root


@pytest.fixture
def ci(checkout, tmp_path) -> Callable[..., tuple[int, str, list[str]]]:
    """Run the checkout's .ci/run with these arguments: its exit status, its output, and what it
    called.
    """

    def run(*names: str, cache: str = "cache", fail: str = "") -> tuple[int, str, list[str]]:
        calls = tmp_path / "calls"
        calls.write_text("")
        environment = {
            "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
            "CALLS": str(calls),
            "FAIL": fail,
            "SHARDCORE_CI_CACHE": str(tmp_path / cache),
        }
        command = ["bash", ".ci/run", *names]
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, calls.read_text().splitlines()

    return run


def titles(output: str) -> list[str]:
    """The parts that a run began, those in the background last."""
    lines = re.findall(r"^=== (.*) ===$", output, re.MULTILINE)
    return [line for line in lines if not re.match(r"result|7 passed", line)]


def checks_cpp(calls: list[str]) -> tuple[bool, bool]:
    """Whether the C++ tests ran under asan, and whether the CUDA build's kernels were looked at."""
    return any("ctest --preset asan" in call for call in calls), any(
        "tools.check_kernels" in call for call in calls
    )


def test_what_every_change_must_pass(ci):
    code, output, calls = ci()
    assert code == 0, output
    assert sorted(titles(output)) == sorted(
        ["packages", "set-up and tests", "lint", ASAN, CUDA, "documentation"]
    )
    assert output.splitlines()[-2:] == ["parts: 6 passed, 0 failed", "=== 7 passed in 1.00s ==="]
    assert "make test" in calls
    assert checks_cpp(calls) == (True, True)


def test_nightly_runs_everything_and_skips_nothing(ci):
    for _ in range(2):
        code, output, calls = ci("nightly")
        assert code == 0, output
        assert "skipped" not in output
        assert checks_cpp(calls) == (True, True)
        marks = [call for call in calls if call.startswith("make test")]
        assert len(marks) == 3
        assert "-m 'more and not slow'" in marks[1]
        assert "-m slow" in marks[2]
        for preset in ("cpu", "asan", "tsan", "aarch64"):
            assert any(f"ctest --preset {preset} " in call for call in calls)
        left_out = re.findall(r"--ignore=(\S+)", marks[2])
        assert left_out
        for path in left_out:
            assert (ROOT / path).exists()
        for file in ("test_ray.py", "test_verl.py"):
            assert [call for call in calls if file in call and "pytest" in call]


def test_cpp_parts_are_skipped_only_where_the_same_files_have_passed(ci, checkout):
    ci()
    code, output, calls = ci()
    assert code == 0
    assert checks_cpp(calls) == (False, False)
    for title in (ASAN, CUDA):
        assert f"--- {title}: skipped" in output
        assert f"skipped, has passed with these files: {title}" in output
    assert "parts: 6 passed, 0 failed" in output
    assert checks_cpp(ci(cache="another")[2]) == (True, True)
    assert checks_cpp(ci("cpp_asan", "cuda_build")[2]) == (True, True)
    for changed in (
        "csrc/adam.cpp",
        "csrc/new.h",
        "setup.py",
        "CMakeLists.txt",
        "tests/cpp/new.cpp",
        "tools/build_config.py",
    ):
        path = checkout / changed
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("changed\n")
        assert checks_cpp(ci()[2]) == (True, True), changed
        assert checks_cpp(ci()[2]) == (False, False), changed


def test_a_failure_is_no_pass(ci):
    for _ in range(2):
        code, output, calls = ci(fail="ctest --preset asan")
        assert code == 1
        assert f"failed: {ASAN}" in output
        assert "parts: 5 passed, 1 failed" in output
        assert checks_cpp(calls)[0]


def test_the_nightly_workflow():
    yaml = pytest.importorskip("yaml", reason="reads the workflow")
    workflow = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    assert set(workflow[True]) == {"schedule", "workflow_dispatch"}  # YAML 1.1 reads `on` as true
    assert workflow["jobs"]["nightly"]["steps"][-1] == {"run": "bash .ci/run nightly"}


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
