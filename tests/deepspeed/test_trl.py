"""What stream_to_vllm leaves alone. tests/integrations/test_transformers_vllm.py and
test_as_deepspeed.py have TRL's trainers.
"""

from typing import Any

import pytest

pytest.importorskip("transformers", reason="tests with transformers")
pytest.importorskip("accelerate", reason="tests with Accelerate")
pytest.importorskip("trl", reason="tests with TRL")

from shardcore.deepspeed.trl import stream_to_vllm
from tests.support.huggingface import launched, tiny_gpt2
from tests.support.ranks import run_fresh


def _twice(world_size: int) -> tuple[list[str], bool]:
    """Return the names that TRL sends of a model that is not sharded, and whether a second call did
    nothing.
    """
    stream_to_vllm()  # before TRL is imported: finds nothing
    with launched(0, world_size):
        from accelerate import Accelerator
        from trl.distributed import DistributedBackend
        from trl.generation.vllm_generation import VLLMGeneration

        before = VLLMGeneration.sync_weights
        stream_to_vllm()
        first = VLLMGeneration.sync_weights
        stream_to_vllm()
        sender: Any = VLLMGeneration.__new__(VLLMGeneration)
        sender.model, sender.mode = tiny_gpt2(), "server"
        sender._dist = DistributedBackend(Accelerator(cpu=True))
        names = [name for name, _ in sender._iter_named_params()]
        return names, VLLMGeneration.sync_weights is first is not before


@pytest.mark.more
def test_models_that_are_not_sharded_keep_trls_own_methods() -> None:
    names, once = run_fresh(_twice, 1)
    assert names == [name for name, _ in tiny_gpt2().named_parameters()]
    assert once
