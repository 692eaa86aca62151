"""transformers at stage 3 without DeepSpeed: from_pretrained and from_config make weights in
pieces, as under zero.Init.

A Zero3Loading is for transformers what HfDeepSpeedConfig is under DeepSpeed: transformers keeps a
weak reference, and partitions weights as long as the object exists. transformers and PEFT then
import deepspeed, so `deepspeed` in sys.modules is shardcore for the same time. The modules of an
installed DeepSpeed come back afterwards: Accelerate imports it where it is installed.
Tested with transformers 5.24.
"""

import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import transformers.modeling_utils
from transformers.integrations.deepspeed import deepspeed_config, set_hf_deepspeed_config

from shardcore.checkpoint.pretrained import read_into_pieces
from shardcore.deepspeed.names import install, new_module
from shardcore.deepspeed.zero_init import Init


def has_stage_3(config: Any) -> bool:
    """Whether a DeepSpeed configuration sets stage 3."""
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    return isinstance(zero, Mapping) and zero.get("stage") == 3


class Zero3Loading:
    """Lets transformers make weights in pieces as long as this object exists.

    Like the HfDeepSpeedConfig of transformers: the object made last counts.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Begin. config: a DeepSpeed configuration of stage 3."""
        self.config = config
        zero = getattr(sys.modules.get("deepspeed"), "zero", None)
        if getattr(zero, "Init", None) is not Init:
            installed = _take_deepspeed()
            package = new_module("deepspeed", "Names of DeepSpeed, over shardcore.")
            install(package)
            vars(package)["in_place_of"] = installed  # for `_leave`
        assert transformers.modeling_utils  # of which a part is replaced
        read_into_pieces(Init)
        set_hf_deepspeed_config(self)
        weakref.finalize(self, _leave).atexit = False

    def is_zero3(self) -> bool:
        """Return True. transformers calls it."""
        return True


def _take_deepspeed() -> dict[str, ModuleType]:
    """Remove the modules of `deepspeed` from sys.modules, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def from_pretrained_in_pieces() -> Iterator[None]:
    """Inside zero.Init, let from_pretrained read files into pieces.

    Only from_pretrained is told of ZeRO 3: the branches that transformers has for it elsewhere draw
    other random numbers, and zero.Init needs none of them.
    """
    kind: Any = transformers.modeling_utils.PreTrainedModel
    plain = vars(kind)["from_pretrained"]

    @wraps(plain.__func__)
    def read(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loading = Zero3Loading({"zero_optimization": {"stage": 3}})
        try:
            return plain.__func__(cls, *args, **kwargs)
        finally:
            del loading  # a traceback would hold it

    kind.from_pretrained = classmethod(read)
    try:
        yield
    finally:
        kind.from_pretrained = plain


def _leave() -> None:
    """Forget shardcore's modules of `deepspeed`, unless another Zero3Loading exists."""
    installed = getattr(sys.modules.get("deepspeed"), "in_place_of", None)
    if installed is None or deepspeed_config() is not None:
        return
    _take_deepspeed()
    sys.modules.update(installed)
