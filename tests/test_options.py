"""What `shard`'s options do to weights, gradients and ranks, beyond the defaults."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.options import DTYPES, ShardOptions, accept_optimizer
from tests.support.models import (
    Net,
    Run,
    assert_one,
    batch_of,
    hash_of,
    hash_of_training,
    loss_of,
    make_net,
    stepped,
    train,
)
from tests.support.ranks import run_ranks


def test_precision_casts_weights_and_keeps_masters_as_given() -> None:
    given = {key: value.clone() for key, value in make_net().state_dict().items()}
    model, _, _ = train(
        0, Run(steps=0, precision="bf16", shard={"keep_fp32": [nn.LayerNorm, "gain"]})
    )
    for name, param in model.named_parameters():
        kept = "norm" in name or name == "gain"
        assert param.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert torch.equal(model.state_dict()[name], given[name]), name
        if not kept:
            assert torch.equal(shardcore.full_state(param, "master"), given[name])
    assert model.offset.dtype == torch.float32, "buffers keep their dtype"


@pytest.mark.parametrize("spell", [lambda dtype: dtype, str, lambda dtype: str(dtype)[6:]])
def test_dtypes_have_torchs_names_too(spell: Any) -> None:
    for short, dtype in DTYPES.items():
        given = ShardOptions(precision=spell(dtype), reduce_dtype=spell(dtype))
        assert given == ShardOptions(precision=short, reduce_dtype=short)
        assert given.dtype == dtype
        model = nn.Linear(2, 3)
        model, _ = shardcore.shard(model, None, precision=spell(dtype))
        assert model.weight.dtype == dtype
    with pytest.raises(ValueError, match="precision is 'float64'"):
        shardcore.shard(nn.Linear(2, 3), None, precision="float64")
    with pytest.raises(ValueError, match="precision is 16"):
        shardcore.shard(nn.Linear(2, 3), None, precision=16)  # type: ignore[arg-type]


def test_inputs_are_cast_and_outputs_are_not() -> None:
    seen: list[torch.dtype] = []

    class Probe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(
            self, x: torch.Tensor, *, index: torch.Tensor, more: dict[str, torch.Tensor]
        ) -> torch.Tensor:
            seen.extend([x.dtype, index.dtype, more["y"].dtype])
            return (x * self.weight).float()

    for cast, expected, precision in (
        (True, torch.bfloat16, "bf16"),
        (False, torch.float32, "bf16"),
        (True, torch.float32, None),
    ):
        model = Probe() if precision is not None else Probe().bfloat16()
        model, _ = shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), cast_inputs=cast, precision=precision
        )
        seen.clear()
        out = model(torch.ones(3), index=torch.tensor([1]), more={"y": torch.ones(1)})
        assert seen == [expected, torch.int64, expected]
        assert out.dtype == torch.float32


def test_low_precision_models_become_float32() -> None:
    model = make_net().bfloat16()
    given = [p.detach().float() for p in model.parameters()]
    model, _, _ = train(0, Run(steps=0, precision="fp32"), model)
    for p, value in zip(model.parameters(), given, strict=True):
        assert p.dtype == torch.float32
        assert torch.equal(p, value)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        stepped(model, optimizer, 0, step)


@pytest.mark.parametrize("make", [shardcore.FusedAdam, torch.optim.AdamW])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_float32_script_keeps_its_bits(
    stage: int, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_net()
    _steps(plain, shardcore.FusedAdam(plain.parameters(), lr=1e-2, weight_decay=0.1))
    caplog.set_level("INFO", "shardcore")
    model = make_net()
    model, optimizer = shardcore.shard(
        model, make(model.parameters(), lr=1e-2, weight_decay=0.1), stage
    )
    _steps(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert hash_of(model.state_dict().values()) == hash_of(plain.state_dict().values())
    assert not [text for text in caplog.messages if "converts" in text]


class Mixed(Net):
    """Blocks in bfloat16 between float32 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x).bfloat16()
        for block in self.blocks:
            x = block(x)
        return self.head(x.float()) * self.gain + self.offset


def _mixed(rank: int, world_size: int, stage: int, master: str | None) -> tuple[str, str]:
    torch.manual_seed(0)
    model, plain = Mixed(), Mixed()
    plain.load_state_dict(model.state_dict())
    alone = shardcore.FusedAdam(
        [
            {"params": plain.blocks.parameters(), "master": "fp32"},
            {"params": [*plain.inp.parameters(), plain.head.weight]},
        ],
        lr=0.1,
    )
    plain.gain.requires_grad_(False)
    model.gain.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = shardcore.shard(
        model, shardcore.FusedAdam(params, lr=0.1, master=master), stage
    )
    _steps(model, optimizer)
    _steps(plain, alone)
    for name, param in model.named_parameters():
        assert param.dtype == (torch.bfloat16 if name.startswith("blocks") else torch.float32), name
    kept = [shardcore.full_state(p, "master") for p in model.blocks.parameters()]
    masters = [alone.state[p]["master"] for p in plain.blocks.parameters()]
    with shardcore.full_params(model):
        return hash_of([*model.parameters(), *kept]), hash_of([*plain.parameters(), *masters])


@pytest.mark.cases(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("master", [None, "split"])
def test_bfloat16_weights_have_masters_beside_float32_ones(stage: int, master: str | None) -> None:
    """To the bits of unsharded training, since every rank has the same batches."""
    assert_one(digest for pair in run_ranks(2, _mixed, stage, master) for digest in pair)


@pytest.mark.parametrize(
    ("precision", "keep", "said"),
    [
        ("bf16", ["head"], ["3 from float32 to bfloat16"]),
        ("fp16", ["gain"], ["3 from float32 to float16, 18 from bfloat16 to float16"]),
        (None, ["blocks.1"], ["6 from bfloat16 to float32"]),
        (None, ["head"], []),
    ],
)
def test_conversions_are_one_line(
    precision: str | None, keep: list[str], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shardcore")
    model = Mixed()
    shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), precision=precision, keep_fp32=keep
    )
    assert caplog.messages == [
        f"shard: precision={precision!r} converts parameters: {text}" for text in said
    ]


def test_float16_weights_are_scaled_on_request() -> None:
    model, optimizer, _ = train(0, Run(steps=0, precision=None), make_net().half())
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert optimizer.loss_scale == 1.0
    x, y = batch_of(0, 0, 0)
    ((model(x.half()).float() - y) ** 2).mean().backward()
    optimizer.step()
    assert optimizer.skipped_steps == 0
    model, optimizer, _ = train(
        0, Run(steps=0, precision=None, shard={"loss_scale": 256.0}), make_net().half()
    )
    assert optimizer.loss_scale == 256.0


def _grad_dtypes(rank: int, world_size: int, runs: list[Run]) -> list[tuple[str, str]]:
    found = []
    for run in runs:
        model, optimizer, _ = train(rank, run)
        loss_of(model, batch_of(9, 0, rank)).backward()
        found.append(
            (hash_of_training(model, optimizer), str(shardcore.full_grad(model.head.weight).dtype))
        )
    return found


@pytest.mark.more
def test_bf16_gradients_are_the_same_on_every_stage_and_tier() -> None:
    runs = [
        Run(
            stage=stage,
            precision="bf16",
            shard={"grad_dtype": "bf16", "offload": offload, "clip_grad_norm": 0.3},
        )
        for stage, offload in enumerate((None, {"optimizer": "cpu"}, None, {"optimizer": "cpu"}))
    ]
    for *answers, other in run_ranks(
        2, _grad_dtypes, [*runs, Run(precision="bf16", shard={"clip_grad_norm": 0.3})]
    ):
        assert set(answers) == {(answers[0][0], "torch.bfloat16")}
        assert other[1] == "torch.float32"
        assert other[0] != answers[0][0]


def _start(rank: int, world_size: int, broadcast: bool, stage: int) -> list[str]:
    model = make_net(seed=rank)
    model.offset.fill_(rank)
    model, _, _ = train(rank, Run(steps=0, stage=stage, shard={"broadcast": broadcast}), model)
    return [hash_of(p for p in model.parameters()), hash_of([model.offset])]


def test_rank_0_is_broadcast_unless_disabled() -> None:
    expected = [hash_of(make_net(0).parameters()), hash_of([torch.zeros(5)])]
    assert run_ranks(2, _start, True, 2) == [expected, expected]
    apart = run_ranks(2, _start, False, 0)
    assert apart[0] == expected
    assert apart[1] == [hash_of(make_net(1).parameters()), hash_of([torch.ones(5)])]


class WithEmpty(Net):
    """A unit whose only parameter has no element, and one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Linear(0, 5, bias=False)
        self.one = nn.Linear(1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.empty(x[:, :0]) + self.one(x[:, :1])


def _empty(rank: int, world_size: int, stage: int, offload: Any) -> str:
    torch.manual_seed(0)
    model = WithEmpty()
    options = {"units": [model.empty, model.one], "offload": offload}
    return hash_of_training(*train(rank, Run(stage=stage, shard=options), model)[:2])


@pytest.mark.cases(1)
@pytest.mark.parametrize("world_size", [1, 4])
def test_empty_parameters_and_empty_shards(world_size: int) -> None:
    hashes = {
        value
        for stage in (0, 1, 2, 3)
        for offload in (None, {"optimizer": "cpu"})
        for value in run_ranks(world_size, _empty, stage, offload)
    }
    assert len(hashes) == 1


def _subgroup(rank: int, world_size: int) -> str:
    import torch.distributed as dist

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, optimizer, _ = train(rank % 2, Run(shard={"process_group": pairs[rank // 2]}))
    return hash_of_training(model, optimizer)


def _pair(rank: int, world_size: int) -> str:
    return hash_of_training(*train(rank, Run())[:2])


def test_a_process_group_of_some_ranks() -> None:
    assert set(run_ranks(4, _subgroup)) == set(run_ranks(2, _pair))


def test_the_defaults_of_shard_are_those_of_its_options() -> None:
    """`estimate.predict` takes them from there."""
    of_shard = {
        name: parameter.default
        for name, parameter in inspect.signature(shardcore.shard).parameters.items()
    }
    assert {field.name: field.default for field in fields(ShardOptions)}.items() <= of_shard.items()
    assert of_shard.keys() - {field.name for field in fields(ShardOptions)} == {
        "model",
        "optimizer",
        "process_group",
        "model_parallel_group",
        "ranks_per_node",
    }


def test_defaults_that_follow_the_stage_the_precision_and_the_optimizer() -> None:
    by_stage = [ShardOptions(stage=stage).reduce_policy(2).sync_each for stage in range(4)]
    assert by_stage == [False, False, True, True]
    active = {name: ShardOptions(precision=name).loss_scaler().active for name in ("fp16", "bf16")}
    assert active == {"fp16": True, "bf16": False}
    for make, decoupled in ((torch.optim.AdamW, True), (torch.optim.Adam, False)):
        accepted = accept_optimizer(make(nn.Linear(1, 1).parameters()))
        assert [group["adam_w_mode"] for group in accepted.param_groups] == [decoupled]


def test_other_packages_low_bit_optimizers_are_refused_without_their_import() -> None:
    params = [nn.Parameter(torch.zeros(4))]
    for module, name in (
        ("bitsandbytes.optim.adamw", "AdamW8bit"),
        ("bitsandbytes.optim.adamw", "PagedAdamW"),
        ("bitsandbytes.optim.lion", "PagedLion8bit"),
        ("torchao.optim.adam", "AdamWFp8"),
        ("torchao.optim.cpu_offload", "CPUOffloadOptimizer"),
    ):
        of_package = type(name, (torch.optim.AdamW,), {"__module__": module})
        # the claim of a subclass is wrong: its states are of blocks
        claims = type("Mine", (of_package,), {"__module__": "mine", "elementwise": True})
        package = module.partition(".")[0]
        for cls in (of_package, claims):
            with pytest.raises(
                TypeError, match=f'a {cls.__name__} of {package}, .*state_dtype="8bit"'
            ):
                accept_optimizer(cls(params))
    mine = type("Mine", (torch.optim.AdamW,), {"__module__": "mine", "elementwise": True})
    assert accept_optimizer(mine(params)) is not None


def test_the_optimizers_of_bitsandbytes_and_torchao_are_refused() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="its own optimizers")
    torchao = pytest.importorskip("torchao.optim", reason="its own optimizers")
    for package, made in (
        ("bitsandbytes", bitsandbytes.optim.AdamW8bit),
        ("bitsandbytes", bitsandbytes.optim.PagedAdamW8bit),
        ("bitsandbytes", bitsandbytes.optim.Lion8bit),
        ("torchao", torchao.AdamW8bit),
        ("torchao", torchao.AdamW4bit),
        ("torchao", torchao.AdamWFp8),
    ):
        model = nn.Linear(4, 4)
        with pytest.raises(TypeError, match=f"optimizer is a {made.__name__} of {package}"):
            shardcore.shard(model, made(model.parameters()))


def test_an_optimizer_that_was_accepted_before_its_offload_is_known_is_checked_in_shard() -> None:
    """As Trainer does it: files would take none of what an elementwise step writes."""
    model = nn.Linear(3, 2)
    accepted = accept_optimizer(torch.optim.SGD(model.parameters(), momentum=0.9))
    with pytest.raises(NotImplementedError, match=r'"nvme" with SGD'):
        shardcore.shard(model, accepted, offload={"optimizer": "nvme", "path": "."})
