"""When a GPU did what: told by events, on the host's clock, once it has happened."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from tests.exactness.case import loss_of
from tests.exactness.families import FAMILIES
from tests.exactness.lockstep import engine_on_nvme, make_batch
from tests.internals import CudaDevice

pytestmark = pytest.mark.gpu

_LONG_CYCLES = 500_000_000
_SLACK_SECONDS = 0.01


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(torch.device("cuda", torch.cuda.current_device()))


def test_a_stamp_is_known_when_the_gpu_has_passed_it(device: CudaDevice) -> None:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    first = device.stamp()
    torch.cuda._sleep(_LONG_CYCLES)
    last = device.stamp()
    assert device.seconds_at(last) is None
    torch.cuda.synchronize()
    end = time.perf_counter()
    began, ended = device.seconds_at(first), device.seconds_at(last)
    assert began is not None
    assert ended is not None
    assert begin - _SLACK_SECONDS <= began < ended <= end + _SLACK_SECONDS
    assert ended - began > 0.5 * (end - begin)


def test_copies_are_told_once_with_their_times(device: CudaDevice) -> None:
    source = torch.zeros(1 << 24, dtype=torch.uint8).pin_memory()
    target = torch.zeros_like(source, device=device.torch_device)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    device.synchronize(device.upload(target, source, None))
    device.synchronize(device.download(source, target, None))
    end = time.perf_counter()
    taken = device.pop_copies()
    assert [copy.name for copy, _, _ in taken] == ["upload", "download"]
    for copy, began, ended in taken:
        assert copy.num_bytes == 1 << 24
        assert begin - _SLACK_SECONDS <= began < ended <= end + _SLACK_SECONDS
    assert device.pop_copies() == []
    device.synchronize(device.upload(target, target.clone(), None))
    assert device.pop_copies() == [], "inside the GPU"


def test_the_trace_has_copies_and_the_gpus_own_time(tmp_path: Path) -> None:
    case = next(case for case in FAMILIES if case.name == "llama")
    with engine_on_nvme(
        tmp_path, case.make("none"), {"infinity": {"timeline": str(tmp_path / "trace.json")}}, device="cuda"
    ) as engine:
        for step in range(4):
            batch = {name: value.cuda() for name, value in make_batch(step, case=case).items()}
            engine.backward(loss_of(engine(**batch)))
            engine.step()
            torch.cuda.synchronize()
        assert engine.report.copy_busy_seconds > 0
        assert engine.report.compute_busy_seconds > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {row: [event for event in events if event.get("cat") == row] for row in ("compute", "copies")}
    assert {event["name"] for event in rows["copies"]} >= {"upload"}
    assert any(event["name"].startswith("backward ") for event in rows["compute"])
