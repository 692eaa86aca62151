"""reduce_dtype: what travels between ranks, in bytes and in bits; the sums stay float32."""

from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from tests.choice import combinations
from tests.engine.models import Run, batch_of, hash_of_training, loss_of, make_net, train
from tests.ranks import run_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _hash(rank: int, world_size: int, runs: list[Run]) -> list[str]:
    return [hash_of_training(*train(rank, run)[:2]) for run in runs]


@pytest.mark.parametrize(
    ("precision", "order"), combinations(["fp32", "bf16", "fp16"], [(1, None), (2, True), (2, False)], meet=1)
)
def test_one_hash_for_every_stage_and_dtypes_that_differ(precision: str, order: tuple[int, Any]) -> None:
    accumulate, sync_each = order

    def runs(reduce_dtype: str | None) -> list[Run]:
        options = {"reduce_dtype": reduce_dtype, "sync_each": sync_each, "keep_fp32": [nn.LayerNorm]}
        if precision == "fp16":
            options["loss_scale"] = 256.0
        return [
            Run(stage=stage, steps=2, precision=precision, accumulate=accumulate, shard={**options, "units": units})
            for stage, units in ((0, "auto"), (1, 500), (2, "auto"), (3, 500))
        ]

    found = {}
    for name in (None, "fp32", "bf16", "fp16"):
        (found[name],) = {value for of_rank in run_ranks(2, _hash, runs(name)) for value in of_rank}
    assert found[None] == found["fp32"], "float32 holds every gradient and every sum as it is"
    narrower = {"fp32", "bf16", "fp16"} - {precision if sync_each is not False else "fp32"}  # than what there is
    assert len({found[name] for name in narrower} | {found[None]}) == (3 if "fp32" not in narrower else 2)


def _sent(rank: int, world_size: int, reduce_dtype: str | None, locally: bool) -> tuple[set[str], Any]:
    """What goes into all_to_all, and the reduced gradient; locally: after it was only added on this rank."""
    shard = {"reduce_dtype": reduce_dtype, "sync_each": not locally}
    model, optimizer, _ = train(rank, Run(stage=1, steps=0, accumulate=2, shard=shard))
    dtypes: set[str] = set()
    comm = optimizer._engine.comm
    send = comm.all_to_all

    def spy(received: torch.Tensor, sent: torch.Tensor, *where: Any, **of: Any) -> Any:
        dtypes.update([str(sent.dtype), str(received.dtype)])
        return send(received, sent, *where, **of)

    comm.all_to_all = spy
    loss_of(model, batch_of(0, 0, rank)).backward()
    assert (dtypes == set()) == locally
    full = shardcore.full_grad(model.head.weight)
    return dtypes, full.tolist()


@pytest.mark.parametrize("reduce_dtype", [None, "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("locally", [False, True])
def test_what_travels_has_that_dtype_and_is_rounded_once(reduce_dtype: str | None, locally: bool) -> None:
    dtype = DTYPES[reduce_dtype or "fp32"]
    parts = []
    for rank in range(2):
        model = make_net()
        loss_of(model, batch_of(0, 0, rank)).backward()
        parts.append(model.head.weight.grad.to(dtype).float())
    expected = (parts[0] + parts[1]) / 2
    for dtypes, full in run_ranks(2, _sent, reduce_dtype, locally):
        assert dtypes == {str(dtype)}
        assert torch.equal(torch.tensor(full), expected)


def test_one_rank_alone_rounds_nothing() -> None:
    hashes = {hash_of_training(*train(0, Run(shard={"reduce_dtype": name}))[:2]) for name in (None, "bf16", "fp16")}
    assert len(hashes) == 1


def test_bad_reduce_dtypes() -> None:
    model = make_net()
    with pytest.raises(ValueError, match=r'reduce_dtype is .fp8.; expected "bf16" or "fp16" or "fp32" or None'):
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()), reduce_dtype="fp8")
