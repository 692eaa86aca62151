"""Forwards that torch records, or runs on fake tensors: at stage 3 they are refused before
anything is sent, else they work.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import shardcore
from tests.support.models import adam, batch_of, loss_of, make_net
from tests.support.pretend_cuda import DEVICE, run_pretended, why_not
from tests.support.ranks import run_ranks

WHY_NOT = why_not()


def _fake(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(x)


def _fake_backward(model: nn.Module, x: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(x).sum().backward()


def _fake_full_params(model: nn.Module, x: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), shardcore.full_params(model):
        model(x)


def _compiled(model: nn.Module, x: torch.Tensor) -> None:
    torch.compile(model, backend="aot_eager")(x)
    torch._dynamo.reset()


def _whole(model: nn.Module, x: torch.Tensor) -> None:
    """Every rank traces for itself inside full_params, and what it gets computes what the model
    does.
    """
    with shardcore.full_params(model):
        expected = model(x)
        assert torch.equal(torch.jit.trace(model, (x,))(x), expected)
        assert torch.equal(make_fx(model)(x)(x), expected)
        assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
        assert _fake(model, x).shape == expected.shape


TRACERS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "jit": lambda model, x: torch.jit.trace(model, (x,)),
    "fake": _fake,
    "fake full_params": _fake_full_params,
    "fake backward": _fake_backward,
    "export": lambda model, x: torch.export.export(model, (x,)),
    "make_fx": lambda model, x: make_fx(model)(x),
    "make_fx pre_dispatch": lambda model, x: make_fx(model, pre_dispatch=True)(x),
    "make_fx symbolic": lambda model, x: make_fx(
        model, tracing_mode="symbolic", _allow_non_fake_inputs=True
    )(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "compile": _compiled,
    "inside full_params": _whole,
}
REFUSED = {  # at stage 3
    "jit": "forward: the weights of the root are sharded (stage 3), and torch.jit.trace does not "
    "gather them",
    "fake": "forward: the weights of the root are sharded (stage 3), and FakeTensorMode does not "
    "gather them",
    "fake full_params": "full_params: the weights of the root are sharded (stage 3), and "
    "FakeTensorMode does",
    "fake backward": "forward: the weights of the root are sharded (stage 3), and FakeTensorMode "
    "does not gather them",
    "export": "expected shardcore.full_params(model) around torch.export, or stage 0, 1 or 2",
    "make_fx": "make_fx does not gather them",
    "make_fx pre_dispatch": "make_fx does not gather them",
    "make_fx symbolic": "make_fx does not gather them",
    "vmap": "transforms of torch.func",
}
ELSE_REFUSED = {
    "fake backward": "backward: FakeTensorMode is active, and fake gradients cannot be reduced"
}


def _trained(
    rank: int, world_size: int, stage: int, device: str, rows: list[str]
) -> tuple[list[float], dict[str, str]]:
    """Train three steps after each row, "" for none of them; returns the losses, and the errors
    by row.
    """
    net = make_net()
    model, optimizer = shardcore.shard(net, adam(net), stage, precision="fp32")
    losses, errors = [], {}
    for row, name in enumerate(rows):
        if name:
            try:
                TRACERS[name](model, batch_of(0, 0, rank)[0].to(device))
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"
        for step in range(3):
            loss = loss_of(
                model, tuple(one.to(device) for one in batch_of(3 * row + step, 0, rank))
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, errors


def _compare(run: Callable[..., Any], stage: int, device: str, rows: list[str]) -> None:
    refused = {
        name: text
        for name, text in (REFUSED if stage == 3 else ELSE_REFUSED).items()
        if name in rows
    }
    expected = run(2, _trained, stage, device, [""] * len(rows))
    for (losses, errors), (wanted, _) in zip(
        run(2, _trained, stage, device, rows), expected, strict=True
    ):
        assert errors.keys() == refused.keys(), errors
        for name, text in refused.items():
            assert text in errors[name]
            assert errors[name].startswith("NotImplementedError: ")
        assert losses == wanted


ALL = [*TRACERS]
COMPILED = ["compile"]  # takes longer than all others


@pytest.mark.parametrize(
    ("stage", "rows"),
    [
        *((stage, [name for name in ALL if name not in COMPILED]) for stage in (2, 3)),
        *(
            pytest.param(stage, rows, marks=pytest.mark.more)
            for stage, rows in ((0, ALL), (1, COMPILED), (3, COMPILED))
        ),
    ],
)
def test_each_tracer_works_or_is_refused_by_name_and_training_continues(
    stage: int, rows: list[str]
) -> None:
    _compare(run_ranks, stage, "cpu", rows)


@pytest.mark.more
@pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
def test_tracers_are_refused_on_a_pretended_gpu() -> None:
    _compare(run_pretended, 3, DEVICE.type, ["jit", "fake", "make_fx"])
