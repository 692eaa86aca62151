"""Threads and wrappers around a sharded model: what would mix gradients, or use weights while they go, is refused by name."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.models import Run, batch_of, hash_of_training, loss_of, make_net, train
from tests.ranks import run_ranks


def elsewhere(call: Callable[[], Any]) -> list[str]:
    """Run `call` on another thread to its end; returns the text of its error, if any."""
    errors: list[str] = []

    def run() -> None:
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


def _step(model: Any, optimizer: Any) -> str:
    optimizer.zero_grad()
    loss_of(model, batch_of(1, 0, 0)).backward()
    optimizer.step()
    return hash_of_training(model, optimizer)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_inside_that_of_another_thread_is_refused_on_both(stage: int) -> None:
    model, optimizer, _ = train(0, Run(stage=stage, steps=1))
    other = loss_of(model, batch_of(2, 0, 0))
    errors: list[str] = []
    handle = model.blocks[1].up.weight.register_hook(lambda grad: errors.extend(elsewhere(other.backward)))
    with pytest.raises(RuntimeError, match="two threads run a backward of this model at the same time"):
        loss_of(model, batch_of(1, 0, 0)).backward()
    handle.remove()
    assert "two threads run a backward" in errors[0]
    with pytest.raises(ValueError, match="the last backward ended in an error"):
        optimizer.step()
    plain, its, _ = train(0, Run(stage=stage, steps=1))
    assert _step(model, optimizer) == _step(plain, its), "the next one starts clean"


def test_one_thread_after_the_other_trains_as_one() -> None:
    plain, its, _ = train(0, Run(stage=3, steps=1))
    model, optimizer, _ = train(0, Run(stage=3, steps=1))
    losses: list[torch.Tensor] = []
    assert not elsewhere(lambda: losses.append(loss_of(model, batch_of(1, 0, 0))))
    assert not elsewhere(losses[0].backward)
    assert not elsewhere(optimizer.step)
    assert hash_of_training(model, optimizer) == _step(plain, its)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_forward_inside_another_threads_pass(stage: int) -> None:
    """Refused at stage 3; below it finds the same weights at any time."""
    model, optimizer, _ = train(0, Run(stage=stage, steps=1))
    plain, its, _ = train(0, Run(stage=stage, steps=1))
    main, errors = threading.current_thread(), []

    def evaluate(*_: Any) -> None:
        if threading.current_thread() is main:
            errors.append(elsewhere(lambda: model(torch.ones(2, 10))))

    handles = [model.blocks[1].register_forward_pre_hook(evaluate), model.blocks[1].up.weight.register_hook(evaluate)]
    with torch.set_grad_enabled(True):
        hash_ = _step(model, optimizer)
    for handle in handles:
        handle.remove()
    assert hash_ == _step(plain, its)
    inside = ["another thread is inside a forward", "another thread is inside a backward"]
    assert [bool(e) for e in errors] == [stage == 3] * 2
    assert stage == 2 or all(text in error[0] for text, error in zip(inside, errors, strict=True))


def test_a_forward_that_failed_keeps_no_other_thread_out() -> None:
    model, _, _ = train(0, Run(stage=3, steps=1))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.ones(2, 11))
    assert not elsewhere(lambda: model(torch.ones(2, 10)))


def _wrapped(rank: int, world_size: int, stage: int) -> list[str]:
    from torch.distributed._composable import replicate

    texts = []
    model, _, _ = train(rank, Run(stage=stage, steps=1))
    around, _, _ = train(rank, Run(stage=stage, steps=1))
    copy = model._replicate_for_data_parallel()
    wrapped = [nn.parallel.DistributedDataParallel(nn.Sequential(model)), replicate(nn.Sequential(model)), replicate(around)]
    for each in (copy, *wrapped):
        with pytest.raises(RuntimeError) as refusal:
            each(torch.ones(2, 10))
        texts.append(str(refusal.value))
    teaching = nn.parallel.DistributedDataParallel(make_net())
    teaching.module.register_forward_hook(lambda module, args, output: output - model(args[0]).detach())
    teaching(torch.ones(2, 10)).sum().backward()  # a model beside the wrapped one is left alone
    return texts


@pytest.mark.parametrize("stage", [0, 2])
def test_wrappers_that_would_average_again_are_refused(stage: int) -> None:
    for replica, *wrapped in run_ranks(2, _wrapped, stage):
        assert "runs inside DataParallel" in replica
        assert len(wrapped) == 3
        assert all("runs inside DistributedDataParallel or replicate(); expected it on its own" in text for text in wrapped)
