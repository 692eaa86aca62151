"""Parsers of command line arguments, shared by the demo and the benchmarks. argparse puts the
option's name before each.
"""

import argparse
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from examples.corpus import MIN_BYTES


def whole_number(smallest: int, largest: int | None = None) -> Callable[[str], int]:
    """Make a parser of whole numbers from ``smallest`` to ``largest``."""
    limits = f"of at least {smallest}" if largest is None else f"from {smallest} to {largest}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if value < smallest or (largest is not None and value > largest):
            raise argparse.ArgumentTypeError(f"{text}; expected a whole number {limits}")
        return value

    return parse


positive = whole_number(1)
seed = whole_number(-(2**63), 2**64 - 1)  # what torch.manual_seed takes


def not_negative(text: str) -> float:
    """Parse a finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}; expected a finite number of at least 0")
    return value


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    value = not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text}; expected a number above 0")
    return value


def elements(text: str) -> int:
    """Parse a number of elements: 4096, 64K or 64M (powers of two), 3e7."""
    found = re.fullmatch(r"(\d{1,15})(?:([km])|e(\d{1,2}))?", text.lower())
    count = (
        0
        if found is None
        else int(found[1]) * {None: 1, "k": 2**10, "m": 2**20}[found[2]] * 10 ** int(found[3] or 0)
    )
    if not 1 <= count < 2**63:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected a number of elements such as 4096, 64K, 64M or 3e7"
        )
    return count


def text_file(text: str) -> str:
    """Check that a file can be read and is long enough to train on; returns its name."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file; expected a text to train on")
    try:
        with open(text, "rb") as file:
            numel = file.seek(0, 2)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{text} cannot be read ({error.strerror}); expected a text to train on"
        ) from None
    if numel < MIN_BYTES:
        raise argparse.ArgumentTypeError(f"{text} has {numel} bytes; expected at least {MIN_BYTES}")
    return text


def make_out_folder(parser: argparse.ArgumentParser, folder: Path) -> None:
    """Make the folder of --out and try to write there: before the run, since after it the
    results would be lost.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        parser.error(
            f"argument --out: {folder} cannot be written to ({error.strerror}); expected a folder, "
            f"or a new name"
        )
