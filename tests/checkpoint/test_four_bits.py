"""from_pretrained in bitsandbytes' 4 bits under ZeRO 3: pieces with the bits of the plain one."""

import copy
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="tests with transformers")
peft = pytest.importorskip("peft", reason="tests with PEFT")
pytest.importorskip("accelerate", reason="transformers needs it for ZeRO 3")
pytest.importorskip("bitsandbytes", reason="tests with bitsandbytes")

from safetensors.torch import load_file, save_file  # noqa: E402

import shardcore  # noqa: E402
from shardcore.checkpoint.file_tensors import counts  # noqa: E402
from shardcore.engine.pieces import is_partitioned, pieces_of  # noqa: E402
from tests.support.huggingface import (  # noqa: E402
    VOCAB,
    hash_of_state,
    save_tiny_llama,
    tiny,
    train_two_steps,
    zero3,
)
from tests.support.models import error_of  # noqa: E402
from tests.support.peak import Peak  # noqa: E402
from tests.support.ranks import run_fresh, run_ranks  # noqa: E402

CONFIG: dict[str, Any] = {
    "train_batch_size": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 3},
}
TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn"], "mixtral": ["q_proj"]}


def _config(**options: Any) -> Any:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options
    )


def _load(folder: str, options: dict[str, Any] | None, dtype: torch.dtype) -> Any:
    """options: of the quantization; None for a folder that is quantized."""
    words = {} if options is None else {"quantization_config": _config(**options)}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **words)


def _with_lora(model: Any) -> Any:
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(5)
    targets = TARGETS[model.config.model_type]
    lora = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model, lora).train()


def _loaded_and_trained(
    rank: int,
    world_size: int,
    folder: str,
    options: dict[str, Any] | None,
    dtype: torch.dtype,
    how: str,
) -> Any:
    """how: "plain", "pieces", or "broken" (one byte of a piece of scales is another)."""
    with nullcontext() if how == "plain" else zero3(CONFIG):
        model = _load(folder, options, dtype)
    if how != "plain":
        assert all(is_partitioned(param) for param in model.parameters())
        scales = [pieces_of(p)[1] for p in model.parameters() if hasattr(p, "quant_state")]
        assert all(is_partitioned(scale) for scale in scales)
        if how == "broken" and rank == 1:
            scales[3].ds_tensor.view(torch.uint8)[0] ^= 1
    model = _with_lora(model)
    engine = shardcore.initialize(model=model, config=CONFIG)[0]
    losses = train_two_steps(engine, rank)
    state = engine.module.state_dict()
    return losses, sorted(state), hash_of_state(state)


NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
FP4 = {"bnb_4bit_quant_type": "fp4"}
HALF = torch.bfloat16
LOADED: list[tuple[str, dict[str, Any], torch.dtype]] = [
    ("Llama", NF4, torch.float32),
    ("Llama", FP4, HALF),
    ("GPT2", NF4, torch.float32),  # transposes its matrices, and has biases and tied weights
    ("Mixtral", NF4, HALF),  # stacks experts, which stay floats
]


def _save(folder: Path, made: str, dtype: torch.dtype) -> None:
    if made == "Llama":
        save_tiny_llama(folder, dtype)
    else:
        tiny(made).to(dtype).save_pretrained(folder)


@pytest.mark.cases(3)
@pytest.mark.parametrize(("made", "options", "dtype"), LOADED)
def test_a_base_that_is_quantized_as_it_loads_trains_to_the_bits(
    tmp_path: Path, made: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    _save(tmp_path, made, dtype)
    run = (_loaded_and_trained, str(tmp_path), options, dtype)
    plain, pieces, broken = (run_ranks(2, *run, how) for how in ("plain", "pieces", "broken"))
    assert pieces == plain
    assert broken != plain, "the test sees one bit of one scale"


def _save_quantized(folder: Path, made: str, options: dict[str, Any], dtype: torch.dtype) -> Path:
    _save(folder / "floats", made, dtype)
    quantized = folder / "quantized"
    _load(str(folder / "floats"), options, dtype).save_pretrained(quantized)
    return quantized


@pytest.mark.cases(3)
@pytest.mark.parametrize(("made", "options", "dtype"), LOADED)
def test_a_base_that_was_quantized_before_trains_to_the_bits(
    tmp_path: Path, made: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    quantized = _save_quantized(tmp_path, made, options, dtype)
    run = (_loaded_and_trained, str(quantized), None, dtype)
    plain, pieces, broken = (run_ranks(2, *run, how) for how in ("plain", "pieces", "broken"))
    assert pieces == plain
    assert broken != plain, "the test sees one bit of one scale"


def _bytes_read(rank: int, world_size: int, folder: str, options: dict[str, Any] | None) -> int:
    counts.clear()
    with zero3(CONFIG):
        _load(folder, options, HALF)
    return counts["bytes_read"]


@pytest.mark.parametrize("before", [False, True], ids=["floats", "quantized"])
def test_files_are_read_once_in_all(tmp_path: Path, before: bool) -> None:
    folder, options = tmp_path, None if before else NF4
    if before:
        folder = _save_quantized(tmp_path, "Llama", NF4, HALF)
    else:
        _save(folder, "Llama", HALF)
    size = (folder / "model.safetensors").stat().st_size
    read = run_ranks(2, _bytes_read, str(folder), options)
    # each rank reads the header, and the tables of 16 and 256 values
    small = sum(t.nbytes for n, t in load_file(folder / "model.safetensors").items() if "qua" in n)
    assert 0.95 * size < sum(read) < 1.1 * size + 2 * small
    assert max(read) < 0.6 * size + small, "each rank reads its part"


def _used(rank: int, world_size: int, folder: str) -> list[Any]:
    """Return the weight as floats, of the model and of a copy; and an error of a moved model."""
    import bitsandbytes

    def floats(model: Any) -> torch.Tensor:
        weight = model.model.layers[1].mlp.up_proj.weight
        with shardcore.zero.GatheredParameters([weight]):  # type: ignore[attr-defined]
            return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)

    with zero3(CONFIG):
        model = _load(folder, NF4, torch.float32)
    twin = copy.deepcopy(model)
    before = floats(model)
    weight = twin.model.layers[1].mlp.up_proj.weight
    assert type(weight) is bitsandbytes.nn.Params4bit
    pieces_of(weight)[1].ds_tensor.zero_()  # type: ignore[attr-defined]
    changed = floats(twin)
    assert torch.equal(floats(model), before)
    model.model.layers[0].mlp.up_proj.weight.quant_state.absmax = torch.empty(0)
    return [before, changed, error_of(lambda: shardcore.initialize(model=model, config=CONFIG))]


def test_weights_are_gathered_with_scales_and_copied_with_them(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    plain = _load(str(tmp_path), NF4, torch.float32).model.layers[1].mlp.up_proj.weight
    import bitsandbytes

    expected = bitsandbytes.functional.dequantize_4bit(plain.data, plain.quant_state)
    for before, changed, message in run_ranks(2, _used, str(tmp_path)):
        assert torch.equal(before, expected)
        assert not torch.equal(changed, expected), "the copy has scales of its own"
        assert "the scales of a 4-bit weight were moved to another device" in message


def _reward(rank: int, world_size: int, folder: str) -> Any:
    torch.manual_seed(rank)
    with zero3(CONFIG):
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, quantization_config=_config(**NF4), num_labels=1
        )
    model = _with_lora(model)
    engine = shardcore.initialize(model=model, config=CONFIG)[0]
    return engine.module.state_dict()["base_model.model.score.weight"]


def test_a_new_head_has_the_values_of_rank_0(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    first, second = run_ranks(2, _reward, str(tmp_path))
    assert torch.equal(first, second)
    assert first.std() > 0


def _refused(rank: int, world_size: int, folder: str, options: dict[str, Any] | None) -> str:
    with zero3(CONFIG):
        return error_of(lambda: _load(folder, options, torch.float32))


def test_bad_files_are_refused_on_every_rank(tmp_path: Path) -> None:
    quantized = _save_quantized(tmp_path, "Llama", NF4, torch.float32)
    file = quantized / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    for end in ("absmax", "nested_quant_map"):
        some = {n: t for n, t in tensors.items() if n != f"{name}.{end}"}
        save_file(some, file, {"format": "pt"})
        for message in run_ranks(2, _refused, str(quantized), None):
            assert f"model.safetensors lacks scales or tables of {name}" in message
    small = {n: t[:-1] if n == name else t for n, t in tensors.items()}
    save_file(small, file, {"format": "pt"})
    for message in run_ranks(2, _refused, str(quantized), None):
        assert "mismatched" in message
    other = tmp_path / "floats" / "model.safetensors"
    tensors = load_file(other)
    save_file({n: t[:-1] if n == name else t for n, t in tensors.items()}, other, {"format": "pt"})
    for message in run_ranks(2, _refused, str(other.parent), NF4):
        assert "mismatched" in message
    other.write_bytes(other.read_bytes()[:-100])
    for message in run_ranks(2, _refused, str(other.parent), NF4):
        assert "model.safetensors is torn" in message


def _of_8_bits(rank: int, world_size: int, folder: str) -> str:
    eight_bits = transformers.BitsAndBytesConfig(load_in_8bit=True)
    load = transformers.AutoModelForCausalLM.from_pretrained
    load(folder, quantization_config=eight_bits)  # without ZeRO 3
    with zero3(CONFIG):
        return error_of(lambda: load(folder, quantization_config=eight_bits))


def test_8_bits_are_refused_before_they_are_read(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    for said in run_ranks(2, _of_8_bits, str(tmp_path)):
        assert said.startswith("ValueError: from_pretrained: shardcore does not shard"), said


def _exported(rank: int, world_size: int, folder: str, output: str) -> str:
    """Export a sharded model in each way; return an error of an export from a checkpoint."""
    model, _ = shardcore.shard(_load(folder, NF4, HALF), None, stage=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "state_dict", None)  # nothing gathers the whole model
        model.save_pretrained(f"{output}/saved", max_shard_size=40_000)
        shardcore.consolidate(model, f"{output}/consolidated", max_shard_bytes=40_000)
        shardcore.consolidate(model, f"{output}/wide", dtype=torch.float32)
    shardcore.save(f"{output}/checkpoint", model, None)
    return error_of(lambda: shardcore.consolidate(f"{output}/checkpoint", f"{output}/out"))


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def test_exports_load_by_plain_from_pretrained_to_the_bit(tmp_path: Path) -> None:
    _save(tmp_path, "Llama", HALF)
    plain = _load(str(tmp_path), NF4, HALF)
    plain.save_pretrained(tmp_path / "plain")
    expected = _tensors(tmp_path / "plain")
    for message in run_ranks(2, _exported, str(tmp_path), str(tmp_path)):
        assert "q_proj.weight is in 4 bits, and the checkpoint has no tables" in message
    config = (tmp_path / "plain" / "config.json").read_bytes()
    assert (tmp_path / "saved" / "config.json").read_bytes() == config
    (tmp_path / "consolidated" / "config.json").write_bytes(config)
    for name in ("saved", "consolidated"):
        found = _tensors(tmp_path / name)
        assert len([*(tmp_path / name).glob("*.safetensors")]) > 2
        assert hash_of_state(found) == hash_of_state(expected)
        assert found.keys() == expected.keys()
        state = _load(str(tmp_path / name), None, HALF).state_dict()
        assert hash_of_state(state) == hash_of_state(plain.state_dict())
    wide = _tensors(tmp_path / "wide")
    floats = {name for name, tensor in expected.items() if tensor.dtype == HALF}
    assert floats == {n for n, t in wide.items() if t.dtype != expected[n].dtype}
    changed = {**expected, "model.layers.0.mlp.up_proj.weight.quant_map": torch.zeros(16)}
    assert hash_of_state(changed) != hash_of_state(expected)


BIG = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
PARAMS = 24 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
UNIT_BYTES = 2 * PARAMS // 24  # of a block, in bfloat16


def _save_big(folder: str) -> None:
    tiny("Llama", **BIG).bfloat16().save_pretrained(folder, max_shard_size="100MB")


def _peak_of_loading(rank: int, world_size: int, folder: str, under_zero3: bool) -> int:
    """From from_pretrained to the end of initialize."""
    gc.collect()
    with Peak() as peak:
        with zero3(CONFIG) if under_zero3 else nullcontext():
            model = _load(folder, NF4, HALF)
        shardcore.initialize(model=_with_lora(model), config=CONFIG)
    return peak.most


@pytest.mark.more
def test_a_rank_has_its_shard_and_two_units_in_memory(tmp_path: Path) -> None:
    run_fresh(_save_big, str(tmp_path))
    warm = tmp_path / "warm"  # allocators and lazy imports
    save_tiny_llama(warm)
    run_ranks(2, _peak_of_loading, str(warm), True)
    shard = PARAMS / 2 * (1 + 1 / 32) / 2  # packed bytes, and a byte for 64 elements
    bound = shard + 2 * UNIT_BYTES + (64 << 20)
    for peak in run_ranks(2, _peak_of_loading, str(tmp_path), True):
        assert 0.9 * shard < peak < bound
    for peak in run_ranks(2, _peak_of_loading, str(tmp_path), False):
        assert peak > bound, "the whole model in 4 bits on each rank"
