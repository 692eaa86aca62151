"""``shardcore run``: starts ranks on this machine, or on several, with the options of DeepSpeed's
launcher.

What is to run is a NodePlan per machine. It comes from, in this order: --node_rank (started once on
every machine, by srun or Kubernetes), a hostfile (the other machines are reached by ssh),
SageMaker's variables, or this machine alone. Source:
https://www.deepspeed.ai/getting-started/#launching-deepspeed-training; for SageMaker's variables
https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md.
"""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardcore.distributed.launchers import env_int, launched_world_size
from shardcore.distributed.machine import own_cores, parse_cores
from shardcore.launch.failures import first, report
from shardcore.launch.hosts import Slots, read_hostfile, select, trim
from shardcore.launch.node import NodePlan, Outcome, run_node
from shardcore.launch.nodes import address_of, is_this_machine, passed_environment, run_nodes
from shardcore.metrics.compare import Run, compare, read_run
from shardcore.metrics.run_digests import DIRECTORY_VARIABLE, FILE, STEPS_VARIABLE

HOSTFILE = Path("/job/hostfile")  # where DeepSpeed's launcher looks
PORT = 29500  # of several machines, as DeepSpeed's and torch's launchers have it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of run to its parser."""
    parser.usage = "shardcore run [OPTIONS] PROGRAM [ARGUMENTS]"
    parser.allow_abbrev = False
    parser.set_defaults(others=_OTHERS)
    for name, metavar, kind, text in _OPTIONS:
        names = name.split()
        names += [word.replace("_", "-") for word in names if "_" in word]  # torchrun's spelling
        if kind is bool:
            parser.add_argument(*names, action="store_true", help=text)
        elif kind is int:
            parser.add_argument(*names, metavar=metavar, action=_Number, help=text)
        else:
            parser.add_argument(*names, metavar=metavar, type=kind, help=text)
    parser.add_argument(
        "program", metavar="PROGRAM", help="a Python file, followed by its arguments"
    )
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help=argparse.SUPPRESS
    )
    rest.required = False  # else argparse asks for ARGUMENTS where PROGRAM is missing


# The smallest value of each number.
_LEAST = {
    "num_gpus": 1,
    "num_nodes": 1,
    "master_port": 1,
    "max_restarts": 0,
    "node_rank": 0,
    "ssh_port": 1,
    "twice": 1,
}


class _Number(argparse.Action):
    """Stores a whole number; None, the default, for torchrun's "gpu" and "auto" ranks. Errors name
    the option as it was typed.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self.dest == "num_gpus" and values in ("gpu", "auto"):
            setattr(namespace, self.dest, None)
            return
        least = _LEAST[self.dest]
        if self.dest == "num_nodes" and ":" in values:
            parser.error(
                f"{option_string} is {values}; elastic ranges are not supported. Give one number"
            )
        if not values.removeprefix("-").isdecimal():
            parser.error(f"{option_string} is {values}; expected a whole number")
        if int(values) < least:
            parser.error(f"{option_string} is {values}; expected at least {least}")
        if self.dest in ("master_port", "ssh_port") and int(values) > 65535:
            parser.error(f"{option_string} is {values}; expected at most 65535")
        setattr(namespace, self.dest, int(values))


# Options of other launchers, and ours in their place.
_OTHERS = {
    "standalone": "leave it out: without a hostfile, `shardcore run` starts this machine alone",
    "use_env": "leave it out, and pass --no_local_rank",
    "rdzv_endpoint": "use --master_addr HOST --master_port PORT, with --num_nodes and --node_rank",
    "rdzv_backend": "leave it out; --master_addr and --node_rank are enough",
    "rdzv_id": "leave it out; --master_addr and --node_rank are enough",
    "rdzv_conf": "leave it out",
    "num_processes": "use --num_gpus for the ranks of each machine",
    "num_machines": "use --num_nodes",
    "machine_rank": "use --node_rank",
    "main_process_ip": "use --master_addr",
    "main_process_port": "use --master_port",
    "multi_gpu": "leave it out: each GPU gets a rank",
    "mixed_precision": "use shard(precision=)",
    "launcher": "leave it out: a hostfile means ssh; under a scheduler pass --node_rank",
    "np": "use --num_gpus",
    "n": "use --num_gpus",
    "nproc": "use --num_gpus",
    "nprocs": "use --num_gpus",
    "gpus": "use --num_gpus",
}


# Names, what is given, its type, what it does. The first name is that of the value; hyphens are
# accepted for underscores.
_OPTIONS: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    (
        "--num_gpus --num_accelerators --nproc_per_node",
        "N",
        int,
        "number of ranks on each machine. Each rank uses one GPU, or the CPU with gloo on a "
        "machine without GPUs (default: the slots of the hostfile, or the number of GPUs, or 1)",
    ),
    (
        "--num_nodes --nnodes",
        "N",
        int,
        "use the first N hosts of the hostfile; with --node_rank: the number of machines",
    ),
    (
        "--hostfile -H",
        "FILE",
        Path,
        f"file of hosts, one per line: worker-0 slots=8 (default: {HOSTFILE} if it exists)",
    ),
    (
        "--include -i",
        "SPEC",
        str,
        "use only these hosts and slots: host1@host2:0,2 (this machine is localhost)",
    ),
    ("--exclude -e", "SPEC", str, "use all hosts and slots except these"),
    (
        "--master_addr",
        "ADDRESS",
        str,
        "address of the first machine (default: the output of hostname -I there)",
    ),
    (
        "--master_port",
        "PORT",
        int,
        f"port on the first machine (default: {PORT}, or any free port on a single machine)",
    ),
    (
        "--bind_cores_to_rank",
        "",
        bool,
        "bind each rank to its share of the CPU cores, near its GPU if known",
    ),
    (
        "--bind_core_list",
        "LIST",
        str,
        "divide only these cores among ranks: 0-15,32-47 (requires --bind_cores_to_rank)",
    ),
    (
        "--no_numa_binding",
        "",
        bool,
        "let ranks use all cores, not only the cores of their GPU's NUMA node",
    ),
    ("--no_local_rank", "", bool, "do not pass --local_rank=N to the program"),
    ("--module -m", "", bool, "run PROGRAM as a module, like python -m"),
    ("--no_python", "", bool, "run PROGRAM directly, without the Python interpreter"),
    (
        "--as_deepspeed",
        "",
        bool,
        "replace imports of deepspeed by shardcore, in the program and in libraries "
        "(docs/huggingface.md)",
    ),
    (
        "--max_restarts",
        "N",
        int,
        "restart all ranks after a failure, up to N times (default: 0)",
    ),
    (
        "--node_rank",
        "N",
        int,
        "start only the ranks of this machine, number N (from 0) of --num_nodes or of the hostfile",
    ),
    (
        "--no_ssh",
        "",
        bool,
        "accepted for compatibility with DeepSpeed's launcher; requires --node_rank",
    ),
    ("--ssh_port", "PORT", int, "port of the ssh servers on the hosts"),
    (
        "--twice",
        "N",
        int,
        "run the program twice, each time for N optimizer steps, and name the first value that "
        "differs (docs/reproducibility.md)",
    ),
)


def run(options: argparse.Namespace) -> int:
    """Run the program's ranks and return the exit status: 0, or the first failing rank's; with
    --twice 1, too, if the runs differ. Raises ValueError, OSError.
    """
    plans = plan(options)
    if options.twice is None:
        return _run(plans, options)
    if len(plans[0].slots) > 1:
        raise ValueError(
            f"run: --twice is given for {len(plans[0].slots)} machines; expected one. Set "
            f"{DIRECTORY_VARIABLE} and {STEPS_VARIABLE} in two runs, and pass the directories to "
            "shardcore compare"
        )
    try:
        return _run_twice(plans, options)
    finally:
        for name in (DIRECTORY_VARIABLE, STEPS_VARIABLE):
            os.environ.pop(name, None)


def _run_twice(plans: list[NodePlan], options: argparse.Namespace) -> int:
    """Run, run again, and print what differs first. Leaves variables in the environment."""
    with tempfile.TemporaryDirectory(prefix="shardcore-twice-") as folder:
        runs: list[Run] = []
        for name in ("first", "second"):
            text = f"shardcore run: {name} of two runs, of {options.twice} steps each"
            print(text, file=sys.stderr, flush=True)
            path = Path(folder, name)
            os.environ[DIRECTORY_VARIABLE], os.environ[STEPS_VARIABLE] = (
                str(path),
                str(options.twice),
            )
            if status := _run(plans, options):
                return status
            if not (path / FILE).is_file() or not (digests := read_run(path)).rows:
                raise ValueError(
                    f"run: --twice: the {name} run ended without a step of an optimizer that "
                    "shardcore.shard returned; expected at least one step"
                )
            runs.append(digests)
        result = compare(*runs)
    first, second = (len(run.rows) for run in runs)
    if result.equal and first != second:
        print(f"the first run makes {first} steps, and the second {second}; steps of both agree")
        return 1
    print(result)
    return 0 if result.equal else 1


def _run(plans: list[NodePlan], options: argparse.Namespace) -> int:
    """Run the ranks, again after a failure as often as --max_restarts says."""
    alone = len(plans) == 1 and (plans[0].started_alone or is_this_machine(plans[0].host))
    environment = {} if alone else passed_environment([Path.home(), Path.cwd()])
    for attempt in range(plans[0].max_restarts + 1):
        attempted = [replace(node, restart=attempt) for node in plans]
        if alone:
            outcome = run_node(attempted[0])
        else:
            outcome = run_nodes(attempted, environment, options.ssh_port)
        status = _show_outcome(outcome, plans[0])
        if status == 0 or outcome.signal or outcome.error:
            break
        if attempt < plans[0].max_restarts:
            print(
                f"shardcore run: restart {attempt + 1} of {plans[0].max_restarts}",
                file=sys.stderr,
                flush=True,
            )
    return status


def _show_outcome(outcome: Outcome, node: NodePlan) -> int:
    """Show how the ranks ended, if not well, and return the exit status."""
    parts = []
    if outcome.signal:
        parts.append(f"shardcore run: ended by {signal.Signals(outcome.signal).name}")
    if outcome.error:
        parts.append(f"shardcore {outcome.error}")
    status = 0
    if outcome.signal:
        status = 128 + outcome.signal
    elif outcome.error:
        status = 2
    if outcome.failures:
        cause = first(outcome.failures)
        text = report(outcome.failures, node.world_size, "shardcore run")
        if not cause.text and cause.code == 2 and node.local_rank:  # argparse's, most often
            text += " (if the program does not take --local_rank: shardcore run --no_local_rank)"
        parts.append(text)
        status = status or cause.code
    if parts:
        sys.stdout.flush()
        print(*parts, sep="\n", file=sys.stderr, flush=True)
    return status


# --- what is to run -------------------------------------------------------------------------------


def plan(options: argparse.Namespace) -> list[NodePlan]:
    """Return what each machine runs (of --node_rank and SageMaker: this one). Raises ValueError,
    OSError for the hostfile.
    """
    _check(options)
    hostfile = options.hostfile or (HOSTFILE if HOSTFILE.is_file() else None)
    kind = "script"
    if options.no_python:
        kind = "program"
    elif options.module:
        kind = "module"
    common = NodePlan(
        slots=(),
        node_rank=0,
        program=[options.program, *options.arguments],
        kind=kind,
        local_rank=not options.no_local_rank,
        as_deepspeed=options.as_deepspeed,
        master_port=options.master_port or 0,
        bind_cores=options.bind_cores_to_rank,
        core_list=parse_cores(options.bind_core_list) if options.bind_core_list else (),
        numa=not options.no_numa_binding,
        max_restarts=options.max_restarts or 0,
    )
    if options.ssh_port is not None and (hostfile is None or options.node_rank is not None):
        raise ValueError(
            "run: --ssh_port is given, but nothing is reached by ssh; expected it with a hostfile "
            "only"
        )
    if hostfile is not None:
        slots = _choose(read_hostfile(hostfile), options)
        if options.node_rank is not None:
            return [_own_node(common, slots, options)]
        return _over_ssh(common, slots, options)
    if options.node_rank is not None:
        nodes = range(options.num_nodes or 1)
        return [_own_node(common, {f"node {node}": _own_slots(options) for node in nodes}, options)]
    if "SM_HOSTS" in os.environ:
        return [_sagemaker(common, options, os.environ)]
    if (options.num_nodes or 1) > 1:
        raise ValueError(
            f"run: --num_nodes is {options.num_nodes} but there is no hostfile; expected "
            f"--hostfile, or --node_rank and --master_addr, given on each machine"
        )
    slots = {"localhost": _own_slots(options)}
    if options.include or options.exclude:
        pool = {"localhost": _all_slots()}
        slots = select(pool, options.include or "", options.exclude or "")
    address = options.master_addr or common.master_addr
    return [replace(common, slots=list(slots.values()), master_addr=address)]


def _check(options: argparse.Namespace) -> None:
    if options.module and options.no_python:
        raise ValueError("run: --module and --no_python are both given; expected one of them")
    if options.as_deepspeed and options.no_python:
        raise ValueError(
            "run: --as_deepspeed and --no_python are both given; expected a Python program, whose "
            "imports change"
        )
    if options.bind_core_list and not options.bind_cores_to_rank:
        raise ValueError(
            "run: --bind_core_list is given without --bind_cores_to_rank; expected both"
        )
    if (options.include or options.exclude) and (options.num_nodes or options.num_gpus):
        raise ValueError(
            "run: --include or --exclude is given with --num_nodes or --num_gpus; expected one way "
            "to choose"
        )
    if options.no_ssh and options.node_rank is None:
        raise ValueError(
            "run: --no_ssh is given without --node_rank; expected the number of this machine"
        )
    name, size = launched_world_size()
    if size > 1 and options.node_rank is None:
        raise ValueError(
            f"run: this process is one of {size} that another launcher has started ({name}); "
            f"expected that launcher alone, or one `shardcore run` for each machine with "
            f"--num_nodes, --node_rank and --master_addr (docs/launch.md)"
        )


def _choose(pool: Slots, options: argparse.Namespace) -> Slots:
    return trim(
        select(pool, options.include or "", options.exclude or ""),
        options.num_nodes,
        options.num_gpus,
    )


def _all_slots() -> list[int]:
    """The GPUs of this machine; without any, its cores."""
    return list(range(torch.cuda.device_count() or len(own_cores())))


def _own_slots(options: argparse.Namespace) -> list[int]:
    """As many as --num_gpus says, or one for each GPU; without GPUs, one."""
    return list(range(options.num_gpus or torch.cuda.device_count() or 1))


def _over_ssh(common: NodePlan, slots: Slots, options: argparse.Namespace) -> list[NodePlan]:
    hosts = list(slots)
    address = options.master_addr
    if not address:
        several = len(hosts) > 1
        address = address_of(hosts[0], options.ssh_port) if several else common.master_addr
    port = common.master_port or (PORT if len(hosts) > 1 else 0)
    return [
        replace(
            common,
            slots=list(slots.values()),
            node_rank=rank,
            host=host,
            master_addr=address,
            master_port=port,
        )
        for rank, host in enumerate(hosts)
    ]


def _own_node(common: NodePlan, slots: Slots, options: argparse.Namespace) -> NodePlan:
    """The plan of this machine alone, where each is started by itself."""
    nodes = len(slots)
    if options.node_rank >= nodes:
        raise ValueError(
            f"run: --node_rank is {options.node_rank} but there are {nodes} nodes; expected 0 to "
            f"{nodes - 1} (--num_nodes)"
        )
    first = next(iter(slots)).rpartition("@")[2]
    address = options.master_addr or (first if not first.startswith("node ") else None)
    if nodes > 1 and address is None:
        raise ValueError(
            "run: --node_rank is given without --master_addr; expected the address of node 0, on "
            "all nodes"
        )
    return _alone(
        common,
        slots,
        options.node_rank,
        socket.gethostname(),
        address or common.master_addr,
        options,
    )


def _alone(
    common: NodePlan, slots: Slots, rank: int, host: str, address: str, options: argparse.Namespace
) -> NodePlan:
    if len(slots) > 1 and options.max_restarts:
        raise ValueError(
            f"run: --max_restarts is {options.max_restarts}, but each of {len(slots)} machines was "
            f"started by itself, and none can start the others again; expected 0 (the scheduler "
            f"can start the job again), or a hostfile and ssh"
        )
    port = common.master_port or (PORT if len(slots) > 1 else 0)
    values = list(slots.values())
    return replace(
        common,
        slots=values,
        node_rank=rank,
        host=host,
        master_addr=address,
        master_port=port,
        started_alone=True,
    )


def _sagemaker(
    common: NodePlan, options: argparse.Namespace, environment: Mapping[str, str]
) -> NodePlan:
    """The plan of this machine in a SageMaker training job, which starts the same command on
    all.
    """
    for name in ("include", "exclude", "num_nodes"):
        if getattr(options, name):
            raise ValueError(
                f"run: --{name} is given in a SageMaker job, whose hosts SM_HOSTS names; expected "
                f"--num_gpus alone"
            )
    try:
        hosts = json.loads(environment["SM_HOSTS"])
        assert isinstance(hosts, list)
        rank = hosts.index(environment["SM_CURRENT_HOST"])
    except (ValueError, KeyError, AssertionError):
        raise ValueError(
            f"run: SM_HOSTS is {environment['SM_HOSTS']!r} and SM_CURRENT_HOST "
            f"{environment.get('SM_CURRENT_HOST')!r}; expected a JSON list of hosts, and one of "
            f"them"
        ) from None
    gpus = env_int("SM_NUM_GPUS") if "SM_NUM_GPUS" in environment else torch.cuda.device_count()
    if gpus and (options.num_gpus or 0) > gpus:
        raise ValueError(
            f"run: --num_gpus is {options.num_gpus} but SM_NUM_GPUS is {gpus}; expected at most as "
            f"many"
        )
    slots = {host: list(range(options.num_gpus or gpus or 1)) for host in hosts}
    address = options.master_addr or (hosts[0] if len(hosts) > 1 else common.master_addr)
    return _alone(common, slots, rank, hosts[rank], address, options)
