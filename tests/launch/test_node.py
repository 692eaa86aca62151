"""One machine's ranks: what is checked first, where they run, and how their ends are told."""

import itertools
import os
import signal
import socket
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardcore.distributed import machine
from shardcore.launch import node
from shardcore.launch.node import NodePlan, Outcome, run_node

SOON_S = 30.0  # for what takes a second or two on a quiet machine


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run a program, which needs no torch, on two ranks."""
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, "")  # to be put back
        monkeypatch.delenv(name)
    handlers = {number: signal.getsignal(number) for number in node.ENDING}

    def start(program: str, *arguments: str, ranks: int = 2, **plan: Any) -> Outcome:
        (tmp_path / "program.py").write_text(
            "import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(program)
        )
        fields = {"slots": [list(range(ranks))], "node_rank": 0, "local_rank": False} | plan
        start_s = time.monotonic()
        outcome = run_node(NodePlan(program=["program.py", *arguments], **fields))
        assert time.monotonic() - start_s < SOON_S
        return outcome

    yield start
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_ranks_and_their_environment(run: Callable[..., Outcome], capfd: Any) -> None:
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "GLOO_SOCKET_IFNAME",
    ]
    outcome = run(
        f"print([os.environ[name] for name in {names}], sys.argv[1:])",
        "a b",
        "$x$$ ${local_rank}",
        local_rank=True,
    )
    assert outcome == Outcome()
    printed = capfd.readouterr()
    args = "'a b', '$x$$ ${local_rank}'"
    assert sorted(printed.out.splitlines()) == [
        f"['{rank}', '{rank}', '2', '2', '127.0.0.1', 'lo'] ['--local_rank={rank}', {args}]"
        for rank in range(2)
    ]
    assert (
        printed.err == "shardcore run: torch finds no GPU on localhost: 2 on its CPU, over gloo\n"
    )


def test_the_rank_that_raised_first_is_the_cause(
    run: Callable[..., Outcome], capfd: Any, tmp_path: Path
) -> None:
    """Rank 1 raises and takes long to end; rank 0, which waits for it, raises later and ends at
    once.
    """
    outcome = run("""
        import atexit, pathlib
        if rank == 1:
            atexit.register(lambda: (pathlib.Path("raised").touch(), time.sleep(1)))
            raise ValueError("boom")
        while not os.path.exists("raised"):
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")
    """)
    assert [
        (failure.rank, failure.last)
        for failure in sorted(outcome.failures, key=lambda failure: failure.time_ns)
    ] == [
        (1, "ValueError: boom"),
        (0, "RuntimeError: Connection closed by peer"),
    ]
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err + printed.out, "ranks print none"
    assert "torch/distributed/elastic" not in printed.err
    assert "signal" not in printed.err


def test_other_ends(run: Callable[..., Outcome]) -> None:
    end = "if rank == 1: {}\ntime.sleep(60)"
    assert [(f.rank, f.last, f.code) for f in run(end.format("sys.exit(7)")).failures] == [
        (1, "ended with exit status 7", 7)
    ]
    killed = run(end.format("os.kill(os.getpid(), 9)")).failures
    assert [(failure.rank, failure.code) for failure in killed] == [(1, 137)]
    assert "SIGKILL" in killed[0].last


def test_a_rank_that_raised_and_stays_is_shown(
    run: Callable[..., Outcome], capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "STUCK_S", 0.1)
    monkeypatch.setattr(node, "_CHECK_S", 0.05)
    run("""
        import threading
        if rank == 0:
            threading.Thread(target=time.sleep, args=(0.5,)).start()
            raise ValueError("boom")
        time.sleep(60)
    """)
    stderr = capfd.readouterr().err
    assert stderr.count("ValueError: boom") == 1
    assert "rank 0 of 2 has raised, and has not ended since:\nTraceback" in stderr


def test_a_used_port(run: Callable[..., Outcome]) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        outcome = run("", master_port=port)
    assert (
        f"run: --master_port {port} cannot be used on localhost (Address already in use); expected "
        f"a free port" in outcome.error
    )
    assert run("", master_port=port) == Outcome(), "now it is free"


def test_an_unknown_master_address_and_an_absent_program(
    run: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "_NAME_S", 0.5)
    outcome = run(
        "", slots=[[0], [0]], node_rank=1, master_addr="no-such-host.invalid", master_port=29500
    )
    assert "the master address no-such-host.invalid is unknown" in outcome.error
    outcome = run_node(NodePlan(slots=[[0]], node_rank=0, program=["absent.py"]))
    assert (
        outcome.error
        == f"run: localhost has no file absent.py in {tmp_path}; expected a Python program there"
    )


def test_a_master_address_that_comes_with_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: Any) -> None:
        if next(clock) < 60:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(
        node, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None)
    )
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    plan = NodePlan(
        slots=[[0], [0]],
        node_rank=1,
        program=["x"],
        kind="module",
        master_addr="w0",
        master_port=29500,
    )
    clock = itertools.count(0, 10)
    assert node._check(replace(plan, started_alone=True)) == 29500
    clock = itertools.count(0, 10)
    with pytest.raises(ValueError, match="the master address w0 is unknown"):
        node._check(plan)


def test_gpus(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(
        torch.cuda,
        "device_count",
        lambda: len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")),
    )
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    outcome = run("", slots=[[0, 4]])
    assert outcome.error == "run: localhost has 4 GPUs, but GPU 4 is asked for; expected 0 to 3"
    # One write per rank: print() writes an unbuffered line and its end separately.
    show = "os.write(1, (os.environ['CUDA_VISIBLE_DEVICES'] + '\\n').encode())"
    assert [run(show, slots=[[1, 3]], restart=attempt) for attempt in range(2)] == [Outcome()] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6, GPU-5,4")
    assert run(show, slots=[[0, 2]]) == Outcome(), "slots count what is visible, as torch does"
    printed = capfd.readouterr()
    assert printed.out.splitlines() == ["1,3"] * 4 + ["7,GPU-5"] * 2
    assert "no GPU" not in printed.err


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = NodePlan(slots=[[0, 1, 2, 3]], node_rank=0, program=["x"])
    monkeypatch.setattr(machine, "own_cores", lambda: list(range(1, 9)))
    monkeypatch.setattr(machine, "physical_cores", lambda cores: len(cores) // 2)
    monkeypatch.setattr(machine, "_topology_of", lambda core, root: (0, core, core))
    monkeypatch.setattr(machine, "quota", lambda: None)

    def placed(**options: Any) -> tuple[list[list[int]], list[int]]:
        changed = replace(plan, **options)
        cores = node._cores_of_ranks(changed)
        return cores, node._threads(changed, cores)

    assert placed() == ([[], [], [], []], [2, 2, 2, 2])
    assert placed(slots=[[0]]) == ([[]], [0])
    assert placed(bind_cores=True) == ([[1, 2], [3, 4], [5, 6], [7, 8]], [1, 1, 1, 1])
    assert placed(bind_cores=True, core_list=[1, 2, 3, 8])[0] == [[1], [2], [3], [8]]
    with pytest.raises(ValueError, match="--bind_core_list has core 9, which localhost has not"):
        placed(bind_cores=True, core_list=[8, 9])
    with pytest.raises(ValueError, match="4 ranks for the cores"):
        placed(bind_cores=True, core_list=[1, 2])
    monkeypatch.setattr(machine, "quota", lambda: 4.5)
    assert placed()[1] == [1, 1, 1, 1]
    # Two GPUs a node; core 0 and 9 are not this job's.
    monkeypatch.setattr(
        node, "_cores_near", lambda slot: [0, 1, 2, 3, 4] if slot in (0, 3) else [5, 6, 7, 8, 9]
    )
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    assert placed()[0] == [first, second, second, first]
    assert placed(slots=[[1, 3]])[0] == [second, first]
    assert placed(numa=False)[0] == [[], [], [], []]
    assert placed(slots=[[0]])[0] == [[]], "a rank alone has all nodes"
    assert placed(bind_cores=True)[0] == [[1, 2], [5, 6], [7, 8], [3, 4]]


def test_ranks_run_on_their_cores(run: Callable[..., Outcome], capfd: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("needs two cores")
    show = "print(rank, os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])"
    assert run(show, bind_cores=True, core_list=cores) == Outcome()
    assert sorted(capfd.readouterr().out.splitlines()) == [
        f"{rank} {{{cores[rank]}}} 1" for rank in range(2)
    ]
