"""What an optimizer hands its work to once it is sharded, and how everything finds it.

Invariant: no reference cycle leads through an engine (docs/architecture.md, What belongs to whom). The model's hooks and the
optimizer keep it; it keeps parameters, which refer to it by `EngineRef`.
"""

import weakref
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
    """How a parameter refers to its engine, without keeping it. A copy of the parameter refers to None."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def engine_of(thing: object) -> Any:
    """Return the engine of a sharded model, or of a parameter of it; None where there is none, or none any more."""
    engine = getattr(thing, "_shardcore_engine", None)
    return engine() if isinstance(engine, EngineRef) else engine


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call of a bound method that does not keep the object; once that is gone it does nothing and returns None."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        here = weak()
        return None if here is None else here(*arguments)

    return call


def keep_uncompiled(kind: type, *names: str, reason: str | None = None) -> None:
    """Make torch.compile call these methods of a class as they are, and say the reason. Imports torch._dynamo.

    (Bound methods kept on an object would keep that object in a cycle.)
    """
    for name in names:
        method = vars(kind)[name]
        if not hasattr(method, "_torchdynamo_disable"):
            setattr(kind, name, torch.compiler.disable(method, reason=reason))  # type: ignore[no-untyped-call]


class ShardedEngine(Protocol):
    """What an optimizer hands its work to once its parameters are sharded (``optimizer._engine``).

    The optimizer has checked the arguments; what it found is ``problem``, which the engine raises on every rank.
    ``grad_scale`` is one number (a GradScaler's included) and multiplies; with capturable the device reads it. ``found_inf`` is
    not passed on: an engine looks for non-finite gradients itself, on every rank.
    """

    device: torch.device

    @property
    def grads_in_shards(self) -> bool: ...
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
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def own_grads(
        self,
        op: str,
        params: Sequence[torch.Tensor] | None,
        what: str,
        norm_type: float | None = None,
    ) -> GradShards: ...
