"""What one rank does for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from infinity.distributed.agreement import on_rank_0
from infinity.distributed.world import world
from infinity.errors import RankError
from tests.ranks import run_ranks


def test_the_others_wait_for_as_long_as_rank_0_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the timeout of the process group. Until a rank has ended: then rank 0 says so."""
    monkeypatch.setattr("infinity.distributed.agreement.PULSE_SECONDS", 0.001)

    def train(rank: int) -> None:
        ranks, pulses = world(), []
        all_gather_ints = ranks.all_gather_ints
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranks, "all_gather_ints", lambda *args: (pulses.append(args), all_gather_ints(*args))[1])

            def work() -> None:
                while len(pulses) < 50:
                    pass

            on_rank_0(ranks, "a test", work)
            assert len(pulses) >= 50
        if rank == 1:
            return
        with pytest.raises(RankError, match="another rank has ended"):
            on_rank_0(ranks, "a test", lambda: None)

    assert run_ranks(2, train, tmp_path) == ["", ""]
