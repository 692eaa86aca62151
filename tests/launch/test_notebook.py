"""notebook_launcher: rank 0's result, tracebacks of ranks, and no process that stays."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore.launch import notebook

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def train(steps: int) -> Any:
    dist.init_process_group()
    torch.manual_seed(3)
    model = torch.nn.Linear(40, 30)
    model, optimizer = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters(), lr=0.1), stage=3
    )
    for _ in range(steps):
        model(torch.full((2, 40), 1.0 + dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "rank": dist.get_rank(),
        "world": dist.get_world_size(),
        "weights": model.state_dict()["weight"],
    }


def environment() -> Any:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return [os.environ[name] for name in names], torch.get_num_threads(), os.getpid()


def stay() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def test_the_result_is_that_of_rank_0() -> None:
    # with OpenMP's threads, as a notebook may have before
    (torch.randn(300, 300) @ torch.randn(300, 300)).sum()
    results = shardcore.notebook_launcher(train, (2,), num_processes=2)
    assert (results["rank"], results["world"]) == (0, 2)
    torch.manual_seed(3)
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    for _ in range(2):
        (
            sum(model(torch.full((2, 40), value)).square().mean() for value in (1.0, 2.0)) / 2
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(results["weights"], model.weight.detach())
    assert not torch.allclose(
        shardcore.notebook_launcher(train, (1,), num_processes=2)["weights"], model.weight
    ), "a step less"
    assert not dist.is_initialized()


def test_one_process_is_a_new_one_too() -> None:
    variables, threads, number = shardcore.notebook_launcher(lambda: environment())
    assert variables == ["0", "0", "1", "1", "127.0.0.1"]
    assert threads == 1, "OpenMP's threads do not survive a fork"
    assert number != os.getpid()
    assert "RANK" not in os.environ
    assert torch.get_num_threads() >= 1


def test_an_error_comes_with_its_traceback(capfd: Any) -> None:
    def fail() -> None:
        dist.init_process_group()
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.barrier()

    with pytest.raises(RuntimeError) as error:
        shardcore.notebook_launcher(fail, num_processes=2)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("notebook_launcher: rank 0 of 2 failed: ")
    assert lines[1:3] == [
        "notebook_launcher: rank 1 of 2 failed:",
        "Traceback (most recent call last):",
    ]
    assert lines[3].endswith("in fail"), "the launcher's own frames are left out"
    assert lines[-1] == "ValueError: boom"
    assert "boom" not in capfd.readouterr().err
    assert error.value.__suppress_context__ or error.value.__context__ is None


def test_a_rank_that_dies_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "_GRACE_S", 0.2)
    start_s = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        shardcore.notebook_launcher(
            lambda: (
                os.kill(os.getpid(), signal.SIGKILL)
                if os.environ["RANK"] == "1"
                else time.sleep(60)
            ),
            num_processes=2,
        )
    assert (
        str(error.value)
        == "notebook_launcher: rank 1 of 2 was ended by SIGKILL (as the kernel does when memory "
        "runs out)"
    )
    assert time.monotonic() - start_s < 20
    with pytest.raises(RuntimeError) as error:  # ranks 0 and 1 would not end by themselves
        shardcore.notebook_launcher(
            lambda: sys.exit(7) if os.environ["RANK"] == "2" else stay(), num_processes=3
        )
    assert str(error.value) == "notebook_launcher: rank 2 of 3 ended with exit status 7"
    with pytest.raises(RuntimeError, match="rank 0 of 1 ended with exit status 7"):
        shardcore.notebook_launcher(lambda: sys.exit(7))


def test_results_that_cannot_come_back() -> None:
    with pytest.raises(
        RuntimeError,
        match="TypeError: notebook_launcher: the function returned a function that cannot be "
        "copied",
    ):
        shardcore.notebook_launcher(lambda: lambda: 0)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"function": 5}, TypeError, "function has type int; expected a function"),
        ({"args": 5}, TypeError, r"args has type int; expected a tuple: args=\(a, b\)"),
        ({"args": "ab"}, TypeError, "args has type str"),
        ({"num_processes": 0}, ValueError, "num_processes is 0; expected a whole number above 0"),
        ({"num_processes": True}, ValueError, "num_processes is True"),
        ({"start_method": "thread"}, ValueError, "start_method is 'thread'; expected one of fork"),
        (
            {"start_method": "spawn"},
            TypeError,
            "cannot be sent to another process .*expected a function of an importable module",
        ),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        shardcore.notebook_launcher(**{"function": lambda: 0} | arguments)


def test_cuda_that_was_used_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    pid = os.getpid()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != pid)
    with pytest.raises(
        RuntimeError,
        match=r"CUDA has been used in this process.*restart the kernel.*start_method=\"spawn\"",
    ):
        shardcore.notebook_launcher(environment)
    with pytest.raises(ValueError, match="num_processes is 3 but there are 2 GPUs"):
        shardcore.notebook_launcher(environment, num_processes=3)


def test_not_inside_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="this process is a rank already"):
        shardcore.notebook_launcher(environment)


class Aborts:
    def __del__(self, abort: Any = os.abort) -> None:
        abort()


def ends_late(folder: Path) -> Any:
    """Leave a thread, an exit function, and what aborts the interpreter's end, as threads of
    torch's may.
    """
    threading.Timer(0.5, (folder / "thread").touch).start()
    atexit.register((folder / "atexit").touch)
    globals()["kept"] = Aborts()
    return environment()


@pytest.mark.slow
def test_spawn_takes_functions_of_modules(tmp_path: Path) -> None:
    variables, threads, _ = shardcore.notebook_launcher(
        ends_late, (tmp_path,), num_processes=2, start_method="spawn"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"thread", "atexit"}
    assert variables == ["0", "0", "2", "2", "127.0.0.1"]
    assert threads == max(1, len(os.sched_getaffinity(0)) // 2) or "OMP_NUM_THREADS" in os.environ


@pytest.mark.slow
def test_an_interrupt_ends_all_ranks() -> None:
    code = (
        "import os, shardcore, time\n"
        "def wait():\n    os.write(1, b'%d\\n' % os.getpid()); time.sleep(100)\n"
        "shardcore.notebook_launcher(wait, num_processes=2)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    numbers = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    assert not any(Path(f"/proc/{number}").exists() for number in numbers)
