"""tools/gpu_check.py without a GPU: what it refuses, its parts, its report, and steps that fail,
hang or lack a tool.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import bench_copies, bench_offload_train
from benchmarks.device import Device
from tools import check_ranks, gpu_check
from tools.gpu_check import Step

DEVICE = {
    "name": "NVIDIA Test 9000",
    "capability": "9.0",
    "memory_bytes": 1,
    "multiprocessors": 1,
    "count": 1,
    "driver": "1.2",
}


def python(name, code, limit_s=60.0, **more):
    return Step(name, [sys.executable, "-c", code], limit_s, **more)


BUILD = python("build", "print('built')")
OK = python("ok", "print('fine')")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run main with made-up parts, as if there were a GPU; returns (exit status, reports by
    part, what was printed).
    """
    monkeypatch.setattr(gpu_check, "why_no_gpu", lambda: None)
    monkeypatch.setattr(gpu_check, "describe_device", lambda: DEVICE)
    monkeypatch.setattr(gpu_check, "build_environment", lambda: {"TORCH_CUDA_ARCH_LIST": "9.0"})
    clocks = (
        "import time; print('300, 2619', '1980, 3201', '1000, 2619', sep='\\n', flush=True); "
        "time.sleep(60)"
    )
    monkeypatch.setattr(gpu_check, "nvidia_smi", lambda *fields: [sys.executable, "-c", clocks])
    monkeypatch.setattr(gpu_check, "INTERRUPT_S", 5)
    monkeypatch.setattr(gpu_check, "WORK", tmp_path / "work")
    out = tmp_path / "results"

    def run(parts, *arguments, build=BUILD):
        monkeypatch.setattr(gpu_check, "build", lambda: build)
        monkeypatch.setattr(
            gpu_check, "PARTS", {name: lambda steps=steps: steps for name, steps in parts.items()}
        )
        monkeypatch.setattr(
            sys, "argv", ["gpu_check", "--out", str(out), "--commit", "abc", *arguments]
        )
        code = gpu_check.main()
        reports = {path.name: json.loads(path.read_text()) for path in out.glob("*.json")}
        return code, reports, capsys.readouterr().out

    return run


def statuses(report):
    return {step["name"]: step["status"] for step in report["steps"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_exits_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 2
    said = (
        f"gpu_check: this machine has no GPU that torch {torch.__version__} can use; expected "
        f"one; nothing was run"
    )
    assert said in capsys.readouterr().err
    rule = subprocess.run(
        ["make", "-n", "gpu-check"], cwd=gpu_check.ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "-m tools.gpu_check" in rule


def test_without_torch_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "torch", None)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 2
    assert (
        f"gpu_check: {sys.executable} has no torch; expected one built for CUDA"
        in capsys.readouterr().err
    )


def test_an_unknown_part_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--part", "kernel"])
    with pytest.raises(SystemExit) as stop:
        gpu_check.main()
    assert stop.value.code == 2
    assert "invalid choice: 'kernel' (choose from" in capsys.readouterr().err


@pytest.mark.more
def test_the_report(run):
    says = "import os; print(os.environ['SHARDCORE_COMMIT'])"
    says += "; import time; time.sleep(1)"  # its clocks are seen
    figure = python(
        "figures",
        says,
        read=lambda folder: ({"of": (folder / "log.txt").read_text().strip()}, None),
    )
    code, reports, printed = run({"kernels": [figure]})
    assert code == 0
    report = reports["gpu_kernels_nvidia_test_9000.json"]
    assert list(report) == ["report", "part", "passed", "device", "machine", "steps"]
    assert (report["report"], report["part"], report["passed"], report["device"]) == (
        "gpu_check",
        "kernels",
        True,
        DEVICE,
    )
    assert report["machine"]["commit"] == "abc"
    assert [list(step) for step in report["steps"]] == [
        ["name", "status", "detail", "seconds", "clocks_mhz", "figures"]
    ] * 2
    assert report["steps"][1]["clocks_mhz"] == {
        "sm": [300.0, 1000.0, 1980.0],
        "memory": [2619.0, 2619.0, 3201.0],
    }
    assert statuses(report) == {"build": "passed", "figures": "passed"} or statuses(report) == {
        "ok": "passed",
        "figures": "passed",
    }
    assert report["steps"][1]["figures"] == {"of": "abc"}, "its steps say the same commit"
    assert "gpu_check: part kernels passed; wrote" in printed
    assert "no picture was made" in printed


def test_only_the_part_that_is_asked_for_runs(run):
    code, reports, _ = run({"a": [OK], "b": [OK]}, "--part", "b")
    assert (code, list(reports)) == (0, ["gpu_b_nvidia_test_9000.json"])
    code, reports, _ = run({"a": [OK], "b": [OK]})
    assert (code, len(reports)) == (0, 2)


def test_a_step_that_fails_makes_the_part_fail_and_the_rest_is_written(run):
    def half(folder):
        return {"half": 1}, None

    steps = [
        python("fails", "import sys; print('why'); sys.exit(7)", read=half),
        python("lacks", "import sys; sys.exit(3)"),
        OK,
    ]
    code, reports, printed = run({"kernels": steps})
    (report,) = reports.values()
    assert code == 1
    assert report["passed"] is False
    assert statuses(report) == {
        "build": "passed",
        "fails": "failed",
        "lacks": "not done",
        "ok": "passed",
    }
    by_name = {step["name"]: step for step in report["steps"]}
    assert by_name["fails"]["detail"] == "exit status 7: why"
    assert by_name["fails"]["figures"] == {"half": 1}
    assert by_name["lacks"]["detail"].startswith("a tool is missing")
    assert "part kernels did NOT pass" in printed


def test_a_missing_tool_alone_makes_the_part_fail(run):
    assert run({"kernels": [OK, python("lacks", "import sys; sys.exit(3)")]})[0] == 1


def test_a_reader_may_refuse_and_may_break(run):
    empty = python("empty", "pass", read=lambda folder: ({"passed": 0}, "no test passed"))
    broken = python("broken", "pass", read=gpu_check.read_tests)
    code, reports, _ = run({"kernels": [empty, broken]})
    (report,) = reports.values()
    assert code == 1
    assert [step["status"] for step in report["steps"]] == ["passed", "failed", "failed"]
    assert report["steps"][1]["detail"].startswith("no test passed")
    assert "its result cannot be read" in report["steps"][2]["detail"]


def test_nothing_runs_after_a_build_that_failed(run):
    code, reports, _ = run({"kernels": [OK]}, build=python("build", "import sys; sys.exit(1)"))
    (report,) = reports.values()
    assert code == 1
    assert statuses(report) == {"build": "failed", "ok": "not done"}


def is_running(pid: str) -> bool:
    """Whether a process is neither gone nor dead and waiting for its parent. Of /proc, as small
    systems have no ps.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
def test_a_step_that_hangs_is_stopped_with_its_children_and_may_write_what_it_has(run, tmp_path):
    child = (
        "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'import time; "
        "time.sleep(600)'])"
    )
    code = f"""
import time, pathlib
{child}
pathlib.Path({str(tmp_path / "child")!r}).write_text(str(c.pid))
try:
    time.sleep(600)
finally:
    pathlib.Path({str(tmp_path / "partial")!r}).write_text("3")
"""
    hangs = python(
        "hangs",
        code,
        3.0,
        read=lambda folder: ({"partial": (tmp_path / "partial").read_text()}, None),
    )
    start = time.monotonic()
    _, reports, _ = run({"kernels": [hangs, OK]})
    assert time.monotonic() - start < 60
    (report,) = reports.values()
    entry = report["steps"][1]
    assert (entry["status"], entry["figures"]) == ("failed", {"partial": "3"})
    assert entry["detail"].startswith("stopped after 3 s")
    assert report["steps"][2]["status"] == "passed"
    assert is_running(str(os.getpid()))
    assert not is_running((tmp_path / "child").read_text())


def test_a_part_has_a_limit(run, monkeypatch):
    monkeypatch.setattr(gpu_check, "PART_LIMIT_S", -1)
    code, reports, _ = run({"kernels": [OK]})
    (report,) = reports.values()
    assert code == 1
    assert report["steps"][0]["detail"] == "no time was left for it"


def test_pictures_lie_beside_the_report_and_of_one_name_are_named_by_their_steps(run, tmp_path):
    draws = (
        "import pathlib, sys; pathlib.Path(sys.argv[1], "
        "'bars.png').write_bytes(sys.argv[2].encode())"
    )
    steps = [python(name, draws) for name in ("small", "large")]
    for step in steps:
        step.command.extend(["{folder}", step.name])
    stem, found = "gpu_kernels_nvidia_test_9000", {}
    for given in (steps[:1], steps):
        _, _, printed = run({"kernels": given})
        assert "no picture was made" not in printed
        found |= {path.name: path.read_text() for path in (tmp_path / "results").glob("*.png")}
    assert found == {
        f"{stem}_bars.png": "small",
        f"{stem}_small_bars.png": "small",
        f"{stem}_large_bars.png": "large",
    }
    run({"kernels": [OK]})
    assert not (tmp_path / "work/kernels/small").exists()


def test_a_step_is_given_the_time_that_it_may_take(run, monkeypatch):
    monkeypatch.setattr(gpu_check, "ENDING_S", 5)

    def read(folder):
        return {"s": (folder / "log.txt").read_text()}, None

    limits = {"enough": 40.0, "little": 5.5, "rest": 10.0**6}
    steps = [
        python(name, "import sys; print(sys.argv[1])", limit_s, read=read)
        for name, limit_s in limits.items()
    ]
    for step in steps:
        step.command.append("at {seconds}")
    _, reports, _ = run({"kernels": steps})
    (report,) = reports.values()
    enough, little, rest = (step["figures"]["s"].strip() for step in report["steps"][1:])
    assert (enough, little) == ("at 35", "at 1")
    assert 0 < float(rest.removeprefix("at ")) <= gpu_check.PART_LIMIT_S - 5


def test_copies_below_their_target_are_a_failure(tmp_path):
    assert gpu_check.read_copies(tmp_path) == ({}, "it wrote no figures")
    (tmp_path / "copies.json").write_text('{"below_target": []}')
    assert gpu_check.read_copies(tmp_path) == ({"below_target": []}, None)
    (tmp_path / "copies.json").write_text('{"below_target": ["a: 0.90", "b: 0.91"]}')
    assert gpu_check.read_copies(tmp_path)[1] == "a: 0.90; b: 0.91"


def test_training_without_offload_is_a_failure(tmp_path):
    assert gpu_check.read_training(tmp_path) == ({}, "it wrote no figures")
    engines = {"shardcore 2": {"moved_bytes": [0, 0]}, "peer": {}}
    (tmp_path / "offload_train.json").write_text(
        json.dumps({"engines": engines, "left_out": {"shardcore 2, x": "large"}})
    )
    assert gpu_check.read_training(tmp_path)[1].endswith(
        "with offload: {'shardcore 2, x': 'large'}"
    )
    engines["shardcore 2, x"] = {"moved_bytes": [0.5, 0]}
    (tmp_path / "offload_train.json").write_text(json.dumps({"engines": engines, "left_out": {}}))
    assert gpu_check.read_training(tmp_path)[1] is None


TESTS = """
import pytest
def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip(reason="no GPU")
def test_skipped(): pass
"""


@pytest.mark.more
def test_pytests_results_are_read(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--junitxml=junit.xml",
        "test_it.py",
    ]
    # quicker, and they count no tests
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    figures, problem = gpu_check.read_tests(tmp_path)
    assert problem is None
    assert figures == {
        "passed": 1,
        "failed": ["test_it::test_bad"],
        "skipped": {"test_it::test_skipped": "no GPU"},
    }
    subprocess.run(
        [*command, "-k", "skipped"], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert gpu_check.read_tests(tmp_path)[1] == "no test passed"


def test_the_ranks_part_runs_what_is_there(monkeypatch):
    options = check_ranks.make_parser()
    for gpus, names, counts in (
        (1, ["layouts_2", "layouts_4", "left_out_backward"], ["2", "4", "2"]),
        (16, ["layouts", "left_out_backward", "benchmark"], ["8", "8"]),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        steps = gpu_check.ranks()
        assert [step.name for step in steps] == names
        launched = [step.command for step in steps if "torch.distributed.run" in step.command]
        assert [command[command.index("--nproc-per-node") + 1] for command in launched] == counts
        for command in launched:
            given = options.parse_args(command[command.index("tools.check_ranks") + 1 :])
            assert given.device == "cuda"
    assert list(gpu_check.PARTS)[:2] == ["speed", "ranks"]


def test_the_parts_run_what_is_there():
    names = {
        "speed": ["ordered_sum", "benchmarks"],
        "activations": ["tests", "benchmark"],
        "kernels": ["tests", "machine_code", "memcheck", "racecheck", "initcheck"],
    }
    for part, expected in names.items():
        steps = gpu_check.PARTS[part]()
        assert [step.name for step in steps] == expected
        for step in [gpu_check.build(), *steps]:
            assert step.command[:2] == [sys.executable, "-m"]
            program = gpu_check.ROOT / step.command[2]
            assert program.is_file() or importlib.util.find_spec(step.command[2]) is not None


@pytest.mark.more
def test_each_test_of_a_gpu_is_in_one_part():
    """pytest reads all files here, which the parts do not."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests",
        "-m",
        "gpu",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    found = subprocess.run(
        command, cwd=gpu_check.ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = sorted({line.partition("::")[0] for line in found.splitlines() if "::" in line})
    assert sorted(path for paths in gpu_check.GPU_TESTS.values() for path in paths) == files
    for part, paths in gpu_check.GPU_TESTS.items():
        tests = gpu_check.PARTS[part]()[0].command
        assert tests[2:5] == ["pytest", "-m", "gpu"]
        assert tests[-len(paths) :] == paths


def test_the_sharding_part_runs_what_is_there(monkeypatch, tmp_path, capsys):
    """Every command line is understood by the program that it starts, up to what only a GPU can
    do.
    """
    steps = {step.name: step for step in gpu_check.sharding()}
    assert list(steps) == ["tests", "benchmark", "trace", "trace_offload"]
    for step in list(steps.values())[1:]:
        module = importlib.import_module(step.command[2])
        launched = []
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(
            module, "launch", lambda *arguments, seen=launched: seen.append(arguments) or 0
        )
        monkeypatch.setattr(
            sys, "argv", [part.replace("{folder}", str(tmp_path)) for part in step.command[2:]]
        )
        assert module.main() == 0
        ((function, nproc, device, _, options),) = launched
        assert (function, nproc, device, options.preset) == (module.run_rank, 1, "cuda", "gpu")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(SystemExit):
            module.main()
        assert "--device: cuda; torch can use 0 GPUs here" in capsys.readouterr().err


def test_the_offload_part_runs_what_is_there(monkeypatch, tmp_path, capsys):
    steps = {step.name: step for step in gpu_check.offload()}
    assert list(steps) == ["tests", "copies", "train_1.5b", "train_7b"]
    assert sum(step.limit_s for step in steps.values()) < gpu_check.PART_LIMIT_S
    started = []
    level = {
        "rate_over_plain": {"median": 1.0, "low": 1.0, "high": 1.0},
        "gb_per_second": {"shardcore": 1.0},
    }
    copied = {"ways": dict.fromkeys(bench_copies.WAYS, level)}
    monkeypatch.setattr(
        bench_copies,
        "measure",
        lambda device, size_bytes, options: started.append(size_bytes) or copied,
    )
    monkeypatch.setattr(bench_copies, "shortfalls", lambda report: ["slow"])
    monkeypatch.setattr(bench_copies, "Device", lambda kind: Device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *index: "GPU")
    monkeypatch.setattr(
        bench_offload_train, "launch", lambda *arguments: started.append(arguments) or 0
    )
    for name in ("copies", "train_1.5b", "train_7b"):
        command = [
            part.replace("{folder}", str(tmp_path)).replace("{seconds}", "60")
            for part in steps[name].command[2:]
        ]
        module = {"copies": bench_copies}.get(name, bench_offload_train)
        assert command[0] == module.__name__
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(SystemExit):
            module.main()
        assert "--device: cuda; torch can use 0 GPUs here" in capsys.readouterr().err
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        assert module.main() == 0
    *sizes, small, large = started
    assert max(sizes) == 2**28
    for (function, nproc, device, threads, options), preset in ((small, "1.5b"), (large, "7b")):
        assert (function, nproc, device, threads) == (bench_offload_train.run_rank, 1, "cuda", None)
        assert (options.preset, options.seconds) == (preset, 60.0)


def test_figures_are_read(tmp_path):
    read = gpu_check.read_figures("train_step")
    assert read(tmp_path) == ({}, "it wrote no figures")
    (tmp_path / "train_step.json").write_text('{"a": 1}')
    assert read(tmp_path) == ({"a": 1}, None)


def test_the_build_is_for_the_gpus_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda index: [(9, 0), (8, 0), (9, 0)][index]
    )
    assert gpu_check.build_environment() == {
        "SHARDCORE_CUDA": "1",
        "TORCH_CUDA_ARCH_LIST": "8.0;9.0",
    }
