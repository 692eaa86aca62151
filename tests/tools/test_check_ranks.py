"""tools/check_ranks.py over gloo ranks: what it finds equal, and that it finds what is not."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.scripts import finished, torchrun

# At stage 2 alone the learning rate is another one.
BROKEN = """
import sys, shardcore
from tools import check_ranks
real = shardcore.shard
def shard(model, optimizer, **options):
    for group in optimizer.param_groups:
        group["lr"] *= 1.0 + (options["stage"] == 2)
    return real(model, optimizer, **options)
shardcore.shard = shard
sys.exit(check_ranks.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_layouts_that_have_other_bits_are_named(broken: bool, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    program = [str(tmp_path / "broken.py")] if broken else ["-m", "tools.check_ranks"]
    options = ["--device", "cpu", "--only", ", offload", "--sizes", "1", "--out", str(tmp_path)]
    done = finished([sys.executable, *torchrun(2), *program, *options], tmp_path)
    assert (done.returncode != 0) == broken, done.stderr[-3000:]
    result = json.loads((tmp_path / "ranks.json").read_text())
    names = {f"stage {stage}, offload{more}" for stage in (1, 2, 3) for more in ("", ", overlapped")}
    assert set(result["hashes"]["flat"]) == names
    assert {problem.partition(":")[0] for problem in result["problems"]} == (
        {"stage 2, offload", "stage 2, offload, overlapped"} if broken else set()
    )
    assert (len(set(result["hashes"]["flat"].values())) == 1) != broken
