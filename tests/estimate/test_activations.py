"""The bytes that a forward keeps: as autograd on the CPU keeps them, and as figures by hand."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from examples.llama import Llama
from shardcore.estimate.activations import activations_of
from tests.support.activations import peak_bytes


def saved_by(model: nn.Module, loss_of: Any) -> int:
    """Return the bytes that autograd really saves, without the model's own tensors."""
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model)
    return sum(storage.nbytes() for storage in held.values())


def test_they_are_those_of_a_forward_on_the_cpu() -> None:
    sizes: dict[str, int] = {"layers": 3, "width": 64, "heads": 4, "kv_heads": 4}
    sizes |= {"hidden": 160, "vocabulary": 300}
    with torch.device("meta"):
        planned = Llama(**sizes)
    batch, length = 2, 96
    got = activations_of(planned, torch.bfloat16, batch, length)
    assert next(planned.parameters()).dtype == torch.float32, "the model is not changed"
    model = Llama(**sizes).bfloat16()
    ids = torch.randint(300, (batch, length))

    def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())

    real = saved_by(model, lambda model: loss_of(model, ids))
    logits = batch * length * 300
    assert got.whole == pytest.approx(real + logits * (2 + 4), rel=0.01)
    on_meta = torch.zeros(batch, length, dtype=torch.long, device="meta")
    planned.bfloat16()
    peak = peak_bytes(planned, lambda: loss_of(planned, on_meta))
    assert got.whole == pytest.approx(peak, rel=0.1), "of forward and backward"


class Blocks(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x.sum()  # type: ignore[no-any-return]


def test_a_checkpointed_unit_keeps_its_input_and_one_unit_is_whole() -> None:
    blocks, width, tokens = 5, 32, 3 * 11
    with torch.device("meta"):
        model = Blocks(blocks, width)
    got = activations_of(model, torch.float32, 3, 11)
    ids, loss = 8 * tokens, 4 + 4  # and its gradient
    # a block keeps its input and the output of ReLU, which is the input of the next layer
    assert got.whole == blocks * 4 * tokens * (width + 4 * width) + ids + loss
    assert got.checkpointed == 4 * tokens * (blocks * width + 4 * width) + ids + loss


def test_a_transformers_model_whose_forward_fails_is_estimated_by_the_formula() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=300,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    measured = activations_of(model, torch.bfloat16, 2, 96)
    assert measured.source == "by a forward on the meta device"
    model.forward = lambda *_, **__: int(torch.zeros(1, device="meta"))
    formula = activations_of(model, torch.bfloat16, 2, 96)
    assert "arXiv:2205.05198" in formula.source
    elements, logits = 2 * 96 * 64, 2 * 96 * 300 * (2 + 4 + 4)
    assert formula.whole == 3 * 34 * elements + logits
    assert formula.checkpointed == 3 * 2 * elements + 34 * elements + logits
    assert formula.whole < measured.whole < 2 * formula.whole
