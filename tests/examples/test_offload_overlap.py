"""benchmarks/bench_offload_overlap.py: the arithmetic of its schedules, and a run."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks import bench_offload_overlap
from benchmarks.offload_schedule import Parts, blocking_time, deepspeed_spans, deepspeed_time, lazy_bound

PARTS = Parts(forward=3.0, backward=6.0, out=4.0, adam=2.0, back=5.0, chunks=10)


def test_schedules_of_one_step():
    assert lazy_bound(PARTS) == pytest.approx(6 + 5 + 0.9)
    assert lazy_bound(replace(PARTS, out=7.0, adam=9.0)) == pytest.approx(7 + 9 + 1.2)
    assert blocking_time(PARTS) == pytest.approx(3 + 6 + 0.4 + 5 + 0.2)
    assert deepspeed_time(PARTS) == pytest.approx(3 + 6 + 0.4 + 2 + 5)


def test_earlier_micro_steps_count_whole():
    for schedule in (lazy_bound, blocking_time, deepspeed_time):
        assert schedule(replace(PARTS, micro_steps=3)) - schedule(PARTS) == pytest.approx(2 * (6 + 3))


def test_the_picture_of_deepspeed_is_as_long_as_its_time():
    spans = list(deepspeed_spans(PARTS))
    assert max(span.end for span in spans) == pytest.approx(deepspeed_time(PARTS))
    for lane in {span.lane for span in spans}:
        times = [(span.start, span.end) for span in spans if span.lane == lane]
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(times)), lane


def test_a_run(tmp_path, run_main):
    cell = ["--forward-ms", "2", "--link", "1", "--adam", "100"]
    printed = run_main(bench_offload_overlap, *cell, "--rounds", "2", "--numel", "512", "--out", str(tmp_path))
    assert "24 units of 512 parameters" in printed
    one, two = json.loads((tmp_path / "offload_overlap.json").read_text())["cells"]
    assert (one["case"]["accumulate"], two["case"]["accumulate"]) == (1, 2)
    for cell in (one, two):
        assert cell["parts"]["back"] == pytest.approx(24 * 512 * 2 / 1e9)  # bfloat16 weights
        assert cell["lazy"]["seconds"] > 0 < cell["blocking"]["seconds"]
    assert one["parts"]["out"] == pytest.approx(24 * 512 * 2 / 1e9)  # as it is
    assert two["parts"]["out"] == pytest.approx(24 * 512 * 4 / 1e9)  # sums are float32
    pytest.importorskip("matplotlib")
    assert (tmp_path / "offload_overlap.png").read_bytes().startswith(b"\x89PNG")
