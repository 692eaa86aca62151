"""Small lists of parameters and gradients, optimizers of every kind after some steps, and
comparisons of them.
"""

import copy
import hashlib

import pytest
import torch

from shardcore.optim import FusedAdam
from shardcore.optim import tensor_lists as step_of_adam
from tests.support.placement import storage_of

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
    """Let every step on the host, the long way and the short one, make its scalars by
    hyper(group, step, grad_scale).
    """
    monkeypatch.setattr(step_of_adam, "hyper_of", hyper)


class OnCpu(FusedAdam):
    """A FusedAdam that may be capturable over CPU parameters, and is if nothing else is said."""

    _capture_type = "cpu"

    def __init__(self, params, capturable=True, **more):
        super().__init__(params, capturable=capturable, **more)


SHAPES = [(7, 5), (33,), (), (0, 4), (2, 3, 4)]


def make_params(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES
    ]


def step_grads(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def run_steps(optimizer, params, first, last):
    for step in range(first, last):
        for p, g in zip(params, step_grads(params, step), strict=True):
            p.grad = g
        optimizer.step()


def torch_adam(adam_w_mode):
    return torch.optim.AdamW if adam_w_mode else torch.optim.Adam


def param(n=4, dtype=torch.float32):
    return torch.nn.Parameter(torch.ones(n, dtype=dtype))


class Snapshot:
    """Everything a failing call could have changed."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.params = [p for g in optimizer.param_groups for p in g["params"]]
        self.before = copy.deepcopy((self.params, optimizer.state_dict(), optimizer.skipped_steps))

    def check(self):
        params, state_dict, skipped = self.before
        now = self.optimizer.state_dict()
        assert all(torch.equal(a, b) for a, b in zip(params, self.params, strict=True))
        assert now["param_groups"] == state_dict["param_groups"]
        assert now["state"].keys() == state_dict["state"].keys()
        for i, state in state_dict["state"].items():
            assert now["state"][i].keys() == state.keys()
            assert all(torch.equal(now["state"][i][key], value) for key, value in state.items())
        assert self.optimizer.skipped_steps == skipped


KINDS = {
    "fp32": (torch.float32, {}),
    "amsgrad": (torch.float32, {"amsgrad": True}),
    "master": (torch.bfloat16, {"master": "fp32"}),
    "split": (torch.bfloat16, {"master": "split"}),
    "8bit": (torch.bfloat16, {"state_dtype": "8bit"}),
    "bf16": (torch.float16, {"state_dtype": "bf16"}),
    "stochastic": (torch.bfloat16, {"stochastic_rounding": True}),
}


each_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind, steps=2, make=FusedAdam):
    """Return parameters and an optimizer of KINDS after some steps."""
    dtype, options = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape in ((4, 6), (300,), (2, 3, 4))
    ]
    optimizer = make(params, lr=0.1, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
        optimizer.step()
    return params, optimizer


def digest(params, optimizer):
    """A hash of every byte that a step could write, and of the counts."""
    tensors = [p.detach() for p in params] + [p.grad for p in params if p.grad is not None]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    hashed = hashlib.sha256()
    for t in tensors:
        hashed.update(
            storage_of(t).view(torch.uint8).clone().numpy().tobytes() if not t.is_meta else b"meta"
        )
    hashed.update(str(optimizer.skipped_steps).encode())
    return hashed.hexdigest()


def release(tensor):
    tensor.untyped_storage().resize_(0)
