"""DistributedAttention: attention over sequences that are split over ranks.

The exchanges are those of shardcore/parallel/sequence.py.
Source: https://www.deepspeed.ai/tutorials/ds-sequence, 0.19.8.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardcore.parallel.sequence import exchange_dimensions, group_of_sequence, repeat_heads

_HEADS = 2  # the dimension of heads


class DistributedAttention(nn.Module):
    """Calls `local_attention` with whole sequences and a part of the heads.

    Rank i of n holds the i-th of n equal, contiguous parts of each sequence. If n does not divide
    the key and value heads, these heads are repeated.
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: dist.ProcessGroup | DeviceMesh,
        scatter_idx: int = _HEADS,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        """Choose them.

        Args:
            local_attention: a function, or module, of query, key and value.
            sequence_process_group: the ranks of a sequence.
            scatter_idx: 2, the dimension of heads.
            gather_idx: accepted, as in DeepSpeed: batch_dim_idx tells where tokens are.
            sp_stream: None: the exchanges run on the current stream.
            num_kv_heads: accepted: the heads are counted.

        Raises ValueError for another scatter_idx or sp_stream.
        """
        super().__init__()
        if scatter_idx != _HEADS:
            raise ValueError(
                f"DistributedAttention: scatter_idx is {scatter_idx}; expected 2, the dimension of "
                f"heads"
            )
        if sp_stream is not None:
            raise ValueError(
                "DistributedAttention: sp_stream is given; expected None (exchanges run on the "
                "current stream)"
            )
        self.local_attn = local_attention
        self.spg = group_of_sequence(sequence_process_group)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the attention of this rank's tokens. Differentiable. Forward and backward are
        collective.

        Args:
            query, key, value: (batch, tokens, heads, features), or with batch_dim_idx 1 (tokens,
                batch, heads, features).
            batch_dim_idx: 0 or 1.
            rotary_pos_emb: cosines and sines (tokens, 1, 1, features) of whole sequences, for query
                and key.
            args, kwargs: passed to local_attention. It returns (batch, tokens, heads / n,
                features), or heads and features as one dimension. Tokens are first if they are
                first in the inputs.

        Raises ValueError if n does not divide the query's heads, or batch_dim_idx is neither 0 nor
        1.
        """
        if batch_dim_idx not in (0, 1):
            raise ValueError(
                f"DistributedAttention: batch_dim_idx is {batch_dim_idx}; expected 0 or 1"
            )
        tokens = 1 - batch_dim_idx
        key, value = repeat_heads(
            "DistributedAttention", query, key, value, self.spg.size(), _HEADS
        )
        query, key, value = (
            exchange_dimensions(x, self.spg, _HEADS, tokens) for x in (query, key, value)
        )
        if rotary_pos_emb is not None:
            cos, sin = (part.transpose(0, tokens) for part in rotary_pos_emb)
            query, key = (apply_rotary_pos_emb(x, cos, sin) for x in (query, key))
        return exchange_dimensions(
            self.local_attn(query, key, value, *args, **kwargs), self.spg, tokens, _HEADS
        )


def apply_rotary_pos_emb(
    t: torch.Tensor, freqs_cos: torch.Tensor, freqs_sin: torch.Tensor
) -> torch.Tensor:
    """Return t with its first features rotated, one half against the other.

    freqs_cos, freqs_sin: of as many features as are rotated; shapes broadcast to t's.
    """
    size = freqs_cos.shape[-1]
    turned, rest = t[..., :size], t[..., size:]
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * freqs_cos + torch.cat((-second, first), -1) * freqs_sin, rest), -1)
