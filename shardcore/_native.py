"""Loads the compiled extension shardcore._C, or raises an ImportError that says why it cannot and how to build it.

The rest of the package imports C++ functions from here (``from shardcore._native import _C``). setup.py writes a record beside
the library, _C.build.json, which can be read even if the library cannot be loaded.
"""

import json
from pathlib import Path

import torch

_RECORD = Path(__file__).with_name("_C.build.json")
_BUILD = "build it with 'pip install --no-build-isolation .' (or -e .), or in a checkout with 'make setup'"


def build_record() -> dict[str, str]:
    """Return setup.py's record of the last build: torch, cuda, python, and line (what was built and why); {} without one."""
    try:
        record = json.loads(_RECORD.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _public(version: str) -> str:
    """Return a version without its local part, which TORCH_VERSION in the headers lacks: 2.13.0 of 2.13.0+cpu."""
    return version.split("+")[0]


def _why(error: ImportError) -> str:
    """Return the text of the ImportError for a _C that did not load."""
    built_for = build_record().get("torch")
    if not any(_RECORD.parent.glob("_C*.so")):
        return f"shardcore: its C++ extension (shardcore._C) is not built; {_BUILD}"
    if built_for and _public(built_for) != _public(torch.__version__):
        return _other_torch(built_for) + f" [{error}]"
    if isinstance(error, ModuleNotFoundError):  # a library is there, under the suffix of another Python
        return f"shardcore: its C++ extension is built for another Python; {_BUILD}"
    return f"shardcore: its C++ extension does not load: {error}; rebuild: {_BUILD}"


def _other_torch(built_for: str) -> str:
    return (
        f"shardcore: its C++ extension is built for torch {built_for}, but torch is {torch.__version__}; rebuild: {_BUILD}. "
        "Where pip installs what it built before: --no-cache-dir --force-reinstall --no-deps"
    )


try:
    import shardcore._C as _C
except ImportError as error:
    raise ImportError(_why(error)) from error

if _public(_C.build_info()["torch"]) != _public(torch.__version__):  # it loaded, but the ABI is only promised for one torch
    raise ImportError(_other_torch(_C.build_info()["torch"]))

__all__ = ["_C", "build_record"]
