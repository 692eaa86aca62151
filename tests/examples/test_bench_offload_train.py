"""benchmarks/bench_copies.py and bench_offload_train.py on the CPU: runs, what they refuse, what
they leave out and why.
"""

import json
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import (
    bench_copies,
    bench_fused_adam,
    bench_offload_train,
    bench_ordered_sum,
    offload_parts,
    offload_trainers,
)
from benchmarks.bench_offload_train import Clock, check, why_not
from benchmarks.device import Device
from benchmarks.offload_parts import Measured, Parts, lazy_bound, streamed
from benchmarks.offload_trainers import Engine, Need, Trainer

CPU = ["--device", "cpu"]
GIB = 2**30


@pytest.mark.more
def test_copies(tmp_path, run_main):
    sizes = ["--sizes", "4096", "64K", "--judge", "64K"]
    printed = run_main(
        bench_copies, *CPU, *sizes, "--rounds", "2", "--pause", "0", "--out", str(tmp_path)
    )
    assert "copies of" in printed
    report = json.loads((tmp_path / "copies.json").read_text())
    assert [result["size_bytes"] for result in report["sizes"]] == [4096, 65536]
    for result in report["sizes"]:
        assert list(result["ways"]) == ["to host", "from host", "both at once"]
        assert all(
            len(samples) == 2
            for way in result["ways"].values()
            for samples in way["seconds"].values()
        )


@pytest.mark.more
def test_copies_that_bring_other_bytes_are_noticed(monkeypatch, tmp_path, run_main):
    monkeypatch.setattr(bench_copies.Tier, "queue", lambda tier, way: None)
    with pytest.raises(
        ValueError, match="bench_copies: shardcore to host brought other bytes than were sent"
    ):
        run_main(bench_copies, *CPU, "--sizes", "4096", "--rounds", "1", "--out", str(tmp_path))


def test_a_rate_below_the_target_counts_from_a_size_on():
    def result(size_bytes: int, ratio: float, refusal: str = "") -> dict[str, Any]:
        return {
            "size_bytes": size_bytes,
            "pin_refusal": refusal,
            "ways": {"to host": {"rate_over_plain": {"median": ratio}}},
        }

    sizes = [
        result(2**20, 0.5),
        result(2**24, 0.95),
        result(2**25, 0.949),
        result(2**20, 1.0, "no more pages"),
    ]
    assert bench_copies.shortfalls({"options": {"judge": 2**24}, "sizes": sizes}) == [
        "32 MiB to host: 0.949 of a plain copy's rate; expected 0.95",
        "1 MiB could not be pinned: no more pages",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "module", [bench_copies, bench_fused_adam, bench_offload_train, bench_ordered_sum]
)
def test_without_a_gpu_they_say_so(tmp_path, run_main, capfd, module):
    with pytest.raises(SystemExit) as stop:
        run_main(module, "--out", str(tmp_path))
    assert stop.value.code == 2
    assert (
        f"{module.__name__}: error: argument --device: cuda; torch can use 0 GPUs here"
        in capfd.readouterr().err
    )
    assert list(tmp_path.iterdir()) == []


class Event:
    """Stands in for torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.time, self.enable_timing = 0.0, enable_timing

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        assert self.time

    def elapsed_time(self, end: "Event") -> float:
        assert self.enable_timing, "CUDA refuses"
        assert end.enable_timing
        return 1e3 * (end.time - self.time)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the benchmark take the CPU for a GPU: its events, its counters of memory. Returns
    calls that change something.
    """
    calls: list[str] = []

    def device(kind: str) -> Device:
        made = Device(kind)
        made.is_cuda, made.name = True, "GPU"
        return made

    monkeypatch.setattr(bench_offload_train, "Device", device)
    for size in ("COPY_BYTES", "ADAM_NUMEL"):
        monkeypatch.setattr(offload_parts, size, 2**16)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    # CPU builds lack it
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append("host"), raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 2 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000 + len(calls))
    return calls


@pytest.mark.more
def test_a_run(tmp_path, run_main, as_on_a_gpu):
    names = ["shardcore 2", "shardcore 2, gradients, lazy", "shardcore 3, params", "FSDP2"]
    options = [
        "--preset",
        "tiny",
        "--batch",
        "1",
        "--steps",
        "2",
        "--rounds",
        "1",
        "--engines",
        *names,
    ]
    printed = run_main(bench_offload_train, *CPU, *options, "--out", str(tmp_path))
    assert "CPU Adam" in printed
    report = json.loads((tmp_path / "offload_train.json").read_text())
    assert (list(report["engines"]), report["left_out"]) == (names, {})
    numel, engines = report["numel"], report["engines"]
    for name, result in engines.items():
        assert len(result["seconds"]) == 2, name
        assert result["bound"] == pytest.approx(lazy_bound(Parts(**result["parts"])))
        assert result["over_bound"]["median"] == pytest.approx(
            result["step"]["median"] / result["bound"]
        )
        assert 1000 < result["peak_bytes_at_start"] < result["peak_bytes"]
        assert result["held_before_bytes"] == 1000
    assert report["measured"]["activation_bytes"] > 0
    assert as_on_a_gpu.count("reset_peak_memory_stats") == 1 + 2 * len(names)
    assert as_on_a_gpu.count("host") >= len(names)
    assert "GPU" in printed
    assert engines["shardcore 2"]["parts"]["adam"] == engines["shardcore 2"]["moved_bytes"][0] == 0
    gradients, params = engines[names[1]], engines[names[2]]
    padded = pytest.approx(2 * numel, rel=0.2)  # to blocks: the model is tiny
    assert gradients["moved_bytes"] == [padded, padded]
    assert params["moved_bytes"][0] == padded
    # a block in both passes, the other one stays in between
    assert params["moved_bytes"][1] > 1.3 * params["moved_bytes"][0]
    assert params["parts"]["back"] == 0 < gradients["parts"]["back"]
    for name in names[1:3]:
        last = engines[name]["last_adam"]
        assert last["chunks"] >= 3, "the root and two blocks"
        assert last["seconds"] > 0 <= last["idle_seconds"]
    pytest.importorskip("matplotlib")
    assert (tmp_path / "offload_train.png").read_bytes().startswith(b"\x89PNG")


def test_the_bound_of_a_step():
    parts = Parts(forward=3.0, backward=6.0, out=4.0, adam=2.0, back=5.0, chunks=10)
    assert lazy_bound(parts) == pytest.approx(6 + 0.9 * 5 + 0.1 * (2 + 5 + 3))
    assert lazy_bound(replace(parts, out=7.0, adam=9.0)) == pytest.approx(
        6 + 0.9 * 9 + 0.1 * (9 + 5 + 3)
    ), "Adam begins at once"
    for copied in (5.0, 7.0):  # weights that are copied for each pass lengthen both
        passes = max(6.0, copied)
        assert lazy_bound(streamed(parts, copied)) == pytest.approx(
            passes + 0.9 * max(5, copied) + 0.1 * (2 + max(5, copied))
        )
    assert lazy_bound(replace(parts, out=20.0)) == pytest.approx(20 + 0.6 + 0.1 * (2 + 5 + 3)), (
        "the last gradient comes late"
    )
    measured = Measured([3.0], [6.0], {"to host": [10.0], "from host": [5.0]}, [0.5])
    assert measured.parts(4, 10, (40.0, 70.0), streams=True) == Parts(7.0, 7.0, 4.0, 2.0, 0.0, 10)
    assert measured.parts(4, 10, (40.0, 25.0), streams=False) == parts
    assert Measured().parts(4, 10, (0.0, 0.0), streams=False) is None


def test_what_does_not_fit_is_named_with_what_it_needs(monkeypatch):
    engine = Engine(
        lambda preset, device: Trainer(lambda tokens, targets: tokens),
        lambda preset: Need(3 * GIB, 5 * GIB),
    )
    device = Device("cpu")
    monkeypatch.setattr(bench_offload_train, "free_bytes", lambda: 6 * GIB)
    assert (
        why_not(engine, "tiny", device, None)
        == "needs 8.0 GiB of host memory, of which 6.0 are free"
    )
    monkeypatch.setattr(device, "free_bytes", lambda: 4 * GIB)
    assert why_not(engine, "tiny", device, GIB) is None
    expected = "needs 5.0 GiB on the device, activations included, of which 4.0 are free"
    assert why_not(engine, "tiny", device, 2 * GIB) == expected


def test_needs_of_large_models():
    """16 bytes a parameter, wherever they are: a 7B model's leave a few blocks of weights and
    gradients on the device.
    """
    all_of = offload_trainers.engines(batch=1)
    numel = offload_trainers.numel_of("7b")
    assert 6.4e9 < numel < 6.5e9
    assert 1.4e9 < offload_trainers.numel_of("1.5b") < 1.5e9
    assert all_of["shardcore 2"].need("7b").device == pytest.approx(16 * numel, rel=0.01)
    need = all_of["shardcore 3, params, lazy"].need("7b")
    assert need.host == pytest.approx(16 * numel, rel=0.01)
    assert need.device < 3 * GIB
    # What peers pin is rounded up: flat buffers of 4, 4 and 2 bytes a parameter, or each parameter
    # by itself.
    assert offload_trainers.deepspeed_need("7b", 2).host == 2**35 + 2**35 + 2**34 + 8 * numel
    assert offload_trainers.fsdp2_need("7b").host == pytest.approx(
        16 * numel + 8 * 32 * 4096**2, rel=0.001
    )


@pytest.mark.more
def test_a_peer_that_fails_and_one_of_ours_that_lacks_memory_are_left_out(
    tmp_path, run_main, monkeypatch
):
    def fails(error: Exception) -> Engine:
        def make(preset: str, device: torch.device) -> Trainer:
            raise error

        return Engine(make, lambda preset: Need(0, 0))

    ours = offload_trainers.engines(1)["shardcore 2"]
    made = {
        "shardcore 2": ours,
        "shardcore x": fails(MemoryError("no room")),
        "peer": fails(OSError("no compiler")),
    }
    monkeypatch.setattr(bench_offload_train, "engines", lambda batch: made)
    # so there is no bound either
    monkeypatch.setattr(bench_offload_train, "measure", lambda *arguments: "needs more")
    monkeypatch.setattr(bench_offload_train.harness, "write_png", lambda *arguments: None)
    options = [
        *CPU,
        "--preset",
        "tiny",
        "--batch",
        "1",
        "--steps",
        "1",
        "--rounds",
        "1",
        "--out",
        str(tmp_path),
    ]
    printed = run_main(bench_offload_train, *options)
    report = json.loads((tmp_path / "offload_train.json").read_text())
    assert report["measured"]["compute_left_out"] == "needs more"
    assert list(report["engines"]) == ["shardcore 2"]
    assert "bound" not in report["engines"]["shardcore 2"]
    assert (
        "shardcore x is left out: MemoryError: no room\npeer is left out: OSError: no compiler"
        in printed
    )
    made["shardcore x"] = fails(OSError("a fault of ours"))
    with pytest.raises(OSError, match="a fault of ours"):
        run_main(bench_offload_train, *options)
    dist.destroy_process_group()
    monkeypatch.setattr(Clock, "left", 0.0)
    with pytest.raises(
        ValueError,
        match=r"no engine of ours could be measured: {'shardcore 2': 'no time is left of 900 s'",
    ):
        run_main(bench_offload_train, *options)
    dist.destroy_process_group()


def test_a_peer_that_trains_something_else_is_named_and_one_of_ours_refused(capsys):
    results = {"shardcore 2": {"losses": [5.0, 4.0]}, "peer": {"losses": [5.0, 5.0, 5.0]}}
    check(results, left_out := {})
    assert (
        "peer trains something else: its losses differ from shardcore 2's by 1.0e+00"
        in capsys.readouterr().out
    )
    assert (list(results), list(left_out)) == (["shardcore 2"], ["peer"])
    results["shardcore 3"] = {"losses": [5.0, 4.21]}
    with pytest.raises(ValueError, match="bench_offload_train: shardcore 3 has losses that differ"):
        check(results, {})
