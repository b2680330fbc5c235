"""Loaders as DeepSpeed makes them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from infinity.checkpoint.random_states import random_states, set_random_states

logger = logging.getLogger(__name__)


class Loader(DataLoader[Any]):
    """torch's, with DeepSpeed's name for its sampler, and a position that a checkpoint keeps.

    The position is that of the newest iterator. Batches up to it are not made once more where the data set has indices.
    """

    _num_given = 0
    _num_epochs = 0
    _begun_with: Mapping[str, Any] | None = None
    """The random generators when the present epoch began: samplers draw from them."""
    _resumed_at: int | None = None

    @property
    def data_sampler(self) -> Any:
        """As ``sampler``."""
        return self.sampler

    def state_dict(self) -> dict[str, Any]:
        """Where it is: batches given in the present epoch, and what their order follows from."""
        return {
            "num_given": self._num_given,
            "num_epochs": self._num_epochs,
            "sampler_epoch": getattr(self.sampler, "epoch", None),
            "begun_with": self._begun_with,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next batch, of an iterator that is there as of a new one, is the one that would have come then."""
        self._num_given = int(state["num_given"])
        self._num_epochs = int(state["num_epochs"])
        self._begun_with = state["begun_with"]
        if state["sampler_epoch"] is not None and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(state["sampler_epoch"])
        self._resumed_at = self._num_given

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return _Batches(self)

    def begin(self) -> Iterator[Any]:
        """torch's iterator, at the position that was loaded or at the start."""
        resumed_at, self._resumed_at = self._resumed_at, None
        if not resumed_at:
            self._num_given = 0
            self._begun_with = random_states()
            return super().__iter__()
        logger.info(
            "the loader goes on after %d batches of its epoch; engine.load_checkpoint(..., load_data_position=False) "
            "begins anew",
            resumed_at,
        )
        now = random_states()
        try:
            if self._begun_with is not None:
                set_random_states(self._begun_with)
            return self._skipped(resumed_at)
        finally:
            set_random_states(now)

    def _skipped(self, num_batches: int) -> Iterator[Any]:
        batches = super().__iter__()
        indices: Any = getattr(batches, "_sampler_iter", None)
        is_indexed = not self.num_workers and indices is not None and not isinstance(self.dataset, IterableDataset)
        for _ in range(num_batches):
            next(indices if is_indexed else batches, None)
        return batches

    def note_given(self) -> None:
        """A batch goes to whoever iterates."""
        self._num_given += 1

    def note_end(self) -> None:
        """An epoch is over."""
        self._num_given = 0
        self._num_epochs += 1
        self._begun_with = None

    @property
    def is_resumed(self) -> bool:
        """Whether a position was loaded that no iterator has taken up."""
        return self._resumed_at is not None


class _Batches:
    """An iterator over a loader, which says how far it is."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._batches = loader.begin()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._loader.is_resumed:
            self._batches = self._loader.begin()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loader.note_end()
            raise
        self._loader.note_given()
        return batch


def make_loader(
    dataset: Any,
    batch_size: int | None,
    *,
    collate_fn: Callable[[Any], Any] | None,
    drop_last: bool,
    sampler: Any = None,
    shuffles: bool = True,
    num_workers: int = 0,
    rank: int = 0,
    num_ranks: int = 1,
) -> Loader:
    """A loader that draws as DeepSpeed's does.

    Without a ``sampler`` that is torch's `DistributedSampler` for ``rank`` of ``num_ranks`` processes: shuffled by its seed,
    0, and its epoch, and by no global generator. The epoch stays 0, so each pass has the same order, unless the script says
    ``loader.data_sampler.set_epoch(epoch)``. An `IterableDataset` has an order of its own.
    """
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(dataset, num_replicas=num_ranks, rank=rank, shuffle=shuffles)
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
