"""Shards and tensor-parallel slices as one world: what ranks say comes in one order, and the
first problem is everyone's.
"""

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from shardcore.distributed.comm import Comm
from shardcore.distributed.everyone import Everyone
from tests.support.ranks import run_ranks


def _as_one(rank: int, world: int, shape: tuple[int, ...]) -> list[Any]:
    names = ("dp", "tp", "pp")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    comm, *parts = (Comm(mesh[name].get_group()) for name in names)
    comm.slices = parts[:1]
    everyone = Everyone(comm, parts if len(parts) > 1 else None)
    said = everyone.gather_json(rank)
    problems = [
        everyone.first_problem(ValueError(f"of {rank}") if rank in bad else None)
        for bad in ([], [2], [1, 2, 3])
    ]
    return [everyone.rank, everyone.world_size, everyone.slices, said, problems]


@pytest.mark.parametrize(("shape", "slices"), [((4,), 1), ((2, 2), 2), ((1, 2, 2), 4)])
def test_ranks_of_all_dimensions_are_one_world(shape: tuple[int, ...], slices: int) -> None:
    problems = [None, (2, "ValueError: of 2"), (1, "ValueError: of 1")]
    for rank, found in enumerate(run_ranks(4, _as_one, shape)):
        assert found == [rank, 4, slices, [0, 1, 2, 3], problems]
