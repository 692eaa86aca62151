"""TRL's trainers that generate with vLLM: how it gets the weights of a sharded model.

TRL reads parameter after parameter, and to merge adapters it gathers the whole model and edits it.
In place of this a sharded model is streamed unit by unit, with adapters merged on the way
(shardcore/stream.py). vLLM gets the names and the layout of the model's files. Other models keep
TRL's own methods.

Private names of TRL: `_iter_named_params` and `_weight_metadata` of VLLMGeneration,
`_move_model_to_vllm_inner` of OnlineDPOTrainer. Tested with TRL 1.16.0.
"""

import sys
from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn

from shardcore.checkpoint.save_pretrained import is_transformers
from shardcore.optim.interface import engine_of
from shardcore.stream import param_metadata, stream_params


def stream_to_vllm() -> None:
    """Let the classes of TRL that send weights to vLLM, where they are imported, stream sharded
    models. A second call does nothing.
    """
    for module, kind, methods in (
        (
            "trl.generation.vllm_generation",
            "VLLMGeneration",
            {"_iter_named_params": _iterating, "sync_weights": _announcing},
        ),
        (
            "trl.experimental.online_dpo.online_dpo_trainer",
            "OnlineDPOTrainer",
            {"_move_model_to_vllm_inner": _moving},
        ),
    ):
        found: Any = getattr(sys.modules.get(module), kind, None)
        for name, streaming in methods.items():
            own = getattr(found, name, None)
            if own is not None and not hasattr(own, "_shardcore_streams"):
                new: Any = wraps(own)(streaming(own))
                new._shardcore_streams = True
                setattr(found, name, new)


def _iterating(own: Any) -> Any:
    def method(generation: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if engine_of(generation.model) is None:
            return own(generation)  # type: ignore[no-any-return]
        return _stream(generation.model, generation.mode)

    return method


def _announcing(own: Any) -> Any:
    def method(generation: Any) -> None:
        if engine_of(generation.model) is not None and generation.mode == "server":
            generation._weight_metadata = _metadata(generation.model)  # TRL would iterate for it
        own(generation)

    return method


def _moving(own: Any) -> Any:
    def method(trainer: Any) -> None:
        if engine_of(trainer.model) is None:
            own(trainer)
            return
        tensors = _stream(trainer.model, trainer.vllm_mode)
        if trainer.vllm_mode == "colocate":
            worker = trainer.llm.llm_engine.model_executor.driver_worker
            for item in tensors:
                worker.model_runner.model.load_weights([item])
        elif trainer.accelerator.is_main_process:
            trainer.vllm_client.update_named_params(_metadata(trainer.model), tensors)
        else:
            for _ in tensors:  # sends this rank's shards
                pass

    return method


def _stream(model: nn.Module, mode: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream to TRL's main process, or to the vLLM of each rank."""
    return stream_params(model, ranks=[0] if mode == "server" else None, **_options(model))


def _metadata(model: nn.Module) -> list[tuple[str, str, list[int]]]:
    """Describe the stream as VLLMClient.update_named_params expects it."""
    return [
        (each.name, str(each.dtype).removeprefix("torch."), list(each.shape))
        for each in param_metadata(model, **_options(model))
    ]


def _options(model: Any) -> dict[str, Any]:
    merges = hasattr(model, "get_base_model")  # a model of PEFT
    base = model.get_base_model() if merges else model
    names = "huggingface" if is_transformers(base) else "model"
    return {"names": names, "merge_adapters": merges}
