"""A model of PEFT as an ordinary one: LoRA adapters merged into their base, and 4-bit or int8
weights as floats, unit by unit, with the configs of the base.

The values are those that forward uses: W + scaling * B A, in the dtypes that weights train in,
rounded once. PEFT's own merge_and_unload would quantize a 4-bit base again, and would make
Parameters that the engine does not know. Names of PEFT are used in this file alone; it is never
imported. Tested with PEFT 0.21.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import groupby, repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardcore.checkpoint.format import plain_name
from shardcore.engine.engine import Engine
from shardcore.engine.quantized import dequantized, parts_of, shape_and_dtype
from shardcore.torch_private import is_persistent


class Merged(NamedTuple):
    """A parameter or buffer of the ordinary model, and the LoRA layer around it, if any."""

    name: str
    tensor: torch.Tensor
    layer: Any = None

    def value(self) -> torch.Tensor:
        """Return its value, while the weights are unsharded."""
        value = dequantized(self.tensor)
        for adapter in _active(self.layer):
            variant = getattr(self.layer, "lora_variant", {}).get(adapter)
            if variant is None:
                value = value + self.layer.get_delta_weight(adapter)
            else:  # DoRA, alone
                value = variant.merge_safe(self.layer, adapter, value)
                self.layer._cache_pop(f"{adapter}-weight_norm")
        return value

    def params(self) -> set[nn.Parameter]:
        """Return the parameters that the value is made of."""
        params = set() if self.layer is None else set(self.layer.parameters())
        params |= {part for _, part in parts_of(self.tensor)}
        return params | ({self.tensor} if isinstance(self.tensor, nn.Parameter) else set())


def merged_of(op: str, model: Any, engine: Engine | None) -> dict[str, Merged]:
    """Return the tensors of the ordinary model by name, tied ones once, in the order of units. op:
    the call, for errors.

    Raises ValueError for a model without adapters of PEFT, and NotImplementedError for other
    adapters than LoRA and DoRA.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        raise ValueError(
            f"{op}: merge_adapters is True for a {type(model).__name__}; expected a model of PEFT"
        )
    if engine is not None and engine.comm.slices:
        raise NotImplementedError(
            f"{op}: merge_adapters does not support tensor-parallel models yet"
        )
    # with the layer: of tied weights, one may be under an adapter and the other not
    first: dict[tuple[torch.Tensor, Any], Merged] = {}
    for each in _tensors(op, model.get_base_model(), ""):
        first.setdefault((each.tensor, each.layer), each)
    if engine is None:
        return {each.name: each for each in first.values()}
    order = {bucket.unit: number for number, bucket in enumerate(engine.buckets)}
    tensors = sorted(first.values(), key=lambda each: order.get(unit_of(engine, each), -1))
    return {each.name: each for each in tensors}


def dtype_of_base(merged: Iterable[Merged]) -> torch.dtype | None:
    """Return the dtype of the weights under adapters, before they were quantized; of several dtypes
    the one that holds all; None without adapters.
    """
    dtypes = [shape_and_dtype(each.tensor)[1] for each in merged if each.layer is not None]
    return reduce(torch.promote_types, dtypes) if dtypes else None


def units_of(engine: Engine, merged: Mapping[str, Merged]) -> list[list[str]]:
    """Return the names of `merged` by unit, in its order."""
    return [
        [*names] for _, names in groupby(merged, key=lambda name: unit_of(engine, merged[name]))
    ]


@torch.no_grad()
def merged_values(
    engine: Engine | None,
    merged: Sequence[Merged],
    dtypes: Mapping[str, torch.dtype],
    is_wanted: Callable[[str], bool],
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield values by name in these dtypes, in the order of `merged`, while the next unit is
    gathered. Collective: every rank takes all. An error is raised after the last unit.

    is_wanted: whether this rank uses the value; None in place of all other values. device: None for
    that of the weights.
    """
    errors: list[Exception] = []
    units = [[*unit] for _, unit in groupby(merged, key=lambda each: unit_of(engine, each))]
    turns: Iterable[None] = repeat(None, len(units))
    if engine is not None and engine.unsharder is not None:
        params = [set().union(*(each.params() for each in unit)) for unit in units]
        turns = engine.unsharder.in_turn(params)
    for _, unit in zip(turns, units, strict=True):
        for each in () if errors else unit:
            try:
                value = None
                if is_wanted(each.name):  # copied, as a weight alone is memory of the unit
                    value = each.value().to(device, dtypes[each.name], copy=True)
            except Exception as error:  # the other ranks gather all units
                errors.append(error)
                break
            yield each.name, value
            del value
    if errors:
        raise errors.pop()


def save_configs(
    engine: Engine, merged: Mapping[str, Merged], folder: Path, dtype: torch.dtype | None
) -> None:
    """Write the config of the base without its quantization, and its generation config, as
    transformers' save_pretrained does. Nothing for a base of another library.

    dtype: of the weights in files; None: as the config has it.
    """
    wrapped: Any = engine.model
    model = wrapped.get_base_model()
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if dtype is not None:
        config.dtype = dtype
    if getattr(config, "tie_word_embeddings", False):
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        names = [f"{plain_name(name)}.weight" for name, m in model.named_modules() if m in ends]
        config.tie_word_embeddings = len(names) < 2 or not all(name in merged for name in names)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def unit_of(engine: Engine | None, merged: Merged) -> str:
    """Return the unit of a tensor, or of a part of it; "" for the root and what is in no bucket."""
    if engine is None:
        return ""
    params = [merged.tensor, *(part for _, part in parts_of(merged.tensor))]
    bucket = next((engine.bucket_of[p] for p in params if p in engine.bucket_of), None)  # type: ignore[index]
    return "" if bucket is None else bucket.unit


def _tensors(op: str, module: Any, name: str) -> Iterator[Merged]:
    """Yield the tensors of the ordinary module that a module of PEFT's model stands for."""
    prefix = f"{name}." if name else ""
    if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
        (active,) = module.active_adapters
        yield from _tensors(op, module.modules_to_save[active], name)
    elif hasattr(module, "base_layer"):
        _check_layer(op, module, name)
        base = module.get_base_layer()
        for each in _tensors(op, base, name):
            yield each._replace(layer=module) if each.tensor is base.weight else each
    else:
        for key, param in module._parameters.items():
            if param is not None:
                yield Merged(plain_name(prefix + key), param)
        for key, buffer in module._buffers.items():
            if buffer is not None and is_persistent(module, key):
                yield Merged(plain_name(prefix + key), buffer)
        for key, child in module._modules.items():
            if child is not None:
                yield from _tensors(op, child, prefix + key)


def _active(layer: Any) -> list[str]:
    """Return the adapters of a LoRA layer that forward adds to its base."""
    if layer is None or layer.merged or layer.disable_adapters:
        return []
    return [each for each in layer.active_adapters if each in _adapters(layer)]


def _adapters(layer: Any) -> list[str]:
    return [*getattr(layer, "lora_A", ()), *getattr(layer, "lora_embedding_A", ())]


def _check_layer(op: str, layer: Any, name: str) -> None:
    """Raise NotImplementedError unless the layer adds B A to its weight, or is DoRA's."""
    variants, biases = getattr(layer, "lora_variant", {}), getattr(layer, "lora_bias", {})
    active = _active(layer)
    others = [each for each in active if each in variants]
    is_dora = len(active) == 1 and all(
        type(variants[each]).__name__ in ("DoraLinearVariant", "DoraEmbeddingVariant")
        for each in others
    )
    if (
        (others and not is_dora)
        or any(map(biases.get, active))
        or not _adapters(layer)
        or not hasattr(layer.get_base_layer(), "weight")
    ):
        raise NotImplementedError(
            f"{op}: merge_adapters supports LoRA without lora_bias, and DoRA as the only adapter, "
            f"and {name} has another adapter ({type(layer).__module__}.{type(layer).__name__})"
        )
