"""The command line: ``shardcore info | run | estimate | consolidate | report | compare | bench``
(or ``python -m shardcore``).

Exit status: 0 done; 1 of ``consolidate --check`` a checkpoint with other values than were saved; 2
wrong arguments, or no source checkout where one is needed; of ``bench`` the suite's own, of ``run``
that of the rank that failed first.
Benchmarks are not installed with the package: they belong to a commit, and compare with libraries
that only a developer has. ``bench`` runs those of the checkout that this package is imported from.
"""

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from shardcore._native import _C, build_record
from shardcore.checkpoint.consolidate import MAX_SHARD_BYTES, bytes_of, check, consolidate
from shardcore.distributed import machine
from shardcore.estimate import estimate_command as estimate
from shardcore.estimate.fit import columns
from shardcore.launch import run_command as launch
from shardcore.metrics import compare, report
from shardcore.offload import disk
from shardcore.options import DTYPES, nearest
from shardcore.version import __version__

_CHECKOUT = Path(__file__).resolve().parent.parent
_PREFIX = "bench_"  # benchmarks/bench_<suite>.py writes <suite>.json


def _facts() -> dict[str, str]:
    """Return what `info` shows, by name."""
    build = _C.build_info()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "shardcore": __version__,
        "build": build_record()
        .get("line", "unknown (no record beside the library)")
        .removeprefix("shardcore: built "),
        "library": str(_C.__file__),
        "compiler": build["compiler"],
        "torch": torch.__version__,
        "CPU": f"{_C.cpu_isa()} (this build and CPU have {', '.join(_C.cpu_isas())}), "
        f"{torch.get_num_threads()} threads",
        "CUDA": f"{build['cuda']} for {build['cuda_arch_list']}"
        if build["cuda"]
        else "not in this build",
        "GPUs": ", ".join(
            f"{p.name} ({p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB)" for p in gpus
        )
        or "none",
    }


def _numa_facts() -> dict[str, str]:
    """Return on which cores workers update states, and the NUMA nodes that states lie on."""
    nodes = machine.numa_nodes()
    if not nodes:
        return {"NUMA": "nothing to do: one NUMA node"}
    facts = {
        "NUMA": "; ".join(
            f"node {node} has cores {machine.format_cores(cores)}" for node, cores in nodes.items()
        )
    }

    def placed(of_ranks: Sequence[Sequence[int]], rank: int) -> str:
        threads = machine.worker_threads(of_ranks, rank, machine.quota())
        cores = machine.worker_cores(of_ranks, rank, threads) or machine.own_cores()
        return (
            f"updates states on cores {machine.format_cores(cores)}, which lie on "
            f"{_nodes_text(machine.nodes_of(cores))}"
        )

    facts["one rank"] = placed([machine.own_cores()], 0)
    near = [
        machine.near_cores(machine.pci_address(gpu)) for gpu in range(torch.cuda.device_count())
    ]
    of_ranks = machine.divide_by_nodes([machine.own_cores()] * len(near), near)
    for gpu, cores in enumerate(near):
        facts[f"GPU {gpu}"] = (
            f"is on {_nodes_text(machine.nodes_of(cores)) if cores else 'an unknown node'}"
        )
        if len(near) > 1:
            facts[f"GPU {gpu}"] += f"; its rank of {len(near)} {placed(of_ranks, gpu)}"
    tier = _C.HostTier(torch.device("cpu"))
    tier.empty(1, torch.uint8, pinned=False, nodes=list(nodes))
    if tier.node_refusal:
        facts["but"] = (
            f"the system refuses to place memory ({tier.node_refusal}): states lie on any node"
        )
    return facts


def _nodes_text(nodes: Sequence[int]) -> str:
    return (
        f"node{'s' if len(nodes) > 1 else ''} "
        f"{', '.join(map(str, nodes))}{' by turns' if len(nodes) > 1 else ''}"
    )


def _info(parsed: argparse.Namespace) -> int:
    for folder in parsed.disk:
        if not Path(folder).is_dir():
            raise ValueError(f"info: --disk {folder} is not an existing directory")
    facts = _facts() | _numa_facts()
    engine = disk.file_engine()
    measured = {folder: disk.measure(engine, Path(folder)) for folder in parsed.disk}
    for folder, rates in measured.items():
        facts[folder] = f"{disk.about(engine, Path(folder))}: {_rates(rates)}"
    if len(measured) > 1:
        facts["all of them"] = (
            f'{_rates(disk.striped(list(measured.values())))} (offload={{"path": [DIR, ...]}})'
        )
    print(columns([[name, value] for name, value in facts.items()]))
    return 0


def _rates(rates: disk.Rates) -> str:
    return (
        f"reads {rates.read / 1e9:.2f} GB/s, writes {rates.write / 1e9:.2f}, both at once "
        f"{rates.both / 1e9:.2f} in all"
    )


def _suites(checkout: Path) -> dict[str, str]:
    """Return the benchmarks of a checkout, name -> first paragraph of the description; none where
    the package is installed.
    """
    paths = (
        sorted(checkout.glob(f"benchmarks/{_PREFIX}*.py"))
        if (checkout / "pyproject.toml").exists()
        else []
    )
    texts = {path: ast.get_docstring(ast.parse(path.read_text())) or "" for path in paths}
    return {
        path.stem.removeprefix(_PREFIX): " ".join(text.partition("\n\n")[0].split())
        for path, text in texts.items()
    }


def _consolidate(parsed: argparse.Namespace) -> int:
    if parsed.check:
        return _check(parsed)
    if parsed.output is None:
        raise ValueError("OUT is missing; expected where to write, or --check")
    dtype, size = DTYPES.get(parsed.dtype), bytes_of(parsed.max_shard_size or MAX_SHARD_BYTES)
    print(
        *consolidate(
            parsed.directory, parsed.output, tag=parsed.tag, dtype=dtype, max_shard_bytes=size
        ),
        sep="\n",
    )
    return 0


def _check(parsed: argparse.Namespace) -> int:
    """Print how a checkpoint compares with its digests; return 1 if it has other values."""
    if parsed.output or parsed.dtype or parsed.max_shard_size:
        raise ValueError("--check writes nothing; expected it without OUT, --dtype and file sizes")
    checked = check(parsed.directory, parsed.tag)
    for label in checked.differing:
        print(f"{label} has other values than were saved")
    print(
        f"{checked.path}: all checksums match; {checked.same} digests match, "
        f"{len(checked.differing)} differ, {checked.without} tensors and states have none"
    )
    return 1 if checked.differing else 0


def _bench(parsed: argparse.Namespace) -> int:
    suites = _suites(_CHECKOUT)
    if not suites:
        raise ValueError(
            f"{_CHECKOUT}, where this shardcore is imported from, is no source checkout; expected "
            f"one (clone the repository, make setup, then python -m shardcore bench there)"
        )
    if parsed.suite is None:
        print(columns(list(suites.items())))
        return 0
    if parsed.suite not in suites:
        raise ValueError(f"argument SUITE: {parsed.suite}; expected {', '.join(suites)}")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_CHECKOUT), os.environ.get("PYTHONPATH")]))
    }
    command = [sys.executable, "-P", "-m", f"benchmarks.{_PREFIX}{parsed.suite}", *parsed.options]
    return subprocess.run(command, env=environment, check=False).returncode


def _refuse(parsed: argparse.Namespace, word: str) -> None:
    """End with the error that a command does not know an argument, and the option meant instead."""
    name = word.partition("=")[0]
    if not name.startswith("-"):
        parsed.parser.error(f"unexpected argument {word!r}")
    other = getattr(parsed, "others", {}).get(name.lstrip("-").replace("-", "_"))
    known = [option for option in parsed.parser._option_string_actions if option.startswith("--")]
    near = nearest(name, known)
    if other is None and near is not None:
        other = f"did you mean {near!r}?"
    # `run` has more spellings than an error should list
    parsed.parser.error(f"unknown option {name}; {other or f'see {parsed.parser.prog} --help'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (of this process, by default) and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="shardcore", description="Sharded, offloaded training on torch.distributed."
    )
    parser.add_argument("--version", action="version", version=f"shardcore {__version__}")
    commands = parser.add_subparsers(
        required=True, metavar="info | run | estimate | consolidate | report | compare | bench"
    )

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str, **how: Any
    ) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(name, help=text, **how)
        added.set_defaults(run=run, parser=added)
        return added

    informer = command(
        "info", _info, "show the version, the build and the hardware of this machine"
    )
    informer.add_argument(
        "--disk",
        nargs="+",
        default=[],
        metavar="DIR",
        help="also measure the disks of these directories",
    )
    runner = command(
        "run",
        launch.run,
        "start the ranks of a training program; accepts the options of DeepSpeed's launcher",
    )
    launch.add_arguments(runner)
    estimator = command(
        "estimate",
        estimate.run,
        "estimate memory and communication per rank for a model, without training it",
    )
    estimate.add_arguments(estimator)
    consolidator = command(
        "consolidate",
        _consolidate,
        "write the weights of a checkpoint as ordinary .safetensors files, or check it",
    )
    consolidator.add_argument(
        "directory", metavar="DIR", help="what save was given, or one checkpoint"
    )
    consolidator.add_argument(
        "output",
        metavar="OUT",
        nargs="?",
        help="a directory, or the name of one .safetensors file",
    )
    consolidator.add_argument(
        "--check",
        action="store_true",
        help="write nothing; compare the checkpoint with its checksums and digests",
    )
    consolidator.add_argument("--tag", help="which checkpoint (default: the latest)")
    consolidator.add_argument(
        "--dtype", choices=list(DTYPES), help="of all floating tensors (default: float32 masters)"
    )
    consolidator.add_argument("--max-shard-size", help="of a file (default: 5GB)")
    report.add_arguments(
        command(
            "report",
            report.run,
            "write an HTML page with plots of the metrics that shardcore.Metrics recorded",
        )
    )
    compare.add_arguments(
        command(
            "compare",
            compare.run,
            "find what differs first between two runs, or two checkpoints",
        )
    )
    usage = "shardcore bench [SUITE [OPTIONS]]"
    bench = command("bench", _bench, "run a benchmark of a source checkout", usage=usage)
    bench.add_argument("suite", nargs="?", metavar="SUITE", help="which one (default: list them)")
    bench.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        metavar="OPTIONS",
        help="the suite's own: bench SUITE --help",
    )
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(parsed, unknown[0])
    # a user's function
    of_users = (
        (ValueError, OSError, TypeError) if parsed.run is estimate.run else (ValueError, OSError)
    )
    try:
        status: int = parsed.run(parsed)
    except of_users as error:
        command_name = parsed.parser.prog
        message = str(error).removeprefix(f"{command_name.rpartition(' ')[2]}: ")
        if parsed.run is launch.run:
            parsed.parser.error(message)
        # without the usage, which would hide the cause
        parsed.parser.exit(2, f"{command_name}: error: {message}\n")
    # threads of torch's agent and store may abort this process's end (2.13)
    if arguments is None and parsed.run is launch.run:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
