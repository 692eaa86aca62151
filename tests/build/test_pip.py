"""pip install without --no-build-isolation stops at once and says what to add; a wheel's
requirements. Builds nothing.
"""

import shutil
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

# Not find_spec("pip"): asked for pip, setuptools removes its distutils and cannot be imported
# afterwards.
HAS_PIP = any(distributions(name="pip"))
pytestmark = pytest.mark.skipif(not HAS_PIP, reason="pip is not installed for this Python")


@pytest.fixture
def checkout(tmp_path):
    """The files that a build reads, without sources: a build that went on would fail in another
    way.
    """
    for name in (
        "setup.py",
        "pyproject.toml",
        "README.md",
        "csrc/flags.txt",
        # without it, tools of a checkout on PYTHONPATH (make test) would come first
        "tools/__init__.py",
        "tools/build_config.py",
        "tools/build_backend.py",
        "shardcore/version.py",
    ):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, target)
    return tmp_path


def test_isolated_build_stops_and_says_what_to_add(checkout):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-index",
        "--no-deps",
        "--disable-pip-version-check",
    ]
    command += ["-w", str(checkout / "out"), str(checkout)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "isolated build environment" in result.stdout + result.stderr
    assert (
        "add --no-build-isolation: pip install --no-build-isolation -e ."
        in result.stdout + result.stderr
    )
    assert not (checkout / "out").exists() or not list((checkout / "out").iterdir())


@pytest.mark.more
@pytest.mark.skipif(
    find_spec("setuptools") is None, reason="setuptools is not installed for this Python"
)
def test_a_wheel_requires_the_torch_that_it_is_built_against(checkout):
    shutil.copytree(ROOT / "csrc", checkout / "csrc", dirs_exist_ok=True)
    code = (
        "import sys; sys.path.insert(0, 'tools'); import build_backend\n"
        "print(build_backend.prepare_metadata_for_build_wheel('out'))\n"
    )
    (checkout / "out").mkdir()
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    metadata = (checkout / "out" / made.stdout.splitlines()[-1] / "METADATA").read_text()
    required = [
        line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Requires-Dist:")
    ]
    assert [line for line in required if "extra ==" not in line] == [
        f"torch=={torch.__version__.split('+')[0]}"
    ]
