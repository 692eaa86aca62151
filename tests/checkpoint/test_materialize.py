"""Models built on the meta device and made by functions: to the bits of building, on every rank
or none.
"""

import re
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from examples.gpt import GPT, PRESETS
from tests.support.choice import combinations
from tests.support.meta import frozen_net, init, meta
from tests.support.models import (
    Net,
    Run,
    batch_of,
    error_of,
    hash_of,
    hash_of_training,
    loss_of,
    make_net,
    train,
)
from tests.support.ranks import run_ranks


def _made_and_trained(
    rank: int, world_size: int, run: Run, on_meta: bool, frozen: bool = False
) -> list[Any]:
    """Made from rank 0's random numbers, every other rank having its own."""
    torch.manual_seed(rank)
    build = frozen_net if frozen else Net
    extra = {"materialize": init} if on_meta else {}
    model = meta(build) if on_meta else build()
    objects = list(model.parameters())
    objects[0].mark = "kept"
    drawn: list[Any] = []
    if not on_meta:
        drawn.append(torch.rand(1).item())
    model, optimizer, losses = train(
        rank, Run(**{**run.__dict__, "shard": {**run.shard, **extra}}), model
    )
    if on_meta:
        drawn.append(torch.rand(1).item())
    assert all(p is q and not p.is_meta for p, q in zip(objects, model.parameters(), strict=True))
    assert objects[0].mark == "kept"
    assert not any(buffer.is_meta for buffer in model.buffers())
    return [hash_of_training(model, optimizer), losses, drawn]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "precision", "frozen"),
    combinations([0, 1, 2, 3], ["fp32", "bf16"], [False, True], meet=1),
)
def test_a_function_makes_the_bits_of_building(stage: int, precision: str, frozen: bool) -> None:
    run = Run(stage=stage, precision=precision, steps=1)
    built, made = (
        run_ranks(2, _made_and_trained, run, on_meta, frozen) for on_meta in (False, True)
    )
    assert [entry[:2] for entry in made] == [entry[:2] for entry in built]
    assert made[0][2] == built[0][2], (
        "a tied weight's second module draws random numbers in building, too"
    )
    assert frozen or made == built, "others draw as many numbers, too"


def test_offload_and_torchs_optimizer() -> None:
    hashes = set()
    for on_meta in (False, True):
        for offload in (
            None,
            {"optimizer": "cpu"},
            {"optimizer": "cpu", "params": "cpu", "gradients": "cpu"},
        ):
            torch.manual_seed(3)
            model = meta() if on_meta else Net()
            theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
            model, optimizer = shardcore.shard(
                model,
                theirs,
                3,
                offload=offload,
                materialize=init if on_meta else None,
                precision="bf16",
            )
            loss_of(model, batch_of(0, 0, 0)).backward()
            optimizer.step()
            hashes.add(hash_of_training(model, optimizer))
    assert len(hashes) == 1


class PlainGPT(GPT):
    """The example without its second initialization, which draws after everything was built."""

    def _initialize(self) -> None:
        pass


@pytest.mark.parametrize("stage", [2, 3])
def test_the_example_made_from_meta(stage: int) -> None:
    torch.manual_seed(0)
    expected = {**PlainGPT(PRESETS["tiny"]).state_dict()}
    torch.manual_seed(0)
    model = meta(lambda: PlainGPT(PRESETS["tiny"]))
    model, _ = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), stage, materialize=init, precision="bf16"
    )
    assert hash_of(model.state_dict().values()) == hash_of(expected.values())
    assert torch.equal(model.angles, PlainGPT(PRESETS["tiny"]).angles)
    assert model(torch.zeros(1, 8, dtype=torch.int64)).isfinite().all()


def test_reset_parameters_is_the_default() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 3))

    torch.manual_seed(1)
    expected = build().state_dict()
    torch.manual_seed(1)
    model = meta(build)
    model, _ = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 3, precision="fp32")
    assert hash_of(model.state_dict().values()) == hash_of(expected.values())
    with pytest.raises(
        ValueError,
        match=r"gain, offset of the root \(Net\) are on the meta device, .* no reset_parameters\(\)",
    ):
        shardcore.shard(model := meta(), shardcore.FusedAdam(model.parameters()), precision="bf16")
    assert model.gain.is_meta, "nothing was changed"


def _failing(rank: int, world_size: int, how: str) -> str:
    def fails(module: nn.Module) -> None:
        if how == "raises" and rank == 1 and isinstance(module, nn.LayerNorm):
            raise KeyError("no such weight")
        if how == "forgets" and isinstance(module, nn.LayerNorm):
            module.weight.fill_(1.0)
            return
        init(module)
        if how == "replaces" and isinstance(module, nn.LayerNorm):
            module.weight = nn.Parameter(torch.ones(24))
        if how == "reshapes" and isinstance(module, nn.LayerNorm):
            module.weight.data = torch.ones(25)

    model = meta()
    return error_of(
        lambda: shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), 3, materialize=fails, precision="bf16"
        )
    )


@pytest.mark.parametrize(
    "how, text",
    [
        (
            "raises",
            r"filling blocks\.0\.norm \(LayerNorm\): rank 1 failed: KeyError: no such weight",
        ),
        ("forgets", r"rank 0 failed: ValueError: blocks\.0\.norm\.bias contains NaN"),
        ("replaces", r"blocks\.0\.norm\.weight was replaced; expected it to be filled in place"),
        ("reshapes", r"blocks\.0\.norm\.weight became \(25,\)"),
    ],
)
def test_a_function_that_fails_fails_on_every_rank(how: str, text: str) -> None:
    answers = run_ranks(2, _failing, how)
    assert any(re.search(text, answer) for answer in answers), answers
    for answer in answers:  # the error of the rank itself, or of another rank that has none
        assert "rank" not in answer or answer.endswith("build model and optimizer anew"), answer


class Masked(nn.Module):
    """Has buffers in which NaN does not show what was forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("places", torch.arange(4), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)
        self.register_buffer("turns", torch.ones(4, dtype=torch.complex64), persistent=False)


@pytest.mark.parametrize("forgotten", ["places", "mask", "turns", ""])
def test_buffers_of_other_dtypes_that_are_forgotten_show(forgotten: str) -> None:
    def fills(module: nn.Module) -> None:
        if not isinstance(module, Masked):
            module.reset_parameters()  # type: ignore[operator]
            return
        for name, value in Masked().named_buffers(recurse=False):
            if name != forgotten:
                module.get_buffer(name).copy_(value)

    model = meta(Masked)
    optimizer = shardcore.FusedAdam(model.parameters())
    if forgotten:
        with pytest.raises(ValueError, match=f"{forgotten} contains unset values") as raised:
            shardcore.shard(model, optimizer, materialize=fills)
        assert "build model and optimizer anew" in raised.value.__notes__[0]
    else:
        shardcore.shard(model, optimizer, materialize=fills)
        assert all(
            buffer.equal(Masked().get_buffer(name)) for name, buffer in model.named_buffers()
        )


@pytest.mark.parametrize("stage", [0, 3])
def test_hooks_stay(stage: int) -> None:
    model, seen = meta(), []
    model.gain.register_hook(lambda grad: grad * 0.0)
    removed = model.inp.weight.register_hook(lambda grad: grad * 0.0)
    model.inp.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param))
    model, _ = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), stage, materialize=init, precision="fp32"
    )
    removed.remove()
    loss_of(model, batch_of(0, 0, 0)).backward()
    grads = [shardcore.full_grad(param) for param in (model.gain, model.inp.weight)]
    assert [bool(grad.any()) for grad in grads if grad is not None] == [False, True]
    assert [param is model.inp.weight for param in seen] == [True]


def test_only_rank_0_need_fill_when_it_broadcasts() -> None:
    assert len(set(run_ranks(2, _rank_0_fills))) == 1


def _rank_0_fills(rank: int, world_size: int) -> str:
    model = meta()
    fill = init if rank == 0 else (lambda module: None)
    model, _ = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), 3, materialize=fill, precision="bf16"
    )
    return hash_of(model.state_dict().values())


# --- refusals -------------------------------------------------------------------------------------


def test_what_cannot_be_made_is_refused_before_anything_changes() -> None:
    def refused(
        model: nn.Module, match: str, error: type[Exception] = ValueError, materialize: Any = init
    ) -> None:
        optimizer = shardcore.FusedAdam(model.parameters())
        before = [p.is_meta for p in model.parameters()]
        with pytest.raises(error, match=match):
            shardcore.shard(model, optimizer, materialize=materialize, precision="bf16")
        assert [p.is_meta for p in model.parameters()] == before
        assert optimizer._engine is None

    refused(meta(), "materialize is 3; expected a callable", TypeError, 3)
    refused(meta(), r"materialize is \[\]; expected a callable", TypeError, [])
    refused(meta(), r"materialize is \[<function init.*\]; expected a callable", TypeError, [init])
    refused(make_net(), "no tensor of the model is on the meta device")
    mixed = meta()
    mixed.blocks[1].up.bias = nn.Parameter(torch.zeros(37))
    refused(
        mixed, r"weight of blocks\.1\.up \(Linear\) are on the meta device, while bias is in memory"
    )
    used = meta()
    loss = used(torch.zeros(2, 10, device="meta"))
    refused(used, "is still referenced elsewhere")
    del loss
    model = meta()
    theirs = torch.optim.AdamW(model.parameters())
    model(torch.zeros(2, 10, device="meta")).sum().backward()
    theirs.step()
    theirs.zero_grad()
    with pytest.raises(ValueError, match=r"exp_avg has no memory \(device meta\)"):
        shardcore.shard(model, theirs, materialize=init, precision="bf16")


def test_optimizers_take_meta_parameters_and_refuse_to_step_on_them() -> None:
    for make in (shardcore.FusedAdam, shardcore.CPUAdam):
        model = meta()
        optimizer = make(model.parameters())
        model(torch.zeros(2, 10, device="meta")).sum().backward()
        with pytest.raises(ValueError, match="device meta; expected cpu"):
            optimizer.step()
        with pytest.raises(ValueError, match="device meta; expected cpu"):
            optimizer.step(max_norm=1.0)
        assert not optimizer.state
