"""What an optimizer hands its work to once it is sharded."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Gradients = Sequence[torch.Tensor | None]


class Engine(Protocol):
    """What an optimizer hands its work to once its parameters are sharded (``optimizer._engine``).

    The optimizer has checked the arguments; ``grad_scale`` is one number (a GradScaler's included) and multiplies.
    ``found_inf`` is not passed on: an engine looks for non-finite gradients itself, on every rank.
    """

    def step(
        self, closure: Callable[[], Any] | None, grads: Gradients | None, grad_scale: float, max_norm: float | None
    ) -> Any: ...
    def zero_grad(self, set_to_none: bool) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
