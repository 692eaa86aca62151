"""From shards to ordinary .safetensors files, which transformers and plain torch load. Streams: 4
MiB, or a unit, at a time.

Files have the names of Hugging Face: model.safetensors, or above a limit
model-00001-of-00003.safetensors and so on with model.safetensors.index.json. Each is written under
another name, synced and renamed; the index is the last.

Note [Ranks]: From a sharded model, the ranks write different files at the same time. All ranks
gather unit after unit, in an order that alternates between the files of the ranks. The rank that
writes a file queues the values for a thread and drops them when they are written. The queue holds
at most the bytes of the largest unit. Only ranks that see the directory write, so a directory on
the disk of one machine is enough.
"""

import json
import os
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby, product, zip_longest
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from shardcore._native import _C
from shardcore.checkpoint.digested import Comparison
from shardcore.checkpoint.directory import find, sync_directory, write_synced
from shardcore.checkpoint.format import (
    MANIFEST,
    Checkpoint,
    cut,
    head_of,
    named_buffers,
    named_parameters,
    names_of,
)
from shardcore.checkpoint.load import open_checkpoint
from shardcore.checkpoint.merged import (
    Merged,
    dtype_of_base,
    merged_of,
    merged_values,
    save_configs,
    units_of,
)
from shardcore.checkpoint.safetensors import INDEX, SINGLE
from shardcore.checkpoint.save import buffers_of
from shardcore.checkpoint.source import Source
from shardcore.engine.agreement import together
from shardcore.engine.bucket import Bucket, rounded
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.quantized import SCALES, named_means, parts_of, shape_and_dtype, tables_of
from shardcore.engine.slices import held_by, slice_of
from shardcore.offload.disk import file_engine

_T = TypeVar("_T")
MAX_SHARD_BYTES = 5_000_000_000
Tensors: TypeAlias = Mapping[str, torch.Tensor]  # what is written, on the meta device


def consolidate(
    source: str | os.PathLike[str] | nn.Module,
    output: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    merge_adapters: bool = False,
) -> list[Path]:
    """Write the weights of a checkpoint, or of a sharded model, to ordinary .safetensors files.
    Returns their paths.

    Args:
        source: A directory given to `save`, or another library's checkpoint supported by `load`.
            Pass `tag` if the directory contains several checkpoints. Or the model returned by
            shard: then every rank calls this function. The ranks that see the directory write
            different files at the same time, and rank 0 renames the files at the end.
        output: A directory, to be filled with Hugging Face's file names, or the path of one
            .safetensors file.
        dtype: The dtype of all floating tensors. None: float32 for weights with masters, and the
            own dtype of all other tensors.
        max_shard_bytes: The largest size of the tensors in one file, unless a single tensor is
            larger.
        merge_adapters: True writes a sharded model of PEFT as an ordinary model: LoRA adapters are
            merged into their base, and 4-bit and int8 weights become floats. Values are those that
            forward uses, rounded once. The dtype None means the dtype of the base weights under
            adapters, before they were quantized. A directory also gets config.json and
            generation_config.json of a transformers model, so plain from_pretrained loads it.

    Tied weights are written once, under their first name. Host memory: a few MiB from a checkpoint;
    from a model, the full weights of two units that are gathered and of one that is written.

    Raises:
        OSError, ValueError: For files that cannot be read or written, or are damaged, with the
            file. On the other ranks RuntimeError.
        ValueError: For a checkpoint with weights in 4 bits; of a model they are written with their
            tables.
        ValueError, NotImplementedError: If merge_adapters is True for another source than a sharded
            model of PEFT, or for other adapters than LoRA and DoRA.
    """
    if not isinstance(source, nn.Module):
        _check(output, dtype, max_shard_bytes)
        if merge_adapters:
            raise ValueError(
                "consolidate: merge_adapters is True for files; expected a sharded model of PEFT"
            )
    else:
        engine = engine_behind("consolidate", source)
        with together(engine.everyone, "consolidate", "nothing was written"):
            _check(output, dtype, max_shard_bytes)
            merged = merged_of("consolidate", engine.model, engine) if merge_adapters else None
            tensors = of_engine(engine, dtype) if merged is None else of_merged(merged, dtype)
        if merged is not None:
            return _write_merged(engine, Path(output), merged, tensors, max_shard_bytes)
        return write_model("consolidate", engine, Path(output), tensors, max_shard_bytes)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"consolidate: source is of type {type(source).__name__}; expected a directory or a "
            "sharded model"
        )
    with open_checkpoint("consolidate", Path(source), tag) as opened:
        tensors = of_source(opened, dtype)
        values = (part for name in tensors for part in read(opened, name, dtype))
        return write(tensors, values, Path(output), max_shard_bytes)


class Checked(NamedTuple):
    """What `check` found in the checkpoint `path`: which tensors and states differ from the saved
    digest, how many have it, and how many have none.
    """

    path: Path
    differing: list[str]
    same: int
    without: int


def check(directory: str | os.PathLike[str], tag: str | None = None) -> Checked:
    """Read a checkpoint of shardcore, 4 MiB at a time, and compare its checksums and its digests.

    Raises OSError for files that cannot be read; ValueError for damaged files, and for a checkpoint
    of another library.
    """
    path = find("consolidate", Path(directory), tag)
    if not (path / MANIFEST).exists():
        raise ValueError(
            f"consolidate: {path} contains no {MANIFEST}, so it has no digests; expected a "
            "checkpoint of shardcore.save"
        )
    with Checkpoint(path) as source:
        comparison, without = Comparison(source.digests), 0
        for name, entry in source.entries.items():
            for columns, key in product(entry.slices, source.keys(name)):
                digested = None
                for start, numel in cut(0, columns.rows * columns.count, columns):
                    _, digested = source.read_digested(name, key, columns, start, numel)
                    if digested is not None:
                        saved, digest = digested
                        comparison.add(saved.label, numel, digest)
                without += digested is None
        differing = comparison.differing
        return Checked(path, differing, len(source.digests) - len(differing), without)


def _check(output: str | os.PathLike[str], dtype: object, max_shard_bytes: object) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"consolidate: dtype is {dtype!r}; expected a floating dtype, such as torch.bfloat16, "
            "or None"
        )
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ValueError(
            f"consolidate: max_shard_bytes is {max_shard_bytes!r}; expected a number of bytes"
        )
    if Path(output).suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise ValueError(
            f"consolidate: output is {output!r}; expected a directory, or the name of a "
            ".safetensors file"
        )


def bytes_of(size: int | str) -> int:
    """Return a number of bytes, which may be given as "5GB". ValueError for anything else."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:B|([KMGT])(I?)B)?", size.strip().upper())
    if match is None:
        raise ValueError(f'a size is {size!r}; expected a number of bytes, or a text such as "5GB"')
    number, prefix, is_binary = match.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " KMGT".index(prefix or " "))


def _on_meta(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _cast_to(dtype: torch.dtype, floating: torch.dtype | None) -> torch.dtype:
    return floating if floating is not None and dtype.is_floating_point else dtype


def of_source(source: Source, dtype: torch.dtype | None) -> Tensors:
    """Return what a checkpoint has by name, tied weights once, in `dtype`. ValueError for weights
    in 4 bits: it has no tables of theirs.
    """
    for name in source.shapes:
        weight, _, end = name.rpartition(".")
        if end in SCALES and weight in source.shapes:
            raise ValueError(
                f"consolidate: {weight} is in 4 bits, and the checkpoint has no tables to read it "
                "by. Load the checkpoint into the model, and pass the model in its place"
            )
    return {
        name: _on_meta(shape, _cast_to(source.read(name, "weight", 0, 0).dtype, dtype))
        for name, shape in source.shapes.items()
        if name not in source.tied
    }


def read(source: Source, name: str, dtype: torch.dtype | None) -> Iterator[torch.Tensor]:
    """Yield a flattened tensor of a checkpoint, part by part."""
    for start, numel in cut(0, prod(source.shapes[name])):
        values = source.read(name, "weight", start, numel)
        yield rounded(values, _cast_to(values.dtype, dtype))


@dataclass(frozen=True)
class Layout:
    """The files of a model: the tensors of each file, and the index of several files.

    single: The name of the file if there is only one. None: older files in the folder stay.
    """

    folder: Path
    files: Mapping[str, Sequence[str]]
    index: Mapping[str, Any] | None = None
    single: str | None = SINGLE
    index_name: str = INDEX

    @property
    def names(self) -> list[str]:
        """The names of all files, the index last."""
        return [*self.files, *([] if self.index is None else [self.index_name])]

    @property
    def stale(self) -> list[str]:
        """The files of an older model in the folder."""
        if self.single is None:
            return []
        stem = re.escape(self.single.removesuffix(".safetensors"))
        pattern = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}\.safetensors")
        return [
            path.name
            for path in self.folder.iterdir()
            if path.name not in self.names
            and (path.name in (self.single, self.index_name) or pattern.fullmatch(path.name))
        ]


def layout_of(tensors: Tensors, output: Path, max_shard_bytes: int) -> Layout:
    """Return the files that `consolidate` writes."""
    if output.suffix == ".safetensors":
        return Layout(output.parent, {output.name: list(tensors)}, single=None)
    files = _cut_into_files(tensors, max_shard_bytes)
    if len(files) == 1:
        return Layout(output, {SINGLE: files[0]})
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    weight_map = {key: name for name, file in zip(names, files, strict=True) for key in file}
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    return Layout(output, dict(zip(names, files, strict=True)), index)


def write(
    tensors: Tensors, values: Iterator[torch.Tensor], output: Path, max_shard_bytes: int
) -> list[Path]:
    """Write tensors, whose `values` come in order and in parts, to `output`; returns the files."""
    layout, ending = layout_of(tensors, output, max_shard_bytes), _ending(os.getpid())
    layout.folder.mkdir(parents=True, exist_ok=True)
    before = set(layout.folder.iterdir())
    try:
        for name, keys in layout.files.items():
            file = _File(
                _unfinished(layout.folder / name, ending), {key: tensors[key] for key in keys}
            )
            try:
                while file.missing_bytes > 0:
                    file.append(next(values))
            finally:
                file.close()
        return _publish(layout, ending)
    except BaseException:
        for path in set(layout.folder.glob(f".*{ending}")) - before:
            path.unlink()
        raise


def _cut_into_files(tensors: Tensors, max_shard_bytes: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and files[-1]:
            files.append([])
            room = max_shard_bytes
        files[-1].append(name)
        room -= tensor.nbytes
    return files


def _ending(process: int) -> str:
    """Return the end of an unfinished file's name.

    It is not a checkpoint's, whose unfinished files a save removes. It is of one process, because
    all ranks of a program may write one folder (deepspeed.zero_to_fp32).
    """
    return f".{process}.writing"


def _unfinished(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}{ending}")


def _publish(layout: Layout, ending: str) -> list[Path]:
    """Write the index, remove what an older model left, and give the files their names."""
    folder = layout.folder
    if layout.index is not None:
        text = json.dumps(layout.index, indent=2, sort_keys=True) + "\n"
        write_synced(_unfinished(folder / layout.index_name, ending), text.encode())
    for name in layout.stale:
        (folder / name).unlink(missing_ok=True)  # another rank may have removed it
    for name in layout.names:
        os.rename(_unfinished(folder / name, ending), folder / name)
    sync_directory(folder)
    return [folder / name for name in layout.names]


class _File:
    """A .safetensors file that is written from its beginning to its end, and is then durable and
    closed.
    """

    def __init__(self, path: Path, tensors: Tensors) -> None:
        """tensors: in the order in which their values are appended."""
        self._path = path
        described = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        head, _ = head_of(described, {"format": "pt"})
        self.missing_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._writer = _C.FileWriter(file_engine(), str(path), len(head) + self.missing_bytes)
        self._writer.append(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        self._finish_if_complete()

    def append(self, values: torch.Tensor) -> None:
        if values.nbytes == 0:
            return
        self._writer.append(values)
        self.missing_bytes -= values.nbytes
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        if self.missing_bytes == 0:
            self._writer.finish()
            self._writer.close()  # gives its buffers back

    def check_complete(self) -> None:
        if self.missing_bytes > 0:
            raise ValueError(f"{self._path} lacks {self.missing_bytes} bytes; expected all values")

    def close(self) -> None:
        self._writer.close()


# --- from a model ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Part:
    """Tensors of the model that become tensors in files.

    make: Returns the values in files from the values in the model, both by name. None: the only
        source is the only target.
    """

    sources: Sequence[str]
    targets: Sequence[str]
    make: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None = None


def write_model(
    op: str, engine: Engine, output: Path, tensors: Tensors, max_shard_bytes: int
) -> list[Path]:
    """Write `tensors` of a sharded model: see `consolidate`. Collective."""
    plan = plan_of(engine, tensors, [Part([name], [name]) for name in tensors], tensors)
    return write_files(op, engine, layout_of(plan.targets, output, max_shard_bytes), plan)


class Plan(NamedTuple):
    """What is read of the model, in which dtypes; what is in files; and how the one becomes the
    other.
    """

    sources: Tensors
    parts: Sequence[Part]
    targets: Tensors


def plan_of(engine: Engine, sources: Tensors, parts: Sequence[Part], targets: Tensors) -> Plan:
    """Return a plan of these, and of the scales and tables by which other libraries read the 4-bit
    weights in them.
    """
    names, all_parts = names_of(engine), list[Part]()
    param_of = {name: param for param, name in names.items()}
    all_sources, all_targets = dict(sources), dict(targets)
    for part in parts:
        param, tables = param_of.get(part.sources[0]), dict[str, torch.Tensor]()
        if part.make is None and param is not None:
            tables = {f"{part.targets[0]}.{end}": t for end, t in tables_of(param).items()}
        all_parts.append(_with_tables(part, tables) if tables else part)
        all_targets |= {name: _on_meta(t.shape, t.dtype) for name, t in tables.items()}
        for end, scales in parts_of(param) if tables and param is not None else ():
            if names[scales] not in sources:
                target = f"{part.targets[0]}.{end}"
                all_parts.append(Part([names[scales]], [target]))
                all_sources[names[scales]] = _on_meta(scales.shape, scales.dtype)
                all_targets[target] = _on_meta(scales.shape, scales.dtype)
    return Plan(all_sources, all_parts, all_targets)


def _with_tables(part: Part, tables: Tensors) -> Part:
    (source,), (target,) = part.sources, part.targets
    return Part([source], [target, *tables], lambda of: {target: of[source], **tables})


def write_files(
    op: str,
    engine: Engine,
    layout: Layout,
    plan: Plan,
    before_renames: Callable[[], object] | None = None,
    merged: Mapping[str, Merged] | None = None,
) -> list[Path]:
    """Write the files of `layout` from a sharded model, by all ranks: Note [Ranks]. Returns their
    paths. Collective.

    op: the call, for errors. before_renames: rank 0 calls it when all files are complete. merged:
    tensors that the sources are made of, if they are not the model's own.
    """
    engine.read_all("state_dict", "the model")
    ranks = engine.everyone
    ending = _ending(ranks.gather_json(os.getpid())[0])
    marker = _unfinished(layout.folder / "shardcore", ending)
    try:
        with together(ranks, op, _UNCHANGED), _naming(op, layout.folder):
            if ranks.rank == 0:
                layout.folder.mkdir(parents=True, exist_ok=True)
                write_synced(marker, b"")
        # os.path: False where a directory above is unreadable, which Path.exists() raises
        sees_folder = ranks.gather_json(os.path.exists(marker))
        writers = [rank for rank, sees in enumerate(sees_folder) if sees]
        writer_of = {file: writers[i % len(writers)] for i, file in enumerate(layout.files)}
        with together(ranks, op, _UNCHANGED), _naming(op, layout.folder):
            _stream(engine, layout, plan, writer_of, ending, merged)
        with together(ranks, op, "the directory may lack files"), _naming(op, layout.folder):
            if ranks.rank == 0:
                if before_renames is not None:
                    before_renames()
                _publish(layout, ending)
    finally:
        with suppress(OSError):
            for path in layout.folder.glob(f".*{ending}"):
                path.unlink(missing_ok=True)
    return [layout.folder / name for name in layout.names]


_UNCHANGED = "existing files are unchanged"


@contextmanager
def _naming(op: str, folder: Path) -> Iterator[None]:
    """Let errors of the system name the call and its folder."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.strerror is None:
            raise
        words = f"{op}: {folder} cannot be written: {error.strerror}"
        raise OSError(error.errno, words, error.filename) from error


def _stream(
    engine: Engine,
    layout: Layout,
    plan: Plan,
    writer_of: Mapping[str, int],
    ending: str,
    merged: Mapping[str, Merged] | None,
) -> None:
    """Gather all values, and write the files of this rank. writer_of: the rank of each file."""
    own_rank = engine.everyone.rank
    sources, parts, targets = plan
    part_of = {name: part for part in parts for name in part.sources}
    rank_of = {name: writer_of[file] for file, names in layout.files.items() for name in names}
    writers_of = {part: {rank_of[name] for name in part.targets} for part in parts}

    def is_wanted(name: str) -> bool:
        return own_rank in writers_of[part_of[name]]

    def first_writer(unit: Sequence[str]) -> int:
        return next((rank_of[part_of[name].targets[0]] for name in unit if name in part_of), 0)

    if merged is None:
        names = names_of(engine)
        buckets = _alternating(
            _by_unit(engine.buckets),
            lambda unit: first_writer([names.get(m.param, "") for b in unit for m in b.params]),
        )
        order = _names(engine, sources, buckets)
        values = _gathered(engine, sources, buckets, is_wanted)
    else:
        order = _alternating(units_of(engine, merged), first_writer)
        dtypes = {name: tensor.dtype for name, tensor in sources.items()}
        values = merged_values(engine, [merged[name] for name in order], dtypes, is_wanted, "cpu")
    place = {name: i for i, name in enumerate(as_made(order, part_of))}
    files = {
        _unfinished(layout.folder / file, ending): {
            name: targets[name] for name in sorted(layout.files[file], key=place.__getitem__)
        }
        for file, writer in writer_of.items()
        if writer == own_rank
    }
    largest_bytes = max(
        (bucket.layout.numel * bucket.dtype.itemsize for bucket in engine.buckets), default=0
    )
    own = _OwnFiles(files, largest_bytes)
    held: dict[Part, dict[str, torch.Tensor]] = {part: {} for part in parts}
    try:
        for name, value in values:
            part = part_of[name]
            if value is not None:
                held[part][name] = value
                del value  # before the next unit is waited for
                if len(held[part]) == len(part.sources):
                    own.write(made_of(part, held.pop(part)))
        own.finish()
    finally:
        for _ in values:  # the other ranks gather all of it
            pass
        own.close()


def _by_unit(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    return [[*unit] for _, unit in groupby(buckets, lambda bucket: bucket.unit)]


def _alternating(units: Iterable[Sequence[_T]], writer: Callable[[Sequence[_T]], int]) -> list[_T]:
    """Return what units have in another order: units of different writers take turns."""
    queues: dict[int, list[Sequence[_T]]] = {}
    for unit in units:
        queues.setdefault(writer(unit), []).append(unit)
    turns = zip_longest(*queues.values(), fillvalue=())
    return [each for turn in turns for unit in turn for each in unit]


def as_made(names: Iterable[str], part_of: Mapping[str, Part]) -> Iterator[str]:
    """Yield the targets of parts in the order in which they are made, from names in the order in
    which they are gathered.
    """
    missing = {part: len(part.sources) for part in part_of.values()}
    for name in names:
        part = part_of[name]
        missing[part] -= 1
        if missing[part] == 0:
            yield from part.targets


def made_of(part: Part, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if part.make is None:
        return dict(zip(part.targets, values.values(), strict=True))
    made = part.make(values)
    return {name: made[name] for name in part.targets}


class _OwnFiles:
    """The files that this rank writes, in a thread: Note [Ranks]."""

    def __init__(self, files: Mapping[Path, Tensors], max_queued_bytes: int) -> None:
        """files: the tensors of each, in the order in which `write` gets them."""
        self._files, self._max_queued_bytes = files, max_queued_bytes
        self._path_of = {name: path for path, tensors in files.items() for name in tensors}
        self._open: dict[Path, _File] = {}
        self._thread = ThreadPoolExecutor(1, "shardcore-consolidate")
        self._queue: deque[tuple[Future[None], int]] = deque()

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Queue values by name. Waits if the queue is full. Raises errors of earlier writes."""
        for name, value in values.items():
            if name in self._path_of:
                self._wait(self._max_queued_bytes - value.nbytes)
                self._queue.append((self._thread.submit(self._append, name, value), value.nbytes))

    def finish(self) -> None:
        """Wait until all files are complete and durable."""
        self._wait(-1)
        for path in self._files:
            self._file(path).check_complete()  # makes the file of a model without tensors

    def close(self) -> None:
        """Close the files, complete or not."""
        self._thread.shutdown(cancel_futures=True)
        for file in self._open.values():
            file.close()

    def _wait(self, queued_bytes: int) -> None:
        while self._queue and sum(size for _, size in self._queue) > queued_bytes:
            self._queue[0][0].result()
            self._queue.popleft()

    def _append(self, name: str, value: torch.Tensor) -> None:
        self._file(self._path_of[name]).append(value.contiguous())

    def _file(self, path: Path) -> "_File":
        if path not in self._open:
            self._open[path] = _File(path, self._files[path])
        return self._open[path]


def of_merged(merged: Mapping[str, Merged], dtype: torch.dtype | None) -> Tensors:
    """Return what an ordinary model has of a model of PEFT, in `dtype`; None: that of the base."""
    dtype = dtype_of_base(merged.values()) if dtype is None else dtype
    tensors = {}
    for name, each in merged.items():
        shape, own_dtype = shape_and_dtype(each.tensor)
        tensors[name] = _on_meta(shape, _cast_to(own_dtype, dtype))
    return tensors


def _write_merged(
    engine: Engine,
    output: Path,
    merged: Mapping[str, Merged],
    tensors: Tensors,
    max_shard_bytes: int,
) -> list[Path]:
    layout = layout_of(tensors, output, max_shard_bytes)
    parts = [Part([name], [name]) for name in tensors]
    floating = next((t.dtype for t in tensors.values() if t.is_floating_point()), None)

    def save_rest() -> None:
        if layout.single is not None:  # the folder is of this model alone
            save_configs(engine, merged, layout.folder, floating)

    plan = Plan(tensors, parts, tensors)  # with 4-bit weights as floats
    return write_files("consolidate", engine, layout, plan, save_rest, merged)


def on_first_rank(
    op: str, engine: Engine, tensors: Tensors, use: Callable[[Iterator[torch.Tensor]], list[Path]]
) -> list[Path]:
    """Let rank 0 use the flattened values of `tensors`, while all ranks gather them; returns what
    it does there. Collective. op: the call, for errors.
    """
    engine.read_all("state_dict", "the model")
    is_first = engine.everyone.rank == 0
    gathered = _gathered(engine, tensors, engine.buckets, lambda name: is_first)
    values = (value.reshape(-1) for _, value in gathered if value is not None)
    with together(engine.everyone, op, _UNCHANGED):
        try:
            return use(values) if is_first else []
        finally:
            for _ in values:  # the other ranks gather all of it
                pass


def of_engine(engine: Engine, dtype: torch.dtype | None) -> Tensors:
    """Return what a sharded model has by name, tied weights once: in `dtype`; None: masters are
    float32.
    """
    parts = {part for param in engine.model.parameters() for _, part in parts_of(param)}
    return {
        name: _on_meta(t.shape, _cast_to(_dtype_of(engine, t), None if t in parts else dtype))
        for name, t in in_order(engine).items()
    }


def as_trained(engine: Engine, exclude_frozen: bool = False) -> Tensors:
    """Return what a sharded model has by name, tied weights once, in the dtypes that weights
    train in.
    """
    return {
        name: _on_meta(tensor.shape, tensor.dtype)
        for name, tensor in in_order(engine).items()
        if not (exclude_frozen and isinstance(tensor, nn.Parameter) and not engine.trains(tensor))
    }


def state_dict_of(
    engine: Engine, tensors: Tensors, values: Iterator[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return an ordinary state dict, tied weights under each name, on the CPU, from the `values`
    that on_first_rank passes.
    """
    of_name = {name: next(values).view(tensor.shape).clone() for name, tensor in tensors.items()}
    name_of = {tensor: name for name, tensor in in_order(engine).items()}
    model = engine.model
    named = {**dict(named_parameters(model, remove_duplicate=False)), **dict(named_buffers(model))}
    state = {}
    for name, tensor in named.items():
        if (first := name_of.get(tensor)) in of_name:
            state[name] = of_name[first]
            state |= {f"{name}.{end}": table for end, table in tables_of(tensor).items()}
    return state


def whole_state_dict(engine: Engine, exclude_frozen: bool = False) -> dict[str, torch.Tensor]:
    """Return an ordinary state dict on rank 0, on the CPU, in the dtypes that weights train in;
    {} elsewhere. Collective.
    """
    # a state dict's type, by which Accelerate knows that tensors may be tied
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    tensors = as_trained(engine, exclude_frozen)

    def keep(values: Iterator[torch.Tensor]) -> list[Path]:
        state.update(state_dict_of(engine, tensors, values))
        return []

    on_first_rank("state_dict", engine, tensors, keep)
    return state


def in_order(engine: Engine) -> dict[str, torch.Tensor]:
    """Return parameters and buffers in the order in which they are gathered: bucket by bucket,
    then what is in none. Means of scales are left out: they are in `tables_of` the weight.
    """
    names = names_of(engine)
    sharded = {names[param]: param for param in engine.managed if param in names}
    rest = {name: param for param, name in names.items() if param not in engine.managed}
    means = {mean for _, mean in named_means(engine.model)}
    buffers = {name: b for name, b in buffers_of(engine.model).items() if b not in means}
    return {**sharded, **rest, **buffers}


def _dtype_of(engine: Engine, tensor: torch.Tensor) -> torch.dtype:
    bucket: Any = engine.bucket_of.get(tensor)  # type: ignore[call-overload]
    has_masters = bucket is not None and bucket.state_format.master is not None
    return torch.float32 if has_masters else tensor.dtype


def _names(engine: Engine, tensors: Tensors, buckets: Sequence[Bucket]) -> list[str]:
    """Return the names of `tensors` in the order in which `_gathered` yields them."""
    names = names_of(engine)
    sharded = [names.get(managed.param) for bucket in buckets for managed in bucket.params]
    rest = [name for name, tensor in in_order(engine).items() if tensor not in engine.managed]
    return [name for name in (*sharded, *rest) if name is not None and name in tensors]


@torch.no_grad()
def _gathered(
    engine: Engine,
    tensors: Tensors,
    buckets: Sequence[Bucket],
    is_wanted: Callable[[str], bool],
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield `tensors` by name, on the CPU, bucket by bucket, then the tensors in no bucket.
    Collective: every rank takes all.

    is_wanted: whether this rank uses the values; None in place of all other values.
    """
    names = {tensor: name for name, tensor in in_order(engine).items() if name in tensors}

    def on_host(name: str, full: torch.Tensor) -> tuple[str, torch.Tensor | None]:
        if not is_wanted(name):
            return name, None
        return name, rounded(full, tensors[name].dtype).to("cpu")

    asked = [
        bucket for bucket in buckets if any(managed.param in names for managed in bucket.params)
    ]
    fulls = engine.full_tensors.of_buckets(
        (bucket, engine.master_or_weight(bucket)) for bucket in asked
    )
    for bucket in asked:
        full = next(fulls)
        for managed in bucket.params:
            if managed.param in names:
                yield on_host(names[managed.param], managed.full(managed.slice_of(full)))
        del full  # before the next one is waited for
    for tensor, name in names.items():
        if tensor not in engine.managed:
            whole = held_by(tensor).detach()
            tensor_slice = slice_of(name, tensor)
            if tensor_slice is not None:
                whole = tensor_slice.assemble(whole)
            yield on_host(name, whole)
