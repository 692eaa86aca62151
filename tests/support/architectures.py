"""Real architectures of the transformers package, small and with random weights, each with a
batch and a loss.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCAB = 97


@dataclass(frozen=True)
class Architecture:
    """make: builds the model. batch: keyword inputs of `size` samples from a generator, labels
    included.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], dict[str, torch.Tensor]]


def _tokens(generator: torch.Generator, size: int, length: int = 12) -> torch.Tensor:
    return torch.randint(2, VOCAB, (size, length), generator=generator)


def _language(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    tokens = _tokens(generator, size)
    return {"input_ids": tokens, "labels": tokens}


def _few_tokens(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    """So few that some experts get none, on some ranks or on all."""
    tokens = _tokens(generator, size, 3)
    return {"input_ids": tokens, "labels": tokens}


def _translation(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(generator, size), "labels": _tokens(generator, size, 7)}


def _images(generator: torch.Generator, size: int) -> dict[str, torch.Tensor]:
    pixels = torch.randn(size, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (size,), generator=generator)}


def gpt2() -> nn.Module:
    """GPT-2: its head is its embedding."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=32,
        n_layer=3,
        n_head=2,
        embd_pdrop=0,
        attn_pdrop=0,
        resid_pdrop=0,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    """T5: encoder and decoder share an embedding with the head; the decoder's blocks all read
    the encoder's output.
    """
    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=3,
        num_heads=2,
        dropout_rate=0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


class LoraLinear(nn.Module):
    """A frozen linear layer and a trainable product of two thin ones, as LoRA adds it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def llama_lora() -> nn.Module:
    """Llama with everything frozen but thin products beside the projections of its attention."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model: Any = LlamaForCausalLM(config)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LoraLinear(getattr(layer.self_attn, name)))
    return model  # type: ignore[no-any-return]


class Expert(nn.Module):
    """One expert with weights of its own, as checkpoints of Mixtral have it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)  # type: ignore[no-any-return]


class SeparateExperts(nn.ModuleList):
    """Experts as modules: one that no token chose has no gradient (transformers itself keeps all
    of a layer in one tensor).
    """

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self):
            tokens, place = torch.where(chosen == index)
            if len(tokens):
                out = out.index_add(
                    0, tokens, expert(x[tokens]) * weights[tokens, place, None].to(x.dtype)
                )
        return out


def mixtral(separate: bool = False) -> nn.Module:
    """Mixtral: of eight experts a token uses two."""
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=32,
    )
    model: Any = MixtralForCausalLM(config)
    for layer in model.model.layers if separate else ():
        layer.mlp.experts = SeparateExperts(Expert(32, 24) for _ in range(8))
    return model  # type: ignore[no-any-return]


def vit() -> nn.Module:
    """A vision transformer: a convolution, encoder blocks, a classifier."""
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    return ViTForImageClassification(config)


ARCHITECTURES = {
    "gpt2": Architecture(gpt2, _language),
    "t5": Architecture(t5, _translation),
    "llama_lora": Architecture(llama_lora, _language),
    "mixtral": Architecture(mixtral, _few_tokens),
    "mixtral_modules": Architecture(lambda: mixtral(separate=True), _few_tokens),
    "vit": Architecture(vit, _images),
}
