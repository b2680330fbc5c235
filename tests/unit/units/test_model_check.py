"""Models that cannot be taken over are refused with the reason and the cure."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from infinity.errors import ModelError
from infinity.units.model_check import check_model
from tests.ranks import run_ranks


@pytest.mark.parametrize("wrapper", [nn.DataParallel, nn.parallel.DistributedDataParallel, FullyShardedDataParallel])
@pytest.mark.parametrize("is_inside", [False, True])
def test_wrappers_that_exchange_are_refused(wrapper: type[nn.Module], is_inside: bool, tmp_path: Path) -> None:
    def function(rank: int) -> None:
        device = {"device_id": torch.device("cpu")} if wrapper is FullyShardedDataParallel else {}
        warnings.simplefilter("ignore")  # FSDP warns of a world of one
        wrapped = wrapper(nn.Linear(2, 2), **device)
        model = nn.Sequential(wrapped) if is_inside else wrapped
        name = "0" if is_inside else wrapper.__name__
        with pytest.raises(ModelError, match=rf"'{name}' is wrapped in torch's {wrapper.__name__},.*bare"):
            check_model(model)

    assert run_ranks(1, function, tmp_path) == [""]
