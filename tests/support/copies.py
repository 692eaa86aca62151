"""Tiers whose copies are late, slow or fail, and whose system locks few pages:
tests/cpp/simulated_copies.h, on the CPU.

The backend is a small library of its own, compiled into build/ by the first test that needs it.
`shardcore._C` has only the argument by which a tier is given another backend.
"""

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from shardcore._native import _C

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests/cpp/simulated_copies.cpp"
CAPSULE = b"shardcore.CopyBackend"  # capsules keep the pointer
HostTier = _C.HostTier  # which tests replace


def compiled(
    source: Path, flags: Sequence[str], others: Sequence[Path] = (), version: str = ""
) -> Path:
    """Return the shared library of a C++ file, in build/: compiled if it, what it includes
    (`others`) or `version` is new.
    """
    digest = hashlib.sha256(f"{flags} {version}".encode())
    for path in (source, *others):
        digest.update(path.read_bytes())
    library = ROOT / f"build/tests/{source.stem}_{digest.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")  # several processes may come at once
        command = [
            os.environ.get("CXX", "c++"),
            "-O1",
            "-shared",
            "-fPIC",
            str(source),
            "-o",
            str(made),
            *flags,
        ]  # libraries last
        subprocess.run(command, check=True)
        made.replace(library)
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    flags = ["-std=c++17", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}"]
    library = compiled(SOURCE, flags, [SOURCE.with_suffix(".h"), ROOT / "csrc/copy/copy_stream.h"])
    loaded = ctypes.CDLL(str(library))
    loaded.simulated_backend.restype = ctypes.c_void_p
    loaded.simulated_backend.argtypes = [
        ctypes.c_double,
        ctypes.c_int64,
        ctypes.c_bool,
        ctypes.c_int64,
    ]
    return loaded


def simulated_tier(
    pin_memory: bool = False,
    pin_memory_limit: int | None = None,
    *,
    gigabytes_per_second: float = 0.0,
    failing_copy: int = 0,
    late: bool = False,
    pinnable_bytes: int = -1,
) -> _C.HostTier:
    """Return a HostTier of the CPU with such copies; see Simulation in
    tests/cpp/simulated_copies.h.
    """
    backend = _library().simulated_backend(
        1e9 * gigabytes_per_second, failing_copy, late, pinnable_bytes
    )
    make_capsule = ctypes.pythonapi.PyCapsule_New
    make_capsule.restype = ctypes.py_object
    make_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return HostTier(
        torch.device("cpu"), pin_memory, pin_memory_limit, make_capsule(backend, CAPSULE, None)
    )
