"""Which rank of how many this process is, from the environment that its launcher (torchrun, mpirun,
srun) sets.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torch.distributed
reads; RANK and WORLD_SIZE take precedence over all others. Open MPI sets OMPI_COMM_WORLD_*; MPICH,
Intel MPI and `srun --mpi=pmi2` set PMI_*. These precede SLURM's variables, since mpirun starts its
helpers on other nodes by srun, whose variables the ranks inherit.

In a batch script SLURM sets SLURM_NTASKS and SLURM_PROCID=0 for the one process that runs there.
Only srun sets SLURM_STEP_NUM_TASKS, the tasks of this step, so that variable counts. (srun(1) and
sbatch(1), "output environment variables".)
"""

import os
import re

# The variable with the number of processes: those with the rank, the local rank and (if any) the
# local world size.
_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "PMI_SIZE": ("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "SLURM_STEP_NUM_TASKS": ("SLURM_PROCID", "SLURM_LOCALID", None),
}


def launched_world_size() -> tuple[str, int]:
    """Return the variable that has the number of ranks, and its value; ("", 1) without one."""
    for name in ("WORLD_SIZE", *_LAUNCHERS):
        if name in os.environ:
            return name, env_int(name)
    return "", 1


def ranks_on_machine() -> int | None:
    """Return how many ranks the launcher started on this machine, as on each other one; None
    where it does not say.
    """
    for name in ("LOCAL_WORLD_SIZE", *(locals_name for *_, locals_name in _LAUNCHERS.values())):
        if name and os.environ.get(name):
            return env_int(name)
    tasks_per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    equal_nodes = re.fullmatch(r"(\d+)(\(x\d+\))?", tasks_per_node)
    return int(equal_nodes[1]) if equal_nodes else None


def follow_launcher(op: str) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun does, if mpirun or
    srun started several ranks.

    Variables that are set are kept, and if RANK or WORLD_SIZE is set nothing changes. Raises
    ValueError, with nothing changed, if the environment lacks what is needed.
    """
    size_name, size = launched_world_size()
    if "RANK" in os.environ or size_name not in _LAUNCHERS or size == 1:
        return
    rank_name, local_name, locals_name = _LAUNCHERS[size_name]
    if rank_name not in os.environ:
        raise ValueError(
            f"{op}: {size_name} is {size}, but {rank_name} is not set. Set both, or RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun does), or WORLD_SIZE=1 for a "
            "single process"
        )
    rank = env_int(rank_name)
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS")
    by_srun = not size_name.startswith("OMPI") and tasks == str(size)
    if by_srun:
        one_node = os.environ.get("SLURM_STEP_NUM_NODES") == "1"
        local_name = local_name if local_name in os.environ else "SLURM_LOCALID"
    else:
        one_node = locals_name is not None and os.environ.get(locals_name) == str(size)
    if local_name in os.environ:
        variables["LOCAL_RANK"] = str(env_int(local_name))
    elif one_node:
        variables["LOCAL_RANK"] = str(rank)
    nodes = os.environ.get("SLURM_STEP_NODELIST" if by_srun else "SLURM_JOB_NODELIST", "")
    if one_node:
        variables["MASTER_ADDR"] = "127.0.0.1"
    elif nodes:
        variables["MASTER_ADDR"] = first_host(nodes)
    elif "MASTER_ADDR" not in os.environ:
        raise ValueError(
            f"{op}: {size_name} is {size}, over several nodes, but MASTER_ADDR is not set. Set it "
            "to the host name of rank 0 (Open MPI: mpirun -x MASTER_ADDR=host ...; Intel MPI and "
            "MPICH: mpirun -genv MASTER_ADDR host ...)"
        )
    variables["MASTER_PORT"] = "29500"  # torchrun's default
    job = os.environ.get("SLURM_JOB_ID", "")
    step = os.environ.get("SLURM_STEP_ID", "") if by_srun else "0"
    if job.isdigit() and step.isdigit():  # a port per step: other jobs may run on the same node
        variables["MASTER_PORT"] = str(15000 + (10 * int(job) + int(step)) % 10000)
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def first_host(nodes: str) -> str:
    """Return the first host in a SLURM node list: gpu003 of "gpu[003-007,9],login1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def env_int(name: str) -> int:
    """Return an environment variable as an int; ValueError if it is not a whole number."""
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable {name} is {text!r}; expected a whole number"
        ) from None
