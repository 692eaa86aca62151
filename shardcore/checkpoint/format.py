"""The format of a checkpoint, written and read: a directory with a manifest and one data file per
rank.

    global_step20/
      manifest.json            what there is, and where: shapes, dtypes, ranges with their files,
                               offsets and checksums
      rank_00000.safetensors   flat ranges of tensors, "name@start" (of a state
                               "name.exp_avg@start")
      rank_00000.slot_0.safetensors   its states, where a step of states on disk was committed
                                      (checkpoint/slots.py)
      rank_00000.json          this rank's random states and positions in its data
      client_state.json        what the user gave beside it

A range has at most RANGE_NUMEL elements and does not cross a multiple of that in its parameter, so
that a load that cuts parameters there too reads each range once, for any world size. Its checksum
(crc32c) is checked in every read. Data begin at a multiple of ALIGNMENT bytes. JSON files end with
a checksum of what is before it. A part of a parameter is stored as the optimizer keeps it: "master"
(float32), or "weight", of split masters with "remainder" (int16); "exp_avg" and so on, of 8-bit
codes with "exp_avg_scale", one float32 per 256 elements; "ema": a moving average of its values.
"digests" has those of the values of "weight", "exp_avg" and so on (checkpoint/digested.py); readers
that do not know them ignore them. A slot may have older values, too: the manifest says which count.
Of a parameter that tensor-parallel ranks have slices of, each slice is stored as a tensor of its
own, "name[first:end]@start": columns [first, end) of the parameter seen as "rows" rows, flat row by
row. So a slice of any dimension has long ranges, and 8-bit codes keep their blocks. Its ranges are
shorter, by its share of a row, so that some rows of the whole tensor are about one range of each
slice. A manifest that has slices has version 2. Nothing is unpickled; names of files are matched
against a pattern; each offset is checked against the file before it is read.

Files are not trusted. Checksums find damage, not malice: whoever changes a manifest can give it a
right checksum. So every size, offset and index is checked before use, plain data have a fixed list
of tags (plain.py), and only regular files are read (`file_tensors.open_regular`).
"""

import json
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardcore._native import _C
from shardcore.checkpoint import plain
from shardcore.checkpoint.digested import Digested, Saved, digest_key
from shardcore.checkpoint.file_tensors import open_regular
from shardcore.checkpoint.safetensors import DTYPES
from shardcore.checkpoint.source import Source, gathered, reporting
from shardcore.engine.digests import VERSION as DIGEST_VERSION
from shardcore.engine.digests import digest_of
from shardcore.engine.engine import Engine
from shardcore.engine.quantized import named_means, with_parts
from shardcore.layout import BLOCK, Columns, round_up
from shardcore.offload.disk import file_engine
from shardcore.optim.state import MAX_STEP
from shardcore.optim.state_format import SCALES, joined_master
from shardcore.torch_private import WRAPPERS, is_persistent

FORMAT, VERSION, SLICED = "shardcore checkpoint", 1, 2
MANIFEST, CLIENT_STATE = "manifest.json", "client_state.json"
RANGE_NUMEL = 1 << 20
ALIGNMENT = 4096
_STATE = re.compile(r"[A-Za-z_]\w*")  # of another optimizer than Adam
EMA = "ema"
_CODES = (torch.int8, torch.uint8)
# What each part of a tensor may be stored as.
_DTYPES_OF = {
    "weight": tuple(DTYPES),
    "master": ("F32",),
    "remainder": ("I16",),
    "exp_avg": ("F32", "BF16", "I8"),
    "exp_avg_sq": ("F32", "BF16", "U8"),
    "max_exp_avg_sq": ("F32",),
    EMA: ("F32",),
    **dict.fromkeys(SCALES.values(), ("F32",)),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FILE = re.compile(
    r"rank_\d{5,9}(\.(slot_\d{1,5}|rest_[01]))?\.(safetensors|json)|client_state\.json"
)
_MAX_JSON_BYTES, _MAX_PLAIN_BYTES = 1 << 30, 1 << 28
_MAX_OPEN = 256  # files at once: a process may usually have 1,024


def plain_name(name: str) -> str:
    """Return a parameter's name as the plain model has it: without wrappers (activation
    checkpointing, torch.compile).
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the persistent buffers of a model, shared ones under each name, and the means of
    scales.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and is_persistent(module, key):
                yield plain_name(f"{prefix}.{key}").lstrip("."), buffer
    for name, mean in named_means(model):
        yield plain_name(name), mean


def named_parameters(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model, and their scales, by the names that a plain model has."""
    for name, param in with_parts(model.named_parameters(remove_duplicate=remove_duplicate)):
        yield plain_name(name), param


def names_of(engine: Engine) -> dict[torch.Tensor, str]:
    """Return the plain name of each parameter as the model has it now. Code that wraps or prunes
    a layer changes names.
    """
    return {param: plain_name(name) for param, name in engine.membership.names().items()}


def with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have a `get_extra_state` of their own, by plain name."""
    default = nn.Module.get_extra_state
    return {
        plain_name(name): module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not default
    }


def data_file(rank: int) -> str:
    """Return the name of a rank's data file."""
    return f"rank_{rank:05d}.safetensors"


def rank_file(rank: int) -> str:
    """Return the name of the file of what a rank has for itself."""
    return f"rank_{rank:05d}.json"


def stored_numel(part: str, numel: int) -> int:
    """Return how many elements a part of a tensor of `numel` elements has: scales are one per
    block.
    """
    return -(-numel // BLOCK) if part in SCALES.values() else numel


def slice_name(name: str, first: int, count: int) -> str:
    """Return the name under which these columns of a tensor are stored."""
    return f"{name}[{first}:{first + count}]"


def cut(start: int, numel: int, columns: Columns | None = None) -> Iterator[tuple[int, int]]:
    """Yield (start, numel) of the ranges that elements [start, start + numel) of a tensor are read
    and written in.

    columns: of which slice of it they are.
    """
    longest = RANGE_NUMEL
    if columns is not None and columns.rows > 1:
        longest = max(BLOCK, RANGE_NUMEL * columns.count // max(1, columns.width) // BLOCK * BLOCK)
    while numel > 0:
        count = min(numel, longest - start % longest)
        yield start, count
        start, numel = start + count, numel - count


def dtype_name(dtype: torch.dtype, where: str) -> str:
    """Return the format's name of a dtype. TypeError if it has none."""
    if dtype not in _NAMES:
        raise TypeError(
            f"save: {where} is a tensor of {dtype}, which safetensors does not support. Use one of "
            f"{', '.join(DTYPES)}, or a buffer with persistent=False, which is not saved"
        )
    return _NAMES[dtype]


# --- JSON files that end with a checksum ----------------------------------------------------------

_SUM = ', "crc32c": "'


def json_bytes(value: Mapping[str, Any], plain_data: bool = False) -> bytes:
    """Return a file of a JSON object, which is given "crc32c" as its last entry. plain_data: it
    has that alone.
    """
    text = json.dumps(value, allow_nan=False)[:-1].encode()
    most = _MAX_PLAIN_BYTES if plain_data else _MAX_JSON_BYTES
    if len(text) > most - 100:
        content = (
            "the ranges of tensors, and the values of get_extra_state() and param_groups, take"
        )
        if plain_data:
            content = "plain data take"
        raise ValueError(
            f"save: {content} {len(text)} bytes as JSON; expected at most {most}. Register large "
            "tensors as buffers of the model, or save them yourself"
        )
    return text + f'{_SUM}{crc32c(text):08x}"}}\n'.encode()


def read_json(path: Path) -> Any:
    """Return the object of such a file. Raises OSError, or ValueError if it is damaged."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_JSON_BYTES:
            raise ValueError(
                f"load: {path} is {size} bytes long; expected at most {_MAX_JSON_BYTES}"
            )
        data = file.read(size)
    text, separator, rest = data.rpartition(_SUM.encode())
    if not separator or rest != f'{crc32c(text):08x}"}}\n'.encode():
        raise ValueError(
            f"load: {path} is damaged: the checksum at its end does not match its content. Use "
            "another checkpoint, or copy it again"
        )
    try:
        return json.loads(text + b"}")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"load: {path} is not a JSON object ({error}); expected a file written by shardcore"
        ) from error


def crc32c(data: bytes) -> int:
    """Return the checksum of bytes."""
    return _C.crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else 0


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Range:
    """Elements [start, start + numel) of a part of a tensor: in file number `file`, at `offset`
    bytes.
    """

    start: int
    numel: int
    file: int
    offset: int
    crc: int


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors that are kept of a parameter, flattened; `ranges` in order."""

    dtype: torch.dtype
    ranges: Sequence[Range]


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter or buffer. step: how many updates it has had; None where it has no optimizer
    states.

    slices: the parts of each, in order; of a tensor that is not sliced of all of it.
    """

    shape: tuple[int, ...]
    step: int | None
    slices: Mapping[Columns, Mapping[str, Part]]

    @property
    def parts(self) -> Mapping[str, Part]:
        """Those of the first slice."""
        return next(iter(self.slices.values()))


class Checkpoint(Source):
    """A checkpoint of shardcore's own: see source.Source. Reads may come from several threads."""

    def __init__(
        self,
        path: Path,
        engine: _C.FileEngine | None = None,
        manifest: Mapping[str, Any] | None = None,
        whole: bool = True,
    ) -> None:
        """Check the manifest of the directory `path`. Raises OSError, or ValueError if it is
        damaged or not whole.

        manifest: if it is not to be read from its file. whole: if False, tensors may lack elements,
        which cannot be read.
        """
        self.path, self._whole = path, whole
        self.manifest: Mapping[str, Any] = (
            read_json(path / MANIFEST) if manifest is None else manifest
        )
        self._engine = engine or file_engine()
        self._readers: dict[int, _C.FileReader] = {}
        self._lock = threading.Lock()
        self._parse()

    def _reading(self, field: str) -> AbstractContextManager[None]:
        return reporting(
            f"{self.path / MANIFEST} is not a valid manifest: its {field!r} is wrong",
            "one by shardcore",
        )

    def _parse(self) -> None:
        m = self.manifest
        with self._reading("format"):
            if m["format"] != FORMAT or m["version"] not in (VERSION, SLICED):
                raise ValueError(
                    f"load: {self.path / MANIFEST} is in format {m['format']!r}, version "
                    f"{m['version']!r}; expected {FORMAT!r}, version {VERSION} or {SLICED}. A "
                    "newer shardcore may read it"
                )
        with self._reading("files"):
            self.files = [(str(file["name"]), _count(file["bytes"])) for file in m["files"]]
            self._heads = [
                (_count(file.get("head_bytes", 0)), _count(file.get("head_crc32c", 0)))
                for file in m["files"]
            ]
            self._check_files()
        with self._reading("tensors"):
            self.entries = {
                str(name): self._entry(str(name), entry) for name, entry in m["tensors"].items()
            }
        with self._reading("digests"):
            # a reader of another version of digests compares none
            known = m.get("digest_version") == DIGEST_VERSION
            self._saved = dict(self._saved_digests(m["tensors"])) if known else {}
            self.digests = {saved.label: saved for saved in self._saved.values()}
        with self._reading("tied"):
            self.tied = {str(alias): str(name) for alias, name in m["tied"].items()}
            self._entry_of = self.entries | {
                alias: self.entries[name] for alias, name in self.tied.items()
            }
        self.shapes = {name: entry.shape for name, entry in self._entry_of.items()}
        self.steps = {
            name: entry.step for name, entry in self.entries.items() if entry.step is not None
        }
        with self._reading("groups"):
            groups = plain.from_json(m["groups"], "groups")
            self.groups = None if groups is None else _groups_of(groups)
        with self._reading("counters"):
            self.counters = {str(name): _count(value) for name, value in m["counters"].items()}
        with self._reading("scheduler"):
            self.scheduler = plain.from_json(m["scheduler"], "scheduler")
        with self._reading("loss_scale"):
            loss_scale = plain.from_json(m["loss_scale"], "loss_scale")
            self.loss_scale = None if loss_scale is None else _dict(loss_scale)
        with self._reading("extra_state"):
            self.extra_state = {
                str(name): plain.from_json(state, str(name))
                for name, state in m["extra_state"].items()
            }
        with self._reading("frozen"):
            self.frozen = set(_names(m["frozen"]))
        with self._reading("world_size"):
            self.world_size = _count(m["world_size"], least=1)
        with self._reading("slices"):
            self.slices = _count(m.get("slices", 1), least=1)
        self.client_state = self._plain(CLIENT_STATE)

    def _check_files(self) -> None:
        for name, size in self.files:
            if not _FILE.fullmatch(name):
                raise ValueError(
                    f"load: {self.path / MANIFEST} names the file {name!r}; expected names such as "
                    f"{data_file(0)}"
                )
            actual = os.stat(self.path / name).st_size
            if actual != size:
                raise ValueError(
                    f"load: {self.path / name} is {actual} bytes long; expected {size}. The copy "
                    "may be incomplete"
                )

    def _entry(self, name: str, entry: Mapping[str, Any]) -> Entry:
        shape = tuple(_count(size) for size in entry["shape"])
        step = None if entry["step"] is None else _step_of(name, entry["step"])
        if "slices" not in entry:
            whole = Columns(1, prod(shape), 0, prod(shape))
            return Entry(shape, step, {whole: self._parts(name, entry["parts"], prod(shape))})
        rows = _count(entry["rows"])
        width = prod(shape) // max(1, rows)
        slices: dict[Columns, Mapping[str, Part]] = {}
        end = 0
        for slice_entry in entry["slices"]:
            first, count = map(_count, slice_entry["columns"])
            columns = Columns(rows, width, first, count)
            slices[columns] = self._parts(
                slice_name(name, first, count), slice_entry["parts"], rows * count
            )
            if first != end or count == 0:
                raise ValueError(
                    f"load: {self.path / MANIFEST} lacks columns of {name} from {end} on, or lists "
                    "some twice"
                )
            end = first + count
        dtypes = [{key: part.dtype for key, part in parts.items()} for parts in slices.values()]
        differ = any(of_slice != dtypes[0] for of_slice in dtypes)
        if end != width or rows * width != prod(shape) or differ:
            raise ValueError(
                f"load: {self.path / MANIFEST}: the slices of {name} do not fit together: {end} of "
                f"{width} columns in {rows} rows, as {dtypes}; expected all of the shape {shape}"
            )
        return Entry(shape, step, slices)

    def _saved_digests(
        self, tensors: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[str, Columns, str], Saved]]:
        """Yield the digests of each key of each slice."""
        for name, entry in self.entries.items():
            slices = tensors[name].get("slices") or [tensors[name]]
            for (columns, parts), stored_entry in zip(entry.slices.items(), slices, strict=True):
                stored = name
                if "slices" in tensors[name]:
                    stored = slice_name(name, columns.first, columns.count)
                for key, text in stored_entry.get("digests", {}).items():
                    first = "master" if key == "weight" and "master" in parts else key
                    has_rest = _rest_of(parts, key) is not None
                    label, hashed = digest_key(
                        stored, first, parts[first].dtype, entry.shape, has_rest
                    )
                    numel = columns.rows * columns.count
                    yield (name, columns, key), Saved(label, hashed, numel, int(text, 16))

    def _parts(self, name: str, entry: Mapping[str, Any], numel: int) -> Mapping[str, Part]:
        parts = {}
        for key, part in entry.items():
            of_other_optimizer = ("F32",) if _STATE.fullmatch(key) else ()
            if part["dtype"] not in _DTYPES_OF.get(key, of_other_optimizer):
                raise ValueError(
                    f"load: {self.path / MANIFEST}: {name}.{key} is of the unknown dtype "
                    f"{part['dtype']!r}"
                )
            parts[key] = self._part(f"{name} ({key})", part, stored_numel(key, numel))
        dtypes = {key: part.dtype for key, part in parts.items()}
        split = "remainder" in parts and dtypes.get("weight") != torch.bfloat16
        coded = any(
            (dtypes.get(key) in _CODES) != (scale in parts) for key, scale in SCALES.items()
        )
        if not {"weight", "master"} & set(parts) or split or coded:
            raise ValueError(
                f"load: {self.path / MANIFEST}: the parts of {name} do not fit together: {dtypes}"
            )
        return parts

    def _part(self, name: str, part: Mapping[str, Any], numel: int) -> Part:
        dtype = DTYPES[part["dtype"]]
        ranges = [Range(*map(_count, values)) for values in part["ranges"]]
        end = 0
        for item in ranges:
            overlaps = item.start < end
            leaves_gap = self._whole and item.start > end
            if overlaps or leaves_gap or not 0 < item.numel <= RANGE_NUMEL:
                raise ValueError(
                    f"load: {self.path / MANIFEST} lacks elements of {name} from {end} on, or "
                    "lists some twice"
                )
            end = item.start + item.numel
            if item.offset + item.numel * dtype.itemsize > self.files[item.file][1]:
                raise ValueError(
                    f"load: {self.path / MANIFEST} places {name} beyond the end of "
                    f"{self.files[item.file][0]}"
                )
        if end > numel or (self._whole and end < numel):
            raise ValueError(
                f"load: {self.path / MANIFEST} lists {end} elements of {name}; expected {numel}"
            )
        return Part(dtype, ranges)

    def of_rank(self, rank: int) -> Mapping[str, Any] | None:
        """See Source."""
        state = self._plain(rank_file(rank))
        if state is not None and not {"random", "stateful"} <= state.keys():
            raise ValueError(
                f"load: {self.path / rank_file(rank)} contains {', '.join(state)}; expected random "
                "and stateful"
            )
        return state

    def _plain(self, name: str) -> dict[str, Any] | None:
        """Return the dict that a file of plain data has, None if there is no such file."""
        if all(name != file for file, _ in self.files):
            return None
        with reporting(
            f"{self.path / name} contains no plain data in its 'value'", "a file by shardcore"
        ):
            return _dict(plain.from_json(read_json(self.path / name)["value"], "value"))

    def keys(self, name: str) -> tuple[str, ...]:
        """See Source."""
        weight_and_scales = ("weight", "master", "remainder", *SCALES.values())
        states = [key for key in self._entry_of[name].parts if key not in weight_and_scales]
        return ("weight", *states)

    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """See Source."""
        first = next(iter(self._entry_of[name].slices))
        return self.read_slice(
            name, key, Columns(first.rows, first.width, 0, first.width), start, numel
        )

    def read_slice(
        self, name: str, key: str, columns: Columns | None, start: int, numel: int
    ) -> torch.Tensor:
        """See Source."""
        slices = self._entry_of[name].slices
        if columns is None or columns.rows != next(iter(slices)).rows:
            return super().read_slice(name, key, columns, start, numel)
        reads = {stored: partial(self._read, name, key, parts) for stored, parts in slices.items()}
        return gathered(columns, start, numel, reads)

    def read_digested(
        self, name: str, key: str, columns: Columns | None, start: int, numel: int
    ) -> Digested:
        """See Source. Of ranges of stored slices, at blocks of 256 elements."""
        parts_of, stored = self._entry_of[name].slices, self.tied.get(name, name)
        first = next(iter(parts_of))
        whole = columns or Columns(first.rows, first.width, 0, first.width)
        saved = self._saved.get((stored, whole, key))
        if saved is None or start % BLOCK or (numel % BLOCK and start + numel < saved.numel):
            return self.read_slice(name, key, columns, start, numel), None
        values, rest = self._kept(name, key, parts_of[whole], start, numel)
        digest = digest_of(saved.key, values, start, rest)
        return _joined(key, values, rest), (saved, digest)

    def _read(
        self, name: str, key: str, parts: Mapping[str, Part], start: int, numel: int
    ) -> torch.Tensor:
        """Return elements of a slice."""
        # codes are decoded by the block
        skipped = start % BLOCK if SCALES.get(key, "") in parts else 0
        return _joined(key, *self._kept(name, key, parts, start - skipped, skipped + numel))[
            skipped:
        ]

    def _kept(
        self, name: str, key: str, parts: Mapping[str, Part], start: int, numel: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return elements of a slice as they are stored: with the remainders of weights, or the
        scales of codes, which begin at `start`, a multiple of 256.
        """
        first = "master" if key == "weight" and "master" in parts else key
        values = self._stored(parts[first], name, start, numel)
        rest = _rest_of(parts, key)
        if rest is None:
            return values, None
        if key != "weight":
            start, numel = start // BLOCK, stored_numel(SCALES[key], numel)
        return values, self._stored(parts[rest], name, start, numel)

    def _stored(self, part: Part, name: str, start: int, numel: int) -> torch.Tensor:
        """Return elements of a part as they are in the files, with the checksum of every range
        checked.
        """
        parts = []
        index = max(0, bisect_right(part.ranges, start, key=lambda item: item.start) - 1)
        while numel > 0:
            item = part.ranges[index] if index < len(part.ranges) else None
            # where the checkpoint is one rank's part alone
            if item is None or not item.start <= start < item.start + item.numel:
                raise ValueError(
                    f"load: {self.path} does not contain all elements of {name}; expected the "
                    f"range from {start} on"
                )
            skipped = start - item.start
            count = min(numel, item.numel - skipped)
            parts.append(self._range(item, part.dtype, name)[skipped : skipped + count])
            start, numel, index = start + count, numel - count, index + 1
        if not parts:
            return torch.empty(0, dtype=part.dtype, device="cpu")
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _range(self, item: Range, dtype: torch.dtype, name: str) -> torch.Tensor:
        nbytes = item.numel * dtype.itemsize
        read = self._reader(item.file).start(item.offset, nbytes).wait()
        crc = _C.crc32c(read)
        if crc != item.crc:
            file = self.path / self.files[item.file][0]
            raise ValueError(
                f"load: {file} is damaged in bytes {item.offset} to {item.offset + nbytes} "
                f"({name}, elements {item.start} to {item.start + item.numel}): their crc32c is "
                f"{crc:08x}; expected {item.crc:08x}. Use another checkpoint, or copy the file "
                "again"
            )
        aligned = (
            read.data_ptr() % dtype.itemsize == 0 and read.storage_offset() % dtype.itemsize == 0
        )
        return (read if aligned else read.clone()).view(dtype)

    def _reader(self, file: int) -> _C.FileReader:
        with self._lock:
            if file not in self._readers:
                path = self.path / self.files[file][0]
                reader = _C.FileReader(self._engine, str(path))
                size, crc = self._heads[file]
                if size > reader.size_bytes or _C.crc32c(reader.start(0, size).wait()) != crc:
                    raise ValueError(
                        f"load: {path} is damaged in bytes 0 to {size}, its header. Use another "
                        "checkpoint, or copy it again"
                    )
                self._readers[file] = reader
                if len(self._readers) > _MAX_OPEN:
                    # it closes after the reads that it has started
                    del self._readers[next(iter(self._readers))]
            return self._readers[file]

    def close(self) -> None:
        """See Source."""
        with self._lock:
            for reader in self._readers.values():
                reader.close()
            self._readers.clear()


def _rest_of(parts: Mapping[str, Part], key: str) -> str | None:
    """Return the part that is read with the one of a key: remainders, or scales."""
    rest = "remainder" if key == "weight" else SCALES.get(key, "")
    return rest if rest in parts and not (key == "weight" and "master" in parts) else None


def _joined(key: str, values: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
    """Return the float32 values of what is stored in two parts; of one part, the part."""
    if rest is None:
        return values
    return joined_master(values, rest) if key == "weight" else _C.decode_moment(values, rest)


def _count(value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 63:
        raise TypeError(f"{value!r} is no count of at least {least}")
    return value


def _step_of(name: str, value: object) -> int:
    step = _count(value)
    if step > MAX_STEP:
        raise ValueError(f"step of {name} is {step}; expected at most 2**53")
    return step


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no dict")
    return value


def _names(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{value!r} is no list of names")
    return value


def _groups_of(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise TypeError(f"{value!r} is no list of groups")
    for group in value:
        _names(_dict(group)["params"])
    return value


# --- writing --------------------------------------------------------------------------------------


def head_of(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
    alignment: int = ALIGNMENT,
) -> tuple[bytes, list[int]]:
    """Return the head of a .safetensors file with these (dtype, shape) after each other, and the
    offset of each in the file.

    Its size is a multiple of `alignment`.
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offsets, cursor = [], 0
    for name, (dtype, shape) in tensors.items():
        size = prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": dtype_name(dtype, name),
            "shape": list(shape),
            "data_offsets": [cursor, cursor + size],
        }
        offsets.append(cursor)
        cursor += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = round_up(8 + len(text), alignment)
    head = (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)
    return head, [padded + offset for offset in offsets]
