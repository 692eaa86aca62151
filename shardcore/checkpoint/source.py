"""What a checkpoint has, whoever wrote it: full tensors by name, read by ranges."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch


class Source(ABC):
    """A checkpoint on disk. Nothing is unpickled into live objects; sizes are checked before memory is taken.

    path: its directory or file. shapes: of parameters and persistent buffers by name (as in model.state_dict()). tied: names in
    `shapes` that are another one's memory, by which. frozen: parameters that did not train; they may be left out of `shapes`.
    steps: of parameters that have optimizer states: how many updates each has had.
    groups: the optimizer's param_groups, options by name, with "params": list of names; None: unknown. numbered: whether the
    file has parameters by number alone, so that names are right only if the optimizer has groups of the same sizes.
    client_state, scheduler: plain data that was saved beside it; None: there is none. loss_scale: dict or None. counters: of
    the training loop ("global_steps", "micro_steps", ...), where they are known. extra_state: what modules keep, by
    their names. world_size: how many ranks saved it; 0: unknown.
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

    @abstractmethod
    def keys(self, name: str) -> tuple[str, ...]:
        """Return what is stored of a name: "weight" (a parameter's float32 master where there is one), then its states.

        These are an Adam's "exp_avg", "exp_avg_sq" and "max_exp_avg_sq", or another optimizer's, and "ema" (a moving average).
        """

    @abstractmethod
    def read(self, name: str, key: str, start: int, numel: int) -> torch.Tensor:
        """Return elements [start, start + numel) of a flattened tensor: (numel,), on the CPU, in the dtype that is stored.

        May be called by several threads. Raises OSError or ValueError, with file and offset.
        """

    def of_rank(self, rank: int) -> Mapping[str, Any] | None:
        """Return what a rank saved for itself ("random", "stateful"), or None. Raises OSError or ValueError."""
        return None

    def close(self) -> None:  # noqa: B027 - not every source has files open
        """Close its files."""

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close its files."""
        self.close()
