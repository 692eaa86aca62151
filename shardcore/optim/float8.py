"""torchao's float8 weights: which parameters of a model they are, and the plain tensor inside one.

`convert_to_float8_training` with `enable_fsdp_float8_all_gather=True` makes each linear weight a
WeightWithDynamicFloat8CastTensor: a high-precision tensor that FSDP2 casts before it is gathered.
Such weights are found by their module, which keeps the flag once the weight is a plain Parameter.
torchao is looked up in sys.modules, never imported: a process without it has no such weights.
"""

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# of torchao's weight, beside the attributes that users set on a parameter
_FIELDS = {"_tensor", "_linear_mm_config", "_dtype", "_precomputed_scale"}


@dataclass(frozen=True)
class Float8Format:
    """How a weight is cast to float8 with one scale: max(dtype) / max(abs(weight)).

    rounds_scale: the scale is rounded down to a power of two. mm_config: torchao's LinearMMConfig.
    """

    dtype: torch.dtype
    rounds_scale: bool
    mm_config: Any


def is_float8_weight(value: object) -> bool:
    """Whether value is torchao's weight for a float8 all-gather."""
    module = sys.modules.get("torchao.float8.fsdp_utils")
    return module is not None and isinstance(value, module.WeightWithDynamicFloat8CastTensor)


def plain_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a float8 weight wraps (the same memory), and any other as it is."""
    if not is_float8_weight(tensor):
        return tensor
    wrapped: Any = tensor
    inner: torch.Tensor = wrapped._tensor
    return inner.detach()


def unwrap(param: torch.Tensor) -> None:
    """Make a parameter that is a float8 weight a plain Parameter over the tensor inside; it stays
    the same object.
    """
    twin = nn.Parameter(plain_part(param), param.requires_grad)
    torch.utils.swap_tensors(param, twin)  # type: ignore[no-untyped-call]
    attributes = {key: value for key, value in vars(twin).items() if key not in _FIELDS}
    vars(param).update(attributes)


def float8_linears(model: nn.Module) -> dict[str, Any]:
    """Return the modules that torchao made of linear layers to train in float8, by name."""
    module = sys.modules.get("torchao.float8.float8_linear")
    if module is None:
        return {}
    return {name: m for name, m in model.named_modules() if isinstance(m, module.Float8Linear)}


def check_float8(model: nn.Module, device: torch.device) -> None:
    """Raise ValueError for layers that compute in float8 on a GPU that cannot."""
    layers = [name for name, m in float8_linears(model).items() if not m.config.emulate]
    if device.type != "cuda" or not layers:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        raise ValueError(
            f"shard: {layers[0]} computes in float8, which {device} (compute capability "
            f"{major}.{minor}) does not support; expected 8.9 or newer. Use "
            "Float8LinearConfig(emulate=True)"
        )


def float8_formats(model: nn.Module) -> Mapping[nn.Parameter, Float8Format]:
    """Return the weights that are gathered as float8 bytes, with their formats.

    Weights whose forward and backward use other casts, or which a module of another kind uses, too,
    are not among them.
    """
    linears = {*float8_linears(model).values()}
    if not linears:
        return {}
    found: dict[nn.Parameter, set[Float8Format | None]] = {}
    for module in model.modules():
        own = _format_of(module) if module in linears else None
        for name, param in module._parameters.items():
            if param is not None:
                found.setdefault(param, set()).add(own if name == "weight" else None)
    formats: dict[nn.Parameter, Float8Format] = {}
    for param, of_uses in found.items():
        only = next(iter(of_uses)) if len(of_uses) == 1 else None
        if only is not None:
            formats[param] = only
    return formats


def ungathered_float8(model: nn.Module, gathered: Collection[nn.Parameter]) -> str:
    """Say which float8 layers gather their weights in their own dtype, and why; "" for none."""
    others = {
        name: linear
        for name, linear in float8_linears(model).items()
        if linear.weight not in gathered
    }
    if not others:
        return ""
    tensorwise = "TENSORWISE"
    rowwise = any(
        linear.config.cast_config_weight.scaling_granularity.name != tensorwise
        for linear in others.values()
    )
    reason = (
        "their recipe scales rows, not whole tensors"
        if rowwise
        else "enable_fsdp_float8_all_gather is False"
    )
    return (
        f"the weights of {len(others)} float8 layers ({next(iter(others))}, ...) are gathered in "
        f"their own dtype, because {reason}"
    )


def _format_of(linear: Any) -> Float8Format | None:
    config = linear.config
    cast = config.cast_config_weight
    if not config.enable_fsdp_float8_all_gather or config.cast_config_weight_for_grad_input != cast:
        return None
    return Float8Format(
        cast.target_dtype, config.round_scales_to_power_of_2, linear.linear_mm_config
    )
