"""Ctrl-C, held back from what has to be done as a whole."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def held_back_interrupts() -> Iterator[None]:
    """Let Ctrl-C take effect at the end only: what is inside is done as a whole."""
    old = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(old):
        yield
        return
    came: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
        if came:
            old(*came[0])
