"""The benchmarks at sizes that say nothing about speed: they run, write what they measured, and notice who does other work."""

import io
import json
import sys

import pytest
import torch

from benchmarks import bench_cpu_adam, bench_reduced_states, bench_train_step, convergence, harness


@pytest.mark.parametrize("pages", ["equal", "own"])
def test_cpu_adam(tmp_path, run_main, pages):
    options = ["--sizes", "4K", "1001", "--rounds", "2", "--threads", "1", "--pause", "0", "--pages", pages]
    printed = run_main(bench_cpu_adam, *options, "--out", str(tmp_path))
    assert "shardcore reaches" in printed
    result = json.loads((tmp_path / "cpu_adam.json").read_text())
    assert [(r["subject"], r["numel"]) for r in result["results"]] == [
        (subject, numel) for numel in (4096, 1001) for subject in ("fp32", "offload")
    ]
    for subject in result["results"]:
        assert {"limit", "shardcore CPUAdam", "torch fused AdamW"} <= subject["engines"].keys()
        assert all(len(engine["seconds"]) == 2 for engine in subject["engines"].values())
    assert result["options"]["threads"] == 1
    assert {"commit", "torch", "cpu"} <= result["machine"].keys()


def test_train_step(tmp_path, run_main):
    options = ["--preset", "tiny", "--batch", "1", "--rounds", "2", "--warmup", "1", "--pause", "0"]
    engines = ["FSDP2", "shardcore 0", "shardcore 2 + offload"]
    printed = run_main(bench_train_step, *options, "--engines", *engines, "--out", str(tmp_path))
    assert "time / DDP" in printed
    result = json.loads((tmp_path / "train_step.json").read_text())
    assert set(result["engines"]) == {"DDP", *engines}
    assert result["engines"]["DDP"]["time_over_ddp"]["median"] == 1.0
    assert all(len(engine["seconds"]) == 2 for engine in result["engines"].values())


def test_reduced_states(tmp_path, run_main):
    options = ["--numel", "4K", "--small", "1001", "--rounds", "2", "--threads", "1", "--pause", "0"]
    printed = run_main(bench_reduced_states, *options, "--out", str(tmp_path))
    assert "speed / fp32 master" in printed
    result = json.loads((tmp_path / "reduced_states.json").read_text())
    assert [(r["subject"], r["numel"]) for r in result["results"]] == [
        (subject, numel) for numel in (4096, 1001) for subject in ("offload", "fp32")
    ]
    assert result["results"][0]["states"]["split master, 8-bit states"]["bytes"] == 14


def test_convergence_goes_on_where_it_stopped(tmp_path, run_main):
    kinds = ["bf16 weights, fp32 master", "bf16 weights, split master"]
    options = ["--preset", "tiny", "--batch", "1", "--steps", "3", "--seeds", "1", "--threads", "1", "--out", str(tmp_path)]
    run_main(convergence, *options, "--kinds", kinds[0])
    first = json.loads((tmp_path / "convergence.json").read_text())["runs"]
    printed = run_main(convergence, *options, "--kinds", *kinds)
    runs = json.loads((tmp_path / "convergence.json").read_text())["runs"]
    assert runs[0] == first[0]
    assert [run["kind"] for run in runs] == kinds
    assert runs[0]["losses"] == runs[1]["losses"]
    assert "spread over seeds" in printed


@pytest.mark.parametrize("module", [bench_cpu_adam, bench_reduced_states, bench_train_step])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "x"], "argument --rounds: x; expected a whole number of at least 1"),
        (["--rounds", "0"], "argument --rounds: 0; expected a whole number of at least 1"),
        (["--pause", "-1"], "argument --pause: -1; expected a finite number of at least 0"),
        (["--out", __file__], f"argument --out: {__file__} cannot be written to (File exists); expected a folder"),
    ],
)
def test_bad_arguments(monkeypatch, capsys, module, arguments, message):
    monkeypatch.setattr(bench_cpu_adam.os, "execve", lambda *_: pytest.fail("started again"))  # it would replace pytest
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    with pytest.raises(SystemExit) as stop:
        module.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_train_step_needs_two_ranks(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_train_step", "--nproc", "1"])
    with pytest.raises(SystemExit):
        bench_train_step.main()
    assert "argument --nproc: 1; expected a whole number of at least 2" in capsys.readouterr().err


def test_an_engine_that_trains_something_else_is_noticed():
    losses = {"DDP": [5.5, 5.0], "same": [5.5, 5.0001], "idle": [5.5, 5.5]}
    assert bench_train_step.check_losses({"DDP": losses["DDP"], "same": losses["same"]})["same"] < 1e-3
    with pytest.raises(ValueError, match=r"bench_train_step: idle has losses that differ from DDP's by 1\.0e-01"):
        bench_train_step.check_losses(losses)


def test_an_engine_that_does_less_is_noticed():
    weight = torch.randn(4096)
    ours = bench_cpu_adam.Case(lambda: None, weight)
    same = bench_cpu_adam.Case(lambda: None, weight + 1e-7)
    idle = bench_cpu_adam.Case(lambda: None, weight + 1e-3)
    limit = bench_cpu_adam.Case(lambda: None, None)
    assert bench_cpu_adam.check_same_work("fp32", {bench_cpu_adam.OURS: ours, "same": same, "limit": limit}) < 1e-5
    with pytest.raises(ValueError, match="weights differ"):
        bench_cpu_adam.check_same_work("fp32", {bench_cpu_adam.OURS: ours, "idle": idle, "limit": limit})


def test_sizes():
    assert [bench_cpu_adam.parse_size(text) for text in ("4096", "64K", "2m")] == [4096, 65536, 2 * 2**20]
    for text in ("0", "-4K", "x", "", "1.5M"):
        with pytest.raises(bench_cpu_adam.argparse.ArgumentTypeError, match="expected a number of elements"):
            bench_cpu_adam.parse_size(text)


def test_ratios_are_paired_by_round():
    # The second round is ten times slower for both: a ratio of medians would not see that they are always 2 : 1.
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
    assert calls.count("a") == calls.count("b") == 8
    assert all({calls[i], calls[i + 2]} == {"a", "b"} for i in range(0, 16, 4))


def test_a_timer_may_be_given():
    asked = []

    def timer(call, repeats):
        asked.append(repeats)
        return 6.0

    seconds = harness.interleave({"a": lambda: None}, rounds=2, repeats=3, pause_s=0, warmup=1, timer=timer)
    assert seconds == {"a": [2.0, 2.0]}
    assert asked == [3, 3, 3]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_bar_is_for_terminals(terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    bar = harness.Bar(4, stream)
    for name in ("a", "b", "a", "b"):
        bar.advance(name)
    bar.clear()
    lines = stream.getvalue().replace("\x1b[K", "").split("\r")
    assert lines[1:] == (["." * 30 + " 0/4  a", "#" * 7 + "." * 23 + " 1/4  b", "#" * 15 + "." * 15 + " 2/4  a",
                          "#" * 22 + "." * 8 + " 3/4  b", ""] if terminal else [])  # fmt: skip
