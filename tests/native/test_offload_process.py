"""What a step and copies in flight find in their process: its end, a fork, other threads,
SHARDCORE_CPU_ISA.
"""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import shardcore
from shardcore._native import _C
from tests.support.copies import simulated_tier
from tests.support.models import Run, batch_of, hash_of_training, loss_of, train
from tests.support.ranks import run_fresh

HEAD = """
import gc, os, signal, sys, threading, torch
import shardcore
from tests.support.copies import simulated_tier
signal.alarm(120)  # ends what would hang
SLOW = {"gigabytes_per_second": 1e-15}  # days for a byte
def begin(**how):
    tier = simulated_tier(**how)
    buffer = tier.empty(1000, torch.float32)
    events = [tier.to_tier(buffer, torch.ones(1000)), tier.from_tier(torch.zeros(1000), buffer)]
    return tier, buffer, events
"""
ENDS = {
    "all at once, many, never waited for": "held = [begin(**SLOW) for _ in range(50)]; tier, "
    "*others = begin(late=True)",
    "one of three first": "held = [[x for i, x in enumerate(begin(**SLOW)) if i != first] for "
    "first in range(3)]",
    "only a buffer, only events are left": "buffer, events = begin(**SLOW)[1], begin(**SLOW)[2]",
    "in a circle": "things = list(begin(**SLOW)); things.append(things); del things",
    "at exit": "import atexit; atexit.register(lambda: setattr(sys, 'held', begin(**SLOW))); "
    "sys.exit(0)",
    "a thread's own": "t = threading.Thread(target=lambda: begin(**SLOW)); t.start(); t.join()",
}


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HEAD + script], capture_output=True, text=True, timeout=300
    )


@pytest.mark.more
def test_an_interpreter_ends_whatever_is_in_flight():
    """Each end in a child of one process: importing torch takes longer than ending."""
    script = "signal.alarm(0)  # each child has its own\n"
    script += (
        "gc.collect(); gc.freeze()  # or each child would copy what was imported, to look "
        "whether it is garbage\n"
    )
    for end in ENDS:
        script += f"pid = os.fork()\nif pid == 0:\n    signal.alarm(120)\n    {ENDS[end]}\n"
        script += (
            f"else:\n    assert os.waitpid(pid, 0)[1] == 0, {end!r}\n"
            + "if pid:\n    pass\nelse:\n    sys.exit(0)\n"
        )
    result = run(script)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.more
def test_a_first_interpreter_ends_as_well():
    result = run(
        "sys.modules['torch'].held = begin(**SLOW); sys.held = begin(**SLOW); tier, buffer, events "
        "= begin(**SLOW)"
    )
    assert (result.returncode, result.stderr) == (0, "")


def _steps_of_a_child_and_its_parent():
    """Hashes after a step of the forked child, which copies meanwhile, and after the same step
    of the parent.
    """
    model, optimizer, _ = train(0, Run(steps=2, shard={"offload": {"optimizer": "cpu"}}))
    tier = _C.HostTier(torch.device("cpu"))
    buffer = tier.empty(1 << 20, torch.float32)
    tier.to_tier(buffer, torch.ones(1 << 20)).synchronize()
    back = torch.zeros(1 << 20)
    # 4 MiB each: the last is in flight at the fork
    done, *_, running = [tier.from_tier(back, buffer) for _ in range(500)]

    def step():
        loss_of(model, batch_of(2, 0, 0)).backward()
        optimizer.step()
        return hash_of_training(model, optimizer).encode()

    torch.set_num_threads(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        with pytest.raises(
            RuntimeError, match="from_tier: copy 500 was in flight when this process was forked"
        ):
            running.synchronize()
        mine = torch.zeros(1 << 20)
        tier.from_tier(mine, buffer).synchronize()
        assert mine.eq(1.0).all()
        with torch.autograd.set_multithreading_enabled(False):
            os.write(writer, step())
        del tier, buffer, done, running
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    running.synchronize()
    mine = step()
    return os.read(reader, len(mine)), mine


def test_a_forked_child_steps_to_the_same_bits_without_its_parents_threads():
    of_child, mine = run_fresh(_steps_of_a_child_and_its_parent)
    assert of_child == mine


class Memory(bytearray):
    def __del__(self):
        time.sleep(0.005)  # another thread has the GIL meanwhile


def _two_threads_free_tensors() -> None:
    signal.alarm(60)
    tier = simulated_tier(late=True)
    buffer = tier.empty(4, torch.float32)
    for _ in range(20):
        tier.to_tier(buffer, torch.frombuffer(Memory(16), dtype=torch.float32))
    threads = [threading.Thread(target=tier.synchronize) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.more
def test_two_threads_free_tensors_whose_end_hands_the_gil_over():
    """As the thread of an overlapped step and the main thread do: each tensor ends once."""
    run_fresh(_two_threads_free_tensors)


def _steps_of_a_child_and_its_parent_adam() -> tuple[bytes, bytes, bytes]:
    """Digests of the weight: after a step of the forked child; of the parent before and after
    the same step.
    """
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
    of_child, before, after = run_fresh(_steps_of_a_child_and_its_parent_adam)
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
