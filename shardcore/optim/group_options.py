"""Options of a parameter group and arguments of a step: names, checks, and the one conversion into
the scalars of a step.

Invariants: every check runs before anything is written; the engine uses the same functions, so that
the message for a bad option is the same with and without sharding.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch

from shardcore._native import _C

# Weights and gradients that the kernels take, each independent of the other.
PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICE_TYPES = ("cpu", "cuda", "meta")
# Weights that may have a master: a float32 weight is its own.
MASTERED_DTYPES = (torch.bfloat16, torch.float16)

MASTERS = (None, "fp32", "split")
STATE_DTYPES = ("fp32", "bf16", "8bit")
_NUMBERS = ("lr", "eps", "weight_decay")
READ = (*_NUMBERS, "betas")  # of a group of Adam's, for read_once
_FLAGS = (
    "adam_w_mode",
    "amsgrad",
    "maximize",
    "bias_correction",
    "capturable",
    "stochastic_rounding",
)
_LARGEST = torch.finfo(torch.float32).max  # gradients are multiplied in float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def number(op: str, name: str, value: object) -> float:
    """Return an int, a float or a tensor of one element as a Python float.

    Raises TypeError for anything else, bool included. Synchronizes with the device of a CUDA
    tensor.
    """
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.dtype is torch.bool or value.is_meta:
            raise TypeError(
                f"{op}: {name} is a {dtype_name(value.dtype)} tensor of shape {tuple(value.shape)} "
                f"on {value.device}; expected one real number"
            )
        return float(value.item())
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    raise TypeError(
        f"{op}: {name} is of type {type(value).__name__}; expected a number or a tensor of one "
        "element"
    )


def json_value(value: Any) -> Any:
    """Return the value of an option as JSON has it: a tensor as its numbers."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


def on_device(value: object) -> bool:
    """Whether value is a tensor that the host can read only by synchronizing."""
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def capturing(device: torch.device) -> bool:
    """Whether work queued now on this device becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def device_number(op: str, name: str, value: object) -> float | torch.Tensor:
    """Return a tensor on a device unchanged (a kernel reads it), anything else as `number` does.
    Raises TypeError.
    """
    if not on_device(value):
        return number(op, name, value)
    assert isinstance(value, torch.Tensor)
    if value.numel() != 1 or value.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{op}: {name} is a {dtype_name(value.dtype)} tensor of shape {tuple(value.shape)} on "
            f"{value.device}; expected one float32 or float64 number, which a capturable step "
            "reads there"
        )
    return value


def host_scale(op: str, grad_scale: object, loss_scale: object) -> float:
    """Return the factor of the gradients in double: grad_scale, divided by GradScaler's loss_scale
    if there is one.
    """
    scale = 1.0 if grad_scale is None else number(op, "grad_scale", grad_scale)
    divisor = 1.0 if loss_scale is None else number(op, "optimizer.grad_scale", loss_scale)
    if not (math.isfinite(divisor) and divisor != 0.0 and abs(scale / divisor) <= _LARGEST):
        raise ValueError(
            f"{op}: grad_scale is {scale} (over a loss scale of {divisor}); expected finite "
            "numbers, and a quotient within float32"
        )
    return scale / divisor


def check_max_norm(op: str, max_norm: object, capturable: bool = False) -> float:
    """Return max_norm as a float; ValueError if it is negative or NaN. Infinity measures without
    clipping.
    """
    if capturable and on_device(max_norm):
        raise TypeError(
            f"{op}: max_norm is a tensor on the device; expected a number, because a capturable "
            "step does not wait for the device"
        )
    x = number(op, "max_norm", max_norm)
    if not x >= 0.0:
        raise ValueError(f"{op}: max_norm is {x}; expected a number of at least 0")
    return x


def check_options(op: str, group: Mapping[str, Any], where: str = "") -> None:
    """Raise ValueError or TypeError for an option that no step can use.

    op and where (for example "param_groups[1].") begin the message. Schedulers and users change
    options at any time, so every step calls this.
    """
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"{op}: {where}betas is {betas!r}; expected two numbers (beta1, beta2)")
    for name, value in (
        *((name, group[name]) for name in _NUMBERS),
        ("betas[0]", betas[0]),
        ("betas[1]", betas[1]),
    ):
        if group["capturable"] is True and name == "lr":
            value = device_number(op, where + name, value)
            if isinstance(value, torch.Tensor):
                continue
        if group["capturable"] is True and on_device(value):
            raise TypeError(
                f"{op}: {where}{name} is a tensor on {value.device}; expected a number (a "
                "capturable step reads only lr there)"
            )
        x = number(op, where + name, value)
        if name.startswith("betas") and not (0.0 <= x < 1.0):
            raise ValueError(f"{op}: {where}{name} is {x}; expected a number in [0, 1)")
        if not (0.0 <= x < math.inf):
            raise ValueError(f"{op}: {where}{name} is {x}; expected a finite number of at least 0")
    for name in _FLAGS:
        if not isinstance(group[name], bool):
            raise TypeError(f"{op}: {where}{name} is {group[name]!r}; expected True or False")
    seed = group["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"{op}: {where}seed is {seed!r}; expected an int")
    if not 0 <= seed < 2**64:
        raise ValueError(f"{op}: {where}seed is {seed}; expected an int in [0, 2**64)")
    master, state_dtype = group["master"], group["state_dtype"]
    for name, value, choices in (
        ("master", master, MASTERS),
        ("state_dtype", state_dtype, STATE_DTYPES),
    ):
        if value is not None and not isinstance(value, str):
            raise TypeError(
                f"{op}: {where}{name} is of type {type(value).__name__}; expected one of {choices}"
            )
        if value not in choices:
            raise ValueError(f"{op}: {where}{name} is {value!r}; expected one of {choices}")
    if state_dtype != "fp32" and group["amsgrad"]:
        raise ValueError(
            f"{op}: {where}amsgrad is True with state_dtype={state_dtype!r}; expected "
            "state_dtype='fp32', because a running maximum of rounded moments only grows"
        )
    if group["stochastic_rounding"] and master is not None:
        raise ValueError(
            f"{op}: {where}stochastic_rounding is True with master={master!r}; expected "
            "master=None, because a weight is always rounded to nearest from its master"
        )


def lr_on_device(group: Mapping[str, Any]) -> bool:
    """Whether the group's lr is a tensor that the kernel reads, so that its value is not known
    on the host.
    """
    return group["capturable"] is True and on_device(group["lr"])


def read_once(
    groups: Sequence[Mapping[str, Any]], names: Collection[str]
) -> Sequence[Mapping[str, Any]]:
    """Return groups with numbers in place of tensors on a device, for the options `names`; all are
    read together.

    Each read waits for the device, and a step uses an option several times. Capturable groups stay
    unchanged, since kernels read their lr, as do values that `number` refuses. Without such tensors
    the groups themselves are returned.
    """

    def tensors(value: object) -> Iterator[torch.Tensor]:
        if isinstance(value, tuple | list):
            for tensor in value:
                yield from tensors(tensor)
        elif (
            isinstance(value, torch.Tensor)
            and on_device(value)
            and value.numel() == 1
            and value.is_floating_point()
        ):
            yield from [] if value.is_meta else [value]

    options = [
        group.get(name) for group in groups if group.get("capturable") is not True for name in names
    ]
    options_on_device = [
        tensor for option in options if type(option) is not float for tensor in tensors(option)
    ]
    if not options_on_device:
        return groups
    values = torch.stack(
        [
            tensor.detach().double().reshape(()).to(options_on_device[0].device)
            for tensor in options_on_device
        ]
    ).tolist()
    numbers = dict(zip(map(id, options_on_device), values, strict=True))

    def read(value: object) -> object:
        return (
            type(value)(map(read, value))
            if isinstance(value, tuple | list)
            else numbers.get(id(value), value)
        )

    return [
        {**group, **{name: read(group[name]) for name in names if name in group}}
        for group in groups
    ]


def check_group(op: str, group: Mapping[str, Any], where: str) -> None:
    """Raise ValueError or TypeError for options that no step can use with the group's
    parameters.
    """
    check_options(op, group, where)
    numbered = draws_random_bits(group)
    if not numbered and group["master"] != "split":
        return
    for i, p in enumerate(group["params"]):
        check_dtype(op, f"{where}params[{i}]", p.dtype, group)
        if numbered:
            _check_numbered(op, f"{where}params[{i}]", p, group)


def check_groups(op: str, groups: Sequence[Mapping[str, Any]], device_type: str) -> None:
    """Raise ValueError or TypeError for groups that no step can use, each or together."""
    for i, group in enumerate(groups):
        check_group(op, group, f"param_groups[{i}].")
    check_capturable(op, groups, device_type)


def check_capturable(op: str, groups: Sequence[Mapping[str, Any]], device_type: str) -> None:
    """Raise ValueError unless no group is capturable, or all are and have parameters on one
    device of this type.
    """
    flags = [group["capturable"] for group in groups]
    if True not in flags:
        return
    first: torch.device | None = None
    for i, group in enumerate(groups):
        where = f"param_groups[{i}].capturable"
        for p in group["params"] if group["capturable"] else ():
            first = first or p.device
            if p.device.type != device_type:
                raise ValueError(
                    f"{op}: {where} is True for {p.device.type.upper()} parameters; expected False "
                    "(only CUDA graphs capture)"
                )
            if p.device != first:
                raise ValueError(
                    f"{op}: {where} is True for parameters on {first} and {p.device}; expected one "
                    "device. A CUDA graph captures one device: make an optimizer for each"
                )
        if group["capturable"] is not flags[0]:
            raise ValueError(
                f"{op}: {where} is {flags[i]}, and {flags[0]} in param_groups[0]; expected the "
                "same in all groups, because a step decides on the device or on the host"
            )


def check_param(op: str, name: str, param: torch.Tensor) -> None:
    """Raise TypeError or ValueError for a parameter that the kernels cannot update in place.

    A parameter on the meta device passes: shardcore.shard materializes it. The kernels refuse steps
    before that.
    """
    if param.dtype not in PARAM_DTYPES:
        raise TypeError(
            f"{op}: {name} has dtype {dtype_name(param.dtype)}; expected float32, bfloat16 or "
            "float16"
        )
    if param.layout is not torch.strided:
        raise ValueError(f"{op}: {name} has layout {param.layout}; expected a dense tensor")
    if param.device.type not in DEVICE_TYPES:
        raise ValueError(f"{op}: {name} is on device {param.device}; expected cpu or cuda")
    if not _C.is_dense(param):
        raise ValueError(
            f"{op}: {name} has strides {param.stride()} for shape {tuple(param.shape)}; expected "
            "memory without gaps or overlaps. Set p.data = p.data.contiguous() first"
        )


def _check_numbered(op: str, name: str, param: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Raise ValueError if the bits depend on the numbers of elements, and memory has another order
    (channels_last).
    """
    reduced = group["state_dtype"] != "fp32"
    if not param.is_contiguous() and (reduced or param.dtype is torch.bfloat16):
        option = f"state_dtype={group['state_dtype']!r}" if reduced else "stochastic_rounding=True"
        alternative = "state_dtype='fp32'" if reduced else "stochastic_rounding=False"
        raise ValueError(
            f"{op}: {name} has strides {param.stride()} for shape {tuple(param.shape)} with "
            f"{option}; expected contiguous memory, because blocks and random bits follow an "
            "element's number. Set p.data = p.data.contiguous() first, or use a group with "
            f"{alternative}"
        )


def check_dtype(op: str, name: str, dtype: torch.dtype, group: Mapping[str, Any]) -> None:
    """Raise ValueError for a parameter whose dtype its group's options cannot serve."""
    if dtype is torch.float16 and group.get("master") == "split":
        raise ValueError(
            f"{op}: {name} has dtype float16 with master='split'; expected bfloat16, because 16 "
            "more bits do not extend float16 to float32. For float16 use master='fp32'"
        )
    if dtype is torch.float16 and group.get("stochastic_rounding"):
        raise ValueError(
            f"{op}: {name} has dtype float16 with stochastic_rounding=True; expected bfloat16, "
            "because float16 weights are rounded to nearest only. For float16 use "
            "stochastic_rounding=False"
        )


def draws_random_bits(group: Mapping[str, Any]) -> bool:
    """Whether a step of this group (of torch.optim, too) may depend on random bits, so that its
    tensors need keys.
    """
    return (
        bool(group.get("stochastic_rounding", False)) or group.get("state_dtype", "fp32") != "fp32"
    )


def hypers_of(group: Mapping[str, Any]) -> "Callable[..., _C.AdamHyper]":
    """Return a function that makes the scalars of a step from a group, checked by check_options.

    Its arguments are step= (counted from 1) and grad_scale=, the factor of the gradient: a double,
    rounded once. In a capturable step the device has its own step and grad_scale, and reads
    lr if it is a tensor there.
    """
    beta1, beta2 = group["betas"]
    return partial(
        _C.AdamHyper,
        lr=group["lr"] if lr_on_device(group) else float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        adam_w_mode=group["adam_w_mode"],
        bias_correction=group["bias_correction"],
        maximize=group["maximize"],
        stochastic_rounding=group["stochastic_rounding"],
        seed=group["seed"],
    )


def hyper_of(group: Mapping[str, Any], step: int = 1, grad_scale: float = 1.0) -> "_C.AdamHyper":
    """Make the scalars of one step. See hypers_of."""
    return hypers_of(group)(step=step, grad_scale=grad_scale)
