"""The launcher: every rank runs, rank 0's result is the exit code, and the first failure is the
one that is reported.
"""

import os
import re

import pytest
import torch
import torch.distributed as dist

from examples.launch import Rank, launch


def sum_of_ranks(rank: Rank, addend: int) -> int:
    total = torch.tensor(rank.rank + addend)
    dist.all_reduce(total)
    assert torch.get_num_threads() == 1
    return int(total) if rank.rank == 0 else 77


def fail_on_rank_1(rank: Rank) -> int:
    if rank.rank == 1:
        raise ValueError("rank 1 has a bad day")
    dist.barrier()  # fails too, but later, when rank 1 has gone
    return 0


def die_on_rank_1(rank: Rank) -> int:
    if rank.rank == 1:
        os.kill(os.getpid(), 9)
    dist.barrier()
    return 0


def interrupt(rank: Rank) -> int:
    raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch, forked_ranks):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():  # left by a function that did not end
        dist.destroy_process_group()


def test_ranks_form_a_group_and_rank_0_decides_the_exit_code():
    assert launch(sum_of_ranks, 2, "cpu", 1, 10) == 21


def test_first_failure_is_reported(capfd):
    assert launch(fail_on_rank_1, 2, "cpu", 1) == 1
    error = capfd.readouterr().err
    assert "launch: rank 1 of 2 failed:\nTraceback" in error
    assert error.endswith("ValueError: rank 1 has a bad day\n")


def test_killed_rank_ends_all_and_is_reported_first(capfd):
    assert launch(die_on_rank_1, 2, "cpu", 1) == 1
    # rank 0, whose barrier fails by it, may be seen before or after it
    error = capfd.readouterr().err
    # torch's log, since 2.14
    error = re.sub(r"^[IW]\d{4} .*torch/multiprocessing/.*\n", "", error, flags=re.MULTILINE)
    assert error.startswith(
        "launch: rank 1 of 2 was ended by SIGKILL (as the kernel does when memory runs out)\n"
    )


def test_interrupted_single_rank_says_so(capfd):
    assert launch(interrupt, 1, "cpu", 1) == 130
    assert capfd.readouterr().err == "interrupted\n"
