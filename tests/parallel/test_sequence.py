"""What ranks of a sequence exchange is moved, not changed; batches are cut as the losses of
whole sequences need them.
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from shardcore import SequenceParallelLoader, split_sequences, ulysses_attention
from tests.support.ranks import run_ranks

BATCH, TOKENS, FEATURES = 2, 8, 4


def inputs(heads: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(BATCH, count, TOKENS, FEATURES, generator=generator)
        for count in (heads, kv_heads, kv_heads)
    ]


def exchanged(rank: int, world_size: int, heads: int, kv_heads: int) -> bool:
    """Attention that adds keys and values to queries: whole heads come in, and parts of
    sequences go out, bit for bit.
    """
    group: Any = dist.group.WORLD
    whole = [x.requires_grad_() for x in inputs(heads, kv_heads)]
    parts = [x.detach().chunk(world_size, 2)[rank].requires_grad_() for x in whole]

    def add(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        assert query.shape == (BATCH, heads // world_size, TOKENS, FEATURES)
        times = query.shape[1] // key.shape[1]
        return query * key.repeat_interleave(times, 1) + value.repeat_interleave(times, 1)

    got = ulysses_attention(add, *parts, group)
    query, key, value = whole
    times = heads // kv_heads
    expected = query * key.repeat_interleave(times, 1) + value.repeat_interleave(times, 1)
    upstream = torch.linspace(1, 2, expected.numel()).view(expected.shape)
    expected.backward(upstream)
    got.backward(upstream.chunk(world_size, 2)[rank])
    assert torch.equal(got, expected.chunk(world_size, 2)[rank])
    # Each query has one gradient; those of keys and values are sums over the queries of a group, in
    # another order.
    assert torch.equal(parts[0].grad, query.grad.chunk(world_size, 2)[rank])
    for part, x in zip(parts[1:], whole[1:], strict=True):
        torch.testing.assert_close(
            part.grad, x.grad.chunk(world_size, 2)[rank], rtol=0, atol=times * 2.0**-23 * 4
        )
    return True


@pytest.mark.parametrize(
    "world_size, heads, kv_heads", [(2, 4, 4), (2, 6, 2), (4, 8, 2), (4, 12, 3)]
)
def test_whole_heads_come_in_and_parts_go_out(world_size: int, heads: int, kv_heads: int) -> None:
    assert all(run_ranks(world_size, exchanged, heads, kv_heads))


def attended(rank: int, world_size: int) -> float:
    attention = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    whole = inputs(8, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    got = ulysses_attention(
        attention, *(x.chunk(2, 2)[mesh["sp"].get_local_rank()] for x in whole), mesh["sp"]
    )
    expected = attention(*(x.double() for x in whole)).chunk(2, 2)[mesh["sp"].get_local_rank()]
    return (got - expected).abs().max().item()


def test_causal_attention_with_grouped_heads_over_a_mesh() -> None:
    # A score, its exponential and the weighted mean of values below 4: fewer than 32 roundings.
    assert max(run_ranks(4, attended)) < 32 * 4 * 2.0**-24


def batches(seed: int = 0) -> dict[str, Any]:
    ids = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) + seed
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels, "name": "a"}


def loaded(rank: int, world_size: int) -> list[dict[str, Any]]:
    loader = SequenceParallelLoader([batches(0), batches(1)], dist.group.WORLD)
    assert len(loader) == 2
    return list(loader)


def test_batches_are_split_with_the_labels_of_whole_sequences() -> None:
    ranks = run_ranks(2, loaded)
    for step in range(2):
        parts, whole = [rank[step] for rank in ranks], batches(step)
        joined = {
            name: torch.cat([part[name] for part in parts], 1)
            for name in ("input_ids", "labels", "position_ids")
        }
        assert torch.equal(joined["input_ids"], whole["input_ids"])
        assert torch.equal(joined["position_ids"], torch.arange(TOKENS).expand(BATCH, TOKENS))
        assert torch.equal(joined["labels"][:, :-1], whole["labels"][:, 1:])
        assert (joined["labels"][:, -1] == -100).all()
        for part in parts:
            assert torch.equal(part["shift_labels"], part["labels"])
            assert part["num_items_in_batch"] == (3 + 7) / 2
            assert part["name"] == "a"


def refusals(rank: int, world_size: int) -> list[str]:
    group: Any = dist.group.WORLD
    messages = []

    def note(call: Any) -> None:
        try:
            call()
        except (TypeError, ValueError) as error:
            messages.append(str(error))

    note(lambda: next(iter(SequenceParallelLoader([batches(rank)], group))))
    note(lambda: split_sequences({"input_ids": torch.zeros(1, 7, dtype=torch.int64)}, group))
    note(lambda: ulysses_attention(lambda q, k, v: q, *inputs(3, 1), group))
    note(lambda: split_sequences(batches(), "sp"))
    return messages


def test_refusals() -> None:
    for messages in run_ranks(2, refusals):
        assert len(messages) == 4
        for text, part in zip(
            messages,
            ("different batches", "7 tokens for 2 ranks", "3 query heads", "group is 'sp'"),
            strict=True,
        ):
            assert part in text
