"""The interface between optimizers and the sharded engine, and how parameters refer to it.

Invariant: no reference cycle leads through an engine (docs/architecture.md, Ownership). The model's hooks and the
optimizer keep it; it keeps parameters, which refer to it by `EngineRef`.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from shardcore.optim.step import DeviceScale, DeviceState

Gradients = Sequence[torch.Tensor | None]


class GradShards(Protocol):
    """This rank's parts of reduced gradients, to be clipped in place (shardcore.engine.step.OwnGrads)."""

    part: torch.Tensor
    device: torch.device

    def scale(self, coefficient: float) -> None: ...
    def clamp(self, limit: float) -> None: ...


class EngineRef(weakref.ref[Any]):
    """A parameter's weak reference to its engine. A copy of the parameter refers to nothing.

    It is pickled as an empty dict of a kind that torch.load reads with weights_only, which None's type is not.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()


def engine_of(thing: object) -> Any:
    """Return the engine of a sharded model, or of a parameter of it; None if it has none, or if that was freed."""
    engine = getattr(thing, "_shardcore_engine", None)
    return engine() if isinstance(engine, EngineRef) else engine or None


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a bound method that refers to its object weakly; after that is freed it returns None."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        here = weak()
        return None if here is None else here(*arguments)

    return call


def keep_uncompiled(kind: type, *names: str, reason: str | None = None) -> None:
    """Make torch.compile call these methods of a class without tracing them. Imports torch._dynamo.

    reason: what torch.compile's logs show. (A disabled bound method, kept on its object, would be a reference cycle.)
    """
    for name in names:
        method = vars(kind)[name]
        if not hasattr(method, "_torchdynamo_disable"):
            setattr(kind, name, torch.compiler.disable(method, reason=reason))  # type: ignore[no-untyped-call]


class ShardedEngine(Protocol):
    """The engine as optimizers and clipping see it (``optimizer._engine``; shardcore.engine.engine.Engine).

    step: the optimizer has checked the arguments, and ``problems`` has the error it found, if any, for which the engine raises
    on every rank. ``grad_scale`` multiplies and includes a GradScaler's; with capturable the device reads it. ``found_inf`` is
    not passed: the engine looks for non-finite gradients itself, on every rank.
    """

    device: torch.device

    @property
    def grads_in_shards(self) -> bool: ...
    @property
    def last_grad_norm(self) -> float | None: ...
    @property
    def device_state(self) -> DeviceState: ...
    def step(
        self,
        closure: Callable[[], Any] | None,
        grads: Gradients | None,
        grad_scale: float | DeviceScale,
        max_norm: float | None,
        problems: list[Exception],
    ) -> Any: ...
    @property
    def loss_scale(self) -> float: ...
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor: ...
    def synchronize(self) -> None: ...
    def settle(self) -> None: ...
    def zero_grad(self, set_to_none: bool) -> None: ...
    def offload_states(self, states: bool, buffers: bool, pin_memory: bool) -> None: ...
    def reload_states(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def own_grads(
        self,
        op: str,
        params: Sequence[torch.Tensor] | None,
        what: str,
        norm_type: float | None = None,
    ) -> GradShards: ...
