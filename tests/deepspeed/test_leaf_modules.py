"""Marks on modules by DeepSpeed's names: found by class, derived class, name and suffix, and
taken away; what they do.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.deepspeed.config import read_config
from shardcore.deepspeed.leaf_modules import mark_configured
from tests.support.models import Block, batch_of, make_net
from tests.support.ranks import run_ranks

utils: Any = shardcore.utils  # type: ignore[attr-defined]


class Derived(nn.Linear):
    pass


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Derived(2, 2)
        self.outer = nn.Linear(2, 2)


@pytest.mark.parametrize("asked", [Block, "Block", "tests.support.models.Block"])
def test_modules_are_found_by_class_and_name(asked: Any) -> None:
    net = make_net()
    blocks = list(net.blocks)
    assert utils.get_z3_leaf_modules(net) == []
    assert utils.set_z3_leaf_modules(net, [asked]) == utils.get_z3_leaf_modules(net) == blocks
    assert all(utils.z3_leaf_module(block) for block in blocks)
    assert not utils.z3_leaf_module(net)
    assert utils.unset_z3_leaf_modules(net, [asked]) == blocks
    assert utils.get_z3_leaf_modules(net) == []


def test_a_class_means_what_is_derived_from_it_and_a_string_does_not() -> None:
    expert = Expert()
    assert utils.set_z3_leaf_modules(expert, [nn.Linear]) == [expert.inner, expert.outer]
    assert utils.set_z3_leaf_modules(expert, ["Linear"]) == [expert.outer]
    assert utils.set_z3_leaf_modules(expert, [nn.Module]) == [expert.inner, expert.outer, expert], (
        "children first"
    )


def test_modules_are_found_by_their_own_names() -> None:
    expert = Expert()
    assert utils.set_z3_leaf_modules_by_name(
        expert, ["outer", "none"], raise_if_not_found=False
    ) == ([expert.outer], ["none"])
    assert utils.set_z3_leaf_modules_by_suffix(expert, ["er", "ner"]) == (
        [expert.inner, expert.outer],
        [],
    )
    assert utils.get_z3_leaf_modules(expert) == [expert.inner, expert.outer]
    utils.set_z3_leaf_modules_by_name(expert, ["inner"], flag=False)
    assert utils.get_z3_leaf_modules(expert) == [expert.outer]


def test_what_is_not_there_is_refused_and_marks_nothing() -> None:
    expert = Expert()
    assert utils.set_z3_leaf_modules(expert, [nn.Conv2d], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="has no module of"):
        utils.set_z3_leaf_modules(expert, [nn.Conv2d])
    with pytest.raises(TypeError, match=r"leaf_module_classes\[1\] is 3"):
        utils.set_z3_leaf_modules(expert, [nn.Linear, 3])
    with pytest.raises(ValueError, match=r"for \['none'\]"):
        utils.set_z3_leaf_modules_by_name(expert, ["outer", "none"])
    assert utils.get_z3_leaf_modules(expert) == []


def test_the_marks_are_deepspeeds() -> None:
    peer = pytest.importorskip("deepspeed.utils", reason="DeepSpeed is not installed")
    for call, asked in (
        ("set_z3_leaf_modules", [nn.Linear]),
        ("set_z3_leaf_modules_by_suffix", ["er"]),
    ):
        one, other = Expert(), Expert()
        getattr(utils, call)(one, asked)
        getattr(peer, call)(other, asked)
        names = [
            [name for name, module in e.named_modules() if peer.z3_leaf_module(module)]
            for e in (one, other)
        ]
        assert names[0] == names[1]
        assert names[0]


class Experts(nn.Module):
    """Two experts, of which each rank uses another."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.experts = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 10)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.experts[self.rank](x))


def _model(where: str, rank: int) -> nn.Module:
    torch.manual_seed(0)
    if where == "root":
        return Experts(rank)
    if where == "inside":
        return nn.Sequential(nn.Linear(10, 10), nn.Sequential(Experts(rank), nn.Tanh()))
    return nn.Sequential(nn.Linear(10, 10), Experts(rank), Experts(rank))


def _losses(
    rank: int, model: nn.Module, stage: int, leaf: dict[str, Any], **own: Any
) -> list[float]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "leaf_module": leaf},
        "shardcore": own,
    }
    engine, _, _, _ = shardcore.initialize(model=model, config=config)
    losses = []
    for step in range(3):
        loss = engine(batch_of(step, 0, rank)[0]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.module is model
    return losses


# By where the module is: how it is marked by a call, and by the configuration.
MARKS: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any]]] = {
    "root": (lambda model: utils.set_z3_leaf_modules(model, [nn.Module]), {"classes": ["Experts"]}),
    "inside": (lambda model: utils.set_z3_leaf_modules(model, [Experts]), {"names": ["1.0"]}),
    "repeated": (
        lambda model: utils.set_z3_leaf_modules_by_name(model, ["1", "2"]),
        {"name_suffixes": ["1", "2"]},
    ),
}


def _trainings(rank: int, world_size: int) -> dict[str, list[list[float]]]:
    hashes = {}
    for where, (mark, configured) in MARKS.items():
        model = _model(where, rank)
        mark(model)
        hashes[where] = [
            _losses(rank, _model(where, rank), 2, {}),
            _losses(rank, model, 3, {}),
            _losses(rank, _model(where, rank), 3, configured, units=50),
        ]
    return hashes


def test_ranks_that_use_other_parts_of_a_marked_module_train_as_at_stage_2() -> None:
    """The module is the root, is inside other modules, or is repeated."""
    for hashes in run_ranks(2, _trainings):
        for where, (expected, *losses) in hashes.items():
            assert all(one == expected for one in losses), where


def test_a_configuration_marks_what_it_names_and_says_what_is_not_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    leaf = {"classes": "Derived", "names": ["outer", "none"], "name_suffixes": ["strange"]}
    settings = read_config(
        {"train_batch_size": 1, "zero_optimization": {"stage": 3, "leaf_module": leaf}}
    )
    expert = Expert()
    mark_configured(expert, settings, log=True)
    assert utils.get_z3_leaf_modules(expert) == [expert.inner, expert.outer]
    assert [
        record.message.rpartition("names ")[2].partition(",")[0] for record in caplog.records
    ] == [
        "['none']",
        "['strange']",
    ]
