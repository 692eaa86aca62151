"""Scripts for DeepSpeed, with one word changed: its modules, functions and classes by their
names.
"""

import argparse
import random
import sys
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shardcore.ops.adam import DeepSpeedCPUAdam, FusedAdam  # type: ignore[import-not-found]
from torch import nn

import shardcore as deepspeed
from shardcore.deepspeed.params import ZeroParamStatus
from shardcore.engine.bucket import Bucket
from tests.support.deepspeed import ds_config, start, train
from tests.support.models import batch_of, hash_of_training, loss_of, make_net
from tests.support.ranks import run_fresh, run_ranks


def test_modules_have_deepspeeds_names() -> None:
    peer = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    for name in (
        "initialize",
        "init_distributed",
        "add_config_arguments",
        "init_inference",
        "DeepSpeedEngine",
    ):
        assert hasattr(peer, name)
        assert hasattr(deepspeed, name)
    for path in (
        *(
            "zero.Init",
            "zero.GatheredParameters",
            "ops.adam.DeepSpeedCPUAdam",
            "ops.adam.FusedAdam",
            "comm.all_reduce",
        ),
        *(
            "zero.ZeroParamStatus.AVAILABLE",
            "zero.unwrap_model_for_generation",
            "logger.info",
            "checkpointing.reset",
        ),
        *("DeepSpeedConfigError", "runtime.config.DeepSpeedConfigError"),
    ):
        of_peer, ours = peer, deepspeed
        for part in path.split("."):
            of_peer, ours = getattr(of_peer, part), getattr(ours, part)


def _imported_again() -> bool:
    """Import modules of a package that has DeepSpeed's names, too, as a script does that has not
    imported them.
    """
    del sys.modules["shardcore.checkpoint.consolidate"], deepspeed.checkpoint.consolidate
    return [
        import_module(f"shardcore.checkpoint.{name}") for name in ("consolidate", "utils")
    ] != []


def test_shardcores_own_packages_stay() -> None:
    assert deepspeed.checkpoint.__file__ is not None
    assert deepspeed.checkpoint.load.load is deepspeed.load
    assert run_fresh(_imported_again)


def test_what_is_not_there_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"shardcore\.pipe"):
        __import__("shardcore.pipe.module")
    with pytest.raises(ImportError, match="OnebitAdam"):
        exec("from shardcore.ops.adam import OnebitAdam")
    with pytest.raises(NotImplementedError, match="shardcore trains only"):
        deepspeed.init_inference()
    with pytest.raises(NotImplementedError, match="does not support expert parallelism"):
        deepspeed.moe.layer.MoE(8)
    with pytest.raises(NotImplementedError, match="chooses no batch sizes"):
        deepspeed.elasticity.compute_elastic_config({}, "0.19.8")


def test_a_model_without_experts_is_asked_for_them() -> None:
    net, utils = make_net(), deepspeed.moe.utils
    assert not any(isinstance(module, deepspeed.moe.layer.MoE) for module in net.modules())
    assert not any(utils.is_moe_param(param) for param in net.parameters())
    assert utils.has_moe_layers(net) == (False, 0)
    group = {"params": list(net.parameters()), "name": "all"}
    split = utils.split_params_into_different_moe_groups_for_optimizer
    assert split(group) == split([group]) == split((group,)) == [group]


def test_tensors_are_made_on_a_device_and_in_a_dtype() -> None:
    assert deepspeed.OnDevice is deepspeed.utils.OnDevice
    with deepspeed.OnDevice(dtype=torch.float16, device="meta"):
        net = make_net()
    assert {(param.device.type, param.dtype) for param in net.parameters()} == {
        ("meta", torch.float16)
    }
    with deepspeed.OnDevice(dtype=torch.float16, enabled=False):
        tensor = torch.zeros(1)
    assert (tensor.device.type, tensor.dtype) == ("cpu", torch.float32)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_nested_tensors_are_moved() -> None:
    move = deepspeed.runtime.utils.move_to_device
    batch = {"x": torch.ones(2), "rest": [torch.ones(1), (torch.ones(3),)]}
    moved = move(batch, "meta")
    assert moved["x"].is_meta
    assert moved["rest"][1][0].is_meta
    assert not batch["x"].is_meta
    assert move(Pair(torch.ones(1), torch.ones(1)), "meta")[1].is_meta
    own = torch.ones(2)
    assert move([own], "cpu", lambda item: isinstance(item, torch.Tensor))[0] is own


def _generation(rank: int, world_size: int) -> None:
    engine = start(ds_config(stage=3))
    param = engine.module.inp.weight
    with deepspeed.runtime.zero.unwrap_model_for_generation(engine) as model:
        assert param.ds_status == deepspeed.runtime.zero.ZeroParamStatus.AVAILABLE
        if rank == 0:  # not collective inside
            model(batch_of(0, 0, 0)[0])
    assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE


def test_weights_are_there_to_generate() -> None:
    run_ranks(2, _generation)


def test_the_optimizer_has_the_loss_scale_by_its_other_name() -> None:
    engine = start(ds_config(fp16={"enabled": True, "initial_scale_power": 4}))
    assert engine.optimizer.cur_scale == engine.optimizer.loss_scale == 16
    assert engine.optimizer.dynamic_loss_scale
    for fp16 in ({"enabled": True, "loss_scale": 8}, {"enabled": False}):
        assert not start(ds_config(fp16=fp16)).optimizer.dynamic_loss_scale


def test_a_configuration_is_read_alone() -> None:
    assert deepspeed.runtime.config.DeepSpeedConfig is deepspeed.DeepSpeedConfig
    config = deepspeed.DeepSpeedConfig(ds_config(accumulation=3))
    assert (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    ) == (12, 4, 3)
    assert config.zero_enabled
    with pytest.raises(ValueError, match="unknown_key"):
        deepspeed.DeepSpeedConfig({"unknown_key": 1})


def test_optimizers_that_are_not_built_are_refused_when_they_are_made() -> None:
    for kind in (deepspeed.ops.lamb.FusedLamb, deepspeed.runtime.fp16.onebit.OnebitAdam):
        with pytest.raises(
            NotImplementedError, match=f"{kind.__name__}: not built; expected FusedAdam"
        ):
            kind(make_net().parameters(), lr=1e-3)


def test_all_generators_are_seeded() -> None:
    drawn = []
    for _ in range(2):
        deepspeed.runtime.utils.set_random_seed(7)
        drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert drawn[0] == drawn[1]


def test_arguments_of_the_command_line() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    options = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (options.deepspeed, options.deepspeed_config) == (True, "ds.json")


@pytest.mark.parametrize(
    ("kind", "mode"), [(DeepSpeedCPUAdam, "adamw_mode"), (FusedAdam, "adam_w_mode")]
)
@pytest.mark.parametrize("decoupled", [True, False])
def test_optimizers_take_deepspeeds_arguments(kind: Any, mode: str, decoupled: bool) -> None:
    model, other = make_net(), make_net()
    optimizer = kind(
        model.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, **{mode: decoupled}
    )
    expected = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        other.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1
    )
    for net, its in ((model, optimizer), (other, expected)):
        for step in range(3):
            loss_of(net, batch_of(step, 0, 0)).backward()
            its.step()
            its.zero_grad()
    for param, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(param, same, rtol=1e-4, atol=1e-6)
    low = DeepSpeedCPUAdam(make_net().parameters(), fp32_optimizer_states=False)
    assert low.param_groups[0]["state_dtype"] == "bf16"


def test_lion_takes_deepspeeds_arguments() -> None:
    for kind in (deepspeed.ops.lion.FusedLion, deepspeed.ops.lion.DeepSpeedCPULion):
        optimizer = kind(make_net().parameters(), 1e-2, (0.8, 0.9), 0.1)
        assert type(optimizer) is deepspeed.Lion
        options = {key: optimizer.param_groups[0][key] for key in ("lr", "betas", "weight_decay")}
        assert options == {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1}
        assert kind(make_net().parameters()).defaults["betas"] == (0.9, 0.999)
    with pytest.raises(ValueError, match="fp32_optimizer_states is False"):
        deepspeed.ops.lion.DeepSpeedCPULion(make_net().parameters(), fp32_optimizer_states=False)


def test_adagrad_takes_deepspeeds_arguments() -> None:
    adagrad = deepspeed.ops.adagrad.DeepSpeedCPUAdagrad
    model = make_net()
    engine = start(
        {key: value for key, value in ds_config().items() if key != "optimizer"},
        model,
        optimizer=adagrad(model.parameters(), 0.1, 1e-8, 0.01),
    )
    plain = make_net()
    expected = torch.optim.Adagrad(plain.parameters(), lr=0.1, eps=1e-8, weight_decay=0.01)
    for step in range(3):
        batch = batch_of(step, 0, 0)
        engine.backward(loss_of(engine, batch))
        engine.step()
        loss_of(plain, batch).backward()
        expected.step()
        expected.zero_grad()
    for name, value in engine.module_state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    with pytest.raises(ValueError, match="fp32_optimizer_states is False"):
        adagrad(plain.parameters(), fp32_optimizer_states=False)


def test_small_functions_have_deepspeeds_values() -> None:
    peer = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    for path, calls in (
        ("runtime.pipe.topology._prime_factors", [(number,) for number in (1, 2, 12, 97, 360)]),
        (
            "utils.torch.required_torch_version",
            [("1.3",), (2.0, 2.1), (None, "99"), ("99",), ("2.0", "99.1")],
        ),
        ("utils.recursive_getattr", [(torch, "nn.Linear"), (torch, "ones")]),
        ("accelerator.is_current_accelerator_supported", [()]),
    ):
        module, _, name = path.rpartition(".")
        theirs, ours = (
            getattr(import_module(f"{package}.{module}"), name)
            for package in ("deepspeed", "shardcore")
        )
        for call in calls:
            assert ours(*call) == theirs(*call), (path, call)
    assert (
        deepspeed.constants.TORCH_DISTRIBUTED_DEFAULT_PORT
        == peer.constants.TORCH_DISTRIBUTED_DEFAULT_PORT
    )
    with pytest.raises(ValueError, match="number is 0"):
        deepspeed.runtime.pipe.topology._prime_factors(0)
    with pytest.raises(ValueError, match="no version is given"):
        deepspeed.utils.torch.required_torch_version()


def test_a_module_is_replaced_by_its_name() -> None:
    net, new = make_net(), nn.Identity()
    for name in ("blocks.1.up", "head"):
        deepspeed.utils.recursive_setattr(net, name, new)
        assert deepspeed.utils.recursive_getattr(net, name) is new is net.get_submodule(name)


def test_an_engine_and_its_optimizer_have_names_that_libraries_ask_for() -> None:
    engine = start(ds_config())
    assert not engine.sparse_tensor_module_names
    assert isinstance(engine.optimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)


def test_slices_of_other_libraries_are_seen() -> None:
    is_slice = deepspeed.runtime.utils.is_model_parallel_parameter
    param = nn.Parameter(torch.ones(1))
    assert not is_slice(param)
    param.tensor_model_parallel = True  # type: ignore[attr-defined]
    assert is_slice(param)


def test_memory_usage_is_printed_if_forced(capsys: pytest.CaptureFixture[str]) -> None:
    deepspeed.runtime.utils.see_memory_usage("before")
    assert capsys.readouterr().out == ""
    deepspeed.runtime.utils.see_memory_usage("after", force=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "after"
    assert float(lines[-1].split()[-2]) > 0.01


def _modified(rank: int, world_size: int) -> list[Any]:
    draws = []
    for stage in (0, 2, 3):
        engine = start(ds_config(stage=stage))
        weight = engine.module.head.weight
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
            if rank == 0:
                with torch.no_grad():
                    weight.fill_(2.0)
        with deepspeed.zero.GatheredParameters([weight]):
            draws.append(weight.detach().clone())
        train(engine, rank, 1)
        draws.append(hash_of_training(engine, engine.optimizer))
    return draws


def test_edits_of_one_rank_inside_gathered_parameters_reach_all() -> None:
    first, second = run_ranks(2, _modified)
    for draws in (first, second):
        assert all(bool((weight == 2.0).all()) for weight in draws[::2])
        assert len(set(draws[1::2])) == 1, "the same at every stage"
    assert first[1::2] == second[1::2]


def _edited_by_one(rank: int, world_size: int) -> None:
    engine = start(ds_config(stage=2))
    with deepspeed.zero.GatheredParameters(engine.module.head.weight), torch.no_grad():
        if rank == 0:
            engine.module.head.weight.fill_(2.0)
    with pytest.raises(
        ValueError, match=r"head\.weight is unchanged on rank 1 but edited on rank 0"
    ):
        train(engine, rank, 1)


def test_an_edit_of_one_rank_without_a_modifier_is_refused_by_the_step() -> None:
    run_ranks(2, _edited_by_one)


OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


def _edited_behind_autograd(
    rank: int,
    world_size: int,
    tiers: dict[str, Any],
    modifier: int | None,
    twin: bool,
    stage: int = 3,
) -> list[float]:
    """Fill most of a weight through .data, as libraries do; returns what it is then, is saved
    as, and is after a step.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 5))
    config = ds_config(bf16={"enabled": True}, zero_optimization={"stage": stage, **tiers})
    with pytest.MonkeyPatch.context() as patch:
        if twin:  # as if nothing had been edited
            patch.setattr(
                Bucket,
                "changed",
                property(lambda bucket: False, lambda bucket, value: None),
                raising=False,
            )
        engine = start(config, net)
        weight, other = net[0].weight, net[1].weight
        first, rest = (
            engine.module_state_dict()["0.weight"][0],
            engine.module_state_dict()["1.weight"],
        )
        with deepspeed.zero.GatheredParameters([weight, other], modifier_rank=modifier):
            if modifier in (rank, None):
                weight.data[1:].fill_(2.0)
        saved = engine.module_state_dict()
        assert torch.equal(saved["1.weight"], rest)  # masters of others keep all bits
        assert torch.equal(saved["0.weight"][0], first)
        engine.backward(engine(torch.zeros(1, 64, dtype=torch.bfloat16)).sum() * 0)
        engine.step()
        with deepspeed.zero.GatheredParameters(weight):
            return [saved["0.weight"][-1, -1].item(), weight[-1, -1].item()]


@pytest.mark.parametrize("modifier", [0, None])
@pytest.mark.parametrize("tiers", [{}, OFFLOAD], ids=["device", "cpu"])
def test_edits_behind_autograd_inside_gathered_parameters_stay(
    tiers: dict[str, Any], modifier: int | None
) -> None:
    assert (
        run_ranks(2, _edited_behind_autograd, tiers, modifier, False)
        == [[2.0, pytest.approx(2.0, abs=0.02)]] * 2
    )
    assert run_ranks(2, _edited_behind_autograd, tiers, modifier, True)[0][0] != 2.0


@pytest.mark.parametrize(("world", "stage"), [(1, 3), (2, 2)])
def test_edits_behind_autograd_of_a_modifier_stay_where_nothing_is_gathered(
    world: int, stage: int
) -> None:
    unchanged = [2.0, pytest.approx(2.0, abs=0.02)]
    assert run_ranks(world, _edited_behind_autograd, {}, 0, False, stage) == [unchanged] * world
    assert run_ranks(world, _edited_behind_autograd, {}, 0, True, stage)[0][0] != 2.0


def _averaged(rank: int, world_size: int) -> None:
    """DeepSpeed-Chat's and OpenRLHF's moving average: parameters of two engines gathered at
    once.
    """
    trained, average = make_net(), make_net(1)
    start(ds_config(stage=3), trained)
    without = {key: value for key, value in ds_config(stage=3).items() if key != "optimizer"}
    start(without, average)
    expected = [
        torch.lerp(one, other, 0.25)
        for one, other in zip(make_net().parameters(), make_net(1).parameters(), strict=True)
    ]
    for param, mean in zip(trained.parameters(), average.parameters(), strict=True):
        asked = [
            p
            for p in (param, mean)
            if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE
        ]
        assert asked == [param, mean]
        with deepspeed.zero.GatheredParameters(asked), torch.no_grad():
            mean.data.copy_(torch.lerp(param.data, mean.data, 0.25))
    for param, value in zip(average.parameters(), expected, strict=True):
        with deepspeed.zero.GatheredParameters(param):
            assert torch.equal(param, value)


def test_parameters_of_two_models_are_gathered_at_once() -> None:
    run_ranks(2, _averaged)


def _paused(rank: int, world_size: int) -> None:
    kinds, devices = (
        deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum,
        deepspeed.runtime.zero.offload_config,
    )
    engine = start(ds_config(stage=3, bf16={"enabled": True}))
    train(engine, rank, 1)
    include = [kinds.optim_states, kinds.contiguous_grad_buffer, kinds.hp_params, kinds.lp_grads]
    engine.optimizer.offload_states(
        include=include, device=devices.OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True
    )
    engine.empty_partition_cache()
    tensors = {
        line.kind: line.bytes
        for line in deepspeed.memory_report(engine).lines
        if line.tier == "device" and line.bytes
    }
    assert list(tensors) == ["weights"]
    engine.reload_states(non_blocking=True)
    train(engine, rank, 1)
    engine.offload_states()
    engine.reload_states()
    with pytest.raises(ValueError, match="weights stay"):
        engine.offload_states([kinds.lp_params])


def test_states_are_away_between_phases() -> None:
    run_ranks(2, _paused)


def test_a_group_is_started_once() -> None:
    assert not dist.is_initialized()
    deepspeed.init_distributed()  # no launcher: this process alone
    assert not dist.is_initialized()


def test_copies_keep_ties() -> None:
    weight = torch.ones(3)
    copies = deepspeed.checkpoint.utils.clone_tensors_for_torch_save(
        {"a": weight, "b": [weight, (weight[:1], 5)], "c": torch.empty(0)}
    )
    assert copies["a"] is copies["b"][0]
    assert copies["b"][1][1] == 5
    assert copies["b"][1][0].untyped_storage().nbytes() == 4, "no more than what is asked for"
    copies["a"].zero_()
    assert weight.sum() == 3
