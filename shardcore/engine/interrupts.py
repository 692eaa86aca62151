"""Ctrl-C, held back from what has to be done as a whole.

The functions of `signal` itself make enums of what they take and return, which takes longer than all else here.
"""

import _signal  # type: ignore[import-not-found]
import threading
from contextlib import ContextDecorator
from signal import SIGINT
from typing import Any


class _Held:
    """What the main thread, which alone is interrupted, holds back: depth, of what it has begun; old, the handler; came."""

    depth = 0
    old: Any = None
    came: list[tuple[Any, ...]] = []  # noqa: RUF012


def _on_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident


class held_back_interrupts(ContextDecorator):  # noqa: N801
    """Let Ctrl-C take effect at the end only: what is inside is done as a whole. A class, since it is often entered."""

    def __enter__(self) -> None:
        """Hold it back, unless something around this does."""
        if not _on_main_thread():
            return
        if _Held.depth == 0:
            _Held.old = _signal.getsignal(SIGINT)
            if not callable(_Held.old):
                return
            _Held.came.clear()
            _signal.signal(SIGINT, lambda *arguments: _Held.came.append(arguments))
        _Held.depth += 1

    def __exit__(self, *_: object) -> None:
        """Let it take effect, unless something around this holds it back."""
        if _Held.depth == 0 or not _on_main_thread():
            return
        _Held.depth -= 1
        if _Held.depth == 0:
            _signal.signal(SIGINT, _Held.old)
            if _Held.came:
                _Held.old(*_Held.came.pop(0))
