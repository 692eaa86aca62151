"""Data loaders: a rank's part of a dataset, and one without an end."""

from collections.abc import Iterable
from typing import Any, Self

from torch.utils.data import DataLoader, Dataset, DistributedSampler


class ShardedLoader(DataLoader[Any]):
    """This rank's micro-batches. Each iteration over it is an epoch, with a new order that is
    the same on all ranks.
    """

    def __init__(
        self, dataset: Dataset[Any], replicas: tuple[int, int], shuffle: bool, **options: Any
    ) -> None:
        """Load one of so many parts of `dataset`, as `replicas` says; `options` are
        DataLoader's.
        """
        self.epoch = 0  # of the next iteration
        super().__init__(
            dataset, sampler=DistributedSampler(dataset, *replicas, shuffle=shuffle), **options
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration (to resume a run)."""
        self.epoch = epoch

    def __iter__(self) -> Any:
        """Start the next epoch."""
        sampler: Any = self.sampler
        sampler.set_epoch(self.epoch)
        self.epoch += 1
        return super().__iter__()


class RepeatingLoader:
    """Iterates over a loader again and again, without an end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        """Begin with the first batch of `loader`."""
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Self:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch; after the last the first of a new epoch. StopIteration if the
        loader has none.
        """
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
