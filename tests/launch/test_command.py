"""shardcore run as users type it: what is planned, real ranks, SageMaker's variables, and errors that come at once."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardcore import cli
from shardcore.launch import command, node
from shardcore.launch.node import ENDING, NodePlan
from tests.support.ranks import free_port
from tests.support.scripts import ROOT, run_forked

SOON_S = 90.0  # for what takes five seconds on a quiet machine
HOSTS = "w0 slots=2\nw1 slots=4\n"
# At the end of a program that ends well: while the interpreter ends a thread of gloo's may abort it (see scripts.finished).
END = "os._exit(0)"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No launcher's variables, no hostfile of this machine."""
    for name in [name for name in os.environ if name.startswith(("SM_", "SLURM_", "OMPI_", "PMI_", "CUDA_VISIBLE"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command, "HOSTFILE", tmp_path / "absent")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text(HOSTS)
    handlers = {number: signal.getsignal(number) for number in ENDING}
    yield
    for number, handler in handlers.items():  # torch's agent leaves its own
        signal.signal(number, handler)


def plans(*words: str) -> list[NodePlan]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.plan(parser.parse_args([*words, "train.py", "--num_gpus", "9", "x"]))


def slots(*words: str) -> dict[str, list[int]]:
    return {plan.host: list(plan.own_slots) for plan in plans("--master_addr", "w0", *words)}


# --- what is planned --------------------------------------------------------------------------------------------------


def test_this_machine() -> None:
    (plan,) = plans()
    assert plan == NodePlan(slots=[[0]], node_rank=0, program=["train.py", "--num_gpus", "9", "x"]), "the program's own option"
    assert plans("--num_gpus", "3")[0].slots == [[0, 1, 2]]
    assert plans("--num_accelerators=3")[0].slots == [[0, 1, 2]]
    assert plans("--include", "localhost:1")[0].slots == [[1]]
    (plan,) = plans("-m", "--max-restarts", "2", "--bind_cores_to_rank", "--bind_core_list", "0-2,5", "--no_numa_binding")
    assert (plan.kind, plan.max_restarts, plan.bind_cores, plan.core_list, plan.numa) == (
        "module",
        2,
        True,
        [0, 1, 2, 5],
        False,
    )
    assert plans("--as-deepspeed")[0].as_deepspeed
    with pytest.raises(ValueError, match="--as_deepspeed and --no_python are both given"):
        plans("--as-deepspeed", "--no_python")
    (plan,) = plans("--no_python", "--no-local-rank", "--master_port", "1234", "--num_nodes", "1")
    assert (plan.kind, plan.local_rank, plan.master_port, plan.as_deepspeed) == ("program", False, 1234, False)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert plans()[0].slots == [[0, 1, 2, 3]]
    assert plans("--exclude", "localhost:0,2")[0].slots == [[1, 3]]
    with pytest.raises(ValueError, match="--include names slot 4 of localhost; expected one of 0 to 3"):
        plans("--include", "localhost:4")


def test_hostfiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert slots("--hostfile", "hosts") == {"w0": [0, 1], "w1": [0, 1, 2, 3]}
    assert slots("-H", "hosts", "-i", "w1:3") == {"w1": [3]}
    assert slots("-H", "hosts", "--num_nodes", "1") == {"w0": [0, 1]}
    assert slots("-H", "hosts", "--num_gpus", "1") == {"w0": [0], "w1": [0]}
    first, second = plans("-H", "hosts", "--master_addr", "a")
    assert (first.node_rank, second.node_rank, second.slots, second.world_size) == (0, 1, [[0, 1], [0, 1, 2, 3]], 6)
    assert (second.master_addr, second.master_port) == ("a", command.PORT)
    monkeypatch.setattr(command, "address_of", lambda host, port: f"of {host} {port}")
    assert plans("-H", "hosts", "--ssh_port", "7")[1].master_addr == "of w0 7"
    (plan,) = plans("-H", "hosts", "--node_rank", "1", "--no_ssh")
    assert (plan.own_slots, plan.master_addr, plan.started_alone) == ([0, 1, 2, 3], "w0", True)
    (tmp_path / "named").write_text("me@w0 slots=2\nw1 slots=4\n")
    assert plans("-H", "named", "--node_rank", "1")[0].master_addr == "w0"
    monkeypatch.setattr(command, "HOSTFILE", tmp_path / "hosts")
    assert slots() == slots("--hostfile", "hosts"), "DeepSpeed's usual place"


def test_a_machine_of_several() -> None:
    """As srun or Kubernetes start it, once on each."""
    (plan,) = plans("--num_nodes", "3", "--node_rank", "2", "--master_addr", "first", "--num_gpus", "2")
    assert plan.slots == [[0, 1]] * 3
    assert (plan.node_rank, plan.master_addr, plan.master_port) == (2, "first", command.PORT)


def test_sagemaker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOSTS": '["algo-1", "algo-2"]', "CURRENT_HOST": "algo-2", "NUM_GPUS": "4"}.items():
        monkeypatch.setenv(f"SM_{name}", value)
    (plan,) = plans()
    assert (plan.slots, plan.node_rank, plan.master_addr, plan.host) == ([[0, 1, 2, 3]] * 2, 1, "algo-1", "algo-2")
    assert plan.started_alone
    assert plans("--num_gpus", "2")[0].slots == [[0, 1]] * 2
    for words, text in [
        (["--num_gpus", "5"], "--num_gpus is 5 but SM_NUM_GPUS is 4"),
        (["--include", "algo-1"], "--include is given in a SageMaker job"),
        (["--max_restarts", "1"], "each of 2 machines was started by itself"),
    ]:
        with pytest.raises(ValueError, match=text):
            plans(*words)
    monkeypatch.setenv("SM_NUM_GPUS", "0")
    assert plans()[0].slots == [[0]] * 2, "on the CPU"
    monkeypatch.setenv("SM_CURRENT_HOST", "algo-3")
    with pytest.raises(ValueError, match="SM_CURRENT_HOST 'algo-3'; expected a JSON list of hosts, and one of them"):
        plans()
    assert list(slots("-H", "hosts")) == ["w0", "w1"], "a hostfile comes first"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--num_gpus", "0"], "--num_gpus is 0; expected at least 1"),
        (["--max_restarts", "-1"], "--max_restarts is -1; expected at least 0"),
        (["--master_port", "70000"], "--master_port is 70000; expected at most 65535"),
        (["--num_nodes", "2"], "--num_nodes is 2 but there is no hostfile; expected --hostfile, or --node_rank"),
        (["-m", "--no_python"], "--module and --no_python are both given"),
        (["--bind_core_list", "0"], "--bind_core_list is given without --bind_cores_to_rank"),
        (["--bind_cores_to_rank", "--bind_core_list", "3-1"], "'3-1' has '3-1'; expected numbers and ranges"),
        (["--include", "localhost", "--num_gpus", "1"], "expected one way to choose"),
        (["--include", "w7"], "--include names the host 'w7'; expected one of localhost"),
        (["--hostfile", "nowhere"], "nowhere"),
        (["--no_ssh"], "--no_ssh is given without --node_rank"),
        (["--ssh_port", "22"], "nothing is reached by ssh"),
        (["--node_rank", "1", "--num_nodes", "2"], "--node_rank is given without --master_addr"),
        (["--node_rank", "2", "--num_nodes", "2", "--master_addr", "a"], "but there are 2 nodes; expected 0 to 1"),
        (["--node_rank", "0", "--num_nodes", "2", "--master_addr", "a", "--max_restarts", "1"], "was started by itself"),
    ],
)
def test_what_is_refused(words: list[str], text: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", *words, "train.py"])
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "usage: shardcore run [OPTIONS] PROGRAM [ARGUMENTS]"
    assert said[-1].startswith("shardcore run: error: ")
    assert text in said[-1]


def test_without_a_program(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run"])
    assert capsys.readouterr().err.endswith("the following arguments are required: PROGRAM\n")


def test_inside_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ValueError, match=r"one of 4 that another launcher has started \(SLURM_STEP_NUM_TASKS\)"):
        plans()
    assert plans("--node_rank", "0", "--num_nodes", "4", "--master_addr", "a")[0].slots == [[0]] * 4


# --- real ranks -------------------------------------------------------------------------------------------------------


def shardcore_run(program: str, *words: str, arguments: tuple[str, ...] = (), **environment: str) -> Any:
    """Start a program; returns the process."""
    Path("train.py").write_text(textwrap.dedent(program))
    given = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    line = [sys.executable, "-m", "shardcore", "run", *words, "train.py", *arguments]
    return subprocess.Popen(line, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


TRAINING = """
    import argparse, hashlib, torch, torch.distributed as dist, shardcore
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    dist.init_process_group()
    assert options.local_rank == dist.get_rank()
    torch.manual_seed(1)
    model = torch.nn.Linear(40, 30)
    model, optimizer = shardcore.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
    torch.manual_seed(dist.get_rank())
    for _ in range(options.steps):
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = model.state_dict()["weight"]
        print(f"{dist.get_rank()} {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}\\n", end="")
    dist.destroy_process_group()
"""


@pytest.mark.more
def test_training_is_that_of_ranks_with_torchruns_variables() -> None:
    process = shardcore_run(TRAINING, "--num_gpus", "2", arguments=("--steps", "3"))
    out, err = process.communicate(timeout=SOON_S)
    assert process.returncode == 0, err
    hashes = sorted(out.splitlines())
    assert len({line[2:] for line in hashes}) == 3, "each step changes the weights"
    assert [f"{rank} {line[2:]}" for rank in (0, 1) for line in hashes[:3]] == hashes
    assert err.startswith("shardcore run: torch finds no GPU on localhost: 2 on its CPU, over gloo\n")
    Path("train.py").write_text(textwrap.dedent(TRAINING).replace("options.local_rank ==", "0 <="))
    assert sorted(run_forked(Path("train.py"), "--steps", "3", ranks=2, folder=Path.cwd()).splitlines()) == hashes


@pytest.mark.more
def test_a_traceback_is_the_last_thing_on_the_screen_once() -> None:
    start_s = time.monotonic()
    process = shardcore_run("""
        import torch, torch.distributed as dist
        dist.init_process_group()
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.all_reduce(torch.ones(1))
    """, "--num_gpus", "2", "--no_local_rank")  # fmt: skip
    _, err = process.communicate(timeout=SOON_S)
    assert process.returncode == 1
    lines = err.splitlines()
    assert lines[-5:] == [
        "shardcore run: rank 1 of 2 failed:",
        "Traceback (most recent call last):",
        '  File "train.py", line 5, in <module>',
        '    raise ValueError("boom")',
        "ValueError: boom",
    ]
    assert err.count("boom") == 2
    assert err.count("Traceback") == 1
    assert len(lines) <= 7, "one line of the machine's, one of rank 0's, which waited for rank 1"
    assert time.monotonic() - start_s < SOON_S


@pytest.mark.more
def test_sagemakers_two_machines() -> None:
    """Each starts the same command; localhost and 127.0.0.1 stand for two hosts."""
    port, hosts = free_port(), ["localhost", "127.0.0.1"]
    program = f"""
        import os, torch.distributed as dist
        dist.init_process_group()
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, (os.environ["SM_CURRENT_HOST"], os.environ["LOCAL_RANK"], os.environ["SM_MODEL_DIR"]))
        if dist.get_rank() == 0:
            print(rows, flush=True)
        {END}
    """
    given = {"SM_HOSTS": json.dumps(hosts), "SM_NUM_GPUS": "0", "SM_MODEL_DIR": "/opt/ml/model"}
    started = [
        shardcore_run(program, "--no_local_rank", "--master_port", port, SM_CURRENT_HOST=host, **given)
        for host in reversed(hosts)
    ]
    said = [process.communicate(timeout=SOON_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert said[1][0] == f"{[(host, '0', '/opt/ml/model') for host in hosts]}\n"
    assert said[0][0] == ""


def run_here(*words: str) -> int:
    """The command in this process, for programs that need no torch."""
    start_s = time.monotonic()
    status = cli.main(["run", *words])
    assert time.monotonic() - start_s < 20, "within seconds"
    return status


@pytest.mark.more
def test_errors_come_within_seconds(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("train.py").write_text("import time; time.sleep(100)")
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert run_here("--master_port", port, "train.py") == 2
    assert f"shardcore run: --master_port {port} cannot be used on localhost" in capfd.readouterr().err
    assert run_here("absent.py") == 2
    assert "has no file absent.py" in capfd.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert run_here("--num_gpus", "3", "train.py") == 2
    assert capfd.readouterr().err == "shardcore run: localhost has 2 GPUs, but GPU 2 is asked for; expected 0 to 1\n"
    monkeypatch.setattr(node, "_NAME_OF_SCHEDULER_S", 1.0)
    assert run_here("--num_nodes", "2", "--node_rank", "1", "--master_addr", "none.invalid", "--num_gpus", "1", "train.py") == 2
    assert "the master address none.invalid is unknown" in capfd.readouterr().err


def test_statuses_and_restarts(capfd: Any) -> None:
    Path("train.py").write_text("import sys; sys.exit(7)")
    assert run_here("train.py") == 7
    assert capfd.readouterr().err.splitlines()[-1] == "shardcore run: rank 0 of 1 ended with exit status 7"
    Path("train.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    assert run_here("--num_gpus", "2", "train.py") == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.endswith("ended with exit status 2 (if the program does not take --local_rank: shardcore run --no_local_rank)")
    Path("train.py").write_text(
        "import os; n = int(os.environ['TORCHELASTIC_RESTART_COUNT']); print(n, flush=True); assert n == 2, f'attempt {n}'"
    )
    assert run_here("--max_restarts", "3", "train.py") == 0
    said = capfd.readouterr()
    assert said.out.split() == ["0", "1", "2"]
    assert [line for line in said.err.splitlines() if "attempt" in line and "Error" in line] == [
        "AssertionError: attempt 0", "AssertionError: attempt 1",
    ]  # fmt: skip
    assert run_here("--max_restarts", "1", "train.py") == 1, "each failed, and so does the last"


@pytest.mark.more
def test_ctrl_c() -> None:
    process = shardcore_run("import time; print('here\\n', end='', flush=True); time.sleep(100)", "--num_gpus", "2")
    assert [process.stdout.readline() for _ in range(2)] == ["here\n"] * 2
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SOON_S)
    assert process.returncode == 130
    assert err.splitlines()[1:] == ["shardcore run: ended by SIGINT"]


@pytest.mark.more
def test_nohup_is_respected() -> None:
    """torchrun ends at SIGHUP even where it is to be ignored."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited
    try:
        process = shardcore_run("import time; print('here', flush=True); time.sleep(2); print('there')", "--no_local_rank")
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=SOON_S)
    assert (process.returncode, out) == (0, "there\n"), err


@pytest.mark.more
def test_a_restart_finds_nothing_of_the_attempt_before() -> None:
    """torchrun's ranks may read the addresses of dead ones (torch's issue 135712); here each attempt has a store of its own."""
    process = shardcore_run(f"""
        import os, torch.distributed as dist
        dist.init_process_group()
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        if dist.get_rank() == 0:
            print(os.environ["TORCHELASTIC_RESTART_COUNT"], store.check(["mine"]), flush=True)
            store.set("mine", "1")
        dist.barrier()
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
        {END}
    """, "--num_gpus", "2", "--max_restarts", "1", "--master_port", free_port(), "--no_local_rank")  # fmt: skip
    out, err = process.communicate(timeout=2 * SOON_S)
    assert (process.returncode, out.split("\n")[:-1]) == (0, ["0 False", "1 False"]), err


# --- examples/cluster ---------------------------------------------------------------------------------------------------

# No rank imports torch; that two machines' ranks meet at such an address, test_sagemakers_two_machines shows.
ALL_RANKS = """
    import os, sys
    names = ("NODE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    print(f"{' '.join(os.environ[name] for name in names)} {sys.argv[1:]}\\n", end="", flush=True)
"""


def check_all_ranks(said: str, arguments: list[str]) -> None:
    """Raise AssertionError unless each of two nodes had its rank, and both one address."""
    rows = sorted(line.split(maxsplit=6) for line in said.splitlines())
    assert [row[:4] for row in rows] == [["0", "0", "0", "2"], ["1", "1", "0", "2"]], said
    assert rows[0][4:] == rows[1][4:], said
    assert rows[0][4] in ("localhost", "127.0.0.1"), said
    assert rows[0][6] == str(arguments), said


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Put scripts on PATH, and shardcore."""

    def put(**scripts: str) -> None:
        (tmp_path / "bin").mkdir()
        scripts["shardcore"] = f'exec {sys.executable} -m shardcore "$@"'
        for name, text in scripts.items():
            (tmp_path / "bin" / name).write_text("#!/bin/bash\n" + text)
            (tmp_path / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        Path("train.py").write_text(textwrap.dedent(ALL_RANKS))

    return put


@pytest.mark.more
def test_the_slurm_batch_file(on_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun starts its command once on each of two nodes."""
    on_path(
        scontrol='[ "$*" = "show hostnames node[1-2]" ] && echo -e "localhost\\n127.0.0.1"',
        srun="""[ "$1 $2" = "--kill-on-bad-exit=1 --cpus-per-task=64" ] && shift 2
            for node in 1 0; do SLURM_NODEID=$node NODE=$node SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$node "$@" & done; wait""",
    )
    job = {"JOB_ID": str(int(free_port()) - 15000), "JOB_NODELIST": "node[1-2]", "NNODES": "2", "CPUS_PER_TASK": "64"}
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    done = subprocess.run(
        ["bash", str(ROOT / "examples/cluster/slurm.sbatch"), "train.py", "a b"],
        capture_output=True, text=True, timeout=2 * SOON_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    check_all_ranks(done.stdout, ["a b"])


@pytest.mark.more
def test_the_kubernetes_manifest(on_path: Any) -> None:
    yaml = pytest.importorskip("yaml", reason="reads the manifest")
    on_path()
    job = yaml.safe_load((ROOT / "examples/cluster/pytorchjob.yaml").read_text())
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert sum(part["replicas"] for part in replicas.values()) == 2
    port, started = free_port(), []
    for rank, part in enumerate((replicas["Master"], replicas["Worker"])):
        (container,) = part["template"]["spec"]["containers"]
        shell, option, line = container["command"]
        assert line.count("--num_gpus 8") == 1
        given = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port, "NODE": str(rank)}
        words = [shell, option, line.replace("--num_gpus 8", "--num_gpus 1")]
        started.append(
            subprocess.Popen(words, env=os.environ | given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=2 * SOON_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    check_all_ranks(said[0][0] + said[1][0], ["--checkpoints", "/checkpoints"])
