"""The benchmark of the ordered sum on the CPU: what it counts, its file, and sums that differ."""

import json

import pytest
import torch

from benchmarks import bench_ordered_sum
from benchmarks.device import Device
from shardcore._native import _C

QUICK = ["--device", "cpu", "--rounds", "2", "--repeats", "1", "--pause", "0", "--unit", "64K"]


def test_every_rank_owns_whole_blocks_of_the_unit():
    unit = bench_ordered_sum.UNIT["cuda"]
    assert [bench_ordered_sum.numel_of_rank(unit, ranks) for ranks in (8, 64, 256, 1024)] == [
        25297920,
        3162368,
        790784,
        197888,
    ]
    assert bench_ordered_sum.numel_of_rank(1, 8) == 256


@pytest.mark.more
def test_a_run_on_the_cpu(tmp_path, run_main):
    printed = run_main(bench_ordered_sum, *QUICK, "--ranks", "8", "1024", "--out", str(tmp_path))
    assert "1,024 pieces of 256 elements" in printed
    report = json.loads((tmp_path / "ordered_sum.json").read_text())
    assert (report["device"], [result["ranks"] for result in report["sums"]]) == ("cpu", [8, 1024])
    for result in report["sums"]:
        ours, theirs, bf16, _ = result["cases"]
        assert [case["engine"] for case in (ours, theirs, bf16)] == [
            "shardcore: fp32",
            "torch: fp32",
            "shardcore: bf16",
        ]
        assert (
            ours["moved_bytes"]
            == theirs["moved_bytes"]
            == result["numel"] * (4 * result["ranks"] + 4)
        )
        assert bf16["moved_bytes"] == result["numel"] * (2 * result["ranks"] + 4)
        assert all(
            len(case["seconds"]) == 2 and case["share"]["median"] > 0 for case in result["cases"]
        )


def test_a_sum_that_leaves_a_piece_out_is_an_error(monkeypatch):
    add = _C.ordered_sum
    monkeypatch.setattr(
        _C, "ordered_sum", lambda pieces, count, *rest: add(pieces[256:], count - 1, *rest)
    )
    with pytest.raises(ValueError, match="sums of 8 pieces differ by"):
        bench_ordered_sum.make_sums(Device("cpu"), 8, 256, torch.float32)
