"""The average of sharded weights is torch's AveragedModel's of an unsharded model; evaluation
with it changes nothing.
"""

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardcore
from shardcore.extras import ema as ema_module
from tests.support.models import Run, adam, hash_of_training, make_net, stepped, train
from tests.support.ranks import run_ranks
from tests.support.slices import lm_loss, make_lm, mesh_of, sharded_lm, train_lm

DECAY = 0.9
X = torch.linspace(-1, 1, 80).view(8, 10)
TIERS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "overlap_step": True},
    {"stage": 2, "offload": {"optimizer": "cpu"}, "overlap_step": True},
    {"stage": 3},
    {"stage": 3, "offload": {"optimizer": "cpu", "params": "cpu"}, "precision": "bf16"},
    {"stage": 2, "precision": "bf16"},
]


def step(model: Any, optimizer: Any, number: int, rank: int = 0) -> None:
    stepped(model, optimizer, rank, number)


def averaged_by_torch(steps: int) -> dict[str, torch.Tensor]:
    model = make_net()
    optimizer, averaged = (
        adam(model),
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
    )
    for number in range(steps):
        step(model, optimizer, number)
        averaged.update_parameters(model)
    return {name: param.detach() for name, param in averaged.module.named_parameters()}


def equal(state: dict[str, Any], expected: dict[str, torch.Tensor]) -> bool:
    averages = state["averages"]
    return averages.keys() == expected.keys() and all(
        torch.equal(averages[name], expected[name]) for name in expected
    )


def averages_on(rank: int, world_size: int, options: dict[str, Any], steps: int) -> bool:
    """Whether they are those of the masters after each step, and torch's. Every rank has the
    same batches.
    """
    model = make_net()
    model, optimizer = shardcore.shard(model, adam(model), **options)
    ema = shardcore.EMA(model, DECAY, offload=True if options["stage"] == 1 else None)
    expected: dict[str, torch.Tensor] = {}
    for number in range(steps):
        step(model, optimizer, number)
        ema.update()
        masters = {name: value for name, value in model.state_dict().items() if name != "offset"}
        if number == 0:
            expected = masters
        torch._foreach_lerp_(
            [expected[name] for name in masters], list(masters.values()), 1 - DECAY
        )
    state = ema.state_dict()
    assert state["updates"] == steps
    return equal(state, expected) and (
        "precision" in options or equal(state, averaged_by_torch(steps))
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize("options", TIERS, ids=str)
def test_it_is_the_average_of_the_masters_and_torchs(options: dict[str, Any]) -> None:
    assert all(run_ranks(2, averages_on, options, 4))


def averages_of_weights(rank: int, world_size: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ema_module, "read_weights", lambda engine, bucket: bucket.owned_values)
        return averages_on(rank, world_size, {"stage": 2, "precision": "bf16"}, 3)


def test_an_average_of_rounded_weights_is_noticed() -> None:
    assert not any(run_ranks(2, averages_of_weights))


def evaluates(rank: int, world_size: int, options: dict[str, Any], broken: bool) -> None:
    run = Run(
        options["stage"],
        steps=3,
        precision=options.get("precision"),
        shard={"offload": options.get("offload")},
    )
    expected = hash_of_training(*train(rank, run)[:2])
    model = make_net()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), **run.adam)
    model, optimizer = shardcore.shard(model, optimizer, **options)
    ema = shardcore.EMA(model, DECAY)
    for number in range(3):
        step(model, optimizer, number, rank)
        ema.update()
        averages = ema.state_dict()["averages"]
        with shardcore.full_params(model):
            before = [param.clone() for param in model.parameters()]
            dtype = before[0].dtype
        plain = make_net().to(dtype)
        plain.load_state_dict(averages, strict=False)
        with pytest.MonkeyPatch.context() as patch, torch.no_grad(), ema.swap():
            got = model(X)
            if broken:
                patch.setattr(shardcore.EMA, "_put", lambda *_: None)
        assert torch.equal(got, plain(X.to(dtype)))
        with shardcore.full_params(model):
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        with ema.swap(), shardcore.full_params(model):  # an edit is lost
            next(model.parameters()).data.zero_()
    assert hash_of_training(model, optimizer) == expected


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "options", [TIERS[0], TIERS[5], {"stage": 3, "offload": TIERS[4]["offload"]}], ids=str
)
def test_evaluation_has_the_averages_and_training_goes_on_as_if_it_had_not_been(
    options: dict[str, Any],
) -> None:
    run_ranks(2, evaluates, options, False)


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_do_not_come_back_are_noticed(stage: int) -> None:
    with pytest.raises(AssertionError):
        run_ranks(2, evaluates, {"stage": stage}, True)


def trained(rank: int, stage: int) -> tuple[Any, Any, shardcore.EMA]:
    model = make_net()
    model, optimizer = shardcore.shard(model, adam(model), stage)
    return model, optimizer, shardcore.EMA(model, DECAY)


def saves(rank: int, world_size: int, folder: str, steps: int) -> None:
    model, optimizer, ema = trained(rank, 2)
    for number in range(steps):
        step(model, optimizer, number)
        ema.update()
    shardcore.save(folder, model, optimizer, ema=ema)
    shardcore.save(folder, model, optimizer, tag="without", save_latest=False)


def goes_on(rank: int, world_size: int, folder: str, steps: int) -> None:
    model, optimizer, ema = trained(rank, 3)
    with pytest.raises(
        ValueError if rank == 0 else (ValueError, RuntimeError), match="no moving average"
    ):
        shardcore.load(folder, model, optimizer, ema=ema, tag="without")
    shardcore.load(folder, model, optimizer, ema=ema)
    again = trained(rank, 1)[2]
    again.load_state_dict(ema.state_dict())
    assert again.state_dict()["updates"] == steps
    assert equal(again.state_dict(), averaged_by_torch(steps))
    step(model, optimizer, steps)
    ema.update()
    saving = shardcore.save(folder, model, optimizer, ema=ema, tag="background", wait=False)
    ema.update()
    saving.wait()
    model, _, found = trained(rank, 0)
    shardcore.load(folder, model, ema=found, tag="background")
    assert found.updates == steps + 1
    assert equal(found.state_dict(), averaged_by_torch(steps + 1))


@pytest.mark.more
def test_a_checkpoint_keeps_it_for_any_world_and_stage(tmp_path: Any) -> None:
    run_ranks(2, saves, str(tmp_path), 3)
    run_ranks(4, goes_on, str(tmp_path), 3)


def refuses(rank: int, world_size: int, folder: str) -> None:
    model, optimizer, ema = trained(rank, 3)
    step(model, optimizer, 0)
    whole = model.state_dict()
    with ema.swap():
        for call in (
            optimizer.step,
            model.state_dict,
            optimizer.state_dict,
            lambda: model.load_state_dict(whole),
            lambda: shardcore.save(folder, model, optimizer),
            ema.update,
        ):
            with pytest.raises(ValueError, match="averaged weights"):
                call()
        ema.state_dict()
    with (
        shardcore.full_params(model),
        pytest.raises(ValueError, match="swap: called inside full_params"),
        ema.swap(),
    ):
        pass
    with pytest.raises(ValueError, match="gain has shape"):
        ema.load_state_dict(
            {"updates": 1, "averages": {**ema.state_dict()["averages"], "gain": torch.zeros(3)}}
        )
    with pytest.raises(ValueError, match="ema is a EMA that does not belong to model"):
        shardcore.save(folder, trained(rank, 1)[0], ema=ema)
    with pytest.raises(ValueError, match="decay is 2"):
        shardcore.EMA(model, 2)
    with pytest.raises(ValueError, match="no optimizer"):
        shardcore.EMA(shardcore.shard(make_net(), None, 3)[0])


def test_what_is_refused(tmp_path: Any) -> None:
    run_ranks(2, refuses, str(tmp_path))


# --- tensor-parallel models -----------------------------------------------------------------------


def average_of_slices(rank: int, world: int, tp: int, stage: int, folder: str) -> dict[str, Any]:
    """Averages after two steps, or on other slices those that were saved; an update more, and a
    swap.
    """
    mesh = mesh_of(world, tp)
    model, optimizer = sharded_lm(mesh, stage, frozen="second")
    ema = shardcore.EMA(model, DECAY)
    if tp == 2:
        expected: dict[str, torch.Tensor] = {}
        for number in range(2):
            train_lm(model, optimizer, mesh, range(number, number + 1))
            ema.update()
            masters = {
                name: value for name, value in model.state_dict().items() if "second" not in name
            }
            expected = expected or masters
            torch._foreach_lerp_(
                [*expected.values()],
                [masters[name] for name in expected],
                0.0 if number == 0 else 1 - DECAY,
            )
        assert equal(ema.state_dict(), expected)
        shardcore.save(folder, model, optimizer, ema=ema)
    shardcore.load(folder, model, optimizer, ema=ema)
    state = ema.state_dict()
    assert state["updates"] == 2
    ema.update()
    ema.load_state_dict(state)
    assert equal(ema.state_dict(), state["averages"])
    plain = make_lm()
    plain.load_state_dict(model.state_dict())
    plain.load_state_dict(state["averages"], strict=False)
    with ema.swap(), torch.no_grad():
        losses = [
            lm_loss(one, 9, 0, sliced).item() for one, sliced in ((model, tp > 1), (plain, False))
        ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    return {name: value.tolist() for name, value in state["averages"].items()}


@pytest.mark.more
def test_the_average_of_slices_is_that_of_the_whole_weights(tmp_path: Any) -> None:
    saved = run_ranks(4, average_of_slices, 2, 2, str(tmp_path))
    assert [saved[0]] * 6 == [*saved, *run_ranks(2, average_of_slices, 1, 3, str(tmp_path))]
