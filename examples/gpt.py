"""A byte-level GPT in plain torch: what the demo trains and what the benchmarks time.

Nothing here knows of shardcore. Pre-norm blocks, causal scaled_dot_product_attention, rotary
positions, an untied head. Positions and initialization are chosen for a fast start, since a demo
has few steps: rotary positions reach a loss of 2.30 where learned ones reach 2.49, and blocks that
begin as the identity need 100 steps where GPT-2's scaled weights need 160. Source: Su et al. 2021
(RoFormer), equation 34: rotary positions.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB_SIZE = 256  # one token a byte


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model: ``dim`` is a multiple of ``heads``; ``context`` is the longest
    sequence in tokens.
    """

    dim: int
    layers: int
    heads: int
    context: int


PRESETS = {
    "tiny": GPTConfig(dim=64, layers=2, heads=2, context=64),  # 0.1M parameters: tests
    "cpu3m": GPTConfig(dim=256, layers=4, heads=4, context=128),  # 3.3M: benchmarks/convergence.py
    # 10.9M: the demo on a CPU machine
    "cpu10m": GPTConfig(dim=384, layers=6, heads=6, context=128),
    # 25.5M: benchmarks/bench_train_step.py
    "cpu26m": GPTConfig(dim=512, layers=8, heads=8, context=128),
    "gpu": GPTConfig(dim=1024, layers=28, heads=16, context=1024),  # 353M: the demo on GPUs
    # 1.48B, as wide and deep as GPT-2 XL: offload on GPUs
    "1.5b": GPTConfig(dim=1600, layers=48, heads=25, context=1024),
    # 6.45B, as GPT-3 6.7B: benchmarks/bench_offload_train.py
    "7b": GPTConfig(dim=4096, layers=32, heads=32, context=1024),
}


def rotary_angles(context: int, head_dim: int) -> Tensor:
    """Make the angles of rotary positions: (context, head_dim / 2) float32, position times a
    falling frequency.
    """
    frequencies = 10000.0 ** -torch.linspace(0, 1, head_dim // 2 + 1)[:-1]
    return torch.arange(context)[:, None] * frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its angle; x (..., time, head_dim), cos and
    sin (time, head_dim / 2).
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention over (batch, time, dim)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, dim = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, head_dim)
        y = F.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True
        )
        return self.proj(y.transpose(1, 2).reshape(batch, time, dim))


class Block(nn.Module):
    """One pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp_up = nn.Linear(config.dim, 4 * config.dim)
        self.mlp_down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Maps tokens (batch, time) int64 to logits (batch, time, 256) in the dtype of the weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(VOCAB_SIZE, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, VOCAB_SIZE, bias=False)
        self.register_buffer(
            "angles", rotary_angles(config.context, config.dim // config.heads), persistent=False
        )
        self._initialize()

    def _initialize(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                # what a block adds: nothing at first
                if name.endswith(("attention.proj", "mlp_down")):
                    nn.init.zeros_(module.weight)
                else:
                    nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.token_embedding.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.01)  # the first predictions are close to uniform

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)
        angles = self.angles[: tokens.shape[1]]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.final_norm(x))


def build_gpt(preset: str, seed: int) -> GPT:
    """Make the preset's model on the CPU in float32; the same seed gives the same bits and
    leaves torch's global seed alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(PRESETS[preset])


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats a byte, in float32, of logits (batch, time, 256) for targets
    (batch, time).
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
