"""The benchmark of tensor, pipeline and sequence parallelism at sizes that say nothing about
speed.
"""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="the benchmark trains transformers' Llama")
from benchmarks import bench_parallel
from shardcore._native import _C


@pytest.mark.slow  # 13 trainings
def test_parallel(tmp_path, run_main, forked_ranks):
    options = [
        "--preset",
        "tiny",
        "--rounds",
        "1",
        "--pause",
        "0",
        "--peers",
        "DDP",
        "FSDP2",
        "--out",
        str(tmp_path),
    ]
    run_main(bench_parallel, *options)
    result = json.loads((tmp_path / "parallel.json").read_text())
    expected = {
        "tensor": ["shardcore 2", "shardcore 3", "FSDP2 2", "FSDP2 3"],
        "pipeline": [
            "shardcore 2",
            "shardcore 3",
            "shardcore 1, PipelineModule",
            "DDP",
            "FSDP2 2",
            "FSDP2 3",
        ],
        "sequence": ["shardcore 3", "shardcore 3, whole", "FSDP2 3, whole"],
    }
    for part, names in expected.items():
        assert list(result[part]["engines"]) == names, f"{part} left out {result[part]['left_out']}"
        for name, figures in result[part]["engines"].items():
            assert len(figures["seconds"]) == 1, name
            assert 0 < figures["kept_bytes"] < figures["peak_bytes"], name
        assert result[part]["engines"][result[part]["base"]]["time_over_base"]["median"] == 1.0
    cut = result["pipeline"]["engines"]
    assert cut["FSDP2 3"]["kept_bytes"] < 0.75 * cut["DDP"]["kept_bytes"], (
        "weights and states in shards, no buckets"
    )


def test_bytes_between_steps_and_in_one_are_counted():
    kept = []
    for _ in range(2):
        found: list[int] = []
        with bench_parallel.counted(found) as mark:
            kept.append(torch.empty(8 << 20, dtype=torch.uint8))
            kept.append(kept[-1][5:])  # in the same memory
            # which torch's allocator knows nothing of
            kept.append(_C.empty_huge(4 << 20, torch.uint8))
            torch.empty(16 << 20, dtype=torch.uint8)  # before the step that counts
            mark()
            torch.empty(2 << 20, dtype=torch.uint8)
        assert found == [12 << 20, 14 << 20]
