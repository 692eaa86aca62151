"""Loading: any checkpoint (source.Source) into any sharded model, each rank reading what it
keeps, one range at a time.
"""

import errno
import logging
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardcore.checkpoint import format as layout
from shardcore.checkpoint import plain
from shardcore.checkpoint.directory import LATEST, find
from shardcore.checkpoint.foreign.deepspeed_files import open_foreign
from shardcore.checkpoint.foreign.torch_files import source_of, tree_of
from shardcore.checkpoint.format import named_buffers, named_parameters
from shardcore.checkpoint.save import (
    EMA_UPDATES,
    Averages,
    check_pairs,
    columns_of,
    finish_saving,
    ranges_of,
)
from shardcore.checkpoint.sharded import rounding, warn_of_rounding
from shardcore.checkpoint.slots import open_committed
from shardcore.checkpoint.source import Source, reporting
from shardcore.distributed.everyone import Everyone, attempt_together
from shardcore.engine.bucket import Bucket
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.slices import held_by
from shardcore.layout import Columns

logger = logging.getLogger("shardcore")

_AHEAD = 4  # ranges that are read while one is used


@dataclass(frozen=True)
class Loaded:
    """What `load` found. missing: names of the model that the checkpoint lacks; unexpected: the
    reverse (strict=False).
    """

    path: Path
    client_state: Mapping[str, Any]
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()


@dataclass(frozen=True)
class Wanted:
    """What to take from a checkpoint. in_place: states and masters that lie in files are those
    of the checkpoint already.
    """

    strict: bool = True
    states: bool = True
    scheduler: Any = None
    stateful: Mapping[str, Any] = field(default_factory=dict)
    ema: Averages | None = None
    in_place: bool = False


def load(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tag: str | None = None,
    scheduler: Any = None,
    stateful: Mapping[str, Any] | None = None,
    ema: Averages | None = None,
    strict: bool = True,
) -> Loaded:
    """Load a checkpoint into a sharded model and its optimizer, of any world size, stage, tier and
    state form. Collective.

    Each rank reads what it keeps, 4 MiB at a time, and checks checksums. What this optimizer cannot
    keep exactly (8-bit and bfloat16 states, weights without masters) is rounded, with one warning.
    Random states are restored where the world has the size that it had, if an optimizer is given.
    Weights and states are used bit for bit otherwise. With an optimizer, gradients that wait for
    its step are dropped.

    Args:
        directory: What `save` was given (then "latest" names the checkpoint), or one checkpoint.
        model, optimizer: What shard returned; without an optimizer its states are left out.
        tag: The name of the checkpoint in `directory`.
        scheduler: Its `load_state_dict` is called, if a scheduler was saved.
        stateful: By the names that `save` was given: `load_state_dict` is called with what this
            rank saved. The world must have the size that it had.
        ema: An EMA of the model, to go on from the one that was saved.
        strict: Raise if names differ. If False, missing ones keep their values, and both are
        returned.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError, TypeError: For other names, shapes or groups, or another optimizer's states,
        before anything is changed; for
            damaged data, with file and offset (then the model is partly loaded). On the other ranks
            RuntimeError.
        OSError: For files that cannot be read.
    """
    engine = engine_behind("load", model)
    attempt_together(
        engine.everyone,
        "load",
        lambda: check_pairs("load", engine, optimizer, ema),
        "nothing was changed",
    )
    if ema is not None:
        ema.follow()
    finish_saving(engine)
    wanted = Wanted(strict, optimizer is not None, scheduler, stateful or {}, ema)
    source = open_together(engine, Path(directory), tag)
    try:
        return load_from(source, engine, wanted)
    finally:
        source.close()


def open_together(engine: Engine, folder: Path, tag: str | None) -> Source:
    """Open a checkpoint, the one that rank 0 finds, on every rank, or raise on every rank.
    Collective.
    """
    comm, folder = engine.everyone, folder.absolute()
    then = "nothing was changed"
    path = attempt_together(
        comm, "load", lambda: find("load", folder, tag) if comm.rank == 0 else folder, then
    )
    path = Path(comm.gather_json(str(path))[0])  # "latest" may be moved meanwhile

    def opened() -> Source:
        engine.synchronize()  # parameters are read for their names
        return open_path("load", path, names_of_optimizer(engine))

    # No file of it is open before its first read, so there is nothing to close where another rank
    # has failed.
    source: Source = attempt_together(comm, "load", opened, then)
    return source


def names_of_optimizer(engine: Engine) -> dict[str, list[str]]:
    """Return what the optimizer updates, in the order of its groups; without one, all. Each with
    the other names of it.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in named_parameters(engine.model, remove_duplicate=False):
        names.setdefault(param, []).append(name)
    updated = [
        names[param] for group in engine.groups for param in group["params"] if param in names
    ]
    return {first: others for first, *others in updated or names.values()}


def open_checkpoint(op: str, folder: Path, tag: str | None, names: Collection[str] = ()) -> Source:
    """Open a checkpoint, of shardcore, DeepSpeed or torch. Raises OSError, or ValueError for what
    is none.

    names: see open_foreign; empty where only weights are read.
    """
    return open_path(op, find(op, folder, tag), names)


def is_there(folder: Path) -> bool:
    """Return whether `load` finds a checkpoint in a folder, whole or not; False if there is
    none, or none without its tag.
    """
    if (folder / LATEST).is_file():
        return True
    try:
        open_checkpoint("load", folder, None).close()
    except FileNotFoundError as error:
        return str(error.filename) != str(folder)
    except (OSError, ValueError):
        pass  # loading says what is wrong with it
    return True


def open_path(op: str, path: Path, names: Collection[str] = ()) -> Source:
    """Open the checkpoint that `find` found. See open_checkpoint."""
    try:
        if (path / layout.MANIFEST).exists():
            return _of_planner(layout.Checkpoint(path), names)
        if (path / layout.data_file(0)).exists():
            raise ValueError(
                f"load: {path} has {layout.data_file(0)} without {layout.MANIFEST}; expected both "
                f"(is the copy complete?)"
            )
        source = (open_committed(path) if path.is_dir() else None) or open_foreign(path, names)
    except ValueError as error:
        error.args = (str(error).replace("load: ", f"{op}: ", 1),)
        raise
    if source is None:
        raise FileNotFoundError(
            errno.ENOENT,
            f"{op}: this is no checkpoint; expected one of shardcore, DeepSpeed or torch",
            str(path),
        )
    return source


def _of_planner(own: layout.Checkpoint, names: Collection[str]) -> Source:
    """Return a checkpoint of ours; what shardcore.dcp wrote has the names of the state dict,
    which its planner had joined.
    """
    objects, ways = objects_of(own)
    if not isinstance(ways, dict):
        return own
    items: dict[str, Any] = objects
    for name, shape in own.shapes.items():  # each as a file_tensors.Stored
        dtype = own.read(name, "weight", 0, 0).dtype
        items[name] = SimpleNamespace(
            shape=shape, dtype=dtype, read=partial(own.read, name, "weight")
        )
    with reporting(f"{own.path} is damaged or of another form", "one by shardcore"):
        tree = tree_of((ways.get(name, (name,)), value) for name, value in items.items())
        source = source_of(own.path, tree, names)
    source.close = own.close  # type: ignore[method-assign]
    return source


def objects_of(own: layout.Checkpoint) -> tuple[dict[str, Any], Any]:
    """Return what shardcore.dcp wrote that is no tensor, and the planner's data; ({}, None) if
    another wrote it.
    """
    where = str(own.path / layout.MANIFEST)
    with reporting(f"{where} is no manifest", "one by shardcore"):
        found = own.manifest.get("dcp", {"objects": {}, "planner_data": None})
        objects = {
            str(name): plain.from_json(value, where) for name, value in found["objects"].items()
        }
        return objects, plain.from_json(found["planner_data"], where)


@torch.no_grad()
def load_from(source: Source, engine: Engine, wanted: Wanted) -> Loaded:
    """Load from an open checkpoint. Collective. See `load`."""
    missing: list[str] = []
    unexpected: list[str] = []
    options: list[dict[str, Any]] | None = None
    with_extra_state = layout.with_extra_state(engine.model)

    def check() -> str:
        nonlocal options
        named = _named(engine)
        there = {
            tensor
            for name, tensor in named.items()
            if name in source.shapes or name in source.frozen
        }
        missing.extend(name for name, tensor in named.items() if tensor not in there)
        unexpected.extend(
            f"{name}._extra_state" for name in source.extra_state if name not in with_extra_state
        )
        unexpected.extend(name for name in source.shapes if name not in named)
        if wanted.strict and (missing or unexpected):
            raise ValueError(
                f"load: {source.path} has other names than the model: missing "
                f"{_in_short(missing)}; unexpected "
                f"{_in_short(unexpected)}; expected the same model, or strict=False"
            )
        for name, tensor in named.items():
            if name in source.shapes and source.shapes[name] != tensor.shape:
                raise ValueError(
                    f"load: {name} has shape {source.shapes[name]} in {source.path}; expected "
                    f"{tuple(tensor.shape)}"
                )
        engine.refuse_held("load")
        if (
            wanted.states
            and wanted.strict
            and source.groups is None
            and not source.steps
            and engine.updater.buckets
        ):
            raise ValueError(
                f"load: {source.path} has no states of an optimizer; expected some, or load "
                f"without an optimizer (which leaves "
                "its states as they are), or strict=False (which resets them)"
            )
        check_stateful("load", source, engine.everyone, wanted.stateful)
        if wanted.ema is not None:
            _check_averages(source, engine)
        if wanted.states:
            options = options_of(source, engine)
            if not wanted.in_place:  # else the source has what is to be read alone
                _check_states(source, engine)
            engine.scaler.check_state("load", source.loss_scale)
        if wanted.scheduler is not None:
            check_scheduler("load", source, wanted.scheduler)
        return f"{source.path.name}, {len(named)} names"

    engine.together("load", check)
    rounded: set[str] = set()
    then = "the model is partly loaded: load another checkpoint before it is used"
    attempt_together(
        engine.everyone, "load", lambda: _load_tensors(source, engine, wanted, rounded), then
    )
    engine.use_loaded()
    if options is not None:
        for group, new in zip(engine.groups, options, strict=True):
            group.update(new)
    if wanted.states:
        engine.go_on_from(source.loss_scale, source.counters.get("skipped_steps"))
        engine.zero_grad()
    if wanted.ema is not None:
        wanted.ema.updates = source.counters.get(EMA_UPDATES, 0)

    def restore_rest() -> None:
        if wanted.scheduler is not None:
            wanted.scheduler.load_state_dict(source.scheduler)
        for name, value in source.extra_state.items():
            if name in with_extra_state:
                with_extra_state[name].set_extra_state(value)

    restore_rank("load", source, engine, wanted, restore_rest)
    warn_of_rounding("load", engine.everyone, rounded, stacklevel=3)
    return Loaded(source.path, source.client_state or {}, missing, unexpected)


def _of_rank(source: Source, ranks: Everyone) -> Mapping[str, Any] | None:
    """Return what this rank saved for itself; None where there is none, or ranks have other
    parts of the model now.
    """
    same = (source.world_size, source.slices) == (ranks.world_size, ranks.slices)
    return source.of_rank(ranks.rank) if same else None


def check_stateful(op: str, source: Source, ranks: Everyone, stateful: Mapping[str, Any]) -> None:
    """Raise ValueError unless the source has the state of each of these for this rank."""
    if not stateful:
        return
    of_rank = _of_rank(source, ranks)
    if of_rank is None:
        there, here = (
            f"{one.world_size}" + f" ({one.slices} slices)" * (one.slices > 1)
            for one in (source, ranks)
        )
        raise ValueError(
            f"{op}: stateful has {', '.join(stateful)}, but {source.path} was saved by {there} "
            f"ranks, each with its own; expected {here}, or None (keep positions in data in "
            f"client_state)"
        )
    if lacks := ", ".join(name for name in stateful if name not in of_rank["stateful"]):
        raise ValueError(
            f"{op}: stateful has {lacks}, which {source.path} does not have for this rank; "
            f"expected the names that were saved ({', '.join(of_rank['stateful']) or 'none'})"
        )


def _check_averages(source: Source, engine: Engine) -> None:
    updated = {managed.param for bucket in engine.updater.buckets for managed in bucket.params}
    names = sorted(name for param, name in _names_in(source, engine).items() if param in updated)
    if lacks := [name for name in names if layout.EMA not in source.keys(name)]:
        raise ValueError(
            f"load: {source.path} has no moving average of {_in_short(lacks)}; expected one that "
            f"save was given ema for, or ema=None"
        )


def _check_states(source: Source, engine: Engine) -> None:
    """Raise ValueError where parameters have some of the states that a step needs: those of
    another optimizer.
    """
    names = _names_in(source, engine)
    for bucket in engine.updater.buckets:
        for name in (names[managed.param] for managed in bucket.params if managed.param in names):
            keys, saved = (
                set(bucket.state_format.keys) - {"master", "max_exp_avg_sq"},
                source.keys(name),
            )
            if source.steps.get(name, 0) > 0 and (lacks := sorted(keys - set(saved))):
                raise ValueError(
                    f"load: {source.path} has no {lacks[0]!r} of {name}, so another optimizer "
                    f"saved it; expected one that "
                    f"keeps {', '.join(sorted(keys))} (or load without an optimizer, and train on "
                    f"from its weights)"
                )


def check_scheduler(op: str, source: Source, scheduler: Any) -> None:
    """Raise ValueError unless the source has a state of a scheduler of this kind: torch's take
    any dict, or fail half-way.
    """
    if source.scheduler is None:
        others = (
            f" (it has {_in_short(list(map(str, source.client_state)))})"
            if source.client_state
            else ""
        )
        raise ValueError(
            f"{op}: {source.path} has no scheduler's state{others}; expected one, or scheduler=None"
        )
    # Private keys, and "verbose", come and go with torch's versions.
    saved, here = (
        {key for key in state if not str(key).startswith("_") and key != "verbose"}
        for state in (source.scheduler, scheduler.state_dict())
    )
    if saved != here:
        raise ValueError(
            f"{op}: {source.path} has a scheduler's state of {_in_short(sorted(map(str, saved)))}; "
            f"expected "
            f"{_in_short(sorted(map(str, here)))}, as this {type(scheduler).__name__} has: make "
            f"the scheduler that was saved "
            "(DeepSpeed's are in shardcore.deepspeed.lr_schedules), or give scheduler=None and set "
            "it yourself"
        )


def _named(engine: Engine) -> dict[str, torch.Tensor]:
    return {
        **dict(named_parameters(engine.model, remove_duplicate=False)),
        **dict(named_buffers(engine.model)),
    }


def _names_in(source: Source, engine: Engine) -> dict[torch.Tensor, str]:
    """Return what a source has of the model, with the first name there of each: it may have a
    tied weight under one alone.
    """
    return {
        tensor: name for name, tensor in reversed(_named(engine).items()) if name in source.shapes
    }


def _in_short(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) + more) or "none"


def options_of(source: Source, engine: Engine) -> list[dict[str, Any]] | None:
    """Return the options that the checkpoint gives each group of the optimizer; None if it has
    no groups.
    """
    if source.groups is None:
        return None
    sizes = [
        [len(group["params"]) for group in groups]
        for groups in (source.groups, engine.updater.groups)
    ]
    if source.numbered and sizes[0] != sizes[1]:
        raise ValueError(
            f"load: {source.path} has parameters by number, in groups of {sizes[0]}; expected "
            f"groups of {sizes[1]}, as this "
            "optimizer: make the groups that it was saved with, in their order (or save "
            "param_names in each group)"
        )
    names: dict[torch.Tensor, str] = {param: name for name, param in named_parameters(engine.model)}
    names.update(_names_in(source, engine))
    group_of = {name: group for group in source.groups for name in group["params"]}
    found = []
    for index, group in enumerate(engine.updater.groups):
        here = [names[param] for param in group["params"]]
        theirs = {id(group_of[name]): group_of[name] for name in here if name in group_of}
        if len(theirs) > 1:
            raise ValueError(
                f"load: param_groups[{index}] has parameters of {len(theirs)} groups of "
                f"{source.path}; expected groups that are the same as there, or parts of them"
            )
        options = next(iter(theirs.values()), group)
        found.append({**options, "params": here})
    with reporting(f"{source.path} has 'groups' that no step can use", "those of this optimizer"):
        imported = engine.updater.kind.import_groups(
            "load", engine.updater.groups, {"state": {}, "param_groups": found}
        )
    engine.updater.check_fixed(
        "load",
        [{**group, **new} for group, new in zip(engine.updater.groups, imported, strict=True)],
    )
    return imported


# --- tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """A range to read, of a slice (None: all) of a tensor, and what to do with it."""

    name: str
    key: str
    columns: Columns | None
    start: int
    numel: int
    use: Callable[[torch.Tensor], None]


def _load_tensors(source: Source, engine: Engine, wanted: Wanted, rounded: set[str]) -> None:
    """Read what this rank keeps; nothing is sent. What is not kept exactly is added to
    `rounded`, in words.
    """
    if engine.unsharder is not None:
        # what is kept, or still being gathered after a failed forward, has the old values
        engine.unsharder.reshard_all()
    with ThreadPoolExecutor(_AHEAD, "shardcore-load") as pool:
        for read, values in _ahead(pool, source, _reads(source, engine, wanted, rounded)):
            read.use(values)
    if wanted.states:
        names = _names_in(source, engine)
        for bucket in engine.updater.buckets:
            for managed in bucket.params:
                if managed.param in names:
                    managed.step = int(source.steps.get(names[managed.param], 0))


def _ahead(
    pool: ThreadPoolExecutor, source: Source, reads: Iterable[_Read]
) -> Iterator[tuple[_Read, torch.Tensor]]:
    """Yield each range and what it has, the next ones being read meanwhile."""
    coming: deque[tuple[_Read, Future[torch.Tensor]]] = deque()
    for read in reads:
        coming.append(
            (
                read,
                pool.submit(
                    source.read_slice, read.name, read.key, read.columns, read.start, read.numel
                ),
            )
        )
        if len(coming) > _AHEAD:
            first, future = coming.popleft()
            yield first, future.result()
    for first, future in coming:
        yield first, future.result()


def _reads(source: Source, engine: Engine, wanted: Wanted, rounded: set[str]) -> Iterator[_Read]:
    names = _names_in(source, engine)
    for bucket in engine.buckets:
        tiers = (0, bucket.device_numel), (bucket.device_numel, bucket.owned_numel)
        for managed, start, param_start, numel in (
            one for tier in tiers for one in ranges_of(bucket, *tier)
        ):
            if managed.param in names:
                what, chunk = (names[managed.param], managed.columns), (start, param_start, numel)
                yield from _reads_of(source, what, engine, bucket, chunk, wanted, rounded)
                if wanted.ema is not None and bucket.group is not None:
                    average = wanted.ema.shard(bucket)[start : start + numel]
                    yield _Read(
                        what[0], layout.EMA, what[1], param_start, numel, partial(_set, average)
                    )
    for tensor, name in names.items():
        if tensor not in engine.bucket_of:
            local, columns = held_by(tensor), columns_of(name, tensor)
            if not local.is_contiguous():
                yield _Read(name, "weight", columns, 0, local.numel(), partial(_set, local))
                continue
            for start, numel in layout.cut(0, local.numel(), columns):
                yield _Read(
                    name,
                    "weight",
                    columns,
                    start,
                    numel,
                    partial(_set, local.view(-1)[start : start + numel]),
                )


def _set(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.copy_(values.view(tensor.shape))


def _reads_of(
    source: Source,
    what: tuple[str, Columns | None],
    engine: Engine,
    bucket: Bucket,
    chunk: tuple[int, int, int],
    wanted: Wanted,
    rounded: set[str],
) -> Iterator[_Read]:
    (name, columns), (start, param_start, numel) = what, chunk
    store = engine.store
    there = wanted.in_place and start >= bucket.device_numel

    def use_weight(values: torch.Tensor) -> None:
        bucket.assign(start, values.to(bucket.owned_weight.device))
        if there:
            return
        if bucket.state_format.master is not None:
            store.write(bucket, "master", start, values)
        elif bucket.dtype != values.dtype and not torch.equal(
            bucket.owned_values(start, numel).to("cpu", values.dtype), values
        ):
            rounded.add(rounding(bucket, name, "weight"))

    def use_state(key: str, values: torch.Tensor) -> None:
        store.write(bucket, key, start, values)
        if bucket.state_format.state_dtype != "fp32":
            kept = store.read(bucket, key, start, numel).to("cpu", values.dtype)
            if not torch.equal(kept, values):
                rounded.add(rounding(bucket, f"{name}.{key}", key))

    yield _Read(name, "weight", columns, param_start, numel, use_weight)
    if bucket.group is None or there or not wanted.states:
        return
    saved = source.keys(name)
    for key in bucket.state_format.keys:
        if key == "master":
            continue
        if key in saved and source.steps.get(name, 0) > 0:
            yield _Read(name, key, columns, param_start, numel, partial(use_state, key))
        else:
            store.write(bucket, key, start, torch.zeros(numel, device="cpu"))


# --- what each rank has for itself ----------------------------------------------------------------


def restore_rank(
    op: str, source: Source, engine: Engine, wanted: Wanted, first: Callable[[], None]
) -> None:
    """Call `first`, then restore random states and positions in data. Collective: an error on
    one rank is one on all.
    """

    def restore() -> None:
        first()
        of_rank = _of_rank(source, engine.everyone)
        if of_rank is not None and (wanted.states or wanted.stateful):
            if wanted.states:
                with reporting(
                    f"{source.path} has 'random' states that are wrong", "those that save wrote"
                ):
                    _restore_random(of_rank["random"], engine.device)
            for name, value in wanted.stateful.items():
                value.load_state_dict(of_rank["stateful"][name])

    attempt_together(engine.everyone, op, restore, "weights and states are loaded, the rest is not")


def _restore_random(states: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
