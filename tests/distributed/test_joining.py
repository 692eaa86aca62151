"""Models in parts (model_parallel_group): one norm, one decision to skip and one error for all
of them.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from shardcore.distributed.comm import Comm
from tests.support.groups import device_decides
from tests.support.models import Net, batch_of, loss_of
from tests.support.ranks import run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "on the device": {},
    "overlapped": {"overlap_step": True, "offload": {"optimizer": "cpu"}},
    "fp16": {"precision": "fp16"},
}
# stage, options, the part that has no gradient in the second step (None: one part's gradients are
# not finite there), and whether torch's function clips.
CASES = [
    *((stage, "plain", None, False) for stage in range(4)),
    (1, "on the device", None, False),
    (2, "on the device", 0, False),
    (2, "overlapped", None, False),
    (3, "overlapped", 1, False),
    (2, "fp16", None, False),
    (0, "plain", 1, True),
    (3, "plain", 1, True),
]
Case = tuple[int, str, int | None, bool]


class Parts(nn.ModuleList):
    """A model of two parts."""

    def forward(self, part: int, x: torch.Tensor) -> torch.Tensor:
        return self[part](x)


def _net(part: int) -> Net:
    torch.manual_seed(part)
    return Net(width=16 + 8 * part, depth=1)


def _train(
    model: Any, nets: dict[int, Any], case: Case, rank: int, groups: dict[str, Any]
) -> tuple[Any, list[float]]:
    """Train a model of these nets, by their parts; returns its weights, its norms, its skipped
    steps and its loss scale.
    """
    stage, name, idle, by_torch = case
    options = {"precision": "fp32", "clip_grad_norm": None if by_torch else 0.5} | OPTIONS[name]
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = shardcore.shard(model, optimizer, stage, **groups, **options)
    norms: list[Any] = []
    for step in range(3):
        for part, net in nets.items():
            if step == 1 and part == idle:
                continue
            factor = float("inf") if step == 1 and idle is None and part == 1 else 1.0 + 2.0 * part
            optimizer.scale_loss(loss_of(net, batch_of(step, part, rank)) * factor).backward()
        if by_torch:
            clip = nn.utils.clip_grad_norm_ if groups else shardcore.clip_grad_norm_
            norms.append(clip(model.parameters(), 0.5).item())
        optimizer.step()
        if not by_torch:
            norms.append(optimizer._engine.last_grad_norm)
        optimizer.zero_grad()
    weights = {key: value.tolist() for key, value in model.state_dict().items()}
    return weights, [*map(str, norms), optimizer.skipped_steps, optimizer.loss_scale]


def _in_parts(rank: int, world: int, cases: list[Case]) -> list[Any]:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "mp"))
    groups = {"process_group": mesh["dp"], "model_parallel_group": mesh["mp"]}
    part, results = mesh.get_local_rank("mp"), []
    for case in cases:
        net = _net(part)
        with device_decides() if case[1] == "on the device" else nullcontext():
            results.append(_train(net, {part: net}, case, mesh.get_local_rank("dp"), groups))
    return results


def _as_one(rank: int, world: int, cases: list[Case]) -> list[Any]:
    models = [Parts([_net(0), _net(1)]) for _ in cases]
    parts = [{part: partial(model, part) for part in (0, 1)} for model in models]
    return [
        _train(model, nets, case, rank, {})
        for model, nets, case in zip(models, parts, cases, strict=True)
    ]


def _apart(rank: int, world: int, cases: list[Case]) -> list[Any]:
    with mock.patch.object(Comm, "of_parts", lambda comm, row, *_: row.unsqueeze(0)):
        return _in_parts(rank, world, cases)


def test_parts_train_as_one_model_does() -> None:
    found, expected = run_ranks(4, _in_parts, CASES), run_ranks(2, _as_one, CASES)[0]
    for number, (weights, said) in enumerate(expected):
        for rank, results in enumerate(found):
            start = f"{rank % 2}."
            part = {
                key.removeprefix(start): value
                for key, value in weights.items()
                if key.startswith(start)
            }
            assert results[number] == (part, said), CASES[number]


def test_parts_that_did_not_hear_of_each_other_are_seen() -> None:
    cases = CASES[:1]
    assert [said for ((_, said),) in run_ranks(2, _apart, cases)] != [
        said for ((_, said),) in run_ranks(2, _in_parts, cases)
    ]


def _unlike(rank: int, world: int) -> list[float]:
    """Only the first part is offloaded, with a worker."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "parts"))
    groups = {"process_group": mesh["dp"], "model_parallel_group": mesh["parts"]}
    options = OPTIONS["overlapped"] if rank == 0 else {}
    net: Any = _net(rank)
    net, optimizer = shardcore.shard(
        net, shardcore.FusedAdam(net.parameters(), lr=1e-2), 2, **groups, **options
    )
    norms = []
    for step in range(2):
        loss_of(net, batch_of(step, 0, 0)).backward()
        optimizer.step()
        norms.append(float(optimizer._engine.last_grad_norm))
        optimizer.zero_grad()
    optimizer.synchronize()
    return norms


def test_parts_may_differ_in_where_they_keep_states() -> None:
    first, second = run_ranks(2, _unlike)
    assert first == second


def _refused(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "mp"))
    groups: dict[str, Any] = {"process_group": mesh["dp"], "model_parallel_group": mesh["mp"]}

    def error_of(call: Any, *args: Any, **options: Any) -> str:
        with pytest.raises(ValueError) as raised:
            call(*args, **options)
        return str(raised.value)

    net = _net(rank % 2)
    optimizer: Any = shardcore.FusedAdam(net.parameters())
    said = [
        # of ranks of one part
        error_of(shardcore.shard, net, optimizer, 2 if rank else 4, **groups),
        error_of(shardcore.shard, net, optimizer, **{**groups, "process_group": None}),
        error_of(shardcore.shard, net, optimizer, **{**groups, "model_parallel_group": mesh}),
    ]
    model, optimizer = shardcore.shard(net, optimizer, **groups)
    loss_of(model, batch_of(0, 0, rank)).backward()
    before = [param.detach().clone() for param in model.parameters()]
    if rank == world - 1:
        net.gain.grad = torch.ones(())
    said += [error_of(optimizer.step), error_of(nn.utils.clip_grad_norm_, net.parameters(), 1.0)]
    net.gain.grad = None
    said.append(error_of(optimizer.step, max_norm=1.0 + rank % 2))
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    assert not all(map(torch.equal, before, model.parameters()))
    return said


def test_an_error_of_one_rank_is_one_in_all_parts() -> None:
    found = run_ranks(4, _refused)
    stages, overlap, mesh, steps, clips, norms = zip(*found, strict=True)
    assert all("stage is 4" in stages[rank] for rank in (0, 2))
    assert all("shard: rank 0 refused: " in stages[rank] for rank in (1, 3))
    assert all("process_group and model_parallel_group share the ranks" in text for text in overlap)
    assert all("a mesh of 2 dimensions; expected one of 1" in text for text in mesh)
    for said, op in ((steps, "step"), (clips, "clip_grad_norm_")):
        assert "gain.grad was assigned" in said[3]
        assert all(f"{op}: rank 3 refused: " in said[rank] for rank in (0, 1, 2))
    assert all(
        "parts of the model disagree: option max_norm is 2.0 on rank 1 but 1.0 on rank 0" in text
        for text in norms
    )
