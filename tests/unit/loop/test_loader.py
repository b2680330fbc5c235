"""The loader of ``training_data`` draws as torch's does with a DistributedSampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from infinity.errors import StepError
from infinity.loop.loader import OwnBatches, make_loader


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize("num_samples", [3, 10, 12])
def test_each_rank_gets_as_many_batches(num_samples: int, shuffles: bool, drop_last: bool) -> None:
    """A number of samples that cannot be divided, and a last batch that is smaller, included."""
    data = list(range(num_samples))
    lengths = set()
    for rank in range(4):
        loader = make_loader(data, batch_size=2, drop_last=drop_last, shuffles=shuffles, rank=rank, num_ranks=4)
        sampler: DistributedSampler[int] = DistributedSampler(data, 4, rank, shuffle=shuffles)  # type: ignore[arg-type]
        expected = DataLoader(data, 2, sampler=sampler, drop_last=drop_last)  # type: ignore[arg-type]
        for epoch in (0, 1):
            loader.data_sampler.set_epoch(epoch)
            sampler.set_epoch(epoch)
            batches = [batch.tolist() for batch in loader]
            assert batches == [batch.tolist() for batch in expected]
            lengths.add(len(batches))
    assert len(lengths) == 1


def test_a_position_is_that_of_the_newest_iterator() -> None:
    first = make_loader(list(range(12)), batch_size=2, drop_last=False)
    batches = iter(first)
    next(batches), next(batches)
    state = first.state_dict()
    expected = [batch.tolist() for batch in batches]
    second = make_loader(list(range(12)), batch_size=2, drop_last=False)
    second.load_state_dict(state)
    iter(second)  # nobody asks it for a batch
    assert len(list(second)) == 6
    second.load_state_dict(state)
    assert [batch.tolist() for batch in second] == expected


@pytest.mark.parametrize("epoch", [1, 0, None])
def test_a_position_in_an_epoch_of_another_order_is_told(epoch: int | None, caplog: pytest.LogCaptureFixture) -> None:
    first = make_loader(list(range(12)), batch_size=2, drop_last=False)
    first.data_sampler.set_epoch(1)
    batches = iter(first)
    next(batches)
    second = make_loader(list(range(12)), batch_size=2, drop_last=False)
    second.load_state_dict(first.state_dict())
    if epoch is not None:
        second.data_sampler.set_epoch(epoch)
    found = [batch.tolist() for batch in second]
    assert (found == [batch.tolist() for batch in batches]) == (epoch != 0)
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert ["within epoch 1 of its sampler" in each and "set_epoch(0)" in each for each in told] == [True] * (
        epoch == 0
    )


def test_own_batches_go_on_after_an_exception_and_refuse_what_is_empty() -> None:
    class Data(Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if index == 1 and not failed:
                failed.append(index)
                raise OSError("a file is not there for a moment")
            return index

    failed: list[int] = []
    batches = OwnBatches(make_loader(Data(), batch_size=1, drop_last=False, shuffles=False))
    assert next(batches).item() == 0
    with pytest.raises(OSError, match="for a moment"):
        next(batches)
    assert [next(batches).item() for _ in range(6)] == [2, 3, 0, 1, 2, 3]
    with pytest.raises(StepError, match="training_data gives no batch"):
        next(OwnBatches([]))


def test_a_stream_that_all_ranks_get_whole_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    for num_ranks in (1, 2):
        assert ("split_dataset_by_node" in caplog.text) is False
        loader = make_loader(Stream(), batch_size=2, drop_last=False, num_ranks=num_ranks)
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert "each of 2 processes gets all samples" in caplog.text


def test_a_loader_with_workers_and_a_stream_of_samples_go_on() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    for dataset, num_workers in ((list(range(10)), 2), (Stream(), 0)):
        make = lambda: make_loader(dataset, batch_size=2, drop_last=False, num_workers=num_workers)  # noqa: B023, E731
        first = make()
        batches = iter(first)
        next(batches)
        next(batches)
        state = first.state_dict()
        expected = [batch.tolist() for batch in batches]
        second = make()
        second.load_state_dict(state)
        before = torch.get_rng_state()
        assert [batch.tolist() for batch in second] == expected
        assert torch.equal(torch.get_rng_state(), before)
        assert len(list(second)) == 5
