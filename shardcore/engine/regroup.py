"""Parameters that begin to train after `shard`: the buckets of their units are laid out anew, with
the states that there are.

The engine is then set up again over the buckets, old and new: it stays the same object, which hooks
and optimizer refer to.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardcore.distributed.compare import Entry
from shardcore.engine.agreement import together
from shardcore.engine.bucket import Bucket, allocate
from shardcore.engine.build import PARTLY_FILLED, known_options
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.hooks import attach_state_dicts
from shardcore.engine.optimizer_state import ShardedStates
from shardcore.engine.units import Unit, UnitSpec
from shardcore.optim.group_options import PARAM_DTYPES


def unfreeze(module: nn.Module) -> None:
    """Let all parameters of a sharded model, or of a module of it, train from now on. Collective.

    Sets requires_grad and allocates gradients, masters and states for these parameters. Each
    parameter must be in a group of the optimizer, from the start or through
    `optimizer.add_param_group`. That method does the same for parameters that already require
    gradients. Call `unfreeze` between zero_grad() and the next backward. Units without changes stay
    as they are; other units keep their states bit for bit.

    Raises ValueError or NotImplementedError, on every rank and with nothing changed, in three
    cases: a parameter is in no group, gradients are waiting for a step, or states are in files or
    split by a ratio.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"unfreeze: got a {type(module).__name__}; expected a module")
    params = (
        p
        for m in module.modules()
        for p in getattr(m._parameters, "own", m._parameters).values()
        if p is not None
    )
    engine = engine_behind("unfreeze", next(params, module))
    optimizer: Any = engine._optimizer()
    frozen: list[nn.Parameter] = []
    problem: BaseException | None = None
    try:
        # parameters() starts no gather, so over NCCL it may refuse to be read after an overlapped
        # step
        engine.synchronize()
        frozen += [param for param in module.parameters() if not param.requires_grad]
        grouped = (
            set()
            if optimizer is None
            else {param for group in optimizer.param_groups for param in group["params"]}
        )
        if not grouped.issuperset(module.parameters()):
            raise ValueError(
                "unfreeze: some of these parameters are in no group of the optimizer; call "
                "add_param_group first"
            )
    except BaseException as error:  # of any kind: the other ranks are waiting
        problem = error
    for param in frozen:
        param.requires_grad_(True)
    try:
        regroup(engine, optimizer, problem, "unfreeze")
    except BaseException:
        for param in frozen:
            param.requires_grad_(False)
        raise
    finally:
        problem = None  # else a cycle


@torch.no_grad()
def regroup(
    engine: Engine, optimizer: Any, problem: BaseException | None, op: str = "add_param_group"
) -> None:
    """Bring the buckets in line with what requires gradients and is in which group. Collective.

    problem: why this rank refuses.
    """
    model, plan = engine.model, engine.plan
    param_of = {m.name: m.param for m in (*engine.managed.values(), *engine.constant.values())}
    specs = [
        UnitSpec(unit, model, [(name, param_of[name]) for name in names])
        for unit, names in plan.members.items()
    ]
    asleep = [
        param
        for param, bucket in engine.bucket_of.items()
        if bucket.trainable and not param.requires_grad
    ]
    planned: list[Bucket] = []

    def check() -> list[Entry]:
        if problem is not None:
            raise problem
        tiers = engine.options["offload"]
        if tiers.path is not None or tiers.auto or tiers.ratio < 1.0:
            raise NotImplementedError(
                f"{op}: states are in files, or split by a ratio; expected them on the device or "
                f"the CPU"
            )
        if engine.reducer.holds_grads:
            raise ValueError(
                f"{op}: gradients wait for a step or zero_grad(); expected it between zero_grad() "
                f"and a backward"
            )
        engine.refuse_held(op)
        if plan.host is not None and not engine.updater.buckets:
            raise NotImplementedError(
                f"{op}: nothing trained when shard() was called with offload; expected at least "
                f"one parameter"
            )
        engine.membership.check(op)
        engine.reload_states()
        if engine.saving is not None:
            engine.saving.wait()
        engine.updater.accept_weight_edits()
        planned.extend(plan.builder.plan(model, specs, optimizer))
        entries: list[Entry] = [
            ("parameter", m.name, f"in {b.label}", f"in param_groups[{b.group}]")
            for b in planned
            if b.trainable
            for m in b.params
        ]
        name_of = {param: name for name, param in param_of.items()}
        for index, group in enumerate(optimizer.param_groups):
            where = f"param_groups[{index}]"
            entries += [
                ("optimizer's parameter", name_of[p], f"in {where}") for p in group["params"]
            ]
            entries += [
                ("group option", f"{where}.{key}", str(value))
                for key, value in known_options(optimizer.kind, group).items()
            ]
        return entries

    for param in asleep:  # frozen for now: they keep their states
        param.requires_grad_(True)
    try:
        engine.agree(op, check)
        if engine.unsharder is not None:
            engine.unsharder.reshard_all()
        old_buckets = {_key(bucket): bucket for bucket in engine.buckets}
        buckets = [old_buckets.get(_key(bucket), bucket) for bucket in planned]
        with together(engine.everyone, f"{op}: laying out parameters anew", PARTLY_FILLED):
            units = []
            for unit in plan.units:
                of_unit = [bucket for bucket in buckets if bucket.unit == unit.name]
                replaced = [
                    bucket
                    for bucket in engine.buckets
                    if bucket.unit == unit.name and bucket not in of_unit
                ]
                _move(
                    engine, replaced, [bucket for bucket in of_unit if bucket not in engine.buckets]
                )
                units.append(Unit(unit.name, of_unit, unit.stays))
            for bucket in buckets:  # its buffers belong to the pools of the old reducer
                bucket.grad, bucket.reduced = None, False
            plan = copy.copy(plan)
            plan.model, plan.optimizer, plan.units, plan.buckets = model, optimizer, units, buckets
            attributes = (
                engine.membership,
                engine.hooks,
                engine.handles,
                engine.save_staging,
                engine.saving,
                engine.own_weights,
            )
            divisor, audit = engine.reducer.divisor, engine.reducer.audit
            Engine.__init__(engine, plan)
            engine.updater.audit = engine.reducer.audit = audit
            if divisor != engine.reducer.divisor:
                engine.sum_gradients()
            (
                engine.membership,
                engine.hooks,
                engine.handles,
                engine.save_staging,
                engine.saving,
                engine.own_weights,
            ) = attributes
            attach_state_dicts(model, engine)
            engine.go_on_from(engine.scaler.state())
            optimizer.__dict__["state"] = ShardedStates(
                engine.updater.buckets, engine.settle, optimizer.state.others
            )
    finally:
        for param in asleep:
            param.requires_grad_(False)


def _key(bucket: Bucket) -> tuple[Any, ...]:
    return (
        bucket.unit,
        bucket.dtype,
        bucket.group,
        bucket.trainable,
        *(managed.param for managed in bucket.params),
    )


def _move(engine: Engine, replaced: Sequence[Bucket], new_buckets: Sequence[Bucket]) -> None:
    """Move weights and states of a unit from buckets that are given up to new ones. Collective;
    all of them are gathered.
    """
    store, plan = engine.store, engine.plan
    values: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    before = {managed.param: managed for bucket in replaced for managed in bucket.params}
    for bucket in replaced:
        keys = (
            [key for key in bucket.state_format.keys if key != "master"]
            if bucket.group is not None
            else []
        )
        parts = [
            (bucket, engine.master_or_weight(bucket)),
            *((bucket, store.read(bucket, key)) for key in keys),
        ]
        for key, full in zip(["weight", *keys], engine.full_tensors.of_buckets(parts), strict=True):
            for managed in bucket.params:
                values.setdefault(managed.param, {})[key] = managed.slice_of(full).clone()
    for bucket in new_buckets if plan.host is not None else ():
        if bucket.group is not None:
            bucket.device_numel = 0  # the CPU updates all of it: split stores were refused
    store.replace(
        [b for b in replaced if b.group is not None],
        [b for b in new_buckets if b.group is not None],
    )
    for bucket in new_buckets:
        tier = (
            plan.host.copies
            if plan.host is not None and engine.options["offload"].params is not None
            else None
        )
        plan.builder.allocate(bucket, tier)
        dtype = torch.float32 if bucket.dtype in PARAM_DTYPES else bucket.dtype
        weights = allocate(bucket.layout.numel, dtype, engine.device)
        for managed in bucket.params:
            weight = (
                values[managed.param]["weight"]
                if managed.param in values
                else managed.local.detach()
            )
            managed.slice_of(weights).copy_(weight)
        plan.builder.keep(bucket, bucket.params, weights, store)
        for managed in bucket.params:
            if managed.param in before:
                old = before[managed.param]
                managed.step, managed.tried, managed.cohort = old.step, old.tried, old.cohort
            for key in bucket.state_format.keys if bucket.group is not None else ():
                if key in values.get(managed.param, {}):
                    flat = values[managed.param][key].reshape(-1)
                    for piece in bucket.pieces_of(managed):
                        store.write(
                            bucket,
                            key,
                            piece.start,
                            flat[piece.param_start : piece.param_start + piece.numel],
                        )
