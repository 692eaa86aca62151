"""DistributedAttention over two ranks: attention of whole sequences, and as DeepSpeed's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from shardcore.sequence import layer as ours  # type: ignore[import-not-found]
from torch.nn.functional import scaled_dot_product_attention

from tests.support.models import error_of
from tests.support.ranks import run_ranks

BATCH, TOKENS, HEADS, WIDTH = 2, 6, 4, 8


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch_dim: int = 0,
    flat: bool = False,
) -> Any:
    """Causal attention of (batch, tokens, heads, features), or of tokens first; flat: returns
    the heads in one dimension.
    """
    # DeepSpeed and shardcore call it with the same dimensions: heads come before tokens inside.
    whole = [
        x.permute(1, 2, 0, 3) if batch_dim == 1 else x.transpose(1, 2) for x in (query, key, value)
    ]
    output = scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    output = output.permute(2, 0, 1, 3) if batch_dim == 1 else output.transpose(1, 2)
    return output.flatten(2) if flat else output


def inputs(batch_dim: int, kv_heads: int = HEADS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    whole = [
        torch.randn(BATCH, TOKENS, heads, WIDTH, generator=generator)
        for heads in (HEADS, kv_heads, kv_heads)
    ]
    return [x.transpose(0, 1) if batch_dim == 1 else x for x in whole]


def outputs(
    layers: Any, rank: int, batch_dim: int, rotary: bool = False, kv_heads: int = HEADS, **more: Any
) -> list[torch.Tensor]:
    """Return this rank's part of the output, and of the gradients of query, key and value."""
    parts = [
        x.chunk(2, 1 - batch_dim)[rank].contiguous().requires_grad_()
        for x in inputs(batch_dim, kv_heads)
    ]
    attention_of_ranks = layers.DistributedAttention(attention, dist.group.WORLD, 2, 1 - batch_dim)
    output = attention_of_ranks(
        *parts, batch_dim, frequencies() if rotary else None, batch_dim=batch_dim, **more
    )
    output.square().sum().backward()
    return [output.detach(), *(part.grad for part in parts if part.grad is not None)]


def frequencies() -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines (tokens, 1, 1, features) of half of the features."""
    angles = torch.arange(TOKENS)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    return angles.cos()[:, None, None], angles.sin()[:, None, None]


def whole(
    rank: int, batch_dim: int, rotary: bool = False, kv_heads: int = HEADS
) -> list[torch.Tensor]:
    """Return what `outputs` does, of one process's attention."""
    leaves = [x.detach().requires_grad_() for x in inputs(batch_dim, kv_heads)]
    cos, sin = (part.transpose(0, 1 - batch_dim) for part in frequencies())
    turned = [ours.apply_rotary_pos_emb(x, cos, sin) for x in leaves[:2]] if rotary else leaves[:2]
    output = attention(*turned, leaves[2], batch_dim)
    output.square().sum().backward()
    tensors = [output.detach(), *(x.grad for x in leaves if x.grad is not None)]
    return [x.chunk(2, 1 - batch_dim)[rank] for x in tensors]


def _compared(rank: int, world_size: int) -> None:
    for batch_dim in (0, 1):
        for options in ({}, {"rotary": True}, {"kv_heads": 2}, {"kv_heads": 1}):
            own = outputs(ours, rank, batch_dim, **options)
            assert len(own) == 4
            torch.testing.assert_close(own, whole(rank, batch_dim, **options))
        flat = outputs(ours, rank, batch_dim, flat=True)
        torch.testing.assert_close(flat[0], whole(rank, batch_dim)[0].flatten(2))
    layer = ours.DistributedAttention(attention, dist.group.WORLD)
    odd = torch.ones(1, 2, 3, 4)
    assert "got 3 query heads and 3 key heads on 2 ranks" in error_of(
        lambda: layer(odd, odd, odd, 0)
    )
    assert "batch_dim_idx is 2; expected 0 or 1" in error_of(lambda: layer(odd, odd, odd, 2))
    assert "scatter_idx is 1" in error_of(
        lambda: ours.DistributedAttention(attention, dist.group.WORLD, 1)
    )
    assert "sp_stream is given" in error_of(
        lambda: ours.DistributedAttention(attention, dist.group.WORLD, sp_stream=1)
    )


def test_attention_is_that_of_whole_sequences() -> None:
    run_ranks(2, _compared)


def _with_deepspeeds(rank: int, world_size: int) -> None:
    theirs = pytest.importorskip("deepspeed.sequence.layer")
    pytest.importorskip("deepspeed.comm").init_distributed("gloo")
    for batch_dim, options in ((0, {}), (0, {"rotary": True}), (0, {"kv_heads": 2}), (1, {})):
        torch.testing.assert_close(
            outputs(ours, rank, batch_dim, **options), outputs(theirs, rank, batch_dim, **options)
        )


@pytest.mark.more
def test_attention_is_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="compares with DeepSpeed's")
    pytest.importorskip("einops", reason="DeepSpeed's needs it")
    run_ranks(2, _with_deepspeeds)
