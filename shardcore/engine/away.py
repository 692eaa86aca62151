"""Weights, states and buffers that leave the device between two phases of training.

Meanwhile the weights are closed: the same tensors without memory, and a read raises an error that
names the call which brings them back. So a caller that no check stops raises, too. Parameters and
their version counters stay, and so do edits that no step has seen.
"""

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from shardcore._native import _C
from shardcore.engine.bucket import Bucket, Managed, allocate, closed_message
from shardcore.engine.engine import WEIGHTS_AWAY, Engine, engine_behind
from shardcore.engine.memory_report import report_now

_Owner = TypeVar("_Owner", Bucket, Managed)


def offload_states(model: nn.Module, *, pin_memory: bool = True) -> int:
    """Move a sharded model off the device until `reload_states`, so that generation or another
    model has the memory. Returns the bytes of device memory that this call freed on this rank.

    Weights, master weights and optimizer states move to host memory: full weights at stages 0 to 2,
    shards at stage 3, and frozen ones. The buffers of gradients and gathered weights are freed.
    Buffers of modules stay. Works for a model without an optimizer, and for an engine of
    `initialize`. To keep the weights on the device, call `optimizer.offload_states()`.

    Until `reload_states(model)` every use raises an error: forward, step, reads and state dicts.
    Then training continues with the same bits. Call it after step() and zero_grad(). Not
    collective. Waits for the device. Do not replay CUDA graphs that were captured before.

    Args:
        model: The model that `shard` returned, or an engine.
        pin_memory: Whether this host memory is page-locked, for faster copies.

    Raises:
        ValueError: The model is not sharded, gradients wait for a step, or the call is inside
            `full_params`.
        MemoryError: Host memory is too small. The weights have not moved; `reload_states` brings
            back what has.
    """
    engine = engine_behind("offload_states", model)
    engine.refuse_held("offload_states")
    before = _device_bytes(engine)
    engine.offload_states(states=True, buffers=True, pin_memory=pin_memory)
    if engine.weights_away is None:
        engine.weights_away = WeightsAway(engine, pin_memory)
        if engine.unsharder is not None:
            engine.unsharder.explain(lambda name, _: f"the weights of {name} {WEIGHTS_AWAY}")
        if engine.device.type == "cuda":
            torch.cuda.empty_cache()
    return before - _device_bytes(engine)


def reload_states(model: nn.Module, *, states: bool = True) -> None:
    """Move a sharded model back to the device, after `offload_states` of the model or of its
    optimizer. Does nothing if nothing was moved.

    Waits for the copies. Not collective. Raises torch's out-of-memory error if the device's free
    memory is too small; call it again once there is more.

    Args:
        model: The model that `shard` returned, or an engine.
        states: Whether master weights and optimizer states move, too. Without them forwards,
            `stream_params`, saves and state dicts work, and step() raises an error.
    """
    engine = engine_behind("reload_states", model)
    if isinstance(engine.weights_away, WeightsAway):
        engine.weights_away.bring_back()
        engine.weights_away = None
        if engine.unsharder is not None:
            engine.unsharder.explain(closed_message)
    if states:
        engine.reload_states()


def _device_bytes(engine: Engine) -> int:
    engine.synchronize()
    return report_now(engine).by_tier.get("device", 0)


class WeightsAway:
    """The weights of a model in host memory, from when this is made until `bring_back`."""

    def __init__(self, engine: Engine, pin_memory: bool) -> None:
        """Move them. MemoryError, with nothing moved, if host memory is too small."""
        if engine.unsharder is not None:
            engine.unsharder.reshard_all()
            engine.unsharder.pool.shrink(0)
        self._device, self._tier = engine.device, _C.HostTier(engine.device, pin_memory)
        self._resident = engine.lifetimes.full_weight_resident
        # weights that options keep in host memory or in files stay there
        self._buckets = {
            bucket: self._to_host(bucket.weight if self._resident else bucket.owned_weight)
            for bucket in engine.buckets
            if bucket.tier is None
        }
        self._frozen = {
            managed: self._to_host(managed.local.detach().reshape(-1))
            for param, managed in engine.constant.items()
            if param not in engine.managed
        }
        self._tier.synchronize()
        engine.store.forget_weights()
        for bucket, on_host in self._buckets.items():
            self._give(bucket, self._closed(bucket.unit or "the root", on_host))
            bucket.weight_tier = "cpu"
        for managed, on_host in self._frozen.items():
            managed.local.data = self._closed(managed.name, on_host).view(managed.local.shape)

    def bring_back(self) -> None:
        """Move all weights to the device. Its out-of-memory error leaves them where they are."""
        buckets, frozen = self._on_device(self._buckets), self._on_device(self._frozen)
        self._tier.synchronize()
        for bucket, weight in buckets.items():
            self._give(bucket, weight)
            bucket.weight_tier = "device"
        for managed, weight in frozen.items():
            managed.local.data = weight.view(managed.local.shape)

    def _to_host(self, flat: torch.Tensor) -> torch.Tensor:
        on_host = self._tier.empty(flat.numel(), flat.dtype)
        self._tier.to_tier(on_host, flat)
        return on_host

    def _on_device(self, on_host: Mapping[_Owner, torch.Tensor]) -> dict[_Owner, torch.Tensor]:
        moved = {}
        for owner, source in on_host.items():
            moved[owner] = allocate(source.numel(), source.dtype, self._device)
            self._tier.from_tier(moved[owner], source)
        return moved

    def _closed(self, name: str, on_host: torch.Tensor) -> torch.Tensor:
        like = torch.empty(0, dtype=on_host.dtype, device=self._device)
        return _C.closed(on_host.shape, like, f"the weights of {name} {WEIGHTS_AWAY}")

    def _give(self, bucket: Bucket, weight: torch.Tensor) -> None:
        """Let the bucket have this memory, which is closed or not, in place of what it had."""
        if not self._resident:
            bucket.owned_weight = weight
            return
        bucket.weight, bucket.owned_weight = weight, bucket.owned_slice(weight)
        for managed in bucket.params:
            managed.local.data = managed.slice_of(weight)
            managed.storage = managed.storage_now()
