"""Shards and tensor-parallel slices as one world, whose ranks have one order."""

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from shardcore.distributed.comm import Comm
from shardcore.distributed.everyone import Everyone
from shardcore.engine.agreement import together
from tests.support.ranks import run_ranks


def _as_one(rank: int, world: int, shape: tuple[int, ...]) -> list[Any]:
    names = ("dp", "tp", "pp")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    comm, *parts = (Comm(mesh[name].get_group()) for name in names)
    comm.slices = parts[:1]
    everyone = Everyone(comm, parts if len(parts) > 1 else None)
    errors = []
    for bad in ([], [2], [1, 2, 3]):
        try:
            with together(everyone, "call", "as before"):
                if rank in bad:
                    raise ValueError(rank)
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
    return [
        everyone.rank,
        everyone.world_size,
        everyone.slices,
        everyone.gather_json(rank),
        errors,
    ]


@pytest.mark.parametrize(("shape", "slices"), [((4,), 1), ((2, 2), 2), ((1, 2, 2), 4)])
def test_ranks_of_all_dimensions_are_one_world(shape: tuple[int, ...], slices: int) -> None:
    named = [f"call: rank {bad} failed: ValueError: {bad}; as before" for bad in (2, 1)]
    for rank, found in enumerate(run_ranks(4, _as_one, shape)):
        errors = [
            str(rank) if rank in bad else text
            for bad, text in zip(([2], [1, 2, 3]), named, strict=True)
        ]
        assert found == [rank, 4, slices, [0, 1, 2, 3], errors]
