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
"""

import io
import os
import pickle
import pickletools
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import torch

from shardcore.checkpoint.file_tensors import FileTensor, Window, is_stored, whole
from shardcore.checkpoint.source import reporting

_MAX_DEPTH = 50  # of plain data
_LOCAL_HEADER = 30  # bytes of a zip's header of an entry, before its name


# --- torch.save's zip -----------------------------------------------------------------------------


class _Stream(io.RawIOBase):
    """A window as a file for zipfile."""

    def __init__(self, window: Window) -> None:
        self._window, self._at = window, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._window.size}[whence]
        )
        if at < 0:
            raise io.UnsupportedOperation("seek before the start")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._window.size - self._at)
        size = left if size is None or size < 0 else min(size, left)
        found = self._window.read(self._at, size)
        self._at += size
        return bytes(found)


class _Archive:
    """The zip that torch.save writes: <name>/data.pkl, and a storage in each <name>/data/<key>,
    none compressed.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        with reporting(f"{window} is torn or no file of torch.save's", "its zip: copy it again"):
            self._entries = {
                info.filename: info for info in zipfile.ZipFile(_Stream(window)).infolist()
            }
        roots = [
            name.removesuffix("data.pkl")
            for name in self._entries
            if name.endswith("/data.pkl") and name.count("/") == 1
        ]
        if len(roots) != 1:
            raise ValueError(
                f"load: {window} is a zip without data.pkl; expected a file of torch.save's"
            )
        self._root = roots[0]
        if f"{self._root}constants.pkl" in self._entries:
            raise ValueError(
                f"load: {window} is a TorchScript program; expected tensors and plain data that "
                f"torch.save wrote"
            )
        if f"{self._root}byteorder" in self._entries:
            order = bytes(self.entry("byteorder").read()).decode("ascii", "replace")
            if order != sys.byteorder:
                raise ValueError(
                    f"load: {window} has byte order {order!r}; expected {sys.byteorder!r}, as this "
                    f"machine"
                )

    def entry(self, name: str) -> Window:
        """Return the bytes of an entry. Raises ValueError if there is none, or it is compressed."""
        info = self._entries.get(self._root + name)
        if info is None:
            raise ValueError(
                f"load: {self.window} has no entry {name}; expected a complete file: copy it again"
            )
        if (
            info.compress_type != zipfile.ZIP_STORED
            or info.compress_size != info.file_size
            or info.flag_bits & 1
        ):
            raise ValueError(
                f"load: {self.window} has a compressed or encrypted {name}; expected it as "
                f"torch.save writes it"
            )
        header = bytes(self.window.read(info.header_offset, _LOCAL_HEADER))
        magic, name_size, extra_size = struct.unpack("<4s22xHH", header)
        if magic != b"PK\x03\x04":
            raise ValueError(
                f"load: {self.window} has no header of {name} at {info.header_offset}; expected "
                f"one: copy the file again"
            )
        return self.window.part(
            info.header_offset + _LOCAL_HEADER + name_size + extra_size, info.file_size
        )

    def pickle(self) -> bytes:
        """Return data.pkl. Raises ValueError if it is damaged."""
        window = self.entry("data.pkl")
        raw = bytes(window.read())
        expected = self._entries[f"{self._root}data.pkl"].CRC
        if zlib.crc32(raw) != expected:
            raise ValueError(
                f"load: {window}, data.pkl, is damaged: its crc32 is {zlib.crc32(raw):08x}; "
                f"expected {expected:08x} (copy it again)"
            )
        return raw


class _NotTakenError(ValueError):
    """What a file has is none of its damage: it is of a kind that is not taken."""


# --- what a pickle may name -----------------------------------------------------------------------


class StandIn:
    """An object of a class that was not made: the class's name, and the attributes that it had.

    There is a subclass for each name. pickle makes an object by __new__ alone, and gives it
    attributes by __setstate__.
    """

    name: str
    state: dict[str, Any]

    def __new__(cls) -> Any:
        """Make one without attributes."""
        made = super().__new__(cls)
        made.state = {}
        return made

    def __setstate__(self, state: Any) -> None:
        """Keep attributes as data."""
        for part in state if isinstance(state, tuple) else (state,):  # of slots apart
            self.state.update(part or {})

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.state.get(key, default)


class _Named:
    """A function or class that a pickle names. call: makes what stands for its result, from
    plain data; None: nothing does.
    """

    def __init__(
        self,
        call: Callable[..., Any] | None = None,
        dtype: torch.dtype | None = None,
        untyped: bool = False,
    ) -> None:
        """dtype, untyped: of a storage's class."""
        self._call, self.dtype, self.untyped = call, dtype, untyped

    def __call__(self, *args: Any) -> Any:
        if self._call is None:
            raise ValueError("a class is called, which makes no plain data")
        return self._call(*args)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a function or class is given attributes")


class _Storage(NamedTuple):
    window: Window
    dtype: torch.dtype
    untyped: bool


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
        raise ValueError("an enum's value is no number or text")
    return value


def _default_dict(factory: Any = None, items: Any = ()) -> dict[Any, Any]:
    return _Dict(items)


def _bytes_of(value: Any = b"", encoding: Any = None) -> bytes:
    if isinstance(value, str) and encoding in ("latin1", "latin-1"):
        return value.encode("latin1")
    if not isinstance(value, bytes | bytearray) or encoding is not None:
        raise ValueError(f"bytes are made from {type(value).__name__}")
    return bytes(value)


def _path(*parts: Any) -> str:
    return os.path.join("", *parts)


def _size(given: Any) -> tuple[int, ...]:
    sizes: tuple[int, ...] = tuple(given)
    if any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("a size is no count")
    return sizes


def _layout(name: Any) -> str:
    if name != "torch.strided":
        raise ValueError(f"a tensor's layout is {name!r}; expected torch.strided")
    return "torch.strided"


def _tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    *more: Any,
    dtype: torch.dtype | None = None,
) -> FileTensor:
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor is made from something else than a storage")
    if any(isinstance(item, Mapping) and any(item.values()) for item in more):
        raise ValueError(
            "a tensor is marked conjugate or negative; expected plain values: save "
            "tensor.resolve_conj().resolve_neg()"
        )
    if storage.untyped and dtype is None:
        raise ValueError("a tensor has no dtype")
    return FileTensor(storage.window, dtype or storage.dtype, offset, _size(size), _size(stride))


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *more: Any
) -> FileTensor:
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor's dtype is none")
    return _tensor(storage, offset, size, stride, grad, hooks, *more, dtype=dtype)


def _parameter(data: Any, *attributes: Any) -> Any:
    return data


def _of_type(rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
    """Stand for torch._tensor._rebuild_from_type_v2: a tensor with attributes, which are left
    out.
    """
    return rebuild(*args)


class _Properties(StandIn):
    """Stands for TensorProperties, whose state is a tuple."""

    name = "torch.distributed.checkpoint.metadata.TensorProperties"

    def __setstate__(self, state: Any) -> None:
        self.state["dtype"] = state[0]


class _Array(StandIn):
    """Stands for a NumPy array."""

    name = "numpy.ndarray"

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, columns_first, raw = state
        self.state["array"] = _numpy_array(dtype, shape, raw, bool(columns_first))


def _array(kind: Any, shape: Any, code: Any) -> StandIn:
    made: StandIn = _Array()
    return made


class _ArrayDtype(StandIn):
    """Stands for a NumPy dtype: of numbers only."""

    name = "numpy.dtype"

    def __new__(cls, code: Any, align: Any = False, copy: Any = True) -> Any:
        if (
            not isinstance(code, str)
            or code[:1] not in "biufc"
            or not code[1:].isdecimal()
            or len(code) > 3
        ):
            raise _NotTakenError(
                f"a NumPy value of dtype {code!r}; expected numbers: save text, dates, objects "
                f"without NumPy"
            )
        made = super().__new__(cls)
        made.state.update(code=code, order="=")
        return made

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", ">", "=", "|"):
            raise ValueError("a byte order is none")
        self.state["order"] = state[1]


def _array_of_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> StandIn:
    """Stand for numpy's _frombuffer, of pickle's protocol 5."""
    made: StandIn = _Array()
    made.state["array"] = _numpy_array(dtype, shape, raw, order == "F")
    return made


def _array_scalar(dtype: Any, raw: Any) -> Any:
    return _numpy_array(dtype, (), raw).item()


def _numpy_array(dtype: Any, shape: Any, raw: Any, columns_first: bool = False) -> Any:
    if not isinstance(dtype, _ArrayDtype):
        raise ValueError("a NumPy array without a dtype")
    try:
        numpy = import_module("numpy")
    except ModuleNotFoundError as error:
        raise ValueError(
            "there is a NumPy array, and NumPy is missing; expected it (pip install numpy)"
        ) from error
    made = numpy.frombuffer(
        _bytes_of(raw), dtype=numpy.dtype(dtype.state["code"]).newbyteorder(dtype.state["order"])
    )
    return made.reshape(_size(shape), order="F" if columns_first else "C").copy()


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
}
_STAND_INS = (  # classes of which only attributes are taken
    "argparse.Namespace",
    "types.SimpleNamespace",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "torch.distributed.checkpoint.metadata.Metadata",
    "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
    "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
)
_CALLED: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _Dict,
    "collections.Counter": _Counter,
    "collections.defaultdict": _default_dict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.bytes": _bytes_of,
    "builtins.bytearray": _bytes_of,
    "builtins.complex": complex,
    "_codecs.encode": _bytes_of,
    **dict.fromkeys(
        (
            "pathlib.PosixPath",
            "pathlib.WindowsPath",
            "pathlib.PurePosixPath",
            "pathlib._local.PosixPath",
        ),
        _path,
    ),
    "deepspeed.runtime.zero.config.ZeroStageEnum": _value,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _value,
    "torch.Size": _size,
    "torch.device": lambda kind, index=None: str(kind) if index is None else f"{kind}:{index}",
    "torch.serialization._get_layout": _layout,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.numeric._frombuffer": _array_of_buffer,
    "numpy._core.numeric._frombuffer": _array_of_buffer,
    "numpy.core.multiarray.scalar": _array_scalar,
    "numpy._core.multiarray.scalar": _array_scalar,
}
_UNCALLED = (
    *("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter"),
    *(
        "numpy.ndarray",
        *(
            f"builtins.{name}"
            for name in ("bool", "dict", "float", "int", "list", "long", "str", "unicode")
        ),
    ),
)
_KNOWN: Mapping[str, Any] = {
    **{name: _Named(call) for name, call in _CALLED.items()},
    **{name: _Named() for name in _UNCALLED},
    **{name: type(name, (StandIn,), {"name": name}) for name in _STAND_INS},
    **{kind.name: kind for kind in (_Properties, _ArrayDtype)},
    **{
        name: _Named(dtype=dtype)
        for kind, dtype in _STORAGES.items()
        for name in (f"torch.{kind}Storage", f"torch.storage.{kind}Storage")
    },
    **{
        name: _Named(dtype=torch.uint8, untyped=True)
        for name in ("torch.UntypedStorage", "torch.storage.UntypedStorage")
    },
    **{
        f"torch.{name}": value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
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
        found = _KNOWN.get(f"{module}.{name}")
        if found is None:
            hint = (
                " (save full tensors: get_state_dict with full_state_dict=True, or "
                "torch.distributed.checkpoint)"
            )
            raise ValueError(
                f"load: {self._where} names {module[:100]}.{name[:100]}, which is refused, since "
                f"it may run code; expected "
                "tensors, plain data, and what DeepSpeed and torch.optim save: load it where you "
                "trust it, take that out, and "
                f"save it again{hint if 'DTensor' in f'{module}.{name}' else ''}"
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        return self._storage(pid)


def _run(raw: bytes, where: str, storage: Callable[[Any], Any]) -> Any:
    with reporting(f"{where} is damaged or no checkpoint", "tensors and plain data: copy it again"):
        for code, argument, _ in pickletools.genops(raw):
            if code.name in ("EXT1", "EXT2", "EXT4"):
                raise ValueError("it has an extension code, which may name anything")
            # memory is taken for all places before it
            if code.name.endswith("PUT") and int(argument or 0) > len(raw):
                raise ValueError(f"it puts a value in the place {argument}")
        try:
            return _Unpickler(raw, where, storage).load()
        except _NotTakenError as error:
            raise ValueError(f"load: {where} has {error}") from None


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
    if window.size < 4 or bytes(window.read(0, 4)) != b"PK\x03\x04":
        raise ValueError(
            f"load: {window} is no file of torch.save's, or one from before torch 1.6; expected "
            f"its zip: save it again"
        )
    archive = _Archive(window)
    entries: dict[str, Window] = {}

    def storage(pid: Any) -> _Storage:
        kind, named, key, _, numel = pid
        if (
            kind != "storage"
            or not isinstance(named, _Named)
            or named.dtype is None
            or type(numel) is not int
            or numel < 0
        ):
            raise ValueError("refers to something else than a storage")
        if not isinstance(key, str) or not key.isdecimal():
            raise ValueError(f"a storage is named {str(key)[:100]!r}; expected a number")
        if key not in entries:
            entries[key] = archive.entry(f"data/{key}")
        found = entries[key]
        if found.size != numel * named.dtype.itemsize:
            raise ValueError(
                f"storage {key} has {found.size} bytes; expected {numel * named.dtype.itemsize}"
            )
        return _Storage(found, named.dtype, named.untyped)

    return _run(archive.pickle(), str(window), storage)


def load_file(path: Path) -> Any:
    """Return what the file `path` of torch.save's has. See `load_torch`."""
    return load_torch(Window.of(path))


def plain(value: Any, where: str) -> Any:
    """Return a value as plain data in memory: tensors are read, and objects become dicts of their
    attributes.

    Raises OSError or ValueError, the latter also for data that contain themselves, and for classes.
    """
    return _plain(value, where, {}, 0)


def _plain(value: Any, where: str, done: dict[int, Any], depth: int) -> Any:
    """Return plain data. done: what was converted, by id, so that what is shared stays shared."""
    if depth > _MAX_DEPTH:
        raise ValueError(
            f"load: {where} is nested more than {_MAX_DEPTH} levels deep; expected plain data"
        )
    if isinstance(value, _Named | _Storage | type):
        raise ValueError(f"load: {where} is a class or a storage; expected plain data")
    if isinstance(value, _Array):
        return value.get("array")
    if not is_stored(value) and not isinstance(value, dict | list | tuple | StandIn):
        return value
    if id(value) not in done:
        held: Any = value.state if isinstance(value, StandIn) else value
        if is_stored(held):
            done[id(value)] = whole(held)
        elif isinstance(held, dict):
            made = {
                k: _plain(item, f"{where}[{short(k)}]", done, depth + 1) for k, item in held.items()
            }
            done[id(value)] = Counter(made) if isinstance(held, _Counter) else made
        else:
            kind = list if isinstance(held, list) else tuple
            done[id(value)] = kind(
                _plain(item, f"{where}[{i}]", done, depth + 1) for i, item in enumerate(held)
            )
    return done[id(value)]
