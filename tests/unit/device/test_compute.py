"""Which device an engine computes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from infinity.device.compute import choose_device


@pytest.mark.parametrize(
    ("current", "number", "expected"),
    [(0, 0, 0), (0, 1, 1), (1, 0, 1), (2, 1, 2), (0, 4, 0)],  # the last: each process sees one GPU of its own
)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_each_process_takes_a_gpu_of_its_own(
    device: str | None, current: int, number: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets LOCAL_RANK and nothing else: all would compute on the first one."""
    taken = [current]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1])
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert choose_device(nn.Linear(2, 2), device, number) == torch.device("cuda", expected)
    assert taken[-1] == expected


def test_a_named_device_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(nn.Linear(2, 2), "cuda:0", 1) == torch.device("cuda", 0)
    assert choose_device(nn.Linear(2, 2), "cpu", 1) == torch.device("cpu")
