"""Trainer.save_model at stage 3 under DeepSpeed's names: it streams, and asks for no whole weights.

tests/deepspeed/test_as_deepspeed.py has the real Trainer; here it is replaced, so that ranks need
not import it.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="tests with transformers")
pytest.importorskip("accelerate", reason="Trainer needs Accelerate")
peft = pytest.importorskip("peft", reason="tests with PEFT")

from safetensors.torch import load_file  # noqa: E402

import shardcore  # noqa: E402
from tests.support.huggingface import LORA, VOCAB, tiny_gpt2  # noqa: E402
from tests.support.models import error_of  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402


class Trainer:
    """What shardcore uses of transformers' Trainer."""

    def __init__(self, engine: Any, output_dir: str) -> None:
        self.deepspeed, self.model, self.pushed = engine, engine.module, 0
        self.args = SimpleNamespace(output_dir=output_dir, push_to_hub=True, hub_revision=None)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        raise NotImplementedError("the whole weights")

    def _save(self, output_dir: str | None, state_dict: dict[str, Any]) -> None:
        folder = output_dir or self.args.output_dir
        self.model.save_pretrained(folder, state_dict=state_dict)
        Path(folder, "training_args.bin").write_bytes(b"")

    def push_to_hub(self, **_: Any) -> None:
        self.pushed += 1


def _save(rank: int, world_size: int, folder: str, zero: dict[str, Any]) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.trainer.Trainer", type("Trainer", (Trainer,), {}))
        engine = shardcore.initialize(model=tiny_gpt2(), config=config)[0]
        trainer = transformers.trainer.Trainer(engine, folder)
        said = error_of(trainer.save_model)
        if said == "no error":
            trainer.save_model(f"{folder}/second", _internal_call=True)
        with shardcore.full_params(engine.module):
            params = engine.module.named_parameters()
            weights = {name: param.detach().clone() for name, param in params}
        return said, trainer.pushed, weights


def test_weights_are_streamed_and_other_files_are_trainers(tmp_path: Path) -> None:
    (said, pushed, weights), _ = run_ranks(2, _save, str(tmp_path), {"stage": 3})
    assert said == "no error"
    assert pushed == 1, "not by the internal call"
    for folder in (tmp_path, tmp_path / "second"):
        assert (folder / "training_args.bin").exists()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.dtype == torch.bfloat16
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
        for name, param in loaded.named_parameters():
            assert torch.equal(param, weights[name]), name


@pytest.mark.parametrize(
    "zero", [{"stage": 2}, {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}]
)
def test_other_configurations_are_trainers_own(tmp_path: Path, zero: dict[str, Any]) -> None:
    said = [each[0] for each in run_ranks(2, _save, str(tmp_path), zero)]
    assert said == ["NotImplementedError: the whole weights"] * 2


def _save_adapters(rank: int, world_size: int, base: str, folder: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(0)
    model.resize_token_embeddings(VOCAB + 8)
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.trainer.Trainer", type("Trainer", (Trainer,), {}))
        engine = shardcore.initialize(model=model, config=config)[0]
        trainer = transformers.trainer.Trainer(engine, folder)
        trainer.save_model()
        return trainer.pushed, expected


@pytest.mark.more
def test_adapters_are_saved_with_embeddings_that_were_resized(tmp_path: Path) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapters"
    tiny_gpt2().save_pretrained(base)
    (pushed, expected), _ = run_ranks(2, _save_adapters, str(base), str(folder))
    assert pushed == 1
    assert (folder / "training_args.bin").exists()
    found = load_file(folder / "adapter_model.safetensors")
    wte = "base_model.model.transformer.wte.weight"
    assert torch.equal(found.pop(wte), expected[wte].bfloat16().float())
    found.pop("base_model.model.lm_head.weight", None)
    assert len(found) == 8
    for name, value in found.items():
        assert torch.equal(value, expected[name.replace(".weight", ".default.weight")])
