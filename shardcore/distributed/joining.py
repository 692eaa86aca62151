"""The groups among shard's arguments: how a rank finds the other ranks that train its model."""

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardcore.distributed.comm import Comm
from shardcore.distributed.groups import NotAMemberError
from shardcore.distributed.launchers import ranks_on_machine

logger = logging.getLogger("shardcore")

SLICES = "the mesh of the DTensors"


def join(
    group: dist.ProcessGroup | DeviceMesh | None,
    slices: DeviceMesh | None,
    parts: dist.ProcessGroup | DeviceMesh | None,
    ranks_per_node: int | None,
    gpu: torch.device | None,
) -> tuple[Comm, Exception | None]:
    """Return (Comm(group, ranks_per_node, gpu), None). If that fails, return a Comm over which the
    error can be sent, and the error.

    slices: the mesh over which parameters are sliced. parts: the model_parallel_group. A rank that
    is not in a group raises at once: no other rank waits for it.
    """
    problem: Exception | None = None
    for arguments in ((group, ranks_per_node, gpu), (group, None, gpu)):
        try:
            comm = Comm(*arguments)
            break
        except NotAMemberError:
            raise
        except Exception as error:  # of any kind: torch's, where `group` is none
            problem = problem or error
    else:
        comm = Comm()
    for name, other_group in ((SLICES, slices), ("model_parallel_group", parts)):
        if other_group is None:
            continue
        try:
            comm.across = [*comm.across, _across([comm, *comm.across], name, other_group, gpu)]
            if name == SLICES:
                comm.slices = comm.across
        except NotAMemberError:
            raise
        except Exception as error:
            problem = problem or error
    return comm, problem


def _across(
    joined: Sequence[Comm],
    name: str,
    group: dist.ProcessGroup | DeviceMesh,
    gpu: torch.device | None,
) -> Comm:
    """Return a Comm over `group`, the ranks with other parts of the model. joined: the Comms that
    were joined before.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"shard: {name} is a mesh of {group.ndim} dimensions; expected one of 1 "
                f"(mesh[...]._flatten())"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"shard: {name} is {group!r}; expected a process group with this rank, or a "
            f"DeviceMesh of 1 dimension"
        )
    for comm in joined:
        assert comm.group is not None
        common = set(dist.get_process_group_ranks(comm.group)) & set(
            dist.get_process_group_ranks(group)
        )
        if common != {dist.get_rank()} and name == SLICES:
            raise ValueError(
                f"shard: the model is already sharded (DTensor) over the ranks {sorted(common)}, "
                "and process_group includes them; expected an ordinary model, or tensor-parallel "
                "slices over another dimension of the mesh (process_group=mesh['dp'] beside "
                "parallelize_module(model, mesh['tp'], plan))"
            )
        if common != {dist.get_rank()}:
            raise ValueError(
                f"shard: {'process_group' if comm is joined[0] else SLICES} and {name} share the "
                f"ranks {sorted(common)}; expected this rank, {dist.get_rank()}, alone. "
                "process_group consists of the ranks with the same part of the model, the other "
                "group of the ranks with the other parts"
            )
    return Comm(group, gpu=gpu)


_advised = False  # of ranks_per_node, in this process


def advise_nodes(comm: Comm, backend_sums: bool) -> None:
    """Advise once to set ranks_per_node, if gradients are exchanged over several nodes as over one:
    much of that exchange is exposed.
    """
    global _advised
    local = ranks_on_machine() or comm.world_size
    if _advised or comm.rank != 0 or not comm.uses_nccl or backend_sums:
        return
    flat = comm.topology.nodes == 1 and comm.world_size == dist.get_world_size()
    equal_nodes = 1 < local < comm.world_size and comm.world_size % local == 0
    if flat and equal_nodes:
        _advised = True
        logger.warning(
            "shard: gradients are exchanged over all %d ranks at once, of which %d share a node; "
            "expected ranks_per_node=%d, "
            "which sends less between nodes (its own bits, the same at every stage), or "
            'reduction="nccl" (docs/scaling.md)',
            comm.world_size,
            local,
            local,
        )
