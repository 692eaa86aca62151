"""Models that only run forward: shard(model, None)."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore
from tests.engine.made import init, meta
from tests.engine.models import Net, batch_of, hash_of, hash_of_training, loss_of, make_net
from tests.ranks import run_ranks

PLACES = [(0, None), (1, None), (2, None), (3, None), (3, {"params": "cpu"}), (3, {"optimizer": "cpu", "params": "cpu"})]


def wide_net(seed: int) -> Net:
    """So wide that padding counts little."""
    torch.manual_seed(seed)
    return Net(64, 128)


def _forward(rank: int, world_size: int, stage: int, offload: Any) -> None:
    plain, x = wide_net(0), batch_of(0, 0, rank)[0]
    model, nothing = shardcore.shard(wide_net(rank), None, stage, offload=offload)  # rank 0's weights
    assert nothing is None
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
    expected = hash_of(plain.state_dict().values())
    assert hash_of(model.state_dict().values()) == expected
    with shardcore.full_params(model):
        assert hash_of(model.parameters()) == hash_of(plain.parameters())
        model.gain.data.fill_(2.0)
    state = shardcore.sharded_state_dict(model)
    model.load_state_dict(wide_net(7).state_dict())
    assert hash_of(model.state_dict().values()) == hash_of(wide_net(7).state_dict().values())
    shardcore.load_sharded_state_dict(model, state)
    assert model.state_dict()["gain"] == 2.0
    model.load_state_dict(plain.state_dict())
    report = shardcore.memory_report(model)
    assert report.by_kind["master"] == report.by_kind["states"] == report.by_kind["gradients"] == 0
    if stage == 3:
        kept = sum(line.bytes for line in report.lines if line.kind == "weights" and line.unit != "shared")
        assert kept < 0.6 * sum(p.nbytes for p in plain.parameters())
        assert report.by_tier.get("cpu", 0) >= (kept if offload else 0)
    with shardcore.full_params(model):
        copied = copy.deepcopy(model)
    assert hash_of(copied.state_dict().values()) == expected
    copied(x).sum().backward()  # an ordinary model


@pytest.mark.parametrize(("stage", "offload"), PLACES)
def test_a_model_without_an_optimizer(stage: int, offload: Any) -> None:
    run_ranks(2, _forward, stage, offload)


def _gradients(rank: int, world_size: int, stage: int, offload: Any) -> str:
    """They flow through frozen weights to what comes before; one that reaches a parameter is an error on every rank."""
    plain = make_net().requires_grad_(False)
    model, _ = shardcore.shard(make_net().requires_grad_(False), None, stage, offload=offload)
    for step in range(2):
        inputs = [batch_of(step, 0, rank)[0].requires_grad_() for _ in range(2)]
        model(inputs[0]).square().sum().backward()
        plain(inputs[1]).square().sum().backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    model, _ = shardcore.shard(make_net(), None, stage, offload=offload)
    with pytest.raises(RuntimeError) as raised:
        loss_of(model, batch_of(0, 0, rank)).backward()
    dist.barrier()
    with torch.no_grad():
        assert torch.equal(model(inputs[0]), plain(inputs[0]))
    assert all(p.grad is None for p in model.parameters())
    return str(raised.value)


@pytest.mark.parametrize(("stage", "offload"), [PLACES[2], PLACES[3], PLACES[4]])
def test_gradients_through_and_to_it(stage: int, offload: Any) -> None:
    for text in run_ranks(2, _gradients, stage, offload):
        assert (
            "requires a gradient, but its model was sharded without an optimizer, to run forward only; expected model.req"
            in text
        )


def _distilled(rank: int, world_size: int, teacher_stage: int | None) -> str:
    teacher: nn.Module = make_net(3)
    if teacher_stage is not None:
        teacher, _ = shardcore.shard(teacher, None, teacher_stage)
    student = make_net(0)
    student, optimizer = shardcore.shard(student, shardcore.FusedAdam(student.parameters(), lr=1e-2), 3)
    for step in range(3):
        x = batch_of(step, 0, rank)[0]
        with torch.no_grad():
            target = teacher(x)
        (student(x) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return hash_of_training(student, optimizer)


def test_a_teacher_beside_a_student() -> None:
    assert len({text for stage in (None, 2, 3) for text in run_ranks(2, _distilled, stage)}) == 1


@pytest.mark.parametrize("stage", [0, 3])
def test_a_teacher_from_the_meta_device(stage: int) -> None:
    torch.manual_seed(0)
    model, _ = shardcore.shard(meta(), None, stage, materialize=init)
    assert hash_of(model.state_dict().values()) == hash_of(make_net(0).state_dict().values())


def _one_rank_trains(rank: int, world_size: int) -> str:
    model = make_net()
    with pytest.raises(ValueError, match="ranks disagree") as raised:
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()) if rank else None)
    return str(raised.value)


def test_ranks_with_and_without_an_optimizer_are_refused() -> None:
    assert all("frozen" in text and "trainable" in text for text in run_ranks(2, _one_rank_trains))


def test_initialize_without_parameters_says_what_takes_its_place() -> None:
    config = {"train_micro_batch_size_per_gpu": 1}
    with pytest.raises(ValueError, match=r"there is no optimizer; .*shardcore\.shard\(model, None\)"):
        shardcore.initialize(model=Net(), config=config)
