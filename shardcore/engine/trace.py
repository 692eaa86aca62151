"""Names for what the engine does, in the traces of torch.profiler (record_function) and, with CUDA, of NVTX tools such as nsys.

The scopes are `shardcore::<what>(<unit>)`: gather (unshard weights), reduce (send a unit's gradients), sum (add up the received
ones), gather_grad (full gradients: stage 0 and replicas), adam (the update; of all units at once where no copy or collective of
one overlaps with the update of the next), read (state dicts and the like). `shardcore::step` is around a step.
Source: the documentation of torch.profiler and torch.cuda.nvtx.
"""

import functools

import torch


class scope:  # noqa: N801
    """Mark what happens inside, on this thread; unit: its name in the model ("" is the root), None if it is no unit's.

    A class with two calls of C: torch.profiler.record_function alone takes five times as long while nothing is recorded.
    """

    __slots__ = ("_name", "_record")

    def __init__(self, what: str, unit: str | None = None) -> None:
        """Choose the name."""
        self._name = f"shardcore::{what}" if unit is None else f"shardcore::{what}({unit or 'root'})"

    def __enter__(self) -> None:
        """Begin."""
        self._record = torch._C._autograd._record_function_with_args_enter(self._name)
        if _has_nvtx():
            torch.cuda.nvtx.range_push(self._name)  # type: ignore[no-untyped-call]

    def __exit__(self, *_: object) -> None:
        """End, also in an error."""
        if _has_nvtx():
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        torch._C._autograd._record_function_with_args_exit(self._record)


@functools.cache
def _has_nvtx() -> bool:
    return torch.cuda.is_available()
