"""What a rank runs before its program: gives it GPUs and cores, and keeps the exception that ends
it for the launcher to show.

Started as a file (python rank.py OPTIONS PROGRAM ...), with the standard library alone: the program
sees a fresh interpreter, in which neither torch nor shardcore is imported. OPTIONS is JSON,
`options` in node.py.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def record(
    directory: str | Path, rank: int, error: BaseException, trace: TracebackType | None
) -> None:
    """Write this rank's exception, its traceback from `trace` on, to where the launcher looks
    for it.
    """
    text = "".join(traceback.format_exception(type(error), error, trace))
    last = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    path = Path(directory, f"{rank}.json")
    path.with_suffix(".part").write_text(
        json.dumps({"time_ns": time.time_ns(), "last": last[-1], "text": text})
    )
    path.with_suffix(".part").replace(path)  # so that it is never seen half written


def end_with_parent() -> None:
    """Have this process ended by SIGTERM when its parent ends: a launcher that is killed leaves
    no ranks behind (Linux).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _record_exceptions(directory: str) -> None:
    """Have the exception that ends this process recorded instead of printed: every rank would
    print its own, in any order.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return  # sent by the launcher, which says so
        while trace is not None and trace.tb_frame.f_code.co_filename in (
            __file__,
            runpy.__file__,
            "<frozen runpy>",
        ):
            trace = trace.tb_next
        try:
            record(directory, int(os.environ["RANK"]), error, trace)
        except OSError:  # the launcher is gone, or the disk is full
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook  # torch.distributed's own hook, set later, calls this one


def _install_as_deepspeed() -> None:
    """Let `import deepspeed` mean shardcore, also where that is imported from a checkout."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    module = importlib.import_module("shardcore.deepspeed.as_deepspeed")
    del sys.path[0]  # before the call, which puts a folder there
    module.install_as_deepspeed()


def _run(options: Mapping[str, Any], program: list[str]) -> None:
    if options["kind"] == "program":
        os.execvp(program[0], program)
    if not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file
    if options["kind"] == "module":
        sys.path.insert(0, os.getcwd())
    elif not os.path.isdir(program[0]):  # runpy inserts a directory itself
        sys.path.insert(0, os.path.dirname(os.path.realpath(program[0])))
    if options["as_deepspeed"]:
        _install_as_deepspeed()
    sys.argv = program
    if options["kind"] == "module":
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


def main() -> None:
    """Become the rank that the environment and sys.argv describe."""
    options, program = json.loads(sys.argv[1]), sys.argv[2:]
    local_rank = int(os.environ["LOCAL_RANK"])
    _record_exceptions(options["failures"])
    end_with_parent()
    if options["gpus"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = options["gpus"]
    cores = options["cores"][local_rank]
    if cores:
        os.sched_setaffinity(0, cores)
    threads = options["threads"][local_rank]
    if threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]  # as DeepSpeed's launcher sets it
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(options["restart"])
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(options["max_restarts"])
    if options["local_rank"]:
        program.insert(1, f"--local_rank={local_rank}")
    _run(options, program)


if __name__ == "__main__":
    main()
