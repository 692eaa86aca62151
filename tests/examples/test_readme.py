"""The Python examples of the README, which are one script, as its section "Use" says."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]


def test_examples_run_over_two_ranks(tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    script = tmp_path / "train.py"
    script.write_text("\n".join(blocks))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
