"""Marks on modules by DeepSpeed's names: found by class, derived class, name and suffix; and taken away."""

from typing import Any

import pytest
from torch import nn

import shardcore
from tests.support.models import Block, make_net

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
    assert utils.set_z3_leaf_modules(expert, [nn.Module]) == [expert.inner, expert.outer, expert], "children first"


def test_modules_are_found_by_their_own_names() -> None:
    expert = Expert()
    assert utils.set_z3_leaf_modules_by_name(expert, ["outer", "none"], raise_if_not_found=False) == ([expert.outer], ["none"])
    assert utils.set_z3_leaf_modules_by_suffix(expert, ["er", "ner"]) == ([expert.inner, expert.outer], [])
    assert utils.get_z3_leaf_modules(expert) == [expert.inner, expert.outer]
    utils.set_z3_leaf_modules_by_name(expert, ["inner"], flag=False)
    assert utils.get_z3_leaf_modules(expert) == [expert.outer]


def test_what_is_not_there_is_refused_and_marks_nothing() -> None:
    expert = Expert()
    assert utils.set_z3_leaf_modules(expert, [nn.Conv2d], raise_if_not_found=False) == []
    with pytest.raises(ValueError, match="has no module of"):
        utils.set_z3_leaf_modules(expert, [nn.Conv2d])
    with pytest.raises(TypeError, match=r"leaf_module_classes\[1\] has 3"):
        utils.set_z3_leaf_modules(expert, [nn.Linear, 3])
    with pytest.raises(ValueError, match=r"for \['none'\]"):
        utils.set_z3_leaf_modules_by_name(expert, ["outer", "none"])
    assert utils.get_z3_leaf_modules(expert) == []


def test_the_marks_are_deepspeeds() -> None:
    peer = pytest.importorskip("deepspeed.utils", reason="DeepSpeed is not installed")
    for call, asked in (("set_z3_leaf_modules", [nn.Linear]), ("set_z3_leaf_modules_by_suffix", ["er"])):
        one, other = Expert(), Expert()
        getattr(utils, call)(one, asked)
        getattr(peer, call)(other, asked)
        names = [[name for name, module in e.named_modules() if peer.z3_leaf_module(module)] for e in (one, other)]
        assert names[0] == names[1]
        assert names[0]
