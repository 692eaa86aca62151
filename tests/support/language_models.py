"""Tiny models of transformers, sharded and after a step, and the same ones unsharded."""

from collections.abc import Callable
from typing import Any

import torch

import shardcore
from tests.support.huggingface import VOCAB, tiny_gpt2

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def tiny_llama() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def tiny_mixtral() -> Any:
    """Return a model whose experts are one tensor, and one tensor for each expert in files."""
    import transformers

    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    )


KINDS: dict[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "mixtral": tiny_mixtral,
}


def stepped_lm(kind: Callable[[], Any], rank: int, stage: int = 3, precision: Any = "bf16") -> Any:
    """Return a model after a step, so that masters have other values than its weights."""
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = shardcore.shard(model, optimizer, stage, precision=precision)
    ids = torch.arange(rank, rank + 16).view(2, 8) % VOCAB
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return model


def plain_of(model: Any, kind: Callable[[], Any], dtype: torch.dtype) -> Any:
    """Return an unsharded model with the weights of a sharded one. Collective."""
    plain = kind().to(dtype)
    plain.load_state_dict(model.state_dict())
    # the weights of forward: torch would round a master halfway between two to the even one
    with shardcore.full_params(model), torch.no_grad():
        for own, param in zip(plain.parameters(), model.parameters(), strict=True):
            own.copy_(param)
    return plain
