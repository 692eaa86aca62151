"""What DeepSpeed and shardcore make of the same calls of initialize: one script, under both names.

Run once per rank: python -m tests.support.deepspeed_makes MODULE FILE, with RANK, WORLD_SIZE and so
on set. MODULE: deepspeed or shardcore. Rank 0 writes what `CALLS` return to FILE, by their names,
as JSON.
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.deepspeed import ADAM, ds_config
from tests.support.models import batch_of


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 5)
    )


def _plain(stage: int = 0, **more: Any) -> dict[str, Any]:
    config = ds_config(stage=stage, **more)
    return {key: value for key, value in config.items() if key != "optimizer"}


def _train(engine: Any, steps: int) -> None:
    for step in range(steps):
        x, y = batch_of(step, 0, dist.get_rank())
        engine.backward(((engine(x) - y) ** 2).mean())
        engine.step()


def _norms(deepspeed: Any, model: Any) -> list[float]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [param.detach().double().norm().item() for param in model.parameters()]


def some_parameters(deepspeed: Any) -> list[Any]:
    """An optimizer of some of the parameters."""
    found = []
    for stage in (0, 2, 3):
        model = _model()
        optimizer = torch.optim.AdamW([*model[0].parameters(), model[4].bias], **ADAM)
        engine = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=model.parameters(),
            config=_plain(stage),
        )[0]
        _train(engine, 2)
        found.append([_norms(deepspeed, engine.module), engine.global_steps])
    return found


class Untested(torch.optim.Optimizer):
    """Signed momentum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (
            param
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ):
            average = self.state[param].setdefault("average", torch.zeros_like(param))
            param.sub_(average.lerp_(param.grad, 0.1).sign(), alpha=1e-2)


def untested(deepspeed: Any) -> list[Any]:
    """An optimizer of a class that neither knows."""
    found = []
    for stage in (1, 3):
        config, model = _plain(stage, zero_allow_untested_optimizer=True), _model()
        engine = deepspeed.initialize(
            model=model, optimizer=Untested(model.parameters()), config=config
        )[0]
        _train(engine, 3)
        found.append(_norms(deepspeed, model))
    return found


def again(deepspeed: Any) -> list[Any]:
    """Initialize again on the same module, at the same stage and another one: new states, over
    the trained weights.
    """
    found = []
    for stages in ((0, 0, 1), (1, 1, 2), (2, 2, 0)):
        model = _model()
        for stage in stages:
            optimizer = torch.optim.AdamW(model.parameters(), **ADAM)  # DeepSpeed compiles its own
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=_plain(stage))[0]
            _train(engine, 2)
            found.append([_norms(deepspeed, model), engine.global_steps])
    return found


def no_optimizer(deepspeed: Any) -> list[Any]:
    """Parameters alone: forward, and a checkpoint that another model loads."""
    model = _model()
    engine, *others = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=_plain()
    )
    found = [other is None for other in others]
    with torch.no_grad():
        found.append(engine(batch_of(0, 0, 0)[0]).norm().item())
    with TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        engine.save_checkpoint(shared[0], client_state={"seen": 3})
        other = _model(seed=1)
        again = deepspeed.initialize(
            model=other, model_parameters=other.parameters(), config=_plain()
        )[0]
        path, client_state = again.load_checkpoint(shared[0])
        found += [
            Path(path).relative_to(shared[0]).parts[0],
            client_state["seen"],
            again.global_steps,
            *_norms(deepspeed, other),
        ]
        dist.barrier()
    return found


CALLS: tuple[Callable[[Any], Any], ...] = (some_parameters, untested, again, no_optimizer)

if __name__ == "__main__":
    chosen = import_module(sys.argv[1])
    chosen.init_distributed("gloo")
    answers = {call.__name__: call(chosen) for call in CALLS}
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(answers))
    dist.destroy_process_group()
