"""Whole values of a sharded model, and its state in shards: what users call on every rank."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shardcore.engine import sharded_state
from shardcore.engine.engine import Engine
from shardcore.optim import EngineRef, engine_of


def _engine_of(op: str, thing: Any) -> Engine:
    engine = engine_of(thing) or getattr(thing, "_engine", None)
    if not isinstance(engine, Engine):
        gone = isinstance(getattr(thing, "_shardcore_engine", None), EngineRef)
        state = "is left of a sharded model that is gone, as is its optimizer" if gone else "is not sharded"
        raise ValueError(f"{op}: {type(thing).__name__} {state}; expected what shardcore.shard returned, or a parameter of it")
    return engine


def full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the averaged, unscaled gradient of a sharded model's parameter, whole. Collective: all ranks ask for the same one.

    A new tensor of the parameter's shape on the rank's device, in shard's `grad_dtype` (one rank alone may have the weight's
    dtype); None if no rank has a gradient for it. What was only added locally (`no_sync`, `accumulate`) is reduced first.
    Raises ValueError or TypeError, on every rank, for a frozen parameter and where ranks ask for different ones.
    """
    return _engine_of("full_grad", param).full_grad(param)


def full_state(param: nn.Parameter, key: str) -> torch.Tensor:
    """Return an optimizer state of a sharded model's parameter, whole. Collective: all ranks ask for the same one.

    key: "exp_avg", "exp_avg_sq", "master" where there is one, "max_exp_avg_sq" with amsgrad: a new tensor of the parameter's
    shape where the states live, float32 (bfloat16 moments as they are). "step": the count, a tensor of shape () on the CPU.
    Raises ValueError, TypeError or KeyError, on every rank, for a frozen parameter, another key and where ranks differ.
    """
    return _engine_of("full_state", param).full_state(param, key)


@contextmanager
def full_params(model: nn.Module) -> Iterator[None]:
    """Make a sharded model's weights whole inside the context, to read or to edit in place. Collective.

    model: what shard returned, a module of it, or the engine that initialize returned. At stages 0 to 2 weights are always
    whole. Every rank makes the same edits; they reach the shards at the end of the context (stage 3), masters at the next step.

    Entering and leaving are collective; a forward inside is not, where all weights of the model are whole: ranks may run it as
    often as each needs (to generate sequences of different lengths), or one rank alone (to evaluate). Backward is. At stage 3 a
    gradient penalty (`autograd.grad` with create_graph) needs forward and backward inside.
    """
    if not isinstance(model, nn.Module):
        given, model = type(model).__name__, getattr(model, "module", model)  # an engine's
        if not isinstance(model, nn.Module):
            raise TypeError(f"full_params: got a {given}; expected a module that shardcore.shard returned, or an engine")
    params = set(model.parameters())
    engine = _engine_of("full_params", next((p for p in params if engine_of(p) is not None), model))
    with engine.weights.whole(params) if engine.weights is not None else nullcontext():
        yield


def sharded_state_dict(of: nn.Module | torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the state of a sharded model, or of its optimizer, without any rank holding the whole. Collective.

    For torch.distributed.checkpoint: `save` it; or let `load` fill it, then pass it to load_sharded_state_dict. The
    checkpoint has whole tensors (float32 from masters), which any world size, stage or plain model loads. Keys are the
    model's parameters (tied ones under each name) and persistent buffers; of an optimizer "parameter.exp_avg",
    "parameter.step" and so on, without its options, and, where the loss scale moves, "loss_scale.scale",
    "loss_scale.stable_steps" and "loss_scale.hysteresis_left" (of shape (), on the CPU). The values are copies of what this
    rank has. What modules keep beside tensors (`get_extra_state`) is left out, with a warning that names them.
    """
    engine = _engine_of("sharded_state_dict", of)
    return sharded_state.optimizer_state(engine) if isinstance(of, torch.optim.Optimizer) else sharded_state.model_state(engine)


def load_sharded_state_dict(of: nn.Module | torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Set a sharded model, or its optimizer, from what sharded_state_dict returned and a checkpoint filled. Collective.

    Moments that 8-bit codes cannot keep exactly are warned of; for bfloat16 ones torch.distributed.checkpoint rounds before.

    Raises ValueError or TypeError on every rank, with nothing changed, for other keys or shards, or a loss scale that is none.
    """
    engine = _engine_of("load_sharded_state_dict", of)
    if isinstance(of, torch.optim.Optimizer):
        sharded_state.load_optimizer_state(engine, state_dict)
    else:
        sharded_state.load_model_state(engine, state_dict)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Let backwards inside the context add their gradients locally in float32; the next reduction sends the sum.

    model: what shard returned, or the engine that initialize returned. Not collective, but every rank does the same.
    """
    with _engine_of("no_sync", model).no_sync():
        yield
