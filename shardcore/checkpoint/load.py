"""Loading: any checkpoint (source.Source) into any sharded model, each rank reading what it
keeps, one range at a time.

Names, shapes, groups, loss scale and scheduler are checked, and compared between ranks, before
anything changes. Damaged data are found while they are read: then the error says that the model is
partly loaded.
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
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardcore.checkpoint import format as layout
from shardcore.checkpoint import plain
from shardcore.checkpoint.digested import Comparison, Digested
from shardcore.checkpoint.directory import LATEST, find
from shardcore.checkpoint.foreign.deepspeed_files import open_foreign
from shardcore.checkpoint.foreign.torch_files import source_of, tree_of
from shardcore.checkpoint.format import named_buffers, named_parameters
from shardcore.checkpoint.save import (
    EMA_UPDATES,
    Averages,
    Span,
    check_order,
    check_pairs,
    columns_of,
    finish_saving,
    path_of,
    ranges_of,
)
from shardcore.checkpoint.sharded import rounding, warn_of_rounding
from shardcore.checkpoint.slots import open_committed
from shardcore.checkpoint.source import Source, reporting
from shardcore.distributed.everyone import Everyone
from shardcore.engine.agreement import together
from shardcore.engine.bucket import Bucket
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.model_state import use_loaded
from shardcore.engine.slices import held_by
from shardcore.layout import Columns

logger = logging.getLogger("shardcore")

_AHEAD = 4  # ranges that are read while one is used


@dataclass(frozen=True)
class Loaded:
    """The result of `load`. With strict=False, missing lists the model's names that the checkpoint
    lacks, unexpected the checkpoint's names that the model lacks.
    """

    path: Path
    client_state: Mapping[str, Any]
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()


@dataclass(frozen=True)
class LoadOptions:
    """Which parts of a checkpoint to load. in_place: states and masters that lie in files are those
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
    """Load a checkpoint into a sharded model and its optimizer, from any world size, stage, tier
    and state form. Collective.

    Each rank reads its own shards, 4 MiB at a time, and verifies checksums and the digests that
    `save` stored. If this optimizer
    cannot store a value exactly (8-bit and bfloat16 states, weights without masters), the value is
    rounded, with one warning. Otherwise weights and states are bit for bit the saved values. With
    an optimizer, random states are restored if the world size is unchanged, and gradients that wait
    for a step are dropped.

    Args:
        directory: The directory given to `save` (then "latest" names the checkpoint), or one
            checkpoint.
        model, optimizer: The model and the optimizer returned by shard. Without an optimizer, its
            states are not loaded.
        tag: The name of the checkpoint in `directory`.
        scheduler: Its `load_state_dict` is called, if a scheduler was saved.
        stateful: A dict of objects by the names given to `save`. Each object's `load_state_dict` is
            called with the state saved by this rank. The world size must be unchanged.
        ema: An EMA of the model, to continue from the saved average.
        strict: Raise if names differ. If False, missing parameters keep their values, and missing
            and unexpected names are returned.

    Raises:
        FileNotFoundError: If there is no checkpoint.
        ValueError, TypeError: For other names, shapes or groups, or another optimizer's states,
            before anything is changed. For damaged data, with file and offset; then the model is
            partly loaded. On the other ranks RuntimeError.
        ValueError: On every rank, if digests differ from the saved ones. The model has the values
            that were read.
        OSError: For files that cannot be read.
    """
    check_order("load", directory)
    engine = engine_behind("load", model)
    with together(engine.everyone, "load", "nothing was changed"):
        check_pairs("load", engine, optimizer, ema)
        folder = path_of("load", directory)
    if ema is not None:
        ema.follow()
    finish_saving(engine)
    options = LoadOptions(strict, optimizer is not None, scheduler, stateful or {}, ema)
    source = open_together(engine, folder, tag)
    try:
        return load_from(source, engine, options)
    finally:
        source.close()


def open_together(engine: Engine, folder: Path, tag: str | None) -> Source:
    """Open a checkpoint, the one that rank 0 finds, on every rank, or raise on every rank.
    Collective.
    """
    comm, folder = engine.everyone, folder.absolute()
    then = "nothing was changed"
    with together(comm, "load", then):
        path = find("load", folder, tag) if comm.rank == 0 else folder
    path = Path(comm.gather_json(str(path))[0])  # "latest" may be moved meanwhile
    # No file of it is open before its first read, so there is nothing to close where another rank
    # has failed.
    with together(comm, "load", then):
        engine.synchronize()  # parameters are read for their names
        return open_path("load", path, names_of_optimizer(engine))


def names_of_optimizer(engine: Engine) -> dict[str, list[str]]:
    """Return the names of the parameters that the optimizer updates, in the order of its groups;
    without one, of all. The first name of each has the others.
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


def has_checkpoint(folder: Path) -> bool:
    """Return whether `load` finds a checkpoint in a folder, whole or not; False if there is
    none, or none without its tag.
    """
    if not folder.exists():
        return False
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
            return _in_planners_tree(layout.Checkpoint(path), names)
        if (path / layout.data_file(0)).exists():
            raise ValueError(
                f"load: {path} contains {layout.data_file(0)} without {layout.MANIFEST}; expected "
                "both. The copy may be incomplete"
            )
        source: Source | None = open_committed(path) if path.is_dir() else None
        source = source or open_foreign(path, names)
    except ValueError as error:
        error.args = (str(error).replace("load: ", f"{op}: ", 1),)
        raise
    if source is None:
        raise FileNotFoundError(
            errno.ENOENT,
            f"{op}: this is not a checkpoint; expected one of shardcore, DeepSpeed or torch",
            str(path),
        )
    return source


def _in_planners_tree(checkpoint: layout.Checkpoint, names: Collection[str]) -> Source:
    """Return a checkpoint of ours; what shardcore.dcp wrote has the names of the state dict,
    which its planner had joined.
    """
    objects, paths = objects_of(checkpoint)
    if not isinstance(paths, dict):
        return checkpoint
    items: dict[str, Any] = objects
    for name, shape in checkpoint.shapes.items():
        dtype = checkpoint.read(name, "weight", 0, 0).dtype
        read = partial(checkpoint.read, name, "weight")
        items[name] = SimpleNamespace(shape=shape, dtype=dtype, read=read)  # as file_tensors.Stored
    with reporting(f"{checkpoint.path} is damaged or in another format", "one by shardcore"):
        tree = tree_of((paths.get(name, (name,)), value) for name, value in items.items())
        source = source_of(checkpoint.path, tree, names)
    source.close = checkpoint.close  # type: ignore[method-assign]
    return source


def objects_of(checkpoint: layout.Checkpoint) -> tuple[dict[str, Any], Any]:
    """Return what shardcore.dcp wrote that is no tensor, and the planner's data; ({}, None) if
    another wrote it.
    """
    manifest_path = str(checkpoint.path / layout.MANIFEST)
    with reporting(f"{manifest_path} is not a valid manifest", "one by shardcore"):
        saved = checkpoint.manifest.get("dcp", {"objects": {}, "planner_data": None})
        objects = {
            str(name): plain.from_json(value, manifest_path)
            for name, value in saved["objects"].items()
        }
        return objects, plain.from_json(saved["planner_data"], manifest_path)


@torch.no_grad()
def load_from(source: Source, engine: Engine, options: LoadOptions) -> Loaded:
    """Load from an open checkpoint. Collective. See `load`."""
    missing: list[str] = []
    unexpected: list[str] = []
    group_options: list[dict[str, Any]] | None = None
    with_extra_state = layout.with_extra_state(engine.model)

    def check() -> str:
        nonlocal group_options
        named = _named(engine)
        saved = {  # a tied weight may be saved under one of its names
            tensor
            for name, tensor in named.items()
            if name in source.shapes or name in source.frozen
        }
        missing.extend(name for name, tensor in named.items() if tensor not in saved)
        unexpected.extend(
            f"{name}._extra_state" for name in source.extra_state if name not in with_extra_state
        )
        unexpected.extend(name for name in source.shapes if name not in named)
        if options.strict and (missing or unexpected):
            raise ValueError(
                f"load: {source.path} and the model differ in names: missing "
                f"{_shortened(missing)}; unexpected {_shortened(unexpected)}. Use the same model, "
                "or strict=False"
            )
        for name, tensor in named.items():
            if name in source.shapes and source.shapes[name] != tensor.shape:
                raise ValueError(
                    f"load: {name} has shape {source.shapes[name]} in {source.path}; expected "
                    f"{tuple(tensor.shape)}"
                )
        engine.refuse_held("load")
        without_states = source.groups is None and not source.steps
        if options.states and options.strict and without_states and engine.updater.buckets:
            raise ValueError(
                f"load: {source.path} contains no optimizer states. Load without an optimizer, "
                "which keeps its states, or with strict=False, which resets them"
            )
        check_stateful("load", source, engine.everyone, options.stateful)
        if options.ema is not None:
            _check_averages(source, engine)
        if options.states:
            group_options = options_of(source, engine)
            if not options.in_place:  # states in place are not in the source, and not read
                _check_states(source, engine)
            engine.scaler.check_state("load", source.loss_scale)
        if options.scheduler is not None:
            check_scheduler("load", source, options.scheduler)
        return f"{source.path.name}, {len(named)} names"

    engine.agree("load", check)
    rounded: set[str] = set()
    then = "the model is partly loaded; load another checkpoint before you use it"
    comparison = Comparison(source.digests)
    with together(engine.everyone, "load", then):
        _load_tensors(source, engine, options, rounded, comparison)
    _compare(source, engine, comparison)
    use_loaded(engine)
    if group_options is not None:
        for group, new in zip(engine.groups, group_options, strict=True):
            group.update(new)
    if options.states:
        engine.go_on_from(source.loss_scale, source.counters.get("skipped_steps"))
        engine.zero_grad()
    if options.ema is not None:
        options.ema.updates = source.counters.get(EMA_UPDATES, 0)

    def restore_rest() -> None:
        if options.scheduler is not None:
            options.scheduler.load_state_dict(source.scheduler)
        for name, value in source.extra_state.items():
            if name in with_extra_state:
                with_extra_state[name].set_extra_state(value)

    restore_rank("load", source, engine, options, restore_rest)
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
        saved_by, present = (
            f"{world.world_size}" + f" ({world.slices} slices)" * (world.slices > 1)
            for world in (source, ranks)
        )
        raise ValueError(
            f"{op}: stateful names {', '.join(stateful)}, but {source.path} was saved by "
            f"{saved_by} ranks, each with its own state; expected {present}, or stateful=None. To "
            "change the number of ranks, keep positions in the data in client_state"
        )
    missing = [name for name in stateful if name not in of_rank["stateful"]]
    if missing:
        raise ValueError(
            f"{op}: stateful names {', '.join(missing)}, but {source.path} contains no state of it "
            f"for this rank; expected the saved names ({', '.join(of_rank['stateful']) or 'none'})"
        )


def _check_averages(source: Source, engine: Engine) -> None:
    updated = {managed.param for bucket in engine.updater.buckets for managed in bucket.params}
    names = sorted(name for param, name in _names_in(source, engine).items() if param in updated)
    missing = [name for name in names if layout.EMA not in source.keys(name)]
    if missing:
        raise ValueError(
            f"load: {source.path} contains no moving average of {_shortened(missing)}. Load a "
            "checkpoint saved with ema=, or pass ema=None"
        )


def _check_states(source: Source, engine: Engine) -> None:
    """Raise ValueError where parameters have some of the states that a step needs: those of
    another optimizer.
    """
    names = _names_in(source, engine)
    for bucket in engine.updater.buckets:
        keys = set(bucket.state_format.keys) - {"master", "max_exp_avg_sq"}
        for managed in bucket.params:
            name = names.get(managed.param)
            if name is None or source.steps.get(name, 0) <= 0:
                continue
            missing = sorted(keys - set(source.keys(name)))
            if missing:
                raise ValueError(
                    f"load: {source.path} contains no {missing[0]!r} of {name}, so another "
                    f"optimizer saved it; expected one with {', '.join(sorted(keys))}. To continue "
                    "from the weights alone, load without an optimizer"
                )


def check_scheduler(op: str, source: Source, scheduler: Any) -> None:
    """Raise ValueError unless the source has a state of a scheduler of this kind: torch's take
    any dict, or fail half-way.
    """
    if source.scheduler is None:
        client_state = ""
        if source.client_state:
            client_state = (
                f" (its client_state contains {_shortened(list(map(str, source.client_state)))})"
            )
        raise ValueError(
            f"{op}: {source.path} contains no scheduler state{client_state}. Pass scheduler=None"
        )
    saved_keys, keys = (
        # private keys, and "verbose", come and go with torch's versions
        {key for key in state if not str(key).startswith("_") and key != "verbose"}
        for state in (source.scheduler, scheduler.state_dict())
    )
    if saved_keys != keys:
        raise ValueError(
            f"{op}: {source.path} contains a scheduler state with "
            f"{_shortened(sorted(map(str, saved_keys)))}; expected "
            f"{_shortened(sorted(map(str, keys)))}, as in this {type(scheduler).__name__}. Create "
            "the scheduler class of the saved run (DeepSpeed's are in "
            "shardcore.deepspeed.lr_schedules), or pass scheduler=None and set it yourself"
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


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) + more) or "none"


def options_of(source: Source, engine: Engine) -> list[dict[str, Any]] | None:
    """Return the options that the checkpoint gives each group of the optimizer; None if it has
    no groups.
    """
    if source.groups is None:
        return None
    saved_sizes = [len(group["params"]) for group in source.groups]
    sizes = [len(group["params"]) for group in engine.updater.groups]
    if source.numbered and saved_sizes != sizes:
        raise ValueError(
            f"load: {source.path} numbers the parameters, in groups of {saved_sizes}; expected "
            f"groups of {sizes}, as in this optimizer. Create the groups of the saved run in the "
            "same order, or save param_names in each group"
        )
    names: dict[torch.Tensor, str] = {param: name for name, param in named_parameters(engine.model)}
    names.update(_names_in(source, engine))
    group_of = {name: group for group in source.groups for name in group["params"]}
    saved_options = []
    for index, group in enumerate(engine.updater.groups):
        group_names = [names[param] for param in group["params"]]
        saved_groups = {
            id(group_of[name]): group_of[name] for name in group_names if name in group_of
        }
        if len(saved_groups) > 1:
            raise ValueError(
                f"load: param_groups[{index}] mixes parameters of {len(saved_groups)} groups of "
                f"{source.path}; expected the same groups as there, or parts of them"
            )
        options = next(iter(saved_groups.values()), group)
        saved_options.append({**options, "params": group_names})
    with reporting(
        f"the 'groups' of {source.path} are unusable for a step", "those of this optimizer"
    ):
        imported = engine.updater.kind.import_groups(
            "load", engine.updater.groups, {"state": {}, "param_groups": saved_options}
        )
    engine.updater.check_fixed(
        "load",
        [{**group, **new} for group, new in zip(engine.updater.groups, imported, strict=True)],
    )
    return imported


# --- tensors --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    """A range to read, of a slice (None: all) of a tensor, and what to do with it. counts: this
    rank adds its digest to the comparison.
    """

    name: str
    key: str
    columns: Columns | None
    start: int
    numel: int
    use: Callable[[torch.Tensor], None]
    counts: bool


def _load_tensors(
    source: Source,
    engine: Engine,
    options: LoadOptions,
    rounded: set[str],
    comparison: Comparison,
) -> None:
    """Read what this rank keeps; nothing is sent. What is not kept exactly is added to
    `rounded`, in words.
    """
    if engine.unsharder is not None:
        # what is kept, or still being gathered after a failed forward, has the old values
        engine.unsharder.reshard_all()
    with ThreadPoolExecutor(_AHEAD, "shardcore-load") as pool:
        reads = _reads(source, engine, options, rounded)
        for read, (values, digested) in _read_ahead(pool, source, reads):
            read.use(values)
            if digested is not None:
                saved, digest = digested
                comparison.add(saved.label, read.numel, digest)
    if options.states:
        names = _names_in(source, engine)
        for bucket in engine.updater.buckets:
            for managed in bucket.params:
                if managed.param in names:
                    managed.step = int(source.steps.get(names[managed.param], 0))


def _compare(source: Source, engine: Engine, comparison: Comparison) -> None:
    """Raise ValueError on every rank if the values that all ranks read are not the saved ones.
    Collective.
    """
    comparison.add_up([engine.comm, *engine.comm.slices], engine.device)
    if differing := comparison.differing:
        raise ValueError(
            f"load: {source.path} has other values of {_shortened(differing)} than were saved: "
            "their digests differ, although the checksums of the files match. The model has these "
            "values; load another checkpoint before you use it"
        )


def _read_ahead(
    pool: ThreadPoolExecutor, source: Source, reads: Iterable[_Read]
) -> Iterator[tuple[_Read, Digested]]:
    """Yield each range with its values and digest, while the pool reads the next ones."""
    pending: deque[tuple[_Read, Future[Digested]]] = deque()

    def get(read: _Read) -> Digested:
        where = read.name, read.key, read.columns, read.start, read.numel
        return source.read_digested(*where) if read.counts else (source.read_slice(*where), None)

    for read in reads:
        pending.append((read, pool.submit(get, read)))
        if len(pending) > _AHEAD:
            first, future = pending.popleft()
            yield first, future.result()
    for first, future in pending:
        yield first, future.result()


def _reads(
    source: Source, engine: Engine, options: LoadOptions, rounded: set[str]
) -> Iterator[_Read]:
    names = _names_in(source, engine)
    for bucket in engine.buckets:
        # no range crosses from the share on the device to the share off it
        on_device = ranges_of(bucket, 0, bucket.device_numel)
        off_device = ranges_of(bucket, bucket.device_numel, bucket.owned_numel)
        for span in chain(on_device, off_device):
            managed, start, param_start, numel = span
            name = names.get(managed.param)
            if name is None:
                continue
            # of ranks that read the same ranges, one counts each
            counts = bucket.counted and bucket.reduces[0] <= start < bucket.reduces[1]
            yield from _reads_of(source, name, engine, bucket, span, options, rounded, counts)
            if options.ema is not None and bucket.group is not None:
                use = partial(_set, options.ema.shard(bucket)[start : start + numel])
                yield _Read(name, layout.EMA, managed.columns, param_start, numel, use, counts)
    for tensor, name in names.items():
        if tensor in engine.bucket_of:
            continue
        local, columns = held_by(tensor), columns_of(name, tensor)
        # the ranks that write it: see save._items
        counts = engine.comm.rank == 0 and (columns is not None or engine.everyone.rank == 0)
        if not local.is_contiguous():  # ranges of it would not be views
            yield _Read(name, "weight", columns, 0, local.numel(), partial(_set, local), counts)
            continue
        for start, numel in layout.cut(0, local.numel(), columns):
            use = partial(_set, local.view(-1)[start : start + numel])
            yield _Read(name, "weight", columns, start, numel, use, counts)


def _set(tensor: torch.Tensor, values: torch.Tensor) -> None:
    tensor.copy_(values.view(tensor.shape))


def _reads_of(
    source: Source,
    name: str,
    engine: Engine,
    bucket: Bucket,
    span: Span,
    options: LoadOptions,
    rounded: set[str],
    counts: bool,
) -> Iterator[_Read]:
    """Yield the weight and the states of a range."""
    managed, start, param_start, numel = span
    store = engine.store
    in_place = options.in_place and start >= bucket.device_numel

    def use_weight(values: torch.Tensor) -> None:
        bucket.assign(start, values.to(bucket.owned_weight.device))
        if in_place:
            return
        if bucket.state_format.master is not None:
            store.write(bucket, "master", start, values)
        elif bucket.dtype != values.dtype:
            stored = bucket.owned_values(start, numel).to("cpu", values.dtype)
            if not torch.equal(stored, values):
                rounded.add(rounding(bucket, name, "weight"))

    def use_state(key: str, values: torch.Tensor) -> None:
        store.write(bucket, key, start, values)
        if bucket.state_format.state_dtype != "fp32":
            stored = store.read(bucket, key, start, numel).to("cpu", values.dtype)
            if not torch.equal(stored, values):
                rounded.add(rounding(bucket, f"{name}.{key}", key))

    yield _Read(name, "weight", managed.columns, param_start, numel, use_weight, counts)
    if bucket.group is None or in_place or not options.states:
        return
    saved = source.keys(name)
    for key in bucket.state_format.keys:
        if key == "master":
            continue
        if key in saved and source.steps.get(name, 0) > 0:
            use = partial(use_state, key)
            yield _Read(name, key, managed.columns, param_start, numel, use, counts)
        else:
            store.write(bucket, key, start, torch.zeros(numel, device="cpu"))


# --- what each rank has for itself ----------------------------------------------------------------


def restore_rank(
    op: str, source: Source, engine: Engine, options: LoadOptions, first: Callable[[], None]
) -> None:
    """Call `first`, then restore random states and positions in data. Collective: an error on
    one rank is one on all.
    """
    with together(engine.everyone, op, "weights and states are loaded, the rest is not"):
        first()
        of_rank = _of_rank(source, engine.everyone)
        if of_rank is None:
            return
        if options.states:
            problem = f"{source.path} contains invalid 'random' states"
            with reporting(problem, "states written by save"):
                restore_random(of_rank["random"], engine.device)
        for name, value in options.stateful.items():
            value.load_state_dict(of_rank["stateful"][name])


def restore_random(states: Mapping[str, Any], device: torch.device) -> None:
    """Set this rank's random generators to the states that `random_states` returned."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
