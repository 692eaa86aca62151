"""What public libraries import from DeepSpeed is there, or refused by a message that says what to
use instead.

imported_names.json has these names, and which library, of which version, imports or calls them. It
was collected from their sources: each `import` of deepspeed, and each attribute of what it binds.
"""

import importlib.util
import inspect
import json
import sys
from importlib import import_module
from pathlib import Path

import pytest

from shardcore.deepspeed.as_deepspeed import install_as_deepspeed
from shardcore.deepspeed.unsupported import INSTEAD, instead_of
from tests.support.ranks import run_fresh

IMPORTED = json.loads(Path(__file__).with_name("imported_names.json").read_text())
NOT_DEEPSPEEDS = {"utils.is_initialized"}  # nor has DeepSpeed 0.19.8 it


def _refusal_of(name: str) -> str | None:
    """Return what is said when a name below deepspeed is imported; None if it is there, or an
    attribute of what is.
    """
    module, _, own = f"deepspeed.{name}".rpartition(".")
    try:
        exec(f"from {module} import {own}")
    except ImportError as error:
        above, _, kind = module.rpartition(".")
        found = getattr(sys.modules.get(above), kind, None)
        return None if hasattr(found, own) else str(error)
    return None


def _install() -> None:
    """Call install_as_deepspeed in a process that imported what tests need."""
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("deepspeed", "accelerate", "transformers")
    ]:
        del sys.modules[name]
    install_as_deepspeed()


def _refusals(names: list[str]) -> dict[str, str | None]:
    _install()
    return {name: _refusal_of(name) for name in names}


def test_names_that_public_libraries_import_are_there_or_refused_with_a_remedy() -> None:
    # tests/integrations/test_ulysses.py imports these
    with_transformers = "runtime.sequence_parallel.ulysses_sp.Ulysses"
    names = [
        name
        for name in IMPORTED["names"]
        if name not in NOT_DEEPSPEEDS and not name.startswith(with_transformers)
    ]
    missing = {name: said for name, said in run_fresh(_refusals, names).items() if said is not None}
    for name, said in missing.items():
        assert f"no counterpart of DeepSpeed's {name.split('.')[0]}" in said, name
        assert "; expected " in said, (name, said)
    common = [name for name in names if "," in IMPORTED["names"][name]]
    assert len(common) > 15
    assert not set(common) & missing.keys(), "what two libraries use"


def _attributes() -> list[str]:
    _install()
    package, found = import_module("deepspeed"), []
    for module, name in ((package, "inference"), (package.utils, "no_such")):
        assert not hasattr(module, name)
        with pytest.raises(AttributeError) as error:
            getattr(module, name)
        found.append(str(error.value))
    return found


def test_an_attribute_that_is_not_there_says_the_same() -> None:
    known, unknown = run_fresh(_attributes)
    assert known.startswith("module 'deepspeed' has no attribute 'inference'")
    assert known.endswith("an inference engine of your choice")
    assert unknown.endswith("which has no counterpart of DeepSpeed's utils.no_such")


def _files() -> list[str]:
    _install()
    package = import_module("deepspeed")
    assert importlib.util.find_spec("deepspeed") is package.__spec__
    assert package.__spec__.origin == package.__file__ == inspect.getfile(package)
    assert inspect.getfile(package.zero) == package.zero.__spec__.origin
    return [package.__file__, package.__path__[0], package.zero.__file__]


def test_the_package_has_a_file_and_a_spec() -> None:
    file, folder, module = run_fresh(_files)
    assert Path(file).parent == Path(folder)
    assert Path(file).is_file()
    assert Path(module).is_file()


def test_the_nearest_entry_is_the_one_that_counts() -> None:
    assert instead_of("ops.sparse_attention.FixedSparsityConfig") == INSTEAD["ops.sparse_attention"]
    assert (
        instead_of("runtime.zero.tiling.TiledLinear")
        == INSTEAD["runtime.zero.tiling"]
        != INSTEAD["runtime.zero"]
    )
    assert instead_of("ops.sparse") is None
