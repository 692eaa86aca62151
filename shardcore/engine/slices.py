"""Parameters that are sliced over tensor-parallel ranks: DTensors on a mesh of one dimension.

The engine keeps, reduces and updates this rank's local part, a plain tensor; the Parameter stays a
DTensor around it. Full tensors (state dicts, `full_grad`) are assembled over the mesh, and cut
where they are loaded. torch.distributed.tensor is looked up in sys.modules, never imported: see
optim/dtensor.py.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcore.layout import Columns
from shardcore.optim.dtensor import is_dtensor, local_part
from shardcore.torch_private import local_tensor_of, split_factor_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class Slice:
    """How a DTensor is cut: along `dim` (None: every rank has all of it) from `start` on, `size`
    indices on this rank.

    blocks: the dimension has so many equal blocks (queries, keys and values in one weight), each of
    which is cut so.
    """

    mesh: DeviceMesh
    placements: "tuple[Placement, ...]"
    shape: torch.Size
    stride: tuple[int, ...]
    dim: int | None
    start: int
    size: int
    blocks: int = 1

    @property
    def columns(self) -> Columns | None:
        """This rank's part as columns, None if that is all of it. A local part has their
        elements row by row.
        """
        return None if self.dim is None else self._columns(self.dim, self.start, self.size)

    def all_columns(self) -> list[Columns]:
        """Return those of every rank that has some, in order."""
        if self.dim is None or not self.shape.numel():
            return []
        length, ranks = self.shape[self.dim] // self.blocks, self.mesh.size()
        of_ranks = [
            self._columns(self.dim, *chunk_of(length, ranks, rank)) for rank in range(ranks)
        ]
        return [columns for columns in of_ranks if columns.count]

    def _columns(self, dim: int, start: int, size: int) -> Columns:
        inner = prod(self.shape[dim + 1 :])
        rows, width = prod(self.shape[:dim]) * self.blocks, self.shape[dim] // self.blocks * inner
        return Columns(rows, width, start * inner, size * inner)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a full tensor, a view; of a DTensor its local part, placed
        as the parameter.
        """
        if is_dtensor(full):
            return self.local(full)
        if self.dim is None:
            return full
        if self.blocks == 1:
            return full.narrow(self.dim, self.start, self.size)
        parts = divided(full, self.dim, self.blocks, -1).narrow(self.dim + 1, self.start, self.size)
        return parts.flatten(self.dim, self.dim + 1)

    def local(self, dtensor: Any) -> torch.Tensor:
        """Return the local part of a DTensor, placed as the parameter first. Collective if that
        changes it.
        """
        # such as a gradient whose sum over the mesh is still to be taken
        if dtensor.placements != self.placements:
            dtensor = dtensor.redistribute(self.mesh, self.placements)
        return local_part(dtensor)

    def wrap(self, local: torch.Tensor) -> "DTensor":
        """Return the DTensor of which this rank's part is `local` (the same memory)."""
        dtensor: type[DTensor] = sys.modules["torch.distributed.tensor"].DTensor
        with torch.no_grad():
            return dtensor.from_local(
                local,
                self.mesh,
                self.placements,
                run_check=False,
                shape=self.shape,
                stride=self.stride,
            )

    def assemble(self, local: torch.Tensor) -> torch.Tensor:
        """Return a new full tensor from the parts of all ranks, on the device of `local`.
        Collective over the mesh.
        """
        near = local.contiguous().to(self.mesh.device_type)
        with torch.no_grad():
            if self.dim is None or self.blocks == 1:
                return self.wrap(near).full_tensor().to(local.device, copy=self.dim is None)
            shard = sys.modules["torch.distributed.tensor"].Shard(self.dim)
            by_rank: torch.Tensor = replace(self, placements=(shard,)).wrap(near).full_tensor()
            parts = divided(by_rank, self.dim, -1, self.blocks, self.size).transpose(
                self.dim, self.dim + 1
            )
            return parts.flatten(self.dim, self.dim + 2).contiguous().to(local.device)

    def boxes(
        self, offsets: tuple[int, ...], part: torch.Tensor
    ) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield a box of the local part, `part` at `offsets`, as boxes of the full tensor: where
        they are, and views.
        """
        if self.dim is None:
            yield offsets, part
            return
        block, first = self.shape[self.dim] // self.blocks, offsets[self.dim]
        last = first + part.shape[self.dim]
        for number in range(self.blocks):
            low, high = max(first, number * self.size), min(last, (number + 1) * self.size)
            if low < high:
                at = number * block + self.start + low - number * self.size
                yield (
                    (*offsets[: self.dim], at, *offsets[self.dim + 1 :]),
                    part.narrow(self.dim, low - first, high - low),
                )


def chunk_of(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return (start, size) of what a rank has of so many indices, as torch.chunk cuts them."""
    chunk = -(-length // ranks)
    start = min(length, chunk * rank)
    return start, min(chunk, length - start)


def divided(tensor: torch.Tensor, dim: int, *sizes: int) -> torch.Tensor:
    """Return a tensor with one of its dimensions as several, of these sizes."""
    return tensor.reshape(*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :])


def slice_of(name: str, param: torch.Tensor) -> Slice | None:
    """Return how a parameter is cut, None if it is an ordinary one. Raises ValueError for
    placements that are not supported.
    """
    if not is_dtensor(param):
        return None
    tensor, sliced = sys.modules["torch.distributed.tensor"], param
    mesh, placements = sliced.device_mesh, tuple(sliced.placements)  # type: ignore[attr-defined]
    if mesh.ndim != 1:
        raise ValueError(
            f"shard: {name} is already sharded (DTensor) on a mesh of {mesh.ndim} dimensions; "
            f"expected an ordinary parameter, "
            "or a tensor-parallel one on a mesh of 1 dimension (parallelize_module(model, "
            "mesh['tp'], plan))"
        )
    shape, stride = param.shape, param.stride()
    if type(placements[0]) is tensor.Replicate:
        return Slice(mesh, placements, shape, stride, None, 0, 0)
    blocks = split_factor_of(placements[0])
    if blocks == 1 and type(placements[0]) is not tensor.Shard:
        raise ValueError(
            f"shard: {name} has the placement {placements[0]}; expected Shard(dim) or Replicate()"
        )
    dim = placements[0].dim % max(1, param.dim())
    if blocks > 1 and shape[dim] % (blocks * mesh.size()):
        raise ValueError(
            f"shard: {name} has the shape {tuple(shape)} and the placement {placements[0]}; "
            f"expected {blocks} x {mesh.size()} equal parts along dimension {dim}"
        )
    start, size = chunk_of(shape[dim] // blocks, mesh.size(), mesh.get_local_rank())
    expected = [blocks * size if at == dim else count for at, count in enumerate(shape)]
    if list(held_by(param).shape) != expected:
        raise ValueError(
            f"shard: {name} has a local part of shape {tuple(held_by(param).shape)}; expected "
            f"{tuple(expected)} of {tuple(shape)} (even chunks, as torch.chunk makes them)"
        )
    return Slice(mesh, placements, shape, stride, dim, start, size, blocks)


def held_by(param: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a DTensor holds, itself: memory that is given to it is the
    parameter's. Any other as it is.
    """
    return local_tensor_of(param) if is_dtensor(param) else param


def slice_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh over whose ranks the parameters of `model` are sliced, None if none is.
    Raises ValueError for several.
    """
    name_of_mesh = {}
    for name, param in model.named_parameters():
        if (cut := slice_of(name, param)) is not None:
            name_of_mesh[cut.mesh] = name
    if len(name_of_mesh) > 1:
        names = " and ".join(list(name_of_mesh.values())[:2])
        raise ValueError(
            f"shard: {names} are on different meshes; expected one tensor-parallel mesh for the "
            f"whole model"
        )
    return next(iter(name_of_mesh), None)


def refuse_slices(op: str, sliced: bool, instead: str) -> None:
    """Raise NotImplementedError for what cannot be had of a model that is sliced over
    tensor-parallel ranks yet.
    """
    if sliced:
        raise NotImplementedError(
            f"{op}: not available yet for a tensor-parallel model (DTensor parameters); use "
            f"{instead}"
        )
