"""Time CPU Adam over ever more tensors, and over ever larger ones: what one tensor costs, and what one element.

    tensors    float32 parameters of one element each, --tensors of them: microseconds a tensor
    elements   one flat float32 parameter of --sizes elements: nanoseconds an element

Beside torch's fused AdamW, in the steady state: states exist, gradients stay where they are. All cases of a subject take
turns; "growth" is the time of one tensor or element over that at the base (the size nearest to 3e7), in the same round: 1 if
time is in proportion to the size. All --sizes are the beginning of the same four buffers (weight, gradient, two moments), so
the largest alone needs memory: 16 bytes per element. Sizes that do not fit into the free memory are left out.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

import shardcore
from benchmarks import harness, suite
from benchmarks.adam_kinds import CHECK_STRIDE, OPTIONS, check_same_work
from benchmarks.cpu_buffers import allocate, huge_page_setting
from examples.arguments import elements
from examples.machine import available_bytes

OURS = "shardcore CPUAdam"
ENGINES = {OURS: shardcore.CPUAdam, "torch fused AdamW": partial(torch.optim.AdamW, fused=True)}
BYTES_HELD = 16  # an element: weight, gradient, two moments
BASE = 3 * 10**7


@dataclass(frozen=True)
class Subject:
    """What is counted, in which unit, and how many one sample steps over at least (in up to 100 steps)."""

    name: str
    each: str
    unit: str
    per_second: float
    sample: int


TENSORS = Subject("tensors", "tensor", "us", 1e6, 10**5)
ELEMENTS = Subject("elements", "element", "ns", 1e9, 10**8)


@dataclass(frozen=True)
class Case:
    """One engine over `size` tensors or elements: ``step`` is what is timed, ``weights`` what it updates."""

    engine: str
    size: int
    step: Callable[[], None]
    weights: Sequence[torch.Tensor]


def tensor_cases(count: int) -> Iterator[Case]:
    """Set up every engine over `count` tensors of one element, each with memory of its own."""
    generator = torch.Generator().manual_seed(0)
    values, grads = (torch.randn(count, generator=generator).mul_(size) for size in (0.02, 1e-3))
    for engine, make in ENGINES.items():
        params = [torch.nn.Parameter(value.clone()) for value in values.split(1)]
        for param, grad in zip(params, grads.split(1), strict=True):
            param.grad = grad.clone()
        yield Case(engine, count, make(params, **OPTIONS).step, params)


def element_cases(sizes: Sequence[int]) -> Iterator[Case]:
    """Set up every engine over the first elements of the same buffers. A case goes on with moments that others moved, too."""
    weight, grad, exp_avg, exp_avg_sq = (allocate(max(sizes), torch.float32, huge=True) for _ in range(4))
    weight.normal_(0, 0.02)
    grad.normal_(0, 1e-3)
    for size in sizes:
        for engine, make in ENGINES.items():
            param = torch.nn.Parameter(weight[:size])
            param.grad = grad[:size]
            optimizer = make([param], **OPTIONS)
            optimizer.state[param].update(step=torch.zeros(()), exp_avg=exp_avg[:size], exp_avg_sq=exp_avg_sq[:size])
            yield Case(engine, size, optimizer.step, [weight])


def check_tensors(cases: Sequence[Case]) -> None:
    """Raise ValueError unless the engines hold the same weights."""
    for size in {case.size for case in cases}:
        weights = {case.engine: torch.cat([w.detach() for w in case.weights]) for case in cases if case.size == size}
        check_same_work(f"{size} tensors", weights, OURS, "bench_adam_scaling")


def check_elements(cases: Sequence[Case]) -> None:
    """Raise ValueError unless one more step of each case changes all of its elements (those looked at), and none beyond."""
    for case in cases:
        sampled = case.weights[0][::CHECK_STRIDE]
        before = sampled.clone()
        case.step()
        changed, inside = sampled != before, -(-case.size // CHECK_STRIDE)
        if not changed[:inside].all() or changed[inside:].any():
            raise ValueError(f"bench_adam_scaling: {case.engine} changed other elements than the first {case.size}")


def measure(subject: Subject, cases: Sequence[Case], options: argparse.Namespace) -> dict[str, object]:
    """Time the cases of one subject in turns; prints the table and returns what JSON holds."""
    steps = {f"{case.size:,} {subject.name}, {case.engine}": case.step for case in cases}
    repeats = {name: min(100, max(1, subject.sample // case.size)) for name, case in zip(steps, cases, strict=True)}
    gc.collect()
    gc.freeze()  # what one case's garbage costs shall not depend on the tensors of all others
    seconds = harness.interleave(steps, options.rounds, repeats=repeats, pause_s=options.pause, warmup=2)
    gc.unfreeze()
    by_case = {(case.engine, case.size): samples for case, samples in zip(cases, seconds.values(), strict=True)}
    base = min((case.size for case in cases), key=lambda size: abs(size - BASE))
    rows = [[subject.name, "engine", f"{subject.unit} a {subject.each}", f"growth from {base:,}", "time / ours"]]
    results = []
    for (engine, size), samples in by_case.items():
        each = harness.spread([s / size * subject.per_second for s in samples])
        growth = harness.paired([s / size for s in samples], [s / base for s in by_case[engine, base]])
        over_ours = harness.paired(samples, by_case[OURS, size])
        rows.append([f"{size:,}", engine, str(each), str(growth), str(over_ours)])
        spreads = {"each": asdict(each), "growth": asdict(growth), "time_over_ours": asdict(over_ours)}
        results.append({"size": size, "engine": engine, "seconds": samples, **spreads})
    print(f"\n{subject.name}, {options.threads} threads, {options.rounds} rounds, median [quartiles]")
    print(harness.table(rows))
    return {"subject": subject.name, "unit": f"{subject.unit} a {subject.each}", "base": base, "cases": results}


def panel(result: dict[str, object], key: str, x_label: str) -> harness.Panel:
    """Turn one result into bars of one of its figures."""
    bars = {f"{case['size']:,}: {case['engine']}": harness.Spread(**case[key]) for case in result["cases"]}
    return harness.Panel(result["subject"], f"{x_label} (median and quartiles)", bars, lambda n: OURS in n, mark=1.0)


def main() -> int:
    parser = suite.make_parser("adam_scaling", __doc__, rounds=15, pause=0.02, threads=True)
    counts, sizes = [10**2, 10**3, 10**4, 10**5], [10**6, 10**7, 3 * 10**7, 10**8, 3 * 10**8, 5 * 10**8]
    parser.add_argument("--tensors", type=elements, nargs="+", default=counts, help="counts (default: 1e2 1e3 1e4 1e5)")
    parser.add_argument("--sizes", type=elements, nargs="+", default=sizes, help="default: 1e6 1e7 3e7 1e8 3e8 5e8")
    options = suite.parse(parser)
    torch.set_num_threads(options.threads)
    room = available_bytes()
    fitting = [size for size in options.sizes if room is None or BYTES_HELD * size < 0.9 * room]
    left_out = [size for size in options.sizes if size not in fitting]
    if left_out:
        why = f"{BYTES_HELD} bytes per element, {room / 2**30:.1f} GiB are free"
        print(f"left out: {', '.join(f'{size:,}' for size in left_out)} elements ({why})")
    results = []
    cases = [case for count in options.tensors for case in tensor_cases(count)]
    results.append(measure(TENSORS, cases, options))
    check_tensors(cases)
    cases.clear()
    if fitting:
        cases = list(element_cases(fitting))
        results.append(measure(ELEMENTS, cases, options))
        check_elements(cases)
    run = suite.about_run("adam_scaling", options)
    report = {**run, "huge_pages": huge_page_setting(), "left_out": left_out, "results": results}
    harness.write_json(options.out / "adam_scaling.json", report)
    panels = [panel(results[0], "each", "microseconds a tensor")]
    panels += [panel(result, "growth", f"time per element, at {result['base']:,} = 1") for result in results[1:]]
    harness.write_png(options.out / "adam_scaling.png", panels, f"CPU Adam, more and larger tensors, {options.threads} threads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
