"""FusedAdam and CPUAdam: torch.optim's manners around one call of the kernel for the whole list of tensors.

Invariants: a step checks everything before it writes anything. After shardcore.shard the object stays the same and its
``_engine`` does the work; what is public here then only delegates.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shardcore._native import _C
from shardcore.optim.clip import ShardedGradients, global_norm
from shardcore.optim.dtensor import Rows, export_dtensors, find_rows, grouped, local_part
from shardcore.optim.options import check_capturable, check_group, check_groups
from shardcore.optim.sharded import Gradients, ShardedEngine
from shardcore.optim.state import States
from shardcore.optim.state_dict import (
    adopt_torch_group,
    export_groups,
    export_state,
    import_groups,
    import_states,
    numbers_of,
    other_entries,
    take_masters,
)
from shardcore.optim.step import (
    DeviceScale,
    DeviceState,
    Update,
    capturing,
    check_grads_list,
    check_max_norm,
    check_new_params,
    device_scale,
    host_scale,
)

logger = logging.getLogger("shardcore")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def hooked_step(func: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return what torch.optim puts in place of an optimizer's step: it calls hooks, and names the step to torch.profiler.

    Where there are neither it is `func` alone: torch's takes longer than a repeated step over a few tensors.
    """
    listened = torch.optim.Optimizer.profile_hook_step(func)

    @wraps(func)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        optimizer = args[0]
        assert isinstance(optimizer, torch.optim.Optimizer)
        if (
            torch.compiler.is_compiling()  # as torch has it, and before what torch.compile cannot look into
            or _C.records_functions()
            or optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        ):
            return listened(*args, **kwargs)
        return func(*args, **kwargs)

    return call


class AdamOptimizer(torch.optim.Optimizer):
    """What FusedAdam and CPUAdam share. See FusedAdam for the arguments."""

    # GradScaler's protocol: it leaves gradients alone and sets the attributes grad_scale (divides) and found_inf (skips)
    # for the time of one step. They must not exist as class attributes: GradScaler multiplies with what it finds.
    _step_supports_amp_scaling = True

    # No default: Lightning's Fabric wraps an optimizer in a subclass that looks up what it lacks.
    _engine: ShardedEngine | None
    _device_type: str | None = None  # the only kind of device allowed, or None
    _capture_type = "cuda"  # the kind of device that can be captured
    _repeat: Update | None = None  # the last step, if the next may go the short way
    profile_hook_step = staticmethod(hooked_step)  # torch.optim wraps step in this

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]],
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
        self._device_state: DeviceState | None = None  # of capturable steps
        self._steppers: dict[torch.device, _C.AdamStepper] = {}
        self._dtensors: dict[torch.Tensor, Rows] = {}
        defaults: dict[str, Any] = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adam_w_mode=adam_w_mode)
        defaults |= dict(
            amsgrad=amsgrad, maximize=maximize, bias_correction=bias_correction, capturable=capturable, master=master
        )
        defaults |= dict(state_dtype=state_dtype, stochastic_rounding=stochastic_rounding, seed=seed)
        super().__init__(params, defaults)
        self.state = States()

    @property
    def _op(self) -> str:
        return type(self).__name__

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: {"params": ..., options that differ from the constructor's}. Refused once the optimizer is sharded."""
        if self._engine is not None:
            raise ValueError(
                f"{self._op}: add_param_group came after shard; expected all groups before it (shards are laid out once)"
            )
        where = f"param_groups[{len(self.param_groups)}]."
        if isinstance(param_group, dict):
            adopt_torch_group(self._op, where, param_group)
        super().add_param_group(param_group)
        try:
            check_new_params(self._op, self.param_groups, self._device_type)
            check_group(self._op, param_group, where)
            check_capturable(self._op, self.param_groups, self._capture_type)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if param_group["capturable"] and param_group["params"]:
            self._state_on(param_group["params"][0].device)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; TypeError for `state` once it lies in shards, where a new dict would change nothing."""
        if name == "state":
            if self.__dict__.get("_engine") is not None:
                raise TypeError(
                    "optimizer.state: it was replaced, but states lie in shards; expected optimizer.load_state_dict(), or "
                    "shardcore.load_sharded_state_dict(optimizer, ...)"
                )
            self._repeat = None
        super().__setattr__(name, value)

    def _find_dtensors(self) -> dict[torch.Tensor, Rows]:
        """Return where the parts of those parameters lie that are DTensors now: Accelerate swaps them in after fully_shard."""
        params = (param for group in self.param_groups for param in group["params"])
        self._dtensors = find_rows(self._op, params, self._dtensors)
        return self._dtensors

    def _state_on(self, device: torch.device) -> DeviceState:
        """Return what capturable steps leave on the device."""
        if self._engine is not None:
            return self._engine.device_state
        if self._device_state is None:
            if capturing(device):
                raise ValueError(f"{self._op}: capturable was set after construction; expected a step before the capture")
            self._device_state = DeviceState(torch.zeros(6, dtype=torch.int64, device=device))
        return self._device_state

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped since the start. Where the device decides (capturable; after shard) this waits for it."""
        if self._engine is not None:
            self._engine.settle()
        return self._skipped_so_far()

    def _count_skip(self, count: int = 1) -> int:
        """Count skipped steps, and return how many there were until then."""
        self._skipped += count
        return self._skipped_so_far()

    def _skipped_so_far(self) -> int:
        return self._skipped + (0 if self._device_state is None else self._device_state.skipped)

    @_disable_dynamo  # torch.compile calls it as it is, as torch's own steps (a graph break)
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grads: Gradients | None = None,
        grad_scale: float | torch.Tensor | None = None,
        max_norm: float | None = None,
    ) -> float | None:
        """Update every parameter that has a gradient, in one pass over memory.

        closure: evaluates the model again and returns the loss, which step returns.
        grads: gradients in place of p.grad, one for each parameter in the order of the groups, None for no gradient;
            float32 | bfloat16 | float16, each independent of its parameter's dtype.
        grad_scale: multiplies every gradient, in the same pass.
        max_norm: clips the global norm of the scaled gradients, without rewriting them. A norm that is not finite skips
            the step: nothing is written, no count moves, ``skipped_steps`` grows by one, and it is logged.

        Without max_norm (and GradScaler) NaN goes through to the weights, as in torch. Raises ValueError or TypeError before
        anything is written; after shard on every rank if one refuses its arguments. CUDA work is queued on the current stream.
        max_norm waits for it, unless the optimizer is capturable: then grad_scale may be a tensor on the device, a scale that
        is not finite skips the step too, and a skipped step is not logged.
        """
        capturable = any(group["capturable"] is True for group in self.param_groups[:1])
        limit: float | None = None
        scale: float | DeviceScale = 1.0
        problems: list[Exception] = []
        try:
            limit = None if max_norm is None else check_max_norm(self._op, max_norm, capturable)
            if grads is not None:
                check_grads_list(self._op, self.param_groups, grads)
            scale = self._scale(grad_scale, limit, capturable)
        except (TypeError, ValueError) as error:
            if self._engine is None:
                raise
            problems.append(error)  # raised on every rank
        if self._engine is not None:
            return self._engine.step(closure, grads, scale, limit, problems)  # type: ignore[no-any-return]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = None if self._repeat is None else self._repeat.find(self._op, self.param_groups, self.state, grads)
        if self._repeat is None or found is None:
            with torch.no_grad():
                self._update(grads, scale, limit)
        elif (clipped := self._clipped_scale([grad for some in found for grad in some], {}, scale, limit)) is not None:
            self._repeat.run(clipped, found)  # needs no `no_grad`
        return loss

    def _scale(self, grad_scale: object, max_norm: float | None, capturable: bool) -> float | DeviceScale:
        loss_scale = getattr(self, "grad_scale", None)
        if self._engine is not None:
            device = self._engine.device  # parameters may be on their way
        else:
            device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        if capturable:
            found_inf = getattr(self, "found_inf", None) if self._engine is None else None  # an engine looks by itself
            return device_scale(self._op, self._state_on(device), grad_scale, loss_scale, found_inf, max_norm)
        if capturing(device):
            raise ValueError(f"{self._op}: step runs while a CUDA graph is captured; expected capturable=True for that")
        return host_scale(self._op, grad_scale, loss_scale)

    def _update(self, grads: Gradients | None, scale: float | DeviceScale, max_norm: float | None) -> None:
        """Make a step that looks at every tensor, and keep it to be repeated."""
        self._repeat = None
        check_groups(self._op, self.param_groups, self._capture_type)
        rows = self._find_dtensors()
        update = Update(self._op, self.param_groups, self.state, grads, rows, self._steppers, isinstance(scale, DeviceScale))
        whole, sharded = grouped(update.owners, [grad for some in update.grads for grad in some], rows)
        clipped = self._clipped_scale(whole, sharded, scale, max_norm)
        if clipped is None:
            return
        update.run(clipped, update.grads)
        increment_version([owner for owner in update.owners if owner in rows])  # the kernel has seen their parts alone
        update.commit()
        self._repeat = update

    def _clipped_scale(
        self,
        grads: Sequence[torch.Tensor],
        sharded: ShardedGradients,
        scale: float | DeviceScale,
        max_norm: float | None,
    ) -> float | DeviceScale | None:
        """Return the scale with the clip coefficient in it, or None after counting a skipped step. The device does its own."""
        if isinstance(scale, DeviceScale):
            if sharded and max_norm is not None:
                raise ValueError(
                    f"{self._op}: max_norm has {max_norm} for capturable DTensors that are sharded; expected None (their norm "
                    "needs other ranks: call clip_grad_norm_ before the step)"
                )
            return scale
        norm = None if max_norm is None else global_norm(grads, sharded)  # before any decision of this rank alone
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

    def _skip(self, why: str) -> None:
        logger.warning("%s: step skipped, nothing written: %s (skipped so far: %d)", self._op, why, self._count_skip())

    @property
    def loss_scale(self) -> float:
        """What `scale_loss` multiplies with now; 1.0 where losses are not scaled. The same on every rank.

        On a GPU with all states there reading it waits for the norm of the last step.
        """
        return 1.0 if self._engine is None else self._engine.loss_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to run backward on: `optimizer.scale_loss(loss).backward()`.

        With shardcore.shard(precision="fp16"), or a `loss_scale` for float16 weights, that is loss (float32 at least) *
        loss_scale, by which the reduction divides the gradients again; otherwise, and without shard, loss itself.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"scale_loss: loss has type {type(loss).__name__}; expected a tensor")
        return loss if self._engine is None else self._engine.scale_loss(loss)

    def synchronize(self) -> None:
        """Wait until the last step is complete: it is when `step` returns, but with shardcore.shard(overlap_step=True).

        There, what asks the model, or `param_groups`, for weights waits by itself. References to parameters that were taken
        before the step have the new weights after this call (an average of the weights over such references needs it, one over
        `model.parameters()` does not). On CUDA they do in the order of the current stream. RuntimeError if the step failed.
        """
        if self._engine is not None:
            self._engine.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or set them to zero, as torch.optim does."""
        if self._engine is not None:
            self._engine.zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of torch.optim.Adam and AdamW, which can load it.

        The step tensors are new; the other tensors are the live ones, as in torch, but for 8-bit moments and split
        masters, which are shown as float32 (loading them back is exact).
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._own_state_dict() if self._engine is None else self._engine.state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def _own_state_dict(self) -> dict[str, Any]:
        dtensors = self._find_dtensors()
        states = {
            number: export_dtensors(export_state(state, local_part(param)), dtensors.get(param))
            for param, number in numbers_of(self.param_groups).items()
            if (state := self.state.get(param))
        }
        return {"state": {**states, **other_entries(self.state)}, "param_groups": export_groups(self.param_groups)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class, torch.optim.Adam or torch.optim.AdamW: all of it, or nothing on an error.

        Tensors are copied to the parameters' devices, kept as state_dtype and master say, whatever the parameters' dtype;
        what that loses is said in a UserWarning. With master="split" a loaded master also sets the weights, which are its
        upper half. Raises ValueError or TypeError for other shapes, numbers, keys.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(f"{self._op}: state_dict has type {type(state_dict).__name__}; expected a dict")
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        if self._engine is None:
            self._load_own(state_dict)
        else:
            self._engine.load_state_dict(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_own(self, state_dict: dict[str, Any]) -> None:
        options = import_groups(self._op, self.param_groups, state_dict)
        states, masters = import_states(self._op, self.param_groups, state_dict, self._find_dtensors())
        take_masters(masters)
        for group, new_options in zip(self.param_groups, options, strict=True):
            group.update(new_options)
        self.state = States(states)

    def __getstate__(self) -> dict[str, Any]:
        if self._engine is not None:
            raise TypeError(
                f"{self._op}: this sharded optimizer cannot be copied; expected state_dict() (its state lies on all ranks)"
            )
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_skipped": self._skipped, "_device_state": self._device_state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._engine, self._steppers = None, {}
        self._dtensors = {}
        super().__setstate__(state)


class FusedAdam(AdamOptimizer):
    """Adam and AdamW over CUDA or CPU parameters in one pass over memory; each parameter's device picks the kernel.

    Updated weights have the same bits on every device and instruction set.

    params: tensors, (name, tensor) pairs, or dicts of them with options of their own, as in torch.optim; float32 |
        bfloat16 | float16, dense (contiguous, channels_last, transposed: states have the same strides, and a gradient with
        others is copied); FSDP2's DTensors too (contiguous; Shard(0) and Replicate(); then step(max_norm=) is collective,
        and ``state`` holds this rank's parts, which state_dict() shows as DTensors). Gradients may have another dtype of
        these (``p.grad_dtype``, or ``step(grads=)``).
    lr, betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW (but weight_decay is 0 by default).
    adam_w_mode: True decays weights (AdamW); False adds weight_decay * weight to the gradient (Adam).
    bias_correction: False leaves out the division by 1 - beta**step.
    master: "fp32" keeps a float32 copy of bfloat16 and float16 weights, taken at their first step, and updates that;
        the weights are rounded from it. Weights changed by others after that are overwritten. "split" keeps, for bfloat16
        weights only, the 16 bits that the weight lacks: the same bits as "fp32" in 2 bytes a parameter less. Weights
        changed by others keep their change.
    state_dtype: how exp_avg and exp_avg_sq are kept. "fp32"; "bf16" (2 bytes each, the second rounded stochastically);
        "8bit" (1 byte each, with a float32 scale for 256 elements, rounded stochastically). Reduced moments are keyed by
        seed as stochastic_rounding is, and exclude amsgrad and parameters that are not contiguous. A NaN or infinity in an
        8-bit moment makes its 256 elements NaN (squares overflow from gradients of about 1e20 on: clip, or unscale, before).
    stochastic_rounding, seed: round bfloat16 weights without a master up or down by chance, keyed by (seed, step,
        parameter, element): the same bits everywhere. float32 weights need no rounding; float16 weights, and bfloat16 ones
        that are not contiguous, are refused.
    capturable: for CUDA parameters of one device, in all groups or none: step counts, scales, norm, clipping and the decision
        to skip stay on the device, and step waits for nothing, so it can be captured in a CUDA graph: the same bits as the
        ordinary step. As in torch: make a step with all gradients before the capture (states must exist), keep parameters
        and gradients where the graph found them, and capture again after load_state_dict (it replaces an lr tensor, too) or
        another set of gradients. Each replay reads lr and grad_scale anew if they are tensors on the device (float32 or
        float64; their values are not checked); numbers and other options stay as captured. The optimizer must live as long
        as its graphs. Sharded DTensors take no max_norm then: their norm needs other ranks. For shardcore.shard see there.

    Raises ValueError or TypeError for what cannot work.
    Source: Kingma and Ba 2015, algorithm 1 (arXiv:1412.6980); Loshchilov and Hutter 2019, algorithm 2 (arXiv:1711.05101);
    Reddi et al. 2018, algorithm 2 (arXiv:1904.09237), with its maximum taken before bias correction as torch does.
    """


class CPUAdam(AdamOptimizer):
    """FusedAdam for CPU parameters only: for optimizer states that live in host memory. Refuses CUDA parameters."""

    _device_type = "cpu"
