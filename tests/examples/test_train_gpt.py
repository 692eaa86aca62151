"""The demo program end to end with its smallest model: what it prints, writes and returns, and
that its check can fail.
"""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import shardcore
from examples import train_gpt
from examples.corpus import Corpus
from examples.gpt import PRESETS
from examples.launch import Rank, launch
from examples.training import Checkpoints, Placement, TrainConfig, Training, gather, train
from tests.support.ranks import run_ranks
from tests.support.scripts import ROOT, run_forked

TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def gathered_without_numpy(rank: int, world_size: int) -> list:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "numpy", None)
        return gather([rank, "text"])


def test_ranks_need_no_numpy_to_exchange_results():
    assert run_ranks(2, gathered_without_numpy) == [[[0, "text"], [1, "text"]]] * 2


def parse(*arguments: str):
    parser = train_gpt.make_parser()
    options = parser.parse_args(arguments)
    train_gpt.complete(parser, options)
    return options


@pytest.fixture
def alone(monkeypatch):
    """As if no torchrun had started this process; threads are put back."""
    for name in TORCHRUN_NAMES:
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.more
def test_demo_on_two_ranks(tmp_path, capfd, monkeypatch, alone):
    """As make demo starts it: it starts the ranks itself."""
    arguments = [
        "--demo",
        "--device",
        "cpu",
        "--nproc",
        "2",
        "--preset",
        "tiny",
        "--steps",
        "20",
        "--out",
        str(tmp_path),
    ]
    arguments += ["--lr", "6e-3", "--batch", "4"]
    # sums that are not exact show their order
    arguments += ["--accumulate", "2", "--precision", "fp16"]
    monkeypatch.setattr(sys, "argv", ["train_gpt", *arguments])
    code = train_gpt.main()
    printed, errors = capfd.readouterr()
    assert code == 0, errors
    for text in (
        "first loss",
        "step time",
        "master per rank",
        "EQUAL, bit for bit",
        "stage 0, no offload",
        "stage 2, cpu offload",
    ):
        assert text in printed
    result = json.loads((tmp_path / "result.json").read_text())
    plain, offloaded = result["trainings"]
    assert result["weights_equal"]
    assert result["world_size"] == 2
    assert plain["weights_sha256"] == offloaded["weights_sha256"]
    assert plain["losses"] == offloaded["losses"]
    assert ("skipped steps" in printed) == (plain["skipped_steps"] > 0)
    assert plain["first_loss"] > 5.4
    assert plain["last_loss"] < 4.0
    for rank in (0, 1):  # half the states and masters on each rank, but for padding
        for kind in ("master", "states"):
            assert (
                0.45
                < offloaded["bytes_per_rank"][rank][kind] / plain["bytes_per_rank"][rank][kind]
                < 0.6
            )
    assert {"commit", "torch", "cpu"} <= result["machine"].keys()
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "matplotlib is not installed" in printed


def test_one_rank_with_accumulation(tmp_path, capsys, alone):
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    options = parse(
        *(
            "--device",
            "cpu",
            "--nproc",
            "1",
            "--preset",
            "tiny",
            "--steps",
            "4",
            "--accumulate",
            "2",
        ),
        *(
            "--text",
            str(text),
            "--stage",
            "1",
            "--offload",
            "cpu",
            "--clip",
            "0",
            "--out",
            str(tmp_path / "out"),
        ),
    )
    assert launch(train_gpt.train_on_rank, 1, "cpu", 1, options) == 0
    assert "stage 1, cpu offload" in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(result["trainings"]) == 1
    assert result["trainings"][0]["tokens_per_step"] == 2 * 8 * 64
    assert len(result["trainings"][0]["losses"]) == 4


def test_demo_fails_when_weights_differ(monkeypatch, tmp_path, capsys, alone):
    def twin(rank, corpus, config, placement, on_step, checkpoints):
        """Trains the offloaded run one step less."""
        steps = config.steps - (placement.offload == "cpu")
        return train(
            rank, corpus, train_gpt.dataclasses.replace(config, steps=steps), placement, on_step
        )

    monkeypatch.setattr(train_gpt, "train", twin)
    options = parse(
        "--demo",
        "--device",
        "cpu",
        "--nproc",
        "1",
        "--preset",
        "tiny",
        "--steps",
        "2",
        "--out",
        str(tmp_path),
    )
    assert launch(train_gpt.train_on_rank, 1, "cpu", 1, options) == 1
    assert "final weights DIFFER" in capsys.readouterr().out
    assert not json.loads((tmp_path / "result.json").read_text())["weights_equal"]


# --- checkpoints ----------------------------------------------------------------------------------

TEXT = b"to be or not to be, that is the question. " * 500
CONFIG = TrainConfig(
    preset="tiny",
    steps=6,
    batch=2,
    accumulate=2,
    lr=3e-3,
    weight_decay=0.1,
    clip=1.0,
    precision="fp16",
    seed=3,
)


class StoppedError(Exception):
    pass


def training_on_rank(
    rank: int,
    world_size: int,
    config: TrainConfig,
    stage: int,
    checkpoints: Checkpoints | None,
    stop_at: int,
    forgetful: bool,
) -> tuple[list[int], Training | None]:
    """Train, with an error at a step if it has that step; returns the steps that were made, and
    the outcome.
    """
    steps = []

    def on_step(step: int, loss: float, seconds: float) -> None:
        if step == stop_at:
            raise StoppedError
        steps.append(step)

    corpus = Corpus(TEXT, "a text")
    place = Rank(rank, world_size, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        if forgetful:
            load = shardcore.load
            patch.setattr(
                shardcore, "load", lambda folder, model, optimizer, scheduler: load(folder, model)
            )
        try:
            return steps, train(
                place, corpus, config, Placement(stage, "none"), on_step, checkpoints
            )
        except StoppedError:
            return steps, None


def trained(checkpoints=None, *, config=CONFIG, stage=2, stop_at=-1, forgetful=False):
    return run_ranks(2, training_on_rank, config, stage, checkpoints, stop_at, forgetful)[0]


@pytest.mark.more
def test_a_training_goes_on_from_its_latest_checkpoint(tmp_path):
    saved = Checkpoints(str(tmp_path), every=2, keep_last=2, resume=True)
    every_step, expected = trained()
    assert every_step == list(range(6))
    steps, outcome = trained(saved, stop_at=5)
    assert (steps, outcome) == (list(range(5)), None)
    assert sorted(os.listdir(tmp_path)) == [".lock", "latest", "step2", "step4"]
    copy = dataclasses.replace(saved, directory=str(shutil.copytree(tmp_path, tmp_path / "copy")))
    steps, outcome = trained(saved, stage=3)
    assert steps == [4, 5]
    for name in ("weights_sha256", "losses", "skipped_steps"):
        assert getattr(outcome, name) == getattr(expected, name), name
    assert len(outcome.step_seconds) == 6
    assert trained(copy, forgetful=True)[1].weights_sha256 != expected.weights_sha256, (
        "states matter"
    )
    with pytest.raises(
        AssertionError, match=r"step6 was saved with lr 0\.003; expected 0\.5, as here"
    ):
        trained(saved, config=dataclasses.replace(CONFIG, lr=0.5))
    steps, outcome = trained(dataclasses.replace(saved, resume=False), stop_at=1)
    assert steps == [0], "without resume it begins again"


def test_a_training_that_has_ended_is_only_loaded(tmp_path):
    config = dataclasses.replace(CONFIG, steps=2)
    saved = Checkpoints(str(tmp_path), every=2, resume=True)
    _, expected = trained(saved, config=config)
    steps, outcome = trained(saved, config=config)
    assert steps == []
    assert (outcome.weights_sha256, outcome.losses) == (expected.weights_sha256, expected.losses)
    assert outcome.median_step_seconds > 0


def pid_of_rank(launcher: int, rank: int) -> int | None:
    """Find the process that torchrun has started as a rank."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (
                process / "environ"
            ).read_bytes().split(b"\0"):
                return int(process.name)
        except (OSError, ValueError, IndexError):  # it has just ended
            pass
    return None


def kill_rank_at(launcher: subprocess.Popen, rank: int, folder: Path, step: int) -> None:
    """Kill a rank as soon as a checkpoint of that step, or a later one, is there."""
    until = time.monotonic() + 100
    while time.monotonic() < until and launcher.poll() is None:
        try:
            reached = int((folder / "latest").read_text().removeprefix("step")) >= step
        except FileNotFoundError:
            reached = False
        pid = pid_of_rank(launcher.pid, rank) if reached else None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.01)
    raise AssertionError(f"there was no checkpoint of step {step}, or torchrun has ended")


@pytest.mark.more
@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc")
def test_torchrun_restarts_a_training_whose_rank_is_killed(tmp_path):
    (tmp_path / "text").write_bytes(TEXT)  # to read the standard library takes longer than to train
    short = (
        "--device",
        "cpu",
        "--preset",
        "tiny",
        "--steps",
        "40",
        "--precision",
        "fp32",
        "--text",
        str(tmp_path / "text"),
    )
    launcher = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
    )
    printed = run_forked(
        "examples.train_gpt",
        *short,
        "--out",
        str(tmp_path / "undisturbed"),
        ranks=2,
        folder=tmp_path,
    )
    assert printed.count("EQUAL, bit for bit, over all ranks") == 1
    assert "ranks      2 on cpu" in printed
    saved = tmp_path / "saved"
    arguments = (
        *short,
        "--checkpoint-every",
        "5",
        "--resume",
        "--checkpoint-dir",
        str(saved),
        "--keep-last",
        "2",
    )
    with open(tmp_path / "said", "w") as said:
        process = subprocess.Popen(
            [
                sys.executable,
                *launcher,
                "-m",
                "examples.train_gpt",
                *arguments,
                "--out",
                str(tmp_path / "killed"),
            ],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name not in TORCHRUN_NAMES}
            | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=said,
            stderr=said,
        )
        try:
            kill_rank_at(process, 1, saved, 10)
            assert process.wait(120) == 0, (tmp_path / "said").read_text()
        finally:
            process.terminate()  # which ends its ranks
            process.wait()
    undisturbed, killed = (
        json.loads((tmp_path / name / "result.json").read_text())["trainings"][0]
        for name in ("undisturbed", "killed")
    )
    assert killed["weights_sha256"] == undisturbed["weights_sha256"]
    assert killed["losses"] == undisturbed["losses"]
    assert (
        len(
            re.findall(
                rf"^going on from {re.escape(str(saved))}/step\d+$",
                (tmp_path / "said").read_text(),
                re.M,
            )
        )
        == 1
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "argument --steps: 0; expected a whole number of at least 1"),
        (["--lr", "x"], "argument --lr: x; expected a finite number of at least 0"),
        (
            ["--seed", "9" * 23],
            f"argument --seed: {'9' * 23}; expected a whole number from -9223372036854775808 to "
            f"1844",
        ),
        (["--text", os.devnull], f"argument --text: {os.devnull} is not a file"),
        (
            ["--out", __file__],
            f"argument --out: {__file__} cannot be written to (File exists); expected a folder",
        ),
        (
            ["--out", f"{__file__}/x"],
            f"argument --out: {__file__}/x cannot be written to (Not a directory); expected a "
            f"folder",
        ),
        (["--clip", "-1"], "argument --clip: -1; expected a finite number"),
        (
            ["--demo", "--resume"],
            "--demo has two trainings; expected no --checkpoint-every and no --resume",
        ),
        (
            ["--keep-last", "2", "--resume"],
            "argument --keep-last: nothing is saved; expected --checkpoint-every with it",
        ),
        (
            ["--checkpoint-dir", "x"],
            "argument --checkpoint-dir: nothing is saved or loaded; expected --checkpoint-every or",
        ),
        (["--demo", "--stage", "1"], "--demo sets stage and offload itself"),
        (["--threads", "100000"], "argument --threads: 100000; expected at most "),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_short_text_is_refused_before_ranks_start(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(b"a" * 4000)
    with pytest.raises(SystemExit) as stop:
        parse("--text", str(text))
    assert stop.value.code == 2
    assert (
        f"argument --text: {text} has 4000 bytes; expected at least 4096" in capsys.readouterr().err
    )


def test_what_auto_chooses(monkeypatch):
    assert train_gpt.PRESET_DEFAULTS.keys() == PRESETS.keys()
    monkeypatch.setattr(train_gpt, "cpu_has_bf16", lambda: False)
    assert parse("--device", "cpu").precision == "fp32"
    monkeypatch.setattr(train_gpt, "cpu_has_bf16", lambda: True)
    options = parse("--device", "cpu")
    assert (options.precision, options.preset, options.nproc, options.stage, options.offload) == (
        "bf16",
        "cpu10m",
        2,
        2,
        "none",
    )
    assert parse("--device", "cpu", "--precision", "fp32").precision == "fp32"
    assert str(Placement(2, "cpu")) == "stage 2, cpu offload"


def test_gpus_without_a_build_for_them(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(train_gpt._C, "build_info", lambda: {"cuda": "13.0"})
    assert parse("--precision", "fp32").device == "cuda"
    assert train_gpt.unused_gpus() is None
    monkeypatch.setattr(train_gpt._C, "build_info", lambda: {"cuda": ""})
    options = parse("--precision", "fp32")
    assert (options.device, options.nproc, options.preset) == ("cpu", 2, "cpu10m")
    corpus = Corpus(b"a" * 4096, "a text")
    config = TrainConfig(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(TrainConfig)}
    )
    said = train_gpt.introduction(options, config, corpus, Rank(0, 2, torch.device("cpu")))
    assert "shardcore was built without CUDA, so the GPUs here are not used" in said
    with pytest.raises(SystemExit):
        parse("--device", "cuda")
    assert (
        "argument --device: cuda; expected cpu here: shardcore was built without CUDA"
        in capsys.readouterr().err
    )
