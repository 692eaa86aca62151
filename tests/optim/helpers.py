"""Small lists of parameters and gradients, and comparisons of them."""

import torch


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
