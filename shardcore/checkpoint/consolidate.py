"""From shards to ordinary .safetensors files, which transformers and plain torch load. Streams: 4
MiB, or a unit, at a time.

Files have the names of Hugging Face: model.safetensors, or above a limit
model-00001-of-00003.safetensors and so on with model.safetensors.index.json. Each is written under
another name, synced and renamed; the index is the last.
"""

import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from shardcore._native import _C
from shardcore.checkpoint import format as layout
from shardcore.checkpoint.directory import sync_directory, write_synced
from shardcore.checkpoint.format import named_buffers, named_parameters, names_of
from shardcore.checkpoint.load import open_checkpoint
from shardcore.checkpoint.safetensors import INDEX, SINGLE
from shardcore.checkpoint.save import buffers_of
from shardcore.checkpoint.source import Source
from shardcore.engine.agreement import together
from shardcore.engine.engine import Engine, engine_behind
from shardcore.engine.slices import held_by, slice_of
from shardcore.offload.disk import file_engine

_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
MAX_SHARD_BYTES = 5_000_000_000
Tensors: TypeAlias = Mapping[str, torch.Tensor]  # what is written, on the meta device


def consolidate(
    source: str | os.PathLike[str] | nn.Module,
    output: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Write the weights of a checkpoint, or of a sharded model, to ordinary .safetensors files.
    Returns their paths.

    Args:
        source: A directory given to `save`, or another library's checkpoint supported by `load`.
            Pass `tag` if the directory contains several checkpoints. Or the model returned by
            shard: then every rank calls this function, and rank 0 writes.
        output: A directory, to be filled with Hugging Face's file names, or the path of one
            .safetensors file.
        dtype: The dtype of all floating tensors. None: float32 for weights with masters, and the
            own dtype of all other tensors.
        max_shard_bytes: The largest size of the tensors in one file, unless a single tensor is
            larger.

    Tied weights are written once, under their first name. Host memory: a few MiB from a checkpoint,
    one unit from a model.

    Raises:
        OSError, ValueError: For files that cannot be read or written, or are damaged, with the
            file. On the other ranks RuntimeError.
    """
    if not isinstance(source, nn.Module):
        _check(output, dtype, max_shard_bytes)
    else:
        engine = engine_behind("consolidate", source)
        with together(engine.everyone, "consolidate", "nothing was written"):
            _check(output, dtype, max_shard_bytes)
            tensors = of_engine(engine, dtype)
        return write_model(engine, Path(output), tensors, max_shard_bytes)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"consolidate: source is of type {type(source).__name__}; expected a directory or a "
            "sharded model"
        )
    with open_checkpoint("consolidate", Path(source), tag) as opened:
        tensors = of_source(opened, dtype)
        values = (part for name in tensors for part in read(opened, name, dtype))
        return write(tensors, values, Path(output), max_shard_bytes)


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
    """Return what a checkpoint has by name, tied weights once, in `dtype`."""
    return {
        name: _on_meta(shape, _cast_to(source.read(name, "weight", 0, 0).dtype, dtype))
        for name, shape in source.shapes.items()
        if name not in source.tied
    }


def read(source: Source, name: str, dtype: torch.dtype | None) -> Iterator[torch.Tensor]:
    """Yield a flattened tensor of a checkpoint, part by part."""
    for start, numel in layout.cut(0, prod(source.shapes[name])):
        values = source.read(name, "weight", start, numel)
        yield values.to(_cast_to(values.dtype, dtype))


def write(
    tensors: Tensors, values: Iterator[torch.Tensor], output: Path, max_shard_bytes: int
) -> list[Path]:
    """Write tensors, whose `values` come in order and in parts, to `output`; returns the files."""
    folder = output.parent if output.suffix == ".safetensors" else output
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    try:
        return _write(tensors, values, output, max_shard_bytes)
    except BaseException:
        for path in set(folder.glob(f".*{_writing()}")) - before:
            path.unlink()
        raise


def _write(
    tensors: Tensors, values: Iterator[torch.Tensor], output: Path, max_shard_bytes: int
) -> list[Path]:
    if output.suffix == ".safetensors":
        _write_file(output, tensors, values)
        _publish(output.parent, [output.name])
        return [output]
    files = _cut_into_files(tensors, max_shard_bytes)
    names = [SINGLE]
    if len(files) > 1:
        names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for name, file in zip(names, files, strict=True):
        _write_file(output / name, {key: tensors[key] for key in file}, values)
    if len(files) > 1:
        weight_map = {key: name for name, file in zip(names, files, strict=True) for key in file}
        total_size = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_synced(_unfinished(output / INDEX), text.encode())
        names.append(INDEX)
    stale = [
        path.name
        for path in output.iterdir()
        if path.name in (SINGLE, INDEX) or _PART.fullmatch(path.name)
    ]
    _publish(output, names, [name for name in stale if name not in names])
    return [output / name for name in names]


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


def _writing() -> str:
    """Return the end of an unfinished file's name.

    It is not a checkpoint's, whose unfinished files a save removes. It is of one process, because
    all ranks of a program may write one folder (deepspeed.zero_to_fp32).
    """
    return f".{os.getpid()}.writing"


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}{_writing()}")


def _publish(folder: Path, names: list[str], stale: list[str] | None = None) -> None:
    """Remove what an older model left, and give the files their names."""
    for name in stale or ():
        (folder / name).unlink(missing_ok=True)  # another rank may have removed it
    for name in names:
        os.rename(_unfinished(folder / name), folder / name)
    sync_directory(folder)


def _write_file(path: Path, tensors: Tensors, values: Iterator[torch.Tensor]) -> None:
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    head, _ = layout.head_of(described, {"format": "pt"})
    size = len(head) + sum(tensor.nbytes for tensor in tensors.values())
    writer = _C.FileWriter(file_engine(), str(_unfinished(path)), size)
    try:
        writer.append(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for tensor in tensors.values():
            remaining = tensor.nbytes
            while remaining > 0:
                part = next(values)
                writer.append(part)
                remaining -= part.nbytes
        writer.finish()
    finally:
        writer.close()


# --- from a model ---------------------------------------------------------------------------------


def write_model(engine: Engine, output: Path, tensors: Tensors, max_shard_bytes: int) -> list[Path]:
    """Write `tensors` of a sharded model on rank 0: see `consolidate`. Collective."""
    return on_first_rank(
        engine, tensors, lambda values: write(tensors, values, output, max_shard_bytes)
    ) or [output]


def on_first_rank(
    engine: Engine, tensors: Tensors, use: Callable[[Iterator[torch.Tensor]], list[Path]]
) -> list[Path]:
    """Let rank 0 use the flattened values of `tensors` while all ranks gather them; returns what
    it does there. Collective.
    """
    engine.read_all("state_dict", "the model")
    values = _values(engine, tensors)
    with together(engine.everyone, "consolidate", "existing files are unchanged"):
        try:
            return use(values) if engine.everyone.rank == 0 else []
        finally:
            for _ in values:  # the other ranks gather all of it
                pass


def of_engine(engine: Engine, dtype: torch.dtype | None) -> Tensors:
    """Return what a sharded model has by name, tied weights once: in `dtype`; None: masters are
    float32.
    """
    return {
        name: _on_meta(t.shape, _cast_to(_dtype_of(engine, t), dtype))
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
    return {
        name: of_name[name_of[tensor]]
        for name, tensor in named.items()
        if name_of[tensor] in of_name
    }


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

    on_first_rank(engine, tensors, keep)
    return state


def in_order(engine: Engine) -> dict[str, torch.Tensor]:
    """Return parameters and buffers in the order in which they are gathered: bucket by bucket,
    then what is in none.
    """
    names = names_of(engine)
    sharded = {names[param]: param for param in engine.managed if param in names}
    rest = {name: param for param, name in names.items() if param not in engine.managed}
    return {**sharded, **rest, **buffers_of(engine.model)}


def _dtype_of(engine: Engine, tensor: torch.Tensor) -> torch.dtype:
    bucket: Any = engine.bucket_of.get(tensor)  # type: ignore[call-overload]
    has_masters = bucket is not None and bucket.state_format.master is not None
    return torch.float32 if has_masters else tensor.dtype


@torch.no_grad()
def _values(engine: Engine, tensors: Tensors) -> Iterator[torch.Tensor]:
    """Yield the flattened values of `tensors`, on the CPU, in the order of `in_order`.
    Collective: every rank takes all.
    """
    names = {tensor: name for name, tensor in in_order(engine).items() if name in tensors}
    buckets = [
        bucket
        for bucket in engine.buckets
        if any(managed.param in names for managed in bucket.params)
    ]
    fulls = engine.full_tensors.of_buckets(
        (bucket, engine.master_or_weight(bucket)) for bucket in buckets
    )
    for bucket, full in zip(buckets, fulls, strict=True):
        for managed in bucket.params:
            if managed.param in names:
                dtype = tensors[names[managed.param]].dtype
                yield managed.full(managed.slice_of(full)).to("cpu", dtype).contiguous().view(-1)
    for tensor, name in names.items():
        if tensor not in engine.managed:
            full = held_by(tensor).detach()
            tensor_slice = slice_of(name, tensor)
            if tensor_slice is not None:
                full = tensor_slice.assemble(full)
            yield full.to("cpu", tensors[name].dtype).contiguous().view(-1)
