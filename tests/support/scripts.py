"""Example scripts in processes of their own, on CPUs, that their launchers start or that are
forked; the losses they print.
"""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.support.ranks import free_port, start

ROOT = Path(__file__).resolve().parents[2]
# What a user's shell does not have: torchrun's variables, GPUs (the tests are about CPUs), the
# network.
_REMOVED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SET = {
    "PYTHONPATH": str(ROOT),
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "CI": "true",
    "OMP_NUM_THREADS": "1",
}


def environment() -> dict[str, str]:
    """Return the variables of this process without those of ranks, for a script on CPUs without
    a network.
    """
    return {name: value for name, value in os.environ.items() if name not in _REMOVED} | _SET


def finished(
    command: Sequence[str], folder: Path, env: dict[str, str] | None = None, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` to its end, and return what it printed; again where a thread of
    gloo's aborted a rank's end.

    ProcessGroupGloo's threads in torch 2.13 may drop a tensor's last reference while the
    interpreter ends, for which they take its lock: that ends the thread in C++ code, and so the
    process. examples/quickstart/ddp.py, which does not import shardcore, ends so in about one of
    fifteen runs on a busy machine.
    """
    for _ in range(3):
        done = subprocess.run(
            command,
            cwd=folder,
            env=env or environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if "terminate called without an active exception" not in done.stderr:
            break
    return done


def run_forked(
    script: Path | str,
    *arguments: str,
    ranks: int,
    folder: Path,
    status: int = 0,
    timeout_s: float = 300,
) -> str:
    """Run a script, or a module by its name, on so many ranks, or for 0 as `python script` does, in
    `folder`.

    Returns what they printed (stdout), in their order; each must exit with `status`.

    Their processes are new and have torchrun's variables, but come from one that has imported
    torch, and in a run of all tests other libraries: to start an interpreter and import them takes
    longer than the script.
    """
    variables = environment()
    if ranks:
        variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with TemporaryDirectory() as outputs:
        files = [Path(outputs, str(rank)) for rank in range(max(1, ranks))]
        started = []
        for rank, file in enumerate(files):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
            started.append(start(run_here, script, arguments, variables | own, folder, file))
        for process in started:
            process.join(timeout_s)
            process.kill()
        printed = [file.read_text() for file in files]
        errors = [file.with_suffix(".err").read_text() for file in files]
    ended = [process.exitcode for process in started]
    assert ended == [status] * len(started), f"{script} ended with {ended}\n" + "\n".join(
        text[-3000:] for text in (*printed, *errors)
    )
    return "".join(printed)


def run_here(
    script: Path | str,
    arguments: Sequence[str],
    variables: dict[str, str],
    folder: Path,
    output: Path,
) -> None:
    """Become a script, or a module by its name, in a process of `start`'s; it prints to `output`
    and to its .err file.
    """
    for stream, file in ((1, output), (2, output.with_suffix(".err"))):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    if isinstance(script, Path):
        runpy.run_path(str(script), run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def losses_in(printed: str) -> list[str]:
    """Return the losses of a run, as printed: `step 3 loss 1.25`, or Trainer's `{'loss': '1.25',
    ...}`.
    """
    return re.findall(r"^(?:step \d+ loss |\{'loss': ')([\d.]+)", printed, re.MULTILINE)


def check_losses_fall(losses: Sequence[str]) -> None:
    """Raise AssertionError unless there are at least ten losses, and the last one is below 0.9
    of the first.
    """
    assert len(losses) >= 10, losses
    assert float(losses[-1]) < 0.9 * float(losses[0]), losses


def to_digits(losses: Sequence[str], digits: int = 5) -> list[str]:
    """Return the losses rounded to so many significant digits."""
    return [f"{float(loss):.{digits}g}" for loss in losses]
