"""Muon for matrices, AdamW for the rest, in one optimizer. The orthogonalization is
torch.optim.Muon's.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardcore.optim.base import Group
from shardcore.optim.elementwise import (
    ElementFormat,
    ElementKind,
    ElementStep,
    bare_optimizer,
    plain_step,
)
from shardcore.optim.group_options import MASTERED_DTYPES
from shardcore.optim.state_format import StateFormat, StateTensors

_OF_MUON: dict[str, Any] = {
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "eps": 1e-7,
}
_OF_MUON |= {"ns_steps": 5, "adjust_lr_fn": None}
_OF_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}


class Muon(torch.optim.Optimizer):
    """Muon for weight matrices, AdamW for other parameters. Muon orthogonalizes the momentum by
    Newton-Schulz iterations.

    Args:
        params: Parameter groups as in torch.optim. AdamW updates a group with use_muon=False, which
            accepts AdamW's options (betas, eps, amsgrad). Muon updates all other groups, the
            default. They may contain only matrices, and accept the options of torch.optim.Muon:
            momentum, nesterov, ns_coefficients, eps, ns_steps, and adjust_lr_fn (None, "original"
            or "match_rms_adamw"; the last fits AdamW's lr and weight_decay). Embeddings and the
            output layer usually belong to AdamW.
        lr, weight_decay: Defaults for groups without their own. The decay is decoupled.

    Without shard, Muon runs torch's two optimizers. shardcore.shard keeps momentum in shards. Where
    a rank needs whole matrices, it gathers a unit's momentum in bfloat16. Each rank orthogonalizes
    the matrices that it owns a part of. Raises ValueError if a group of Muon contains a parameter
    other than a matrix, and for options refused by torch's optimizers. Source: Jordan et al. 2024,
    https://kellerjordan.github.io/posts/muon
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor]
        | Iterable[dict[str, Any]]
        | Iterable[tuple[str, torch.Tensor]],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "use_muon": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: see Muon."""
        use_muon = param_group.setdefault("use_muon", True)
        for key, value in (_OF_MUON if use_muon else _OF_ADAM).items():
            param_group.setdefault(key, value)
        super().add_param_group(param_group)
        names = ("lr", "weight_decay", *(_OF_MUON if use_muon else _OF_ADAM))
        try:  # torch's constructor knows what is wrong with options
            cls = torch.optim.Muon if use_muon else torch.optim.AdamW
            cls([torch.zeros(1, 1)], **{name: self.param_groups[-1][name] for name in names})
            _check_iterations(
                "Muon", self.param_groups[-1], f"param_groups[{len(self.param_groups) - 1}]."
            )
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise
        for index, param in enumerate(self.param_groups[-1]["params"]):
            if use_muon and param.ndim != 2:
                del self.param_groups[-1]
                raise ValueError(
                    f"Muon: param_groups[{len(self.param_groups)}].params[{index}] has shape "
                    f"{tuple(param.shape)}; expected a matrix. For AdamW instead, put it in a "
                    'group {"params": ..., "use_muon": False}'
                )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Returns the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            cls = torch.optim.Muon if group["use_muon"] else torch.optim.AdamW
            options = {
                key: value for key, value in group.items() if key not in ("params", "use_muon")
            }
            plain_step(cls)(bare_optimizer(cls, options, group["params"], self.state))
        return loss


@dataclass(frozen=True)
class MuonStep(ElementStep):
    """What moves matrices along gradients that MuonKind.direction made, with `scale` in them."""

    scale: float = 1.0

    def run(
        self,
        targets: list[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[StateTensors],
    ) -> None:
        """See ElementStep."""
        torch._foreach_mul_(targets, 1.0 - self.options["lr"] * self.options["weight_decay"])
        torch._foreach_add_(targets, list(grads), alpha=self.options["lr"])


class MuonKind(ElementKind):
    """See Kind. Elementwise once the gradients of matrices are orthogonalized
    (engine/orthogonalize.py).
    """

    def __init__(self) -> None:
        """Know Muon."""
        super().__init__(
            Muon, option_names=("lr", "weight_decay", "use_muon", *_OF_MUON, *_OF_ADAM)
        )
        self._adam = ElementKind(torch.optim.AdamW)

    def check_options(self, op: str, group: Group, where: str = "") -> None:
        """See Kind."""
        super().check_options(op, group, where)
        _check_iterations(op, group, where)

    def hyper(self, group: Group, step: int, grad_scale: float) -> ElementStep:
        """See ElementKind."""
        if not group["use_muon"]:
            of_adam = super().hyper(group, step, grad_scale)
            return replace(of_adam, kind=self._adam, options=_of_adam(of_adam.options))
        return MuonStep(self, self._options(group), step, 1.0, grad_scale)

    def format_of(self, group: Group, dtype: torch.dtype) -> StateFormat:
        """See Kind."""
        names = (
            ("momentum_buffer",)
            if group["use_muon"]
            else self._adam._states_of(_of_adam(self._options(group)))
        )
        return ElementFormat("fp32" if dtype in MASTERED_DTYPES else None, names=names)

    @staticmethod
    def momentum(options: Group, buffer: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return what is to be orthogonalized, after the buffer took `grad` (both float32, of
        any elements of matrices).
        """
        buffer.lerp_(grad, 1.0 - options["momentum"])
        return grad.lerp(buffer, options["momentum"]) if options["nesterov"] else buffer

    @staticmethod
    def direction(options: Group, momentum: torch.Tensor) -> torch.Tensor:
        """Return the way that a matrix moves for a learning rate of 1: float32, of the matrix's
        shape.
        """
        move = torch.zeros_like(momentum, dtype=torch.float32)
        move.grad = momentum.float()
        names = ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
        defaults = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
        buffer = {move: {"momentum_buffer": torch.zeros_like(move)}}
        cls = torch.optim.Muon
        plain_step(cls)(
            bare_optimizer(cls, defaults | {name: options[name] for name in names}, [move], buffer)
        )
        move.grad = None
        return move


def _check_iterations(op: str, group: Group, where: str) -> None:
    """Raise ValueError for what torch's Muon refuses in the midst of a step, or never."""
    if not group["use_muon"]:
        return
    coefficients, steps = group["ns_coefficients"], group["ns_steps"]
    if (
        not isinstance(coefficients, tuple | list)
        or len(coefficients) != 3
        or not all(
            isinstance(value, int | float) and math.isfinite(value) for value in coefficients
        )
    ):
        raise ValueError(
            f"{op}: {where}ns_coefficients is {coefficients!r}; expected three finite numbers"
        )
    if not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(
            f"{op}: {where}ns_steps is {steps!r}; expected a whole number from 0 to 99"
        )


def _of_adam(options: Group) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in ("params", "use_muon")}
