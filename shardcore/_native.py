"""Loads the compiled extension shardcore._C, or raises an ImportError that says why it cannot load
and how to build it.

The rest of the package imports C++ functions from here (``from shardcore._native import _C``).
setup.py writes a record beside the library, _C.build.json, which can be read even if the library
cannot be loaded.
"""

import json
import sys
from pathlib import Path

import torch

_RECORD = Path(__file__).with_name("_C.build.json")
_BUILD = "build it in a checkout with 'pip install --no-build-isolation -e .' or 'make setup'"


def build_record() -> dict[str, str]:
    """Return setup.py's record of the last build: torch, cuda, python, and line (what was built
    and why); {} without one.
    """
    try:
        record = json.loads(_RECORD.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _same(version: str) -> str:
    """Return what an extension and torch have to share: numbers of a release (2.13.0+cpu), else
    all (2.13.0a0+eb65.nv26.06).
    """
    release = version.split("+")[0]
    return release if release.replace(".", "").isdecimal() else version


def _why(error: ImportError) -> str:
    """Return the text of the ImportError for a _C that did not load."""
    record = build_record()
    here = _RECORD.parent
    if not any(here.glob("_C*.so")):
        if installed := _installed_elsewhere():
            return (
                f"shardcore was imported from {here}, which has no C++ extension (shardcore._C) "
                f"and hides the package installed in {installed}. Start Python in a folder other "
                f"than {here.parent}, or install the checkout itself with "
                f"'pip install --no-build-isolation -e .'"
            )
        return f"shardcore: the C++ extension (shardcore._C) is not built in {here}; {_BUILD}"
    if other := _other_torch(record.get("torch"), record.get("cuda")):
        return f"{other} [{error}]"
    # a library is there, under the suffix of another Python
    if isinstance(error, ModuleNotFoundError):
        return f"shardcore: its C++ extension is built for another Python; {_BUILD}"
    return f"shardcore: its C++ extension does not load: {error}; rebuild: {_BUILD}"


def _installed_elsewhere() -> Path | None:
    """Return the folder on sys.path with a shardcore that is built, beside the imported one; None
    without one.
    """
    imported = _RECORD.parent.resolve()
    for entry in sys.path:
        package = Path(entry).resolve() / "shardcore"
        if package != imported and any(package.glob("_C*.so")):
            return package.parent
    return None


def _other_torch(built_for: str | None, cuda: str | None) -> str:
    """Return the text for a build whose torch, or the major version of its CUDA, is not the one
    here; "" if it fits.

    A build without CUDA works with any torch of its version.
    """
    other = built_for is not None and _same(built_for) != _same(torch.__version__)
    if not other and (not cuda or cuda.split(".")[0] == str(torch.version.cuda).split(".")[0]):
        return ""
    with_cuda = f" and CUDA {cuda}" if cuda else ""
    here = (
        f"{torch.__version__} with "
        f"{f'CUDA {torch.version.cuda}' if torch.version.cuda else 'no CUDA'}"
    )
    return (
        f"shardcore: its C++ extension is built for torch {built_for}{with_cuda}, but torch is "
        f"{here}; install the wheel for "
        f"this torch, or rebuild: {_BUILD}. Where pip installs what it built before: "
        f"--no-cache-dir --force-reinstall --no-deps"
    )


try:
    import shardcore._C as _C
except ImportError as error:
    raise ImportError(_why(error)) from error

_built = _C.build_info()  # it loaded, but the ABI is only promised for one torch
if _other := _other_torch(_built["torch"], _built["cuda"]):
    raise ImportError(_other)

__all__ = ["_C", "build_record"]
