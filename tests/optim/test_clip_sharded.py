"""torch's own clipping functions over sharded parameters, beside the same calls over a plain
model.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from tests.support.choice import EVERY, part
from tests.support.models import Net, Run, batch_of, loss_of, make_net, train
from tests.support.ranks import run_fresh, run_ranks

STEPS, WORLD = 3, 2
ADAM = {"lr": 1e-2, "eps": 1e-2}  # a large eps: without it Adam would undo a constant factor
TIERS: list[tuple[int, int, dict[str, Any]]] = [  # stage, accumulate, options of shard
    (0, 1, {}),
    (1, 1, {}),
    (2, 2, {"sync_each": False}),
    (3, 1, {}),
    (2, 1, {"offload": {"optimizer": "cpu", "gradients": "cpu"}, "overlap_step": True}),
    (3, 2, {"offload": {"optimizer": "cpu", "gradients": "cpu", "ratio": 0.5}}),
]


def _norm(norm_type: Any, **options: Any) -> Callable[[nn.Module], float]:
    return lambda model: nn.utils.clip_grad_norm_(
        model.parameters(), 0.05, norm_type, **options
    ).item()


def _only_some(model: nn.Module) -> float:
    first = nn.utils.clip_grad_norm_(model.inp.weight, 0.01).item()
    return first + nn.utils.clip_grad_norm_([p for p in model.blocks.parameters()], 0.03).item()


def _deprecated(model: nn.Module) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.clip_grad.clip_grad_norm(model.parameters(), 0.05).item()


def _by_given_norm(model: nn.Module) -> float:
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
    return norm.item()


def _value(model: nn.Module) -> float:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return 0.0


def _value_then_norm(model: nn.Module) -> float:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()


CLIPS: dict[str, Callable[[nn.Module], float]] = {
    "2": _norm(2, foreach=True),
    "1": _norm(1.0, foreach=False),
    "1.5": _norm(1.5, error_if_nonfinite=True),
    "inf": _norm(math.inf),
    "'inf'": _norm("inf"),
    "some": _only_some,
    "deprecated": _deprecated,
    "by a given norm": _by_given_norm,
    "value": _value,
    "value, then norm": _value_then_norm,
}


def _plain(
    clip: Callable[[nn.Module], float] | None, accumulate: int = 1
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The whole batch in one process; returns the norms and the weights."""
    model = make_net()
    optimizer = shardcore.FusedAdam(model.parameters(), **ADAM)
    norms = []
    for step in range(STEPS):
        for micro in range(accumulate):
            for rank in range(WORLD):
                (loss_of(model, batch_of(step, micro, rank)) / (WORLD * accumulate)).backward()
        if clip is not None:
            norms.append(clip(model))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def _sharded(
    rank: int,
    world_size: int,
    clips: list[str],
    stage: int,
    accumulate: int,
    options: dict[str, Any],
) -> list[Any]:
    """The same over ranks, for each way to clip."""
    results = []
    for clip in (CLIPS[name] for name in clips):
        model, optimizer, _ = train(rank, Run(stage, 0, accumulate, adam=ADAM, shard=options))
        norms = []
        for step in range(STEPS):
            for micro in range(accumulate):
                (loss_of(model, batch_of(step, micro, rank)) / accumulate).backward()
            norms.append(clip(model))
            optimizer.step()
            optimizer.zero_grad()
        results.append((norms, model.state_dict()))
    return results


def _worst(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return max((value - others[name]).abs().max().item() for name, value in weights.items())


@pytest.mark.cases(2)
@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize(("stage", "accumulate", "options"), TIERS)
def test_torchs_clipping_does_to_shards_what_it_does_to_gradients(
    stage: int, accumulate: int, options: dict[str, Any], every: int
) -> None:
    clips = part(list(CLIPS), every, TIERS.index((stage, accumulate, options)))
    _, unclipped = _plain(None, accumulate)
    first, second = run_ranks(WORLD, _sharded, clips, stage, accumulate, options)
    for clip, one, other in zip((CLIPS[name] for name in clips), first, second, strict=True):
        expected_norms, expected = _plain(clip, accumulate)
        assert one[0] == other[0], "the same norm on every rank"
        for norms, weights in (one, other):
            assert norms == pytest.approx(expected_norms, rel=1e-5)
            assert _worst(weights, expected) < 1e-6
        assert _worst(unclipped, expected) > 1e-4


# --- lists of parameters of several models --------------------------------------------------------


def _mixed(
    rank: int, world_size: int, stages: tuple[int | None, ...], norm_type: float
) -> tuple[float, float, list[Any]]:
    """One net a stage (None: plain, averaged by hand) clipped together; returns the norms before
    and after, and the weights.
    """
    nets: list[Any] = []
    for seed, stage in enumerate(stages):
        model = make_net(seed)
        optimizer: Any = shardcore.FusedAdam(model.parameters(), **ADAM)
        if stage is None:
            for peer in range(world_size):
                (loss_of(model, batch_of(0, 0, peer)) / world_size).backward()
        else:
            model, optimizer = shardcore.shard(model, optimizer, stage, precision="fp32")
            loss_of(model, batch_of(0, 0, rank)).backward()
        nets.append((model, optimizer))
    every = [param for model, _ in nets for param in model.parameters()]
    before = nn.utils.clip_grad_norm_(every, 0.05, norm_type).item()
    after = shardcore.clip_grad_norm_(every, math.inf, norm_type).item()
    for _, optimizer in nets:
        optimizer.step()
    return before, after, [model.state_dict() for model, _ in nets]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("stages", "norm_type"),
    [((None, 2), 2.0), ((3, None, 1), 2.0), ((0, 3), 1.5), ((2, None), math.inf)],
)
def test_parameters_of_several_models_are_clipped_to_their_joint_norm(
    stages: tuple[int | None, ...], norm_type: float
) -> None:
    before, after, weights = _mixed(0, WORLD, (None,) * len(stages), norm_type)
    for theirs in run_ranks(WORLD, _mixed, stages, norm_type):
        assert theirs[0] == pytest.approx(before, rel=1e-5)
        assert theirs[1] == pytest.approx(after, rel=1e-4)
        for sharded, plain in zip(theirs[2], weights, strict=True):
            assert _worst(sharded, plain) < 1e-6


def _idle(rank: int, world_size: int, stage: int | None) -> float:
    """The norm of a model of which the optimizer has the head alone."""
    model: Any = make_net()
    if stage is not None:
        model, _ = shardcore.shard(
            model, shardcore.FusedAdam([model.head.weight]), stage, precision="fp32"
        )
    loss_of(model, batch_of(0, 0, 0)).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()


def test_parameters_that_no_optimizer_has_count_as_in_torch() -> None:
    assert run_ranks(WORLD, _idle, 2) == [pytest.approx(_idle(0, 1, None), rel=1e-5)] * 2


# --- what is not finite ---------------------------------------------------------------------------


def _overflow(
    rank: int, world_size: int, stage: int, precision: str
) -> tuple[int, list[str], bool]:
    model, optimizer, _ = train(rank, Run(stage, 0, precision=precision))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    said = []
    loss = loss_of(model, batch_of(0, 0, rank)) * (math.inf if rank == 1 else 1.0)
    optimizer.scale_loss(loss).backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        said.append(str(error))
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    return optimizer.skipped_steps, said, _worst(model.state_dict(), start) == 0.0


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (3, "fp16")])
def test_gradients_that_are_not_finite_skip_the_step_all_the_same(
    stage: int, precision: str
) -> None:
    for skipped, said, same in run_ranks(WORLD, _overflow, stage, precision):
        assert skipped == 1
        assert "norm is nan, and error_if_nonfinite is True" in said[0]
        assert same


# --- what is refused, and what cannot be reached --------------------------------------------------


def _refused(rank: int, world_size: int) -> list[str]:
    model, _, _ = train(rank, Run(2, 0))
    loss_of(model, batch_of(0, 0, rank)).backward()
    params = list(model.parameters())
    said = []
    for call in (
        lambda: nn.utils.clip_grad_norm_(params, 1.0, 0),
        lambda: nn.utils.clip_grad_norm_(params, 1.0, 1 + rank),
        lambda: nn.utils.clip_grad_value_(params, -1.0),
        lambda: nn.utils.clip_grads_with_norm_(params, 1.0, torch.tensor(2.0 + rank)),
    ):
        try:
            call()
            said.append("")
        except (ValueError, TypeError) as error:
            said.append(str(error))
    # a habit of many loops
    for op, *more in (("get_total_norm",), ("clip_grad_norm_", 1.0), ("clip_grad_value_", 1.0)):
        with pytest.warns(
            UserWarning, match=f"{op}: got no tensors, .* Pass all parameters to clip_grad_norm_"
        ):
            assert not getattr(nn.utils, op)([p for p in params if p.grad is not None], *more)
    return said


def test_what_clipping_refuses() -> None:
    first, second = run_ranks(WORLD, _refused)
    assert (
        first[0]
        == second[0]
        == "clip_grad_norm_: norm_type is 0.0; expected a number above 0, or inf"
    )
    assert "argument norm_type is 2.0 on rank 1 but 1.0 on rank 0" in first[1]
    assert (
        first[2]
        == second[2]
        == "clip_grad_value_: clip_value is -1.0; expected a number of at least 0"
    )
    assert "clip_grads_with_norm_: ranks disagree: argument coefficient is" in first[3]


def _plain_calls(stage: int) -> tuple[bool, list[Any]]:
    """Whether torch's functions are its own after a shard, and what they do to plain parameters."""
    theirs = nn.utils.clip_grad_norm_
    model: Net = make_net()
    shardcore.shard(model, shardcore.FusedAdam(model.parameters()), stage)
    net = make_net(1)
    loss_of(net, batch_of(0, 0, 0)).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1).item()
    total = nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()
    nn.utils.clip_grads_with_norm_(net.parameters(), 0.05, torch.tensor(total))
    nn.utils.clip_grad_value_(net.gain, 1e-3)
    return theirs is nn.utils.clip_grad_norm_, [
        norm,
        total,
        *(p.grad.sum().item() for p in net.parameters()),
    ]


def test_plain_parameters_go_to_torchs_own_functions() -> None:
    """At stage 0, whose gradients are in p.grad, nothing is replaced at all."""
    (own, expected), (replaced, found) = run_fresh(_plain_calls, 0), run_fresh(_plain_calls, 1)
    assert own
    assert not replaced
    assert found == expected


def _imported_early(stage: int) -> tuple[str, float]:
    """What a clip_grad_norm_ from before shard says of sharded parameters, and what it returns
    for plain ones.
    """
    from torch.nn.utils import clip_grad_norm_

    model, net = make_net(), make_net(1)
    shardcore.shard(model, shardcore.FusedAdam(model.parameters()), stage)
    for each in (model, net):
        loss_of(each, batch_of(0, 0, 0)).backward()
    with pytest.raises(RuntimeError) as refused:
        clip_grad_norm_([*net.parameters(), *model.parameters()], 0.1)
    return str(refused.value), clip_grad_norm_(net.parameters(), 0.1).item()


def test_a_function_that_was_imported_before_shard_refuses_what_it_cannot_clip() -> None:
    message, norm = run_fresh(_imported_early, 1)
    assert "clip_grad_norm_: imported by name before shard()" in message
    net = make_net(1)
    loss_of(net, batch_of(0, 0, 0)).backward()
    assert norm == nn.utils.clip_grad_norm_(net.parameters(), 0.1).item()


def test_a_compiled_function_clips_plain_parameters_as_before() -> None:
    model = make_net()
    shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 1)
    net = make_net(1)
    params = list(net.parameters())
    loss_of(net, batch_of(0, 0, 0)).backward()

    @torch.compile(backend="eager", fullgraph=True)
    def clip() -> torch.Tensor:
        return nn.utils.clip_grad_norm_(params, 0.1)

    before = math.sqrt(sum(p.grad.square().sum().item() for p in params if p.grad is not None))
    assert clip().item() == pytest.approx(before, rel=1e-5)
    assert clip().item() == pytest.approx(0.1, rel=1e-4)
