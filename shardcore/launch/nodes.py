"""Several machines: an agent on each, over ssh where it is not this one; the first that fails ends
all.

Note [Standard input]: `shardcore run` writes to each agent's standard input, through ssh, one line
of JSON: plan and environment (so no secret is in a list of processes). It stays open: when it ends,
because the job does or because `shardcore run` or a connection died, the agent ends its ranks.
Agents write to the terminal as they come, and last a line with an Outcome, which is not shown.
Nothing after it is waited for: a process that a rank left behind may hold the pipe forever.
"""

import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from shardcore.launch.failures import Failure, without_ended
from shardcore.launch.node import ENDING, REPORT, NodePlan, Outcome

# What ranks on other machines get of this one's environment: as DeepSpeed's launcher, and torch's
# own.
_PASSED = (
    "NCCL",
    "PYTHON",
    "MV2",
    "UCX",
    "MLFLOW",
    "GLOO",
    "TORCH",
    "OMP_NUM_THREADS",
    "SHARDCORE",
    "LD_LIBRARY_PATH",
    "PATH",
)
_BEFORE_PYTHON = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "PATH")
_END_S = 40.0  # torch gives ranks 30 s to end
_ANSWER_S = 20.0
_LAST_S = 30.0  # for what ranks have printed and ssh has not passed on yet


def is_this_machine(host: str) -> bool:
    """Whether a host of a hostfile is this machine."""
    name = socket.gethostname()
    return host.rpartition("@")[2] in {
        "localhost",
        "127.0.0.1",
        "::1",
        name,
        name.partition(".")[0],
    }


def ssh_command(host: str, port: int | None) -> list[str]:
    """Return the start of a command on another machine: it never asks for a password, and ends
    with its connection.
    """
    options = ["BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=30"]
    return [
        "ssh",
        *(word for option in options for word in ("-o", option)),
        *(["-p", str(port)] if port else []),
        host,
    ]


def passed_environment(folders: Sequence[Path]) -> dict[str, str]:
    """Return the variables for other machines: some of this environment, then NAME=VALUE lines of
    environment files.

    The files are .deepspeed_env (or what DS_ENV_FILE names) in each of the folders. Raises
    ValueError for other lines.
    """
    passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
    passed["PYTHONPATH"] = os.pathsep.join(
        filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])
    )
    for folder in folders:
        path = folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        lines = path.read_text().splitlines() if path.is_file() else []
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            name, equals, value = text.partition("=")
            if not equals or not name.isidentifier():
                raise ValueError(f"run: line {number} of {path} is {line!r}; expected NAME=VALUE")
            passed[name] = value
    return passed


def address_of(host: str, port: int | None) -> str:
    """Return the first IP address of a host, as `hostname -I` there says. Raises ValueError if
    it cannot be reached.
    """
    command = [*([] if is_this_machine(host) else ssh_command(host, port)), "hostname", "-I"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"run: {host} cannot be reached: {error}") from None
    if done.returncode != 0 or not done.stdout.split():
        raise ValueError(
            f"run: {host} cannot be reached, or has no address: {shlex.join(command)} ended with "
            f"status {done.returncode}: {done.stderr.strip()}; expected a host that ssh reaches "
            f"without a password (or --master_addr)"
        )
    return done.stdout.split()[0]


def run_nodes(
    plans: Sequence[NodePlan], environment: Mapping[str, str], ssh_port: int | None
) -> Outcome:
    """Run all nodes' ranks to their end, and return their failures, with the error of the node
    that failed first.
    """
    agents = [_Agent(plan, environment, ssh_port) for plan in plans]
    ended: queue.SimpleQueue[_Agent] = queue.SimpleQueue()
    previous = {
        number: signal.signal(number, _raise)
        for number in ENDING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    error, by_signal = "", 0
    try:
        for agent in agents:
            agent.start(ended)
        for _ in agents:
            outcome = ended.get().outcome
            error = outcome.error
            if outcome != Outcome():
                break
    except _Signal as stopped:
        by_signal = stopped.number
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for agent in agents:
            agent.end()
        for agent in agents:
            agent.wait()
        if any(agent.in_a_line for agent in agents):
            print(file=sys.stderr)
    failures = without_ended([failure for agent in agents for failure in agent.outcome.failures])
    return Outcome(failures, error, by_signal)


class _Signal(BaseException):
    def __init__(self, number: int) -> None:
        self.number = number


def _raise(number: int, frame: FrameType | None) -> None:
    raise _Signal(number)


class _Agent:
    """The process that runs one node, here or at the other end of ssh."""

    def __init__(
        self, plan: NodePlan, environment: Mapping[str, str], ssh_port: int | None
    ) -> None:
        self.outcome = Outcome()
        self.in_a_line = False  # the last that it wrote was no whole line
        self._plan, self._environment = plan, environment
        self._is_local = is_this_machine(plan.host)
        words = [sys.executable, "-m", "shardcore.launch.node"]
        if not self._is_local:
            variables = [
                f"{name}={environment[name]}" for name in _BEFORE_PYTHON if name in environment
            ]
            words = [
                *ssh_command(plan.host, ssh_port),
                f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *variables, *words])}",
            ]
        self._command = words
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self, ended: "queue.SimpleQueue[_Agent]") -> None:
        """Start it; it puts itself into `ended` when it has ended."""
        # A session of its own: Ctrl-C is for `shardcore run`, which then ends all.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=os.environ | self._environment if self._is_local else None,
        )
        message: dict[str, Any] = {
            "plan": asdict(self._plan),
            "environment": dict(self._environment),
        }
        self._thread = threading.Thread(
            target=self._follow, args=(self._process, json.dumps(message), ended), daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Have it end its ranks, and itself."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def wait(self) -> None:
        """Wait for its end, which `end` has asked for."""
        if self._process is None or self._thread is None:
            return
        self._thread.join(_END_S)
        if self._process.poll() is None:
            self._process.kill()
            self._thread.join()

    def _follow(
        self, process: subprocess.Popen[bytes], message: str, ended: "queue.SimpleQueue[_Agent]"
    ) -> None:
        """Pass its standard error on as it comes, until the outcome."""
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            process.stdin.write(message.encode() + b"\n")
            process.stdin.flush()
        except OSError:
            pass  # it has ended; its status says why
        unread, is_complete = b"", False
        while not is_complete:
            chunk = os.read(process.stderr.fileno(), 2**16)
            if not chunk:
                break
            unread += chunk
            end = unread.find(REPORT)
            if end < 0:  # all is shown but a possible start of the report
                start = unread.rfind(REPORT[:1])
                end = start if REPORT.startswith(unread[start:]) and start >= 0 else len(unread)
            self._show(unread[:end])
            unread = unread[end:]
            is_complete = unread.startswith(REPORT) and b"\n" in unread
        if is_complete:
            self.outcome = self._read(unread.removeprefix(REPORT).partition(b"\n")[0])
            try:
                process.wait(_LAST_S)
            except subprocess.TimeoutExpired:
                self._show(
                    f"shardcore run: {self._plan.host}: ended; the last of its output may be "
                    f"missing\n".encode()
                )
                process.kill()
                process.wait()
        else:
            self._show(unread)
            self.outcome = Outcome(error=self._lost_agent(process.wait()))
        ended.put(self)

    def _read(self, report: bytes) -> Outcome:
        """Return the outcome that it reports. A signal is an error here: `shardcore run` has got
        none.
        """
        try:
            outcome = json.loads(report)
        except ValueError:
            return Outcome(
                error=f"run: the report of the agent on {self._plan.host} cannot be read: "
                f"{report[-200:]!r}"
            )
        error = outcome["error"]
        if outcome["signal"]:
            name = signal.Signals(outcome["signal"]).name
            error = (
                f"run: the agent on {self._plan.host} was ended by {name}, which came from "
                f"there (a scheduler, or a user)"
            )
        return Outcome([Failure(**entry) for entry in outcome["failures"]], error)

    def _show(self, text: bytes) -> None:
        sys.stderr.buffer.write(text)
        sys.stderr.buffer.flush()
        self.in_a_line = not text.endswith(b"\n") if text else self.in_a_line

    def _lost_agent(self, status: int) -> str:
        if not self._is_local and status == 255:  # ssh(1): if an error occurred
            return (
                f"run: {self._plan.host} cannot be reached, or its connection broke (ssh's message "
                f"is above); expected a host "
                f"for which `ssh {self._plan.host} true` needs no password"
            )
        return (
            f"run: the agent on {self._plan.host} ended with status {status} without a report; "
            f"expected {sys.executable}, shardcore and the folder {os.getcwd()} there"
        )
