"""Files that torch.save wrote: plain data, and tensors that stay on disk until a range of them is
read.

A pickle is a program. This module runs it with `pickle.Unpickler`, which finds nothing but the
fixed list `_KNOWN`: it never imports what a pickle names, and calls only the functions and classes
below, which make plain data, a FileTensor, or a StandIn, the inert record of an object's
attributes. Anything else is refused by its name.

Note [Hostile files] No code of a file runs. What pickle does without `find_class` is closed, too:
extension codes are refused before it sees them, and whatever BUILD may be applied to has a
`__setstate__` of its own, or no attributes. Sizes are compared with the file before memory is
taken. A file that damage has changed is a ValueError or an OSError that names it; one that somebody
has made to end the process or to fill its memory may do so, as in torch.

`torch.load(weights_only=True)` is not used: it reads storages in full or maps the file, cannot read
the metadata of torch.distributed.checkpoint, verifies no checksum of the pickle, and accepts all
classes that the program allowed for other files.
"""

import io
import os
import pickle
import pickletools
import re
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch

from shardcore.checkpoint.file_tensors import FileTensor, Window, are_counts, is_stored, whole
from shardcore.checkpoint.source import reporting

_MAX_DEPTH = 50  # of plain data
_MAGIC = b"PK\x03\x04"  # of a zip, and of the header of each of its entries


# --- torch.save's zip -----------------------------------------------------------------------------


class _Stream(io.RawIOBase):
    """A window as a file for zipfile."""

    def __init__(self, window: Window) -> None:
        self._window, self._at = window, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + (0, self._at, self._window.size)[whence]
        if at < 0:
            raise io.UnsupportedOperation("seek before the start")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._window.size - self._at)
        size = left if size is None or size < 0 else min(size, left)
        start, self._at = self._at, self._at + size
        return bytes(self._window.read(start, size))


class _Archive:
    """The zip that torch.save writes: <name>/data.pkl, and a storage in each <name>/data/<key>,
    none compressed.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        with reporting(f"{window} is torn or not a file of torch.save", "its zip: copy it again"):
            infos = zipfile.ZipFile(_Stream(window)).infolist()
        self._entries = {info.filename: info for info in infos}
        roots = [
            name.removesuffix("data.pkl")
            for name in self._entries
            if name.partition("/")[1:] == ("/", "data.pkl")
        ]
        if len(roots) != 1:
            raise ValueError(
                f"load: {window} is a zip without data.pkl; expected a file of torch.save"
            )
        self._root = roots[0]
        if f"{self._root}constants.pkl" in self._entries:
            raise ValueError(
                f"load: {window} is a TorchScript program; expected tensors and plain data from "
                "torch.save"
            )
        if f"{self._root}byteorder" in self._entries:
            order = self.entry("byteorder").read().decode("ascii", "replace")
            if order != sys.byteorder:
                raise ValueError(
                    f"load: {window} is in byte order {order!r}; expected {sys.byteorder!r}, as "
                    "this machine"
                )

    def entry(self, name: str) -> Window:
        """Return the bytes of an entry. Raises ValueError if there is none, or it is compressed."""
        info = self._entries.get(self._root + name)
        if info is None:
            raise ValueError(
                f"load: {self.window} contains no entry {name}. The file is incomplete: copy it "
                "again"
            )
        stored = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        if not stored or info.flag_bits & 1:
            raise ValueError(
                f"load: {self.window} contains a compressed or encrypted {name}; expected it as "
                "torch.save writes it"
            )
        header = struct.Struct("<4s22xHH")
        magic, *sizes = header.unpack(self.window.read(info.header_offset, header.size))
        if magic != _MAGIC:
            raise ValueError(
                f"load: {self.window} contains no header of {name} at {info.header_offset}. Copy "
                "the file again"
            )
        return self.window.part(info.header_offset + header.size + sum(sizes), info.file_size)

    def pickle(self) -> bytes:
        """Return data.pkl. Raises ValueError if it is damaged."""
        window = self.entry("data.pkl")
        raw = bytes(window.read())
        crc, expected = zlib.crc32(raw), self._entries[f"{self._root}data.pkl"].CRC
        if crc != expected:
            raise ValueError(
                f"load: {window}, data.pkl, is damaged: its crc32 is {crc:08x}; expected "
                f"{expected:08x}. Copy it again"
            )
        return raw

    def storage(self, persistent_id: Any) -> FileTensor:
        """Return the storage that a persistent id names, as a tensor of one dimension."""
        kind, storage_class, key, _, numel = persistent_id
        dtype = storage_class.dtype if isinstance(storage_class, _Named) else None
        if kind != "storage" or dtype is None or not are_counts((numel,)):
            raise ValueError("refers to an object other than a storage")
        window, needed = self.entry(f"data/{key}"), numel * dtype.itemsize
        if window.size != needed:
            raise ValueError(f"storage {key} is {window.size} bytes long; expected {needed}")
        return FileTensor(window, dtype, 0, (numel,), (1,))


class _NotTakenError(ValueError):
    """What a file has is none of its damage: it is of a kind that is not taken."""


# --- what a pickle may name -----------------------------------------------------------------------


class StandIn:
    """An object of a class that was not made: the class's name, and the attributes that it had.

    There is a subclass for each name. pickle makes an object by __new__ alone, and gives it
    attributes by __setstate__.
    """

    name: str
    state: dict[Any, Any]

    def __new__(cls) -> Any:
        """Return one without attributes."""
        stand_in = super().__new__(cls)
        stand_in.state = {}
        return stand_in

    def __setstate__(self, state: Any) -> None:
        """Keep attributes as data: those of slots are in a second dict, and a class may have a
        tuple of its own, whose items are kept by their place.
        """
        for index, part in enumerate(state if isinstance(state, tuple) else (state,)):
            if part is not None:
                self.state.update(part if isinstance(part, dict) else {index: part})

    def get(self, key: object, default: Any = None) -> Any:
        """Return an attribute."""
        return self.state.get(key, default)


class _Named:
    """A function or class that a pickle names. call: makes what stands for its result, from
    plain data; None: nothing does. dtype: of a storage's class.
    """

    def __init__(
        self, call: Callable[..., Any] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self._call, self.dtype = call, dtype

    def __call__(self, *args: Any) -> Any:
        if self._call is None:
            raise ValueError("a call of a class is not plain data")
        return self._call(*args)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a function or class is given attributes")


class _Dict(dict[Any, Any]):
    """Stands for a subclass of dict, whose attributes (a state dict's _metadata) are left out."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class _Counter(_Dict):
    """Stands for a Counter."""

    __slots__ = ()


def _value(value: Any = None) -> Any:
    """Stand for an enum's member: its value."""
    if not isinstance(value, int | str):
        raise ValueError("an enum's value is not a number or text")
    return value


def _bytes_of(value: Any = b"", encoding: Any = None) -> bytes:
    if isinstance(value, str) and encoding in ("latin1", "latin-1"):
        return value.encode("latin1")
    if not isinstance(value, bytes | bytearray) or encoding is not None:
        raise ValueError(f"bytes are made from {type(value).__name__}")
    return bytes(value)


def _size(sizes: Any) -> tuple[int, ...]:
    if not are_counts(tuple(sizes)):
        raise ValueError("a size is not a count")
    return tuple(sizes)


def _layout(name: Any) -> str:
    if name != "torch.strided":
        raise ValueError(f"a tensor's layout is {name!r}; expected torch.strided")
    return "torch.strided"


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, *more: Any, dtype: Any = None
) -> FileTensor:
    """more: requires_grad, hooks, and marks."""
    if not isinstance(storage, FileTensor):
        raise ValueError("a tensor is made from an object other than a storage")
    if any(isinstance(item, Mapping) and any(item.values()) for item in more):
        raise ValueError(
            "a tensor is marked conjugate or negative. Save tensor.resolve_conj().resolve_neg() "
            "instead"
        )
    return FileTensor(storage.window, dtype or storage.dtype, offset, _size(size), _size(stride))


def _tensor_v3(*args: Any) -> FileTensor:
    if not isinstance(args[6], torch.dtype):
        raise ValueError("a tensor's dtype is invalid")
    return _tensor(*args[:6], *args[7:], dtype=args[6])


class _ArrayDtype(StandIn):
    """Stands for a NumPy dtype: of numbers only."""

    name = "numpy.dtype"

    def __new__(cls, code: Any, align: Any = False, copy: Any = True) -> Any:
        if not re.fullmatch("[biufc][0-9]{1,2}", str(code)):
            raise _NotTakenError(
                f"a NumPy value of dtype {code!r}; expected numbers. Save text, dates and objects "
                "without NumPy"
            )
        stand_in = super().__new__(cls)
        stand_in.state["code"] = code
        return stand_in


class _Array(StandIn):
    """Stands for a NumPy array."""

    name = "numpy.ndarray"

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, columns_first, raw = state
        array = _numpy_array(dtype, raw).reshape(_size(shape), order="F" if columns_first else "C")
        self.state["array"] = array.copy()


def _array_of_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    """Stand for numpy's _frombuffer, of pickle's protocol 5."""
    array: _Array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", raw))
    return array


def _numpy_array(dtype: Any, raw: Any) -> Any:
    if not isinstance(dtype, _ArrayDtype):
        raise ValueError("a NumPy array without a dtype")
    byte_order = dtype.get(1, "=")
    if byte_order not in ("<", ">", "=", "|"):
        raise ValueError("a byte order is invalid")
    try:
        numpy = import_module("numpy")
    except ModuleNotFoundError as error:
        raise ValueError(
            "it contains a NumPy array, but NumPy is not installed: pip install numpy"
        ) from error
    return numpy.frombuffer(_bytes_of(raw), dtype=byte_order + dtype.state["code"])


_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "BFloat16": torch.bfloat16,
    "Half": torch.float16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "Untyped": torch.uint8,
}
# classes of which only attributes are taken
_STAND_INS = """
    argparse.Namespace
    types.SimpleNamespace
    deepspeed.runtime.fp16.loss_scaler.LossScaler
    deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler
    deepspeed.utils.tensor_fragment.fragment_address
    torch.distributed.checkpoint.metadata.Metadata
    torch.distributed.checkpoint.metadata.TensorStorageMetadata
    torch.distributed.checkpoint.metadata.BytesStorageMetadata
    torch.distributed.checkpoint.metadata.ChunkStorageMetadata
    torch.distributed.checkpoint.metadata.MetadataIndex
    torch.distributed.checkpoint.metadata.StorageMeta
    torch.distributed.checkpoint.metadata.TensorProperties
    torch.distributed.checkpoint.filesystem._StorageInfo
    torch.distributed.checkpoint.filesystem._StoragePrefix
"""
# by how what stands for a result is made
_CALLED: tuple[tuple[Callable[..., Any], str], ...] = (
    (_Dict, "collections.OrderedDict"),
    (_Counter, "collections.Counter"),
    (lambda factory=None, items=(): _Dict(items), "collections.defaultdict"),
    (set, "builtins.set"),
    (frozenset, "builtins.frozenset"),
    (complex, "builtins.complex"),
    (_bytes_of, "builtins.bytes builtins.bytearray _codecs.encode"),
    (
        lambda *parts: os.path.join("", *parts),
        "pathlib.PosixPath pathlib.WindowsPath pathlib.PurePosixPath pathlib._local.PosixPath",
    ),
    (
        _value,
        "deepspeed.runtime.zero.config.ZeroStageEnum "
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    ),
    (_size, "torch.Size"),
    (lambda kind, index=None: str(kind) if index is None else f"{kind}:{index}", "torch.device"),
    (_layout, "torch.serialization._get_layout"),
    (_tensor, "torch._utils._rebuild_tensor torch._utils._rebuild_tensor_v2"),
    (_tensor_v3, "torch._utils._rebuild_tensor_v3"),
    (
        lambda data, *attributes: data,
        "torch._utils._rebuild_parameter torch._utils._rebuild_parameter_with_state",
    ),
    # a tensor with attributes, which are left out
    (lambda rebuild, kind, args, state: rebuild(*args), "torch._tensor._rebuild_from_type_v2"),
    (
        lambda kind, shape, code: _Array(),
        "numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct",
    ),
    (_array_of_buffer, "numpy.core.numeric._frombuffer numpy._core.numeric._frombuffer"),
    (
        lambda dtype, raw: _numpy_array(dtype, raw).reshape(()).item(),
        "numpy.core.multiarray.scalar numpy._core.multiarray.scalar",
    ),
)
_UNCALLED = """
    torch.Tensor torch.nn.parameter.Parameter torch.nn.Parameter numpy.ndarray
    builtins.bool builtins.dict builtins.float builtins.int builtins.list builtins.long
    builtins.str builtins.unicode
"""
_KNOWN: Mapping[str, Any] = {
    **{name: _Named(call) for call, names in _CALLED for name in names.split()},
    **{name: _Named() for name in _UNCALLED.split()},
    **{name: type(name, (StandIn,), {"name": name}) for name in _STAND_INS.split()},
    _ArrayDtype.name: _ArrayDtype,
    **{
        f"{module}.{kind}Storage": _Named(dtype=dtype)
        for kind, dtype in _STORAGES.items()
        for module in ("torch", "torch.storage")
    },
    **{
        f"torch.{name}": kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)
    },
}


# --- running a pickle -----------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    """Runs a pickle with what `_KNOWN` has. storage: returns what stands for a persistent id
    (torch.save's storages).
    """

    def __init__(self, raw: bytes, where: str, storage: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(raw))
        self._where, self._storage = where, storage

    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module  # its name in protocol 2
        known = _KNOWN.get(f"{module}.{name}")
        if known is None:
            hint = (
                " (save full tensors: get_state_dict with full_state_dict=True, or "
                "torch.distributed.checkpoint)"
            )
            raise ValueError(
                f"load: {self._where} names {module[:100]}.{name[:100]}, which is refused because "
                "it may run code; expected tensors, plain data, and the objects saved by "
                "DeepSpeed and torch.optim. Load the file in a trusted place, remove this object, "
                f"and save it again{hint if 'DTensor' in f'{module}.{name}' else ''}"
            )
        return known

    def persistent_load(self, persistent_id: Any) -> Any:
        return self._storage(persistent_id)


def _run(raw: bytes, where: str, storage: Callable[[Any], Any]) -> Any:
    with reporting(
        f"{where} is damaged or not a checkpoint", "tensors and plain data: copy it again"
    ):
        for code, argument, _ in pickletools.genops(raw):
            if code.name in ("EXT1", "EXT2", "EXT4"):
                raise ValueError("it contains an extension code, which may name anything")
            # memory is taken for all places before it
            if code.name.endswith("PUT") and int(argument or 0) > len(raw):
                raise ValueError(f"it puts a value in the place {argument}")
        try:
            return _Unpickler(raw, where, storage).load()
        except _NotTakenError as error:
            raise ValueError(f"load: {where} contains {error}") from None


# --- entry points ---------------------------------------------------------------------------------


def load_pickle(window: Window) -> Any:
    """Return what a file of plain pickle has: plain data and StandIns. Raises OSError or
    ValueError.
    """

    def refuse(_: Any) -> Any:
        raise ValueError("it refers to a storage; expected none in such a file")

    return _run(bytes(window.read()), str(window), refuse)


def load_torch(window: Window) -> Any:
    """Return what torch.save wrote: plain data, StandIns, and tensors as FileTensors. Raises
    OSError or ValueError.
    """
    if window.read(0, min(window.size, 4)) != _MAGIC:
        raise ValueError(
            f"load: {window} is not a zip of torch.save, or is from before torch 1.6. Save it again"
        )
    archive = _Archive(window)
    return _run(archive.pickle(), str(window), archive.storage)


def load_file(path: Path) -> Any:
    """Return what the file `path` of torch.save's has. See `load_torch`."""
    return load_torch(Window.of(path))


def plain(value: Any, where: str) -> Any:
    """Return a value as plain data in memory: tensors are read, and objects become dicts of their
    attributes.

    Raises OSError or ValueError, the latter also for data that contain themselves, and for classes.
    """
    return _plain(value, where, {}, 0)


def _plain(value: Any, where: str, converted: dict[int, Any], depth: int) -> Any:
    """Return plain data. converted: what is done, by id, so that what is shared stays shared."""
    if depth > _MAX_DEPTH:
        raise ValueError(
            f"load: {where} is nested more than {_MAX_DEPTH} levels deep; expected plain data"
        )
    if isinstance(value, _Named | type):
        raise ValueError(f"load: {where} is a class or a storage; expected plain data")
    if isinstance(value, _Array):
        return value.get("array")
    if id(value) in converted:
        return converted[id(value)]
    content: Any = value.state if isinstance(value, StandIn) else value

    def inside(key: Any, item: Any) -> Any:
        return _plain(item, f"{where}[{short(key)}]", converted, depth + 1)

    if is_stored(content):
        result: Any = whole(content)
    elif isinstance(content, dict):
        result = {key: inside(key, item) for key, item in content.items()}
        result = Counter(result) if isinstance(content, _Counter) else result
    elif isinstance(content, list | tuple):
        result = type(content)(inside(index, item) for index, item in enumerate(content))
    else:
        return value
    converted[id(value)] = result
    return result
