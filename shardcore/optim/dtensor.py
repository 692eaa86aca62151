"""DTensor parameters (FSDP2): the rows that this rank holds, and conversion between its local part
and the DTensor. The local part may be torchao's float8 weight, around a plain tensor.

Invariants: kernels and ``optimizer.state`` see only this rank's local part, a plain tensor; state
dicts show DTensors, as torch.optim does. Nothing here communicates. torch.distributed.tensor is
looked up in sys.modules, never imported: the import takes most of a second, and a process that has
not imported it has no DTensors.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardcore.optim.float8 import plain_part
from shardcore.optim.group_options import check_param
from shardcore.optim.state import check_tensor
from shardcore.torch_private import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(value: object) -> bool:
    """Whether value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, as a plain tensor of the same memory; of torchao's
    float8 weight the tensor inside; and any other tensor as it is.
    """
    if not is_dtensor(tensor):
        return plain_part(tensor)
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    wait = getattr(part, "wait", None)  # a collective may still write it
    return plain_part(part if wait is None else wait())


# The other ranks that hold rows of a DTensor: one process group per dimension of its mesh that is
# sharded.
Groups = tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True)
class Rows:
    """The rows of a DTensor that are its local part: [first_row, first_row + rows)."""

    shape: torch.Size
    stride: tuple[int, ...]
    mesh: "DeviceMesh"
    placements: tuple["Placement", ...]
    groups: Groups
    first_row: int
    rows: int

    @property
    def first_element(self) -> int:
        """The index in the full tensor of element 0 of the local part."""
        return self.first_row * self.shape[1:].numel()

    def part(self, op: str, name: str, value: object) -> torch.Tensor:
        """Return the local part of a DTensor that is placed as the parameter, or raise TypeError
        or ValueError.
        """
        if not is_dtensor(value):
            raise TypeError(
                f"{op}: {name} is of type {type(value).__name__}; expected a DTensor, as its "
                "parameter"
            )
        dtensor: DTensor = value  # type: ignore[assignment]
        if dtensor.shape != self.shape:
            raise ValueError(
                f"{op}: {name} has shape {tuple(dtensor.shape)}; expected {tuple(self.shape)}, "
                "as its parameter"
            )
        if dtensor.device_mesh != self.mesh or dtensor.placements != self.placements:
            raise ValueError(
                f"{op}: {name} is placed {dtensor.placements} on {dtensor.device_mesh}; expected "
                f"{self.placements} on {self.mesh}, as its parameter. Redistribute it first"
            )
        return local_part(dtensor)

    def part_of_saved(self, op: str, name: str, value: object) -> object:
        """Return what this rank keeps of a saved value: the local part of a DTensor, or its rows
        of a full plain tensor.
        """
        if is_dtensor(value):
            return self.part(op, name, value)
        if not isinstance(value, torch.Tensor):
            return value  # refused as it would be for any parameter
        full = check_tensor(op, name, value, self.shape)
        return full.narrow(0, self.first_row, self.rows) if full.dim() else full

    def to_dtensor(self, local: torch.Tensor) -> torch.Tensor:
        """Return the DTensor whose local part is `local` (the same memory)."""
        dtensor: type[DTensor] = sys.modules["torch.distributed.tensor"].DTensor
        return dtensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def rows_of(op: str, name: str, param: "DTensor") -> Rows:
    """Return the rows of `param`'s local part. Raises ValueError for placements that cut it
    otherwise than into rows.
    """
    tensor = sys.modules["torch.distributed.tensor"]
    mesh, first, rows = param.device_mesh, 0, param.shape[0] if param.dim() else 1
    sharded: list[dist.ProcessGroup] = []
    for dim, placement in enumerate(param.placements):
        if type(placement) is tensor.Replicate:
            continue
        if type(placement) is not tensor.Shard or not placement.is_shard(0):
            raise ValueError(
                f"{op}: {name} is placed {param.placements}; expected only Replicate() and "
                "Shard(0). A local part must be consecutive full rows, because element numbers "
                "key the random bits"
            )
        sharded.append(mesh.get_group(dim))
        chunk = -(-rows // mesh.size(dim))  # as torch.chunk cuts
        before = min(rows, chunk * mesh.get_local_rank(dim))
        first, rows = first + before, min(chunk, rows - before)
    local = local_part(param)
    if local.shape != (torch.Size([rows, *param.shape[1:]]) if param.dim() else param.shape):
        raise ValueError(
            f"{op}: the local part of {name} has shape {tuple(local.shape)}; expected {rows} "
            f"rows of {tuple(param.shape)}, in even chunks as from torch.chunk"
        )
    return Rows(
        param.shape, param.stride(), mesh, tuple(param.placements), tuple(sharded), first, rows
    )


def check_tensor_param(op: str, name: str, param: torch.Tensor, rows: bool = True) -> Rows | None:
    """Raise unless the kernels can update param in place; return the rows of its local part if it
    is a DTensor.

    rows: False for a DTensor that may be cut otherwise, as its optimizer is to be given to `shard`.
    """
    if is_dtensor(param):
        later = not rows and not any(placement.is_partial() for placement in param.placements)  # type: ignore[attr-defined]
        of_param = None if later else rows_of(op, name, param)  # type: ignore[arg-type]
        local = local_part(param)
        check_param(op, name, local)
        if not local.is_contiguous():
            raise ValueError(
                f"{op}: the local part of {name} has strides {local.stride()} for shape "
                f"{tuple(local.shape)}; expected contiguous memory. Call contiguous() before "
                "distributing it"
            )
        return of_param
    param = plain_part(param)
    if is_traceable_wrapper_subclass(param):
        raise TypeError(
            f"{op}: {name} is of type {type(param).__name__}; expected a plain tensor, a DTensor, "
            "or torchao's float8 weight"
        )
    check_param(op, name, param)
    return None


def find_rows(
    op: str,
    params: Iterable[torch.Tensor | None],
    rows_by_param: Mapping[torch.Tensor, Rows] | None = None,
) -> dict[torch.Tensor, Rows]:
    """Return the rows of those parameters that are DTensors.

    rows_by_param: those of some of them, where they were made before.
    """
    rows_by_param = rows_by_param or {}
    return {
        p: rows_by_param.get(p) or rows_of(op, f"params[{i}]", p)  # type: ignore[arg-type,misc]
        for i, p in enumerate(params)
        if is_dtensor(p)
    }


def export_dtensors(state: Mapping[str, Any], rows: Rows | None) -> dict[str, Any]:
    """Return a state dict's entry with every tensor but the step as a DTensor placed as the
    parameter.
    """
    if rows is None:
        return dict(state)
    return {key: value if key == "step" else rows.to_dtensor(value) for key, value in state.items()}


def import_dtensors(op: str, name: str, saved: Any, rows: Rows | None) -> Any:
    """Return a state dict's entry with this rank's part of every tensor but the step. Raises as
    Rows.part.
    """
    if rows is None or not isinstance(saved, Mapping):
        return saved
    return {
        key: value if key == "step" else rows.part_of_saved(op, f"{name}.{key}", value)
        for key, value in saved.items()
    }


def grouped(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    rows_by_param: Mapping[torch.Tensor, Rows],
) -> tuple[list[torch.Tensor], dict[Groups, list[torch.Tensor]]]:
    """Split local gradients into those that are full on this rank, and those of which other ranks
    hold other rows.

    The result has the ranks of all sharded parameters of `rows_by_param`, in one order on all
    ranks, even if this rank has no gradient for them: summing over them is collective.
    """
    full: list[torch.Tensor] = []
    sharded: dict[Groups, list[torch.Tensor]] = {
        rows.groups: [] for rows in rows_by_param.values() if rows.groups
    }
    for param, grad in zip(params, grads, strict=True):
        (sharded.get(rows_by_param[param].groups, full) if param in rows_by_param else full).append(
            grad
        )
    return full, sharded
