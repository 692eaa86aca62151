"""TiledMLP and its siblings: parts of a model that compute one piece of a sequence at a time.

Each piece is checkpointed: backward computes it again, so one piece's activations exist at a time.
Autograd adds the gradients of a weight over the pieces before it hands them on, so the engine sees
one gradient, as without pieces. Therefore `compute_params` means nothing here, and every tensor
that a function uses gets its gradient.
Source: https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism, 0.19.8.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from shardcore.extras.activations import CheckpointOptions, run_checkpointed

_Function = Callable[..., torch.Tensor]
_piece = partial(run_checkpointed, CheckpointOptions())


class TiledMLP:
    """A module's forward over pieces of the tokens. Call `TiledMLP.apply`."""

    @staticmethod
    def apply(
        fn: _Function, self: nn.Module, x: torch.Tensor, shards: int, compute_params: Any = None
    ) -> torch.Tensor:
        """Return `fn(self, x)`, computed over `shards` pieces of x along its dimension -2.

        fn: treats every token alone, as the layers of an MLP do. x: (batch, tokens, features), or
        (tokens, features). compute_params: not needed here.
        """
        return torch.cat([_piece(fn, self, piece) for piece in x.chunk(shards, -2)], -2)


class TiledFusedLogitsLoss:
    """A loss of a model's head over pieces of the tokens. Call `TiledFusedLogitsLoss.apply`."""

    @staticmethod
    def apply(
        fn: _Function,
        self: nn.Module,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Any,
        output_reduction: str,
    ) -> torch.Tensor:
        """Return the mean or sum of `fn(self, x, y)` over `shards` pieces of the tokens.

        `fn` gets batch and tokens as one dimension, and with a mask also the mask. It returns a
        scalar. DeepSpeed computes gradients in forward. shardcore computes the logits again in
        backward, and supports a gradient of any scale. For a plain cross entropy,
        `shardcore.chunked_cross_entropy` needs no pieces of the tokens.

        Args:
            x: (batch, tokens, ...), such as hidden states.
            y: (batch, tokens, ...), such as labels.
            mask: (batch, tokens) or None.
            compute_params: ignored.
            output_reduction: "mean" weighs pieces equally. If pieces differ in their number of
                labels, use "sum" and divide.

        Raises ValueError for another reduction, or for shapes that do not fit.
        """
        _check_reduction("TiledFusedLogitsLoss", output_reduction, ("mean", "sum"))
        if (
            x.dim() < 2
            or y.shape[:2] != x.shape[:2]
            or (mask is not None and mask.shape != x.shape[:2])
        ):
            raise ValueError(
                f"TiledFusedLogitsLoss: x has shape {tuple(x.shape)}, y {tuple(y.shape)} and mask "
                f"{None if mask is None else tuple(mask.shape)}; expected the same batch and "
                f"tokens in front in each"
            )
        inputs = [item.flatten(0, 1).chunk(shards) for item in (x, y, mask) if item is not None]
        return _reduced(
            torch.stack([_piece(fn, self, *pieces) for pieces in zip(*inputs, strict=True)]),
            output_reduction,
        )


def sequence_tiled_compute(
    fn: _Function,
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Return fn(**kwargs_to_shard, **kwargs_to_pass), computed over pieces of a sequence.

    Args:
        fn: a function of keyword arguments. It returns a tensor.
        seqlen: the tokens of the sequence. Each piece has seqlen / shards tokens, rounded up; the
            last pieces have the rest.
        kwargs_to_shard: tensors (batch, tokens, ...). `fn` gets pieces of them.
        kwargs_to_pass: arguments of every call.
        grad_requiring_tensor_key, compute_params: ignored; every tensor gets its gradient.
        output_unshard_dimension: the dimension to join outputs along. 0 stacks scalars, such as
            losses.
        output_reduction: None, "mean" or "sum", of the joined outputs.

    Raises ValueError for another reduction.
    """
    _check_reduction("sequence_tiled_compute", output_reduction, (None, "mean", "sum"))
    size = math.ceil(seqlen / shards)
    outputs = [
        _piece(
            fn,
            **{key: x[:, start : start + size] for key, x in kwargs_to_shard.items()},
            **kwargs_to_pass,
        )
        for start in range(0, size * shards, size)
    ]
    if output_unshard_dimension == 0:
        return _reduced(torch.stack(outputs), output_reduction)
    return _reduced(torch.cat(outputs, output_unshard_dimension), output_reduction)


def _check_reduction(name: str, reduction: str | None, known: tuple[str | None, ...]) -> None:
    if reduction not in known:
        raise ValueError(
            f"{name}: output_reduction is {reduction!r}; expected one of "
            f"{', '.join(map(repr, known))}"
        )


def _reduced(output: torch.Tensor, reduction: str | None) -> torch.Tensor:
    return output if reduction is None else output.mean() if reduction == "mean" else output.sum()
