"""Where a backward begins and ends, and where each parameter's gradient comes.

Note [Backward boundaries]: a backward begins at the root output's gradient hook (or at the first parameter's gradient if the
loss does not come through the root's output) and ends in autograd's final callback. Reentrant checkpointing runs nested
backwards; beginning at the root output places the callback in the outermost one. Only autograd holds the callback object, so
when it is gone without having been called, the backward failed.
"""

import logging
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TypeVar

import torch

T = TypeVar("T")
logger = logging.getLogger("shardcore")


class _Callback:
    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end()


class Boundary:
    """Watches one backward at a time."""

    def __init__(self, one_thread: bool) -> None:
        """Watch; one_thread: autograd calls all hooks of a backward on the thread that called it, as it does on the CPU."""
        self._callback: weakref.ref[_Callback] | None = None
        self._failed = self._mixed = False
        self._one_thread, self._thread = one_thread, 0

    def begin(self, end: Callable[[], None]) -> None:
        """Let autograd call `end` when the backward that is under way ends."""
        callback = _Callback(end)
        self._callback, self._mixed, self._thread = weakref.ref(callback), False, get_ident()
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def clear(self) -> None:
        """Forget the backward: it ended, or what it left has been dropped."""
        self._callback, self._failed = None, False

    def end(self) -> None:
        """Learn that the backward is at its end: it failed until `clear`, whoever holds its callback (a traceback does).

        RuntimeError if one of another thread came between.
        """
        self._callback, self._failed = None, True
        if self._mixed:
            raise self._two_at_once()

    @property
    def under_way(self) -> bool:
        """Whether a backward has begun and neither ended nor failed."""
        return self._callback is not None and self._callback() is not None

    def goes_on(self) -> bool:
        """Whether the backward that calls is under way; RuntimeError, here and at its end, if that is another thread's."""
        if not self.under_way:
            return False
        if self._one_thread and self._thread != get_ident():
            self._mixed = True
            raise self._two_at_once()
        return True

    @staticmethod
    def _two_at_once() -> RuntimeError:
        return RuntimeError(
            "backward: two threads run a backward of this model at the same time, whose gradients cannot be told apart; "
            "expected one after the other (both are dropped)"
        )

    @property
    def failed(self) -> bool:
        """Whether the last backward ended in an error."""
        return self._failed or (self._callback is not None and self._callback() is None)


def watch(param: torch.Tensor, owner: T, before: Callable[[T], None], after: Callable[[T], None]) -> None:
    """Call `before(owner)` before autograd adds to `param.grad`, and `after(owner)` when it has.

    The hooks hold no strong reference: Python's garbage collector cannot see through the second kind.
    """
    weak = weakref.ref(owner)

    def call_before(grad: torch.Tensor) -> None:
        if (here := weak()) is not None:
            before(here)

    def call_after(param: torch.Tensor) -> None:
        if (here := weak()) is not None:
            after(here)

    param.register_hook(call_before)  # type: ignore[no-untyped-call]
    param.register_post_accumulate_grad_hook(call_after)  # type: ignore[no-untyped-call]


def warn_of_old_grads() -> None:
    """Say that a backward adds to gradients that were used."""
    logger.warning(
        "backward: adds to the gradients that the last step used, as nothing forgot them; expected "
        "optimizer.zero_grad() or model.zero_grad() after a step (from stage 1 on p.grad = None does not; said once)"
    )


def warn_of_dropped_grads() -> None:
    """Say what became of a backward that ended in an error."""
    logger.warning("backward: the last one ended in an error; its gradients, and those it was to be added to, are dropped")
