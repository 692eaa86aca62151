"""Models of the transformers package, sharded: the losses of plain training, one result over
stages, what loops do around.
"""

from typing import Any

import pytest
import torch

import shardcore
from shardcore.engine.unshard import Unsharder
from tests.support.choice import combinations
from tests.support.models import assert_one, hash_of_training
from tests.support.ranks import run_ranks

pytest.importorskip("transformers", reason="real architectures need transformers")

from tests.support.architectures import ARCHITECTURES
from tests.support.training import (
    BATCH,
    STEPS,
    Training,
    batch_of,
    losses_and_hash,
    make,
    plain_losses,
    train,
    worst_difference,
)

FEW = 4  # steps
ENOUGH = 6  # steps, for a small mistake to be seen
CLOSE = 1e-5  # relative, each step's loss: only the order of float32 sums differs
LR = {"llama_lora": 2e-2}


def _training(name: str, **options: Any) -> Training:
    return Training(name, lr=LR.get(name, 2e-3), **options)


# --- against plain training -----------------------------------------------------------------------


ALONE = [
    pytest.param(name, 1, marks=() if name == "t5" else pytest.mark.slow) for name in ARCHITECTURES
]
TWO = [
    pytest.param(name, 2, marks=() if name == "llama_lora" else pytest.mark.slow)
    for name in ARCHITECTURES
]
FOUR = pytest.param("gpt2", 4, marks=pytest.mark.slow)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("name", "world_size"), [*ALONE, *TWO, FOUR])
@pytest.mark.parametrize("steps", [FEW, pytest.param(STEPS, marks=pytest.mark.slow)])
def test_losses_are_those_of_plain_training(name: str, world_size: int, steps: int) -> None:
    """Stage 3 goes all the way; the others perhaps a few steps, in which they have its bits."""
    runs = [
        _training(name, stage=3),
        *(_training(name, stage=stage, steps=steps) for stage in range(4)),
    ]
    ranks = run_ranks(world_size, losses_and_hash, runs)
    expected = plain_losses(runs[0])
    assert expected[-1] < 0.99 * expected[0], "it learns, so losses of different models differ"
    for index, run in enumerate(runs):
        assert (
            worst_difference(expected[: run.steps], [results[index][0] for results in ranks])
            < CLOSE
        )
    assert len({hash_ for results in ranks for _, hash_ in results[1:]}) == 1, (
        "one hash over stages and ranks"
    )


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["gpt2", "llama_lora", "mixtral_modules"])
def test_other_training_has_other_losses(name: str) -> None:
    """Broken twins: a learning rate one percent off, and ranks whose gradients are not averaged."""
    run = _training(name, steps=ENOUGH)
    expected = plain_losses(_training(name))[:ENOUGH]
    slower = plain_losses(Training(name, lr=run.lr * 1.01, steps=ENOUGH))
    assert worst_difference(expected, [slower]) > CLOSE
    model = make(run)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=run.lr, weight_decay=0.01
    )
    alone = []
    for step in range(run.steps):
        model(
            **{key: value[: BATCH // 2] for key, value in batch_of(run, step).items()}
        ).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            alone.append(model(**batch_of(run, step + 1)).loss.item())
    assert worst_difference(expected[1:], [alone[:-1]]) > CLOSE


def _uses_of_experts(rank: int, world_size: int) -> tuple[list[float], list[set[str]]]:
    here: list[set[str]] = []

    def use(name: str) -> Any:
        return lambda *_: here[-1].add(name)

    def watch(model: Any) -> None:
        for name, module in model.named_modules():
            if name.endswith("gate_up"):
                module.register_forward_hook(use(name))
        here.append(set())

    model, _, _ = train(
        rank,
        world_size,
        _training("mixtral_modules", prepare=watch),
        lambda model: here.append(set()),
    )
    counts = [
        shardcore.full_state(p, "step").item()
        for name, p in model.named_parameters()
        if "experts" in name
    ]
    return counts, here[:-1]


@pytest.mark.more
def test_experts_go_unused_on_all_ranks_and_on_one() -> None:
    """The steps above do have what they are to show: otherwise unused experts would not be
    tested.
    """
    (counts, first), (_, second) = run_ranks(2, _uses_of_experts)
    assert min(counts) < Training("").steps
    assert any(a != b for a, b in zip(first, second, strict=True))


# --- what loops do --------------------------------------------------------------------------------


def _recompute(model: Any) -> None:
    _checkpoint(model, reentrant=False)


def _recompute_reentrant(model: Any) -> None:
    _checkpoint(model, reentrant=True)


def _checkpoint(model: Any, reentrant: bool) -> None:
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()  # where the embedding is frozen


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "prepare"),
    combinations(
        ["gpt2", "t5", "llama_lora", "mixtral_modules"], [_recompute, _recompute_reentrant], meet=1
    ),
)
def test_gradient_checkpointing(name: str, prepare: Any) -> None:
    runs = [_training(name, stage=stage, steps=FEW, prepare=prepare) for stage in (1, 2, 3)]
    ranks = run_ranks(2, losses_and_hash, runs)
    assert_one(hash_ for results in ranks for _, hash_ in results)
    assert (
        worst_difference(plain_losses(_training(name))[:FEW], [results[-1][0] for results in ranks])
        < CLOSE
    )


def _evaluate_and_generate(model: Any) -> None:
    model.eval()
    with torch.inference_mode():
        model(**model.probe)
    model.said += (
        model.generate(
            torch.tensor([[5, 6, 7]]), max_new_tokens=5, min_new_tokens=5, do_sample=False
        )
        .flatten()
        .tolist()
    )
    model.train()


def _generating(rank: int, world_size: int, run: Training) -> tuple[list[int], str]:
    def start(model: Any) -> None:
        model.said, model.probe = [], batch_of(run, -1)

    model, optimizer, _ = train(
        rank,
        world_size,
        Training(run.name, run.stage, steps=6, prepare=start),
        _evaluate_and_generate,
    )
    return model.said, hash_of_training(model, optimizer)


@pytest.mark.more
@pytest.mark.parametrize("name", ["gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_evaluation_and_generate_between_steps(name: str) -> None:
    results = [
        answer
        for stage in (1, 3)
        for answer in run_ranks(2, _generating, _training(name, stage=stage))
    ]
    assert all(answer == results[0] for answer in results)
    undisturbed = run_ranks(2, losses_and_hash, [Training(name, steps=6)])[0][0][1]
    assert results[0][1] == undisturbed


# --- memory ---------------------------------------------------------------------------------------


def _whole_bytes(rank: int, world_size: int, run: Training) -> tuple[int, int, int]:
    """The most bytes of whole weights at any time; those of the root and the two largest units;
    those of the model.
    """
    most = 0
    start = Unsharder._start

    def started(weights: Unsharder, unit: Any) -> None:
        nonlocal most
        start(weights, unit)
        most = max(most, weights.pool.allocated_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unsharder, "_start", started)
        model, _, _ = train(rank, world_size, run)
    root, *rest = (
        sum(b.layout.numel * b.dtype.itemsize for b in u.buckets)
        for u in model._shardcore_engine.unsharder.units
    )
    return most, root + sum(sorted(rest)[-2:]), root + sum(rest)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "prepare"), [("gpt2", None), ("t5", _recompute), ("llama_lora", _recompute_reentrant)]
)
def test_no_more_than_the_root_and_two_units_are_whole(name: str, prepare: Any) -> None:
    """T5, too: what its decoder's blocks read of the encoder are outputs; the encoder's weights
    are closed by then.
    """
    for most, limit, everything in run_ranks(
        2, _whole_bytes, _training(name, steps=3, prepare=prepare)
    ):
        assert most <= limit < everything
