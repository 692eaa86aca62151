"""Groups of ranks by DeepSpeed's names: those of `utils.groups`, and of `comm` what
torch.distributed does not have.
"""

import os
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardcore.deepspeed.initialize import tensor_mesh


def inference_all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Add a tensor over the ranks of a group, in place: torch.distributed.all_reduce.
    Collective.
    """
    return dist.all_reduce(tensor, op, group, async_op)


def get_local_rank() -> int:
    """Return this rank's number on its machine, as its launcher set LOCAL_RANK; 0 without a
    launcher.
    """
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """Return the process group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the ranks of a group, by their numbers among all ranks."""
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def _of_sequence(what: str, alone: Any) -> Any:
    """Return what the ranks of a sequence are asked for; `alone` where no group of them was
    made.
    """
    module = sys.modules.get("shardcore.integrations.ulysses")
    groups = None if module is None else module.current()
    return alone if groups is None else getattr(groups, f"get_sequence_parallel_{what}")()


def _group(name: str) -> Any:
    """Return the group of the ranks with other data ("dp"), or with other slices of the model
    ("tp").
    """
    mesh = tensor_mesh()
    if mesh is None and name == "tp":
        raise RuntimeError(
            "utils.groups: no model is sliced over ranks; expected tp_model_init or initialize "
            "before"
        )
    return dist.group.WORLD if mesh is None else mesh[name].get_group()


def _group_size(name: str) -> int:
    if (mesh := tensor_mesh()) is not None:
        return mesh[name].size()
    return dist.get_world_size() if dist.is_initialized() and name == "dp" else 1


def _group_rank(name: str) -> int:
    if (mesh := tensor_mesh()) is not None:
        return mesh.get_local_rank(name)
    return dist.get_rank() if dist.is_initialized() and name == "dp" else 0


def _first_of_group(name: str) -> int:
    return dist.get_global_rank(_group(name), 0)


NAMES: dict[str, Any] = {
    f"{prefix}_parallel_{what}": partial(function, name)
    for prefix, name in (
        ("get_data", "dp"),
        ("_get_data", "dp"),
        ("get_tensor_model", "tp"),
        ("get_model", "tp"),
    )
    for what, function in (
        ("group", _group),
        ("world_size", _group_size),
        ("rank", _group_rank),
        ("src_rank", _first_of_group),
    )
} | {
    f"_get_sequence_parallel_{what}": partial(_of_sequence, what, alone)
    for what, alone in (("group", None), ("world_size", 1), ("rank", 0))
}
OF_COMM = {
    f.__name__: f
    for f in (inference_all_reduce, get_local_rank, get_world_group, get_all_ranks_from_group)
}
