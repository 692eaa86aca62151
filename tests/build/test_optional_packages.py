"""The test suite on a machine that lacks optional packages: every file can be collected, and
says what it skips.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    "torchao",
    "transformers",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "safetensors",
    "peft",
    "trl",
    "ray",
    "verl",
)


def users_of_optional_packages():
    """Test files that import one, or a helper that does. (To collect all files takes half a
    minute.)
    """
    imports = re.compile(rf"(import |from |importorskip\(.)({'|'.join(OPTIONAL)})\b")
    helpers = [
        path.stem
        for path in (ROOT / "tests/support").glob("*.py")
        if imports.search(path.read_text())
    ]
    uses = re.compile(
        imports.pattern + rf"|support(\.| import .*)\b({'|'.join(helpers) or 'none'})\b"
    )
    return [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if uses.search(path.read_text())
    ]


@pytest.mark.more
def test_every_test_file_is_collected_without_optional_packages(tmp_path):
    for name in OPTIONAL:
        (tmp_path / f"{name}.py").write_text(
            f"raise ModuleNotFoundError('none here', name={name!r})\n"
        )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *users_of_optional_packages(),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for reason in (
        "property tests need hypothesis",
        "torch.testing._internal needs expecttest",
        "real architectures need transformers",
    ):
        assert reason in done.stdout
