"""Plain data as JSON and back: numbers, text, lists, tuples, dicts, bytes, tensors. No pickle, and
nothing is executed.

A value that JSON lacks is an object with one key: {"$tuple": [...]}, {"$bytes": base64}, {"$float":
"nan"}, {"$dict": [[key, value], ...]} for keys that are no strings (or begin with "$"),
{"$counter": a dict}, {"$tensor": base64, "dtype": name, "shape": [...]}, and {"$array": ...} for
NumPy's. What cannot be written is a TypeError that says where it is.
"""

import base64
import ctypes
import math
import sys
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

import torch

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_DEEP = 100  # levels of nesting


def to_json(value: Any, where: str) -> Any:
    """Return `value` as what the json module writes; `where` names it in errors. Raises
    TypeError or ValueError.
    """
    return _encode(value, where, 0)


def from_json(value: Any, where: str) -> Any:
    """Return the value that `to_json` was given. Raises ValueError for anything else."""
    try:
        return _decode(value, 0)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        SyntaxError,
    ) as error:
        raise ValueError(
            f"{where}: a value is damaged or was not written by shardcore ({error})"
        ) from error


def _encode(value: Any, where: str, depth: int) -> Any:
    if depth > _DEEP:
        raise ValueError(f"{where} is nested more than {_DEEP} levels deep; expected plain data")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        return {
            "$tensor": _bytes_of(value, where),
            "dtype": _name_of(value.dtype, where),
            "shape": list(value.shape),
        }
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Counter):  # MultiStepLR's milestones, of which it calls elements()
        return {"$counter": _encode(dict(value), where, depth + 1)}
    if isinstance(value, Mapping):
        items = [
            (key, _encode(item, f"{where}[{key!r}]", depth + 1)) for key, item in value.items()
        ]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        return {"$dict": [[_encode(key, where, depth + 1), item] for key, item in items]}
    if isinstance(value, list | tuple):
        encoded = [
            _encode(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)
        ]
        return encoded if isinstance(value, list) else {"$tuple": encoded}
    numpy = sys.modules.get("numpy")
    of_numpy = numpy is not None and isinstance(value, numpy.generic | numpy.ndarray)
    if numpy is not None and of_numpy and value.dtype.kind in "biuf":
        if value.ndim == 0:
            return _encode(value.item(), where, depth + 1)
        value = numpy.ascontiguousarray(value, value.dtype.newbyteorder("="))
        return {
            "$array": _encode(torch.from_numpy(_signed(value)), where, depth + 1),
            "dtype": str(value.dtype),
        }
    if isinstance(value, int | float | str):  # of a subclass, such as an enum's
        if isinstance(value, int):
            plain_value: Any = int(value)
        elif isinstance(value, float):
            plain_value = float(value)
        else:
            plain_value = str.__str__(value)  # not the __str__ of the subclass
        return _encode(plain_value, where, depth + 1)
    raise TypeError(
        f"{where} is of type {type(value).__name__}; expected plain data (numbers, text, lists, "
        "tuples, dicts, bytes, tensors, NumPy arrays). Pass its state_dict(), or save it yourself"
    )


def _signed(array: Any) -> Any:
    """View an array of unsigned integers, which torch may lack, as signed ones of that size."""
    if array.dtype.kind != "u" or array.dtype.itemsize == 1:
        return array
    return array.view(f"i{array.dtype.itemsize}")


def _name_of(dtype: torch.dtype, where: str) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise TypeError(f"{where} is a tensor of {name}; expected one of {', '.join(_DTYPES)}")
    return name


def _bytes_of(tensor: torch.Tensor, where: str) -> str:
    # its memory is not its values
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise TypeError(
            f"{where} is of type {type(tensor).__name__}, which stores its values in other "
            "tensors; expected a plain tensor, such as full_tensor() of a DTensor"
        )
    if tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(
            f"{where} is a tensor without plain memory ({tensor.layout}, {tensor.device}); "
            f"expected a dense one"
        )
    flat = tensor.detach().cpu().contiguous()
    data = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""
    return base64.b64encode(data).decode()


def _decode(value: Any, depth: int) -> Any:
    if depth > 2 * _DEEP:
        raise ValueError(f"nested more than {2 * _DEEP} levels deep")
    if isinstance(value, list):
        return [_decode(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item, depth + 1) for key, item in value.items()}
    if tag == "$tuple":
        return tuple(_decode(item, depth + 1) for item in value[tag])
    if tag == "$bytes":
        return base64.b64decode(value[tag], validate=True)
    if tag == "$float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value[tag]]
    if tag == "$dict":
        return {_decode(key, depth + 1): _decode(item, depth + 1) for key, item in value[tag]}
    if tag == "$counter":
        return Counter(_decode(value[tag], depth + 1))
    if tag == "$tensor":
        dtype, shape = _DTYPES[value["dtype"]], [int(size) for size in value["shape"]]
        data = base64.b64decode(value[tag], validate=True)
        if min(shape, default=0) < 0 or len(data) != prod(shape) * dtype.itemsize:
            raise ValueError(f"a tensor of shape {shape} takes {len(data)} bytes")
        if not data:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
    if tag == "$array":
        return _decode(value[tag], depth + 1).numpy().view(str(value["dtype"]))
    raise ValueError(f"unknown tag {tag}")
