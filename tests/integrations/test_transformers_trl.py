"""The mixin in front of a trainer of TRL's, whose arguments have a DeepSpeed configuration."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="tests with transformers")
pytest.importorskip("accelerate", reason="tests with Accelerate and Trainer")
peft = pytest.importorskip("peft", reason="tests with PEFT")
trl = pytest.importorskip("trl", reason="tests with TRL")

import datasets  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402

from shardcore.engine.pieces import has_piece  # noqa: E402
from shardcore.integrations.transformers import ShardcoreArgumentsMixin, ShardcoreTrainerMixin  # noqa: E402
from tests.support.huggingface import LORA, VOCAB, launched, rows, tiny_gpt2  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
}


class Sharded(ShardcoreTrainerMixin, trl.SFTTrainer):
    pass


class Arguments(ShardcoreArgumentsMixin, trl.SFTConfig):
    pass


def _sft(
    rank: int, world_size: int, out: str, sharded: bool, folder: str | None = None
) -> list[list[float]]:
    """folder: of the model, for the trainer to load; None: it gets a model."""
    with launched(rank, world_size):
        datasets.disable_progress_bars()
        words = {f"w{index}": index for index in range(VOCAB)}
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w3")),
            eos_token="w1",
            pad_token="w2",
        )
        args = (Arguments if sharded else trl.SFTConfig)(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            max_steps=4,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="steps",
            save_steps=2,
            report_to=[],
            disable_tqdm=True,
            learning_rate=0.1,
            log_level="error",
            deepspeed=CONFIG if sharded else None,
        )
        trainer = (Sharded if sharded else trl.SFTTrainer)(
            model=folder or tiny_gpt2(),
            args=args,
            train_dataset=datasets.Dataset.from_list(
                [{"input_ids": row["input_ids"].tolist()} for row in rows(32)]
            ),
            processing_class=tokenizer,
            peft_config=peft.LoraConfig(**LORA),
        )
        base = trainer.model.get_base_model()
        assert has_piece(base.transformer.wte.weight) == (sharded and folder is not None)
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        return [
            [entry[key] for entry in history]
            for key in ("loss", "grad_norm", "mean_token_accuracy")
        ]


@pytest.mark.more
def test_sft_with_lora_has_the_numbers_of_ddp(tmp_path: Path) -> None:
    expected = run_ranks(2, _sft, str(tmp_path / "ddp"), False)[0]
    tiny_gpt2().save_pretrained(tmp_path / "model")
    given = run_ranks(2, _sft, str(tmp_path), True)
    assert run_ranks(2, _sft, str(tmp_path), True, str(tmp_path / "model")) == given
    for of_rank in given:
        assert len(of_rank[0]) == 4
        for ours, theirs in zip(of_rank, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
    folder = tmp_path / "checkpoint-4"
    assert (folder / "adapter_model.safetensors").exists()
    assert not (folder / "model.safetensors").exists()
