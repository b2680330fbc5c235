"""What ranks exchange: sums in their order, the same bits on all, and an end in bounded time where one does not come."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from infinity.distributed import causes, collectives
from infinity.distributed.world import world
from infinity.errors import RankError
from tests.ranks import require_ranks, run_ranks
from tests.waiting import wait_until

_SILENT_SECONDS = 4.0


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_BLOCK_NUMEL", 12)
    monkeypatch.setattr(collectives, "_STEP_NUMEL", 2)
    monkeypatch.setattr(causes, "_SILENT_SECONDS", _SILENT_SECONDS)
    monkeypatch.setattr(causes, "_BEAT_SECONDS", 0.5)


def _values(num: int, numel: int = 101) -> list[torch.Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(num)]


def _mean(values: list[torch.Tensor], wire: torch.dtype = torch.float32) -> torch.Tensor:
    scaled = [(each * (1.0 / len(values))).to(wire).float() for each in values]
    total = scaled[0]
    for each in scaled[1:]:
        total = total + each
    return total.to(wire).float()


@pytest.mark.deep(but=1)
@pytest.mark.parametrize("num", [2, 3, 5])
def test_sums_are_made_in_the_order_of_ranks(num: int, tmp_path: Path) -> None:
    def exchange(rank: int) -> None:
        ranks = world()
        parts = [(0, 40), (40, 40), (40, 101), (101, 101), (101, 101)][:num] if num > 2 else [(0, 3), (3, 101)]
        start, stop = parts[rank]
        for wire in (torch.float32, torch.bfloat16):
            values = _values(num)
            mean, own = _mean(values, wire), values[rank].clone()
            ranks.average("a test", own, wire)
            assert torch.equal(own, mean)
            own = values[rank].clone()
            ranks.reduce("a test", own, parts, wire)
            assert torch.equal(own[start:stop], mean[start:stop])
            assert torch.equal(own[:start], values[rank][:start]) and torch.equal(own[stop:], values[rank][stop:])
        ranks.all_gather_in_memory("a test", own, parts, kind="states")
        assert torch.equal(own, mean)
        for to in range(num):
            own = torch.where((torch.arange(101) >= start) & (torch.arange(101) < stop), mean, torch.zeros(101))
            before = own.clone()
            ranks.collect("a test", own, parts, to)
            assert torch.equal(own, mean if rank == to else before)
        rows = torch.arange(num * 3).view(num, 3) + 100 * rank
        assert ranks.all_to_all("a test", rows, kind="momenta").tolist() == [
            [3 * rank + i + 100 * other for i in range(3)] for other in range(num)
        ]
        assert ranks.all_gather("a test", rows[0], kind="momenta")[:, 0].tolist() == [
            100 * other for other in range(num)
        ]
        assert ranks.gather("a test", b"x" * rank) == [b"x" * other for other in range(num)]
        assert ranks.all_gather_ints("a test", range(rank, rank + 40)) == [
            [*range(other, other + 40)] for other in range(num)
        ]
        sent = torch.arange(6, dtype=torch.bfloat16).view(2, 3).t() * rank
        ranks.broadcast_from("a test", 1, sent)
        assert torch.equal(sent, torch.arange(6, dtype=torch.bfloat16).view(2, 3).t())

    require_ranks(num, exchange, tmp_path)


def test_two_units_in_another_order_are_named_before_anything_is_added_up(tmp_path: Path) -> None:
    def exchange(rank: int) -> None:
        ranks, values = world(), torch.full((8,), float(rank))
        with pytest.raises(
            RankError, match=r"rank \d came with 'unit [ab]', its exchange number \d+ \(here \d+\)"
        ) as error:
            for name in "ab" if rank else "ba":
                ranks.all_gather_ints(f"unit {name}")
                ranks.average(f"unit {name}", values)
        assert f"rank {rank}, unit {'ab'[1 - rank]}: rank {1 - rank} came with 'unit {'ab'[rank]}'" in str(error.value)
        assert values.tolist() == [float(rank)] * 8
        with pytest.raises(RankError, match=f"came with {2 - rank} values"):
            ranks.all_gather_ints("unit c", [7] * (1 + rank))

    require_ranks(2, exchange, tmp_path)


def test_a_rank_that_stops_ends_all_with_its_name(tmp_path: Path) -> None:
    def exchange(rank: int) -> None:
        ranks = world()
        ranks.all_gather_ints("first")
        (tmp_path / f"pid{rank}").write_text(str(os.getpid()))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_until(lambda: all((tmp_path / f"pid{other}").exists() for other in range(3)))
        began = time.monotonic()
        try:
            with pytest.raises(RankError, match=r"the process of rank 1 \(\d+\) is stopped"):
                ranks.all_gather_ints("second")
            assert time.monotonic() - began < 60
        finally:
            (tmp_path / f"over{rank}").touch()  # one that ends sooner would be missed by the other one
            wait_until(lambda: all((tmp_path / f"over{other}").exists() for other in (0, 2)))
            if rank == 0:
                os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)

    (tmp_path / "rank1").write_text("it was killed")
    assert run_ranks(3, exchange, tmp_path) == ["", "it was killed", ""]


def test_a_rank_that_is_cut_off_is_named_after_a_while(tmp_path: Path) -> None:
    """Of which only its silence tells: it is on no machine that can be looked at."""

    def exchange(rank: int) -> None:
        ranks = world()
        ranks.all_gather_ints("first")
        ranks.causes._processes = ["1 elsewhere 1"] * 2
        if rank == 1:
            ranks.causes.write_place = lambda number: time.sleep(600)  # type: ignore[method-assign]
            wait_until((tmp_path / "over").exists)
            return
        try:
            with pytest.raises(RankError, match=r"rank 1 has sent no sign of life for 4 s; its last exchange was '"):
                ranks.all_gather_ints("second")
        finally:
            (tmp_path / "over").touch()

    require_ranks(2, exchange, tmp_path)


def test_a_slow_rank_is_waited_for_and_something_is_done_meanwhile(tmp_path: Path) -> None:
    def exchange(rank: int) -> None:
        num_calls = 0

        def meanwhile() -> None:
            nonlocal num_calls
            num_calls += 1

        ranks = world()
        ranks.all_gather_ints("first")
        for label in ("second", "third"):
            until = time.monotonic() + 1.5 * _SILENT_SECONDS
            if rank == 1 and label == "third":  # as json.loads of a large file does: no other thread of it runs
                ctypes.PyDLL(None).usleep(int(1.5e6 * _SILENT_SECONDS))
            while rank == 1 and time.monotonic() < until:
                torch.ones(100).sum()
            ranks.all_gather_ints(label, meanwhile=meanwhile if rank == 0 else None)
        assert rank or num_calls > 100

    require_ranks(2, exchange, tmp_path)


def test_labels_of_any_length_and_script_are_told(tmp_path: Path) -> None:
    def exchange(rank: int) -> None:
        label = "blöcke." * 40
        world().all_gather_ints(label)
        with pytest.raises(RankError, match=re.escape("came with 'one'" if rank == 0 else "came with 'blöcke.")):
            world().all_gather_ints("one" if rank else label)
        world().all_gather_ints(label)

    require_ranks(2, exchange, tmp_path)
