"""On NCCL a unit's gathers are one call, whatever its groups and dtypes; the bits are those of
gloo.
"""

from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.distributed import comm as comm_module
from tests.support.groups import as_on_nccl
from tests.support.models import hash_of_training, make_net, stepped
from tests.support.ranks import run_ranks

# How many calls a step has, with four units: three blocks and the root. Backward gathers neither
# the root nor the last block.
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "stage 3": ({"stage": 3}, 4 + 2),
    "parts kept": ({"stage": 3, "reshard_after_forward": 2}, 4 + 2),
    "two levels": ({"stage": 3, "ranks_per_node": 2}, 2 * (4 + 2)),
    "stage 2": ({"stage": 2}, 4),
    "overlapped": ({"stage": 2, "overlap_step": True}, 4),
}


def _trained(rank: int, layout: str) -> str:
    """Train with and without weight decay, in bfloat16 but for the norms: a block has three
    buckets.
    """
    model = make_net()
    groups = [
        {
            "params": [param for param in model.parameters() if (param.ndim > 1) == decayed],
            "weight_decay": 0.1 * decayed,
        }
        for decayed in (True, False)
    ]
    options = {"precision": "bf16", "keep_fp32": [nn.LayerNorm], **LAYOUTS[layout][0]}
    model, optimizer = shardcore.shard(model, shardcore.FusedAdam(groups, lr=1e-2), **options)  # type: ignore[assignment]
    for step in range(2):
        CALLS.clear()
        stepped(model, optimizer, rank, step)
    calls = CALLS.copy()
    bits = hash_of_training(model, optimizer)
    CALLS[:] = calls
    return bits


CALLS: list[int] = []  # how many tensors each call of the backend has gathered


def _both(
    rank: int, world_size: int, layouts: list[str], lost: int = 0
) -> list[tuple[str, str, list[int]]]:
    """Return the hashes on gloo and on a group like NCCL's, and the tensors in each call of a
    step. lost: left out of each.
    """
    gather, found = comm_module._all_gather, []

    def counted(fulls: list[torch.Tensor], owns: list[torch.Tensor], group: Any) -> Any:
        CALLS.append(len(fulls))
        kept = max(1, len(fulls) - lost)
        return gather(fulls[:kept], owns[:kept], group)

    for layout in layouts:
        expected = _trained(rank, layout)
        with as_on_nccl() as patch:
            patch.setattr(comm_module, "_all_gather", counted)
            found.append((expected, _trained(rank, layout), CALLS.copy()))
    return found


@pytest.mark.more
def test_the_gathers_of_a_unit_are_one_call_with_the_bits_of_gloo() -> None:
    layouts = list(LAYOUTS)
    for of_rank in run_ranks(4, _both, layouts):
        for layout, (expected, bits, calls) in zip(layouts, of_rank, strict=True):
            assert bits == expected, layout
            assert len(calls) == LAYOUTS[layout][1], layout
            assert max(calls) == 3, layout


@pytest.mark.cases(1)
@pytest.mark.parametrize("layout", ["stage 3", "stage 2"])
def test_a_tensor_left_out_of_a_call_would_be_seen(layout: str) -> None:
    for [(expected, bits, _)] in run_ranks(2, _both, [layout], 1):
        assert bits != expected
