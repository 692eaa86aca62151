"""The options of a parameter group: their names, their checks, and the one conversion into the scalars of a step.

Invariants: every check runs before anything is written; the engine uses the same functions, so that a bad option reads
the same whether the optimizer is sharded or not.
"""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch

from shardcore._native import _C

# Weights and gradients that the kernels take, each independent of the other.
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Weights that may have a master: a float32 weight is its own.
MASTERED_DTYPES = (torch.bfloat16, torch.float16)

MASTERS = (None, "fp32", "split")
STATE_DTYPES = ("fp32", "bf16", "8bit")
_FLAGS = ("adam_w_mode", "amsgrad", "maximize", "bias_correction", "capturable", "stochastic_rounding")


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def number(op: str, name: str, value: object) -> float:
    """Return an int, a float or a tensor of one element as a Python float.

    Raises TypeError for anything else, bool included. A CUDA tensor is waited for.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise TypeError(
                f"{op}: {name} has a {dtype_name(value.dtype)} tensor of shape {tuple(value.shape)}; expected one real number"
            )
        return float(value.item())
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"{op}: {name} has type {type(value).__name__}; expected a number or a tensor of one element")


def _non_negative(op: str, name: str, value: object) -> None:
    x = number(op, name, value)
    if not (0.0 <= x < math.inf):
        raise ValueError(f"{op}: {name} has {x}; expected a finite number of at least 0")


def check_options(op: str, group: Mapping[str, Any], where: str = "") -> None:
    """Raise ValueError, TypeError or NotImplementedError for an option that no step can use.

    op and where (for example "param_groups[1].") begin the message. Cheap enough for every step: schedulers and users
    change options at any time.
    """
    for name in ("lr", "eps", "weight_decay"):
        _non_negative(op, where + name, group[name])
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"{op}: {where}betas has {betas!r}; expected two numbers (beta1, beta2)")
    for i, beta in enumerate(betas):
        x = number(op, f"{where}betas[{i}]", beta)
        if not (0.0 <= x < 1.0):
            raise ValueError(f"{op}: {where}betas[{i}] has {x}; expected a number in [0, 1)")
    for name in _FLAGS:
        if not isinstance(group[name], bool):
            raise TypeError(f"{op}: {where}{name} has {group[name]!r}; expected True or False")
    seed = group["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"{op}: {where}seed has {seed!r}; expected an int")
    if not 0 <= seed < 2**64:
        raise ValueError(f"{op}: {where}seed has {seed}; expected an int in [0, 2**64)")
    _check_storage(op, group, where)


def _check_storage(op: str, group: Mapping[str, Any], where: str) -> None:
    """Check how states are stored: master, state_dtype, stochastic_rounding and capturable."""
    master, state_dtype = group["master"], group["state_dtype"]
    for name, value, known in (("master", master, MASTERS), ("state_dtype", state_dtype, STATE_DTYPES)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{op}: {where}{name} has type {type(value).__name__}; expected one of {known}")
        if value not in known:
            raise ValueError(f"{op}: {where}{name} has {value!r}; expected one of {known}")
    if state_dtype != "fp32" and group["amsgrad"]:
        raise ValueError(
            f"{op}: {where}amsgrad has True with state_dtype={state_dtype!r}; expected state_dtype='fp32' "
            "(a running maximum of rounded moments only grows)"
        )
    if group["stochastic_rounding"] and master is not None:
        raise ValueError(
            f"{op}: {where}stochastic_rounding has True with master={master!r}; expected master=None "
            "(a weight made from a master is always rounded to nearest)"
        )
    if group["capturable"]:
        raise NotImplementedError(f"{op}: {where}capturable has True, which is not built yet; expected False")


def check_param(op: str, name: str, param: torch.Tensor) -> None:
    """Raise TypeError or ValueError for a parameter that the kernels cannot update in place."""
    if param.dtype not in PARAM_DTYPES:
        raise TypeError(f"{op}: {name} has dtype {dtype_name(param.dtype)}; expected float32, bfloat16 or float16")
    if param.layout is not torch.strided:
        raise ValueError(f"{op}: {name} has layout {param.layout}; expected a dense tensor")
    if param.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{op}: {name} has device {param.device}; expected cpu or cuda")
    if not param.is_contiguous():
        raise ValueError(
            f"{op}: {name} has strides {param.stride()} for shape {tuple(param.shape)}; expected contiguous memory"
        )


def check_master(op: str, name: str, param: torch.Tensor, master: str | None) -> None:
    """Raise ValueError for a parameter that cannot have the kind of master that its group asks for."""
    if master == "split" and param.dtype is torch.float16:
        raise ValueError(
            f"{op}: {name} has dtype float16 with master='split'; expected bfloat16 "
            "(a remainder makes no float32 of float16), or master='fp32'"
        )


def hyper_of(group: Mapping[str, Any], step: int, grad_scale: float) -> "_C.AdamHyper":
    """Make the scalars of one step (counted from 1) from a group that check_options has passed.

    grad_scale multiplies the gradient; it arrives in double and is rounded once, inside AdamHyper.
    """
    beta1, beta2 = group["betas"]
    return _C.AdamHyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=step,
        grad_scale=grad_scale,
        adam_w_mode=group["adam_w_mode"],
        bias_correction=group["bias_correction"],
        maximize=group["maximize"],
        stochastic_rounding=group["stochastic_rounding"],
        seed=group["seed"],
    )
