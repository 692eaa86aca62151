"""tools/nccl_standin.py on CPU tensors: what its collectives give, and that those which differ
between ranks never end.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardcore.distributed import comm
from tests.support.ranks import run_ranks
from tools import nccl_standin


def _group() -> dist.ProcessGroup:
    nccl_standin.install("cpu")
    return dist.new_group(backend=nccl_standin.backend("cpu", alone=True))


def _collectives(rank: int, world_size: int) -> dict[str, list[float]]:
    group, own = _group(), torch.tensor([1.0, 2.0]) + 10 * rank
    found: dict[str, torch.Tensor] = {
        name: torch.zeros(2 * world_size) for name in ("gathered", "exchanged", "second", "list")
    }
    found |= {
        "sum": own.clone(),
        "largest": own.clone(),
        "scattered": torch.zeros(2),
        "from 1": own.clone(),
        "sum at 1": own.clone(),
        "part of 1's": torch.zeros(2),
        "next": own.clone(),
    }
    full = torch.arange(2.0 * world_size) + rank
    ints = torch.zeros(world_size, dtype=torch.int32)
    following, before = (rank + 1) % world_size, (rank - 1) % world_size
    works = [  # all are under way at once
        comm._all_gather([found["gathered"]], [own], group),
        dist.all_to_all_single(found["exchanged"], full, group=group, async_op=True),
        group.allgather_into_tensor_coalesced(
            [found["second"], ints], [own, torch.tensor([rank], dtype=torch.int32)]
        ),
        dist.all_gather(list(found["list"].chunk(world_size)), own, group=group, async_op=True),
        dist.all_reduce(found["sum"], group=group, async_op=True),
        dist.all_reduce(found["largest"], dist.ReduceOp.MAX, group=group, async_op=True),
        comm._reduce_scatter(found["scattered"], full, group=group, async_op=True),
        dist.broadcast(found["from 1"], 1, group=group, async_op=True),
        dist.reduce(found["sum at 1"], 1, group=group, async_op=True),
        dist.scatter(
            found["part of 1's"],
            list(full.chunk(world_size)) if rank == 1 else None,
            1,
            group,
            async_op=True,
        ),
        *dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, found["next"], following, group),
                dist.P2POp(dist.isend, own.clone(), before, group),
            ]
        ),
    ]
    for work in works:
        work.wait()
    return {name: tensor.tolist() for name, tensor in [*found.items(), ("ints", ints)]}


def test_collectives() -> None:
    world = 3
    for rank, found in enumerate(run_ranks(world, _collectives)):
        gathered = [1.0, 2.0, 11.0, 12.0, 21.0, 22.0]
        assert found == {
            **dict.fromkeys(("gathered", "second", "list"), gathered),
            "ints": [0, 1, 2],
            "exchanged": [2 * rank + more + other for other in range(world) for more in (0, 1)],
            "sum": [33.0, 36.0],
            "sum at 1": [33.0, 36.0] if rank == 1 else [1.0 + 10 * rank, 2.0 + 10 * rank],
            "part of 1's": [2.0 * rank + 1, 2.0 * rank + 2],
            "largest": [21.0, 22.0],
            "scattered": [world * (2 * rank + more) + 3 for more in (0, 1)],
            "from 1": [11.0, 12.0],
            "next": [1.0 + 10 * ((rank + 1) % world), 2.0 + 10 * ((rank + 1) % world)],
        }


def _sum(group: dist.ProcessGroup) -> dist.Work:
    return dist.all_reduce(torch.ones(8), group=group, async_op=True)


def _longer(group: dist.ProcessGroup) -> dist.Work:
    return dist.all_reduce(torch.ones(9), group=group, async_op=True)


def _exchange(group: dist.ProcessGroup) -> dist.Work:
    return dist.all_to_all_single(torch.zeros(16), torch.ones(16), group=group, async_op=True)


def _mismatch(
    rank: int, world_size: int, calls: list[list[Callable[[Any], Any]]]
) -> tuple[bool, str]:
    group = _group()
    works = [call(group) for call in calls[rank]]
    time.sleep(0.5)
    done = works[-1].is_completed()
    dist.barrier()  # an abort on one rank ends the collectives of others
    group.abort()
    try:
        works[-1].wait()
    except RuntimeError as error:
        return done, str(error)
    return done, ""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "calls", [[_sum, _exchange], [_sum, _longer]], ids=["other collectives", "other sizes"]
)
def test_what_ranks_start_in_other_order_never_ends_until_it_is_aborted(
    calls: list[Callable[[Any], Any]],
) -> None:
    """In another order, since neither would wait for the other if messages were paired by name
    or size alone.
    """
    for done, said in run_ranks(2, _mismatch, [calls, calls[::-1]]):
        assert not done
        assert said
    assert run_ranks(2, _mismatch, [calls, calls]) == [(True, "")] * 2
