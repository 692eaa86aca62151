"""Real ranks for tests: processes that stay alive between tests and form a gloo group of the
size that each test asks for.
"""

import atexit
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import count
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.distributed as dist

_TIMEOUT_S = 120
# Processes are forked from one that has imported torch and the collected test modules and done
# nothing else, so no thread is lost in the fork.
context = multiprocessing.get_context("forkserver")
_workers: list[tuple[Any, Connection]] = []
_calls = count()


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(rank, world_size, *args)` on every rank of a fresh gloo group; returns the
    results in rank order.

    `function` and the results must be picklable (a function of a test module; plain values). An
    error on any rank raises here with that rank's traceback; a rank that hangs ends the test after
    two minutes. The workers are then replaced.
    """
    while len(_workers) < world_size:
        _workers.append(_start())
    call, port = next(_calls), store_port()
    pending = {}
    for rank, (_, pipe) in enumerate(_workers[:world_size]):
        pipe.send((function, rank, world_size, port, call, args))
        pending[pipe] = rank
    results: list[Any] = [None] * world_size
    errors: dict[int, str] = {}
    while pending:
        ready = wait(list(pending), timeout=10 if errors else _TIMEOUT_S)
        if not ready:
            errors.update({rank: "no answer in time" for rank in pending.values()})
            break
        for pipe in ready:
            rank = pending.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                ok, value = False, "the process died"
            if ok:
                results[rank] = value
            else:
                errors[rank] = value
    if errors:
        stop_ranks()
        raise AssertionError(
            "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items()))
        )
    for _, pipe in _workers[:world_size]:
        pipe.send(None)
    return results


def stop_ranks() -> None:
    """End all workers; the next run_ranks starts new ones."""
    while _workers:
        process, pipe = _workers.pop()
        pipe.close()
        process.kill()
        process.join()


atexit.register(stop_ranks)


@cache
def _store() -> dist.TCPStore:
    """Where all ranks meet, served by this process on a port of the system's choice (a file
    would be polled).
    """
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def store_port() -> int:
    """Return the port of the store that ranks of run_ranks meet at."""
    return _store().port


def _start() -> tuple[Any, Connection]:
    ours, theirs = context.Pipe()
    process = start(_serve, theirs, daemon=True)
    theirs.close()
    return process, ours


def free_port() -> str:
    """Return a TCP port that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def join_group(rank: int, world_size: int, port: str) -> None:
    """Join the gloo group of processes that `start` started."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    dist.init_process_group("gloo")


def run_fresh(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)` of a process that has done nothing but imports; both and the
    result must be picklable.
    """
    ours, theirs = context.Pipe()
    process = start(_send, theirs, function, args)
    theirs.close()
    try:
        assert ours.poll(_TIMEOUT_S), "no answer in time"
        return ours.recv()
    finally:
        process.kill()
        process.join()


def _send(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe.send(function(*args))


def preload() -> None:
    """Name what the process has imported from which others are forked."""
    using = [
        name
        for name, module in sys.modules.items()
        if name.startswith("tests.") and hasattr(module, "run_ranks")
    ]
    # Read at the first start only.
    context.set_forkserver_preload(
        ["torch", "torch._dynamo", "shardcore", *using, "tests.support.frozen"]
    )


def start(function: Callable[..., Any], *args: Any, daemon: bool = False) -> Any:
    """Start a process that runs `function(*args)`; both must be picklable."""
    preload()
    process = context.Process(target=function, args=args, daemon=daemon)
    process.start()
    return process


def _serve(pipe: Connection) -> None:
    import torch

    from shardcore.distributed import watchdog

    torch.set_num_threads(1)
    # as seldom as users look tests would take long
    watchdog.LONG_S, watchdog.USERS_LONG_S, watchdog.PAUSE_S = 0.5, 1.0, 0.1
    store: dist.TCPStore | None = None
    while True:
        try:
            function, rank, world_size, port, call, args = pipe.recv()
        except EOFError:
            return
        environment = dict(os.environ)
        try:
            store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(str(call), store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
            answer = (True, function(rank, world_size, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        os.environ.clear()
        # libraries leave variables, such as Accelerate, which its next user would find
        os.environ.update(environment)
        pipe.send(answer)
        try:
            # until every rank has answered: those that wait for this one are to find the
            # difference, not its end
            pipe.recv()
        except EOFError:
            return
        if dist.is_initialized():
            dist.destroy_process_group()
