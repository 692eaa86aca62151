"""Time communication that a step leaves exposed, in percent of compute, on a simulated fabric.

The fabric has nodes of GPUs that NICs join. The engine's own schedule of one rank runs in computed
time (benchmarks/fabric.py): nothing is measured, so every run gives the same figures. FSDP2's
documented schedule, and DeepSpeed's with its defaults and overlap_comm, are computed beside it, on
the same fabric.

In the model: a 7B model of 32 equal units (or that of --model: its units with their mean size), an
embedding and an output head, each half of what is in no unit; bfloat16 weights, one backward a
step; 2 operations per parameter and token in forward, twice as many in backward, at --tflops; Adam,
and each collective, for as long as its bytes take; a latency of 20 microseconds a collective. "head
a unit" is shard(units=[*blocks, head]). A rank sends over its NVLink and its NIC at once; each
carries one collective at a time, and so does a communicator. Rings (gathers, and sums by the
backend) go through every NIC of a node; in an exchange each rank sends each other one its piece.

Not in the model: latency that grows with the number of ranks, congestion between nodes, multicast
and sums in switches, late ranks, kernels that communication slows down, the time to add pieces up,
and the host's own time. What hosts compare over gloo is timed by its messages (80 microseconds
each), beside the table: GPUs work meanwhile.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import harness, suite
from benchmarks.fabric import Large, Machine, simulate, simulate_deepspeed, simulate_fsdp2
from examples.arguments import above_zero, positive
from shardcore.engine.units import plan_units
from shardcore.estimate.estimate_command import build

# world; of a larger one, or one that is no power of two, the small model's padding would count
LARGEST = 1024


def world_size(text: str) -> int:
    """Parse a number of ranks."""
    value = int(text) if text.isdecimal() else 0
    if not 2 <= value <= LARGEST or value & (value - 1):
        raise argparse.ArgumentTypeError(f"{text}; expected a power of two from 2 to {LARGEST}")
    return value


def large_of(model: str) -> Large:
    """Return the sizes of `shardcore estimate`'s MODEL. Raises ValueError for one without units."""
    specs = plan_units(build(model))
    sizes = {spec.name: sum(param.numel() for _, param in spec.params) for spec in specs}
    root = sizes.pop("", 0)
    if not sizes:
        raise ValueError(f"{model} has no repeated blocks; expected a model of some")
    return Large(sum(sizes.values()) / len(sizes), root, len(sizes))


def rows(ranks_per_node: int) -> dict[str, Callable[..., dict[str, float]]]:
    """Return what simulates each row of the table."""

    def sharded(**options: Any) -> Callable[..., dict[str, float]]:
        return lambda world, tokens, machine, large: simulate(
            world, tokens, machine, large, **options
        )

    nodes = {"ranks_per_node": ranks_per_node}
    return {
        "stage 3": sharded(stage=3),
        "stage 3, ranks_per_node": sharded(stage=3, **nodes),
        'stage 3, reduction="nccl"': sharded(stage=3, reduction="nccl"),
        "stage 3, ranks_per_node, head a unit": sharded(stage=3, head_apart=True, **nodes),
        "FSDP2's schedule": simulate_fsdp2,
        "DeepSpeed 3's schedule": lambda *given: simulate_deepspeed(*given, stage=3),
        "stage 0, ranks_per_node": sharded(stage=0, **nodes),
        "stage 0, ranks_per_node, head a unit": sharded(stage=0, head_apart=True, **nodes),
        "stage 1, overlap_step, ranks_per_node": sharded(stage=1, overlap_step=True, **nodes),
        "stage 2": sharded(stage=2),
        "stage 2, overlap_step": sharded(stage=2, overlap_step=True),
        "stage 2, overlap_step, ranks_per_node": sharded(stage=2, overlap_step=True, **nodes),
        "stage 2, overlap_step, ranks_per_node, head a unit": sharded(
            stage=2, overlap_step=True, head_apart=True, **nodes
        ),
        "DeepSpeed 2's schedule": simulate_deepspeed,
    }


def main() -> int:
    """Run, print a table, write fabric.json into --out."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_fabric",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Machine()
    parser.add_argument(
        "--world",
        type=world_size,
        nargs="+",
        default=[8, 64, 1024],
        help="ranks (default: 8 64 1024)",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        nargs="+",
        default=[2048, 4096, 8192],
        help="per rank and step (default: 2048 4096 8192)",
    )
    parser.add_argument(
        "--nvlink",
        type=above_zero,
        default=default.nvlink / 1e9,
        help="GB/s of a GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--nic",
        type=above_zero,
        default=default.nic / 1e9,
        help="GB/s of a GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=positive,
        default=default.ranks_per_node,
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="another model, as `shardcore estimate` takes it (default: 7B)",
    )
    parser.add_argument(
        "--tflops",
        type=above_zero,
        default=default.flops / 1e12,
        help="of a GPU, reached (default: %(default)s)",
    )
    suite.add_out(parser)
    options = suite.parse(parser)
    for world in options.world:
        if world % options.ranks_per_node:
            parser.error(
                f"argument --ranks-per-node: {options.ranks_per_node}; expected a divisor of "
                f"--world {world}"
            )

    try:
        large = Large() if options.model is None else large_of(options.model)
    except (ValueError, TypeError) as error:
        parser.error(f"argument --model: {error}")
    machine = Machine(
        options.ranks_per_node, 1e9 * options.nvlink, 1e9 * options.nic, flops=1e12 * options.tflops
    )
    cells = [(world, tokens) for world in options.world for tokens in options.tokens]
    results, table = (
        [],
        [["exposed, percent of compute", *(f"{world:,} x {tokens:,}" for world, tokens in cells)]],
    )
    cases = rows(options.ranks_per_node)
    longest: dict[int, float] = {}  # comparisons of a step, by world
    bar = harness.Bar(len(cases) * len(cells))
    for name, case in cases.items():
        percents: list[float] = []
        by_kind: dict[str, list[float]] = {
            kind: [] for kind in ("gradients", "weights", "new weights")
        }
        for world, tokens in cells:
            bar.advance(name)
            seconds = {
                kind: taken
                for kind, taken in case(world, tokens, machine, large).items()
                if kind != "host"
            }
            compute, compared = seconds.pop("compute"), seconds.pop("compared", 0.0)
            longest[world] = max(longest.get(world, 0.0), compared)
            percents.append(100 * sum(seconds.values()) / compute)
            for kind, found in by_kind.items():
                found.append(100 * seconds.get(kind, 0.0) / compute)
            results.append(
                {
                    "case": name,
                    "world": world,
                    "tokens": tokens,
                    "compute_s": compute,
                    "exposed_s": seconds,
                    "percent": percents[-1],
                    "compared_s": compared,
                }
            )
        for label, found in [
            (name, percents),
            *((f"  {kind}", found) for kind, found in by_kind.items() if any(found)),
        ]:
            table.append([label, *(f"{percent:.1f}" for percent in found)])
    bar.clear()
    print(
        f"{large.units} units of {large.unit / 1e6:,.1f} million parameters and a root of "
        f"{large.root / 1e6:,.1f} million;"
    )
    print("ranks x tokens per rank and step; simulated, not measured")
    print(harness.table(table))
    spans = ", ".join(f"{1e3 * seconds:.2f} at {world:,}" for world, seconds in longest.items())
    print(f"ms that the hosts compare ranks in a step, beside the GPUs' work: {spans}")
    about = suite.about_run("fabric", options)
    harness.write_json(
        options.out / "fabric.json",
        {
            **about,
            "fabric": dataclasses.asdict(machine),
            "model": dataclasses.asdict(large),
            "results": results,
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
