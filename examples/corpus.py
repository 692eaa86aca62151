"""Text for the demo: the Python standard library's own source, found on every machine that can run
it.

The text is one tensor of bytes. Batches are a pure function of (seed, rank, step, micro_step): two
trainings that are to be compared see the same data, and every rank sees other samples. No state is
kept between batches.
"""

import hashlib
import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

# Packages that users install and generated caches are not the standard library's text.
SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__"}
MIN_BYTES = 4096


def standard_library_files() -> list[Path]:
    """List the .py files of this Python's standard library in an order that does not depend on
    the file system.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


class Corpus:
    """A text as bytes and where it came from.

    data: (n,) uint8 on the CPU. source: a line for people. sha256: of the bytes, so that ranks can
    check that they agree.
    """

    def __init__(self, text: bytes, source: str) -> None:
        if len(text) < MIN_BYTES:
            raise ValueError(
                f"corpus: {source} has {len(text)} bytes; expected at least {MIN_BYTES} (give a "
                f"longer --text)"
            )
        self.source = source
        self.sha256 = hashlib.sha256(text).hexdigest()
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def batch(
        self, *, seed: int, rank: int, step: int, micro_step: int, batch: int, context: int
    ) -> tuple[Tensor, Tensor]:
        """Draw ``batch`` random windows; returns (tokens, targets), each (batch, context) int64,
        targets one byte later.
        """
        if self.data.numel() < context + 1:
            raise ValueError(
                f"corpus: {self.source} has {self.data.numel()} bytes; expected at least "
                f"{context + 1}"
            )
        key = hashlib.sha256(f"{seed}/{rank}/{step}/{micro_step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
        starts = torch.randint(self.data.numel() - context, (batch, 1), generator=generator)
        windows = self.data[starts + torch.arange(context + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load_corpus(text_file: str | None = None) -> Corpus:
    """Read ``text_file``, or the standard library's source; raises OSError or ValueError that
    names the file.
    """
    if text_file is not None:
        return Corpus(Path(text_file).read_bytes(), text_file)
    files = standard_library_files()
    text = b"\n".join(file.read_bytes() for file in files)
    return Corpus(
        text,
        f"{len(files)} .py files of the Python standard library in {sysconfig.get_path('stdlib')}",
    )
