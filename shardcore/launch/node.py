"""The ranks of one machine: checks what it lacks, binds ranks to cores, runs them under torch's
elastic agent.

Ranks are rank.py in processes of torch.distributed.launcher (what torchrun is made of), with its
static rendezvous, in which the order of ranks follows that of nodes. `run_node` runs in `shardcore
run` itself for one machine; for several, ``python -m shardcore.launch.node`` runs it on each, told
what to do on its standard input: Note [Standard input] in nodes.py.

A restart is a loop around all machines, with a new agent each time (run_command.py): torch's own
restarts reuse its store, and nodes do not agree on them.
"""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardcore.distributed import machine
from shardcore.launch.failures import Failure, collect

STUCK_S = 10.0  # after which the traceback of a rank that raised and has not ended is shown
# before an Outcome, the last line of a node's standard error; no text has this character
REPORT = b"\x1eshardcore run: "
_CHECK_S = 0.5
_NAME_S = 5.0  # how long master_addr may be unknown
# where each machine was started by itself: a container's name may come with it, after its image
_NAME_OF_SCHEDULER_S = 120.0
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class NodePlan:
    """What one machine is to run. Plain values: it travels as JSON."""

    slots: Sequence[Sequence[int]]  # of all nodes: GPUs, or numbers of processes
    node_rank: int
    program: Sequence[str]
    host: str = "localhost"
    started_alone: bool = False  # by something else than `shardcore run` on another machine
    kind: str = "script"  # or "module", "program"
    local_rank: bool = True  # pass --local_rank=N
    as_deepspeed: bool = False  # `import deepspeed` means shardcore in the program
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # of node 0; 0: any free one, for one node
    bind_cores: bool = False  # each rank to a share of the cores
    core_list: Sequence[int] = ()  # of which; (): all
    numa: bool = True  # each of several ranks to its GPU's NUMA node
    restart: int = 0  # which attempt this is
    max_restarts: int = 0

    @property
    def own_slots(self) -> Sequence[int]:
        """The slots of this node."""
        return self.slots[self.node_rank]

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return sum(map(len, self.slots))


@dataclass(frozen=True)
class Outcome:
    """How the ranks of one or all nodes ended: well, unless one of these is set."""

    failures: list[Failure] = field(default_factory=list)
    error: str = ""  # why they could not run
    signal: int = 0  # what ended the launcher


def run_node(plan: NodePlan) -> Outcome:
    """Run this machine's ranks to their end. May set GLOO_SOCKET_IFNAME in this process's
    environment, which ranks inherit.
    """
    try:
        gpus = _visible_gpus(plan)
        port = _check(plan)
        cores = _cores_of_ranks(plan)
    except ValueError as problem:
        return Outcome(error=str(problem))
    local = len(plan.own_slots)
    if len(plan.slots) == 1 and sys.platform == "linux":
        # all ranks are here; a host name may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if "LOGLEVEL" not in os.environ:  # the agent's loggers repeat what the report says
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="shardcore-run-") as folder:
        failures = Path(folder, "failures")
        failures.mkdir()
        options = {
            "kind": plan.kind,
            "local_rank": plan.local_rank,
            "as_deepspeed": plan.as_deepspeed,
            "failures": str(failures),
            "gpus": gpus,
            "cores": cores,
            "threads": _threads(plan, cores),
            "restart": plan.restart,
            "max_restarts": plan.max_restarts,
        }
        config = LaunchConfig(
            min_nodes=len(plan.slots),
            max_nodes=len(plan.slots),
            nproc_per_node=local,
            run_id=f"attempt{plan.restart}",
            role="shardcore",
            rdzv_backend="static",
            rdzv_endpoint=f"{_bracketed(plan.master_addr)}:{port}",
            rdzv_configs={"rank": plan.node_rank},
            max_restarts=0,  # all nodes together, in run_command.py
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            # torchrun takes SIGHUP even from nohup, which has it ignored.
            signals_to_handle=",".join(
                s.name for s in ENDING if signal.getsignal(s) is not signal.SIG_IGN
            ),
        )
        command = [
            sys.executable,
            "-u",
            str(Path(__file__).with_name("rank.py")),
            json.dumps(options),
            *plan.program,
        ]
        stuck = _Stuck(failures, plan.world_size)
        exits: dict[int, int] = {}
        error, ended_by = "", 0
        try:
            # torch expands ${...}
            elastic_launch(config, command[0])(*(word.replace("$", "$$") for word in command[1:]))
        except ChildFailedError as failed:
            exits = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        except SignalException as stopped:
            ended_by = int(stopped.sigval)
        except KeyboardInterrupt:  # before there were ranks
            ended_by = signal.SIGINT
        except (RuntimeError, OSError) as lost:
            error = f"run: {plan.host}: {type(lost).__name__}: {str(lost).partition(chr(10))[0]}"
        finally:
            stuck.stop()
        return Outcome(collect(failures, exits), error, ended_by)


# --- checks ---------------------------------------------------------------------------------------


def _check(plan: NodePlan) -> int:
    """Return the port of node 0; raise ValueError for what would fail late, or in each rank."""
    if plan.kind == "script" and not Path(plan.program[0]).exists():
        raise ValueError(
            f"run: {plan.host} has no file {plan.program[0]} in {os.getcwd()}; expected a Python "
            f"program there"
        )
    if len(plan.slots) > 1:
        _resolve(plan.master_addr, _NAME_OF_SCHEDULER_S if plan.started_alone else _NAME_S)
    if plan.node_rank > 0:
        return plan.master_port
    with socket.socket() as probe:
        # as torch does; one that listens is found all the same
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", plan.master_port))
        except OSError as error:
            raise ValueError(
                f"run: --master_port {plan.master_port} cannot be used on {plan.host} "
                f"({error.strerror}); expected a free port "
                "(another job may use it; on one machine, leave it out and any free one is taken)"
            ) from None
        return int(probe.getsockname()[1])


def _visible_gpus(plan: NodePlan) -> str:
    """Return the ranks' CUDA_VISIBLE_DEVICES ("": as it is). This process's, which slots count
    by, stays for a restart.
    """
    count, slots = torch.cuda.device_count(), list(plan.own_slots)
    if count == 0:
        if plan.restart == 0:
            print(
                f"shardcore run: torch finds no GPU on {plan.host}: {len(slots)} on its CPU, over "
                f"gloo",
                file=sys.stderr,
            )
        return ""
    absent = [slot for slot in slots if slot >= count]
    if absent:
        raise ValueError(
            f"run: {plan.host} has {count} GPUs, but GPU {absent[0]} is asked for; expected 0 to "
            f"{count - 1}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return ",".join(visible[slot].strip() for slot in slots)


def _resolve(host: str, seconds: float) -> None:
    """Raise ValueError if a host name stays unknown."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ValueError(
                    f"run: the master address {host} is unknown ({error.strerror}); expected a "
                    f"name or IP address of the "
                    "first machine that the others can connect to (--master_addr)"
                ) from None
        time.sleep(_CHECK_S)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


# --- cores ----------------------------------------------------------------------------------------


def _cores_of_ranks(plan: NodePlan) -> list[list[int]]:
    """Return the cores that each rank of this node is bound to; [] for those it has."""
    own_cores = machine.own_cores()
    ranks = range(len(plan.own_slots))
    absent = sorted(set(plan.core_list) - set(own_cores))
    if absent:
        raise ValueError(
            f"run: --bind_core_list has core {absent[0]}, which {plan.host} has not for this job; "
            f"it has {own_cores}"
        )
    # a rank alone has use for the memory of all nodes
    binds = plan.numa and not plan.core_list and len(ranks) > 1
    near: list[list[int]] = [[] for _ in ranks]
    if binds:
        near = [sorted(set(_cores_near(slot)) & set(own_cores)) for slot in plan.own_slots]
    if not plan.bind_cores:
        return near
    return [_share(plan, near, rank, list(plan.core_list) or own_cores) for rank in ranks]


def _share(
    plan: NodePlan, near: Sequence[Sequence[int]], rank: int, all_cores: list[int]
) -> list[int]:
    """Return the rank's share of the cores near its GPU, or of all."""
    with_same = [other for other, cores in enumerate(near) if cores == near[rank]]
    share = machine.cores_of_share(near[rank] or all_cores, with_same.index(rank), len(with_same))
    if not share:
        raise ValueError(
            f"run: --bind_cores_to_rank has {len(with_same)} ranks for the cores "
            f"{near[rank] or all_cores} of {plan.host}; expected at least a core for each"
        )
    return share


def _cores_near(slot: int) -> list[int]:
    """Return the cores of the NUMA node of a slot's GPU, or []."""
    if slot >= torch.cuda.device_count():
        return []
    return machine.near_cores(machine.pci_address(slot))


def _threads(plan: NodePlan, cores: Sequence[Sequence[int]]) -> list[int]:
    """Return OMP_NUM_THREADS of each rank; 0 leaves it as it is: one rank alone."""
    if plan.bind_cores:
        return [machine.physical_cores(share) for share in cores]
    if len(cores) == 1:
        return [0]
    all_cores = len(machine.own_cores())
    usable = min(all_cores, int(machine.quota() or all_cores))
    return [max(1, usable // len(cores))] * len(cores)


# --- ranks that do not end ------------------------------------------------------------------------


class _Stuck:
    """Shows the traceback of a rank that raised but does not end (a thread, a destructor): the
    job would hang in silence.
    """

    def __init__(self, failures: Path, world_size: int) -> None:
        self._failures, self._world_size = failures, world_size
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        printed: list[int] = []
        while not self._stop.wait(_CHECK_S):
            for failure in collect(self._failures, {}):
                if failure.rank not in printed and time.time_ns() - failure.time_ns > STUCK_S * 1e9:
                    printed.append(failure.rank)
                    head = (
                        f"shardcore run: rank {failure.rank} of {self._world_size} has raised, "
                        f"and has not ended since:"
                    )
                    print(head, failure.text.rstrip(), sep="\n", file=sys.stderr, flush=True)


# --- as a program ---------------------------------------------------------------------------------


def _follow_standard_input() -> Mapping[str, Any]:
    """Return what the first line of standard input says; when it ends, so does this process, by
    SIGTERM.
    """
    pipe = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # for the ranks
    message: Mapping[str, Any] = json.loads(pipe.readline())

    def wait() -> None:
        pipe.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
    return message


def main() -> int:
    """Run what standard input describes, and write the Outcome to standard error."""
    message = _follow_standard_input()
    os.environ.update(message["environment"])
    outcome = run_node(NodePlan(**message["plan"]))
    sys.stderr.flush()
    os.write(2, REPORT + json.dumps(asdict(outcome)).encode() + b"\n")
    return 1 if outcome.failures or outcome.error or outcome.signal else 0


if __name__ == "__main__":
    sys.exit(main())
