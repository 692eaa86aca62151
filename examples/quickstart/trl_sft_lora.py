"""Fine-tune LoRA adapters with TRL's SFTTrainer and PEFT on shardcore: the frozen base is sharded,
the adapters train.

    torchrun --nproc-per-node 8 trl_sft_lora.py          on GPUs, one rank each
    torchrun --nproc-per-node 2 trl_sft_lora.py          on a machine without GPUs

Needs trl and peft. Take your own model and tokenizer from AutoModelForCausalLM.from_pretrained and
AutoTokenizer.
"""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from shardcore.integrations.transformers import ShardcoreTrainerMixin

WORDS = 64


class ShardcoreSFTTrainer(ShardcoreTrainerMixin, SFTTrainer):
    """TRL's trainer over a sharded model."""


def make_tokenizer():
    words = Tokenizer(
        models.WordLevel({f"w{index}": index for index in range(WORDS)}, unk_token="w3")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2")


sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
texts = [
    " ".join(f"w{4 + (start + place) % (WORDS - 4)}" for place in range(16)) for start in range(512)
]
torch.manual_seed(0)
trainer = ShardcoreSFTTrainer(
    model=LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=32, **sizes)),
    args=SFTConfig(
        "out",
        max_steps=20,
        per_device_train_batch_size=16,
        learning_rate=2e-2,
        lr_scheduler_type="constant",
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,  # print the loss instead
        report_to=[],
    ),
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=make_tokenizer(),
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    shard_options={"stage": 3},  # arguments of shardcore.shard
)
trainer.train()
