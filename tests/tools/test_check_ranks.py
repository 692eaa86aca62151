"""tools/check_ranks.py over gloo ranks, and over the stand-in for NCCL: what it finds equal, and
that it finds what is not.
"""

import json
from pathlib import Path

import pytest

from tests.support.scripts import run_forked

# The tool with a small model.
SMALL = """
import sys, shardcore
from tools import check_ranks
check_ranks.WIDTH, check_ranks.DEPTH, check_ranks.STEPS = 64, 4, 2
"""
# At stage 2 alone the learning rate is another one.
BROKEN = """
real = shardcore.shard
def shard(model, optimizer, **options):
    for group in optimizer.param_groups:
        group["lr"] *= 1.0 + (options["stage"] == 2)
    return real(model, optimizer, **options)
shardcore.shard = shard
"""


def script(folder: Path, more: str = "") -> Path:
    (folder / "small.py").write_text(SMALL + more + "sys.exit(check_ranks.main())\n")
    return folder / "small.py"


@pytest.mark.more
def test_layouts_that_have_other_bits_are_named(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--only", ", offload", "--sizes", "1", "--out", str(tmp_path)]
    run_forked(script(tmp_path, BROKEN), *options, ranks=2, folder=tmp_path, status=1)
    result = json.loads((tmp_path / "ranks.json").read_text())
    names = {
        f"stage {stage}, offload{more}" for stage in (1, 2, 3) for more in ("", ", overlapped")
    }
    assert set(result["hashes"]["flat"]) == names
    assert len(set(result["hashes"]["flat"].values())) == 2
    assert {problem.partition(":")[0] for problem in result["problems"]} == {
        "stage 2, offload",
        "stage 2, offload, overlapped",
    }


@pytest.mark.more
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_one_hash_over_all_layouts_on_groups_that_behave_as_nccl(
    ranks: int, tmp_path: Path
) -> None:
    options = ["--device", "cpu", "--standin", "--sizes", "1", "--out", str(tmp_path)]
    run_forked(script(tmp_path), *options, ranks=ranks, folder=tmp_path, timeout_s=900)
    result = json.loads((tmp_path / "ranks.json").read_text())
    assert result["over"] == "nccl_standin"
    hashes = {order: list(found.values()) for order, found in result["hashes"].items()}
    assert {order: len(found) for order, found in hashes.items()} == (
        {"flat": 22} if ranks == 2 else {"flat": 26, "nodes": 26}
    )
    assert all(len(set(found)) == 1 for found in hashes.values())
    assert len({found[0] for found in hashes.values()}) == len(hashes)


@pytest.mark.more
def test_ranks_are_told_that_one_left_out_a_backward(tmp_path: Path) -> None:
    """Where one waits for a GPU's collective, and the other for the host's."""
    options = ["--device", "cpu", "--standin", "--leave-out-backward"]
    printed = run_forked("tools.check_ranks", *options, ranks=2, folder=tmp_path)
    assert printed.count("rank 1 for a step") == 2
