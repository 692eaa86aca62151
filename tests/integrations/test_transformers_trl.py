"""The mixin in front of a trainer of TRL's, whose arguments have a DeepSpeed configuration."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="tests with transformers")
pytest.importorskip("accelerate", reason="tests with Accelerate and Trainer")
peft = pytest.importorskip("peft", reason="tests with PEFT")
trl = pytest.importorskip("trl", reason="tests with TRL")

import datasets  # noqa: E402

from shardcore.engine.pieces import has_piece  # noqa: E402
from shardcore.integrations.transformers import ShardcoreArgumentsMixin, ShardcoreTrainerMixin  # noqa: E402
from shardcore.optim.interface import engine_of  # noqa: E402
from tests.support.huggingface import LORA, launched, rows, tiny_gpt2, tiny_tokenizer  # noqa: E402
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


def _text(ids: Any) -> str:
    return "".join(f" w{index}" for index in ids.tolist())


def _sft(
    rank: int, world_size: int, out: str, sharded: bool, folder: str | None = None
) -> list[list[float]]:
    """folder: of the model, for the trainer to load; None: it gets a model."""
    with launched(rank, world_size):
        datasets.disable_progress_bars()
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
            processing_class=tiny_tokenizer(),
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


def _by_name(
    rank: int, world_size: int, kind: str, folder: str, sharded: bool
) -> tuple[list[list[float]], Any]:
    """Train by a trainer that gets the name of its model. Return losses and norms, and whether the
    model was in pieces, and how the reference model is sharded.
    """
    trainer_type, config_type = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    if sharded:
        trainer_type = type("Sharded", (ShardcoreTrainerMixin, trainer_type), {})
        config_type = type("Arguments", (ShardcoreArgumentsMixin, config_type), {})
    with launched(rank, world_size):
        datasets.disable_progress_bars()
        args = config_type(
            output_dir=f"{folder}/out",
            use_cpu=True,
            bf16=False,
            max_steps=2,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            learning_rate=1e-2,
            log_level="error",
            gradient_checkpointing=False,
            deepspeed=CONFIG if sharded else None,
        )
        samples = [row["input_ids"] for row in rows(32)]
        pairs = [
            {"prompt": _text(ids[:4]), "chosen": _text(ids[4:6]), "rejected": _text(ids[6:])}
            for ids in samples
        ]
        trainer = trainer_type(
            model=folder,
            args=args,
            train_dataset=datasets.Dataset.from_list(
                [{"input_ids": ids.tolist()} for ids in samples] if kind == "SFT" else pairs
            ),
            processing_class=tiny_tokenizer(),
        )
        in_pieces = all(map(has_piece, trainer.model.parameters()))
        reference: Any = engine_of(getattr(trainer, "ref_model", None))
        gathers = reference is not None and reference.unsharder is not None
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        return [[entry[key] for entry in history] for key in ("loss", "grad_norm")], (
            in_pieces,
            gathers,
        )


@pytest.mark.more
@pytest.mark.parametrize("kind", ["SFT", "Reward", "DPO"])
def test_models_that_trainers_load_are_in_pieces(tmp_path: Path, kind: str) -> None:
    tiny_gpt2().save_pretrained(tmp_path)
    plain, of_plain = run_ranks(2, _by_name, kind, str(tmp_path), False)[0]
    assert of_plain == (False, False)
    for numbers, states in run_ranks(2, _by_name, kind, str(tmp_path), True):
        assert states == (True, kind == "DPO"), "the reference model, too, is at stage 3"
        for ours, theirs in zip(numbers, plain, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
