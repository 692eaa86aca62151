"""tensor_parallel: models of transformers by their plans, within rounding of the unsliced ones,
and full state dicts.
"""

import copy
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardcore
from shardcore.parallel import tensor as slicing
from tests.support.models import assert_one, error_of, hash_of, hash_of_training
from tests.support.ranks import run_ranks
from tests.support.slices import mesh_of

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 22,
}
LLAMA = SIZES | {"num_key_value_heads": 2, "max_position_embeddings": 16}
GPT2 = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 22,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = LLAMA | {"moe_intermediate_size": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
GROUPS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _of(name: str, **config: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**config)
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _of("Llama", **LLAMA),
    "llama, tied": _of("Llama", **LLAMA, tie_word_embeddings=True),
    "qwen3": _of("Qwen3", **LLAMA, head_dim=4),
    "gemma": _of("Gemma", **LLAMA, head_dim=4),  # a buffer in what is sliced
    "mixtral": _of("Mixtral", **EXPERTS, num_local_experts=4),
    # it has no modules of some names in its plan
    "qwen3 moe": _of("Qwen3Moe", **EXPERTS, num_experts=4, head_dim=4),
    "deepseek": _of("DeepseekV2", **EXPERTS, **LATENT, **GROUPS, topk_method="greedy"),
    # norms of heads and activations with parameters, in no plan
    "apertus": _of("Apertus", **LLAMA, hidden_act="xielu"),
    # sinks, a parameter of attention itself
    "granite": _of("GraniteMoeSWA", **EXPERTS, num_local_experts=4),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **NO_DROPOUT)),
}
Found = tuple[str, dict[str, Any], list[float]]


def _make(name: str, mesh: Any, stage: int, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = MODELS[name]()
    if mesh["tp"].size() > 1:
        assert shardcore.tensor_parallel(model, mesh["tp"]) is model
        model = copy.deepcopy(model)  # as users may before they train
    # so that steps show the sizes of gradients
    optimizer: Any = shardcore.FusedAdam(model.parameters(), lr=1e-2, eps=1e-4)
    return shardcore.shard(
        model, optimizer, stage, process_group=mesh["dp"], clip_grad_norm=0.5, **options
    )


def _steps(model: Any, optimizer: Any, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(
            22, (3, 7), generator=torch.Generator().manual_seed(1009 * step + rank)
        )
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _train(rank: int, world: int, tp: int, cases: list[tuple[str, int]]) -> list[Found]:
    mesh, found = mesh_of(world, tp), []
    for name, stage in cases:
        model, optimizer = _make(name, mesh, stage)
        losses = _steps(model, optimizer, mesh["dp"].get_local_rank(), range(2))
        weights = {key: value.tolist() for key, value in model.state_dict().items()}
        found.append((hash_of_training(model, optimizer), weights, losses))
    return found


def _error(found: Found, expected: Found) -> float:
    assert list(found[1]) == list(expected[1])
    pairs = [
        (torch.tensor(found[1][key]), torch.tensor(value)) for key, value in expected[1].items()
    ]
    return max(
        (a - b).abs().max().item()
        for a, b in [*pairs, (torch.tensor(found[2]), torch.tensor(expected[2]))]
    )


CASES = [
    ("llama, tied", 1),
    ("llama, tied", 3),
    ("qwen3", 2),
    ("gpt2", 0),
    ("gpt2", 3),
    ("gemma", 2),
]
OF_EXPERTS = [
    ("mixtral", 0),
    ("mixtral", 3),
    ("qwen3 moe", 2),
    ("deepseek", 1),
    ("granite", 2),
    ("apertus", 3),
]


@pytest.mark.more
@pytest.mark.parametrize(("dp", "cases"), [(2, CASES), (1, OF_EXPERTS)], ids=["dense", "experts"])
def test_models_by_their_plans(dp: int, cases: list[tuple[str, int]]) -> None:
    once = dict(cases)
    expected, found = run_ranks(dp, _train, 1, [*once.items()]), run_ranks(2 * dp, _train, 2, cases)
    for rank, of_rank in enumerate(found):
        whole, hashes = dict(zip(once, expected[rank // 2], strict=True)), set()
        for (name, _), one in zip(cases, of_rank, strict=True):
            assert _error(one, whole[name]) < 1e-5, name
            hashes.add((name, one[0]))
        assert len(hashes) == len(once), "stages have the same bits"


# A model, what breaks it, and the parameter that the first step names if it sees the fault.
FAULTS: dict[str, tuple[str, Callable[[], Any], str]] = {
    "queries, keys and values are cut as one": (
        "gpt2",
        lambda: mock.patch.object(slicing, "_columns", _as_one(slicing._columns)),
        "",
    ),
    "heads' gradients are not added": (
        "qwen3",
        lambda: mock.patch.object(slicing, "_sum_gradients", None),
        "k_norm.weight",
    ),
    "what experts are given gets no sums of gradients": (
        "mixtral",
        lambda: mock.patch.object(slicing, "_copied", lambda x, _: x),
        "layernorm.weight",
    ),
    "rotated features' gradients are not added": (  # a small part of them
        "deepseek",
        lambda: mock.patch.object(slicing, "_sum_rope_gradients", _none),
        "",
    ),
}


def _none(*given: Any) -> None:
    """In place of a change."""


def _as_one(columns: Any) -> Any:
    return lambda blocks: columns(1)


def _with_fault(rank: int, world: int, fault: str) -> Found | str:
    name, patch, param = FAULTS[fault]
    with patch():
        if param:
            return error_of(lambda: _train(rank, world, 2, [(name, 2)]))
        return _train(rank, world, 2, [(name, 2)])[0]


@pytest.mark.cases(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    name, _, param = FAULTS[fault]
    found = run_ranks(2, _with_fault, fault)
    if param:
        for text in found:
            assert re.search(
                rf"step: the gradient of \S+{param}, which every tensor-parallel rank has in full, "
                rf"differs",
                text,
            )
    else:
        (expected,) = run_ranks(1, _train, 1, [(name, 2)])[0]
        assert _error(found[0], expected) > 1e-3


def _save(rank: int, world: int, tp: int, folder: str) -> list[str]:
    mesh = mesh_of(world, tp)
    model, optimizer = _make("gpt2", mesh, 2)
    _steps(model, optimizer, mesh["dp"].get_local_rank(), range(2))
    dcp.save(
        {
            "model": shardcore.sharded_state_dict(model),
            "optimizer": shardcore.sharded_state_dict(optimizer),
        },
        checkpoint_id=folder,
    )
    shardcore.save(f"{folder}/own", model, optimizer)
    torch.manual_seed(0)
    other, other_optimizer = _make("gpt2", mesh, 3)
    other.load_state_dict(model.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    return [hash_of_training(model, optimizer), hash_of_training(other, other_optimizer)]


def _load(rank: int, world: int, tp: int, folder: str) -> list[str]:
    model, optimizer = _make("gpt2", mesh_of(world, tp), 3)
    state = {
        "model": shardcore.sharded_state_dict(model),
        "optimizer": shardcore.sharded_state_dict(optimizer),
    }
    dcp.load(state, checkpoint_id=folder)
    shardcore.load_sharded_state_dict(model, state["model"])
    shardcore.load_sharded_state_dict(optimizer, state["optimizer"])
    own, own_optimizer = _make("gpt2", mesh_of(world, tp), 2)
    shardcore.load(f"{folder}/own", own, own_optimizer)
    return [hash_of_training(model, optimizer), hash_of_training(own, own_optimizer)]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((1, 1), (2, 2))])
def test_fused_weights_load_anywhere(
    before: tuple[int, int], after: tuple[int, int], tmp_path: Any
) -> None:
    saved = run_ranks(before[0], _save, before[1], str(tmp_path))
    loaded = run_ranks(after[0], _load, after[1], str(tmp_path))
    assert_one(hashed for of_rank in [*saved, *loaded] for hashed in of_rank)


# --- models on the meta device --------------------------------------------------------------------


def _on_meta(rank: int, world: int, name: str, stage: int, folder: str) -> list[str]:
    """Hashes of a training from a folder, beside one from the model in memory; and of new
    weights, beside unsliced ones.
    """
    mesh, hashes = mesh_of(world, 2), []
    torch.manual_seed(0)
    made = MODELS[name]()
    with torch.no_grad():
        for param in made.parameters():  # those that are built as ones and zeros, too
            param.add_(torch.randn_like(param), alpha=0.05)
    if rank == 0:
        made.save_pretrained(folder)
    dist.barrier()
    for materialize in (None, folder):
        model = _empty(name) if materialize else made
        params = list(shardcore.tensor_parallel(model, mesh["tp"]).parameters())
        optimizer: Any = shardcore.FusedAdam(params, lr=1e-2)
        model, optimizer = shardcore.shard(
            model, optimizer, stage, process_group=mesh["dp"], materialize=materialize
        )
        assert all(old is new for old, new in zip(params, model.parameters(), strict=True))
        losses = _steps(model, optimizer, mesh["dp"].get_local_rank(), range(2))
        hashes.append(f"{hash_of_training(model, optimizer)} {hash_of(model.buffers())} {losses}")
    for tp in (1, 2):
        torch.manual_seed(rank * (tp - 1))
        model = _empty(name) if tp == 1 else shardcore.tensor_parallel(_empty(name), mesh["tp"])
        alone = mesh["dp"] if tp == 2 else dist.new_subgroups(1)[0]
        model, _ = shardcore.shard(
            model, shardcore.FusedAdam(model.parameters()), stage, process_group=alone
        )
        hashes.append(hash_of(value for _, value in sorted(model.state_dict().items())))
    return hashes


def _empty(name: str) -> Any:
    with torch.device("meta"):
        return MODELS[name]()


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "stage"), [("llama, tied", 2), ("gpt2", 3), ("gemma", 1), ("deepseek", 3)]
)
def test_models_on_the_meta_device_get_the_same_weights(
    name: str, stage: int, tmp_path: Any
) -> None:
    for in_memory, from_files, whole, sliced in run_ranks(4, _on_meta, name, stage, str(tmp_path)):
        assert in_memory == from_files
        assert whole == sliced


# --- adapters -------------------------------------------------------------------------------------

TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "deepseek": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}


def _with_lora(rank: int, world: int, tp: int, name: str, stage: int, first: str) -> Found:
    """first: what is called first where the model is sliced, "peft" or "slices"."""
    import peft

    mesh = mesh_of(world, tp)
    torch.manual_seed(0)
    model = MODELS[name]()
    calls: list[Callable[[Any], Any]] = [
        lambda model: peft.get_peft_model(
            model, peft.LoraConfig(target_modules=TARGETS[name], r=4)
        ),
        lambda model: shardcore.tensor_parallel(model, mesh["tp"]) if tp > 1 else model,
    ]
    for call in calls if first == "peft" else calls[::-1]:
        model = copy.deepcopy(call(model))
    optimizer: Any = shardcore.FusedAdam(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4
    )
    model, optimizer = shardcore.shard(
        model, optimizer, stage, process_group=mesh["dp"], clip_grad_norm=0.5
    )
    state = model.state_dict()
    drawn = torch.Generator().manual_seed(1)
    for value in [state[key] for key in sorted(state) if "lora_" in key]:
        value.normal_(std=0.3, generator=drawn)
    model.load_state_dict(state)
    losses = _steps(model, optimizer, mesh["dp"].get_local_rank(), range(2))
    return (
        hash_of_training(model, optimizer),
        {k: v.tolist() for k, v in model.state_dict().items()},
        losses,
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "stage", "first"),
    [
        ("llama", 3, "slices"),
        ("gpt2", 2, "peft"),
        ("llama", 0, "peft"),
        ("gpt2", 1, "slices"),
        ("deepseek", 2, "slices"),
    ],
)
def test_adapters_train_as_on_the_unsliced_model(name: str, stage: int, first: str) -> None:
    pytest.importorskip("peft")
    (expected,) = run_ranks(1, _with_lora, 1, name, stage, first)
    for found in run_ranks(2, _with_lora, 2, name, stage, first):
        assert _error(found, expected) < 1e-5
        assert {k: torch.tensor(v).shape for k, v in found[1].items()} == {
            k: torch.tensor(v).shape for k, v in expected[1].items()
        }


def _refused_adapters(rank: int, world: int) -> list[str]:
    import peft
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = mesh_of(world, 2)
    lora: Any = {"target_modules": ["q_proj"], "r": 2}

    def sharded(model: Any) -> Any:
        optimizer = shardcore.FusedAdam(
            [param for param in model.parameters() if param.requires_grad]
        )
        return shardcore.shard(model, optimizer, process_group=mesh["dp"])

    by_torch = MODELS["llama"]()
    for layer in by_torch.model.layers:
        parallelize_module(layer.self_attn.q_proj, mesh["tp"], ColwiseParallel())
    sliced = shardcore.tensor_parallel(MODELS["llama"](), mesh["tp"])
    rescales = peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    embeds = peft.get_peft_model(
        MODELS["llama"](), peft.LoraConfig(target_modules=["embed_tokens", "q_proj"])
    )
    dora = peft.get_peft_model(MODELS["llama"](), peft.LoraConfig(**lora, use_dora=True))
    return [
        error_of(lambda: shardcore.tensor_parallel(embeds, mesh["tp"])),
        error_of(lambda: shardcore.tensor_parallel(dora, mesh["tp"])),
        error_of(lambda: sharded(peft.get_peft_model(sliced, rescales))),
        error_of(lambda: sharded(peft.get_peft_model(by_torch, peft.LoraConfig(**lora)))),
    ]


def test_adapters_that_cannot_be_sliced_are_named() -> None:
    pytest.importorskip("peft")
    for texts in run_ranks(2, _refused_adapters):
        for text, names in zip(
            texts, ["lora_embedding_A", "lora_", "ia3_l", "lora_A"], strict=True
        ):
            assert re.search(
                f" uses the adapter {names}\\S* beside a slice of its layer; expected plain LoRA",
                text,
            ), text


class _SentError(Exception):
    """In place of a broadcast."""


def _sent(rank: int, world: int) -> str:
    def send(values: torch.Tensor, *_: Any, **__: Any) -> None:
        raise _SentError(values.device.type)

    mesh = init_device_mesh("cpu", (world,))
    with (
        mock.patch.object(type(mesh), "device_type", "meta"),
        mock.patch.object(dist, "broadcast", send),
        pytest.raises(_SentError) as seen,
    ):
        shardcore.tensor_parallel(
            MODELS["gpt2"]().transformer.h[0].mlp,
            mesh,
            {"c_fc": slicing._columns(1), "c_proj": slicing._rows},
        )
    return str(seen.value)


def test_weights_in_host_memory_are_sent_from_the_meshs_device() -> None:
    assert run_ranks(2, _sent) == ["meta", "meta"]


ACROSS = {
    "experts.gate_up_proj": "colwise",
    "experts.down_proj": "rowwise",
    "experts": "moe_tp_experts",
}
GPT_OSS = SIZES | {
    "num_local_experts": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts_per_tok": 1,
}


class Scaled(nn.Module):
    """Experts with a parameter that plans leave whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale = nn.Parameter(torch.ones(4, 6, 2)), nn.Parameter(torch.ones(4))


def _refusals(rank: int, world: int) -> list[str]:
    texts = []
    mesh = init_device_mesh("cpu", (world,))
    head = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    llama, tied = MODELS["llama"], MODELS["llama, tied"]()
    sparse, grouped = llama(), llama()
    grouped.config.num_attention_heads = 6
    sparse.config.activation_sparsity_pattern = [0.95, 0.0]
    calls: list[Callable[[], Any]] = [
        lambda: shardcore.tensor_parallel(nn.Linear(4, 4), mesh),
        lambda: shardcore.tensor_parallel(nn.Linear(4, 4), init_device_mesh("cpu", (1, world))),
        lambda: shardcore.tensor_parallel(llama(), mesh.get_group()),
        lambda: shardcore.tensor_parallel(llama(), mesh),
        lambda: shardcore.tensor_parallel(MODELS["gpt2"](), mesh),
        lambda: shardcore.tensor_parallel(grouped, mesh),
        lambda: shardcore.tensor_parallel(nn.Sequential(nn.Linear(4, 4)), mesh, {"1": "colwise"}),
        lambda: shardcore.tensor_parallel(
            nn.Sequential(nn.Linear(4, 4)), mesh, {"0": "moe_identity_expert"}
        ),
        lambda: shardcore.tensor_parallel(
            nn.Sequential(Scaled()), mesh, {"0.up": "colwise", "0": "moe_tp_experts"}
        ),
        lambda: shardcore.tensor_parallel(
            nn.Sequential(Scaled()), mesh, {"0.up": "colwise_gather_output"}
        ),
        lambda: shardcore.tensor_parallel(nn.Sequential(Scaled()), mesh, {"0.scale": "colwise"}),
        lambda: shardcore.tensor_parallel(MODELS["mixtral"]().model.layers[0].mlp, mesh, ACROSS),
        lambda: shardcore.tensor_parallel(_of("GptOss", **GPT_OSS)(), mesh),
        lambda: shardcore.tensor_parallel(sparse, mesh),
        lambda: shardcore.tensor_parallel(tied.base_model, mesh, {}),
        lambda: shardcore.chunked_cross_entropy(
            torch.ones(1, 4), head, torch.zeros(1, dtype=torch.int64)
        ),
    ]
    for call in calls:
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as raised:
            call()
        texts.append(str(raised.value))
    tied.config.num_attention_heads = tied.config.num_key_value_heads = 3
    with pytest.raises(NotImplementedError) as raised:
        shardcore.tensor_parallel(tied, mesh, {"lm_head": "colwise_gather_output"})
    return [*texts, str(raised.value)]


def test_what_cannot_be_sliced_is_named() -> None:
    expected = [
        "tensor_parallel: Linear defines no plan",
        "tensor_parallel: mesh is DeviceMesh(",
        "tensor_parallel: mesh is <torch",
        "tensor_parallel: num_attention_heads is 4 on 3 ranks",
        "tensor_parallel: num_attention_heads is 4 on 3 ranks",
        "tensor_parallel: num_key_value_heads is 2 on 3 ranks",
        "tensor_parallel: plan names '1', which is not a module or parameter of the model",
        "tensor_parallel: 0 uses the unsupported style 'moe_identity_expert'",
        "tensor_parallel: the plan does not slice scale of Scaled",
        "tensor_parallel: 0.up is a parameter with the style 'colwise_gather_output'; expected "
        "['colwise', 'rowwise', ",
        "tensor_parallel: a weight has shape (4,); expected 1 x 3 equal parts of dimension 0",
        "tensor_parallel: MixtralExperts.gate_up_proj is cut across gates and inputs; expected "
        '"packed_colwise"',
        "tensor_parallel: GptOssForCausalLM defines no plan for its layers",
        "tensor_parallel: activation_sparsity_pattern is set",
        "tensor_parallel: LlamaModel defines no plan",
        "chunked_cross_entropy: weight is a DTensor",
        "tensor_parallel: model.embed_tokens.weight and lm_head.weight are one weight, but the "
        "plan slices them differently",
    ]
    for texts in run_ranks(3, _refusals):
        for text, start in zip(texts, expected, strict=True):
            assert text.startswith(start), text
