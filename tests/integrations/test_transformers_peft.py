"""Adapters over a frozen, sharded base: PEFT's LoRA, and bases that are quantized."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="tests with transformers")
pytest.importorskip("accelerate", reason="tests with Accelerate and Trainer")
peft = pytest.importorskip("peft", reason="tests with PEFT")

from safetensors.torch import load_file  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

import shardcore  # noqa: E402
from shardcore.checkpoint import consolidate  # noqa: E402
from shardcore.integrations.transformers import ShardcoreTrainer  # noqa: E402
from tests.support.huggingface import (  # noqa: E402
    LORA,
    VOCAB,
    hash_of_state,
    launched,
    message_of,
    rows,
    seed_everything,
    tiny_gpt2,
)
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.more

DEFAULTS = {
    "use_cpu": True,
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
    "report_to": [],
    "disable_tqdm": True,
    "learning_rate": 0.1,
    "log_level": "error",
}


def with_adapters() -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(tiny_gpt2(), peft.LoraConfig(**LORA))


def adapters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "lora" in name}


def kept_bytes(model: Any) -> int:
    """Return the bytes of weights that a rank keeps, without what is gathered for a while."""
    lines = shardcore.memory_report(model).lines
    return sum(line.bytes for line in lines if line.kind == "weights" and line.unit != "shared")


def train(
    rank: int, world_size: int, out: str, kind: Any, options: Any, changes: Any, resume: Any = None
) -> dict[str, Any]:
    with launched(rank, world_size):
        seed_everything(0)
        model = with_adapters()
        base = {
            name: value.clone() for name, value in model.state_dict().items() if "lora" not in name
        }
        args = TrainingArguments(output_dir=out, **{**DEFAULTS, **changes})
        sharded = {} if options is None else {"shard_options": options}
        trainer = kind(
            model=model, args=args, train_dataset=rows(64), eval_dataset=rows(8, 2), **sharded
        )
        trainer.train(resume_from_checkpoint=resume)
        after = model.state_dict()
        frozen = {name: after[name].to(value.dtype) for name, value in base.items()}
        assert changes.get("bf16") or all(
            torch.equal(frozen[name], value) for name, value in base.items()
        )
        return {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "hash": hash_of_state(adapters_of(model)),
            "weight_bytes": 0 if options is None else kept_bytes(model),
        }


def test_adapters_train_at_every_stage_and_are_saved_alone(tmp_path: Path) -> None:
    ddp = run_ranks(2, train, str(tmp_path / "ddp"), Trainer, None, {})[0]
    hashes, weight_bytes = set(), {}
    for stage, more in ((2, {"offload": {"optimizer": "cpu"}}), (3, {})):
        out = tmp_path / f"stage{stage}"
        for ours in run_ranks(2, train, str(out), ShardcoreTrainer, {"stage": stage, **more}, {}):
            assert ours["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
            hashes.add(ours["hash"])
            weight_bytes[stage] = ours["weight_bytes"]
        folder = out / "checkpoint-4"
        assert not (folder / "model.safetensors").exists()
        saved = load_file(folder / "adapter_model.safetensors")
        model = peft.PeftModel.from_pretrained(tiny_gpt2(), folder)
        hashes.add(hash_of_state(adapters_of(model)))
        assert len(saved) == len(adapters_of(model)) == 8
        shards = sum(path.stat().st_size for path in folder.glob("global_step4/*.safetensors"))
        base = sum(param.numel() * 4 for param in model.parameters() if not param.requires_grad)
        assert 0 < shards < base, "the base is not saved"
    assert len(hashes) == 1
    assert weight_bytes[3] < 0.6 * weight_bytes[2], "the frozen base is sharded, too"


def test_adapters_resume_to_the_bit(tmp_path: Path) -> None:
    changes = {"bf16": True, "gradient_checkpointing": True}
    whole = run_ranks(2, train, str(tmp_path), ShardcoreTrainer, {"stage": 3}, changes)[0]
    folder = str(tmp_path / "checkpoint-2")
    resumed = run_ranks(
        2, train, str(tmp_path / "resumed"), ShardcoreTrainer, {"stage": 2}, changes, folder
    )
    assert {each["hash"] for each in resumed} == {whole["hash"]}


def test_the_best_adapters_come_back(tmp_path: Path) -> None:
    best = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "greater_is_better": True,
    }
    ours = run_ranks(2, train, str(tmp_path), ShardcoreTrainer, {"stage": 3}, best)[0]
    chosen, last = (
        peft.PeftModel.from_pretrained(tiny_gpt2(), tmp_path / f"checkpoint-{step}")
        for step in (2, 4)
    )
    assert ours["hash"] == hash_of_state(adapters_of(chosen)) != hash_of_state(adapters_of(last))


def classifier() -> Any:
    """Return a classifier whose head trains beside its adapters."""
    torch.manual_seed(3)
    base = transformers.GPT2ForSequenceClassification(tiny_gpt2().config)
    return peft.get_peft_model(base, peft.LoraConfig(**{**LORA, "task_type": "SEQ_CLS"}))


def train_classifier(rank: int, world_size: int, out: str, stage: int) -> str:
    with launched(rank, world_size):
        data = [{**row, "labels": torch.tensor(index % 2)} for index, row in enumerate(rows(16))]
        args = TrainingArguments(output_dir=out, **{**DEFAULTS, "max_steps": 2, "bf16": True})
        trainer = ShardcoreTrainer(
            model=classifier(), args=args, train_dataset=data, shard_options={"stage": stage}
        )
        trainer.train()
        return hash_of_trained(trainer.model)


def hash_of_trained(model: Any) -> str:
    return hash_of_state(
        {
            k: v.bfloat16()
            for k, v in model.state_dict().items()
            if "lora" in k or "modules_to_save" in k
        }
    )


def test_a_head_that_trains_beside_adapters_is_saved_with_them(tmp_path: Path) -> None:
    hashes = set()
    for stage in (2, 3):
        out = tmp_path / f"stage{stage}"
        hashes |= set(run_ranks(2, train_classifier, str(out), stage))
        saved = load_file(out / "checkpoint-2" / "adapter_model.safetensors")
        assert len([name for name in saved if "score" in name]) == 1
        model = classifier()
        model.load_adapter(out / "checkpoint-2", "default")
        hashes.add(hash_of_trained(model))
    assert len(hashes) == 1


def train_resized(rank: int, world_size: int, base: str, out: str, kind: Any, options: Any) -> None:
    with launched(rank, world_size):
        seed_everything(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(VOCAB + 8)
        args = TrainingArguments(output_dir=out, **{**DEFAULTS, "max_steps": 2, "save_steps": 1})
        lora = peft.get_peft_model(model, peft.LoraConfig(**LORA))
        kind(model=lora, args=args, train_dataset=rows(16), **options).train()


def test_embeddings_that_were_resized_are_saved_as_peft_saves_them(tmp_path: Path) -> None:
    base = str(tmp_path / "base")
    tiny_gpt2().save_pretrained(base)
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    run_ranks(2, train_resized, base, str(plain), Trainer, {})
    options = {"shard_options": {"stage": 3}}
    run_ranks(2, train_resized, base, str(ours), ShardcoreTrainer, options)
    found, expected = (
        load_file(each / "checkpoint-1" / "adapter_model.safetensors") for each in (ours, plain)
    )
    assert found["base_model.model.transformer.wte.weight"].shape == (VOCAB + 8, 32)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
        assert value.dtype == expected[name].dtype


def save_alone(rank: int, world_size: int, out: str) -> list[bool]:
    """Rank 0 alone merges and saves adapters inside GatheredParameters, as scripts for DeepSpeed
    do; then all train.
    """
    model = classifier()
    model, optimizer = shardcore.shard(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=3, precision="bf16"
    )
    gathered, gathers = shardcore.zero.GatheredParameters, []  # type: ignore[attr-defined]
    for modifier in (None, 0):
        with gathered(list(model.parameters()), modifier_rank=modifier):
            if rank == 0:
                model.save_pretrained(f"{out}/{modifier}")
                if modifier == 0:
                    model.merge_adapter()
                    model.get_base_model().save_pretrained(
                        f"{out}/merged", state_dict=model.get_base_model().state_dict()
                    )
                    model.unmerge_adapter()
        batch = rows(2)[rank]
        model(input_ids=batch["input_ids"][None], labels=torch.tensor([1])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gathers.append(
            bool((model.state_dict()["base_model.model.transformer.ln_f.weight"] == 1).all())
        )
    return gathers


def test_one_rank_saves_and_merges_adapters_inside_gathered_parameters(tmp_path: Path) -> None:
    run_ranks(2, save_alone, str(tmp_path))
    first, fresh = (
        load_file(tmp_path / "None" / "adapter_model.safetensors"),
        classifier().state_dict(),
    )
    assert len([name for name in first if "lora" in name or "score" in name]) == len(first) == 9
    for name, value in first.items():
        old, new = (
            (".weight", ".default.weight")
            if "lora" in name
            else ("score", "score.modules_to_save.default")
        )
        key = name.replace(old, new)
        assert torch.equal(value, fresh[key].bfloat16())
    assert (tmp_path / "merged" / "model.safetensors").exists()


def save_adapters(rank: int, world_size: int, out: str) -> list[str]:
    """Save two adapters, of which one does not train, on every rank; return what was gathered."""
    model = with_adapters()
    model.add_adapter("other", peft.LoraConfig(**{**LORA, "r": 2}))
    model.get_input_embeddings().weight.data[0] = 5.0
    model, optimizer = shardcore.shard(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=3, precision="bf16"
    )
    batch = rows(2)[rank]
    model(input_ids=batch["input_ids"][None], labels=batch["labels"][None]).loss.backward()
    optimizer.step()
    state = model.state_dict()
    gathered: list[str] = []
    read = consolidate.on_first_rank

    def watched(op: str, engine: Any, tensors: Any, use: Any) -> Any:
        gathered.extend(tensors)
        return read(op, engine, tensors, use)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardcore.checkpoint.save_pretrained.on_first_rank", watched)
        for name, more in (("own", {}), ("embeddings", {"save_embedding_layers": True})):
            model.save_pretrained(f"{out}/{name}", is_main_process=rank == 0, **more)
            if rank == 0:
                model.save_pretrained(f"{out}/{name}_given", state_dict=state, **more)
    return gathered


def test_every_rank_saves_adapters_and_gathers_no_more(tmp_path: Path) -> None:
    for gathered in run_ranks(2, save_adapters, str(tmp_path)):
        assert any("other" in name for name in gathered)
        assert {name for name in gathered if "lora_" not in name} == {
            "base_model.model.transformer.wte.weight"
        }
    for name in ("own", "embeddings"):
        for adapter in ("", "other"):
            file = Path(adapter, "adapter_model.safetensors")
            found = load_file(tmp_path / name / file)
            expected = load_file(tmp_path / f"{name}_given" / file)
            assert found.keys() == expected.keys()
            assert hash_of_state(found) == hash_of_state(expected)
            dtypes = {value.dtype for key, value in found.items() if "lora" in key}
            assert dtypes == {torch.bfloat16 if adapter else torch.float32}, "one has masters"
            assert any("wte" in key for key in found) == (name == "embeddings")


# --- quantized bases ------------------------------------------------------------------------------


class Quantized(nn.Module):
    """Stands in for a layer of bitsandbytes: codes of one byte, frozen, and adapters of PEFT's
    kind over them.
    """

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(
            0, 256, (16, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
        )
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.lora_a, self.lora_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ ((self.weight.to(x.dtype) - 128) / 256).T + self.lora_b(self.lora_a(x))


class QuantizedModel(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(Quantized(), nn.Linear(16, 8), Quantized())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.blocks(x) - 1).square().mean()}


def train_quantized(
    rank: int, world_size: int, out: str, options: Any, bf16: bool, bits: int = 4
) -> Any:
    with launched(rank, world_size):
        model = QuantizedModel()
        if bits == 8:
            model.blocks[0].weight.SCB = None  # as bitsandbytes' Int8Params have
        codes = model.blocks[0].weight.clone()
        data = [
            {"x": torch.randn(8, generator=torch.Generator().manual_seed(index))}
            for index in range(32)
        ]
        args = TrainingArguments(
            output_dir=out, **{**DEFAULTS, "save_strategy": "no", "bf16": bf16}
        )
        sharded = {} if options is None else {"shard_options": options}
        trainer = (Trainer if options is None else ShardcoreTrainer)(
            model=model, args=args, train_dataset=data, **sharded
        )
        trainer.train()
        state = model.state_dict()
        assert torch.equal(state["blocks.0.weight"], codes)
        return [
            entry["loss"] for entry in trainer.state.log_history if "loss" in entry
        ], hash_of_state(state)


def test_a_quantized_base_trains_at_every_stage_and_one_of_8_bits_below_3(tmp_path: Path) -> None:
    expected, _ = run_ranks(2, train_quantized, str(tmp_path), None, False)[0]
    found = [
        each
        for stage in (2, 3)
        for each in run_ranks(2, train_quantized, str(tmp_path), {"stage": stage}, False)
    ]
    for losses, _ in found:
        assert losses == pytest.approx(expected, rel=1e-5)
    assert len({hashed for _, hashed in found}) == 1
    assert (
        len(
            {
                hashed
                for _, hashed in run_ranks(2, train_quantized, str(tmp_path), {"stage": 1}, True)
            }
        )
        == 1
    )
    for message in run_ranks(2, message_of, train_quantized, str(tmp_path), {"stage": 3}, False, 8):
        assert "blocks.0.weight is quantized to 8 bits" in message
        assert "expected stage 0, 1 or 2" in message
