"""What initialize is given and gives back: optimizers, schedulers, data, ranks that disagree,
the environment.
"""

import copy
import functools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import shardcore
import shardcore as deepspeed
from tests.support.deepspeed import ADAM, ds_config, start, train
from tests.support.meta import init, meta
from tests.support.models import assert_one, batch_of, hash_of, hash_of_training, make_net
from tests.support.ranks import free_port, run_ranks
from tests.support.scripts import run_forked


def without(key: str, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in ds_config(**more).items() if name != key}


# --- optimizers and schedulers --------------------------------------------------------------------

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": lambda params: shardcore.FusedAdam(params, **ADAM),
    "CPUAdam": lambda params: shardcore.CPUAdam(params, **ADAM),
    "AdamW": lambda params: torch.optim.AdamW(params, **ADAM),
    "class": functools.partial(torch.optim.AdamW, **ADAM),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("as_function", [True, False])
def test_an_optimizer_of_the_user_gives_the_bits_of_the_configured_one(
    kind: str, as_function: bool
) -> None:
    expected = start(ds_config())
    train(expected, 0, 2)
    model = make_net()
    optimizer = MAKERS[kind] if as_function else MAKERS[kind](model.parameters())
    engine, used, _, _ = shardcore.initialize(
        model=model, config=without("optimizer"), optimizer=optimizer
    )
    assert (used is optimizer) == (not as_function and kind in ("FusedAdam", "CPUAdam"))
    train(engine, 0, 2)
    assert hash_of_training(engine.module, used) == hash_of_training(expected, expected.optimizer)


@pytest.mark.parametrize("as_groups", [False, True])
def test_muon_takes_the_matrices_but_embeddings_and_heads(as_groups: bool) -> None:
    params = {
        "lr": 1e-3,
        "muon_lr": 0.01,
        "betas": [0.8, 0.9],
        "momentum": 0.9,
        "ns_method": "gram",
    }
    layers = {
        "embed_tokens": nn.Linear(10, 8),
        "block": nn.Linear(8, 8),
        "lm_head": nn.Linear(8, 5),
    }
    hashes = set()
    for by_config in (True, False):
        model = copy.deepcopy(nn.Sequential(OrderedDict(layers)))
        matrix = model.block.weight
        decay: dict[str, Any] = {"weight_decay": 0.1} if as_groups else {"weight_decay": 0.0}
        adam = {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-10, "use_muon": False, **decay}
        groups = [
            {"params": [matrix], "lr": 0.01, "momentum": 0.9, **decay},
            {"params": [param for param in model.parameters() if param is not matrix], **adam},
        ]
        config, chosen = without("optimizer"), {"optimizer": shardcore.Muon(groups)}
        if by_config:
            config["optimizer"] = {"type": "Muon", "params": params}
            chosen = {
                "model_parameters": [{"params": model.parameters(), **decay}] if as_groups else None
            }
        engine, optimizer, _, _ = shardcore.initialize(model=model, config=config, **chosen)
        train(engine, 0, 2)
        hashes.add(hash_of(engine.module_state_dict().values()))
        assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]
    assert len(hashes) == 1


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_an_optimizer_counts_as_one_of_the_class_that_was_given(kind: str) -> None:
    cls = getattr(torch.optim, kind)
    model = make_net()
    optimizer = cls(model.parameters(), lr=0.1)
    engine = start(without("optimizer"), model, optimizer=optimizer)
    wrapper = type("Wrapper", (engine.optimizer.__class__,), {})
    assert isinstance(engine.optimizer, cls)
    assert issubclass(wrapper, cls)
    assert wrapper.step is type(engine.optimizer).step
    configured = start(ds_config()).optimizer
    assert isinstance(configured, deepspeed.ops.adam.FusedAdam)  # type: ignore[attr-defined]
    assert isinstance(engine.optimizer, deepspeed.ops.adam.FusedAdam) == (kind == "AdamW")  # type: ignore[attr-defined]
    assert not isinstance(configured, cls)
    assert type(engine) is shardcore.DeepSpeedEngine  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_on_the_meta_device_is_made(stage: int) -> None:
    hashes = set()
    for model, options in ((make_net(5), {}), (meta(), {"materialize": init})):
        torch.manual_seed(5)
        engine = start(ds_config(stage=stage), model=model, **options)
        train(engine, 0, 2)
        hashes.add(hash_of_training(engine, engine.optimizer))
    assert len(hashes) == 1
    with pytest.raises(TypeError, match="materialize is 3; expected a callable"):
        start(ds_config(stage=stage), model=meta(), materialize=3)


def _linear() -> nn.Module:
    return meta(lambda: nn.Sequential(nn.Linear(8, 8)))  # type: ignore[no-any-return]


def test_a_model_on_the_meta_device_has_random_weights_on_request_alone() -> None:
    with pytest.raises(
        ValueError, match=r"0\.weight is on the meta device, and materialize is not"
    ):
        start(ds_config(stage=3), model=_linear())
    weight = start(ds_config(stage=0), model=_linear(), materialize=None).module[0].weight
    assert 0 < weight.std() < 1


def test_a_class_is_a_function() -> None:
    engine = start(without("optimizer"), optimizer=shardcore.CPUAdam)
    assert type(engine.optimizer) is shardcore.CPUAdam
    assert engine.get_lr() == [1e-3]


def test_model_parameters_may_be_groups_or_any_iterable() -> None:
    model = make_net()
    groups = [
        {"params": model.head.parameters(), "lr": 0.5},
        {"params": [model.gain], "weight_decay": 0.3},
    ]
    engine = start(ds_config(), model, model_parameters=groups)
    assert engine.get_lr() == [0.5, 1e-2]
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.1, 0.3]
    model = make_net()
    model.head.requires_grad_(False)
    engine = start(
        ds_config(), model, model_parameters=(p for p in model.parameters() if p.requires_grad)
    )
    assert len(engine.optimizer.param_groups[0]["params"]) == len(list(model.parameters())) - 1
    model = make_net()
    model.head.requires_grad_(False)
    assert (
        len(start(ds_config(), model).optimizer.param_groups[0]["params"])
        == len(list(model.parameters())) - 1
    )
    model = make_net()
    optimizer = shardcore.FusedAdam(model.parameters())
    assert (
        start(
            without("optimizer"), model, optimizer=optimizer, model_parameters=model.parameters()
        ).optimizer
        is optimizer
    )


def _refused(
    kind: type[Exception], says: str, config: dict[str, Any] | None = None, **options: Any
) -> None:
    with pytest.raises(kind, match=says):
        start(ds_config() if config is None else config, **options)


def _forward_only(rank: int, world_size: int, stage: int, low: str) -> bool:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": low == "bf16"},
    }
    config["scheduler"] = {"type": "WarmupLR", "params": {}}
    model, plain = make_net(seed=rank), make_net(seed=0)
    data = TensorDataset(torch.zeros(4, 10))
    engine, optimizer, loader, scheduler = shardcore.initialize(
        model=model, config=config, model_parameters=model.parameters(), training_data=data
    )
    assert (optimizer, scheduler, engine.optimizer, engine.lr_scheduler) == (None, None, None, None)
    assert engine.training_dataloader is loader
    assert len(loader) == 4 // world_size
    assert isinstance(engine, shardcore.DeepSpeedEngine)
    x, _ = batch_of(0, 0, rank)
    with torch.no_grad():
        same = torch.equal(
            engine.eval()(x),
            plain.to(torch.bfloat16 if low == "bf16" else torch.float32)(
                x.bfloat16() if low == "bf16" else x
            ),
        )
    for refused in (lambda: engine.backward(torch.ones(())), engine.step):
        with pytest.raises(ValueError, match="there is no optimizer"):
            refused()
    assert engine.train().module.training
    assert (engine.zero_optimization_stage(), engine.zero_optimization()) == (stage, stage > 0)
    sizes = (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    )
    assert sizes == (world_size, 1, 1)
    engine.destroy()
    return same


@pytest.mark.parametrize(("stage", "low"), [(0, "bf16"), (2, "fp32"), (3, "bf16")])
def test_without_an_optimizer_a_model_only_runs_forward(stage: int, low: str) -> None:
    assert all(run_ranks(2, _forward_only, stage, low))


def _evaluated(rank: int, world_size: int, folder: str, stage: int) -> None:
    trained = start(ds_config(stage=2))
    assert shardcore.initialize(model=make_net(), config=without("optimizer"))[0].load_checkpoint(
        folder
    ) == (None, {})
    train(trained, rank, 1)
    trained.save_checkpoint(folder, client_state={"seen": 3})
    engine = shardcore.initialize(model=make_net(seed=1), config=without("optimizer", stage=stage))[
        0
    ]
    path, client_state = engine.load_checkpoint(folder, load_optimizer_states=False)
    assert (Path(path).name, client_state) == ("global_step1", {"seen": 3})
    expected = hash_of(trained.module_state_dict().values())
    assert hash_of(engine.module_state_dict().values()) == expected
    engine.save_checkpoint(folder, client_state={"seen": 4})
    engine.wait_for_checkpoint()
    assert engine.save_16bit_model(folder, "model.bin") is True
    others = (
        shardcore.initialize(model=make_net(seed=2), config=without("optimizer"))[0],
        start(ds_config(), make_net(seed=3)),
    )
    for other in others:
        path, client_state = other.load_checkpoint(folder, load_optimizer_states=False)
        assert (Path(path).name, client_state, other.global_steps) == (
            "global_step1",  # counted on from the checkpoint that was loaded, as in DeepSpeed
            {"seen": 4},
            1,
        )
        assert hash_of(other.module_state_dict().values()) == expected


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_only_runs_forward_loads_and_saves_weights(
    tmp_path: Path, stage: int
) -> None:
    run_ranks(2, _evaluated, str(tmp_path), stage)


OURS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "when": {"overlap_step": False, "prefetch": 2, "offload": {"gradients": None}},
    "nodes": {"ranks_per_node": 2},
    "mesh": {"mesh": [2, 2], "reshard_after_forward": False},
    "states": {"optimizer": {"state_dtype": "8bit"}},
}


def _hash_by_section(rank: int, world_size: int, section: dict[str, Any]) -> str:
    engine = start(
        ds_config(
            zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}},
            shardcore=section,
        )
    )
    train(engine, rank, 2)
    return hash_of_training(engine, engine.optimizer)


def test_the_section_of_shardcore_reaches_shard_and_the_optimizer() -> None:
    hashes = {name: run_ranks(4, _hash_by_section, section)[0] for name, section in OURS.items()}
    assert hashes["nothing"] == hashes["when"]
    assert hashes["nodes"] == hashes["mesh"], "ranks are added in the same order"
    assert len({hashes[name] for name in ("nothing", "nodes", "states")}) == 3, (
        "else nothing arrived"
    )


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"overlap": True},
            r"config shardcore\.overlap is not supported; expected one of overlap_step, ",
        ),
        (
            {"offload": {"device": "cpu"}},
            r"config shardcore\.offload\.device is not supported; expected one of gradients, ",
        ),
        ({"optimizer": 3}, r"config shardcore\.optimizer is 3; expected an object with keys"),
        ({"prefetch": -1}, r"shard: prefetch is -1"),
        (
            {"mesh": 3},
            r"config shardcore\.mesh is 3; expected two numbers of ranks: \[replicate, shard\]",
        ),
        ({"mesh": [2, "8"]}, r"config shardcore\.mesh is \[2, '8'\]"),
        (
            {"mesh": [2, 8]},
            r"shardcore\.mesh is \[2, 8\]; expected numbers whose product is 1, the ranks",
        ),
        (
            {"state_dtype": "8bit"},
            r"sync_each, audit, offload, optimizer \(shardcore\.optimizer\.state_dtype\?\)",
        ),
    ],
)
def test_what_the_section_of_shardcore_may_not_have(section: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        start(ds_config(stage=3, shardcore=section))


def test_a_mesh_of_one_rank_is_none() -> None:
    assert start(ds_config(shardcore={"mesh": [1, 1]})).world_size == 1


def test_a_given_optimizer_takes_the_place_of_the_configurations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_net()
    own = shardcore.FusedAdam(model.parameters(), lr=0.25)
    with caplog.at_level(logging.WARNING, "shardcore"):
        engine = start(ds_config(), model, optimizer=own)
    assert engine.optimizer is own
    assert engine.get_lr() == [0.25]
    assert "optimizer= replaces the optimizer of the config" in caplog.text
    caplog.clear()
    start(ds_config())
    assert "takes its place" not in caplog.text


def test_a_replaced_optimizer_is_no_warning_as_the_engine_has_the_new_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "shardcore")
    model = make_net()
    start(ds_config(), model, optimizer=torch.optim.AdamW(model.parameters()))
    (record,) = (record for record in caplog.records if "from AdamW" in record.getMessage())
    assert record.levelname == "INFO"


def test_an_optimizer_of_some_parameters_updates_these_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.head.parameters(), **ADAM)
    engine = start(
        without("optimizer", stage=0),
        model,
        optimizer=optimizer,
        model_parameters=model.parameters(),
    )
    assert (
        f"optimizer= updates 1 of the {len(list(model.parameters()))} trainable parameters in "
        f"model_parameters" in caplog.text
    )
    assert "no group of the optimizer" not in caplog.text
    train(engine, 0, 2)
    changed = {
        name
        for name, value in engine.module_state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed == {"head.weight"}


class Halving(torch.optim.SGD):
    """Of a class that shard does not know."""


class Normed(torch.optim.SGD):
    """Steps by a norm over a parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


@pytest.mark.parametrize("stage", [0, 3])
def test_an_untested_optimizer_is_taken_after_a_trial(
    stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    hashes = set()
    config = without("optimizer", stage=stage)
    for cls, allowed in ((torch.optim.SGD, {}), (Halving, {"zero_allow_untested_optimizer": 1})):
        engine = start(config | allowed, optimizer=functools.partial(cls, lr=0.1, momentum=0.9))
        train(engine, 0, 2)
        hashes.add(hash_of_training(engine, engine.optimizer))
    assert caplog.text.count("Halving is accepted") == 1
    assert len(hashes) == 1
    model = make_net()
    before = hash_of(model.state_dict().values())
    for allowed, says in (
        (True, "the optimizer Normed are not elementwise"),
        (False, "shard: optimizer is a Normed"),
    ):
        for optimizer in (functools.partial(Normed, lr=0.1), Normed(model.parameters(), lr=0.1)):
            _refused(
                TypeError,
                says,
                config | {"zero_allow_untested_optimizer": allowed},
                model=model,
                optimizer=optimizer,
            )
    assert hash_of(model.state_dict().values()) == before


def test_a_low_bit_optimizer_of_another_package_gets_no_trial() -> None:
    of_package = type("AdamW8bit", (Halving,), {"__module__": "bitsandbytes.optim.adamw"})
    config = without("optimizer") | {"zero_allow_untested_optimizer": True}
    given = {cls: functools.partial(cls, lr=0.1, momentum=0.9) for cls in (of_package, Halving)}
    start(config, optimizer=given[Halving])
    says = "initialize: optimizer is a AdamW8bit of bitsandbytes"
    _refused(TypeError, says, config, optimizer=given[of_package])


def test_refused_optimizers() -> None:
    model = make_net()
    plain = without("optimizer")
    section = {"optimizer": {"state_dtype": "bf16"}}
    _refused(
        ValueError,
        "config shardcore.optimizer is given, but",
        ds_config(shardcore=section),
        optimizer=shardcore.FusedAdam,
    )
    _refused(
        ValueError,
        "there is no optimizer",
        plain,
        model=model,
        lr_scheduler=lambda made: StepLR(made, 1),
    )
    _refused(TypeError, r"optimizer\(\.\.\.\) returned a list", plain, optimizer=list)
    _refused(TypeError, "optimizer has type str", plain, optimizer="AdamW")
    _refused(TypeError, "optimizer is a torch.optim.NAdam", plain, optimizer=torch.optim.NAdam)
    for wrong in (
        model.gain,
        5,
        model,
        "head",
        set(model.parameters()),
        dict(model.named_parameters()),
        model.parameters,
    ):
        kind = type(wrong).__name__
        for config in (plain, None):
            says = f"model_parameters has type {kind}; expected a list"
            _refused(TypeError, says, config, model=model, model_parameters=wrong)
    _refused(ValueError, "empty parameter list", model=model, model_parameters=[])
    optimizer = shardcore.FusedAdam(model.head.parameters())
    others = model.inp.parameters()
    _refused(
        ValueError,
        "model_parameters lacks parameters of optimizer",
        plain,
        model=model,
        optimizer=optimizer,
        model_parameters=others,
    )
    for items, text in (
        ([[model.gain]], "can only optimize Tensors"),
        ([{"params": 5}], "'int' object is not iterable"),
    ):
        for config, own in ((plain, optimizer), (None, None)):
            _refused(TypeError, text, config, model=model, optimizer=own, model_parameters=items)


@pytest.mark.parametrize("kind", ["FusedAdam", "AdamW"])
def test_a_scheduler_object_drives_the_optimizer(kind: str) -> None:
    model = make_net()
    optimizer = MAKERS[kind](model.parameters())
    scheduler = StepLR(optimizer, 1, 0.5)
    engine, used, _, returned = shardcore.initialize(
        model=model, config=without("optimizer"), optimizer=optimizer, lr_scheduler=scheduler
    )
    assert returned is scheduler is engine.lr_scheduler
    train(engine, 0, 2)
    assert [group["lr"] for group in used.param_groups] == [2.5e-3]


def test_refused_schedulers() -> None:
    model = make_net()
    optimizer = shardcore.FusedAdam(model.parameters())
    scheduler = StepLR(shardcore.FusedAdam(make_net().parameters()), 1)
    options = {"model": model, "optimizer": optimizer}
    _refused(
        ValueError,
        "drives another optimizer",
        without("optimizer"),
        lr_scheduler=scheduler,
        **options,
    )
    _refused(ValueError, "drives another optimizer", lr_scheduler=StepLR(optimizer, 1), model=model)
    _refused(TypeError, "lr_scheduler has type int", lr_scheduler=3)
    bare = type("Bare", (), {"step": lambda self: None})()
    _refused(ValueError, "the optimizer is made here", lr_scheduler=bare)


def test_models_must_fit_the_configuration() -> None:
    _refused(TypeError, "model has type list", model=[])
    model = make_net()
    model.head.to(torch.bfloat16)
    _refused(
        ValueError,
        r"head\.weight has dtype bfloat16 but config enables neither bf16 nor fp16",
        model=model,
    )
    start(ds_config(bf16={"enabled": True}), model)
    model = make_net().to(torch.bfloat16)
    _refused(
        ValueError,
        "config enables neither",
        ds_config(torch_autocast={"enabled": True, "dtype": "fp16"}),
        model=model,
    )


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_buffers_are_cast_but_those_that_stay_in_float32(low: str) -> None:
    class Router(nn.Module):
        _keep_in_fp32_modules_strict = ("bias",)
        _keep_in_fp32_modules = ("at*e",)

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            for name, dtype in (
                ("bias", torch.bfloat16),
                ("attribute", torch.float32),
                ("count", torch.int64),
            ):
                self.register_buffer(name, torch.ones(2, dtype=dtype))

    def cast(**types: Any) -> list[torch.dtype]:
        model = nn.ModuleDict({"inside": Router()})
        model.register_buffer("bias", torch.ones(2))
        start(ds_config(**{low: {"enabled": True}}, data_types=types), model)
        return [buffer.dtype for buffer in model.buffers()]

    fp32, fp16 = torch.float32, torch.float16
    outer, *own = cast(buffer_dtype="fp16")
    assert [outer, *own] == [fp16, fp32, fp32 if low == "fp16" else fp16, torch.int64]
    assert cast() == [fp32, fp32, fp32, torch.int64]
    assert cast(buffer_dtype="fp16", keep_in_fp32_modules=["^bias"]) == [
        fp32,
        fp16,
        fp16,
        torch.int64,
    ]
    assert cast(keep_in_fp32_modules=[]) == [fp32, torch.bfloat16, fp32, torch.int64]


# --- data -----------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """A dataset without a length."""

    def __iter__(self) -> Any:
        return iter(range(4))


def test_collate_fn_and_refused_data() -> None:
    data = [1, 2, 3, 4, 5]
    engine, _, loader, _ = shardcore.initialize(
        model=make_net(), config=ds_config(), training_data=data, collate_fn=sum
    )
    assert isinstance(loader, DataLoader)
    assert sum(loader) == sum(engine.deepspeed_io(data)) == 15
    for config in (ds_config(), without("optimizer")):
        assert sum(start(config, collate_fn=sum).deepspeed_io(data, route="eval")) == 15
    assert list(engine.deepspeed_io(data, collate_fn=len)) == [4, 1]
    _refused(TypeError, "training_data has type DataLoader", training_data=DataLoader(data))
    _refused(TypeError, "training_data has type generator", training_data=(i for i in data))
    _refused(TypeError, "training_data has type Stream", training_data=Stream())


# --- ranks ----------------------------------------------------------------------------------------


def _message(rank: int, world_size: int, which: str) -> str:
    config = ds_config()
    if rank == 1 and which == "clipping":
        config["gradient_clipping"] = 1.0
    if rank == 1 and which == "key":
        config["gradient_cliping"] = 1.0
    model = make_net()

    def optimizer(params: Any) -> Any:
        if rank == 1 and which == "function":
            raise RuntimeError("planted")
        return shardcore.FusedAdam(params, **ADAM)

    def scheduler(chosen: Any) -> Any:
        if rank == 1 and which == "scheduler":
            raise RuntimeError("planted")
        return torch.optim.lr_scheduler.StepLR(chosen, 1)

    del config["optimizer"]
    data: Any = list(range(9 if rank == 1 and which == "data" else 8))
    try:
        shardcore.initialize(
            model=model,
            config=config,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            training_data=data,
        )
    except (ValueError, RuntimeError) as error:
        assert not hasattr(model, "_shardcore_engine")
        assert dist.is_initialized(), "a group that was there before stays"
        return str(error)
    return "nothing"


def test_ranks_fail_together() -> None:
    both = run_ranks(2, _message, "clipping")
    assert both[0] == both[1]
    assert "initialize: ranks disagree" in both[0]
    assert "config gradient_clipping is 1.0 on rank 1 but 0.0 on rank 0" in both[0]
    other, own = run_ranks(2, _message, "key")
    assert "did you mean gradient_clipping?" in own
    assert other.startswith("initialize: rank 1 refused: ")
    assert f"{own} (nothing was changed)" in other
    both = run_ranks(2, _message, "data")
    assert both[0] == both[1]
    assert "the training_data is 9 samples on rank 1 but 8 samples on rank 0" in both[0]
    for which in ("function", "scheduler"):
        other, own = run_ranks(2, _message, which)
        assert own == "planted"
        assert "rank 1 refused" in other
    assert run_ranks(2, _message, "none") == ["nothing", "nothing"]


def _refused_late(rank: int, world_size: int, folder: str) -> None:
    model = make_net()
    optimizer = shardcore.FusedAdam(
        [{"params": model.parameters(), "lr": torch.tensor(0.5)}], lr=0.5
    )
    config = without("optimizer", stage=3) | {"shardcore": {"prefetch": -1}}  # which shard refuses
    options = {"model": model, "optimizer": optimizer, "config": config}
    metrics = {"enabled": True, "output_path": folder}
    before = {**optimizer.param_groups[0]}
    ours = {"type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0}}
    torchs = {"type": "ConstantLR", "params": {"factor": 0.5}}
    for data, section, schedule in (
        (range(8 + rank), metrics, ours),
        (None, {}, ours),
        (None, {}, torchs),
        (None, metrics | {"output_path": f"{folder}/file"}, ours),
    ):
        arguments = {**options, "config": config | {"csv_monitor": section, "scheduler": schedule}}
        with pytest.raises((ValueError, RuntimeError, NotADirectoryError)):
            shardcore.initialize(**arguments, training_data=data)
        assert before["lr"] is optimizer.param_groups[0]["lr"]
        assert before["lr"] == 0.5
        assert before == optimizer.param_groups[0]
        assert [path.name for path in Path(folder).iterdir()] == ["file"]


def test_what_is_refused_leaves_learning_rates_and_begins_no_metrics(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run_ranks(2, _refused_late, str(tmp_path))


# --- the environment ------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An environment without a launcher; a process group that the test starts is ended."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    if dist.is_initialized():
        dist.destroy_process_group()


def test_without_a_launcher_the_world_is_this_process(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("MASTER_ADDR", "left over")
    start(ds_config())
    assert not dist.is_initialized()


def test_a_world_of_one_from_the_environment(environment: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }.items():
        environment.setenv(name, value)
    _refused(ValueError, "config amp is not supported", ds_config(amp=True))
    assert not dist.is_initialized()
    _refused(TypeError, "optimizer has type str", without("optimizer"), optimizer="AdamW")
    group = dist.group.WORLD
    assert group is not None, "what a failing call started stays"
    start(ds_config())
    assert dist.group.WORLD is group
    assert dist.get_backend() == ("nccl" if torch.cuda.is_available() else "gloo")
    start(ds_config())  # a second model uses the group that is there


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "RANK not set in the environment; expected all of",
        ),
        (
            {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
            "RANK is 'x'; expected a whole",
        ),
    ],
)
def test_half_an_environment_is_refused(
    environment: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    _refused(ValueError, says)
    assert not dist.is_initialized()


def _hash(rank: int, world_size: int) -> str:
    engine = start(ds_config(2, bf16={"enabled": True}))
    train(engine, rank, 2)
    return hash_of_training(engine, engine.optimizer)


def main() -> None:
    """What torchrun runs: the environment is all that it gives. The first configuration has a
    mistake, then the parameters.
    """
    torch.set_num_threads(1)
    assert not dist.is_initialized()
    _refused(ValueError, "did you mean gradient_clipping", ds_config(2, gradient_cliping=1.0))
    assert not dist.is_initialized()
    with pytest.raises(TypeError, match="model_parameters has type int"):
        shardcore.initialize(model=make_net(), model_parameters=5, config=ds_config(2))
    value = _hash(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {value}", flush=True)
    dist.destroy_process_group()


def _asked_of_the_engine(rank: int, world_size: int) -> list[Any]:
    engine = start(ds_config(stage=3))
    train(engine, rank, 1)
    answers: list[Any] = []
    for of in (engine, engine.module):
        with shardcore.full_params(of):
            weights = hash_of(engine.module.parameters())
        with shardcore.no_sync(of):
            engine.backward(engine(batch_of(5, 0, rank)[0]).sum())
        norm = shardcore.clip_grad_norm_(of, 1e-3).item()
        engine.zero_grad()
        state = shardcore.sharded_state_dict(of)
        shardcore.load_sharded_state_dict(of, state)
        answers.append((weights, norm, list(state), shardcore.memory_report(of).by_kind))
    return answers


def test_what_takes_a_model_takes_the_engine_too() -> None:
    for of_engine, of_module in run_ranks(2, _asked_of_the_engine):
        assert of_engine == of_module


@pytest.mark.more
def test_torchruns_variables_also_after_an_initialize_that_raised(tmp_path: Path) -> None:
    printed = run_forked("tests.deepspeed.test_initialize", ranks=2, folder=tmp_path)
    expected = run_ranks(2, _hash)
    for rank in range(2):
        assert f"rank {rank} of 2: {expected[rank]}" in printed


if __name__ == "__main__":
    main()


CPU = {"offload_optimizer": {"device": "cpu"}}


def _muon(rank: int, world_size: int) -> list[str]:
    hashes = []
    for zero in ({"stage": 1}, {"stage": 2, **CPU}, {"stage": 3, **CPU}):
        muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "zero_optimization": zero}
        engine = start({**ds_config(), **muon})
        train(engine, rank, 2)
        hashes.append(hash_of(engine.module_state_dict().values()))
    return hashes


@pytest.mark.parametrize("stage", [1, 3])
def test_a_given_muon_offloads_its_states_too(stage: int) -> None:
    """In place of the configuration's AdamW, whose gradients would be in host memory."""
    model = nn.Sequential(nn.Linear(10, 8), nn.Linear(8, 5))
    groups = [
        {"params": [layer.weight for layer in model]},
        {"params": [layer.bias for layer in model], "use_muon": False},
    ]
    config = ds_config() | {"zero_optimization": {"stage": stage, **CPU}}
    engine = start(config, model, optimizer=shardcore.Muon(groups))
    before = engine.module_state_dict()["0.weight"]
    train(engine, 0, 1)
    assert not torch.equal(engine.module_state_dict()["0.weight"], before)


def test_muon_offloads_its_states() -> None:
    for hashes in run_ranks(2, _muon):
        assert_one(hashes)
