"""What the optimizers of shard() share: torch.optim's interface, handed to the engine once a model
is sharded.

`Kind` is what the engine knows of an optimizer: its options, its states and their checks. The
engine holds no optimizer, only its kind and its groups.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardcore.optim.group_options import capturing, check_max_norm, host_scale
from shardcore.optim.interface import Gradients, Superseded, engine_of
from shardcore.optim.state_format import StateFormat
from shardcore.optim.tensor_lists import DeviceScale, DeviceState, device_scale
from shardcore.torch_private import disable_dynamo, optimizer_hooks

Group = Mapping[str, Any]


class Kind(Protocol):
    """What the engine has to know about an optimizer.

    on_device: whether the device can decide on a step (engine/device_step.py). name: of its class,
    for messages. read: the options that may be tensors of one element; on a device, a step reads
    them once (options.read_once).
    """

    name: str
    on_device: bool

    @property
    def read(self) -> Collection[str]: ...

    def terms(self, group: Group) -> dict[str, Any]:
        """Return the options that decide the arithmetic of a step; ranks compare them."""

    def fixed(self, group: Group) -> dict[str, Any]:
        """Return the options that decide the states of a group."""

    def check_options(self, op: str, group: Group, where: str = "") -> None:
        """Raise ValueError or TypeError for an option that no step can use."""

    def hypers(self, group: Group) -> Callable[..., Any]:
        """Return a function that makes the update of parameters in their `step`-th step (from 1),
        with gradients multiplied by `grad_scale`; both are passed by name.
        """

    def format_of(self, group: Group, dtype: torch.dtype) -> StateFormat:
        """Return the format of states of weights of `dtype`, by the options of `group`."""

    def export_groups(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Return param_groups as torch.optim writes them."""

    def import_groups(
        self, op: str, groups: Sequence[Group], state_dict: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the options that loading `state_dict` gives to each group; ValueError or
        TypeError for unknown ones.
        """

    def import_state(
        self, op: str, name: str, saved: Any, param: torch.Tensor, state_format: StateFormat
    ) -> tuple[Mapping[str, Any], list[str]]:
        """Return a parameter's state, checked, and descriptions of its values that are lost. Raises
        ValueError or TypeError.
        """


@cache
def refuse_others() -> None:
    """Let optimizers that are made after shard raise when they step the sharded model, from now on
    in this process.

    From stage 1 on such an optimizer finds no p.grad, so it would update nothing, silently. A
    wrapper of the optimizer that shard returned (FairScale's OSS, Lookahead) may have the same
    parameters: at the end of its step the gradients are used.
    """
    register_optimizer_step_post_hook(_refuse_other)


def _refuse_other(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if getattr(optimizer, "_engine", None) is not None:  # the one that shard returned
        return
    for group in optimizer.param_groups:
        # an overlapped step is under way, for which reading "params" would wait
        if not isinstance(group, dict):
            return
        engine = engine_of(next(iter(group["params"]), None))  # the first of a group is enough
        if engine is not None and engine.has_unused_grads:
            raise ValueError(
                f"step: this {type(optimizer).__name__} finds no p.grad: shardcore.shard sharded "
                "its parameters with another optimizer. Call step() of the optimizer returned by "
                "shard"
            )


# of DeepSpeed's OffloadStateTypeEnum
OFFLOADABLE = ("optim_states", "hp_params", "lp_grads", "contiguous_grad_buffer")


class ShardableOptimizer(torch.optim.Optimizer):
    """An optimizer that shard accepts and returns: its public methods delegate to the engine once
    there is one.
    """

    kind: Kind
    # The Engine, or None. No default: Lightning's Fabric wraps an optimizer in a subclass that
    # looks up what it lacks.
    _engine: Any
    _regroup: Callable[
        [Any, Any, BaseException | None], None
    ]  # after shard: lays out states for new groups (engine/regroup.py)
    _skipped: int
    _device_state: DeviceState | None  # of capturable steps
    # GradScaler's protocol: it leaves gradients alone and sets the attributes grad_scale (divides)
    # and found_inf (skips) during one step. They must not be class attributes: GradScaler would
    # multiply a value that it finds there.
    _step_supports_amp_scaling = True

    def __repr__(self) -> str:
        """Return torch's text, or the engine's if `initialize` has replaced this optimizer."""
        engine = self.__dict__.get("_engine")
        return repr(engine) if isinstance(engine, Superseded) else super().__repr__()

    @property
    def _op(self) -> str:
        return type(self).__name__

    @disable_dynamo  # torch.compile calls it as it is, as torch's own steps (a graph break)
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], float] | None = None,
        *,
        grads: Gradients | None = None,
        grad_scale: float | torch.Tensor | None = None,
        max_norm: float | None = None,
    ) -> float | None:
        """Update every parameter that has a gradient, in place, in one pass over memory.

        Args:
            closure: Evaluates the model again and returns the loss, which step returns.
            grads: Gradients used instead of p.grad, one per parameter in the order of the groups,
                None for no gradient; float32 | bfloat16 | float16, each independent of its
                parameter's dtype.
            grad_scale: Multiplies every gradient, in the same pass; a number or a tensor of one
                element.
            max_norm: Clips the global norm of the scaled gradients, without writing the gradients.
                If the norm is not finite, the step is skipped: no weight, state or count changes,
                ``skipped_steps`` grows by one, and a warning is logged.

        Without max_norm (and GradScaler), NaN propagates to the weights, as in torch. Raises
        ValueError or TypeError before anything is written; after shard, on every rank if one rank
        refuses its arguments. CUDA work is queued on the current stream, and max_norm synchronizes
        with it. A capturable optimizer does not synchronize: grad_scale may be a tensor on the
        device, a scale that is not finite skips the step too, and a skipped step is not logged.
        """
        if self._engine is None:
            return self._own_step(closure, grads, grad_scale, max_norm)
        scale: float | DeviceScale = 1.0
        limit: float | None = None
        problems: list[BaseException] = []
        try:
            scale, limit = self._checked(self._engine.device, grad_scale, max_norm)
        except Exception as error:  # of any kind: the other ranks are waiting
            problems.append(error)
        return self._engine.step(closure, grads, scale, limit, problems)  # type: ignore[no-any-return]

    def _own_step(
        self,
        closure: Callable[[], float] | None,
        grads: Gradients | None,
        grad_scale: float | torch.Tensor | None,
        max_norm: float | None,
    ) -> float | None:
        raise NotImplementedError

    def _checked(
        self, device: torch.device, grad_scale: object, max_norm: object
    ) -> tuple[float | DeviceScale, float | None]:
        """Return the scale of gradients on `device`, a GradScaler's included, and max_norm. Raises
        ValueError or TypeError.
        """
        loss_scale = getattr(self, "grad_scale", None)
        capturable = self.kind.on_device and any(
            group["capturable"] is True for group in self.param_groups[:1]
        )
        limit = None if max_norm is None else check_max_norm(self._op, max_norm, capturable)
        if capturable:
            # the engine looks for non-finite gradients itself
            found_inf = None if self._engine is not None else getattr(self, "found_inf", None)
            state = self._state_on(device)
            return device_scale(self._op, state, grad_scale, loss_scale, found_inf, limit), limit
        may_capture = self._engine is None or device.type == "cuda"
        if self.kind.on_device and may_capture and capturing(device):
            raise ValueError(
                f"{self._op}: step runs while a CUDA graph is captured. This needs capturable=True"
            )
        if grad_scale is None and loss_scale is None:
            return 1.0, limit
        return host_scale(self._op, grad_scale, loss_scale), limit

    def _state_on(self, device: torch.device) -> DeviceState:
        """Return the state that capturable steps keep on the device."""
        raise NotImplementedError

    def forget(self) -> None:
        """Drop the update that repeats the last step: there are other states now."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; TypeError for `state` once it is sharded, where a new dict would
        change nothing.
        """
        if name == "state":
            if self.__dict__.get("_engine") is not None:
                raise TypeError(
                    "optimizer.state: states are sharded, so the attribute cannot be replaced. "
                    "Use optimizer.load_state_dict(), or "
                    "shardcore.load_sharded_state_dict(optimizer, ...)"
                )
            self.forget()
        super().__setattr__(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: {"params": ..., options that differ from the constructor's}.

        After `shard`, the call is collective. It accepts parameters of the model that are in no
        group, such as frozen parameters, and creates their masters and states. It also raises the
        errors of shardcore.unfreeze.

        Raises ValueError or TypeError for options and parameters that no step can use.
        """
        if self._engine is None:
            self._add_group(param_group)
            return
        problem: BaseException | None = None
        before = len(self.param_groups)
        try:
            self.synchronize()
            self._add_group(param_group)
            if strange := [p for p in param_group["params"] if engine_of(p) is not self._engine]:
                raise ValueError(
                    f"{self._op}: {len(strange)} parameters given to add_param_group are not "
                    "parameters of the model. After shard, add only parameters of the model given "
                    "to shard"
                )
        except BaseException as error:  # of any kind: the other ranks are waiting
            problem = error
        try:
            self._regroup(self._engine, self, problem)
        except BaseException:
            del self.param_groups[before:]
            raise
        finally:
            problem = None  # else a cycle

    def _add_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)

    @property
    def skipped_steps(self) -> int:
        """The number of skipped steps since the start. `shardcore.load`, and a start from a commit,
        restore it.

        Synchronizes if the device decides on steps (capturable; after shard).
        """
        if self._engine is not None:
            self._engine.settle()
        return self._skipped_so_far()

    @property
    def overflow(self) -> bool:
        """Whether the last sharded step was skipped because its norm was not finite. Accelerate
        reads it. Waits for this norm.
        """
        norm = None if self._engine is None else self._engine.last_grad_norm
        return norm is not None and not math.isfinite(norm)

    def _count_skip(self, count: int = 1) -> int:
        """Count skipped steps, and return how many there were until then."""
        self._skipped += count
        return self._skipped_so_far()

    def _skipped_so_far(self) -> int:
        return self._skipped + (0 if self._device_state is None else self._device_state.skipped)

    @property
    def loss_scale(self) -> float:
        """The current factor of `scale_loss`, the same on every rank; 1.0 without loss scaling.

        If all states are on the GPU, reading it synchronizes with the last step.
        """
        return 1.0 if self._engine is None else self._engine.loss_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for backward: `optimizer.scale_loss(loss).backward()`.

        With shardcore.shard(precision="fp16"), or a `loss_scale` for float16 weights, it returns
        loss * loss_scale in at least float32, and the reduction divides the gradients by
        loss_scale. Otherwise, and without shard, it returns loss itself. Raises TypeError if loss
        is not a tensor.
        """
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"scale_loss: loss is of type {type(loss).__name__}; expected a tensor")
        return loss if self._engine is None else self._engine.scale_loss(loss)

    def synchronize(self) -> None:
        """Wait until the last step is complete. Only with shardcore.shard(overlap_step=True),
        `step` may return before.

        Reading weights through the model or `param_groups` waits without this call. References to
        parameters made before the step contain the new weights only after this call; on CUDA in the
        order of the current stream. For example, an average over such references needs the call, an
        average over `model.parameters()` does not. Raises RuntimeError if the step failed.
        """
        if self._engine is not None:
            self._engine.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or to zero if not set_to_none, as torch.optim does."""
        if self._engine is not None:
            self._engine.zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    def offload_states(
        self,
        include: Collection[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Free device memory between two phases of training: for generation, evaluation, or another
        model. Only after `shard`.

        Adam's states and master weights move from the device to host memory until `reload_states`,
        and the buffers of gradients and gathered weights are freed. Weights stay on the device, so
        forwards without gradients, saves and state dicts work. step() raises an error until then.
        Names, arguments and call are DeepSpeed's. Not collective. Waits for the device. Do not
        replay CUDA graphs that captured a step before.

        Args:
            include: The parts to move or free: "optim_states" or "hp_params" (states and masters,
                together), "lp_grads" or "contiguous_grad_buffer" (the buffers, together). None:
                all.
            device: "cpu".
            pin_memory: Whether this host memory is page-locked, for faster copies.
            non_blocking: Accepted and ignored: the copies are complete when the call returns, so
                that the memory is free then.

        Raises ValueError for other names and devices, for "lp_params" (weights stay), and if the
        buffers still contain gradients. Raises MemoryError, with nothing moved, if host memory is
        too small.
        """
        names = [include] if isinstance(include, str) else include
        chosen = (
            OFFLOADABLE if names is None else [str(getattr(name, "value", name)) for name in names]
        )
        if strange := [name for name in chosen if name not in OFFLOADABLE]:
            hint = (
                " (weights stay; shardcore.offload_states(model) moves them, too)"
                if "lp_params" in strange
                else ""
            )
            raise ValueError(
                f"offload_states: include contains {strange}; expected some of "
                f"{list(OFFLOADABLE)}{hint}"
            )
        if getattr(device, "value", device) != "cpu":
            raise ValueError(f'offload_states: device is {device!r}; expected "cpu"')
        self._sharded("offload_states").offload_states(
            bool({"optim_states", "hp_params"}.intersection(chosen)),
            bool({"lp_grads", "contiguous_grad_buffer"}.intersection(chosen)),
            pin_memory,
        )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the states of `offload_states` back to the device. Does nothing if none were moved.
        Waits for the copies.

        Raises torch's out-of-memory error, with nothing moved, if the device's free memory is too
        small. Not collective.
        """
        self._sharded("reload_states").reload_states()

    def _sharded(self, op: str) -> Any:
        if self._engine is None:
            raise ValueError(
                f"{op}: this {self._op} is not sharded. Use the optimizer returned by "
                "shardcore.shard"
            )
        return self._engine

    def state_dict(self) -> dict[str, Any]:
        """Return states and groups in the form of torch.optim. torch's optimizer can load it. After
        shard: collective.

        Step tensors are new. All other tensors are not copied, as in torch, except 8-bit moments
        and split masters: these are float32 copies, and loading them back is exact.
        """
        for pre_hook in optimizer_hooks(self, "state_dict_pre").values():
            pre_hook(self)
        state_dict = self._own_state_dict() if self._engine is None else self._engine.state_dict()
        for post_hook in optimizer_hooks(self, "state_dict_post").values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def _own_state_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of torch.optim's: all of it, or nothing on an error.

        Tensors are copied to the parameters' devices and stored according to state_dtype and
        master, regardless of the parameters' dtype. A UserWarning names the loss of precision. With
        master="split", a loaded master also sets the weights, which are its upper half. Raises
        ValueError or TypeError for other shapes, numbers of parameters, or keys.
        """
        if not isinstance(state_dict, dict):
            raise TypeError(
                f"{self._op}: state_dict is of type {type(state_dict).__name__}; expected a dict"
            )
        state_dict = state_dict.copy()
        for pre_hook in optimizer_hooks(self, "load_state_dict_pre").values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        if self._engine is None:
            self._load_own(state_dict)
        else:
            self._engine.load_state_dict(state_dict)
        for post_hook in optimizer_hooks(self, "load_state_dict_post").values():
            post_hook(self)

    def _load_own(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        if self._engine is not None:
            raise TypeError(
                f"{self._op}: a sharded optimizer cannot be copied, because its state is on all "
                "ranks. Use state_dict()"
            )
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_skipped": self._skipped, "_device_state": self._device_state}
