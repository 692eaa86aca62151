"""What ranks give, read or do differently, or one of them alone: every rank raises and names it."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardcore
from shardcore.distributed.compare import name_ranks
from shardcore.engine import build
from shardcore.engine import states as store
from shardcore.engine import unshard as gather
from shardcore.engine.engine import Engine
from shardcore.engine.unshard import Unsharder
from tests.support.choice import combinations
from tests.support.logs import logged
from tests.support.models import (
    Net,
    Run,
    batch_of,
    error_of,
    hash_of_training,
    loss_of,
    make_net,
    train,
)
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(
    "ranks, text",
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([0, 2, 3, 4, 5, 7, 8], "ranks 0, 2 to 5, 7, 8"),
    ],
)
def test_ranks_in_a_row_are_named_by_the_first_and_the_last(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


def sharded(stage: int = 2, timeout_s: float = 60, **options: Any) -> tuple[nn.Module, Any]:
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    model = make_net()
    options = {"precision": "bf16"} | options
    return shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), stage, process_group=group, **options
    )


def _clips_differ(rank: int, world_size: int, stage: int) -> list[str]:
    model, _, _ = train(rank, Run(steps=1, stage=stage))
    loss_of(model, batch_of(1, 0, rank)).backward()
    head, gain = model.head.weight, model.gain
    return [
        error_of(lambda: shardcore.clip_grad_norm_(model, 1.0 + rank)),
        error_of(lambda: shardcore.clip_grad_norm_([head, gain][: 1 + rank], 1.0)),
        error_of(
            lambda: shardcore.clip_grad_norm_(model if rank else list(model.parameters()), 1.0)
        ),
    ]


@pytest.mark.parametrize("stage", [0, 2])
def test_clipping_that_differs_is_refused_on_all(stage: int) -> None:
    for limit, params, same in run_ranks(2, _clips_differ, stage):
        assert "clip_grad_norm_: ranks disagree: " in limit
        assert "argument max_norm is 2.0 on rank 1 but 1.0 on rank 0" in limit
        assert "rank 1 has 1 parameter more than rank 0; the first is gain" in params
        assert same == "no error"


def _transformed(rank: int, world_size: int, stage: int) -> list[str]:
    model, optimizer, _ = train(rank, Run(steps=1, stage=stage))
    x, _ = batch_of(1, 0, rank)

    def gradients() -> torch.Tensor:
        values = {name: torch.ones(param.shape) for name, param in model.named_parameters()}
        return torch.func.grad(lambda v: torch.func.functional_call(model, v, (x,)).sum())(values)[
            "head.weight"
        ]

    texts = [error_of(gradients)]
    with shardcore.full_params(model):
        texts.append(error_of(gradients))
    loss_of(model, batch_of(2, 0, rank)).backward()
    optimizer.step()
    return texts


@pytest.mark.parametrize("stage", [2, 3])
def test_transforms_of_torch_func_over_shards_are_refused(stage: int) -> None:
    for texts in run_ranks(2, _transformed, stage):
        for text in texts:
            assert ("forward: the weights of" in text) == (stage == 3)
            assert ("transforms of torch.func (grad, vmap, ...) do not support" in text) == (
                stage == 3
            )
            assert text == "no error" or stage == 3


def _steps_differ(rank: int, world_size: int, stage: int) -> list[str]:
    model, optimizer, _ = train(rank, Run(steps=1, stage=stage))
    before = hash_of_training(model, optimizer)
    errors = []

    def step_of_other(change: Any) -> None:
        loss_of(model, batch_of(1, 0, rank)).backward()
        if rank == 1:
            change()
        errors.append(error_of(optimizer.step))
        optimizer.zero_grad()

    # a scheduler that looked at this rank's own loss
    step_of_other(lambda: optimizer.param_groups[0].update(lr=0.5))
    optimizer.param_groups[0]["lr"] = 1e-2
    step_of_other(optimizer.zero_grad)
    assert hash_of_training(model, optimizer) == before
    step_of_other(lambda: None)
    return errors


@pytest.mark.parametrize("stage", [0, 3])
def test_steps_that_differ_are_refused_on_all(stage: int) -> None:
    for lr, forgotten, same in run_ranks(2, _steps_differ, stage):
        assert (
            "step: ranks disagree: group option param_groups[0].lr is 0.5 on rank 1 but 0.01 on rank 0"
            in lr
        )
        assert "step: ranks disagree: option backwards is 0 on rank 1 but 1 on rank 0" in forgotten
        assert same == "no error"


def _fails_once(param: nn.Parameter) -> None:
    """Let the next backward end in an error when it comes to the gradient of `param`."""

    def fail(grad: torch.Tensor) -> None:
        handle.remove()
        raise RuntimeError("planted")

    handle = param.register_hook(fail)


def _all_fail_in_backward(
    rank: int, world_size: int, stage: int, where: str, options: dict[str, Any]
) -> list[Any]:
    model, optimizer = sharded(stage, **options)
    errors = []
    if where:
        _fails_once(dict(model.named_parameters())[where])
    for micro in range(4 if where else 2):  # of a pair, then of another
        if where and micro == 2:
            optimizer.zero_grad()
        errors.append(
            error_of(lambda micro=micro: loss_of(model, batch_of(1, micro % 2, rank)).backward())
        )
    optimizer.step()
    return [hash_of_training(model, optimizer), *errors]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("stage", "where", "options"),
    [
        (0, "blocks.0.up.weight", {}),
        (1, "head.weight", {"sync_each": True}),  # before anything was sent
        # after the head's and the last block's gradients were sent
        (2, "blocks.0.up.weight", {"precision": "bf16"}),
        (3, "blocks.0.up.weight", {"offload": {"optimizer": "cpu", "gradients": "cpu"}}),
        (1, "blocks.0.up.weight", {"sync_each": False, "accumulate": 2}),  # while nothing is sent
    ],
)
def test_a_backward_that_fails_alike_on_all_ranks_is_dropped(
    stage: int, where: str, options: dict[str, Any]
) -> None:
    """What comes after has the bits of a training without that backward."""
    failed, good = (
        run_ranks(2, _all_fail_in_backward, stage, place, options) for place in (where, "")
    )
    for _, first, *later in failed:
        assert first == "RuntimeError: planted"
        assert later == ["no error"] * 3
    assert {hashed for hashed, *_ in failed} == {hashed for hashed, *_ in good}


def _reads_differ(rank: int, world_size: int) -> list[str]:
    model, optimizer = sharded(precision="bf16")
    errors = [error_of(model.state_dict if rank == 0 else optimizer.state_dict)]
    if rank == 1:
        model.head.weight.data = model.head.weight.data.clone()
    errors.append(error_of(model.state_dict))
    return errors


def test_reads_that_differ_or_fail_raise_on_every_rank() -> None:
    first, second = run_ranks(2, _reads_differ)
    assert first[0].startswith(
        "OtherCallError: state_dict: rank 1 calls optimizer.state_dict; expected every rank"
    )
    assert second[0].startswith(
        "OtherCallError: optimizer.state_dict: rank 0 calls state_dict; expected every rank"
    )
    assert first[1].startswith("ValueError: state_dict: rank 1 refused: ValueError: ")
    assert "head.weight is no longer stored in shardcore's memory" in first[1]
    assert "head.weight is no longer stored in shardcore's memory" in second[1]


REFUSALS: dict[str, Any] = {
    "max_norm": lambda model, optimizer: optimizer.step(max_norm=float("nan")),
    "grad_scale": lambda model, optimizer: optimizer.step(grad_scale=float("inf")),
    "grad_scale type": lambda model, optimizer: optimizer.step(grad_scale="1"),
    "grads": lambda model, optimizer: optimizer.step(grads=[None] * len(list(model.parameters()))),
    "grads length": lambda model, optimizer: optimizer.step(grads=[]),
}


def _one_refuses_its_arguments(
    rank: int, world_size: int, stage: int, how: str, with_grads: bool
) -> tuple[str, bool, int]:
    model, optimizer = sharded(stage, timeout_s=5, precision="fp32")
    if with_grads:
        loss_of(model, batch_of(0, 0, rank)).backward()
    before = str(model.state_dict())

    error = error_of(optimizer.step if rank == 0 else lambda: REFUSALS[how](model, optimizer))
    same = str(model.state_dict()) == before
    loss_of(model, batch_of(1, 0, rank)).backward()  # nobody is left behind: the same calls go on
    optimizer.step()
    return error, same, int(shardcore.full_state(model.gain, "step"))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("with_grads", "how", "stage"), combinations([True, False], REFUSALS, [0, 2, 3], meet=1)
)
def test_arguments_that_one_rank_refuses_raise_on_every_rank_at_once(
    stage: int, how: str, with_grads: bool
) -> None:
    other, own = run_ranks(2, _one_refuses_its_arguments, stage, how, with_grads)
    assert own[0].startswith(("ValueError: ", "TypeError: "))
    assert "rank 1 refused" not in own[0]
    assert other[0].startswith("ValueError: ")
    assert "rank 1 refused" in other[0]
    assert other[1:] == own[1:] == (True, 1)


def _order_differs(rank: int, world_size: int) -> list[str]:
    model = make_net()
    params = list(model.parameters())
    errors = [
        error_of(
            lambda: shardcore.shard(
                model, shardcore.FusedAdam(params[::-1] if rank else params), 1, precision="bf16"
            )
        )
    ]
    if rank:
        model.add_module("tail", model.head)
    errors.append(
        error_of(lambda: shardcore.shard(model, shardcore.FusedAdam(params), 1, precision="bf16"))
    )
    return errors


def test_ranks_whose_order_or_names_differ_are_refused() -> None:
    for order, names in run_ranks(2, _order_differs):
        assert "ranks disagree" in order
        assert " at " in order
        assert "ranks disagree" in names
        assert "the first is tail.weight (the same as head.weight)" in names


def _reads_a_part(rank: int, world_size: int) -> list[str]:
    model, optimizer = sharded(1, timeout_s=20)
    return [
        error_of((model if rank else model.blocks[1]).state_dict),
        error_of(lambda: shardcore.sharded_state_dict(model) if rank else model.state_dict()),
        error_of(lambda: shardcore.sharded_state_dict(optimizer if rank else model)),
        error_of(model.state_dict),
    ]


def test_reads_of_the_model_and_of_a_part_of_it_are_not_mixed_up() -> None:
    part, whole = run_ranks(2, _reads_a_part)
    assert (
        "state_dict: ranks disagree: the value read is that of the model on rank 1 but that of "
        "blocks.1 on rank 0; expected the same" in part[0]
    )
    assert whole[0] == part[0]
    assert "rank 1 calls sharded_state_dict" in part[1]
    assert "that of the optimizer on rank 1 but that of the model on rank 0" in part[2]
    assert part[3] == whole[3] == "no error"


# --- groups ---------------------------------------------------------------------------------------


def _in_group(rank: int, world_size: int) -> list[list[str]]:
    texts = []
    own = [dist.new_group([each]) for each in range(world_size)][rank]
    for group in (own, None):
        with logged() as said:
            train(rank, Run(steps=0, shard={"process_group": group}))
        texts.append(said)
    return texts


def test_a_group_of_one_rank_among_many_is_warned_of() -> None:
    for rank, (own, everyone) in enumerate(run_ranks(2, _in_group)):
        assert f"process_group has this rank ({rank}) alone, of 2: nothing is sharded" in own[0]
        assert not everyone


# --- values ---------------------------------------------------------------------------------------


def _edit(model: Any, optimizer: Any, value: float) -> None:
    with torch.no_grad():
        model.blocks[0].up.weight.add_(value)


def _edit_frozen(model: Any, optimizer: Any, value: float) -> None:
    with torch.no_grad():
        model.inp.weight.add_(value)


def _load(model: Any, optimizer: Any, value: float) -> None:
    model.head.load_state_dict({"weight": torch.full((5, 24), value)})


def _load_frozen(model: Any, optimizer: Any, value: float) -> None:
    model.inp.load_state_dict({"weight": torch.full((24, 10), value)}, strict=False)


def _load_states(model: Any, optimizer: Any, value: float) -> None:
    state = {
        number: {"step": 1, "exp_avg": p + value, "exp_avg_sq": p}
        for number, p in enumerate(_shapes(model))
    }
    # there is one
    groups = [
        group | {"params": list(range(len(group["params"])))} for group in optimizer.param_groups
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _shapes(model: Any) -> list[torch.Tensor]:
    return [torch.zeros(param.shape) for param in model.parameters()]


# what rank 1 does alone -> what the next step says
DOINGS: list[tuple[Callable[..., None], str]] = [
    (_load, "parameter head.weight is loaded on rank 1 but unchanged on rank 0"),
    (
        _load_frozen,
        "rank 1 has 1 changed frozen weight more than rank 0; the first is inp.weight loaded",
    ),
    (_load_states, "the optimizer state is loaded on rank 1 but not loaded on rank 0"),
    (_edit, "parameter blocks.0.up.weight is edited on rank 1"),
    (
        _edit_frozen,
        "rank 1 has 1 changed frozen weight more than rank 0; the first is inp.weight edited",
    ),
]


def _with_values(rank: int, world_size: int, stage: int) -> list[tuple[str, str]]:
    found = []
    # at stage 3 no weight that is edited has replicas
    for doing, _ in DOINGS[: 3 if stage == 3 else None]:
        model = make_net()
        model.inp.weight.requires_grad_(False)
        model, optimizer, _ = train(rank, Run(stage=stage, steps=1), model)
        if rank == 1:
            doing(model, optimizer, 1.0)
        loss_of(model, batch_of(1, 0, rank)).backward()
        with pytest.raises(ValueError) as refusal:
            optimizer.step()
        optimizer.zero_grad()
        hash_ = ""
        # nothing is held against a load that makes all equal again
        if doing not in (_edit, _edit_frozen):
            doing(model, optimizer, 0.5)
            loss_of(model, batch_of(1, 0, rank)).backward()
            optimizer.step()
            hash_ = hash_of_training(model, optimizer)
        found.append((str(refusal.value), hash_))
    return found


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_one_rank_loads_or_edits_alone_is_refused(stage: int) -> None:
    first, second = run_ranks(2, _with_values, stage)
    for (_, expected), (text, hash_), (same, other) in zip(DOINGS, first, second, strict=False):
        assert text == same
        assert expected in text
        assert hash_ == other


def _loaded_alone(rank: int, world_size: int) -> str:
    model, optimizer, _ = train(rank, Run(stage=1, steps=1))
    if rank == 0:
        _load(model, optimizer, 1.0)
    with pytest.raises(ValueError) as refusal:
        model.state_dict()
    return str(refusal.value)


def test_a_read_after_a_load_on_one_rank_is_refused() -> None:
    here, there = run_ranks(2, _loaded_alone)
    assert here == there
    assert (
        "the value read is that of the model on rank 1 but that of the model after 1 of its weights "
        "were loaded or edited on rank 0" in here
    )


# --- failures -------------------------------------------------------------------------------------


def _renewed(rank: int, world_size: int, fails: bool) -> tuple[list[str], int]:
    texts = []
    options = {"offload": {"optimizer": "cpu", "params": "cpu"}}
    model, optimizer, _ = train(rank, Run(stage=3, steps=1, shard=options))
    real, calls = gather.Gatherer.fetch, []

    def bring(bucket: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return real(bucket)

    try:
        with shardcore.full_params(model):
            loss_of(model, batch_of(1, 0, rank)).backward()
            with pytest.MonkeyPatch.context() as patch:
                if fails and rank == 1:
                    patch.setattr(gather.Gatherer, "fetch", staticmethod(bring))
                optimizer.step()
    except RuntimeError as error:
        texts.append(str(error))
    return texts, int(optimizer.state[model.gain]["step"])


@pytest.mark.more
def test_a_copy_that_fails_after_a_step_in_full_params_stops_all_ranks_and_undoes_no_step() -> None:
    (_, steps), _ = run_ranks(2, _renewed, False)
    (others, other_steps), (own, own_steps) = run_ranks(2, _renewed, True)
    assert own == ["planted"]
    assert (
        "ranks wait for different things, which can never end: rank 0 for the weights of blocks.0"
        in others[0]
    )
    assert other_steps == own_steps == steps == 2


def _out_of_memory(rank: int, world_size: int) -> list[tuple[str, bool]]:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("planted")

    places: list[tuple[Any, str]] = [
        (build, "allocate"),
        (store, "allocate"),
        (Engine, "__init__"),
        (Unsharder, "__init__"),
    ]
    found = []
    for where, name in places:
        model = Net()
        begun = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(where, name, fail)
            with pytest.raises(MemoryError if rank == 1 else RuntimeError) as failure:
                shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 3, precision="fp32")
        # the timeout is 60 seconds
        found.append((str(failure.value), time.monotonic() - begun < 30))
    return found


def test_memory_that_one_rank_lacks_is_an_error_on_all() -> None:
    others, own = run_ranks(2, _out_of_memory)
    assert own == [("planted", True)] * len(own)
    for text, at_once in others:
        assert "rank 1 failed: MemoryError: planted" in text
        assert at_once
