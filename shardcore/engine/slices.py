"""Parameters that are sliced over tensor-parallel ranks: DTensors on a mesh of one dimension.

The engine keeps, reduces and updates this rank's local part, a plain tensor; the Parameter stays a DTensor around it. Full
tensors (state dicts, `full_grad`) are assembled over the mesh, and cut where they are loaded. torch.distributed.tensor is
looked up in sys.modules, never imported: see optim/dtensor.py.
"""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcore.optim.dtensor import is_dtensor, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class Slice:
    """How a DTensor is cut: along `dim` (None: every rank has all of it) from `start` on, `size` indices on this rank."""

    mesh: DeviceMesh
    placements: "tuple[Placement, ...]"
    shape: torch.Size
    stride: tuple[int, ...]
    dim: int | None
    start: int
    size: int

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor, a view; of a DTensor its local part, placed as the parameter."""
        if is_dtensor(full):
            return self.local(full)
        return full if self.dim is None else full.narrow(self.dim, self.start, self.size)

    def local(self, dtensor: Any) -> torch.Tensor:
        """Return the local part of a DTensor, placed as the parameter first. Collective if that changes it."""
        if dtensor.placements != self.placements:  # such as a gradient whose sum over the mesh is still to be taken
            dtensor = dtensor.redistribute(self.mesh, self.placements)
        return local_part(dtensor)

    def wrap(self, local: torch.Tensor) -> "DTensor":
        """Return the DTensor of which this rank's part is `local` (the same memory)."""
        dtensor: type[DTensor] = sys.modules["torch.distributed.tensor"].DTensor
        with torch.no_grad():
            return dtensor.from_local(local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride)

    def assemble(self, local: torch.Tensor) -> torch.Tensor:
        """Return a new full tensor from the parts of all ranks, on the device of `local`. Collective over the mesh."""
        near = local.contiguous().to(self.mesh.device_type)
        with torch.no_grad():
            return self.wrap(near).full_tensor().to(local.device, copy=self.dim is None)

    def offset(self, offsets: tuple[int, ...]) -> tuple[int, ...]:
        """Return the place in the full tensor of a place in the local part."""
        return tuple(at + self.start * (dim == self.dim) for dim, at in enumerate(offsets))


def slice_of(name: str, param: torch.Tensor) -> Slice | None:
    """Return how a parameter is cut, None if it is an ordinary one. Raises ValueError for placements that are not supported."""
    if not is_dtensor(param):
        return None
    tensor, given = sys.modules["torch.distributed.tensor"], param
    mesh, placements = given.device_mesh, tuple(given.placements)  # type: ignore[attr-defined]
    if mesh.ndim != 1:
        raise ValueError(
            f"shard: {name} is already sharded (DTensor) on a mesh of {mesh.ndim} dimensions; expected an ordinary parameter, "
            "or a tensor-parallel one on a mesh of 1 dimension (parallelize_module(model, mesh['tp'], plan))"
        )
    shape, stride = param.shape, param.stride()
    if type(placements[0]) is tensor.Replicate:
        return Slice(mesh, placements, shape, stride, None, 0, 0)
    if type(placements[0]) is not tensor.Shard:
        raise ValueError(f"shard: {name} has the placement {placements[0]}; expected Shard(dim) or Replicate()")
    dim = placements[0].dim % max(1, param.dim())
    chunk = -(-shape[dim] // mesh.size())  # as torch.chunk cuts
    start = min(shape[dim], chunk * mesh.get_local_rank())
    size = min(chunk, shape[dim] - start)
    expected = [size if at == dim else length for at, length in enumerate(shape)]
    if list(held_by(param).shape) != expected:
        raise ValueError(
            f"shard: {name} has a local part of shape {tuple(held_by(param).shape)}; expected {tuple(expected)} of "
            f"{tuple(shape)} (even chunks, as torch.chunk makes them)"
        )
    return Slice(mesh, placements, shape, stride, dim, start, size)


def held_by(param: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a DTensor holds, itself: memory that is given to it is the parameter's. Any other as it is."""
    return param._local_tensor if is_dtensor(param) else param  # type: ignore[attr-defined]


def slice_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh over whose ranks the parameters of `model` are sliced, None if none is. Raises ValueError for several."""
    found = {}
    for name, param in model.named_parameters():
        if (cut := slice_of(name, param)) is not None:
            found[cut.mesh] = name
    if len(found) > 1:
        names = " and ".join(list(found.values())[:2])
        raise ValueError(f"shard: {names} are on different meshes; expected one tensor-parallel mesh for the whole model")
    return next(iter(found), None)


def refuse_slices(op: str, sliced: bool, instead: str) -> None:
    """Raise NotImplementedError for what cannot be had of a model that is sliced over tensor-parallel ranks yet."""
    if sliced:
        raise NotImplementedError(f"{op}: not available yet for a tensor-parallel model (DTensor parameters); use {instead}")
