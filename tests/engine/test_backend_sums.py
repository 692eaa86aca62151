"""reduction="nccl": the backend adds. Here gloo's own reduce_scatter stands in for NCCL's; the engine does the same with it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from shardcore.distributed.comm import Comm
from shardcore.engine.reduce_scatter import ReduceScatter
from tests.engine.models import Run, batch_of, hash_of_training, loss_of, make_net, train
from tests.engine.test_fp16 import Ramp
from tests.ranks import run_ranks


class stand_in:  # noqa: N801 - a context manager
    """Lets gloo's reduce_scatter be chosen, and counts its calls; fault: an operation that spoils what it gives back."""

    def __init__(self, fault: Any = None) -> None:
        self.fault, self.calls = fault, 0

    def __enter__(self) -> "stand_in":
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Comm, "backend_sums", True)
        reduce_scatter = Comm.reduce_scatter

        def counted(comm: Comm, received: torch.Tensor, sent: torch.Tensor, name: str) -> Any:
            self.calls += 1
            works = reduce_scatter(comm, received, sent, name)
            if self.fault is not None:
                for work in works:
                    work.wait()
                self.fault(received)
            return [] if self.fault is not None else works

        self.patch.setattr(Comm, "reduce_scatter", counted)
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def _hashes(rank: int, world_size: int, runs: list[Run], fault: Any = None) -> tuple[list[str], int]:
    with stand_in(fault) as backend:
        return [hash_of_training(*train(rank, run)[:2]) for run in runs], backend.calls


def _twice(received: torch.Tensor) -> None:
    received.mul_(2.0)


@pytest.mark.parametrize(("accumulate", "sync_each"), [(1, None), (2, True), (2, False)])
def test_two_ranks_in_float32_have_the_bits_of_the_ordered_sum(accumulate: int, sync_each: bool | None) -> None:
    """a + b is b + a: with two ranks there is one order of adding."""
    common = {"sync_each": sync_each, "clip_grad_norm": 0.5}
    runs = {
        reduction: [Run(stage=n, accumulate=accumulate, shard={**common, "reduction": reduction}) for n in range(4)]
        for reduction in ("nccl", "ordered")
    }
    (expected, no_calls), _ = run_ranks(2, _hashes, runs["ordered"])
    assert no_calls == 0
    for found, calls in run_ranks(2, _hashes, runs["nccl"]):
        assert found == expected
        assert calls >= 4 * len(runs["nccl"]), "the backend was not asked"
    for found, _ in run_ranks(2, _hashes, runs["nccl"], _twice):
        assert not set(found) & set(expected), "else the test could not tell"


def _grads(rank: int, world_size: int, precision: str, layout: str, stage: int) -> list[torch.Tensor]:
    shard: dict[str, Any] = {"reduction": "nccl"}
    if layout == "mesh":
        shard["process_group"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    elif layout == "nodes":
        shard["ranks_per_node"] = 2
    with stand_in():
        model, optimizer, _ = train(rank, Run(stage=stage, steps=0, precision=precision, shard=shard))
        optimizer.scale_loss(loss_of(model, batch_of(0, 0, rank))).backward()
        return [shardcore.full_grad(param).float() for param in model.parameters()]


@pytest.mark.parametrize("layout", ["flat", "nodes", "mesh"])
@pytest.mark.parametrize(("precision", "stage"), [("fp32", 0), ("fp32", 3), ("bf16", 2), ("fp16", 1)])
def test_every_layout_gets_the_average(layout: str, precision: str, stage: int) -> None:
    parts = []
    for rank in range(4):
        model = make_net()
        loss_of(model, batch_of(0, 0, rank)).backward()
        parts.append([param.grad for param in model.parameters()])
    tolerance = {"fp32": 1e-6, "bf16": 2.0**-5, "fp16": 2.0**-8}[precision]
    for grads in run_ranks(4, _grads, precision, layout, stage):
        for got, *of_ranks in zip(grads, *parts, strict=True):
            expected = sum(of_ranks) / 4
            assert (got - expected).abs().max() <= tolerance * max(part.abs().max() for part in of_ranks)


def _large(rank: int, world_size: int, divide: bool) -> list[float]:
    with stand_in(), pytest.MonkeyPatch.context() as patch:
        if not divide:
            patch.setattr("shardcore.engine.reduce_scatter._overflows", lambda sent: False)
        model: Any = Ramp()
        optimizer: Any = shardcore.FusedAdam(model.parameters())
        model, optimizer = shardcore.shard(model, optimizer, precision="fp16", loss_scale=1.0, reduction="nccl")
        (model(torch.ones(1000)).float() * 65504.0).backward()
        return shardcore.full_grad(model.weight).unique().tolist()


def test_float16_is_divided_before_it_is_added() -> None:
    assert run_ranks(4, _large, True) == [[65504.0]] * 4
    assert run_ranks(4, _large, False) == [[float("inf")]] * 4, "else the test could not tell"


def _refused(rank: int, world_size: int) -> str:
    model = make_net()
    try:
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()), reduction="nccl")
    except ValueError as error:
        return str(error)
    return "no error"


def test_other_backends_are_refused() -> None:
    for text in run_ranks(2, _refused):
        assert 'reduction is "nccl" but the process group has no nccl backend; expected "ordered"' in text


def test_one_rank_alone_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = hash_of_training(*train(0, Run(shard={"keep_fp32": [nn.LayerNorm]}))[:2])
    monkeypatch.setattr(ReduceScatter, "_start", lambda *_: pytest.fail("something was sent"))
    assert hash_of_training(*train(0, Run(shard={"keep_fp32": [nn.LayerNorm], "reduction": "nccl"}))[:2]) == ordered
