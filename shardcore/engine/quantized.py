"""Weights that bitsandbytes has quantized to 4 bits, and torchao to int8: the tensors that hold
them, and what else their layers need under an engine.

bitsandbytes' `Params4bit` holds packed bytes. Its `quant_state` holds one scale per block, in 8
bits with one float32 per 256 of them (double quantization), and no module has these tensors.
torchao's `Int8Tensor` is a Parameter without memory: its attributes hold codes, scales and zero
points. All these tensors are frozen parameters of the weight's unit here, so at stage 3 they are
sharded, gathered and freed like any other. They stay the same objects: layers and autograd reach
them through the weight. Of a `quant_state` every rank keeps two tables and the mean of the scales.

Names of the two libraries are used in this file alone, and neither is imported unless a
weight is dequantized. Tested with bitsandbytes 0.50 and torchao 0.18.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import import_module
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardcore.optim.float8 import check_float8

logger = logging.getLogger("shardcore")

SUPPORTED = (
    "bitsandbytes' 4-bit weights (load_in_4bit), or torchao's Int8WeightOnlyConfig for nn.Linear"
)
# Of transformers' `quantization_method`. fp8 has ordinary parameters.
_METHODS = "bitsandbytes", "torchao", "fp8"


def is_int8(tensor: object) -> bool:
    """Whether this is a weight of torchao's Int8WeightOnly, which computes with floats."""
    kind = type(tensor)
    is_torchao = kind.__name__ == "Int8Tensor" and kind.__module__.startswith("torchao.")
    return is_torchao and getattr(tensor, "act_quant_kwargs", None) is None


def parts_of(weight: torch.Tensor) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the tensors beside a 4-bit weight, or in an int8 one, as frozen parameters; nothing for
    another parameter.

    The names of the former are their ends in a state dict, those of the latter are its attributes.
    """
    holders: list[tuple[str, Any, str]] = []
    if is_int8(weight):
        holders = [(key, weight, key) for key in _inner(weight)]
    elif (state := getattr(weight, "quant_state", None)) is not None:
        holders = [("absmax", state, "absmax")]
        if getattr(state, "state2", None) is not None:
            holders.append(("nested_absmax", state.state2, "absmax"))
    for name, holder, key in holders:
        if not isinstance(getattr(holder, key), nn.Parameter):
            setattr(holder, key, nn.Parameter(getattr(holder, key), requires_grad=False))
        yield name, getattr(holder, key)


def _inner(weight: Any) -> list[str]:
    """Return the attributes of an int8 weight that are tensors."""
    keys, _ = weight.__tensor_flatten__()
    return list(keys)


def with_parts(
    named: Iterable[tuple[str, nn.Parameter]],
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield named parameters, each followed by the tensors beside it; of an int8 weight only the
    tensors in it.
    """
    for name, param in named:
        if not is_int8(param):
            yield name, param
        yield from ((f"{name}.{key}", part) for key, part in parts_of(param))


def named_means(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the mean of the scales of each 4-bit weight that has one: a tensor of shape ()."""
    for name, param in model.named_parameters():
        mean: Any = getattr(getattr(param, "quant_state", None), "offset", None)
        if mean is not None:
            yield f"{name}.nested_offset", mean


def numel_of(param: torch.Tensor) -> int:
    """Return the number of elements of a parameter; of a 4-bit weight, those before packing."""
    state: Any = getattr(param, "quant_state", None)
    return param.numel() if state is None else prod(state.shape)


def shape_and_dtype(weight: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return those of the weight as floats (see `dequantized`)."""
    state: Any = getattr(weight, "quant_state", None)
    return (weight.shape, weight.dtype) if state is None else (state.shape, state.dtype)


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """Return a 4-bit or int8 weight as floats; another tensor as it is."""
    if is_int8(weight):
        of_int8: Any = weight
        return of_int8.dequantize()  # type: ignore[no-any-return]
    state: Any = getattr(weight, "quant_state", None)
    if state is None:
        return weight.detach()
    functional: Any = import_module("bitsandbytes.functional")
    return functional.dequantize_4bit(weight.detach(), state)  # type: ignore[no-any-return]


def described(param: torch.Tensor) -> str:
    """Return in words how a weight is quantized, for ranks to compare."""
    state: Any = getattr(param, "quant_state", None)
    return "" if state is None else f"in {state.quant_type} blocks of {state.blocksize}"


# --- before and after the engine ------------------------------------------------------------------


def check_model(model: nn.Module, stage: int, device: torch.device, trains: bool) -> None:
    """Raise ValueError for weights in a form that cannot be sharded, or trained over, on `device`
    at this stage.
    """
    check_float8(model, device)
    for name, module in model.named_modules():
        method = getattr(module, "quantization_method", None)
        method = getattr(method, "value", method)
        if trains and isinstance(method, str) and method not in _METHODS:
            raise ValueError(
                f"shard: {name or 'the model'} is quantized by {method}, and shardcore does not "
                f"support training over it. Use {SUPPORTED}"
            )
    for name, param in model.named_parameters():
        if stage == 3 and hasattr(param, "SCB"):
            raise ValueError(
                f"shard: {name} is quantized to 8 bits by bitsandbytes, whose layers re-assign it, "
                "at stage 3; expected stage 0, 1 or 2 (adapters over it are sharded there), or "
                "load_in_4bit"
            )
        if getattr(getattr(param, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"shard: {name} has the packing that bitsandbytes uses to evaluate on this CPU, "
                "and it cannot be trained over. Load the model again, and call shard() before "
                "model.eval() and a forward"
            )
        if is_int8(param) and param.device.type != device.type:
            raise ValueError(
                f"shard: {name} is quantized by torchao on {param.device}. Move the model to "
                f"{device} before shard()"
            )


def bias_dtypes(model: nn.Module) -> dict[nn.Parameter, torch.dtype]:
    """Return the dtypes to which 4-bit layers cast their biases in their first forward: it would
    put new memory in the place of their shards.
    """
    modules: Iterable[Any] = model.modules()
    return {
        module.bias: module.compute_dtype
        for module in modules
        if isinstance(getattr(module, "compute_dtype", None), torch.dtype)
        and hasattr(getattr(module, "weight", None), "quant_state")
        and isinstance(getattr(module, "bias", None), nn.Parameter)
    }


def keep_as_packed(model: nn.Module, device: torch.device) -> None:
    """Move the tables of 4-bit weights to `device`, and let layers keep the weights as they are.

    On CPUs with AVX512-BF16 the forward of an evaluation would replace `weight.data`, and round the
    scales to bfloat16.
    """
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False
    for param in model.parameters():
        state: Any = getattr(param, "quant_state", None)
        for holder in (state, getattr(state, "state2", None)):
            if holder is not None:
                holder.code = holder.code.to(device)


def warn_of_unquantized(model: nn.Module) -> None:
    """Say which experts bitsandbytes has left as they were: it quantizes linear layers alone."""
    params = [*model.named_parameters()]
    if not any(hasattr(param, "quant_state") for _, param in params):
        return
    experts = {name: p for name, p in params if p.dim() == 3 and p.is_floating_point()}
    if experts:
        logger.warning(
            "shard: bitsandbytes quantizes linear layers only. %d fused experts stay in %s and "
            "take %.2f MB in all; the first is %s",
            len(experts),
            " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in experts.values()})),
            sum(p.nbytes for p in experts.values()) / 1e6,
            next(iter(experts)),
        )


def keep_class(new: nn.Parameter, old: nn.Parameter) -> nn.Parameter:
    """Return `new`, which takes the place of `old`, as a 4-bit weight if `old` is one."""
    if hasattr(old, "quant_state"):
        new.__class__ = old.__class__
        new.__dict__.update(old.__dict__)
        del new.__dict__["_shardcore_engine"]
    return new


# --- state dicts ----------------------------------------------------------------------------------


def take_apart(state_dict: dict[str, Any]) -> dict[str, list[str]]:
    """Add the tensors in the int8 weights of a state dict to it; returns their names, by that of
    the weight.
    """
    weights = {key: _inner(value) for key, value in state_dict.items() if is_int8(value)}
    for key, names in weights.items():
        state_dict |= {f"{key}.{name}": getattr(state_dict[key], name) for name in names}
    return weights


def put_together(state_dict: dict[str, Any], weights: dict[str, list[str]]) -> None:
    """Make int8 weights of the tensors that `take_apart` added."""
    for key, names in weights.items():
        state_dict[key] = state_dict[key].detach()  # it may be the model's own
        for name in names:
            setattr(state_dict[key], name, state_dict.pop(f"{key}.{name}"))


def entry_of(state_dict: dict[str, Any], key: str) -> Any:
    """Return an entry of a state dict, which may lie in an int8 weight; None without."""
    weight, _, name = key.rpartition(".")
    if is_int8(state_dict.get(weight)):
        return getattr(state_dict[weight], name, None)
    return state_dict.get(key)


# --- from files -----------------------------------------------------------------------------------

SCALES = "absmax", "nested_absmax"  # as parts_of yields them
_STATISTICS = *SCALES, "quant_map", "nested_quant_map", "quant_state"


def is_statistic(end: str) -> bool:
    """Whether a 4-bit weight has a tensor beside it under this end of a name in a state dict."""
    return end.partition(".")[0] in _STATISTICS


def is_complete(ends: Collection[str]) -> bool:
    """Whether these tensors beside a 4-bit weight are all that it needs."""
    nested = {"nested_absmax", "nested_quant_map"}.intersection(ends)
    has_format = any(end.startswith("quant_state.") for end in ends)
    return has_format and "absmax" in ends and "quant_map" in ends and len(nested) != 1


def statistics_of(weight: Any) -> dict[str, torch.Tensor]:
    """Return the tensors beside a 4-bit weight, by the ends of their names in a state dict."""
    return weight.quant_state.as_dict(packed=True)  # type: ignore[no-any-return]


def tables_of(weight: Any) -> dict[str, torch.Tensor]:
    """Return what files have of a 4-bit weight besides its bytes and scales, on the CPU: tables,
    and the format with the mean of the scales. {} for another weight.
    """
    if getattr(weight, "quant_state", None) is None:
        return {}
    return {end: t.to("cpu") for end, t in statistics_of(weight).items() if end not in SCALES}


def empty_like(
    old: Any, dtype: torch.dtype, statistics: Mapping[str, torch.Tensor], device: torch.device
) -> nn.Parameter:
    """Return a 4-bit weight in place of the unquantized `old`, with empty bytes and scales.

    dtype: of the bytes. statistics: the tensors beside it; of scales the dtypes count alone.
    """
    given = {
        end: torch.empty(0, dtype=tensor.dtype) if end in SCALES else tensor
        for end, tensor in statistics.items()
    }
    weight = type(old).from_prequantized(
        torch.empty(0, dtype=dtype), given, device=device, module=old.module
    )
    return weight  # type: ignore[no-any-return]


# --- without values -------------------------------------------------------------------------------


def nf4_like(weight: torch.Tensor) -> nn.Parameter:
    """Return a 4-bit weight on the meta device, of the sizes that bitsandbytes gives `weight` with
    double quantization: blocks of 64 elements, and 256 scales to a nested block.
    """
    blocks = -(-weight.numel() // 64)
    packed = torch.empty(-(-weight.numel() // 2), 1, dtype=torch.uint8, device="meta")
    scales = torch.empty(blocks, dtype=torch.uint8, device="meta")
    nested = torch.empty(-(-blocks // 256), device="meta")
    param = nn.Parameter(packed, requires_grad=False)
    param.quant_state = SimpleNamespace(  # type: ignore[attr-defined]
        absmax=scales, state2=SimpleNamespace(absmax=nested), shape=weight.shape
    )
    return param
