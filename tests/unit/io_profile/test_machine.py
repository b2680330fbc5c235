"""Copies between host and GPU."""

from __future__ import annotations

import pytest

from infinity.io_profile import machine


@pytest.mark.gpu
def test_copies_to_and_from_the_gpu_are_measured() -> None:
    found = list(machine.measure_copies())
    assert [each.num_bytes for each in found] == list(machine.COPY_BYTES)
    assert all(each.to_device_bytes_per_second > 0 < each.to_host_bytes_per_second for each in found)


def test_without_a_gpu_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no CUDA device" in (machine.why_no_copies() or "")
