"""State dicts that torch.optim.Adam and AdamW read, and theirs read back.

Invariants: a loaded value never passes through the parameter's dtype (torch's own loading would
turn the float32 moments of a bfloat16 weight into bfloat16); everything is checked and built before
the optimizer changes.
"""

import copy
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from shardcore._native import _C
from shardcore.optim.dtensor import Rows, import_dtensors, local_part
from shardcore.optim.group_options import MASTERED_DTYPES, check_options, dtype_name
from shardcore.optim.state import (
    TENSOR_KEYS,
    ParamState,
    StepCount,
    check_tensor,
    device_counts,
    new_state,
    share_counts,
    step_count,
)
from shardcore.optim.state_format import (
    MOMENTS,
    SCALES,
    in_memory,
    joined_master,
    moment_values,
    split_remainder,
    stored_moment,
)

# Keys of torch's groups for how torch runs a step, not what the step computes: written for torch,
# not read.
TORCH_ONLY: dict[str, Any] = {"foreach": None, "fused": None, "differentiable": False}
# Options for how an optimizer stores states and runs: loading does not change them.
_LOCAL_KEYS = ("master", "state_dtype", "stochastic_rounding", "capturable")
_RENAMED = {"decoupled_weight_decay": "adam_w_mode"}
_TUPLES = ("betas", "etas", "step_sizes")
_STORED_AS = {"fp32": "float32", "bf16": "bfloat16", "8bit": "8-bit codes"}
# Keys that torch.optim and its learning-rate schedulers write into groups.
SCHEDULER_KEYS = (
    "param_names",
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
)


def numbers_of(groups: Sequence[Mapping[str, Any]]) -> dict[torch.Tensor, int]:
    """Return each parameter's number in state dicts: the number of entries before its first one,
    as torch.optim counts.
    """
    numbers: dict[torch.Tensor, int] = {}
    for number, param in enumerate(param for group in groups for param in group["params"]):
        numbers.setdefault(param, number)
    return numbers


def export_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return param_groups as torch.optim.Adam and AdamW write them: parameters by number,
    torch's keys added.
    """
    exported = []
    numbers = numbers_of(groups)
    for group in groups:
        options = {key: value for key, value in group.items() if key != "params"}
        params = [numbers[param] for param in group["params"]]
        exported.append(
            TORCH_ONLY
            | options
            | {"decoupled_weight_decay": group["adam_w_mode"], "params": params}
        )
    return exported


def other_entries(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the entries of `optimizer.state` whose keys are not parameters; state dicts have
    them as they are.
    """
    return {key: state[key] for key in state if not isinstance(key, torch.Tensor)}


def adopt_torch_group(op: str, where: str, group: dict[str, Any]) -> None:
    """Translate torch.optim's own keys in a new group (from the param_groups of an Adam or AdamW)
    to our options, in place.

    Raises ValueError for options that these optimizers do not have.
    """
    if "decoupled_weight_decay" in group:
        decoupled = group["decoupled_weight_decay"]
        if group.setdefault("adam_w_mode", decoupled) is not decoupled:
            raise ValueError(
                f"{op}: {where}adam_w_mode is {group['adam_w_mode']}, but decoupled_weight_decay "
                f"is {decoupled}. The two options mean the same; pass only one"
            )
    if group.get("differentiable"):
        raise ValueError(
            f"{op}: {where}differentiable is {group['differentiable']}; expected False, because "
            "autograd does not see the steps of a kernel"
        )


def import_groups(
    op: str,
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any],
    *,
    local_keys: Sequence[str] = _LOCAL_KEYS,
    renamed: Mapping[str, str] = _RENAMED,
    check: Callable[[str, Mapping[str, Any], str], None] = check_options,
    name: str = "Adam",
) -> list[dict[str, Any]]:
    """Return, for each group, the options that loading ``state_dict`` (torch's or ours) gives it;
    nothing is changed.

    renamed: our names of torch's options. name: of the optimizer's class, for messages. local_keys:
    options for storing states and running steps, which stay this optimizer's. Raises ValueError or
    TypeError for another number of groups or parameters, for an unknown key, and for a value that
    no step can use.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"{op}: state_dict contains no {key!r}; expected state and param_groups, as from "
                "state_dict()"
            )
    saved = state_dict["param_groups"]
    if not isinstance(saved, Sequence) or not all(
        isinstance(g, Mapping) and isinstance(g.get("params"), list | tuple) for g in saved
    ):
        raise TypeError(
            f'{op}: state_dict["param_groups"] is not a list of dicts with a list "params"; '
            "expected the result of state_dict()"
        )
    if len(saved) != len(groups):
        raise ValueError(
            f"{op}: state_dict contains {len(saved)} parameter groups; expected {len(groups)}, as "
            "in this optimizer"
        )
    for i, saved_group in enumerate(saved):
        if strange := [
            number for number in saved_group["params"] if not isinstance(number, Hashable)
        ]:
            raise TypeError(
                f'{op}: state_dict["param_groups"][{i}]["params"] contains {strange[0]!r}; '
                "expected a number for each parameter, as from state_dict()"
            )
    imported = []
    # groups that share an lr tensor still share one, as after torch's loading
    copies: dict[int, Any] = {}
    for i, (group, saved_group) in enumerate(zip(groups, saved, strict=True)):
        where = f"param_groups[{i}]"
        if len(saved_group["params"]) != len(group["params"]):
            raise ValueError(
                f"{op}: {where} contains {len(saved_group['params'])} parameters; expected "
                f"{len(group['params'])}, as in this optimizer"
            )
        options = {}
        passed_by = ("params", *TORCH_ONLY, *local_keys)
        for key, value in saved_group.items():
            if key in passed_by:
                continue
            own_key = renamed.get(key, key)
            if own_key not in group and own_key not in SCHEDULER_KEYS:
                came, expected = (
                    ", ".join(str(k) for k in some if k not in passed_by)
                    for some in (saved_group, group)
                )
                raise ValueError(
                    f"{op}: {where} contains {came}; {key!r} is an unknown key; expected "
                    f"{expected}, as in {name}, or keys of a scheduler. The state of another "
                    "optimizer does not fit. For a key of your own, add it to the group first"
                )
            options[own_key] = (
                tuple(value)
                if key in _TUPLES and isinstance(value, list)
                else copy.deepcopy(value, copies)
            )
        check(op, {**group, **options}, f"{where}.")
        imported.append(options)
    return imported


def export_state(state: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return a state for a state dict: a plain dict with a step tensor of its own.

    8-bit moments become the float32 values they stand for, a remainder the float32 master; other
    tensors are the live ones.
    """
    joined = joined_state(state, param)
    return {key: moment_values(joined, key) for key in joined if key not in SCALES.values()}


def joined_state(state: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return a state as a plain dict that is complete without its weights: with a float32 master in
    place of a remainder.
    """
    joined = dict(state)
    if "remainder" in joined:
        joined["master"] = joined_master(param, joined.pop("remainder"))
    return joined


def import_state(
    op: str,
    name: str,
    saved: object,
    param: torch.Tensor,
    master: str | None,
    state_dtype: str = "fp32",
) -> tuple[ParamState, list[str]]:
    """Return a new state for param made from ``saved`` (torch's or ours), and descriptions of what
    was lost.

    The state has param's shape and device, and is stored as master ("fp32", "split" or None) and
    state_dtype say. Moments may have any floating dtype. A master must be float32: one of another
    dtype was converted by torch.optim's loading and not updated by torch's steps, so it is left out
    and made again from the weights. With "split" the state has the remainder, and the weight is the
    rounded master. Raises ValueError or TypeError for unknown or missing keys, shapes, values.
    """
    if not isinstance(saved, Mapping):
        raise TypeError(f"{op}: {name} is of type {type(saved).__name__}; expected a dict")
    lost: list[str] = []
    state = ParamState()
    if not saved:
        return state, lost
    for key in saved:
        if key in SCALES.values() and saved[key] == {}:
            # torch.distributed.checkpoint's flattened form asks for the keys of optimizer.state,
            # which has these
            continue
        if key != "step" and key not in TENSOR_KEYS:
            raise ValueError(
                f"{op}: {name} contains the unknown key {key!r}; expected step, "
                f"{', '.join(TENSOR_KEYS)}"
            )
    for key in ("step", "exp_avg", "exp_avg_sq"):
        if key not in saved:
            raise ValueError(
                f"{op}: {name} contains no {key!r}; expected step, exp_avg and exp_avg_sq, the "
                "state of Adam"
            )
    state.count = StepCount(step_count(op, f"{name}.step", saved["step"]))
    for key in TENSOR_KEYS:
        if key not in saved:
            continue
        value = check_tensor(op, f"{name}.{key}", saved[key], param.shape)
        if key in MOMENTS:
            stored, exact = stored_moment(key, value, state_dtype, param.device, param)
            if not exact:
                lost.append(
                    f"{name}.{key} is rounded from {dtype_name(value.dtype)} to "
                    f"{_STORED_AS[state_dtype]}"
                )
            state.update(stored)
        elif key == "master" and master is None:
            lost.append(
                f"{name}.master is left out: this optimizer keeps none for it (the weights stay as "
                "they are)"
            )
        elif key == "master" and value.dtype is not torch.float32:
            lost.append(
                f"{name}.master is {dtype_name(value.dtype)}, stale after torch.optim; it starts "
                f"again from the weights"
            )
        elif key == "master" and master == "split":
            state["remainder"] = split_remainder(value, param.device, param)
        else:
            state[key] = new_state(param, value)
    return state, lost


def take_masters(masters: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Set the weights whose remainders import_states made from these float32 masters."""
    params = list(masters)
    with torch.no_grad():
        values = _C.dense([master.detach().to(p.device) for p, master in masters.items()], params)
        _C.cast([in_memory(p) for p in params], [in_memory(value) for value in values])


def saved_states(
    op: str, groups: Sequence[Mapping[str, Any]], state_dict: Mapping[str, Any]
) -> tuple[dict[torch.Tensor, tuple[Any, Any]], dict[Any, Any]]:
    """Return (id, state) of each parameter with a state in the state dict, and its
    `other_entries`.

    The state dict must have passed import_groups. Raises TypeError or ValueError for states or ids
    that belong to no parameter.
    """
    saved = state_dict["state"]
    if not isinstance(saved, Mapping):
        raise TypeError(
            f'{op}: state_dict["state"] is of type {type(saved).__name__}; expected a dict'
        )
    params: dict[Any, torch.Tensor] = {}
    for group, saved_group in zip(groups, state_dict["param_groups"], strict=True):
        params.update(zip(saved_group["params"], group["params"], strict=True))
    if len(params) < len(numbers_of(groups)):
        raise ValueError(
            f'{op}: state_dict["param_groups"] names a parameter twice; expected each once'
        )
    others = {}
    for key, value in saved.items():
        if key not in params:
            # a parameter's
            if isinstance(key, int) or (isinstance(value, Mapping) and "step" in value):
                raise ValueError(
                    f'{op}: state_dict["state"] contains the key {key!r}; expected one of the ids '
                    "in param_groups"
                )
            others[key] = value
    return {params[key]: (key, state) for key, state in saved.items() if key in params}, others


def warn_of_lost(op: str, lost: Sequence[str], stacklevel: int) -> None:
    """Give one UserWarning for all descriptions in `lost`. stacklevel: as the caller's own
    warning would have.
    """
    if lost:
        more = f" (and {len(lost) - 1} more like it)" if len(lost) > 1 else ""
        warnings.warn(f"{op}: {lost[0]}{more}", UserWarning, stacklevel=stacklevel + 1)


def import_states(
    op: str,
    groups: Sequence[Mapping[str, Any]],
    state_dict: Mapping[str, Any],
    dtensors: Mapping[torch.Tensor, Rows],
) -> tuple[dict[Any, Any], dict[torch.Tensor, torch.Tensor]]:
    """Return the states that loading state_dict gives to the parameters of groups, and other
    entries; nothing is changed.

    dtensors: of those parameters that are DTensors; a saved tensor may then be a DTensor or the
    full tensor. Also returned: the float32 masters of parameters (their local parts) whose state
    has a remainder; take_masters sets their weights from them. state_dict["param_groups"] must have
    passed import_groups. One UserWarning names what was lost.
    """
    group_of = {param: group for group in groups for param in group["params"]}
    states: dict[torch.Tensor, ParamState] = {}
    masters: dict[torch.Tensor, torch.Tensor] = {}
    lost: list[str] = []
    saved, others = saved_states(op, groups, state_dict)
    for param, (key, value) in saved.items():
        group = group_of[param]
        master = group["master"] if param.dtype in MASTERED_DTYPES else None
        name, local = f"state[{key!r}]", local_part(param)
        value = import_dtensors(op, name, value, dtensors.get(param))
        state, lost_values = import_state(op, name, value, local, master, group["state_dtype"])
        lost += lost_values
        if state:
            states[param] = state
        if "remainder" in state:
            masters[local] = value["master"]
    if states and groups[0]["capturable"]:
        for state, count in zip(
            states.values(),
            device_counts(list(states.values()), next(iter(states)).device),
            strict=True,
        ):
            state.count = count
    else:
        share_counts(states.values())
    warn_of_lost(op, lost, stacklevel=4)
    return {**states, **others}, masters
