"""Sharded training against plain torch: losses, gradients, unused and frozen parameters, schedulers, clipping, skips."""

import logging
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from tests.choice import some
from tests.engine.models import Run, batch_of, hash_of_training, loss_of, make_net, train
from tests.ranks import run_ranks

ADAM = {"lr": 1e-2, "weight_decay": 0.1}


def _plain(world_size: int, steps: int, clip: float | None = None, accumulate: int = 1) -> tuple[nn.Module, list[float]]:
    """Single-process torch on the global batch: the mean over equal rank batches is the mean over their union."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(accumulate):
            parts = [batch_of(step, micro, rank) for rank in range(world_size)]
            loss = loss_of(model, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))) / accumulate
            loss.backward()
            total += loss.item()
        losses.append(total)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def _losses(rank: int, world_size: int, run: Run) -> list[float]:
    return train(rank, run)[2]


@pytest.mark.parametrize(
    ("stage", "world_size"), some(product([0, 1, 2, 3], [1, 2, 4]), [(0, 2), (1, 2), (2, 2), (3, 2), (3, 1), (1, 4)])
)
def test_fp32_losses_follow_single_process_training(world_size: int, stage: int) -> None:
    _, expected = _plain(world_size, 20, clip=0.7)
    run = Run(stage=stage, steps=20, shard={"clip_grad_norm": 0.7})
    of_ranks = run_ranks(world_size, _losses, run)
    for step, want in enumerate(expected):
        got = sum(losses[step] for losses in of_ranks) / world_size
        assert abs(got - want) <= 1e-5 * abs(want), (step, got, want)


def test_a_wrong_gradient_scale_would_be_seen() -> None:
    """Broken twin of the test above: ranks that sum instead of averaging are one learning-rate-free Adam step apart."""
    _, expected = _plain(2, 20, clip=0.7)
    _, unclipped = _plain(2, 20, clip=None)
    assert max(abs(a - b) / abs(a) for a, b in zip(expected, unclipped, strict=True)) > 1e-3


def _grads(rank: int, world_size: int, stage: int, precision: str) -> dict[str, Any]:
    model, _optimizer, _ = train(rank, Run(stage=stage, steps=0, precision=precision))
    loss_of(model, batch_of(0, 0, rank)).backward()
    shown = {name: param.grad for name, param in model.named_parameters()}
    full = {name: shardcore.full_grad(param).float().tolist() for name, param in model.named_parameters()}
    return {"shown": {n: None if g is None else (g.float().tolist(), str(g.dtype)) for n, g in shown.items()}, "full": full}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_are_averages(stage: int, precision: str) -> None:
    results = run_ranks(3, _grads, stage, precision)
    model = make_net()
    for rank in range(3):
        (loss_of(model, batch_of(0, 0, rank)) / 3).backward()
    tolerance = 1e-6 if precision == "fp32" else 0.05
    for result in results:
        for name, param in model.named_parameters():
            full = torch.tensor(result["full"][name])
            assert torch.allclose(full, param.grad, rtol=tolerance, atol=tolerance), name
            if stage == 0:
                values, dtype = result["shown"][name]
                assert dtype == ("torch.float32" if precision == "fp32" else "torch.bfloat16")
                assert torch.allclose(torch.tensor(values), full, rtol=1e-2 if precision == "bf16" else 0)
            else:
                assert result["shown"][name] is None


class Branches(nn.Module):
    """Two branches; each forward says which are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(10, 5), nn.Linear(10, 5), nn.Linear(10, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        return self.frozen(sum(getattr(self, name)(x) for name in use.split("+")))


def _branches(rank: int, world_size: int, stage: int, offload: Any, plan: list[list[str]]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Branches()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), **ADAM)
    model, optimizer = shardcore.shard(model, optimizer, stage, precision="fp32", offload=offload)
    for step, uses in enumerate(plan):
        x, y = batch_of(step, 0, rank)
        ((model(x, uses[rank % len(uses)]) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = {name: shardcore.full_state(p, "step").item() for name, p in model.named_parameters() if p.requires_grad}
    return {"weights": {k: v.tolist() for k, v in model.state_dict().items()}, "steps": steps}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [None, {"optimizer": "cpu"}])
def test_unused_and_frozen_parameters_behave_as_in_torch(stage: int, offload: Any) -> None:
    plan = [["first"], ["first+second"], ["first", "second"], ["second"]]  # the third: one on rank 0, the other on rank 1
    results = run_ranks(2, _branches, stage, offload, plan)
    assert results[0] == results[1]
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step, uses in enumerate(plan):
        for rank in range(2):
            x, y = batch_of(step, 0, rank)
            (((model(x, uses[rank % len(uses)]) - y) ** 2).mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.allclose(torch.tensor(results[0]["weights"][name]), value, rtol=1e-5, atol=1e-6), name
    for name in ("first.weight", "second.bias"):
        assert results[0]["steps"][name] == 3
    assert results[0]["steps"]["never.weight"] == 0
    torch.manual_seed(0)
    assert torch.equal(torch.tensor(results[0]["weights"]["never.weight"]), Branches().never.weight), "no decay either"


@pytest.mark.parametrize("kind", ["FusedAdam", "torch"])
def test_a_scheduler_made_before_shard_drives_the_optimizer(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def run(sharded: bool) -> nn.Module:
        model = make_net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), **ADAM)
        if sharded and kind == "FusedAdam":
            optimizer = shardcore.FusedAdam(model.parameters(), **ADAM)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        group = optimizer.param_groups[0]
        if sharded:
            given = optimizer
            with caplog.at_level(logging.WARNING, logger="shardcore"):
                model, optimizer = shardcore.shard(model, optimizer, 2, precision="fp32")
            assert (optimizer is given) == (kind == "FusedAdam")
            assert isinstance(optimizer, shardcore.FusedAdam)
            assert optimizer.param_groups[0] is group
            assert group["params"] == list(model.parameters())
        for step in range(4):
            loss_of(model, batch_of(step, 0, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert group["lr"] == pytest.approx(1e-2 / 16)
        return model

    expected, got = run(False), run(True)
    for a, b in zip(expected.parameters(), got.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert ("made a shardcore.FusedAdam from AdamW" in caplog.text) == (kind == "torch")


def _poisoned(rank: int, world_size: int, stage: int) -> tuple[bool, int, float, float]:
    model, optimizer, _ = train(rank, Run(stage=stage, steps=2))
    before = hash_of_training(model, optimizer)
    x, y = batch_of(7, 0, rank)
    if rank == 1:
        x[0, 0] = float("inf")
    loss_of(model, (x, y)).backward()
    optimizer.step()
    optimizer.zero_grad()
    same = hash_of_training(model, optimizer) == before
    loss_of(model, batch_of(8, 0, rank)).backward()
    optimizer.step()
    step = shardcore.full_state(next(model.parameters()), "step").item()
    return same, optimizer.skipped_steps, step, optimizer._engine.last_grad_norm


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_non_finite_gradient_on_one_rank_skips_the_step_on_all(stage: int) -> None:
    results = run_ranks(2, _poisoned, stage)
    assert results[0] == results[1]
    same, skipped, step, norm = results[0]
    assert same
    assert (skipped, step) == (1, 3)
    assert 0 < norm < 100


def test_gradients_add_up_until_zero_grad() -> None:
    for stage in (0, 2):
        model, _, _ = train(0, Run(stage=stage, steps=0))
        plain = make_net()
        for micro in range(3):
            loss_of(model, batch_of(0, micro, 0)).backward()
            loss_of(plain, batch_of(0, micro, 0)).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(shardcore.full_grad(p), q.grad, rtol=1e-5, atol=1e-7)
        model.zero_grad()
        assert all(shardcore.full_grad(p) is None for p in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stage_0_accepts_edited_replaced_and_removed_gradients(precision: str) -> None:
    def step(edit: Any) -> dict[str, torch.Tensor]:
        model, optimizer, _ = train(0, Run(stage=0, steps=0, precision=precision, adam={"lr": 1e-2}))
        loss_of(model, batch_of(0, 0, 0)).backward()
        edit(model)
        optimizer.step()
        return model.state_dict()

    def removed(model: nn.Module) -> None:
        model.head.weight.grad = None

    def replaced(model: nn.Module) -> None:
        model.head.weight.grad = torch.zeros_like(model.head.weight)

    def edited(model: nn.Module) -> None:
        model.head.weight.grad.zero_()

    start = make_net().state_dict()
    untouched = step(lambda model: None)
    for edit in (removed, replaced, edited):
        result = step(edit)
        assert torch.equal(result["head.weight"], start["head.weight"])
        assert torch.equal(result["inp.weight"], untouched["inp.weight"])
    assert not torch.equal(untouched["head.weight"], start["head.weight"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clip_grad_norm_is_the_global_norm(stage: int) -> None:
    norms = run_ranks(2, _clip, stage)
    model = make_net()
    for rank in range(2):
        (loss_of(model, batch_of(0, 0, rank)) / 2).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for before, after in norms:
        assert before == pytest.approx(expected.item(), rel=1e-6)
        assert after == pytest.approx(0.1, rel=1e-4)


def _clip(rank: int, world_size: int, stage: int) -> tuple[float, float]:
    model, _, _ = train(rank, Run(stage=stage, steps=0))
    loss_of(model, batch_of(0, 0, rank)).backward()
    before = shardcore.clip_grad_norm_(model, 0.1)
    after = shardcore.clip_grad_norm_(model.parameters(), 10.0)
    return before.item(), after.item()


@pytest.mark.parametrize("offload", [None, {"optimizer": "cpu"}])
def test_float32_weights_edited_through_data_count_on_every_tier(offload: Any) -> None:
    model, optimizer, _ = train(0, Run(steps=1, shard={"offload": offload}))
    model.head.weight.data.clamp_(-0.01, 0.01)
    loss_of(model, batch_of(3, 0, 0)).backward()
    optimizer.step()
    assert model.head.weight.abs().max() < 0.05
