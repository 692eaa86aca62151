"""The recipes: their scripts with the tiny preset, and the figures of their pages, computed
again.
"""

import json
import math
import re

import pytest
import torch

pytest.importorskip("transformers", reason="the recipes train transformers' Llama")

from safetensors.torch import load_file

from examples import llama
from examples.gpt import GPT, PRESETS, next_byte_loss
from examples.recipes import llama_7b_one_gpu, llama_70b_eight_gpus
from shardcore import FusedAdam, cli, consolidate
from shardcore.estimate import predict
from tests.support.activations import peak_bytes
from tests.support.scripts import ROOT, check_losses_fall, losses_in, run_forked

FOLDER = ROOT / "examples" / "recipes"
PAGES = ROOT / "docs" / "recipes"
KINDS = ("weights", "gradients", "master", "states", "communication")
TINY = ["--preset", "tiny", "--length", "64", "--lr", "3e-3"]
GIB = 2**30


def page(name):
    return (PAGES / name).read_text()


def predicted(recipe, preset, world_size, lean=False, **other):
    """The prediction for a recipe's own model and options, which `other` replaces."""
    model = recipe.make_model(preset)
    optimizer = FusedAdam(model.parameters(), **(recipe.LEAN if lean else {}))
    return predict(model, optimizer, world_size=world_size, **(recipe.SHARD | other))


def gib(count):
    return f"{count / GIB:.2f}"


def row(prediction, tier, title):
    """The line of a page's table: GiB by kind, and their sum."""
    held = dict.fromkeys(KINDS, 0)
    for line in prediction.resting.lines:
        if line.tier == tier:
            held[line.kind] += line.bytes
    return (
        f"| {title} | {' | '.join(gib(count) for count in [*held.values(), sum(held.values())])} |"
    )


def test_bytes_of_the_7b():
    text = page("7b_on_24_gb.md")
    plain, lean = (predicted(llama_7b_one_gpu, "7b", 1, lean) for lean in (False, True))
    assert f"{plain.numel:,} parameters" in text
    assert row(plain, "device", "device") in text
    assert row(plain, "cpu", "host") in text
    assert row(lean, "cpu", "host, `--lean`") in text
    assert row(lean, "device", "device") in text  # the same
    other = predicted(llama_7b_one_gpu, "7b", 1, offload={"optimizer": "cpu", "gradients": "cpu"})
    assert row(other, "device", "device") not in text
    assert sum(plain.resting.by_tier.values()) > sum(lean.resting.by_tier.values())


@pytest.mark.more
def test_bytes_of_the_70b():
    text = page("70b_on_8x80_gb.md")
    plain, lean = (predicted(llama_70b_eight_gpus, "70b", 8, lean) for lean in (False, True))
    assert f"{plain.numel:,} parameters" in text
    assert row(plain, "device", "device") in text
    assert row(plain, "cpu", "host") in text
    assert row(lean, "cpu", "host, `--lean`") in text
    assert f"{8 * plain.resting.by_tier['cpu'] / GIB:.1f} GiB of host memory" in text
    assert f"{8 * lean.resting.by_tier['cpu'] / GIB:.1f} GiB with `--lean`" in text
    assert f"each rank sends {plain.sent_bytes / GIB:.1f} GiB per step" in text
    choices = {
        '`grad_dtype="fp32"`': predicted(llama_70b_eight_gpus, "70b", 8, grad_dtype="fp32"),
        'gradients in host memory, too: `"gradients": "cpu"`': predicted(
            llama_70b_eight_gpus, "70b", 8, offload={"optimizer": "cpu", "gradients": "cpu"}
        ),
        "`--lean` without offload: does not fit with activations": predicted(
            llama_70b_eight_gpus, "70b", 8, lean=True, offload=None
        ),
    }
    for title, choice in choices.items():
        tiers = choice.resting.by_tier
        assert f"| {title} | {gib(tiers['device'])} | {gib(tiers.get('cpu', 0))} |" in text


@pytest.mark.parametrize("name", ["7b_on_24_gb.md", "70b_on_8x80_gb.md"])
def test_the_commands_print_the_sums(name, capsys):
    """`shardcore estimate` as the page gives it, plain and lean, prints the sums of its table."""
    text = page(name)
    (command,) = re.findall(r"`shardcore (estimate [^`]*)`", text)
    sums = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[-1].strip("| ")
        for line in text.splitlines()
        if line[:1] == "|"
    }
    for more, host in ("", "host"), (" --master split --state-dtype 8bit", "host, `--lean`"):
        assert cli.main((command + more).split()) == 0
        shown = capsys.readouterr().out.splitlines()[3].split()
        assert shown[7:9] == [sums["device"], sums[host]]


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "recipe", "preset", "sequences", "length"),
    [
        ("7b_on_24_gb.md", llama_7b_one_gpu, "7b", 4, 2048),
        # 80 blocks alike
        pytest.param(
            "70b_on_8x80_gb.md", llama_70b_eight_gpus, "70b", 2, 4096, marks=pytest.mark.slow
        ),
    ],
)
def test_activations(name, recipe, preset, sequences, length):
    model = recipe.make_model(preset).bfloat16()
    tokens = torch.zeros(sequences, length, dtype=torch.int64, device="meta")
    peak = peak_bytes(model, lambda: model(input_ids=tokens, labels=tokens).loss)
    kept = predicted(recipe, preset, 8 if preset == "70b" else 1).resting.by_tier["device"]
    assert f"{peak / GIB:.1f} GiB for {sequences} sequences of {length:,} tokens" in " ".join(
        page(name).split()
    )
    assert f"{(peak + kept) / GIB:.1f} GiB in all" in page(name)


@pytest.mark.more
def test_activations_are_those_that_were_measured():
    """The method of test_activations, on what the H200 ran: within 2%; with another kernel for
    attention not.
    """
    found = json.loads((ROOT / "benchmarks/results/offload_train_7b_nvidia_h200.json").read_text())
    measured, peaks = found["measured"]["activation_bytes"], []
    for fused in True, False:
        with torch.device("meta"):
            model = GPT(PRESETS["7b"]).bfloat16()
        tokens = torch.zeros(4, 1024, dtype=torch.int64, device="meta")
        peaks.append(
            peak_bytes(
                model,
                lambda: next_byte_loss(model(tokens), tokens),  # noqa: B023
                fused_attention=fused,
            )
        )
    assert peaks[0] == pytest.approx(measured, rel=0.02)
    assert peaks[1] != pytest.approx(measured, rel=0.02)
    text = page("7b_on_24_gb.md")
    assert f"{peaks[0] / GIB:.1f} GiB where {measured / GIB:.1f} were measured" in " ".join(
        text.split()
    )


def test_what_is_called_measured_is_in_the_file():
    text = page("7b_on_24_gb.md")
    found = json.loads((ROOT / "benchmarks/results/offload_train_7b_nvidia_h200.json").read_text())
    ours, plain = found["engines"]["shardcore 3, params, lazy"], found["engines"]["shardcore 2"]
    assert f"{found['numel']:,} parameters, {found['tokens_a_step']:,} tokens" in " ".join(
        text.split()
    )
    tiers = [ours["peak_bytes"], ours["kept_bytes"]["device"], ours["kept_bytes"]["cpu"]]
    assert f"| measured, GiB | {' | '.join(f'{count / GIB:.1f}' for count in tiers)} |" in text
    assert (
        f"{ours['step']['median']:.2f} s per step of 4,096 tokens, "
        f"{ours['over_bound']['median']:.2f} times" in text
    )
    assert f"{plain['step']['median']:.2f} s and {plain['peak_bytes'] / GIB:.1f} GiB" in text


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_per_parameter_beside_ddp(stage):
    (line,) = (
        line
        for line in page("ddp_in_three_lines.md").splitlines()
        if line.startswith(f"| `stage={stage}`")
    )
    with_8 = float(line.strip("| ").split(" | ")[-1])
    with torch.device("meta"):
        model = llama.llama_7b()
    kinds = predict(model, stage=stage, world_size=8, precision="fp32").resting.by_kind
    apart = kinds["communication"] + (0 if stage < 3 else kinds["weights"] - 4 * 6_738_415_616 / 8)
    held = (sum(kinds.values()) - apart) / 6_738_415_616
    assert held == pytest.approx(with_8, abs=0.05)
    assert held != pytest.approx(with_8 + 0.5, abs=0.05)


@pytest.mark.more
def test_the_7b_script_trains_its_tiny_preset(tmp_path):
    printed = run_forked(
        FOLDER / "llama_7b_one_gpu.py", *TINY, "--lean", "--save", "saved", ranks=0, folder=tmp_path
    )
    check_losses_fall(losses_in(printed))
    consolidate(tmp_path / "saved", tmp_path / "exported")
    names = llama_7b_one_gpu.make_model("tiny").state_dict().keys()
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == names


@pytest.mark.more
def test_the_70b_script_trains_its_tiny_preset(tmp_path):
    printed = run_forked(
        FOLDER / "llama_70b_eight_gpus.py", *TINY, "--save", "saved", ranks=2, folder=tmp_path
    )
    check_losses_fall(losses_in(printed))
    assert (tmp_path / "saved" / "latest").exists()


@pytest.mark.more
def test_the_7b_script_reads_a_folder_of_weights(tmp_path):
    """Whose head is zero, so that every token is as likely: the random weights' first loss is
    another.
    """
    model = llama_7b_one_gpu.LlamaForCausalLM(
        llama_7b_one_gpu.LlamaConfig(**llama_7b_one_gpu.PRESETS["tiny"])
    )
    model.lm_head.weight.data.zero_()
    model.save_pretrained(tmp_path / "weights")
    arguments = [*TINY, "--steps", "1", "--weights", str(tmp_path / "weights")]
    printed = run_forked(FOLDER / "llama_7b_one_gpu.py", *arguments, ranks=0, folder=tmp_path)
    (loss,) = losses_in(printed)
    assert float(loss) == pytest.approx(math.log(128), abs=1e-5)
