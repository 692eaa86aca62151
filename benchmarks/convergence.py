"""Train a small GPT from several seeds with every way to keep weights and moments, beside torch's
AdamW; a table and a plot.

Real text (the standard library's source), the same batches for every kind. A run is one (kind,
seed); finished runs are kept in --out/convergence.json and not made again, so a run that was
interrupted goes on where it stopped. Not part of any test: a run of the default size takes one or
two minutes on two cores.

What counts is the mean loss of the last steps, and how far the seeds spread. "split master" must
have the losses of "fp32 master" to the last digit.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import shardcore
from benchmarks import harness, suite
from examples.arguments import positive
from examples.corpus import Corpus, load_corpus
from examples.gpt import PRESETS, build_gpt, next_byte_loss
from examples.machine import describe_machine, usable_cores
from examples.pictures import new_figure, save_figure
from examples.training import learning_rate_factor

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIONS = {"lr": 2e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
LAST = 50  # steps whose loss is averaged


def ours(**kind: object) -> Make:
    return lambda params: shardcore.CPUAdam(params, **OPTIONS, **kind)


# kind -> (dtype of the weights, optimizer)
KINDS: dict[str, tuple[torch.dtype, Make]] = {
    "torch AdamW, fp32": (
        torch.float32,
        lambda params: torch.optim.AdamW(params, **OPTIONS, fused=True),
    ),
    "fp32": (torch.float32, ours()),
    "bf16 states": (torch.float32, ours(state_dtype="bf16")),
    "8-bit states": (torch.float32, ours(state_dtype="8bit")),
    "bf16 weights, fp32 master": (torch.bfloat16, ours(master="fp32")),
    "bf16 weights, split master": (torch.bfloat16, ours(master="split")),
    "bf16 weights, stochastic rounding": (torch.bfloat16, ours(stochastic_rounding=True)),
    "bf16 weights, split master, 8-bit states": (
        torch.bfloat16,
        ours(master="split", state_dtype="8bit"),
    ),
}


def train(kind: str, seed: int, corpus: Corpus, options: argparse.Namespace) -> dict[str, object]:
    """Make one run; returns its losses (one a step) and what it took."""
    dtype, make = KINDS[kind]
    model = build_gpt(options.preset, seed=seed).to(dtype)
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, options.steps)
    )
    losses = []
    start = time.perf_counter()
    for step in range(options.steps):
        tokens, targets = corpus.batch(
            seed=seed,
            rank=0,
            step=step,
            micro_step=0,
            batch=options.batch,
            context=PRESETS[options.preset].context,
        )
        loss = next_byte_loss(model(tokens), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0:
            print(
                f"\r{kind}, seed {seed}: step {step}/{options.steps}, loss {losses[-1]:.3f}   ",
                end="",
                file=sys.stderr,
            )
    print(file=sys.stderr)
    return {"kind": kind, "seed": seed, "losses": losses, "seconds": time.perf_counter() - start}


def final(run: dict[str, object]) -> float:
    """The mean loss of the last steps."""
    return statistics.fmean(run["losses"][-LAST:])


def report(runs: list[dict[str, object]], out: Path) -> None:
    """Print the table and draw the curves (means over seeds, over windows of LAST steps)."""
    rows = [["kind", "seeds", f"loss, last {LAST} steps", "spread over seeds"]]
    kinds = [kind for kind in KINDS if any(run["kind"] == kind for run in runs)]
    for kind in kinds:
        finals = [final(run) for run in runs if run["kind"] == kind]
        rows.append(
            [
                kind,
                str(len(finals)),
                f"{statistics.fmean(finals):.4f}",
                f"{max(finals) - min(finals):.4f}",
            ]
        )
    print(harness.table(rows))
    path = out / "convergence.png"
    figure = new_figure(path, 8, 5)
    if figure is None:
        return
    axes = figure.add_subplot()
    for kind in kinds:
        curves = torch.tensor([run["losses"] for run in runs if run["kind"] == kind]).mean(0)
        windows = curves.unfold(0, min(LAST, len(curves)), min(LAST, len(curves))).mean(1)
        axes.plot(torch.arange(1, len(windows) + 1) * LAST, windows, label=kind)
    axes.set(
        xlabel="step",
        ylabel=f"loss (mean of {LAST} steps and all seeds)",
        title="Reduced states beside float32",
    )
    axes.legend()
    save_figure(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preset", choices=list(PRESETS), default="cpu3m", help="model (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=positive, default=600, help="steps of a run (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=positive, default=4, help="sequences per step (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=positive, default=3, help="seeds 0 to SEEDS - 1 (default: %(default)s)"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="which (default: all)"
    )
    parser.add_argument("--threads", type=positive, help="threads (default: all cores)")
    suite.add_out(parser)
    options = suite.parse(parser)
    torch.set_num_threads(options.threads or usable_cores())
    asked = {"preset": options.preset, "steps": options.steps, "batch": options.batch}
    path = options.out / "convergence.json"
    runs: list[dict[str, object]] = []
    if path.exists() and (old := json.loads(path.read_text()))["options"] == asked:
        runs = old["runs"]
    corpus = load_corpus()
    done = {(run["kind"], run["seed"]) for run in runs}
    for seed in range(options.seeds):
        for kind in options.kinds:
            if (kind, seed) not in done:
                runs.append(train(kind, seed, corpus, options))
                harness.write_json(
                    path,
                    {
                        "benchmark": "convergence",
                        "machine": describe_machine(),
                        "options": asked,
                        "runs": runs,
                    },
                )
    report(runs, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
