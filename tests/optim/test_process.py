"""What a step finds in its process: threads that a fork left behind, and SHARDCORE_CPU_ISA."""

import subprocess
import sys

import pytest

FORK = """
import hashlib, os, signal, torch, shardcore
torch.set_num_threads(2)
p = torch.nn.Parameter(torch.linspace(-1, 1, 1 << 20))
optimizer = shardcore.CPUAdam([p], lr=0.1)
grad = torch.linspace(1, 2, 1 << 20)
optimizer.step(grads=[grad])  # starts the threads
digest = lambda: hashlib.sha256(p.detach().numpy()).digest()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends a child that waits for threads which it does not have
    optimizer.step(grads=[grad])
    os.write(writer, digest())
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert status == 0, f"the child ended with status {status}"
before = digest()
optimizer.step(grads=[grad])
assert os.read(reader, 32) == digest() != before
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process")
def test_a_forked_child_steps_to_the_same_bits():
    result = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_a_wrong_instruction_set_is_refused_before_anything_is_marked_as_written():
    script = """
import os, torch
os.environ["SHARDCORE_CPU_ISA"] = "sse9"
import shardcore
from shardcore._native import _C
p, out, ones = torch.nn.Parameter(torch.ones(8)), torch.zeros(8), torch.ones(8)
optimizer = shardcore.CPUAdam([p])
for call in (
    lambda: optimizer.step(grads=[ones]), lambda: _C.cast([out], [ones]), lambda: _C.ordered_sum(ones, 1, 1.0, out),
    lambda: _C.sq_norm([ones]),
):
    try:
        call()
    except ValueError as error:
        assert str(error).startswith('environment: SHARDCORE_CPU_ISA has "sse9"; expected '), error
    else:
        raise AssertionError("sse9 was accepted")
    assert (p._version, out._version) == (0, 0), (p._version, out._version)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
