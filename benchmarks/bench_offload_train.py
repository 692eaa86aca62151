"""Time steps of a GPT on one GPU with states, gradients and weights in host memory, beside no
offload and other engines.

Engines are built, trained for a few steps and let go again, one after the other, in turns: no
machine holds several of a 7B model. All train in bfloat16 with float32 masters and clipping, from
the same weights on the same batches, and their losses must agree. In each round forward and
backward of the model alone, plain pinned copies both ways at once and one CPU Adam are timed, too.
From these follows the bound that no exact schedule beats (offload_parts.lazy_bound), and a step's
time over it.

    shardcore 2               no offload
    ..., optimizer            states and masters in host memory; "gradients": gradients, too;
                              "params": weights, too (stage 3)
    ..., lazy                 overlap_step=True
    DeepSpeed 2, 3            ZeRO-Offload, at stage 3 with offload_param (where deepspeed is
                              installed)
    FSDP2                     torch's fully_shard with CPUOffloadPolicy

What does not fit is left out by name, with what it needs and what is free, and so is what there is
no time for (--seconds). With --device cpu everything runs on a machine without a GPU, to test it;
figures then mean nothing.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice

import torch

from benchmarks import harness, suite
from benchmarks.bench_train_step import check_losses
from benchmarks.device import Device
from benchmarks.offload_parts import WARMUP, Marks, Measured, freed_after, lazy_bound, measure
from benchmarks.offload_trainers import BF16_BYTES, Engine, deepspeed_version, engines, numel_of
from examples.arguments import above_zero, positive
from examples.corpus import load_corpus
from examples.gpt import PRESETS
from examples.launch import Rank, launch
from shardcore.distributed.machine import free_bytes

# Of the range of the losses, so that who does nothing is seen. bfloat16 rounds, and Adam's first
# steps are as large for small gradients as for large ones.
LOSS_TOLERANCE = 0.2
GIB = 2**30
Batches = Sequence[Mapping[str, torch.Tensor]]


def ours(name: str) -> bool:
    """Whether an engine is ours."""
    return name.startswith("shardcore")


def batches_of(options: argparse.Namespace, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """Return the batch of each step, the same for every engine; on the device, since bringing
    them would stop its queue.
    """
    corpus, size = (
        load_corpus(),
        {"batch": options.batch, "context": PRESETS[options.preset].context},
    )
    drawn = [
        corpus.batch(seed=0, rank=0, step=step, micro_step=0, **size)
        for step in range(WARMUP + options.steps)
    ]
    return [
        {"tokens": tokens.to(device), "targets": targets.to(device)} for tokens, targets in drawn
    ]


class Clock:
    """What is left of --seconds, and whether another visit fits in."""

    def __init__(self, seconds: float) -> None:
        self._end, self._longest = time.monotonic() + seconds, 0.0

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self._end - time.monotonic()

    def took(self, name: str, seconds: float) -> None:
        """Learn how long a visit took. Peers, which may compile something first, say nothing of
        the others.
        """
        if ours(name):
            self._longest = max(self._longest, seconds)

    def is_over(self, name: str) -> bool:
        """Whether a visit would likely end too late, if it took as long as the longest of ours;
        a peer's twice as long.
        """
        return self.left <= self._longest * (1 if ours(name) else 2)


def why_not(engine: Engine, preset: str, device: Device, activations: int | None) -> str | None:
    """Say what an engine needs and what is free, if it does not fit."""
    need, free_here, free_host = engine.need(preset), device.free_bytes(), free_bytes()
    on_device = need.device + (activations or 0)
    if free_here is not None and on_device > free_here:
        return (
            f"needs {on_device / GIB:.1f} GiB on the device, activations included, of which "
            f"{free_here / GIB:.1f} are free"
        )
    host = need.host + (need.device if free_here is None else 0)
    if free_host is not None and host > free_host:
        return f"needs {host / GIB:.1f} GiB of host memory, of which {free_host / GIB:.1f} are free"
    return None


def visit(
    engine: Engine, preset: str, device: Device, batches: Batches, clock: Clock
) -> dict[str, object]:
    """Build an engine, train it and let it go; returns its samples."""
    start = time.monotonic()
    if device.is_cuda:
        # by nobody who is still known: it would count as the engine's
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    trainer = engine.make(preset, device.torch)
    result: dict[str, object] = {"build_seconds": time.monotonic() - start}
    before = trainer.moved() if trainer.moved else (0, 0)
    marks, losses = Marks(device), []
    for number, batch in enumerate(batches):
        if number == WARMUP and device.is_cuda:
            # building and the first steps
            result["peak_bytes_at_start"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        if number >= WARMUP:
            marks.mark()
        losses.append(trainer.step(**batch))
        if number > WARMUP and clock.left <= 0:
            break
    marks.mark()  # where the next step would begin
    result["seconds"] = marks.intervals()
    trainer.finish()
    if device.is_cuda:
        torch.cuda.synchronize()
        result |= {"peak_bytes": torch.cuda.max_memory_allocated(), "held_before_bytes": held}
    if trainer.moved:
        result["moved_bytes"] = [
            (now - then) / len(losses) for now, then in zip(trainer.moved(), before, strict=True)
        ]
    result |= trainer.facts()
    result["losses"] = [loss.item() for loss in losses]
    return result


def add_up(
    visits: Sequence[dict[str, object]], engine: Engine, numel: int, chunks: int, measured: Measured
) -> dict[str, object]:
    """Turn the visits to one engine into what is told of it."""
    result = dict(visits[-1])
    result["seconds"] = [second for visited in visits for second in visited["seconds"]]
    step = harness.spread(result["seconds"])
    result["step"] = asdict(step)
    moved = result.get(
        "moved_bytes", [BF16_BYTES * numel, BF16_BYTES * numel * (2 if engine.streams else 1)]
    )
    parts = measured.parts(numel if engine.offloads else 0, chunks, tuple(moved), engine.streams)
    if parts is None:
        return result
    bound = lazy_bound(parts)
    result |= {
        "parts": asdict(parts),
        "bound": bound,
        "over_bound": asdict(over(result["seconds"], bound)),
    }
    result["over_compute"] = step.median / measured.compute
    return result


def over(seconds: Sequence[float], bound: float) -> harness.Spread:
    return harness.spread([second / bound for second in seconds])


def run_rank(rank: Rank, options: argparse.Namespace) -> int:
    """Measure, and write what is known after every engine."""
    device, clock = Device(str(rank.device)), Clock(options.seconds)
    batches = batches_of(options, rank.device)
    numel, chunks = numel_of(options.preset), PRESETS[options.preset].layers + 1
    made = engines(options.batch)
    chosen = {name: made[name] for name in options.engines or made}
    parts = Measured()
    left_out: dict[str, str] = {}
    report: dict[str, object] = {
        **suite.about_run("offload_train", options),
        "device": device.name,
        "deepspeed": deepspeed_version(),
        "numel": numel,
        "tokens_a_step": options.batch * PRESETS[options.preset].context,
        "measured": (measured := {}),
        "engines": (results := {}),
        "left_out": left_out,
    }
    visits: dict[str, list[dict[str, object]]] = {}
    for order in orders(list(chosen), options.rounds):
        if measured and all(clock.is_over(name) for name in order):
            break
        problem = measure(device, options.preset, batches[0], options.steps, parts)
        measured |= asdict(parts) | {"compute_left_out": problem}
        for name in order:
            if name in left_out:
                continue
            if clock.is_over(name):
                left_out.update(
                    {} if name in visits else {name: f"no time is left of {options.seconds:g} s"}
                )
                continue
            left = why_not(chosen[name], options.preset, device, parts.activation_bytes) or attempt(
                name, chosen[name], options.preset, device, batches, clock, visits
            )
            left_out.update({} if left is None else {name: left})
            results.update(
                {n: add_up(v, chosen[n], numel, chunks, parts) for n, v in visits.items()}
            )
            write(report, options)
    check(results, left_out)
    show(report)
    write(report, options)
    print(f"wrote {options.out / 'offload_train.json'}")
    return 0


def orders(names: list[str], rounds: int) -> Sequence[list[str]]:
    """Return the first round in the order given, as time may end, and the others in a random
    one.
    """
    return [names, *islice(harness.random_order(names, rounds, seed=0), rounds - 1)]


def attempt(
    name: str,
    engine: Engine,
    preset: str,
    device: Device,
    batches: Batches,
    clock: Clock,
    visits: dict[str, list[dict[str, object]]],
) -> str | None:
    """Visit an engine and add its samples; returns why it failed. Ours may only lack memory."""
    print(f"{name} ({clock.left:.0f} s are left)", file=sys.stderr, flush=True)
    start = time.monotonic()
    with freed_after(device):
        try:
            visits.setdefault(name, []).append(visit(engine, preset, device, batches, clock))
        except Exception as error:
            if ours(name) and not isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise
            if not visits[name]:
                del visits[name]
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
    clock.took(name, time.monotonic() - start)
    return None


def check(results: dict[str, dict[str, object]], left_out: dict[str, str]) -> None:
    """Name peers that train something else. ValueError if one of ours does, or if nothing of
    ours was measured.
    """
    base = next(filter(ours, results), None)
    if base is None:
        raise ValueError(f"bench_offload_train: no engine of ours could be measured: {left_out}")
    steps = min(len(result["losses"]) for result in results.values())
    losses = {name: result["losses"][:steps] for name, result in results.items()}
    fall = max(losses[base]) - min(losses[base])
    _, others = check_losses(losses, base, LOSS_TOLERANCE, "bench_offload_train", scale=fall)
    for name, difference in others.items():
        found = f"its losses differ from {base}'s by {difference:.1e} of their range"
        print(f"{name} trains something else: {found} (more than {LOSS_TOLERANCE})")
        left_out[name] = found
        del results[name]


def write(report: dict[str, object], options: argparse.Namespace) -> None:
    """Write the figures and the bars as they are now."""
    harness.save_json(options.out / "offload_train.json", report)
    panels = panels_of(report)
    if panels:
        harness.write_png(
            options.out / "offload_train.png",
            panels,
            f"GPT {options.preset} on {report['device']}, bfloat16",
        )


def panels_of(report: dict[str, object]) -> list[harness.Panel]:
    """Return bars of each engine's time and memory."""
    results = report["engines"]
    over_bound = {
        name: harness.Spread(**r["over_bound"]) for name, r in results.items() if "over_bound" in r
    }
    over_compute = {name: r["over_compute"] for name, r in results.items() if "over_compute" in r}
    peaks = {name: r["peak_bytes"] / GIB for name, r in results.items() if "peak_bytes" in r}
    panels = []
    if over_bound:
        x_label = (
            "time of a step over what no exact schedule beats, from this run's parts "
            "(median "
            "and quartiles)"
        )
        panels.append(harness.Panel("step / bound", x_label, over_bound, ours, mark=1.0))
    for title, x_label, values in (
        (
            "step / compute",
            "time of a step over forward and backward of the model alone",
            over_compute,
        ),
        ("peak device memory", "GiB while training", peaks),
    ):
        if values:
            bars = {name: harness.Spread(value, value, value) for name, value in values.items()}
            panels.append(harness.Panel(title, x_label, bars, ours))
    return panels


def show(report: dict[str, object]) -> None:
    """Print the parts, a table of engines, and what was left out."""
    measured = report["measured"]
    preset, tokens = report["options"]["preset"], report["tokens_a_step"]
    rows = [
        [
            "engine",
            "ms",
            "bound, ms",
            "step / bound [quartiles]",
            "/ compute",
            "tokens/s",
            "peak, GiB",
        ]
    ]
    for name, result in report["engines"].items():
        step = result["step"]["median"]
        known = "bound" in result
        rows.append(
            [
                name,
                f"{1e3 * step:.1f}",
                f"{1e3 * result['bound']:.1f}" if known else "-",
                str(harness.Spread(**result["over_bound"])) if known else "-",
                f"{result['over_compute']:.2f}" if known else "-",
                f"{tokens / step:.0f}",
                f"{result['peak_bytes'] / GIB:.2f}" if "peak_bytes" in result else "-",
            ]
        )
    print(f"{preset}: {report['numel']:,} parameters, {tokens} tokens per step, {report['device']}")
    if measured.get("forward"):
        milliseconds = [
            1e3 * harness.spread(measured[part]).median for part in ("forward", "backward")
        ]
        link = ", ".join(
            f"{way} {harness.spread(rates).median / 1e9:.1f} GB/s"
            for way, rates in measured["link"].items()
        )
        rate = 1e-9 / harness.spread(measured["adam"]).median
        threads = measured["adam_threads"]
        print(
            f"forward {milliseconds[0]:.1f} ms, backward {milliseconds[1]:.1f}; {link}, both at "
            f"once; CPU Adam {rate:.2f} "
            f"Gparam/s on {threads} threads"
        )
    print(harness.table(rows))
    for name, reason in report["left_out"].items():
        print(f"{name} is left out: {reason}")


def main() -> int:
    parser = suite.make_parser("offload_train", __doc__, rounds=2, pause=0.0)
    parser.add_argument(
        "--preset", choices=list(PRESETS), default="1.5b", help="model (default: %(default)s)"
    )
    parser.add_argument(
        "--batch", type=positive, default=4, help="sequences per step (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=positive, default=6, help="timed in each visit (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=above_zero,
        default=900.0,
        help="begin nothing after these (default: %(default)s)",
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="(default: %(default)s)"
    )
    names = list(engines(batch=1))
    parser.add_argument(
        "--engines", nargs="+", choices=names, help="which, in this order first (default: all)"
    )
    options = suite.parse(parser)
    return launch(run_rank, 1, options.device, None, options)


if __name__ == "__main__":
    sys.exit(main())
