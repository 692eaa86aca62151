"""Weights that bitsandbytes has quantized to 4 bits: the scales beside them, and what else their
layers need under an engine.

Such a weight (`Params4bit`) holds packed bytes. Its `quant_state` holds one scale per block, in 8
bits with one float32 per 256 of them (double quantization), and no module has these tensors. Here
they are frozen parameters of the weight's unit, so at stage 3 they are sharded, gathered and freed
like any other. They stay the same objects: layers and autograd reach them through `quant_state`.
Every rank keeps the rest whole: two tables and the mean of the scales.

bitsandbytes' names are used in this file alone, and it is never imported. Tested with 0.50.
"""

from collections.abc import Iterable, Iterator
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


def scales_of(param: torch.Tensor) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the scales of a 4-bit weight as frozen parameters, by the names that they have behind
    the weight's in a state dict; nothing for another parameter.
    """
    state: Any = getattr(param, "quant_state", None)
    for name, holder in (("absmax", state), ("nested_absmax", getattr(state, "state2", None))):
        if holder is not None:
            if not isinstance(holder.absmax, nn.Parameter):
                holder.absmax = nn.Parameter(holder.absmax, requires_grad=False)
            yield name, holder.absmax


def with_scales(
    named: Iterable[tuple[str, nn.Parameter]],
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield named parameters, and after each its scales."""
    for name, param in named:
        yield name, param
        yield from ((f"{name}.{key}", scale) for key, scale in scales_of(param))


def named_means(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the mean of the scales of each weight that has one: a tensor of shape ()."""
    for name, param in model.named_parameters():
        mean: Any = getattr(getattr(param, "quant_state", None), "offset", None)
        if mean is not None:
            yield f"{name}.nested_offset", mean


def numel_of(param: torch.Tensor) -> int:
    """Return the number of elements of a parameter; of a 4-bit weight, those before packing."""
    state: Any = getattr(param, "quant_state", None)
    return param.numel() if state is None else prod(state.shape)


def described(param: torch.Tensor) -> str:
    """Return in words how a weight is quantized, for ranks to compare."""
    state: Any = getattr(param, "quant_state", None)
    return "" if state is None else f"in {state.quant_type} blocks of {state.blocksize}"


def check_model(model: nn.Module, stage: int) -> None:
    """Raise ValueError for weights in a form that cannot be trained over at this stage."""
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


def keep_class(new: nn.Parameter, old: nn.Parameter) -> nn.Parameter:
    """Return `new`, which takes the place of `old`, as a 4-bit weight if `old` is one."""
    if hasattr(old, "quant_state"):
        new.__class__ = old.__class__
        new.__dict__.update(old.__dict__)
        del new.__dict__["_shardcore_engine"]
    return new


def nf4_like(weight: torch.Tensor) -> nn.Parameter:
    """Return a 4-bit weight on the meta device, of the sizes that bitsandbytes gives `weight` with
    its defaults: blocks of 64 elements, and double quantization in blocks of 256 scales.
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
