"""The bytes that a forward keeps for its backward, from a forward on the meta device.

Nothing is computed or allocated. Tensors saved by autograd are counted by storage, as in eager
mode. Attention counts as a fused kernel: it keeps its inputs, its output and a float32 number a
row. A formula replaces the forward of a transformers model, if the forward does not run on the meta
device. Fragmentation of the allocator and temporary memory of kernels are not included.
"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardcore.engine.units import UnitPolicy, plan_units
from shardcore.torch_private import pytree, storage_id

_META = torch.device("meta")
_Storages = dict[int, torch.UntypedStorage]  # by storage_id


@dataclass(frozen=True)
class Activations:
    """Bytes kept by a rank for backward: of every module, or with each unit checkpointed.

    source: a forward or the formula, in words.
    """

    whole: int
    checkpointed: int
    source: str


def activations_of(
    model: nn.Module, dtype: torch.dtype, batch: int, length: int, units: UnitPolicy = "auto"
) -> Activations:
    """Return the activations of `batch` sequences of `length` tokens, with weights in dtype.

    model: on the meta device, called with token ids (batch, length); not changed. A transformers
    model also gets labels. For any other model with an output (batch, length, words), the
    cross-entropy is added. Raises ValueError if the forward fails.
    """
    try:
        return _measured(model, dtype, batch, length, units)
    except Exception as error:
        config = getattr(model, "config", None)
        if all(hasattr(config, name) for name in ("hidden_size", "num_hidden_layers")):
            return _by_formula(config, dtype, batch, length)
        raise ValueError(
            f"estimate: a forward of {type(model).__name__} with token ids ({batch}, {length}) "
            f"raised {type(error).__name__}: {first_line(error).rstrip('.')}. Leave out --batch "
            "and --seq-len; with --fit, --device-memory and --host-memory pass --activations GIB "
            "instead"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), "")


def _by_formula(config: Any, dtype: torch.dtype, batch: int, length: int) -> Activations:
    """Estimate by the usual formula: 34 bytes for each 16-bit element that a layer has as input.

    Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
    (arXiv:2205.05198), equation 2, without the attention scores, as fused kernels do not keep
    them. A checkpointed layer keeps its input alone. The logits are counted three times: in dtype,
    and in float32 with their gradient.
    """
    layer_input = batch * length * config.hidden_size * dtype.itemsize
    layer, layers = 17 * layer_input, config.num_hidden_layers
    logits = batch * length * getattr(config, "vocab_size", 0) * (dtype.itemsize + 8)
    return Activations(
        layers * layer + logits,
        layers * layer_input + layer + logits,
        "by the formula of arXiv:2205.05198",
    )


def _measured(
    model: nn.Module, dtype: torch.dtype, batch: int, length: int, units: UnitPolicy
) -> Activations:
    model = copy.deepcopy(model).to(dtype).train()
    ids = torch.zeros(batch, length, dtype=torch.long, device=_META)
    saved = _Saved(model, units)
    with _FusedAttention(), torch.autograd.graph.saved_tensors_hooks(saved.pack, _same), _META:
        if hasattr(getattr(model, "config", None), "hidden_size"):
            # a mask of four dimensions is used as it is: nothing has to look into it
            mask = torch.ones(batch, 1, length, length, dtype=torch.bool)
            given = {"attention_mask": mask, "labels": ids, "use_cache": False}
            accepted = inspect.signature(model.forward).parameters
            output = model(ids, **{name: given[name] for name in given if name in accepted})
            logits = getattr(output, "logits", None)
        else:
            output = logits = model(ids)
            if isinstance(logits, torch.Tensor) and logits.dim() == 3:
                F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
    gradients = 0
    if isinstance(logits, torch.Tensor):
        saved.keep([logits])
        gradients = logits.numel() * torch.float32.itemsize
    whole, checkpointed = saved.bytes()
    return Activations(
        whole + gradients, checkpointed + gradients, "by a forward on the meta device"
    )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Saved:
    """The storages saved by autograd, by running unit; "" outside of all units."""

    def __init__(self, model: nn.Module, units: UnitPolicy) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._of_model = {storage_id(tensor.untyped_storage()) for tensor in tensors}
        self._running: list[str] = []
        self._by_unit: defaultdict[str, _Storages] = defaultdict(dict)
        self._inputs: _Storages = {}
        for unit in plan_units(model, units):
            if unit.name:
                unit.module.register_forward_pre_hook(self._enter(unit.name), with_kwargs=True)
                unit.module.register_forward_hook(self._leave)

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._running:
                self._put(self._inputs, pytree.tree_leaves((args, kwargs)))
            self._running.append(name)

        return enter

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    def _put(self, storages: _Storages, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                storage = value.untyped_storage()
                if storage_id(storage) not in self._of_model:
                    storages[storage_id(storage)] = storage

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor saved by autograd."""
        storage = tensor.untyped_storage()
        if storage_id(storage) not in self._of_model:
            self._by_unit[self._running[0] if self._running else ""][storage_id(storage)] = storage
        return tensor

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors outside of units."""
        self._put(self._by_unit[""], tensors)

    def bytes(self) -> tuple[int, int]:
        """Return the bytes of all storages, and the bytes with each unit checkpointed: inputs of
        units, storages outside of units, and one unit.
        """
        outside = self._by_unit.pop("", {})
        everything = dict(outside)
        for storages in self._by_unit.values():
            everything |= storages
        kept = outside | self._inputs
        largest = max(
            (
                sum(storages[key].nbytes() for key in storages.keys() - kept.keys())
                for storages in self._by_unit.values()
            ),
            default=0,
        )
        return _bytes(everything), _bytes(kept) + largest


def _bytes(storages: _Storages) -> int:
    return sum(storage.nbytes() for storage in storages.values())


class _FusedAttention(TorchFunctionMode):
    """Counts scaled_dot_product_attention, whose kernel depends on the device, as a fused one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            return _Attention.apply(  # type: ignore[no-untyped-call]
                given["query"], given["key"], given["value"]
            )
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> torch.Tensor:
        # kernels write (batch, length, heads, width), of which the output is a transposed view
        shape = query.shape[:-1] if query.dim() < 4 else query.transpose(-3, -2).shape[:-1]
        out: torch.Tensor = query.new_empty(*shape, value.shape[-1])
        out = out if query.dim() < 4 else out.transpose(-3, -2)
        per_row = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, per_row)
        return out
