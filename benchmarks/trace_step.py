"""Draw training steps of shardcore from a torch.profiler trace: what ran when, and how much of what
moves bytes was hidden.

Writes trace_step.png (a lane for each CUDA stream, or CPU thread, and one for the engine's scopes),
trace_step.json (busy times, and the share of communication and copies during which something
computed) and the trace itself for chrome://tracing. With --device cuda each rank has a GPU: with
one alone nothing is communicated, but --offload has copies, which --overlap-step hides behind two
steps' compute. Copies within a GPU's memory count as compute. On CPU ranks torch's profiler does
not see the threads of gloo: there the picture shows when the engine started what, and only tests
this program.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import shardcore
from benchmarks import harness, suite
from examples.arguments import positive
from examples.corpus import load_corpus
from examples.gpt import PRESETS, build_gpt, next_byte_loss
from examples.launch import Rank, default_nproc, launch
from examples.pictures import new_figure, save_figure

COLOURS = {"compute": "tab:blue", "communication": "tab:red", "copy": "tab:orange"}
SCOPES = {
    "gather": "tab:purple",
    "gather_grad": "tab:pink",
    "reduce": "tab:brown",
    "sum": "tab:olive",
    "adam": "tab:green",
}
# what leaves for host memory, each with those before it
TIERS = ("optimizer", "gradients", "params")
WARMUP = 3  # steps: the order of units is learned, pools have their size


@dataclass(frozen=True)
class Span:
    """Something of one kind that ran in a lane from `start` to `end`, in seconds of any clock."""

    lane: str
    kind: str
    start: float
    end: float


def spans_of(events: Iterable[Mapping[str, object]]) -> list[Span]:
    """Sort the events of a chrome trace into lanes and kinds; what neither computes, moves bytes
    nor is ours is left out.
    """
    found = []
    for event in events:
        if event.get("ph") != "X":
            continue
        name, category = str(event["name"]), event.get("cat")
        # among the operations without CUDA, else an annotation
        if category in ("user_annotation", "cpu_op") and name.startswith("shardcore::"):
            lane, kind = "engine", name.removeprefix("shardcore::").partition("(")[0]
            if kind not in SCOPES:
                continue
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            lane = f"GPU stream {event['tid']}"
            leaves = category == "gpu_memcpy" and "Device -> Device" not in name
            kind = "copy" if leaves else "communication" if name.startswith("nccl") else "compute"
        elif category == "cpu_op":
            lane = f"CPU thread {event['tid']}"
            kind = "communication" if name.startswith(("gloo:", "c10d::")) else "compute"
        else:
            continue
        start = float(event["ts"]) / 1e6
        found.append(Span(lane, kind, start, start + float(event["dur"]) / 1e6))
    on_gpu = any(span.lane.startswith("GPU") for span in found)
    return [span for span in found if not (on_gpu and span.lane.startswith("CPU"))]


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the times during which at least one of the spans ran, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def total(times: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in times)


def overlap(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> float:
    """Return how long both ran."""
    return sum(
        max(0.0, min(x[1], y[1]) - max(x[0], y[0]))
        for x in a
        for y in b
        if x[0] < y[1] and y[0] < x[1]
    )


def figures_of(spans: Sequence[Span]) -> dict[str, object]:
    """Return the length of all and busy times in microseconds, and which shares of moving bytes
    computing hides (on GPUs).
    """
    busy: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        busy[span.kind if span.lane != "engine" else f"shardcore::{span.kind}"].append(span)
    compute = union(busy["compute"])
    moved = {kind: union(busy[kind]) for kind in ("communication", "copy")}
    on_gpu = any(span.lane.startswith("GPU") for span in spans)
    hidden = {
        kind: overlap(times, compute) / total(times) if times and on_gpu else None
        for kind, times in moved.items()
    }
    return {
        "step_us": 1e6 * (max(span.end for span in spans) - min(span.start for span in spans)),
        "busy_us": {
            kind: 1e6 * total(union(of_kind)) for kind, of_kind in sorted(busy.items()) if of_kind
        },
        "hidden_share": hidden,
    }


def draw(path: Path, title: str, spans: Sequence[Span]) -> None:
    """Draw what ran when, in lanes below each other; says so, and draws nothing, where
    matplotlib is missing.
    """
    lanes = sorted({span.lane for span in spans}, key=lambda lane: (lane != "engine", lane))
    figure = new_figure(path, 12, 0.6 * len(lanes) + 1.8)
    if figure is None:
        return
    axes = figure.subplots()
    begin = min(span.start for span in spans)
    for kind, colour in (COLOURS | SCOPES).items():
        label = kind
        for height, lane in enumerate(reversed(lanes)):
            bars = [
                (1e3 * (span.start - begin), 1e3 * (span.end - span.start))
                for span in spans
                if (span.lane, span.kind) == (lane, kind)
            ]
            if bars:
                axes.broken_barh(
                    bars,
                    (height - 0.4, 0.8),
                    facecolors=colour,
                    edgecolors="white",
                    linewidth=0.3,
                    label=label,
                )
                label = None  # once in the legend
    axes.set_yticks(range(len(lanes)), lanes[::-1])
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("ms")
    figure.legend(loc="outside lower center", ncols=8)
    save_figure(figure, path)


def run_rank(rank: Rank, options: argparse.Namespace) -> int:
    """Train a few steps and record one; rank 0 reports."""
    model = build_gpt(options.preset, seed=0).to(rank.device)
    optimizer = shardcore.FusedAdam(model.parameters(), lr=1e-4)
    tiers = TIERS[: TIERS.index(options.offload) + 1] if options.offload else ()
    model, optimizer = shardcore.shard(
        model,
        optimizer,
        options.stage,
        offload=dict.fromkeys(tiers, "cpu") or None,
        precision=options.precision,
        overlap_step=options.overlap_step,
    )
    corpus, context = load_corpus(), PRESETS[options.preset].context
    on_gpu = rank.device.type == "cuda"

    def step(number: int) -> None:
        batch = corpus.batch(
            seed=0, rank=rank.rank, step=number, micro_step=0, batch=options.batch, context=context
        )
        tokens, targets = (part.to(rank.device) for part in batch)
        optimizer.scale_loss(next_byte_loss(model(tokens), targets)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(WARMUP):
        step(number)
    dist.barrier()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(
        activities=kinds, experimental_config=_ExperimentalConfig(profile_all_threads=True)
    ) as recorded:
        for number in range(2 if options.overlap_step else 1):
            step(WARMUP + number)
        optimizer.synchronize()
        if on_gpu:
            torch.cuda.synchronize()
    if rank.rank > 0:
        return 0
    trace = options.out / "trace_step.trace.json"
    recorded.export_chrome_trace(str(trace))
    spans = spans_of(json.loads(trace.read_text())["traceEvents"])
    figures = figures_of(spans)
    where = f"{rank.world_size} {options.device} rank{'s' * (rank.world_size > 1)}"
    harness.write_json(
        options.out / "trace_step.json", {**suite.about_run("trace_step", options), **figures}
    )
    print(json.dumps(figures, indent=1))
    offload = f", {' and '.join(tiers)} in host memory" if tiers else ""
    steps = ", two steps with overlap_step" if options.overlap_step else ", one step"
    title = f"{options.preset}, stage {options.stage}, {options.precision}{offload}{steps}, {where}"
    draw(options.out / "trace_step.png", title, spans)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trace_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preset", choices=list(PRESETS), default="cpu26m", help="model (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=positive, default=4, help="sequences per rank (default: %(default)s)"
    )
    parser.add_argument(
        "--stage", type=int, choices=[0, 1, 2, 3], default=3, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--precision",
        choices=["fp32", "bf16", "fp16"],
        default="bf16",
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--offload", choices=TIERS, help="in host memory, with those before it (default: nothing)"
    )
    parser.add_argument(
        "--overlap-step", action="store_true", help="let the step run behind the next forward"
    )
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="of the ranks (default: %(default)s)",
    )
    parser.add_argument("--nproc", type=positive, help="ranks (default: all GPUs, or 2 on the CPU)")
    suite.add_out(parser)
    options = suite.parse(parser)
    threads = 1 if options.device == "cpu" else None
    return launch(
        run_rank, options.nproc or default_nproc(options.device), options.device, threads, options
    )


if __name__ == "__main__":
    sys.exit(main())
