"""The most anonymous memory that a process has, measured while code runs."""

import ctypes
import gc
import threading
from pathlib import Path

import pytest


class Peak:
    """The most anonymous memory that the process has inside the context, beyond the memory at its
    start, in bytes.
    """

    def __enter__(self) -> "Peak":
        gc.collect()  # else memory of earlier models comes back in between
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        self._first = self.most = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.most = max(self.most, self._now()) - self._first

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
        pytest.skip("/proc/self/status has no RssAnon")
