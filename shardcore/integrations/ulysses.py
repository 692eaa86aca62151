"""DeepSpeed's names for sequence parallelism: what Accelerate and Trainer call for
ParallelismConfig(sp_backend="deepspeed").

`register_with_transformers` chooses the ranks of a sequence; `initialize(mpu=)` gets what it
returns, and gives the model its attention (sequence_attention.py).
Source: https://www.deepspeed.ai/tutorials/ulysses-alst-sequence-parallelism, 0.19.8.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from shardcore.deepspeed.initialize import start_process_group
from shardcore.integrations.sequence_attention import enable_sequence_parallel
from shardcore.parallel.sequence import split_sequences

_current: "SequenceParallelGroups | None" = None


def current() -> "SequenceParallelGroups | None":
    """Return what `register_with_transformers` returned last; None before."""
    return _current


class SequenceParallelGroups:
    """The `mpu` of `initialize`: groups of neighbouring ranks, one group for each sequence."""

    def __init__(self, size: int, attention: str | None, in_eval: bool) -> None:
        """Make the groups. Collective over all ranks. attention: what the model has to have;
        None: whatever it has.
        """
        if not dist.is_initialized():
            start_process_group("register_with_transformers", 29500)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world % size:
            raise ValueError(
                f"register_with_transformers: sequence_parallel_size is {size}; expected a divisor "
                f"of {world} ranks"
            )
        groups = [dist.new_group([*range(start, start + size)]) for start in range(0, world, size)]
        self._group: Any = groups[dist.get_rank() // size]
        self._attention, self._in_eval = attention, in_eval

    def get_sequence_parallel_group(self) -> Any:
        """Return the group of this rank's sequences."""
        return self._group

    def get_sequence_parallel_world_size(self) -> int:
        """Return the number of ranks of a sequence."""
        return dist.get_world_size(self._group)

    def get_sequence_parallel_rank(self) -> int:
        """Return the number of this rank's part in its sequences."""
        return dist.get_rank(self._group)

    def enable(self, model: nn.Module) -> None:
        """Let the model of transformers in `model` have attention over these ranks. See
        enable_sequence_parallel.
        """
        inner = next(
            (module for module in model.modules() if isinstance(module, PreTrainedModel)), None
        )
        if inner is None:
            raise TypeError(
                f"initialize: mpu is for a model of transformers, and model is a "
                f"{type(model).__name__} without one"
            )
        has = inner.config.get_text_config()._attn_implementation
        if self._attention not in (None, has):
            raise ValueError(
                f"initialize: the model uses the attention {has!r}, and register_with_transformers "
                f"got core_attn_implementation={self._attention!r}; expected the same in both"
            )
        enable_sequence_parallel(inner, self._group, in_eval=self._in_eval)


class UlyssesSPAttentionHF:
    """A namespace of functions for sequence-parallel attention, without objects."""

    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: it has no objects."""
        raise NotImplementedError(
            "UlyssesSPAttentionHF: expected UlyssesSPAttentionHF.register_with_transformers(...)"
        )

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceParallelGroups | None:
        """Return the groups of ranks for `initialize(mpu=)`, or None for a size of 1. Collective
        over all ranks.

        core_attn_implementation: the attention of the model.
        disable_in_eval: True lets each rank pass whole sequences in evaluation.

        Batches and sequences may be of any size. Other arguments have no effect.
        """
        global _current
        if sequence_parallel_size == 1:
            return None
        _current = SequenceParallelGroups(
            sequence_parallel_size, core_attn_implementation, not disable_in_eval
        )
        return _current


class UlyssesSPDataLoaderAdapter:
    """Iterates over this rank's parts of the batches of a loader. The loader yields different
    batches on each rank of a sequence.

    The ranks take turns: each batch of a rank is split over all ranks. See split_sequences; labels
    are in `shift_labels` only.
    """

    def __init__(
        self,
        dl: Iterable[Mapping[str, Any]],
        sp_rank: int,
        sp_group: Any,
        sp_world_size: int,
        device: torch.device | str,
    ) -> None:
        """Wrap a loader; sp_group: the ranks of a sequence, of which there are sp_world_size.
        Parts go to `device`.
        """
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = device
        self._iterator: Iterator[Mapping[str, Any]] | None = None
        self._parts: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        """Return the number of batches of all ranks of a sequence."""
        assert isinstance(self.dl, Sized)
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Self:
        """Return itself; an iteration that has ended begins again."""
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next part. Collective over the ranks of a sequence."""
        if not self._parts:
            self._iterator = iter(self.dl) if self._iterator is None else self._iterator
            try:
                batch_of_rank = next(self._iterator)
            except StopIteration:
                self._iterator = None
                raise
            batches: list[Any] = [None] * self.sp_world_size
            dist.all_gather_object(
                batches,
                {name: _to(value, "cpu") for name, value in batch_of_rank.items()},
                group=self.sp_group,
            )
            for batch in batches:
                part = split_sequences(batch, self.sp_group)
                part = {
                    name: part[name]
                    for name in part
                    if name not in ("labels", "num_items_in_batch")
                }
                self._parts.append({name: _to(value, self.device) for name, value in part.items()})
        return self._parts.popleft()


def _to(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
