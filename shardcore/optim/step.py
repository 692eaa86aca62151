"""From gradients to one kernel call a device, and the bookkeeping after it.

Invariant: a capturable step reads no device memory on the host, so that it can be captured in a CUDA graph. A number (or a
CPU tensor) is fixed in the graph; a tensor on the device is read at every replay.

Invariants: ``collect`` checks every gradient before a step does anything; ``Update`` gathers new states and counts on the
side, and ``commit`` puts them in place only after every kernel call has been accepted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardcore._native import _C
from shardcore.optim.dtensor import Rows, check_tensor_param, local_part
from shardcore.optim.options import (
    MASTERED_DTYPES,
    PARAM_DTYPES,
    CheckedOptions,
    check_options,
    device_number,
    dtype_name,
    hyper_of,
    number,
    on_device,
)
from shardcore.optim.state import Changes, DeviceStepCount, ParamState, StepCount, device_counts, has_memory, new_state
from shardcore.optim.state_format import MASTER_STORAGE, MOMENT_DTYPES, new_moments, zeros

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


Group = Mapping[str, Any]


@dataclass(slots=True)
class Active:
    """The parameters of one group that have a gradient in this step.

    keys: (index over all groups, index of its first element in the whole parameter). owners: the parameters as the groups hold
    them; params and grads are what kernels see, this rank's part of a DTensor.
    """

    group: Group
    keys: list[tuple[int, int]] = field(default_factory=list)
    owners: list[torch.Tensor] = field(default_factory=list)
    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)


def collect(
    op: str,
    groups: Sequence[Group],
    grads: Sequence[torch.Tensor | None] | None,
    device_type: str | None,
    dtensors: Mapping[torch.Tensor, Rows],
) -> tuple[list[Active], list[torch.Tensor]]:
    """Return, by group, the parameters with a gradient (from grads, or from p.grad), and all those without.

    device_type: the only one allowed, or None. dtensors: those of the parameters that are DTensors. A gradient that lies in
    memory in another order than its parameter, or has torch's negative bit, is copied. Raises ValueError or TypeError.
    """
    actives: list[Active] = []
    idle: list[torch.Tensor] = []
    index = -1
    for group in groups:
        active = Active(group)
        for param in group["params"]:
            index += 1
            grad = param.grad if grads is None else grads[index]
            if grad is None:
                idle.append(param)
                continue
            first_element = 0
            active.owners.append(param)
            if dtensors and param in dtensors:
                rows = dtensors[param]
                grad, param, first_element = rows.part(op, f"grads[{index}]", grad), local_part(param), rows.first_element
            # One chain of cheap tests: what is wrong is found out only when something is.
            if (
                not isinstance(grad, torch.Tensor)
                or grad.dtype not in PARAM_DTYPES
                or grad.layout is not torch.strided
                or grad.shape != param.shape
                or grad.device != param.device
            ):
                raise _bad_grad(op, index, param, grad)
            if not (param.is_contiguous() and param.dtype in PARAM_DTYPES):
                check_tensor_param(op, f"params[{index}]", active.owners[-1])
            if device_type is not None and param.device.type != device_type:
                check_device(op, f"params[{index}]", param, device_type)
            active.keys.append((index, first_element))
            active.params.append(param)
            active.grads.append(grad)
        active.grads = _C.dense(active.grads, active.params)
        actives.append(active)
    return actives, idle


def check_grads_list(op: str, groups: Sequence[Group], grads: object) -> None:
    """Raise TypeError or ValueError unless grads is a list with one entry for each parameter."""
    if not isinstance(grads, list | tuple):
        raise TypeError(f"{op}: grads has type {type(grads).__name__}; expected a list with one entry for each parameter")
    expected = sum(len(group["params"]) for group in groups)
    if len(grads) != expected:
        raise ValueError(
            f"{op}: grads has {len(grads)} entries; expected {expected}, one for each parameter (None: no gradient)"
        )


def check_new_params(op: str, groups: Sequence[Group], params: Sequence[object], device_type: str | None) -> None:
    """Refuse parameters that no step could update, and a parameter given twice (two threads would write it at once)."""
    before = [p for group in groups for p in group["params"]]
    known, start = {p for p in before if isinstance(p, torch.Tensor)}, len(before)  # groups may have been edited by hand
    for i, p in enumerate(params, start):
        name = f"params[{i}]"
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"{op}: {name} has type {type(p).__name__}; expected a tensor")
        if device_type is not None and not p.is_meta:
            check_device(op, name, p, device_type)
        check_tensor_param(op, name, p)
        if not p.is_leaf and not p.retains_grad:
            raise ValueError(f"{op}: {name} was computed from other tensors; expected a leaf, as a model's parameters are")
        if p in known:
            raise ValueError(f"{op}: {name} is given twice; expected each parameter once")
        known.add(p)


def check_device(op: str, name: str, param: torch.Tensor, device_type: str) -> None:
    """Raise ValueError unless param is on this kind of device."""
    if param.device.type != device_type:
        hint = "use shardcore.FusedAdam, which takes CUDA parameters" if device_type == "cpu" else "move it first"
        raise ValueError(f"{op}: {name} has device {param.device}; expected {device_type} ({hint})")


def _bad_grad(op: str, index: int, param: torch.Tensor, grad: object) -> Exception:
    """Say what is wrong with a gradient that did not pass."""
    name = f"grads[{index}]"
    if not isinstance(grad, torch.Tensor):
        return TypeError(f"{op}: {name} has type {type(grad).__name__}; expected a tensor or None")
    if grad.layout is not torch.strided:
        return ValueError(f"{op}: {name} has layout {grad.layout}; expected a dense gradient (grad.to_dense(), or SparseAdam)")
    if grad.dtype not in PARAM_DTYPES:
        return TypeError(f"{op}: {name} has dtype {dtype_name(grad.dtype)}; expected float32, bfloat16 or float16")
    if grad.shape != param.shape:
        return ValueError(f"{op}: {name} has shape {tuple(grad.shape)}; expected {tuple(param.shape)}, the parameter's")
    return ValueError(f"{op}: {name} has device {grad.device}; expected {param.device}, the parameter's")


@dataclass(slots=True)
class Call:
    """The lists of one kernel call: the tensors of one device."""

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    exp_avgs: list[torch.Tensor] = field(default_factory=list)
    exp_avg_sqs: list[torch.Tensor] = field(default_factory=list)
    hyper_index: list[int] = field(default_factory=list)
    masters: list[torch.Tensor | None] = field(default_factory=list)
    max_exp_avg_sqs: list[torch.Tensor | None] = field(default_factory=list)
    exp_avg_scales: list[torch.Tensor | None] = field(default_factory=list)
    exp_avg_sq_scales: list[torch.Tensor | None] = field(default_factory=list)
    keys: list[tuple[int, int]] = field(default_factory=list)
    with_masters: bool = False
    with_max: bool = False
    with_scales: bool = False

    def lists(self) -> dict[str, Any]:
        """Return all lists but the gradients, as AdamStepper.step and AdamLists name them."""
        return {
            "params": self.params,
            "exp_avgs": self.exp_avgs,
            "exp_avg_sqs": self.exp_avg_sqs,
            "hyper_index": self.hyper_index,
            "masters": self.masters if self.with_masters else None,
            "max_exp_avg_sqs": self.max_exp_avg_sqs if self.with_max else None,
            "keys": self.keys,
            "exp_avg_scales": self.exp_avg_scales if self.with_scales else None,
            "exp_avg_sq_scales": self.exp_avg_sq_scales if self.with_scales else None,
        }


class Update:
    """One step over the active parameters: built, run, committed, in this order."""

    def __init__(self, op: str, actives: Sequence[Active], states: Mapping[torch.Tensor, Any], on_device: bool) -> None:
        """Gather the lists. Missing states are made but not put in place; ``states`` is only read. on_device: capturable."""
        self._op, self._on_device = op, on_device
        self.calls: dict[torch.device, Call] = {}
        self.sources: list[tuple[Group, ParamState | None]] = []  # what makes each call's scalars; None: the device counts
        self.source_of: list[int] = []  # of each of states, where the device makes scalars for each
        self._new_states: dict[torch.Tensor, ParamState] = {}
        self._new_tensors: list[tuple[ParamState, str, torch.Tensor]] = []
        self.states: list[ParamState] = []
        self._counts: dict[int, StepCount] = {}  # by value: equal steps are one counter
        self.device_counts: list[DeviceStepCount] = []  # of a capturable step: one for each of states
        self._zero = StepCount()
        for active in actives:
            self._add_group(active, states)
        if on_device:
            for device in self.calls:
                self._count_on(device)

    def _count_on(self, device: torch.device) -> None:
        """Take every state's count on the device. Memory made during a capture would be filled anew at each replay."""
        missing = next((state for state in self.states if isinstance(state.count, StepCount)), None)
        changed = missing if missing is not None else next((state for state, _, _ in self._new_tensors), None)
        if changed is not None and capturing(device):
            index = next(i for (i, _), state in zip(self.calls[device].keys, self.states, strict=True) if state is changed)
            raise ValueError(
                f"{self._op}: params[{index}] has a gradient and no state yet, while a CUDA graph is captured; expected a step "
                "with all the gradients of the graph before the capture (at replays a state made now would start again)"
            )
        self.device_counts = device_counts(self.states, device)

    def _add_group(self, active: Active, states: Mapping[torch.Tensor, Any]) -> None:
        group = active.group
        master, amsgrad, state_dtype = group["master"], group["amsgrad"], group["state_dtype"]
        dtypes = MOMENT_DTYPES[state_dtype]
        hyper_of_count: dict[int, int] = {}
        last_count: StepCount | None = None
        hyper = -1
        if self._on_device:
            hyper = self._add_source(group, None)
        call, device = Call(), None
        for key, owner, param, grad in zip(active.keys, active.owners, active.params, active.grads, strict=True):
            if param.device != device:
                device = param.device
                call = self.calls.setdefault(device, Call())
                call.with_masters |= master is not None
                call.with_max |= amsgrad
                call.with_scales |= dtypes.scaled
            state = states.get(owner)
            if type(state) is not ParamState or len(state) < 3:
                state = self._new_states[owner] = self._adopt(key[0], param, state, state_dtype)
            count = state.count
            if not self._on_device and count is not last_count:
                if isinstance(count, DeviceStepCount):  # capturable was switched off
                    count = StepCount(count.value)
                shared = self._counts.setdefault(count.value, count)
                if shared is not state.count:
                    state.count = count = shared
                last_count = count
                if count.value not in hyper_of_count:
                    hyper_of_count[count.value] = self._add_source(group, state)
                hyper = hyper_of_count[count.value]
            self.states.append(state)
            call.keys.append(key)
            call.params.append(param)
            call.grads.append(grad)
            exp_avg = state.moment("exp_avg")
            if getattr(exp_avg, "dtype", None) is not dtypes.exp_avg:
                raise self._other_state(key[0], "exp_avg", exp_avg, dtypes.exp_avg, f"state_dtype={state_dtype!r}")
            call.exp_avgs.append(exp_avg)
            call.exp_avg_sqs.append(state.moment("exp_avg_sq"))
            call.hyper_index.append(len(self.source_of) if self._on_device else hyper)
            if self._on_device:
                self.source_of.append(hyper)
            call.max_exp_avg_sqs.append(self._extra(state, "max_exp_avg_sq", param, None) if amsgrad else None)
            call.exp_avg_scales.append(state.extra("exp_avg_scale"))
            call.exp_avg_sq_scales.append(state.extra("exp_avg_sq_scale"))
            call.masters.append(self._master(key[0], state, param, master))

    def _add_source(self, group: Group, state: ParamState | None) -> int:
        self.sources.append((group, state))
        return len(self.sources) - 1

    def _other_state(self, index: int, key: str, found: object, expected: torch.dtype | None, option: str) -> TypeError:
        has = f"dtype {dtype_name(found.dtype)}" if isinstance(found, torch.Tensor) else f"type {type(found).__name__}"
        wanted = "none" if expected is None else dtype_name(expected)
        return TypeError(
            f"{self._op}: state[params[{index}]].{key} has {has}; expected {wanted} for {option} (it changed after the first "
            "step; use load_state_dict to convert states)"
        )

    def _master(self, index: int, state: ParamState, param: torch.Tensor, kind: str | None) -> torch.Tensor | None:
        """Return the float32 master or the remainder; make it now, from the weights, if the state has none yet."""
        key, dtype = MASTER_STORAGE[kind if param.dtype in MASTERED_DTYPES else None]
        for other in ("master", "remainder"):
            found, expected = state.extra(other), dtype if other == key else None
            if found is not None and getattr(found, "dtype", None) is not expected:
                option = f"a {dtype_name(param.dtype)} parameter with master={kind!r}"
                raise self._other_state(index, other, found, expected, option)
        if key is None or dtype is None:
            return None
        kept = state.extra(key)
        if kept is None and not has_memory(param):
            raise ValueError(
                f"{self._op}: params[{index}] has no memory to make a {key} from; expected some (restore it first)"
            )
        if kind == "fp32":
            return self._extra(state, key, param, param)
        if kept is None:
            kept = zeros(param.shape, dtype, param.device, param)
            self._new_tensors.append((state, key, kept))
        return kept

    def _adopt(self, index: int, param: torch.Tensor, state: Any, state_dtype: str) -> ParamState:
        """Return a ParamState for a parameter that has none yet, or has a plain dict that the user put there."""
        if state:
            missing = [key for key in ("step", "exp_avg", "exp_avg_sq") if key not in state]
            if missing:
                raise ValueError(
                    f"{self._op}: state[params[{index}]] has no {missing[0]!r}; expected step, exp_avg and exp_avg_sq"
                )
            adopted = ParamState(state)
        else:
            adopted = ParamState()
            adopted.count = self._zero
            adopted.update(new_moments(param.shape, state_dtype, partial(zeros, device=param.device, like=param)))
        return adopted

    def _extra(self, state: ParamState, key: str, param: torch.Tensor, source: torch.Tensor | None) -> torch.Tensor:
        """Return a master or a maximum; make it now if the state has none yet."""
        tensor = state.extra(key)
        if tensor is None:
            tensor = new_state(param, source)
            self._new_tensors.append((state, key, tensor))
        return tensor

    def run(self, steppers: dict[torch.device, "_C.AdamStepper"], scale: float | DeviceScale) -> None:
        """Call the kernel once a device, with the stepper kept for that device. A DeviceScale belongs to a capturable step."""
        hypers = [_hyper(group, state, scale) for group, state in self.sources]
        for device, call in self.calls.items():
            scalars: Sequence[_C.AdamHyper] | _C.DeviceScalars = hypers
            if isinstance(scale, DeviceScale):
                counters = [count.counter for count in self.device_counts]
                scalars = scale.decide(scale.squares(call.grads), counters, self.source_of, hypers)
            stepper = steppers.get(device)
            if stepper is None:
                stepper = steppers[device] = _C.AdamStepper()
            stepper.step(**call.lists(), grads=call.grads, hypers=scalars)
            call.grads = []  # they are the user's to free

    def commit(self, states: dict[torch.Tensor, Any], idle: list[torch.Tensor]) -> None:
        """Put new states in place and count the step (a capturable step counts itself). Parameters in idle keep their count."""
        if self._new_states:  # an empty update would count as a change, and no other optimizer could take the short way
            states.update(self._new_states)
        for state, key, tensor in self._new_tensors:
            state[key] = tensor
        for state, counter in zip(self.states, self.device_counts, strict=bool(self.device_counts)):
            if state.count is not counter:
                state.count = counter
        idle_states = [states[param] for param in idle if states.get(param)]
        held = {id(state.count) for state in idle_states if type(state) is ParamState}
        split = {id(count): StepCount(count.value) for count in self._counts.values() if id(count) in held}
        if split:
            for state in self.states:
                if id(state.count) in split:
                    state.count = split[id(state.count)]
        for count in self._counts.values():
            split.get(id(count), count).value += 1


def _hyper(group: Group, state: ParamState | None, scale: float | DeviceScale) -> "_C.AdamHyper":
    if isinstance(scale, DeviceScale) or state is None:
        return hyper_of(group)
    return hyper_of(group, state.count.value + 1, scale)


# The stepper and lists of each call, and its gradients as AdamLists.plain_grads returns them.
Found = Sequence[tuple["_C.AdamStepper", "_C.AdamLists", tuple[torch.Tensor, ...]]]


class Repeat:
    """The lists of a committed step, read once, to be run again while only values change.

    They are good as long as groups hold the same parameters and storage options, no state was put in place or taken away, and
    the same parameters have gradients. Options, learning rates and counts are looked at anew, and so is each tensor's memory.
    """

    def __init__(
        self,
        update: Update,
        steppers: Mapping[torch.device, "_C.AdamStepper"],
        groups: Sequence[Group],
        states: Mapping[torch.Tensor, Any],
        idle: Sequence[torch.Tensor],
    ) -> None:
        """Remember `update`, just committed."""
        self._calls = [
            (steppers[device], _C.AdamLists(**call.lists()), [index for index, _ in call.keys])
            for device, call in update.calls.items()
        ]
        self._states, self._idle, self._changes = states, tuple(idle), Changes.count
        self._groups = list(groups)
        self._params = [list(group["params"]) for group in groups]
        self._kinds = [_kind(group) for group in groups]
        self._checked = [CheckedOptions(group) for group in groups]
        index = {id(group): i for i, group in enumerate(groups)}
        self._sources = [(index[id(group)], None if state is None else state.count) for group, state in update.sources]
        self._counters = [count.counter for count in update.device_counts]
        self._source_of = update.source_of
        counts = [state.count for state in update.states]
        self._counts = list({id(count): count for count in counts if isinstance(count, StepCount)}.values())
        Changes.keep(self)

    def forget(self) -> None:
        """Let go of the tensors, as a state changed: `find` finds nothing any more."""
        self._calls, self._states = [], {}

    def find(
        self,
        op: str,
        groups: Sequence[Group],
        states: Mapping[torch.Tensor, Any],
        given: Sequence[torch.Tensor | None] | None,
    ) -> Found | None:
        """Return the calls of this step with their gradients, or None if something else has to be looked at.

        given: gradients in place of ``p.grad``, one entry for each parameter. Raises ValueError or TypeError for options that
        no step can use; those that hold are not looked at again.
        """
        if self._changes != Changes.count or states is not self._states or not _C.same_objects(groups, self._groups):
            return None
        for i, (group, params) in enumerate(zip(groups, self._params, strict=True)):
            if not self._checked[i].hold(group):
                check_options(op, group, f"param_groups[{i}].")
                if _kind(group) != self._kinds[i]:
                    return None
                self._checked[i] = CheckedOptions(group)
            if not _C.same_objects(group.get("params"), params):
                return None
        if given is not None and sum(grad is None for grad in given) != len(self._idle):
            return None
        found = []
        for stepper, lists, indices in self._calls:
            if given is None:
                grads = lists.plain_grads(self._idle)
            else:
                grads = lists.plain_grads((), [given[index] for index in indices])
            if grads is None:
                return None
            found.append((stepper, lists, grads))
        return found or None

    def run(self, scale: float | DeviceScale, found: Found) -> None:
        """Step with the gradients that were found, and count the step."""
        if isinstance(scale, DeviceScale):
            of_groups = [self._checked[i].hyper(self._groups[i]) for i, _ in self._sources]
            for stepper, lists, grads in found:  # of one device
                scalars = scale.decide(scale.squares(grads), self._counters, self._source_of, of_groups)
                stepper.repeat(lists, grads, scalars)
        else:
            hypers = [
                self._checked[i].hyper(self._groups[i], 1 if count is None else count.value + 1, scale)
                for i, count in self._sources
            ]
            for stepper, lists, grads in found:
                stepper.repeat(lists, grads, hypers)
        for count in self._counts:
            count.value += 1


def _kind(group: Group) -> tuple[Any, ...]:
    """The options of a group that decide which lists a step has."""
    return group["master"], group["state_dtype"], group["amsgrad"], group["stochastic_rounding"], group["capturable"]
