"""Ranks started from a notebook or a script: each runs one function in a process of its own;
rank 0's result comes back.
"""

import atexit
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from shardcore.distributed import machine
from shardcore.launch.failures import collect, report
from shardcore.launch.rank import end_with_parent, record
from shardcore.torch_private import is_in_bad_fork

_OP = "notebook_launcher"
_GRACE_S = 5.0  # in which ranks fail by themselves, or end, once one has failed


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    *,
    start_method: str = "fork",
) -> Any:
    """Run ``function(*args)`` on ranks of this machine, each in a new process, and return the
    result of rank 0.

    num_processes: the number of ranks. Default: one for each GPU, or one without GPUs.
    start_method: "fork" runs any function, also of a notebook cell. Do not use CUDA in this process
        before: call neither ``.cuda()`` nor ``torch.cuda.is_available()``. torch then computes with
        one CPU thread on each rank, because OpenMP's threads do not survive a fork. "spawn" runs
        only functions of importable modules. It also works after CUDA was used, and divides the
        cores among the ranks.

    The ranks get the environment of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT). The function starts torch.distributed as a script does, by init_process_group or
    `initialize`. Without GPUs the backend is gloo.

    The result is copied to this process, with tensors on the CPU. To return the weights of a
    sharded model, return ``model.state_dict()``, and call it on all ranks. A single rank is a new
    process, too, so GPU memory and process groups end with it. An interrupt of this process ends
    all ranks.

    Raises ValueError or TypeError for bad arguments. Raises RuntimeError with the traceback of the
    first rank to fail, and if CUDA is in use here and start_method is "fork".
    """
    count = _check(function, args, num_processes, start_method)
    with tempfile.TemporaryDirectory(prefix="shardcore-notebook-") as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            environment = {
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_PORT": str(probe.getsockname()[1]),
            }
        context: Any = multiprocessing.get_context(start_method)
        arguments = (function, tuple(args), folder, environment, start_method == "fork")
        processes = [
            context.Process(target=_rank, args=(rank, *arguments)) for rank in range(count)
        ]
        try:
            _start(processes, start_method)
            exits = _join(processes)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        if any(exits.values()):
            raise RuntimeError(report(collect(Path(folder), exits), count, _OP))
        # from the process above
        return torch.load(Path(folder, "result"), map_location="cpu", weights_only=False)


def _start(processes: Sequence[BaseProcess], start_method: str) -> None:
    try:
        for process in processes:
            process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if start_method == "fork":  # which pickles nothing
            raise
        raise TypeError(
            f"{_OP}: function or args cannot be sent to another process ({error}); expected a "
            f"function of an importable module "
            f'and plain values for start_method="{start_method}" ("fork" takes any)'
        ) from None


def _join(processes: Sequence[BaseProcess]) -> dict[int, int]:
    """Wait until all have ended, or some seconds after the first has failed; return the exit
    codes of those that have.
    """
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(processes)}
    exits: dict[int, int] = {}
    while running:
        ready = wait(list(running), timeout=_GRACE_S if any(exits.values()) else None)
        if not ready:
            break
        for sentinel in ready:
            rank = running.pop(sentinel)
            processes[rank].join()
            exits[rank] = processes[rank].exitcode or 0
    return exits


def _check(function: Any, args: Any, num_processes: Any, start_method: str) -> int:
    """Return the number of processes."""
    if not callable(function):
        raise TypeError(
            f"{_OP}: function has type {type(function).__name__}; expected a function to run on "
            f"each rank"
        )
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise TypeError(
            f"{_OP}: args has type {type(args).__name__}; expected a tuple: args=(a, b)"
        )
    if start_method not in multiprocessing.get_all_start_methods():
        raise ValueError(
            f"{_OP}: start_method is {start_method!r}; expected one of "
            f"{', '.join(multiprocessing.get_all_start_methods())}"
        )
    gpus = torch.cuda.device_count()
    count = (gpus or 1) if num_processes is None else num_processes
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(
            f"{_OP}: num_processes is {num_processes!r}; expected a whole number above 0"
        )
    if gpus and count > gpus:
        raise ValueError(
            f"{_OP}: num_processes is {count} but there are {gpus} GPUs; expected at most one rank "
            f"for each (ranks on the CPU: "
            'os.environ["CUDA_VISIBLE_DEVICES"] = "" before torch is imported)'
        )
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if initialized or "RANK" in os.environ:
        raise RuntimeError(
            f"{_OP}: this process is a rank already; expected a process that no launcher started "
            f"(call the function)"
        )
    if gpus and start_method == "fork" and _fork_lacks_cuda():
        raise RuntimeError(
            f"{_OP}: CUDA has been used in this process, and a forked one cannot use it again; "
            f"expected no CUDA before "
            '(restart the kernel and keep .cuda(), .to("cuda") and torch.cuda calls, '
            "is_available() too, in the function), or "
            'start_method="spawn" for a function of an importable module (always with MIG, which '
            "torch counts by CUDA itself)"
        )
    return count


def _fork_lacks_cuda() -> bool:
    """Ask a fork: torch.cuda.is_available() is enough for it, and leaves no trace that this
    process could see.
    """
    child = os.fork()
    if child == 0:
        os._exit(is_in_bad_fork())
    return os.waitpid(child, 0)[1] != 0


def _rank(
    rank: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    folder: str,
    environment: dict[str, str],
    forked: bool,
) -> None:
    """Run the function as one rank, and leave rank 0's result, or the exception, in the folder."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # a fork has the parent's handlers, which are about the parent
        signal.signal(number, signal.SIG_DFL)
    end_with_parent()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    if sys.platform == "linux":
        # all ranks are here; a host name may not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if forked:
        # OpenMP's threads do not survive a fork, and to wait for them would take forever
        torch.set_num_threads(1)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(machine.own_cores()) // int(environment["WORLD_SIZE"])))
    try:
        result = function(*args)
        if rank == 0:
            _save(result, Path(folder, "result"))
    except Exception as error:
        record(folder, rank, error, error.__traceback__ and error.__traceback__.tb_next)
        sys.exit(1)  # nothing is printed: the parent raises what was recorded
    # end as a forked process does: threads of torch's may abort an interpreter that ends (2.13)
    if not forked:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _save(result: Any, path: Path) -> None:
    try:
        torch.save(result, path)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{_OP}: the function returned a {type(result).__name__} that cannot be copied to "
            f"another process ({error}); "
            "expected tensors and plain values, such as model.state_dict()"
        ) from None
