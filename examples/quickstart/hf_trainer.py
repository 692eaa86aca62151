"""Train a small Llama with Hugging Face's Trainer on shardcore.

    torchrun --nproc-per-node 8 hf_trainer.py          on GPUs, one rank each
    torchrun --nproc-per-node 2 hf_trainer.py          on a machine without GPUs

Needs transformers and accelerate. For a script that must stay as it is: shardcore run
--as-deepspeed (docs/huggingface.md).
"""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from shardcore.integrations.transformers import ShardcoreTrainer

VOCABULARY, LENGTH = 64, 32


def counting(number):
    """Samples in which each token is the one before it plus 1."""
    rows = [(torch.arange(LENGTH) + start) % VOCABULARY for start in range(number)]
    return [{"input_ids": row, "labels": row} for row in rows]


def make_model() -> nn.Module:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes)
    )


torch.manual_seed(0)
trainer = ShardcoreTrainer(
    model=make_model(),
    args=TrainingArguments(
        "out",
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        max_grad_norm=1.0,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,  # print the loss instead
        report_to=[],
    ),
    train_dataset=counting(512),
    shard_options={"stage": 3, "offload": {"optimizer": "cpu"}},  # arguments of shardcore.shard
)
trainer.train()  # trainer.train(resume_from_checkpoint=True) goes on from the last checkpoint
