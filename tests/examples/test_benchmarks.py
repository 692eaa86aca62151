"""The benchmarks at sizes that say nothing about speed: they run, write what they measured, and
notice who does other work.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from benchmarks import (
    bench_activations,
    bench_audits,
    bench_checkpoint,
    bench_cpu_adam,
    bench_digests,
    bench_elementwise,
    bench_fabric,
    bench_io,
    bench_load,
    bench_many_params,
    bench_nvme,
    bench_train_step,
    convergence,
    harness,
    suite,
)
from benchmarks.adam_kinds import check_same_work
from examples import arguments, machine


@pytest.mark.more
@pytest.mark.parametrize(("pages", "numel"), [("equal", 4096), ("own", 1001)])
def test_cpu_adam(tmp_path, run_main, pages, numel, monkeypatch):
    monkeypatch.setattr(bench_cpu_adam, "DeepSpeedCPUAdam", None)  # it compiles for minutes
    options = [
        "--sizes",
        str(numel),
        "--rounds",
        "2",
        "--threads",
        "1",
        "--pause",
        "0",
        "--pages",
        pages,
    ]
    printed = run_main(bench_cpu_adam, *options, "--out", str(tmp_path))
    assert "shardcore reaches" in printed
    result = json.loads((tmp_path / "cpu_adam.json").read_text())
    assert [(r["subject"], r["numel"]) for r in result["results"]] == [
        ("fp32", numel),
        ("offload", numel),
    ]
    for subject in result["results"]:
        assert {"limit", "shardcore CPUAdam", "torch fused AdamW"} <= subject["engines"].keys()
        assert all(len(engine["seconds"]) == 2 for engine in subject["engines"].values())
    moved = {name: engine["bytes"] for name, engine in result["results"][1]["engines"].items()}
    assert (moved["limit"], moved["shardcore CPUAdam, split master, 8-bit states"]) == (28, 14)
    assert result["options"]["threads"] == 1
    assert {"commit", "torch", "cpu"} <= result["machine"].keys()


def test_many_params(tmp_path, run_main):
    options = ["--params", "10", "--rounds", "2", "--repeats", "1"]
    printed = run_main(bench_many_params, *options, "--pause", "0", "--out", str(tmp_path))
    assert "10 parameters of 8 x 8" in printed
    parts = json.loads((tmp_path / "many_params.json").read_text())["parts"]
    assert set(parts) == {"backward", "step"}
    for part in parts.values():
        assert {engine: len(samples) for engine, samples in part["seconds"].items()} == {
            "plain": 2,
            "sharded": 2,
        }


def test_many_params_notices_other_weights():
    models = bench_many_params.models_of(3)
    bench_many_params.check_same_weights(models)
    with torch.no_grad():
        models["plain"][0].many[1].add_(1.0)
    with pytest.raises(ValueError, match=r"bench_many_params: many\.1 differs"):
        bench_many_params.check_same_weights(models)


@pytest.mark.more
@pytest.mark.parametrize(
    ("nproc", "base", "engines"),
    [
        (2, "DDP", ["ZeroRedundancy", "FSDP2 3", "shardcore 2 + offload"]),
        (1, "torch", ["shardcore 3"]),
    ],
)
def test_train_step(tmp_path, run_main, nproc, base, engines):
    options = [
        "--preset",
        "tiny",
        "--batch",
        "1",
        "--rounds",
        "2",
        "--warmup",
        "1",
        "--pause",
        "0",
        "--nproc",
        str(nproc),
    ]
    options += ["--steps", "1"]
    printed = run_main(bench_train_step, *options, "--engines", *engines, "--out", str(tmp_path))
    assert f"time / {base}" in printed
    result = json.loads((tmp_path / "train_step.json").read_text())
    assert set(result["engines"]) == {base, *engines}
    assert result["engines"][base]["time_over_base"]["median"] == 1.0
    assert all(len(engine["seconds"]) == 2 for engine in result["engines"].values())
    assert result["options"]["device"] == "cpu"


@pytest.fixture
def no_fio(monkeypatch):
    monkeypatch.setattr(bench_io.shutil, "which", lambda name: None)


def io_options(folder) -> list[str]:
    return [
        "--mib",
        "2",
        "--rounds",
        "2",
        "--pause",
        "0",
        "--dir",
        str(folder),
        "--out",
        str(folder),
    ]


def test_io(tmp_path, run_main, no_fio):
    printed = run_main(bench_io, *io_options(tmp_path))
    assert "fio: fio is not on PATH (apt-get install fio)" in printed
    result = json.loads((tmp_path / "io.json").read_text())
    assert list(result["cases"]) == ["fresh", "read"]
    for engines in result["cases"].values():
        assert {name: len(each["seconds"]) for name, each in engines.items()} == {
            "shardcore": 2,
            "threads": 2,
        }
    assert [path.name for path in tmp_path.iterdir()] == ["io.json"], "its files are gone"


@pytest.mark.more
@pytest.mark.skipif(not shutil.which("fio"), reason="no fio")
def test_io_beside_fio(tmp_path, run_main):
    run_main(bench_io, *io_options(tmp_path))
    result = json.loads((tmp_path / "io.json").read_text())
    assert all(engines["fio"]["over_fio"]["median"] == 1 for engines in result["cases"].values())
    slow = {
        "read": {"shardcore": {"over_fio": {"median": 0.9}}},
        "fresh": {"shardcore": {"over_fio": {"median": 0.96}}},
    }
    assert bench_io.shortfalls(slow) == ["read: 0.90 of fio's rate; expected 0.95"]


@pytest.mark.more
def test_checkpoint(tmp_path, run_main, no_fio):
    printed = run_main(
        bench_checkpoint,
        "--mib",
        "16",
        "--rounds",
        "1",
        "--dir",
        str(tmp_path),
        "--out",
        str(tmp_path),
    )
    assert "how many times faster than each" in printed
    (result,) = json.loads((tmp_path / "checkpoint.json").read_text())["sizes"]
    peers = {"torch.save", "dcp", "huggingface"}
    assert (
        set(result["save"]["times_faster_than"])
        == set(result["load"]["times_faster_than"])
        == peers
    )
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.json"], "its files are gone"


def test_checkpoints_that_fall_short_are_named():
    times = {"fio": {"median": 0.8}, "dcp": {"median": 1.2}, "huggingface": {"median": 0.9}}
    result = {
        "save": {"times_faster_than": times},
        "load": {"times_faster_than": {}},
        "pause": {"ratio": 0.2},
    }
    assert bench_checkpoint.shortfalls(result) == [
        "save: 0.80 of the speed of fio; expected 0.9",
        "save: 0.90 of the speed of huggingface; expected 1",
        "pause: 0.20 of async_save's; expected 0.1",
    ]


@pytest.mark.more
@pytest.mark.skipif(not shutil.which("fio"), reason="no fio")
@pytest.mark.parametrize(
    ("what", "names"),
    [("states", {"nvme", "scratch", "cpu"}), ("weights", {"nvme", "late", "cpu"})],
)
def test_nvme(tmp_path, run_main, what, names):
    options = ["--what", what, "--mib", "32", "--tokens", "2", "--rounds", "1", "--pause", "0"]
    printed = run_main(bench_nvme, *options, "--dir", str(tmp_path), "--out", str(tmp_path))
    assert "over bound" in printed
    result = json.loads((tmp_path / "nvme.json").read_text())
    assert set(result["seconds"]) == {*names, "fio"}
    if what == "states":
        assert result["host_bytes"]["cpu"] > result["state_bytes"]
    else:
        assert 32 << 20 < result["read_bytes"] <= 64 << 20, "in forward, and again in backward"
    assert [path.name for path in tmp_path.iterdir()] == ["nvme.json"], "its files are gone"


@pytest.mark.more
def test_activations(tmp_path, run_main):
    printed = run_main(
        bench_activations,
        "--tiny",
        "--device",
        "cpu",
        "--rounds",
        "2",
        "--pause",
        "0",
        "--out",
        str(tmp_path),
    )
    assert "ours, offload" in printed
    result = json.loads((tmp_path / "activations.json").read_text())
    for part, names in {
        "blocks": {"plain", "torch checkpoint", "ours, offload"},
        "head": {"all logits", "ours"},
    }.items():
        assert names <= result[part]["seconds"].keys() == result[part]["peak_bytes"].keys()
    heads = bench_activations.heads(torch.device("cpu"), 8, 16, 32, 2**10)
    heads["ours"] = lambda: [grad + 0.1 for grad in heads["all logits"]()]
    with pytest.raises(AssertionError, match="ours: gradients differ"):
        bench_activations.check_same_gradients(heads, "all logits")


@pytest.mark.more
def test_fabric(tmp_path, run_main):
    printed = run_main(bench_fabric, "--world", "8", "--tokens", "4096", "--out", str(tmp_path))
    result = json.loads((tmp_path / "fabric.json").read_text())
    assert result["fabric"]["nic"] == 45e9
    for each in result["results"]:
        assert each["percent"] == pytest.approx(
            100 * sum(each["exposed_s"].values()) / each["compute_s"]
        )
        assert re.search(
            rf"^{re.escape(each['case'])} +{each['percent']:.1f}$", printed, re.MULTILINE
        )
    percents = {each["case"]: each["percent"] for each in result["results"]}
    assert percents["stage 2, overlap_step"] < percents["stage 2"] / 4, (
        "the gathers of new weights are hidden"
    )
    assert percents["FSDP2's schedule"] == pytest.approx(
        percents['stage 3, reduction="nccl"'], rel=0.1
    ), "the same on one node"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "2048"], "argument --world: 2048; expected a power of two from 2 to 1024"),
        (["--world", "48"], "argument --world: 48; expected a power of two from 2 to 1024"),
        (
            ["--ranks-per-node", "3"],
            "argument --ranks-per-node: 3; expected a divisor of --world 8",
        ),
        (
            ["--model", "torch.nn:Identity"],
            "argument --model: torch.nn:Identity has no repeated blocks; expected",
        ),
        (["--nic", "0"], "argument --nic: 0; expected a number above 0"),
    ],
)
def test_fabric_refuses(tmp_path, run_main, capfd, arguments, message):
    with pytest.raises(SystemExit):
        run_main(bench_fabric, *arguments, "--out", str(tmp_path))
    assert message in capfd.readouterr().err


def test_io_finds_other_bytes(tmp_path, run_main, no_fio, monkeypatch):
    checksums = iter([1, 2])
    monkeypatch.setattr(bench_io._C, "crc32c", lambda tensor: next(checksums))
    with pytest.raises(ValueError, match=r"bench_io: .* holds other bytes than were written"):
        run_main(bench_io, *io_options(tmp_path))


def test_convergence_goes_on_where_it_stopped(tmp_path, run_main):
    kinds = ["bf16 weights, fp32 master", "bf16 weights, split master"]
    options = [
        "--preset",
        "tiny",
        "--batch",
        "1",
        "--steps",
        "3",
        "--seeds",
        "1",
        "--threads",
        "1",
        "--out",
        str(tmp_path),
    ]
    run_main(convergence, *options, "--kinds", kinds[0])
    first = json.loads((tmp_path / "convergence.json").read_text())["runs"]
    printed = run_main(convergence, *options, "--kinds", *kinds)
    runs = json.loads((tmp_path / "convergence.json").read_text())["runs"]
    assert runs[0] == first[0]
    assert [run["kind"] for run in runs] == kinds
    assert runs[0]["losses"] == runs[1]["losses"]
    assert "spread over seeds" in printed


@pytest.mark.parametrize("module", [bench_cpu_adam, bench_train_step])
def test_bad_arguments(monkeypatch, capsys, module):
    # it would replace pytest
    monkeypatch.setattr(suite.os, "execve", lambda *_: pytest.fail("started again"))
    for given, message in (
        (["--rounds", "0"], "argument --rounds: 0; expected a whole number of at least 1"),
        (["--pause", "-1"], "argument --pause: -1; expected a finite number of at least 0"),
        (
            ["--out", __file__],
            f"argument --out: {__file__} cannot be written to (File exists); expected a folder",
        ),
    ):
        monkeypatch.setattr(sys, "argv", [module.__name__, *given])
        with pytest.raises(SystemExit) as stop:
            module.main()
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_an_engine_that_trains_something_else_is_left_out_or_refused():
    losses = {"DDP": [5.5, 5.0], "same": [5.5, 5.0001], "peer": [5.5, 5.5]}
    alike, others = bench_train_step.check_losses(losses, "DDP")
    assert list(alike) == ["DDP", "same"]
    assert alike["same"] < 1e-3
    assert others == {"peer": pytest.approx(0.1)}
    with pytest.raises(
        ValueError,
        match=r"bench_train_step: shardcore 1 has losses that differ from DDP's by 1\.0e-01",
    ):
        bench_train_step.check_losses(losses | {"shardcore 1": losses["peer"]}, "DDP")


def test_an_engine_that_does_less_is_noticed():
    weight = torch.randn(4096)
    assert (
        check_same_work("fp32", {"ours": weight, "same": weight + 1e-7}, "ours", "bench_x") < 1e-5
    )
    with pytest.raises(ValueError, match=r"bench_x: fp32 weights differ"):
        check_same_work("fp32", {"ours": weight, "idle": weight + 1e-3}, "ours", "bench_x")


def test_sizes():
    assert [arguments.elements(text) for text in ("4096", "64K", "2m", "3e7")] == [
        4096,
        65536,
        2 * 2**20,
        30_000_000,
    ]
    for text in ("0", "-4K", "x", "", "1.5M", "3e", "2Ke3", "1e99"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a number of elements"):
            arguments.elements(text)


def test_ratios_are_paired_by_round():
    # The second round is ten times slower for both: a ratio of medians would not see that they are
    # always 2 : 1.
    assert harness.paired([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == harness.Spread(2.0, 2.0, 2.0)
    assert harness.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == harness.Spread(3.0, 2.0, 4.0)
    assert str(harness.Spread(1.0, 0.5, 2.0)) == "1.00 [0.50, 2.00]"


def test_order_is_random_but_agreed():
    orders = list(harness.random_order(["a", "b", "c"], 20, seed=3))
    assert orders == list(harness.random_order(["a", "b", "c"], 20, seed=3))
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len({tuple(order) for order in orders}) > 2


def test_every_case_runs_once_a_round():
    calls: list[str] = []
    cases = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}
    seconds = harness.interleave(cases, rounds=3, repeats=2, pause_s=0, warmup=1)
    assert {name: len(samples) for name, samples in seconds.items()} == {"a": 3, "b": 3}
    assert calls.count("a") == calls.count("b") == 16  # two that do not count before each two
    assert all({calls[i], calls[i + 4]} == {"a", "b"} for i in range(0, 32, 8))


def test_repeats_may_differ_by_case_and_a_timer_may_be_given():
    calls: list[str] = []
    cases = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}
    timer = lambda call, n: sum(call() or 6.0 for _ in range(n))  # noqa: E731
    seconds = harness.interleave(
        cases, rounds=2, repeats={"a": 1, "b": 3}, pause_s=0, warmup=1, timer=timer
    )
    assert seconds == {"a": [6.0, 6.0], "b": [6.0, 6.0]}
    assert (calls.count("a"), calls.count("b")) == (3, 9)


def test_a_tree_inside_another_repository_is_none_of_its_commits(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    tree = tmp_path / "unpacked"
    tree.mkdir()
    (tree / "pyproject.toml").touch()
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(
        [*git, "commit", "-q", "--allow-empty", "-m", "another"], cwd=tmp_path, check=True
    )
    monkeypatch.setattr(machine, "ROOT", tree)
    assert machine.git_commit() == "unknown"
    subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
    assert re.fullmatch(r"[0-9a-f]{40,}\+changes", machine.git_commit())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.git_commit() == "unknown"
    monkeypatch.setenv("SHARDCORE_COMMIT", "abc")
    assert machine.describe_machine()["commit"] == "abc"


@pytest.mark.more
def test_digests(tmp_path, run_main):
    small = ["--tiny", "--device", "cpu", "--numel", "4K", "--rounds", "2", "--pause", "0"]
    assert "time over a read" in run_main(bench_digests, *small, "--out", str(tmp_path))
    result = json.loads((tmp_path / "digests.json").read_text())
    assert [*result["kernel"]] == ["float32", "bfloat16", "split"]
    run = result["run"]
    assert run["calls"] > 0
    assert run["read_over_masters"] >= 3  # local and reduced gradients, new weights; and outputs


@pytest.mark.more
def test_elementwise(tmp_path, run_main):
    options = [
        "--numel",
        "4K",
        "--rounds",
        "2",
        "--threads",
        "1",
        "--pause",
        "0",
        "--out",
        str(tmp_path),
    ]
    assert "time / ours" in run_main(bench_elementwise, *options)
    result = json.loads((tmp_path / "elementwise.json").read_text())
    assert [(r["optimizer"], r["subject"]) for r in result["results"]] == [
        (name, subject) for name in ("SGD", "Adagrad", "Lion") for subject in ("fp32", "offload")
    ]
    assert all({"shardcore", "torch"} <= r["engines"].keys() for r in result["results"])


@pytest.mark.slow
def test_load(tmp_path, run_main):
    options = ["--gb", "0.4", "--cases", "shardcore 3", "fsdp2, dcp", "--dir", str(tmp_path)]
    run_main(bench_load, *options, "--out", str(tmp_path))
    result = json.loads((tmp_path / "load.json").read_text())
    ours, peer = result["cases"]["shardcore 3"], result["cases"]["fsdp2, dcp"]
    assert max(ours["peak_bytes"][0]) <= result["bound_bytes"]
    assert 0.95 <= ours["read_of_files"] <= 1.05
    assert ours["losses"] == pytest.approx(peer["losses"], rel=1e-3)


@pytest.mark.more
def test_audits(tmp_path, run_main):
    small = ["--tiny", "--device", "cpu", "--flips", "8", "--rounds", "2", "--pause", "0"]
    assert "8 of 8" in run_main(bench_audits, *small, "--out", str(tmp_path))
    result = json.loads((tmp_path / "audits.json").read_text())
    found = {name: of["found"] for name, of in result["found"].items()}
    assert found["new weight, lasting"] == found["new exp_avg, lasting"] == 8
    assert found["a master, between two steps"] == 0
    assert 0 < result["cost"]["copied_over_update"] < 1
    assert 0 < result["sent_bytes"]["audit"] < result["sent_bytes"]["gradients"]
