"""tools/check_ranks.py over gloo ranks, and over a stand-in for NCCL: what it finds equal, and that it finds what is not."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.support.groups import as_on_nccl
from tests.support.ranks import run_ranks
from tests.support.scripts import finished, torchrun
from tools import check_ranks

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


def _hashes_as_on_nccl(rank: int, world_size: int) -> dict[str, list[str]]:
    device = torch.device("cpu")
    found: dict[str, list[str]] = {}
    with as_on_nccl():
        for order, _, layout in check_ranks.layouts(world_size, 2):
            found.setdefault(order, []).append(check_ranks.run(device, layout))
        found["flat"].append(check_ranks.two_at_once(device))
    return found


@pytest.mark.slow
def test_one_hash_over_layouts_on_groups_that_are_taken_for_nccl() -> None:
    """Gloo's collectives run in the order in which they are started, as NCCL's do, over groups of the levels."""
    first, *others = run_ranks(4, _hashes_as_on_nccl)
    assert all(found == first for found in others)
    assert [len(first[order]) for order in ("flat", "nodes")] == [21, 9]
    assert [len(set(first[order])) for order in ("flat", "nodes")] == [1, 1]
    assert first["flat"][0] != first["nodes"][0]
