"""Parts of a model that compute a piece of a sequence at a time: the same numbers as at once,
and as DeepSpeed's.
"""

from typing import Any

import pytest
import torch
from shardcore.runtime.sequence_parallel import ulysses_sp as ours  # type: ignore[import-not-found]
from torch import nn
from torch.nn.functional import cross_entropy

from tests.support.deepspeed import ds_config, start
from tests.support.ranks import run_ranks

TOKENS, WIDTH, WORDS = 13, 6, 11


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Two MLPs and a head with its loss, by one of the ways of `WAYS`."""

    def __init__(self, way: str, names: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = Mlp(), Mlp(), nn.Linear(WIDTH, WORDS, bias=False)
        self.way, self.names = way, names

    def _mlp(self, mlp: Mlp, x: torch.Tensor) -> Any:
        weights = list(mlp.parameters())
        if self.way == "mlp":
            return self.names.TiledMLP.apply(Mlp.forward, mlp, x, 4, weights)
        if self.way == "compute":
            return self.names.sequence_tiled_compute(
                Mlp.forward, x.shape[1], 4, {"x": x}, {"self": mlp}, "x", weights, 1, None
            )
        return mlp(x)

    def _part(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        losses = cross_entropy(self.head(x).flatten(0, -2), y.flatten(), reduction="none")
        return (losses if mask is None else losses * mask.flatten()).sum() / TOKENS

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        x, mask = self._mlp(self.second, self._mlp(self.first, x)), (y > 2).float()
        if self.way == "loss":
            fused = self.names.TiledFusedLogitsLoss
            return fused.apply(Model._part, self, x, y, mask, 4, [self.head.weight], "sum")
        if self.way == "compute loss":
            kwargs = {"x": x, "y": y, "mask": mask}
            return self.names.sequence_tiled_compute(
                Model._part, TOKENS, 4, kwargs, {"self": self}, "x", [self.head.weight], 0, "sum"
            )
        return self._part(x, y, mask)


WAYS = ("mlp", "compute", "loss", "compute loss")


def batch(seed: int, size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, TOKENS, WIDTH, generator=generator), torch.randint(
        0, WORDS, (size, TOKENS), generator=generator
    )


def gradients(way: str, names: Any, size: int = 2) -> list[torch.Tensor]:
    """Return the loss, the gradient of the inputs, and those of the weights."""
    model, (x, y) = Model(way, names), batch(1, size)
    loss = model(x.requires_grad_(), y)
    loss.backward()
    assert x.grad is not None
    return [
        loss.detach(),
        x.grad,
        *(param.grad for param in model.parameters() if param.grad is not None),
    ]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_all_tokens_at_once(way: str) -> None:
    for size in (1, 2):
        plain = gradients("plain", None, size)
        tiled = gradients(way, ours, size)
        assert len(tiled) == len(plain) == 2 + 7
        torch.testing.assert_close(tiled, plain)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_deepspeeds(way: str) -> None:
    theirs = pytest.importorskip(
        "deepspeed.runtime.sequence_parallel.ulysses_sp", reason="DeepSpeed is not installed"
    )
    torch.testing.assert_close(gradients(way, ours, 1), gradients(way, theirs, 1))


def test_a_mean_weighs_pieces_equally() -> None:
    head, (x, y) = nn.Linear(WIDTH, WORDS), batch(2)

    def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return cross_entropy(module(x), y)

    tiled = ours.TiledFusedLogitsLoss.apply(loss, head, x, y, None, 4, None, "mean")
    pieces = zip(x.flatten(0, 1).chunk(4), y.flatten().chunk(4), strict=True)
    torch.testing.assert_close(tiled, torch.stack([loss(head, *piece) for piece in pieces]).mean())
    with torch.no_grad():
        assert ours.TiledFusedLogitsLoss.apply(loss, head, x, y, None, 4, None, "mean") == tiled


def test_other_arguments_are_refused() -> None:
    head, (x, y) = nn.Linear(WIDTH, WORDS), batch(2)
    fused = ours.TiledFusedLogitsLoss.apply
    with pytest.raises(
        ValueError, match="output_reduction is 'none'; expected one of 'mean', 'sum'"
    ):
        fused(nn.Module.__call__, head, x, y, None, 2, None, "none")
    with pytest.raises(ValueError, match=r"mask \(2,\); expected the same batch and tokens"):
        fused(nn.Module.__call__, head, x, y, torch.ones(2), 2, None, "sum")
    with pytest.raises(ValueError, match="output_reduction is 'max'"):
        ours.sequence_tiled_compute(
            Mlp.forward, TOKENS, 2, {"x": x}, {}, "x", output_reduction="max"
        )


def _train(rank: int, world_size: int) -> None:
    after = {}
    for way in ("plain", *WAYS):
        engine = start(ds_config(stage=3, accumulation=2), Model(way, ours))
        for micro_step in range(4):
            engine.backward(engine(*batch(10 * micro_step + rank)))
            engine.step()
        after[way] = engine.module_state_dict()
    for way in WAYS:
        torch.testing.assert_close(after[way], after["plain"], rtol=1e-4, atol=1e-5)


def test_a_sharded_model_trains_as_without_pieces() -> None:
    run_ranks(2, _train)
