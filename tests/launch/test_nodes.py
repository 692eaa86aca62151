"""Several machines: ssh is a script on PATH that runs the command here, in the environment of a
login without variables.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shardcore.launch import nodes
from shardcore.launch.node import REPORT, NodePlan, Outcome
from tests.support.ranks import context, free_port
from tests.support.ranks import start as fork
from tests.support.scripts import run_here

SOON_S = 90.0  # for what takes five seconds on a quiet machine
_SSH = """#!/bin/sh
echo "$@" >> {log}
while [ "${{1#-}}" != "$1" ]; do shift 2; done
host=$1; shift
case $host in
  alpha|beta) exec env -i HOME=/nowhere ON=$host sh -c "$*" ;;
  *) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255 ;;
esac
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Start `shardcore run` over a hostfile with alpha and beta, a rank each."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(_SSH.format(log=tmp_path / "ssh.log"))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setenv("HOME", str(tmp_path))
    started = []

    def run(program: str, *options: str, hosts: str = "alpha slots=1\nbeta slots=1\n") -> Any:
        (tmp_path / "hosts").write_text(hosts)
        (tmp_path / "program.py").write_text(program)
        plans = [
            "--hostfile",
            "hosts",
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            free_port(),
            *options,
        ]
        command = [
            sys.executable,
            "-m",
            "shardcore",
            "run",
            *plans,
            "--no_local_rank",
            "program.py",
            "a b",
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, cwd=tmp_path, text=True, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_ranks_of_two_machines(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank order is that of hosts, variables arrive, and beta's traceback is the last thing on
    the screen, once.
    """
    monkeypatch.setenv("NCCL_DEBUG", "WARN it")
    monkeypatch.setenv("MY_SECRET", "stays")
    (tmp_path / ".deepspeed_env").write_text("# mine\nTOKEN=a 'b' $c\n")
    process = start("""if True:
        import os, sys, torch, torch.distributed as dist
        dist.init_process_group()
        rows = [None, None]
        names = ["ON", "RANK", "LOCAL_RANK", "NCCL_DEBUG", "TOKEN", "MY_SECRET"]
        dist.all_gather_object(rows, [os.environ.get(name) for name in names] + sys.argv[1:])
        if dist.get_rank() == 0:
            print(*rows, sep="\\n", flush=True)
            print("\\x1e at work", file=sys.stderr, flush=True)
        dist.barrier()
        if dist.get_rank() == 1:
            print("50%|#####", end="", file=sys.stderr, flush=True)
            raise ValueError("boom")
        dist.barrier()
    """)
    out, err = process.communicate(timeout=SOON_S)
    assert out.splitlines() == [
        """['alpha', '0', '0', 'WARN it', "a 'b' $c", None, 'a b']""",
        """['beta', '1', '0', 'WARN it', "a 'b' $c", None, 'a b']""",
    ]
    assert process.returncode == 1
    assert "\x1e at work\n" in err
    assert err.count("Traceback") == err.count("ValueError: boom") == 1
    assert err.endswith('    raise ValueError("boom")\nValueError: boom\n'), err
    assert REPORT.decode() not in err
    # Alpha's ranks may write into the line of the bar; shardcore begins one of its own.
    assert "50%|#####" in err
    assert 0 < err.count("shardcore run: ") == len(re.findall("^shardcore run: ", err, re.M)), err
    assert "TOKEN" not in (tmp_path / "ssh.log").read_text(), "a list of processes shows commands"
    assert "BatchMode=yes" in (tmp_path / "ssh.log").read_text()


@pytest.mark.slow
def test_an_unknown_host_ends_the_others(start: Callable[..., Any]) -> None:
    start_s = time.monotonic()
    process = start("import time; time.sleep(60)", hosts="localhost slots=1\ngamma slots=1\n")
    _, err = process.communicate(timeout=SOON_S)
    assert process.returncode == 2
    assert "ssh: Could not resolve hostname gamma" in err
    assert err.splitlines()[-1].startswith(
        "shardcore run: gamma cannot be reached, or its connection broke"
    )
    assert time.monotonic() - start_s < SOON_S


@pytest.mark.slow
def test_restarts_take_all_machines(start: Callable[..., Any], tmp_path: Path) -> None:
    process = start(
        """if True:
        import os, torch.distributed as dist
        dist.init_process_group()
        assert os.environ["TORCHELASTIC_MAX_RESTARTS"] == "2"
        os.write(1, f"{dist.get_rank()} {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n".encode())
        dist.barrier()
        if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("once")
        dist.barrier()
        os._exit(0)  # see scripts.finished
    """,
        "--max_restarts",
        "2",
    )
    out, err = process.communicate(timeout=2 * SOON_S)
    assert process.returncode == 0, err
    assert sorted(out.split("\n")[:-1]) == ["0 0", "0 1", "1 0", "1 1"]
    # torch may print more: a rank that ends while the store of the other is gone
    assert "shardcore run: restart 1 of 2" in err.splitlines()
    assert err.count("ValueError: once") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_command(
    start: Callable[..., Any], tmp_path: Path, number: int
) -> None:
    process = start("import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(100)")
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    _, err = process.communicate(timeout=SOON_S)
    assert process.returncode == (130 if number == signal.SIGINT else -9)
    assert "Traceback" not in err
    end = time.monotonic() + SOON_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.1)
    if number == signal.SIGINT:
        assert err.splitlines()[-1] == "shardcore run: ended by SIGINT"


@pytest.mark.slow
def test_a_machine_without_shardcore(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin" / "ssh").write_text("#!/bin/sh\nexec sh -c 'exit 127'\n")
    process = start("")
    _, err = process.communicate(timeout=SOON_S)
    assert (
        f"ended with status 127 without a report; expected {sys.executable}, shardcore and the "
        f"folder {tmp_path} there" in err
    )


def outcome_of(folder: Path, monkeypatch: pytest.MonkeyPatch, ssh: str) -> Outcome:
    """Run w1 and w2, which ssh pretends to reach: it has read the plan when it runs the given
    script.
    """
    (folder / "ssh").write_text(
        '#!/bin/sh\nread plan\nreport() { printf "\\036shardcore run: %s\\n" "$1" >&2; }\n' + ssh
    )
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    plans = [
        NodePlan(slots=[[0], [0]], node_rank=rank, program=["x.py"], host=f"w{rank + 1}")
        for rank in range(2)
    ]
    return nodes.run_nodes(plans, {}, None)


def test_an_agent_that_a_signal_ends_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = json.dumps(asdict(Outcome(signal=signal.SIGTERM)))
    outcome = outcome_of(tmp_path, monkeypatch, f"case $* in *w1*) cat ;; esac\nreport '{ended}'\n")
    assert outcome.error.startswith(
        "run: the agent on w2 was ended by SIGTERM, which came from there"
    )
    assert outcome.signal == 0


def test_what_ranks_leave_behind_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process holds standard error, and ssh stays as long as it does."""
    monkeypatch.setattr(nodes, "_LAST_S", 0.1)
    left = (
        f"sleep 60 &\necho $! >> {tmp_path}/left\nreport "
        f"'{json.dumps(asdict(Outcome()))}'\necho more >&2\nexec sleep 60\n"
    )
    assert outcome_of(tmp_path, monkeypatch, left) == Outcome()
    for number in (tmp_path / "left").read_text().split():
        os.kill(int(number), signal.SIGKILL)  # it is there still


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(
        '#!/bin/sh\ncase "$*" in *good*) echo "10.0.0.7 fd00::1" ;; *) echo "who?" >&2; exit 255 '
        ";; esac\n"
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert nodes.address_of("good", 2222) == "10.0.0.7"
    with pytest.raises(
        ValueError,
        match=r"bad cannot be reached.*-p 2222 bad hostname -I ended with status 255: who\?",
    ):
        nodes.address_of("bad", 2222)
    assert nodes.is_this_machine("localhost")
    assert nodes.is_this_machine("me@127.0.0.1")
    assert not nodes.is_this_machine("bad")


def test_environment_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    (first / ".deepspeed_env").write_text("X=1\nY=2\n")
    (second / ".deepspeed_env").write_text("\nX=3=4\n")
    variables = nodes.passed_environment([first, second])
    assert (variables["X"], variables["Y"]) == ("3=4", "2")
    assert variables["PYTHONPATH"].split(":")[0] == os.getcwd()
    assert variables["PATH"] == os.environ["PATH"]
    (second / "other").write_text("Z=5\nno value\n")
    monkeypatch.setenv("DS_ENV_FILE", "other")
    with pytest.raises(ValueError, match=r"line 2 of .*other is 'no value'; expected NAME=VALUE"):
        nodes.passed_environment([first, second])


def agent(pipe: Any, output: Path) -> None:
    """Become the program that runs a node elsewhere, with `pipe` as its standard input."""
    os.dup2(pipe.fileno(), 0)
    pipe.close()
    run_here("shardcore.launch.node", (), dict(os.environ), output.parent, output)


@pytest.mark.more
def test_the_agent_ends_with_its_standard_input(tmp_path: Path) -> None:
    """As when ssh, or the process that started it, has died."""
    (tmp_path / "program.py").write_text(
        "import os, sys, time; print(os.getpid(), os.environ['SECRET'], sys.stdin.read() == '', "
        "flush=True); time.sleep(60)"
    )
    plan = NodePlan(slots=[[0]], node_rank=0, program=["program.py"], local_rank=False)
    output, (theirs, ours) = tmp_path / "out", context.Pipe(duplex=False)
    process = fork(agent, theirs, output)
    theirs.close()
    os.write(
        ours.fileno(),
        json.dumps({"plan": asdict(plan), "environment": {"SECRET": "told"}}).encode() + b"\n",
    )
    until = time.monotonic() + SOON_S
    while not output.exists() or not output.read_text().endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.05)
    number, *rest = output.read_text().split()
    assert rest == ["told", "True"]
    ours.close()
    process.join(SOON_S)
    assert not Path(f"/proc/{number}").exists()
    text, _, told = output.with_suffix(".err").read_bytes().rpartition(REPORT)
    assert json.loads(told) == asdict(Outcome(signal=signal.SIGTERM))
    assert b"Traceback" not in text
