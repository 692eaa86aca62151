"""Which modules form units, and which unit a shared parameter belongs to."""

import pytest
import torch
from torch import nn

from shardcore.engine.units import plan_units
from tests.support.models import Block, Net


def names(model: nn.Module, policy: object = "auto") -> dict[str, list[str]]:
    return {unit.name: [name for name, _ in unit.params] for unit in plan_units(model, policy)}  # type: ignore[arg-type]


def test_auto_finds_the_repeated_blocks() -> None:
    units = names(Net(depth=3))
    assert list(units) == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert units[""] == ["gain", "inp.weight", "inp.bias", "head.weight"]
    assert units["blocks.1"][0] == "blocks.1.norm.weight"


def test_every_parameter_is_in_one_unit() -> None:
    model = Net()
    model.head.weight = nn.Parameter(torch.zeros(5, 24))
    for policy in ("auto", Block, [Block, nn.Linear], 1, 500, 10_000_000, [model.blocks[1]]):
        found = [param for unit in plan_units(model, policy) for _, param in unit.params]  # type: ignore[arg-type]
        assert len(found) == len(set(found)) == len(list(model.parameters()))


def test_a_weight_tied_across_units_belongs_to_their_parent() -> None:
    model = Net()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    units = names(model)
    assert "blocks.0.up.weight" in units[""]
    assert all("up.weight" not in name for name in units["blocks.0"] + units["blocks.2"])


def test_a_weight_tied_inside_a_unit_stays_there() -> None:
    model = Net()
    model.blocks[1].extra = model.blocks[1].up
    assert names(model)["blocks.1"].count("blocks.1.up.weight") == 1


def test_units_by_size_leave_small_rests_to_the_parent() -> None:
    model = Net(width=24, hidden=37, depth=2)  # a block has 1,885 parameters, its largest layer 925
    assert list(names(model, 1500)) == ["", "blocks.0", "blocks.1"]
    assert "blocks.0.up" in names(model, 900)


def test_lists_are_no_units_as_nobody_calls_them() -> None:
    """Their weights would never be gathered: lists in a list give their children, lists by size
    leave theirs to the parent.
    """
    model = nn.Module()
    model.layers = nn.ModuleList(
        [nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)]) for _ in range(2)]
    )
    assert list(names(model)) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    assert list(names(model, 25)) == [""]
    assert list(names(model, 20)) == ["", "layers.0.0", "layers.1.0"]
    for policy in (nn.ModuleList, [model.layers]):
        with pytest.raises(
            ValueError,
            match="units includes a ModuleList without a forward; expected modules that are called",
        ):
            plan_units(model, policy)


def test_what_torchs_modules_read_without_calling_it_is_theirs() -> None:
    """MultiheadAttention never calls out_proj, and in evaluation TransformerEncoderLayer calls
    none of its parts.
    """
    model = nn.Module()
    model.layer = nn.TransformerEncoderLayer(8, 2, 16)
    model.attention = nn.MultiheadAttention(8, 2)
    model.head = nn.Linear(8, 8)
    assert list(names(model, 1)) == ["layer", "attention", "head"]
    assert list(names(model, nn.Linear)) == ["", "head"]
    with pytest.raises(
        ValueError,
        match="units includes a NonDynamicallyQuantizableLinear inside a torch module that reads",
    ):
        plan_units(model, [model.attention.out_proj])


def test_modules_listed_after_a_rule_stay_whole() -> None:
    """So do marked ones. Where a module that stays whole is never called, its weights are those
    of the unit around it.
    """

    def linears() -> list[nn.Module]:
        return [nn.Linear(4, 4), nn.Linear(4, 4)]

    model = nn.Sequential(nn.Sequential(*linears()), nn.ModuleList(linears()))
    for policy in ("auto", 20):
        assert (
            list(names(model, policy))
            == list(names(model, [policy]))
            == ["0.0", "0.1", "1.0", "1.1"]
        )
        assert list(names(model, [policy, model[0]])) == ["0", "1.0", "1.1"]
        assert list(names(model, [policy, nn.Sequential])) == [""]
    assert list(names(Net(depth=2), ["auto", Block])) == ["", "blocks.0", "blocks.1"]
    assert list(names(model, [50, model[0]])) == [""], "it has fewer weights than a unit"
    model[1]._z3_leaf = True
    for policy in ("auto", 20):
        assert list(names(model, policy)) == ["", "0.0", "0.1"]


def test_nested_units_own_only_what_their_children_leave() -> None:
    model = Net(depth=2)
    units = names(model, [model.blocks[0], model.blocks[0].up])
    assert units["blocks.0.up"] == ["blocks.0.up.weight", "blocks.0.up.bias"]
    assert "blocks.0.up.weight" not in units["blocks.0"]
    assert "blocks.0.norm.weight" in units["blocks.0"]


@pytest.mark.parametrize(
    ("policy", "error", "text"),
    [
        ("layers", ValueError, 'units is "layers"; expected "auto"'),
        (0, ValueError, "expected at least 1"),
        (True, TypeError, "not a bool"),
        (nn.Conv2d, ValueError, "names Conv2d, but no module of the model is one"),
        ([nn.Linear(2, 2)], ValueError, "from outside the model"),
        (["blocks"], TypeError, "expected module classes or modules"),
        ([0], ValueError, "expected at least 1"),
        (["auto", nn.Conv2d], ValueError, "names Conv2d"),
        ([Block, "auto"], TypeError, "has 'auto'; expected module classes or modules"),
    ],
)
def test_bad_policies(policy: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        plan_units(Net(), policy)  # type: ignore[arg-type]
