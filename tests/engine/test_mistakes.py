"""Each mistake gives one warning with its remedy, and the correct way to the same end gives none."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from tests.support.logs import logged
from tests.support.models import adam, batch_of, loss_of, make_net
from tests.support.ranks import run_ranks

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def _sharded(stage: int, **options: Any) -> tuple[Any, Any]:
    model = make_net()
    return shardcore.shard(model, adam(model), stage, **options)


def _step(model: Any, optimizer: Any, backwards: int = 1, zero: bool = True) -> None:
    for micro in range(backwards):
        loss_of(model, batch_of(0, micro, 0)).backward()
    optimizer.step()
    if zero:
        optimizer.zero_grad()


# --- steps and backwards --------------------------------------------------------------------------


@STAGES
@pytest.mark.parametrize("backwards", [1, 2, 8])
def test_another_number_of_backwards_than_accumulate_is_named_once(
    stage: int, backwards: int
) -> None:
    model, optimizer = _sharded(stage, accumulate=4)
    with logged() as said:
        for _ in range(2):
            _step(model, optimizer, backwards)
        assert said == []
        for _ in range(4):
            _step(model, optimizer, backwards)
    (text,) = said
    assert "accumulate=4" in text
    assert f"came after {backwards} backward(s)" in text


@pytest.mark.parametrize("backwards", [(4, 1, 1, 1, 1), (1, 1, 4, 1, 1, 1), (2, 3, 2, 2, 2)])
def test_a_step_with_fewer_backwards_is_not(backwards: tuple[int, ...]) -> None:
    model, optimizer = _sharded(2, accumulate=4)
    with logged() as said:
        for count in backwards:
            _step(model, optimizer, count)
    assert said == []


@STAGES
def test_a_step_without_gradients_is_named_once(stage: int) -> None:
    model, optimizer = _sharded(stage)
    before = [value.clone() for value in model.state_dict().values()]
    with logged() as said:
        for _ in range(2):
            loss_of(model, batch_of(0, 0, 0)).backward()
            optimizer.zero_grad()  # before the step
            optimizer.step()
    (text,) = said
    assert "no parameter has a gradient" in text
    assert "backward()" in text
    assert all(map(torch.equal, before, model.state_dict().values()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_uses_the_gradients_of_the_last_one_is_named_once(stage: int) -> None:
    model, optimizer = _sharded(stage)
    with logged() as said:
        _step(model, optimizer, zero=False)
        assert said == []
        for _ in range(3):
            optimizer.step()
    (text,) = said
    assert "same gradients again" in text


@STAGES
def test_other_steps_are_not(stage: int) -> None:
    model, optimizer = _sharded(stage)
    with logged() as said:
        for _ in range(2):
            _step(model, optimizer)
        optimizer.step(lambda: loss_of(model, batch_of(0, 0, 0)).backward())
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()  # with gradients of zero
        optimizer.zero_grad()
        if stage == 0:
            for _ in range(2):  # gradients of another source
                for param in model.parameters():
                    param.grad = torch.ones_like(param)
                optimizer.step()
    assert said == []


# --- require_backward_grad_sync -------------------------------------------------------------------


def _as_under_ddp(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        for micro in range(3):
            model.require_backward_grad_sync = micro == 2
            loss_of(model, batch_of(0, micro, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _never_synced(model: Any, optimizer: Any) -> None:
    model.require_backward_grad_sync = False
    for _ in range(2):
        _step(model, optimizer)


def _always_synced(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        model.require_backward_grad_sync = True
        _step(model, optimizer)


def _with_no_sync(model: Any, optimizer: Any) -> None:
    with shardcore.no_sync(model):
        loss_of(model, batch_of(0, 0, 0)).backward()
    model.require_backward_grad_sync = True
    _step(model, optimizer)


@STAGES
@pytest.mark.parametrize("loop", [_as_under_ddp, _never_synced])
def test_ddps_switch_is_named_once(stage: int, loop: Callable[[Any, Any], None]) -> None:
    model, optimizer = _sharded(stage)
    with logged() as said:
        loop(model, optimizer)
    (text,) = said
    assert "require_backward_grad_sync has no effect" in text
    assert "shardcore.no_sync(model)" in text


@pytest.mark.parametrize(
    ("loop", "accumulate"), [(_always_synced, 1), (_with_no_sync, 1), (_as_under_ddp, 3)]
)
def test_it_is_not_where_nothing_was_to_be_left_out(
    loop: Callable[[Any, Any], None], accumulate: int
) -> None:
    model, optimizer = _sharded(2, accumulate=accumulate)
    with logged() as said:
        loop(model, optimizer)
    assert said == []


# --- edits of 16-bit weights through .data --------------------------------------------------------


def _edit(model: Any) -> None:
    model.head.weight.data.mul_(2)


def _first_step(rank: int, world_size: int, stage: int, offload: Any, when: str) -> list[str]:
    model, optimizer = _sharded(stage, precision="bf16", offload=offload)
    with logged() as said:
        if when == "after a load":
            for _ in range(2):
                _step(model, optimizer)
            model.load_state_dict(model.state_dict())
        _edit(model)
        edited = model.head.weight.detach().clone()
        _step(model, optimizer)
        assert (model.head.weight - edited).abs().max() > 0.05, "the step reverts it"
        _edit(model)
        _step(model, optimizer)
    return said


@pytest.mark.parametrize("offload", [None, {"optimizer": "cpu", "ratio": 0.5}])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("when", ["after shard", "after a load"])
def test_an_edit_through_data_that_the_first_step_reverts_is_named_once(
    stage: int, offload: Any, when: str
) -> None:
    (text,) = _first_step(0, 1, stage, offload, when)
    assert "head.weight" in text
    assert "inp.weight" not in text
    assert "torch.no_grad()" in text


def test_ranks_name_edits_of_what_they_own() -> None:
    said = [
        text for of_rank in run_ranks(2, _first_step, 2, None, "after shard") for text in of_rank
    ]
    assert 1 <= len(said) <= 2
    assert all("head.weight" in text for text in said)


def _in_place(model: Any) -> None:
    with shardcore.full_params(model), torch.no_grad():
        model.head.weight.mul_(2)


@pytest.mark.parametrize(
    ("precision", "edit"),
    [("bf16", _in_place), ("bf16", lambda model: None), ("fp16", _in_place), ("fp32", _edit)],
)
@pytest.mark.parametrize("master", ["fp32", "split"])
def test_an_edit_that_steps_keep_is_not_named(
    precision: str, edit: Callable[[Any], None], master: str
) -> None:
    if precision != "bf16" and master == "split":
        pytest.skip("split masters are of bfloat16 weights")
    model: Any = make_net()
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2, master=master)
    _edit(model)  # before shard
    scale = 8.0 if precision == "fp16" else None  # which overflows in no step
    model, optimizer = shardcore.shard(model, optimizer, 2, precision=precision, loss_scale=scale)
    with logged() as said:
        edit(model)
        loss = loss_of(model, batch_of(0, 0, 0))
        optimizer.scale_loss(loss).backward()
        optimizer.step()
    assert said == []


# --- torch.compile before shard -------------------------------------------------------------------


@pytest.fixture
def fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compiled_blocks(model: Any) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    return model


def _in_place_inside(model: Any) -> nn.Module:
    model.compile(backend="eager")
    return nn.Sequential(model)


@pytest.mark.parametrize(
    ("stage", "make", "text"),
    [
        (2, lambda model: torch.compile(model, backend="eager"), '"_orig_mod."'),
        (3, lambda model: torch.compile(model, backend="eager"), "each unit cuts the graph"),
        (3, lambda model: nn.Sequential(torch.compile(model, backend="eager")), "0.*blocks.0"),
        (3, _in_place_inside, "0.*blocks.0"),
        (2, _in_place_inside, None),
        (2, lambda model: model, None),
        (2, _compiled_blocks, None),
        (3, _compiled_blocks, None),
    ],
)
def test_compile_around_units_before_shard_is_named(
    stage: int, make: Callable[[Any], nn.Module], text: str | None, fresh_graphs: None
) -> None:
    model = make(make_net())
    with logged() as said:
        shardcore.shard(model, adam(model), stage)
    assert len(said) == (text is not None)
    for warning in said:
        assert re.search(text or "", warning)
        assert "Pass compile=True to shard()" in warning


@STAGES
@pytest.mark.parametrize("trained", ["head", ""])
def test_an_optimizer_of_frozen_parameters(stage: int, trained: str) -> None:
    model = make_net()
    model.requires_grad_(False)
    if trained:
        model.get_submodule(trained).requires_grad_(True)
    optimizer = adam(model)
    with logged() as said:
        shardcore.shard(model, optimizer, stage)
    expected = [] if trained else ["shard: no parameter of the optimizer requires a gradient"]
    assert [text.partition(",")[0] for text in said] == expected
