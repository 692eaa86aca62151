"""QLoRA with bitsandbytes itself, on CPU ranks: a base of NF4 with double quantization under LoRA."""

import gc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="tests with transformers")
pytest.importorskip("peft", reason="tests with PEFT")
pytest.importorskip("bitsandbytes", reason="tests with bitsandbytes")

import shardcore
from shardcore.estimate import predict
from shardcore.estimate.estimate_command import to_qlora
from tests.support.huggingface import (
    hash_of_state,
    qlora_of,
    rows,
    save_tiny_llama,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.more

STEPS = 3


def adapters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "lora" in name}


def base_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "lora" not in name}


def loss_of(model: Any, sample: dict[str, torch.Tensor]) -> torch.Tensor:
    batch = {name: value[None] for name, value in sample.items()}
    return model(**batch).loss


def train_unsharded(rank: int, world_size: int, folder: str, change: float = 1.0) -> Any:
    """Train on the global batches, which are two samples, without shard().

    change: what one scale of the scales is multiplied by.
    """
    model = qlora_of(folder)
    layer = model.base_model.model.model.layers[1].mlp.up_proj
    layer.weight.quant_state.state2.absmax[1] *= change
    optimizer = shardcore.FusedAdam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    samples, losses = rows(2 * STEPS), []
    for step in range(STEPS):
        for sample in samples[2 * step : 2 * step + 2]:
            loss = loss_of(model, sample)
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, hash_of_state(adapters_of(model)), hash_of_state(base_of(model))


def train_sharded(rank: int, world_size: int, folder: str, stage: int) -> Any:
    """Train as `train_unsharded` does, a sample of each global batch on each rank."""
    model: Any = qlora_of(folder)
    optimizer: Any = shardcore.FusedAdam(
        [p for p in model.parameters() if p.requires_grad], lr=0.01
    )
    model, optimizer = shardcore.shard(model, optimizer, stage=stage)
    losses = []
    for sample in rows(2 * STEPS)[rank::2]:
        loss = loss_of(model, sample)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, hash_of_state(adapters_of(model)), hash_of_state(base_of(model))


def test_qlora_over_two_ranks_has_the_bits_of_the_unsharded_run(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    [(losses, adapters, base)] = run_ranks(1, train_unsharded, str(tmp_path))
    [(_, changed, _)] = run_ranks(1, train_unsharded, str(tmp_path), 1.01)
    assert changed != adapters, "the test must see a wrong scale"
    for stage in (0, 3):
        ranks = run_ranks(2, train_sharded, str(tmp_path), stage)
        pairs = zip(*(rank[0] for rank in ranks), strict=True)
        assert [loss for pair in pairs for loss in pair] == losses
        assert {rank[1] for rank in ranks} == {adapters}
        assert {rank[2] for rank in ranks} == {base}, "the state dict has the whole base"


def bytes_of_tensors() -> int:
    """Return the memory of all tensors in this process."""
    gc.collect()
    sizes = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu":
            with suppress(RuntimeError):  # of a weight that is sharded: it has no memory
                sizes[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(sizes.values())


def held_and_estimated(
    rank: int, world_size: int, folder: str, keeps_base: bool = False
) -> tuple[int, int, dict[str, int], dict[str, int]]:
    """Return the bytes of tensors that a rank holds between steps, the bytes of tables in them;
    the bytes of memory_report, and those that `shardcore estimate --qlora 4` shows, by kind.
    """
    import transformers

    qlora_of(folder)  # fills the caches of libraries
    before = bytes_of_tensors()
    model: Any = qlora_of(folder, torch.bfloat16, "all-linear")
    optimizer: Any = shardcore.FusedAdam([p for p in model.parameters() if p.requires_grad])
    kept = [param.data for param in model.parameters()] if keeps_base else []
    model, optimizer = shardcore.shard(model, optimizer, stage=3, precision="bf16")
    for sample in rows(2):
        loss_of(model, sample).backward()
        optimizer.step()
        optimizer.zero_grad()
        del sample
    held = bytes_of_tensors() - before
    del kept
    states = [p.quant_state for p in model.parameters() if hasattr(p, "quant_state")]
    tables = sum(state.code.nbytes + state.state2.code.nbytes for state in states)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        twin = transformers.AutoModelForCausalLM.from_config(config)
    to_qlora(twin, 4)
    estimate = predict(twin, stage=3, world_size=world_size, rank=rank, precision="bf16").resting
    return held, tables, shardcore.memory_report(model).by_kind, estimate.by_kind


def test_ranks_hold_the_bytes_of_the_estimate(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, torch.bfloat16)
    beyond = 1024  # means of scales, rotary frequencies, counters
    for world_size in (2, 3):
        run = world_size, held_and_estimated, str(tmp_path)
        for held, tables, report, estimate in run_ranks(*run):
            assert report == estimate
            assert 0 <= held - sum(estimate.values()) - tables < beyond
    for held, tables, _, estimate in run_ranks(2, held_and_estimated, str(tmp_path), True):
        assert held - sum(estimate.values()) - tables > beyond, (
            "a base that a rank keeps whole is seen"
        )
