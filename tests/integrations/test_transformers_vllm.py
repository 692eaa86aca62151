"""TRL's trainers that generate with vLLM: it gets the weights that the sharded model trains."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="tests with transformers")
pytest.importorskip("accelerate", reason="tests with Accelerate and Trainer")
pytest.importorskip("peft", reason="tests with PEFT")
pytest.importorskip("trl", reason="tests with TRL")

from shardcore.integrations.transformers import ShardcoreTrainerMixin  # noqa: E402
from tests.support.huggingface import launched, tiny_gpt2  # noqa: E402
from tests.support.ranks import run_ranks, stop_ranks  # noqa: E402
from tests.support.vllm_trainers import (  # noqa: E402
    ARGUMENTS,
    connect,
    save_tiny_model,
    train_with_vllm,
    use_stand_in,
)

TRAINERS = {
    "GRPO": ("trl", {"num_generations": 2, "max_completion_length": 6}),
    "RLOO": ("trl", {"num_generations": 2, "max_completion_length": 6}),
    "OnlineDPO": ("trl.experimental.online_dpo", {"max_new_tokens": 6, "max_length": 26}),
}


@pytest.fixture(scope="module", autouse=True)
def ranks_with_vllm() -> Iterator[None]:
    """Begin with ranks that have not looked for vLLM, and leave none to other tests."""
    stop_ranks()
    yield
    stop_ranks()


def _train(
    rank: int,
    world_size: int,
    folder: str,
    kind: str,
    mode: str,
    stage: int,
    lora: bool,
    arguments: dict[str, Any],
) -> int:
    use_stand_in()
    with launched(rank, world_size), pytest.MonkeyPatch.context() as patch:
        module, of_kind = TRAINERS[kind]
        found: Any = importlib.import_module(module)
        connect(patch, folder)
        # which online DPO asks for a device, and others whether to pin memory
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
        args = getattr(found, f"{kind}Config")(
            output_dir=f"{folder}/out",
            use_cpu=True,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            gradient_checkpointing=False,
            vllm_mode=mode,
            **ARGUMENTS,
            **of_kind,
            **{"bf16": not lora, **arguments},
        )
        sharded = type("Sharded", (ShardcoreTrainerMixin, getattr(found, f"{kind}Trainer")), {})
        return train_with_vllm(sharded, args, folder, lora=lora, shard_options={"stage": stage})[1]


# two generations a step: the second one finds that sleep has dropped the weights
SLEEP = {
    "vllm_enable_sleep_mode": True,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 1,
}
# a trainer, the mode, the stage, whether LoRA trains, further arguments
CASES: dict[str, tuple[str, str, int, bool, dict[str, Any]]] = {
    "grpo_server": ("GRPO", "server", 3, False, {}),
    "grpo_colocate": ("GRPO", "colocate", 3, False, {}),
    "grpo_stage_2": ("GRPO", "server", 2, True, {}),
    "grpo_sleeps": ("GRPO", "colocate", 3, True, SLEEP),
    "rloo_lora": ("RLOO", "server", 3, True, {}),
    "online_dpo_server": ("OnlineDPO", "server", 3, False, {}),
    "online_dpo_colocate": ("OnlineDPO", "colocate", 3, True, {"vllm_enable_sleep_mode": True}),
}


@pytest.mark.more
@pytest.mark.parametrize("case", CASES)
def test_vllm_has_the_weights_of_forward_at_every_step(tmp_path: Path, case: str) -> None:
    save_tiny_model(tmp_path)
    on_ranks = run_ranks(2, _train, str(tmp_path), *CASES[case])
    mode, arguments = CASES[case][1], CASES[case][4]
    generations = 3 * arguments.get("gradient_accumulation_steps", 1)
    compared = generations * len([*tiny_gpt2().parameters()])
    assert on_ranks == [compared, 0 if mode == "server" else compared]
