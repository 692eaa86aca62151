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


@dataclass(frozen=True, slots=True)
class DeviceScale:
    """grad_scale multiplies, loss_scale divides. Tensors have one element; `skipped` is int64.

    The step is skipped, and `skipped` counts it, if found_inf is not 0 or (with max_norm) the norm is not finite.
    """

    grad_scale: float | torch.Tensor
    loss_scale: float | torch.Tensor
    found_inf: float | torch.Tensor
    max_norm: float | None
    skipped: torch.Tensor

    def step(self, counters: Sequence[torch.Tensor]) -> "_C.DeviceStep":
        """Return what the kernel reads and counts; counters: of each parameter's steps, int64 of one element."""
        return _C.DeviceStep(
            counters,
            self.skipped,
            grad_scale=self.grad_scale,
            loss_scale=self.loss_scale,
            found_inf=self.found_inf,
            max_norm=self.max_norm,
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
    op: str, grad_scale: object, loss_scale: object, found_inf: object, max_norm: float | None, skipped: torch.Tensor
) -> DeviceScale:
    """Return the same for a capturable step; waits for nothing. Numbers are checked as host_scale does, tensors cannot be."""
    scale = device_number(op, "grad_scale", 1.0 if grad_scale is None else grad_scale)
    divisor = device_number(op, "optimizer.grad_scale", 1.0 if loss_scale is None else loss_scale)
    host_scale(op, *(1.0 if isinstance(value, torch.Tensor) else value for value in (scale, divisor)))
    found = device_number(op, "optimizer.found_inf", 0.0 if found_inf is None else found_inf)
    return DeviceScale(scale, divisor, found, max_norm, skipped)


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
