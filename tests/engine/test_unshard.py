"""Stage 3: weights are whole only around their use; what uses them, when, and what happens to
those who come at other times.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.engine.units import Unit, UnitState
from shardcore.engine.unshard import Order, Unsharder
from tests.support.models import (
    Net,
    Ordered,
    Run,
    batch_of,
    hash_of,
    hash_of_training,
    loss_of,
    make_net,
    stepped,
    train,
)
from tests.support.ranks import run_ranks
from tests.support.schedules import recording

ADAM = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What a world of one does with weights: "+blocks.0" when a unit's gather starts,
    "-blocks.0" when it is resharded.
    """
    with recording() as events:
        yield events


def taken(log: list[str]) -> list[str]:
    events = log.copy()
    log.clear()
    return events


# --- when weights are whole -----------------------------------------------------------------------


def test_each_unit_is_gathered_ahead_and_resharded(log: list[str]) -> None:
    model, _, _ = train(0, Run(stage=3, steps=0))
    a, b, c = "blocks.0", "blocks.1", "blocks.2"
    for step in range(3):
        loss = loss_of(model, batch_of(step, 0, 0))
        # the order is not known yet
        first = ["+root", f"+{a}", f"-{a}", f"+{b}", f"-{b}", f"+{c}", f"-{c}"]
        # the last unit stays: its backward is next
        ahead = ["+root", f"+{a}", f"+{b}", f"-{a}", f"+{c}", f"-{b}"]
        assert taken(log) == (first if step == 0 else ahead)
        loss.backward()
        first = [f"+{c}", f"-{c}", f"+{b}", f"-{b}", f"+{a}", f"-{a}", "-root"]
        ahead = [f"+{b}", f"-{c}", f"+{a}", f"-{b}", f"-{a}", "-root"]
        assert taken(log) == (first if step == 0 else ahead)


def test_without_resharding_weights_are_gathered_once(log: list[str]) -> None:
    model, optimizer, _ = train(0, Run(stage=3, steps=2, shard={"reshard_after_forward": False}))
    log.clear()
    loss_of(model, batch_of(0, 0, 0)).backward()
    assert sorted(event for event in taken(log) if event[0] == "+") == [
        "+blocks.0",
        "+blocks.1",
        "+blocks.2",
        "+root",
    ]
    kept = hash_of_training(model, optimizer)
    assert kept == hash_of_training(*train(0, Run(stage=3, steps=2))[:2])


def test_evaluation_leaves_nothing_whole(log: list[str]) -> None:
    model, _, _ = train(0, Run(stage=3, steps=1))
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(2, 10))
        assert not any(
            unit.state is not UnitState.SHARDED for unit in model._shardcore_engine.unsharder.units
        )


def test_a_unit_is_sharded_gathering_or_unsharded() -> None:
    model, _, _ = train(0, Run(stage=3, steps=2))
    unsharder = model._shardcore_engine.unsharder
    unit = unsharder.units[1]
    seen = [unit.state]
    unsharder._start(unit)
    seen.append(unit.state)
    unsharder._unshard(unit)
    seen.append(unit.state)
    unsharder.reshard_all()
    assert [*seen, unit.state] == [
        UnitState.SHARDED,
        UnitState.GATHERING,
        UnitState.UNSHARDED,
        UnitState.SHARDED,
    ]


def test_another_order_is_learned_anew(log: list[str]) -> None:
    """A pass that leaves the known way gathers nothing ahead from there on; the next pass knows
    the new way.
    """
    torch.manual_seed(0)
    model, optimizer, _ = train(0, Run(stage=3, steps=0), Ordered())
    expected = Ordered()
    expected.load_state_dict(model.state_dict())
    for order in [
        (0, 1, 2),
        (0, 1, 2),
        (0, 2, 1),
        (0, 2, 1),
        (1, 1, 0),
        (1, 1, 0),
        (2,),
        (0, 1, 2),
    ]:
        log.clear()
        x = torch.ones(2, 10)
        model(x, order).sum().backward()
        expected(x, order).sum().backward()
        for (name, param), twin in zip(
            model.named_parameters(), expected.parameters(), strict=True
        ):
            got = shardcore.full_grad(param)
            assert (got is None) == (twin.grad is None), name
            assert got is None or torch.allclose(got, twin.grad, rtol=1e-5, atol=1e-6), name
        optimizer.zero_grad()
        expected.zero_grad()
        assert sum(event[0] == "+" for event in log) == sum(event[0] == "-" for event in log)


def _pool_bytes(rank: int, world_size: int) -> list[int]:
    torch.manual_seed(0)
    model, _, _ = train(rank, Run(stage=3, steps=3), Net(depth=8))
    weights = model._shardcore_engine.unsharder
    units = {
        unit.name: sum(b.layout.numel * b.weight.itemsize for b in unit.buckets)
        for unit in weights.units
    }
    used = weights.pool.allocated_bytes
    with shardcore.full_params(model):
        assert weights.pool.allocated_bytes >= sum(units.values())
    return [used, weights.pool.allocated_bytes, units[""] + 2 * units["blocks.0"]]


def test_no_more_than_two_units_and_the_root_are_whole_at_once() -> None:
    for used, used_after_full_params, limit in run_ranks(2, _pool_bytes):
        assert used <= limit
        assert used_after_full_params <= limit


# --- who reads at other times ---------------------------------------------------------------------


def test_reading_a_closed_weight_names_it() -> None:
    model, optimizer, _ = train(0, Run(stage=3, steps=1))
    message = r"blocks\.1\.up\.weight is sharded \(stage 3\).*with shardcore\.full_params\(model\)"
    weight = model.blocks[1].up.weight
    for read in (
        lambda: weight + 1,
        lambda: weight.tolist(),
        lambda: weight.data.zero_(),
        lambda: nn.functional.linear(torch.ones(24), weight),
    ):
        with pytest.raises(RuntimeError, match=message):
            read()
    with pytest.raises(RuntimeError, match=r"head\.weight is sharded .* of the model"):
        nn.functional.linear(torch.ones(24), model.head.weight)
    before = hash_of_training(model, optimizer)
    out = model.blocks[1](torch.ones(2, 24))  # a unit of its own may be called
    out.sum().backward()
    assert shardcore.full_grad(weight) is not None
    assert shardcore.full_grad(model.head.weight) is None
    optimizer.zero_grad()
    assert hash_of_training(model, optimizer) == before


def test_parameters_stay_the_same_objects() -> None:
    model = make_net()
    params = list(model.parameters())
    model, _, _ = train(0, Run(stage=3), model)
    assert all(p is q for p, q in zip(params, model.parameters(), strict=True))
    assert all(
        p.shape == q.shape and p.requires_grad
        for p, q in zip(params, make_net().parameters(), strict=True)
    )


def _edited(rank: int, world_size: int, stage: int, precision: str) -> str:
    model, optimizer, _ = train(rank, Run(stage=stage, precision=precision))
    with shardcore.full_params(model), torch.no_grad():
        model.head.weight[1] = 2.0
        with shardcore.full_params(model.blocks[0]):
            model.blocks[0].up.weight.mul_(0.5)
        model.inp.weight.add_(0.25)
    loss_of(model, batch_of(7, 0, rank)).backward()
    optimizer.step()
    return hash_of_training(model, optimizer)


@pytest.mark.cases(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_edits_in_full_params_reach_the_shards(precision: str) -> None:
    hashes = {value for stage in (2, 3) for value in run_ranks(2, _edited, stage, precision)}
    assert len(hashes) == 1


def test_loading_a_module_while_it_is_whole() -> None:
    model, _, _ = train(0, Run(stage=3, precision="bf16"))
    given = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    with shardcore.full_params(model):
        model.load_state_dict(given)
        assert torch.equal(model.head.weight, given["head.weight"].to(torch.bfloat16))
    assert hash_of(model.state_dict().values()) == hash_of(given.values())


def _generate(rank: int, world_size: int, generates: bool, overlap: bool) -> str:
    """Train; between steps each rank runs forward as often as its samples are long, one of them
    with gradients.
    """
    model, optimizer, _ = train(rank, Run(stage=3, steps=2, shard={"overlap_step": overlap}))
    for step in range(2, 5):
        if generates:
            with shardcore.full_params(model):
                with torch.no_grad():
                    outputs = [model(batch_of(step, i, 0)[0]) for i in range(3 * rank + step)]
                    outputs += [model.head(torch.ones(24)) for _ in range(rank)]
                assert all(output.isfinite().all() for output in outputs)
                if rank == 0:
                    assert model(batch_of(step, 0, 0)[0]).requires_grad
                    assert model.blocks[1](torch.ones(24)).requires_grad
            with shardcore.full_params(model.blocks[1]):
                for _ in range(rank):
                    model.blocks[1](torch.ones(24))
        stepped(model, optimizer, rank, step)
    return hash_of_training(model, optimizer)


@pytest.mark.cases(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_run_forwards_of_their_own_inside_full_params(overlap: bool) -> None:
    assert run_ranks(2, _generate, True, overlap) == run_ranks(2, _generate, False, overlap)


def _full_params_fails_on_its_way(model: Any) -> None:
    opening = Unsharder._unshard

    def failing(weights: Unsharder, unit: Any) -> None:
        if unit is weights.units[2]:
            raise MemoryError("no more")
        opening(weights, unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unsharder, "_unshard", failing)
        with pytest.raises(MemoryError, match="no more"), shardcore.full_params(model):
            pass


def test_full_params_that_fails_on_its_way_holds_nothing() -> None:
    model, optimizer, _ = train(0, Run(stage=3, steps=1))
    _full_params_fails_on_its_way(model)
    assert not any(
        unit.state is UnitState.UNSHARDED or unit.pins
        for unit in model._shardcore_engine.unsharder.units
    )
    for step in range(1, 3):
        stepped(model, optimizer, 0, step)
    assert hash_of_training(model, optimizer) == hash_of_training(
        *train(0, Run(stage=3, steps=3))[:2]
    )


def _load_after(rank: int, world_size: int, how: str) -> tuple[list[str], int, int]:
    """Load shards while old weights may be on their way; returns the weights that are not new then,
    and the pool's bytes.

    how: a `full_params` that fails on its way in, or a gather that nobody used, as a failed forward
    leaves it.
    """
    model, _, _ = train(rank, Run(stage=3, steps=1))
    weights = model._shardcore_engine.unsharder
    shards = shardcore.sharded_state_dict(model)
    with shardcore.full_params(model), torch.no_grad():
        for param in model.parameters():
            param.zero_()
    before = weights.pool.allocated_bytes
    if how == "gather":
        weights._start(weights.units[2])
    else:
        _full_params_fails_on_its_way(model)
        assert all(not unit.gathers for unit in weights.units)
    pool = weights.pool.allocated_bytes
    shardcore.load_sharded_state_dict(model, shards)
    state = model.state_dict()
    with shardcore.full_params(model):
        wrong = [
            name for name, param in model.named_parameters() if not torch.equal(param, state[name])
        ]
    return wrong, before, pool


@pytest.mark.parametrize("how", ["full_params", "gather"])
def test_shards_that_are_loaded_are_what_is_gathered_next(how: str) -> None:
    for wrong, before, pool in run_ranks(2, _load_after, how):
        assert wrong == []
        assert pool <= before or how == "gather"


def _penalized(rank: int, world_size: int, stage: int) -> tuple[str, str]:
    """Every rank has the same batches, so that sharded training has the bits of unsharded
    training.
    """
    hashes = []
    for shards in (True, False):
        model = make_net()
        optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2)
        if shards:
            model, optimizer = shardcore.shard(model, optimizer, stage)
        for step in range(3):
            x, y = batch_of(step, 0, 0)
            x.requires_grad_()
            with shardcore.full_params(model) if shards else nullcontext():
                out = model(x)
                (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
                ((out - y).square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        hashes.append(hash_of(model.state_dict().values()))
    return hashes[0], hashes[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_penalty_inside_full_params(stage: int) -> None:
    for sharded, plain in run_ranks(2, _penalized, stage):
        assert sharded == plain


def test_what_follows_a_unit_is_expected_as_long_as_the_order_holds() -> None:
    order, (first, second, third) = Order(), (Unit(name, [], stays=False) for name in "abc")
    order.begin()
    for unit in (first, second, second, third):
        order.use(unit)
        assert order.after(1) == []
    order.end()
    order.begin()
    order.use(first)
    assert order.after(2) == [second, third]
    assert not order.is_last(first)
    order.use(third)
    assert order.after(2) == []
    order.end()
    order.begin()
    order.use(first)
    assert order.after(2) == [third]
    order.use(third)
    assert order.is_last(third)
