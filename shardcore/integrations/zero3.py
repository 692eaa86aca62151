"""transformers at stage 3 without DeepSpeed: from_pretrained and from_config make weights in
pieces, as under zero.Init.

A Zero3Loading is for transformers what HfDeepSpeedConfig is under DeepSpeed: transformers keeps a
weak reference, and partitions weights as long as the object exists. transformers and PEFT then
import deepspeed, so `deepspeed` in sys.modules is shardcore for the same time. An installed
DeepSpeed can be imported again afterwards.
Tested with transformers 5.24.
"""

import logging
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import transformers.modeling_utils
from transformers.integrations.deepspeed import deepspeed_config, set_hf_deepspeed_config

from shardcore.checkpoint.pretrained import read_into_pieces
from shardcore.deepspeed.names import install, new_module
from shardcore.deepspeed.zero_init import Init

logger = logging.getLogger("shardcore")


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
        if sys.modules.get("deepspeed") is None:
            package = new_module("deepspeed", "Names of DeepSpeed, over shardcore.")
            install(package)
            vars(package)["made_for_zero3"] = True  # so `_leave` removes it
        assert transformers.modeling_utils  # of which a part is replaced
        read_into_pieces(Init)
        set_hf_deepspeed_config(self)
        weakref.finalize(self, _leave).atexit = False

    def is_zero3(self) -> bool:
        """Return True. transformers calls it."""
        return True


def zero3_loading(config: Mapping[str, Any]) -> Zero3Loading | None:
    """Return a new Zero3Loading; None, with a warning, if the real DeepSpeed is imported."""
    package = sys.modules.get("deepspeed")
    if package is not None and getattr(getattr(package, "zero", None), "Init", None) is not Init:
        logger.warning(
            "DeepSpeed is imported, so from_pretrained makes the whole model on each rank. Do not "
            "import deepspeed before the training arguments"
        )
        return None
    return Zero3Loading(config)


def _leave() -> None:
    """Forget the modules of `deepspeed`, unless another Zero3Loading exists."""
    is_own = hasattr(sys.modules.get("deepspeed"), "made_for_zero3")
    if not is_own or deepspeed_config() is not None:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
