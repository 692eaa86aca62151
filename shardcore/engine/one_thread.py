"""Refuses a forward while another thread is inside one (stage 3): it would find weights that come and go."""

import sys
import threading
from types import FrameType

from torch import nn


class ForwardThread:
    """Which thread runs the forward of a model. An exception may end that without a word, so frames tell who still does."""

    def __init__(self) -> None:
        self._thread = 0

    def enter(self, model: nn.Module) -> None:
        """Begin a forward of `model`; RuntimeError if another thread is inside one."""
        here = threading.get_ident()
        if self._thread not in (0, here) and _inside(model, sys._current_frames().get(self._thread)):
            raise RuntimeError(
                "forward: another thread is inside a forward of this model; expected one at a time at stage 3, where weights "
                "come and go with each (stages 0 to 2 let threads evaluate side by side)"
            )
        self._thread = here

    def leave(self) -> None:
        """End the forward."""
        self._thread = 0


def _inside(model: nn.Module, frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False
