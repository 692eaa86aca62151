"""Process groups: of meshes, and those made beside the user's group, each of which one engine at a time takes."""

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardcore.distributed.launchers import env_int

logger = logging.getLogger("shardcore")

MAKING = timedelta(minutes=2)  # how long ranks may take, at most, to make a gloo group beside NCCL before they do without


class NotAMemberError(ValueError):
    """A rank was given a group of others."""


@dataclass
class GroupSlot:
    """A process group that one engine at a time takes; `group` is None for the one that the user gave.

    host: the group of the same ranks on which they tell each other what lies in host memory, if `group` has no gloo for that.
    in_backward: one has begun and not ended. broken: what was raised when a wait failed. spoiled: one did, or a backward was
    left: messages that nobody took may lie there. left: what an engine that is gone left on its way; gloo breaks a connection
    if that loses its memory.
    """

    group: dist.ProcessGroup | None
    host: dist.ProcessGroup | None = None
    met: bool = False
    taken: bool = False
    in_backward: bool = False
    broken: str = ""
    spoiled: bool = False
    left: list[Any] = field(default_factory=list)

    def release(self, on_way: list[Any]) -> None:
        """Leave it to the next engine, unless what this one left there, `on_way` or not, would meet that one's messages."""
        self.left += filter(None, on_way)
        self.taken = self.in_backward or self.spoiled or bool(self.left)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend for each kind of device. (init_process_group() without a name chooses one that get_backend hides.)"""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def own_gpu() -> torch.device:
    """Return the GPU of this rank where no tensor tells: the one bound to it (`device_id=`), the current one, LOCAL_RANK's.

    The current one counts if it is not 0, since then someone chose it. A rank that sees one GPU alone, as schedulers give them,
    uses that. Raises ValueError if LOCAL_RANK is none of those that it sees.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is not None and world.bound_device_id is not None:
        return world.bound_device_id
    chosen, count = torch.cuda.current_device(), torch.cuda.device_count()
    if chosen != 0 or "LOCAL_RANK" not in os.environ or count == 1:
        return torch.device("cuda", chosen)
    local = env_int("LOCAL_RANK")
    if not 0 <= local < count:
        raise ValueError(
            f"LOCAL_RANK is {local} but this machine has {count} CUDA devices; expected a process for each device at most"
        )
    return torch.device("cuda", local)


def use_own_gpu() -> torch.device | None:
    """Make this rank's GPU the current one and return it; None where nothing tells which it is, or where ranks use no NCCL."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    told = "LOCAL_RANK" in os.environ or (world is not None and world.bound_device_id is not None)
    if not told or not torch.cuda.is_available() or (world is not None and backends_of(world).get("cuda") != "nccl"):
        return None
    device = own_gpu()
    torch.cuda.set_device(device)
    return device


# The groups made beside each user's group, in the same order on every rank.
_slots: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[GroupSlot]]" = weakref.WeakKeyDictionary()


def slots_of(group: dist.ProcessGroup) -> list[GroupSlot]:
    """Return the slots of the user's `group`: itself first, then the groups made beside it; new ones are added to this list."""
    return _slots.setdefault(group, [GroupSlot(None)])


def taken_slots() -> Iterator[GroupSlot]:
    """Iterate over the slots that engines have taken."""
    return (slot for slots in _slots.values() for slot in slots if slot.taken)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return how long collectives of `group` on `device` wait."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def group_beside(
    like: dist.ProcessGroup,
    ranks: Sequence[int],
    device: torch.device,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Make a group of `ranks`, with the backend and the timeout of `like` unless others are given.

    Collective over these ranks alone. Of a part of the world, torch up to 2.13 needs ranks that are in equally many groups (it
    names the group by that); newer ones need all ranks of the world to have made equally many.
    """
    world = dist.group.WORLD
    assert world is not None
    part, bound = len(ranks) < world.size(), world.bound_device_id
    if part:  # with a bound device torch would split the world's NCCL communicator, which waits for every rank of the world
        world.bound_device_id = None
    try:
        group: dist.ProcessGroup | None = dist.new_group(
            ranks,
            timeout=timeout or timeout_of(like, device),
            backend=backend or dist.get_backend(like),
            use_local_synchronization=part,
        )
    finally:
        world.bound_device_id = bound
    assert group is not None
    return group


def host_group_beside(
    like: dist.ProcessGroup, device: torch.device, gather_json: Callable[[Any], list[Any]]
) -> dist.ProcessGroup | None:
    """Make a gloo group of the ranks of `like`, with its timeout; None on every rank, with a warning, if one cannot.

    Collective. gather_json: Comm's, over `like`.
    """
    ranks, timeout = dist.get_process_group_ranks(like), timeout_of(like, device)
    group, problem = None, ""
    try:  # half of the timeout at most: a rank that fails waits for the others on NCCL, whose watchdog must not come first
        group = group_beside(like, ranks, device, "gloo", min(timeout / 2, MAKING))
        backend: Any = group._get_backend(torch.device("cpu"))
        getattr(backend, "wrapped_pg", backend)._set_default_timeout(timeout)
    except Exception as error:  # of any kind: the other ranks are waiting
        problem = f"{type(error).__name__}: {error}"
    said = gather_json(problem)
    if not any(said):
        return group
    if group is not None:
        dist.destroy_process_group(group)
    if dist.get_rank(like) == 0:
        failed = [rank for rank, text in enumerate(said) if text]
        logger.warning(
            "shard: the process group has NCCL alone, and no gloo group of its ranks could be made beside it (on %d of %d "
            "ranks; on rank %d: %s): what ranks tell each other goes over NCCL, so the host waits for the device in a backward "
            "and a step; expected gloo to reach all ranks (GLOO_SOCKET_IFNAME names the network interface)",
            len(failed),
            len(said),
            failed[0],
            said[failed[0]],
        )
    return None


# The groups made of meshes of two dimensions over part of a world.
_of_meshes: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]"
_of_meshes = weakref.WeakKeyDictionary()


def group_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, int | None]:
    """Return the process group of a mesh's ranks, and the size of the dimension that shards if another replicates.

    Collective over the mesh, whose ranks need not be the whole world. (torch's own way to make one group of two dimensions
    asks for names of them.)
    """
    if mesh.get_coordinate() is None:
        raise NotAMemberError("shard: process_group is a mesh without this rank; expected one that it belongs to")
    if mesh.ndim == 1:
        return mesh.get_group(), None
    if mesh.ndim != 2:
        raise ValueError(f"shard: process_group is a mesh of {mesh.ndim} dimensions; expected 1, or 2 (replicate, shard)")
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(f"shard: process_group is a mesh of the ranks {ranks}; expected them in rising order, row by row")
    world = dist.group.WORLD
    assert world is not None
    if len(ranks) == dist.get_world_size():
        return world, mesh.size(1)
    groups = _of_meshes.setdefault(world, {})
    if tuple(ranks) not in groups:
        groups[tuple(ranks)] = group_beside(world, ranks, torch.device(mesh.device_type))
    return groups[tuple(ranks)], mesh.size(1)
