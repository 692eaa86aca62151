"""Loss scaling for float16: how large the scale is, and when it changes.

float16 cannot represent values between 0 and 6e-8, which many gradients have, nor above 65504. So
the loss is multiplied by a scale before backward, and the reduction, which computes in float32,
divides by it. One function updates the scale on the host and on the device
(csrc/core/loss_scale.h). No communication: all ranks update the scale from the same norm. Source:
Micikevicius et al. 2018, section 3.2 (arXiv:1710.03740). Options and their meaning are those that
DeepSpeed documents (https://www.deepspeed.ai/docs/config-json/#fp16-training-options).

All reads of gradients return unscaled values, since the reduction divides. Nothing is added in
float16: pieces are sent in it and summed in float32, as are local micro-steps. At stage 0 `p.grad`
has the weight's dtype, in which small values may read 0; the step uses the float32 gradients.

The scale is a part of `optimizer.state_dict()`, which torch.optim ignores. The helpers of
torch.distributed.checkpoint (`get_optimizer_state_dict`) drop it: after a load the first steps may
then be skipped. `sharded_state_dict(optimizer)` has it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardcore._native import _C
from shardcore.optim.group_options import MASTERED_DTYPES

_LARGEST = 2.0**127  # of the powers of two in float32


@dataclass(frozen=True)
class LossScale:
    """A dynamic loss scale. It starts at 2**initial_power, doubles after steps without an overflow
    and halves after overflows.

    window: the number of steps without an overflow before the scale doubles. It doubles at the next
        step without an overflow, and the count starts again.
    hysteresis: the number of overflows until the scale halves. With 2 the first overflow only skips
        its step; the second and every later overflow halve the scale. The count restarts after the
        scale doubles.
    consecutive_hysteresis: True restarts this count after every step without an overflow.
    minimum: the lower limit of the scale. An overflow at the limit raises an error.
    """

    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive_hysteresis: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for an option that no scale can follow."""
        for name, least in (("initial_power", 0), ("window", 1), ("hysteresis", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"LossScale: {name} has {value!r}; expected a whole number")
            if value < least:
                raise ValueError(f"LossScale: {name} has {value}; expected at least {least}")
        if self.initial_power > 127:
            raise ValueError(
                f"LossScale: initial_power has {self.initial_power}; expected at most 127 (float32 "
                f"ends there)"
            )
        if isinstance(self.minimum, bool) or not isinstance(self.minimum, int | float):
            raise TypeError(f"LossScale: minimum has {self.minimum!r}; expected a number")
        if not 0.0 < self.minimum <= 2.0**self.initial_power:
            raise ValueError(
                f"LossScale: minimum has {self.minimum}; expected more than 0, and at most "
                f"2**initial_power (the first scale)"
            )
        if not isinstance(self.consecutive_hysteresis, bool):
            raise TypeError(
                f"LossScale: consecutive_hysteresis has {self.consecutive_hysteresis!r}; expected "
                f"True or False"
            )


class LossScaler:
    """The loss scale of one sharded model.

    scale: what the loss of the next backward is multiplied by. active: whether losses are scaled at
    all. unscaled: a backward since the gradients were last forgotten ran on a loss that was not
    scaled by `scale`, where it is noticed: `has_losses` is False on ranks whose backwards go on
    from other ranks'. rule: how it moves; None: it does not.
    live, live_unscale: where the device moves it (engine/device_step.py), the scale and 1 / (ranks
    * scale) there, float64 of shape (), ahead of `scale`.
    """

    def __init__(self, options: LossScale | float | None) -> None:
        """Scale dynamically, by a fixed number, or (None, or 1.0: the user does it) not at all."""
        self.options = options if isinstance(options, LossScale) else None
        fixed = 1.0 if options is None or isinstance(options, LossScale) else float(options)
        self.scale = fixed if self.options is None else 2.0**self.options.initial_power
        self.active = self.options is not None or fixed != 1.0
        self.has_losses, self.unscaled = True, False
        self._scaled = False
        self.stable_steps = 0  # since the last overflow
        self.hysteresis_left = 1 if self.options is None else self.options.hysteresis
        self.rule: _C.LossScaleRule | None = None
        if (o := self.options) is not None:
            self.rule = _C.LossScaleRule(
                window=o.window,
                hysteresis=o.hysteresis,
                minimum=o.minimum,
                consecutive_hysteresis=o.consecutive_hysteresis,
            )
        self.live: torch.Tensor | None = None
        self.live_unscale: torch.Tensor | None = None
        self._steps = 0  # steps and loads so far, each of which may have changed the scale

    @property
    def host_scale(self) -> float | None:
        """The scale, or None where only the device knows it."""
        return self.scale if self.live is None else None

    @property
    def compared(self) -> str:
        """What ranks compare of a loaded scale from which the device goes on (later only the
        device knows it).
        """
        return "" if self.live is None else f", loss scale {self.state()}"

    # --- whether backwards are scaled -------------------------------------------------------------

    def unscale(self, ranks: int) -> float | torch.Tensor:
        """Return the factor for sums over `ranks`: a number, or float64 of shape () where the
        device updates the scale.
        """
        return 1.0 / (ranks * self.scale) if self.live_unscale is None else self.live_unscale

    def multiply(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to run backward on, float32 at least; its backward notes whether the
        scale is still the same.
        """
        if not self.active:
            return loss
        loss = loss.float() if loss.dtype in MASTERED_DTYPES else loss
        scale = (
            self.scale if self.live is None else self.live.to(loss.device, loss.dtype, copy=True)
        )
        steps, scaled = self._steps, loss * scale
        if scaled.requires_grad:
            scaled.register_hook(lambda grad: self._note_loss(scale, steps))  # type: ignore[no-untyped-call]
        return scaled

    def _note_loss(self, scale: float | torch.Tensor, steps: int) -> None:
        """Note that a backward started from a loss that was multiplied by `scale`, as it was
        after `steps` steps.
        """
        if self.live is None or not isinstance(scale, torch.Tensor):
            self._scaled = bool(scale == self.scale)
        # torch.equal waits for the device, but seldom runs: a loss is rarely used after a later
        # step
        else:
            self._scaled = steps == self._steps or torch.equal(scale, self.live.to(scale))

    def end_backward(self, any_grad: bool) -> None:
        """Note that a backward ended, and whether it gave any gradient."""
        self.unscaled |= any_grad and self.active and self.has_losses and not self._scaled
        self._scaled = False

    # --- after a step -----------------------------------------------------------------------------

    def end_step(self) -> None:
        """Note that a step was made or skipped, perhaps long before its result is known here."""
        self._steps += 1

    @property
    def state_now(self) -> tuple[float, int, int]:
        """The scale, its stable steps, and the overflows left until it halves."""
        return self.scale, self.stable_steps, self.hysteresis_left

    def after_update(self, state: tuple[float, int, int] | None = None) -> None:
        """Note that a step updated the weights. state: as the device updated it; None: it is
        updated here.
        """
        if self.rule is not None:
            self.scale, self.stable_steps, self.hysteresis_left = state or self.rule.after(
                *self.state_now, False
            )

    def after_overflow(self, state: tuple[float, int, int] | None = None) -> str:
        """Note that a step was skipped; returns what to add to its log line. RuntimeError if the
        scale would fall too low.

        state: as in `after_update`.
        """
        if self.options is None or self.rule is None:
            return f"; the loss scale stays {self.scale:g}" if self.active else ""
        old, waits = self.scale, self.hysteresis_left > 1
        self.scale, self.stable_steps, self.hysteresis_left = state or self.rule.after(
            *self.state_now, True
        )
        if waits:
            return (
                f"; the loss scale stays {self.scale:g} (overflows until it halves: "
                f"{self.hysteresis_left})"
            )
        if old <= self.options.minimum:
            raise RuntimeError(
                f"step: gradients are not finite though the loss scale is at its minimum, "
                f"{self.scale:g}; nothing was updated "
                "on any rank; expected finite gradients there: look for infinity or NaN in the "
                "data, the loss and the "
                "activations (float16 ends at 65504), lower the learning rate or "
                "LossScale(minimum=...), or train with "
                'precision="bf16"'
            )
        return f"; the loss scale goes from {old:g} to {self.scale:g}"

    # --- state ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Return what a state dict keeps: plain numbers, or None if the scale never moves."""
        if self.options is None:
            return None
        return {
            "scale": self.scale,
            "stable_steps": self.stable_steps,
            "hysteresis_left": self.hysteresis_left,
        }

    def check_state(self, op: str, state: object) -> None:
        """Raise TypeError or ValueError unless `load_state` can follow `state`."""
        if state is None or self.options is None:
            return
        if not isinstance(state, Mapping) or set(state) != {
            "scale",
            "stable_steps",
            "hysteresis_left",
        }:
            raise TypeError(
                f'{op}: state_dict["loss_scale"] is {state!r}; expected scale, stable_steps and '
                f"hysteresis_left"
            )
        for key, value in state.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
            ):
                raise TypeError(
                    f'{op}: state_dict["loss_scale"][{key!r}] is {value!r}; expected a finite '
                    f"number"
                )
        if (
            not 0.0 < state["scale"] <= _LARGEST
            or state["stable_steps"] < 0
            or state["hysteresis_left"] < 1
        ):
            raise ValueError(
                f'{op}: state_dict["loss_scale"] is {dict(state)}; expected a scale above 0 and '
                f"counts"
            )

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state` within this scaler's own options. None, or a scale that never
        moves, changes nothing.
        """
        if state is None or self.options is None:
            return
        self.scale = max(float(state["scale"]), self.options.minimum)
        self.stable_steps = int(state["stable_steps"])
        self.hysteresis_left = min(int(state["hysteresis_left"]), self.options.hysteresis)
        self._steps += 1  # losses that were multiplied before have another scale
