"""verl's engines on CPU ranks, without Ray: a platform for the CPU, which verl does not have, its
configurations, batches and losses.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.support.language_models import SIZES

ROWS = 4  # of each rank


def use_cpu() -> None:
    """Let verl compute on the CPU."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):
        device_name = "cpu"
        device_module = SimpleNamespace(
            current_device=lambda: torch.device("cpu"),
            empty_cache=lambda: None,
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
            max_memory_allocated=lambda: 0,
            max_memory_reserved=lambda: 0,
            mem_get_info=lambda: (0, 0),
        )

        def current_device(self) -> Any:
            return torch.device("cpu")

        def empty_cache(self) -> None:
            pass

        def nvtx_range(self, msg: str) -> Any:
            return nullcontext()

    if platform_manager._current_platform is None:
        platform_manager.set_platform(Cpu())


def save_qwen(folder: Path) -> None:
    """Write a tiny Qwen2 of two layers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(**{**SIZES, "num_hidden_layers": 2})
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def batch(step: int, rank: int, **settings: Any) -> Any:
    """Return rows of different lengths, packed without padding as verl's workers get them."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = [5, 9, 7, 12] if rank == 0 else [11, 6, 8, 4]
    ids = [torch.randint(SIZES["vocab_size"], (n,), generator=generator) for n in lengths]
    masks = [torch.tensor([0, 0] + [1] * (n - 2)) for n in lengths]
    targets = [torch.randn(n, generator=generator) for n in lengths]

    def nested(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    tensors = {
        "input_ids": nested(ids),
        "position_ids": nested([torch.arange(n) for n in lengths]),
        "loss_mask": nested(masks),
        "targets": nested(targets),
    }
    defaults = {
        "temperature": 1.0,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "use_remove_padding": False,
        "calculate_entropy": True,
    }
    return tu.get_tensordict(tensors, {**defaults, **settings})


def sft() -> Callable[..., Any]:
    """verl's own loss of supervised training."""
    from verl.workers.utils.losses import sft_loss

    return partial(sft_loss, None)


def of_values(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """A critic's loss: the squared error over the tokens of all ranks."""
    error = model_output["values"].values() - data["targets"].values()
    masked = error.square() * data["loss_mask"].values()
    return masked.sum() / data["batch_num_tokens"] * data["dp_size"], {}


def configurations(
    folder: Any,
    backend: str = "shardcore",
    model_type: str = "language_model",
    model: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """Return the arguments of verl's TrainingWorkerConfig."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    from shardcore.integrations.verl import ShardcoreEngineConfig

    kind = ShardcoreEngineConfig if backend == "shardcore" else FSDPEngineConfig
    attention = {"override_config": {"attn_implementation": "sdpa"}}
    model_config = HFModelConfig(
        path=str(folder), load_tokenizer=False, **attention | (model or {})
    )
    model_config.model_type = model_type
    schedule = {"lr": 1e-2, "total_training_steps": 10, "lr_warmup_steps": 2}
    return {
        "model_type": model_type,
        "model_config": model_config,
        "engine_config": kind(strategy=backend, use_torch_compile=False, **config),
        "optimizer_config": FSDPOptimizerConfig(**schedule, **(optim or {})),
        "checkpoint_config": CheckpointConfig(**(checkpoint or {})),
    }


def engine_of(
    folder: Any, backend: str = "shardcore", model_type: str = "language_model", **options: Any
) -> Any:
    """Return one of verl's engines, initialized; options: see `configurations`. Collective."""
    use_cpu()
    from verl.workers.engine import EngineRegistry

    arguments = configurations(folder, backend, model_type, **options)
    if model_type == "value_model":
        _load_values_without_flash_attention()
    # verl registers its own engine for GPUs only
    device = "cpu" if backend == "shardcore" else "cuda"
    with patch.dict(os.environ, {"VERL_ENGINE_DEVICE": device}):
        engine = EngineRegistry.new(arguments.pop("model_type"), backend, **arguments)
    engine.initialize()
    return engine


def _load_values_without_flash_attention() -> None:
    """verl loads value models with flash_attention_2, which is not installed."""
    import transformers
    import verl.utils.model

    def load(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        torch.manual_seed(0)  # of the new head
        return transformers.AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, attn_implementation="sdpa"
        )

    verl.utils.model.load_valuehead_model = load


def use_packed_attention() -> None:
    """Let attn_implementation="packed" be what verl wraps for Ulysses: flash attention, whose
    kernel is torch's attention within each of the packed sequences.
    """
    from transformers import AttentionInterface
    from transformers.integrations import flash_attention
    from verl.models.transformers import monkey_patch

    def kernel(query: Any, key: Any, value: Any, *_: Any, position_ids: Any, **options: Any) -> Any:
        sequence = (position_ids[0] == 0).cumsum(0)
        within = (sequence[:, None] == sequence).tril()
        heads = (each.transpose(1, 2) for each in (query, key, value))
        scale = options["softmax_scale"]
        return torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=within, scale=scale, enable_gqa=True
        ).transpose(1, 2)

    monkey_patch._flash_attention_forward = kernel
    AttentionInterface.register("packed", flash_attention.flash_attention_forward)


def train(engine: Any, loss: Any, steps: range = range(3), **settings: Any) -> list[Any]:
    """Run steps as verl's worker does. Returns losses, and norms where verl reports them."""
    results = []
    for step in steps:
        with engine.train_mode():
            data = batch(step, engine.get_data_parallel_rank(), **settings)
            output = engine.train_batch(data, loss)
            engine.lr_scheduler_step()
        results.append((output["loss"], output["metrics"].get("grad_norm")))
    return results


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return what a rollout gets, on the CPU. Collective."""
    return {n: w.detach().float().clone() for n, w in engine.get_per_tensor_param()[0]}
