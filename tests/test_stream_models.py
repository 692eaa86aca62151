"""stream_params of models of transformers and PEFT: names, converted experts, adapters."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="tests with transformers")
peft = pytest.importorskip("peft", reason="tests with PEFT")
safetensors = pytest.importorskip("safetensors.torch", reason="needs the safetensors package")

import shardcore  # noqa: E402
from tests.support.huggingface import LORA, qlora_of, rows, save_tiny_llama, tiny_gpt2  # noqa: E402
from tests.support.language_models import KINDS, plain_of, stepped_lm  # noqa: E402
from tests.support.models import error_of  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def streamed(model: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Return what the stream yields, which its metadata describe."""
    found = dict(shardcore.stream_params(model, **options))
    described = [(name, value.shape, value.dtype) for name, value in found.items()]
    assert described == shardcore.param_metadata(model, **options)
    return found


def _as_in_files(rank: int, world_size: int, folder: str, name: str, stage: int) -> None:
    model = stepped_lm(KINDS[name], rank, stage)
    plain = plain_of(model, KINDS[name], torch.bfloat16)
    if rank == 0:
        plain.save_pretrained(folder)
    found = streamed(model, names="huggingface", bucket_bytes=3000)
    if rank == 0:
        assert_equal(found, safetensors.load_file(f"{folder}/model.safetensors"))
    assert (streamed(model).keys() == found.keys()) == (name != "mixtral")


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_names_and_experts_are_those_of_files(tmp_path: Any, name: str, stage: int) -> None:
    run_ranks(2, _as_in_files, str(tmp_path), name, stage)


def _changes(rank: int, world_size: int, name: str) -> str:
    model = stepped_lm(KINDS[name], rank)
    changes = shardcore.track_changes(model)

    def stream(names: str) -> dict[str, torch.Tensor]:
        items = shardcore.stream_params(model, changes=changes, since=changes.version, names=names)
        return {name: values for name, _, values in items}

    if name == "mixtral":
        error = error_of(lambda: stream("huggingface"))
        assert stream("model").keys() == streamed(model).keys()
        return error
    assert_equal(stream("huggingface"), streamed(model, names="huggingface"))
    assert stream("huggingface") == {}
    return ""


def test_changes_have_names_of_files_unless_experts_are_converted() -> None:
    assert run_ranks(2, _changes, "llama") == ["", ""]
    for error in run_ranks(2, _changes, "mixtral"):
        assert "got changes, and names that convert model.layers.0.mlp.experts." in error


ADAPTERS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "beside": {"modules_to_save": ["ln_f"]},
}


def adapted(kind: str) -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(**LORA, init_lora_weights=False, **ADAPTERS[kind])
    return peft.get_peft_model(tiny_gpt2(), config)


def _merged(rank: int, world_size: int, folder: str, kind: str, stage: int) -> None:
    model = adapted(kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = shardcore.shard(model, optimizer, stage)
    batch = {name: value[None] for name, value in rows(2)[rank].items()}
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    before = model.state_dict()
    merged = streamed(model, names="huggingface", merge_adapters=True)
    adapters = streamed(model, only_trainable=True)
    assert_equal(model.state_dict(), before)
    model.save_pretrained(folder)
    plain = adapted(kind)
    plain.load_state_dict(before)
    base = plain.get_base_model().named_parameters()
    unmerged = {name.replace(".base_layer", ""): value.clone() for name, value in base}
    expected = dict(plain.merge_and_unload().named_parameters())
    assert_equal(merged, {name: value.detach() for name, value in expected.items()})
    assert any(not torch.equal(value, unmerged[n]) for n, value in merged.items() if n in unmerged)
    if rank == 0:
        assert_equal(adapters, safetensors.load_file(f"{folder}/adapter_model.safetensors"))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_are_merged_or_streamed_alone(tmp_path: Any, kind: str, stage: int) -> None:
    run_ranks(2, _merged, str(tmp_path), kind, stage)


def test_an_ordinary_model_of_peft_is_merged() -> None:
    model = adapted("lora")
    found = streamed(model, merge_adapters=True)
    expected = dict(adapted("lora").merge_and_unload().named_parameters())
    assert_equal(found, {name: value.detach() for name, value in expected.items()})


def test_arguments_that_do_not_fit_the_model_are_refused() -> None:
    model = adapted("lora")
    with pytest.raises(ValueError, match="only_trainable=True and merge_adapters=True"):
        shardcore.param_metadata(model, merge_adapters=True, only_trainable=True)
    with pytest.raises(ValueError, match="expected a model of PEFT"):
        shardcore.param_metadata(tiny_gpt2(), merge_adapters=True)
    ia3 = peft.get_peft_model(tiny_gpt2(), peft.IA3Config(task_type="CAUSAL_LM"))
    with pytest.raises(NotImplementedError, match=r"stream_params: .*has another adapter"):
        shardcore.param_metadata(ia3, merge_adapters=True)


def _of_four_bits(rank: int, world_size: int, folder: str) -> None:
    model = qlora_of(folder)
    model, _ = shardcore.shard(model, None, 3)
    with pytest.raises(NotImplementedError, match="is quantized; expected merge_adapters=True"):
        shardcore.param_metadata(model)
    found = streamed(model, merge_adapters=True)
    shardcore.consolidate(model, f"{folder}/merged", merge_adapters=True, dtype=torch.float32)
    assert_equal(found, safetensors.load_file(f"{folder}/merged/model.safetensors"))
    names = streamed(model, only_trainable=True)
    assert {"lora" in name for name in names} == {True}


def test_quantized_bases_are_floats(tmp_path: Any) -> None:
    pytest.importorskip("bitsandbytes", reason="tests with bitsandbytes")
    save_tiny_llama(tmp_path)
    run_ranks(2, _of_four_bits, str(tmp_path))


def test_adapters_of_packed_experts_are_refused_by_name() -> None:
    config = peft.LoraConfig(
        target_parameters=["mlp.experts.gate_up_proj"], target_modules=["q_proj"]
    )
    model = peft.get_peft_model(KINDS["mixtral"](), config)
    with pytest.raises(NotImplementedError, match=r"experts has another adapter"):
        shardcore.param_metadata(model, merge_adapters=True)
