"""shardcore info and bench: what they print, what they refuse, and which suite runs with which options."""

import importlib
import json
import subprocess
import sys
import tomllib

import pytest
import torch

import shardcore
from shardcore import cli
from shardcore._native import _C

ROOT = cli._CHECKOUT


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A checkout with made-up suites: each runs a line of code with ``options`` at hand."""

    def make(**suites):
        folder = tmp_path / "benchmarks"
        folder.mkdir()
        (tmp_path / "pyproject.toml").touch()
        (folder / "__init__.py").touch()  # else a PYTHONPATH with the real checkout would come first
        for name, code in suites.items():
            head = f'"""Time {name}.\n\nMore of it.\n"""\nimport sys\noptions = sys.argv[1:]\n'
            (folder / f"bench_{name}.py").write_text(head + code + "\n")
        monkeypatch.setattr(cli, "_CHECKOUT", tmp_path)
        return tmp_path

    return make


def test_info(capsys):
    assert cli.main(["info"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == ["shardcore", "build", "library", "compiler", "torch", "CPU", "CUDA", "GPUs"]
    assert lines["shardcore"] == shardcore.__version__
    assert lines["torch"] == torch.__version__
    assert lines["library"] == _C.__file__
    assert " because " in lines["build"]
    assert lines["CPU"].startswith(f"{_C.cpu_isa()} (")
    assert (lines["CUDA"] == "not in this build") == (_C.build_info()["cuda"] == "")


def test_the_script_runs_main():
    module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["shardcore"].partition(":")
    assert getattr(importlib.import_module(module), function) is cli.main


def test_only_what_is_built_is_offered(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "info | estimate | bench" in text
    for word in ("consolidate", "{run"):
        assert word not in text
    for bad in ([], ["estimate"], ["consolidate"], ["run"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(bad)
        assert stop.value.code == 2


def test_estimate(capsys):
    assert cli.main(["estimate", "examples.llama:llama_7b", "--world-size", "8", "64"]) == 0
    head, assumed, titles, *rows = capsys.readouterr().out.splitlines()
    assert assumed == "bf16 weights, fp32 masters, fp32 moments, fp32 reduced gradients"
    assert head.startswith("examples.llama:llama_7b: 6,738,415,616 parameters in 33 units")
    assert titles.split()[:3] == ["ranks", "stage", "weights"]
    assert [row.split()[:2] for row in rows] == [[ranks, stage] for ranks in ("8", "64") for stage in "0123"]
    assert cli.main(["estimate", "examples.llama:llama_7b", "--world-size", "8", "--stage", "2", "--offload", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "exchange gradients" in text
    assert "gather weights after the step  33" in text
    assert cli.main(["estimate", "examples.llama:llama_7b", "--stage", "1", "--precision", "fp32", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    numel = entry["parameters"]
    sizes = {"weights": 4 * numel, "gradients": 4 * numel, "master": 0, "states": 8 * numel, "communication": 0}
    assert entry["bytes"] == {"device": sizes}
    assert entry["transfers"] == []
    tiers = ["--offload", "cpu", "--offload-gradients", "--offload-params", "--ratio", "0.5", "--stage", "3", "--json"]
    assert cli.main(["estimate", "examples.llama:llama_7b", *tiers]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["bytes"]["cpu"]["weights"] == 2 * numel
    for kind, each in (("master", 4), ("states", 8), ("gradients", 2)):
        assert entry["bytes"]["cpu"][kind] == entry["bytes"]["device"][kind] == each * numel / 2
    everything = ["--offload", "cpu", "--offload-gradients", "--offload-params", "--stage", "3"]
    reduced = ["--master", "split", "--state-dtype", "8bit", "--grad-dtype", "bf16"]
    assert cli.main(["estimate", "examples.llama:llama_7b", *everything, *reduced]) == 0
    _, assumed, titles, row, *_ = capsys.readouterr().out.splitlines()
    assert assumed == "bf16 weights, split masters, 8bit moments, bf16 reduced gradients"
    cells = dict(zip(titles.replace("on ", "on_").split()[:10], map(float, row.split()[:10]), strict=True))
    assert cells["total"] == pytest.approx(cells["on_device"] + cells["on_cpu"], abs=0.02)
    assert cells["on_cpu"] * 2**30 / numel == pytest.approx(8 + 8 / 256, rel=1e-3)  # 2 + 2 + 2 + 2, and scales of moments
    nodes = ["--world-size", "16", "--ranks-per-node", "4", "--hybrid", "--keep", "2", "--stage", "3", "--json"]
    assert cli.main(["estimate", "examples.llama:llama_7b", *nodes]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["bytes"]["device"]["master"] == pytest.approx(4 * numel / 4, rel=0.01)
    assert "gather weights in backward, of parts kept" in {transfer["purpose"] for transfer in entry["transfers"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "MODULE:FUNCTION is 'nope'; expected a module and a function in it"),
        (["nope:f"], "nope:f was not found from"),
        (["examples.llama:nope"], "has no attribute 'nope'"),
        (["builtins:list"], "builtins:list returned a list; expected a torch.nn.Module"),
        (["examples.gpt:PRESETS"], "examples.gpt:PRESETS is a dict; expected a function or class that makes a model"),
        (["examples.llama:llama_7b", "--units", "x"], 'units is "x"; expected "auto"'),
        (["examples.llama:llama_7b", "--world-size", "0"], "world_size is 0; expected at least 1"),
        (["examples.llama:llama_7b", "--hybrid"], "hybrid is True without ranks_per_node; expected the number of ranks"),
        (["examples.llama:llama_7b", "--world-size", "8", "--ranks-per-node", "3"], "expected a divisor of the 8 ranks"),
        (["examples.llama:llama_7b", "--world-size", "8", "--keep", "3"], "expected a divisor of 8, the ranks that share"),
        (["examples.llama:llama_7b", "--grad-dtype", "fp16"], "argument --grad-dtype: invalid choice: 'fp16'"),
        (["examples.llama:llama_7b", "--master", "split", "--precision", "fp32"], "--master is split with --precision fp32"),
        (["examples.llama:llama_7b", "--keep", "1", "--stage", "2"], "reshard_after_forward is 1 at stage 2"),
        (["examples.llama:llama_7b", "--accumulate", "0"], "accumulate is 0; expected at least 1"),
    ],
)
def test_what_cannot_be_estimated_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(["estimate", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_suites_are_those_of_the_checkout(capsys):
    suites = cli._suites(ROOT)
    assert {"adam_scaling", "cpu_adam", "fused_adam", "reduced_states", "train_step"} <= set(suites)
    assert all(about.startswith("Time ") and about.endswith(".") for about in suites.values())
    for name in suites:
        assert f'"{name}.json"' in (ROOT / f"benchmarks/bench_{name}.py").read_text()  # where bench says the figures are
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    capsys.readouterr()
    assert cli.main(["bench"]) == 0
    assert "cpu_adam        Time one CPU Adam step" in capsys.readouterr().out


def test_a_real_suite(tmp_path):
    """Run as a module."""
    options = ["--numel", "4K", "--small", "1001", "--rounds", "2", "--threads", "1", "--pause", "0"]
    command = [sys.executable, "-m", "shardcore", "bench", "reduced_states", "--out", "here", *options]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "MPLCONFIGDIR": str(tmp_path)}  # matplotlib warns of a bad home
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    file = tmp_path / "here/reduced_states.json"
    assert json.loads(file.read_text())["options"]["rounds"] == 2
    assert done.stderr == ""  # the bar is for terminals


def test_a_suite_gets_its_options_and_gives_its_status(checkout, capfd):
    checkout(a="print(options)\nsys.exit(5)")
    assert cli.main(["bench", "a", "--rounds", "3", "--out=x"]) == 5
    assert "['--rounds', '3', '--out=x']" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (False, "argument SUITE: nope; expected a\n"),
        (True, "is no source checkout; expected one (clone the repository, make setup"),
    ],
)
def test_what_is_not_there_is_refused(checkout, capsys, installed, message):
    root = checkout(a="pass")
    if installed:  # another package may have installed a folder of that name
        (root / "pyproject.toml").unlink()
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "nope"])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
