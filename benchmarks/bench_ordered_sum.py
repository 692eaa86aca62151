"""Time the ordered sum of the ranks' pieces, as a share of the read bandwidth in the same run.

A unit of a 7B model is cut among 8, 64, 256 and 1,024 ranks, and one rank adds up what it received:
ever fewer elements of ever more ranks, of the same bytes. Beside it torch's sum over the ranks, in
an order of its own, without the norm of the result. Pieces are float32 and bfloat16, the sum
float32.

share = bytes of the pieces and of the sum / time, over the same for a kernel that only reads, in
the same round. Times on a GPU are from CUDA events around several sums in a row. --device cpu times
the CPU's sum, over a smaller unit; there torch's sum of one tensor stands for reading.
"""

import argparse
import sys
from collections.abc import Callable

import torch

from benchmarks import harness, suite
from benchmarks.adam_kinds import SHORT
from benchmarks.bench_fused_adam import OURS
from benchmarks.device import Device
from examples.arguments import elements, positive
from shardcore._native import _C

UNIT = {"cuda": 202_383_360, "cpu": 202_383_360 // 16}  # elements of a layer of Llama 7B
BLOCK = 256  # shards start on such boundaries
DTYPES = (torch.float32, torch.bfloat16)


def numel_of_rank(unit: int, ranks: int) -> int:
    """Return how many elements of the unit each rank owns."""
    return -(-unit // (ranks * BLOCK)) * BLOCK


def make_sums(
    device: Device, ranks: int, numel: int, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Return our sum and torch's of the same pieces (ranks, numel), ready to call; ValueError if
    they differ.
    """
    generator = torch.Generator(device.torch).manual_seed(0)
    pieces = torch.randn(
        ranks, numel, generator=generator, device=device.torch, dtype=torch.float32
    ).to(dtype)
    ours, theirs = (torch.zeros(numel, dtype=torch.float32, device=device.torch) for _ in range(2))
    calls = {
        f"{OURS}{SHORT[dtype]}": lambda: _C.ordered_sum(pieces.view(-1), ranks, 1.0, ours),
        f"torch: {SHORT[dtype]}": lambda: torch.sum(pieces, 0, dtype=torch.float32, out=theirs),
    }
    for call in calls.values():
        call()
    difference = float((ours - theirs).abs().max()) / ranks**0.5
    if not difference < 1e-4:
        raise ValueError(
            f"bench_ordered_sum: sums of {ranks} pieces differ by {difference:.1e}; expected only "
            f"other rounding"
        )
    return calls


def measure(device: Device, ranks: int, options: argparse.Namespace) -> dict[str, object]:
    """Time the sums of one number of ranks; prints the table and returns what JSON holds."""
    numel = numel_of_rank(options.unit, ranks)
    read_bytes = 4 * ranks * numel // 16 * 16
    device.free_bytes()
    calls, sizes = {"read": device.reader(read_bytes)}, {}
    for dtype in DTYPES:
        sums = make_sums(device, ranks, numel, dtype)
        calls |= sums
        sizes |= dict.fromkeys(sums, numel * (ranks * dtype.itemsize + 4))
    seconds = harness.interleave(
        calls,
        options.rounds,
        repeats=options.repeats,
        pause_s=options.pause,
        warmup=2,
        timer=device.timer,
    )
    result: dict[str, object] = {"ranks": ranks, "numel": numel, "cases": []}
    rows = [["sum", "ms (median)", "GB/s", "share of reading [quartiles]"]]
    for name, moved in sizes.items():
        case = harness.rates(seconds[name], seconds["read"], moved, read_bytes)
        result["cases"].append(
            {"engine": name, "ours": name.startswith(OURS), "moved_bytes": moved, **case}
        )
        ms = harness.spread(seconds[name]).median * 1e3
        rows.append(
            [
                name,
                f"{ms:.3f}",
                f"{case['gb_per_second']:.1f}",
                str(harness.Spread(**case["share"])),
            ]
        )
    print(f"\n{ranks:,} pieces of {numel:,} elements, {options.rounds} rounds")
    print(harness.table(rows))
    return result


def main() -> int:
    """Run, print a table for each number of ranks, write ordered_sum.json and a picture into
    --out.
    """
    parser = suite.make_parser("ordered_sum", __doc__, rounds=20, pause=0.005)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: the CPU's sum"
    )
    parser.add_argument(
        "--ranks", type=positive, nargs="+", default=[8, 64, 256, 1024], help="default: %(default)s"
    )
    parser.add_argument(
        "--unit", type=elements, help="elements that all ranks share (default: 202M, on CPUs 13M)"
    )
    parser.add_argument(
        "--repeats", type=positive, default=10, help="sums a sample (default: %(default)s)"
    )
    options = suite.parse(parser)
    options.unit = options.unit or UNIT[options.device]
    device = Device(options.device)
    results: list[dict[str, object]] = []
    try:  # whatever stops the run, what was measured is kept
        for ranks in options.ranks:
            results.append(measure(device, ranks, options))
    finally:
        report = {**suite.about_run("ordered_sum", options), "device": device.name, "sums": results}
        harness.write_json(options.out / "ordered_sum.json", report)
    panels = [
        harness.Panel(
            f"{result['ranks']:,} pieces of {result['numel']:,} elements",
            "share of read bandwidth (median and quartiles)",
            {case["engine"]: harness.Spread(**case["share"]) for case in result["cases"]},
            lambda name: name.startswith(OURS),
            mark=1.0,
        )
        for result in results
    ]
    harness.write_png(options.out / "ordered_sum.png", panels, f"Ordered sum on {device.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
