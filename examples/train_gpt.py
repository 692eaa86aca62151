"""Train a byte-level GPT with shardcore on real text; with --demo, twice, to see that offload
changes not one bit.

    python -m examples.train_gpt --demo                     stage 0, then stage 2 with CPU offload,
                                                            from the same seed
    python -m examples.train_gpt --stage 2 --offload cpu    one training
    torchrun --nproc-per-node 4 -m examples.train_gpt --demo
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1             docs/checkpoints.md, "Restart after a
                                                            failure"
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m examples.train_gpt
    --checkpoint-every 20 --resume
                                                            goes on from the last checkpoint when a
                                                            rank has died

Without torchrun it starts the ranks itself. Exit code: 0; 1 if a rank failed or the final weights
differ; 2 for bad arguments.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import torch

from examples import report
from examples.arguments import make_out_folder, not_negative, positive, seed, text_file
from examples.corpus import Corpus, load_corpus
from examples.gpt import GPT, PRESETS
from examples.launch import Rank, default_nproc, launch, under_torchrun
from examples.machine import cpu_has_bf16, describe_machine, usable_cores
from examples.training import Checkpoints, Placement, TrainConfig, Training, gather, train
from shardcore._native import _C

# steps, batch (sequences per rank and micro-step) and peak learning rate where the options do not
# say.
PRESET_DEFAULTS = {
    "tiny": {"steps": 60, "batch": 8, "lr": 3e-3},
    "cpu3m": {"steps": 140, "batch": 4, "lr": 2e-3},
    "cpu10m": {"steps": 100, "batch": 4, "lr": 1e-3},
    "cpu26m": {"steps": 140, "batch": 4, "lr": 1e-3},
    "gpu": {"steps": 200, "batch": 8, "lr": 3e-4},
    "1.5b": {"steps": 200, "batch": 4, "lr": 2e-4},
    "7b": {"steps": 200, "batch": 2, "lr": 1.2e-4},
}
DEMO_PLACEMENTS = [Placement(stage=0, offload="none"), Placement(stage=2, offload="cpu")]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_gpt",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to run")
    what.add_argument(
        "--demo",
        action="store_true",
        help="compare stage 0 without offload to stage 2 with CPU offload",
    )
    what.add_argument("--stage", type=int, choices=[0, 1, 2, 3], help="ZeRO stage (default: 2)")
    what.add_argument(
        "--offload", choices=["none", "cpu"], help="tier of the optimizer states (default: none)"
    )
    what.add_argument(
        "--preset", choices=list(PRESETS), help="model size (default: gpu on GPUs, cpu10m on a CPU)"
    )
    what.add_argument(
        "--text",
        type=text_file,
        metavar="FILE",
        help="train on this file (default: the Python standard library's source)",
    )
    what.add_argument(
        "--out",
        metavar="DIR",
        help="write loss.png and result.json here (default: demo with --demo, else nothing)",
    )

    how = parser.add_argument_group("training")
    how.add_argument("--steps", type=positive, help="optimizer steps (default: the preset's)")
    how.add_argument(
        "--batch", type=positive, help="sequences per rank and micro-step (default: the preset's)"
    )
    how.add_argument(
        "--accumulate", type=positive, default=1, help="micro-steps per step (default: %(default)s)"
    )
    how.add_argument("--lr", type=not_negative, help="peak learning rate (default: the preset's)")
    how.add_argument(
        "--weight-decay", type=not_negative, default=0.1, help="AdamW decay (default: %(default)s)"
    )
    how.add_argument(
        "--clip",
        type=not_negative,
        default=1.0,
        help="global gradient norm; 0: no clipping (default: %(default)s)",
    )
    how.add_argument(
        "--seed", type=seed, default=0, help="of the weights and the batches (default: %(default)s)"
    )
    how.add_argument(
        "--precision",
        choices=["auto", "bf16", "fp16", "fp32"],
        default="auto",
        help="of the weights; auto: bf16 where the processor multiplies it natively (GPUs; CPUs "
        "with AVX-512 BF16, AMX or Arm "
        "BF16), else fp32; fp16 scales the loss, and skips steps whose gradients overflow",
    )
    how.add_argument(
        "--deterministic",
        action="store_true",
        help="torch's deterministic algorithms (always with --demo on GPUs)",
    )

    saved = parser.add_argument_group("checkpoints")
    saved.add_argument(
        "--checkpoint-every", type=positive, metavar="N", help="save every N steps (default: never)"
    )
    saved.add_argument(
        "--resume",
        action="store_true",
        help="go on from the latest checkpoint (without one: begin, as without --resume)",
    )
    saved.add_argument(
        "--checkpoint-dir", metavar="DIR", help="where checkpoints are (default: checkpoints)"
    )
    saved.add_argument(
        "--keep-last",
        type=positive,
        metavar="K",
        help="keep the newest K checkpoints (default: all)",
    )

    where = parser.add_argument_group("ranks")
    where.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: GPUs if there are any",
    )
    where.add_argument(
        "--nproc",
        type=positive,
        help="ranks to start (default: one a GPU, 2 on a CPU; torchrun decides under torchrun)",
    )
    where.add_argument(
        "--threads", type=positive, help="CPU threads a rank (default: its share of the cores)"
    )
    return parser


def choose_precision(asked: str, device: str) -> tuple[str, str]:
    """Return the precision and why: bf16 is taken where it is fast, since elsewhere it only
    slows the training down.
    """
    if asked != "auto":
        return asked, "as asked"
    if device == "cuda":
        return "bf16", "GPUs of compute capability 8.0 and above multiply bfloat16 natively"
    if cpu_has_bf16():
        return "bf16", "this CPU multiplies bfloat16 natively"
    return "fp32", "this CPU has no bfloat16 units"


def unused_gpus() -> str | None:
    """Say why the GPUs that torch sees cannot be used; None if they can, or if there are none."""
    if not torch.cuda.is_available() or _C.build_info()["cuda"]:
        return None
    return (
        "shardcore was built without CUDA, so the GPUs here are not used (install the CUDA "
        "toolkit: the build needs its nvcc)"
    )


def complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fill in what depends on the machine and check what needs more than one option; exits with
    code 2 on bad arguments.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "argument --device: cuda, but torch sees no GPU; expected cpu here (or a CUDA build of "
            "torch)"
        )
    if options.device == "cuda" and unused_gpus():
        parser.error(f"argument --device: cuda; expected cpu here: {unused_gpus()}")
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() and not unused_gpus() else "cpu"
    if options.demo and (options.stage is not None or options.offload is not None):
        parser.error(
            "argument --demo sets stage and offload itself; expected no --stage and no --offload "
            "with it"
        )
    if options.demo and (options.checkpoint_every is not None or options.resume):
        parser.error(
            "argument --demo has two trainings; expected no --checkpoint-every and no --resume "
            "with it"
        )
    if options.keep_last is not None and options.checkpoint_every is None:
        parser.error("argument --keep-last: nothing is saved; expected --checkpoint-every with it")
    if (
        options.checkpoint_dir is not None
        and options.checkpoint_every is None
        and not options.resume
    ):
        parser.error(
            "argument --checkpoint-dir: nothing is saved or loaded; expected --checkpoint-every or "
            "--resume with it"
        )
    options.checkpoint_dir = options.checkpoint_dir or "checkpoints"
    if under_torchrun() and options.nproc is not None:
        parser.error(
            "argument --nproc: torchrun has started the ranks already; expected no --nproc with it"
        )
    if options.threads is not None and options.threads > usable_cores():
        parser.error(
            f"argument --threads: {options.threads}; expected at most {usable_cores()}, the cores "
            f"here"
        )
    options.stage, options.offload = (
        2 if options.stage is None else options.stage,
        options.offload or "none",
    )
    options.nproc = options.nproc or default_nproc(options.device)
    if (
        options.device == "cuda"
        and not under_torchrun()
        and options.nproc > torch.cuda.device_count()
    ):
        parser.error(
            f"argument --nproc: {options.nproc}; expected at most {torch.cuda.device_count()}, the "
            f"GPUs here"
        )
    options.preset = options.preset or ("gpu" if options.device == "cuda" else "cpu10m")
    for name, value in PRESET_DEFAULTS[options.preset].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.precision, options.precision_reason = choose_precision(
        options.precision, options.device
    )
    options.deterministic |= options.demo and options.device == "cuda"
    if options.demo and options.out is None:
        options.out = "demo"
    if options.out is not None:
        make_out_folder(parser, Path(options.out))


def train_on_rank(rank: Rank, options: argparse.Namespace) -> int:
    """Run on every rank: train once or twice, report on rank 0; returns the exit code."""
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
    corpus = load_corpus(options.text)
    if len(set(gather(corpus.sha256))) > 1:
        raise ValueError(
            "train_gpt: argument --text: ranks read different texts; expected one text (give the "
            "same FILE everywhere)"
        )
    config = TrainConfig(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(TrainConfig)}
    )
    checkpoints = Checkpoints(
        options.checkpoint_dir, options.checkpoint_every, options.keep_last, options.resume
    )
    placements = DEMO_PLACEMENTS if options.demo else [Placement(options.stage, options.offload)]
    if rank.rank == 0:
        print(introduction(options, config, corpus, rank), flush=True)
    trainings = []
    for placement in placements:
        with report.ProgressBar(
            str(placement), config.steps, config.tokens_per_step(rank.world_size), rank.rank == 0
        ) as bar:
            trainings.append(train(rank, corpus, config, placement, bar.update, checkpoints))
    equal = len({digest for training in trainings for digest in training.weights_sha256}) == 1
    if rank.rank == 0:
        print("\n" + report.result_table(trainings))
        print(conclusion(trainings, equal))
        if options.out is not None:
            write_files(options, corpus, rank, trainings, equal)
    return 0 if equal else 1


def introduction(
    options: argparse.Namespace, config: TrainConfig, corpus: Corpus, rank: Rank
) -> str:
    """Say what is about to run, and what was chosen for this machine."""
    with torch.device("meta"):
        numel = sum(param.numel() for param in GPT(PRESETS[config.preset]).parameters())
    backend = "NCCL" if rank.device.type == "cuda" else "gloo"
    lines = [
        f"model      byte-level GPT, {numel / 1e6:.1f}M parameters (preset {config.preset})",
        f"text       {corpus.data.numel() / 1e6:.1f} MB: {corpus.source}",
        f"ranks      {rank.world_size} on {rank.device.type} over {backend}; CPU threads a rank: "
        f"{torch.get_num_threads()}",
        f"precision  {config.precision}: {options.precision_reason}",
        f"training   {config.steps} steps of {config.tokens_per_step(rank.world_size):,} tokens, "
        f"seed {config.seed}",
    ]
    if unused_gpus():
        lines.append(f"note       {unused_gpus()}")
    if options.deterministic:
        lines.append(
            "torch's deterministic algorithms are switched on, so that the final weights can be "
            "compared bit for bit"
        )
    return "\n".join(lines) + "\n"


def conclusion(trainings: list[Training], equal: bool) -> str:
    """Say what the hashes prove."""
    if sum(len(training.weights_sha256) for training in trainings) == 1:
        return f"final weights: {trainings[0].weights_sha256[0]}"
    compared = "both trainings and all ranks" if len(trainings) > 1 else "all ranks"
    if equal:
        return (
            f"final weights are EQUAL, bit for bit, over {compared}: "
            f"{trainings[0].weights_sha256[0]}"
        )
    found = "; ".join(
        f"{training.placement}: {' '.join(training.weights_sha256)}" for training in trainings
    )
    return f"final weights DIFFER over {compared}; expected one hash, got {found}"


def write_files(
    options: argparse.Namespace, corpus: Corpus, rank: Rank, trainings: list[Training], equal: bool
) -> None:
    """Write DIR/result.json and DIR/loss.png, and say so."""
    directory = Path(options.out)
    result = {
        "machine": describe_machine(),
        "options": {
            name: value for name, value in vars(options).items() if name not in ("stage", "offload")
        },
        "world_size": rank.world_size,
        "threads_per_rank": torch.get_num_threads(),
        "text": {"source": corpus.source, "bytes": corpus.data.numel(), "sha256": corpus.sha256},
        "deterministic_algorithms": options.deterministic,
        "weights_equal": equal,
        "trainings": [report.training_as_json(training) for training in trainings],
    }
    report.write_json(directory / "result.json", result)
    title = f"byte-level GPT ({options.preset}), {rank.world_size} ranks, {options.precision}"
    report.write_loss_png(directory / "loss.png", trainings, title)
    print(f"wrote {directory}/result.json")


def main() -> int:
    parser = make_parser()
    options = parser.parse_args()
    complete(parser, options)
    # cuBLAS reads this when it is first used; torch's deterministic algorithms ask for it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return launch(train_on_rank, options.nproc, options.device, options.threads, options)


if __name__ == "__main__":
    sys.exit(main())
