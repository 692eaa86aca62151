"""FusedAdam and CPUAdam: the interface of torch.optim around one kernel call per device for all
tensors.

Invariants: a step checks everything before it writes anything. After shardcore.shard the object is
the same and its ``_engine`` does the work; the public methods then only delegate.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from shardcore._native import _C
from shardcore.optim.base import Group, ShardableOptimizer
from shardcore.optim.clip import ShardedGradients, global_norm
from shardcore.optim.dtensor import Rows, export_dtensors, find_rows, grouped, local_part
from shardcore.optim.float8 import is_float8_weight
from shardcore.optim.group_options import (
    READ,
    capturing,
    check_capturable,
    check_group,
    check_groups,
    check_options,
    hypers_of,
    lr_on_device,
    read_once,
)
from shardcore.optim.interface import Gradients
from shardcore.optim.state import ParamState
from shardcore.optim.state_dict import (
    adopt_torch_group,
    export_groups,
    export_state,
    import_groups,
    import_state,
    import_states,
    numbers_of,
    other_entries,
    take_masters,
)
from shardcore.optim.state_format import StateFormat, format_of
from shardcore.optim.tensor_lists import (
    DeviceScale,
    DeviceState,
    Update,
    check_grads_list,
    check_new_params,
)

logger = logging.getLogger("shardcore")

# Options of a group that decide the arithmetic of a step.
_TERMS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "adam_w_mode",
    "maximize",
    "bias_correction",
    "seed",
)
# Options that decide the states of a group.
_FIXED = ("amsgrad", "master", "state_dtype", "stochastic_rounding", "capturable")


class AdamKind:
    """See Kind."""

    name, on_device, read = "Adam", True, READ
    check_options = staticmethod(check_options)
    hypers = staticmethod(hypers_of)
    format_of = staticmethod(format_of)
    export_groups = staticmethod(export_groups)
    import_groups = staticmethod(import_groups)

    @staticmethod
    def terms(group: Group) -> dict[str, Any]:
        """See Kind."""
        return {
            key: "on the device" if key == "lr" and lr_on_device(group) else group[key]
            for key in _TERMS
        }

    @staticmethod
    def fixed(group: Group) -> dict[str, Any]:
        """See Kind."""
        return {key: group[key] for key in _FIXED}

    @staticmethod
    def import_state(
        op: str, name: str, saved: Any, param: torch.Tensor, state_format: StateFormat
    ) -> tuple[Mapping[str, Any], list[str]]:
        """See Kind."""
        return import_state(op, name, saved, param, state_format.master, state_format.state_dtype)


class AdamOptimizer(ShardableOptimizer):
    """What FusedAdam and CPUAdam share. See FusedAdam for the arguments."""

    kind = AdamKind()
    _device_type: str | None = None  # the only kind of device allowed, or None
    _capture_type = "cuda"  # the kind of device that can be captured
    # the last step, which the next may run again (tensor_lists.py, Note [Repeated steps])
    _repeat: Update | None = None

    def __init__(
        self,
        params: Iterable[torch.Tensor]
        | Iterable[dict[str, Any]]
        | Iterable[tuple[str, torch.Tensor]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        amsgrad: bool = False,
        maximize: bool = False,
        bias_correction: bool = True,
        capturable: bool = False,
        master: str | None = None,
        state_dtype: str = "fp32",
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        self._engine = None
        self._skipped = 0
        self._device_state = None
        self._steppers: dict[torch.device, _C.AdamStepper] = {}
        self._dtensors: dict[torch.Tensor, Rows] = {}
        defaults: dict[str, Any] = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            adam_w_mode=adam_w_mode,
            amsgrad=amsgrad,
            maximize=maximize,
            bias_correction=bias_correction,
            capturable=capturable,
            master=master,
            state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
        )
        if isinstance(params, nn.Module):
            raise TypeError(
                f"{self._op}: params is a {type(params).__name__}; pass model.parameters()"
            )
        super().__init__(params, defaults)
        self.state = defaultdict(ParamState)

    def forget(self) -> None:
        """Drop the cached update of the last step. Called after states changed."""
        self._repeat = None

    def _add_group(self, param_group: dict[str, Any]) -> None:
        where = f"param_groups[{len(self.param_groups)}]."
        if isinstance(param_group, dict):
            adopt_torch_group(self._op, where, param_group)
        super()._add_group(param_group)
        try:
            check_new_params(self._op, self.param_groups, self._device_type)
            check_group(self._op, param_group, where)
            check_capturable(self._op, self.param_groups, self._capture_type)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if param_group["capturable"] and param_group["params"]:
            self._state_on(param_group["params"][0].device)

    def _find_dtensors(self) -> dict[torch.Tensor, Rows]:
        """Return the rows of this rank for the parameters that are DTensors now: Accelerate
        swaps them in after fully_shard.
        """
        params = (param for group in self.param_groups for param in group["params"])
        self._dtensors = find_rows(self._op, params, self._dtensors)
        return self._dtensors

    def _state_on(self, device: torch.device) -> DeviceState:
        """See ShardableOptimizer."""
        if self._engine is not None:
            return self._engine.device_state  # type: ignore[no-any-return]
        if self._device_state is None:
            if capturing(device):
                raise ValueError(
                    f"{self._op}: capturable was set after construction. Run a step before the "
                    "capture"
                )
            self._device_state = DeviceState(torch.zeros(6, dtype=torch.int64, device=device))
        return self._device_state

    def _own_step(
        self,
        closure: Callable[[], float] | None,
        grads: Gradients | None,
        grad_scale: float | torch.Tensor | None,
        max_norm: float | None,
    ) -> float | None:
        device = next(
            (p.device for group in self.param_groups for p in group["params"]),
            torch.device("cpu"),
        )
        scale, limit = self._checked(device, grad_scale, max_norm)
        if grads is not None:
            check_grads_list(self._op, self.param_groups, grads)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        calls = (
            None
            if self._repeat is None
            else self._repeat.find(self._op, self.param_groups, self.state, grads)
        )
        if self._repeat is None or calls is None:
            with torch.no_grad():
                self._update(grads, scale, limit)
            return loss
        normed = [] if limit is None else [grad for call in calls for grad in call.grads]
        clipped = self._clipped_scale(normed, {}, scale, limit)
        if clipped is not None:
            self._repeat.run(clipped, calls)  # needs no `no_grad`
        return loss

    def _update(
        self, grads: Gradients | None, scale: float | DeviceScale, max_norm: float | None
    ) -> None:
        """Run a step that looks at every tensor, and keep it for the next."""
        self._repeat = None
        read = read_once(self.param_groups, READ)
        check_groups(self._op, read, self._capture_type)
        rows = self._find_dtensors()
        on_device = isinstance(scale, DeviceScale)
        update = Update(
            self._op, self.param_groups, read, self.state, grads, rows, self._steppers, on_device
        )
        full, sharded = grouped(
            update.owners, [grad for call in update.calls for grad in call.grads], rows
        )
        clipped = self._clipped_scale(full, sharded, scale, max_norm)
        if clipped is None:
            return
        update.run(clipped, update.calls)
        # the kernel counted a version of the tensors inside only
        wrappers = [owner for owner in update.owners if owner in rows or is_float8_weight(owner)]
        increment_version(wrappers)
        update.commit()
        # the local parts of DTensors may change, so each step looks them up
        self._repeat = None if rows or wrappers else update

    def _clipped_scale(
        self,
        grads: Sequence[torch.Tensor],
        sharded: ShardedGradients,
        scale: float | DeviceScale,
        max_norm: float | None,
    ) -> float | DeviceScale | None:
        """Return the scale with the clip coefficient in it, or None after counting a skipped
        step. The device does its own.
        """
        if isinstance(scale, DeviceScale):
            if sharded and max_norm is not None:
                raise ValueError(
                    f"{self._op}: max_norm is {max_norm} for capturable sharded DTensors; expected "
                    "None, because their norm needs other ranks. Call clip_grad_norm_ before the "
                    "step"
                )
            return scale
        # before any decision of this rank alone
        norm = None if max_norm is None else global_norm(grads, sharded)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) != 0.0:
            self._skip("GradScaler found a gradient that is not finite")
            return None
        if max_norm is None or norm is None:
            return scale
        clipped = _C.clipped_scale(scale, norm, max_norm)
        if clipped is None:
            self._skip(f"the gradients' norm is {norm}")
        return clipped

    def _skip(self, reason: str) -> None:
        logger.warning(
            "%s: step skipped, nothing written: %s (skipped so far: %d)",
            self._op,
            reason,
            self._count_skip(),
        )

    def _own_state_dict(self) -> dict[str, Any]:
        dtensors = self._find_dtensors()
        states = {
            number: export_dtensors(export_state(state, local_part(param)), dtensors.get(param))
            for param, number in numbers_of(self.param_groups).items()
            if (state := self.state.get(param))
        }
        return {
            "state": {**states, **other_entries(self.state)},
            "param_groups": export_groups(self.param_groups),
        }

    def _load_own(self, state_dict: dict[str, Any]) -> None:
        options = import_groups(self._op, self.param_groups, state_dict)
        states, masters = import_states(
            self._op, self.param_groups, state_dict, self._find_dtensors()
        )
        take_masters(masters)
        for group, new_options in zip(self.param_groups, options, strict=True):
            group.update(new_options)
        self.state = defaultdict(ParamState, states)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._engine, self._steppers = None, {}
        self._dtensors = {}
        super().__setstate__(state)


class FusedAdam(AdamOptimizer):
    """Adam and AdamW for CUDA and CPU parameters, in one pass over memory. Each parameter's device
    selects the kernel.

    Updated weights are bit for bit the same on every device and instruction set.

    Args:
        params: Tensors, (name, tensor) pairs, or dicts of parameters with their own options, as in
            torch.optim. Parameters are float32 | bfloat16 | float16, of any shape, and dense
            (contiguous, channels_last, transposed). States use the parameter's strides; a gradient
            with other strides is copied. A gradient may use another of these dtypes than its
            parameter (``p.grad_dtype``, or ``step(grads=)``). FSDP2's DTensors are accepted if they
            are contiguous and their placements are Shard(0) and Replicate(). With them,
            step(max_norm=) is collective, ``state`` contains this rank's local parts, and
            state_dict() returns DTensors. torchao's weights for a float8 all-gather are accepted,
            plain and inside DTensors; the step updates the float32 tensor inside.
        lr, betas, eps, weight_decay, amsgrad, maximize: As in torch.optim.AdamW, but weight_decay
            defaults to 0.
        adam_w_mode: True decays weights (AdamW). False adds weight_decay * weight to the gradient
            (Adam).
        bias_correction: False omits the division by 1 - beta**step.
        master: "fp32" keeps a float32 copy of bfloat16 and float16 weights, made at their first
            step. Steps update the copy and round the weights from it, so they overwrite edits of
            the weights by other code. "split" keeps the 16 bits missing in the weight, for bfloat16
            weights only. The results are bit for bit those of "fp32", with 2 bytes less per
            parameter, and edits of the weights by other code are kept.
        state_dtype: The storage of exp_avg and exp_avg_sq: "fp32"; "bf16" (2 bytes per element
            each, exp_avg_sq rounded stochastically); "8bit" (1 byte per element each and a float32
            scale per 256 elements, rounded stochastically). The random bits are keyed as for
            stochastic_rounding. "bf16" and "8bit" do not support amsgrad and non-contiguous
            parameters. A NaN or infinity in an 8-bit moment makes its 256 elements NaN. Squares
            overflow for gradients from about 1e20: clip or unscale the gradients first.
        stochastic_rounding, seed: Round bfloat16 weights without a master up or down at random,
            keyed by (seed, step, parameter, element), so the bits are the same everywhere. float32
            weights need no rounding. float16 weights and non-contiguous bfloat16 weights are not
            supported.
        capturable: Let a CUDA graph capture steps, for CUDA parameters of one device, in all groups
            or none. Step counts, scales, norm, clipping and the decision to skip stay on the
            device, and step does not synchronize; the results are bit for bit those of the ordinary
            step. As in torch: run a step with all gradients before the capture (states must exist),
            keep parameters and gradients at their addresses, and capture again after
            load_state_dict (it also replaces an lr tensor) or for another set of gradients. Each
            replay reads lr and grad_scale if they are tensors on the device (float32 or float64;
            their values are not checked). Numbers and other options are fixed at capture. The
            optimizer must live as long as its graphs. Sharded DTensors do not support max_norm
            then, because their norm needs other ranks. For sharded optimizers, see capturable in
            shardcore.shard.

    Raises ValueError or TypeError for options and parameters that no step can use, and
    torch.optim's errors for `params` itself. Source: Kingma and Ba 2015, algorithm 1
    (arXiv:1412.6980); Loshchilov and Hutter 2019, algorithm 2 (arXiv:1711.05101); Reddi et al.
    2018, algorithm 2 (arXiv:1904.09237), with its maximum taken before bias correction as torch
    does.
    """


class CPUAdam(AdamOptimizer):
    """FusedAdam for CPU parameters only, for optimizer states in host memory. Raises ValueError for
    CUDA parameters.
    """

    _device_type = "cpu"
