"""DeepSpeed's reads and writes of one parameter: `safe_get_full_fp32_param`, `safe_set_full_grad`
and so on.

All are collective, over the ranks that train the parameter, and take whole tensors. (The ones of
"local" partitions are not here: what a rank owns of a parameter is another range than in
DeepSpeed.) Source: https://deepspeed.readthedocs.io/en/latest/zero3.html#debugging and
#modifying-partitioned-states, 0.19.8.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import nn

from shardcore.api import full_grad, full_state
from shardcore.deepspeed.training_engine import grad_scale_of
from shardcore.engine.engine import Engine
from shardcore.engine.full_values import set_full_grad, set_full_state
from shardcore.optim.interface import engine_of


def _engine(param: nn.Parameter) -> Engine | None:
    """Return what trains the parameter; None for one that is not sharded, or was frozen then."""
    engine = engine_of(param)
    return engine if isinstance(engine, Engine) and engine.trains(param) else None


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the float32 master of a trainable parameter in full, None for others. Collective."""
    if (engine := _engine(param)) is None:
        return None
    if param.dtype != torch.float32:
        return full_state(param, "master")
    with nullcontext() if engine.unsharder is None else engine.unsharder.full_params({param}):
        return param.detach().clone()


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the full averaged gradient of a trainable parameter, or `param.grad` of any other.
    Collective.

    The gradient is divided by the accumulation steps, also after the loss's own backward(). Returns
    None without a gradient.
    """
    if (engine := _engine(param)) is None or (grad := full_grad(param)) is None:
        return param.grad
    return grad.mul_(grad_scale_of(engine))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a full state ("exp_avg", "exp_avg_sq") of a trainable parameter, or None for any
    other. Collective.
    """
    return None if _engine(param) is None else full_state(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the weights of a trainable parameter and its float32 master. Other parameters do not
    change. Collective.

    value: a tensor of the parameter's shape, the same on all ranks.

    Raises ValueError or TypeError on every rank, with nothing changed.
    """
    if (engine := _engine(param)) is not None:
        set_full_state(engine, param, "master", value)


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set a full state ("exp_avg", "exp_avg_sq") of a trainable parameter. Other parameters do not
    change. Collective.

    value: see safe_set_full_fp32_param, also for errors. Raises KeyError for another key.
    """
    if (engine := _engine(param)) is not None:
        set_full_state(engine, param, optim_state_key, value)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the full averaged gradient of a trainable parameter, or copy to `param.grad` of any
    other. Collective.

    value: see safe_set_full_fp32_param, also for errors. With fp16 it is unscaled.

    Raises ValueError without a gradient.
    """
    if (engine := _engine(param)) is not None:
        set_full_grad(engine, param, value, grad_scale_of(engine))
    elif param.grad is not None:
        param.grad.copy_(value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter],
    update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor],
) -> None:
    """Replace gradients by the result of update_func(gradient, parameter), one after the other.
    Collective.
    """
    for param in param_list:
        if (grad := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(grad, param))


NAMES = {
    function.__name__: function
    for function in (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_update_full_grad_vectorized,
    )
}
