"""Models of transformers over split sequences have the losses and gradients of whole ones, up to
float32's rounding.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from tests.support.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="tests with transformers")

from transformers import (  # noqa: E402
    AttentionInterface,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from shardcore.integrations.sequence_attention import enable_sequence_parallel  # noqa: E402

VOCABULARY, TOKENS = 48, 24
# A gradient goes through at most 40 matrix products, norms and softmaxes (two layers, forward and
# backward), each of which adds up at most 64 terms: through at most 2,560 roundings of 2^-24. They
# are independent, so their sum grows with the root of their number: 3e-6 of the largest gradient.
# Twice that.
BOUND = 2 * 2560**0.5 * 2.0**-24


def llama(attention: str = "sdpa", **options: Any) -> Any:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attn_implementation": attention,
        **options,
    }
    config, kind = (
        (MistralConfig, MistralForCausalLM) if options else (LlamaConfig, LlamaForCausalLM)
    )
    torch.manual_seed(0)
    return kind(config(**sizes, **heads))


def gpt2() -> Any:
    sizes = {
        "vocab_size": VOCABULARY,
        "n_positions": TOKENS,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
    }
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def lora() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(llama(), config)


class Chunked(nn.Module):
    """The loss without logits, in a forward that has the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = llama()

    def forward(
        self,
        labels: torch.Tensor,
        shift_labels: torch.Tensor,
        num_items_in_batch: Any = None,
        **batch: Any,
    ) -> Any:
        hidden = self.inside.model(**batch).last_hidden_state
        head, count = self.inside.lm_head.weight, num_items_in_batch
        return (
            shardcore.chunked_cross_entropy(
                hidden, head, shift_labels, reduction="sum", chunk_bytes=1 << 14
            )
            / count
        )


MODELS: dict[str, Any] = {
    "llama": llama,
    "llama, eager": lambda: llama("eager"),
    "mistral, sliding": lambda: llama(sliding_window=5),
    "gpt2": gpt2,
    "chunked": Chunked,
    "lora": lora,
}
REFERENCES = {"llama, eager": "llama"}  # which has no softmax in float32


def batch_of(sequence: int, kind: str) -> dict[str, torch.Tensor]:
    """Two sequences, most of whose labels lie in the last parts; padded before them, or packed
    of documents.
    """
    generator = torch.Generator().manual_seed(sequence)
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, :17] = -100
    batch = {"input_ids": ids, "labels": labels}
    if kind == "padded":
        mask = torch.ones_like(ids)
        # what padding predicts differs between attentions
        mask[0, :9], mask[1, :2], labels[1, :3] = 0, 0, -100
        return {**batch, "attention_mask": mask}
    if kind == "packed":  # one of the beginnings is that of a part
        lengths = torch.tensor([7, 5, 12])
        return {
            **batch,
            "position_ids": torch.cat([torch.arange(n) for n in lengths]).expand(2, -1),
        }
    return batch


def whole(
    build: Any, batches: list[dict[str, torch.Tensor]]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients in float64, averaged over batches."""
    model = build().double()
    total = 0.0
    for batch in batches:
        if isinstance(model, Chunked):
            shifted = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
            loss = nn.functional.cross_entropy(
                model.inside(batch["input_ids"]).logits.flatten(0, 1), shifted.flatten()
            )
        else:
            loss = model(**batch, use_cache=False).loss
        (loss / len(batches)).backward()
        total += loss.item() / len(batches)
    return total, {
        name: param.grad for name, param in model.named_parameters() if param.grad is not None
    }


def largest_error(
    rank: int, world_size: int, kind: str, data: str, sp: int, stage: int, twin: str = ""
) -> float:
    """Return the largest error of loss and gradients, as a share of the largest value of each."""
    mesh = init_device_mesh("cpu", (world_size // sp, sp), mesh_dim_names=("dp", "sp"))
    model = MODELS[kind]()
    if stage:
        shardcore.apply_activation_checkpointing(model)
    optimizer = shardcore.FusedAdam([param for param in model.parameters() if param.requires_grad])
    enable_sequence_parallel(
        getattr(model, "inside", model).model if kind == "chunked" else model, mesh["sp"]
    )
    model, optimizer = shardcore.shard(model, optimizer, stage=stage)
    batch = batch_of(mesh["dp"].get_local_rank(), data)
    part = shardcore.split_sequences(batch, mesh["sp"])
    if twin == "labels shifted after the split":
        part["labels"] = batch["labels"].chunk(sp, 1)[mesh["sp"].get_local_rank()]
        del part["shift_labels"]
    if twin == "a mean per rank":
        part["num_items_in_batch"] = (part["labels"] != -100).sum()
    with pytest.MonkeyPatch.context() as patch:
        if twin == "documents not told apart":
            patch.setattr(
                "transformers.masking_utils.find_packed_sequence_indices", lambda positions: None
            )
        result = model(**part)
    loss = result if kind == "chunked" else result.loss
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    expected_loss, expected = whole(
        MODELS[REFERENCES.get(kind, kind)],
        [batch_of(index, data) for index in range(world_size // sp)],
    )
    errors = [abs(mean.item() / world_size - expected_loss) / expected_loss]
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        grad = shardcore.full_grad(param)
        errors.append(((grad - expected[name]).abs().max() / expected[name].abs().max()).item())
    return max(errors)


# Model, data, ranks, ranks of a sequence, stage; blocks are computed again from stage 1 on.
CASES = [
    ("llama", "packed", 4, 4, 3),  # 2 key heads
    ("lora", "packed", 2, 2, 3),
    ("llama, eager", "padded", 2, 2, 2),
    ("mistral, sliding", "packed", 2, 2, 1),
    ("gpt2", "padded", 4, 2, 3),
    ("chunked", "plain", 2, 2, 0),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind, data, world_size, sp, stage", CASES)
def test_gradients_are_those_of_whole_sequences(
    kind: str, data: str, world_size: int, sp: int, stage: int
) -> None:
    assert max(run_ranks(world_size, largest_error, kind, data, sp, stage)) < BOUND


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "twin", ["labels shifted after the split", "a mean per rank", "documents not told apart"]
)
def test_broken_twins_are_noticed(twin: str) -> None:
    assert min(run_ranks(2, largest_error, "llama", "packed", 2, 2, twin)) > 100 * BOUND


def seen_inside(rank: int, world_size: int) -> bool:
    """A flash attention gets positions of whole sequences, whole heads, and the name that it is
    called by.
    """

    seen = []

    def flash(
        module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **kwargs: Any
    ) -> Any:
        seen.append(
            (
                module.config._attn_implementation,
                query.shape[1:3],
                key.shape[1:3],
                kwargs["position_ids"].tolist(),
            )
        )
        return sdpa_attention_forward(module, query, key, *rest, **kwargs)

    AttentionInterface.register("my_flash", flash)
    model, other = llama(), llama()
    model.config._attn_implementation = "my_flash"
    enable_sequence_parallel(model, dist.group.WORLD)
    part = shardcore.split_sequences(batch_of(0, "packed"), dist.group.WORLD)
    model(**part)
    assert seen[0] == (
        "my_flash",
        (1, TOKENS),
        (1, TOKENS),
        batch_of(0, "packed")["position_ids"].tolist(),
    )
    # other models stay as they are
    assert other(input_ids=torch.zeros(1, 3, dtype=torch.int64)).logits.shape[1] == 3
    assert model.config.use_cache is False
    with pytest.raises(ValueError, match="position_ids is missing"):
        model(input_ids=part["input_ids"])
    return True


def refusals(rank: int, world_size: int) -> bool:
    from shardcore.integrations.sequence_attention import enable_sequence_parallel

    def note(model: Any, error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            enable_sequence_parallel(model, dist.group.WORLD)

    note(nn.Linear(1, 1), TypeError, "model is a Linear")
    note(
        T5ForConditionalGeneration(
            T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
        ),
        ValueError,
        "an encoder-decoder",
    )
    # labels of split_sequences are shifted
    for head in (LlamaForTokenClassification, LlamaForSequenceClassification):
        note(
            head(llama().config),
            ValueError,
            f"the labels of the {head.__name__}'s head are not the next tokens",
        )
    note(
        MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)),
        ValueError,
        "expected a decoder",
    )
    note(
        llama(num_attention_heads=3, num_key_value_heads=3, head_dim=8),
        ValueError,
        "has 3 attention heads",
    )
    model = llama()
    enable_sequence_parallel(model, dist.group.WORLD)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="no tokens in a cache"):
        model(ids, position_ids=ids, attention_mask=torch.ones(1, 5))
    peft = pytest.importorskip("peft")
    prompted = peft.get_peft_model(
        llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    note(prompted, ValueError, "trains a prompt")
    return True


def evaluated_before_backward(rank: int, world_size: int) -> None:
    """Whole sequences of an evaluation between forward and backward: blocks are computed again
    as they were.
    """
    model = llama()
    shardcore.apply_activation_checkpointing(model)
    enable_sequence_parallel(model, dist.group.WORLD, in_eval=False)
    part = shardcore.split_sequences(batch_of(0, "plain"), dist.group.WORLD)
    grads = []
    for evaluates in (False, True):
        model.zero_grad()
        loss = model.train()(**part).loss
        if evaluates:
            with torch.no_grad():
                model.eval()(input_ids=batch_of(rank, "plain")["input_ids"])
            model.train()
        loss.backward()
        grads.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_an_evaluation_between_forward_and_backward() -> None:
    run_ranks(2, evaluated_before_backward)


def test_what_the_attention_inside_sees() -> None:
    assert all(run_ranks(4, seen_inside))


def test_refusals() -> None:
    assert all(run_ranks(2, refusals))
