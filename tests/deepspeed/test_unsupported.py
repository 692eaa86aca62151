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
        parent = getattr(sys.modules.get(above), kind, None)
        return None if hasattr(parent, own) else str(error)
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
    missing = {
        name: message
        for name, message in run_fresh(_refusals, names).items()
        if message is not None
    }
    for name, message in missing.items():
        assert f"no counterpart of DeepSpeed's {name.split('.')[0]}" in message, name
        assert "; expected " in message, (name, message)
    common = [name for name in names if "," in IMPORTED["names"][name]]
    assert len(common) > 15
    assert not set(common) & missing.keys(), "what two libraries use"


def _public_modules() -> list[str]:
    """Return the modules of the installed DeepSpeed, by their names below it, from their files."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("DeepSpeed is not installed")
    root = Path(spec.origin).parent
    paths = [file.relative_to(root).with_suffix("").parts for file in root.rglob("*.py")]
    modules = {path[:-1] if path[-1] == "__init__" else path for path in paths}
    return sorted(
        ".".join(path)
        for path in modules
        if path and not any(part.startswith("_") for part in path)
    )


def _modules_refused(names: list[str]) -> dict[str, str]:
    _install()
    refused = {}
    for name in names:
        try:
            import_module(f"deepspeed.{name}")
        except ModuleNotFoundError as error:
            refused[name] = str(error)
    return refused


def test_each_public_module_is_there_or_refused_with_a_remedy() -> None:
    names = _public_modules()
    refused = run_fresh(_modules_refused, names)
    assert len(names) > len(refused) > 100
    without = [name for name, message in refused.items() if "; expected " not in message]
    assert without == []


ALIASES = {
    "accelerator.abstract_accelerator.DeepSpeedAccelerator": "accelerator.DeepSpeedAccelerator",
    "ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad": "ops.adagrad.DeepSpeedCPUAdagrad",
    "ops.adam.cpu_adam.DeepSpeedCPUAdam": "ops.adam.DeepSpeedCPUAdam",
    "ops.adam.fused_adam.FusedAdam": "ops.adam.FusedAdam",
    "ops.lamb.fused_lamb.FusedLamb": "ops.lamb.FusedLamb",
    "ops.lion.cpu_lion.DeepSpeedCPULion": "ops.lion.DeepSpeedCPULion",
    "ops.lion.fused_lion.FusedLion": "ops.lion.FusedLion",
    "runtime.engine.DeepSpeedOptimizerCallable": "DeepSpeedOptimizerCallable",
    "runtime.engine.DeepSpeedSchedulerCallable": "DeepSpeedSchedulerCallable",
    "utils.init_on_device.OnDevice": "utils.OnDevice",
    "utils.module_utils.recursive_getattr": "utils.recursive_getattr",
    "utils.nvtx.instrument_w_nvtx": "utils.instrument_w_nvtx",
    "utils.tensor_fragment.safe_get_full_grad": "utils.safe_get_full_grad",
    "utils.z3_leaf_module.set_z3_leaf_modules": "utils.set_z3_leaf_modules",
}


def _aliases() -> None:
    _install()
    package = import_module("deepspeed")
    for alias, name in ALIASES.items():
        module, _, own = alias.rpartition(".")
        above, _, same = f"deepspeed.{name}".rpartition(".")
        thing = getattr(import_module(f"deepspeed.{module}"), own)
        assert thing is getattr(import_module(above), same), alias
    parts = [getattr(package, f"__version_{part}__") for part in ("major", "minor", "patch")]
    assert ".".join(map(str, parts)) == package.__version__
    assert package.dist is package.comm
    assert package.utils.instrument_w_nvtx(_aliases) is _aliases
    accelerator = package.accelerator
    assert isinstance(accelerator.get_accelerator(), accelerator.DeepSpeedAccelerator)


def test_a_class_is_in_the_module_where_deepspeed_defines_it_too() -> None:
    run_fresh(_aliases)


def _attributes(names: list[str]) -> list[tuple[str, str]]:
    """Return what getattr and import say of names that are not there."""
    _install()
    messages = []
    for name in names:
        above, _, own = name.rpartition(".")
        module = import_module(above)
        assert not hasattr(module, own)
        assert getattr(module, own, 3) == 3
        with pytest.raises(AttributeError) as attribute:
            getattr(module, own)
        with pytest.raises(ImportError) as imported:
            exec(f"from {above} import {own}")
        with pytest.raises(ImportError) as as_module:
            exec(f"import {name}")
        assert str(as_module.value) == str(imported.value)
        messages.append((str(attribute.value), str(imported.value)))
    return messages


# of these three kinds of modules: with names of their own, those of another module, and torch's
MISSING = ("utils.no_such", "profiling.flops_profiler.no_such", "comm.no_such", "inference")


def test_a_name_that_is_not_there_says_so() -> None:
    messages = run_fresh(_attributes, [f"deepspeed.{name}" for name in MISSING])
    for name, (attribute, imported) in zip(MISSING, messages, strict=True):
        above, _, own = f"deepspeed.{name}".rpartition(".")
        assert attribute.startswith(f"module '{above}' has no attribute '{own}': ")
        assert attribute.endswith(imported.split(": ", 1)[1])
        assert "deepspeed is shardcore in this process" in imported
        assert f"no counterpart of DeepSpeed's {name}" in imported
    assert messages[0][1].endswith("utils.no_such")
    assert messages[3][1].endswith("an inference engine of your choice")


def test_what_is_said_of_a_module_that_is_there_names_something_else() -> None:
    assert "DistributedAttention" not in str(instead_of("sequence.layer.single_all_to_all"))
    tiled = "runtime.sequence_parallel.ulysses_sp.SequenceTiledCompute"
    assert str(instead_of(tiled)).startswith("sequence_tiled_compute")
    modules = ("stage3", "config", "utils", "linear", "mics")
    assert len({instead_of(f"runtime.zero.{name}") for name in modules}) == len(modules)


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
