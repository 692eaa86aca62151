"""The test suite on a machine that lacks optional packages: every file can be collected, and says what it skips."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tests.conftest

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = (
    "hypothesis",
    "expecttest",
    "pydantic",
    "matplotlib",
    "rich",
    "apex",
    "deepspeed",
    "bitsandbytes",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "safetensors",
    "peft",
    "trl",
    "ray",
)


def users_of_optional_packages():
    """Test files that import one, or a helper that does. (To collect all files takes half a minute.)"""
    imports = re.compile(rf"(import |from |importorskip\(.)({'|'.join(OPTIONAL)})\b")
    helpers = [path.stem for path in (ROOT / "tests/support").glob("*.py") if imports.search(path.read_text())]
    uses = re.compile(imports.pattern + rf"|support(\.| import .*)\b({'|'.join(helpers) or 'none'})\b")
    return [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if uses.search(path.read_text())]


@pytest.mark.more
def test_every_test_file_is_collected_without_optional_packages(tmp_path):
    for name in OPTIONAL:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('none here', name={name!r})\n")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *users_of_optional_packages()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for reason in (
        "property tests need hypothesis",
        "torch.testing._internal needs expecttest",
        "real architectures need transformers",
    ):
        assert reason in done.stdout


class Item:
    """Stands in for a test."""

    nodeid = "tests/test_it.py::test_it"

    def __init__(self, marked):
        self.marked, self.markers = marked, []

    def getparent(self, kind):
        return None

    def get_closest_marker(self, name):
        return pytest.mark.gpu if name == "gpu" and self.marked else None

    def add_marker(self, marker):
        self.markers.append(marker)


@pytest.mark.parametrize(
    ("available", "cuda", "reason"),
    [(False, "", "no GPU"), (False, "13.0", "no GPU"), (True, "", "this build has no CUDA"), (True, "13.0", None)],
)
def test_tests_marked_gpu_say_what_is_missing(monkeypatch, available, cuda, reason):
    from shardcore._native import _C

    monkeypatch.setattr(tests.conftest.torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(_C, "build_info", lambda: {"cuda": cuda})
    items = [Item(marked=False), Item(marked=True)]
    tests.conftest.pytest_collection_modifyitems(items)
    assert items[0].markers == []
    assert [marker.kwargs["reason"] for marker in items[1].markers] == ([reason] if reason else [])
