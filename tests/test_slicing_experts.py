"""tensor_parallel of mixtures of experts, by transformers' plans: within rounding of the unsliced ones, and faults are seen."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardcore
from shardcore import slicing
from tests.support.models import hash_of_training
from tests.support.ranks import run_ranks
from tests.support.slices import mesh_of

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 22}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
GROUPS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "head_dim": 4},  # norms of heads; no module of some names of the plan
    "DeepseekV2": {**LATENT, **GROUPS, "topk_method": "greedy"},  # latent attention, experts that all tokens share
    "DeepseekV3": {**LATENT, **GROUPS},
    "GraniteMoeSWA": {"num_local_experts": 4},  # and sinks, a parameter of attention itself
}


def _model(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **HEADS, **CONFIGS[name]})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def _train(rank: int, world: int, tp: int, name: str, stages: list[int]) -> list[tuple[str, dict[str, Any], list[float]]]:
    """Two steps at each stage: a hash, the full weights, and the losses."""
    mesh, found = mesh_of(world, tp), []
    for stage in stages:
        model = _model(name) if tp == 1 else shardcore.tensor_parallel(_model(name), mesh["tp"])
        optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2, eps=1e-3)  # so that steps show gradients' sizes
        model, optimizer = shardcore.shard(model, optimizer, stage, process_group=mesh["dp"], clip_grad_norm=0.5)
        losses = []
        for step in range(2):
            seed = 1009 * step + mesh["dp"].get_local_rank()
            tokens = torch.randint(22, (3, 7), generator=torch.Generator().manual_seed(seed))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = {key: value.tolist() for key, value in model.state_dict().items()}
        found.append((hash_of_training(model, optimizer), weights, losses))
    return found


def _error(found: Any, expected: Any) -> float:
    assert list(found[1]) == list(expected[1])
    pairs = [(torch.tensor(found[1][key]), torch.tensor(value)) for key, value in expected[1].items()]
    return max((a - b).abs().max().item() for a, b in [*pairs, (torch.tensor(found[2]), torch.tensor(expected[2]))])


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_by_their_plans(name: str) -> None:
    (expected,) = run_ranks(1, _train, 1, name, [2])[0]
    for of_rank in run_ranks(2, _train, 2, name, [0, 3]):
        assert [_error(one, expected) < 1e-5 for one in of_rank] == [True, True]
        assert len({one[0] for one in of_rank}) == 1, "stages have the same bits"


FAULTS: dict[str, tuple[str, str, Any]] = {
    "gradients of what experts and rotated features are given are not added": ("DeepseekV2", "_copied", lambda x, mesh: x),
    "gates and their inputs are cut as one": ("Mixtral", "_PARAM_STYLES", slicing._PARAM_STYLES | {"packed_colwise": (-2, 1)}),
    "rotated features' gradients are not added": ("DeepseekV2", "_sum_rope_gradients", lambda rotated: None),
}


def _with_fault(rank: int, world: int, fault: str) -> Any:
    name, attribute, value = FAULTS[fault]
    with mock.patch.object(slicing, attribute, value):
        return _train(rank, world, 2, name, [2])


@pytest.mark.cases(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    (expected,) = run_ranks(1, _train, 1, FAULTS[fault][0], [2])[0]
    assert _error(run_ranks(2, _with_fault, fault)[0][0], expected) > 1e-4


class Scaled(nn.Module):
    """Experts with a parameter that plans leave whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = (nn.Parameter(torch.ones(shape)) for shape in ((3, 4, 2), (3, 2, 4), (3,)))


def _refusals(rank: int, world: int) -> list[str]:
    texts = []
    for plan in (
        {"experts.up": "colwise", "experts.down": "rowwise", "experts": "moe_tp_experts"},
        {"experts.up": "colwise_gather_output"},
        {"experts.scale": "colwise"},
    ):
        with pytest.raises((ValueError, NotImplementedError)) as raised:
            shardcore.tensor_parallel(nn.ModuleDict({"experts": Scaled()}), init_device_mesh("cpu", (world,)), plan)
        texts.append(str(raised.value))
    return texts


def test_what_experts_cannot_be_sliced_is_named() -> None:
    expected = [
        "tensor_parallel: Scaled has scale, which the plan does not slice",
        "tensor_parallel: experts.up is a parameter with the style 'colwise_gather_output'; expected ['colwise', 'row",
        "tensor_parallel: a weight has the shape (3,); expected 1 x 2 equal parts of dimension 0",
    ]
    for texts in run_ranks(2, _refusals):
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start), text
