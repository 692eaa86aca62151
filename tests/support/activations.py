"""The most memory that forward and backward take beside the weights, from a run on the meta
device, which takes none.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they are alive."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.alive_bytes = self.peak_bytes = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, torch.Tensor)
        }
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if (
                isinstance(tensor, torch.Tensor)
                and (storage := tensor.untyped_storage())._cdata not in self._known | given
            ):
                self._known.add(storage._cdata)
                self.alive_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return results

    def _freed(self, key: int, count: int) -> None:
        self._known.discard(key)
        self.alive_bytes -= count


def peak_bytes(
    model: nn.Module, loss_of: Callable[[], torch.Tensor], *, fused_attention: bool = True
) -> int:
    """Return the peak of activations and of passing gradients in a forward and backward of a model
    on meta.

    Each weight's gradient is freed at once, as the engine's reduction does. fused_attention: as on
    GPUs (FlashAttention, which keeps query, key, value, output and a row of sums); else as meta
    does it by default, which keeps the probabilities.
    """
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    with (
        pytest.MonkeyPatch.context() as patch,
        Live([*model.parameters(), *model.buffers()]) as live,
    ):
        if fused_attention:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", _fused_attention)
        # transformers 5.24 looks into the positions for packed sequences; there are no values on
        # meta.
        patch.setattr(
            "transformers.masking_utils.find_packed_sequence_indices",
            lambda *_, **__: None,
            raising=False,
        )
        loss_of().backward()
    return live.peak_bytes


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    **how: Any,
) -> torch.Tensor:
    assert attn_mask is None
    how.pop("enable_gqa", None)
    groups = query.shape[1] // key.shape[1]
    key, value = (
        tensor.repeat_interleave(groups, 1) if groups > 1 else tensor for tensor in (key, value)
    )
    is_causal, scale = how.pop("is_causal", False), how.pop("scale", None)
    assert not how
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
