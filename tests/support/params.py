"""Small lists of parameters and gradients, and comparisons of them."""

import torch

from shardcore.optim import FusedAdam
from shardcore.optim.options import CheckedOptions

# Options of capturable optimizers (and "dtype", the weights'), tried with and without CUDA graphs.
CAPTURABLE_KINDS = [
    {},
    {"adam_w_mode": False, "weight_decay": 0.1, "amsgrad": True, "maximize": True},
    {"bias_correction": False, "weight_decay": 0.1},
    {"master": "fp32", "dtype": torch.bfloat16},
    {"master": "split", "dtype": torch.bfloat16, "state_dtype": "bf16"},
    {"state_dtype": "8bit", "seed": 3},
    {"stochastic_rounding": True, "dtype": torch.bfloat16, "seed": 5},
]


def params_of(*sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in sizes]


def grads_of(params, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator) for p in params]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def snapshot(optimizer):
    tensors = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    for state in optimizer.state.values():
        tensors += [state[key].clone() for key in sorted(state)]
    return tensors


def plant_scalars(monkeypatch, hyper):
    """Let every step on the host, the long way and the short one, make its scalars by hyper(group, step, grad_scale)."""
    monkeypatch.setattr(CheckedOptions, "hyper", lambda self, *arguments: hyper(*arguments))


class OnCpu(FusedAdam):
    """A FusedAdam that may be capturable over CPU parameters, and is if nothing else is said."""

    _capture_type = "cpu"

    def __init__(self, params, capturable=True, **more):
        super().__init__(params, capturable=capturable, **more)
