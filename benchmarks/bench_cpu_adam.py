"""Time one CPU Adam step against torch's fused AdamW, DeepSpeed's CPU Adam (when installed) and the memory's limit.

Two subjects, each a flat tensor of --sizes elements:

    fp32      float32 weight and gradient: 4 streams read, 3 written
    offload   what a step of offloaded training does: bfloat16 gradient in, unscale, Adam on the float32 master, bfloat16
              weight out. shardcore does it in one pass; peers in four: widen, unscale, step, narrow.

The limit is a loop over the same streams with trivial arithmetic (stream_limit.cpp). All buffers of all engines ask for
huge pages with --pages equal, so that only the loops differ; with --pages own everybody has what it allocates by itself.
At the end all engines must hold the same weights (to rounding), so nobody is fast by doing less.
"""

import argparse
import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

import shardcore
from benchmarks import harness, suite
from benchmarks.adam_kinds import LOSS_SCALE, OPTIONS, check_same_work
from benchmarks.cpu_buffers import Buffers, four_pass_step, huge_page_setting, step_of
from benchmarks.stream_limit import StreamLimit
from examples.arguments import elements

try:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    DeepSpeedCPUAdam = None

BYTES_PER_PARAM = {"fp32": 28, "offload": 28}  # fp32: 7 x 4; offload: 2 + 3 x 4 in, 3 x 4 + 2 out


def parse_options() -> argparse.Namespace:
    parser = suite.make_parser("cpu_adam", __doc__, rounds=15, pause=0.05, threads=True)
    parser.add_argument("--sizes", type=elements, nargs="+", default=[64 * 2**20], help="elements (default: 64M)")
    parser.add_argument("--pages", choices=["equal", "own"], default="equal", help="see above (default: %(default)s)")
    return suite.parse(parser)


@dataclass(frozen=True)
class Case:
    """One engine at work: ``step`` is what is timed, ``weight`` what it updates (None: the limit, which updates nothing)."""

    step: Callable[[], None]
    weight: torch.Tensor | None


def fp32_cases(buffers: Buffers, limit: StreamLimit) -> dict[str, Case]:
    """Set up the float32 subject for every engine."""
    cases = {}
    streams = buffers.streams(*[torch.float32] * 4)
    cases["limit"] = Case(lambda: limit.adam(*streams), None)

    param = buffers.parameter(torch.float32)
    param.grad = buffers.copy_of(buffers.grad, torch.float32)
    cases["shardcore CPUAdam"] = Case(shardcore.CPUAdam([param], **OPTIONS).step, param)

    for name in peers():
        param = buffers.parameter(torch.float32)
        param.grad = buffers.copy_of(buffers.grad, torch.float32)
        cases[name] = Case(step_of(peer(name, param), buffers), param)
    return cases


def offload_cases(buffers: Buffers, limit: StreamLimit) -> dict[str, Case]:
    """Set up the offload subject for every engine; gradients come multiplied by the loss scale."""
    scaled = buffers.grad * LOSS_SCALE  # a power of two: exact
    cases = {}
    streams = buffers.streams(torch.bfloat16, torch.bfloat16, *[torch.float32] * 3)
    cases["limit"] = Case(lambda: limit.offload(*streams), None)

    param = buffers.parameter(torch.bfloat16)
    param.grad = buffers.copy_of(scaled, torch.bfloat16)
    optimizer = shardcore.CPUAdam([param], **OPTIONS, master="fp32")
    cases["shardcore CPUAdam"] = Case(lambda: optimizer.step(grad_scale=1 / LOSS_SCALE), param)

    for name in peers():
        weight = buffers.copy_of(buffers.weight, torch.bfloat16)
        grad = buffers.copy_of(scaled, torch.bfloat16)
        cases[name] = Case(
            four_pass_step(lambda master, name=name: peer(name, master), weight, grad, buffers, 1 / LOSS_SCALE), weight
        )
    return cases


def peers() -> list[str]:
    """Name the peers that are installed."""
    return ["torch fused AdamW"] + (["DeepSpeedCPUAdam"] if DeepSpeedCPUAdam is not None else [])


def peer(name: str, param: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Make a peer's optimizer over ``param``."""
    if name == "DeepSpeedCPUAdam":
        return DeepSpeedCPUAdam([param], **OPTIONS)
    return torch.optim.AdamW([param], **OPTIONS, fused=True)


SUBJECTS = {"fp32": fp32_cases, "offload": offload_cases}
OURS = "shardcore CPUAdam"


def measure(subject: str, numel: int, options: argparse.Namespace, limit: StreamLimit) -> dict[str, object]:
    """Run one subject at one size; prints the table and returns what JSON holds."""
    cases = SUBJECTS[subject](Buffers(numel, options.pages == "equal"), limit)
    repeats = min(100, max(1, 2**20 // numel))  # a sample of a small size is many steps
    steps = {name: case.step for name, case in cases.items()}
    seconds = harness.interleave(steps, options.rounds, repeats=repeats, pause_s=options.pause, warmup=2)
    weights = {name: case.weight for name, case in cases.items() if case.weight is not None}
    worst = check_same_work(subject, weights, OURS, "bench_cpu_adam")
    ours = seconds[OURS]
    rows = [["engine", "ms (median)", "Gparam/s", "GB/s", "time / ours [quartiles]"]]
    result = {}
    for name, samples in seconds.items():
        rate = numel / harness.spread(samples).median / 1e9
        ratio = harness.paired(samples, ours)
        rows.append([name, f"{numel / rate / 1e6:.2f}", f"{rate:.2f}", f"{rate * BYTES_PER_PARAM[subject]:.1f}", str(ratio)])
        result[name] = {"seconds": samples, "gparams_per_second": rate, "time_over_ours": asdict(ratio)}
    print(f"\n{subject}, {numel:,} elements, {options.threads} threads, {options.rounds} rounds, {options.pages} pages")
    print(harness.table(rows))
    of_limit = harness.paired(seconds["limit"], ours)
    print(f"shardcore reaches {of_limit.median:.0%} of the limit; engines' weights agree to {worst:.1e}")
    return {"subject": subject, "numel": numel, "weights_agree_to": worst, "engines": result}


def panel(result: dict[str, object]) -> harness.Panel:
    """Turn one result into bars: each engine's speed over ours, by paired ratios."""
    speeds = {}
    for name, engine in result["engines"].items():
        ours = result["engines"][OURS]["seconds"]
        speeds[name] = harness.paired(ours, engine["seconds"])
    title = f"{result['subject']}, {result['numel']:,} elements"
    return harness.Panel(title, "speed, shardcore = 1 (median and quartiles)", speeds, lambda name: name == OURS, mark=1.0)


def main() -> None:
    options = parse_options()
    suite.use_threads("cpu_adam", options)
    if DeepSpeedCPUAdam is None:
        print("DeepSpeedCPUAdam is left out: deepspeed is not installed (pip install --no-build-isolation deepspeed)")
    limit = StreamLimit(options.threads)
    results = []
    for numel in options.sizes:
        for subject in SUBJECTS:
            results.append(measure(subject, numel, options, limit))
            gc.collect()
    report = {**suite.about_run("cpu_adam", options), "huge_pages": huge_page_setting(), "results": results}
    harness.write_json(options.out / "cpu_adam.json", report)
    harness.write_png(
        options.out / "cpu_adam.png", [panel(result) for result in results], f"CPU Adam, {options.threads} threads"
    )


if __name__ == "__main__":
    main()
