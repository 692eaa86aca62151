"""The state dict of the module of initialize's engine, as scripts for DeepSpeed read it."""

import pytest
import torch

import shardcore
from tests.support.deepspeed import ds_config, start, train
from tests.support.models import hash_of_training, make_net
from tests.support.ranks import run_ranks

BF16 = {"enabled": True}


def _read_alone(rank: int, world_size: int, stage: int) -> None:
    engine, other = (start(ds_config(2, stage, bf16=BF16)) for _ in range(2))
    for number in (1, 2):
        train(engine, rank, number)
        train(other, rank, number)
        if rank == 0:
            read = engine.module.state_dict()
            of_part = engine.module.blocks.state_dict(prefix="blocks.")
        masters = other.module_state_dict()
        if rank == 0:
            assert set(read) == set(masters)
            for name, value in read.items():
                assert value.dtype == (torch.float32 if name == "offset" else torch.bfloat16), name
                assert torch.equal(value, masters[name].to(value.dtype)), name
                # for torch.save and safetensors
                assert value.untyped_storage().nbytes() == value.nbytes, name
            assert all(torch.equal(value, read[name]) for name, value in of_part.items())
    assert hash_of_training(engine, engine.optimizer) == hash_of_training(other, other.optimizer)


def _read_alone_after_unfreezing(rank: int, world_size: int) -> list[torch.dtype]:
    model = make_net()
    model.head.requires_grad_(False)
    engine = start(ds_config(2, 2, bf16=BF16), model, model_parameters=[*model.parameters()])
    train(engine, rank, 1)
    shardcore.unfreeze(engine.module)
    return [value.dtype for value in engine.module.head.state_dict().values()] if rank == 0 else []


def test_one_rank_reads_the_weights_alone_after_unfreezing() -> None:
    assert set(run_ranks(2, _read_alone_after_unfreezing)[0]) == {torch.bfloat16}


def _read_masters(rank: int, world_size: int) -> None:
    engine = start(ds_config(2, 2, bf16=BF16, shardcore={"overlap_step": True}))
    train(engine, rank, 1)
    weights, masters = engine.module.state_dict(), engine.module_state_dict()
    assert all(
        torch.equal(value, masters[name]) and value.dtype == torch.float32
        for name, value in weights.items()
    )


def test_an_overlapped_step_has_masters_in_the_state_dict() -> None:
    """A read on one rank alone would start the gathers of the step there."""
    run_ranks(2, _read_masters)


@pytest.mark.parametrize("stage", [0, 2])
def test_one_rank_reads_the_weights_of_the_module_alone_below_stage_3(stage: int) -> None:
    run_ranks(2, _read_alone, stage)
