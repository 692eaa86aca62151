"""Generation by a model at stage 3: all weights at once where they fit, else a unit at a time.

Each token is a forward, which gathers every unit. So `generate` is faster if the weights are
gathered once for all tokens. They may take half of the free memory; the other half is for keys,
values and activations, whose size nobody knows before. The rank with the least memory decides for
all, anew for each call, as free memory changes. A unit at a time, ranks run the same number of
forwards: those that are done go on until the last one is.
"""

import logging
import weakref
from contextlib import nullcontext
from typing import Any

from torch import nn

from shardcore.distributed.machine import machine_id
from shardcore.engine.agreement import agree, value_read
from shardcore.engine.engine import Engine
from shardcore.engine.full_params import full_params
from shardcore.engine.hooks import Method
from shardcore.estimate.probe import free_and_total

logger = logging.getLogger("shardcore")
# the choices that were logged
_said: weakref.WeakKeyDictionary[Engine, set[bool]] = weakref.WeakKeyDictionary()


def fits_whole(engine: Engine) -> bool:
    """Return whether every rank can have all weights while it generates, the same on all ranks.
    Collective at stage 3, but not inside full_params.
    """
    unsharder = engine.unsharder
    if unsharder is None or unsharder.all_pinned or not unsharder.copies_apart:
        return True
    engine.synchronize()
    agree(engine.comm, "generate", entries=[value_read("the free memory")])
    of_ranks = engine.comm.gather_json([free_and_total(engine.device)[0], machine_id()])
    places = [place for _, place in of_ranks]
    if engine.device.type == "cuda":
        free = min(bytes_free for bytes_free, _ in of_ranks)
    else:  # the ranks of a machine share it
        free = min(bytes_free // places.count(place) for bytes_free, place in of_ranks)
    whole = sum(bucket.layout.numel * bucket.dtype.itemsize for bucket in engine.buckets)
    fits = bool(2 * whole <= free)
    said = _said.setdefault(engine, set())
    if engine.comm.rank == 0 and fits not in said:
        level, how = (
            (logging.INFO, "all weights are gathered once for a call")
            if fits
            else (logging.WARNING, "each token gathers one unit after the other, which is slower")
        )
        logger.log(
            level,
            "generate: %s. All weights take %.2f GiB, and half of the free memory of the rank with "
            "the least is %.2f GiB",
            how,
            whole / 2**30,
            free / 2**31,
        )
    said.add(fits)
    return fits


def generate_together(model: nn.Module, engine: Engine) -> None:
    """Let `generate` of a model of transformers, and of modules of it, work at stage 3 on ranks
    that end at different tokens.
    """
    if engine.unsharder is None:
        return
    for module in model.modules():
        if hasattr(module, "generate") and engine.comm.world_size > 1:
            # the second is for torch.compile
            vars(module).update(
                _is_fsdp_managed_module=_StaysInStep(engine), _fsdp_use_orig_params=True
            )
        if hasattr(type(module), "generate"):
            vars(module).setdefault("generate", _Generate(module, engine))


class _StaysInStep:
    """Whether transformers' `generate` has to run until all ranks are done, as with FSDP: each
    forward gathers.

    False inside full_params(model), and in a copy of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine | None = engine  # None in a deepcopy

    def __bool__(self) -> bool:
        return (
            self.engine is not None
            and self.engine.unsharder is not None
            and not self.engine.unsharder.all_pinned
        )


class _Generate(Method):
    """`generate` of a module, with all weights gathered if they fit. With `synced_gpus` the caller
    has chosen to gather a unit at a time.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generate, engine = type(self.model).generate, self.engine  # type: ignore[attr-defined]
        unsharder = None if engine is None else engine.unsharder
        # inside full_params one rank alone may call it
        if engine is None or unsharder is None or unsharder.all_pinned:
            return generate(self.model, *args, **kwargs)
        whole = kwargs.get("synced_gpus") is None and fits_whole(engine)
        with full_params(engine, {*engine.managed}) if whole else nullcontext():
            return generate(self.model, *args, **kwargs)
