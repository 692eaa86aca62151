"""Groups of ranks by DeepSpeed's names. (Of sliced models: test_initialize_tensor_parallel.py.)"""

import os

import torch
from shardcore.utils import groups  # type: ignore[import-not-found]

import shardcore as deepspeed
from tests.support.ranks import run_ranks


def _names_of_comm(rank: int, world_size: int) -> None:
    comm = deepspeed.comm
    deepspeed.init_distributed()
    value = torch.full((3,), rank + 1.0)
    comm.inference_all_reduce(value)
    assert value.tolist() == [3.0] * 3
    comm.inference_all_reduce(value.fill_(rank), op=comm.ReduceOp.MAX, group=comm.get_world_group())
    assert value.tolist() == [1.0] * 3
    assert (
        comm.get_all_ranks_from_group()
        == comm.get_all_ranks_from_group(comm.get_world_group())
        == [0, 1]
    )
    assert (groups._get_data_parallel_world_size(), groups._get_data_parallel_rank()) == (
        world_size,
        rank,
    )
    assert comm.get_local_rank() == int(os.environ.get("LOCAL_RANK", "0"))


def test_names_of_comm_that_torch_has_not() -> None:
    run_ranks(2, _names_of_comm)
