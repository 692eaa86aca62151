"""State dicts, options and states of a sharded model's optimizer: exact, exchangeable with
torch, effective when loaded.
"""

import copy
import itertools
import logging
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import shardcore
from shardcore.engine.optimizer_state import OptimizerStateIO
from shardcore.engine.states import DeviceStore
from shardcore.offload.cpu_store import CpuStore
from tests.support.choice import few
from tests.support.models import Run, batch_of, hash_of, hash_of_training, loss_of, make_net, train
from tests.support.ranks import run_ranks

ADAM = {"lr": 1e-2, "weight_decay": 0.1}
CPU, PARAMS = {"optimizer": "cpu"}, {"optimizer": "cpu", "params": "cpu"}
PLACES: list[tuple[int, str, Any]] = [
    (stage, precision, CPU if offloaded else None)
    for stage, precision, offloaded in few(
        [*itertools.product((0, 1, 2, 3), ("fp32", "bf16"), (False, True))]
    )
]
PLACES += [(2, "bf16", CPU | {"ratio": 0.37}), (3, "fp32", PARAMS), (3, "bf16", PARAMS)]
RUNS = [
    Run(stage=stage, precision=precision, shard={"offload": offload}, steps=3)
    for stage, precision, offload in PLACES
]
IDS = [
    f"stage{r.stage}-{r.precision}-{'-'.join(map(str, (r.shard['offload'] or {'device': ''}).values()))}"
    for r in RUNS
]


def _one_step(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    loss_of(model, batch_of(step, 0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _resumed(rank: int, world_size: int, run: Run) -> list[str]:
    """Train on; the second model starts elsewhere, loads the first one's state dicts and must
    end at the same bits.
    """
    model, optimizer, _ = train(rank, run)
    saved = model.state_dict(), optimizer.state_dict()
    _are_whole(run, model, *saved)
    _one_step(model, optimizer, rank, 9)
    other, other_optimizer, _ = train(rank, Run(**{**run.__dict__, "seed": 5, "steps": 1}))
    differs = hash_of_training(other, other_optimizer)
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    _one_step(other, other_optimizer, rank, 9)
    return [hash_of_training(model, optimizer), hash_of_training(other, other_optimizer), differs]


def _are_whole(run: Run, model: nn.Module, weights: dict[str, Any], adam: dict[str, Any]) -> None:
    """Check that state dicts have ordinary tensors of full shapes, from the masters: bfloat16
    weights hide what those know.
    """
    expected, state = make_net().state_dict(), adam["state"]
    assert list(weights) == list(expected)
    for key, value in weights.items():
        assert (value.shape, value.dtype) == (expected[key].shape, torch.float32)
        assert value.untyped_storage().nbytes() <= value.numel() * 4, (
            "ordinary tensors of their own memory"
        )
    assert list(state) == list(range(len(list(model.parameters()))))
    for number, param in enumerate(model.parameters()):
        assert state[number]["exp_avg"].shape == param.shape
        assert state[number]["step"].item() == run.steps
        assert torch.equal(state[number]["exp_avg"], shardcore.full_state(param, "exp_avg"))
    with shardcore.full_params(model):
        same = [
            torch.equal(param.float(), weights[name]) for name, param in model.named_parameters()
        ]
    assert all(same) == (run.precision == "fp32")


@pytest.mark.cases(2)
@pytest.mark.parametrize("run", RUNS, ids=IDS)
def test_state_dicts_are_whole_and_loading_resumes_bit_for_bit(run: Run) -> None:
    (first, resumed, unrelated), other = run_ranks(2, _resumed, run)
    assert first == resumed != unrelated
    assert other == [first, resumed, unrelated]


@pytest.mark.parametrize(("stage", "kind"), [(0, "AdamW"), (2, "Adam")])
def test_torch_continues_from_a_sharded_state_and_back(stage: int, kind: str) -> None:
    run = Run(stage=stage, adam=ADAM | {"adam_w_mode": kind == "AdamW"})
    model, optimizer, _ = train(0, run)
    plain = make_net()
    plain.load_state_dict(model.state_dict())
    theirs = getattr(torch.optim, kind)(plain.parameters(), lr=0.5)
    theirs.load_state_dict(optimizer.state_dict())
    assert theirs.param_groups[0]["lr"] == 1e-2
    for step in range(10, 15):
        _one_step(model, optimizer, 0, step)
        _one_step(plain, theirs, 0, step)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)
    again, again_optimizer, _ = train(0, Run(stage=stage, steps=1, seed=3))
    again.load_state_dict(plain.state_dict())
    again_optimizer.load_state_dict(theirs.state_dict())
    assert again_optimizer.param_groups[0]["adam_w_mode"] == (kind == "AdamW")
    _one_step(again, again_optimizer, 0, 20)
    _one_step(plain, theirs, 0, 20)
    for p, q in zip(again.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("precision", "offload"), [("fp32", None), ("fp32", CPU), ("bf16", None)])
def test_the_optimizers_state_is_carried_into_the_shards(precision: str, offload: Any) -> None:
    """Two steps, shard, two steps: as four steps under the engine from the start (float32: also
    before it).
    """
    model = make_net()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), **ADAM)
    for step in range(2):
        _one_step(model, optimizer, 0, step)
    model, optimizer = shardcore.shard(model, optimizer, 2, precision=precision, offload=offload)
    assert shardcore.full_state(model.gain, "step").item() == 2
    for step in range(2, 4):
        _one_step(model, optimizer, 0, step)
    whole, _, _ = train(0, Run(stage=2, steps=4))
    for p, q in zip(model.state_dict().values(), whole.state_dict().values(), strict=True):
        if precision == "fp32":
            assert torch.equal(p, q)
        else:
            assert torch.allclose(p, q, rtol=0.05, atol=5e-3)


@pytest.mark.parametrize(
    ("kind", "offload"), [(torch.optim.AdamW, CPU), (shardcore.FusedAdam, None)]
)
def test_only_one_state_that_is_carried_is_there_twice(
    kind: Any, offload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_net()
    optimizer = kind(model.parameters())
    _one_step(model, optimizer, 0, 0)
    old = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
    there = []
    scatter = OptimizerStateIO._scatter

    def counted(*arguments: Any) -> None:
        scatter(*arguments)
        there.append(sum(state() is not None for state in old))

    monkeypatch.setattr(OptimizerStateIO, "_scatter", counted)
    shardcore.shard(model, optimizer, 2, offload=offload, precision="bf16")
    assert there == list(range(len(old), 0, -1))


@pytest.mark.parametrize("run", RUNS, ids=IDS)
def test_load_state_dict_holds_through_the_next_step(run: Run) -> None:
    """Weights loaded after shard must reach the masters: with lr 0 and no decay a step must
    leave them alone, exactly.
    """
    model, optimizer, _ = train(0, Run(**{**run.__dict__, "adam": {"lr": 1e-2}}))
    torch.manual_seed(77)
    given = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    optimizer.param_groups[0]["lr"] = 0.0
    model.load_state_dict(given)
    model.blocks[1].load_state_dict(
        {key: value + 1 for key, value in model.blocks[1].state_dict().items()}
    )
    expected = {key: value.clone() for key, value in given.items()}
    for key, value in model.blocks[1].state_dict().items():
        expected[f"blocks.1.{key}"] = value.float()
    _one_step(model, optimizer, 0, 1)
    for key, value in model.state_dict().items():
        if run.precision == "bf16" and key.startswith("blocks.1."):
            continue  # a submodule's state_dict is of its bfloat16 weights
        assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("run", RUNS, ids=IDS)
def test_weights_edited_in_place_are_kept(run: Run) -> None:
    model, optimizer, _ = train(0, Run(**{**run.__dict__, "adam": {"lr": 1e-2}}))
    optimizer.param_groups[0]["lr"] = 0.0
    before = model.state_dict()
    with shardcore.full_params(model), torch.no_grad():
        model.head.weight[0] = 3.0
    _one_step(model, optimizer, 0, 1)
    after = model.state_dict()
    assert torch.equal(after["head.weight"][0], torch.full((24,), 3.0))
    assert torch.equal(after["head.weight"][1:], before["head.weight"][1:])
    assert torch.equal(after["inp.weight"], before["inp.weight"])


def test_a_tied_weight_is_whole_under_both_names() -> None:
    model = make_net()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model, _, _ = train(0, Run(precision="bf16"), model)
    state = model.state_dict()
    assert torch.equal(state["blocks.0.up.weight"], state["blocks.2.up.weight"])
    assert state["blocks.2.up.weight"].dtype == torch.float32
    model.load_state_dict(state)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model, optimizer, _ = train(0, Run())
    good = optimizer.state_dict()
    expected = hash_of_training(model, optimizer)
    for number, bad in (
        (3, {**good["state"][3], "exp_avg": torch.zeros(2, 2)}),
        (0, {**good["state"][0], "momentum": torch.zeros(())}),
        (5, {**good["state"][5], "step": torch.tensor(-1.0)}),
        (99, good["state"][0]),
    ):
        broken = {"state": {**good["state"], number: bad}, "param_groups": good["param_groups"]}
        with pytest.raises((ValueError, TypeError)):
            optimizer.load_state_dict(broken)
        assert hash_of_training(model, optimizer) == expected
    with pytest.raises(ValueError, match="no 'state'"):
        optimizer.load_state_dict({"param_groups": []})
    with pytest.raises(ValueError, match="assign is True"):
        model.load_state_dict(model.state_dict(), assign=True)


def test_an_empty_read_lies_where_parts_of_both_tiers_are_put_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, optimizer, _ = train(0, Run(shard={"offload": {"optimizer": "cpu", "ratio": 0.5}}))
    engine = optimizer._engine
    bucket = next(bucket for bucket in engine.buckets if bucket.device_numel and bucket.host_numel)
    asked: list[str] = []
    for store in (DeviceStore, CpuStore):
        monkeypatch.setattr(
            store,
            "read",
            lambda *a, _read=store.read, _name=store.__name__: (asked.append(_name), _read(*a))[1],
        )
    assert engine.store.read(bucket, "exp_avg", 0, 0).numel() == 0
    assert asked == ["CpuStore"]


def one_backward(model: nn.Module) -> None:
    loss_of(model, batch_of(9, 0, 0)).backward()


@pytest.mark.parametrize(
    ("stage", "key", "value"),
    [(0, "amsgrad", True), (2, "state_dtype", "bf16"), (2, "master", "fp32")],
)
def test_options_that_decide_which_states_there_are_stay(stage: int, key: str, value: Any) -> None:
    model, optimizer, _ = train(0, Run(stage=stage, steps=1))
    saved = optimizer.state_dict()
    before = hash_of(model.state_dict().values())
    optimizer.param_groups[0][key] = value
    one_backward(model)
    with pytest.raises(
        ValueError,
        match=rf"step: param_groups\[0\].{key} is {value!r}; expected .*, as when shard\(\)",
    ):
        optimizer.step()
    assert hash_of(model.state_dict().values()) == before
    optimizer.load_state_dict(saved) if key == "amsgrad" else optimizer.param_groups[0].update(
        saved["param_groups"][0]
    )
    optimizer.step()


def test_a_state_dict_of_amsgrad_is_refused_where_there_is_no_maximum() -> None:
    _, given, _ = train(0, Run(steps=1, adam={"amsgrad": True}))
    model, optimizer, _ = train(0, Run(steps=1))
    before = hash_of(model.state_dict().values())
    with pytest.raises(
        ValueError, match=r"load_state_dict: param_groups\[0\].amsgrad is True; expected False"
    ):
        optimizer.load_state_dict(given.state_dict())
    assert optimizer.param_groups[0]["amsgrad"] is False
    assert hash_of(model.state_dict().values()) == before


@pytest.mark.parametrize("kind", [shardcore.FusedAdam, torch.optim.AdamW])
@pytest.mark.parametrize(
    "bad", [{"exp_avg": torch.zeros(3)}, {"ema": torch.zeros(5)}, {"step": torch.tensor(1.5)}]
)
def test_a_bad_state_is_refused_before_anything_changes(
    kind: Any, bad: dict[str, torch.Tensor]
) -> None:
    model = make_net()
    optimizer = kind(model.parameters())
    one_backward(model)
    optimizer.step()
    optimizer.zero_grad()
    good = dict(optimizer.state[model.gain])
    optimizer.state[model.gain] = good | bad
    with pytest.raises(
        (ValueError, TypeError), match=r"shard: the optimizer's state of param_groups\[0\] params"
    ):
        shardcore.shard(model, optimizer, 2, precision="bf16")
    assert model.gain.dtype == torch.float32
    assert not hasattr(model, "_shardcore_engine")
    optimizer.state[model.gain] = good
    one_backward(model)
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 3])
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
    model, optimizer = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), 2, precision="fp32"
    )
    with pytest.raises(
        ValueError, match=r"0.weight has layout torch.sparse_coo; expected a dense gradient"
    ):
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
    with pytest.raises(
        KeyError,
        match=r"optimizer\.state: 'exp_avg' was read, but states are sharded; expected shardcore\.",
    ):
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
        with pytest.raises(
            TypeError,
            match=r"optimizer\.state: (.* )?states are sharded.*optimizer\.load_state_dict",
        ):
            change()
    optimizer.param_groups.extend(optimizer.param_groups)
    twice = optimizer.state_dict()
    ids = twice["param_groups"][0]["params"]
    assert [group["params"] for group in twice["param_groups"]] == [ids, ids]
    with pytest.raises(
        ValueError,
        match=r"load_state_dict: param_groups has 2 groups; expected 1, as shard\(\) found them",
    ):
        optimizer.load_state_dict(twice)
    return [
        saved["state"]["tokens"],
        saved["state"]["ema"],
        twice["state"]["tokens"],
        list(twice["state"])[:-1] == ids,
    ]


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
            shardcore.shard(
                model, shardcore.FusedAdam(model.blocks.parameters()), stage, precision="bf16"
            )
        said = [record.getMessage() for record in caplog.records]
        assert [
            message.startswith("shard: these trainable parameters are in no group")
            for message in said
        ] == [True] * stage
    assert all(name in said[0] for name in ("gain", "inp.weight", "inp.bias", "head.weight"))


def _submodule(rank: int, world_size: int, stage: int) -> bool:
    model, _, _ = train(
        rank, Run(stage=stage, precision="bf16", shard={"overlap_step": stage == 2})
    )
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
    for parts in (
        {"outer": model, "alias": model.blocks[1]},
        {"alias": model.blocks[1], "outer": model},
    ):
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
