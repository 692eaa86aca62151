"""Reads of full values: what they refuse, what they receive, which gathers run at once."""

from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.distributed.comm import Comm
from tests.support.models import Net, Run, batch_of, error_of, loss_of, make_net, train
from tests.support.ranks import run_ranks


def _received(rank: int, world_size: int, stage: int) -> list[tuple[str, int, int]]:
    """What reads of one parameter receive from other ranks, in bytes, and what the parameter
    has.
    """
    model = train(rank, Run(stage=stage, steps=1), Net(width=64, hidden=128))[0]
    loss_of(model, batch_of(1, 0, rank)).backward()
    received: list[int] = []
    exchange = Comm._exchange

    def counting(
        comm: Comm, sent: Any, places: Any, kind: Any, name: str, ranks: Any, of: Any
    ) -> Any:
        received.append(
            sum(
                data.nbytes for data, other in zip(places, ranks, strict=True) if other != comm.rank
            )
        )
        return exchange(comm, sent, places, kind, name, ranks, of)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "_exchange", counting)
        for name, param in model.named_parameters():
            for what, read in (
                ("grad", shardcore.full_grad),
                ("state", lambda p: shardcore.full_state(p, "exp_avg")),
            ):
                received.clear()
                read(param)
                found.append((f"{what} of {name}", sum(received), 4 * param.numel()))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_read_of_one_parameter_moves_no_other(stage: int) -> None:
    for found in run_ranks(2, _received, stage):
        assert [(name, moved) for name, moved, nbytes in found if moved > nbytes + 1024] == []


def _under_way(rank: int, world_size: int, stage: int) -> dict[str, list[int]]:
    """By call: how many gathers of whole values are under way at each wait for one."""
    model, optimizer, _ = train(rank, Run(stage=stage, steps=1))
    under_way: list[int] = []
    started: list[str] = []
    all_gather = Comm.all_gather

    class Seen:
        def wait(self) -> None:
            under_way.append(len(started) - len(under_way))

    def seen(comm: Comm, wholes: list[torch.Tensor], *arguments: Any, **options: Any) -> Any:
        works = all_gather(comm, wholes, *arguments, **options)
        if not wholes[0].is_floating_point():  # what ranks compare
            return works
        started.append("")
        return [Seen(), *works]

    def whole() -> None:
        with shardcore.full_params(model):
            pass

    shards = shardcore.sharded_state_dict(model)
    calls = {
        "state_dict": model.state_dict,
        "optimizer.state_dict": optimizer.state_dict,
        "full_params": whole,
        "load_sharded_state_dict": lambda: shardcore.load_sharded_state_dict(model, shards),
    }
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "all_gather", seen)
        for name, call in calls.items():
            call()
            found[name] = under_way.copy()
            under_way.clear()
            started.clear()
    return found


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (2, {"optimizer.state_dict": [2] * 7 + [1], "load_sharded_state_dict": [4, 3, 2, 1]}),
        (
            3,
            {
                "optimizer.state_dict": [2] * 7 + [1],
                "state_dict": [2, 2, 2, 1],
                "full_params": [4, 3, 2, 1],
            },
        ),
    ],
)
def test_a_gather_is_under_way_while_another_is_waited_for(
    stage: int, expected: dict[str, list[int]]
) -> None:
    for found in run_ranks(2, _under_way, stage):
        assert {name: counts for name, counts in found.items() if counts} == expected


def test_whole_values_of_the_wrong_thing() -> None:
    model = make_net()
    model.inp.requires_grad_(False)
    model, _, _ = train(0, Run(steps=0), model)
    with pytest.raises(ValueError, match="Parameter is not sharded"):
        shardcore.full_state(nn.Parameter(torch.zeros(1)), "step")
    with pytest.raises(ValueError, match="Net is not sharded"), shardcore.full_params(make_net()):
        pass
    with pytest.raises(ValueError, match="was frozen when shard"):
        shardcore.full_grad(model.inp.weight)
    with (
        pytest.raises(TypeError, match="got a Parameter; expected a module"),
        shardcore.full_params(model.head.weight),
    ):
        pass


def _reads_of_different_things(rank: int, world_size: int) -> list[str]:
    model, _, _ = train(rank, Run(steps=1, stage=1))
    head, gain = model.head.weight, model.gain
    return [
        error_of(lambda: shardcore.full_grad(model if rank else head)),
        error_of(lambda: shardcore.full_state(head, "momentum" if rank else "exp_avg")),
        error_of(lambda: shardcore.full_state(head, "step" if rank else "exp_avg")),
        error_of(lambda: shardcore.full_grad(gain if rank else head)),
        error_of(lambda: shardcore.full_state(head, "exp_avg")),
    ]


def test_a_read_that_one_rank_refuses_or_that_differs_is_refused_on_all() -> None:
    other, own = run_ranks(2, _reads_of_different_things)
    assert "full_grad: got a Net; expected a parameter" in own[0]
    assert (
        "full_state: head.weight has no state 'momentum'; expected one of step, exp_avg, exp_avg_sq"
        in own[1]
    )
    assert "full_grad: rank 1 refused: TypeError: full_grad: got a Net" in other[0]
    assert "full_state: rank 1 refused: KeyError: " in other[1]
    assert (
        "full_state: ranks disagree: the value read is step of head.weight on rank 1 but exp_avg "
        "of head.weight on rank 0; expected the same on every rank (nothing was changed)" in own[2]
    )
    assert "the value read is gain on rank 1 but head.weight on rank 0" in own[3]
    assert other[2:4] == own[2:4]
    assert other[4] == own[4] == "no error"
