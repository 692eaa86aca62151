"""Trainer and Accelerate over the CPU ranks of tests/support/ranks.py, with a tiny model and
data made from numbers.
"""

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.models import hash_of

VOCAB, LENGTH = 40, 8
# of tiny_gpt2
LORA = {
    "r": 4,
    "target_modules": ["c_attn", "c_fc"],
    "fan_in_fan_out": True,
    "task_type": "CAUSAL_LM",
}


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """Be a rank that torchrun has started, for Accelerate, if there is a process group, or a
    single process.
    """
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, of few workers and steps
        ranks = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
        }
        settings = {
            "MASTER_ADDR": "localhost",
            "OMP_NUM_THREADS": 1,
            "HF_HUB_OFFLINE": 1,
            "CI": "true",
        }  # CI: TRL sends nothing
        for name, value in {**(ranks if dist.is_initialized() else {}), **settings}.items():
            patch.setenv(name, str(value))
        # else each rank imports it, for seconds
        patch.setattr("accelerate.utils.other.is_deepspeed_available", lambda: False)
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def message_of(rank: int, world_size: int, function: Callable[..., Any], *args: Any) -> str:
    """Return the error that `function(rank, world_size, *args)` raises; the ranks are not lost,
    as by an error in run_ranks.
    """
    try:
        function(rank, world_size, *args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def tiny_gpt2(seed: int = 0) -> Any:
    """Return a GPT-2 of two layers with tied embeddings and no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


def tiny_tokenizer() -> Any:
    """Return a tokenizer of the words " w0" to " w39" for tiny_gpt2."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w3")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2")


def forget_deepspeed() -> None:
    """Forget an installed DeepSpeed that another test's libraries have imported in this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def rows(count: int, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Return samples for a language model; some labels are left out, so that ranks have unequal
    numbers of them.
    """
    made = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(count):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=made)
        labels = ids.clone()
        labels[: index % 4] = -100
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return samples


def seed_everything(seed: int) -> None:
    """Set the random states that Trainer saves."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def hash_of_state(state: dict[str, torch.Tensor]) -> str:
    """Return one hash of a whole state dict."""
    return hash_of(value for _, value in sorted(state.items()))


def save_tiny_llama(folder: Any, dtype: torch.dtype = torch.float32) -> None:
    """Write a Llama of two layers, whose largest weights have 512 blocks of 64 elements."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=32, **sizes, **heads)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def qlora_of(
    folder: Any,
    dtype: torch.dtype = torch.float32,
    targets: str | tuple[str, ...] = ("q_proj", "down_proj"),
) -> Any:
    """Return the model of `save_tiny_llama` in bitsandbytes' NF4 with double quantization, under
    LoRA, in training mode.
    """
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits, dtype=dtype)
    torch.manual_seed(0)
    modules = targets if isinstance(targets, str) else [*targets]
    lora = peft.LoraConfig(
        r=4, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base, lora).train()


@contextmanager
def zero3(config: dict[str, Any]) -> Iterator[None]:
    """Let transformers make models as a script does under `shardcore run --as-deepspeed` after
    HfDeepSpeedConfig(config), in a process that has imported transformers.
    """
    from shardcore.integrations.zero3 import Zero3Loading

    loading = Zero3Loading(config)
    try:
        yield
    finally:
        del loading


def train_two_steps(engine: Any, rank: int) -> list[float]:
    """Train an engine of `initialize` on tokens of this rank; return its losses."""
    losses = []
    for _ in range(2):
        logits = engine(input_ids=torch.arange(8).view(1, 8) + rank)[0]
        loss = logits.float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def tiny(kind: str, seed: int = 0, **more: Any) -> Any:
    """Return a tiny Llama, a Mixtral with fused experts, or tiny_gpt2."""
    import transformers

    if kind == "GPT2":
        return tiny_gpt2(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **({"num_local_experts": 4} if kind == "Mixtral" else {}),
        **more,
    }
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)
