"""The full gradient, state or master of one parameter: read, gathered over ranks, or written.

Of a write each rank keeps the part that it owns. Every rank has to give the same values: their
checksum is a part of what ranks agree on, so ranks whose values differ raise.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from shardcore.engine.bucket import note_written, sq_norm_of
from shardcore.engine.engine import Engine
from shardcore.optim.state import check_tensor, step_tensor


@torch.no_grad()
def full_grad(engine: Engine, param: nn.Parameter) -> torch.Tensor | None:
    """Return the full averaged gradient of one parameter, or None if it has none.
    Collective.
    """
    engine.begin_grad_read("full_grad", lambda: engine.part_of("full_grad", param)[1].name)
    bucket, managed = engine.part_of("full_grad", param)
    grad = bucket.owned_grad()
    if not managed.has_grad or grad is None:
        return None
    return engine.full_tensors.of_param(
        bucket, managed, lambda start, numel: grad[start : start + numel]
    ).to(engine.device)


@torch.no_grad()
def full_state(engine: Engine, param: nn.Parameter, key: str) -> torch.Tensor:
    """Return one full optimizer state ("step", "exp_avg", ...; "master") of one parameter.
    Collective.
    """

    def check() -> str:
        bucket, managed = engine.part_of("full_state", param)
        keys = ["step", *(bucket.state_format.keys if bucket.group is not None else ())]
        if key not in keys:
            raise KeyError(
                f"full_state: {managed.name} has no state {key!r}; expected one of "
                f"{', '.join(keys)}"
            )
        engine.updater.accept_weight_edits()
        return f"{key} of {managed.name}"

    engine.agree("full_state", check)
    bucket, managed = engine.part_of("full_state", param)
    if key == "step":
        return step_tensor(managed.step)
    return engine.full_tensors.of_param(bucket, managed, partial(engine.store.read, bucket, key))


@torch.no_grad()
def set_full_state(engine: Engine, param: nn.Parameter, key: str, value: Any) -> None:
    """Set a full optimizer state ("exp_avg", ...) of one parameter; "master": its weights, and the
    master if it has one.

    Collective. Raises ValueError, TypeError or KeyError on every rank, with nothing changed, for a
    frozen parameter, another key or shape, inside full_params, and where ranks differ.
    """
    op = "set_full_state"

    def check() -> str:
        bucket, managed = engine.part_of(op, param)
        keys = ["master", *(bucket.state_format.keys if bucket.group is not None else ())]
        if key not in keys:
            raise KeyError(
                f"{op}: {managed.name} has no state {key!r}; expected one of "
                f"{', '.join(dict.fromkeys(keys))}"
            )
        engine.refuse_held(op)
        engine.updater.accept_weight_edits()
        return _described(f"{key} of {managed.name}", check_tensor(op, "value", value, param.shape))

    engine.agree(op, check)
    bucket, managed = engine.part_of(op, param)
    flat = managed.cut(value.detach()).reshape(-1)
    if key != "master":
        for piece in bucket.pieces_of(managed):
            part = flat[piece.param_start : piece.param_start + piece.numel]
            engine.store.write(bucket, key, piece.start, part.to(bucket.owned_weight.device))
        return
    if engine.unsharder is not None:
        engine.unsharder.reshard_all()  # what is kept unsharded has the old values
    engine.updater.set_weights(bucket, managed, flat.float())
    note_written([managed])
    managed.version = managed.version_now


@torch.no_grad()
def set_full_grad(engine: Engine, param: nn.Parameter, value: Any, scale: float = 1.0) -> None:
    """Replace the full averaged, unscaled gradient of one parameter, rounded to the dtype that
    gradients have. Collective.

    value: is divided by scale, what the step multiplies gradients by.

    Raises ValueError or TypeError on every rank, with nothing changed, for a frozen parameter, one
    without a gradient, another shape, and where ranks differ.
    """
    op = "set_full_grad"

    def check() -> str:
        managed = engine.part_of(op, param)[1]
        return _described(managed.name, check_tensor(op, "value", value, param.shape))

    engine.begin_grad_read(op, check)
    bucket, managed = engine.part_of(op, param)
    if not managed.has_grad or not bucket.grads():
        raise ValueError(
            f"{op}: {managed.name} has no gradient; expected a backward through it before"
        )
    flat = managed.cut(value.detach() if scale == 1.0 else value.detach() / scale).reshape(-1)
    for start, part in bucket.grads():
        for owner, piece, view in bucket.owned_views(part, start):
            if owner is managed:
                first = piece.param_start + max(0, start - piece.start)
                view.copy_(flat[first : first + view.numel()])
    bucket.sq_norm = sq_norm_of(bucket.own_grads(), engine.device)
    engine.reducer.show_grads()


def _described(words: str, value: torch.Tensor) -> str:
    bits = value.detach().float().contiguous().view(torch.int32)
    # of integers: in any order, on any device
    return f"{words} with the checksum {bits.sum(dtype=torch.int64).item()}"
