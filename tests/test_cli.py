"""shardcore info and bench: what they print, what they refuse, and which suite runs with which
options.
"""

import importlib
import json
import tomllib

import pytest
import torch

import shardcore
from shardcore import cli
from shardcore._native import _C
from shardcore.distributed import machine
from tests.support.models import Run, train

ROOT = cli._CHECKOUT


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A checkout with made-up suites: each runs a line of code with ``options`` at hand."""

    def make(**suites):
        folder = tmp_path / "benchmarks"
        folder.mkdir()
        (tmp_path / "pyproject.toml").touch()
        # else a PYTHONPATH with the real checkout would come first
        (folder / "__init__.py").touch()
        for name, code in suites.items():
            head = f'"""Time {name}.\n\nMore of it.\n"""\nimport sys\noptions = sys.argv[1:]\n'
            (folder / f"bench_{name}.py").write_text(head + code + "\n")
        monkeypatch.setattr(cli, "_CHECKOUT", tmp_path)
        return tmp_path

    return make


def test_info(capsys):
    assert cli.main(["info"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == [
        "shardcore",
        "build",
        "library",
        "compiler",
        "torch",
        "CPU",
        "CUDA",
        "GPUs",
        "NUMA",
    ]
    assert lines["shardcore"] == shardcore.__version__
    assert lines["torch"] == torch.__version__
    assert lines["library"] == _C.__file__
    assert " because " in lines["build"]
    assert lines["CPU"].startswith(f"{_C.cpu_isa()} (")
    assert (lines["CUDA"] == "not in this build") == (_C.build_info()["cuda"] == "")


def test_info_names_a_directory_that_does_not_exist(capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        cli.main(["info", "--disk", str(tmp_path), f"{tmp_path}/missing"])
    assert stop.value.code == 2
    expected = f"--disk {tmp_path}/missing is not an existing directory"
    assert capsys.readouterr().err == f"shardcore info: error: {expected}\n"


def test_info_of_two_sockets(capsys, monkeypatch):
    nodes = {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    monkeypatch.setattr(machine, "numa_nodes", lambda root=None: nodes)
    monkeypatch.setattr(machine, "own_cores", lambda: list(range(8)))
    monkeypatch.setattr(machine, "quota", lambda: None)
    monkeypatch.setattr(machine, "pci_address", str)
    monkeypatch.setattr(machine, "near_cores", lambda address: nodes[int(address)])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cli, "_facts", dict)
    assert cli.main(["info"]) == 0
    both = [
        "NUMA      node 0 has cores 0-3; node 1 has cores 4-7",
        "one rank  updates states on cores 0-7, which lie on nodes 0, 1 by turns",
        "GPU 0     is on node 0; its rank of 2 updates states on cores 0-3, which lie on node 0",
        "GPU 1     is on node 1; its rank of 2 updates states on cores 4-7, which lie on node 1",
    ]
    assert [
        line for line in capsys.readouterr().out.splitlines() if not line.startswith("but ")
    ] == both
    nodes[1023] = nodes.pop(1)
    del nodes[0]
    monkeypatch.setattr(machine, "near_cores", lambda address: [])
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert "GPU 1     is on an unknown node; its rank of 2 updates" in text
    assert "but       the system refuses to place memory (mbind: " in text


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"shardcore {shardcore.__version__}\n"


def test_the_script_runs_main():
    module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "scripts"
    ]["shardcore"].partition(":")
    assert getattr(importlib.import_module(module), function) is cli.main


def test_only_what_is_built_is_offered(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "info | run | estimate | consolidate | report | compare | bench" in text
    for bad in ([], ["estimate"], ["consolidate"], ["run"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(bad)
        assert stop.value.code == 2


def test_consolidate(tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")
    model, optimizer, _ = train(0, Run(stage=2, steps=1, precision="bf16"))
    shardcore.save(tmp_path / "saved", model, optimizer)
    out = tmp_path / "out"
    assert (
        cli.main(
            [
                "consolidate",
                str(tmp_path / "saved"),
                str(out),
                "--dtype",
                "bf16",
                "--max-shard-size",
                "8KB",
            ]
        )
        == 0
    )
    paths = capsys.readouterr().out.split()
    assert paths[-1] == str(out / "model.safetensors.index.json")
    found = {
        name: value for path in paths[:-1] for name, value in safetensors.load_file(path).items()
    }
    assert all(
        torch.equal(found[name], value.bfloat16()) for name, value in model.state_dict().items()
    )
    for bad in (["--tag", "nothing"], ["--max-shard-size", "much"], ["--dtype", "int8"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(["consolidate", str(tmp_path / "saved"), str(out), *bad])
        assert stop.value.code == 2
    assert "/nothing does not exist" in capsys.readouterr().err


def test_the_suites_are_those_of_the_checkout(capsys):
    suites = cli._suites(ROOT)
    assert {"cpu_adam", "fused_adam", "ordered_sum", "train_step"} <= set(suites)
    assert all(about.startswith("Time ") and about.endswith(".") for about in suites.values())
    for name in suites:
        # where bench says the figures are
        assert f'"{name}.json"' in (ROOT / f"benchmarks/bench_{name}.py").read_text()
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    capsys.readouterr()
    assert cli.main(["bench"]) == 0
    assert "cpu_adam       Time one CPU Adam step" in capsys.readouterr().out


@pytest.mark.more
def test_a_real_suite(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))  # matplotlib warns of a bad home
    options = [
        "--device",
        "cpu",
        "--ranks",
        "8",
        "4",
        "--unit",
        "8K",
        "--rounds",
        "2",
        "--pause",
        "0",
    ]
    assert cli.main(["bench", "ordered_sum", "--out", "here", *options]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""  # the bar is for terminals
    assert "share of reading" in printed.out
    result = json.loads((tmp_path / "here/ordered_sum.json").read_text())
    assert result["options"]["rounds"] == 2
    assert [(found["ranks"], found["numel"]) for found in result["sums"]] == [(8, 1024), (4, 2048)]


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
