"""Sequence parallelism: each rank of a group has a contiguous part of every sequence, and in
attention a part of the heads.

The way is that of DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509): before attention an
all-to-all gives each rank whole sequences of some heads, after it one gives back its part of the
sequences with all heads. Nothing is added up on the way, so each head's attention is computed as on
one rank. Models of transformers: shardcore/integrations/sequence_attention.py.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardcore._native import _C
from shardcore.distributed.comm import Comm, exchange_flat, gather_flat
from shardcore.engine.agreement import agree

_IGNORE = -100  # cross_entropy's own label of positions that count for nothing
_HEADS, _TOKENS = 1, 2  # dimensions


def group_of_sequence(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of a mesh of one dimension, or the group itself; TypeError if it
    is neither.
    """
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"sequence parallel: group is {group!r}; expected a process group, or a mesh of one "
            "dimension"
        )
    return group


def ulysses_attention(
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup | DeviceMesh,
) -> torch.Tensor:
    """Return this rank's part of `attention(query, key, value)` over whole sequences. Each rank of
    the group passes its part.

    Rank i of n passes the i-th of n equal, contiguous parts of every sequence. `attention` is
    called with all tokens and 1/n of the heads. If n does not divide the number of key and value
    heads, they are repeated as often as needed. Differentiable; forward and backward are
    collective.

    Args:
        attention: A function of (batch, heads / n, tokens * n, features) that returns the same
            shape, such as a partial of torch.nn.functional.scaled_dot_product_attention with
            is_causal=True, enable_gqa=True.
        query: (batch, heads, tokens, features), of any dtype.
        key, value: (batch, kv_heads, tokens, features); kv_heads divides heads.
        group: The ranks of a sequence, or a mesh of one dimension such as mesh["sp"].

    Raises ValueError if n does not divide the number of query heads. Every rank must pass the same
    shapes.
    """
    group = group_of_sequence(group)
    key, value = repeat_heads("ulysses_attention", query, key, value, group.size(), _HEADS)
    whole = [exchange_dimensions(x, group, _HEADS, _TOKENS) for x in (query, key, value)]
    return exchange_dimensions(attention(*whole), group, _TOKENS, _HEADS)


def repeat_heads(
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranks: int,
    dimension: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value with heads, in `dimension`, that `ranks` divide; ValueError by `name`
    if the query's are not.
    """
    heads, kv_heads = query.shape[dimension], key.shape[dimension]
    if heads % ranks or heads % kv_heads:
        raise ValueError(
            f"{name}: got {heads} query heads and {kv_heads} key heads on {ranks} ranks; expected "
            "query heads divisible by the ranks and by the key heads. Use a smaller sequence "
            "parallel group"
        )
    times = ranks // math.gcd(ranks, kv_heads)
    if times == 1:
        return key, value
    return key.repeat_interleave(times, dimension), value.repeat_interleave(times, dimension)


def exchange_dimensions(
    x: torch.Tensor, group: dist.ProcessGroup, split: int, join: int
) -> torch.Tensor:
    """Send the i-th of equal parts along `split` to rank i; return what comes, joined along
    `join`. Collective.
    """
    return _Exchange.apply(x, group, split, join)  # type: ignore[no-untyped-call, no-any-return]


class _Exchange(torch.autograd.Function):
    """Send the i-th part along one dimension to rank i, and join what comes along another one."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, split: int, join: int
    ) -> torch.Tensor:
        ctx.back = group, join, split
        sent = torch.stack(x.chunk(group.size(), split))
        received = torch.empty_like(sent)
        exchange_flat(received, sent, group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Exchange.apply(grads[0], *ctx.back), None, None, None  # type: ignore[no-untyped-call]


def gather_sequence(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return (batch, tokens * n) from each rank's (batch, tokens), such as positions or a mask.
    Collective; no gradients.
    """
    full = part.new_empty(group.size(), *part.shape)
    gather_flat(
        full.view(-1).view(torch.uint8), part.contiguous().view(-1).view(torch.uint8), group
    )
    return torch.cat(full.unbind(), 1)


def split_sequences(
    batch: Mapping[str, Any], group: dist.ProcessGroup | DeviceMesh
) -> dict[str, Any]:
    """Return this rank's part of a batch. All ranks of the group pass the whole batch.

    Tensors of shape (batch, tokens, ...) are cut into equal, contiguous parts. Everything else is
    returned unchanged. `position_ids`, the positions in the whole sequence, is added if it is
    missing. Labels are shifted before they are cut, so the label of a part's last token is the
    first token of the next part. Both `labels` and `shift_labels` are returned shifted; causal
    models of transformers expect `shift_labels` to be shifted.

    Divide the sum of a rank's losses by `num_items_in_batch`, a float32 scalar: the number of
    labels other than -100 in the whole batch, divided by the number of ranks in the group. After
    `shard` averages gradients over all ranks, they equal the gradients of the mean over the batch's
    labels, on whichever rank the labels are. The same is true of the average of the ranks' losses.

    Args:
        batch: `input_ids` (batch, tokens), and for a loss `labels` of the same shape, not shifted.
        group: See ulysses_attention.

    Raises ValueError if the number of tokens is not a multiple of the number of ranks in the group.
    """
    group = group_of_sequence(group)
    tokens, ranks = batch["input_ids"].shape[1], group.size()
    if tokens % ranks:
        raise ValueError(
            f"split_sequences: input_ids contains {tokens} tokens for {ranks} ranks; expected a "
            f"multiple of {ranks}. Pad sequences, for example with pad_to_multiple_of={ranks} in a "
            f"collator, and use {_IGNORE} as labels"
        )
    whole = dict(batch)
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(tokens, device=whole["input_ids"].device).expand(
            whole["input_ids"].shape
        )
    if "labels" in whole:
        shifted = torch.nn.functional.pad(whole["labels"], (0, 1), value=_IGNORE)[:, 1:]
        whole["labels"] = whole["shift_labels"] = shifted
        whole["num_items_in_batch"] = (shifted != _IGNORE).sum() / ranks

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == tokens:
            return value.chunk(ranks, 1)[group.rank()].contiguous()
        return value

    return {name: cut(value) for name, value in whole.items()}


class SequenceParallelLoader:
    """Iterate over this rank's parts of the batches of a DataLoader. All ranks of the group must
    load the same batches.

    Use the sampler of the data parallel ranks: DistributedSampler(dataset,
    num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank()). Each batch is compared over
    the group.
    """

    def __init__(
        self, loader: Iterable[Mapping[str, Any]], group: dist.ProcessGroup | DeviceMesh
    ) -> None:
        """Wrap `loader`; its batches and `group` are those of `split_sequences`."""
        self.loader, self.group = loader, group_of_sequence(group)

    def __len__(self) -> int:
        """Return the number of batches, as the loader has it."""
        assert isinstance(self.loader, Sized)
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield what `split_sequences` returns. Raises ValueError on every rank if ranks have
        different batches. Collective.
        """
        comm = Comm(self.group)
        for batch in self.loader:
            entries = [
                ("checksum", name, str(_C.crc32c(batch[name].cpu().contiguous())))
                for name in ("input_ids", "labels")
                if name in batch
            ]
            agree(comm, "SequenceParallelLoader", entries=entries, explain=_other_batches)
            yield split_sequences(batch, self.group)


def _other_batches() -> ValueError:
    return ValueError(
        "SequenceParallelLoader: the ranks of one sequence got different batches. Use the same "
        "sampler on these ranks, such as DistributedSampler(dataset, "
        'num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank())'
    )
