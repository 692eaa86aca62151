"""What a sharded model's optimizer still is to its user: options, states, gradients, the optimizer that it replaced."""

import copy
import logging
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import shardcore
from tests.engine.models import Run, batch_of, hash_of, loss_of, make_net, train
from tests.ranks import run_ranks


def one_backward(model: nn.Module) -> None:
    loss_of(model, batch_of(9, 0, 0)).backward()


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("change", [{"amsgrad": True}, {"state_dtype": "bf16"}, {"master": "fp32"}])
def test_options_that_decide_which_states_there_are_stay(stage: int, change: dict[str, Any]) -> None:
    model, optimizer, _ = train(0, Run(stage=stage, steps=1))
    key, value = next(iter(change.items()))
    saved = optimizer.state_dict()
    before = hash_of(model.state_dict().values())
    optimizer.param_groups[0][key] = value
    one_backward(model)
    with pytest.raises(ValueError, match=rf"step: param_groups\[0\].{key} is {value!r}; expected .*, as when shard\(\)"):
        optimizer.step()
    assert hash_of(model.state_dict().values()) == before
    optimizer.load_state_dict(saved) if key == "amsgrad" else optimizer.param_groups[0].update(saved["param_groups"][0])
    optimizer.step()


def test_a_state_dict_of_amsgrad_is_refused_where_there_is_no_maximum() -> None:
    _, given, _ = train(0, Run(steps=1, adam={"amsgrad": True}))
    model, optimizer, _ = train(0, Run(steps=1))
    before = hash_of(model.state_dict().values())
    with pytest.raises(ValueError, match=r"load_state_dict: param_groups\[0\].amsgrad is True; expected False"):
        optimizer.load_state_dict(given.state_dict())
    assert optimizer.param_groups[0]["amsgrad"] is False
    assert hash_of(model.state_dict().values()) == before


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (shardcore.FusedAdam, {"exp_avg": torch.zeros(3)}),
        (shardcore.FusedAdam, {"ema": torch.zeros(5)}),
        (torch.optim.AdamW, {"exp_avg": torch.zeros(3)}),
        (torch.optim.AdamW, {"ema": torch.zeros(5)}),
        (torch.optim.AdamW, {"step": torch.tensor(1.5)}),
    ],
)
def test_a_bad_state_is_refused_before_anything_changes(kind: Any, bad: dict[str, torch.Tensor]) -> None:
    model = make_net()
    optimizer = kind(model.parameters())
    one_backward(model)
    optimizer.step()
    optimizer.zero_grad()
    good = dict(optimizer.state[model.gain])
    optimizer.state[model.gain] = good | bad
    with pytest.raises((ValueError, TypeError), match=r"shard: the optimizer's state of param_groups\[0\] params"):
        shardcore.shard(model, optimizer, 2, precision="bf16")
    assert model.gain.dtype == torch.float32
    assert not hasattr(model, "_shardcore_engine")
    optimizer.state[model.gain] = good
    one_backward(model)
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_grad_forgets_what_a_user_assigned(stage: int) -> None:
    model, optimizer, _ = train(0, Run(stage=stage, steps=1))
    for forget in (optimizer.zero_grad, model.zero_grad):
        model.gain.grad = torch.ones(())
        with pytest.raises(ValueError, match=r"^backward: gain\.grad was assigned; expected None"):
            one_backward(model)
        forget()
        one_backward(model)
        optimizer.step()


def test_after_a_sparse_gradient_training_goes_on() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    model, optimizer = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 2, precision="fp32")
    with pytest.raises(ValueError, match=r"0.weight has layout torch.sparse_coo; expected a dense gradient"):
        model(torch.arange(3)).sum().backward()
    optimizer.zero_grad()
    model[0].sparse = False
    model(torch.arange(3)).sum().backward()
    optimizer.step()


def _checkpoint(rank: int, world_size: int, stage: int) -> list[str]:
    model, optimizer, _ = train(rank, Run(stage=stage, steps=2))
    before = hash_of(model.state_dict().values())
    saved = get_optimizer_state_dict(model, optimizer)
    assert {entry["step"].item() for entry in saved["state"].values()} == {2.0}
    whole = optimizer.state_dict()["state"]
    train_more = [batch_of(step, 0, rank) for step in (5, 6)]
    for batch in train_more:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    set_optimizer_state_dict(model, optimizer, saved)
    again = optimizer.state_dict()["state"]
    same = all(torch.equal(whole[n][key], again[n][key]) for n in whole for key in whole[n])
    return [before, str(same)]


@pytest.mark.parametrize("stage", [0, 2])
def test_torchs_distributed_checkpoint_reads_and_writes_the_state(stage: int) -> None:
    first, second = run_ranks(2, _checkpoint, stage)
    assert first == second
    assert first[1] == "True"


def test_state_shows_parameters_and_step_counts() -> None:
    model, optimizer, _ = train(0, Run(steps=3))
    assert len(optimizer.state) == len(list(model.parameters()))
    assert optimizer.state[model.gain]["step"] == 3
    with pytest.raises(KeyError, match=r"optimizer\.state: 'exp_avg' was read, but states lie in shards; expected shardcore\."):
        optimizer.state[model.gain]["exp_avg"]
    with pytest.raises(TypeError):
        optimizer.state[model.gain] = {}


def _other_entries(rank: int, world_size: int, kind: Any) -> list[Any]:
    model = make_net()
    optimizer: Any = kind(model.parameters(), lr=1e-2)
    one_backward(model)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state["tokens"] = 17
    model, optimizer = shardcore.shard(model, optimizer, 2, precision="fp32")
    optimizer.state["ema"] = {"decay": 0.5}
    one_backward(model)
    optimizer.step()
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [*range(len(list(model.parameters()))), "tokens", "ema"]
    optimizer.load_state_dict({**saved, "state": {**saved["state"], "tokens": 20}})
    del optimizer.state["ema"]
    assert len(optimizer.state) == len(list(optimizer.state)) == len(list(model.parameters())) + 1
    for change in (
        lambda: optimizer.state.__setitem__(model.gain, {}),
        lambda: optimizer.state.__delitem__(model.gain),
        lambda: optimizer.state[model.gain].update(exp_avg=torch.zeros(())),
        lambda: optimizer.state[model.gain].__setitem__("exp_avg", torch.zeros(())),
        lambda: optimizer.state[model.gain].clear(),
        lambda: optimizer.state.clear(),
        lambda: setattr(optimizer, "state", {}),
    ):
        with pytest.raises(TypeError, match=r"optimizer\.state: .* states lie in shards; expected optimizer\.load_state_dict"):
            change()
    optimizer.param_groups.extend(optimizer.param_groups)
    twice = optimizer.state_dict()
    ids = twice["param_groups"][0]["params"]
    assert [group["params"] for group in twice["param_groups"]] == [ids, ids]
    with pytest.raises(ValueError, match=r"load_state_dict: param_groups has 2 groups; expected 1, as shard\(\) found them"):
        optimizer.load_state_dict(twice)
    return [saved["state"]["tokens"], saved["state"]["ema"], twice["state"]["tokens"], list(twice["state"])[:-1] == ids]


@pytest.mark.parametrize("kind", [shardcore.FusedAdam, torch.optim.AdamW])
def test_other_entries_of_state_and_groups_listed_twice_are_in_state_dicts(kind: Any) -> None:
    assert run_ranks(2, _other_entries, kind) == [[17, {"decay": 0.5}, 20, True]] * 2


def test_the_replaced_optimizer_keeps_no_states() -> None:
    model = make_net()
    old = torch.optim.AdamW(model.parameters())
    one_backward(model)
    old.step()
    old.zero_grad()
    scheduler = torch.optim.lr_scheduler.StepLR(old, 1)
    _, new = shardcore.shard(model, old, 2, precision="bf16")
    assert not old.state
    assert scheduler.optimizer is old
    assert new.state_dict()["state"][0]["step"] == 1


def test_parameters_that_no_optimizer_updates_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for stage in (0, 1):
        caplog.clear()
        model = make_net()
        with caplog.at_level(logging.WARNING, "shardcore"):
            shardcore.shard(model, shardcore.FusedAdam(model.blocks.parameters()), stage, precision="bf16")
        said = [record.getMessage() for record in caplog.records]
        assert [message.startswith("shard: no group of the optimizer has these") for message in said] == [True] * stage
    assert all(name in said[0] for name in ("gain", "inp.weight", "inp.bias", "head.weight"))


def _submodule(rank: int, world_size: int, stage: int) -> bool:
    model, _, _ = train(rank, Run(stage=stage, precision="bf16", shard={"overlap_step": stage == 2}))
    whole, block = model.state_dict(), model.blocks[1].state_dict()
    with shardcore.full_params(model):
        copied = copy.deepcopy(model.blocks[1]).state_dict()
    assert all(value.dtype == torch.bfloat16 for value in copied.values())
    assert block["up.weight"].dtype == torch.float32
    for prefix in ("blocks.1.", "block.", "m.blocks.1."):
        for into in ({}, {"destination": OrderedDict()}):
            prefixed = model.blocks[1].state_dict(prefix=prefix, **into)
            assert list(prefixed) == [prefix + key for key in block]
            assert all(prefixed[prefix + key].equal(value) for key, value in block.items())
    for parts in ({"outer": model, "alias": model.blocks[1]}, {"alias": model.blocks[1], "outer": model}):
        prefixed = nn.ModuleDict(parts).state_dict()  # as a LightningModule has a part of its model
        assert all(prefixed[f"outer.{key}"].equal(value) for key, value in whole.items())
        assert all(prefixed[f"alias.{key}"].equal(value) for key, value in block.items())
    both = model.head.state_dict()
    model.blocks[1].state_dict(destination=both, prefix="enc.")
    assert all(both[f"enc.{key}"].equal(value) for key, value in block.items())
    return all(torch.equal(value, whole[f"blocks.1.{key}"]) for key, value in block.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_submodules_state_dict_is_from_the_master_too(stage: int) -> None:
    assert run_ranks(2, _submodule, stage) == [True, True]
