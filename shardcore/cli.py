"""The command line: ``shardcore info``, ``shardcore estimate`` and ``shardcore bench`` (or ``python -m shardcore``).

Exit status: 0 done; 1 something failed; 2 wrong arguments, or no source checkout where one is needed.
Benchmarks are not installed with the package: they belong to a commit, and compare with libraries that only a developer has.
``bench`` therefore runs those of the checkout that this package is imported from.
"""

import argparse
import ast
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shardcore._native import _C, build_record
from shardcore.estimate import command as estimate
from shardcore.version import __version__

_CHECKOUT = Path(__file__).resolve().parent.parent
_PREFIX = "bench_"  # benchmarks/bench_<suite>.py writes <suite>.json
_CANNOT_RUN_HERE = 2  # what a suite exits with on a machine that lacks its device


def _facts() -> dict[str, str]:
    """What `info` shows, by name."""
    build = _C.build_info()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "shardcore": __version__,
        "build": build_record().get("line", "unknown (no record beside the library)").removeprefix("shardcore: built "),
        "library": str(_C.__file__),
        "compiler": build["compiler"],
        "torch": torch.__version__,
        "CPU": f"{_C.cpu_isa()} (this build and CPU have {', '.join(_C.cpu_isas())}), {torch.get_num_threads()} threads",
        "CUDA": f"{build['cuda']} for {build['cuda_arch_list']}" if build["cuda"] else "not in this build",
        "GPUs": ", ".join(f"{p.name} ({p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB)" for p in gpus) or "none",
    }


def _info() -> int:
    print(_columns([[name, value] for name, value in _facts().items()]))
    return 0


def _suites(checkout: Path) -> dict[str, str]:
    """The benchmarks of a checkout: name -> first line of their description. None where the package is installed."""
    found: dict[str, str] = {}
    if not (checkout / "pyproject.toml").exists():
        return found
    for path in sorted(checkout.glob(f"benchmarks/{_PREFIX}*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        found[path.stem.removeprefix(_PREFIX)] = text.partition("\n")[0]
    return found


def _bench(names: Sequence[str], out: Path, options: Sequence[str], suites: Mapping[str, str]) -> int:
    """Run suites one after the other, each in a process of its own, and print a table of how they ended."""
    if options and len(names) != 1:
        print("shardcore bench: options after -- need one suite; expected its name before them", file=sys.stderr)
        return 2
    if any(option.partition("=")[0] == "--out" for option in options):
        print("shardcore bench: --out after --; expected it before (the table says where results are)", file=sys.stderr)
        return 2
    chosen = names or list(suites)
    rows, failed = [["suite", "result", "time", "figures"]], False
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(_CHECKOUT), os.environ.get("PYTHONPATH")]))}
    for number, name in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {name}: {suites[name]}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{_PREFIX}{name}", "--out", str(out), *options]
        start = time.monotonic()
        code = subprocess.run(command, cwd=_CHECKOUT, env=environment, check=False).returncode
        left_out = code == _CANNOT_RUN_HERE and not names
        failed |= code != 0 and not left_out
        result = "done" if code == 0 else "cannot run here" if left_out else f"failed ({code})"
        rows.append([name, result, f"{time.monotonic() - start:.0f} s", str(out / f"{name}.json") if code == 0 else "-"])
        print(flush=True)
    print(_columns(rows))
    return 1 if failed else 0


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Align all columns to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (of this process, by default); returns the exit status: 1, too, where nobody reads on (| head)."""
    try:
        try:
            return _run(arguments)
        finally:  # also where argparse exits: --help
            if sys.stdout is not None:  # closed
                sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:  # what is left is written when Python ends
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, options = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    suites = _suites(_CHECKOUT)
    parser = argparse.ArgumentParser(prog="shardcore", description="Sharded, offloaded training on torch.distributed.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="info | estimate | bench")
    commands.add_parser("info", help="what is installed, how it was built, and what it finds on this machine")
    estimator = commands.add_parser(
        "estimate", help="bytes that each rank keeps and sends, for a model, stages and numbers of ranks; trains nothing"
    )
    estimate.add_arguments(estimator)
    bench = commands.add_parser(
        "bench",
        help="run benchmarks (in a source checkout)",
        usage="shardcore bench [-h] [--out FOLDER] [SUITE ...] [-- OPTIONS OF THE SUITE ...]",
        epilog="\n".join(f"{name}: {about}" for name, about in suites.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(suites) or 'none here'} (default: all)")
    bench.add_argument("--out", type=Path, default=Path("build/benchmarks"), metavar="FOLDER", help="results (%(default)s)")
    parsed = parser.parse_args(own)
    if parsed.command != "bench" and options:
        parser.error(f"{parsed.command}: {' '.join(options)} after --; expected nothing (only bench passes options on)")
    if parsed.command == "info":
        return _info()
    if parsed.command == "estimate":
        try:
            return estimate.run(parsed, _columns)
        except (ValueError, TypeError) as error:
            estimator.error(str(error))
    if not suites:
        bench.error(
            f"{_CHECKOUT}, where this shardcore is imported from, is no source checkout; expected one (clone the repository, "
            "make setup, then python -m shardcore bench there)"
        )
    unknown = [name for name in parsed.suites if name not in suites]
    if unknown:
        bench.error(f"argument SUITE: {unknown[0]}; expected {', '.join(suites)}")
    return _bench(parsed.suites, parsed.out.resolve(), options, suites)
