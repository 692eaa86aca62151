"""What multiplies the gradients of a step: one number on the host, or for a capturable step what the device makes it from.

Invariant: a capturable step reads no device memory on the host, so that it can be captured in a CUDA graph. A number (or a
CPU tensor) is fixed in the graph; a tensor on the device is read at every replay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardcore._native import _C
from shardcore.optim.options import device_number, number, on_device

_LARGEST = torch.finfo(torch.float32).max  # gradients are multiplied in float32


class DeviceState:
    """What the steps of one optimizer that the device decides on leave there (csrc/adam/device_step.h).

    words: int64 (6,): the loss scale, its stable steps, its overflows left, 1 / (ranks * scale), the norm, the skipped steps.
    """

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words

    @property
    def skipped(self) -> int:
        """How many steps were skipped; waits for the device."""
        return int(self.words[5].item())


@dataclass(frozen=True, slots=True)
class DeviceScale:
    """What multiplies the gradients of a step that the device decides on. Tensors have one element.

    grad_scale multiplies, loss_scale divides. The step is skipped if found_inf is not 0 or (with max_norm) the norm is not
    finite.
    """

    state: DeviceState
    grad_scale: float | torch.Tensor
    loss_scale: float | torch.Tensor = 1.0
    found_inf: float | torch.Tensor = 0.0
    max_norm: float | None = None

    def squares(self, grads: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the squared norm that `decide` takes, None if nothing is to be clipped."""
        return None if self.max_norm is None else _C.sq_norm(grads).unsqueeze(0)

    def decide(
        self,
        squares: torch.Tensor | None,
        counters: Sequence[torch.Tensor],
        hyper_index: Sequence[int],
        hypers: "Sequence[_C.AdamHyper]",
        ranks: int = 1,
        rule: "_C.LossScaleRule | None" = None,
    ) -> "_C.DeviceScalars":
        """Queue the decision; returns the scalars of each parameter. counters: of their steps, int64 of one element."""
        return _C.device_step(
            self.state.words,
            squares,
            counters,
            hyper_index,
            hypers,
            grad_scale=self.grad_scale,
            loss_scale=self.loss_scale,
            found_inf=self.found_inf,
            max_norm=self.max_norm,
            ranks=ranks,
            rule=rule,
        )


def host_scale(op: str, grad_scale: object, loss_scale: object) -> float:
    """Return what multiplies the gradients, in double: grad_scale, over GradScaler's loss_scale if there is one."""
    scale = 1.0 if grad_scale is None else number(op, "grad_scale", grad_scale)
    divisor = 1.0 if loss_scale is None else number(op, "optimizer.grad_scale", loss_scale)
    if not (math.isfinite(divisor) and divisor != 0.0 and abs(scale / divisor) <= _LARGEST):
        raise ValueError(
            f"{op}: grad_scale has {scale} (over a loss scale of {divisor}); expected finite numbers, and a quotient that "
            "float32 holds"
        )
    return scale / divisor


def device_scale(
    op: str, state: DeviceState, grad_scale: object, loss_scale: object, found_inf: object, max_norm: float | None
) -> DeviceScale:
    """Return the same for a capturable step; waits for nothing. Numbers are checked as host_scale does, tensors cannot be."""
    scale = device_number(op, "grad_scale", 1.0 if grad_scale is None else grad_scale)
    divisor = device_number(op, "optimizer.grad_scale", 1.0 if loss_scale is None else loss_scale)
    host_scale(op, *(1.0 if isinstance(value, torch.Tensor) else value for value in (scale, divisor)))
    found = device_number(op, "optimizer.found_inf", 0.0 if found_inf is None else found_inf)
    return DeviceScale(state, scale, divisor, found, max_norm)


def capturing(device: torch.device) -> bool:
    """Whether work queued now on this device becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_max_norm(op: str, max_norm: object, capturable: bool = False) -> float:
    """Return max_norm as a float; ValueError if it is negative or NaN. Infinity measures without clipping."""
    if capturable and on_device(max_norm):
        raise TypeError(
            f"{op}: max_norm has a tensor on the device; expected a number (a capturable step does not wait for it)"
        )
    x = number(op, "max_norm", max_norm)
    if not x >= 0.0:
        raise ValueError(f"{op}: max_norm has {x}; expected a number of at least 0")
    return x
