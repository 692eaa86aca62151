"""Files that torch.save wrote, read without pickle: plain data, and tensors that stay on disk until a range of them is read.

A pickle is a program. This module decodes its instructions with pickletools and runs them itself, over plain data only: it
never imports what a pickle names, and calls only the functions below, which make plain data, a FileTensor, or a StandIn, the
inert record of an object's attributes. What a pickle may name is the fixed list `_KNOWN`; anything else is refused by its name.

Note [Hostile files]
Sizes are compared with the file before memory is taken; instructions are executed once each, and calls may copy a few times
the pickle's size in all, so time and memory are linear in that; tuples are few levels deep (hash() of deeply nested ones would
end the process); and plain data have an end, however often a part of them is referred to. Whatever is wrong with a file is a
ValueError or an OSError that names it.
"""

import os
import pickletools
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from io import RawIOBase, UnsupportedOperation
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch

from shardcore.checkpoint.file_tensors import FileTensor, Window, is_stored, whole

_MAX_PICKLE_BYTES = 1 << 30  # of one pickle, or of a zip's directory
_MAX_DEPTH = 50  # of plain data
_MAX_NESTED = 1_000_000  # elements of a tuple of tuples, each as often as it is reached
_COPIES = 4  # times the bytes of a pickle: the elements that its calls may copy
_MAX_VALUES = 100_000_000  # of plain data, likewise
_LOCAL_HEADER = 30  # bytes of a zip's header of an entry, before its name


# --- torch.save's zip ----------------------------------------------------------------------------------------------------


class _Stream(RawIOBase):
    """A window as a file for zipfile."""

    def __init__(self, window: Window) -> None:
        self._window, self._at = window, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._window.size}[whence]
        if at < 0:
            raise UnsupportedOperation("seek before the start")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._window.size - self._at)
        size = left if size is None or size < 0 else min(size, left)
        if size > _MAX_PICKLE_BYTES:
            raise ValueError(f"its directory has {size} bytes")
        found = self._window.read(self._at, size)
        self._at += size
        return bytes(found)


class _Archive:
    """The zip that torch.save writes: <name>/data.pkl, and a storage in each <name>/data/<key>, none compressed."""

    def __init__(self, window: Window) -> None:
        self.window = window
        try:
            with zipfile.ZipFile(_Stream(window)) as file:
                self._entries = {info.filename: info for info in file.infolist()}
        except OSError:
            raise
        except Exception as error:  # zipfile's own, of damaged files: BadZipFile, struct.error, NotImplementedError and others
            raise ValueError(
                f"load: {window} is torn or no file of torch.save's ({error}); expected its zip: copy it again"
            ) from error
        roots = [name.removesuffix("data.pkl") for name in self._entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(roots) != 1:
            raise ValueError(f"load: {window} is a zip without data.pkl; expected a file of torch.save's")
        self._root = roots[0]
        if f"{self._root}constants.pkl" in self._entries:
            raise ValueError(f"load: {window} is a TorchScript program; expected tensors and plain data that torch.save wrote")
        if f"{self._root}byteorder" in self._entries:
            order = bytes(self.entry("byteorder").read()).decode("ascii", "replace")
            if order != sys.byteorder:
                raise ValueError(f"load: {window} has byte order {order!r}; expected {sys.byteorder!r}, as this machine")

    def entry(self, name: str) -> Window:
        """Return the bytes of an entry. Raises ValueError if there is none, or it is compressed."""
        info = self._entries.get(self._root + name)
        if info is None:
            raise ValueError(f"load: {self.window} has no entry {name}; expected a complete file: copy it again")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
            raise ValueError(f"load: {self.window} has a compressed or encrypted {name}; expected it as torch.save writes it")
        header = bytes(self.window.read(info.header_offset, _LOCAL_HEADER))
        magic, name_size, extra_size = struct.unpack("<4s22xHH", header)
        if magic != b"PK\x03\x04":
            raise ValueError(
                f"load: {self.window} has no header of {name} at {info.header_offset}; expected one: copy the file again"
            )
        return self.window.part(info.header_offset + _LOCAL_HEADER + name_size + extra_size, info.file_size)

    def pickle(self) -> bytes:
        """Return data.pkl. Raises ValueError if it is damaged."""
        window = self.entry("data.pkl")
        if window.size > _MAX_PICKLE_BYTES:
            raise ValueError(f"load: {window}, data.pkl, has {window.size} bytes; expected at most {_MAX_PICKLE_BYTES}")
        raw = bytes(window.read())
        expected = self._entries[f"{self._root}data.pkl"].CRC
        if zlib.crc32(raw) != expected:
            raise ValueError(
                f"load: {window}, data.pkl, is damaged: its crc32 is {zlib.crc32(raw):08x}; expected {expected:08x} (copy it "
                "again)"
            )
        return raw


# --- what a pickle may name -------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class StandIn:
    """An object of a class that was not made: the class's name, and the attributes that it had."""

    name: str
    state: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.state.get(key, default)

    def __repr__(self) -> str:
        """Return its class's name: attributes may be long, or contain it."""
        return f"StandIn({self.name})"


@dataclass(frozen=True)
class _Named:
    """A class or function that a pickle names. call: makes what stands for its result, from plain data."""

    name: str
    call: Callable[..., Any]
    typed: torch.dtype | None = None  # of a storage's class


@dataclass(frozen=True)
class _Storage:
    window: Window
    dtype: torch.dtype
    untyped: bool


def _uncallable(name: str, *args: Any) -> Any:
    raise ValueError(f"{name} is called, which makes no plain data")


def _stand_in(name: str, *args: Any) -> StandIn:
    if args:
        raise ValueError(f"{name} is made from {len(args)} arguments; expected none")
    return StandIn(name)


def _value(value: Any = None) -> Any:
    """Stand for an enum's member: its value."""
    if not isinstance(value, int | str):
        raise ValueError("an enum's value is no number or text")
    return value


def _pairs(items: Any = ()) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in items.items() if isinstance(items, dict) else items:
        found[_key(key)] = value
    return found


def _default_dict(factory: Any = None, items: Any = ()) -> dict[Any, Any]:
    return _pairs(items)


def _elements(items: Sequence[Any] = ()) -> set[Any]:
    return {_key(item) for item in items}


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
            "a tensor is marked conjugate or negative; expected plain values: save tensor.resolve_conj().resolve_neg()"
        )
    if storage.untyped and dtype is None:
        raise ValueError("a tensor has no dtype")
    return FileTensor(storage.window, dtype or storage.dtype, offset, _size(size), _size(stride))


def _tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *more: Any) -> FileTensor:
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor's dtype is none")
    return _tensor(storage, offset, size, stride, grad, hooks, *more, dtype=dtype)


def _parameter(data: Any, *attributes: Any) -> FileTensor:
    if not isinstance(data, FileTensor):
        raise ValueError("a Parameter is made from something else than a tensor")
    return data


def _of_type(rebuild: Any, kind: Any, args: Any, state: Any) -> FileTensor:
    """Stand for torch._tensor._rebuild_from_type_v2: a tensor with attributes, which are left out."""
    if not isinstance(rebuild, _Named) or not isinstance(kind, _Named) or kind.name not in _TENSOR_TYPES:
        raise ValueError("a tensor of an unknown type")
    return _parameter(rebuild.call(*args))


_TENSOR_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.Parameter")


def _array(kind: Any, shape: Any, code: Any) -> StandIn:
    return StandIn("numpy.ndarray")


def _array_dtype(code: Any, align: Any = False, copy: Any = True) -> StandIn:
    """Stand for a NumPy dtype: of numbers only (BUILD gives its byte order)."""
    if not isinstance(code, str) or code[:1] not in "biufc" or not code[1:].isdecimal() or len(code) > 3:
        raise ValueError(f"a NumPy array of {code!r}; expected numbers")
    return StandIn("numpy.dtype", {"code": code, "order": "="})


def _array_scalar(dtype: Any, raw: Any) -> Any:
    return _numpy_array(dtype, (), raw).item()


def _numpy_array(dtype: Any, shape: Any, raw: Any, columns_first: bool = False) -> Any:
    if not isinstance(dtype, StandIn) or dtype.name != "numpy.dtype":
        raise ValueError("a NumPy array without a dtype")
    try:
        numpy = import_module("numpy")
    except ModuleNotFoundError as error:
        raise ValueError("there is a NumPy array, and NumPy is missing; expected it (pip install numpy)") from error
    made = numpy.frombuffer(_bytes_of(raw), dtype=numpy.dtype(dtype.state["code"]).newbyteorder(dtype.state["order"]))
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
_DTYPES = (
    *("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"),
    *("bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
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
    "torch.distributed.checkpoint.metadata.TensorProperties",
    "torch.distributed.checkpoint.metadata.MetadataIndex",
    "torch.distributed.checkpoint.metadata.StorageMeta",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
)
_CALLED: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _pairs,
    "collections.Counter": _pairs,
    "collections.defaultdict": _default_dict,
    "builtins.set": _elements,
    "builtins.frozenset": _elements,
    "builtins.bytes": _bytes_of,
    "builtins.bytearray": _bytes_of,
    "builtins.complex": lambda real, imaginary: complex(float(real), float(imaginary)),
    "_codecs.encode": _bytes_of,
    **dict.fromkeys(("pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath"), _path),
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
    "numpy.core.multiarray.scalar": _array_scalar,
    "numpy._core.multiarray.scalar": _array_scalar,
    "numpy.dtype": _array_dtype,
}
_KNOWN: Mapping[str, Any] = {
    **{name: _Named(name, call) for name, call in _CALLED.items()},
    **{name: _Named(name, partial(_stand_in, name)) for name in _STAND_INS},
    **{
        name: _Named(name, partial(_uncallable, name))
        for name in (*_TENSOR_TYPES, "numpy.ndarray", "builtins.int", "builtins.list")
    },
    **{
        name: _Named(name, partial(_uncallable, name), dtype)
        for kind, dtype in _STORAGES.items()
        for name in (f"torch.{kind}Storage", f"torch.storage.{kind}Storage")
    },
    **{
        name: _Named(name, partial(_uncallable, name), torch.uint8)
        for name in ("torch.UntypedStorage", "torch.storage.UntypedStorage")
    },
    **{f"torch.{name}": getattr(torch, name) for name in _DTYPES},
}


def _key(value: Any, depth: int = 0) -> Any:
    """Return a key of a dict or element of a set, if it is safe to hash."""
    if isinstance(value, tuple) and depth < 3 and len(value) <= 16:
        return tuple(_key(item, depth + 1) for item in value)
    if value is None or isinstance(value, str | int | float | bytes | torch.dtype | StandIn):
        return value
    raise ValueError(f"a key is a {type(value).__name__}; expected text or numbers")


# --- the instructions of a pickle -------------------------------------------------------------------------------------------


class _Machine:
    """Runs the instructions of one pickle. storage: returns what stands for a persistent id (torch.save's storages)."""

    def __init__(self, where: str, storage: Callable[[Any], Any]) -> None:
        self._where, self._storage = where, storage
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._nested: dict[int, tuple[Any, int, int]] = {}  # by id, tuples in which there are others: depth and elements

    def run(self, raw: bytes) -> Any:
        self._budget = _COPIES * len(raw)
        at: int | None = 0
        name = ""
        try:
            for code, argument, position in pickletools.genops(raw):
                name, at = code.name, position
                if name == "STOP":
                    (found,) = self._stack
                    if self._marks:
                        raise ValueError("a mark is left")
                    return found
                self._step(name, argument)
        except OSError:
            raise
        except Exception as error:  # of whatever kind damaged or hostile bytes cause
            if isinstance(error, ValueError) and str(error).startswith("load: "):
                raise
            raise ValueError(
                f"load: {self._where} is damaged or no checkpoint: instruction {name or 'none'} at {at}: "
                f"{type(error).__name__}: {error}; expected tensors and plain data"
            ) from error
        raise ValueError(f"load: {self._where} ends within its pickle; expected a complete one: copy it again")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _LITERALS:
            stack.append(argument)
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name == "MARK":
            self._marks.append(stack)
            self._stack = []
        elif name in _TUPLES:
            count = _TUPLES[name]
            if len(stack) < count:
                raise ValueError("too few values")
            stack[len(stack) - count :] = [self._tuple(stack[len(stack) - count :])]
        elif name in _FROM_MARK:
            items = self._pop_mark()
            if name != "POP_MARK":
                self._stack.append(self._tuple(items) if name == "TUPLE" else _FROM_MARK[name](items))
        elif name in ("APPENDS", "SETITEMS", "ADDITEMS"):
            items = self._pop_mark()
            self._fill(name, self._stack[-1], items)
        elif name == "APPEND":
            item = stack.pop()
            self._fill("APPENDS", stack[-1], [item])
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self._fill("SETITEMS", stack[-1], [key, value])
        elif name == "POP":
            if stack:
                stack.pop()
            else:
                self._pop_mark()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "GLOBAL":
            stack.append(self._named(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            inner, module = stack.pop(), stack.pop()
            stack.append(self._named(module, inner))
        elif name in ("REDUCE", "NEWOBJ"):
            args, called = stack.pop(), stack.pop()
            if not isinstance(called, _Named) or not isinstance(args, tuple):
                raise ValueError(f"calls a {type(called).__name__}, which is nothing that a checkpoint needs")
            self._copy(args)
            stack.append(called.call(*args))
        elif name == "BUILD":
            state = stack.pop()
            self._copy(state if isinstance(state, tuple) else (state,))
            _build(stack, state)
        elif name == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif name not in ("PROTO", "FRAME"):  # EXT1 to EXT4, which look up a registry; INST, OBJ, NEWOBJ_EX, PERSID and others
            raise ValueError(f"load: {self._where} has the instruction {name}, which no checkpoint needs; expected plain data")

    def _copy(self, values: Sequence[Any]) -> None:
        """Count what a call may copy: values may be there many times, and calls' results be given to calls."""
        self._budget -= sum(len(value) for value in values if isinstance(value, Sized))
        if self._budget < 0:
            raise ValueError(f"its calls copy more than {_COPIES} times as much as it has")

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _tuple(self, items: list[Any]) -> tuple[Any, ...]:
        """Return a tuple that is safe to hash and compare: few levels, and few elements in all of them."""
        depth, numel = 1, len(items)
        for item in items:
            if type(item) is tuple:
                _, below, inner = self._nested.get(id(item), (item, 1, len(item)))
                depth, numel = max(depth, below + 1), numel + inner
        if depth > _MAX_DEPTH or (depth > 1 and numel > _MAX_NESTED):
            raise ValueError(f"tuples are nested {depth} deep, with {numel} elements in all")
        made = tuple(items)
        if depth > 1:
            self._nested[id(made)] = (made, depth, numel)
        return made

    def _fill(self, name: str, into: Any, items: list[Any]) -> None:
        if name == "APPENDS" and type(into) is list:
            into.extend(items)
        elif name == "SETITEMS" and type(into) is dict and len(items) % 2 == 0:
            for key, value in zip(items[::2], items[1::2], strict=True):
                into[_key(key)] = value
        elif name == "ADDITEMS" and type(into) is set:
            into.update(_elements(items))
        else:
            raise ValueError(f"fills a {type(into).__name__}")

    def _named(self, module: Any, name: Any) -> Any:
        module = "builtins" if module == "__builtin__" else module  # its name in protocol 2
        found = _KNOWN.get(f"{module}.{name}") if isinstance(module, str) and isinstance(name, str) else None
        if found is None:
            hint = " (save full tensors: get_state_dict with full_state_dict=True, or torch.distributed.checkpoint)"
            raise ValueError(
                f"load: {self._where} names {str(module)[:100]}.{str(name)[:100]}, which is refused, since it may run code; "
                "expected tensors, plain data, and what DeepSpeed and torch.optim save: load it where you trust it, take that "
                f"out, and save it again{hint if 'DTensor' in f'{module}.{name}' else ''}"
            )
        return found


def _build(stack: list[Any], state: Any) -> None:
    """Give the object on the stack its attributes: of a stand-in they are kept as data, of what is plain data left out."""
    into = stack[-1]
    if isinstance(into, StandIn) and into.name == "numpy.ndarray":
        _, shape, dtype, columns_first, raw = state
        into.state["array"] = _numpy_array(dtype, shape, raw, bool(columns_first))
    elif isinstance(into, StandIn) and into.name == "numpy.dtype":
        if state[1] not in ("<", ">", "=", "|"):
            raise ValueError("a byte order is none")
        into.state["order"] = state[1]
    elif isinstance(into, StandIn) and into.name.endswith(".TensorProperties") and isinstance(state, tuple):
        into.state["dtype"] = state[0]
    elif isinstance(into, StandIn):
        for part in state if isinstance(state, tuple) else (state,):
            if part is not None and not (type(part) is dict and all(isinstance(key, str) for key in part)):
                raise ValueError(f"attributes of {into.name} are no dict of names")
            into.state.update(part or {})
    elif not isinstance(into, dict | FileTensor) or not isinstance(state, dict | tuple | None):
        raise ValueError(f"gives attributes to a {type(into).__name__}")


_CONSTANTS: Mapping[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_LITERALS = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    )
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_FROM_MARK: Mapping[str, Callable[[list[Any]], Any]] = {
    "TUPLE": tuple,  # see _tuple
    "LIST": list,
    "DICT": lambda items: _pairs(zip(items[::2], items[1::2], strict=True)),
    "FROZENSET": _elements,
    "POP_MARK": lambda items: None,
}


# --- entry points -----------------------------------------------------------------------------------------------------------


def load_pickle(window: Window) -> Any:
    """Return what a file of plain pickle has: plain data and StandIns. Raises OSError or ValueError."""

    def refuse(_: Any) -> Any:
        raise ValueError("it refers to a storage; expected none in such a file")

    if window.size > _MAX_PICKLE_BYTES:
        raise ValueError(f"load: {window} has {window.size} bytes; expected at most {_MAX_PICKLE_BYTES} of metadata")
    return _Machine(str(window), refuse).run(bytes(window.read()))


def load_torch(window: Window) -> Any:
    """Return what torch.save wrote: plain data, StandIns, and tensors as FileTensors. Raises OSError or ValueError."""
    if window.size < 4 or bytes(window.read(0, 4)) != b"PK\x03\x04":
        raise ValueError(
            f"load: {window} is no file of torch.save's, or one from before torch 1.6; expected its zip: save it again"
        )
    archive = _Archive(window)
    entries: dict[str, Window] = {}

    def storage(pid: Any) -> _Storage:
        kind, named, key, _, numel = pid
        if kind != "storage" or not isinstance(named, _Named) or named.typed is None or type(numel) is not int or numel < 0:
            raise ValueError("refers to something else than a storage")
        if not isinstance(key, str) or not key.isdecimal():
            raise ValueError(f"a storage is named {str(key)[:100]!r}; expected a number")
        if key not in entries:
            entries[key] = archive.entry(f"data/{key}")
        found = entries[key]
        if found.size != numel * named.typed.itemsize:
            raise ValueError(f"storage {key} has {found.size} bytes; expected {numel * named.typed.itemsize}")
        return _Storage(found, named.typed, named.name.endswith("UntypedStorage"))

    return _Machine(str(window), storage).run(archive.pickle())


def load_file(path: Path) -> Any:
    """Return what the file `path` of torch.save's has. See `load_torch`."""
    return load_torch(Window.of(path))


def plain(value: Any, where: str) -> Any:
    """Return a value as plain data in memory: tensors are read, and objects become dicts of their attributes.

    Raises OSError or ValueError, the latter also for data that contain themselves, and for classes.
    """
    return _plain(value, where, {}, 0)[0]


def _plain(value: Any, where: str, done: dict[int, tuple[Any, int]], depth: int) -> tuple[Any, int]:
    """Return plain data, and how many values they are, each as often as it is reached. done: what was converted, by id."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"load: {where} is nested more than {_MAX_DEPTH} levels deep; expected plain data")
    if isinstance(value, _Named | _Storage):
        raise ValueError(f"load: {where} is a class or a storage; expected plain data")
    if isinstance(value, StandIn) and value.name == "numpy.ndarray":
        return value.get("array"), 1
    if not is_stored(value) and not isinstance(value, dict | list | tuple | StandIn):
        return value, 1
    if id(value) in done:  # what is shared stays shared
        return done[id(value)]
    count = 1
    made: Any
    if is_stored(value):
        made = whole(value)
    else:
        held = value.state if isinstance(value, StandIn) else value
        found = {}
        for key, item in held.items() if isinstance(held, dict) else enumerate(held):
            found[key], more = _plain(item, f"{where}[{short(key)}]", done, depth + 1)
            count += more
            if count > _MAX_VALUES:
                raise ValueError(f"load: {where} has more than {_MAX_VALUES} values; expected plain data of fewer")
        made = found if isinstance(held, dict) else list(found.values()) if isinstance(held, list) else tuple(found.values())
    done[id(value)] = made, count
    return made, count
