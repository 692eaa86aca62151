"""deepspeed itself: in a process where `install_as_deepspeed` was called, `import deepspeed` means shardcore.

`shardcore run --as-deepspeed` calls it before a script starts, which then needs no changed word. An installed DeepSpeed is
hidden from that process; what shardcore does not have is an ImportError that says so.
Source: Python's import protocol, https://docs.python.org/3/reference/import.html.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

from shardcore.deepspeed.names import VERSION, install, new_module
from shardcore.deepspeed.params import name_sharded_params
from shardcore.optim import ShardableOptimizer

# What TRL moves DeepSpeed's hooks with, around a `generate` inside GatheredParameters: nothing, as hooks here leave parameters
# alone there. `optimizer.parameter_offload`, after install_as_deepspeed.
_NO_HOOKS = SimpleNamespace(
    module=SimpleNamespace(named_parameters=lambda recurse: (), ds_external_parameters=lambda: ()),
    forward_hooks=(),
    backward_hooks=(),
    _register_deepspeed_module=lambda module: None,
)


class _Metadata(importlib.metadata.Distribution):
    """What importlib.metadata has of an installed package, where libraries look for DeepSpeed and its version."""

    _FILES: Mapping[str, str] = {
        "METADATA": f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\nSummary: shardcore under DeepSpeed's names\n",
        "top_level.txt": "deepspeed\n",
    }

    def read_text(self, filename: str) -> str | None:
        """Return the text of a file of the metadata."""
        return self._FILES.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Refuse: there are no files."""
        raise FileNotFoundError(f"deepspeed: there is no file {path}: these are shardcore's modules (--as-deepspeed)")


class _Finder:
    """In sys.meta_path: has an installed DeepSpeed hidden from this process, and says what shardcore does not have."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return None, for other finders; raise ModuleNotFoundError for a module of DeepSpeed that is not in `MODULES`."""
        if name.startswith("deepspeed."):
            own = name.removeprefix("deepspeed.")
            raise ModuleNotFoundError(
                f"No module named {name!r}: deepspeed is shardcore in this process (--as-deepspeed), which has no counterpart "
                f"of DeepSpeed's {own}",
                name=name,
            )
        return None

    @classmethod
    def find_distributions(cls, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        """Yield the metadata of "deepspeed", if it is asked for."""
        asked = getattr(context, "name", None)
        if asked is None or asked.lower() == "deepspeed":
            yield _Metadata()


def install_as_deepspeed() -> None:
    """Let `import deepspeed` mean shardcore in this process alone, whether or not DeepSpeed is installed.

    Call it before transformers and accelerate are imported, since they look for DeepSpeed as they are. A second call does
    nothing. Raises RuntimeError if DeepSpeed, or one of these, is imported already.
    """
    if any(isinstance(finder, type) and issubclass(finder, _Finder) for finder in sys.meta_path):
        return
    early = [name for name in ("deepspeed", "accelerate", "transformers") if name in sys.modules]
    if early:
        why = (
            "the real DeepSpeed would be in use beside shardcore" if early[0] == "deepspeed" else "it has looked for DeepSpeed"
        )
        raise RuntimeError(
            f"install_as_deepspeed: {early[0]} is imported already, so {why}; expected the call (or shardcore run "
            "--as-deepspeed) before any such import"
        )
    package = new_module("deepspeed", "shardcore under DeepSpeed's names: see shardcore.deepspeed.names.")
    vars(package).update(__version__=VERSION, version=VERSION)
    install(package)
    name_sharded_params()
    ShardableOptimizer.parameter_offload = _NO_HOOKS  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder)
    importlib.invalidate_caches()
