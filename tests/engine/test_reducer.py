"""What counts as a backward: partial accumulation, checkpointing, failures, other graphs,
several models.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore.engine.reducer import GradState
from tests.support.models import (
    Block,
    Branch,
    Branched,
    Net,
    Reused,
    Run,
    assert_one,
    batch_of,
    error_of,
    hash_of_training,
    loss_of,
    make_net,
    train,
)
from tests.support.ranks import run_ranks

ADAM = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_with_graphs_are_added_locally_like_others(stage: int) -> None:
    def trained(create_graph: bool) -> str:
        model, optimizer, _ = train(
            0, Run(stage=stage, steps=0, accumulate=2, shard={"sync_each": False})
        )
        for micro in range(2):
            loss_of(model, batch_of(0, micro, 0)).backward(create_graph=create_graph)
        optimizer.step()
        return hash_of_training(model, optimizer)

    assert trained(create_graph=True) == trained(create_graph=False)


def test_a_bucket_is_reduced_once_a_backward() -> None:
    model, _, _ = train(0, Run(steps=1))
    reducer = model._shardcore_engine.reducer
    local_grads = reducer._in_order
    loss = loss_of(model, batch_of(1, 0, 0))
    with shardcore.no_sync(model):
        loss.backward(retain_graph=True)
    assert {local.state for local in local_grads} == {GradState.COLLECTING}
    loss.backward()
    assert {local.state for local in local_grads} == {GradState.REDUCED}
    local_grads[0].state = GradState.REDUCING
    with pytest.raises(AssertionError):  # it is on its way
        reducer._send(local_grads[0], torch.zeros(0))


def _accumulated(rank: int, world_size: int, declared: int, use_no_sync: bool) -> str:
    model, optimizer, _ = train(rank, Run(steps=0, accumulate=declared, shard={"sync_each": False}))
    with shardcore.no_sync(model) if use_no_sync else nullcontext():
        loss_of(model, batch_of(0, 0, rank)).backward()
    loss_of(model, batch_of(0, 1, rank)).backward()
    optimizer.step()
    return hash_of_training(model, optimizer)


@pytest.mark.parametrize(("declared", "use_no_sync"), [(4, False), (1, True)])
def test_step_takes_what_is_there_and_no_sync_is_local_accumulation(
    declared: int, use_no_sync: bool
) -> None:
    assert run_ranks(2, _accumulated, declared, use_no_sync) == run_ranks(2, _accumulated, 2, False)


class Checkpointed(Net):
    """Blocks recomputed in backward, the first one called twice."""

    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x) * self.gain


def _checkpointed(rank: int, world_size: int, reentrant: bool, stage: int) -> dict[str, list[Any]]:
    torch.manual_seed(0)
    model = Checkpointed()
    model.reentrant = reentrant
    model, _, _ = train(rank, Run(stage=stage, steps=3), model)
    return {key: value.tolist() for key, value in model.state_dict().items()}


@pytest.mark.cases(1)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_called_twice(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed()
    model.reentrant = reentrant
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(3):
        for rank in range(2):
            (loss_of(model, batch_of(step, 0, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = [run_ranks(2, _checkpointed, reentrant, stage)[0] for stage in (1, 3)]
    assert results[0] == results[1]
    for key, value in model.state_dict().items():
        assert torch.allclose(torch.tensor(results[0][key]), value, rtol=1e-5, atol=1e-6), key


def _reused(
    rank: int,
    world_size: int,
    stage: int,
    units: Any,
    accumulate: int = 1,
    precision: str = "bf16",
    **options: Any,
) -> str:
    torch.manual_seed(0)
    run = Run(
        stage=stage,
        precision=precision,
        shard={"units": units, "sync_each": False, **options},
        accumulate=accumulate,
    )
    model, optimizer, _ = train(rank, run, Reused())
    return hash_of_training(model, optimizer)


@pytest.mark.more
def test_units_do_not_show_where_gradients_arrive_in_parts() -> None:
    """What comes second is added alike, sent bucket or not; and a unit inside a unit stays whole
    for the second part.
    """
    kinds = [(1, "auto"), (1, 10**9), (3, 500), (3, (Block, nn.Sequential))]
    assert_one(hash_ for kind in kinds for hash_ in run_ranks(2, _reused, *kind))
    few = [kinds[0], kinds[2], kinds[3]]
    assert_one(_reused(0, 1, *kind, precision="fp32", grad_dtype="bf16") for kind in few)
    assert_one(_reused(0, 1, *kind, accumulate=2) for kind in few)


def _fail_in_backward(model: Any) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise RuntimeError("planted")

    handle = model.blocks[1].up.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        loss_of(model, batch_of(5, 0, 0)).backward()
    handle.remove()


def _fails_alone(rank: int, world_size: int) -> str:
    model, _, _ = train(rank, Run(steps=0, accumulate=2, shard={"sync_each": False}))
    if rank == 0:
        _fail_in_backward(model)
    else:
        loss_of(model, batch_of(0, 0, rank)).backward()
    return error_of(lambda: shardcore.clip_grad_norm_(model, 1.0))


def test_a_local_backward_that_failed_on_one_rank_is_an_error_of_the_next_read_of_gradients() -> (
    None
):
    """Rank 0 has dropped its gradients, so it would not take part in the reduction of the
    others'.
    """
    for text in run_ranks(2, _fails_alone):
        assert "rank 0: 0 backwards since the last step" in text


def test_a_failed_backward_gives_back_what_was_for_late_gradients() -> None:
    model, optimizer, _ = train(0, Run(steps=0), Reused())
    reducer = optimizer._engine.reducer
    late: list[int] = []

    def fail(grad: torch.Tensor) -> None:
        late.append(sum(local.late is not None for local in reducer._in_order))
        raise OSError("planted")

    model.inp.weight.register_hook(fail)
    taken = []
    for _ in range(3):
        with pytest.raises(OSError, match="planted"):
            loss_of(model, batch_of(0, 0, 0)).backward()
        optimizer.zero_grad()
        taken.append(reducer.pool.allocated_bytes)
    assert late == [1] * 3, "else the test could not fail"
    assert_one(taken)


def test_closures_run() -> None:
    model, optimizer, _ = train(0, Run(steps=0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(0, 0, 0))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(
        loss_of(make_net(), batch_of(0, 0, 0)).item()
    )
    assert shardcore.full_state(model.gain, "step").item() == 1


@pytest.mark.parametrize("stage", [0, 2])
def test_autograd_grad_is_no_backward(stage: int) -> None:
    model, optimizer, _ = train(0, Run(stage=stage, steps=0, accumulate=2))
    expected, expected_optimizer, _ = train(0, Run(stage=stage, steps=0, accumulate=2))
    for micro in range(2):
        torch.autograd.grad(loss_of(model, batch_of(5, micro, 0)), [model.head.weight])
        loss_of(model, batch_of(0, micro, 0)).backward()
        torch.autograd.grad(loss_of(model, batch_of(6, micro, 0)), [model.head.weight])
        loss_of(expected, batch_of(0, micro, 0)).backward()
    if stage == 0:
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    optimizer.step()
    expected_optimizer.step()
    assert hash_of_training(model, optimizer) == hash_of_training(expected, expected_optimizer)


def test_gradients_that_nothing_cleared_after_a_step_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From stage 1 on `p.grad = None` clears nothing, which would otherwise show in the loss
    alone.
    """
    for stage, clears, times in ((0, False, 0), (2, False, 1), (3, False, 1), (2, True, 0)):
        model, optimizer, _ = train(0, Run(steps=0, stage=stage))
        optimizer.step()  # there is nothing to clear
        caplog.clear()
        for step in range(3):
            for micro in range(2):
                loss_of(model, batch_of(step, micro, 0)).backward()
            optimizer.step()
            for param in model.parameters():
                param.grad = None
            if clears:
                model.zero_grad()
        assert caplog.text.count("backward: gradients are added to those of the last step") == times


@pytest.mark.parametrize("root_forward", [True, False])
def test_a_failed_backward_is_named_by_the_step_and_training_goes_on(
    root_forward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With the next root forward, or of a submodule without one; nothing is left of what failed."""
    (model, optimizer, _), (other, its, _) = train(0, Run(steps=1)), train(0, Run(steps=1))
    _fail_in_backward(model)
    with pytest.raises(ValueError, match="the last backward raised an error"):
        optimizer.step()
    assert "Its gradients, and the earlier gradients of this step, are dropped" in caplog.text
    for each, adam in ((model, optimizer), (other, its)):
        loss = (
            loss_of(each, batch_of(1, 0, 0)) if root_forward else each.head(torch.ones(2, 24)).sum()
        )
        loss.backward()
        adam.step()
    assert hash_of_training(model, optimizer) == hash_of_training(other, its)


class Critic(nn.Module):
    """Uses its second layer on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.first(x) + (self.second(x) if both else 0.0)


def _two_models(rank: int, world_size: int, stage: int) -> list[list[float]]:
    torch.manual_seed(0)
    made: list[Any] = [make_net(), Critic()]
    for model in made:
        shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), stage, precision="fp32", units=1
        )
    x, y = batch_of(0, 0, rank)
    ((made[1](made[0](x), both=rank == 0) - y) ** 2).mean().backward()
    return [shardcore.full_grad(p).flatten().tolist() for model in made for p in model.parameters()]


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 2])
def test_two_models_in_one_backward_with_a_branch_on_one_rank(stage: int) -> None:
    torch.manual_seed(0)
    net, critic = make_net(), Critic()
    for rank in range(2):
        x, y = batch_of(0, 0, rank)
        (((critic(net(x), both=rank == 0) - y) ** 2).mean() / 2).backward()
    expected = [p.grad.flatten() for model in (net, critic) for p in model.parameters()]
    for got in run_ranks(2, _two_models, stage):
        for a, b in zip(got, expected, strict=True):
            assert torch.allclose(torch.tensor(a), b, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_branches_on_streams_of_their_own_have_the_bits_of_one_stream(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> str:
        torch.manual_seed(0)
        model, optimizer, _ = train(0, Run(stage=stage, steps=0, accumulate=2), Branched().cuda())
        for step in range(4):
            for micro in range(2):
                loss_of(model, [one.cuda() for one in batch_of(step, micro, 0)]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return hash_of_training(model, optimizer)

    forked = trained()
    monkeypatch.setattr(Branch, "forks", False)
    assert trained() == forked


def _hooked(rank: int, world_size: int) -> None:
    """Compare what hooks that are there before `shard`, and after a step, see with gradients of
    a plain model.
    """
    for stage in range(4):
        plain, net = make_net(), make_net()
        seen: dict[str, list[torch.Tensor]] = {"before": [], "after": []}

        def watch(name: str, params: Any, seen: dict[str, list[torch.Tensor]] = seen) -> list[Any]:
            def note(param: Any) -> None:
                seen[name].append(param.grad.clone())

            return [param.register_post_accumulate_grad_hook(note) for param in params]

        watch("before", net.parameters())
        options: dict[str, Any] = {"precision": "fp32", "accumulate": 2, "sync_each": stage > 1}
        model, optimizer = shardcore.shard(
            net, shardcore.FusedAdam(net.parameters(), lr=0.0), stage, **options
        )
        handles: list[Any] = []
        for micro in range(4):
            if micro == 1:
                handles = watch("after", model.parameters())
            if micro == 3:
                for handle in handles:
                    handle.remove()
            loss_of(model, batch_of(0, micro, rank)).backward()
            if micro % 2:
                optimizer.step()
                optimizer.zero_grad()
            plain.zero_grad()
            loss_of(plain, batch_of(0, micro, rank)).backward()
            expected = sorted(
                param.grad.norm().item() for param in plain.parameters() if param.grad is not None
            )
            for name in ("before", "after") if micro in (1, 2) else ("before",):
                assert sorted(grad.norm().item() for grad in seen[name]) == expected, (
                    stage,
                    micro,
                    name,
                )
            assert len(seen["after"]) == len(expected) * (micro in (1, 2))
            for grads in seen.values():
                grads.clear()


def test_hooks_that_are_added_after_shard_see_the_local_gradient() -> None:
    run_ranks(2, _hooked)
