"""What the suites' command lines share: options that all of them have, and what a result says of
its run.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

from examples.arguments import make_out_folder, not_negative, positive
from examples.machine import describe_machine, usable_cores


def make_parser(
    name: str, about: str, *, rounds: int, pause: float, threads: bool = False
) -> argparse.ArgumentParser:
    """Make the parser of ``benchmarks.bench_<name>`` with the options --rounds, --pause, --out
    and, if asked for, --threads.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.bench_{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=positive, default=rounds, help="rounds that count (default: %(default)s)"
    )
    parser.add_argument(
        "--pause",
        type=not_negative,
        default=pause,
        help="seconds before each sample (default: %(default)s)",
    )
    if threads:
        parser.add_argument(
            "--threads",
            type=positive,
            default=usable_cores(),
            help="threads of all (default: all cores)",
        )
    add_out(parser)
    return parser


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the option --out."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/benchmarks"),
        help="folder of the results (default: %(default)s)",
    )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse this process's arguments; the folder of --out exists afterwards, and so do the GPUs
    asked for.
    """
    options = parser.parse_args()
    found, needed = torch.cuda.device_count(), getattr(options, "nproc", None) or 1
    if getattr(options, "device", None) == "cuda" and found < needed:
        parser.error(
            f"argument --device: cuda; torch can use {found} GPUs here, expected {needed} (or "
            f"--device cpu)"
        )
    make_out_folder(parser, options.out)
    return options


def use_threads(name: str, options: argparse.Namespace) -> None:
    """Let everything run on --threads threads, on the CPU; this may start
    ``benchmarks.bench_<name>`` anew.
    """
    if os.environ.get("OMP_NUM_THREADS") != str(options.threads):
        # An OpenMP that an extension brings along (DeepSpeed's) reads this once, before we could
        # set it.
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(options.threads),
            "DS_ACCELERATOR": "cpu",
        }
        os.execve(
            sys.executable,
            [sys.executable, "-m", f"benchmarks.bench_{name}", *sys.argv[1:]],
            environment,
        )
    torch.set_num_threads(options.threads)


def about_run(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Begin a result: which benchmark, on what, with which options."""
    return {
        "benchmark": name,
        "machine": describe_machine(),
        "options": {key: value for key, value in vars(options).items() if key != "out"},
    }
