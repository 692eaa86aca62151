"""Saving: every rank writes its ranges to a file of its own, in a directory that gets its name when
all of it is on disk.

How that is named, and what a crash leaves: checkpoint/directory.py, Note [Commit].

Which rank writes what: `_items`. Ranks are numbered over data and tensor parallelism
(`Engine.everyone`). Saves in the background: checkpoint/background.py.
"""

import logging
import os
import random
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from shardcore.checkpoint import directory, plain
from shardcore.checkpoint import format as layout
from shardcore.checkpoint.background import AS_BEFORE, Mailbox, Saving, identity, stage
from shardcore.checkpoint.digested import key_of_part
from shardcore.checkpoint.format import named_buffers, named_parameters, names_of
from shardcore.checkpoint.write import (
    Item,
    LinkedFiles,
    add_range,
    check_visible,
    stored_entries,
    write_json,
    write_manifest,
    write_ranges,
)
from shardcore.distributed.compare import Entry
from shardcore.engine.agreement import together, value_read
from shardcore.engine.bucket import Bucket, Managed
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.slices import held_by, slice_of
from shardcore.layout import BLOCK, Columns
from shardcore.optim.state_format import SCALES

logger = logging.getLogger("shardcore")
EMA_UPDATES = "ema_updates"  # among the counters of a manifest


def save(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tag: str | None = None,
    scheduler: Any = None,
    client_state: Mapping[str, Any] | None = None,
    stateful: Mapping[str, Any] | None = None,
    ema: "Averages | None" = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    keep_last: int | None = None,
    wait: bool = True,
) -> "Saving":
    """Save a sharded model and its optimizer to `directory`/`tag`. Any world size, stage and tier
    can load it. Collective.

    When `save` returns (with wait=False: when the `wait()` of its result returns), everything is on
    disk. A crash at any instant leaves the earlier checkpoints intact. A checkpoint of the same tag
    is replaced when the new checkpoint is complete. Every rank writes its own shards, 4 MiB at a
    time. Files of committed steps ("optimizer": "nvme") are linked instead of copied, on the same
    file system. The manifest has the digest of each tensor and state, except of those in linked
    files. Random states (of Python, torch, NumPy and the GPU) are saved for every rank,
    buffers for rank 0. Gradients are not saved, and a warning is logged if some wait for a step:
    save after a step.

    Args:
        directory: A directory for one model, on a file system shared by all ranks.
        model: The model returned by shard.
        optimizer: The optimizer returned by shard. None leaves its states out.
        tag: The name of the checkpoint; default "global_step" and the number of optimizer steps.
        scheduler: Any object with `state_dict()`; rank 0's is saved.
        client_state: Plain data (numbers, text, lists, tuples, dicts, tensors); rank 0's is saved.
        stateful: A dict of objects with `state_dict()` by name, such as a StatefulDataLoader. Each
            rank's own are saved.
        ema: An EMA of the model, to save with it.
        save_latest: Let `load` find this checkpoint without a tag.
        exclude_frozen_parameters: Leave out parameters that do not train.
        keep_last: Afterwards remove old checkpoints of `directory`, except the newest keep_last and
            the checkpoint named by "latest". The disk needs room for one more. A warning names
            files that cannot be removed.
        wait: If False, write in the background. This call copies data from the device to host
            memory. States already in host memory are not copied: the next step waits until they are
            written. The next save waits for this save, and raises its error on every rank, unless
            `wait()` raised it there before. Call `wait()` before the program ends.

    Returns a Saving. Its `path` may be used as a path; `wait()` and `done` are for a save in the
    background.

    Streams: waits for the work queued on the current stream.

    Raises:
        ValueError, TypeError: On every rank, before anything is written.
        FileExistsError: If `directory`/`tag` exists and is neither a checkpoint nor an empty
            directory.
        BlockingIOError: If another process, or another model of this process, is saving into
            `directory`. The message names it.
        OSError: If a file cannot be written, with its path and offset, on the rank of the failure.
        RuntimeError: If another rank, or the save before this one, failed.
    """
    content = Content(
        states=optimizer is not None,
        exclude_frozen=exclude_frozen_parameters,
        scheduler=scheduler,
        client_state=client_state,
        stateful=stateful or {},
        ema=ema,
    )
    check_order("save", directory)
    engine = engine_behind("save", model)
    with together(engine.everyone, "save", "nothing was saved"):
        check_pairs("save", engine, optimizer, ema)
        folder = path_of("save", directory)
    if ema is not None:
        ema.follow()
    return write_checkpoint(engine, folder, tag, content, save_latest, keep_last, wait)


def check_order(op: str, directory: object) -> None:
    """Raise TypeError for a model in place of the directory."""
    if isinstance(directory, nn.Module):
        raise TypeError(
            f"{op}: directory is a {type(directory).__name__}; call "
            f"{op}(directory, model, optimizer)"
        )


def path_of(op: str, directory: str | os.PathLike[str]) -> Path:
    """Return the directory that a user gave as a path; TypeError for anything else."""
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"{op}: directory is of type {type(directory).__name__}; expected a path")
    return Path(directory)


def check_pairs(op: str, engine: Engine, optimizer: object, ema: object) -> None:
    """Raise ValueError unless the optimizer and the EMA, if there are any, are those of the
    engine.
    """
    made_by = {
        "optimizer": "the optimizer that shard returned with model",
        "ema": "an EMA of model",
    }
    for name, thing in (("optimizer", optimizer), ("ema", ema)):
        if thing is not None and getattr(thing, "_engine", None) is not engine:
            raise ValueError(
                f"{op}: {name} is a {type(thing).__name__} that does not belong to model; expected "
                f"{made_by[name]}"
            )


class Averages(Protocol):
    """The moving average of a model's weights (ema.py). shard: of a bucket's owned range,
    float32, live.
    """

    updates: int

    def follow(self) -> None: ...
    def shard(self, bucket: Bucket) -> torch.Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Content:
    """What is saved. counters: of a training loop, by name. The others: see `save`."""

    states: bool
    exclude_frozen: bool = False
    scheduler: Any = None
    client_state: Mapping[str, Any] | None = None
    stateful: Mapping[str, Any] = field(default_factory=dict)
    ema: Averages | None = None
    counters: Mapping[str, int] = field(default_factory=dict)


def finish_saving(engine: Engine) -> None:
    """Wait for a save in the background, and raise its error on every rank unless all have
    raised it. Collective.
    """
    saving = engine.saving
    if saving is not None:
        with together(engine.everyone, "save", AS_BEFORE):
            pass  # a rank that has died would be waited for: this says so
        try:
            with together(engine.everyone, "save", AS_BEFORE):
                if not saving.raised:
                    saving.wait()
        except Exception:
            engine.saving = None
            raise
        engine.saving = None
        _note_saved(engine, str(saving.path))


def _note_saved(engine: Engine, path: str) -> None:
    if engine.updater.audit is not None:
        engine.updater.audit.saved(path)


@torch.no_grad()
def write_checkpoint(
    engine: Engine,
    folder: Path,
    tag: str | None,
    content: Content,
    save_latest: bool,
    keep_last: int | None,
    wait: bool,
) -> "Saving":
    """Save `content`; the other arguments are those of `save`. Collective."""
    comm, folder = engine.everyone, folder.absolute()

    def check() -> list[Entry]:
        if tag is not None:
            directory.check_tag("save", tag)
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise ValueError(
                f"save: keep_last is {keep_last!r}; expected a number of at least 1, or None"
            )
        engine.membership.check("save")
        engine.updater.accept_weight_edits()
        arguments = {
            "directory": str(folder),
            "tag": tag,
            "keep_last": keep_last,
            "exclude_frozen_parameters": content.exclude_frozen,
            "optimizer": content.states and "given",
            "ema": content.ema is not None and "given",
            "save_latest": bool(save_latest),
            "wait": bool(wait),
        }
        of_model = value_read(f"a checkpoint{engine.updater.changed()}")
        return [of_model, *(("argument", name, str(value)) for name, value in arguments.items())]

    finish_saving(engine)
    engine.agree("save", check, then="nothing was saved")
    engine.settle_audits()
    if content.states and engine.reducer.backwards > 0 and comm.rank == 0:
        logger.warning(
            "save: %s backward(s) ran since the last step, and gradients are not saved. A run "
            "from this checkpoint begins the step anew. To continue bit for bit, save after a "
            "step",
            engine.reducer.backwards,
        )
    steps = max((managed.step for _, managed in _trained(engine)), default=0)
    name = tag or f"global_step{steps}"
    with together(comm, "save", "nothing was saved"):
        metadata = CheckpointMetadata(engine, content)
    with together(comm, "save", AS_BEFORE):
        lock = directory.SaveLock(folder, name) if comm.rank == 0 else None
    job = _Job(engine, folder, name, content, metadata, lock, (save_latest, keep_last))
    saving = Saving(folder / name, job)
    try:
        with together(comm, "save", AS_BEFORE):
            job.prepare(stages=not wait)
        mailbox = Mailbox(comm, comm.gather_json(uuid.uuid4().hex)[0])
        if not wait:
            saving.start(mailbox)
            engine.saving = saving
            return saving
        with together(comm, "save", AS_BEFORE):
            written = job.write()
        with together(comm, "save", AS_BEFORE):
            mailbox.send(written)
        with together(comm, "save", AS_BEFORE):
            job.commit(mailbox.receive_all())
        _note_saved(engine, str(saving.path))
        return saving
    finally:
        if saving.thread is None:
            job.end()


# --- what is written ------------------------------------------------------------------------------


def _trained(engine: Engine) -> Iterator[tuple[Bucket, Managed]]:
    for bucket in engine.updater.buckets:
        for managed in bucket.params:
            yield bucket, managed


# Shapes and dtypes by name; the frozen parameters; what other names are the same as which.
Described: TypeAlias = tuple[dict[str, Any], list[str], dict[str, str]]


def _items(
    engine: Engine, content: Content, linked: LinkedFiles, names: Mapping[torch.Tensor, str]
) -> Iterator[Item]:
    """Yield what this rank saves, what `linked` files have among it.

    names: of the parameters, see `names_of`.
    """
    for bucket in engine.buckets:
        # Of tensor-parallel ranks each writes its slices, and the first of them what all have.
        if not bucket.counted or (content.exclude_frozen and not bucket.trainable):
            continue
        # Of what several ranks have, each writes the part that it adds up in a reduction: at stage
        # 0 a share of everything. It is cut where linked chunks are, so that a linked file has all
        # of an item or nothing.
        cuts = set(bucket.reduces)
        for chunk_bucket, start, end in linked.chunks:
            if chunk_bucket is bucket:
                cuts |= {start, end}
        for low, high in pairwise(sorted(cuts)):
            for span in ranges_of(bucket, low, high):
                name = stored_name(names[span.managed.param], span.managed.columns)
                yield from parts_of(engine, bucket, span, name, content.states)
                if content.ema is not None and bucket.group is not None:
                    average = content.ema.shard(bucket)[span.start : span.start + span.numel]
                    where = span.param_start, span.numel
                    yield Item(name, layout.EMA, average.dtype, *where, partial(identity, average))
    if engine.comm.rank != 0:
        return
    # Rank 0 writes buffers and what is in no bucket, and the first rank of each tensor-parallel
    # slice its columns of them.
    for name, tensor in _unsharded(engine, content, names):
        columns = columns_of(name, tensor)
        if columns is not None or engine.everyone.rank == 0:
            flat = held_by(tensor).detach().reshape(-1)
            yield from items_of(stored_name(name, columns), flat, columns)


def items_of(name: str, flat: torch.Tensor, columns: Columns | None = None) -> Iterator[Item]:
    """Yield the ranges of a tensor that lies in memory, or a slice of one."""
    for start, numel in layout.cut(0, flat.numel(), columns):
        yield Item(name, "weight", flat.dtype, start, numel, partial(flat.narrow, 0, start, numel))


def columns_of(name: str, tensor: torch.Tensor) -> Columns | None:
    """Return which columns of a tensor this rank has, None if all of it."""
    tensor_slice = slice_of(name, tensor)
    return None if tensor_slice is None else tensor_slice.columns


def stored_name(name: str, columns: Columns | None) -> str:
    """Return the name under which a tensor, or these columns of it, is stored."""
    return name if columns is None else layout.slice_name(name, columns.first, columns.count)


class Span(NamedTuple):
    """A range of a parameter, as files have it: elements [param_start, param_start + numel), which
    are at `start` of the range that this rank owns of the bucket.
    """

    managed: Managed
    start: int
    param_start: int
    numel: int


def ranges_of(bucket: Bucket, low: int, high: int) -> Iterator[Span]:
    """Yield the ranges that files have of [low, high) of the owned range."""
    for piece in bucket.pieces:
        managed = bucket.params[piece.slot]
        start, end = max(piece.start, low), min(piece.start + piece.numel, high)
        for first, numel in layout.cut(
            piece.param_start + start - piece.start, end - start, managed.columns
        ):
            yield Span(managed, piece.start + first - piece.param_start, first, numel)


def weight_of(bucket: Bucket, span: Span, name: str) -> Iterator[Item]:
    """Yield the weights of a range, unless float32 masters make them. See `parts_of`."""
    _, start, param_start, numel = span
    if bucket.group is None or bucket.state_format.master != "fp32":
        weight = partial(bucket.owned_values, start, numel)
        yield Item(name, "weight", bucket.dtype, param_start, numel, weight)


def parts_of(
    engine: Engine,
    bucket: Bucket,
    span: Span,
    name: str,
    states: bool,
) -> Iterator[Item]:
    """Yield the items of a range, stored under `name`: weights, and states if `states`."""
    managed, start, param_start, numel = span
    made = {item.part: item for item in weight_of(bucket, span, name)}
    yield from made.values()
    if bucket.group is None:
        return
    stays = engine.store.tier != "device" and start >= bucket.device_numel
    in_host_memory = stays and engine.store.tier == "cpu"
    views = engine.store.states_of(bucket, start, numel) if in_host_memory else {}
    for part, dtype in bucket.state_format.dtypes.items():
        makes_weight = part in ("master", "remainder")
        if not makes_weight and not (states and managed.step > 0):
            continue
        first = param_start // BLOCK if part in SCALES.values() else param_start
        count = layout.stored_numel(part, numel)
        if views:
            read = partial(identity, views[part])
        else:  # states in files are read when they are written
            read = partial(_read_state, engine, bucket, part, start, numel)
        of_both = made.get(key_of_part(part))
        made[part] = Item(name, part, dtype, first, count, read, stays, of_both)
        yield made[part]


def _read_state(engine: Engine, bucket: Bucket, part: str, start: int, numel: int) -> torch.Tensor:
    return engine.store.states_of(bucket, start, numel)[part]


def _unsharded(
    engine: Engine, content: Content, names: Mapping[torch.Tensor, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield buffers, and the frozen parameters that are in no bucket."""
    for _, param in engine.unmanaged:
        if param not in engine.bucket_of and not content.exclude_frozen:
            yield names[param], param
    yield from buffers_of(engine.model).items()


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers, shared ones under their first name."""
    first: dict[torch.Tensor, str] = {}
    for name, buffer in named_buffers(model):
        first.setdefault(buffer, name)
    return {name: buffer for buffer, name in first.items()}


class CheckpointMetadata:
    """What is saved beside tensors, as JSON values: checked before anything is written."""

    def __init__(
        self, engine: Engine, content: Content, rank: Mapping[str, Any] | None = None
    ) -> None:
        """Read the states now. TypeError or ValueError for what is no plain data.

        rank: what `rank_state` returned, of what each rank has for itself alone: then it is to have
        the rest, too.
        """
        self.rank = rank_state(engine.device, content.stateful) if rank is None else rank
        first = engine.everyone.rank == 0 or rank is not None
        if first and not isinstance(content.client_state, Mapping | None):
            raise TypeError(
                f"save: client_state is of type {type(content.client_state).__name__}; expected a "
                "dict, or None"
            )
        self.client_state = (
            plain.to_json(content.client_state, "save: client_state") if first else None
        )
        scheduler_state = None
        if first and content.scheduler is not None:
            scheduler_state = _state_of("scheduler", content.scheduler)
        self.scheduler = plain.to_json(scheduler_state, "save: scheduler.state_dict()")
        self.files = {
            layout.rank_file(engine.everyone.rank): layout.json_bytes(
                {"value": self.rank}, plain_data=True
            )
        }
        if self.client_state is not None:
            self.files[layout.CLIENT_STATE] = layout.json_bytes(
                {"value": self.client_state}, plain_data=True
            )
        self.extra_state = {
            name: plain.to_json(module.get_extra_state(), f"save: {name}.get_extra_state()")
            for name, module in layout.with_extra_state(engine.model).items()
        }
        names = names_of(engine)
        groups = [
            {**group, "params": [names[param] for param in group["params"]]}
            for group in engine.updater.groups
        ]
        self.groups = plain.to_json(groups, "save: param_groups") if content.states else None
        self.loss_scale = engine.scaler.state()
        self.counters = {"skipped_steps": engine.skipped_steps} if content.states else {}
        if content.ema is not None:
            self.counters[EMA_UPDATES] = content.ema.updates
        self.slices = engine.everyone.slices
        self.steps = {}
        if content.states:
            self.steps = {
                names[managed.param]: managed.step
                for _, managed in _trained(engine)
                if managed.step > 0
            }

    def entries(
        self, described: Described, counters: Mapping[str, int], numerics: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tensors and the other entries of a manifest, for `manifest_of`."""
        tensors, frozen, tied = described
        for name, entry in tensors.items():
            entry["step"] = self.steps.get(name)
        return tensors, {
            "tied": tied,
            "frozen": frozen,
            "groups": self.groups,
            "loss_scale": self.loss_scale,
            "scheduler": self.scheduler,
            "extra_state": self.extra_state,
            "counters": self.counters | dict(counters),
            "numerics": numerics,
            **({"slices": self.slices} if self.slices > 1 else {}),
        }


def rank_state(device: torch.device, stateful: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank saves for itself, as JSON values: random states, and those of
    `stateful`.
    """
    states = {name: _state_of(f"stateful[{name!r}]", value) for name, value in stateful.items()}
    return {
        "random": plain.to_json(random_states(device), "save: random states"),
        "stateful": {
            name: plain.to_json(state, f"save: stateful[{name!r}]")
            for name, state in states.items()
        },
    }


def _state_of(name: str, value: Any) -> Any:
    if not callable(getattr(value, "state_dict", None)):
        raise TypeError(
            f"save: {name} is of type {type(value).__name__}; expected an object with state_dict()"
        )
    return value.state_dict()


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of this rank's random generators."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


# --- writing it -----------------------------------------------------------------------------------


class _Job:
    """The save of one rank: prepare, write, commit (rank 0), end."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        name: str,
        content: Content,
        metadata: CheckpointMetadata,
        lock: directory.SaveLock | None,
        latest: tuple[bool, int | None],
    ) -> None:
        """lock: rank 0's. latest: save_latest and keep_last of `save`."""
        self._engine: Engine | None = engine
        self._comm = engine.everyone
        self._store = engine.store
        self._folder, self._name = folder, name
        self._content = content
        self._metadata = metadata
        self._lock = lock
        self._latest = latest
        self._path = directory.unfinished(folder, name)
        self._items: list[Item] = []
        self._read = threading.Event()  # set when a step may overwrite the items that stay
        self._numerics = numerics_of(engine)

    def prepare(self, stages: bool) -> None:
        """List what is written; if `stages`, copy what does not stay where it is, and let steps
        wait for the rest.
        """
        assert self._engine is not None
        check_visible(self._path, self._comm.rank)
        names = names_of(self._engine)
        linked = self._linked = self._link_committed(self._engine, names)
        self._linked_ranges = []
        for item in _items(self._engine, self._content, linked, names):
            if item.key in linked.ranges:
                self._linked_ranges.append(linked.ranges[item.key])
            else:
                self._items.append(item)
        self._describe = describe(self._engine, self._content)
        self._shapes = {
            stored: entry["shape"]
            for name, entry in self._describe[0].items()
            for stored in stored_entries(name, entry)
        }
        if stages:
            stage([item for item in self._items if not item.stays], self._engine)
            self._items.sort(key=lambda item: not item.stays)
            if self._items and self._items[0].stays:
                self._store.watch(self._read.wait)
            self._engine = None

    def _link_committed(self, engine: Engine, names: Mapping[torch.Tensor, str]) -> LinkedFiles:
        """Link the files of committed states into the checkpoint, where this rank alone writes
        what it owns: see checkpoint/slots.py, Note [Linked slots].
        """
        alone = all(bucket.reduces == (0, bucket.owned_numel) for bucket in engine.buckets)
        if engine.commits is None or not self._content.states or not alone:
            return LinkedFiles()
        linked: LinkedFiles = engine.commits.link_into(self._path, names)
        return linked

    def write(self) -> dict[str, Any]:
        """Write the files of this rank; returns their entries in the manifest, and the ranges by
        name and part.
        """
        try:
            written = write_ranges(
                self._path,
                layout.data_file(self._comm.rank),
                self._items,
                read=self._read,
                shapes=self._shapes,
            )
        finally:
            self._read.set()
        written["files"] += self._linked.files
        for linked_range in self._linked_ranges:
            add_range(written["ranges"], *linked_range)
            name, part, *_ = linked_range  # linked files are not read
            written["digests"].setdefault(name, {})[key_of_part(part)] = None
        for name, data in self._metadata.files.items():
            written["files"].append(write_json(self._path / name, data))
        return written

    def commit(self, written_by_ranks: Sequence[Any]) -> None:
        """On rank 0: write the manifest of what all ranks wrote, and give the checkpoint its
        name.
        """
        if self._comm.rank != 0:
            return
        entries = self._metadata.entries(self._describe, self._content.counters, self._numerics)
        write_manifest(self._path, written_by_ranks, *entries)
        directory.commit(self._folder, self._name, *self._latest)

    def end(self) -> None:
        """Unlock; what is not complete is removed."""
        self._store.watch(None)
        self._read.set()
        self._items.clear()
        self._engine = None
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


def numerics_of(engine: Engine) -> Any:
    """Return the options that the model was sharded with, as JSON values."""
    options = {**engine.options, "ranks": engine.comm.topology}
    del options["audit"]  # changes no bits
    for name, value in options.items():
        if is_dataclass(value) and not isinstance(value, type):
            options[name] = asdict(value)
    return plain.to_json(options, "save: numerics")


def describe(engine: Engine, content: Content) -> Described:
    """Return shapes and dtypes by name, the frozen parameters, and what other names are the same
    as which.
    """
    model = engine.model
    named: dict[str, torch.Tensor] = {**dict(named_parameters(model)), **buffers_of(model)}
    frozen = {name for name, param in named_parameters(model) if not engine.trains(param)}
    tensors: dict[str, dict[str, Any]] = {
        name: {"shape": list(tensor.shape), "dtype": layout.dtype_name(tensor.dtype, name)}
        for name, tensor in named.items()
        if name not in frozen or not content.exclude_frozen
    }
    for name in tensors:
        tensor_slice = slice_of(name, named[name])
        slices = [] if tensor_slice is None else tensor_slice.all_columns()
        if slices:
            columns = [{"columns": [of_slice.first, of_slice.count]} for of_slice in slices]
            tensors[name] |= {"rows": slices[0].rows, "slices": columns}
    first_name = {tensor: name for name, tensor in named.items()}
    names_and_tensors = [*named_parameters(model, remove_duplicate=False), *named_buffers(model)]
    tied = {
        name: first_name[tensor]
        for name, tensor in names_and_tensors
        if first_name[tensor] != name and first_name[tensor] in tensors
    }
    return tensors, sorted(frozen), tied
