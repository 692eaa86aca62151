"""What setup.py does without torch: the sdist, which holds the whole checkout, and cleaning,
unless something is built, too.
"""

import shutil
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD_OUTPUTS = (
    "shardcore/_C.cpython-311-x86_64-linux-gnu.so",
    "shardcore/_C.build.json",
    "tests/__pycache__/ranks.cpython-311.pyc",
)

pytestmark = pytest.mark.skipif(
    find_spec("setuptools") is None, reason="setuptools is not installed for this Python"
)


def setup(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py in a folder, in a Python where torch cannot be imported."""
    (folder / "torch.py").write_text("raise ImportError('torch is not for this')\n")
    command = [sys.executable, "setup.py", "-q", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.more
def test_sdist_holds_what_git_tracks(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if not listed.stdout:  # no repository, or another one around this tree
        pytest.skip("this is not a git checkout")
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    for name in tracked:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in BUILD_OUTPUTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    made = setup(tmp_path, "sdist", "--formats", "tar", "--dist-dir", "out")
    assert made.returncode == 0, made.stderr
    # each becomes an error of some later setuptools
    assert "SetuptoolsDeprecationWarning" not in made.stderr
    with tarfile.open(next((tmp_path / "out").iterdir())) as archive:
        info = next(
            member
            for member in archive
            if member.name.count("/") == 1 and member.name.endswith("/PKG-INFO")
        )
        metadata = archive.extractfile(info).read()
        assert b"\nLicense: Apache-2.0\n" in metadata
        assert b"\nRequires-Dist: torch>=2.11\n" in metadata
        inside = {member.name.partition("/")[2] for member in archive if member.isfile()}
    added = {
        name
        for name in inside
        if name in ("PKG-INFO", "setup.cfg") or name.startswith("shardcore.egg-info/")
    }
    assert inside - added == tracked


def test_clean_alone_needs_no_torch_but_a_build_beside_it_does(tmp_path):
    for name in (
        "setup.py",
        "pyproject.toml",
        "README.md",
        "tools/__init__.py",
        "tools/build_config.py",
        "shardcore/version.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    cleaned = setup(tmp_path, "clean")
    assert cleaned.returncode == 0, cleaned.stderr
    built = setup(tmp_path, "clean", "build_ext", "--inplace")
    assert built.returncode != 0
    assert "torch is not for this" in built.stderr
