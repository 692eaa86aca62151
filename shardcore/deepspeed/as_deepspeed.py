"""deepspeed itself: in a process where `install_as_deepspeed` was called, `import deepspeed` means
shardcore.

`shardcore run --as-deepspeed` calls it before a script starts, which then needs no changed word.
The folder stand_in, in front of sys.path, has a package deepspeed and its metadata, where libraries
look for them. An installed DeepSpeed is hidden; what shardcore does not have is an ImportError that
says so.
Source: Python's import protocol, https://docs.python.org/3/reference/import.html.
"""

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from shardcore.checkpoint.pretrained import read_into_pieces
from shardcore.deepspeed.names import MODULES, VERSION, install
from shardcore.deepspeed.params import name_sharded_params
from shardcore.deepspeed.unsupported import instead_of
from shardcore.deepspeed.zero_init import Init
from shardcore.optim import ShardableOptimizer

# What TRL moves DeepSpeed's hooks with, around a `generate` inside GatheredParameters: nothing, as
# hooks here leave parameters alone there. `optimizer.parameter_offload`, after
# install_as_deepspeed.
_NO_HOOKS = SimpleNamespace(
    module=SimpleNamespace(named_parameters=lambda recurse: (), ds_external_parameters=lambda: ()),
    forward_hooks=(),
    backward_hooks=(),
    _register_deepspeed_module=lambda module: None,
)


_STAND_IN = str(Path(__file__).with_name("stand_in"))
# where shardcore is: of a checkout it may be in no path
_ROOT = str(Path(__file__).resolve().parents[2])


def _why(name: str) -> str:
    own = name.removeprefix("deepspeed.")
    instead = instead_of(own)
    why = (
        f"deepspeed is shardcore in this process (--as-deepspeed), which has no counterpart of "
        f"DeepSpeed's {own}"
    )
    return why if instead is None else f"{why}; expected {instead}"


def _attribute(module: str, late: Callable[[str], Any] | None, name: str) -> Any:
    """Return what `late` has by a name, or say that it is not there; the `__getattr__` of a
    module.
    """
    if late is not None:
        with suppress(AttributeError):
            return late(name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}: {_why(f'{module}.{name}')}")


class _Finder:
    """In sys.meta_path: says what shardcore does not have, and extends from_pretrained when
    transformers' models are imported.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return None, for other finders; of transformers.modeling_utils a spec whose loader also
        installs the reader of pieces. Raise ModuleNotFoundError for a module of DeepSpeed that
        is not in `MODULES`.

        `from deepspeed.utils import X` comes here, too, where X is not there: every module of these
        is a package. It forgets an error that has X as its `name`, so this one has none.
        """
        if name.startswith("deepspeed."):
            raise ModuleNotFoundError(f"No module named {name!r}: {_why(name)}")
        if name == "transformers.modeling_utils":
            return _with_reader(PathFinder.find_spec(name, path, target))
        return None


def _with_reader(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Let the import of transformers' models install the reader of pieces. For a quantized model
    transformers does not call zero.Init, which installs it, too.
    """
    loader: Any = spec and spec.loader
    if loader is None:
        return spec
    execute = loader.exec_module

    def execute_and_extend(module: ModuleType) -> None:
        execute(module)
        read_into_pieces(Init)

    loader.exec_module = execute_and_extend
    return spec


def install_as_deepspeed() -> None:
    """Let `import deepspeed` mean shardcore in this process, and in those that multiprocessing
    starts from it.

    Call it before transformers and accelerate are imported, since they look for DeepSpeed as they
    are. A second call does nothing. An installed DeepSpeed is hidden. Raises RuntimeError if it, or
    one of these, is imported already.
    """
    if _STAND_IN in sys.path:
        return
    early = [name for name in ("deepspeed", "accelerate", "transformers") if name in sys.modules]
    if early:
        why = (
            "the real DeepSpeed would be in use beside shardcore"
            if early[0] == "deepspeed"
            else "it has looked for DeepSpeed"
        )
        raise RuntimeError(
            f"install_as_deepspeed: {early[0]} is imported already, so {why}; expected the call "
            f"(or shardcore run --as-deepspeed) before any such import"
        )
    if _ROOT not in sys.path:
        sys.path.append(_ROOT)
    sys.path.insert(0, _STAND_IN)
    importlib.invalidate_caches()
    importlib.import_module("deepspeed")
    # behind the script's folder; new processes get both from multiprocessing
    sys.path.insert(1, sys.path.pop(0))


def register(package: ModuleType) -> None:
    """Give these names to the package that is being imported: deepspeed of the stand-in, which
    has a file and a spec.
    """
    parts = zip(("major", "minor", "patch"), map(int, VERSION.split(".")), strict=True)
    vars(package).update({f"__version_{part}__": number for part, number in parts})
    vars(package).update(__version__=VERSION, version=VERSION)
    install(package)
    vars(package)["dist"] = vars(package)["comm"]
    for module in (package, *(sys.modules[f"deepspeed.{path}"] for path in MODULES)):
        late = vars(module).get("__getattr__")
        vars(module)["__getattr__"] = partial(_attribute, module.__name__, late)
    name_sharded_params()
    ShardableOptimizer.parameter_offload = _NO_HOOKS  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder)
    read_into_pieces(Init)  # where transformers' models are imported: in a new process
