"""The engines of bench_offload_train: how each trains a GPT in bfloat16 on one device with parts of
its state on the host.

All start from the same weights (random, and exact in bfloat16), keep float32 masters and moments,
clip to the same norm and take AdamW's step. None ever has the whole model in float32 on the device,
unless that is how it trains.
"""

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import shardcore
from benchmarks.bench_train_step import OPTIONS
from examples.gpt import GPT, PRESETS, next_byte_loss, rotary_angles
from shardcore.estimate import predict

try:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    deepspeed = None

MAX_NORM = 1.0
BF16_BYTES = 2


@dataclass(frozen=True)
class Trainer:
    """A model that trains.

    step: one whole step on tokens and targets; returns the loss, on the device. finish: waits for
    what step() left for later.
    moved: bytes copied to and from host memory so far; None if it does not count. facts: what else
    is worth telling.
    """

    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    finish: Callable[[], None] = lambda: None
    moved: Callable[[], tuple[int, int]] | None = None
    facts: Callable[[], dict[str, object]] = dict


@dataclass(frozen=True)
class Need:
    """Bytes that an engine keeps: beside activations on the device, and in host memory."""

    device: int
    host: int


@dataclass(frozen=True)
class Engine:
    """make: builds the trainer of a preset on a device; need: what that keeps.

    offloads: the CPU takes the step. streams: weights come from host memory for each pass.
    """

    make: Callable[[str, torch.device], Trainer]
    need: Callable[[str], Need]
    offloads: bool = True
    streams: bool = False


# --- models ---------------------------------------------------------------------------------------


class Fill:
    """Gives a module's own parameters their values, which depend only on the module's number
    among those that have any.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._number = device, 0

    def __call__(self, module: nn.Module) -> None:
        self._number += 1
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(b"%d" % self._number))
        for name, param in module.named_parameters(recurse=False):
            values = torch.zeros(param.shape, device=self._device)
            if param.ndim > 1:
                values.normal_(0, 0.02, generator=generator)
            elif isinstance(module, nn.LayerNorm) and name == "weight":
                values.fill_(1.0)
            own = param.to_local() if isinstance(param, DTensor) else param
            own.copy_(values.bfloat16())
        if isinstance(module, GPT):
            module.angles = angles_of(module).to(self._device)


def angles_of(model: GPT) -> torch.Tensor:
    return rotary_angles(model.config.context, model.config.dim // model.config.heads)


def on_meta(preset: str) -> GPT:
    """Build a model without memory."""
    with torch.device("meta"):
        return GPT(PRESETS[preset])


@torch.no_grad()
def fill_all(model: nn.Module, device: torch.device) -> None:
    """Fill every module of a model that has memory; random numbers are drawn on `device`."""
    fill = Fill(device)
    for module in model.modules():
        if (
            next(module.parameters(recurse=False), None) is not None
            or next(module.buffers(recurse=False), None) is not None
        ):
            fill(module)


def plain_model(preset: str, device: torch.device) -> GPT:
    """Build a model of bfloat16 weights on the device."""
    model = on_meta(preset).bfloat16().to_empty(device=device)
    fill_all(model, device)
    return model


@cache
def numels_of(preset: str) -> tuple[int, ...]:
    """Return the elements of each parameter of a preset."""
    return tuple(param.numel() for param in on_meta(preset).parameters())


def numel_of(preset: str) -> int:
    """Count the parameters of a preset."""
    return sum(numels_of(preset))


def pinned(size_bytes: int) -> int:
    """Return what torch takes for so many pinned bytes: a power of two."""
    return 1 << (size_bytes - 1).bit_length()


# --- engines --------------------------------------------------------------------------------------

TIERS: dict[str, dict[str, Any]] = {
    "optimizer": {"stage": 2, "offload": {"optimizer": "cpu"}},
    "gradients": {"stage": 2, "offload": {"optimizer": "cpu", "gradients": "cpu"}},
    "params": {"stage": 3, "offload": {"optimizer": "cpu", "gradients": "cpu", "params": "cpu"}},
}


def last_adam(store: Any) -> dict[str, float]:
    """Return how long CPU Adam of the last step worked, and rested between its first chunk and
    its last.
    """
    events = store._pipeline.events
    spans = [(begin, end) for what, begin, end, _ in events if what == "update"]
    idle = sum(begin - end for (_, end), (begin, _) in pairwise(spans))
    spent = spans[-1][1] - spans[0][0] - idle if spans else 0.0
    return {"chunks": len(spans), "seconds": spent, "idle_seconds": idle}


def shardcore_trainer(preset: str, device: torch.device, options: dict[str, Any]) -> Trainer:
    """Train with shardcore.shard(**options)."""
    model: Any = on_meta(preset)
    adam = shardcore.FusedAdam(model.parameters(), **OPTIONS)
    model, adam = shardcore.shard(
        model, adam, precision="bf16", clip_grad_norm=MAX_NORM, materialize=Fill(device), **options
    )
    copies = getattr(adam._engine.store, "copies", None)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = next_byte_loss(model(tokens), targets)
        loss.backward()
        adam.step()
        adam.zero_grad()
        return loss.detach()

    def facts() -> dict[str, object]:
        found: dict[str, object] = {"kept_bytes": shardcore.memory_report(model).by_tier}
        if copies is not None:
            found |= {"pinned_bytes": copies.bytes_pinned, "pin_refusal": copies.pin_refusal}
            found["last_adam"] = last_adam(adam._engine.store)
        return found

    moved = (
        (lambda: (0, 0))
        if copies is None
        else (lambda: (copies.bytes_to_tier, copies.bytes_from_tier))
    )
    return Trainer(step, adam.synchronize, moved, facts)


def shardcore_engine(options: dict[str, Any]) -> Engine:
    """Return the engine of shardcore.shard(**options)."""

    def need(preset: str) -> Need:
        chosen = {key: value for key, value in options.items() if key != "stage"}
        kept = predict(
            on_meta(preset), None, options["stage"], world_size=1, precision="bf16", **chosen
        ).resting.by_tier
        return Need(kept.get("device", 0), kept.get("cpu", 0))

    place = options.get("offload") or {}
    return Engine(
        lambda preset, device: shardcore_trainer(preset, device, options),
        need,
        bool(place),
        "params" in place,
    )


def deepspeed_version() -> str | None:
    """Return which DeepSpeed is installed, if one is."""
    return None if deepspeed is None else deepspeed.__version__


def deepspeed_trainer(preset: str, device: torch.device, stage: int, batch: int) -> Trainer:
    """Train with ZeRO-Offload, with weights in host memory, too, at stage 3."""
    pinned = {"device": "cpu", "pin_memory": device.type == "cuda"}
    zero: dict[str, object] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "offload_optimizer": pinned,
    }
    if stage == 3:
        zero["offload_param"] = pinned
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": MAX_NORM,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    os.environ.setdefault("LOCAL_RANK", "0")  # it asks for this where no launcher is
    model = plain_model(preset, device)
    adam = DeepSpeedCPUAdam(model.parameters(), **OPTIONS)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    model.angles = angles_of(model).to(device)  # some versions make bfloat16 of them

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = next_byte_loss(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainer(step)


def deepspeed_need(preset: str, stage: int) -> Need:
    """What it keeps as its source reads: float32 master and gradient, bfloat16 weights, flat and
    pinned, and both moments.

    On the device weights and gradients at stage 2, whole units at stage 3, and two buffers of 5e8
    elements.
    """
    numel, units = numel_of(preset), PRESETS[preset].layers + 1
    device = 2 * BF16_BYTES * numel // (1 if stage == 2 else units) + 2 * BF16_BYTES * min(
        numel, 500_000_000
    )
    return Need(device, 2 * pinned(4 * numel) + pinned(BF16_BYTES * numel) + 8 * numel)


def fsdp2_trainer(preset: str, device: torch.device) -> Trainer:
    """Train with torch's fully_shard and its CPUOffloadPolicy: float32 weights, gradients and
    states in host memory.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    model: Any = on_meta(preset)
    for module in [*model.blocks, model]:
        fully_shard(module, reshard_after_forward=module is not model, **policy)
    model.to_empty(device="cpu")
    fill_all(model, device)
    adam = torch.optim.AdamW(model.parameters(), **OPTIONS, fused=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = next_byte_loss(model(tokens), targets)
        loss.backward()
        # Of one rank the local part is all. A norm of DTensors would ask NCCL for a sum of CPU
        # tensors.
        grads = [param.grad.to_local() for param in model.parameters()]
        coefficient = MAX_NORM / (torch.nn.utils.get_total_norm(grads) + 1e-6)
        torch._foreach_mul_(grads, coefficient.clamp(max=1.0))
        adam.step()
        adam.zero_grad()
        return loss.detach()

    return Trainer(step)


def fsdp2_need(preset: str) -> Need:
    """Float32 weights and gradients, pinned, and both moments in host memory; on the device a
    few units, in both dtypes.
    """
    numel = numel_of(preset)
    flat = sum(pinned(4 * of_param) for of_param in numels_of(preset))
    return Need(4 * (4 + BF16_BYTES) * numel // (PRESETS[preset].layers + 1), 2 * flat + 8 * numel)


def engines(batch: int) -> dict[str, Engine]:
    """Return, by name, those that are installed; the most telling ones first, as time may end."""
    ours = {"shardcore 2": shardcore_engine({"stage": 2})}
    for overlap_step in (True, False):
        for name in ("gradients", "params", "optimizer"):
            options = TIERS[name] | {"overlap_step": overlap_step}
            ours[f"shardcore {options['stage']}, {name}{', lazy' * overlap_step}"] = (
                shardcore_engine(options)
            )
    first = ("shardcore 2", "shardcore 2, gradients, lazy", "shardcore 3, params, lazy")
    return {name: ours[name] for name in first} | peers(batch) | ours


def peers(batch: int) -> dict[str, Engine]:
    """Return those of others."""
    found: dict[str, Engine] = {}
    if deepspeed is not None:
        for stage in (2, 3):
            found[f"DeepSpeed {stage}"] = Engine(
                lambda preset, device, stage=stage: deepspeed_trainer(preset, device, stage, batch),
                lambda preset, stage=stage: deepspeed_need(preset, stage),
                streams=stage == 3,
            )
    found["FSDP2"] = Engine(fsdp2_trainer, fsdp2_need, streams=True)
    return found
