"""shardcore run as users type it: what is planned, real ranks, SageMaker's variables, and errors
that come at once.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardcore import cli
from shardcore.launch import run_command as command
from shardcore.launch.node import ENDING, NodePlan
from tests.support.ranks import free_port, start
from tests.support.scripts import ROOT, run_forked, run_here

SOON_S = 90.0  # for what takes five seconds on a quiet machine
HOSTS = "w0 slots=2\nw1 slots=4\n"
# At the end of a program that ends well: while the interpreter ends a thread of gloo's may abort it
# (see scripts.finished).
END = "os._exit(0)"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No launcher's variables, no hostfile of this machine."""
    for name in [
        name
        for name in os.environ
        if name.startswith(("SM_", "SLURM_", "OMPI_", "PMI_", "CUDA_VISIBLE"))
    ]:
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
    return plans_of([*words, "train.py", "--num_gpus", "9", "x"])


def plans_of(words: list[str]) -> list[NodePlan]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.plan(parser.parse_args(words))


def slots(*words: str) -> dict[str, list[int]]:
    return {plan.host: list(plan.own_slots) for plan in plans("--master_addr", "w0", *words)}


# --- what is planned ------------------------------------------------------------------------------


def test_this_machine() -> None:
    (plan,) = plans()
    assert plan == NodePlan(
        slots=[[0]], node_rank=0, program=["train.py", "--num_gpus", "9", "x"]
    ), "the program's own option"
    assert plans("--num_gpus", "3")[0].slots == [[0, 1, 2]]
    for spelling in ("--num_accelerators=3", "--nproc_per_node=3", "--nproc-per-node=3"):
        assert plans(spelling)[0].slots == [[0, 1, 2]]
    assert plans("--include", "localhost:1")[0].slots == [[1]]
    (plan,) = plans(
        "-m",
        "--max-restarts",
        "2",
        "--bind_cores_to_rank",
        "--bind_core_list",
        "0-2,5",
        "--no_numa_binding",
    )
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
    assert (plan.kind, plan.local_rank, plan.master_port, plan.as_deepspeed) == (
        "program",
        False,
        1234,
        False,
    )


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert plans()[0].slots == [[0, 1, 2, 3]]
    for word in ("gpu", "auto"):
        assert plans("--nproc-per-node", word)[0].slots == [[0, 1, 2, 3]]
    assert plans("--exclude", "localhost:0,2")[0].slots == [[1, 3]]
    with pytest.raises(
        ValueError, match="--include names slot 4 of localhost; expected one of 0 to 3"
    ):
        plans("--include", "localhost:4")


def test_hostfiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert slots("--hostfile", "hosts") == {"w0": [0, 1], "w1": [0, 1, 2, 3]}
    assert slots("-H", "hosts", "-i", "w1:3") == {"w1": [3]}
    assert slots("-H", "hosts", "--num_nodes", "1") == {"w0": [0, 1]}
    assert slots("-H", "hosts", "--num_gpus", "1") == {"w0": [0], "w1": [0]}
    first, second = plans("-H", "hosts", "--master_addr", "a")
    assert (first.node_rank, second.node_rank, second.slots, second.world_size) == (
        0,
        1,
        [[0, 1], [0, 1, 2, 3]],
        6,
    )
    assert (second.master_addr, second.master_port) == ("a", command.PORT)
    monkeypatch.setattr(command, "address_of", lambda host, port: f"of {host} {port}")
    assert plans("-H", "hosts", "--ssh_port", "7")[1].master_addr == "of w0 7"
    (plan,) = plans("-H", "hosts", "--node_rank", "1", "--no_ssh")
    assert (plan.own_slots, plan.master_addr, plan.started_alone) == ([0, 1, 2, 3], "w0", True)
    (tmp_path / "named").write_text("me@w0 slots=2\nw1 slots=4\n")
    assert plans("-H", "named", "--node_rank", "1")[0].master_addr == "w0"
    monkeypatch.setattr(command, "HOSTFILE", tmp_path / "hosts")
    assert slots() == slots("--hostfile", "hosts"), "DeepSpeed's usual place"


def test_sagemaker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HOSTS": '["algo-1", "algo-2"]',
        "CURRENT_HOST": "algo-2",
        "NUM_GPUS": "4",
    }.items():
        monkeypatch.setenv(f"SM_{name}", value)
    (plan,) = plans()
    assert (plan.slots, plan.node_rank, plan.master_addr, plan.host) == (
        [[0, 1, 2, 3]] * 2,
        1,
        "algo-1",
        "algo-2",
    )
    assert plan.started_alone
    assert plan.master_port == command.PORT, "each machine plans by itself: one port for all"
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
    with pytest.raises(
        ValueError, match="SM_CURRENT_HOST 'algo-3'; expected a JSON list of hosts, and one of them"
    ):
        plans()
    assert list(slots("-H", "hosts")) == ["w0", "w1"], "a hostfile comes first"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--num_gpus", "0"], "--num_gpus is 0; expected at least 1"),
        (["--nproc-per-node", "0"], "error: --nproc-per-node is 0; expected at least 1"),
        (["--nproc-per-node=cpu"], "error: --nproc-per-node is cpu; expected a whole number"),
        (["--master_port", "gpu"], "error: --master_port is gpu; expected a whole number"),
        (["--nnodes", "1:4"], "--nnodes is 1:4; elastic ranges are not supported. Give one number"),
        (["--nproc", "2"], "unknown option --nproc; use --num_gpus"),
        (["--gpus=2"], "unknown option --gpus; use --num_gpus"),
        (["--nnodes", "2"], "--num_nodes is 2 but there is no hostfile"),
        (["--standalone"], "unknown option --standalone; leave it out"),
        (["--rdzv-endpoint=h:1"], "unknown option --rdzv-endpoint; use --master_addr"),
        (["--num_processes", "2"], "unknown option --num_processes; use --num_gpus"),
        (["-np", "2"], "unknown option -np; use --num_gpus"),
        (["--num_gpu", "2"], "unknown option --num_gpu; did you mean '--num_gpus'?"),
        (["--zzz"], "unknown option --zzz; see shardcore run --help"),
        (["--max_restarts", "-1"], "--max_restarts is -1; expected at least 0"),
        (["--master_port", "70000"], "--master_port is 70000; expected at most 65535"),
        (
            ["--num_nodes", "2"],
            "--num_nodes is 2 but there is no hostfile; expected --hostfile, or --node_rank",
        ),
        (["-m", "--no_python"], "--module and --no_python are both given"),
        (["--bind_core_list", "0"], "--bind_core_list is given without --bind_cores_to_rank"),
        (
            ["--bind_cores_to_rank", "--bind_core_list", "3-1"],
            "'3-1' has '3-1'; expected numbers and ranges",
        ),
        (["--include", "localhost", "--num_gpus", "1"], "expected one way to choose"),
        (["--include", "w7"], "--include names the host 'w7'; expected one of localhost"),
        (["--hostfile", "nowhere"], "nowhere"),
        (["--no_ssh"], "--no_ssh is given without --node_rank"),
        (["--ssh_port", "22"], "nothing is reached by ssh"),
        (["--node_rank", "1", "--num_nodes", "2"], "--node_rank is given without --master_addr"),
        (
            ["--node_rank", "2", "--num_nodes", "2", "--master_addr", "a"],
            "but there are 2 nodes; expected 0 to 1",
        ),
        (
            ["--node_rank", "0", "--num_nodes", "2", "--master_addr", "a", "--max_restarts", "1"],
            "was started by itself",
        ),
    ],
)
def test_what_is_refused(words: list[str], text: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", *words, "train.py"])
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "usage: shardcore run [OPTIONS] PROGRAM [ARGUMENTS]"
    assert lines[-1].startswith("shardcore run: error: ")
    assert "error: run: " not in lines[-1]
    assert text in lines[-1]


def test_without_a_program(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run"])
    assert capsys.readouterr().err.endswith("the following arguments are required: PROGRAM\n")


def test_inside_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(
        ValueError, match=r"one of 4 that another launcher has started \(SLURM_STEP_NUM_TASKS\)"
    ):
        plans()
    assert plans("--node_rank", "0", "--num_nodes", "4", "--master_addr", "a")[0].slots == [[0]] * 4


# --- real ranks -----------------------------------------------------------------------------------


class Command:
    """`shardcore run` in a process that has imported torch already; what it and its ranks print
    goes to files.
    """

    def __init__(
        self, program: str, *words: str, arguments: tuple[str, ...] = (), **environment: str
    ) -> None:
        folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
        (folder / "train.py").write_text(textwrap.dedent(program))
        self.output = folder / "out"
        variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        self.process = start(
            run_here,
            "shardcore",
            ("run", *words, "train.py", *arguments),
            variables,
            folder,
            self.output,
        )

    def ended(self) -> tuple[int, str, str]:
        """Wait for its end; return its exit status, standard output and standard error."""
        self.process.join(SOON_S)
        self.process.kill()
        return (
            self.process.exitcode,
            self.output.read_text(),
            self.output.with_suffix(".err").read_text(),
        )


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
    model, optimizer = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), stage=3)
    torch.manual_seed(dist.get_rank())
    for _ in range(options.steps):
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = model.state_dict()["weight"]
        print(f"{dist.get_rank()} {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}\\n", end="", flush=True)
    if dist.get_rank() == 1:
        raise ValueError("boom")
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.more
def test_ranks_train_as_with_torchruns_variables_and_a_traceback_is_the_last_thing_on_the_screen_once() -> (
    None
):
    status, out, err = Command(TRAINING, "--num_gpus", "2", arguments=("--steps", "2")).ended()
    hashes = sorted(out.splitlines())
    assert len({line[2:] for line in hashes}) == 2, "each step changes the weights"
    assert [f"{rank} {line[2:]}" for rank in (0, 1) for line in hashes[:2]] == hashes
    lines = err.splitlines()
    assert lines[0] == "shardcore run: torch finds no GPU on localhost: 2 on its CPU, over gloo"
    assert lines[-5:-2] == [
        "shardcore run: rank 1 of 2 failed:",
        "Traceback (most recent call last):",
        '  File "train.py", line 20, in <module>',
    ]
    assert lines[-2:] == ['    raise ValueError("boom")', "ValueError: boom"]
    assert (status, err.count("boom"), err.count("Traceback")) == (1, 2, 1)
    assert len(lines) <= 7, "one line of the machine's, one of rank 0's, which waited for rank 1"
    Path("train.py").write_text(textwrap.dedent(TRAINING).replace("options.local_rank ==", "0 <="))
    assert (
        sorted(
            run_forked(
                Path("train.py"), "--steps", "2", ranks=2, folder=Path.cwd(), status=1
            ).splitlines()
        )
        == hashes
    )


TWICE = """
    import os, sys, torch, torch.distributed as dist, shardcore
    from torch.utils.data import DataLoader
    dist.init_process_group()
    torch.manual_seed(0)
    frozen = torch.nn.Linear(8, 8).requires_grad_(False)
    shardcore.shard(frozen, None, stage=3)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    model, optimizer = shardcore.shard(model, torch.optim.AdamW(model.parameters()), stage=3, units=[*model])
    other = torch.nn.Linear(8, 8)
    other, of_other = shardcore.shard(other, torch.optim.AdamW(other.parameters()))
    folder = os.environ["SHARDCORE_DIGESTS"]
    name = os.path.basename(folder)
    metrics = shardcore.Metrics(model, name, digests=1, log=False)
    try:
        for step, x in enumerate(DataLoader(torch.randn(40, 8), batch_size=4, num_workers=1), 1):
            other(x).sum().backward()
            of_other.step()
            of_other.zero_grad()
            if step == 2 and name == "second" and "wrong" in sys.argv and dist.get_rank() == 1:
                model[1].register_forward_hook(
                    lambda module, args, y: y.register_hook(lambda grad: grad * 1.5) and None
                )
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            metrics.step(loss=loss)
            optimizer.zero_grad()
            print(f"step {step}\\n", end="", flush=True)  # in one write
    finally:
        print("the program ends", flush=True)
"""


@pytest.mark.more
def test_twice_ends_both_runs_after_the_steps_and_names_what_differs() -> None:
    """The program has a frozen model, a second optimizer, and digests of its own."""
    words = ("--num_gpus", "2", "--no_local_rank", "--twice", "3")
    status, out, err = Command(TWICE, *words).ended()
    equal = "equal: 3 steps, 1 to 3; not compared: losses, which are not recorded"
    assert (status, out.splitlines()[-1]) == (0, equal), err
    assert sorted(out.splitlines()[:-1]) == ["step 1"] * 4 + ["step 2"] * 4, "each ends in its step"
    assert "shardcore run: second of two runs, of 3 steps each" in err
    status, out, err = Command(TWICE, *words, arguments=("wrong",)).ended()
    assert status == 1, err
    said = out.splitlines()[-1]
    assert said.startswith(
        "step 2: the local gradients of 1 differ on ranks [1]; all outputs agree"
    )


SHORT = """
    import os, sys, torch, torch.distributed as dist, shardcore
    dist.init_process_group()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    model, optimizer = shardcore.shard(model, torch.optim.AdamW(model.parameters()))
    second = os.path.basename(os.environ["SHARDCORE_DIGESTS"]) == "second"
    for step in range(int(sys.argv[1]) if second else 3):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.more
def test_twice_counts_the_steps_of_both_runs() -> None:
    """The program finds its own files in the second run, and has less or nothing to do."""
    words = ("--num_gpus", "1", "--no_local_rank", "--twice", "3")
    status, out, err = Command(SHORT, *words, arguments=("2",)).ended()
    said = "the first run makes 3 steps, and the second 2; steps of both agree\n"
    assert (status, out) == (1, said), err
    status, out, err = Command(SHORT, *words, arguments=("0",)).ended()
    assert (status, out) == (2, ""), err
    assert "the second run ended without a step of an optimizer" in err


def test_twice_says_why_it_compares_nothing(capfd: Any) -> None:
    Path("train.py").write_text("import sys; sys.exit(7)")
    assert run_in_this_process("--twice", "3", "train.py") == 7
    assert "second" not in capfd.readouterr().err
    Path("train.py").write_text("")
    with pytest.raises(SystemExit):
        run_in_this_process("--twice", "3", "train.py")
    assert "ended without a step of an optimizer" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        run_in_this_process(
            "--twice", "3", "--hostfile", "hosts", "--master_addr", "w0", "train.py"
        )
    assert "--twice is given for 2 machines; expected one" in capfd.readouterr().err
    assert "SHARDCORE_DIGESTS" not in os.environ


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
    variables = {"SM_HOSTS": json.dumps(hosts), "SM_NUM_GPUS": "0", "SM_MODEL_DIR": "/opt/ml/model"}
    options = ("--no_local_rank", "--master_port", port)
    started = [
        Command(program, *options, SM_CURRENT_HOST=host, **variables) for host in reversed(hosts)
    ]
    second, first = (command.ended() for command in started)
    assert first[:2] == (0, f"{[(host, '0', '/opt/ml/model') for host in hosts]}\n"), first
    assert second[:2] == (0, ""), second


def run_in_this_process(*words: str) -> int:
    """The command in this process, for programs that need no torch."""
    start_s = time.monotonic()
    status = cli.main(["run", *words])
    assert time.monotonic() - start_s < 20, "within seconds"
    return status


def test_statuses_and_restarts(capfd: Any) -> None:
    assert run_in_this_process("absent.py") == 2
    assert "shardcore run: localhost has no file absent.py in " in capfd.readouterr().err
    Path("train.py").write_text("import sys; sys.exit(7)")
    assert run_in_this_process("train.py") == 7
    assert (
        capfd.readouterr().err.splitlines()[-1]
        == "shardcore run: rank 0 of 1 ended with exit status 7"
    )
    Path("train.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    assert run_in_this_process("--num_gpus", "2", "train.py") == 2
    printed = capfd.readouterr().err.splitlines()[-1]
    assert printed.endswith(
        "ended with exit status 2 (if the program does not take --local_rank: shardcore run "
        "--no_local_rank)"
    )
    Path("train.py").write_text(
        "import os; n = int(os.environ['TORCHELASTIC_RESTART_COUNT']); print(n, flush=True); "
        "assert n == 2, f'attempt {n}'"
    )
    assert run_in_this_process("--max_restarts", "3", "train.py") == 0
    printed = capfd.readouterr()
    assert printed.out.split() == ["0", "1", "2"]
    assert [line for line in printed.err.splitlines() if "attempt" in line and "Error" in line] == [
        "AssertionError: attempt 0",
        "AssertionError: attempt 1",
    ]
    assert run_in_this_process("--max_restarts", "1", "train.py") == 1, (
        "each failed, and so does the last"
    )


@pytest.mark.more
def test_nohup_is_respected_and_ctrl_c_ends_the_ranks() -> None:
    """torchrun ends at SIGHUP even where it is to be ignored."""
    Path("nohup.py").write_text(
        "import runpy, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "runpy.run_module('shardcore', run_name='__main__')"
    )
    Path("train.py").write_text(
        "import time; print('here\\n', end='', flush=True); time.sleep(100)"
    )
    output, words = (
        Path("out").absolute(),
        ("run", "--num_gpus", "2", "--no_local_rank", "train.py"),
    )
    process = start(
        run_here,
        Path("nohup.py"),
        words,
        os.environ | {"PYTHONPATH": str(ROOT)},
        Path.cwd(),
        output,
    )
    until = time.monotonic() + SOON_S
    while not output.exists() or output.read_text() != "here\nhere\n":
        assert time.monotonic() < until
        time.sleep(0.05)
    for number in (signal.SIGHUP, signal.SIGINT):
        os.kill(process.pid, number)
        time.sleep(0.2)
    process.join(SOON_S)
    assert process.exitcode == 130
    assert output.with_suffix(".err").read_text().splitlines()[1:] == [
        "shardcore run: ended by SIGINT"
    ]


@pytest.mark.more
def test_a_restart_finds_nothing_of_the_attempt_before(
    capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's ranks may read the addresses of dead ones (torch's issue 135712); here each
    attempt has a store of its own.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("train.py").write_text(
        textwrap.dedent(f"""
        import os, torch.distributed as dist
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        print(os.environ["TORCHELASTIC_RESTART_COUNT"], store.check(["mine"]), flush=True)
        store.set("mine", "1")
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
        {END}
    """)
    )
    assert (
        run_in_this_process(
            "--max_restarts", "1", "--master_port", free_port(), "--no_local_rank", "train.py"
        )
        == 0
    )
    assert capfd.readouterr().out.splitlines() == ["0 False", "1 False"]


# --- examples/cluster -----------------------------------------------------------------------------


RECORDS = """
import json, os, sys
with open("run." + os.environ["NODE"], "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
"""


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run a command with these scripts on PATH, and return what each `shardcore run` of its
    would run, by node.
    """

    def run(
        command: list[str], environments: list[dict[str, str]], **scripts: str
    ) -> list[NodePlan]:
        (tmp_path / "bin").mkdir(exist_ok=True)
        scripts["shardcore"] = f"#!{sys.executable} -S\n{RECORDS}"
        for name, text in scripts.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
        for environment in environments:
            variables = (
                os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"} | environment
            )
            subprocess.run(command, env=variables, check=True, timeout=SOON_S)
        node_plans = []
        for file in sorted(tmp_path.glob("run.*")):
            words, environment = json.loads(file.read_text())
            assert words.pop(0) == "run"
            with monkeypatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                node_plans += plans_of(words)
        return node_plans

    return run


def check_two_nodes(
    plans: list[NodePlan], gpus: int, program: list[str], address: tuple[str, int]
) -> None:
    """Raise AssertionError unless two nodes run the program, with one address; that ranks meet
    there, SageMaker's show.
    """
    first, second = plans
    assert (first.node_rank, second.node_rank) == (0, 1)
    assert replace(first, node_rank=1) == second
    assert (first.slots, first.program) == ([list(range(gpus))] * 2, program)
    assert (first.master_addr, first.master_port) == address
    assert (first.local_rank, first.started_alone) == (False, True)


def test_the_slurm_batch_file(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """srun starts its command once on each of two nodes."""
    scontrol = '#!/bin/bash\n[ "$*" = "show hostnames node[1-2]" ] && echo -e "node1\\nnode2"'
    srun = """#!/bin/bash
        [ "$1 $2" = "--kill-on-bad-exit=1 --cpus-per-task=64" ] && shift 2
        for node in 1 0; do SLURM_NODEID=$node NODE=$node SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$node "$@"; done"""
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "64",
    }
    command = ["bash", str(ROOT / "examples/cluster/slurm.sbatch"), "train.py", "a b"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    check_two_nodes(
        planned(command, [job], scontrol=scontrol, srun=srun),
        8,
        ["train.py", "a b"],
        ("node1", 15007),
    )


def test_the_kubernetes_manifest(planned: Any) -> None:
    yaml = pytest.importorskip("yaml", reason="reads the manifest")
    replicas = yaml.safe_load((ROOT / "examples/cluster/pytorchjob.yaml").read_text())["spec"][
        "pytorchReplicaSpecs"
    ]
    assert [replicas[name]["replicas"] for name in ("Master", "Worker")] == [1, 1]
    node_plans = []
    for rank, part in enumerate((replicas["Master"], replicas["Worker"])):
        (container,) = part["template"]["spec"]["containers"]
        pod = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "job-master-0",
            "MASTER_PORT": "23456",
            "NODE": str(rank),
        }
        node_plans = planned(container["command"], [pod])
    check_two_nodes(
        node_plans, 8, ["train.py", "--checkpoints", "/checkpoints"], ("job-master-0", 23456)
    )
