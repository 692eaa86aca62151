"""The documentation site is built from good pages, and refused for a link, an anchor or a page
that is wrong.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "docs-venv"
FAULTS = {  # by what is written at the end of a page: what mkdocs says of it
    "[no page](nowhere.md)\n": "nowhere.md",
    "[no anchor](memory.md#nowhere)\n": "#nowhere",
    "[no file](../examples/nowhere.py)\n": "../examples/nowhere.py",
    "![from elsewhere](https://example.com/a.png)\n": "expected nothing from another host",
    "A list\n- without an empty line before it\n": "expected an empty line",
}


def build(root):
    command = [VENV / "bin" / "python", "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not (VENV / "packages").exists(), reason="mkdocs is not there: run make docs first"
)
def test_what_is_wrong_with_a_page_is_found(tmp_path):
    for name in ("docs", "benchmarks", "examples", "tools", ".github"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for path in (*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "mkdocs.yml"):
        shutil.copy(path, tmp_path)
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    # a page that shows a file
    assert (tmp_path / "build" / "site" / "examples" / "cluster" / "slurm.sbatch.html").exists()
    page = tmp_path / "docs" / "install.md"
    good = page.read_text()
    for fault, said in FAULTS.items():
        page.write_text(f"{good}\n{fault}")
        done = build(tmp_path)
        assert done.returncode != 0, fault
        assert said in done.stderr, done.stderr
