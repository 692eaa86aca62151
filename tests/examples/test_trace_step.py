"""benchmarks/trace_step.py: what it makes of a trace, and a run on the CPU."""

import json

import pytest

from benchmarks import trace_step


def event(name, category, start, end, tid=7):
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start, "tid": tid}


TRACE = [
    event("gemm", "kernel", 0, 10),
    event("gemm", "kernel", 5, 20),
    event("ncclDevKernel_AllGather", "kernel", 15, 35, tid=9),
    event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 40, 44, tid=10),
    event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 20, 22),
    event("shardcore::gather(blocks.0)", "user_annotation", 1, 3),
    event("shardcore::step", "user_annotation", 36, 50),
    event("aten::mm", "cpu_op", 0, 100),
    {"ph": "i", "name": "mark", "ts": 0},
]


def test_spans_of_a_gpu():
    spans = trace_step.spans_of(TRACE)
    assert [(span.lane, span.kind) for span in spans] == [
        ("GPU stream 7", "compute"),
        ("GPU stream 7", "compute"),
        ("GPU stream 9", "communication"),
        ("GPU stream 10", "copy"),
        ("GPU stream 7", "compute"),
        ("engine", "gather"),
    ]
    figures = trace_step.figures_of(spans)
    assert figures["step_us"] == pytest.approx(44)
    assert figures["busy_us"] == pytest.approx(
        {"communication": 20, "compute": 22, "copy": 4, "shardcore::gather": 2}
    )
    assert figures["hidden_share"] == pytest.approx({"communication": 0.35, "copy": 0.0})


def test_spans_of_a_cpu_say_nothing_of_what_is_hidden():
    spans = trace_step.spans_of(
        [event("aten::mm", "cpu_op", 0, 10), event("gloo:send", "cpu_op", 2, 5)]
    )
    assert [span.kind for span in spans] == ["compute", "communication"]
    assert trace_step.figures_of(spans)["hidden_share"] == {"communication": None, "copy": None}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("nproc", "options"),
    [(1, ["--stage", "2", "--offload", "gradients", "--overlap-step"]), (2, [])],
)
def test_a_run_on_the_cpu(tmp_path, run_main, forked_ranks, nproc, options):
    common = ["--preset", "tiny", "--batch", "1", "--nproc", str(nproc), "--out", str(tmp_path)]
    run_main(trace_step, *common, *options)
    result = json.loads((tmp_path / "trace_step.json").read_text())
    assert result["benchmark"] == "trace_step"
    assert result["step_us"] > 0
    assert {"shardcore::adam", "shardcore::reduce"} <= result["busy_us"].keys()
    assert ("shardcore::sum" in result["busy_us"]) == (nproc == 2)
    pytest.importorskip("matplotlib")
    assert (tmp_path / "trace_step.png").read_bytes().startswith(b"\x89PNG")
