"""Names for what the engine does, in the traces of torch.profiler (record_function) and, with CUDA, of NVTX tools such as nsys.

The scopes are `shardcore::<what>(<unit>)`: gather (whole weights), reduce (a unit's gradients leave), sum (what came of them is
added up), gather_grad (whole gradients: stage 0 and replicas), adam (the update; of all units at once at stage 0), read (state
dicts and the like). `shardcore::step` lies around a step. Source: the documentation of torch.profiler and torch.cuda.nvtx.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def scope(what: str, unit: str | None = None) -> Iterator[None]:
    """Mark what happens inside, on this thread; unit: its name in the model ("" is the root), None if it is no unit's."""
    name = f"shardcore::{what}" if unit is None else f"shardcore::{what}({unit or 'root'})"
    with torch.profiler.record_function(name):
        if not _has_nvtx():
            yield
            return
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


@functools.cache
def _has_nvtx() -> bool:
    return torch.cuda.is_available()
