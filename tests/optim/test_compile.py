"""torch.compile over a whole training step: it compiles the model, leaves our step and clipping alone, and changes no bits."""

import torch

import shardcore
from tests.optim.helpers import same

X = torch.linspace(-1, 1, 24).view(4, 6)


def train(compile_step, steps=2):
    """The weights after some steps, and whether each step's bookkeeping was traced (seen from functions that it calls)."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = shardcore.CPUAdam(model.parameters(), lr=0.1)
    params, traced = list(model.parameters()), []

    def watched(value):
        traced.append(torch.compiler.is_compiling())
        return value

    def step():
        optimizer.zero_grad()
        model(X).square().mean().backward()
        shardcore.clip_grad_norm_((watched(p) for p in params), 0.1)
        optimizer.step(lambda: watched(0.0), max_norm=0.05)

    run = torch.compile(step, backend="eager") if compile_step else step
    for _ in range(steps):
        run()
    return [p.detach() for p in params], traced


def test_a_compiled_step_leaves_ours_alone():
    weights, _ = train(False)
    compiled, traced = train(True)
    assert same(weights, compiled)
    assert len(traced) == 6
    assert not any(traced)
