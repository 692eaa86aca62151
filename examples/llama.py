"""Models with the shapes of the Llama family, for `shardcore estimate` and simulated worlds.

Under torch.device("meta") they take no memory. Rotary embeddings, which have no parameters, are
left out.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Grouped-query attention and a gated MLP, each behind a norm. (batch, length, width) -> the
    same.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.attention_norm = nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.attention_norm(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens (batch, length) -> logits (batch, length, vocabulary)."""

    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, heads, kv_heads, hidden) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def llama_7b() -> Llama:
    """6,738,415,616 parameters."""
    return Llama(layers=32, width=4096, heads=32, kv_heads=32, hidden=11008, vocabulary=32000)


def llama_70b() -> Llama:
    """68,976,648,192 parameters."""
    return Llama(layers=80, width=8192, heads=64, kv_heads=8, hidden=28672, vocabulary=32000)


def llama_405b() -> Llama:
    """405,853,388,800 parameters."""
    return Llama(layers=126, width=16384, heads=128, kv_heads=8, hidden=53248, vocabulary=128256)
