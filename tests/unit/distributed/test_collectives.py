"""Values that ranks exchange: the mean is the same bits on all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infinity.distributed import collectives
from infinity.distributed.world import world
from tests.ranks import run_ranks


def test_the_mean_is_that_of_ranks_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_BLOCK_NUMEL", 7)
    values = [torch.randn(20, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    third = 1.0 / 3
    expected = (values[0] * third + values[1] * third) + values[2] * third

    def average(rank: int) -> None:
        world().average("a test", values[rank])
        assert torch.equal(values[rank], expected)
        sent = torch.arange(6, dtype=torch.bfloat16).view(2, 3).t() * rank
        world().take_from("a test", 2, sent)
        assert torch.equal(sent, torch.arange(6, dtype=torch.bfloat16).view(2, 3).t() * 2)

    assert run_ranks(3, average, tmp_path) == ["", "", ""]
