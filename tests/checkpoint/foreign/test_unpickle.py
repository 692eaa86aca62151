"""Files of torch.save's: values bit for bit; hostile and damaged pickles are refused, and
nothing of them is run.
"""

import collections
import copyreg
import io
import os
import pickle
import struct
import sys
import types
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardcore.checkpoint.file_tensors import Window
from shardcore.checkpoint.foreign.unpickle import StandIn, load_file, load_pickle, plain
from tests.support.foreign import read_damaged, same_bits


def _saved(folder: Path, value: Any) -> Path:
    torch.save(value, folder / "file.pt")
    return folder / "file.pt"


def _back(folder: Path, value: Any) -> Any:
    return plain(load_file(_saved(folder, value)), "file")


DTYPES = "float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8"
DTYPES += " uint16 uint32 bool complex64"


@pytest.mark.parametrize("name", DTYPES.split())
def test_tensors_of_every_dtype(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    raw = torch.randint(0, 2 if name == "bool" else 256, (17 * dtype.itemsize,), dtype=torch.uint8)
    values = raw.view(dtype)
    for tensor in (
        values,
        values[3:12],
        values[5:5],
        nn.Parameter(values, requires_grad=False),
    ):
        stored = load_file(_saved(tmp_path, {"tensor": tensor}))["tensor"]
        assert stored.shape == tensor.shape
        assert same_bits(stored.read(0, tensor.numel()), tensor.detach())


def test_plain_data(tmp_path: Path) -> None:
    shared = [1, 2]
    numbers = [0, -1, 255, 65536, -(1 << 31), 1 << 80, 0.1, float("inf"), True, False, None, 1 + 2j]
    value = {
        "numbers": numbers,
        "text": ["", "a", "\u00e9\n" * 300, "x" * 70_000],
        "bytes": [b"", b"abc\xff", bytearray(b"\0\xfe")],
        "tuples": ((), (1,), (1, 2), (1, 2, 3), tuple(range(10))),
        "sets": [{1, "a"}, frozenset({2, (3, 4)})],
        "dicts": [
            {},
            {1: 2, (1, "b"): 3},
            collections.OrderedDict(a=1),
            collections.Counter("aab"),
        ],
        "default": [
            collections.defaultdict(kind, {"a": kind()})
            for kind in (list, int, dict, float, str, bool)
        ],
        "shared": [shared, shared],
    }
    of_torch = {"torch": [torch.Size([2, 3]), torch.float16, torch.device("cpu")]}
    back = _back(tmp_path, value | of_torch)
    assert back["torch"] == [(2, 3), torch.float16, "cpu"]
    assert list(back["dicts"][3].elements()) == ["a", "a", "b"]
    assert back["shared"][0] is back["shared"][1]
    assert back == value | {"torch": back["torch"]}
    path = tmp_path / "plain.pkl"
    for protocol in (2, 3, 4, 5):
        path.write_bytes(pickle.dumps(value, protocol))
        assert plain(load_pickle(Window.of(path)), "file") == value
    simple = types.SimpleNamespace(a=torch.ones(2))
    objects = _back(tmp_path, {"args": Namespace(lr=0.1, sizes=[1]), "simple": simple})
    assert objects["args"] == {"lr": 0.1, "sizes": [1]}
    assert torch.equal(objects["simple"]["a"], torch.ones(2))


def test_arrays_of_numpy(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy", reason="NumPy's arrays need numpy")
    legacy = numpy.random.RandomState(3).get_state()
    arrays = [
        legacy[1],
        numpy.arange(6, dtype=">i4").reshape(2, 3),
        numpy.arange(6.0).reshape(2, 3),
        numpy.asfortranarray(numpy.eye(2, 3)),
        numpy.zeros((0, 3), dtype=bool),
    ]
    state = numpy.random.default_rng(0).bit_generator.state
    content = {"state": state, "legacy": legacy, "arrays": arrays, "scalar": numpy.float64(0.1)}
    for protocol in (2, 3, 4, 5):
        torch.save(content, tmp_path / "file.pt", pickle_protocol=protocol)
        back = plain(load_file(tmp_path / "file.pt"), "file")
        assert (back["scalar"], back["state"]) == (0.1, state)
        for got, expected in zip(
            [back["legacy"][1], *back["arrays"]], [legacy[1], *arrays], strict=True
        ):
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert (got == expected).all()
    for bad in (["text"], [print], numpy.array(["2020-01-01"], dtype="datetime64[D]")):
        with pytest.raises(
            ValueError, match=r"file\.pt contains a NumPy value of dtype '[^']*'; expected numbers"
        ):
            load_file(_saved(tmp_path, numpy.array(bad)))


# --- hostile pickles ------------------------------------------------------------------------------


class _Reduced:
    """Pickles as a call."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


class _Other:
    """A class that no checkpoint of torch's or DeepSpeed's has."""

    def __setstate__(self, state: Any) -> None:
        _ran.append("setstate")


_ran: list[str] = []


def run(what: str = "ran") -> str:
    """Called by a hostile pickle."""
    _ran.append(what)
    return what


def _global(name: str) -> bytes:
    return b"c" + name.replace(" ", "\n").encode() + b"\n"


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _call(name: str, *args: bytes) -> bytes:
    return b"\x80\x02" + _global(name) + b"(" + b"".join(args) + b"tR."


def _with_attribute(value_pickle: bytes, key: str = "a", value: bytes = b"K\x01") -> bytes:
    """A pickle that gives a value attributes."""
    return b"\x80\x02" + value_pickle + b"}" + _text(key) + value + b"sb."


HERE = __name__
RUN = _global(f"{HERE} run")
NAMESPACE = _global("argparse Namespace")
HOSTILE: dict[str, bytes] = {
    "os.system": _call("posix system", _text("true")),
    "eval": _call("builtins eval", _text(f"__import__({HERE!r}, fromlist=['x']).run()")),
    "eval of protocol 2": _call("__builtin__ eval", _text("1")),
    "stack global": b"\x80\x04" + _text(HERE) + _text("run") + b"\x93)R.",
    "a function of ours": _call(f"{HERE} run"),
    "instance": b"(i" + HERE.encode() + b"\nrun\n.",
    "object": b"(" + RUN + b"o.",
    "new object": b"\x80\x02" + RUN + b")\x81.",
    "new object with keywords": b"\x80\x04" + RUN + b")}\x92.",
    "getattr": _call("builtins getattr", _global("os path"), _text("sep")),
    "a dotted name": b"\x80\x04"
    + _text("collections")
    + _text("OrderedDict.__init__.__globals__")
    + b"\x93.",
    "a dotted name of torch": b"\x80\x04" + _text("torch") + _text("Size.__class__") + b"\x93.",
    "torch.load": _call("torch.serialization load", _text("x")),
    "torch.hub": _call("torch hub.load", _text("x")),
    "pickle.loads": _call("_pickle loads", b"C\x02N."),
    "extension 1": b"\x80\x02\x82\xf0)R.",
    "extension 2": b"\x80\x02\x83\xf0\x00)R.",
    "extension 4": b"\x80\x02\x84\xf0\x00\x00\x00)R.",
    "memo of a class": b"\x80\x02"
    + _global("collections OrderedDict")
    + b"q\x000"
    + RUN
    + b"q\x00h\x00)R.",
    "memo beyond": b"\x80\x02h\x07.",
    "a huge memo index": b"\x80\x02Nr\xff\xff\xff\x7f0j\xfe\xff\xff\x7f.",
    "attributes of a class": _with_attribute(_global("torch FloatStorage")),
    "attributes of a function": _with_attribute(_global("torch Size")),
    "attributes of a stand-in's class": _with_attribute(NAMESPACE),
    "attributes of a list": _with_attribute(b"]"),
    "a called stand-in": b"\x80\x02" + NAMESPACE + b")\x81)R.",
    "a called number": b"\x80\x02K\x01)R.",
    "a called text": b"\x80\x02" + _text("os.system") + b")R.",
    "a called storage": _call("torch FloatStorage", b"K\x01"),
    "a called Tensor": _call("torch Tensor", b"K\x01"),
    "arguments of a stand-in": _call("argparse Namespace", b"K\x01"),
    "a persistent id": b"\x80\x02" + _text("x") + b"Q.",
    "a textual persistent id": b"Px\n.",
    "a buffer": b"\x80\x05\x97.",
    "gigabytes of zeros": _call("builtins bytearray", b"J\xff\xff\xff\x7f"),
    "bytes that are not there": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
    "text that is not there": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",
    "a long that is not there": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "a list as key": b"\x80\x02}]Ns.",
    "filled text": b"\x80\x02" + _text("x") + b"K\x01a.",
    "nothing": b"",
    "no end": b"\x80\x02N",
    "no value": b"\x80\x02.",
    "a pop too many": b"\x80\x020000.",
    "unknown instruction": b"\x80\x02\xff.",
    "a number of no digits": b"Iabc\n.",
    "a huge number": b"L" + b"9" * 10_000 + b"L\n.",
    "a tensor of a number": _call("torch._utils _rebuild_tensor_v2", b"K\x01K\x00))\x89N"),
    "a size below 0": _call("torch Size", b"(J\xff\xff\xff\xfft"),
    "a layout": _call("torch.serialization _get_layout", _text("torch.sparse_coo")),
    "set of a list": _call("builtins set", b"(]l"),
    "a typed tensor": _call("torch._tensor _rebuild_from_type_v2", RUN, RUN, b")N"),
    "codecs": _call("_codecs encode", _text("x"), _text("rot13")),
}


def _as_file(folder: Path, raw: bytes) -> Path:
    """A file of torch.save's, whose data.pkl is `raw`."""
    path = folder / "hostile.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("hostile/data.pkl", raw)
        file.writestr("hostile/byteorder", sys.byteorder)
        file.writestr("hostile/data/0", b"\0" * 64)
        file.writestr("hostile/version", "3\n")
    return path


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_pickles_are_refused_and_not_run(tmp_path: Path, what: str) -> None:
    copyreg.add_extension(HERE, "run", 0xF0)
    try:
        pickle.loads(b"\x80\x02\x82\xf0.")  # now pickle finds it in its cache, without find_class
        _ran.clear()
        with pytest.raises(ValueError, match=r"hostile\.pt"):
            load_file(_as_file(tmp_path, HOSTILE[what]))
        (tmp_path / ".metadata").write_bytes(HOSTILE[what])
        with pytest.raises(ValueError, match=r"\.metadata"):
            load_pickle(Window.of(tmp_path / ".metadata"))
        assert _ran == []
    finally:
        copyreg.remove_extension(HERE, "run", 0xF0)


@pytest.mark.parametrize(
    "what", ["a function of ours", "stack global", "instance", "object", "memo of a class", "eval"]
)
def test_pickle_itself_runs_them(what: str) -> None:
    """A reader that is no more careful than pickle would fail the test above."""
    _ran.clear()
    pickle.loads(HOSTILE[what])
    assert _ran == ["ran"]


def test_refusals_name_the_class_the_file_and_what_to_do(tmp_path: Path) -> None:
    for value in (_Other(), _Reduced(run, ("x",)), {"a": [_Other]}, _Reduced(os.getenv, ("HOME",))):
        path = _saved(tmp_path, {"model": {}, "x": value})
        _ran.clear()
        with pytest.raises(
            ValueError, match=r"file\.pt.* names [\w.]+\.(_Other|run|getenv), which is refused"
        ) as caught:
            load_file(path)
        assert "in a trusted place, remove this object, and save it again" in str(caught.value)
        assert _ran == []
    with pytest.raises(
        ValueError, match=r"names torch\._utils\._rebuild_sparse_tensor, which is refused"
    ):
        load_file(_saved(tmp_path, torch.eye(3).to_sparse()))
    with pytest.raises(ValueError, match="it puts a value in the place 2147483647"):
        load_file(_as_file(tmp_path, HOSTILE["a huge memo index"]))
    with pytest.raises(ValueError, match="marked conjugate or negative"):
        load_file(_saved(tmp_path, torch.ones(2, dtype=torch.complex64).conj()))


def test_data_that_contain_themselves_or_are_deep(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested more than"):
        plain(load_file(_saved(tmp_path, loop)), "file")
    deep: Any = []
    for _ in range(60):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 50"):
        plain(load_file(_saved(tmp_path, {"client": deep})), "file")
    with pytest.raises(ValueError, match="is a class or a storage"):
        plain(load_file(_saved(tmp_path, torch.Tensor)), "file")


def _tensor_pickle(
    numel: int, offset: int, size: tuple[int, ...], stride: tuple[int, ...], key: str = "0"
) -> bytes:
    class Id(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return (
                ("storage", torch.FloatStorage, key, "cpu", numel)
                if isinstance(value, _Other)
                else None
            )

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (
                _Other(),
                offset,
                size,
                stride,
                False,
                collections.OrderedDict(),
            )

    out = io.BytesIO()
    Id(out, 2).dump(Tensor())
    return out.getvalue()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((17, 0, (1,), (1,)), "is 64 bytes long; expected 68"),
        ((16, 1, (16,), (1,)), "expected 68 for shape"),
        ((16, 0, (4, 4), (5, 1)), "expected 76 for shape"),
        ((16, 0, (1 << 40,), (1,)), "expected 4398046511104 for shape"),
        ((16, -1, (1,), (1,)), "expected counts"),
        ((16, 0, (1,), (-1,)), "is not a count"),
        ((16, 0, (2, 2), (1,)), "expected counts"),
        ((-1, 0, (1,), (1,)), "an object other than a storage"),
        *(((16, 0, (1,), (1,), key), f"contains no entry data/{key}") for key in ("1", "../0", "")),
    ],
)
def test_tensors_beyond_their_storage_are_refused(tmp_path: Path, args: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load_file(_as_file(tmp_path, _tensor_pickle(*args)))


def test_tensors_inside_their_storage(tmp_path: Path) -> None:
    stored = load_file(_as_file(tmp_path, _tensor_pickle(16, 0, (16,), (1,))))
    assert stored.read(0, 16).tolist() == [0.0] * 16
    # 4 PB, of one element
    huge = load_file(_as_file(tmp_path, _tensor_pickle(16, 0, (1 << 50,), (0,))))
    assert huge.read(1 << 49, 3).tolist() == [0.0] * 3


OTHER = "big" if sys.byteorder == "little" else "little"


@pytest.mark.parametrize(
    ("entries", "how", "text"),
    [
        ({"x/data.pkl": "N."}, zipfile.ZIP_DEFLATED, "compressed or encrypted"),
        ({"x/other.pkl": "N."}, zipfile.ZIP_STORED, r"a zip without data\.pkl"),
        ({"data.pkl": "N."}, zipfile.ZIP_STORED, r"a zip without data\.pkl"),
        ({"x/data.pkl": "N.", "y/data.pkl": "N."}, zipfile.ZIP_STORED, r"without data\.pkl"),
        ({"x/data.pkl": "N.", "x/byteorder": OTHER}, zipfile.ZIP_STORED, "is in byte order"),
    ],
)
def test_other_zips_are_refused(
    tmp_path: Path, entries: dict[str, str], how: int, text: str
) -> None:
    with zipfile.ZipFile(tmp_path / "file.pt", "w", how) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    with pytest.raises(ValueError, match=text):
        load_file(tmp_path / "file.pt")


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"from before torch 1\.6"):
        load_file(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"not a zip of torch\.save"):
        load_file(path)
    torch.jit.script(nn.Linear(2, 2)).save(str(path))
    with pytest.raises(ValueError, match="TorchScript program"):
        load_file(path)
    with pytest.raises(FileNotFoundError):
        load_file(tmp_path / "none.pt")
    with pytest.raises(OSError, match="Is a directory"):
        load_file(tmp_path)


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    value = {
        "model": {"a": torch.randn(5, 7), "b": torch.randn(3).bfloat16()},
        "epoch": 3,
        "args": Namespace(a=1),
    }
    path = _saved(tmp_path, value)

    def read() -> None:
        plain(load_file(path), "file")

    assert 200 < read_damaged(path, 500, read) <= 500
    raw = path.read_bytes()
    for at, text in (
        (raw.index(b"epoch"), r"data\.pkl, is damaged: its crc32 is"),
        (raw.rindex(b"PK\x03\x04", 0, raw.index(b"data/0")), "contains no header of data/0 at"),
    ):
        path.write_bytes(raw[:at] + b"?" + raw[at + 1 :])
        with pytest.raises(ValueError, match=text):
            load_file(path)


def test_damaged_pickles_are_errors(tmp_path: Path) -> None:
    """Without a checksum, each changed byte reaches pickle."""
    path = tmp_path / "plain.pkl"
    path.write_bytes(
        pickle.dumps(
            {"a": [1, (2, 3.5)], "b": {"c": Namespace(x={4, 5})}, "d": b"x" * 300, "e": 1 << 70}, 4
        )
    )
    refused = read_damaged(path, 2000, lambda: plain(load_pickle(Window.of(path)), "file"))
    assert 500 < refused < 2000


def test_attributes_are_data_only(tmp_path: Path) -> None:
    """Those that would change how a live object behaves are only entries of a dict, or left out,
    or refused.
    """
    for name in ("__class__", "__setstate__", "state", "get"):
        stand_in = load_file(
            _as_file(tmp_path, _with_attribute(NAMESPACE + b")\x81", name, _text("x")))
        )
        assert isinstance(stand_in, StandIn)
        assert stand_in.state == {name: "x"}
    raw = _with_attribute(_global("collections OrderedDict") + b")R", "items", _text("x"))
    assert load_file(_as_file(tmp_path, raw)).items() == {}.items()
    raw = _with_attribute(_tensor_pickle(16, 0, (16,), (1,))[2:-1], "offset", b"K\x99")
    with pytest.raises(ValueError, match="a tensor is given attributes"):
        load_file(_as_file(tmp_path, raw))
