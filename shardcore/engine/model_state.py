"""The model's state dicts: what happens before and after torch makes or loads one.

A state dict has full tensors from the masters, so making one is collective. A module's part of a
state dict that is being made belongs to that read. Note [Local] in full_params.py says where a rank
reads its own weights instead.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardcore.distributed.comm import Traffic, wait_all
from shardcore.engine.agreement import attempt
from shardcore.engine.bucket import Managed, note_written
from shardcore.engine.engine import Engine
from shardcore.engine.quantized import put_together, take_apart
from shardcore.engine.slices import held_by, slice_of
from shardcore.torch_private import storage_id


def begin_read(engine: Engine, module: nn.Module, name: str, prefix: str) -> None:
    """Begin a state_dict of `module`, of this name, or of a part of one that is being read:
    finish the step.

    If that failed, the read that every rank makes says so on all of them.
    """
    reader = engine.state_dict_of
    if (
        reader is None
        or not name
        or prefix == reader[1]
        or (reader[0] and not name.startswith(f"{reader[0]}."))
    ):
        engine.state_dict_of = name, prefix
        engine.reads_own = engine.own_weights or engine.gathered.covers(
            p for p in module.parameters() if p in engine.managed
        )
        problems: list[BaseException] = []

        def refuse() -> None:
            raise problems.pop()

        attempt(problems, engine.synchronize)
        if problems and engine.reads_own:
            refuse()
        if problems:
            engine.read_all("state_dict", name or "the model", refuse)


def end_read(engine: Engine, name: str, prefix: str, state_dict: dict[str, Any]) -> None:
    """Replace the entries of managed parameters with full tensors of their own memory, from the
    masters. Collective.

    With `own_weights`, and inside GatheredParameters, from this rank's weights; then collective
    only over slices. Nothing where this is a part of the state_dict of a module around this
    one.
    """
    if engine.state_dict_of != (name, prefix):
        return
    engine.state_dict_of = None
    if not engine.reads_own:
        engine.read_all("state_dict", name or "the model")
        engine.updater.warn_of_lost_edits("state_dict")
    int8_weights = take_apart(state_dict)
    keys = keys_of(engine.managed.values(), state_dict, prefix)
    with torch.no_grad():
        asked = [
            bucket
            for bucket in engine.buckets
            if any(managed.param in keys for managed in bucket.params)
        ]
        sources = (
            (bucket, bucket.weight if engine.reads_own else engine.master_or_weight(bucket))
            for bucket in asked
        )
        for bucket, full in zip(asked, engine.full_tensors.of_buckets(sources), strict=True):
            for managed in bucket.params:
                if managed.param in keys:
                    values = managed.full(managed.slice_of(full).clone())
                    for key in keys[managed.param]:
                        state_dict[key] = values
        assemble_rest(state_dict)
        put_together(state_dict, int8_weights)


def begin_load(engine: Engine, params: Sequence[nn.Parameter]) -> None:
    """Begin a load_state_dict of a module that has `params`. Where steps are committed,
    collective (see `end_load`).
    """
    engine.refuse_away("load_state_dict")
    engine.updater.refuse_swapped("load_state_dict")
    if engine.gathered.covers(params, spread=True):
        engine.synchronize()
    else:
        engine._settle_commits()
    if engine.unsharder is not None:
        engine.unsharder.begin_load(params)


def end_load(engine: Engine, loaded: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
    """Set masters, too, from the values that were given for parameters, not from those as
    rounded to the weights.

    Where one rank's weights become those of all, the load is an edit of these.
    """
    for param, value in loaded:
        if engine.gathered.covers([param], spread=True):
            continue
        if param in engine.managed:
            bucket, managed = engine.bucket_of[param], engine.managed[param]
            if (
                engine.unsharder is not None
                and engine.unsharder.is_held(param)
                and engine.comm.world_size > 1
            ):
                engine.unsharder.undo.append(engine.updater.undo_of_load(bucket, managed))
            engine.updater.set_weights(bucket, managed, managed.cut(value))
        else:
            engine.constant[param].note_load()
    engine.updater.checks_masters = True
    if engine.unsharder is not None:
        engine.unsharder.end_load()


def use_loaded(engine: Engine) -> None:
    """Use the weights that every rank has set from one checkpoint, behind autograd: gather
    resident ones. Collective.
    """
    gathers: list[Any] = []
    for bucket in engine.buckets if engine.lifetimes.gathers_new_weights else ():
        gathers += engine.comm.all_gather(
            [bucket.weight], Traffic.READ, "the loaded weights", engine.comm.shard_ranks
        )
    every = [*engine.managed.values(), *engine.constant.values()]
    note_written(every)
    for managed in every:
        managed.rewritten = True
    engine.updater.forget_changes()
    engine.updater.checks_masters = True
    engine.loads += 1
    wait_all(gathers)


def keys_of(
    params: Iterable[Managed], state_dict: Mapping[str, Any], prefix: str
) -> dict[torch.nn.Parameter, list[str]]:
    """Return the keys of a module's part of a state dict under which each parameter is.

    By memory, not by name: wrappers (torch's CheckpointWrapper, ...) show their parameters under
    other names.
    """
    param_at = {(*managed.storage, managed.local.shape): managed.param for managed in params}
    keys: dict[torch.nn.Parameter, list[str]] = {}
    for key, entry in state_dict.items():
        value = held_by(entry)
        if (
            type(value) in (torch.Tensor, torch.nn.Parameter)
            and value.layout == torch.strided
            and key.startswith(prefix)
        ):
            at = storage_id(value.untyped_storage()), int(value.storage_offset()), value.shape
            if at in param_at:
                keys.setdefault(param_at[at], []).append(key)
    return keys


def assemble_rest(state_dict: dict[str, Any]) -> None:
    """Replace the slices of frozen weights that are in no bucket with full tensors. Collective."""
    for key, value in state_dict.items():
        if (cut := slice_of(key, value)) is not None:
            state_dict[key] = cut.assemble(held_by(value).detach())
