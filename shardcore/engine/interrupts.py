"""Ctrl-C, held back from what has to be done as a whole.

The functions of `signal` itself make enums of what they take and return, which takes longer than all else here.

Note [Cut short]: the handler of another signal may raise anywhere, also as what is held back begins or ends. Then `_hold` stays
behind, though nothing is under way any more; whoever finds it there sees that, as the frame that began is not on the stack.
"""

import _signal  # type: ignore[import-not-found]
import sys
import threading
from contextlib import ContextDecorator
from signal import SIGINT
from types import FrameType
from typing import Any

_came: list[tuple[Any, ...]] = []  # what is held back


class _Outermost:
    """Where Ctrl-C was first held back, and the handler that there was."""

    frame: FrameType | None = None
    old: Any = None


def _is_under_way(frame: FrameType | None) -> bool:
    """Whether what runs in this frame is inside of the outermost one. See Note [Cut short]."""
    while frame is not None and frame is not _Outermost.frame:
        frame = frame.f_back
    return frame is not None


def _hold(number: int, frame: FrameType | None) -> None:
    if _is_under_way(frame):
        _came.append((number, frame))
    else:
        _signal.signal(SIGINT, _Outermost.old)
        _Outermost.old(number, frame)


class held_back_interrupts(ContextDecorator):  # noqa: N801
    """Let Ctrl-C take effect at the end only: what is inside is done as a whole. A class, since it is often entered.

    Only the outermost one changes the handler.
    """

    _changed = False

    def _recreate_cm(self) -> "held_back_interrupts":  # of ContextDecorator: for each call of what is decorated
        return held_back_interrupts()

    def __enter__(self) -> None:
        """Hold it back, unless something around this does. Only the main thread is interrupted."""
        old = _signal.getsignal(SIGINT)
        if not callable(old) or threading.get_ident() != threading.main_thread().ident:
            return
        frame = sys._getframe(1)
        if old is not _hold:
            _Outermost.old = old
        elif _is_under_way(frame):
            return
        _Outermost.frame = frame
        self._changed = True
        _signal.signal(SIGINT, _hold)

    def __exit__(self, *_: object) -> None:
        """Let it take effect, unless something around this holds it back."""
        if not self._changed:
            return
        _Outermost.frame = None
        _signal.signal(SIGINT, _Outermost.old)
        if _came:
            came = _came[0]
            _came.clear()
            _Outermost.old(*came)
