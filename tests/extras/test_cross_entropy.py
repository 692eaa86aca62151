"""The chunked cross entropy against float64, its gradients too, and its memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardcore
from shardcore import chunked_cross_entropy
from shardcore.extras import cross_entropy
from tests.support.activations import Live

ROWS, FEATURES, CLASSES = 51, 32, 101


def inputs(
    dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight, bias = (
        torch.randn(3, ROWS // 3, FEATURES),
        torch.randn(CLASSES, FEATURES),
        torch.randn(CLASSES),
    )
    target = torch.randint(0, CLASSES, (3, ROWS // 3))
    target[0, :5] = -100
    hidden, weight, bias = (
        tensor.to(device, dtype).requires_grad_() for tensor in (hidden, weight, bias)
    )
    return hidden, weight, target.to(device), bias


def errors(dtype: torch.dtype, reduction: str, chunk: int, device: str = "cpu") -> list[float]:
    """Return the largest error of the loss and of each gradient, as a share of the largest
    value.
    """
    hidden, weight, target, bias = inputs(dtype, device)
    given = [hidden, weight, bias]
    loss = chunked_cross_entropy(
        hidden, weight, target, bias, reduction=reduction, chunk_bytes=4 * ROWS * chunk
    )
    upstream = torch.linspace(0.5, 2, loss.numel(), device=device).view(loss.shape)
    got = [loss, *torch.autograd.grad(loss, given, upstream)]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    logits = F.linear(exact[0], exact[1], exact[2]).flatten(0, 1)
    oracle = F.cross_entropy(logits, target.flatten(), reduction=reduction).view(loss.shape)
    expected = [oracle, *torch.autograd.grad(oracle, exact, upstream.double())]
    return [
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected, strict=True)
    ]


@pytest.mark.parametrize("chunk", [7, 10, CLASSES, 1000])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 4e-6), (torch.bfloat16, 2e-2)])
def test_loss_and_gradients(dtype: torch.dtype, bound: float, reduction: str, chunk: int) -> None:
    assert max(errors(dtype, reduction, chunk)) < bound


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 4e-6), (torch.bfloat16, 2e-2)])
def test_on_a_gpu(dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    assert max(errors(dtype, "mean", 10, "cuda")) < bound


def test_logits_of_a_wrong_chunk_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = cross_entropy._logits
    monkeypatch.setattr(cross_entropy, "_logits", lambda *inputs: logits(*inputs).roll(1, 0))
    assert max(errors(torch.float32, "mean", 60)) > 1e-2


def test_autocast_and_frozen_weights() -> None:
    hidden, weight, target, _ = inputs(torch.float32)
    weight = weight.detach()
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, target, chunk_bytes=4 * ROWS * 10)
        logits = F.linear(hidden, weight).float()
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32
    assert torch.allclose(loss, F.cross_entropy(logits.flatten(0, 1), target.flatten()), rtol=1e-6)


def test_no_target_counts() -> None:
    hidden, weight, target, _ = inputs(torch.float32)
    assert chunked_cross_entropy(hidden, weight, torch.full_like(target, -100)).isnan()
    assert (
        chunked_cross_entropy(hidden, weight, torch.full_like(target, -100), reduction="sum") == 0
    )


def test_memory_is_that_of_chunks() -> None:
    hidden, weight = (
        torch.randn(4096, 16, requires_grad=True),
        torch.randn(2048, 16, requires_grad=True),
    )
    target = torch.randint(0, 2048, (4096,))
    chunk = 1 << 20
    with Live([hidden, weight, target]) as live:
        chunked_cross_entropy(hidden, weight, target, chunk_bytes=chunk).backward()
    assert live.peak_bytes < 4 * chunk < 4 * 4096 * 2048


class Model(torch.nn.Module):
    """Whose loss is computed in its forward, where the head has its weight at stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(*(torch.nn.Linear(FEATURES, FEATURES) for _ in range(3)))
        self.head = torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        return chunked_cross_entropy(
            self.body(x), self.head.weight, target, self.head.bias, chunk_bytes=4 * ROWS * 10
        )


def test_sharded_weights() -> None:
    hidden, _, target, _ = inputs(torch.float32)
    weights = []
    for stage in (0, 3):
        torch.manual_seed(1)
        model, optimizer = shardcore.shard(
            model := Model(), shardcore.FusedAdam(model.parameters()), stage
        )
        for _ in range(2):
            model(hidden.detach(), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(5, 3)}, r"weight \(5, 3\)"),
        ({"target": torch.ones(2, dtype=torch.int64)}, r"target has shape \(2,\)"),
        ({"target": torch.ones(3, 17)}, "target is torch.float32"),
        ({"bias": torch.ones(3)}, r"bias has shape \(3,\)"),
        ({"reduction": "max"}, "reduction is 'max'"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        (
            {"weight": torch.ones(CLASSES, FEATURES, dtype=torch.bfloat16)},
            "weight is torch.bfloat16",
        ),
        ({"target": torch.full((3, 17), CLASSES)}, "index out of range"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    hidden, weight, target, bias = inputs(torch.float32)
    arguments = {"hidden": hidden, "weight": weight, "target": target, "bias": bias} | change
    with pytest.raises((ValueError, TypeError, IndexError), match=message):
        chunked_cross_entropy(**arguments)
