"""shardcore estimate: what it prints and what it refuses."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from examples.llama import llama_70b
from shardcore import cli
from shardcore.estimate import predict
from shardcore.estimate.estimate_command import to_qlora
from shardcore.offload import disk


def blocks() -> torch.nn.Module:
    """Return a model with repeated blocks of two layers."""
    block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))  # noqa: E731
    return torch.nn.Sequential(*(block() for _ in range(4)))


def _mlp(hidden: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, hidden), torch.nn.Linear(hidden, 64))


mlp_6000 = partial(_mlp, 6_000)  # 12 MiB of states and masters
mlp_300000 = partial(_mlp, 300_000)
MODEL = blocks()


@pytest.mark.more
def test_estimate(capsys):
    assert cli.main(["estimate", "examples.llama:llama_7b", "--world-size", "8", "64"]) == 0
    head, assumed, titles, *rows, nccl = capsys.readouterr().out.splitlines()
    assert nccl.startswith("NCCL's buffers, on the device: about 1.00 ")
    assert "The table excludes NCCL's buffers, which follow it. " in head
    assert head.endswith("Activations are not estimated without --batch and --seq-len.")
    assert assumed == "bf16 weights, fp32 masters, fp32 moments, fp32 reduced gradients"
    assert head.startswith("examples.llama:llama_7b: 6,738,415,616 parameters in 33 units")
    assert titles.split()[:3] == ["ranks", "stage", "weights"]
    assert [row.split()[:2] for row in rows] == [
        [ranks, stage] for ranks in ("8", "64") for stage in "0123"
    ]
    assert (
        cli.main(
            [
                "estimate",
                "examples.llama:llama_7b",
                "--world-size",
                "8",
                "--stage",
                "2",
                "--offload",
                "cpu",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "exchange gradients" in text
    assert "gather weights after the step  33" in text
    assert (
        cli.main(
            ["estimate", "examples.llama:llama_7b", "--stage", "1", "--precision", "fp32", "--json"]
        )
        == 0
    )
    (entry,) = json.loads(capsys.readouterr().out)
    numel = entry["parameters"]
    sizes = {
        "weights": 4 * numel,
        "gradients": 4 * numel,
        "master": 0,
        "states": 8 * numel,
        "communication": 0,
    }
    assert entry["bytes"] == {"device": sizes}
    assert entry["transfers"] == []
    tiers = [
        "--offload",
        "cpu",
        "--offload-gradients",
        "--offload-params",
        "--ratio",
        "0.5",
        "--stage",
        "3",
        "--json",
    ]
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
    cells = dict(
        zip(titles.replace("on ", "on_").split()[:10], map(float, row.split()[:10]), strict=True)
    )
    assert cells["total"] == pytest.approx(cells["on_device"] + cells["on_cpu"], abs=0.02)
    # 2 + 2 + 2 + 2, and scales of moments
    assert cells["on_cpu"] * 2**30 / numel == pytest.approx(8 + 8 / 256, rel=1e-3)
    assert (
        cli.main(
            [
                "estimate",
                "examples.llama:llama_7b",
                "--offload",
                "nvme",
                "--stage",
                "3",
                "--offload-params",
            ]
        )
        == 0
    )
    _, _, titles, row, *_ = capsys.readouterr().out.splitlines()
    cells = dict(
        zip(titles.replace("on ", "on_").split()[:11], map(float, row.split()[:11]), strict=True)
    )
    assert cells["on_nvme"] * 2**30 / numel == pytest.approx(12, rel=1e-3)
    assert cells["on_cpu"] * 2**30 / numel == pytest.approx(2, rel=0.05)
    nodes = [
        "--world-size",
        "16",
        "--ranks-per-node",
        "4",
        "--hybrid",
        "--keep",
        "2",
        "--stage",
        "3",
        "--json",
    ]
    assert cli.main(["estimate", "examples.llama:llama_7b", *nodes]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["bytes"]["device"]["master"] == pytest.approx(4 * numel / 4, rel=0.01)
    assert "gather weights in backward, of parts kept" in {
        transfer["purpose"] for transfer in entry["transfers"]
    }


def test_json_has_the_rates_of_a_disk_and_weights_in_files_mean_stage_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disk, "measure", lambda *_: disk.Rates(2e3, 1e3, 1e3))
    in_files = [
        "--offload",
        "nvme",
        "--offload-params",
        "nvme",
        "--disk",
        str(tmp_path),
        "--disk",
        str(tmp_path),
    ]
    assert cli.main(["estimate", "tests.support.models:Net", "--json", *in_files]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["stage"] == 3
    assert entry["disk"]["bytes_per_second"] == {"read": 4e3, "write": 2e3, "both": 2e3}
    assert entry["disk"]["seconds"] == (entry["disk"]["read"] + entry["disk"]["written"]) / 2e3


def test_a_model_of_transformers_is_estimated_from_its_configuration(capsys, tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=100)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    numel = sum(param.numel() for param in transformers.GPT2LMHeadModel(config).parameters())
    for name in (tmp_path, tmp_path / "config.json"):
        assert cli.main(["estimate", str(name), "--stage", "3", "--offload-params", "--json"]) == 0
        (entry,) = json.loads(capsys.readouterr().out)
        assert entry["parameters"] == numel
        assert set(entry["bytes"]) == {"cpu", "device"}, "weights alone are in host memory"
        assert entry["bytes"]["cpu"]["states"] == 0 < entry["bytes"]["device"]["states"]


def test_a_function_may_import_its_neighbours_when_it_is_called(capsys, tmp_path, monkeypatch):
    (tmp_path / "built_by.py").write_text(
        "def build():\n    from neighbour_of import Linear\n    return Linear(2, 3)\n"
    )
    (tmp_path / "neighbour_of.py").write_text("from torch.nn import Linear\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["estimate", "built_by:build", "--stage", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["parameters"] == 9


def test_a_model_that_transformers_cannot_make_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=100)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)

    def needs_more(config: object) -> None:
        raise ImportError("it needs another library\nand\nmany words")

    monkeypatch.setattr(transformers, "GPT2LMHeadModel", needs_more)
    with pytest.raises(SystemExit):
        cli.main(["estimate", str(tmp_path)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "cannot make a GPT2LMHeadModel (ImportError: it needs another library)" in last
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SystemExit):
        cli.main(["estimate", str(tmp_path)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"shardcore estimate: error: MODEL is '{tmp_path}', from which")


def test_activations_and_nccls_buffers_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "examples.llama:llama_7b", "--batch", "2", "--seq-len", "64"]
    several = ["--world-size", "8", "--ranks-per-node", "4", "--nccl", "0.5", "--stage", "1"]
    assert cli.main([*command, *several, "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["nccl"] == 3 * 2**29, "all ranks, those of the node, and one of each node"
    assert entry["activations"]["whole"] > 2 * entry["activations"]["checkpointed"] > 0
    assert cli.main([*command, "--stage", "3"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].endswith(". The table excludes activations, which follow it.")
    assert "activations of 2 x 64 tokens, on the device: " in said
    assert "by a forward on the meta device" in said
    assert "buffers, on the device" not in said, "one rank has no communicator"


def test_small_models_are_shown_in_mib(capsys: pytest.CaptureFixture[str]) -> None:
    for hidden, unit in ((6_000, "MiB"), (300_000, "GiB")):
        size = 2**20 if unit == "MiB" else 2**30
        numel = 64 * hidden + hidden + hidden * 64 + 64
        name = f"tests.estimate.test_estimate_command:mlp_{hidden}"
        command = ["estimate", name, "--stage", "0", "--world-size", "2"]
        assert cli.main([*command, "--offload", "nvme", "--nccl", "0"]) == 0
        said = capsys.readouterr().out
        head, _, _, row, *_ = said.splitlines()
        assert f" {unit} of rank 0. " in head
        # the columns "weights" and "states"
        cells = [float(cell) for cell in row.split()[2:6]]
        assert cells[0] == pytest.approx(2 * numel / size, rel=1e-2, abs=0.006)
        assert cells[3] == pytest.approx(8 * numel / size, rel=1e-2, abs=0.006)
        for title in ("read per step", "written", "on disk", "sent"):
            assert f"{unit} {title}" in said
        assert said.count("GiB") == (0 if unit == "MiB" else 5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nosuchpkg", "ModuleNotFoundError: No module named 'nosuchpkg'"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import torch\ntorch.nope", "AttributeError: module 'torch' has no attribute 'nope'"),
    ],
)
def test_a_module_that_cannot_be_imported(
    text: str,
    reason: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "broken_module.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit):
        cli.main(["estimate", "broken_module:f"])
    said = capsys.readouterr().err
    assert said.startswith(f"shardcore estimate: error: importing broken_module failed: {reason}")


FIT = ["--fit", "--host-memory", "64", "--device-memory"]


def test_fit_names_its_times_and_prints_lines_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "tests.estimate.test_estimate_command:blocks", *FIT]
    assert cli.main([*command, "1"]) == 0
    said = capsys.readouterr().out
    assert ", 1 rank (1 per machine). " in said
    assert "The times exclude compute (forward, backward and recomputation)" in said
    assert said.count("  transfers and Adam, ms  ") == 2


def test_dtypes_have_the_names_that_shard_accepts(capsys: pytest.CaptureFixture[str]) -> None:
    for name, short in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        assert cli.main(["estimate", "tests.support.models:Net", "--precision", name]) == 0
        assert f"\n{short} weights, " in capsys.readouterr().out


def kept_weight_bytes() -> int:
    """Return the bytes of weights that a rank of 8 keeps of a 70B model in 4 bits with adapters."""
    with torch.device("meta"):
        model = llama_70b()
    to_qlora(model, 16)
    lines = predict(model, stage=3, world_size=8, precision="bf16").resting.lines
    return sum(line.bytes for line in lines if line.kind == "weights" and line.unit != "shared")


def test_a_70b_base_in_4_bits_takes_at_most_5_gb_of_each_of_8_ranks(monkeypatch):
    # per element of a linear layer: half a byte, and a scale per 64 with a float32 per 256 of them
    in_blocks, others = 80 * 855_638_016, 80 * 2 * 8192 + 8192 + 2 * 32_000 * 8192
    base = in_blocks * (1 / 2 + 1 / 64 + 4 / (64 * 256)) + 2 * others
    adapters = 2 * 80 * 16 * 161_792
    assert kept_weight_bytes() == pytest.approx((base + adapters) / 8, rel=1e-3)
    assert kept_weight_bytes() <= 5.0e9
    monkeypatch.setattr("shardcore.engine.units.with_parts", lambda named: named)
    assert kept_weight_bytes() > 5.0e9, "whole scales are seen"


def test_qlora_is_estimated(capsys):
    arguments = ["--world-size", "8", "--stage", "3", "--qlora", "16"]
    assert cli.main(["estimate", "examples.llama:llama_7b", *arguments]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert head.startswith("examples.llama:llama_7b: 6,778,392,576 parameters in 33 units")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "MODEL is 'nope', "),
        (["examples.llama"], "add :FUNCTION, as in examples.llama:llama_7b"),
        (["examples.llama:"], "add :FUNCTION, as in examples.llama:llama_7b"),
        (["examples/llama.py"], "add :FUNCTION, as in examples.llama:llama_7b"),
        (["nope/nope"], "MODEL is 'nope/nope', "),
        (["nope.json"], "MODEL is 'nope.json', but there is no such file"),
        (["docs"], "MODEL is 'docs', a folder without config.json"),
        (["nope:f"], "nope:f was not found from"),
        (["nope.nope:f"], "nope.nope:f was not found from"),
        (["examples.llama.nope:f"], "examples.llama.nope:f was not found from"),
        (["examples/llama.py:llama_7b"], "did you mean examples.llama:llama_7b?"),
        (["tests.estimate.test_estimate_command:MODEL"], "MODEL is already a model; pass a class"),
        (["tests.support.models:Net", "--gpus", "2"], "unknown option --gpus; use --world-size"),
        (["torch.nn:Linear"], "torch.nn:Linear() raised TypeError: "),
        (["tests.support.models:Net", "--batch", "1"], "--batch and --seq-len belong together"),
        (
            ["tests.support.models:Net", "--batch", "1", "--seq-len", "5"],
            ". Leave out --batch and --seq-len; with --fit, --device-memory and --host-memory "
            "pass --activations GIB instead",
        ),
        (
            ["examples.gpt:GPT", "--batch", "0", "--seq-len", "5"],
            "--batch or --seq-len is below 1",
        ),
        (["examples.llama:nope"], "has no attribute 'nope'"),
        (["builtins:list"], "builtins:list returned a list; expected a torch.nn.Module"),
        (
            ["examples.gpt:PRESETS"],
            "examples.gpt:PRESETS is a dict; expected a function or class that makes a model",
        ),
        (["tests.support.models:Net", "--units", "x"], '--units is x; expected "auto"'),
        (["tests.support.models:Net", "--units", "-5"], '--units is -5; expected "auto"'),
        (["tests.support.models:Net", "--units", "0"], '--units is 0; expected "auto"'),
        (
            ["examples.llama:llama_7b", "--world-size", "0"],
            "--world-size is 0; expected at least 1",
        ),
        (
            ["examples.llama:llama_7b", "--hybrid"],
            "--hybrid is given without --ranks-per-node; expected the number of ranks",
        ),
        (
            ["examples.llama:llama_7b", "--world-size", "8", "--ranks-per-node", "3"],
            "--ranks-per-node is 3; expected a divisor of --world-size 8",
        ),
        (["tests.support.models:Net", "--prefetch", "-1"], "--prefetch is -1; expected 0 or more"),
        (["tests.support.models:Net", "--ranks-per-node", "0"], "--ranks-per-node is 0"),
        (["tests.support.models:Net", "--offload", "cpu", "--ratio", "2"], "--ratio is 2; "),
        (["tests.support.models:Net", "--ratio", "0.5"], "--ratio is given without --offload"),
        (["tests.support.models:Net", "--offload-gradients"], "--offload-gradients is given with"),
        (
            ["tests.support.models:Net", "--offload", "cpu", "--offload-gradients", "--stage", "0"],
            "--offload-gradients is given with --stage 0",
        ),
        (
            ["tests.support.models:Net", "--offload-params", "--stage", "2"],
            "--offload-params is given with --stage 2",
        ),
        (["tests.support.models:Net", "--offload-params", "nvme"], "nvme needs --offload nvme"),
        (["tests.support.models:Net", *FIT, "1", "--hybrid"], "--hybrid with --fit; expected"),
        (["tests.support.models:Net", *FIT, "0"], "--device-memory is 0; expected"),
        (
            ["tests.support.models:Net", *FIT, "1", "--host-memory", "-1"],
            "--host-memory is -1; expected",
        ),
        (
            ["tests.support.models:Net", "--world-size", "8", "--keep", "3"],
            "--keep is 3; expected a divisor of 8, the number of ranks that share weights",
        ),
        (
            [
                *("tests.support.models:Net", "--world-size", "8", "--keep", "8"),
                *("--hybrid", "--ranks-per-node", "4"),
            ],
            "--keep is 8; expected a divisor of 4, the number of ranks that share weights",
        ),
        (["tests.support.models:Net", "--keep", "0"], "--keep is 0; expected a divisor of 1"),
        (
            ["tests.support.models:Net", *FIT, "1", "--activations", "-1"],
            "--activations is -1; expected 0 or more GiB",
        ),
        (
            ["tests.support.models:Net", *FIT, "1", "--disk-space", "-1"],
            "--disk-space is -1; expected 0 or more GiB",
        ),
        (["tests.support.models:Net", "--nccl", "nan"], "--nccl is nan; expected 0 or more GiB"),
        (
            ["tests.support.models:Net", *FIT, "1", "--disk-space", "inf"],
            "--disk-space is inf; expected 0 or more GiB",
        ),
        (
            ["examples.llama:llama_7b", "--grad-dtype", "fp16"],
            "argument --grad-dtype: invalid choice: 'fp16'",
        ),
        (
            ["examples.llama:llama_7b", "--master", "split", "--precision", "fp32"],
            "--master is split with --precision fp32",
        ),
        (
            ["tests.support.models:Net", "--keep", "1", "--stage", "2"],
            "--keep is given with --stage 2; expected --stage 3",
        ),
        (
            ["examples.llama:llama_7b", "--qlora", "0"],
            "--qlora is 0; expected at least 1",
        ),
        (
            ["torch.nn:Identity", "--qlora", "8"],
            "--qlora needs linear layers in repeated blocks",
        ),
        (
            ["examples.llama:llama_7b", "--accumulate", "0"],
            "--accumulate is 0; expected at least 1",
        ),
        (
            ["tests.support.models:Net", "--offload", "cpu", "--disk", "/"],
            "--disk with --offload cpu; expected --offload nvme",
        ),
        (
            ["tests.support.models:Net", "--offload", "nvme", "--disk", "/nonexist"],
            "--disk /nonexist is not an existing directory",
        ),
    ],
)
def test_what_cannot_be_estimated_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(["estimate", *arguments])
    assert stop.value.code == 2
    *usage, said = capsys.readouterr().err.splitlines()
    assert usage in ([], ["usage: shardcore estimate MODEL [OPTIONS]"]), "argparse's own errors"
    assert said.startswith("shardcore estimate: error: ")
    assert message in said
    assert "connect" not in said
