"""Models of the transformers package on the meta device: from their own folders as
from_pretrained, and from nothing.
"""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.checkpoint.file_tensors import FileTensor
from tests.support.huggingface import zero3
from tests.support.logs import logged
from tests.support.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="real architectures need transformers")
pytest.importorskip("safetensors", reason="reading files needs safetensors")

from safetensors.torch import save_file  # noqa: E402

from tests.support.architectures import VOCAB  # noqa: E402

_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_TOKENS = {"input_ids": torch.arange(2, 26).view(2, 12)}
# name -> (class, its config's class and options, inputs)
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, _TOKENS),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2},
        _TOKENS,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 2,
            "dropout_rate": 0,
        },
        {**_TOKENS, "decoder_input_ids": torch.arange(14).view(2, 7)},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_LLAMA, "num_local_experts": 4}, _TOKENS),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 16,
            **{
                f"{side}_{what}": 2
                for side in ("encoder", "decoder")
                for what in ("layers", "attention_heads")
            },
            **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
            **{
                f"{name}_token_id": index
                for index, name in enumerate(("pad", "bos", "eos", "decoder_start"))
            },
        },
        {
            "input_features": torch.linspace(-1, 1, 2 * 8 * 40).view(2, 8, 40),
            "decoder_input_ids": torch.arange(14).view(2, 7),
        },
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**_ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 10},
        {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 256).view(2, 3, 16, 16)},
    ),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {**_ENCODER, "vocab_size": VOCAB, "max_position_embeddings": 32},
        _TOKENS,
    ),
}


def _build(name: str, **options: Any) -> Any:
    model, config, own, _ = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**own, **options))


def _on_meta(name: str, folder: str | None) -> Any:
    config = getattr(transformers, MODELS[name][1]).from_pretrained(folder) if folder else None
    with torch.device("meta"):
        return getattr(transformers, MODELS[name][0])(config) if config else _build(name)


def _saved(name: str, folder: Path, **options: Any) -> str:
    """A folder in which every weight has values of its own: also those that are built as zeros
    or ones.
    """
    torch.manual_seed(3)
    model = _build(name)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.05)
    model.save_pretrained(folder, **options)
    return str(folder)


def _outputs(model: Any, name: str) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**MODELS[name][3]).logits  # type: ignore[no-any-return]


def _compared(rank: int, world_size: int, name: str, folder: str, stage: int) -> list[str]:
    """What differs from from_pretrained."""
    torch.manual_seed(7)
    model = _on_meta(name, folder)
    model, _ = shardcore.shard(
        model, shardcore.FusedAdam(model.parameters()), stage, precision="fp32", materialize=folder
    )
    theirs = getattr(transformers, MODELS[name][0]).from_pretrained(folder, dtype=torch.float32)
    ours, expected = model.state_dict(), theirs.state_dict()
    assert list(ours) == list(expected)
    assert [key for key, _ in model.named_parameters()] == [
        key for key, _ in theirs.named_parameters()
    ]
    buffers = dict(theirs.named_buffers())
    assert [key for key, _ in model.named_buffers()] == list(buffers)
    differ = [key for key, value in ours.items() if not torch.equal(value, expected[key])]
    differ += [key for key, value in model.named_buffers() if not torch.equal(value, buffers[key])]
    return differ + ["outputs"] * (not torch.equal(_outputs(model, name), _outputs(theirs, name)))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "world_size", "stage"), [("llama", 1, 0), *((name, 2, 3) for name in MODELS)]
)
def test_a_folder_gives_what_from_pretrained_gives(
    tmp_path: Path, name: str, world_size: int, stage: int
) -> None:
    folder = _saved(name, tmp_path)
    assert run_ranks(world_size, _compared, name, folder, stage) == [[]] * world_size


def _in_pieces(rank: int, world_size: int, name: str, folder: str) -> list[str]:
    """What differs from from_pretrained after from_pretrained under ZeRO 3."""
    kind = getattr(transformers, MODELS[name][0])
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    torch.manual_seed(rank)
    with zero3(config):
        model = kind.from_pretrained(folder, dtype=torch.float32)
    assert all(param.shape == (0,) for param in model.parameters())
    shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 3)
    torch.manual_seed(0)
    theirs = kind.from_pretrained(folder, dtype=torch.float32)
    ours, expected = model.state_dict(), theirs.state_dict()
    assert list(ours) == list(expected)
    assert [key for key, _ in model.named_parameters()] == [
        key for key, _ in theirs.named_parameters()
    ]
    buffers = dict(theirs.named_buffers())
    differ = [key for key, value in ours.items() if not torch.equal(value, expected[key])]
    differ += [key for key, value in model.named_buffers() if not torch.equal(value, buffers[key])]
    return differ + ["outputs"] * (not torch.equal(_outputs(model, name), _outputs(theirs, name)))


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_into_pieces_gives_the_same(tmp_path: Path, name: str) -> None:
    folder = _saved(name, tmp_path, max_shard_size="20KB")
    assert run_ranks(2, _in_pieces, name, folder) == [[], []]


def test_a_folder_of_several_files_gives_the_same(tmp_path: Path) -> None:
    folder = _saved("mixtral", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert run_ranks(2, _compared, "mixtral", folder, 3) == [[], []]


def _elements_read(rank: int, world_size: int, name: str, folder: str) -> int:
    read = 0
    original = FileTensor.read

    def counting(tensor: FileTensor, start: int, numel: int) -> torch.Tensor:
        nonlocal read
        read += numel
        return original(tensor, start, numel)

    FileTensor.read = counting  # type: ignore[method-assign]
    try:
        model = _on_meta(name, folder)
        shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), 3, precision="fp32", materialize=folder
        )
    finally:
        FileTensor.read = original  # type: ignore[method-assign]
    return read


@pytest.mark.parametrize("name", ["vit", "mixtral"])
def test_each_rank_reads_its_part_of_what_is_only_renamed(tmp_path: Path, name: str) -> None:
    folder = _saved(name, tmp_path)
    sizes = {key: param.numel() for key, param in _build(name).named_parameters()}
    fused = sum(numel for key, numel in sizes.items() if ".experts." in key)
    assert (fused > 0) == (name == "mixtral")
    read = run_ranks(2, _elements_read, name, folder)
    # What lies on one rank alone is converted there alone.
    assert sum(sizes.values()) <= sum(read) <= sum(sizes.values()) + fused


# --- from nothing ---------------------------------------------------------------------------------


# Computed, not drawn.
FIXED = (
    "model.encoder.embed_positions.weight",
    *(f"model.rotary_emb.{key}inv_freq" for key in ("", "original_")),
)


def _from_nothing(rank: int, world_size: int, name: str) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = _on_meta(name, None)
    model, _ = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 3, precision="fp32")
    return {**model.state_dict(), **dict(model.named_buffers())}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_from_nothing_weights_have_the_distributions_of_building(name: str) -> None:
    made, other = run_ranks(2, _from_nothing, name)
    torch.manual_seed(5)
    built = _build(name)
    drawn = 0
    for key, expected in {**built.state_dict(), **dict(built.named_buffers())}.items():
        value = made[key]
        assert torch.equal(value, other[key]), key
        if (
            not expected.is_floating_point()
            or expected.numel() == 1
            or expected.std() == 0
            or key in FIXED
        ):
            assert torch.equal(value, expected), key
            continue
        drawn += 1
        near = 6 / expected.numel() ** 0.5  # in standard deviations
        assert abs(value.std() / expected.std() - 1) < near, key
        assert abs(value.mean() - expected.mean()) < near * expected.std(), key
        assert not torch.equal(value, expected), key
    assert drawn


def test_gpt2s_projections_are_scaled_by_depth() -> None:
    """What a module around the one that has the weight does."""
    (made,) = run_ranks(1, _from_nothing, "gpt2")
    for layer in range(2):
        assert made[f"transformer.h.{layer}.mlp.c_proj.weight"].std() == pytest.approx(
            0.02 / 4**0.5, rel=0.05
        )
        assert made[f"transformer.h.{layer}.mlp.c_fc.weight"].std() == pytest.approx(0.02, rel=0.05)


class Wrapped(nn.Module):
    """A transformers model in a module that is none."""

    def __init__(self, body: str = "llama") -> None:
        super().__init__()
        self.body = _build(body)
        self.head = nn.Linear(VOCAB, 3)


def _inside(rank: int, world_size: int, folder: str) -> list[str]:
    torch.manual_seed(7)
    with torch.device("meta"):
        model: Any = Wrapped("mixtral")
    optimizer = shardcore.FusedAdam(model.parameters())
    with pytest.raises(ValueError, match=r"head\.weight \(and 1 more: head\.bias\) is on the meta"):
        shardcore.shard(model, optimizer, 3, materialize=folder)
    materialize = [folder, model.body._init_weights]
    model, _ = shardcore.shard(model, optimizer, 3, precision="fp32", materialize=materialize)
    theirs = transformers.MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state = model.state_dict()
    expected = {f"body.{name}": value for name, value in theirs.state_dict().items()}
    assert state.keys() - expected.keys() == {"head.weight", "head.bias"}
    assert 0 < state["head.weight"].std() < 0.05
    return [name for name, value in expected.items() if not torch.equal(state[name], value)]


def test_a_folder_is_read_into_a_transformers_model_inside_another_module(tmp_path: Path) -> None:
    folder = _saved("mixtral", tmp_path)
    assert run_ranks(2, _inside, folder) == [[], []]


def test_files_with_the_names_of_the_outer_module_are_read_as_before(tmp_path: Path) -> None:
    torch.manual_seed(3)
    built = Wrapped()
    save_file(built.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model: Any = Wrapped()
    optimizer = shardcore.FusedAdam(model.parameters())
    model, _ = shardcore.shard(model, optimizer, 3, precision="fp32", materialize=tmp_path)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in built.state_dict().items())


def test_a_transformers_model_inside_another_module_fills_itself() -> None:
    with torch.device("meta"):
        model: Any = Wrapped()
    model, _ = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 3, precision="fp32")
    state = model.state_dict()
    assert state["body.model.norm.weight"].eq(1).all()
    assert state["body.lm_head.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(
        model.body.model.rotary_emb.inv_freq, _build("llama").model.rotary_emb.inv_freq
    )
    assert 0 < state["head.weight"].abs().max() <= VOCAB**-0.5


# --- what folders lack ----------------------------------------------------------------------------


def test_a_new_head_over_a_base_models_folder_is_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = transformers.BertModel(
        transformers.BertConfig(**MODELS["bert"][2]), add_pooling_layer=True
    )
    base.save_pretrained(tmp_path)
    make = transformers.BertForSequenceClassification
    with torch.device("meta"):
        model: Any = make(base.config)
    optimizer = shardcore.FusedAdam(model.parameters())
    with pytest.raises(
        ValueError,
        match=r"classifier\.weight \(and 1 more: classifier\.bias\) is on the meta device and not "
        r"in",
    ):
        shardcore.shard(model, optimizer, 3, materialize=tmp_path)
    model, _ = shardcore.shard(
        model, optimizer, 3, precision="fp32", materialize=[tmp_path, model._init_weights]
    )
    state = model.state_dict()
    assert all(torch.equal(state[f"bert.{key}"], value) for key, value in base.state_dict().items())
    assert 0 < state["classifier.weight"].std() < 0.05
    assert state["classifier.bias"].eq(0).all()


_HEADS = [
    (
        "BertForPreTraining",
        "BertForSequenceClassification",
        "bert",
        "classifier",
        "cls.seq_relationship.weight",
    ),
    ("LlamaForCausalLM", "LlamaForSequenceClassification", "llama", "score", "lm_head.weight"),
    ("LlamaForCausalLM", "LlamaModel", "llama", None, "lm_head.weight"),
]


def _another_head(
    rank: int, world_size: int, made: str, of: str, head: str | None, folder: str
) -> list[str]:
    config = getattr(transformers, MODELS[of][1]).from_pretrained(folder)
    with torch.device("meta"):
        model: Any = getattr(transformers, made)(config)
    optimizer = shardcore.FusedAdam(model.parameters())
    materialize = folder if head is None else [folder, model._init_weights]
    with logged() as messages:
        model, _ = shardcore.shard(model, optimizer, 3, precision="fp32", materialize=materialize)
    state = model.state_dict()
    theirs = getattr(transformers, made).from_pretrained(folder, dtype=torch.float32).state_dict()
    if head is not None:
        assert 0 < state[f"{head}.weight"].std() < 0.05
    differ = [key for key, value in state.items() if not torch.equal(value, theirs[key])]
    assert differ == ([] if head is None else [f"{head}.weight"])
    return messages


@pytest.mark.parametrize(("old", "made", "of", "head", "dropped"), _HEADS)
def test_an_old_head_is_dropped_with_a_warning(
    tmp_path: Path, old: str, made: str, of: str, head: str | None, dropped: str
) -> None:
    getattr(transformers, old)(
        getattr(transformers, MODELS[of][1])(**MODELS[of][2])
    ).save_pretrained(tmp_path)
    (message,), nothing = run_ranks(2, _another_head, made, of, head, str(tmp_path))
    assert "which the model lacks; dropped, as from_pretrained does" in message
    assert dropped in message
    assert nothing == []


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = _saved("mixtral", tmp_path)
    other = _on_meta("llama", None)
    match = (
        r"0\.mlp\.down_proj.* not in .* \(model\.layers\.0\.block_sparse_moe.* there is "
        r"not in the model\)\. Add its values"
    )
    with pytest.raises(ValueError, match=match):
        shardcore.shard(other, shardcore.FusedAdam(other.parameters()), 3, materialize=folder)
    config = json.loads((tmp_path / "config.json").read_text())
    with torch.device("meta"):
        larger: Any = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**{**config, "intermediate_size": 47})
        )
    with pytest.raises(
        ValueError,
        match=r"experts\.gate_up_proj has shape \(4, 96, 32\) in .*; expected \(4, 94, 32\)",
    ):
        shardcore.shard(larger, shardcore.FusedAdam(larger.parameters()), 3, materialize=folder)
    assert all(p.is_meta for p in larger.parameters())


def test_what_init_weights_leaves_is_an_error_that_names_it() -> None:
    """CLIP's scale is made by its constructor alone."""
    sides = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.CLIPConfig(
        text_config={**sides, "vocab_size": VOCAB},
        vision_config={**sides, "image_size": 16, "patch_size": 4},
    )

    def on_meta() -> Any:
        with torch.device("meta"):
            return transformers.CLIPModel(config)

    model = on_meta()
    with pytest.raises(
        ValueError, match=r"logit_scale contains NaN .* or put the tensor in memory before shard"
    ):
        shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 3)
    model = on_meta()
    model.logit_scale = nn.Parameter(torch.tensor(2.5))
    model, _ = shardcore.shard(model, shardcore.FusedAdam(model.parameters()), 3)
    assert model.state_dict()["logit_scale"] == 2.5


def test_what_a_constructor_leaves_in_memory_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """XLNet's calls torch.FloatTensor, which knows of no meta device."""
    config = transformers.XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=1, n_head=2, d_inner=48)
    torch.manual_seed(0)
    for moved in (False, True):
        caplog.clear()
        with torch.device("meta"):
            model: Any = transformers.XLNetLMHeadModel(config)
        names = [name for name, param in model.named_parameters() if not param.is_meta]
        assert "transformer.layer.0.rel_attn.q" in names
        if moved:
            model.to("meta")
        model, _ = shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), 3, precision="fp32"
        )
        warned = [
            record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
        ]
        if not moved:
            assert len(warned) == 1
            assert f"{', '.join(names)} is in memory rather than on the meta device" in warned[0]
    assert warned == []
    state = model.state_dict()
    assert all(state[name].std() == pytest.approx(0.02, rel=0.5) for name in names)
