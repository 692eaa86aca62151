"""What the engine keeps of its plan keeps neither model nor optimizer, which keep the engine."""

import gc
import weakref

import shardcore
from tests.support.models import adam, make_net


def test_the_plan_that_an_engine_keeps_has_no_owners() -> None:
    model = make_net()
    model, optimizer = shardcore.shard(model, adam(model), 2)
    plan = optimizer._engine.plan
    assert plan.model is None
    assert plan.optimizer is None
    assert [*plan.members["blocks.0"]] == [
        f"blocks.0.{name}" for name, _ in model.blocks[0].named_parameters()
    ]
    seen = weakref.ref(model)
    gc.disable()
    try:
        del model, optimizer
        assert seen() is None
    finally:
        gc.enable()
