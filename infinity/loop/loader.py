"""Loaders as DeepSpeed makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class Loader(DataLoader[Any]):
    """torch's, with DeepSpeed's name for its sampler."""

    @property
    def data_sampler(self) -> Any:
        """As ``sampler``."""
        return self.sampler


def make_loader(
    dataset: Any,
    batch_size: int | None,
    *,
    collate_fn: Callable[[Any], Any] | None,
    drop_last: bool,
    sampler: Any = None,
    shuffles: bool = True,
    num_workers: int = 0,
) -> Loader:
    """A loader that draws as DeepSpeed's does.

    Without a ``sampler`` that is torch's `DistributedSampler` for one process: shuffled by its seed, 0, and its epoch, and
    by no global generator. The epoch stays 0, so each pass has the same order, unless the script says
    ``loader.data_sampler.set_epoch(epoch)``. An `IterableDataset` has an order of its own.
    """
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=shuffles)
    return Loader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
    )


class RepeatingLoader:
    """An iterator over a loader that begins anew when it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        """``loader``: what is iterated over again and again."""
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
