"""Ranks that mpirun or srun started, as their variables say; and environments that name several
tasks but start no ranks.
"""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore.distributed.launchers import first_host, follow_launcher, ranks_on_machine
from tests.support.deepspeed import ds_config, start, train
from tests.support.models import hash_of_training, make_net
from tests.support.ranks import context, free_port, run_ranks
from tests.support.ranks import start as start_process

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
FOREIGN = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_", "PMI_", "MPI_LOCAL", "SLURM_")


def of_open_mpi(rank: int, size: int, here: int | None = None) -> dict[str, str]:
    here = size if here is None else here
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank % here, "LOCAL_SIZE": here}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}


def of_mpich(rank: int, size: int) -> dict[str, str]:
    return {
        "PMI_RANK": f"{rank}",
        "PMI_SIZE": f"{size}",
        "MPI_LOCALRANKID": f"{rank}",
        "MPI_LOCALNRANKS": f"{size}",
    }


def of_srun(rank: int, size: int, nodes: int = 1) -> dict[str, str]:
    """What a task of `srun -n size` finds; the job has more tasks than this step."""
    job = {"SLURM_JOB_ID": "123456", "SLURM_NTASKS": "64", "SLURM_JOB_NODELIST": "n[01-08]"}
    step = {
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_TASKS": f"{size}",
        "SLURM_STEP_NUM_NODES": f"{nodes}",
    }
    place = {
        "SLURM_STEP_NODELIST": "n[05-06]",
        "SLURM_PROCID": f"{rank}",
        "SLURM_LOCALID": f"{rank % (size // nodes)}",
    }
    return job | step | place


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without a launcher, as it is again afterwards."""
    for name in [name for name in os.environ if name in TORCHRUN or name.startswith(FOREIGN)]:
        monkeypatch.delenv(name)
    for name in TORCHRUN:  # so that monkeypatch takes them away, if the test sets them
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def _train(rank: int, world_size: int) -> str:
    torch.set_num_threads(1)
    engine = start(ds_config(2))
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    train(engine, rank, 2)
    return hash_of_training(engine, engine.optimizer)


def _launched(pipe: Any, variables: dict[str, str], rank: int, world_size: int) -> None:
    for name in [name for name in os.environ if name in TORCHRUN or name.startswith(FOREIGN)]:
        del os.environ[name]
    os.environ.update(variables)
    value = _train(rank, world_size)
    pipe.send((value, [os.environ[name] for name in TORCHRUN]))
    dist.destroy_process_group()


def test_initialize_starts_the_ranks_of_mpirun() -> None:
    """Of srun, too: what it sets is the next test's."""
    expected, port = run_ranks(2, _train), free_port()
    answers = []
    for rank in range(2):
        ours, theirs = context.Pipe()
        answers.append(
            (
                start_process(
                    _launched, theirs, of_open_mpi(rank, 2) | {"MASTER_PORT": port}, rank, 2
                ),
                ours,
            )
        )
    try:
        for rank, (_, pipe) in enumerate(answers):
            assert pipe.poll(60), "no answer in time"
            assert pipe.recv() == (expected[rank], [str(rank), "2", str(rank), "127.0.0.1", port])
    finally:
        for process, _ in answers:
            process.join(10)
            process.kill()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (of_open_mpi(1, 2), ("1", "2", "1", "127.0.0.1", "29500")),
        (of_open_mpi(5, 8, here=4) | {"MASTER_ADDR": "gpu7"}, ("5", "8", "1", "gpu7", "29500")),
        (of_mpich(1, 2), ("1", "2", "1", "127.0.0.1", "29500")),
        (of_srun(3, 4), ("3", "4", "3", "127.0.0.1", "19563")),
        (of_srun(3, 4, nodes=2), ("3", "4", "1", "n05", "19563")),
        # srun --mpi=pmi2
        (
            of_srun(3, 4, nodes=2) | {"PMI_RANK": "3", "PMI_SIZE": "4"},
            ("3", "4", "1", "n05", "19563"),
        ),
        # mpirun over the nodes of a job: srun started one of its helpers on each node but the first
        (of_srun(1, 7, nodes=7) | of_open_mpi(9, 32, here=4), ("9", "32", "1", "n01", "19560")),
    ],
)
def test_what_torchrun_would_have_set(
    environment: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[str, ...]
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    follow_launcher("initialize")
    assert tuple(os.environ[name] for name in TORCHRUN) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (of_srun(3, 8, nodes=2) | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        (of_srun(3, 4) | {"SLURM_STEP_TASKS_PER_NODE": "4"}, 4),
        (of_srun(3, 8, nodes=2) | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, None),
        # torchrun on each node
        (
            of_srun(1, 2, nodes=2)
            | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "LOCAL_WORLD_SIZE": "8"},
            8,
        ),
        (
            of_srun(1, 7, nodes=7)
            | {"SLURM_STEP_TASKS_PER_NODE": "1(x7)"}
            | of_open_mpi(9, 32, here=4),
            4,
        ),
        (of_mpich(1, 2), 2),
    ],
)
def test_ranks_of_a_machine(
    environment: pytest.MonkeyPatch, variables: dict[str, str], expected: int | None
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    assert ranks_on_machine() == expected


@pytest.mark.parametrize(
    "variables",
    [
        # sbatch
        {
            "SLURM_JOB_ID": "123",
            "SLURM_NTASKS": "8",
            "SLURM_NPROCS": "8",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },
        of_srun(0, 1),  # salloc's shell, where it is a step
        of_open_mpi(0, 1),
        of_open_mpi(1, 2) | {"WORLD_SIZE": "1"},  # each for itself
        of_srun(3, 4) | {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1"},
    ],
)
def test_one_process_of_a_job_trains_alone(
    environment: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    if "RANK" in variables:
        environment.setenv("MASTER_PORT", free_port())
    try:
        start(ds_config())
        assert dist.is_initialized() == ("RANK" in variables)
        model = make_net()
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_SIZE is 2, but OMPI_COMM_WORLD_RANK is not set",
        ),
        (
            of_open_mpi(1, 4, here=2),
            "is 4, over several nodes, but MASTER_ADDR is not set. Set it to the host name",
        ),
        (
            {"PMI_SIZE": "many"},
            "the environment variable PMI_SIZE is 'many'; expected a whole number",
        ),
    ],
)
def test_ranks_that_cannot_find_each_other_are_refused(
    environment: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        start(ds_config())
    assert not {"RANK", "WORLD_SIZE"} & set(os.environ)


def test_shard_without_a_group_is_refused(environment: pytest.MonkeyPatch) -> None:
    for name, value in of_srun(1, 2).items():
        environment.setenv(name, value)
    model = make_net()
    with pytest.raises(
        ValueError,
        match=r"is 2 but torch.distributed is not initialized .*call shardcore.initialize\(\) or",
    ):
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()))


def test_the_first_host_of_a_list() -> None:
    lists = {
        "n1": "n1",
        "n1,n2": "n1",
        "gpu[003-007,9],a": "gpu003",
        "r[2,4]-n[08-09]-x": "r2-n08-x",
        "a,b[1-2]": "a",
    }
    assert {nodes: first_host(nodes) for nodes in lists} == lists


def test_a_backend_that_is_named_is_started_in_the_same_way(
    environment: pytest.MonkeyPatch,
) -> None:
    shardcore.init_distributed("gloo")
    assert not dist.is_initialized(), "one process alone"
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        environment.setenv(name, value)
    try:
        shardcore.init_distributed("gloo", distributed_port=int(free_port()))
        assert dist.get_backend() == "gloo"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
