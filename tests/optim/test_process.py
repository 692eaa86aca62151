"""What a step finds in its process: SHARDCORE_CPU_ISA."""

import subprocess
import sys


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
