"""Process groups: those of meshes, and those made beside the user's group, since each serves one
engine at a time.
"""

import hashlib
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardcore.distributed.compare import in_words
from shardcore.distributed.launchers import env_int
from shardcore.torch_private import group_named, set_timeout, timeout_of

logger = logging.getLogger("shardcore")

MAKING = timedelta(minutes=2)  # the longest that making a gloo group beside NCCL may take


class NotAMemberError(ValueError):
    """The process group does not contain this rank."""


@dataclass
class GroupSlot:
    """A process group that serves one engine at a time; `group` is None for the user's own.

    host: a gloo group of the same ranks, over which they compare values if `group` has only NCCL.
    host_tried: making it was tried.
    parts: groups of some of its ranks, this one among them, by these (NCCL).
    in_backward: a backward has begun to send and has not ended. spoiled: another began meanwhile,
    or a wait failed: unreceived messages may be left. broken: the error of that wait.
    orphaned_buffers: in flight, of an engine that is gone; gloo closes a connection whose buffer is
    freed.
    """

    group: dist.ProcessGroup | None
    host: dist.ProcessGroup | None = None
    host_tried: bool = False
    parts: dict[range, dist.ProcessGroup] = field(default_factory=dict)
    in_use: bool = False
    in_backward: bool = False
    broken: str = ""
    spoiled: bool = False
    orphaned_buffers: list[Any] = field(default_factory=list)

    def release(self, in_flight: list[Any]) -> None:
        """Free the group for the next engine, unless messages of this one may be left on it."""
        self.orphaned_buffers += filter(None, in_flight)
        self.in_use = self.in_backward or self.spoiled or bool(self.orphaned_buffers)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend by device type, also where get_backend() hides it (init_process_group()
    without a backend).
    """
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def own_gpu() -> torch.device:
    """Return this rank's GPU: the one bound to the default group (`device_id=`), else the current
    one, else LOCAL_RANK's.

    The current device counts unless it is 0, the default. A rank that sees one GPU uses it. Raises
    ValueError if LOCAL_RANK is not among the visible devices.
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
            f"LOCAL_RANK is {local} but this process sees {count} CUDA devices; expected one for "
            f"each process of the machine (is CUDA_VISIBLE_DEVICES set?)"
        )
    return torch.device("cuda", local)


def use_own_gpu() -> torch.device | None:
    """Make this rank's GPU the current device and return it; None without NCCL, or if nothing
    says which GPU it is.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    is_bound = world is not None and world.bound_device_id is not None
    if not is_bound and "LOCAL_RANK" not in os.environ:
        return None
    if not torch.cuda.is_available():
        return None
    if world is not None and backends_of(world).get("cuda") != "nccl":
        return None
    device = own_gpu()
    torch.cuda.set_device(device)
    return device


# The groups made beside each user's group, in the same order on every rank.
_slots: "weakref.WeakKeyDictionary[dist.ProcessGroup, list[GroupSlot]]" = (
    weakref.WeakKeyDictionary()
)


def slots_of(group: dist.ProcessGroup) -> list[GroupSlot]:
    """Return the slots of the user's `group`, a list to append to: the group itself, then those
    made beside it.
    """
    return _slots.setdefault(group, [GroupSlot(None)])


def slots_in_use() -> Iterator[GroupSlot]:
    """Iterate over the slots that engines have taken."""
    return (slot for slots in _slots.values() for slot in slots if slot.in_use)


# How many groups of the same ranks, a part of the world, were made here.
_parts: "weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]]" = (
    weakref.WeakKeyDictionary()
)


def _named(world: dist.ProcessGroup, ranks: Sequence[int]) -> AbstractContextManager[None]:
    """Let torch name the next group by its ranks, and by how many groups of the same ranks were
    made before.

    torch's own names count all groups that this rank is in, or has made. If that count differs
    between ranks, they wait for the group under different names until the timeout.
    """
    key, counts = tuple(sorted(ranks)), _parts.setdefault(world, Counter())
    name = hashlib.sha1(
        f"shardcore {key} {counts[key]}".encode(), usedforsecurity=False
    ).hexdigest()
    counts[key] += 1
    return group_named(name)


def group_beside(
    like: dist.ProcessGroup,
    ranks: Sequence[int],
    device: torch.device,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Make a group of `ranks`, by default with the backend and the timeout of `like`. Collective
    over these ranks alone.

    The ranks may have made unequally many groups of a part of the world before.
    """
    world = dist.group.WORLD
    assert world is not None
    part, bound = len(ranks) < world.size(), world.bound_device_id
    if part:
        # with a bound device torch splits the world's NCCL communicator, a collective over the
        # whole world
        world.bound_device_id = None
    try:
        with _named(world, ranks) if part else nullcontext():
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
    """Make a gloo group of the ranks of `like`, with its timeout. If a rank cannot, warn and return
    None on every rank.

    Collective. gather_json: Comm's, over `like`.
    """
    ranks, timeout = dist.get_process_group_ranks(like), timeout_of(like, device)
    group, problem = None, ""
    try:
        # within half of the timeout: a rank that fails waits for the others on NCCL, whose own
        # watchdog must not fire first
        group = group_beside(like, ranks, device, "gloo", min(timeout / 2, MAKING))
        set_timeout(group, torch.device("cpu"), timeout)
    except Exception as error:  # of any kind: the other ranks are waiting
        problem = in_words(error)
    problems = gather_json(problem)
    if not any(problems):
        return group
    if group is not None:
        dist.destroy_process_group(group)
    if dist.get_rank(like) == 0:
        failed = [rank for rank, text in enumerate(problems) if text]
        logger.warning(
            "shard: the process group uses NCCL alone, and no gloo group of its ranks could be "
            "made beside it (on %d of %d ranks; on rank %d: %s). Ranks compare over NCCL, so the "
            "host waits for the device in each backward and step. Let gloo reach all ranks: "
            "GLOO_SOCKET_IFNAME names the network interface",
            len(failed),
            len(problems),
            failed[0],
            problems[failed[0]],
        )
    return None


# The groups of meshes of two dimensions over a part of the world.
_of_meshes: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]"
_of_meshes = weakref.WeakKeyDictionary()


def group_of(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, int | None]:
    """Return a process group of all ranks of a mesh, and the size of the second dimension of a mesh
    of two.

    Collective over the mesh, whose ranks need not be the whole world. (torch joins the dimensions
    of a mesh only by name.)
    """
    if mesh.get_coordinate() is None:
        raise NotAMemberError(
            "shard: process_group is a mesh without this rank; expected a mesh with this rank"
        )
    if mesh.ndim == 1:
        return mesh.get_group(), None
    if mesh.ndim != 2:
        raise ValueError(
            f"shard: process_group is a mesh of {mesh.ndim} dimensions; expected 1, or 2 "
            f"(replicate, shard)"
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            f"shard: process_group is a mesh of the ranks {ranks}; expected them in rising order, "
            f"row by row"
        )
    world = dist.group.WORLD
    assert world is not None
    if len(ranks) == dist.get_world_size():
        return world, mesh.size(1)
    groups = _of_meshes.setdefault(world, {})
    if tuple(ranks) not in groups:
        groups[tuple(ranks)] = group_beside(world, ranks, torch.device(mesh.device_type))
    return groups[tuple(ranks)], mesh.size(1)
