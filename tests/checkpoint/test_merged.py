"""Adapters merged into their base for export, unit by unit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="tests with transformers")
peft = pytest.importorskip("peft", reason="tests with PEFT")
pytest.importorskip("bitsandbytes", reason="tests with bitsandbytes")

from safetensors.torch import load_file  # noqa: E402

import shardcore  # noqa: E402
from shardcore.checkpoint import merged  # noqa: E402
from shardcore.engine.quantized import dequantized  # noqa: E402
from tests.support.huggingface import LORA, qlora_of, rows, save_tiny_llama, tiny_gpt2  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.more


def export(rank: int, world_size: int, folder: str, output: str, options: Any) -> Any:
    """Train a step, and export; returns the adapters."""
    model = qlora_of(folder)
    optimizer = shardcore.FusedAdam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model, optimizer = shardcore.shard(model, optimizer, stage=3, **options)
    batch = {name: value[None] for name, value in rows(2)[rank].items()}
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    shardcore.consolidate(model, output, max_shard_bytes=300_000, merge_adapters=True)
    return {name: value for name, value in model.state_dict().items() if "lora" in name}


def merged_by_peft(folder: Path, adapters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights after PEFT's merge into the floats of the 4-bit base."""
    quantized = qlora_of(folder)
    floats = {
        name.replace(".base_layer", "").removeprefix("base_model.model."): dequantized(param)
        for name, param in quantized.named_parameters()
        if "lora" not in name
    }
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain.load_state_dict(floats)
    model = peft.get_peft_model(plain, quantized.peft_config["default"])
    model.load_state_dict(adapters, strict=False)
    return model.merge_and_unload().state_dict()


@pytest.mark.parametrize("units", ["auto", 1000])
def test_an_export_has_the_bits_of_a_merge_into_the_dequantized_base(
    tmp_path: Path, units: Any
) -> None:
    base, output = tmp_path / "base", tmp_path / "merged"
    save_tiny_llama(base)
    adapters = run_ranks(2, export, str(base), str(output), {"units": units})[0]
    assert len([*output.glob("model-*.safetensors")]) > 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(output)
    expected = merged_by_peft(base, adapters)
    assert loaded.state_dict().keys() == expected.keys()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name
    without = merged_by_peft(base, {name: value * 0 for name, value in adapters.items()})
    assert any(not torch.equal(value, expected[name]) for name, value in without.items())


def with_head(module: str = "ln_f", **options: Any) -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(
        **{**LORA, **options}, modules_to_save=[module], init_lora_weights=False
    )
    model = peft.get_peft_model(tiny_gpt2(), config)
    if module == "ln_f":
        with torch.no_grad():
            model.base_model.model.transformer.ln_f.modules_to_save["default"].weight.mul_(1.5)
    return model


def test_modules_trained_beside_adapters_and_tied_weights_are_exported(tmp_path: Path) -> None:
    model = with_head()
    model, _ = shardcore.shard(model, None)
    shardcore.consolidate(model, tmp_path, dtype=torch.bfloat16, merge_adapters=True)
    found = load_file(tmp_path / "model.safetensors")
    expected = with_head().merge_and_unload().state_dict()
    assert set(expected) - set(found) == {"lm_head.weight"}, "tied to the embedding"
    for name, value in found.items():
        assert torch.equal(value, expected[name].bfloat16()), name


def in_two_dtypes(rank: int, world_size: int, output: str) -> tuple[list[str], Any]:
    """Export a bfloat16 base with a norm in float32; returns the tensors that this rank makes."""
    model = with_head("ln_f").bfloat16()
    model.base_model.model.transformer.ln_f.float()
    torch.nn.init.normal_(model.base_model.model.transformer.ln_f.modules_to_save.default.weight)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model, _ = shardcore.shard(model, None, stage=3)
    written: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        value_of = merged.Merged.value
        patch.setattr(
            merged.Merged, "value", lambda each: (written.append(each.name), value_of(each))[1]
        )
        shardcore.consolidate(model, output, max_shard_bytes=30_000, merge_adapters=True)
    return written, expected


def test_an_export_has_one_dtype_and_loads_by_plain_from_pretrained(tmp_path: Path) -> None:
    (first, expected), (second, _) = run_ranks(2, in_two_dtypes, str(tmp_path))
    assert first
    assert second
    assert not {*first} & {*second}, "each rank makes its own files"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    state = loaded.state_dict()
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    norm = expected["base_model.model.transformer.ln_f.modules_to_save.default.weight"]
    assert norm.dtype == torch.float32
    assert torch.equal(state["transformer.ln_f.weight"], norm.bfloat16())
    files: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        files |= load_file(path)
    assert {value.dtype for value in files.values()} == {torch.bfloat16}
    assert all(torch.equal(state[name], value) for name, value in files.items())
    assert loaded.generation_config.pad_token_id == 2
    assert len({*tmp_path.iterdir()}) > 4


def test_weights_that_adapters_untie_are_loaded_apart(tmp_path: Path) -> None:
    ids = torch.arange(6)[None]
    model = with_head("lm_head")
    nn.init.normal_(model.base_model.model.lm_head.modules_to_save.default.weight)
    expected = model(ids).logits
    model, _ = shardcore.shard(model, None)
    shardcore.consolidate(model, tmp_path, merge_adapters=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not loaded.config.tie_word_embeddings
    torch.testing.assert_close(loaded(ids).logits, expected)


def merging(rank: int, world_size: int) -> str:
    model, _ = shardcore.shard(with_head(), None, stage=3)
    with pytest.raises(RuntimeError, match=r"consolidate\(model, FOLDER, merge_adapters=True\)"):
        model.merge_and_unload()
    with shardcore.full_params(model):
        return type(model.merge_and_unload()).__name__


def test_merge_and_unload_of_sharded_weights_names_consolidate() -> None:
    assert run_ranks(2, merging) == ["GPT2LMHeadModel"] * 2
    model, _ = shardcore.shard(with_head(), None)
    assert type(model.merge_and_unload()).__name__ == "GPT2LMHeadModel"


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="merge_adapters is True for files"):
        shardcore.consolidate(tmp_path, tmp_path / "out", merge_adapters=True)
    model, _ = shardcore.shard(nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match="merge_adapters is True for a Linear"):
        shardcore.consolidate(model, tmp_path, merge_adapters=True)
    config = peft.LoraConfig(**LORA, lora_bias=True)
    model, _ = shardcore.shard(peft.get_peft_model(tiny_gpt2(), config), None)
    with pytest.raises(NotImplementedError, match=r"h\.0\.attn\.c_attn has another adapter"):
        shardcore.consolidate(model, tmp_path, merge_adapters=True)


def failing(rank: int, world_size: int, output: str) -> str:
    model = peft.get_peft_model(tiny_gpt2(), peft.LoraConfig(**LORA))
    model, _ = shardcore.shard(model, None, stage=3)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(merged, "dequantized", lambda tensor: tensor + torch.zeros(7, 7, 7, 7))
        try:
            shardcore.consolidate(model, output, merge_adapters=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_an_error_of_the_rank_that_merges_is_one_of_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, failing, str(tmp_path))
    assert "must match the size" in first
    assert "rank 0" in second
    assert [*tmp_path.iterdir()] == []
