"""Trainer.save_model of transformers at stage 3, where `import deepspeed` means shardcore.

Trainer asks the engine for the whole weights, which rank 0 then has in host memory. In place of
this the ranks write the weights together, unit by unit, and rank 0 writes all other files by
Trainer's own `_save`. Of a model of PEFT rank 0 gets the tensors that PEFT saves: Trainer would ask
for the trained ones, without embeddings that were resized. Models that cannot stream are saved by
Trainer's own method. Tested with transformers 5.24.
"""

import sys
from functools import partial, wraps
from pathlib import Path
from typing import Any

from shardcore.checkpoint.save_pretrained import (
    can_stream,
    save_adapters,
    save_pretrained,
    saves_adapters,
)
from shardcore.deepspeed.training_engine import TrainingEngine
from shardcore.optim.interface import engine_of


def stream_saves() -> None:
    """Let save_model of transformers' Trainer, if it is imported, stream. A second call does
    nothing.
    """
    trainer: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is not None and not hasattr(trainer.save_model, "_shardcore_streams"):
        trainer.save_model = _streaming(trainer.save_model)


def _streaming(own: Any) -> Any:
    @wraps(own)
    def save_model(
        trainer: Any, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        engine = getattr(trainer, "deepspeed", None)
        if not isinstance(engine, TrainingEngine) or not _saves(engine, trainer, output_dir):
            own(trainer, output_dir, _internal_call)
            return
        if trainer.args.push_to_hub and not _internal_call:  # as Trainer's own method
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    save_model._shardcore_streams = True  # type: ignore[attr-defined]
    return save_model


def _saves(engine: TrainingEngine, trainer: Any, output_dir: str | None) -> bool:
    """Save the model and Trainer's other files; False, with nothing written, if Trainer's own
    method must.
    """
    model = engine.module
    if (
        engine.zero_optimization_stage() != 3
        or not engine.zero_gather_16bit_weights_on_model_save()
        or trainer.model is not model
    ):
        return False
    write = partial(trainer._save, output_dir)
    if saves_adapters(model):
        return save_adapters(engine_of(model), lambda state: write(state_dict=state))
    if not can_stream(model):
        return False
    folder = Path(output_dir or trainer.args.output_dir)
    save_pretrained(engine_of(model), folder, partial(write, state_dict={}))
    return True
