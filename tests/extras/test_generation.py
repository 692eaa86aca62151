"""`generate` at stage 3: the tokens of the unsharded model, with all weights at once or a unit at
a time, as the rank with the least memory decides.
"""

import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="tests with transformers")
pytest.importorskip("accelerate", reason="tests with Accelerate and Trainer")

import shardcore  # noqa: E402
from shardcore.deepspeed import names  # noqa: E402
from shardcore.engine.unshard import Unsharder  # noqa: E402
from shardcore.extras import generation  # noqa: E402
from shardcore.integrations.accelerate import ShardcoreAccelerator  # noqa: E402
from tests.support.huggingface import VOCAB, launched, tiny_gpt2  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

PLENTY = 1 << 50
TOKENS = 10
Door = Callable[[Any], tuple[Any, AbstractContextManager[Any]]]


def _prepared(model: Any) -> tuple[Any, AbstractContextManager[Any]]:
    accelerator = ShardcoreAccelerator(cpu=True, shard_options={"stage": 3})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator.prepare(model, optimizer)[0], nullcontext()


def _trl(model: Any) -> tuple[Any, AbstractContextManager[Any]]:
    utils = pytest.importorskip("trl.models.utils", reason="tests with TRL")
    accelerator = ShardcoreAccelerator(cpu=True, shard_options={"stage": 3})
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return model, utils.unwrap_model_for_generation(model, accelerator)


def _deepspeed(model: Any) -> tuple[Any, AbstractContextManager[Any]]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
    }
    engine = shardcore.initialize(model=model, config=config)[0]
    return engine.module, names.unwrap_model_for_generation(engine)


DOORS: dict[str, Door] = {"prepare": _prepared, "trl": _trl, "deepspeed": _deepspeed}


def _tokens(model: Any, rank: int, **options: Any) -> list[int]:
    """Ranks have other prompts, and end after other numbers of tokens."""
    prompt = torch.arange(3 + rank, 9 + rank)[None] % VOCAB
    made = model.eval().generate(prompt, max_new_tokens=TOKENS - 4 * rank, **options)
    return list(made[0].tolist())


def _generate(
    rank: int, world: int, door: str, free: list[int], options: dict[str, Any]
) -> dict[str, Any]:
    """Generate twice on each rank; once on rank 0 alone, and in a copy."""
    said: list[str] = []
    gathers = 0
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    gather = Unsharder._gather

    def counted(*arguments: Any, **named: Any) -> None:
        nonlocal gathers
        gathers += 1
        gather(*arguments, **named)

    with launched(rank, world), pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "free_and_total", lambda device: (free[rank], PLENTY))
        patch.setattr(Unsharder, "_gather", counted)
        plain = tiny_gpt2()
        plain.generation_config.eos_token_id = None
        expected = _tokens(copy.deepcopy(plain), rank)
        model, context = DOORS[door](copy.deepcopy(plain))
        logger = logging.getLogger("shardcore")
        logger.addHandler(handler)
        level = logger.level
        logger.setLevel(logging.INFO)
        try:
            with context:
                gathers = 0
                found = [_tokens(model, rank, **options) for _ in range(2)]
                gathers_inside = gathers
            with shardcore.full_params(model):
                copied = copy.deepcopy(model)
                if rank == 0:
                    found.append(_tokens(model, rank))  # alone: no forward is collective
            if rank == 0:
                found.append(_tokens(copied, rank))
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
        units = len(model._shardcore_engine.unsharder.units)
        return {
            "right": [tokens == expected for tokens in found],
            "gathers": gathers_inside,
            "units": units,
            "said": [line for line in said if line.startswith("generate: ")],
        }


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("free", [[PLENTY, PLENTY], [PLENTY, 1]])
def test_the_rank_with_the_least_memory_decides(door: str, free: list[int]) -> None:
    whole = free[1] == PLENTY
    of_ranks = run_ranks(2, _generate, door, free, {})
    for found in of_ranks:
        assert all(found["right"])
        if whole:  # once for a call, or before it for the context
            assert found["gathers"] == (0 if door == "deepspeed" else 2 * found["units"])
        else:  # for each token
            assert found["gathers"] > 6 * found["units"]
    (line,) = of_ranks[0]["said"]
    assert ("all weights are gathered once" in line) == whole
    assert ("which is slower" in line) != whole
    assert not of_ranks[1]["said"]


def test_synced_gpus_gathers_units() -> None:
    for found in run_ranks(2, _generate, "prepare", [PLENTY, PLENTY], {"synced_gpus": True}):
        assert all(found["right"])
        assert found["gathers"] > 6 * found["units"]
        assert not found["said"]
