"""The C++ tests of the torch-free core (tests/cpp), built with CMake and run by CTest, as one
test of this suite.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
JOBS = str(len(os.sched_getaffinity(0)))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository root; ninja may come from this Python's environment."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def skip_or_fail(reason: str) -> None:
    """Skip on a machine that lacks a tool; in CI, which installs them, that is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.mark.slow  # two minutes to compile; .ci/run has them under sanitizers
def test_ctest():
    if shutil.which("cmake") is None:
        skip_or_fail("cmake is not installed (apt-get install cmake)")
    configured = run("cmake", "--preset", "cpu")
    output = configured.stdout + configured.stderr
    if configured.returncode and re.search(r"GTest|GoogleTest", output):
        skip_or_fail("GoogleTest is not installed (apt-get install libgtest-dev)")
    if configured.returncode and "CMAKE_MAKE_PROGRAM" in output:
        skip_or_fail("ninja is not installed (apt-get install ninja-build)")
    assert configured.returncode == 0, output
    built = run("cmake", "--build", "--preset", "cpu", "-j", JOBS)
    assert built.returncode == 0, built.stdout[-8000:] + built.stderr
    tested = run("ctest", "--preset", "cpu", "-j", JOBS)
    assert tested.returncode == 0, tested.stdout[-8000:] + tested.stderr
    assert re.search(r"100% tests passed, 0 tests failed out of [1-9]", tested.stdout)
