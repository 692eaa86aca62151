"""What a step finds in its process: threads that a fork left behind, and SHARDCORE_CPU_ISA."""

import hashlib
import os
import signal
import sys

import pytest
import torch

import shardcore
from shardcore._native import _C
from tests.ranks import run_fresh


def _steps_of_a_child_and_its_parent() -> tuple[bytes, bytes, bytes]:
    """Digests of the weight: after a step of the forked child; of the parent before and after the same step."""
    torch.set_num_threads(2)
    p = torch.nn.Parameter(torch.linspace(-1, 1, 1 << 20))
    optimizer = shardcore.CPUAdam([p], lr=0.1)
    grad = torch.linspace(1, 2, 1 << 20)
    optimizer.step(grads=[grad])  # starts the threads
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that waits for threads which it does not have
        optimizer.step(grads=[grad])
        os.write(writer, hashlib.sha256(p.detach().numpy()).digest())
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child ended with status {status}"
    before = hashlib.sha256(p.detach().numpy()).digest()
    optimizer.step(grads=[grad])
    return os.read(reader, 32), before, hashlib.sha256(p.detach().numpy()).digest()


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process")
def test_a_forked_child_steps_to_the_same_bits() -> None:
    of_child, before, after = run_fresh(_steps_of_a_child_and_its_parent)
    assert of_child == after != before


def _calls_with_a_wrong_instruction_set() -> list[tuple[str, int, int]]:
    """What each call says, and how often the tensors that it writes were marked as written."""
    os.environ["SHARDCORE_CPU_ISA"] = "sse9"
    p, out, ones = torch.nn.Parameter(torch.ones(8)), torch.zeros(8), torch.ones(8)
    optimizer = shardcore.CPUAdam([p])
    found = []
    for call in (
        lambda: optimizer.step(grads=[ones]),
        lambda: _C.cast([out], [ones]),
        lambda: _C.sq_norm([ones]),
    ):
        try:
            call()
            said = "accepted"
        except ValueError as error:
            said = str(error)
        found.append((said, p._version, out._version))
    return found


def test_a_wrong_instruction_set_is_refused_before_anything_is_marked_as_written() -> None:
    for said, *versions in run_fresh(_calls_with_a_wrong_instruction_set):
        assert said.startswith('environment: SHARDCORE_CPU_ISA has "sse9"; expected ')
        assert versions == [0, 0]
