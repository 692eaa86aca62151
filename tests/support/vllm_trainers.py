"""TRL's trainers that generate with vLLM, whose stand-in says which weights it received.

Call `use_stand_in` before the trainers are imported: TRL looks for vLLM once.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardcore
from tests.support.huggingface import LORA, rows, tiny_gpt2, tiny_tokenizer

_STAND_IN = str(Path(__file__).with_name("vllm_stand_in"))
ARGUMENTS: dict[str, Any] = {
    "use_vllm": True,
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 0.01,
}


def use_stand_in() -> None:
    """Let `import vllm` mean the stand-in in this process."""
    if _STAND_IN not in sys.path:
        sys.path.insert(0, _STAND_IN)


def save_tiny_model(folder: Any) -> None:
    """Write what a trainer, and the stand-in, load by the name of a folder."""
    tiny_gpt2().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def train_with_vllm(
    kind: type, args: Any, folder: str, *, lora: bool = False, **options: Any
) -> tuple[Any, int]:
    """Train, and compare after each generation the weights that vLLM used with those that the
    trainer's forward uses. Return the trainer, and how many tensors were compared on this rank.

    A trainer's reward function is called on all ranks between a generation and the step.
    """
    datasets = importlib.import_module("datasets")
    datasets.disable_progress_bars()
    made: list[Any] = []
    counts = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        expected = _merged(made[0], folder) if lora else _of_forward(made[0])
        receiver = _receiver(made[0])
        if receiver is not None:
            assert_equal(receiver.received, expected)
            receiver.received["transformer.wte.weight"] += 1
            with pytest.raises(AssertionError):  # what the comparison has to reject
                assert_equal(receiver.received, expected)
            receiver.received.clear()
            counts.append(len(expected))
        return [float(text.count("7")) for text in completions]

    prompts = ["".join(f" w{index}" for index in row["input_ids"][:4].tolist()) for row in rows(32)]
    trainer = kind(
        model=folder,
        args=args,
        reward_funcs=reward,
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tiny_tokenizer(),
        peft_config=_lora() if lora else None,
        **options,
    )
    made.append(trainer)
    trainer.train()
    return trainer, sum(counts)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def _lora() -> Any:
    # of random values: else adapters add zeros
    return importlib.import_module("peft").LoraConfig(**LORA, init_lora_weights=False)


def _of_forward(trainer: Any) -> dict[str, torch.Tensor]:
    with shardcore.full_params(trainer.model):
        return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def _merged(trainer: Any, folder: str) -> dict[str, torch.Tensor]:
    """Return what PEFT makes of the same adapters on a model that is not sharded."""
    plain = importlib.import_module("peft").get_peft_model(tiny_gpt2(), _lora())
    plain.load_state_dict(trainer.model.state_dict())
    merged = plain.merge_and_unload()
    return {name: param.detach() for name, param in merged.named_parameters()}


def _receiver(trainer: Any) -> Any:
    """Return the stand-in's model that has got weights; None on ranks without one."""
    holder = getattr(trainer, "vllm_generation", trainer)
    llm = getattr(holder, "llm", None)
    client = getattr(holder, "vllm_client", None)
    if llm is not None:
        return llm.model
    return None if client is None else client.session.model


def connect(patch: pytest.MonkeyPatch, folder: str) -> None:
    """Give TRL's client a server of its own process in place of one behind HTTP and NCCL."""
    client = importlib.import_module("trl.generation.vllm_client").VLLMClient
    server = importlib.import_module("vllm.server").Server

    def begin(self: Any, base_url: str, **unused: Any) -> None:
        self.base_url, self.session, self.model = base_url, server(folder), "tiny"
        self._updating_weights = False

    def join(self: Any, device: Any) -> None:
        self.communicator = self.session

    patch.setattr(client, "__init__", begin)
    patch.setattr(client, "init_communicator", join)
