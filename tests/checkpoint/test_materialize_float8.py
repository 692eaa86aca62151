"""Models on the meta device from float8 matrices with a factor for each block (DeepSeek V3)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore.checkpoint.file_tensors import whole
from shardcore.checkpoint.safetensors import open_files
from tests.support.meta import meta, save
from tests.support.ranks import run_ranks


def build() -> nn.Module:
    """Return layers whose weights are no multiples of a block, and one smaller than a block."""
    return nn.Sequential(nn.Linear(300, 257), nn.Linear(257, 128, bias=False), nn.Linear(128, 5))


def quantized(
    state: dict[str, torch.Tensor] | None = None, ends: str = "weight"
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of a file, and the float32 values that they stand for."""
    torch.manual_seed(0)
    stored, values = {}, {}
    for name, value in (state or build().state_dict()).items():
        stored[name] = values[name] = value
        if value.dim() == 2 and name.endswith(ends):
            codes = (value * 100).to(torch.float8_e4m3fn)
            blocks = [-(-size // 128) for size in value.shape]
            factors = torch.rand(blocks) + 0.5
            stored[name], stored[f"{name}_scale_inv"] = codes, factors
            whole = factors.repeat_interleave(128, 0).repeat_interleave(128, 1)
            whole = whole[: value.shape[0], : value.shape[1]]
            # of 4 and 24 bits: exact in float64, so rounded once
            values[name] = (codes.double() * whole.double()).float()
    return stored, values


def made(rank: int, world_size: int, path: str, stage: int, precision: str) -> Any:
    model = meta(build)
    model, _ = shardcore.shard(model, None, stage=stage, precision=precision, materialize=path)
    return model.state_dict()


@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (3, "fp32"), (3, "bf16")])
def test_float8_blocks_become_floats_while_they_are_read(
    tmp_path: Path, stage: int, precision: str
) -> None:
    stored, values = quantized()
    path = save(tmp_path / "model.safetensors", stored)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    for state in run_ranks(2, made, str(path), stage, precision):
        assert state.keys() == values.keys()
        for name, value in values.items():
            assert torch.equal(state[name], value.to(dtype)), name
    factors = stored["0.weight_scale_inv"]
    save(path, stored | {"0.weight_scale_inv": factors.flip(0)})
    (state, _) = run_ranks(2, made, str(path), stage, precision)
    assert not torch.equal(state["0.weight"], values["0.weight"].to(dtype))


def test_factors_of_other_blocks_are_refused(tmp_path: Path) -> None:
    stored, _ = quantized()
    path = save(tmp_path / "model.safetensors", stored | {"0.weight_scale_inv": torch.ones(3, 2)})
    with pytest.raises(ValueError, match=r"0\.weight in .* factors of shape \(3, 2\)"):
        shardcore.shard(meta(build), None, stage=3, materialize=path)
    del stored["0.weight_scale_inv"]
    save(path, stored)
    with pytest.raises(TypeError, match=r"0\.weight has dtype torch\.float8_e4m3fn"):
        shardcore.shard(meta(build), None, stage=3, materialize=path)


def deepseek() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"hidden_size": 160, "intermediate_size": 192, "moe_intermediate_size": 136}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "vocab_size": 64}
    ranks = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = DeepseekV3Config(**sizes, **heads, **experts, **layers, **ranks)
    return DeepseekV3ForCausalLM(config)


@pytest.mark.more
def test_fused_experts_are_made_of_float8(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="tests with transformers")
    torch.manual_seed(1)
    deepseek().save_pretrained(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    names = open_files(path)
    assert any("experts.3.down_proj" in name for name in names), "files have single experts"
    stored, values = quantized({name: whole(each) for name, each in names.items()}, "_proj.weight")
    states = []
    for tensors in (stored, values):
        save(path, tensors)
        model, _ = shardcore.shard(meta(deepseek), None, stage=3, materialize=tmp_path)
        states.append(model.state_dict())
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


class WithFactors(nn.Module):
    """Computes with float8 itself."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.empty(128, 130, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.empty(1, 2), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.to(x.dtype)


def test_a_model_that_has_the_factors_keeps_float8(tmp_path: Path) -> None:
    codes = torch.randn(128, 130).to(torch.float8_e4m3fn)
    factors = torch.rand(1, 2)
    path = save(tmp_path / "model.safetensors", {"weight": codes, "weight_scale_inv": factors})
    model, _ = shardcore.shard(meta(WithFactors), None, stage=3, materialize=path)
    state = model.state_dict()
    assert torch.equal(state["weight"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(state["weight_scale_inv"], factors)
