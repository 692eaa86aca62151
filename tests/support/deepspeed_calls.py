"""Calls that DeepSpeed and shardcore answer alike, and what they answer: one script, under both
names.

Run once per rank: python -m tests.support.deepspeed_calls MODULE FILE, with RANK, WORLD_SIZE and so
on set. MODULE: deepspeed or shardcore. Rank 0 writes the answers of `CALLS` for so many ranks to
FILE, by their names, as JSON.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.deepspeed import ds_config
from tests.support.models import batch_of


class _Scaled(nn.Module):
    """A layer with buffers, one of which it asks to be kept in float32."""

    _keep_in_fp32_modules_strict = ("kept*bias",)

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(7, 5)
        self.register_buffer("kept_as_bias", torch.full((5,), 1 / 3))
        self.register_buffer("scale", torch.full((5,), 1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(x)
        return (out * self.scale + self.kept_as_bias).to(out.dtype)


def _engine(
    deepspeed: Any,
    accumulation: int = 1,
    stage: int = 0,
    scheduler: Any = None,
    low: bool = False,
    spare: bool = False,
    **more: Any,
) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 7), nn.Tanh(), _Scaled()).to(
        torch.bfloat16 if low else torch.float32
    )
    if spare:
        model[2].spare = nn.Linear(3, 2)
    # torch's Adam: DeepSpeed compiles its own.
    adam = {
        "type": "AdamW",
        "params": {"lr": 0.01, "weight_decay": 0.1, "eps": 0.1, "torch_adam": True},
    }
    config = ds_config(accumulation, stage, optimizer=adam, **more)
    options = {"model": model, "model_parameters": model.parameters(), "config": config}
    return deepspeed.initialize(**options, lr_scheduler=scheduler)[0]


def _loss(engine: Any, micro_step: int, autocast: bool = False) -> torch.Tensor:
    x, y = batch_of(0, micro_step, dist.get_rank())
    out: torch.Tensor = engine(x if autocast else x.to(next(engine.module.parameters()).dtype))
    return ((out.float() - y) ** 2).mean()


def _weights(deepspeed: Any, engine: Any) -> list[float]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return [param.detach().float().norm().item() for param in engine.module.parameters()]


class _Watched(torch.optim.lr_scheduler.StepLR):
    """Notes what the engine says while it steps."""

    engine: Any = None
    said: Any = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, 1, 0.5)

    def step(self, *args: Any) -> None:
        super().step(*args)
        self.said = self.engine and self.engine.is_gradient_accumulation_boundary()


def unmanaged(deepspeed: Any) -> dict[str, Any]:
    """Four micro-steps of a loop that decides itself when to step, with two backwards per step
    configured.
    """
    found = {}
    for stage in (0, 1, 2, 3):
        engine = _engine(
            deepspeed,
            2,
            stage,
            _Watched,
            managed_gradient_accumulation=False,
            gradient_clipping=0.1,
        )
        engine.lr_scheduler.engine = engine
        seen: list[Any] = []
        for micro_step in range(4):
            loss = _loss(engine, micro_step)
            returned = engine.backward(loss, scale_wrt_gas=micro_step > 1)
            seen.append((returned / loss).item())
            seen.append(engine.is_gradient_accumulation_boundary())
            if micro_step != 1:
                engine.step()
                seen += [
                    engine.global_steps,
                    engine.global_samples,
                    engine.was_step_applied(),
                    engine.lr_scheduler.said,
                ]
                seen += [
                    engine.get_global_grad_norm() if stage else 0.0,
                    engine.is_gradient_accumulation_boundary(),
                ]
        found[stage] = [*seen, engine.managed_gradient_accumulation(), *_weights(deepspeed, engine)]
    return {str(stage): answers for stage, answers in found.items()}


def losses(deepspeed: Any) -> dict[str, Any]:
    """What is returned of a loss, and which losses are refused."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = _engine(deepspeed, 3, 1)
        loss = _loss(engine, 0).to(dtype)
        found[f"several {dtype}"] = _tried(
            lambda engine=engine: engine.scale(engine(torch.ones(2, 10)))
        )
        found[f"no gradient {dtype}"] = _tried(lambda engine=engine: engine.scale(torch.ones(())))
        returned = engine.backward(loss)
        found[f"returned {dtype}"] = [str(returned.dtype), returned.item()]
    return found


def kinds(deepspeed: Any) -> dict[str, Any]:
    """What engines and optimizers are instances of."""
    engine, model = _engine(deepspeed), nn.Linear(2, 2)
    found = {
        "training": [
            type(engine) is deepspeed.DeepSpeedEngine,
            isinstance(engine, deepspeed.DeepSpeedEngine),
        ]
    }
    config = {"train_micro_batch_size_per_gpu": 1}
    engine = deepspeed.initialize(model=model, config=config)[0]
    found["evaluated"] = [isinstance(engine, deepspeed.DeepSpeedEngine)]
    for of in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        model = nn.Linear(2, 2)
        engine = deepspeed.initialize(
            model=model, optimizer=of(model.parameters(), lr=0.1), config=config
        )[0]
        others = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Optimizer)
        found[of.__name__] = [isinstance(engine.optimizer, other) for other in others]
    return found


def tags(deepspeed: Any) -> dict[str, Any]:
    """Whether a checkpoint is saved under tags that differ by rank, and is there under rank 0's."""
    found: dict[str, Any] = {}
    for validation in (None, "Ignore", "WARN", "fail"):
        with tempfile.TemporaryDirectory() as own:
            folder: list[Any] = [own]
            dist.broadcast_object_list(folder)
            engine = _engine(
                deepspeed,
                **({} if validation is None else {"checkpoint": {"tag_validation": validation}}),
            )
            try:
                saved = engine.save_checkpoint(folder[0], tag=f"of {dist.get_rank()}")
            except (AssertionError, ValueError):
                saved = "refused"
            dist.barrier()
            found[str(validation)] = [saved, Path(folder[0], "of 0").is_dir()]
            dist.barrier()
    return found


def _tried(start: Callable[[], Any]) -> Any:
    try:
        return start()
    except (AssertionError, ValueError):
        return ["refused"]


def reduction(deepspeed: Any) -> dict[str, Any]:
    """Two steps with gradients that are added up over ranks, or averaged."""
    found: dict[str, Any] = {}
    for stage, op in [(0, "mean"), *((stage, "SUM") for stage in range(4)), (0, "max")]:
        more = {"gradient_allreduce_op": op, "gradient_clipping": 0.5 if stage == 1 else 0.0}
        engine = _tried(lambda stage=stage, more=more: _engine(deepspeed, stage=stage, **more))
        if engine != ["refused"]:
            norms = []
            for step in range(2):
                engine.backward(_loss(engine, step))
                engine.step()
                norms.append(engine.get_global_grad_norm() if stage else 0.0)
            engine = [*norms, *_weights(deepspeed, engine)]
        found[f"{op} at {stage}"] = engine
    return found


def autocast(deepspeed: Any) -> dict[str, Any]:
    """Steps under torch.autocast: to float16 with a loss scale, and over weights in bfloat16."""
    found = {}
    for stage in (0, 1, 2, 3):
        for low in (False, True) if stage else (False,):  # DeepSpeed has no masters at stage 0
            section = {"enabled": True, "dtype": "bfloat16" if low else "torch.float16"}
            engine = _engine(deepspeed, stage=stage, low=low, torch_autocast=section)
            seen = []
            for step in range(2):
                loss = _loss(engine, step, autocast=True)
                seen += [
                    engine.scale(loss).item() / loss.item(),
                    engine.backward(loss).item() / loss.item(),
                ]
                engine.step()
            dtype = str(next(engine.module.parameters()).dtype)
            found[f"{section['dtype']} at {stage}"] = [*seen, dtype, *_weights(deepspeed, engine)]
    return found


def dtypes(deepspeed: Any) -> dict[str, Any]:
    """The dtypes of weights and buffers."""
    found = {}
    low: dict[str, Any] = {"bf16": {"enabled": True}}
    for case, more in {
        "none": {},
        "buffers": {"data_types": {"buffer_dtype": "bf16"}},
        "low": low | {"data_types": {"param_dtype": "bf16"}},
        "low buffers": low | {"data_types": {"buffer_dtype": "bf16"}},
        "listed": low
        | {"data_types": {"buffer_dtype": "fp16", "keep_in_fp32_modules": ["2.sc*e"]}},
        "nothing kept": low | {"data_types": {"buffer_dtype": "bf16", "keep_in_fp32_modules": []}},
        "other weights": low | {"data_types": {"param_dtype": "fp16"}},
        "weights alone": {"data_types": {"param_dtype": "bf16"}},
    }.items():
        engine = _tried(lambda more=more: _engine(deepspeed, stage=1, **more))
        tensors = (
            [] if engine == ["refused"] else [*engine.module.parameters(), *engine.module.buffers()]
        )
        found[case] = [str(tensor.dtype) for tensor in tensors] or engine
    return found


def unused(deepspeed: Any) -> dict[str, Any]:
    """A step of a model, some parameters of which are not used."""
    found = {}
    for stage, device in ((0, "none"), (1, "cpu"), (2, "cpu"), (2, "none"), (3, "none")):
        for ignored in (True, False):
            more = {
                "stage": stage,
                "offload_optimizer": {"device": device},
                "ignore_unused_parameters": ignored,
            }
            engine = _engine(
                deepspeed,
                stage=stage,
                spare=True,
                zero_optimization=more,
                zero_force_ds_cpu_optimizer=False,
                gradient_clipping=1.0,
            )
            engine.backward(_loss(engine, 0))
            found[f"{stage} {device} {ignored}"] = _tried(
                lambda engine=engine: [engine.step(), engine.global_steps]
            )
    return found


# By the number of ranks: one rank alone raises DeepSpeed's error of unused parameters.
CALLS: dict[int, tuple[Callable[[Any], Any], ...]] = {
    1: (unused,),
    2: (unmanaged, losses, kinds, tags, reduction, autocast, dtypes),
}

if __name__ == "__main__":
    module = import_module(sys.argv[1])
    module.init_distributed(dist_backend="gloo")
    answers = {call.__name__: call(module) for call in CALLS[dist.get_world_size()]}
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(answers, default=float))
