"""Ctrl-C, held back from what has to be done as a whole.

The functions of `signal` itself make enums of what they take and return, which takes longer than all else here.
"""

import _signal  # type: ignore[import-not-found]
import threading
from contextlib import ContextDecorator
from signal import SIGINT
from typing import Any

_came: list[tuple[Any, ...]] = []  # what is held back


def _hold(*arguments: Any) -> None:
    _came.append(arguments)


class held_back_interrupts(ContextDecorator):  # noqa: N801
    """Let Ctrl-C take effect at the end only: what is inside is done as a whole. A class, since it is often entered.

    Only the outermost one changes the handler, and only it has to come to its end: other signals' handlers may raise.
    """

    _old: Any = None  # the handler that this one changed, in the main thread, which alone is interrupted

    def _recreate_cm(self) -> "held_back_interrupts":  # of ContextDecorator: for each call of what is decorated
        return held_back_interrupts()

    def __enter__(self) -> None:
        """Hold it back, unless something around this does."""
        old = _signal.getsignal(SIGINT)
        if old is _hold or not callable(old) or threading.get_ident() != threading.main_thread().ident:
            return
        _came.clear()
        self._old = old
        _signal.signal(SIGINT, _hold)

    def __exit__(self, *_: object) -> None:
        """Let it take effect, unless something around this holds it back."""
        if self._old is None:
            return
        _signal.signal(SIGINT, self._old)
        if _came:
            self._old(*_came.pop(0))
