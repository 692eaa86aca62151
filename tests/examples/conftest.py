"""Runs the benchmarks' main functions in this process."""

import sys

import pytest
import torch
import torch.multiprocessing as mp

from tests.support.ranks import preload


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launch() fork its ranks from a process that has imported torch. What they print is not
    captured.
    """
    preload()
    start = mp.start_processes
    monkeypatch.setattr(
        mp,
        "start_processes",
        lambda *args, **how: start(*args, **{**how, "start_method": "forkserver"}),
    )


@pytest.fixture
def run_main(monkeypatch, capfd):
    """Run a benchmark's main with arguments, in this process; returns what it printed. Threads
    are put back.
    """
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # As bench_cpu_adam wants it, so that it does not start itself again; both benchmarks set these
    # for their ranks.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    threads = torch.get_num_threads()

    def run(module, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
        assert (module.main() or 0) == 0
        return capfd.readouterr().out

    yield run
    torch.set_num_threads(threads)
