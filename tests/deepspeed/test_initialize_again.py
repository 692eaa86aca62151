"""initialize a second time on the same module: what the first engine says, what is refused, and
loops over configurations.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from tests.support.deepspeed import ds_config, start, train
from tests.support.models import batch_of, error_of, hash_of_training, make_net
from tests.support.ranks import run_ranks

FORWARD = {key: value for key, value in ds_config(stage=3).items() if key != "optimizer"}


def test_calls_of_the_first_engine_name_the_second_call(tmp_path: Any) -> None:
    model = make_net()
    engine, optimizer, _, _ = shardcore.initialize(model=model, config=ds_config(stage=3))
    x = batch_of(0, 0, 0)[0]
    start(ds_config(stage=2), model)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: engine(x),
        "backward": lambda: engine.backward(x.sum()),
        "step": lambda: engine.step(),
        "save_checkpoint": lambda: engine.save_checkpoint(tmp_path),
        "global_steps": lambda: engine.global_steps,
        "state_dict": optimizer.state_dict,
        "sharded_state_dict": lambda: shardcore.sharded_state_dict(optimizer),
    }
    for name, call in calls.items():
        assert error_of(call).startswith(
            f"ValueError: {name}: initialize was called a second time with this model"
        ), name
    assert "a second time" in error_of(optimizer.step)
    assert "a second time" in repr(engine)
    assert "a second time" in repr(optimizer)
    engine.destroy()


def _again(rank: int, world_size: int) -> None:
    model = make_net(rank)
    x = batch_of(0, 0, rank)[0]
    forward = start(FORWARD, model)
    with torch.no_grad():
        expected = forward(x)
        for stage in (3, 2, 0, 3):
            engine = start(ds_config(stage=stage), model)
            assert torch.equal(engine(x), expected)
    train(engine, rank, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        engine = start(FORWARD, model, optimizer=optimizer)
        train(engine, rank, 1)
    model.head = nn.Linear(model.head.in_features, 5)
    engine = start(ds_config(stage=3), model)
    train(engine, rank, 1)
    before = hash_of_training(engine, engine.optimizer)
    refused = {
        "config zero_optimization.stage is 7": {"config": ds_config(stage=7)},
        "optimizer is a torch.optim.NAdam": {
            "config": FORWARD,
            "optimizer": torch.optim.NAdam(model.parameters()),
        },
        "the optimizer is already sharded": {"config": FORWARD, "optimizer": engine.optimizer},
        "ranks disagree": {"config": ds_config(gradient_clipping=float(rank))},
    }
    for says, arguments in refused.items():
        assert says in error_of(lambda: shardcore.initialize(model=model, **arguments))  # noqa: B023
    other = model if rank == 0 else make_net()
    assert "the model is not sharded on rank 1 but sharded on rank 0" in error_of(
        lambda: start(ds_config(), other)
    )
    assert "the model is already sharded" in error_of(lambda: shardcore.shard(model, None))
    assert hash_of_training(engine, engine.optimizer) == before
    train(engine, rank, 1)


def test_a_loop_over_configurations_goes_on_and_refusals_leave_the_engine_as_it_is() -> None:
    run_ranks(2, _again)


def test_weights_that_are_being_edited_are_refused() -> None:
    model = make_net()
    engine = start(ds_config(stage=3), model)
    with (
        shardcore.full_params(model),
        pytest.raises(ValueError, match="initialize: called inside full_params"),
    ):
        start(ds_config(stage=3), model)
    train(engine, 0, 1)
