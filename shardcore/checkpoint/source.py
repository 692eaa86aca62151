"""What a checkpoint has, whoever wrote it: full tensors by name, read by ranges."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from shardcore.checkpoint.digested import Digested, Saved
from shardcore.layout import Columns


class Source(ABC):
    """A checkpoint on disk. Nothing is unpickled into live objects; sizes are checked before memory
    is taken.

    path: its directory or file. shapes: of parameters and persistent buffers by name (as in
    model.state_dict()). tied: names in `shapes` that are another one's memory, by which. frozen:
    parameters that did not train; they may be left out of `shapes`.
    steps: of parameters that have optimizer states: how many updates each has had.
    groups: the optimizer's param_groups, options by name, with "params": list of names; None:
    unknown. numbered: whether the file has parameters by number alone, so that names are right only
    if the optimizer has groups of the same sizes.
    client_state, scheduler: plain data that was saved beside it; None: there is none. loss_scale:
    dict or None. counters: of the training loop ("global_steps", "micro_steps", ...), where they
    are known. extra_state: what modules keep, by their names. world_size: how many ranks saved it;
    0: unknown. slices: in how many tensor-parallel slices. digests: of what was saved, by label.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str] = {}
    frozen: Collection[str] = ()
    steps: Mapping[str, int] = {}
    groups: Sequence[Mapping[str, Any]] | None = None
    numbered: bool = False
    client_state: Mapping[str, Any] | None = None
    scheduler: Mapping[str, Any] | None = None
    loss_scale: Mapping[str, Any] | None = None
    counters: Mapping[str, int] = {}
    extra_state: Mapping[str, Any] = {}
    world_size: int = 0
    slices: int = 1
    digests: Mapping[str, Saved] = {}

    @abstractmethod
    def keys(self, name: str) -> tuple[str, ...]:
        """Return what is stored of a name: "weight" (a parameter's float32 master where there is
        one), then its states.

        These are an Adam's "exp_avg", "exp_avg_sq" and "max_exp_avg_sq", or another optimizer's,
        and "ema" (a moving average).
        """

    @abstractmethod
    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """Return elements [start, start + numel) of a flattened tensor: (numel,), on the CPU, in
        the dtype that is stored.

        May be called by several threads. Raises OSError or ValueError, with file and offset.
        """

    def read_slice(
        self, name: str, key: str, columns: Columns | None, start: int, numel: int
    ) -> torch.Tensor:
        """Return elements [start, start + numel) of a slice of a tensor, of all of it if
        `columns` is None. See `read`.
        """
        return read_columns(partial(self.read, name, key), columns, start, numel)

    def read_digested(
        self, name: str, key: str, columns: Columns | None, start: int, numel: int
    ) -> Digested:
        """Return what `read_slice` does, with the range's part of one of `digests`."""
        return self.read_slice(name, key, columns, start, numel), None

    def of_rank(self, rank: int) -> Mapping[str, Any] | None:
        """Return what a rank saved for itself ("random", "stateful"), or None. Raises OSError or
        ValueError.
        """
        return None

    def close(self) -> None:  # noqa: B027 - not every source has files open
        """Close its files."""

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close its files."""
        self.close()


@contextmanager
def reporting(problem: str, expected: str) -> Iterator[None]:
    """Let what damaged or foreign content causes, of whatever kind, be a ValueError that says which
    file is what.

    An OSError, and a ValueError that says so already, stay as they are.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("load: "):
            raise
        raise ValueError(
            f"load: {problem} ({type(error).__name__}: {error}); expected {expected}"
        ) from error


_LONG = 1 << 20  # elements of a row, of which no two are read at once
ReadPart = Callable[[int, int], torch.Tensor]


def read_columns(read: ReadPart, columns: Columns | None, start: int, numel: int) -> torch.Tensor:
    """Return elements [start, start + numel) of a slice of a tensor of which `read` reads any;
    of all of it if it is None.
    """
    if columns is None:
        return read(start, numel)
    return gathered(
        columns, start, numel, {Columns(columns.rows, columns.width, 0, columns.width): read}
    )


def gathered(
    columns: Columns, start: int, numel: int, parts: Mapping[Columns, ReadPart]
) -> torch.Tensor:
    """Return elements [start, start + numel) of a slice from slices of the same rows that make up
    the tensor.

    parts: of each what reads (start, numel), which is called once for all rows; where rows are
    long, for each.
    """
    if numel == 0:
        return next(iter(parts.values()))(0, 0)
    if columns in parts:
        return parts[columns](start, numel)
    boxes, results = list(columns.boxes(start, numel)), []
    groups = [boxes]
    if columns.width > _LONG:  # no two long rows are read at once
        groups = [[box] for box in boxes]
    for group in groups:
        row, _, column, _ = group[0]
        last_row, rows, last_column, width = group[-1]
        total = sum(rows * width for _, rows, _, width in group)
        full: torch.Tensor | None = None
        for part, read in parts.items():
            low = part.before(row, column)
            high = part.before(last_row + rows - 1, last_column + width)
            first_common = max(part.first, columns.first)
            end_common = min(part.first + part.count, columns.first + columns.count)
            if low >= high or first_common >= end_common:
                continue
            values = read(low, high - low)
            in_row = part.before(0, column + width) - part.before(0, column)
            if len(group) == 1 and in_row == width == total:
                full = values  # the part has all columns of the one row
                break
            full = values.new_empty(total) if full is None else full
            _place(values, low, part, full, group)
        assert full is not None
        results.append(full)
    return results[0] if len(results) == 1 else torch.cat(results)


def _place(
    values: torch.Tensor,
    low: int,
    part: Columns,
    full: torch.Tensor,
    boxes: Iterable[tuple[int, int, int, int]],
) -> None:
    """Copy to `full`, which has `boxes` one after the other, their share of a slice. values: of
    the slice, from `low` on.
    """
    cursor = 0
    for row, rows, column, width in boxes:
        first, end = max(column, part.first), min(column + width, part.first + part.count)
        if first < end:
            offset = values.storage_offset() + part.before(row, first) - low
            target = full[cursor : cursor + rows * width].view(rows, width)
            target[:, first - column : end - column] = values.as_strided(
                (rows, end - first), (part.count, 1), offset
            )
        cursor += rows * width
