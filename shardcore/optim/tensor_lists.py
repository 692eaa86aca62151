"""From gradients to one kernel call per device, and the bookkeeping after it.

Invariants: an ``Update`` checks every gradient before a step does anything, makes new states and
counts on the side, and puts them in place only after every kernel call was accepted. A capturable
step reads no device memory on the host, so that a CUDA graph can capture it: a number (or a CPU
tensor) is fixed in the graph, a tensor on the device is read at every replay.
"""

import operator
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from shardcore._native import _C
from shardcore.optim.dtensor import Rows, check_tensor_param, local_part
from shardcore.optim.float8 import plain_part
from shardcore.optim.group_options import (
    MASTERED_DTYPES,
    PARAM_DTYPES,
    READ,
    capturing,
    check_options,
    device_number,
    dtype_name,
    host_scale,
    hyper_of,
    read_once,
)
from shardcore.optim.state import (
    DeviceStepCount,
    ParamState,
    StepCount,
    device_counts,
    has_memory,
    new_state,
)
from shardcore.optim.state_format import MASTER_STORAGE, MOMENT_DTYPES, new_moments, zeros


class DeviceState:
    """The values that capturable and sharded steps of one optimizer keep on the device
    (csrc/adam/device_step.h).

    words: int64 (6,): the loss scale, its stable steps, its overflows left, 1 / (ranks * scale),
    the norm, the skipped steps.
    """

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words

    @property
    def skipped(self) -> int:
        """How many steps were skipped; synchronizes with the device."""
        return int(self.words[5].item())


@dataclass(frozen=True, slots=True)
class DeviceScale:
    """The scale of the gradients of a step that the device decides on. Tensors have one element.

    grad_scale multiplies, loss_scale divides. The step is skipped if found_inf is not 0 or (with
    max_norm) the norm is not finite.
    """

    state: DeviceState
    grad_scale: float | torch.Tensor
    loss_scale: float | torch.Tensor = 1.0
    found_inf: float | torch.Tensor = 0.0
    max_norm: float | None = None

    def squares(self, grads: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the squared norm for `decide`; None without clipping."""
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
        """Queue the decision; returns the scalars of each parameter. counters: of their steps,
        int64 of one element.
        """
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


def device_scale(
    op: str,
    state: DeviceState,
    grad_scale: object,
    loss_scale: object,
    found_inf: object,
    max_norm: float | None,
) -> DeviceScale:
    """Return the scale of a capturable step, without synchronizing. Numbers are checked as in
    host_scale, tensors are not.
    """
    scale = device_number(op, "grad_scale", 1.0 if grad_scale is None else grad_scale)
    divisor = device_number(op, "optimizer.grad_scale", 1.0 if loss_scale is None else loss_scale)
    host_scale(
        op, *(1.0 if isinstance(value, torch.Tensor) else value for value in (scale, divisor))
    )
    found_inf = device_number(op, "optimizer.found_inf", 0.0 if found_inf is None else found_inf)
    return DeviceScale(state, scale, divisor, found_inf, max_norm)


Group = Mapping[str, Any]
# Options of a group that decide the lists of a step.
_FORMAT = operator.itemgetter(
    "master", "state_dtype", "amsgrad", "stochastic_rounding", "capturable"
)


def check_grads_list(op: str, groups: Sequence[Group], grads: object) -> None:
    """Raise TypeError or ValueError unless grads is a list with one entry for each parameter."""
    if not isinstance(grads, list | tuple):
        raise TypeError(
            f"{op}: grads is of type {type(grads).__name__}; expected a list with one entry for "
            "each parameter"
        )
    expected = sum(len(group["params"]) for group in groups)
    if len(grads) != expected:
        raise ValueError(
            f"{op}: grads contains {len(grads)} entries; expected {expected}, one for each "
            "parameter (None: no gradient)"
        )


def check_new_params(op: str, groups: Sequence[Group], device_type: str | None) -> None:
    """Raise for a parameter of the last group that no step can update, or that is listed twice
    (two threads would write it).
    """
    *earlier_groups, group = groups
    start, seen = sum(len(earlier["params"]) for earlier in earlier_groups), set()
    for i, p in enumerate(group["params"], start):
        if device_type is not None and not p.is_meta and p.device.type != device_type:
            raise ValueError(
                f"{op}: params[{i}] is on device {p.device}; expected {device_type}. For CUDA "
                "parameters use shardcore.FusedAdam"
            )
        # shard takes slices that a step of the optimizer does not
        check_tensor_param(op, f"params[{i}]", p, rows=False)
        if p in seen:
            raise ValueError(f"{op}: params[{i}] is given twice; expected each parameter once")
        seen.add(p)


def bad_grad(op: str, index: int, param: torch.Tensor, grad: object) -> Exception:
    """Return the error for a gradient that a step cannot use."""
    name = f"grads[{index}]"
    if not isinstance(grad, torch.Tensor):
        return TypeError(
            f"{op}: {name} is of type {type(grad).__name__}; expected a tensor or None"
        )
    if grad.layout is not torch.strided:
        return ValueError(
            f"{op}: {name} has layout {grad.layout}; expected a dense gradient (grad.to_dense(), "
            "or SparseAdam)"
        )
    if grad.dtype not in PARAM_DTYPES:
        return TypeError(
            f"{op}: {name} has dtype {dtype_name(grad.dtype)}; expected float32, bfloat16 or "
            "float16"
        )
    if grad.shape != param.shape:
        return ValueError(
            f"{op}: {name} has shape {tuple(grad.shape)}; expected {tuple(param.shape)}, as its "
            "parameter"
        )
    return ValueError(
        f"{op}: {name} is on device {grad.device}; expected {param.device}, as its parameter"
    )


class Call(NamedTuple):
    """A kernel call, which updates the parameters of one device."""

    stepper: "_C.AdamStepper"
    lists: "_C.AdamLists"
    grads: Sequence[torch.Tensor]  # as the kernel reads them
    indices: Sequence[int]  # of the parameters, among those of all groups


class Update:
    """One step over all parameters with a gradient: built, run and committed, then run again while
    only values change.

    Note [Repeated steps]: looking at each tensor from Python takes twenty times as long as the rest
    of the host's work. So a committed update can run again with other gradients. Its groups must
    have the same parameters and storage options, its states the same entries, dtypes and counts,
    and the same parameters must have gradients. Each step reads options, learning rates, counts and
    the tensors of ``optimizer.state``, and the kernel's binding checks each tensor's memory.
    Between steps the update holds no state: states that leave the device free their memory.
    """

    def __init__(
        self,
        op: str,
        groups: Sequence[Group],
        read: Sequence[Group],
        states: MutableMapping[torch.Tensor, Any],
        grads: Sequence[torch.Tensor | None] | None,
        rows: Mapping[torch.Tensor, Rows],
        steppers: dict[torch.device, "_C.AdamStepper"],
        on_device: bool,
    ) -> None:
        """Check the gradients and build the lists of the kernel calls; nothing is changed.

        read: groups as options.read_once returns them, after check_groups. grads: in place of
        ``p.grad``, one for each parameter of the groups. rows: of parameters that are DTensors.
        steppers: one per device; missing ones are added. on_device: the step is capturable. A
        gradient in another memory order than its parameter, or with torch's negative bit, is
        copied. Raises ValueError or TypeError.
        """
        self._op, self._states, self._rows, self._on_device = op, states, rows, on_device
        self._groups, self._read = list(groups), read
        self._params = [list(group["params"]) for group in groups]
        self._formats = [_FORMAT(group) for group in groups]
        self._idle: list[torch.Tensor] = []  # parameters without a gradient
        # (group, count before the first run): index of the scalars
        self._sources: dict[tuple[int, int | None], int] = {}
        self._source_of: list[int] = []  # of each parameter, in a capturable step
        # by the count before the first run; equal counts are one
        self._counts: dict[int, StepCount] = {}
        self._counters: list[torch.Tensor] = []  # of each parameter, in a capturable step
        self._param_states: list[ParamState] = []
        # of each of these, after the first run
        self._count_of: list[StepCount | DeviceStepCount] = []
        self._new_tensors: list[tuple[ParamState, str, torch.Tensor]] = []
        self._new_states: dict[torch.Tensor, ParamState] = {}
        calls: defaultdict[torch.device, defaultdict[str, list[Any]]] = defaultdict(
            lambda: defaultdict(list)
        )
        index = -1
        for place, group in enumerate(groups):
            for param in group["params"]:
                index += 1
                grad = param.grad if grads is None else grads[index]
                if grad is None:
                    self._idle.append(param)
                else:
                    self._add(calls, place, index, param, grad)
        self.owners: list[torch.Tensor] = []  # the parameters of `calls`, as the groups hold them
        self.calls: list[Call] = []
        for device, lists in calls.items():
            indices = [i for i, _ in lists["keys"]]
            if on_device:  # there is one, as check_capturable says
                self._count_on(device, indices)
            for name in ("masters", "max_exp_avg_sqs", "exp_avg_scales", "exp_avg_sq_scales"):
                if not any(tensor is not None for tensor in lists[name]):
                    del lists[name]  # the binding would look at each entry in every step
            self.owners += lists.pop("owners")
            grads_read = _C.dense(lists.pop("grads"), lists["params"])
            stepper = steppers.setdefault(device, _C.AdamStepper())
            self.calls.append(Call(stepper, _C.AdamLists(**lists), grads_read, indices))

    def _add(self, calls: Any, place: int, index: int, owner: torch.Tensor, grad: Any) -> None:
        """Add a parameter of group `place`, the index-th of all, to the lists of its device."""
        # nearly all parameters are plain: no call for these
        param = owner if type(owner) is nn.Parameter else plain_part(owner)
        first_element = 0
        if owner in self._rows:
            rows = self._rows[owner]
            grad, param, first_element = (
                rows.part(self._op, f"grads[{index}]", grad),
                local_part(owner),
                rows.first_element,
            )
        # one chain of cheap tests: bad_grad finds the reason only after one fails
        if (
            not isinstance(grad, torch.Tensor)
            or grad.dtype not in PARAM_DTYPES
            or grad.layout is not torch.strided
            or grad.shape != param.shape
            or grad.device != param.device
        ):
            raise bad_grad(self._op, index, param, grad)
        if not (param.is_contiguous() and param.dtype in PARAM_DTYPES):
            check_tensor_param(self._op, f"params[{index}]", owner)
        group, state = self._groups[place], self._states.get(owner)
        state_dtype = group["state_dtype"]
        if type(state) is not ParamState or len(state) < 3:
            state = self._new_states[owner] = self._adopt(index, param, state, state_dtype)
        if self._on_device:
            hyper_index = len(self._source_of)  # the device makes the scalars of each parameter
            self._source_of.append(self._sources.setdefault((place, None), len(self._sources)))
        else:
            value = state.count.value
            hyper_index = self._sources.setdefault((place, value), len(self._sources))
            if value not in self._counts:
                self._counts[value] = StepCount(value)
            self._count_of.append(self._counts[value])
        self._param_states.append(state)
        exp_avg, expected = state.stored("exp_avg"), MOMENT_DTYPES[state_dtype]["exp_avg"]
        if getattr(exp_avg, "dtype", None) is not expected:
            raise self._dtype_error(
                index, "exp_avg", exp_avg, expected, f"state_dtype={state_dtype!r}"
            )
        largest = state.stored("max_exp_avg_sq") if group["amsgrad"] else None
        if group["amsgrad"] and largest is None:
            largest = new_state(param)
            self._new_tensors.append((state, "max_exp_avg_sq", largest))
        lists = calls[param.device]
        lists["owners"].append(owner)
        lists["params"].append(param)
        lists["grads"].append(grad)
        lists["keys"].append((index, first_element))
        lists["hyper_index"].append(hyper_index)
        lists["exp_avgs"].append(exp_avg)
        lists["exp_avg_sqs"].append(state.stored("exp_avg_sq"))
        lists["exp_avg_scales"].append(state.stored("exp_avg_scale"))
        lists["exp_avg_sq_scales"].append(state.stored("exp_avg_sq_scale"))
        lists["max_exp_avg_sqs"].append(largest)
        lists["masters"].append(self._master(index, state, param, group["master"]))

    def _count_on(self, device: torch.device, indices: Sequence[int]) -> None:
        """Put every state's count on the device. Not during a capture: each replay would fill the
        new memory again.
        """
        changed = [state for state in self._param_states if isinstance(state.count, StepCount)]
        changed += [state for state, _, _ in self._new_tensors]
        if changed and capturing(device):
            index = next(
                i
                for i, state in zip(indices, self._param_states, strict=True)
                if state is changed[0]
            )
            raise ValueError(
                f"{self._op}: params[{index}] got its first gradient while a CUDA graph is "
                "captured, and a state made now would start again at each replay. Before the "
                "capture, run a step with all gradients of the graph"
            )
        counts = device_counts(self._param_states, device)
        self._count_of += counts
        self._counters = [count.counter for count in counts]

    def _dtype_error(
        self, index: int, key: str, value: object, expected: torch.dtype | None, option: str
    ) -> TypeError:
        actual = (
            f"has dtype {dtype_name(value.dtype)}"
            if isinstance(value, torch.Tensor)
            else f"is of type {type(value).__name__}"
        )
        expected_name = "none" if expected is None else dtype_name(expected)
        return TypeError(
            f"{self._op}: state[params[{index}]].{key} {actual}; expected {expected_name} "
            f"for {option}. It changed after the first step; use load_state_dict to convert states"
        )

    def _master(
        self, index: int, state: ParamState, param: torch.Tensor, kind: str | None
    ) -> torch.Tensor | None:
        """Return the float32 master or the remainder; if the state has none, make it from the
        weights.
        """
        key, dtype = MASTER_STORAGE[kind if param.dtype in MASTERED_DTYPES else None]
        for name in ("master", "remainder"):
            value, expected = state.stored(name), dtype if name == key else None
            if value is not None and getattr(value, "dtype", None) is not expected:
                option = f"a {dtype_name(param.dtype)} parameter with master={kind!r}"
                raise self._dtype_error(index, name, value, expected, option)
        if key is None or dtype is None:
            return None
        master: torch.Tensor | None = state.stored(key)
        if master is None:
            if not has_memory(param):
                raise ValueError(
                    f"{self._op}: params[{index}] has no memory, so its {key} cannot be made. "
                    "Restore the parameter first"
                )
            master = (
                new_state(param, source=param)
                if kind == "fp32"
                else zeros(param.shape, dtype, param.device, param)
            )
            self._new_tensors.append((state, key, master))
        return master

    def _adopt(self, index: int, param: torch.Tensor, state: Any, state_dtype: str) -> ParamState:
        """Return a ParamState: a new one for an empty state, else one of the user's plain dict."""
        if not state:
            adopted = ParamState()
            adopted.count = StepCount()  # first, as in torch
            make = partial(zeros, device=param.device, like=param)
            adopted.update(new_moments(param.shape, state_dtype, make))
            return adopted
        missing = [key for key in ("step", "exp_avg", "exp_avg_sq") if key not in state]
        if missing:
            raise ValueError(
                f"{self._op}: state[params[{index}]] contains no {missing[0]!r}; expected step, "
                "exp_avg and exp_avg_sq"
            )
        return ParamState(state)

    def run(self, scale: float | DeviceScale, calls: Sequence[Call]) -> None:
        """Make these calls, and count the step. A DeviceScale belongs to a capturable step."""
        at = 1.0 if isinstance(scale, DeviceScale) else scale
        hypers = [
            hyper_of(self._read[i], 1 if value is None else self._counts[value].value + 1, at)
            for i, value in self._sources
        ]
        for call in calls:
            if isinstance(scale, DeviceScale):
                squares = scale.squares(call.grads)
                scalars = scale.decide(squares, self._counters, self._source_of, hypers)
                call.stepper.repeat(call.lists, call.grads, scalars)
            else:
                call.stepper.repeat(call.lists, call.grads, hypers)
        for count in self._counts.values():
            count.value += 1

    def commit(self) -> None:
        """Put new states and counts in place after the first run, and drop all references to
        states.
        """
        self._states.update(self._new_states)
        for state, key, tensor in self._new_tensors:
            state[key] = tensor
        for state, count in zip(self._param_states, self._count_of, strict=True):
            state.count = count
        for call in self.calls:
            call.lists.release_states(self._states)
        self._states, self._param_states, self._new_tensors, self._new_states = {}, [], [], {}
        # gradients are the user's to free
        self.owners, self.calls = [], [call._replace(grads=()) for call in self.calls]

    def find(
        self,
        op: str,
        groups: Sequence[Group],
        states: Mapping[torch.Tensor, Any],
        grads: Sequence[torch.Tensor | None] | None,
    ) -> Sequence[Call] | None:
        """Return the calls for `run`, or None if the update does not fit this step.

        grads: gradients in place of ``p.grad``, one for each parameter. Raises ValueError or
        TypeError for options that no step can use.
        """
        if not self.calls or not _C.same_objects(groups, self._groups):
            return None
        self._read = read_once(groups, READ)
        for i, (group, params) in enumerate(zip(self._read, self._params, strict=True)):
            check_options(op, group, f"param_groups[{i}].")
            if _FORMAT(group) != self._formats[i] or not _C.same_objects(group["params"], params):
                return None
        if grads is not None and sum(grad is None for grad in grads) != len(self._idle):
            return None
        calls = []
        for call in self.calls:
            lists = call.lists.with_states(states)
            if grads is None:
                plain_grads = call.lists.plain_grads(self._idle)
            else:
                plain_grads = call.lists.plain_grads((), [grads[index] for index in call.indices])
            if lists is None or plain_grads is None:
                return None
            calls.append(call._replace(lists=lists, grads=plain_grads))
        return calls
