"""The GPU benchmark without a GPU: its tables and byte counts, a run on the CPU, and peers that
do not work.
"""

import itertools
import json
import shutil

import pytest
import torch

from benchmarks import adam_kinds, bench_fused_adam, device, harness
from benchmarks.adam_kinds import Kind, every_kind, numel_of
from benchmarks.bench_fused_adam import FP32, PEERS, Peer
from shardcore import FusedAdam

QUICK = ["--device", "cpu", "--rounds", "2", "--repeats", "1", "--pause", "0"]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def test_lists_of_shapes_are_the_models():
    gpt2 = adam_kinds.gpt2_shapes()
    assert (len(gpt2), numel_of(gpt2)) == (148, 124_439_808)
    llama = adam_kinds.llama_shapes()
    assert (len(llama), numel_of(llama)) == (291, 6_738_415_616)
    assert numel_of(adam_kinds.shard(llama, 8)) * 8 == numel_of(llama)
    real = bench_fused_adam.workloads(1)
    assert [numel_of(real[f"flat 1e{power}"]) for power in (6, 7, 8, 9)] == [
        10**6,
        10**7,
        10**8,
        10**9,
    ]
    assert len(real["20,000 tiny tensors"]) == 20_000


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        (Kind(), 4 + 2 * 12),
        (Kind(state_dtype="bf16"), 4 + 2 * 8),
        (Kind(state_dtype="8bit"), 4 + 2 * 6),
        (Kind(BF16, BF16, "fp32"), 2 + 2 * 12 + 2),  # the weight is only written
        (Kind(BF16, BF16, "split"), 2 + 2 * 12),
        (Kind(BF16, BF16, "split", "8bit"), 2 + 2 * 6),
        (Kind(BF16, F32, None, "bf16"), 4 + 2 * 6),
        (Kind(F16, F16, "fp32"), 28),
    ],
    ids=str,
)
def test_bytes_that_a_step_moves(kind, moved):
    assert kind.bytes_moved == moved


@pytest.mark.parametrize("kind", list(every_kind()), ids=str)
def test_bytes_that_are_held_are_those_of_the_optimizer(kind):
    param = torch.nn.Parameter(torch.ones(512, dtype=kind.weight))
    optimizer = FusedAdam([param], **kind.options)
    optimizer.step(grads=[torch.ones(512, dtype=kind.grad)])
    held = [
        param,
        *(
            t
            for key, t in optimizer.state[param].items()
            if key != "step" and not key.endswith("scale")
        ),
    ]
    assert kind.bytes_held == sum(t.nbytes for t in held) / 512


def test_every_combination_that_differs_is_there():
    kinds = set()
    for weight, grad, master, state_dtype, stochastic in itertools.product(
        (F32, BF16, F16),
        (F32, BF16, F16),
        (None, "fp32", "split"),
        ("fp32", "bf16", "8bit"),
        (False, True),
    ):
        kind = Kind(weight, grad, master, state_dtype, stochastic)
        try:
            FusedAdam([torch.nn.Parameter(torch.ones(1, dtype=weight))], **kind.options)
        except ValueError:
            continue
        # else it changes nothing
        if (weight != F32 or master is None) and (weight == BF16 or not stochastic):
            kinds.add(kind)
    assert kinds == set(every_kind())
    assert len(kinds) == len(list(every_kind())) == 63


@pytest.mark.more
def test_a_run_on_the_cpu(tmp_path, run_main):
    printed = run_main(
        bench_fused_adam, *QUICK, "--only", "1e6", "GPT-2", "every", "--out", str(tmp_path)
    )
    assert "share of copy" in printed
    assert "share of reading" in printed
    report = json.loads((tmp_path / "fused_adam.json").read_text())
    assert report["device"] == "cpu"
    assert {"commit", "torch"} <= report["machine"].keys()
    assert [w["workload"] for w in report["workloads"]] == [
        "flat 1e6",
        "GPT-2",
        "flat 256M, every combination",
    ]
    assert [w["workload"] for w in report["norm"]] == ["flat 1e6", "GPT-2"]
    first = report["workloads"][0]
    engines = [case["engine"] for case in first["cases"]]
    assert engines[:3] == [
        "shardcore: fp32 weight, fp32 grad, fp32 states",
        "torch AdamW fused",
        "torch AdamW foreach",
    ]
    assert first["weights_agree_to"] < 1e-4
    for workload in report["workloads"] + report["norm"]:
        for case in workload["cases"]:
            assert len(case["seconds"]) == 2
            assert case["share"]["low"] <= case["share"]["median"] <= case["share"]["high"]
    assert sum(case["ours"] for case in report["workloads"][2]["cases"]) == 63
    assert [(h["workload"], h["us_per_tensor"].keys()) for h in report["host"]] == [
        ("GPT-2", {"the same", "elsewhere"})
    ]
    assert report["launches"][0]["engines"]["torch AdamW fused"] is None  # known on a GPU only


def test_shares_are_of_the_same_round():
    # The second round is ten times slower for both: 8 bytes in 1 s beside 4 bytes in 2 s is four
    # times the rate, always.
    result = harness.rates([1.0, 10.0], [2.0, 20.0], moved=8, limit_moved=4)
    assert result["share"] == {"median": 4.0, "low": 4.0, "high": 4.0}


@pytest.mark.more
def test_a_peer_that_does_not_work_or_does_other_work_is_left_out(monkeypatch, tmp_path, run_main):
    peers = [
        PEERS[0],
        Peer("not here", "no_such_optimizer", "Adam", [FP32], on_cpu=True),
        Peer("half installed", "torch.optim", "NoSuchClass", [FP32], on_cpu=True),
        Peer("fails", "torch.optim", "AdamW", [FP32], {"lr_": 1}, on_cpu=True),
        Peer("torch NAdam", "torch.optim", "NAdam", [FP32], on_cpu=True),
    ]
    monkeypatch.setattr(bench_fused_adam, "PEERS", peers)
    run_main(bench_fused_adam, *QUICK, "--only", "flat 1e6", "--out", str(tmp_path))
    report = json.loads((tmp_path / "fused_adam.json").read_text())
    assert report["not_installed"] == ["no_such_optimizer"]
    (workload,) = report["workloads"]
    reasons = {entry["engine"]: entry["reason"] for entry in workload["left_out"]}
    assert reasons.keys() == {"half installed", "fails", "torch NAdam"}
    assert reasons["fails"].startswith("TypeError: ")
    assert "other work" in reasons["torch NAdam"]
    assert [case["engine"] for case in workload["cases"] if not case["ours"]] == [PEERS[0].name]


@pytest.mark.more
def test_a_peer_that_does_other_work_is_noticed_and_the_rest_is_kept(
    monkeypatch, tmp_path, run_main
):
    other_way = Peer("other way", "torch.optim", "AdamW", [FP32], {"maximize": True}, on_cpu=True)
    monkeypatch.setattr(bench_fused_adam, "PEERS", [other_way])
    with pytest.raises(ValueError, match="bench_fused_adam: fp32 weights differ from every peer's"):
        run_main(bench_fused_adam, *QUICK, "--only", "flat 1e6", "--out", str(tmp_path))
    assert json.loads((tmp_path / "fused_adam.json").read_text())["workloads"] == []


def test_what_is_too_large_is_left_out(monkeypatch, tmp_path, run_main):
    monkeypatch.setattr(device.Device, "free_bytes", lambda self: 2**20)
    printed = run_main(bench_fused_adam, *QUICK, "--only", "flat 1e9", "--out", str(tmp_path))
    assert "is left out: needs 0 GiB of memory" in printed
    report = json.loads((tmp_path / "fused_adam.json").read_text())
    assert len(report["workloads"][0]["left_out"]) == 5
    assert report["workloads"][0]["cases"] == report["norm"][0]["cases"] == []


@pytest.mark.more
def test_the_reading_kernel_compiles(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    device.compile_reader(tmp_path / "read_limit.so", "sm_90")
    assert (tmp_path / "read_limit.so").stat().st_size > 0
