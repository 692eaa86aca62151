"""Weights that begin to train after shard: the bits of a plain training that unfreezes them at
the same step.
"""

from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.engine import regroup
from tests.support.models import (
    Net,
    assert_one,
    batch_of,
    hash_of,
    hash_of_training,
    loss_of,
    make_net,
    stepped,
)
from tests.support.ranks import run_ranks


def made(grouped: bool) -> tuple[Net, Any]:
    """A model of which the head and a norm of block 1 train. grouped: whether the optimizer has
    blocks 1 and 2 already.
    """
    model = make_net().requires_grad_(False)
    trained = [*model.head.parameters(), model.blocks[1].norm.weight]
    for param in trained:
        param.requires_grad_(True)
    if grouped:
        trained += [param for param in model.blocks[1:].parameters() if not param.requires_grad]
    return model, shardcore.FusedAdam(trained, lr=1e-2, weight_decay=0.1)


def steps(model: Any, optimizer: Any, first: int) -> None:
    for number in range(first, first + 2):
        stepped(model, optimizer, 0, number)


def trained(options: dict[str, Any] | None) -> tuple[Any, Any]:
    """Unfreeze blocks 1 and 2, which a group has, then the rest, in a group of its own. Every
    rank has the same batches.
    """
    model, optimizer = made(grouped=True)
    if options is not None:
        model, optimizer = shardcore.shard(model, optimizer, **options)
    steps(model, optimizer, 0)
    for block in model.blocks[1:]:
        block.requires_grad_(True) if options is None else shardcore.unfreeze(block)
    steps(model, optimizer, 2)
    model.blocks[1].norm.weight.requires_grad_(False)  # frozen again, for a while: its states stay
    late = [
        param for param in model.requires_grad_(True).parameters() if param not in optimizer.state
    ]
    model.blocks[1].norm.weight.requires_grad_(False)
    optimizer.add_param_group({"params": late, "lr": 3e-3})
    steps(model, optimizer, 4)
    model.blocks[1].norm.weight.requires_grad_(True)
    steps(model, optimizer, 6)
    return model, optimizer


def is_plain(rank: int, world_size: int, options: dict[str, Any], broken: bool) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        if broken:  # counts of steps are lost where a bucket is made anew
            move = regroup._move

            def forgets(engine: Any, gone: Any, made: Any) -> None:
                move(engine, gone, made)
                for bucket in made:
                    for managed in bucket.params:
                        managed.step = 0

            patch.setattr(regroup, "_move", forgets)
        model, optimizer = trained(options)
    plain, expected = trained(None)
    states = optimizer.state_dict()["state"]
    for number, state in expected.state_dict()["state"].items():
        if any(
            not torch.equal(state[key].float(), states[number][key].cpu().float()) for key in state
        ):
            return False
    return hash_of(model.state_dict().values()) == hash_of(plain.state_dict().values())


def _right_after_a_step(rank: int, world_size: int) -> None:
    model, optimizer = made(grouped=True)
    shardcore.shard(model, optimizer, stage=2, offload={"optimizer": "cpu"}, overlap_step=True)
    optimizer._engine.overlap_step._worker_gathers = False  # as on NCCL
    steps(model, optimizer, 0)
    shardcore.unfreeze(model.blocks[2])
    steps(model, optimizer, 2)
    optimizer.synchronize()
    assert all(param.requires_grad for param in model.blocks[2].parameters())


def test_unfreezing_right_after_an_overlapped_step() -> None:
    run_ranks(2, _right_after_a_step)


OPTIONS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "offload": {"optimizer": "cpu", "gradients": "cpu"}, "overlap_step": True},
    {"stage": 3},
    {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}, "overlap_step": True},
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_unfreezing_has_the_bits_of_a_plain_training(options: dict[str, Any]) -> None:
    assert all(run_ranks(2, is_plain, options, False))


def test_lost_counts_are_noticed() -> None:
    assert not any(run_ranks(2, is_plain, {"stage": 2}, True))


def hashes(rank: int, world_size: int, folder: str) -> list[str]:
    """bfloat16 weights with masters, at two stages; and a checkpoint from before."""
    found = []
    for stage, kind in ((0, "fp32"), (3, "split")):
        model, optimizer = made(grouped=True)
        for group in optimizer.param_groups:
            group["master"] = kind
        model, optimizer = shardcore.shard(model, optimizer, stage, precision="bf16")
        steps(model, optimizer, 0)
        if stage == 0:
            shardcore.save(folder, model, optimizer)
        shardcore.unfreeze(model.blocks[1:])
        steps(model, optimizer, 2)
        found.append(hash_of_training(model, optimizer))
    again, other = shardcore.shard(*made(grouped=True), 2, precision="bf16")
    shardcore.unfreeze(again.blocks[1:])
    shardcore.load(folder, again, other)
    steps(again, other, 2)
    return [*found, hash_of_training(again, other)]


@pytest.mark.more
def test_masters_are_carried_and_old_checkpoints_load(tmp_path: Any) -> None:
    assert_one(one for of_rank in run_ranks(2, hashes, str(tmp_path)) for one in of_rank)


def refuses(rank: int, world_size: int) -> None:
    model, optimizer = shardcore.shard(*made(grouped=False), 3)
    before = hash_of_training(model, optimizer)
    with pytest.raises(ValueError, match="call add_param_group"):
        shardcore.unfreeze(model)
    with pytest.raises(ValueError, match="not parameters of the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match=r"rank 1 refused|lr"):
        optimizer.add_param_group(
            {"params": list(model.inp.parameters()), "lr": -1.0 if rank else 0.1}
        )
    with pytest.raises(ValueError, match="ranks disagree"):
        optimizer.add_param_group({"params": [[*model.inp.parameters()][rank]]})
    loss_of(model, batch_of(0, 0, rank)).backward()
    with pytest.raises(ValueError, match="gradients wait"):
        optimizer.add_param_group({"params": list(model.inp.parameters())})
    optimizer.zero_grad()
    assert len(optimizer.param_groups) == 1
    assert hash_of_training(model, optimizer) == before
    steps(model, optimizer, 0)


def add_groups(rank: int, world_size: int, kind: str, stage: int) -> str:
    """Groups that the optimizer's own class completes and checks, which train."""
    model = make_net().requires_grad_(False)
    head = [*model.head.requires_grad_(True).parameters()]
    made: Any = (
        shardcore.Muon(head, lr=1e-2)
        if kind == "muon"
        else torch.optim.SGD(head, lr=1e-2, momentum=0.9)
    )
    model, optimizer = shardcore.shard(model, made, stage)
    steps(model, optimizer, 0)
    matrices, others = (
        [p for p in model.blocks.parameters() if (p.ndim == 2) == matrix]
        for matrix in (True, False)
    )
    for wrong in (
        ({"lr": -1.0}, {"use_muon": True}) if kind == "muon" else ({"lr": -1.0}, {"momentum": -0.5})
    ):
        with pytest.raises(ValueError, match=r"earning rate|lr|matrix|momentum"):
            optimizer.add_param_group({"params": others, **wrong})
    optimizer.add_param_group({"params": matrices, "weight_decay": 0.1})
    optimizer.add_param_group(
        {"params": others, **({"use_muon": False} if kind == "muon" else {"momentum": 0.5})}
    )
    steps(model, optimizer, 2)
    return hash_of_training(model, optimizer)


@pytest.mark.parametrize("kind", ["muon", "sgd"])
def test_groups_of_other_optimizers_train(kind: str) -> None:
    (alone,) = run_ranks(1, add_groups, kind, 0)
    assert run_ranks(2, add_groups, kind, 2) == [alone, alone]


def test_what_is_refused_changes_nothing() -> None:
    run_ranks(2, refuses)


def averages(rank: int, world_size: int) -> None:
    """A moving average goes on; of what begins to train it begins with the weights."""
    found = []
    for stage in (1, 3):
        model, optimizer = shardcore.shard(*made(grouped=True), stage)
        ema = shardcore.EMA(model, 0.5)
        steps(model, optimizer, 0)
        ema.update()
        before = ema.state_dict()["averages"]
        shardcore.unfreeze(model.blocks[1:])
        after = ema.state_dict()["averages"]
        assert all(torch.equal(after[name], value) for name, value in before.items())
        whole = model.state_dict()
        assert all(
            torch.equal(value, whole[name]) for name, value in after.items() if name not in before
        )
        assert len(after) == len(before) + 11
        steps(model, optimizer, 2)
        ema.update()
        found.append(hash_of(ema.state_dict()["averages"].values()))
    assert_one(found)


def test_a_moving_average_goes_on() -> None:
    run_ranks(2, averages)


def _sums(rank: int, world_size: int) -> list[float]:
    """Return norms of a gradient that is summed over ranks of equal batches, and of one rank's."""
    norms = []
    for sums in (True, False):
        model, optimizer = made(grouped=True)
        model, optimizer = shardcore.shard(model, optimizer, 2, precision="fp32")
        if sums:
            optimizer._engine.sum_gradients()
        shardcore.unfreeze(model.blocks[1])
        loss_of(model, batch_of(0, 0, 0)).backward()
        grad = shardcore.full_grad(model.blocks[1].up.weight)
        assert grad is not None
        norms.append(grad.norm().item())
    return norms


def test_gradients_that_are_summed_are_summed_after_unfreezing_too() -> None:
    for summed, averaged in run_ranks(2, _sums):
        assert summed == 2 * averaged
