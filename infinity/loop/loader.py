"""Loaders as DeepSpeed makes them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from infinity.errors import StepError
from infinity.numerics.random_states import random_states, set_random_states

logger = logging.getLogger(__name__)


class Shards(DistributedSampler[Any]):
    """torch's DistributedSampler, which can skip the first samples of an epoch."""

    _num_skipped = 0

    def begin_at(self, num_samples: int) -> None:
        """Let the next iterator skip the first ``num_samples`` of this rank."""
        self._num_skipped = num_samples

    def __iter__(self) -> Iterator[int]:
        num_skipped, self._num_skipped = self._num_skipped, 0
        return itertools.islice(super().__iter__(), num_skipped, None)


class Loader(DataLoader[Any]):
    """torch's DataLoader with a position that a checkpoint keeps, and DeepSpeed's name for its sampler.

    The position is that of the newest iterator. It counts the samples of all ranks, so that another number of ranks, or
    another batch size, can continue there. If the data set has indices, skipped samples are not loaded.

    [Note: a position for all ranks] In a shuffled epoch, rank r of N has the samples r, r + N, ... When each rank has
    taken k, all together have taken the first k N. With M ranks, each skips its first k N // M. If that division has a
    remainder, fewer than M samples come twice. To skip them would give ranks unequal numbers of batches.
    """

    _num_given = 0
    """Batches of the present epoch that were given out."""
    _num_samples = 0
    """This rank's samples in those batches."""
    _num_epochs = 0
    _begun_with: Mapping[str, Any] | None = None
    """The random generators when the present epoch began: samplers draw from them."""
    is_resumed = False
    """Whether a position was loaded, and no iterator has started from it."""
    _loaded_epoch: int | None = None
    """The sampler's epoch that the loaded position belongs to."""

    @property
    def data_sampler(self) -> Any:
        """DeepSpeed's name for ``sampler``."""
        return self.sampler

    def state_dict(self) -> dict[str, Any]:
        """The position: batches and samples of the present epoch so far, and what determines their order."""
        return {
            "num_given": self._num_given,
            "num_samples": self._num_samples * self._num_ranks,
            "num_epochs": self._num_epochs,
            "sampler_epoch": getattr(self.sampler, "epoch", None),
            "begun_with": self._begun_with,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind the saved position, also in an iterator that exists already."""
        if "num_samples" in state and self.batch_size:
            # Saved by 2 ranks after 6 samples each: 12. With 3 ranks each skips 4. With 5 ranks each skips 2, and the
            # last 2 of the 12 come twice. See [Note: a position for all ranks].
            self._num_samples = int(state["num_samples"]) // self._num_ranks
            self._num_given = -(-self._num_samples // self.batch_size)
        else:  # batches are the script's, or it was saved by a version that counted those alone
            self._num_given = int(state["num_given"])
            self._num_samples = self._num_given * (self.batch_size or 0)
        self._num_epochs = int(state["num_epochs"])
        self._begun_with = state["begun_with"]
        if state["sampler_epoch"] is not None and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(state["sampler_epoch"])
        self._loaded_epoch = state["sampler_epoch"]
        self.is_resumed = True

    @property
    def _num_ranks(self) -> int:
        """How many ranks share the sampler's samples."""
        return int(getattr(self.sampler, "num_replicas", 1))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # torch's loader returns its own iterator; this one tells the loader of each batch that it gives.
        return _Batches(self)

    def begin(self) -> Iterator[Any]:
        """torch's iterator, at the loaded position or at the start."""
        is_resumed, self.is_resumed = self.is_resumed, False
        if not is_resumed or not self._num_given:
            self._num_given = self._num_samples = 0
            self._begun_with = random_states()
            if isinstance(self.sampler, Shards):
                self.sampler.begin_at(0)  # of an iterator that nobody has asked for a batch
            return super().__iter__()
        logger.info(
            "the loader resumes after %d batches of its epoch; with engine.load_checkpoint(..., "
            "load_data_position=False) it starts at the first",
            self._num_given,
        )
        epoch = getattr(self.sampler, "epoch", None)
        if self._loaded_epoch not in (None, epoch):
            logger.warning(
                "the loader resumes within epoch %s of its sampler, but the script has called set_epoch(%s), so the "
                "order of the batches differs: some samples are drawn twice, others not at all. Start the loop over "
                "epochs at loader.data_sampler.epoch",
                *(self._loaded_epoch, epoch),
            )
        # A sampler may draw its permutation from the global generators when iteration begins. It gets the state of
        # then, and the script keeps its own.
        now = random_states()
        try:
            if self._begun_with is not None:
                set_random_states(self._begun_with)
            return self._skipped()
        finally:
            set_random_states(now)

    def _skipped(self) -> Iterator[Any]:
        if isinstance(self.sampler, Shards):
            self.sampler.begin_at(self._num_samples)
            return super().__iter__()
        # Another sampler: skip by drawing from it. torch's iterator has the batches of indices in `_sampler_iter`, so
        # that skipped samples are not loaded. Worker processes draw indices ahead, and an IterableDataset has none.
        batches = super().__iter__()
        indices: Any = getattr(batches, "_sampler_iter", None)
        is_indexed = not self.num_workers and indices is not None and not isinstance(self.dataset, IterableDataset)
        for _ in range(self._num_given):
            next(indices if is_indexed else batches, None)
        return batches

    def on_batch(self) -> None:
        """Count a batch that is given out."""
        self._num_given += 1
        self._num_samples += self.batch_size or 0
        if isinstance(self.sampler, Sized):  # the last batch of an epoch may be smaller
            self._num_samples = min(self._num_samples, len(self.sampler))

    def on_epoch_end(self) -> None:
        """An epoch is over."""
        self._num_given = self._num_samples = 0
        self._num_epochs += 1
        self._begun_with = None


class _Batches(Iterator[Any]):
    """Iterates over a loader, and keeps its position up to date."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._batches = loader.begin()

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        # load_checkpoint was called inside the loop over this iterator.
        if self._loader.is_resumed:
            self._batches = self._loader.begin()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loader.on_epoch_end()
            raise
        self._loader.on_batch()
        return batch


def make_loader(
    dataset: Any, *, shuffles: bool = True, rank: int = 0, num_ranks: int = 1, sampler: Any = None, **options: Any
) -> Loader:
    """A loader that draws as DeepSpeed's does.

    Without a ``sampler`` that is `Shards`, torch's `DistributedSampler`, for ``rank`` of ``num_ranks`` processes. It
    shuffles by seed 0 and its epoch, not by global generators. All ranks get equally many samples, some of them twice
    if necessary. The epoch stays 0, so each pass has the same order, unless the script calls
    ``loader.data_sampler.set_epoch(epoch)``. An `IterableDataset` has an order of its own, and every rank gets all of
    it, with a warning if there are several. ``options``: of torch's `DataLoader`.
    """
    if isinstance(dataset, IterableDataset) and num_ranks > 1:
        logger.warning(
            "training_data is an IterableDataset, so each of %d processes gets all samples unless the data set "
            "divides them itself. Use datasets.distributed.split_dataset_by_node, or itertools.islice(..., rank, "
            "None, num_processes)",
            num_ranks,
        )
    if sampler is None and not isinstance(dataset, IterableDataset):
        sampler = Shards(dataset, num_replicas=num_ranks, rank=rank, shuffle=shuffles)
    return Loader(dataset, sampler=sampler, **options)


class RepeatingLoader(Iterator[Any]):
    """An iterator over a loader that begins anew when it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        """``loader``: iterated over again and again."""
        self.loader = loader
        self.data_iter = iter(loader)

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OwnBatches(RepeatingLoader):
    """Batches of ``training_data``, epoch after epoch. After an exception of the loader, the next batch can be
    taken."""

    def __next__(self) -> Any:
        """
        Raises:
            StepError: the loader is empty.
        """
        try:
            return super().__next__()
        except StopIteration:
            raise StepError.order(
                "engine.train_batch()", "training_data gives no batch", cure="Check its length and dataloader_drop_last"
            ) from None
