"""Lion beside its paper's algorithm in float64; alone, what it takes. Its kernel:
tests/native/test_elements.py.
"""

import pytest
import torch

import shardcore


def _lion(
    weight: torch.Tensor, grads: list[torch.Tensor], lr: float, decay: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 2 of arXiv:2302.06675, in the precision of its inputs."""
    average = torch.zeros_like(weight)
    for grad in grads:
        move = torch.sign(0.9 * average + (1 - 0.9) * grad)
        weight = weight - lr * (move + decay * weight)
        average = 0.99 * average + (1 - 0.99) * grad
    return weight, average


def _farthest(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest distance of a float32 tensor from a float64 one, in units of 2**-23 of the
    latter's largest.
    """
    return float((got.double() - wanted).abs().max() / wanted.abs().max() * 2**23)


def test_lion_is_its_paper_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(1000, generator=generator, dtype=torch.float64).float()
    grads = [torch.randn(1000, generator=generator) for _ in range(5)]
    weight = start.clone().requires_grad_()
    optimizer = shardcore.Lion([weight], lr=0.01, weight_decay=0.1)
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    wanted, average = _lion(start.double(), [grad.double() for grad in grads], 0.01, 0.1)
    # two rounded operations on a weight in each step
    assert _farthest(weight.detach(), wanted) <= 2 * len(grads)
    assert _farthest(optimizer.state[weight]["exp_avg"], average) <= 2 * len(grads)
    twin, _ = _lion(start.double(), [grad.double() for grad in grads[:-1]], 0.01, 0.1)
    assert _farthest(weight.detach(), twin) > 2 * len(grads)
    with pytest.raises(ValueError, match="betas in"):
        shardcore.Lion([weight], betas=(1.0, 0.9))


def test_alone_it_takes_what_torchs_take():
    """Weights in another order of memory, expanded gradients, maximize, several groups."""
    rng = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(6, 5, generator=rng).t().requires_grad_(),
        torch.randn(3, 4, generator=rng).bfloat16().requires_grad_(),
    ]
    grads = [
        torch.randn(5, 6, generator=rng),
        torch.randn(1, 4, generator=rng).bfloat16().expand(3, 4),
    ]
    wanted = [
        _lion(w.detach().double(), [-g.double()], 0.01, 0.0)[0]
        for w, g in zip(weights, grads, strict=True)
    ]
    optimizer = shardcore.Lion(
        [{"params": [weights[0]]}, {"params": [weights[1]]}], lr=0.01, maximize=True
    )
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad
    optimizer.step()
    for weight, target in zip(weights, wanted, strict=True):
        assert torch.allclose(
            weight.detach().double(),
            target,
            rtol=2**-8 if weight.dtype == torch.bfloat16 else 2**-22,
        )
        assert optimizer.state[weight]["exp_avg"].dtype == weight.dtype
