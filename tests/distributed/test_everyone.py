"""Shards and tensor-parallel slices as one world: what ranks say comes in one order, and the first problem is everyone's."""

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from shardcore.distributed.comm import Comm
from shardcore.distributed.everyone import Everyone
from tests.support.ranks import run_ranks


def _as_one(rank: int, world: int, tp: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    comm = Comm(mesh["dp"])
    comm.slices = [Comm(mesh["tp"].get_group())] if tp > 1 else []
    everyone = Everyone(comm)
    said = everyone.gather_json(rank)
    problems = [everyone.first_problem(ValueError(f"of {rank}") if rank in bad else None) for bad in ([], [2], [1, 2, 3])]
    return [everyone.rank, everyone.world_size, everyone.slices, said, problems]


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_of_both_dimensions_are_one_world(tp: int) -> None:
    problems = [None, (2, "ValueError: of 2"), (1, "ValueError: of 1")]
    for rank, found in enumerate(run_ranks(4, _as_one, tp)):
        assert found == [rank, 4, tp, [0, 1, 2, 3], problems]
