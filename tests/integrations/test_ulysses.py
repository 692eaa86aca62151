"""DeepSpeed's names for sequence parallelism: a loop as in its tutorial. (Trainer:
tests/deepspeed/test_as_deepspeed.py.)
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn  # what Trainer weighs losses with
from torch import nn

import shardcore as deepspeed
from tests.support.deepspeed import ds_config
from tests.support.ranks import run_ranks

for needed in ("transformers", "accelerate"):
    pytest.importorskip(needed, reason="tests with transformers")

from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask  # noqa: E402

from shardcore.integrations.ulysses import (  # noqa: E402
    SequenceParallelGroups,
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)

TOKENS = 12


def llama(attention: str = "sdpa") -> Any:
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": attention}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def batches(start: int, step: int, count: int = 6) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (count, 2, TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, :, :5] = -100
    positions = torch.arange(TOKENS).expand(2, -1)
    batches = [
        {"input_ids": i, "labels": x, "position_ids": positions}
        for i, x in zip(ids, labels, strict=True)
    ]
    return batches[start::step]


def losses_of(parts: Iterator[dict[str, Any]], engine: Any, group: Any) -> list[float]:
    """Train as DeepSpeed's tutorial does; returns the losses."""
    found = []
    for part in parts:
        loss = engine(**part, labels=part["shift_labels"]).loss
        if group is not None:
            count = (part["shift_labels"] != -100).sum()
            losses = torch.stack(dist.nn.all_gather(loss, group=group))  # type: ignore[no-untyped-call]
            counts = torch.stack(dist.nn.all_gather(count, group=group))  # type: ignore[no-untyped-call]
            loss = (torch.where(counts > 0, losses, 0.0) * counts).sum() / counts.sum()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def _alone(rank: int, world: int) -> list[float]:
    engine = deepspeed.initialize(model=llama(), config=ds_config())[0]
    shifted = [
        {
            **batch,
            "shift_labels": nn.functional.pad(batch["labels"], (0, 1), value=-100)[
                :, 1:
            ].contiguous(),
        }
        for batch in batches(0, 1)
    ]
    return losses_of(
        iter([{k: v for k, v in batch.items() if k != "labels"} for batch in shifted]), engine, None
    )


def _tutorial(rank: int, world: int, stage: int, twin: bool) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        if twin:
            patch.setattr(SequenceParallelGroups, "enable", lambda self, model: None)
        model = llama()
        mpu = deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF.register_with_transformers(  # type: ignore[attr-defined]
            model_name_or_path="a name",
            core_attn_implementation="sdpa",
            sequence_parallel_size=world,
            micro_batch_size=1,
        )
        config = ds_config(stage=stage, sequence_parallel_size=world)
        engine = deepspeed.initialize(model=model, config=config, mpu=mpu)[0]
    groups = deepspeed.utils.groups  # type: ignore[attr-defined]
    assert groups._get_sequence_parallel_rank() == rank
    assert groups._get_sequence_parallel_world_size() == world
    assert engine.train_batch_size() == 4  # of one sequence group
    group = groups._get_sequence_parallel_group()
    loader = UlyssesSPDataLoaderAdapter(batches(rank, world), rank, group, world, "cpu")
    assert len(loader) == 6
    losses = losses_of(loader, engine, group)
    assert len([*loader]) == 6  # another epoch
    return losses


def test_losses_are_those_of_whole_sequences() -> None:
    (expected,) = run_ranks(1, _alone)
    for losses in run_ranks(2, _tutorial, 3, False):
        assert losses == pytest.approx(expected, rel=1e-5)
    # a twin that attends over its part alone
    assert run_ranks(2, _tutorial, 2, True)[0] != pytest.approx(expected, rel=1e-4)


def named(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Attend as sdpa where the model's configuration says so, as flash attention asks it."""
    assert module.config._attn_implementation == "named"
    return sdpa_attention_forward(module, *args, **kwargs)


def _evaluation(rank: int, world: int) -> None:
    AttentionInterface.register("named", named)
    AttentionMaskInterface.register("named", sdpa_mask)
    whole, model = llama(), llama("named")
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, "named", 2, disable_in_eval=True)
    engine = deepspeed.initialize(model=model, config=ds_config(), mpu=mpu)[0]
    ids = batches(rank, 2)[0]["input_ids"]  # other ones on each rank, whole, and without positions
    engine.eval()
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    for arguments in ({}, {"attention_mask": mask}):
        with torch.no_grad():
            assert torch.equal(
                engine(input_ids=ids, **arguments).logits, whole(input_ids=ids, **arguments).logits
            )


def test_evaluation_has_whole_sequences() -> None:
    run_ranks(2, _evaluation)


def _refusals(rank: int, world: int) -> None:
    register = UlyssesSPAttentionHF.register_with_transformers
    assert register(None, "sdpa", 1) is None
    with pytest.raises(
        ValueError, match="sequence_parallel_size is 3; expected a divisor of 2 ranks"
    ):
        register(None, "sdpa", 3)
    with pytest.raises(NotImplementedError, match="register_with_transformers"):
        UlyssesSPAttentionHF()
    mpu = register(None, "eager", 2)
    with pytest.raises(
        ValueError,
        match="the model uses the attention 'sdpa', and register_with_transformers got core_attn_impl",
    ):
        deepspeed.initialize(model=llama(), config=ds_config(), mpu=mpu)
    with pytest.raises(
        TypeError, match="mpu is for a model of transformers, and model is a Linear"
    ):
        deepspeed.initialize(model=nn.Linear(2, 2), config=ds_config(), mpu=mpu)

    with pytest.raises(
        ValueError, match="config sequence_parallel_size is 2, and mpu 1; expected the same"
    ):
        deepspeed.initialize(model=llama(), config=ds_config(sequence_parallel_size=2))
    model, differ = llama(), ds_config(gradient_clipping=float(rank))
    with pytest.raises(ValueError, match="gradient_clipping"):
        deepspeed.initialize(model=model, config=differ, mpu=register(None, "sdpa", 2))
    assert model.config._attn_implementation == "sdpa"  # what is refused is left as it was

    class Other:
        def get_sequence_parallel_world_size(self) -> int:
            return 2

    with pytest.raises(
        ValueError,
        match="mpu describes sequences over 2 ranks; expected the mpu of UlyssesSPAttentionHF",
    ):
        deepspeed.initialize(model=llama(), config=ds_config(), mpu=Other())


def test_refusals() -> None:
    run_ranks(2, _refusals)
